"""Paged KV cache on a GPU: writing it, and attention over it. `paged` has the layout, the formula and the
references.

`_write`: one program for a few tokens of one KV head. Int8 pages are quantized on the way, bit for bit as
`pages.quantize_kv` does (IEEE divisions, ties to even, no fused multiply-add).

`_attend`: one program for ROWS rows of queries of one KV head: the H // G query heads that share the head,
times as many tokens as fit, so that K and V are read once for all of them; heads beyond ROWS are cut into
pieces, a program each. It walks the keys in tiles of KEYS with an online softmax in fp32; products run on
tensor cores in q's dtype (fp32: three tf32 products), P rounded to that dtype. Int8 codes are multiplied as
they are: the scale of a key is applied to its column of scores, that of a value to its column of P. A block
of queries finds its sequence in `q_starts` by itself, so that nothing is read back to the host.

When there are too few programs to fill a GPU (decode), the keys are cut into parts of equal length;
`_combine` joins them in order. The number of parts follows from shapes alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .paged import _check
from .triton_support import Config, capability, interpreting

FILL = 512  # programs wanted before the keys are cut into parts
PART_KEYS = 256  # fewest keys of a part
MOST_PARTS = 32

# tile: rows of queries, keys. By dtype; the first that fits (largest padded head size, least compute
# capability) is taken. sm_120 has neither the products of sm_90 nor those of sm_100: 128 rows spill there.
# More than 16 query heads a KV head take the table of prefill for decode as well.
DECODE = {
    "half": (
        (64, 80, Config((16, 128), 4, 3)),
        (128, 80, Config((16, 64), 4, 3)),
        (256, 80, Config((16, 32), 4, 3)),
    ),
    "fp32": ((128, 80, Config((16, 32), 8, 2)), (256, 80, Config((16, 16), 8, 2))),
}
PREFILL = {
    "half": (
        (64, 120, Config((64, 64), 4, 3)),
        (64, 90, Config((128, 64), 4, 3)),
        (64, 80, Config((64, 64), 4, 3)),
        (128, 120, Config((64, 32), 8, 3)),
        (128, 90, Config((128, 64), 8, 3)),
        (128, 80, Config((64, 32), 8, 3)),
        (256, 80, Config((64, 32), 8, 2)),
    ),
    "fp32": ((128, 80, Config((32, 32), 8, 2)), (256, 80, Config((16, 16), 8, 2))),
}
WRITE = Config((4,), 4, 1)  # tile: tokens
_DOT = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def _write_one(
    x, pages, scales, slots, tokens, stride_t, stride_g, heads, stride_slot,
    D: tl.constexpr, BLOCK_D: tl.constexpr, TOKENS: tl.constexpr, INT8: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    slot = tl.load(slots + token, mask=token < tokens, other=-1).to(tl.int64)
    here = slot >= 0
    inside = here[:, None] & (d < D)[None, :]
    at = token.to(tl.int64)[:, None] * stride_t + head * stride_g + d[None, :]
    value = tl.load(x + at, mask=inside, other=0.0)
    to = pages + slot[:, None] * stride_slot + head * D + d[None, :]
    if INT8:
        value = value.to(tl.float32)
        scale = tl.div_rn(tl.max(tl.abs(value), axis=1), 127.0)
        tiny = 1.1754943508222875e-38
        inverse = tl.where(scale > 0.0, tl.div_rn(1.0, tl.maximum(scale, tiny)), 0.0)
        # Adding and taking off 1.5 * 2^23 rounds to an integer, ties to even.
        code = (value * inverse[:, None] + 12582912.0) - 12582912.0
        tl.store(to, tl.minimum(tl.maximum(code, -127.0), 127.0).to(tl.int8), mask=inside)
        tl.store(scales + slot * heads + head, scale, mask=here)
    else:
        tl.store(to, value.to(pages.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def _write(
    k, v, k_pages, v_pages, k_scale, v_scale, slots,
    tokens, heads, stride_kt, stride_kg, stride_vt, stride_vg, stride_k, stride_v,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    TOKENS: tl.constexpr, INT8: tl.constexpr,
):  # fmt: skip
    """K (third grid axis 0) or V (1) of TOKENS tokens of one head. Slots below 0 are left out."""
    if tl.program_id(2) == 0:
        _write_one(
            k,
            k_pages,
            k_scale,
            slots,
            tokens,
            stride_kt,
            stride_kg,
            heads,
            stride_k,
            D,
            BLOCK_D,
            TOKENS,
            INT8,
        )
    else:
        _write_one(
            v,
            v_pages,
            v_scale,
            slots,
            tokens,
            stride_vt,
            stride_vg,
            heads,
            stride_v,
            DV,
            BLOCK_DV,
            TOKENS,
            INT8,
        )


@triton.jit(do_not_specialize=["sequences", "part_keys", "tokens"])
def _attend(
    q, k_pages, v_pages, k_scale, v_scale, tables, q_starts, lengths, sinks, slopes, out, tops, totals,
    sequences, tokens, part_keys, window, scale, softcap,
    stride_qt, stride_qh, stride_k, stride_v, kv_heads, stride_table,
    RATIO: tl.constexpr, SPLIT: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, PAGE: tl.constexpr, INT8: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr, SLOPES: tl.constexpr, PART: tl.constexpr, DOT: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Queries of one block and KV head (one of SPLIT pieces of its RATIO heads) over the keys of one part.

    out [T, H, DV], or with PART fp32 [parts, T, H, DV] not divided by the sum, beside tops and totals [parts,
    T, H]: the largest score, in units of ln 2, -inf without keys, and the sum of the exponentials.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    EACH: tl.constexpr = (RATIO + SPLIT - 1) // SPLIT
    TOKENS: tl.constexpr = ROWS // EACH
    SEARCH: tl.constexpr = 128
    PRECISION: tl.constexpr = "tf32x3" if DOT == tl.float32 else None
    block = tl.program_id(0)
    head = tl.program_id(1) // SPLIT
    # Blocks of sequence b begin at q_starts[b] // TOKENS + b: at least one each, enough for all of its
    # queries.
    before = 0
    for at in range(0, sequences, SEARCH):
        b = at + tl.arange(0, SEARCH)
        begin = tl.load(q_starts + b, mask=b < sequences, other=0)
        before += tl.sum(((begin // TOKENS + b <= block) & (b < sequences)).to(tl.int32), axis=0)
    sequence = before - 1
    start = tl.load(q_starts + sequence)
    count = tl.load(q_starts + sequence + 1) - start
    length = tl.load(lengths + sequence)
    first_token = (block - (start // TOKENS + sequence)) * TOKENS
    if first_token >= count:
        return

    row = tl.arange(0, ROWS)
    token = first_token + row // EACH
    kept = (row < TOKENS * EACH) & (token < count)
    shared = tl.program_id(1) % SPLIT * EACH + row % EACH
    kept = kept & (shared < RATIO)
    q_head = head * RATIO + shared
    position = length - count + token
    last = tl.minimum(length, length - count + first_token + TOKENS)
    first = 0
    if WINDOW:
        first = tl.maximum(length - count + first_token - window + 1, 0) // KEYS * KEYS
    if PART:
        first = tl.maximum(first, tl.program_id(2) * part_keys)
        last = tl.minimum(last, (tl.program_id(2) + 1) * part_keys)

    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    at = (start + token).to(tl.int64)[:, None] * stride_qt + q_head[:, None] * stride_qh + d[None, :]
    queries = tl.load(q + at, mask=kept[:, None] & (d < D)[None, :], other=0.0).to(DOT)
    slope = tl.zeros((ROWS,), tl.float32)
    if SLOPES:
        slope = tl.load(slopes + q_head, mask=kept, other=0.0).to(tl.float32)
    table = tables + sequence.to(tl.int64) * stride_table
    k_head = k_pages + head * D + d[:, None]
    v_head = v_pages + head * DV + dv[None, :]

    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, BLOCK_DV), tl.float32)
    for key0 in range(first, last, KEYS):
        key = key0 + tl.arange(0, KEYS)
        live = key < last
        page = tl.load(table + key // PAGE, mask=live, other=0).to(tl.int64)
        slot = page * PAGE + key % PAGE
        ks = tl.load(k_head + slot[None, :] * stride_k, mask=(d < D)[:, None] & live[None, :], other=0)
        x = tl.dot(queries, ks.to(DOT), input_precision=PRECISION)
        if INT8:
            x *= tl.load(k_scale + slot * kv_heads + head, mask=live, other=0.0)[None, :]
        x *= scale
        if SOFTCAP:
            # tanh(y) = 1 - 2 / (exp(2 y) + 1)
            x = softcap * (1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E / softcap)) + 1.0))
        gap = key[None, :] - position[:, None]
        if SLOPES:
            x += slope[:, None] * gap.to(tl.float32)
        seen = live[None, :] & (gap <= 0)
        if WINDOW:
            seen = seen & (gap > -window)
        x = tl.where(seen, x * LOG2E, float("-inf"))
        higher = tl.maximum(top, tl.max(x, axis=1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp2(x - base[:, None])
        fade = tl.exp2(top - base)
        top = higher
        total = total * fade + tl.sum(p, axis=1)
        vs = tl.load(v_head + slot[:, None] * stride_v, mask=live[:, None] & (dv < DV)[None, :], other=0)
        if INT8:
            p *= tl.load(v_scale + slot * kv_heads + head, mask=live, other=0.0)[None, :]
        acc = tl.dot(p.to(DOT), vs.to(DOT), acc * fade[:, None], input_precision=PRECISION)

    heads = kv_heads * RATIO
    at = (start + token).to(tl.int64) * heads + q_head
    inside = kept[:, None] & (dv < DV)[None, :]
    if PART:
        at += tl.program_id(2).to(tl.int64) * tokens * heads
        tl.store(tops + at, top, mask=kept)
        tl.store(totals + at, total, mask=kept)
        tl.store(out + at[:, None] * DV + dv[None, :], acc, mask=inside)
    else:
        if SINKS:
            sink = tl.load(sinks + q_head, mask=kept, other=0.0).to(tl.float32) * LOG2E
            higher = tl.maximum(top, sink)
            acc *= tl.exp2(top - higher)[:, None]
            total = total * tl.exp2(top - higher) + tl.exp2(sink - higher)
        acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
        tl.store(out + at[:, None] * DV + dv[None, :], acc.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "parts"])
def _combine(
    accs, tops, totals, sinks, out, rows, parts, heads,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Join the parts of a row (token, head) in order: accs [parts, rows, DV], tops, totals [parts, rows]."""
    LOG2E: tl.constexpr = 1.4426950408889634
    row = tl.program_id(0).to(tl.int64)
    dv = tl.arange(0, BLOCK_DV)
    top = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    acc = tl.zeros((BLOCK_DV,), tl.float32)
    if SINKS:
        top = tl.load(sinks + row % heads + tl.arange(0, 1)).to(tl.float32) * LOG2E
        total += 1.0
    at = row + tl.arange(0, 1)
    for _ in range(parts):
        part_top = tl.load(tops + at)
        full = part_top > float("-inf")
        higher = tl.maximum(top, part_top)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        fade = tl.exp2(top - base)
        gain = tl.exp2(part_top - base)
        total = total * fade + tl.load(totals + at) * gain
        part = tl.load(accs + at * DV + dv, mask=full & (dv < DV), other=0.0)
        acc = acc * fade + part * gain
        top = higher
        at += rows
    acc = acc / tl.where(total > 0.0, total, 1.0)
    tl.store(out + row * DV + dv, acc.to(out.dtype.element_ty), mask=dv < DV)


def cache_write(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slots: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """As `pages.cache_write`; tokens whose slot is negative are left out."""
    tokens, heads, size = k.shape
    size_v = v.shape[2]
    if not tokens:
        return
    k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
    (block,) = WRITE.tile
    _write[(-(-tokens // block), heads, 2)](
        k, v, k_pages, v_pages, k_scale, v_scale, slots,
        tokens, heads, k.stride(0), k.stride(1), v.stride(0), v.stride(1), k_pages.stride(1),
        v_pages.stride(1), D=size, DV=size_v, BLOCK_D=_padded(size), BLOCK_DV=_padded(size_v), TOKENS=block,
        INT8=k_scale is not None, num_warps=WRITE.num_warps, enable_fp_fusion=False,
    )  # fmt: skip


def paged_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_tables: torch.Tensor,
    q_starts: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    rows: list | None = None,
) -> torch.Tensor:
    """As `paged.paged_attention_reference`; `rows` is not looked at, and rows of q that belong to no sequence
    are left as they come.

    Raises: ValueError when the shapes contradict each other, or for head sizes above 256.
    """
    _check(q, k_pages, v_pages, block_tables, q_starts, lengths, k_scale, v_scale)
    tokens, heads, size = q.shape
    page_tokens, kv_heads, size_v = k_pages.shape[1], k_pages.shape[2], v_pages.shape[3]
    sequences, ratio = lengths.shape[0], heads // kv_heads
    out = torch.empty(tokens, heads, size_v, dtype=q.dtype, device=q.device)
    if not tokens:
        return out
    if q.stride(2) != 1:
        q = q.contiguous()
    decode = tokens <= 4 * sequences and ratio <= 16
    config = _attend_config(DECODE if decode else PREFILL, q, max(_padded(size), _padded(size_v)))
    rows, keys = config.tile
    pieces = -(-ratio // rows)
    blocks = tokens // (rows // -(-ratio // pieces)) + sequences
    parts, part_keys = _parts(blocks * kv_heads * pieces, block_tables.shape[1] * page_tokens)
    apart = parts > 1
    to, tops, totals = out, None, None
    if apart:
        to = torch.empty(parts, tokens, heads, size_v, dtype=torch.float32, device=q.device)
        tops, totals = torch.empty(2, parts, tokens, heads, dtype=torch.float32, device=q.device)
    _attend[(blocks, kv_heads * pieces, parts)](
        q, k_pages, v_pages, k_scale, v_scale, block_tables, q_starts, lengths, sinks, alibi_slopes, to, tops,
        totals, sequences, tokens, part_keys, window or 0, size**-0.5 if scale is None else scale, softcap or
        1.0, q.stride(0), q.stride(1), k_pages.stride(1), v_pages.stride(1), kv_heads, block_tables.stride(0),
        RATIO=ratio, SPLIT=pieces, D=size, DV=size_v, BLOCK_D=_padded(size), BLOCK_DV=_padded(size_v),
        PAGE=page_tokens, INT8=k_scale is not None, WINDOW=window is not None, SOFTCAP=softcap is not None,
        SINKS=sinks is not None and not apart, SLOPES=alibi_slopes is not None, PART=apart,
        DOT=tl.float32 if interpreting() else _DOT[q.dtype], ROWS=rows, KEYS=keys,
        num_warps=config.num_warps, num_stages=config.num_stages, enable_fp_fusion=True,
    )  # fmt: skip
    if apart:
        _combine[(tokens * heads,)](
            to, tops, totals, sinks, out, tokens * heads, parts, heads,
            DV=size_v, BLOCK_DV=_padded(size_v), SINKS=sinks is not None, num_warps=1, enable_fp_fusion=True,
        )  # fmt: skip
    return out


def _padded(size: int) -> int:
    return max(16, triton.next_power_of_2(size))


def _attend_config(table: dict, q: torch.Tensor, size: int) -> Config:
    here = capability(q.device)
    for most, least, config in table["fp32" if q.dtype == torch.float32 else "half"]:
        if size <= most and here >= least:
            return config
    raise ValueError(f"head size {size}: the Triton kernel takes at most 256")


def _parts(programs: int, keys: int) -> tuple[int, int]:
    """(parts the keys are cut into, keys a part)."""
    parts = min(-(-FILL // programs), -(-keys // PART_KEYS), MOST_PARTS)
    each = -(-keys // max(parts, 1) // PART_KEYS) * PART_KEYS
    return -(-keys // each), each
