"""paged.py: a transformers Cache over pages. K1: reorder, crop, select and repeat reach everything stored."""

import copy
import gc
import threading

import pytest
import torch

from hfaccel.cache.paged import PagedCache
from hfaccel.cache.pool import LayerPages, PagePool
from hfaccel.errors import PatchError
from hfaccel.generate import mixin
from tiny import CACHE, ids, tiny


@pytest.fixture
def patched():
    def make(kv_bits=None, family="TL", **kwargs):
        model = tiny(family, attn="sdpa", **kwargs)
        mixin.install(model, kv_bits=kv_bits, page_tokens=4)
        return model, mixin.runner_of(model).pool

    return make


def new(model):
    return PagedCache(mixin.runner_of(model).pool, model.config.num_hidden_layers)


@torch.no_grad()
def logits(model, tokens, cache=None, **kwargs):
    return model(tokens, **{CACHE: cache}, use_cache=cache is not None, **kwargs).logits


def stored(cache):
    """Codes or values of every layer, and scales, in logical order: what reordering must not touch."""
    out = []
    for pages in cache.pool.layers.values():
        for row in cache.sequences:
            for x in pages.tensors():
                out.append(x[row.pages].flatten(0, 1)[: row.length].clone())
    return out


def test_equals_no_cache(patched):
    model, pool = patched()
    x = ids(2, 13, vocab=512)
    cache = new(model)
    got = torch.cat([logits(model, part, cache) for part in (x[:, :6], x[:, 6:7], x[:, 7:13])], dim=1)
    torch.testing.assert_close(got, logits(model, x), atol=1e-4, rtol=0)
    assert cache.get_seq_length() == 13 and cache.layers[3].get_seq_length() == 13
    assert cache.layers[0].keys.shape == (2, 2, 13, 8)
    del cache
    gc.collect()
    assert pool.used_pages == 0


@pytest.mark.parametrize("kv_bits", [None, 8])
def test_crop_equals_a_fresh_prefill(patched, kv_bits):
    model, _ = patched(kv_bits)
    x = ids(2, 30, vocab=512)
    cache, fresh = new(model), new(model)
    logits(model, x, cache)
    cache.crop(-19)
    assert cache.get_seq_length() == 11
    logits(model, x[:, :11], fresh)
    after = ids(2, 5, seed=3, vocab=512)
    # Prefills of 30 and of 11 tokens round fp32 products differently, and so may one code in many.
    torch.testing.assert_close(
        logits(model, after, cache),
        logits(model, after, fresh),
        atol=1e-4 if kv_bits is None else 5e-2,
        rtol=0,
    )
    assert cache.get_seq_length() == fresh.get_seq_length() == 16
    with pytest.raises(ValueError, match="0 or less"):
        cache.crop(3)
    with pytest.raises(PatchError, match="17 of 16"):
        cache.crop(-17)


@pytest.mark.parametrize("kv_bits", [None, 8])
def test_rows_follow_their_index(patched, kv_bits):
    model, pool = patched(kv_bits)
    x, after = ids(3, 10, vocab=512), ids(3, 1, seed=5, vocab=512)
    single = []
    for row in range(3):
        one = new(model)
        logits(model, x[row : row + 1], one)
        single.append(one)
    cache = new(model)
    logits(model, x, cache)
    cache.batch_repeat_interleave(3)
    assert len(cache.sequences) == 9 and pool.used_pages == 9 + 9  # the repeats share every page
    cache.batch_select_indices(torch.tensor([6, 0]))
    got = logits(model, after[:1].expand(2, -1), cache)
    for i, row in enumerate((2, 0)):
        want = logits(model, after[:1], copy.deepcopy(single[row]))
        torch.testing.assert_close(got[i : i + 1], want, atol=1e-4 if kv_bits is None else 5e-2, rtol=0)
    assert cache.get_seq_length() == 11
    with pytest.raises(PatchError, match="2 rows, the forward has 3"):
        logits(model, after, cache)


@pytest.mark.parametrize("kv_bits", [None, 8])
def test_fifty_reorders_leave_the_stored_values_bit_identical(patched, kv_bits):
    model, pool = patched(kv_bits)
    cache = new(model)
    logits(model, ids(2, 10, vocab=512), cache)
    before, used = stored(cache), pool.used_pages
    for _ in range(50):
        cache.reorder_cache(torch.tensor([1, 0]))
    assert all(torch.equal(a, b) for a, b in zip(before, stored(cache), strict=True))
    assert pool.used_pages == used
    cache.reorder_cache(torch.tensor([0, 0]))
    first, second = cache.sequences
    assert first.pages == second.pages and pool.used_pages == used // 2


@pytest.mark.parametrize("family", ["TL", "gemma2", "bloom"])
@pytest.mark.parametrize("padded", [False, True])
def test_beams_equal_plain_transformers(patched, family, padded):
    """The pass-through setting: pages in the model's dtype; 4 beams."""
    kwargs = dict(num_beams=4, max_new_tokens=10, do_sample=False, pad_token_id=0, num_return_sequences=2)
    x = ids(2, 9)
    mask = torch.ones_like(x)
    if padded:
        x[0, :4], mask[0, :4] = 0, 0
    plain = tiny(family, attn="eager")
    want = plain.generate(x, attention_mask=mask, **kwargs)
    model = tiny(family, attn="eager")
    mixin.install(model, page_tokens=4)
    got = model.generate(x, attention_mask=mask, **kwargs)
    assert torch.equal(got, want)
    assert mixin.runner_of(model).pool.used_pages == 0


def test_beams_over_int8_pages_read_their_own_past(patched):
    """With INT8 pages the beams score what greedy scoring of the same sequences over INT8 pages gives."""
    model, pool = patched(8)
    out = model.generate(
        ids(1, 9, vocab=512),
        num_beams=4,
        max_new_tokens=20,
        do_sample=False,
        num_return_sequences=4,
        return_dict_in_generate=True,
        output_scores=True,
        length_penalty=0.0,
        eos_token_id=None,
    )
    for row in range(4):
        sequence = out.sequences[row : row + 1]
        cache = new(model)
        steps = [logits(model, sequence[:, :9], cache)[:, -1]]
        for at in range(9, sequence.shape[1] - 1):
            steps.append(logits(model, sequence[:, at : at + 1], cache)[:, -1])
        logp = torch.log_softmax(torch.stack(steps, dim=1).float(), -1)
        total = logp[0, torch.arange(20), sequence[0, 9:]].sum()
        torch.testing.assert_close(total, out.sequences_scores[row], atol=2e-2, rtol=1e-3)
    del out, cache
    gc.collect()
    assert pool.used_pages == 0


def test_ragged_rollback_moves_rows_to_one_end(patched):
    """Per-row rollback: the slots freed behind become padding in front, and rows go on from their own last
    token."""
    model, _ = patched()
    x = ids(2, 12, vocab=512)
    cache = new(model)
    logits(model, x, cache)
    cache.rollback([0, 1], [2, 5])
    assert cache.pads == [0, 3] and cache.get_seq_length() == 10
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[1, :3] = 0
    after = ids(2, 1, seed=4, vocab=512)
    got = logits(model, after, cache, attention_mask=mask, position_ids=torch.tensor([[10], [7]]))
    for row, kept in ((0, 10), (1, 7)):
        want = logits(model, torch.cat([x[row : row + 1, :kept], after[row : row + 1]], dim=1))[:, -1:]
        torch.testing.assert_close(got[row : row + 1], want, atol=1e-4, rtol=0)


def test_a_copy_shares_pages_until_one_writes(patched):
    model, pool = patched()
    x = ids(1, 10, vocab=512)
    cache = new(model)
    logits(model, x, cache)
    used = pool.used_pages
    twin = copy.deepcopy(cache)
    assert pool.used_pages == used
    a, b = ids(1, 2, seed=1, vocab=512), ids(1, 2, seed=2, vocab=512)
    for tokens, one in ((a, cache), (b, twin)):
        want = logits(model, torch.cat([x, tokens], dim=1))[:, -2:]
        torch.testing.assert_close(logits(model, tokens, one), want, atol=1e-4, rtol=0)


def test_layers_leave_rows_to_the_cache(patched):
    model, _ = patched()
    cache = new(model)
    with pytest.raises(PatchError, match="call this on the cache"):
        cache.layers[0].crop(-1)
    assert cache.layers[0].keys is None and cache.get_max_length() == -1 and cache.is_croppable


def test_no_thread_moves_pages_while_they_are_written(monkeypatch):
    pool = PagePool(page_tokens=4)
    cache, write = PagedCache(pool, 1), LayerPages.write

    def watched(pages, *args):
        grow = threading.Thread(target=pool.reserve, args=(1000,))
        grow.start()
        grow.join(0.2)
        assert grow.is_alive()
        write(pages, *args)

    monkeypatch.setattr(LayerPages, "write", watched)
    k = torch.randn(1, 2, 3, 8)
    cache.update(k, k, 0)
    assert torch.equal(cache.dense(0)[0], k)


@pytest.mark.parametrize("family", ["TL", "bloom"])
def test_a_dropped_cache_gives_its_pages_back(family):
    """Also where the attention of the model never asks for what was put down for it."""
    model = tiny(family)
    mixin.install(model, page_tokens=4)
    pool = mixin.runner_of(model).pool
    out = model.generate(
        ids(1, 6), num_beams=2, max_new_tokens=4, do_sample=False, return_dict_in_generate=True
    )
    assert pool.used_pages > 0
    del out
    gc.collect()
    assert pool.used_pages == 0
    cache = new(model)
    with torch.no_grad():
        model(ids(1, 6), **{CACHE: cache}, use_cache=True)
    del cache
    gc.collect()
    assert pool.used_pages == 0
