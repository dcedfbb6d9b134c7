"""mixin.py and loop.py: `generate` of a patched model against plain transformers, option by option."""

import copy
import gc
import pickle

import pytest
import torch
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from hfaccel.errors import PatchError
from hfaccel.generate import mixin
from tiny import CACHE, ids, tiny

PACKED = [
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi", "phi3", "gpt2", "opt", "gpt_neox",
    "starcoder2", "mixtral", "qwen3_moe", "gpt_oss",
]  # fmt: skip
ROW_BY_ROW = ["bloom", "falcon", "falcon_mq", "falcon_alibi"]
NEW = 12
GREEDY = dict(max_new_tokens=NEW, do_sample=False, pad_token_id=0)


@pytest.fixture(autouse=True)
def _modules_only(monkeypatch):
    monkeypatch.setenv("HFACCEL_STRICT", "1")
    monkeypatch.setenv("HFACCEL_EXECUTOR", "modules")


def patched(family="TL", attn=None, kv_bits=None, **kwargs):
    model = tiny(family, attn=attn, **kwargs)
    mixin.install(model, kv_bits=kv_bits, page_tokens=4)
    return model


def solo(model, row):
    """The oracle: one row, no padding, no cache: [NEW] tokens, [NEW, vocab] logits and the margins of its
    choices."""
    tokens, found = row[None], []
    with torch.no_grad():
        for _ in range(NEW):
            found.append(model(tokens, use_cache=False).logits[0, -1])
            tokens = torch.cat([tokens, found[-1].argmax().view(1, 1)], dim=1)
    found = torch.stack(found)
    top = found.topk(2).values
    return tokens[0, -NEW:], found, top[:, 0] - top[:, 1]


@pytest.mark.parametrize("family", PACKED + ROW_BY_ROW)
def test_every_row_of_a_padded_batch_equals_its_solo_run(family):
    """K3: prompts of 1, 7 and 30 tokens, padded on the left and on the right; windows of 8 are crossed."""
    lengths = (1, 7, 30)
    rows = [ids(1, n, seed=n)[0] for n in lengths]
    plain = tiny(family)
    want = [solo(plain, row) for row in rows]
    model = patched(family)
    for side in ("left", "right"):
        batch, mask = torch.zeros(3, 30, dtype=torch.long), torch.zeros(3, 30, dtype=torch.long)
        for i, row in enumerate(rows):
            at = slice(30 - len(row), 30) if side == "left" else slice(0, len(row))
            batch[i, at], mask[i, at] = row, 1
        out = model.generate(
            batch, attention_mask=mask, **GREEDY, return_dict_in_generate=True, output_logits=True
        )
        assert out.sequences.shape == (3, 30 + NEW)
        for i, (tokens, logits, margins) in enumerate(want):
            got = torch.stack(out.logits)[:, i]
            same = int((out.sequences[i, 30:] == tokens).long().cumprod(0).sum())
            assert same == NEW or margins[same] < 1e-3, f"{family}, {side}, row {i} leaves at token {same}"
            torch.testing.assert_close(got[: same + 1], logits[: same + 1][:NEW], atol=1e-4, rtol=0)
    told = mixin.explain(model)
    assert told["executor"] == "modules" and told["calls"] == {"modules": 2} and not told["fallbacks"]
    assert told["mode"] == ("packed" if family in PACKED else "dense")
    del out
    gc.collect()
    assert mixin.runner_of(model).pool.used_pages == 0


@pytest.mark.parametrize("family", ["TL", "gpt_oss"])
def test_neighbours_do_not_change_a_row(family):
    model = patched(family)
    x = ids(4, 20)
    details = dict(GREEDY, return_dict_in_generate=True, output_logits=True)
    alone = model.generate(x[:1], **details)
    crowd = model.generate(x, **details)
    got, want = torch.stack(crowd.logits)[:, :1], torch.stack(alone.logits)
    # fp32 products of 1 and of 4 rows are blocked differently: 1e-5 of the largest logit
    torch.testing.assert_close(got, want, atol=1e-5 * float(want.abs().max()), rtol=0)


def test_int8_pages_stay_close_and_rows_independent():
    model, plain = patched(kv_bits=8), tiny("TL")
    x = ids(2, 20, vocab=512)
    details = dict(max_new_tokens=1, do_sample=False, return_dict_in_generate=True, output_logits=True)
    got, want = (torch.stack(m.generate(x, **details).logits) for m in (model, plain))
    assert 0 < (got - want).abs().max() < 0.15 * want.std()
    alone = torch.stack(model.generate(x[1:], **details).logits)
    torch.testing.assert_close(got[:, 1:], alone, atol=5e-2, rtol=0)  # a code may round the other way
    assert mixin.explain(model)["kv_bits"] == 8


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_ropes_that_look_at_the_whole_input_run_row_by_row(rope):
    """A long neighbour (beyond the original 16 positions) must not change a short row."""
    parameters = {"rope_type": rope, "rope_theta": 1e4, "factor": 4.0}
    if rope == "longrope":
        factors = [1.0, 2.0, 3.0, 4.0]
        parameters |= dict(
            short_factor=factors, long_factor=factors[::-1], original_max_position_embeddings=16
        )
    kwargs = dict(rope_parameters=parameters, max_position_embeddings=16 if rope == "dynamic" else 64)
    model = patched("TL", **kwargs)
    lengths = (30, 2)
    batch, mask = torch.zeros(2, 30, dtype=torch.long), torch.zeros(2, 30, dtype=torch.long)
    for i, n in enumerate(lengths):
        batch[i, 30 - n :], mask[i, 30 - n :] = ids(1, n, seed=n)[0], 1
    if rope == "longrope":  # crossing the border is transformers' own business
        mask[1, 10:], batch[1, 10:] = 1, ids(1, 20, seed=9)[0]
    got = model.generate(batch, attention_mask=mask, **GREEDY)[:, 30:]
    for i in range(2):
        plain = tiny("TL", **kwargs)
        want = plain.generate(batch[i : i + 1, mask[i].bool()], **GREEDY)[0, -NEW:]
        assert torch.equal(got[i], want)
    assert mixin.explain(model)["mode"] == "rows"


class Ban(LogitsProcessor):
    """Bans token (length mod vocab) and remembers the lengths it saw."""

    def __init__(self):
        self.lengths = []

    def __call__(self, input_ids, scores):
        self.lengths.append(input_ids.shape[1])
        scores = scores.clone()
        scores[:, input_ids.shape[1] % scores.shape[1]] = float("-inf")
        return scores


class AtLength(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return torch.tensor([len(row) >= 16 and i == 0 or len(row) >= 20 for i, row in enumerate(input_ids)])


OPTIONS = {
    "greedy": dict(do_sample=False),
    "min and eos": dict(do_sample=False, eos_token_id=[7, 9, 11, 30], min_new_tokens=3),
    "penalties": dict(do_sample=False, repetition_penalty=1.3, no_repeat_ngram_size=2, bad_words_ids=[[5]]),
    "sampling": dict(do_sample=True, temperature=0.8, top_k=20, top_p=0.9),
    "sampling, typical, min_p": dict(do_sample=True, typical_p=0.9, min_p=0.02, top_k=0),
    "several": dict(do_sample=True, num_return_sequences=3, top_k=0),
    "beams": dict(do_sample=False, num_beams=3, num_return_sequences=2, early_stopping=True),
    "beam sampling": dict(do_sample=True, num_beams=2, top_k=10),
    "guidance": dict(do_sample=False, guidance_scale=1.5),
    "forced": dict(do_sample=False, forced_eos_token_id=3, suppress_tokens=[1, 2, 4]),
    "chunks": dict(do_sample=False, prefill_chunk_size=5),
}  # fmt: skip


@pytest.mark.parametrize("option", OPTIONS)
def test_options_equal_plain_transformers(option):
    """Ids, scores and logits of a patched and an unpatched twin, from the same seed, on a left-padded
    batch."""
    plain, model = tiny("TL", attn="sdpa"), patched("TL", attn="sdpa")
    x = ids(2, 12, vocab=512)
    mask = torch.ones_like(x)
    x[0, :5], mask[0, :5] = 0, 0
    kwargs = dict(attention_mask=mask, max_new_tokens=14, pad_token_id=0, **OPTIONS[option])
    details = dict(return_dict_in_generate=True, output_scores=True, output_logits=True)
    outs = []
    for one in (plain, model):
        ban = Ban()
        torch.manual_seed(5)
        tokens = one.generate(x, logits_processor=LogitsProcessorList([ban]), **kwargs)
        torch.manual_seed(5)
        outs.append((tokens, one.generate(x, **kwargs, **details), ban.lengths))
    (a, want, seen_a), (b, got, seen_b) = outs
    assert torch.equal(a, b) and seen_a == seen_b
    assert torch.equal(want.sequences, got.sequences) and type(want) is type(got)
    for name in ("scores", "logits"):
        torch.testing.assert_close(torch.stack(got[name]), torch.stack(want[name]), atol=1e-4, rtol=1e-4)
    assert got[CACHE].get_seq_length() == want[CACHE].get_seq_length()
    served = mixin.explain(model)
    assert served["fallbacks"] == ({"beam search": 2} if "beam" in option else {})


def test_sampling_repeats_with_a_seed_and_follows_the_distribution():
    """Chi-square of 4,000 first tokens against transformers' probabilities: 7 cells, p = 0.001 at 24.3."""
    plain, model = tiny("TL"), patched("TL")
    x = ids(1, 6, vocab=512)
    with torch.no_grad():
        logits = plain(x).logits[0, -1]
    top = logits.topk(8)
    probs = torch.softmax(top.values / 2.0, -1)
    counts = torch.zeros(8)
    kwargs = dict(do_sample=True, top_k=8, temperature=2.0, max_new_tokens=1, num_return_sequences=1000)
    torch.manual_seed(0)
    for _ in range(4):
        drawn = model.generate(x, **kwargs)[:, -1]
        counts += (drawn[:, None] == top.indices).sum(0)
    assert counts.sum() == 4000
    chi = float(((counts - 4000 * probs) ** 2 / (4000 * probs)).sum())
    print(f"chi-square {chi:.1f} with 7 degrees of freedom")
    assert chi < 24.3
    torch.manual_seed(3)
    first = model.generate(x, do_sample=True, max_new_tokens=8)
    torch.manual_seed(3)
    assert torch.equal(first, model.generate(x, do_sample=True, max_new_tokens=8))


class Collect(BaseStreamer):
    def __init__(self, fail_at=None, error=RuntimeError):
        self.seen, self.ended, self.fail_at, self.error = [], False, fail_at, error

    def put(self, value):
        self.seen.append(value.clone())
        if self.fail_at is not None and len(self.seen) == self.fail_at:
            raise self.error("streamer")

    def end(self):
        self.ended = True


def test_streamer_stopping_and_max_time():
    plain, model = tiny("TL"), patched("TL")
    x = ids(1, 10, vocab=512)
    got = Collect()
    out = model.generate(x, streamer=got, **GREEDY)
    assert torch.equal(torch.cat([got.seen[0][0], *got.seen[1:]]), out[0]) and got.ended
    x = ids(2, 10, vocab=512)
    criteria = StoppingCriteriaList([AtLength()])
    kwargs = dict(
        stopping_criteria=criteria, do_sample=False, max_new_tokens=30, pad_token_id=0, eos_token_id=2
    )
    assert torch.equal(model.generate(x, **kwargs), plain.generate(x, **kwargs))
    assert model.generate(x, max_time=0.0, do_sample=False, max_new_tokens=30).shape[1] == 11


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_pages_come_back_after_an_exception(error):
    model = patched("TL")
    pool = mixin.runner_of(model).pool
    with pytest.raises(error, match="streamer"):
        model.generate(ids(1, 10, vocab=512), streamer=Collect(4, error), **GREEDY)
    assert pool.used_pages == 0 and pool.capacity == 0
    ban = Ban()
    ban.lengths = None  # append fails inside the loop
    for mode in (dict(num_beams=2), dict(do_sample=True, num_return_sequences=2)):
        with pytest.raises(AttributeError):
            model.generate(ids(2, 10, vocab=512), max_new_tokens=5, logits_processor=[ban], **mode)
        gc.collect()
        assert pool.used_pages == 0
    assert model.generate(ids(1, 10, vocab=512), **GREEDY).shape == (1, 10 + NEW)


def test_a_returned_cache_goes_on():
    """Continue from `out.cache` with the full ids, as scripts do: equal to one longer call; left padding
    kept."""
    plain, model = tiny("TL", attn="sdpa"), patched("TL", attn="sdpa")
    x = ids(2, 10, vocab=512)
    mask = torch.ones_like(x)
    x[0, :3], mask[0, :3] = 0, 0
    whole = plain.generate(x, attention_mask=mask, **(GREEDY | dict(max_new_tokens=10)))
    kwargs = GREEDY | dict(max_new_tokens=5)
    first = model.generate(x, attention_mask=mask, return_dict_in_generate=True, **kwargs)
    mask = torch.cat([mask, torch.ones(2, 5, dtype=torch.long)], dim=1)
    with pytest.raises(PatchError, match="HFACCEL_STRICT=1.*a cache passed by the caller"):
        model.generate(first.sequences, **{CACHE: copy.deepcopy(first[CACHE])}, attention_mask=mask, **kwargs)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("HFACCEL_STRICT")
        rest = model.generate(first.sequences, **{CACHE: first[CACHE]}, attention_mask=mask, **kwargs)
        assert torch.equal(rest, whole)
        theirs = DynamicCache(config=model.config)
        assert torch.equal(model.generate(x[1:], **{CACHE: theirs}, **kwargs), whole[1:, :15])
    del first
    gc.collect()
    assert mixin.runner_of(model).pool.used_pages == 0


def test_other_ways_go_to_transformers_loop_and_say_so(monkeypatch):
    monkeypatch.delenv("HFACCEL_STRICT")
    plain, model = tiny("TL"), patched("TL")
    x = ids(1, 10, vocab=512)
    embeds = model.get_input_embeddings()(x).detach()
    x_lookup = torch.cat([x, x, x[:, :4]], dim=1)
    ways = {
        "use_cache=False": (x, dict(use_cache=False)),
        "argument inputs_embeds": (None, dict(inputs_embeds=embeds)),
        "output_attentions or output_hidden_states": (
            x,
            dict(output_attentions=True, output_hidden_states=True, return_dict_in_generate=True),
        ),
        "assisted decoding": (x_lookup, dict(prompt_lookup_num_tokens=3)),
        "cache_implementation='static'": (x, dict(cache_implementation="static")),
    }
    for reason, (inputs, kwargs) in ways.items():
        want, got = (one.generate(inputs, **GREEDY, **kwargs) for one in (plain, model))
        if not isinstance(want, torch.Tensor):
            torch.testing.assert_close(got.attentions, want.attentions, atol=1e-5, rtol=1e-4)
            want, got = want.sequences, got.sequences
        assert torch.equal(want, got), reason
    draft = tiny("TL", seed=1)
    assert torch.equal(*(one.generate(x, assistant_model=draft, **GREEDY) for one in (plain, model)))
    fallbacks = mixin.explain(model)["fallbacks"]
    assert (
        fallbacks == dict.fromkeys(ways, 1) | {"assisted decoding": 2} and not mixin.explain(model)["calls"]
    )


def test_int8_pages_serve_assisted_decoding():
    model = patched("TL", kv_bits=8)
    x = ids(1, 10, vocab=512)
    out = model.generate(torch.cat([x, x], dim=1), prompt_lookup_num_tokens=3, **GREEDY)
    assert out.shape == (1, 20 + NEW) and mixin.runner_of(model).pool.used_pages == 0


def test_encoder_decoder_and_training_mode_fall_back(monkeypatch):
    monkeypatch.delenv("HFACCEL_STRICT")
    plain, model = tiny("t5"), tiny("t5")
    mixin.install(model)
    x = ids(2, 9)
    assert torch.equal(model.generate(x, max_new_tokens=5), plain.generate(x, max_new_tokens=5))
    assert mixin.explain(model)["fallbacks"] == {"encoder-decoder model": 1}
    model = patched("TL")
    model.train()
    model.generate(x, max_new_tokens=2)
    assert mixin.explain(model)["fallbacks"] == {"the model is in training mode": 1}


def test_install_touches_one_model_and_comes_off():
    plain = tiny("TL", attn="sdpa")
    model = tiny("TL", attn="sdpa")
    cls = type(model)
    x = ids(2, 8, vocab=512)
    with torch.no_grad():
        before = model(x).logits
        mixin.install(model)
        assert type(model).__name__ == cls.__name__ and isinstance(model, cls) and type(plain) is cls
        assert (model.config._attn_implementation, plain.config._attn_implementation) == ("hfa", "sdpa")
        assert torch.equal(model(x).logits, before)
        mixin.uninstall(model)
        assert type(model) is cls and model.config._attn_implementation == "sdpa"
        assert torch.equal(model(x).logits, before)
    mixin.uninstall(model)
    with pytest.raises(PatchError, match="not patched"):
        mixin.explain(model)


def test_training_gradients_are_those_of_the_unpatched_model():
    grads = []
    for attn in ("sdpa", "eager"):
        plain, model = tiny("TL", attn=attn), patched("TL", attn=attn)
        x = ids(2, 8, vocab=512)
        mask = torch.ones_like(x)
        mask[0, :3] = 0
        for one in (plain, model):
            one(x, attention_mask=mask, labels=x).loss.backward()
            grads.append(one.model.layers[0].self_attn.k_proj.weight.grad)
        assert torch.equal(grads[-1], grads[-2])


@pytest.mark.parametrize("how", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_carry_settings_and_weights_not_pages(how):
    model = patched("TL", kv_bits=8)
    x = ids(1, 8, vocab=512)
    want = model.generate(x, **GREEDY)
    twin = how(model)
    assert mixin.explain(twin)["kv_bits"] == 8 and not mixin.explain(twin)["calls"]
    assert torch.equal(twin.generate(x, **GREEDY), want)
    with torch.no_grad():
        twin.lm_head.weight.zero_()
    assert torch.equal(model.generate(x, **GREEDY), want)
