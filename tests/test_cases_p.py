"""Faults that people reported against tools of this kind: tying, group sizes, copies and files, offloading.

Parametrized over every rounding method in the registry, so that new ones meet the same cases.
"""

import copy
import math
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

import hfaccel
from hfaccel.errors import PatchError
from hfaccel.quant.linear import codes_of, is_packed
from hfaccel.recipe import PatchConfig
from hfaccel.report import model_bytes
from hfaccel_kernels.packing import unpack_rows
from saved import ROUNDING, attention, config_json, logits, patched, reload, stored
from tiny import ids, tiny

rounding = pytest.mark.parametrize("recipe", ROUNDING)


def method(recipe: str, **fields):
    """The transform of a recipe step with other fields."""
    (transform,) = PatchConfig.from_recipe(recipe).transforms
    return type(transform).from_dict({**transform.to_dict(), **fields})


def tied(**kwargs):
    return tiny("TL", tie_word_embeddings=True, **kwargs)


# P1: tied embedding and head -------------------------------------------------------------------------------


@rounding
def test_p1_default_keeps_one_tensor_for_both_ends(recipe, tmp_path):
    model = patched(tied(), recipe)
    model.save_pretrained(tmp_path)
    loaded = reload(model, tmp_path)
    assert sum("embed_tokens.weight" in n or "lm_head.weight" in n for n in stored(tmp_path)) == len(
        model.lm_head.packed
    )
    for each in (model, loaded):
        assert each.config.tie_word_embeddings
        for name, tensor in each.lm_head.packed.items():
            assert tensor is each.model.embed_tokens.packed[name]
    assert config_json(tmp_path)["tie_word_embeddings"]
    assert torch.equal(logits(loaded), logits(model))


@rounding
def test_p1_head_alone_leaves_lookups_bit_identical(recipe, tmp_path):
    original, every_id = tied(), torch.arange(512)
    model = patched(tied(), method(recipe, targets=["lm_head"]))
    model.save_pretrained(tmp_path)
    loaded = reload(model, tmp_path)
    expected = original.model.embed_tokens(every_id)
    for each in (model, loaded):
        assert is_packed(each.lm_head) and not is_packed(each.model.embed_tokens)
        assert torch.equal(each.model.embed_tokens(every_id), expected)
        assert not each.config.tie_word_embeddings
        each.tie_weights()
    assert (
        not config_json(tmp_path)["tie_word_embeddings"]
        and not config_json(tmp_path)["quantization_config"]["tied"]
    )
    assert torch.equal(logits(loaded), logits(model))
    hfaccel.unpatch(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight and model.config.tie_word_embeddings
    assert torch.equal(logits(model), logits(original))


@rounding
def test_p1_each_end_has_its_own_setting(recipe, tmp_path):
    ends = [
        hfaccel.Head(bits=8, targets=["lm_head"]),
        method(recipe, targets=["model.embed_tokens"], ignore=[]),
    ]
    model = patched(tied(), ends)
    model.save_pretrained(tmp_path)
    loaded = reload(model, tmp_path)
    for each in (model, loaded):
        assert each.lm_head.layout.bits == 8 and each.lm_head.weight is not each.model.embed_tokens.weight
        assert each.model.embed_tokens.layout.bits == method(recipe).bits
        assert not each.config.tie_word_embeddings
    assert torch.equal(logits(loaded), logits(model))
    alone = patched(tied(), method(recipe, targets=["model.embed_tokens"], ignore=[]))
    assert torch.equal(codes_of(model.model.embed_tokens), codes_of(alone.model.embed_tokens))


@rounding
def test_p1_one_module_under_two_names_is_quantized_once(recipe):
    single, double = tiny("TL"), tiny("TL")
    double.again = double.model.layers[1].mlp.down_proj
    for each in (single, double):
        patched(each, method(recipe, ignore=["model.layers.0.**"]))
    assert double.again is double.model.layers[1].mlp.down_proj and is_packed(double.again)
    if method(recipe).name not in ("awq", "w8a8"):  # what another parent calls too is not scaled
        assert torch.equal(codes_of(double.again), codes_of(single.model.layers[1].mlp.down_proj))
    assert len(double._hfaccel.records) == len(single._hfaccel.records)
    hfaccel.unpatch(double)
    assert double.again is double.model.layers[1].mlp.down_proj and type(double.again) is nn.Linear


# P3: rows that the group size does not divide --------------------------------------------------------------


ODD = {
    "S135, 576 = 4.5 x 128": ("S135", {"vocab_size": 512}, 128),
    "70 -> 48 with bias": (
        "TL",
        {"hidden_size": 70, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 24}
        | {"attention_bias": True, "mlp_bias": True},
        128,
    ),
    "64 -> 515 with bias": ("TL", {"intermediate_size": 515, "mlp_bias": True}, 48),
    "whole rows": ("TL", {}, -1),
}


@rounding
@pytest.mark.parametrize("shape", ODD)
def test_p3_any_row_length(recipe, shape, tmp_path):
    family, overrides, group = ODD[shape]
    if method(recipe).group == -1 and method(recipe).name in ("fp8", "w8a8"):
        group = -1  # they have no other
    original, model = tiny(family, **overrides), tiny(family, **overrides)
    patched(model, method(recipe, group=group))
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(reload(model, tmp_path)), logits(model))
    for name, module in model.named_modules():
        if not is_packed(module) or name in ("lm_head", "model.embed_tokens"):
            continue
        n, k = module.out_features, module.in_features
        groups = 1 if group == -1 else math.ceil(k / group)
        assert module.layout.groups(k) == groups, name
        shapes = {key: (tuple(t.shape), t.dtype) for key, t in module.packed.items()}
        assert shapes == module.layout.shapes(n, k), name
        if method(recipe).name != "nf4":
            assert module.weight_scale.shape == (math.ceil(n / 16), groups, 16), name
        theirs = original.get_submodule(name)
        feeds = method(recipe).name in ("awq", "w8a8") and name.endswith(("v_proj", "up_proj"))
        if theirs.bias is not None and not feeds:
            assert torch.equal(module.bias, theirs.bias), name
        if method(recipe).name == "int":
            step = unpack_rows(module.weight_scale, n).float()
            step = step.repeat_interleave(k if group == -1 else group, 1)[:, :k]
            error = (module.dequantize() - theirs.weight).abs()
            # Codes of up to 2^bits steps go through fp32 twice, 2^-24 of their size each time.
            slack = 2.0 ** (module.layout.bits - 22)
            assert (error <= (0.5 + slack) * step).all(), name


@rounding
def test_p3_a_refusal_leaves_the_model_alone(recipe):
    model = tiny("TL")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(PatchError, match="group=0"):
        patched(model, method(recipe, group=0))
    with torch.no_grad():
        model.model.layers[3].mlp.down_proj.weight[5, 7] = math.inf
    with pytest.raises(PatchError, match="model.layers.3.mlp.down_proj.*1 of 11264 values"):
        patched(model, recipe)
    with torch.no_grad():
        model.model.layers[3].mlp.down_proj.weight[5, 7] = before["model.layers.3.mlp.down_proj.weight"][5, 7]
    assert not any(is_packed(module) for module in model.modules()) and not hasattr(model, "_hfaccel")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


# P5: copies, pickles, state dicts, files -------------------------------------------------------------------


@rounding
def test_p5_copies_are_bit_identical_and_independent(recipe):
    model = tied()
    model.model.layers[0].input_layernorm.weight.requires_grad_(False)
    patched(model, recipe)
    expected = logits(model)
    other = patched(tied(seed=5), recipe)
    assert other.load_state_dict(model.state_dict(), strict=True) == ([], [])
    copies = {
        "deepcopy": copy.deepcopy(model),
        "pickle": pickle.loads(pickle.dumps(model)),
        "state dict": other,
    }
    for how, twin in copies.items():
        assert torch.equal(logits(twin), expected), how
        assert twin.lm_head.weight is twin.model.embed_tokens.weight, how
        for module in filter(is_packed, twin.modules()):
            assert not any(p.requires_grad for p in module.parameters(recurse=False)), how
        if how != "state dict":
            flags = {name: p.requires_grad for name, p in twin.named_parameters()}
            assert flags == {name: p.requires_grad for name, p in model.named_parameters()}
            assert not flags["model.layers.0.input_layernorm.weight"] and flags["model.norm.weight"]
            with pytest.raises(PatchError, match="copy of a patched model"):
                hfaccel.unpatch(twin)
        twin.model.layers[1].mlp.up_proj.weight_scale.mul_(2)
        assert not torch.equal(logits(twin), expected) and torch.equal(logits(model), expected), how
    hfaccel.unpatch(model)
    assert torch.equal(logits(model), logits(tied()))


@rounding
def test_p5_sharded_files(recipe, tmp_path):
    model = patched(tiny("TL"), recipe)
    model.save_pretrained(tmp_path, max_shard_size="32KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    loaded = reload(model, tmp_path)
    assert torch.equal(logits(loaded), logits(model))
    assert loaded.state_dict().keys() == stored(tmp_path).keys() == model.state_dict().keys()


@rounding
def test_p5_files_are_as_large_as_memory(recipe, tmp_path):
    model = patched(tied(hidden_size=256, intermediate_size=704, num_hidden_layers=2), recipe)
    model.save_pretrained(tmp_path)
    size = (tmp_path / "model.safetensors").stat().st_size
    assert abs(size - model_bytes(model)) < 0.05 * model_bytes(model)


FRESH = """
import pathlib, pickle, sys
import torch
root = pathlib.Path(sys.argv[1])
expected = torch.load(root / "expected.pt")
import hfaccel
from transformers import AutoModelForCausalLM
for recipe, want in expected["logits"].items():
    loaded = AutoModelForCausalLM.from_pretrained(root / recipe, attn_implementation=expected["attention"])
    unpickled = pickle.loads((root / f"{recipe}.pickle").read_bytes())
    state = torch.load(root / f"{recipe}.pt")
    assert loaded.load_state_dict(state, strict=True) == ([], [])
    for model in (loaded, unpickled):
        assert torch.equal(model(input_ids=expected["ids"]).logits, want), recipe
    try:
        hfaccel.unpatch(unpickled)
    except hfaccel.PatchError as error:
        assert "copy of a patched model" in str(error)
    else:
        raise AssertionError(recipe)
"""


def test_p5_a_process_that_never_saw_the_original(tmp_path):
    expected = {"ids": ids(2, 12), "logits": {}}
    for recipe in ROUNDING:
        model = patched(tiny("TL"), recipe)
        expected["attention"] = attention(model)["attn_implementation"]
        model.save_pretrained(tmp_path / recipe)
        (tmp_path / f"{recipe}.pickle").write_bytes(pickle.dumps(model))
        torch.save(model.state_dict(), tmp_path / f"{recipe}.pt")
        expected["logits"][recipe] = logits(model)
    torch.save(expected, tmp_path / "expected.pt")
    run = subprocess.run([sys.executable, "-c", FRESH, tmp_path], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


# P7: weights on disk, weights nowhere ----------------------------------------------------------------------


def spread(folder, model, *on_disk: str):
    """The folder's model with some modules on disk and the rest on the CPU."""
    parts = ["model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"]
    parts += [f"model.layers.{i}" for i in range(4)]
    places = {part: "disk" if part in on_disk else "cpu" for part in parts}
    return LlamaForCausalLM.from_pretrained(folder, device_map=places, **attention(model))


@rounding
@pytest.mark.parametrize("on_disk", [("model.layers.1",), ("model.embed_tokens", "lm_head")])
def test_p7_offloaded_weights_give_the_same_bits(recipe, on_disk, tmp_path):
    original, inside = tied(), tied()
    original.save_pretrained(tmp_path / "plain")
    patched(inside, recipe).save_pretrained(tmp_path / "inside")
    model = spread(tmp_path / "plain", original, *on_disk)
    assert next(model.get_submodule(on_disk[0]).parameters()).is_meta
    assert torch.equal(
        logits(model), logits(original)
    )  # after which hooks have put new placeholders in place
    patched(model, recipe)
    for _ in range(2):
        assert torch.equal(logits(model), logits(inside))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not any(p.is_meta for m in model.modules() if is_packed(m) for p in m.parameters(recurse=False))
    model.save_pretrained(tmp_path / "outside")
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "outside" / file).read_bytes() == (tmp_path / "inside" / file).read_bytes()
    hfaccel.unpatch(model)
    assert torch.equal(logits(model), logits(original))


@rounding
def test_p7_a_model_without_data_is_refused(recipe):
    with torch.device("meta"):
        model = LlamaForCausalLM(tiny("TL").config)
    with pytest.raises(PatchError, match="model.embed_tokens.weight is on the meta device"):
        patched(model, recipe)
    assert type(model.lm_head) is nn.Linear and not hasattr(model, "_hfaccel")
    part = tiny("TL")
    part.model.layers[2].mlp.to("meta")
    with pytest.raises(PatchError, match="model.layers.2.mlp.gate_proj.weight is on the meta device"):
        patched(part, recipe)
    assert not any(map(is_packed, part.modules()))
