"""What `patch(model)` chooses, and that it leaves no trace of measuring."""

import copy

import pytest
import torch

import hfaccel
from hfaccel import auto
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


def test_kl_and_perplexity_are_the_formulas():
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.randn(5, 11, generator=generator, dtype=torch.float64) for _ in range(2))
    text = torch.randint(0, 11, (1, 5), generator=generator)
    log_p, log_q = p[:-1].log_softmax(-1), q[:-1].log_softmax(-1)
    kl = float((log_p.exp() * (log_p - log_q)).sum(-1).mean())
    assert auto._quality(text, [q], [p]) == f"KL {kl:.4f} is above {auto.KL_LIMIT}"
    assert auto._quality(text, [p], [p]) == ""


def test_an_encoder_is_chosen_by_its_forward(clock):
    model = tiny("bert")
    clock(model, 0.5)
    assert auto.choose(model) == PatchConfig.from_recipe("int8")
