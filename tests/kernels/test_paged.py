"""paged.py: the reference against dense attention, the blocked backend against the reference."""

import pytest
import torch

from hfaccel_kernels import paged
from hfaccel_kernels.pages import cache_write, dequantize_kv, quantize_kv

POOL_PAGES = 48


def dense(q, k, v, *, scale, window, softcap, sinks, slopes):
    """Attention of the last n of S tokens in float64, written without pages: the oracle of the
    specification."""
    n, heads, _ = q.shape
    length, kv_heads, _ = k.shape
    out = torch.zeros(n, heads, v.shape[2], dtype=torch.float64)
    for i in range(n):
        p = length - n + i
        low = 0 if window is None else max(0, p - window + 1)
        for h in range(heads):
            g = h // (heads // kv_heads)
            x = (k[low : p + 1, g].double() @ q[i, h].double()) * scale
            if softcap is not None:
                x = softcap * torch.tanh(x / softcap)
            if slopes is not None:
                x = x + slopes[h].double() * (torch.arange(low, p + 1) - p)
            weights = x.exp()
            total = weights.sum() + (sinks[h].double().exp() if sinks is not None else 0)
            out[i, h] = (weights / total) @ v[low : p + 1, g].double()
    return out


def scene(
    heads,
    kv_heads,
    size,
    page_tokens,
    queries,
    lengths,
    *,
    dtype=torch.float32,
    int8=False,
    v_size=None,
    seed=0,
):
    """A pool poisoned with NaN, and sequences on shuffled pages (the second one on pages that follow each
    other)."""
    g = torch.Generator().manual_seed(seed)
    v_size = v_size or size
    k_pages = torch.full((POOL_PAGES, page_tokens, kv_heads, size), float("nan"), dtype=dtype)
    v_pages = torch.full((POOL_PAGES, page_tokens, kv_heads, v_size), float("nan"), dtype=dtype)
    k_scale = v_scale = None
    if int8:
        k_pages, v_pages = (
            torch.full(k_pages.shape, 127, dtype=torch.int8),
            torch.full(v_pages.shape, 127, dtype=torch.int8),
        )
        k_scale = torch.full(k_pages.shape[:3], float("nan"))
        v_scale = torch.full(v_pages.shape[:3], float("nan"))
    blocks = [-(-length // page_tokens) for length in lengths]
    tables = torch.full((len(lengths), max([*blocks, 1])), -1, dtype=torch.int32)
    free = torch.randperm(POOL_PAGES, generator=g).tolist()
    if len(lengths) > 1 and blocks[1]:
        tables[1, : blocks[1]] = torch.arange(3, 3 + blocks[1])
        free = [p for p in free if not 3 <= p < 3 + blocks[1]]
    kept = []
    for b, length in enumerate(lengths):
        if b != 1:
            tables[b, : blocks[b]] = torch.tensor([free.pop() for _ in range(blocks[b])], dtype=torch.int32)
        k, v = (
            torch.randn(length, kv_heads, size, generator=g),
            torch.randn(length, kv_heads, v_size, generator=g),
        )
        k, v = k.to(dtype), v.to(dtype)
        slot = torch.arange(length)
        slots = tables[b].long()[slot // page_tokens] * page_tokens + slot % page_tokens
        cache_write(k, v, k_pages, v_pages, slots, k_scale, v_scale)
        if int8:
            k, v = (dequantize_kv(*quantize_kv(x)) for x in (k, v))
        kept.append((k, v))
    q = torch.randn(sum(queries), heads, size, generator=g).to(dtype)
    starts = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32)
    pool = {"k_pages": k_pages, "v_pages": v_pages, "k_scale": k_scale, "v_scale": v_scale}
    return q, kept, pool, tables, starts, torch.tensor(lengths, dtype=torch.int32)


CASES = {
    "decode": dict(queries=[1, 1, 1], lengths=[1, 37, 16]),
    "decode on views": dict(queries=[1, 1], lengths=[3, 37]),
    "prefill": dict(queries=[5, 33, 1], lengths=[5, 33, 1]),
    "mixed, chunked": dict(queries=[1, 7, 4, 0], lengths=[20, 40, 4, 9]),
    "one token": dict(queries=[1], lengths=[1]),
}
EXTRAS = {
    "plain": {},
    "window": dict(window=6),
    "window of one": dict(window=1),
    "softcap": dict(softcap=2.0),
    "sinks": dict(sinks=True),
    "alibi": dict(slopes=True),
    "all": dict(window=9, softcap=3.0, sinks=True, slopes=True, scale=0.3),
}


@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("heads, kv_heads, size", [(4, 4, 16), (6, 2, 24), (8, 1, 64)])
def test_equal_to_dense_attention(monkeypatch, case, extra, heads, kv_heads, size):
    monkeypatch.setattr(paged, "BLOCK_TOKENS", 8)  # several blocks and merges in a short context
    q, kept, pool, tables, starts, lengths = scene(heads, kv_heads, size, 4, **CASES[case])
    options = dict(EXTRAS[extra])
    g = torch.Generator().manual_seed(7)
    sinks = torch.randn(heads, generator=g) if options.pop("sinks", False) else None
    slopes = torch.rand(heads, generator=g) if options.pop("slopes", False) else None
    kwargs = dict(window=None, softcap=None, scale=size**-0.5) | options
    want = torch.cat(
        [
            dense(q[starts[b] : starts[b + 1]], k, v, sinks=sinks, slopes=slopes, **kwargs)
            for b, (k, v) in enumerate(kept)
        ]
    )
    for fn in (paged.paged_attention_reference, paged.paged_attention_blocked):
        got = fn(
            q,
            block_tables=tables,
            q_starts=starts,
            lengths=lengths,
            sinks=sinks,
            alibi_slopes=slopes,
            **pool,
            **kwargs,
        )
        # fp32 sums of at most 40 terms against float64
        torch.testing.assert_close(got.double(), want, atol=2e-6, rtol=1e-5, msg=f"{fn.__name__}")


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_blocked_equals_reference_on_every_page_format(monkeypatch, case, dtype, int8):
    monkeypatch.setattr(paged, "BLOCK_TOKENS", 8)
    q, _, pool, tables, starts, lengths = scene(6, 2, 32, 4, dtype=dtype, int8=int8, **CASES[case])
    args = dict(block_tables=tables, q_starts=starts, lengths=lengths, **pool)
    want = paged.paged_attention_reference(q, **args)
    got = paged.paged_attention_blocked(q, **args)
    assert got.dtype == q.dtype
    # bf16: blocks are rounded to 8 bits before and after the merge; values are below 4
    torch.testing.assert_close(
        got, want, **(dict(atol=2e-6, rtol=1e-5) if dtype is torch.float32 else dict(atol=3e-2, rtol=0))
    )


def test_value_head_size_of_its_own():
    q, kept, pool, tables, starts, lengths = scene(4, 2, 16, 4, [3, 1], [9, 30], v_size=8)
    got = paged.paged_attention_blocked(q, block_tables=tables, q_starts=starts, lengths=lengths, **pool)
    plain = dict(scale=0.25, window=None, softcap=None, sinks=None, slopes=None)
    want = torch.cat([dense(q[starts[b] : starts[b + 1]], k, v, **plain) for b, (k, v) in enumerate(kept)])
    torch.testing.assert_close(got.double(), want, atol=2e-6, rtol=1e-5)


def test_decode_gathers_no_more_than_a_block():
    """The largest tensor made while 8 rows decode at 4,096 slots on scattered pages holds one block, not the
    context."""
    page_tokens, slots = 16, 4096
    pages = slots // page_tokens
    k_pages = torch.randn(pages, page_tokens, 1, 8)
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(0)).to(torch.int32)
    tables = order.expand(8, -1).contiguous()
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            known = {k_pages.untyped_storage().data_ptr()}
            for x in result if isinstance(result, tuple | list) else [result]:
                if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in known:
                    largest = max(largest, x.numel())
            return result

    args = dict(
        q=torch.randn(8, 2, 8),
        k_pages=k_pages,
        v_pages=k_pages,
        block_tables=tables,
        q_starts=torch.arange(9, dtype=torch.int32),
        lengths=torch.full((8,), slots, dtype=torch.int32),
    )
    rows = paged.step_rows(args["block_tables"], args["q_starts"], args["lengths"], page_tokens)
    with Watch():
        paged.paged_attention_blocked(**args, rows=rows)
    assert largest <= paged.BLOCK_TOKENS * 8


def test_empty_inputs():
    q, _, pool, tables, starts, lengths = scene(4, 2, 16, 4, [0, 0], [0, 7])
    for fn in (paged.paged_attention_reference, paged.paged_attention_blocked):
        assert fn(q, block_tables=tables, q_starts=starts, lengths=lengths, **pool).shape == (0, 4, 16)


@pytest.mark.parametrize("fn", [paged.paged_attention_reference, paged.paged_attention_blocked])
def test_contradictions_are_refused(fn):
    q, _, pool, tables, starts, lengths = scene(4, 2, 16, 4, [1, 1], [3, 7])
    args = dict(block_tables=tables, q_starts=starts, lengths=lengths, **pool)
    with pytest.raises(ValueError, match="5 query heads"):
        fn(torch.randn(2, 5, 16), **args)
    with pytest.raises(ValueError, match="head size 8"):
        fn(torch.randn(2, 4, 8), **args)
    for few in (pool["v_pages"][:1], pool["v_pages"][:, :, :1]):
        with pytest.raises(ValueError, match="of V, .* are not those of K"):
            fn(q, **{**args, "v_pages": few})
    with pytest.raises(ValueError, match="sequences"):
        fn(q, **{**args, "lengths": lengths[:1]})
    with pytest.raises(ValueError, match="int8 pages"):
        fn(q, **{**args, "k_scale": torch.ones(POOL_PAGES, 4, 2)})
