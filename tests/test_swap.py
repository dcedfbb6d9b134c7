"""The change of the modules: nothing is half-patched, and what follows it."""

import copy
import sys

import pytest
import torch
from transformers import LlamaForCausalLM

import hfaccel
from hfaccel import RTN, Head, PatchError
from snapshot import Snapshot, logits, tied
from tiny import ids, tiny

pytestmark = pytest.mark.usefixtures("spill")


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("keep", [True, False])
def test_failure_in_the_middle(monkeypatch, spill, error, keep):
    from hfaccel.quant import rtn

    model, calls, real = tied(), [], rtn.RTN.apply

    def failing(self, site, stats):
        calls.append(site.name)
        if len(calls) == 12:
            raise error("now")
        return real(self, site, stats)

    before = Snapshot(model)
    monkeypatch.setattr(rtn.RTN, "apply", failing)
    with pytest.raises(error, match="now"):
        hfaccel.patch(model, "int8", keep_original=keep)
    before.check()
    assert not list(spill.glob("*"))
    monkeypatch.undo()
    hfaccel.patch(model, "int8", keep_original=False)


@pytest.mark.parametrize("place", ["hfaccel.checkpoint.mark", "hfaccel.generate.mixin.install"])
def test_failure_at_the_end(monkeypatch, place):
    model = tied()
    before = Snapshot(model)

    def failing(*args, **kwargs):
        raise KeyboardInterrupt

    module, _, name = place.rpartition(".")
    monkeypatch.setattr(sys.modules[module], name, failing)
    with pytest.raises(KeyboardInterrupt):
        hfaccel.patch(model, "int4+kv8")
    before.check()


def test_not_finite_weights_are_refused_by_name():
    model = tiny("TL")
    model.model.layers[3].mlp.down_proj.weight.data[5, 7] = float("nan")
    before = dict(model.named_modules())
    with pytest.raises(PatchError, match=r"layers\.3\.mlp\.down_proj\.weight: 1 of 11264 values are NaN"):
        hfaccel.patch(model, "int8")
    assert dict(model.named_modules()) == before and not hasattr(model, "_hfaccel")


def test_a_patch_under_inference_mode_can_be_trained_with():
    model = tiny("TL")
    with torch.inference_mode():
        hfaccel.patch(model, "int8")
    x = ids(1, 5)
    model(input_ids=x, labels=x).loss.backward()
    with torch.inference_mode():
        hfaccel.unpatch(model)
    model(input_ids=x, labels=x).loss.backward()
    assert model.lm_head.weight.grad is not None


def test_resizing_is_refused_by_name():
    for model, config in ((tied(), "int8"), (tiny("TL"), "int4"), (tiny("TL"), "head8")):
        hfaccel.patch(model, config)
        with pytest.raises(
            PatchError, match="resize_token_embeddings: .* is quantized; call hfaccel.unpatch"
        ):
            model.resize_token_embeddings(600)
        with pytest.raises(PatchError, match="resize_token_embeddings"):
            copy.deepcopy(model).resize_token_embeddings(600)
        hfaccel.unpatch(model).resize_token_embeddings(600)
        assert model.lm_head.weight.shape[0] == 600
    model = hfaccel.patch(tiny("TL"), "int4+head16")
    assert model.resize_token_embeddings(600).weight.shape[0] == 600


def test_models_of_one_config_do_not_change_together():
    config = tiny("TL").config
    first, second = LlamaForCausalLM(config), LlamaForCausalLM(config)
    before, attention = config.to_dict(), config._attn_implementation
    hfaccel.patch(first, [RTN(bits=4), Head(bits=8)])
    assert second.config is config and config.to_dict() == before and config._attn_implementation == attention
    assert all(vars(m).get("config") in (None, config) for m in second.modules())
    assert all(m.config is first.config for m in first.modules() if hasattr(m, "config"))
    hfaccel.unpatch(first)
    assert first.config is config


def test_hooks_survive():
    model, seen = tiny("TL"), []
    handle = model.model.layers[0].mlp.up_proj.register_forward_hook(lambda *_: seen.append(1))
    hfaccel.patch(model, "int8")
    logits(model)
    assert seen == [1]
    handle.remove()
    logits(model)
    hfaccel.unpatch(model)
    logits(model)
    assert seen == [1]


def test_an_offloaded_model_becomes_what_one_in_memory_becomes(tmp_path, saved, spill):  # case P7
    whole = hfaccel.patch(LlamaForCausalLM.from_pretrained(saved), "int4")
    places = {"model.layers.1": "disk", "model.embed_tokens": "cpu", "model.layers.0": "cpu"}
    places |= {"model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    model = LlamaForCausalLM.from_pretrained(saved, device_map=places, offload_folder=tmp_path / "off")
    before = logits(model)
    assert model.model.layers[1].mlp.up_proj.weight.is_meta
    hfaccel.patch(model, "int4")
    assert not spill.exists()
    ours, theirs = model.state_dict(), whole.state_dict()
    packed = [name for name in theirs if not name.endswith("norm.weight") or "layers.1" not in name]
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in packed)
    assert torch.equal(logits(model), logits(whole))
    hfaccel.unpatch(model)
    assert torch.equal(logits(model), before)
