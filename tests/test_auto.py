"""What `patch(model)` chooses, and that it leaves no trace of measuring."""

import copy

import pytest
import torch

import hfaccel
from hfaccel import auto
from hfaccel.measure.perplexity import KLResult
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
    ("kl", "perplexity", "words"),
    [
        (0.005, 10.049, ""),
        (0.0051, 10.0, "KL 0.0051 is above"),
        (0.0, 10.06, "rises by 0.60 %"),
        (float("nan"), 10.0, "KL nan"),
        (0.0, float("nan"), "rises by nan"),
    ],
)
def test_near_lossless(kl, perplexity, words):
    found = auto._lossy(KLResult(kl, 1.0, perplexity, 10.0, tokens=1, windows=1, seconds=0.0))
    assert words in found and bool(found) == bool(words)


def test_an_encoder_is_chosen_by_its_forward(clock):
    model = tiny("bert")
    clock(model, 0.5)
    assert auto.choose(model) == PatchConfig.from_recipe("int8")
