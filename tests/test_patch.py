"""patch, unpatch, original, report: values over every family, and that nothing is ever half-patched."""

import copy
import os
import pickle
import subprocess
import sys
import threading
import types
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, pipeline

import hfaccel
from dequantized import difference, oracle
from hfaccel import RTN, Head, PatchError
from hfaccel.errors import AlreadyPatched, UnsupportedModel
from hfaccel.measure import memory
from hfaccel.quant.linear import QuantEmbedding, QuantExperts, QuantLinear, codes_of, is_packed
from hfaccel.recipe import PatchConfig
from hfaccel.sites import Plan
from tiny import DECODERS, FAMILIES, ids, tiny

EXPERTS = ("mixtral", "qwen3_moe", "gpt_oss")


@pytest.fixture(autouse=True)
def spill(tmp_path, monkeypatch):
    """Every test spills into a folder of its own."""
    folder = tmp_path / "spill"
    monkeypatch.setenv("HFACCEL_SPILL_DIR", str(folder))
    return folder


def logits(model, x=None):
    x = ids(3, 12) if x is None else x
    extra = {"decoder_input_ids": x[:, :7]} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model(input_ids=x, **extra).logits


class Snapshot:
    """Everything about a model that a patch taken back must leave as it was."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.cls = type(model)
        self.attributes = {key: vars(model)[key] for key in vars(model) if not key.startswith("_")}
        self.names = set(vars(model))
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.classes = {name: type(module) for name, module in self.modules.items()}
        self.parameters = dict(model.named_parameters(remove_duplicate=False))
        self.state = {key: value.clone() for key, value in model.state_dict().items()}
        self.grads = {key: p.requires_grad for key, p in self.parameters.items()}
        self.configs = {name: vars(module).get("config") for name, module in self.modules.items()}
        self.config = model.config.to_dict()
        self.attention = model.config._attn_implementation
        self.logits = logits(model)

    def check(self) -> None:
        model = self.model
        assert type(model) is self.cls
        assert {k: v for k, v in vars(model).items() if not k.startswith("_")} == self.attributes
        assert vars(model).keys() == self.names
        modules = dict(model.named_modules(remove_duplicate=False))
        assert modules.keys() == self.modules.keys()
        assert all(modules[name] is module for name, module in self.modules.items())
        assert {name: type(module) for name, module in modules.items()} == self.classes
        parameters = dict(model.named_parameters(remove_duplicate=False))
        assert parameters.keys() == self.parameters.keys()
        assert all(parameters[name] is p for name, p in self.parameters.items())
        assert {name: p.requires_grad for name, p in parameters.items()} == self.grads
        state = model.state_dict()
        assert state.keys() == self.state.keys()
        for key, value in self.state.items():
            assert state[key].dtype == value.dtype and torch.equal(state[key], value), key
        assert all(vars(modules[name]).get("config") is c for name, c in self.configs.items())
        assert model.config.to_dict() == self.config
        assert model.config._attn_implementation == self.attention
        assert torch.equal(logits(model), self.logits)


# Values ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["int8", "int4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family, recipe):
    model = tiny(family)
    dense, before = copy.deepcopy(model), Snapshot(model)
    assert hfaccel.patch(model, recipe) is model
    assert type(model).__name__ == before.cls.__name__ and isinstance(model, before.cls)
    found = logits(model)
    wanted = logits(oracle(dense, model))
    # Equal but for activations in the middle between two codes; experts round their inputs beside that (1 to
    # 2 %).
    assert difference(found, wanted) < (0.04 if family in EXPERTS else 3e-3)
    assert difference(found, before.logits) > 1e-3  # something was rounded
    packed = [module for module in model.modules() if is_packed(module)]
    assert len(packed) == len(hfaccel.report(model).records)
    assert all(p.dtype == torch.uint8 and not p.requires_grad for m in packed for p in _codes(m))
    hfaccel.unpatch(model)
    before.check()


def _codes(module):
    names = module.PROJECTIONS if isinstance(module, QuantExperts) else ("weight",)
    return [module._parameters[name] for name in names]


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "gpt_oss"])
@pytest.mark.parametrize(
    "recipe", ["int8-g32-asym", "int8-tensor", "int4-sym", "int4-row", "int3", "int2+head4"]
)
def test_other_grids(family, recipe):
    model = tiny(family)
    dense = copy.deepcopy(model)
    hfaccel.patch(model, recipe)
    assert difference(logits(model), logits(oracle(dense, model))) < (0.08 if family in EXPERTS else 3e-3)


@pytest.mark.parametrize("recipe", ["int8", "int4-g128"])
def test_group_that_does_not_divide_a_row(recipe):  # case P3
    model = tiny("S135", vocab_size=512)
    dense = copy.deepcopy(model)
    hfaccel.patch(model, recipe)
    assert model.model.layers[0].mlp.up_proj.layout.groups(576) == (1 if recipe == "int8" else 5)
    # Wider rows have more activations in the middle; without rounding them in the oracle it would be 0.02.
    assert difference(logits(model), logits(oracle(dense, model))) < 0.01


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models(dtype):
    model = tiny("llama").to(dtype)
    before = Snapshot(model)
    hfaccel.patch(model, "int8")
    found = logits(model)
    assert found.dtype == dtype and model.dtype == dtype
    assert difference(found.float(), before.logits.float()) < 0.1
    hfaccel.unpatch(model)
    before.check()


# What is a target --------------------------------------------------------------------------------------


def names_of(model, kind=nn.Module):
    return {name for name, module in model.named_modules() if is_packed(module) and isinstance(module, kind)}


def test_targets_and_ignore():
    model = tiny("TL")
    hfaccel.patch(model, RTN(targets="model.layers.*.mlp.**", ignore="**.down_proj"))
    assert names_of(model) == {f"model.layers.{i}.mlp.{x}_proj" for i in range(4) for x in ("gate", "up")}
    hfaccel.unpatch(model)
    hfaccel.patch(model, RTN(bits=4, ignore="model.layers.0.**"))
    assert names_of(model) == {
        f"model.layers.{i}.{x}_proj"
        for i in (1, 2, 3)
        for x in (*(f"self_attn.{r}" for r in "qkvo"), "mlp.gate", "mlp.up", "mlp.down")
    } | {"lm_head"}
    skipped = hfaccel.report(model).skipped
    assert skipped["model.layers.0.mlp.up_proj"] == "ignored by 'model.layers.0.**'"
    hfaccel.unpatch(model)
    hfaccel.patch(model, RTN(targets="model.embed_tokens", ignore=()))
    assert names_of(model) == {"model.embed_tokens"}
    assert isinstance(model.model.embed_tokens, QuantEmbedding)


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (RTN(targets="model.layers.*.mlp.up"), "matches nothing"),
        (RTN(ignore="**.up"), "matches nothing"),
        (RTN(targets="model.embed_tokens"), "left alone by default"),
        (RTN(targets=()), "selects nothing"),
        (RTN(targets="re:("), "regular expression"),
    ],
)
def test_patterns_that_are_wrong(transform, message):
    model = tiny("TL")
    before = Snapshot(model)
    with pytest.raises(PatchError, match=message):
        hfaccel.patch(model, transform)
    before.check()


def test_two_roundings_of_one_weight_are_refused():
    model = tiny("TL")
    before = Snapshot(model)
    with pytest.raises(PatchError, match="layers.0.mlp.up_proj: rounded by both 'int4' and 'int8'"):
        hfaccel.patch(model, [RTN(bits=4), RTN(bits=8, targets="**.up_proj")])
    before.check()


def test_mixed_precision_by_targets():
    model = tiny("TL")
    hfaccel.patch(model, [RTN(bits=8, targets="**.down_proj"), RTN(bits=4, ignore="**.down_proj")])
    bits = {
        name: module.layout.bits for name, module in model.named_modules() if isinstance(module, QuantLinear)
    }
    assert all(bits[name] == (8 if name.endswith(("down_proj", "lm_head")) else 4) for name in bits)
    assert len(bits) == 4 * 7 + 1


def test_experts_are_targeted_whole():
    model = tiny("mixtral")
    with pytest.raises(PatchError, match="experts.down_proj is not among the targets"):
        hfaccel.patch(model, RTN(targets="**.experts.gate_up_proj"))
    hfaccel.patch(model, RTN(targets="**.experts.*"))
    assert names_of(model) == {f"model.layers.{i}.mlp.experts" for i in (0, 1)}


def test_a_linear_with_a_forward_of_its_own_is_left_alone():
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = tiny("TL")
    model.model.layers[1].mlp.up_proj.__class__ = Doubled
    hfaccel.patch(model, "int8")
    assert type(model.model.layers[1].mlp.up_proj) is Doubled
    assert hfaccel.report(model).skipped["model.layers.1.mlp.up_proj"] == "Doubled has a forward of its own"
    hfaccel.unpatch(model)
    with pytest.raises(PatchError, match="layers.1.mlp.up_proj: Doubled has a forward of its own"):
        hfaccel.patch(model, RTN(targets="model.layers.1.mlp.up_proj"))


SMOLLM2 = {  # 135M
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49_152,
    "tie_word_embeddings": True,
}


@pytest.mark.parametrize("shape", [SMOLLM2, memory.SHAPE], ids=["SmolLM2", "1.17B"])
def test_share_of_packed_bytes(shape):
    """At least 95 % of the bytes of the linears, at the shapes themselves and without their data."""
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**shape))
    linears = {name: m.weight.nbytes for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    assert len(linears) == 7 * shape["num_hidden_layers"] + 1
    plan = Plan.of(model, PatchConfig.of("int4"))
    packed = {site.name for transform, sites in plan.work if transform.rounds for site in sites}
    assert sum(linears.get(name, 0) for name in packed) >= 0.95 * sum(linears.values())


# The head and tied embeddings (case P1) -----------------------------------------------------------------


def tied(**fields):
    return tiny("TL", tie_word_embeddings=True, **fields)


def test_tied_head_and_embedding_stay_one_tensor():  # P1 a
    model = tied()
    hfaccel.patch(model, "int4")
    head, table = model.lm_head, model.model.embed_tokens
    assert isinstance(head, QuantLinear) and isinstance(table, QuantEmbedding)
    assert head.layout.bits == 8 and head.layout.group == -1
    assert head.weight is table.weight and head.weight_scale is table.weight_scale
    assert model.config.tie_word_embeddings
    assert torch.equal(table(torch.arange(512)), head.dequantize())
    stored = sum(t.nbytes for t in head.packed.values())
    record = {r.name: r for r in hfaccel.report(model).records}
    assert (record["lm_head"].bytes_after, record["model.embed_tokens"].bytes_after) == (stored, 0)
    for moved in (model.to(torch.bfloat16), copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert moved.lm_head.weight is moved.model.embed_tokens.weight


def test_head_alone_is_untied_and_lookups_stay():  # P1 b
    model = tied()
    before, table = Snapshot(model), model.model.embed_tokens
    hfaccel.patch(model, RTN(targets="lm_head"))
    assert model.model.embed_tokens is table and torch.equal(
        table.weight, before.state["model.embed_tokens.weight"]
    )
    assert isinstance(model.lm_head, QuantLinear) and not model.config.tie_word_embeddings
    model.tie_weights()
    assert isinstance(model.lm_head, QuantLinear) and model.lm_head.weight.dtype == torch.uint8
    hfaccel.unpatch(model)
    before.check()


def test_each_end_with_its_own_setting():  # P1 c
    model = tied()
    before = Snapshot(model)
    hfaccel.patch(model, [RTN(targets="lm_head"), RTN(bits=4, targets="model.embed_tokens", ignore=())])
    assert (model.lm_head.layout.bits, model.model.embed_tokens.layout.bits) == (8, 4)
    assert not model.config.tie_word_embeddings
    hfaccel.unpatch(model)
    before.check()


def test_one_module_under_two_names():  # P1 d
    def shared():
        model = tiny("TL")
        model.model.layers[1].mlp.up_proj = model.model.layers[0].mlp.up_proj
        return model

    model, single = shared(), tiny("TL")
    before = Snapshot(model)
    hfaccel.patch(model, "int4")
    hfaccel.patch(single, "int4")
    layers = model.model.layers
    assert layers[0].mlp.up_proj is layers[1].mlp.up_proj and isinstance(layers[0].mlp.up_proj, QuantLinear)
    assert torch.equal(codes_of(layers[0].mlp.up_proj), codes_of(single.model.layers[0].mlp.up_proj))
    hfaccel.unpatch(model)
    before.check()


def test_head16_leaves_both_ends():
    model = tied()
    hfaccel.patch(model, "int4+head16")
    assert type(model.lm_head) is nn.Linear and model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.tie_word_embeddings
    untied = tiny("TL")
    hfaccel.patch(untied, "int8+head16")
    assert type(untied.lm_head) is nn.Linear


@pytest.mark.parametrize("recipe", ["head8", "head4", "head4-row-sym"])
def test_head_alone_by_its_step(recipe):
    model = tiny("TL")
    hfaccel.patch(model, recipe)
    assert names_of(model) == {"lm_head"}
    assert model.lm_head.layout.bits == int(recipe[4])


def test_untied_embedding_stays():
    model = tiny("TL")
    table = model.model.embed_tokens
    hfaccel.patch(model, "int4")
    assert model.model.embed_tokens is table


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


def test_tables_that_are_one_are_packed_as_one():
    model = tiny("t5")
    before = Snapshot(model)
    hfaccel.patch(model, RTN(targets="shared", ignore=()))
    tables = [model.shared, model.encoder.embed_tokens, model.decoder.embed_tokens]
    assert all(isinstance(t, QuantEmbedding) and t.weight is model.shared.weight for t in tables)
    hfaccel.unpatch(model)
    before.check()


# Nothing is half-patched ---------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("int9", "unknown recipe step 'int9' .* known are int8, int4"),
        ("int4+int8", "given twice"),
        ("int4-g0", "unknown option -g0"),
        ("w4a4", "unknown recipe step 'w4a4'"),
        ({"transforms": [{"name": "int", "bits": 1}]}, "bits=1"),
        (3, "config=3"),
        (["int8"], "'int8' is not a transform"),
    ],
)
def test_bad_configs_change_nothing(config, message):
    model = tiny("TL")
    before = Snapshot(model)
    with pytest.raises(PatchError, match=message):
        hfaccel.patch(model, config)
    before.check()


def test_meta_is_refused():
    with torch.device("meta"):
        model = LlamaForCausalLM(tiny("TL").config)
    with pytest.raises(PatchError, match="model.embed_tokens.weight is on the meta device and has no data"):
        hfaccel.patch(model, "int8")
    with pytest.raises(PatchError, match="is on the meta device"):
        hfaccel.patch(model)


@pytest.mark.parametrize("thing", [nn.Linear(3, 3), object(), "model", None])
def test_other_things_are_no_models(thing):
    with pytest.raises(PatchError, match="not a transformers model, a PeftModel or a pipeline"):
        hfaccel.patch(thing, "int8")


def test_a_model_that_another_method_quantized_is_refused():
    model = tiny("TL")
    model.quantization_method = "bitsandbytes"
    with pytest.raises(PatchError, match="LlamaForCausalLM is quantized by 'bitsandbytes' already"):
        hfaccel.patch(model, "int8")
    hfaccel.unpatch(hfaccel.patch(model, "runtime"))
    model.quantization_method = "gguf"
    hfaccel.patch(model, "int8")


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


def test_models_without_layers_are_refused():
    model = tiny("TL")
    model.model.layers = nn.ModuleList()
    with pytest.raises(UnsupportedModel):
        hfaccel.patch(model, "int8")


def test_kv8_needs_a_model_that_generates():
    model = tiny("bert")
    before = Snapshot(model)
    with pytest.raises(PatchError, match="does not generate"):
        hfaccel.patch(model, "int8+kv8")
    before.check()


def test_patch_twice():
    model = tiny("TL")
    hfaccel.patch(model, "int4")
    state, modules = model._hfaccel, dict(model.named_modules())
    for same in (
        "int4",
        RTN(bits=4),
        [RTN(bits=4, group=64)],
        {"transforms": [{"name": "int", "bits": 4}]},
    ):
        assert hfaccel.patch(model, same) is model
    assert model._hfaccel is state and dict(model.named_modules()) == modules
    for other in ("int8", "int4-sym", "int4+kv8", "runtime"):
        with pytest.raises(
            AlreadyPatched, match=r"patched with 'int4' already; call hfaccel\.unpatch\(model\)"
        ):
            hfaccel.patch(model, other)
    for measured in (None, "auto"):  # near-lossless or nothing: never what is there
        with pytest.raises(
            AlreadyPatched, match=r"'int4' already, and auto chooses 'int8' or 'runtime'; call"
        ):
            hfaccel.patch(model, measured)
    for chosen in ("int8", "runtime"):
        hfaccel.patch(hfaccel.unpatch(model), chosen)
        state = model._hfaccel
        assert hfaccel.patch(model) is hfaccel.patch(model, "auto") is model and model._hfaccel is state


def test_what_is_not_patched_is_said_so():
    model = tiny("TL")
    for call in (hfaccel.unpatch, hfaccel.report, lambda m: hfaccel.original(m).__enter__()):
        with pytest.raises(PatchError, match="LlamaForCausalLM is not patched"):
            call(model)


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


# Originals ------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path):
    folder = tmp_path / "saved"
    tiny("TL", num_hidden_layers=2).save_pretrained(folder)
    return folder


def test_originals_come_from_the_checkpoint(saved, spill):
    model = LlamaForCausalLM.from_pretrained(saved)
    before = Snapshot(model)
    hfaccel.patch(model, "int8")
    assert not spill.exists()
    hfaccel.unpatch(model)
    before.check()


def test_sharded_checkpoints_and_base_models(tmp_path, spill):
    from transformers import LlamaModel

    folder = tmp_path / "sharded"
    tiny("TL", num_hidden_layers=2).save_pretrained(folder, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    for cls in (LlamaForCausalLM, LlamaModel):
        model = cls.from_pretrained(folder)
        before = model.state_dict()
        before = {key: value.clone() for key, value in before.items()}
        hfaccel.patch(model, "int8")
        assert not spill.exists()
        hfaccel.unpatch(model)
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_tensors_that_differ_from_the_checkpoint_are_spilled(saved, spill):
    model = LlamaForCausalLM.from_pretrained(saved)
    model.lm_head.weight.data[0, 0] += 1
    before = Snapshot(model)
    hfaccel.patch(model, "int8")
    assert len(list(spill.glob("*/*.safetensors"))) == 1
    hfaccel.unpatch(model)
    before.check()
    assert not list(spill.glob("*"))


def test_another_dtype_than_the_checkpoint_is_spilled(saved, spill):
    model = LlamaForCausalLM.from_pretrained(saved, dtype=torch.bfloat16)
    before = Snapshot(model)
    hfaccel.patch(model, "int8")
    assert len(list(spill.glob("*/*.safetensors"))) == 15
    hfaccel.unpatch(model)
    before.check()


def test_a_checkpoint_that_changed_is_noticed(saved):
    model = LlamaForCausalLM.from_pretrained(saved)
    hfaccel.patch(model, "int8")
    wanted = logits(model)
    file = saved / "model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1000] ^= 1
    file.unlink()
    file.write_bytes(raw)
    with pytest.raises(PatchError, match="is no longer the tensor that was patched"):
        hfaccel.unpatch(model)
    with pytest.raises(PatchError, match="is no longer the tensor that was patched"):
        hfaccel.original(model).__enter__()
    file.unlink()
    with pytest.raises(PatchError, match="cannot be read from"):
        hfaccel.unpatch(model)
    assert torch.equal(logits(model), wanted)  # still patched, and whole
    raw[-1000] ^= 1
    file.write_bytes(raw)
    hfaccel.unpatch(model)


def test_saving_over_the_checkpoint_keeps_the_originals(saved):
    model = LlamaForCausalLM.from_pretrained(saved)
    before = Snapshot(model)
    hfaccel.patch(model, "int8")
    model.save_pretrained(saved)
    hfaccel.unpatch(model)
    before.check()


def test_spilled_originals_go_with_the_model(spill):
    model = tiny("TL")
    hfaccel.patch(model, "int8")
    assert len(list(spill.glob("*/*.safetensors"))) == 29
    assert oct(next(spill.glob("*")).stat().st_mode)[-3:] == "700"
    del model
    assert not list(spill.glob("*"))


SCRIPT = """
import os, sys
sys.path.insert(0, {tests!r})
from tiny import tiny
import hfaccel
model = hfaccel.patch(tiny("TL"), "int8")
if os.fork() == 0:
    del model
    sys.exit()
os.wait()
hfaccel.unpatch(hfaccel.patch(hfaccel.unpatch(model), "int4"))
model = hfaccel.patch(tiny("TL"), "int8")
assert len(os.listdir({spill!r})) == 1
"""


def test_spilled_originals_outlive_a_child_and_go_at_exit(spill):
    script = SCRIPT.format(tests=str(Path(__file__).parent), spill=str(spill))
    subprocess.run([sys.executable, "-c", script], check=True, env=os.environ)
    assert spill.is_dir() and not list(spill.glob("*"))


def test_a_full_disk_is_seen_before_anything_changes(monkeypatch, spill):
    model = tiny("TL")
    before = Snapshot(model)
    full = types.SimpleNamespace(free=1000)
    monkeypatch.setattr("hfaccel.journal.shutil.disk_usage", lambda _: full)
    with pytest.raises(
        PatchError, match="needs [0-9,]+ bytes under .*, 1,000 are free: set HFACCEL_SPILL_DIR"
    ):
        hfaccel.patch(model, "int8")
    assert not spill.exists()
    before.check()
    hfaccel.patch(model, "int8", keep_original=False)


def test_a_disk_that_fills_up_in_the_middle(monkeypatch, spill):
    from hfaccel import journal

    model, real, calls = tiny("TL"), journal.save_file, []
    before = Snapshot(model)

    def failing(*args):
        calls.append(args)
        if len(calls) == 7:
            raise OSError(28, "No space left on device")
        real(*args)

    monkeypatch.setattr(journal, "save_file", failing)
    with pytest.raises(PatchError, match="layers.0.mlp.down_proj.weight: .*No space left.*HFACCEL_SPILL_DIR"):
        hfaccel.patch(model, "int8")
    before.check()
    assert not list(spill.glob("*"))


def test_a_spill_folder_that_cannot_be_made(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HFACCEL_SPILL_DIR", str(tmp_path / "file"))
    model = tiny("TL")
    before = Snapshot(model)
    with pytest.raises(PatchError, match="HFACCEL_SPILL_DIR=.*: cannot be written"):
        hfaccel.patch(model, "int8")
    before.check()


def test_originals_that_are_not_kept(spill):
    model = tiny("TL")
    hfaccel.patch(model, "int8", keep_original=False)
    assert not spill.exists() and not model._hfaccel.journal.saved
    for call in (hfaccel.unpatch, lambda m: hfaccel.original(m).__enter__()):
        with pytest.raises(PatchError, match="were not kept"):
            call(model)
    assert isinstance(model.lm_head, QuantLinear)
    runtime = tiny("TL")
    before = Snapshot(runtime)
    hfaccel.unpatch(hfaccel.patch(runtime, "runtime", keep_original=False))
    before.check()


def test_copies_have_no_originals():
    model = hfaccel.patch(tiny("TL"), "int4")
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(copied), logits(model))
        assert hfaccel.report(copied).to_dict()["modules"] == hfaccel.report(model).to_dict()["modules"]
        for call in (hfaccel.unpatch, lambda m: hfaccel.original(m).__enter__()):
            with pytest.raises(PatchError, match="no originals: it is a copy of a patched model"):
                call(copied)
        assert hfaccel.patch(copied, "int4") is copied
        with pytest.raises(AlreadyPatched, match="load the original model instead"):
            hfaccel.patch(copied, "int8")
        copied.lm_head.weight_scale.mul_(2)
    assert not torch.equal(copied.lm_head.weight_scale, model.lm_head.weight_scale)


def test_later_changes_survive_unpatch():
    model = tiny("TL")
    hfaccel.patch(model, "int8")
    model.model.norm.weight.data.mul_(2)
    model.train()
    seen = []
    model.lm_head.register_forward_hook(lambda *_: seen.append(1))
    norm = model.model.norm.weight.clone()
    hfaccel.unpatch(model)
    assert torch.equal(model.model.norm.weight, norm)
    assert all(module.training for module in model.modules())
    logits(model)
    assert seen == [1]


def test_originals_follow_a_move():
    """The originals return to where their replacements are, in their own dtype."""
    model = tiny("TL")
    state = {key: value.clone() for key, value in model.state_dict().items()}
    hfaccel.patch(model, "int8")
    model.to(torch.bfloat16).cpu()
    assert model.model.norm.weight.dtype == torch.bfloat16 and logits(model).dtype == torch.bfloat16
    assert model.lm_head.weight_scale.dtype == torch.float32
    hfaccel.unpatch(model)
    assert model.lm_head.weight.dtype == torch.float32 and torch.equal(
        model.lm_head.weight, state["lm_head.weight"]
    )


def test_half_is_refused_as_transformers_does():
    model = hfaccel.patch(tiny("TL"), "int8")
    for cast in (model.half, model.float):
        with pytest.raises(ValueError, match="not supported for quantized model"):
            cast()
    hfaccel.patch(tiny("TL"), "runtime").half()  # nothing of it is quantized


# original ---------------------------------------------------------------------------------------------------


def generated(model, **kwargs):
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, **kwargs}
    return model.generate(ids(2, 5), attention_mask=torch.ones(2, 5, dtype=torch.long), **options)


@pytest.mark.parametrize("family", ["TL", "gpt2", "gemma3", "gpt_oss", "bert", "t5"])
def test_original(family):
    model = tiny(family)
    before = logits(model)
    hfaccel.patch(model, "int4")
    patched, modules = logits(model), dict(model.named_modules())
    for _ in range(2):
        with hfaccel.original(model) as inside:
            assert inside is model
            assert torch.equal(logits(model), before)
        assert torch.equal(logits(model), patched)
        assert dict(model.named_modules()) == modules
    assert all(p.numel() == 0 for p in model._hfaccel.journal.saved)


def test_original_generates_as_before():
    model = tiny("TL")
    greedy, beams = generated(model), generated(model, num_beams=3)
    hfaccel.patch(model, "int2+kv8")
    patched = generated(model)
    with hfaccel.original(model):
        assert torch.equal(generated(model), greedy)
        assert torch.equal(generated(model, num_beams=3), beams)
    assert torch.equal(generated(model), patched)
    assert not torch.equal(patched, greedy)


def test_original_gives_back_after_an_error():
    model = hfaccel.patch(tiny("TL"), "int4")
    patched = logits(model)
    with pytest.raises(KeyError), hfaccel.original(model):
        raise KeyError
    assert torch.equal(logits(model), patched)


def test_original_within_original_and_what_is_refused_there():
    model = tiny("TL")
    before = Snapshot(model)
    hfaccel.patch(model, "int4")
    patched = logits(model)
    with hfaccel.original(model):
        with hfaccel.original(model):
            assert torch.equal(logits(model), before.logits)
        assert torch.equal(logits(model), before.logits)
        with pytest.raises(PatchError, match="inside original"):
            hfaccel.unpatch(model)
    assert torch.equal(logits(model), patched)
    hfaccel.unpatch(model)
    before.check()


class Stopping:
    """A streamer that holds a `generate` after its first token."""

    def __init__(self):
        self.reached, self.go, self.prompt = threading.Event(), threading.Event(), None

    def put(self, value):
        if self.prompt is None:
            self.prompt = value
            return
        self.reached.set()
        assert self.go.wait(60)

    def end(self):
        pass


def test_original_is_refused_while_another_thread_generates():
    model = tiny("TL")
    hfaccel.patch(model, "int4")
    x, streamer, out = ids(1, 5), Stopping(), []
    options = {
        "max_new_tokens": 5,
        "do_sample": False,
        "pad_token_id": 0,
        "attention_mask": torch.ones_like(x),
    }
    wanted = model.generate(x, **options)
    thread = threading.Thread(target=lambda: out.append(model.generate(x, streamer=streamer, **options)))
    thread.start()
    try:
        assert streamer.reached.wait(60)
        for call in (lambda: hfaccel.original(model).__enter__(), lambda: hfaccel.unpatch(model)):
            with pytest.raises(PatchError, match="generating with this model"):
                call()
    finally:
        streamer.go.set()
        thread.join()
    assert torch.equal(out[0], wanted)
    hfaccel.unpatch(model)


def test_generate_of_another_thread_waits_for_original():
    model = tiny("TL")
    hfaccel.patch(model, "int2")
    wanted, out = generated(model), []
    thread = threading.Thread(target=lambda: out.append(generated(model)))
    with hfaccel.original(model):
        thread.start()
        thread.join(0.3)
        assert thread.is_alive() and not out
    thread.join()
    assert torch.equal(out[0], wanted)


# Wrappers, copies, offload
# -------------------------------------------------------------------------------------


def test_a_pipeline_is_taken_as_its_model():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(512)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")), pad_token="w0", unk_token="w0"
    )
    pipe = pipeline("text-generation", model=tiny("TL"), tokenizer=tokenizer)
    assert hfaccel.patch(pipe, "int8") is pipe
    assert isinstance(pipe.model.lm_head, QuantLinear)
    assert "lm_head" in str(hfaccel.report(pipe))
    hfaccel.unpatch(pipe)
    assert type(pipe.model.lm_head) is nn.Linear


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


def test_a_patched_model_is_freed_without_the_collector():
    import gc
    import weakref

    model = hfaccel.patch(tiny("TL"), "int4")
    logits(model)
    codes = weakref.ref(model.lm_head.weight)
    gc.disable()
    try:
        del model
        assert codes() is None
    finally:
        gc.enable()


# report -----------------------------------------------------------------------------------------------------


def test_report():
    model = tied()
    before = sum(p.nbytes for p in model.parameters()) + sum(b.nbytes for b in model.buffers())
    hfaccel.patch(model, "int4")
    report = hfaccel.report(model)
    data = report.to_dict()
    assert data["recipe"] == "int4" and data["bytes_before"] == before
    now = {t.data_ptr(): t.nbytes for t in (*model.parameters(), *model.buffers()) if t.numel()}
    assert data["bytes"] == sum(now.values()) < before / 2
    assert len(data["modules"]) == 4 * 7 + 2
    text = str(report)
    for part in (
        "model.layers.*.mlp.up_proj",
        "int4 g64 asymmetric",
        "int8 row symmetric",
        "whole model",
        "generate:",
    ):
        assert part in text
    assert sum(r["bytes_after"] for r in data["modules"]) == sum(
        t.nbytes
        for m in model.modules()
        if is_packed(m) and m is not model.lm_head
        for t in m.packed.values()
    )
    arithmetic = 4 * (64 * (64 + 64 + 16 + 16) + 3 * 64 * 176) * (0.5 + 3 / 64) + 512 * 64 + 512 * 4
    packed = sum(r["bytes_after"] for r in data["modules"])
    assert packed == pytest.approx(arithmetic, rel=0.03)


def test_report_has_a_row_for_every_grid_under_one_name():
    first = "model.layers.0.mlp.up_proj"
    config = [RTN(bits=8, targets=(first,)), RTN(bits=4, ignore=(first,))]
    text = str(hfaccel.report(hfaccel.patch(tiny("TL"), config)))
    rows = [line.split() for line in text.splitlines() if line.startswith("model.layers.*.mlp.up_proj")]
    assert [(row[1:4], row[4]) for row in rows] == [
        (["int8", "row", "symmetric"], "1"),
        (["int4", "g64", "asymmetric"], "3"),
    ]


def test_report_of_a_runtime_patch_and_an_encoder():
    assert hfaccel.report(hfaccel.patch(tiny("TL"), "runtime")).to_dict()["modules"] == []
    text = str(hfaccel.report(hfaccel.patch(tiny("bert"), "int8")))
    assert "BertForMaskedLM has no runtime" in text
    assert "left alone: cls.predictions" in text
    text = str(hfaccel.report(hfaccel.patch(tiny("mixtral"), "int8")))
    assert "left alone: model.layers.*.mlp.gate (2): not a target" in text


def test_report_names_the_pattern_that_ignored():
    config = [
        RTN(bits=4, targets="**.self_attn.**", ignore=("re:.*0.*", "**.k_proj")),
        RTN(bits=8, ignore=("model.layers.1.**", "**.self_attn.**")),
    ]
    skipped = hfaccel.report(hfaccel.patch(tiny("TL"), config)).skipped
    whys = {
        "model.layers.0.self_attn.q_proj": "ignored by 're:.*0.*'",
        "model.layers.0.self_attn.k_proj": "ignored by 're:.*0.*'",
        "model.layers.2.self_attn.k_proj": "ignored by '**.k_proj'",
        "model.layers.1.mlp.up_proj": "ignored by 'model.layers.1.**'",
        "model.embed_tokens": "not a target",
    }
    assert {name: skipped[name] for name in whys} == whys
    assert "model.layers.0.mlp.up_proj" not in skipped and "model.layers.2.self_attn.q_proj" not in skipped
    skipped = hfaccel.report(hfaccel.patch(tiny("mixtral"), RTN(targets="model.layers.1.mlp.**"))).skipped
    assert skipped["model.layers.1.mlp.gate"] == "left alone by default"
    assert skipped["model.layers.0.mlp.gate"] == "not a target"


def test_original_behaviour_needs_no_patch_of_other_models():
    first, second = tiny("TL"), tiny("TL")
    before = logits(second)
    hfaccel.patch(first, "int2")
    assert torch.equal(logits(second), before) and type(second) is LlamaForCausalLM
    assert type(first).__name__ == "LlamaForCausalLM" and type(first) is not LlamaForCausalLM


@pytest.mark.parametrize("family", DECODERS)
def test_runtime_alone_changes_no_weight(family):
    model = tiny(family)
    before = Snapshot(model)
    hfaccel.patch(model, "runtime")
    assert torch.equal(logits(model), before.logits)
    assert dict(model.named_parameters()).keys() == before.parameters.keys() - _aliases(model)
    hfaccel.unpatch(model)
    before.check()


def _aliases(model):
    names = set(dict(model.named_parameters(remove_duplicate=False)))
    return names - set(dict(model.named_parameters()))
