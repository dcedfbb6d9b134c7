"""Attention over a paged KV cache: the specification, and the PyTorch backend that allocates no dense K or V.

A layer's cache is `k_pages`, `v_pages` [pages, page_tokens, G, D], and `k_scale`, `v_scale` where they are
int8: what lies in them is said and written in `pages`. A sequence owns the pages of one row of `block_tables`
[B, max_blocks] int32 (unused entries -1); its slot s lies in page `block_tables[b, s // page_tokens]` at
offset `s % page_tokens`.

Queries are packed: q [T, H, D] holds the new tokens of all sequences one after another, `q_starts` [B + 1]
int32 says where each begins. The n = q_starts[b+1] - q_starts[b] queries of a sequence sit at its last n
slots, that is query i at slot p = lengths[b] - n + i, `lengths` [B] int32 counting them in. Decode is n = 1,
prefill n = lengths[b], chunked prefill and verification anything between; one call mixes them.

Formula, for query head h of KV head g = h // (H // G) and every slot s with s <= p, and s > p - window if
one is set:
    x_s = scale * <q, k_s>;  x_s = softcap * tanh(x_s / softcap);  x_s += alibi_slopes[h] * (s - p)
    out = sum_s exp(x_s) v_s / (sum_s exp(x_s) + exp(sinks[h]))
Products, softmax and sums are fp32 in the reference, the output has q's dtype. A sequence without queries or
slots yields nothing.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from . import dispatch, triton_support
from .pages import dequantize_kv

BLOCK_TOKENS = (
    512  # slots gathered or dequantized at a time: bounds what decode allocates, whatever the context
)
SCORE_BYTES = 16 << 20  # fp32 scores held at a time where the formula needs them in the open


def paged_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_tables: torch.Tensor,
    q_starts: torch.Tensor,
    lengths: torch.Tensor,
    **options,
) -> torch.Tensor:
    """The formula above, by the backend of q's device; options and errors as `paged_attention_blocked`."""
    backend = dispatch.choose("paged_attention", q.device.type, q.dtype)
    return backend.function(q, k_pages, v_pages, block_tables, q_starts, lengths, **options)


def _check(q, k_pages, v_pages, block_tables, q_starts, lengths, k_scale, v_scale):
    heads, kv_heads = q.shape[1], k_pages.shape[2]
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads are not a multiple of {kv_heads} KV heads")
    if q.shape[2] != k_pages.shape[3]:
        raise ValueError(f"head size {q.shape[2]} of q is not that of the pages, {k_pages.shape[3]}")
    if v_pages.shape[:3] != k_pages.shape[:3]:
        raise ValueError(
            f"pages, tokens and heads of V, {tuple(v_pages.shape[:3])}, are not those of K, "
            f"{tuple(k_pages.shape[:3])}"
        )
    if block_tables.shape[0] != lengths.shape[0] or q_starts.shape[0] != lengths.shape[0] + 1:
        raise ValueError(
            f"block_tables, q_starts and lengths are of {block_tables.shape[0]}, {q_starts.shape[0] - 1} and "
            f"{lengths.shape[0]} sequences"
        )
    if (k_pages.dtype == torch.int8) != (k_scale is not None) or (k_scale is None) != (v_scale is None):
        raise ValueError("int8 pages come with k_scale and v_scale, other pages without")


def paged_attention_reference(
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
) -> torch.Tensor:
    """The formula above, one sequence and one dense matrix of scores at a time: the specification.

    Args: as in the module's docstring; `scale` is D ** -0.5 unless given; sinks, alibi_slopes [H].
    Returns: [T, H, Dv], dtype of q.
    Raises: ValueError when the shapes contradict each other.
    """
    _check(q, k_pages, v_pages, block_tables, q_starts, lengths, k_scale, v_scale)
    page_tokens, kv_heads = k_pages.shape[1], k_pages.shape[2]
    heads = q.shape[1]
    scale = q.shape[2] ** -0.5 if scale is None else scale
    out = q.new_zeros(q.shape[0], heads, v_pages.shape[3])
    for b, (start, stop, length) in enumerate(
        zip(q_starts.tolist()[:-1], q_starts.tolist()[1:], lengths.tolist(), strict=True)
    ):
        n = stop - start
        if not n or not length:
            continue
        pages = block_tables[b, : -(-length // page_tokens)].long()
        k, v = k_pages[pages].flatten(0, 1)[:length], v_pages[pages].flatten(0, 1)[:length]  # [S, G, D]
        if k_scale is not None:
            k = dequantize_kv(k, k_scale[pages].flatten(0, 1)[:length])
            v = dequantize_kv(v, v_scale[pages].flatten(0, 1)[:length])
        k = k.float().repeat_interleave(heads // kv_heads, dim=1)
        v = v.float().repeat_interleave(heads // kv_heads, dim=1)
        x = torch.einsum("nhd,shd->hns", q[start:stop].float(), k) * scale
        if softcap is not None:
            x = softcap * torch.tanh(x / softcap)
        slot = torch.arange(length, device=q.device)
        p = torch.arange(length - n, length, device=q.device)[:, None]
        if alibi_slopes is not None:
            x = x + alibi_slopes.float()[:, None, None] * (slot - p)
        seen = slot <= p
        if window is not None:
            seen &= slot > p - window
        x = x.masked_fill(~seen, float("-inf"))
        if sinks is not None:
            x = torch.cat([x, sinks.float()[:, None, None].expand(-1, n, 1)], dim=-1)
        weights = torch.softmax(x, dim=-1)[..., :length]
        out[start:stop] = torch.einsum("hns,shd->nhd", weights, v).to(q.dtype)
    return out


def _merge(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Join softmaxes over disjoint keys: out = sum_i exp(lse_i - lse) out_i, in the order given."""
    if len(parts) == 1:
        return parts[0]
    lse = torch.logsumexp(torch.stack([part[1] for part in parts]), dim=0)
    out = 0
    for part, part_lse in parts:
        out = out + part.float() * torch.exp(part_lse - lse)[..., None]
    return out, lse


def _open_block(q, k, v, scale, softcap, slopes, slots_q, slot0, window):
    """One block in plain PyTorch: q [G, R, n, D], k [G, S, D], v [G, S, Dv] -> out fp32 [G, R, n, Dv], lse
    [G, R, n].

    A query that sees nothing of the block gets lse -inf and out 0, so that it drops out of the merge.
    """
    groups, ratio, n, _ = q.shape
    x = torch.matmul(q.float().flatten(1, 2), k.float().transpose(1, 2)).mul_(scale)  # [G, R*n, S]
    x = x.view(groups, ratio, n, -1)
    if softcap is not None:
        x = x.div_(softcap).tanh_().mul_(softcap)
    slot = torch.arange(slot0, slot0 + k.shape[1], device=q.device)
    gap = slot - slots_q[:, None]  # [n, S]
    if slopes is not None:
        x = x.add_(slopes.view(groups, ratio, 1, 1) * gap)
    hidden = gap > 0
    if window is not None:
        hidden |= gap <= -window
    x = x.masked_fill_(hidden, float("-inf"))
    top = x.amax(-1, keepdim=True)
    x = x.sub_(torch.where(top.isfinite(), top, 0.0)).exp_()
    total = x.sum(-1, keepdim=True)
    lse = torch.where(top.isfinite(), top, 0.0) + total.log()
    out = torch.matmul(x.flatten(1, 2), v.float()).view(groups, ratio, n, -1)
    return out.div_(total.clamp_min(torch.finfo(torch.float32).tiny)), lse.squeeze(-1)


class _Row:
    """The pages of one sequence, read a stretch at a time: views where pages follow each other, else
    gathers."""

    def __init__(self, k_pages, v_pages, table, first, k_scale, v_scale, dtype):
        self.k_pages, self.v_pages, self.k_scale, self.v_scale = k_pages, v_pages, k_scale, v_scale
        self.table, self.dtype = table, dtype
        self.first = first if first >= 0 else None
        self.page_tokens = k_pages.shape[1]

    def read(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots start..stop-1 as k [G, S, D] and v [G, S, Dv], in q's dtype."""
        page, last = start // self.page_tokens, -(-stop // self.page_tokens)
        skip, count = start - page * self.page_tokens, stop - start
        if self.first is not None:
            pick = slice(self.first + page, self.first + last)
        else:
            pick = self.table[page:last]
        found = []
        for pages, scales in ((self.k_pages, self.k_scale), (self.v_pages, self.v_scale)):
            x = pages[pick].flatten(0, 1)[skip : skip + count]
            if scales is not None:
                x = dequantize_kv(x, scales[pick].flatten(0, 1)[skip : skip + count], self.dtype)
            found.append(x.transpose(0, 1))
        return found[0], found[1]

    def stretches(self, start: int, stop: int, limit: int | None):
        """Cut start..stop-1 at page borders into stretches of at most `limit` slots (None: one view)."""
        if limit is None:
            yield start, stop
            return
        limit = max(self.page_tokens, limit // self.page_tokens * self.page_tokens)
        while start < stop:
            cut = min(stop, (start // self.page_tokens) * self.page_tokens + limit)
            yield start, cut
            start = cut


@dispatch.register("paged_attention", "reference", priority=0, refusal=lambda call: "")
def paged_attention_blocked(
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
    rows: list[tuple[int, int, int, int]] | None = None,
) -> torch.Tensor:
    """The same function by PyTorch operators, without a dense copy of K or V and without T x S scores.

    Pages that follow each other are read as one view, others BLOCK_TOKENS at a time with an online softmax.
    On CPU the GQA group is folded into the query length (5.5 ms -> 0.44 ms against `enable_gqa` in bf16
    decode).

    Args:
        rows: what a caller that runs many layers on the same step computes once with `step_rows`.
    """
    _check(q, k_pages, v_pages, block_tables, q_starts, lengths, k_scale, v_scale)
    scale = q.shape[2] ** -0.5 if scale is None else scale
    heads, kv_heads = q.shape[1], k_pages.shape[2]
    if rows is None:
        rows = step_rows(block_tables, q_starts, lengths, k_pages.shape[1])
    plain = softcap is None and alibi_slopes is None and sinks is None and q.shape[2] == v_pages.shape[3]
    flash = plain and q.device.type == "cpu" and q.dtype in (torch.float32, torch.bfloat16, torch.float16)
    sinks = None if sinks is None else sinks.float().view(kv_heads, -1, 1)
    slopes = None if alibi_slopes is None else alibi_slopes.float()
    q = q.contiguous().view(q.shape[0], kv_heads, heads // kv_heads, q.shape[2])
    if flash and k_scale is None and all(e - s == 1 and size and at >= 0 for s, e, size, at in rows):
        # Decode on views alone. What is left of the Python counts at 30 layers.
        k_slots, v_slots = k_pages.flatten(0, 1), v_pages.flatten(0, 1)
        found, page_tokens = [], k_pages.shape[1]
        for start, stop, length, first in rows:
            high = first * page_tokens + length
            low = high - (length if window is None or window >= length else window)
            k, v = k_slots[low:high].transpose(0, 1)[None], v_slots[low:high].transpose(0, 1)[None]
            mine = q if len(rows) == 1 else q[start:stop]
            found.append(F.scaled_dot_product_attention(mine, k, v, scale=scale))
        if not found:
            return q.new_empty(0, heads, v_pages.shape[3])
        return (found[0] if len(found) == 1 else torch.cat(found)).flatten(1, 2)
    out = q.new_empty(q.shape[0], heads, v_pages.shape[3])
    for b, (start, stop, length, first) in enumerate(rows):
        n = stop - start
        if not n:
            continue
        if not length:
            out[start:stop] = 0
            continue
        row = _Row(k_pages, v_pages, block_tables[b], first, k_scale, v_scale, q.dtype)
        mine = q[start:stop]
        if flash and n == 1:
            low = 0 if window is None else max(0, length - window)
            limit = None if first >= 0 and k_scale is None else BLOCK_TOKENS
            if limit is None or length - low <= limit:
                k, v = row.read(low, length)
                got = F.scaled_dot_product_attention(mine, k[None], v[None], scale=scale)
            else:
                parts = [_flash(mine, *row.read(*s), scale) for s in row.stretches(low, length, limit)]
                got = _merge(parts)[0]
            out[start] = got.reshape(heads, -1)
        elif flash and window is None:
            out[start:stop] = _flash_prefill(mine, row, length, scale)
        else:
            out[start:stop] = _open_row(mine, row, length, scale, window, softcap, slopes, sinks)
    return out


def step_rows(block_tables, q_starts, lengths, page_tokens: int) -> list[tuple[int, int, int, int]]:
    """Per sequence: (first query, end of queries, slots, its first page if its pages follow each other or
    -1).
    """
    starts, sizes = q_starts.tolist(), lengths.tolist()
    table = block_tables.cpu()
    columns = torch.arange(table.shape[1])
    used = -(-lengths.cpu().long() // page_tokens)
    follows = (table == table[:, :1] + columns) | (columns >= used[:, None])
    first = torch.where(follows.all(1), table[:, 0], -1).tolist()
    return list(zip(starts[:-1], starts[1:], sizes, first, strict=True))


def _flash(q, k, v, scale, causal=False):
    """q [1, h, n, D] over k, v [h, S, D] by the CPU flash kernel: out [1, h, n, D], lse [1, h, n]."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k[None], v[None], 0.0, causal, attn_mask=None, scale=scale
    )


def _flash_prefill(q, row, length, scale):
    """q [n, G, R, D] at the last n slots: all earlier slots without a mask, the n new ones causally, joined
    by lse."""
    n, groups, ratio, size = q.shape
    past = length - n
    # Repeating K and V for the query heads touches the new tokens only: bounded by the chunk.
    k, v = row.read(past, length)
    k = k[:, None].expand(-1, ratio, -1, -1).flatten(0, 1)
    v = v[:, None].expand(-1, ratio, -1, -1).flatten(0, 1)
    parts = [_flash(q.flatten(1, 2).transpose(0, 1)[None], k, v, scale, causal=True)]
    if past:
        folded = q.permute(1, 2, 0, 3).reshape(1, groups, ratio * n, size)
        limit = None if row.first is not None and row.k_scale is None else BLOCK_TOKENS
        earlier = [_flash(folded, *row.read(*s), scale) for s in row.stretches(0, past, limit)]
        parts = [(o.reshape(1, -1, n, size), lse.reshape(1, -1, n)) for o, lse in earlier] + parts
    return _merge(parts)[0][0].transpose(0, 1)


def _open_row(q, row, length, scale, window, softcap, slopes, sinks):
    """q [n, G, R, D]: blocks small enough for their scores, with window, softcap, alibi and sinks."""
    n, groups, ratio, _ = q.shape
    first = length - n
    slots_q = torch.arange(first, length, device=q.device)
    low = 0 if window is None else max(0, first - window + 1)
    limit = min(BLOCK_TOKENS, max(1, SCORE_BYTES // (4 * groups * ratio * n)))
    q = q.permute(1, 2, 0, 3)  # [G, R, n, D]
    out = lse = None
    for start, stop in row.stretches(low, length, limit):
        k, v = row.read(start, stop)
        part, part_lse = _open_block(q, k, v, scale, softcap, slopes, slots_q, start, window)
        if out is None:
            out, lse = part, part_lse
        else:
            joint = torch.logaddexp(lse, part_lse)
            safe = torch.where(joint.isfinite(), joint, 0.0)
            out = out * torch.exp(lse - safe)[..., None] + part * torch.exp(part_lse - safe)[..., None]
            lse = joint
    if sinks is not None:  # the sink takes its share of the sum and adds no value
        out = out * torch.exp(lse - torch.logaddexp(lse, sinks))[..., None]
    return out.permute(2, 0, 1, 3).flatten(1, 2).to(q.dtype)


triton_support.register("paged_attention", "triton_paged:paged_attention")
