"""The protocol against plain fp64 loops, the distance between models, and what is refused."""

import math

import pytest
import torch

from hfaccel import PatchError
from hfaccel.measure.perplexity import cut_windows, kl, perplexity, window_logits
from tiny import VOCAB, tiny

WINDOW = 33


@pytest.fixture(scope="module")
def model():
    return tiny("llama")


@pytest.fixture(scope="module")
def other():
    return tiny("llama", seed=1)


@pytest.fixture(scope="module")
def ids():
    return torch.randint(0, VOCAB, (5 * WINDOW + 7,), generator=torch.Generator().manual_seed(3))


def log_probs(model, window):
    with torch.no_grad():
        return model(input_ids=window[None]).logits[0].double().log_softmax(-1)


def oracle(model, ids, windows):
    """The definition, one token at a time."""
    losses = []
    for w in range(windows):
        window = ids[w * WINDOW : (w + 1) * WINDOW]
        log_p = log_probs(model, window)
        losses += [-log_p[t, window[t + 1]].item() for t in range(WINDOW - 1)]
    return sum(losses) / len(losses), len(losses)


@pytest.mark.oldest
@pytest.mark.parametrize("windows, batch", [(1, 1), (5, 1), (5, 3), (5, 8)])
def test_perplexity_is_the_definition(model, ids, windows, batch):
    nll, tokens = oracle(model, ids, windows)
    result = perplexity(model, None, ids, windows=windows, window_tokens=WINDOW, batch=batch)
    assert result.nll == pytest.approx(nll, rel=1e-6)  # fp32 softmax of some 30 terms
    assert result.perplexity == pytest.approx(math.exp(nll), rel=1e-5)
    assert (result.tokens, result.windows) == (tokens, windows)


def test_windows_are_cut_from_the_start_and_a_short_text_gives_fewer(ids):
    seen = []

    def uniform(batch):
        seen.append(batch)
        return torch.zeros(*batch.shape, VOCAB)

    result = perplexity(uniform, None, ids.tolist(), windows=40, window_tokens=WINDOW, batch=2)
    assert result.windows == 5 and result.tokens == 5 * (WINDOW - 1)
    assert torch.equal(torch.cat(seen), ids[: 5 * WINDOW].view(5, WINDOW))
    assert result.perplexity == pytest.approx(VOCAB, rel=1e-6)


def test_a_function_of_ids_is_a_model(model, ids):
    whole = perplexity(model, None, ids, windows=3, window_tokens=WINDOW)
    called = perplexity(lambda x: model(x).logits, None, ids, windows=3, window_tokens=WINDOW)
    assert called.nll == whole.nll


def test_text_is_tokenized_once_without_special_tokens():
    calls = []

    def tokenizer(text, *, add_special_tokens, verbose):
        calls.append((text, add_special_tokens))
        return {"input_ids": [ord(c) for c in text]}

    cut = cut_windows(tokenizer, "abcdefgh", windows=2, window_tokens=3)
    assert cut.tolist() == [[97, 98, 99], [100, 101, 102]]
    assert calls == [("abcdefgh", False)]


def test_the_model_is_measured_in_eval_mode_and_gets_its_modes_back(ids):
    model = tiny("gpt2")
    reference = perplexity(model, None, ids, windows=2, window_tokens=WINDOW)
    assert model.config.attn_pdrop > 0  # dropout would change the result
    model.train()
    model.transformer.h[1].eval()
    before = [m.training for m in model.modules()]
    assert perplexity(model, None, ids, windows=2, window_tokens=WINDOW).nll == reference.nll
    assert [m.training for m in model.modules()] == before
    with pytest.raises(IndexError):  # an id outside the vocabulary
        perplexity(model, None, ids + VOCAB, windows=2, window_tokens=WINDOW)
    assert [m.training for m in model.modules()] == before


def test_logits_that_overflow_or_are_nan_show(ids):
    def sure_and_wrong(batch):
        logits = torch.zeros(*batch.shape, VOCAB)
        logits.scatter_(-1, (batch.roll(-1, -1)[..., None] + 1) % VOCAB, 1e6)
        return logits

    assert perplexity(sure_and_wrong, None, ids, windows=1, window_tokens=WINDOW).perplexity == math.inf
    nan = perplexity(
        lambda x: torch.full((*x.shape, VOCAB), math.nan), None, ids, windows=1, window_tokens=WINDOW
    )
    assert math.isnan(nan.perplexity)


@pytest.mark.oldest
@pytest.mark.parametrize("batch", [1, 4])
def test_kl_is_the_definition(model, other, ids, batch):
    windows = 5
    total, same = 0.0, 0
    for w in range(windows):
        window = ids[w * WINDOW : (w + 1) * WINDOW]
        q, p = log_probs(model, window)[:-1], log_probs(other, window)[:-1]
        total += (p.exp() * (p - q)).sum().item()
        same += (p.argmax(-1) == q.argmax(-1)).sum().item()
    tokens = windows * (WINDOW - 1)
    result = kl(model, other, None, ids, windows=windows, window_tokens=WINDOW, batch=batch)
    assert result.kl == pytest.approx(total / tokens, rel=1e-5)
    assert result.top1_agreement == same / tokens
    assert 0 < result.top1_agreement < 1
    assert result.perplexity == pytest.approx(math.exp(oracle(model, ids, windows)[0]), rel=1e-5)
    assert result.reference_perplexity == pytest.approx(math.exp(oracle(other, ids, windows)[0]), rel=1e-5)
    assert (result.tokens, result.windows) == (tokens, windows)


def test_kl_to_itself_is_zero_and_has_a_direction(model, other, ids):
    own = kl(model, model, None, ids, windows=2, window_tokens=WINDOW)
    assert own.kl == 0.0 and own.top1_agreement == 1.0
    there = kl(model, other, None, ids, windows=2, window_tokens=WINDOW)
    back = kl(other, model, None, ids, windows=2, window_tokens=WINDOW)
    assert there.kl != pytest.approx(back.kl, rel=1e-3)


def test_stored_logits_are_a_reference(model, other, ids):
    logits = list(window_logits(other, None, ids, windows=3, window_tokens=WINDOW))
    assert [list(x.shape) for x in logits] == [[WINDOW, VOCAB]] * 3
    live = kl(model, other, None, ids, windows=3, window_tokens=WINDOW, batch=2)
    stored = kl(model, logits, None, ids, windows=3, window_tokens=WINDOW, batch=2)
    assert stored.kl == pytest.approx(live.kl, rel=1e-5)
    assert stored.top1_agreement == live.top1_agreement


def test_kl_of_tokens_that_are_ruled_out(ids):
    def flat(batch):
        return torch.zeros(*batch.shape, VOCAB)

    def narrow(batch):  # half of the vocabulary is impossible
        logits = flat(batch)
        logits[..., VOCAB // 2 :] = -math.inf
        return logits

    low = ids % (VOCAB // 2)
    fits = kl(flat, narrow, None, low, windows=1, window_tokens=WINDOW)
    assert fits.kl == pytest.approx(math.log(2), rel=1e-6)
    assert kl(narrow, flat, None, low, windows=1, window_tokens=WINDOW).kl == math.inf


@pytest.mark.parametrize(
    "change, message",
    [
        ({"windows": 0}, "windows=0"),
        ({"window_tokens": 1}, "window_tokens=1"),
        ({"batch": 0}, "batch=0"),
        ({"window_tokens": 1024}, "do not fill one window of 1024"),
    ],
)
def test_arguments_that_cannot_be_measured(model, ids, change, message):
    with pytest.raises(PatchError, match=message):
        perplexity(model, None, ids, **{"windows": 1, "window_tokens": WINDOW, **change})


def test_references_that_do_not_fit(model, ids):
    with pytest.raises(PatchError, match="vocabulary"):
        kl(model, lambda x: torch.zeros(*x.shape, VOCAB + 8), None, ids, windows=1, window_tokens=WINDOW)
    with pytest.raises(PatchError, match="logits of 1 windows, 2 wanted"):
        kl(model, [torch.zeros(WINDOW, VOCAB)], None, ids, windows=2, window_tokens=WINDOW)
    with pytest.raises(PatchError, match="for ids of shape"):
        perplexity(lambda x: torch.zeros(1, 2, VOCAB), None, ids, windows=1, window_tokens=WINDOW)
