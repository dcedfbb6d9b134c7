"""`lora.lora_add` on a GPU: every adapter of a step in two launches, after SGMV and BGMV (Punica,
arXiv:2310.18547; S-LoRA, arXiv:2311.03285).

    _shrink   h[part, t] = x[t] a[s]^T over a part of K, fp32
    _expand   y[t] += scale[s] * (sum over parts of h[part, t]) b[s]

Tokens are cut into tiles of TOKENS. Within a tile the first token of each adapter leads: the program that has
it multiplies the rows of all its followers, the other rows masked, so that an adapter is read once a tile and
tokens may come in any order. A program has EACH tokens of a tile to lead. Decode: EACH is 1, so that 32
adapters are 32 programs side by side, and a token that leads nobody costs a program that ends at once.
Prefill: tiles are large and mostly of one adapter; a program walks its leaders one after another.

Nothing is read back to the host, grids follow from shapes alone, and there are no atomics: what is captured
in a CUDA graph serves any adapters, and a token's result depends neither on its neighbours nor on the run.
Products of x and a are exact (of fp32: three tf32 products, as are those of h and b); sums are fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .triton_split import parts_of
from .triton_support import Config, interpreting

FEW = 128  # most tokens for which every token has a program of its own
# (tokens of a tile, tokens a program may lead)
TILES = {"few": (16, 1), "many": (64, 16)}
MOST_PARTS = {"few": 16, "many": 4}  # `_expand` reads them all, for each of its tiles
# tile: K and ranks of `_shrink`, N and ranks of `_expand`. Three tf32 products want two copies of both
# factors: where those are fp32, and in `_expand`, larger tiles spill.
SHRINK = {
    "few": {"half": Config((128, 64), 4, 4), "fp32": Config((64, 64), 4, 3)},
    "many": {"half": Config((64, 64), 4, 3), "fp32": Config((32, 32), 4, 3)},
}
EXPAND = {"few": Config((128, 32), 4, 2), "many": Config((64, 32), 8, 2)}
_DOT = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def _leaders(adapters, tokens, TOKENS: tl.constexpr, EACH: tl.constexpr):
    """Of the tile of program_id(0): its first token, the slot of each row [TOKENS], and whether this program
    leads it."""
    PROGRAMS: tl.constexpr = TOKENS // EACH
    first = tl.program_id(0) // PROGRAMS * TOKENS
    row = tl.arange(0, TOKENS)
    slots = tl.load(adapters + first + row, mask=first + row < tokens, other=-1)
    earlier = (slots[None, :] == slots[:, None]) & (row[None, :] < row[:, None])
    leads = (tl.sum(earlier.to(tl.int32), axis=1) == 0) & (slots >= 0)
    return first, slots, leads & (row // EACH == tl.program_id(0) % PROGRAMS)


@triton.jit(do_not_specialize=["tokens"])
def _shrink(
    x, adapters, a, rank, h, tokens, k, part_k, ranks, stride_x, stride_slot, stride_rank, stride_part,
    TOKENS: tl.constexpr, EACH: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr, DOT: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One part of K (second grid axis), BR ranks (third). h [parts, T, ranks]; ranks beyond a token's own are
    not written."""
    PRECISION: tl.constexpr = "tf32x3" if DOT == tl.float32 else None
    first, slots, leads = _leaders(adapters, tokens, TOKENS, EACH)
    row = tl.arange(0, TOKENS)
    r = tl.program_id(2) * BR + tl.arange(0, BR)
    begin = tl.program_id(1) * part_k
    end = tl.minimum(begin + part_k, k)
    at = (first + row).to(tl.int64)
    leader = tl.min(tl.where(leads, row, TOKENS), axis=0)
    while leader < TOKENS:
        slot = tl.load(adapters + first + leader)
        used = tl.load(rank + slot)
        if tl.program_id(2) * BR < used:
            mine = slots == slot
            acc = tl.zeros((TOKENS, BR), tl.float32)
            table = a + slot.to(tl.int64) * stride_slot + r[None, :] * stride_rank
            for start in tl.range(begin, end, BK, num_stages=STAGES):
                c = start + tl.arange(0, BK)
                inside = mine[:, None] & (c < end)[None, :]
                xs = tl.load(x + at[:, None] * stride_x + c[None, :], mask=inside, other=0.0)
                ws = tl.load(table + c[:, None], mask=(c < end)[:, None] & (r < used)[None, :], other=0.0)
                acc = tl.dot(xs.to(DOT), ws.to(DOT), acc, input_precision=PRECISION)
            to = h + tl.program_id(1).to(tl.int64) * stride_part + at[:, None] * ranks + r[None, :]
            tl.store(to, acc, mask=mine[:, None] & (r < used)[None, :])
        leader = tl.min(tl.where(leads & (row > leader), row, TOKENS), axis=0)


@triton.jit(do_not_specialize=["tokens", "parts"])
def _expand(
    h, adapters, b, scale, rank, y, tokens, n, parts, ranks, stride_part, stride_slot, stride_rank, stride_y,
    TOKENS: tl.constexpr, EACH: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """BN columns of y (second grid axis)."""
    first, slots, leads = _leaders(adapters, tokens, TOKENS, EACH)
    row = tl.arange(0, TOKENS)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    at = (first + row).to(tl.int64)
    leader = tl.min(tl.where(leads, row, TOKENS), axis=0)
    while leader < TOKENS:
        slot = tl.load(adapters + first + leader)
        used = tl.load(rank + slot)
        if used > 0:
            mine = slots == slot
            acc = tl.zeros((TOKENS, BN), tl.float32)
            for begin in range(0, used, BR):
                r = begin + tl.arange(0, BR)
                inside = mine[:, None] & (r < used)[None, :]
                narrow = tl.zeros((TOKENS, BR), tl.float32)
                part = h + first.to(tl.int64) * ranks
                for _ in range(parts):
                    narrow += tl.load(part + row[:, None] * ranks + r[None, :], mask=inside, other=0.0)
                    part += stride_part
                table = b + slot.to(tl.int64) * stride_slot + r[:, None] * stride_rank + column[None, :]
                ws = tl.load(table, mask=(r < used)[:, None] & (column < n)[None, :], other=0.0)
                acc = tl.dot(narrow, ws.to(tl.float32), acc, input_precision="tf32x3")
            here = mine[:, None] & (column < n)[None, :]
            to = y + at[:, None] * stride_y + column[None, :]
            total = tl.load(to, mask=here, other=0.0).to(tl.float32) + tl.load(scale + slot) * acc
            tl.store(to, total.to(y.dtype.element_ty), mask=here)
        leader = tl.min(tl.where(leads & (row > leader), row, TOKENS), axis=0)


def lora_add(
    y: torch.Tensor,
    x: torch.Tensor,
    adapters: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    scale: torch.Tensor,
    rank: torch.Tensor,
) -> None:
    """As `lora.lora_add`; y may have any stride between its rows."""
    (tokens, n), (_, most, k) = y.shape, a.shape
    if not (tokens and n and k and most):
        return
    if y.stride(1) != 1 and n > 1:
        raise ValueError(f"lora_add: y has strides {y.stride()}, its rows must be contiguous")
    x, a, b = (t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous() for t in (x, a, b))
    adapters = adapters.contiguous()
    size = "few" if tokens <= FEW else "many"
    block, each = TILES[size]
    tiles, programs = -(-tokens // block), -(-tokens // block) * (block // each)
    half = a.dtype == x.dtype and x.dtype != torch.float32
    shrink, expand = SHRINK[size]["half" if half else "fp32"], EXPAND[size]
    padded = max(16, triton.next_power_of_2(most))
    (tile_k, tile_r), (tile_n, tile_of_h) = shrink.tile, expand.tile
    tile_r, tile_of_h = min(tile_r, padded), min(tile_of_h, padded)
    parts, part_k = parts_of(k, tile_k, tiles)
    if parts > MOST_PARTS[size]:
        part_k = -(-k // MOST_PARTS[size] // tile_k) * tile_k
        parts = -(-k // part_k)
    h = torch.empty(parts, tokens, most, dtype=torch.float32, device=y.device)
    _shrink[(programs, parts, -(-most // tile_r))](
        x, adapters, a, rank, h, tokens, k, part_k, most, x.stride(0), a.stride(0), a.stride(1), h.stride(0),
        TOKENS=block, EACH=each, BK=tile_k, BR=tile_r,
        DOT=_DOT[x.dtype] if half and not interpreting() else tl.float32,
        STAGES=shrink.num_stages, num_warps=shrink.num_warps, enable_fp_fusion=True,
    )  # fmt: skip
    _expand[(programs, -(-n // tile_n))](
        h, adapters, b, scale, rank, y, tokens, n, parts, most, h.stride(0), b.stride(0), b.stride(1),
        y.stride(0), TOKENS=block, EACH=each, BN=tile_n, BR=tile_of_h,
        num_warps=expand.num_warps, num_stages=expand.num_stages, enable_fp_fusion=True,
    )  # fmt: skip
