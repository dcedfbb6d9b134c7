"""The parts of a product whose K is split over programs: how many, and their sum.

Each part goes to a workspace [parts, M, padded N], fp32, or int32 where the products are of codes, and
`combine` adds them in order: no atomics, so that one shape always gives the same bits. Scales that belong to
a whole sum of codes, and the bias, are applied then.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .triton_codes import scale_of
from .triton_support import Config

FILL = 128  # programs wanted before K is split: about one for each multiprocessor of a large GPU
COMBINE = Config((512,), 4, 1)


@triton.jit(do_not_specialize=["count"])
def _combine(
    parts, bias, out, scale, heads, x_scale,
    n, count, stride_part, stride_row, stride_out,
    HAS_BIAS: tl.constexpr, DOUBLE: tl.constexpr, EXACT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[m] = sum of parts[:, m], in order, + bias. parts fp32 [count, M, padded n]; of EXACT dots int32,
    to be scaled."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1).to(tl.int64)
    here = column < n
    total = tl.zeros((BLOCK,), tl.int32 if EXACT else tl.float32)
    at = parts + row * stride_row + column
    for _ in range(count):
        total += tl.load(at, mask=here, other=0)
        at += stride_part
    if EXACT:
        s = scale_of(scale, heads, column // 16, 0, column % 16, here, 1, DOUBLE)
        total = total.to(tl.float32) * (s * tl.load(x_scale + row))
    if HAS_BIAS:
        total += tl.load(bias + column, mask=here, other=0.0).to(tl.float32)
    tl.store(out + row * stride_out + column, total.to(out.dtype.element_ty), mask=here)


def parts_of(steps: int, tile_steps: int, tiles: int) -> tuple[int, int]:
    """(parts of K, steps a part): enough parts to have FILL programs, each at least two tiles long."""
    turns = -(-steps // tile_steps)
    parts = max(1, min(-(-FILL // tiles), turns // 2))
    each = -(-turns // parts) * tile_steps
    return -(-steps // each), each


def combine(
    parts: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    scale: torch.Tensor,
    heads: torch.Tensor | None,
    x_scale: torch.Tensor | None,
) -> None:
    """out [M, n] = sum of parts [parts, M, padded n] + bias [n].

    Args:
        scale, heads: of one group a row, as `triton_codes.scale_of` reads them, and x_scale [M]: of int32
            parts, which fp32 ones have been multiplied by.
    """
    (m, n), (block,) = out.shape, COMBINE.tile
    _combine[(-(-n // block), m)](
        parts, bias, out, scale, heads, x_scale,
        n, len(parts), parts.stride(0), parts.stride(1), out.stride(0),
        HAS_BIAS=bias is not None, DOUBLE=heads is not None, EXACT=parts.dtype == torch.int32, BLOCK=block,
        num_warps=COMBINE.num_warps, enable_fp_fusion=True,
    )  # fmt: skip
