"""What `patch(model)` chooses, and that it leaves no trace of measuring."""

import copy

import pytest
import torch

import hfaccel
from hfaccel import auto
from hfaccel.measure.corpus import text
from hfaccel.measure.perplexity import KLResult, kl, window_logits
from hfaccel.recipe import PatchConfig
from tiny import ids, tiny


@pytest.fixture
def clock(monkeypatch):
    """Speeds as a test wants them: the patched model takes `factor` times as long."""

    def set_factor(model, factor: float):
        def seconds(call):
            from hfaccel.quant.linear import QuantLinear

            call()
            return factor if any(isinstance(m, QuantLinear) for m in model.modules()) else 1.0

        monkeypatch.setattr(auto, "_seconds", seconds)

    return set_factor


def test_int8_where_it_is_faster_and_near_lossless(clock, monkeypatch):
    model = tiny("llama")
    clock(model, 0.5)
    monkeypatch.setattr(auto, "KL_LIMIT", 10.0)  # random weights are not near-lossless in 8 bits
    monkeypatch.setattr(auto, "PERPLEXITY_LIMIT", 10.0)
    hfaccel.patch(model)
    assert hfaccel.report(model).recipe == "int8"
    twin = hfaccel.patch(tiny("llama"), "int8")
    with torch.no_grad():
        assert torch.equal(model(ids(2, 7)).logits, twin(ids(2, 7)).logits)


@pytest.mark.parametrize("limit", ["speed", "kl"])
def test_the_runtime_alone_where_int8_is_slower_or_lossy(clock, monkeypatch, limit):
    model = tiny("llama")
    before = copy.deepcopy(model.state_dict())
    clock(model, 1.5 if limit == "speed" else 0.5)
    monkeypatch.setattr(auto, "KL_LIMIT", 10.0 if limit == "speed" else 0.0)
    monkeypatch.setattr(auto, "PERPLEXITY_LIMIT", 10.0)
    hfaccel.patch(model)
    assert hfaccel.report(model).recipe == "runtime"
    after = model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[k], after[k]) for k in before)


def test_measuring_draws_nothing_from_the_global_generator(clock):
    model = tiny("llama")
    clock(model, 0.5)
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    auto.choose(model)
    assert torch.equal(torch.rand(3), expected)
    assert not hasattr(model, "_hfaccel")


@pytest.mark.parametrize(
    ("divergence", "perplexity", "words"),
    [
        (0.005, 10.049, ""),
        (0.0051, 10.0, "KL 0.0051 is above 0.005, over 1 tokens"),
        (0.0, 10.06, "rises by 0.60 %, more than 0.5 %"),
        (float("nan"), 10.0, "KL nan"),
        (0.0, float("nan"), "rises by nan"),
    ],
)
def test_near_lossless(divergence, perplexity, words):
    found = auto._lossy(KLResult(divergence, 1.0, perplexity, 10.0, tokens=1, windows=1, seconds=0.0))
    assert words in found and bool(found) == bool(words)


@pytest.mark.parametrize(
    ("measured", "windows"),
    [
        ([0.001, 0.0012, 0.0011], 3),  # far below the limit
        ([0.02, 0.04, 0.03], 3),  # far above
        ([0.0046, 0.0056, 0.0049, 0.0053, 0.0045, 0.0051, 0.0047, 0.0052], 8),  # at it
        ([float("nan")] * 8, 8),
    ],
)
def test_windows_are_measured_until_the_answer_is_clear(monkeypatch, measured, windows):
    model, values = hfaccel.patch(tiny("TL"), "int8"), iter(measured)
    monkeypatch.setattr(
        "hfaccel.measure.perplexity.kl",
        lambda *args, **cut: KLResult(next(values), 0.9, 10.0, 10.0, tokens=63, windows=1, seconds=0.0),
    )
    found = auto._quality(model, auto.texts(model, None))
    assert (found.windows, found.tokens) == (windows, 63 * windows)
    mean = sum(measured[:windows]) / windows
    assert found.kl == pytest.approx(mean, nan_ok=True) and found.perplexity == pytest.approx(10.0)


def test_quality_is_that_of_all_windows_at_once(monkeypatch):
    monkeypatch.setattr(auto, "CLEAR", float("inf"))
    model = tiny("TL")
    texts = auto.texts(model, None)
    assert len(texts) == auto.WINDOWS and all(ids.shape == (1, 64) for ids in texts)
    theirs = list(window_logits(model, None, torch.cat(texts).flatten(), windows=8, window_tokens=64))
    hfaccel.patch(model, "int4")
    whole = kl(model, theirs, None, torch.cat(texts).flatten(), windows=8, window_tokens=64)
    found = auto._quality(model, texts)
    assert found.tokens == whole.tokens and found.windows == 8
    for name in ("kl", "top1_agreement", "perplexity", "reference_perplexity"):
        assert getattr(found, name) == pytest.approx(getattr(whole, name), rel=1e-6), name


def test_excerpts_are_spread_over_the_text():
    seen = []

    def tokenizer(piece, **kwargs):
        seen.append(text("wikitext2_valid").index(piece) / len(text("wikitext2_valid")))
        return {"input_ids": list(range(2000))}

    windows = auto._excerpts(tokenizer, 1024)
    assert [tuple(ids.shape) for ids in windows] == [(1, 1024)] * 8
    assert [round(8 * place, 1) for place in seen] == [0, 4, 2, 6, 1, 5, 3, 7]


def test_what_was_measured_is_said(clock, monkeypatch, caplog):
    model = tiny("llama")
    clock(model, 0.5)
    monkeypatch.setattr(auto, "KL_LIMIT", 10.0)
    monkeypatch.setattr(auto, "PERPLEXITY_LIMIT", 10.0)
    auto.choose(model)
    assert "auto: int8 (KL 0." in caplog.text and "of at most 10.0, perplexity " in caplog.text
    assert "tokens; decode 2.00 x, prefill of 128 2.00 x as fast as the runtime alone" in caplog.text


@pytest.mark.real
def test_int8_is_near_lossless_on_the_real_model():
    """Three windows of KL 0.0035; off the grid 0.0044, which takes seven to be clear of 0.005."""
    model, tokenizer = hfaccel.demo_model()
    with auto._patched(model, auto.OUTCOMES[1], False):
        quality = auto._quality(model, auto.texts(model, tokenizer)[:3])
    assert quality.windows == 3 and quality.tokens == 3 * 1023
    assert 0.002 < quality.kl < 0.0045 and auto._lossy(quality) == ""


def test_an_encoder_is_chosen_by_its_forward(clock):
    model = tiny("bert")
    clock(model, 0.5)
    assert auto.choose(model) == PatchConfig.from_recipe("int8")
