"""y = x @ W^T + bias with W packed as `layouts` says: weights stay packed in memory, activations as they are.

W[n, k] = s[n, g] * (u[n, k] - z[n, g]) with u the unsigned code, z the zero point (2^(bits-1) when symmetric)
and g the group of k. Codes are read as 32-bit words: word (step, line, r) of a 16-row block holds codes of
row r, so that 16 neighbouring words are 64 contiguous bytes and a thread loads 16 bytes at a time. Both
kernels walk the padded K axis of the layout, step by step; `k_of` says which element of x belongs where.

    M <= 4   `_gemv`: fp32 FMAs; a program has the 16 rows of one block and all of K, or a part of K when
             there are too few blocks to fill a GPU. A code is moved into the top mantissa bits of 2^bits,
             which makes it the float 2^bits + u without a conversion; 2^bits + z is taken off once a group,
             with the sum of x. Where groups are no whole steps: M = 1 only.
    M > 4    `_gemm`: tensor cores. With one group a row, u - z is exact in bf16, fp16 and tf32 and the scale
             is applied to the sums; with smaller groups s * (u - z) is rounded to x's dtype. fp32 x takes
             three tf32 products (error about 1e-6). M <= 16 splits K as `_gemv` does.

NF4 codes are looked up in four words of levels, float8 is exact as fp16 words; neither has a zero point.
Where the layout says one scale of x a token, `triton_activations` makes codes of x first, and
both kernels multiply codes. int8 x int8: the dot is exact, in int32, parts of a split K too, and is then
multiplied by the product of both scales, as on CPUs. `_gemv` has fp32 FMAs there as well: a sum of 1,040
products of 8-bit codes is below 2^24, so each of its sums is exact until it is turned into an int32. e4m3:
products of e4m3 from compute capability 8.9 on; before, and beside e5m2, both are bf16, which holds either
exactly.

Other sums are fp32. The parts of a split K go to a workspace and `triton_split` adds them in order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .layouts import ROWS, Layout
from .triton_activations import quantize
from .triton_codes import CODES, bits_of, k_of, scale_of, value_of, words
from .triton_split import combine, parts_of
from .triton_support import Config, capability, interpreting

GEMV_ROWS = (1, 2, 4)

# By bits; tile: steps of K. 64 steps of 16 words are one 16-byte load for each of 256 threads. What bounds
# the others is that their scales stay fewer than threads: Triton then loads them in the layout of the words,
# where more would go through shared memory and two barriers.
GEMV = {
    8: Config((128,), 8, 4),
    4: Config((64,), 8, 5),
    3: Config((16,), 8, 5),
    2: Config((32,), 8, 5),
}
# tile: rows of x, rows of W, K; by the largest M they serve.
GEMM = {
    "half": (
        (16, Config((16, 64, 128), 4, 4)),
        (32, Config((32, 64, 64), 4, 4)),
        (64, Config((64, 128, 64), 4, 3)),
        (None, Config((128, 128, 64), 8, 3)),
    ),
    # Hopper's e4m3 sums have few bits: they are added in fp32 every 32 elements, in registers of their own
    "float8": (
        (16, Config((16, 64, 128), 4, 4)),
        (64, Config((64, 64, 128), 4, 3)),
        (None, Config((128, 64, 128), 8, 3)),
    ),
    "fp32": (
        (16, Config((16, 64, 32), 4, 3)),
        (None, Config((64, 64, 32), 4, 3)),
    ),
}
_DOT = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit(do_not_specialize=["m", "steps", "part_steps"])
def _gemv(
    x, weight, scale, zero, bias, out, heads, x_scale,
    m, n, k, blocks, groups, steps, part_steps, stride_x, stride_w, stride_out, stride_part,
    BITS: tl.constexpr, K_STEP: tl.constexpr, GROUP: tl.constexpr, GROUP_STEPS: tl.constexpr,
    UNIT: tl.constexpr, GAPS: tl.constexpr, HAS_ZERO: tl.constexpr, HAS_BIAS: tl.constexpr,
    CODE: tl.constexpr, DOUBLE: tl.constexpr, TOKEN: tl.constexpr,
    PART: tl.constexpr, M: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """m <= M rows of x times the 16 rows of one block. GROUP 0: one group a row. UNIT: steps that share a
    group.

    x [m, k]; weight int32 [blocks, words]; scale, zero [blocks, groups, 16]; out [m, n], or with PART [parts,
    m, blocks * 16], fp32 or of EXACT int32 dots. TOKEN: x are codes, times x_scale [m].
    """
    EXACT: tl.constexpr = TOKEN and CODE == 0
    UNITS: tl.constexpr = STEPS // UNIT
    block = tl.program_id(0)
    first = tl.program_id(1) * part_steps
    last = tl.minimum(first + part_steps, steps)
    lane = tl.arange(0, 16)
    rows = tl.arange(0, M)[:, None].to(tl.int64)
    kept = rows < m
    side = block.to(tl.int64) * groups * 16 + lane[None, :]  # of scales and zeros
    total = tl.zeros((M, UNITS, UNIT, 16), tl.float32)
    x_total = tl.zeros((M, UNITS, UNIT, 1), tl.float32)
    for at in tl.range(first, last, STEPS, num_stages=STAGES):
        # The words are loaded last: Triton then gives the products their layout, and reshapes cost nothing.
        place = at * K_STEP + tl.arange(0, STEPS * K_STEP)
        element, good = k_of(place, K_STEP, GROUP, GROUP_STEPS, GAPS, k)
        good = good & (place < last * K_STEP)
        xs = tl.load(x + rows * stride_x + element[None, :], mask=kept & good[None, :], other=0.0)
        if GROUP != 0:
            group = (at // UNIT + tl.arange(0, UNITS)) // (GROUP_STEPS // UNIT)
            live = (group < groups)[:, None]
            s = scale_of(scale, heads, block, group[:, None], lane[None, :], live, groups, DOUBLE)
            s = tl.reshape(s, (1, UNITS, 1, 16))
            if HAS_ZERO:
                z = tl.load(zero + side + group[:, None] * 16, mask=live, other=0)
                z = tl.reshape(z, (1, UNITS, 1, 16)).to(tl.float32)
                z += 1 << BITS
            else:
                z = (1 << BITS) + (1 << (BITS - 1))
        w0, w1, w2 = words(
            weight + block.to(tl.int64) * stride_w, at, last, STEPS, BITS, BITS == 8 and CODE == 0
        )
        w0 = tl.reshape(w0, (1, UNITS, UNIT, 16, 1))
        w1 = tl.reshape(w1, (1, UNITS, UNIT, 16, 1))
        w2 = tl.reshape(w2, (1, UNITS, UNIT, 16, 1))
        xs = tl.reshape(xs, (M, UNITS, UNIT, 1, K_STEP)).to(tl.float32)
        if CODE == 0:
            w = (bits_of(w0, w1, w2, BITS, 23) | ((127 + BITS) << 23)).to(tl.float32, bitcast=True)
            if EXACT:  # four products a turn: 260 turns, 133,120 elements of K, stay below 2^24
                w -= 384.0
        else:
            w = value_of(bits_of(w0, w1, w2, BITS, BITS), CODE)
        part = tl.sum(w * xs, axis=4)
        x_part = tl.sum(xs, axis=4)
        if GROUP == 0:
            total += part
            x_total += x_part
        elif CODE == 0:
            total += s * (part - z * x_part)
        else:
            total += s * part
    if EXACT:
        total = total.to(tl.int32)
    y = tl.sum(tl.reshape(total, (M, STEPS, 16)), axis=1)  # [M, 16]
    if GROUP == 0 and not (EXACT and PART):
        if HAS_ZERO:
            z = tl.load(zero + side).to(tl.float32) + (1 << BITS)
        else:
            z = (1 << BITS) + (1 << (BITS - 1))
        if CODE == 0 and not EXACT:
            x_sum = tl.sum(tl.reshape(x_total, (M, STEPS)), axis=1)
            y -= z * x_sum[:, None]
        here = block + 0 * lane[None, :]  # as wide as the mask
        s = scale_of(scale, heads, here, 0, lane[None, :], here >= 0, groups, DOUBLE)
        if TOKEN:
            s = s * tl.load(x_scale + rows, mask=kept, other=0.0)
        y = y.to(tl.float32) * s
    column = block * 16 + lane[None, :]
    if PART:
        tl.store(out + tl.program_id(1).to(tl.int64) * stride_part + rows * stride_out + column, y, mask=kept)
    else:
        if HAS_BIAS:
            y += tl.load(bias + column, mask=column < n, other=0.0).to(tl.float32)
        tl.store(out + rows * stride_out + column, y.to(out.dtype.element_ty), mask=kept & (column < n))


@triton.jit(do_not_specialize=["m", "steps", "part_steps"])
def _gemm(
    x, weight, scale, zero, bias, out, heads, x_scale,
    m, n, k, blocks, groups, steps, part_steps, stride_x, stride_w, stride_out, stride_part,
    BITS: tl.constexpr, K_STEP: tl.constexpr, GROUP: tl.constexpr, GROUP_STEPS: tl.constexpr,
    UNIT: tl.constexpr, GAPS: tl.constexpr, HAS_ZERO: tl.constexpr, HAS_BIAS: tl.constexpr,
    CODE: tl.constexpr, DOUBLE: tl.constexpr, TOKEN: tl.constexpr,
    PART: tl.constexpr, DOT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One [BM, BN] tile of out, for one part of K. Arguments as `_gemv`; DOT is the dtype of the operands."""
    EXACT: tl.constexpr = TOKEN and CODE == 0
    BLOCKS: tl.constexpr = BN // 16
    STEPS: tl.constexpr = BK // K_STEP
    UNITS: tl.constexpr = STEPS // UNIT
    TALL: tl.constexpr = 8  # tiles of x that go together over the same weights, for the L2 cache
    # Tiles in the order of columns of at most TALL row tiles.
    tiles_m = tl.cdiv(m, BM)
    tiles_n = tl.cdiv(blocks, BLOCKS)
    column = tl.program_id(0) // (TALL * tiles_n)
    tall = tl.minimum(tiles_m - column * TALL, TALL)
    inside = tl.program_id(0) % (TALL * tiles_n)
    tile_m = column * TALL + inside % tall
    tile_n = inside // tall

    first = tl.program_id(1) * part_steps
    last = tl.minimum(first + part_steps, steps)
    rows = tile_m * BM + tl.arange(0, BM)
    block = tile_n * BLOCKS + tl.arange(0, BLOCKS)
    lane = tl.arange(0, 16)
    x_rows = x + rows.to(tl.int64)[:, None] * stride_x
    held = tl.minimum(block, blocks - 1)
    w_blocks = weight + held.to(tl.int64)[:, None] * stride_w
    side = held.to(tl.int64)[:, None, None] * groups * 16 + lane[None, None, :]
    if not HAS_ZERO:
        z = tl.full((1, 1, 1, 1, 1), 1 << (BITS - 1), tl.float32)
    elif GROUP == 0:
        z = tl.reshape(tl.load(zero + side).to(tl.float32), (BLOCKS, 1, 1, 16, 1))
    acc = tl.zeros((BM, BN), tl.int32 if DOT == tl.int8 else tl.float32)
    for at in tl.range(first, last, STEPS, num_stages=STAGES):
        place = at * K_STEP + tl.arange(0, BK)
        element, good = k_of(place, K_STEP, GROUP, GROUP_STEPS, GAPS, k)
        good = good & (place < last * K_STEP)
        xs = tl.load(x_rows + element[None, :], mask=(rows < m)[:, None] & good[None, :], other=0.0)
        if GROUP != 0:
            group = (at // UNIT + tl.arange(0, UNITS)) // (GROUP_STEPS // UNIT)
            live = (group < groups)[None, :, None]
            s = scale_of(
                scale,
                heads,
                held[:, None, None],
                group[None, :, None],
                lane[None, None, :],
                live,
                groups,
                DOUBLE,
            )
            s = tl.reshape(s, (BLOCKS, UNITS, 1, 16, 1))
            if HAS_ZERO:
                zs = tl.load(zero + side + group[None, :, None] * 16, mask=live, other=0).to(tl.float32)
                z = tl.reshape(zs, (BLOCKS, UNITS, 1, 16, 1))
        w0, w1, w2 = words(w_blocks, at, last, STEPS, BITS, BITS == 8 and CODE == 0 and not EXACT)
        w0 = tl.reshape(w0, (BLOCKS, UNITS, UNIT, 16, 1))
        w1 = tl.reshape(w1, (BLOCKS, UNITS, UNIT, 16, 1))
        w2 = tl.reshape(w2, (BLOCKS, UNITS, UNIT, 16, 1))
        code = bits_of(w0, w1, w2, BITS, BITS)
        if DOT == tl.int8:
            w = code.to(tl.int8)
        elif DOT == tl.float8e4nv:
            w = code.to(tl.int8).to(tl.float8e4nv, bitcast=True)
        elif CODE != 0:
            w = value_of(code, CODE)
        else:  # 2^23 + u is the float whose mantissa is u: its difference to 2^23 + z is exact.
            w = (code | 0x4B000000).to(tl.float32, bitcast=True) - (z + 8388608.0)
        if GROUP != 0:
            w = w * s
        w = tl.reshape(w.to(DOT), (BLOCKS, STEPS, 16, K_STEP))
        w = tl.reshape(tl.permute(w, (1, 3, 0, 2)), (BK, BN))
        if DOT == tl.int8:
            acc = tl.dot(xs, w, acc, out_dtype=tl.int32)
        elif DOT == tl.float8e4nv:
            acc = tl.dot(xs.to(DOT), w, acc, max_num_imprecise_acc=32)
        else:
            acc = tl.dot(xs.to(DOT), w, acc, input_precision="tf32x3" if DOT == tl.float32 else None)
    column = tile_n * BN + tl.arange(0, BN)
    if GROUP == 0 and not (EXACT and PART):
        s = scale_of(scale, heads, column // 16, 0, column % 16, column < blocks * 16, groups, DOUBLE)
        s = s[None, :]
        if TOKEN:
            s = s * tl.load(x_scale + rows, mask=rows < m, other=0.0)[:, None]
        acc = acc.to(tl.float32) * s
    here = (rows < m)[:, None] & (column < n)[None, :]
    at = rows.to(tl.int64)[:, None] * stride_out + column[None, :]
    if PART:
        tl.store(out + tl.program_id(1).to(tl.int64) * stride_part + at, acc, mask=here)
    else:
        if HAS_BIAS:
            acc += tl.load(bias + column, mask=column < n, other=0.0).to(tl.float32)[None, :]
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=here)


def _gemm_config(m: int, dtype: torch.dtype, layout: Layout) -> Config:
    table = GEMM["float8" if layout.is_float else "fp32" if dtype == torch.float32 else "half"]
    return next(config for most, config in table if most is None or m <= most)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    bias: torch.Tensor | None,
    layout: Layout,
    n: int,
    k: int,
) -> torch.Tensor:
    """x @ W^T + bias for a packed W.

    Args:
        x: [..., K] bf16, fp16 or fp32.
        weight, scale, zero: as `layout.shapes(n, K)` says; zero None when symmetric.
        bias: [n] or None.
    Returns: [..., n], dtype of x; sums in fp32.
    Raises: ValueError when a stored tensor is not of the layout's shape.
    """
    for name, tensor in (("weight", weight), ("weight_scale", scale), ("weight_zero", zero)):
        want = layout.shapes(n, k).get(name, (None,))[0]
        if (None if tensor is None else tuple(tensor.shape)) != want:
            raise ValueError(
                f"{name} is {None if tensor is None else tuple(tensor.shape)}, the layout says {want}"
            )
    rows = x.reshape(-1, k)
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    m = rows.shape[0]
    out = torch.empty(m, n, dtype=x.dtype, device=x.device)
    if m:
        x_scale = None
        if layout.act == "token":
            rows, x_scale = quantize(rows, layout)
        _launch(rows, x_scale, weight.view(torch.int32), scale, zero, bias, layout, out)
    return out.view(*x.shape[:-1], n)


def _dot(x: torch.Tensor, layout: Layout) -> tl.dtype:
    """The dtype of the factors of `_gemm`."""
    if interpreting():
        return tl.int8 if x.dtype == torch.int8 else tl.float32
    if layout.code == "e4m3" and capability(x.device) >= 89:
        return tl.float8e4nv
    return tl.int8 if x.dtype == torch.int8 else _DOT[x.dtype]


def _launch(x, x_scale, weight, scale, zero, bias, layout, out):
    (m, k), n, blocks = x.shape, out.shape[1], weight.shape[0]
    steps = layout.padded_k(k) // layout.k_step
    group = 0 if layout.groups(k) == 1 else layout.group
    group_steps = -(-group // layout.k_step)
    gaps = bool(group % layout.k_step)
    small = m <= (
        1 if gaps else GEMV_ROWS[-1]
    )  # with gaps each element of x has a mask: more rows would spill
    if small:
        config = GEMV[layout.bits]
        (tile_steps,) = config.tile
        tiles = blocks
    else:
        config = _gemm_config(m, x.dtype, layout)
        bm, bn, bk = config.tile
        tile_steps = bk // layout.k_step
        tiles = -(-m // bm) * -(-blocks * ROWS // bn)
    parts, part_steps = (1, steps) if m > 16 else parts_of(steps, tile_steps, tiles)
    split = parts > 1
    exact = x.dtype == torch.int8
    held = torch.int32 if exact else torch.float32
    to = torch.empty(parts, m, blocks * ROWS, dtype=held, device=x.device) if split else out
    constants = {
        "BITS": layout.bits,
        "K_STEP": layout.k_step,
        "GROUP": group,
        "GROUP_STEPS": group_steps,
        "UNIT": min(group_steps & -group_steps, tile_steps) if group else tile_steps,
        "GAPS": gaps,
        "HAS_ZERO": zero is not None,
        "HAS_BIAS": bias is not None and not split,
        "CODE": CODES[layout.code],
        "DOUBLE": layout.scale_dtype == "double",
        "TOKEN": x_scale is not None,
        "PART": split,
        "STAGES": config.num_stages,
        "num_warps": config.num_warps,
        "enable_fp_fusion": True,
    }
    heads = scale.view(torch.float32) if layout.scale_dtype == "double" else None
    tensors = (x, weight, scale, zero, None if split else bias, to, heads, x_scale)
    strides = (x.stride(0), weight.stride(0), to.stride(-2), to.stride(0) if split else 0)
    sizes = (m, n, k, blocks, layout.groups(k), steps, part_steps)
    if small:
        rows = next(rows for rows in GEMV_ROWS if m <= rows)
        _gemv[(blocks, parts)](*tensors, *sizes, *strides, M=rows, STEPS=tile_steps, **constants)
    else:
        _gemm[(tiles, parts)](
            *tensors, *sizes, *strides, BM=bm, BN=bn, BK=bk, DOT=_dot(x, layout), **constants
        )
    if split:
        combine(to, bias, out, scale, heads, x_scale)
