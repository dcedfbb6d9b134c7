"""quant/sensitivity.py: a forward from the changed block on equals the whole; the model stays as it was."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import hfaccel
from hfaccel.anatomy import anatomy
from hfaccel.quant.head import Head
from hfaccel.quant.hqq import HQQ
from hfaccel.quant.sensitivity import ROWS, Replay, rounded, sensitivities
from hfaccel.recipe import PatchConfig
from hfaccel.sites import Plan
from tiny import ids, tiny

WINDOWS = ids(2, 24)


def kl(p, q):
    p, q = (x.double().log_softmax(-1) for x in (p, q))
    return float((p.exp() * (p - q)).sum(-1).mean())


def probes(model, bits=3):
    plan = Plan.of(model, PatchConfig((HQQ(bits=bits),)))
    return [(t, [site]) for t, sites in plan.work for site in sites if t.name != "head"], plan


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "gpt_oss", "falcon_alibi", "bloom", "phi"])
@torch.no_grad()
def test_each_is_the_kl_of_a_model_with_that_matrix_patched(family):
    model = tiny(family)
    before = dict(model.named_modules(remove_duplicate=False))
    tensors = {name: t.clone() for name, t in model.state_dict().items()}
    plain = model(input_ids=WINDOWS).logits
    every, plan = probes(model)
    known = HQQ().smooth(model, plan.anatomy, [site for _, (site,) in every], {}, None)
    found = sensitivities(model, plan.anatomy, every, known, WINDOWS)
    assert dict(model.named_modules(remove_duplicate=False)) == before
    assert all(torch.equal(t, tensors[name]) for name, t in model.state_dict().items())
    assert not any("forward" in vars(module) or module._forward_hooks for module in model.modules())
    last = len(every) - 1
    for at in {0, last // 3, last // 2, last}:
        transform, (site,) = every[at]
        with rounded(model, transform, [site], known):
            wanted = kl(plain, model(input_ids=WINDOWS).logits)
        assert found[at] == pytest.approx(wanted, rel=1e-2, abs=2e-6), site.name
        assert wanted > 1e-5


@torch.no_grad()
def test_a_tied_head_changes_the_embedding_too():
    model = tiny("llama", tie_word_embeddings=True)
    plan = Plan.of(model, PatchConfig((Head(bits=4),)))
    sites = plan.work[0][1]
    assert {site.name for site in sites} == {"lm_head", "model.embed_tokens"}
    (found,) = sensitivities(model, plan.anatomy, [(Head(bits=4), sites)], {}, WINDOWS)
    twin = hfaccel.patch(tiny("llama", tie_word_embeddings=True), "head4")
    plain = model(input_ids=WINDOWS).logits
    assert found == pytest.approx(kl(plain, twin(input_ids=WINDOWS).logits), rel=1e-3)


@torch.no_grad()
def test_earlier_blocks_do_not_run(monkeypatch):
    model = tiny("TL")
    parts = anatomy(model)
    calls = []
    for i, layer in enumerate(model.model.layers):
        layer.register_forward_pre_hook(lambda *a, i=i: calls.append(i))
        layer.mlp.register_forward_hook(lambda *a, i=i: calls.append(10 + i))
    with Replay(model, parts, WINDOWS) as replay:
        replay.record()
        calls.clear()
        assert replay.divergence(2) == pytest.approx(0, abs=1e-6)
    assert calls == [0, 1, 2, 12, 3, 13]  # 0 and 1 give what was recorded


@torch.no_grad()
def test_beside_the_distribution_only_few_rows_of_logits_are_held(monkeypatch):
    model = tiny("llama")
    logits = model(input_ids=WINDOWS).logits.flatten(0, 1)
    made = []

    class Made(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            made.extend(t.untyped_storage() for t in tree_leaves(out) if isinstance(t, torch.Tensor))
            return out

    with Replay(model, anatomy(model), WINDOWS) as replay:
        monkeypatch.setattr(replay, "_forward", lambda: logits + 0)
        for step in (replay.record, lambda: replay.divergence(0)):
            made.clear()
            with Made():
                step()
            wide = {storage.data_ptr() for storage in made if storage.nbytes() > ROWS * logits[0].nbytes}
            wide -= {replay.probabilities.untyped_storage().data_ptr()}
            assert len(made) > 10 and len(wide) <= 1  # the logits themselves
        assert torch.allclose(replay.probabilities, logits.softmax(-1), atol=1e-6)
        assert len(logits) > 2 * ROWS and replay.divergence(0) == pytest.approx(0, abs=1e-6)


@torch.no_grad()
def test_an_interrupt_leaves_the_model_as_it_was():
    model = tiny("llama")
    every, plan = probes(model)
    before = dict(model.named_modules())
    seen = []

    class Stopping(HQQ):
        def apply(self, site, stats):
            seen.append(site.name)
            if len(seen) == 5:
                raise KeyboardInterrupt
            return super().apply(site, stats)

    every = [(Stopping(bits=3), sites) for _, sites in every]
    with pytest.raises(KeyboardInterrupt):
        sensitivities(model, plan.anatomy, every, {}, WINDOWS)
    assert dict(model.named_modules()) == before
    assert not any("forward" in vars(module) or module._forward_hooks for module in model.modules())


@torch.no_grad()
def test_logits_that_are_not_finite_are_named():
    model = tiny("llama")
    every, plan = probes(model)
    model.model.norm.weight[3] = float("nan")
    with pytest.raises(hfaccel.PatchError, match="LlamaForCausalLM: its logits are not numbers"):
        sensitivities(model, plan.anatomy, every, {}, WINDOWS)


def test_sites_are_replaceable():
    """`rounded` takes each site's fold from what is known, not from the site."""
    model = tiny("llama")
    every, plan = probes(model)
    transform, (site,) = every[0]
    known = HQQ().smooth(model, plan.anatomy, [site], {}, None)
    with rounded(model, transform, [site], known):
        inside = model.get_submodule(site.name).dequantize()
    wanted = transform.apply(replace(site, fold=known[site.name]), None).dequantize()
    assert torch.equal(inside, wanted) and model.get_submodule(site.name) is site.module
