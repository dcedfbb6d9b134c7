"""Scales and norms trained, codes untouched: gradients against autograd, and everything given back."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hfaccel
from hfaccel import GPTQ, PatchError
from hfaccel.anatomy import anatomy
from hfaccel.journal import Journal
from hfaccel.quant.linear import QuantExperts, codes_of, is_packed
from hfaccel.quant.tune import Tuning, _Norm, _Scaled, _step
from saved import logits, reload
from tiny import ids, tiny

ROWS = [ids(1, length, seed=length, vocab=256)[0] for length in (40, 25, 33)]
QUICK = Tuning(steps=8, step_tokens=64, lr=3e-3)


def tuned(model, recipe="gptq2+head16", **kwargs):
    return hfaccel.patch(model, recipe.replace("+", "-tuned+"), calibration=ROWS, progress=False, **kwargs)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("hfaccel.quant.gptq.Tuning", lambda: QUICK)


def divergence(model, wanted):
    return float(F.kl_div(logits(model).log_softmax(-1), wanted.log_softmax(-1), log_target=True))


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "mixtral", "t5", "bert"])
def test_nearer_to_the_original_with_the_same_codes(family):
    model = tiny(family)
    x = [row[None] for row in ROWS]

    @torch.no_grad()
    def run():
        extra = [{"decoder_input_ids": row} if model.config.is_encoder_decoder else {} for row in x]
        return torch.cat([model(input_ids=row, **more).logits[0] for row, more in zip(x, extra, strict=True)])

    def kl(found):
        return float(
            F.kl_div(found.log_softmax(-1), wanted.log_softmax(-1), reduction="sum", log_target=True)
        )

    wanted = run()
    hfaccel.patch(model, "gptq2+head16", calibration=ROWS, progress=False)
    plain, codes = kl(run()), stored(model)
    hfaccel.unpatch(model)
    tuned(model)
    assert kl(run()) < 0.97 * plain
    for name, tensor in stored(model).items():
        assert torch.equal(tensor, codes[name]), name
    assert not any("forward" in vars(module) or "project" in vars(module) for module in model.modules())
    hfaccel.unpatch(model)
    assert torch.equal(run(), wanted)


def stored(model):
    return {name: t.clone() for name, t in model.state_dict().items() if t.dtype is torch.uint8}


def test_gradients_are_those_of_autograd():
    """Of the mean divergence over two samples, at scales and norms that are off their start."""
    model = tiny("llama", num_hidden_layers=1)
    original = tiny("llama", num_hidden_layers=1)
    hfaccel.patch(model, "int3-g24+head16", progress=False)
    samples, parts = ROWS[:2], anatomy(model)
    scaled = [_Scaled(m) for m in model.modules() if is_packed(m)]
    norms = [_Norm(model, name, parts, Journal(model)) for name in ("model.norm",)]
    for part in (*scaled, *norms):
        for parameter in part.parameters:
            parameter.data.normal_(std=0.05)
    with torch.no_grad():
        targets = [original(input_ids=row[None]).logits[0] for row in samples]
    probabilities = [target.softmax(-1) for target in targets]
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    loss = _step(model, samples, targets, scaled, norms)
    mine = [p.grad.clone() for part in (*scaled, *norms) for p in part.parameters]

    twin = tiny("llama", num_hidden_layers=1)
    leaves = []
    for (name, module), part in zip(
        ((n, m) for n, m in model.named_modules() if is_packed(m)), scaled, strict=True
    ):
        change = part.changes["weight"].detach().clone().requires_grad_()
        leaves.append(change)
        spread = (1 + change).repeat_interleave(24, 1)[:, : module.in_features]
        swap_in(twin.get_submodule(name), module.dequantize().detach() * spread)
    delta = norms[0].deltas["weight"].detach().clone().requires_grad_()
    swap_in(twin.model.norm, twin.model.norm.weight.detach() + norms[0].units["weight"] * delta)
    total = 0
    for row, p in zip(samples, probabilities, strict=True):
        total = total + (p * (p.log() - twin(input_ids=row[None]).logits[0].log_softmax(-1))).sum()
    total = total / sum(map(len, samples))
    total.backward()
    assert loss == pytest.approx(float(total.detach()), rel=1e-4)
    for found, leaf in zip(mine, (*leaves, delta), strict=True):
        assert torch.allclose(found, leaf.grad, rtol=2e-3, atol=1e-5 * float(leaf.grad.abs().max()) + 1e-7)


def swap_in(module: nn.Module, weight: torch.Tensor) -> None:
    del module._parameters["weight"]
    module.weight = weight


def test_original_saving_and_a_second_run_hold_with_trained_norms(tmp_path):
    model, plain = tiny("TL"), tiny("TL")
    wanted, norm = logits(model), model.model.norm
    tuned(model)
    found = logits(model)
    assert model.model.norm is not norm and not torch.equal(model.model.norm.weight, norm.weight)
    with hfaccel.original(model):
        assert torch.equal(logits(model), wanted) and model.model.norm is norm
    assert torch.equal(logits(model), found)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(reload(model, tmp_path)), found)
    assert torch.equal(logits(tuned(tiny("TL"))), found)
    hfaccel.unpatch(model)
    assert model.model.norm is norm and torch.equal(logits(model), wanted)
    for (name, one), (_, other) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.equal(one, other) and one.requires_grad == other.requires_grad, name


def test_flags_and_modes_are_as_they_were():
    model = tiny("TL").train()
    model.model.layers[1].input_layernorm.weight.requires_grad_(False)
    flags = {n: p.requires_grad for n, p in model.named_parameters() if "norm" in n}
    tuned(model)
    assert {n: p.requires_grad for n, p in model.named_parameters() if "norm" in n} == flags
    assert all(module.training for module in model.modules())
    assert not any(p.grad is not None for p in model.parameters())


def test_it_works_without_keeping_the_originals():
    kept, thrown = tuned(tiny("TL")), tuned(tiny("TL"), keep_original=False)
    assert torch.equal(logits(kept), logits(thrown))
    with pytest.raises(PatchError, match="originals were not kept"), hfaccel.original(thrown):
        pass


@pytest.mark.parametrize("failure", [KeyboardInterrupt, None])
def test_a_failure_in_the_middle_leaves_the_model_untouched(failure, monkeypatch):
    model = tiny("TL")
    wanted, before = logits(model), dict(model.named_modules())
    steps = []

    def broken(*args):
        steps.append(args)
        if len(steps) == 3:
            if failure is None:
                return float("nan")
            raise failure
        return _step(*args)

    monkeypatch.setattr("hfaccel.quant.tune._step", broken)
    with pytest.raises(failure or PatchError):
        tuned(model)
    assert dict(model.named_modules()) == before and torch.equal(logits(model), wanted)
    assert not any("forward" in vars(module) for module in model.modules())


def test_experts_have_a_change_for_each_scale():
    model = hfaccel.patch(tiny("TX"), GPTQ(bits=4), calibration=ROWS, progress=False)
    experts = next(m for m in model.modules() if isinstance(m, QuantExperts))
    part = _Scaled(experts)
    before = experts.dequantize("down_proj")
    assert part.changes["down_proj"].shape == (4, 64, 2)  # 112 inputs: a group of 64 and one of 48
    with torch.no_grad():
        part.changes["down_proj"][2, 5, 1] = 0.5
    codes = experts.down_proj.clone()
    part.settle()
    ratio = experts.dequantize("down_proj") / before
    assert torch.equal(experts.down_proj, codes)
    assert torch.allclose(ratio[2, 5, 64:][before[2, 5, 64:] != 0], torch.tensor(1.5), rtol=1e-3)
    ratio[2, 5, 64:] = 1
    assert torch.equal(ratio[before != 0], torch.ones_like(ratio[before != 0]))


def test_a_model_without_logits_is_refused():
    from transformers import AutoModel

    with pytest.raises(PatchError, match="tuning needs logits, LlamaModel has no output head"):
        tuned(tiny("TL", auto=AutoModel), "gptq4+head16")


def test_codes_of_linears_are_untouched_and_scales_change_a_little():
    plain = hfaccel.patch(tiny("TL"), "gptq4+head16", calibration=ROWS, progress=False)
    model = tuned(tiny("TL"), "gptq4+head16")
    one, other = (m.model.layers[0].mlp.up_proj for m in (plain, model))
    assert torch.equal(codes_of(one), codes_of(other)) and torch.equal(one.weight_zero, other.weight_zero)
    ratio = (other.weight_scale.float() / one.weight_scale.float()).nan_to_num(1.0)
    assert 0.0 < (ratio - 1).abs().max() < 0.05
