"""Activations with one scale a token on GPUs: `activations.quantize_activations`
bit for bit, a program a row.

Rounding is that of a float sum: 1.5 * 2^23 + v has its last bit at 1, and 1.5 * 2^(e + 20) + v, for |v| in
[2^e, 2^(e + 1)), has it where e4m3 has its own. Nothing is fused.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .activations import PEAK_FLOOR
from .codebook import TOP
from .layouts import Layout
from .triton_support import Config

ROUND = Config((1024,), 4, 1)


@triton.jit(do_not_specialize=["k"])
def _round(
    x, out, scale, k, stride_x, stride_out, fixed,
    TOP: tl.constexpr, FLOAT: tl.constexpr, STATIC: tl.constexpr, FLOOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row of x as codes: activations.quantize_activations bit for bit. out int8, or with FLOAT bf16."""
    row = tl.program_id(0).to(tl.int64)
    most = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, k, BLOCK):
        at = start + tl.arange(0, BLOCK)
        v = tl.load(x + row * stride_x + at, mask=at < k, other=0.0).to(tl.float32)
        most = tl.maximum(most, v.to(tl.int32, bitcast=True) & 0x7FFFFFFF)  # above infinity is what is NaN
    bits = tl.max(most, axis=0)
    peak = bits.to(tl.float32, bitcast=True)
    if STATIC:
        inverse = tl.div_rn(1.0, fixed)
        tl.store(scale + row, tl.where(bits < 0x7F800000, fixed, float("nan")))
    else:
        inverse = tl.where(peak > FLOOR, tl.div_rn(1.0, peak) * TOP, 0.0)
        tl.store(scale + row, tl.div_rn(peak, TOP))
    for start in range(0, k, BLOCK):
        at = start + tl.arange(0, BLOCK)
        v = tl.load(x + row * stride_x + at, mask=at < k, other=0.0).to(tl.float32) * inverse
        v = tl.minimum(tl.maximum(v, -TOP), TOP)
        if FLOAT:  # half to even at the last of e4m3's bits: that of the sum
            binade = (v.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
            magic = tl.maximum(binade, 0.015625) * 1572864.0
        else:
            magic = 12582912.0
        v = (v + magic) - magic
        tl.store(out + row * stride_out + at, v.to(out.dtype.element_ty), mask=at < k)


def quantize(x: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
    """`activations.quantize_activations` of x [M, K] where a scale belongs to a token: codes [M, K], int8 or
    bf16, and scales fp32 [M]."""
    m, k = x.shape
    codes = torch.empty(m, k, dtype=torch.bfloat16 if layout.is_float else torch.int8, device=x.device)
    scale = torch.empty(m, dtype=torch.float32, device=x.device)
    (block,) = ROUND.tile
    _round[(m,)](
        x, codes, scale, k, x.stride(0), codes.stride(0), layout.act_scale,
        TOP=TOP["e4m3"] if layout.is_float else 127.0, FLOAT=layout.is_float, STATIC=layout.static,
        FLOOR=PEAK_FLOOR, BLOCK=block, num_warps=ROUND.num_warps, enable_fp_fusion=False,
    )  # fmt: skip
    return codes, scale
