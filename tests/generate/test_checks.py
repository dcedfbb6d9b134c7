"""checks.py: what has no answer is refused before any forward, in every way of generating."""

import gc
import warnings

import pytest
import torch
from transformers import DynamicCache

from hfaccel.errors import PatchError
from hfaccel.generate import checks, mixin
from tiny import CACHE, ids, tiny

TOKENS, VOCAB, TABLE = 6, 512, 32
MODES = {
    "greedy": dict(do_sample=False),
    "sampling": dict(do_sample=True),
    "beams": dict(do_sample=False, num_beams=2),
    "assistant": dict(do_sample=False),
    "lookup": dict(do_sample=False, prompt_lookup_num_tokens=2),
}
X = ids(1, TOKENS, vocab=VOCAB)
AT = torch.arange(TOKENS)[None]


@pytest.fixture(scope="module")
def models():
    """A rotary and a learned-position model, each with a draft, none of which may run."""
    found = {}
    for name, size in (("TL", {}), ("TG", {"max_position_embeddings": TABLE})):
        model, draft = tiny(name, **size), tiny(name, seed=1, **size)
        mixin.install(model, page_tokens=4)
        found[name] = model, draft
    return found


@pytest.fixture(autouse=True)
def _modules_only(monkeypatch):
    monkeypatch.setenv("HFACCEL_EXECUTOR", "modules")


def refused(model, draft, match, modes=MODES, **kwargs):
    ran = []
    hooks = [one.register_forward_pre_hook(lambda *_: ran.append(1)) for one in (model, draft)]
    try:
        for name in modes:
            mode = MODES[name] | ({"assistant_model": draft} if name == "assistant" else {})
            with pytest.raises(PatchError, match=match):
                model.generate(**{"max_new_tokens": 3, "pad_token_id": 0} | mode | kwargs)
            assert not ran, name
    finally:
        for hook in hooks:
            hook.remove()
    assert mixin.runner_of(model).pool.used_pages == 0


def filled(model, rows, tokens):
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids(rows, tokens, vocab=VOCAB), **{CACHE: cache}, use_cache=True)
    return cache


BAD_IDS = {
    "int64 or int32 token ids, not torch.float32": X.float(),
    "int64 or int32 token ids, not torch.bool": X.bool(),
    r"\[batch, tokens\], not shape \[6\]": X[0],
    r"not shape \[1, 1, 6\]": X[None],
    "input_ids must be a tensor .* not a list": X.tolist(),
    "at least one token": X[:, :0],
    "at least one prompt": X[:0],
    "token id 512 is not in the model's vocabulary of 512": torch.full((1, 3), VOCAB),
    "token id -1": torch.full((1, 3), -1),
}
BAD_MASKS = {
    r"\[batch, tokens\], not of shape \[6\]": torch.ones(6),
    r"not of shape \[1, 1, 6\]": torch.ones(1, 1, 6),
    r"attention_mask is \[1, 7\], the input is \[1, 6\]": torch.ones(1, 7),
    r"attention_mask is \[1, 5\]": torch.ones(1, 5),
    r"attention_mask is \[2, 6\]": torch.ones(2, 6),
    "row 0 has no token": torch.zeros(1, 6),
    "must hold 0 and 1 alone": torch.tensor([[-1e9, 0, 0, 0, 0, 0]]),
    "attention_mask must be a tensor": [[1] * 6],
}
BAD_POSITIONS = {
    r"position_ids are \[1, 7\], the input is \[1, 6\]": torch.arange(7)[None],
    r"position_ids are \[1, 5\]": torch.arange(5)[None],
    r"not of shape \[6\]": torch.arange(6),
    r"position_ids are \[3, 6\]": AT.repeat(3, 1),
    "must be integers, not torch.float32": AT.float(),
}


@pytest.mark.parametrize("match", BAD_IDS)
def test_ids(models, match):
    for model, draft in models.values():
        refused(model, draft, match, input_ids=BAD_IDS[match])


@pytest.mark.parametrize("match", [*BAD_MASKS, *BAD_POSITIONS])
@pytest.mark.parametrize("given", ["input_ids", "inputs_embeds"])
def test_masks_and_positions(models, match, given):
    for model, draft in models.values():
        inputs = {given: X if given == "input_ids" else model.get_input_embeddings()(X).detach()}
        if match in BAD_MASKS:
            inputs["attention_mask"] = BAD_MASKS[match]
        else:
            inputs["position_ids"] = BAD_POSITIONS[match]
        refused(model, draft, match, **inputs)


def test_embeddings(models):
    for model, draft in models.values():
        e = model.get_input_embeddings()(X).detach()
        for match, bad in {
            r"\[batch, tokens, width\], not of shape \[6, 64\]": e[0],
            "width 64, not torch.float32 of 63": e[..., :-1],
            "width 64, not torch.int64": e.long(),
            "not finite": e * float("nan"),
            r"at least one token, not \[1, 0, 64\]": e[:, :0],
            r"at least one prompt": e[:0],
        }.items():
            refused(model, draft, match, inputs_embeds=bad)
        refused(model, draft, "input_ids are .*they must agree", inputs_embeds=e, input_ids=X[:, :4])
        refused(model, draft, "it cannot read inputs_embeds", ["assistant"], inputs_embeds=e)
        refused(model, draft, "not go with inputs_embeds", inputs_embeds=e, prefill_chunk_size=2)


def test_learned_positions(models):
    model, draft = models["TG"]
    for name in ("input_ids", "inputs_embeds"):
        inputs = {name: X if name == "input_ids" else model.get_input_embeddings()(X).detach()}
        refused(model, draft, "position_ids hold -3: .* starts at 0", position_ids=AT - 3, **inputs)
        refused(model, draft, "position 35 lies beyond .* 32 learned", position_ids=AT + 30, **inputs)
    refused(model, draft, "the prompt has 33 tokens, .* learned positions 32", input_ids=ids(1, 33))
    refused(model, draft, "28 new tokens behind position 5 lie beyond", input_ids=X, max_new_tokens=28)
    refused(
        model,
        draft,
        "8 new tokens behind position 25 lie",
        input_ids=X,
        position_ids=AT + 20,
        max_new_tokens=8,
    )
    model.generate(X, max_new_tokens=27)  # the last one is not fed
    masked = torch.cat([torch.zeros(1, 10, dtype=torch.long), ids(1, 30)], dim=1)
    assert model.generate(masked, attention_mask=(masked > 0).long(), max_new_tokens=2).shape == (1, 42)
    rotary, _ = models["TL"]
    plain = tiny("TL")
    want = plain.generate(X, position_ids=AT - 3, max_new_tokens=8, do_sample=False)
    assert torch.equal(rotary.generate(X, position_ids=AT - 3, max_new_tokens=8, do_sample=False), want)


@pytest.mark.parametrize("mode", MODES)
def test_generation_that_may_end_in_time_is_stopped_at_the_table(models, mode):
    """An end token may come first: what is fed never passes the table, in whichever loop."""
    model, draft = models["TG"]
    mode = MODES[mode] | ({"assistant_model": draft} if mode == "assistant" else {})
    never = int(torch.arange(VOCAB)[-1])
    kwargs = dict(eos_token_id=never, bad_words_ids=[[never]], pad_token_id=0, **mode)
    with pytest.raises(PatchError, match="beyond the model's table of 32 learned positions"):
        model.generate(X, max_new_tokens=40, **kwargs)
    gc.collect()
    assert mixin.runner_of(model).pool.used_pages == 0
    assert model.generate(X, max_new_tokens=27, **kwargs).shape == (1, 33)


def test_caches(models):
    for name, (model, draft) in models.items():
        refused(model, draft, "holds 3 rows, the call has", input_ids=X, **{CACHE: filled(model, 3, 3)})
        one = [m for m in MODES if m != "beams"]
        for tokens in (6, 9):
            match = f"the cache holds {tokens} tokens, the input 6"
            refused(model, draft, match, one, input_ids=X, **{CACHE: filled(model, 1, tokens)})
        cache = filled(model, 1, 3)
        refused(model, draft, "use_cache=False", input_ids=X, use_cache=False, **{CACHE: cache})
        if name == "TL":
            other = filled(tiny("TL", num_hidden_layers=2), 1, 3)
            refused(model, draft, "the cache has 2 layers, the model 4", input_ids=X, **{CACHE: other})
            other = filled(tiny("TL", head_dim=16), 1, 3)
            match = "2 KV heads of 16, the model has 2 of 8"
            refused(model, draft, match, input_ids=X, **{CACHE: other})
            ours = tiny("TL", num_hidden_layers=2)
            mixin.install(ours)
            ours = ours.generate(X[:, :3], max_new_tokens=2, return_dict_in_generate=True)[CACHE]
            refused(model, draft, "the cache has 2 layers", input_ids=X, **{CACHE: ours})
        plain = tiny(name, **({"max_position_embeddings": TABLE} if name == "TG" else {}))
        want = plain.generate(X, max_new_tokens=3, do_sample=False, **{CACHE: filled(plain, 1, 3)})
        mine = model.generate(X, max_new_tokens=3, do_sample=False, **{CACHE: filled(model, 1, 3)})
        assert torch.equal(mine, want)


def test_arguments_that_contradict(models):
    model, draft = models["TL"]
    for chunk in (0, -1, 1.5, True):
        refused(model, draft, "prefill_chunk_size must be", input_ids=X, prefill_chunk_size=chunk)
    refused(model, draft, "a cache", input_ids=X, prefill_chunk_size=2, use_cache=False)
    both = dict(assistant_model=draft, prompt_lookup_num_tokens=2)
    refused(model, draft, "two ways to draft", ["greedy", "sampling", "beams"], input_ids=X, **both)
    for draws in (dict(assistant_model=draft), dict(prompt_lookup_num_tokens=2)):
        refused(model, draft, "do not go with num_beams", ["beams"], input_ids=X, **draws)
    refused(model, draft, "need a cache", ["assistant", "lookup"], input_ids=X, use_cache=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for kwargs in (dict(num_return_sequences=3), dict(max_new_tokens=0), dict(inputs=X)):
            with pytest.raises(ValueError):
                model.generate(**{"input_ids": X, "do_sample": False} | kwargs)


def test_holes_and_padding():
    rows = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [1, 1, 0, 0], [0, 1, 1, 0], [1, 0, 0, 1], [0, 1, 0, 1]])
    assert [checks.has_holes(row[None]) for row in rows] == [False] * 4 + [True] * 2
    assert checks.left_padding(rows[:2]) == [2, 0]
    assert all(checks.left_padding(row[None]) is None for row in rows[2:])
