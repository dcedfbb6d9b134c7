"""Masks and positions of the caller's own, against plain transformers in fp32; padded beams stay in pages."""

import copy
import gc
import inspect
import sys

import pytest
import torch

from hfaccel.cache.paged import PagedCache
from hfaccel.generate import mixin
from tiny import CACHE, ids, tiny

L, NEW = 20, 12
GREEDY = dict(do_sample=False, max_new_tokens=NEW, pad_token_id=0)
DETAILS = dict(return_dict_in_generate=True, output_logits=True)
HOLES = torch.ones(3, L, dtype=torch.long)
HOLES[0, 5:9] = HOLES[1, 0:3] = HOLES[1, 10] = 0
LEFT = torch.ones(3, L, dtype=torch.long)
LEFT[0, :6] = LEFT[2, :11] = 0
GAPS = torch.arange(L).repeat(3, 1)
GAPS[0, 7:] += 9
GAPS[1, 3:] += 1
GAPS[1, 12:] += 30
WINDOWED = {"mistral", "gemma2", "gemma3", "gpt_oss"}


@pytest.fixture(params=["modules", "auto"], autouse=True)
def executor(request, monkeypatch):
    monkeypatch.setenv("HFACCEL_EXECUTOR", request.param)
    return request.param


def twins(family, **kwargs):
    plain, model = tiny(family), tiny(family)
    mixin.install(model, page_tokens=4, **kwargs)
    return plain, model


def compare(plain, model, **kwargs):
    want, got = (one.generate(ids(3, L), **GREEDY, **DETAILS, **kwargs) for one in (plain, model))
    assert torch.equal(got.sequences, want.sequences)
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(want.logits), atol=3e-4, rtol=0)
    del got
    gc.collect()
    assert mixin.runner_of(model).pool.used_pages == 0


@pytest.mark.parametrize("family", ["TL", "mistral", "gemma2", "gemma3", "gpt_oss", "gpt2", "bloom"])
def test_holes_and_gaps_equal_transformers(family):
    """A sliding window of transformers' counts masked slots too: there its own loop serves."""
    plain, model = twins(family)
    compare(plain, model, attention_mask=HOLES)
    fallbacks = mixin.explain(model)["fallbacks"]
    counts = {"a mask with holes, which count in sliding windows": 1} if family in WINDOWED else {}
    assert fallbacks == counts
    if family != "bloom":
        for kwargs in (
            dict(position_ids=GAPS),
            dict(position_ids=GAPS[1:2]),
            dict(position_ids=GAPS.flip(1)),
            dict(position_ids=GAPS, attention_mask=LEFT),
        ):
            compare(plain, model, **kwargs)
    assert mixin.explain(model)["fallbacks"] == counts


@pytest.mark.parametrize("family", ["TL", "qwen2"])
def test_gaps_equal_a_forward_without_a_cache(family):
    """The oracle has neither a loop nor a cache. It needs its own mask: from gaps alone, without mask and
    cache, transformers concludes that documents were packed, and separates them."""
    plain, model = twins(family)
    out = model.generate(ids(3, L), position_ids=GAPS, **GREEDY)
    last = GAPS[:, -1:] + 1
    positions = torch.cat([GAPS, last + torch.arange(NEW)], dim=1)
    causal = torch.ones(L + NEW, L + NEW).tril().log()[None, None].expand(3, -1, -1, -1)
    with torch.no_grad():
        found = plain(out, attention_mask=causal, position_ids=positions, use_cache=False).logits
    assert torch.equal(found[:, L - 1 : -1].argmax(-1), out[:, L:])


@pytest.mark.parametrize("family", ["TL", "mistral", "gemma2", "gpt_oss", "gpt2"])
@pytest.mark.parametrize("chunk", [None, 4])
def test_padded_beams_never_gather(family, chunk, monkeypatch):
    """Left padding is in the cache, not in a mask: no dense keys and values, and transformers' sequences."""
    plain, model = twins(family)
    # Where models do not pass their kwargs to the cache (5.17), its first forward finds out who attends.
    spare = [] if "kwargs=" in inspect.getsource(sys.modules[type(plain).__module__]) else [1]
    dense = PagedCache.dense

    def gather(self, layer, dtype=None):
        length = self.layers[layer].seen
        assert spare and length <= (chunk or L), "gathered"
        return dense(self, layer, dtype)

    monkeypatch.setattr(PagedCache, "dense", gather)
    for beams in (dict(num_beams=3, num_return_sequences=2), dict(num_beams=2, do_sample=True, top_k=5)):
        outs = []
        for one in (plain, model):
            torch.manual_seed(0)
            kwargs = GREEDY | beams | dict(prefill_chunk_size=chunk)
            outs.append(one.generate(ids(3, L), attention_mask=LEFT, output_scores=True, **DETAILS, **kwargs))
        want, got = outs
        assert torch.equal(got.sequences, want.sequences)
        torch.testing.assert_close(got.sequences_scores, want.sequences_scores, atol=1e-4, rtol=0)
        torch.testing.assert_close(torch.stack(got.scores), torch.stack(want.scores), atol=1e-3, rtol=0)
    del got, outs
    gc.collect()
    assert mixin.runner_of(model).pool.used_pages == 0


@pytest.mark.parametrize("mask", [HOLES[:2], LEFT[1:].flip(1), LEFT[:2]])
def test_a_returned_cache_goes_on_under_the_longer_mask(mask):
    """As transformers' does, and as the whole text without a cache; what transformers makes of padding on
    the right is no oracle."""
    plain, model = twins("TL")
    longer = torch.cat([mask, torch.ones(2, NEW, dtype=torch.long)], dim=1)
    found = []
    for one in (plain, model):
        first = one.generate(ids(2, L), attention_mask=mask, return_dict_in_generate=True, **GREEDY)
        cache = {k: v for k, v in first.items() if k in ("cache", "past_key_values")}
        for kept in (cache, copy.deepcopy(cache), {}):
            out = one.generate(first.sequences, attention_mask=longer, **kept, **GREEDY, **DETAILS)
            found.append((out.sequences, torch.stack(out.logits)))
    right = not mask[:, -1].all()
    for sequences, logits in found[4:] if right else found[1:]:
        assert torch.equal(sequences, found[3 if right else 0][0])
        torch.testing.assert_close(logits, found[3 if right else 0][1], atol=3e-4, rtol=0)


def test_a_returned_cache_with_holes_is_cropped_and_reordered_as_transformers_does():
    plain, model = twins("TL")
    whole = torch.cat([HOLES[:2], torch.ones(2, NEW, dtype=torch.long)], dim=1)
    for change, rows in (
        (lambda c: c.crop(-NEW - 7), [0, 1]),  # into the holes
        (lambda c: c.reorder_cache(torch.tensor([1, 1])), [1, 1]),
        (lambda c: c.batch_repeat_interleave(2), [0, 0, 1, 1]),
        (lambda c: None, [0, 1]),
    ):
        dense = []
        for one in (plain, model):
            out = one.generate(ids(2, L), attention_mask=HOLES[:2], return_dict_in_generate=True, **GREEDY)
            cache = next(v for k, v in out.items() if k in ("cache", "past_key_values"))
            change(cache)
            length = cache.get_seq_length()
            mask = torch.cat([whole[rows, :length], torch.ones(len(rows), 1, dtype=torch.long)], dim=1)
            with torch.no_grad():  # appended behind what is left
                at = mask.sum(-1, keepdim=True) - 1
                one(ids(len(rows), 1), attention_mask=mask, position_ids=at, **{CACHE: cache})
            dense.append(cache.layers[1].keys)
        want, got = dense
        empty = (got == 0).all(dim=(1, 3))
        torch.testing.assert_close(got, want.masked_fill(empty[:, None, :, None], 0), atol=1e-4, rtol=0)
        assert empty.any() and not empty.all()


@pytest.mark.parametrize("family", ["TL", "mistral"])
def test_beams_with_other_masks_equal_transformers(family):
    plain, model = twins(family)
    right = LEFT.flip(1)
    for mask in (HOLES, right):
        want, got = (
            one.generate(ids(3, L), attention_mask=mask, num_beams=3, **GREEDY) for one in (plain, model)
        )
        assert torch.equal(got, want)


def test_beams_share_pages_and_a_neighbour_changes_nothing():
    """Four beams of one prompt hold little more than one row does; a padded row equals its solo run."""
    _, model = twins("TL")
    pool = mixin.runner_of(model).pool
    most = []
    reorder = PagedCache.reorder_cache

    def watch(self, beams):
        reorder(self, beams)
        most.append(pool.used_pages)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PagedCache, "reorder_cache", watch)
        long = ids(1, 64)
        model.generate(long, num_beams=4, **GREEDY)
    assert max(most) < 2 * (64 + NEW) / 4
    row = ids(1, 9, seed=4)
    batch = torch.cat([long, torch.cat([torch.zeros(1, 55, dtype=torch.long), row], dim=1)])
    mask = torch.ones_like(batch)
    mask[1, :55] = 0
    got = model.generate(batch, attention_mask=mask, num_beams=4, **GREEDY)
    assert torch.equal(got[1, 64:], model.generate(row, num_beams=4, **GREEDY)[0, 9:])


def test_a_cache_of_padded_beams_obeys_the_next_mask():
    """Returned to the caller, its padding is no longer taken for the mask."""
    plain, model = twins("TL")
    x = ids(2, L)
    caches = []
    for one in (plain, model):
        out = one.generate(x, attention_mask=LEFT[:2], num_beams=2, **GREEDY, **DETAILS)
        caches.append(next(v for k, v in out.items() if k in ("cache", "past_key_values")))
    length = caches[0].get_seq_length()
    assert caches[1].get_seq_length() == length
    mask = torch.ones(4, length + 1, dtype=torch.long)
    mask[:, :11] = 0
    name = "cache" if "cache" in out else "past_key_values"
    with torch.no_grad():
        want, got = (
            one(ids(4, 1), attention_mask=mask, **{name: cache}).logits
            for one, cache in zip((plain, model), caches, strict=True)
        )
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)
