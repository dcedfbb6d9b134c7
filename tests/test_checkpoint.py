"""The record: what it says, what it refuses, and that a folder comes back as the model that wrote it."""

import copy
import json

import pytest
import torch
from torch import nn

import hfaccel
from hfaccel.checkpoint import FORMAT, SavedConfig, in_adapter
from hfaccel.compat import plain_name
from hfaccel.errors import CheckpointError, PatchError, UnknownName
from hfaccel.quant.linear import QuantEmbedding, QuantLinear, is_packed
from hfaccel.report import model_bytes
from hfaccel_kernels.layouts import Layout
from saved import config_json, logits, patched, reload, stored
from tiny import FAMILIES, tiny


@pytest.mark.parametrize("family", [*FAMILIES, "TG", "TX"])
def test_a_folder_comes_back_as_the_model_that_wrote_it(family, tmp_path):
    model = patched(tiny(family), "int4")
    model.save_pretrained(tmp_path)
    loaded = reload(model, tmp_path)
    assert torch.equal(logits(loaded), logits(model))
    assert type(loaded).__name__ == type(model).__name__
    assert list(loaded.state_dict()) == list(model.state_dict())
    place = {"_name_or_path": str(tmp_path)}
    assert loaded.config.to_dict() == model.config.to_dict() | place
    assert loaded._hfaccel.config == model._hfaccel.config and loaded._hfaccel.origin == "loaded"
    ours, theirs = (sorted(m._hfaccel.records, key=lambda r: r.name) for m in (loaded, model))
    assert ours == theirs
    for (name, a), (_, b) in zip(loaded.named_modules(), model.named_modules(), strict=True):
        assert type(a).__name__ == type(b).__name__ and a.training == b.training, name
        if is_packed(a):
            assert a.layout == b.layout and repr(a) == repr(b), name


@pytest.mark.parametrize(
    "recipe", ["int8-asym", "int8-g32+kv8", "int3-g40", "int2-row-sym", "int4+head16", "int8-tensor+head4"]
)
def test_every_layout_comes_back(recipe, tmp_path):
    model = patched(tiny("TL", tie_word_embeddings=True), recipe)
    model.save_pretrained(tmp_path)
    loaded = reload(model, tmp_path)
    assert torch.equal(logits(loaded), logits(model))
    assert loaded._hfaccel.config.to_recipe() == recipe


def test_the_record_says_what_its_docstring_says(tmp_path):
    model = patched(tiny("TL", tie_word_embeddings=True), "kv8+int4")
    model.save_pretrained(tmp_path)
    record = config_json(tmp_path)["quantization_config"]
    assert set(record) == set(SavedConfig.empty())
    assert (record["quant_method"], record["format"]) == ("hfaccel", FORMAT)
    assert record["hfaccel_version"] == hfaccel.__version__
    assert [entry["name"] for entry in record["transforms"]] == ["kv", "int"]
    assert record["dtype"] == "float32" and record["dtypes"] == {}
    sizes = {name: size for group in record["packed"] for name, size in group["modules"].items()}
    assert sizes["model.layers.3.mlp.down_proj"] == "64x176" and sizes["lm_head"] == "512x64"
    assert len(sizes) == 4 * 7 + 2
    assert {(g["kind"], g["step"]) for g in record["packed"]} == {
        ("linear", "int4"),
        ("linear", "head8"),
        ("embedding", "head8"),
    }
    assert record["tied"] == {
        f"lm_head.{leaf}": f"model.embed_tokens.{leaf}" for leaf in ("weight", "weight_scale")
    }
    assert SavedConfig.from_dict(copy.deepcopy(record)).to_dict() == record


def test_experts_are_stored_as_they_lie_in_memory(tmp_path):
    model = patched(tiny("TX"), "int4")
    model.save_pretrained(tmp_path)
    record = config_json(tmp_path)["quantization_config"]
    (group,) = (g for g in record["packed"] if g["kind"] == "experts")
    assert group["modules"]["model.layers.0.mlp.experts"] == "4x224x64,4x64x112"
    tensors, experts = stored(tmp_path), model.model.layers[0].mlp.experts
    for name in ("gate_up_proj", "gate_up_proj_scale", "gate_up_proj_zero", "down_proj"):
        assert torch.equal(tensors[f"model.layers.0.mlp.experts.{name}"], getattr(experts, name))


def test_files_hold_each_tensor_once_and_are_as_large_as_memory(tmp_path):
    model = patched(tiny("S135", vocab_size=8192), "int4")
    model.save_pretrained(tmp_path)
    tensors = stored(tmp_path)
    assert not any(name.startswith("lm_head") for name in tensors)
    assert set(tensors) == {n for n in model.state_dict() if not n.startswith("lm_head")}
    size = (tmp_path / "model.safetensors").stat().st_size
    assert abs(size - model_bytes(model)) < 0.05 * model_bytes(model)


def test_dtypes_that_differ_come_back(tmp_path):
    model = tiny("TL", tie_word_embeddings=True).to(torch.bfloat16)
    model.model.norm.float()
    model.model.layers[1].mlp.up_proj.float()
    patched(model, "int4", keep_original=False)
    model.save_pretrained(tmp_path)
    record = config_json(tmp_path)["quantization_config"]
    assert record["dtype"] == "bfloat16"
    assert record["dtypes"] == {
        "model.norm.weight": "float32",
        "model.layers.1.mlp.up_proj.weight": "float32",
    }
    loaded = reload(model, tmp_path)
    assert loaded.model.norm.weight.dtype == torch.float32
    assert loaded.model.layers[1].mlp.up_proj.compute_dtype == torch.float32
    assert loaded.model.layers[1].mlp.gate_proj.compute_dtype == torch.bfloat16


def test_the_mark_goes_with_the_patch():
    model = tiny("TL")
    before, config = dict(vars(model)), model.config
    patched(model, "int8")
    assert model.is_quantized and model.quantization_method == "hfaccel" and model.hf_quantizer is not None
    assert model.config is not config and not hasattr(config, "quantization_config")
    hfaccel.unpatch(model)
    assert model.config is config
    assert {key: id(value) for key, value in vars(model).items()} == {k: id(v) for k, v in before.items()}


@pytest.mark.parametrize("recipe", ["runtime", "kv8"])
def test_runtime_choices_leave_a_plain_model(recipe):
    model = patched(tiny("TL"), recipe)
    assert getattr(model, "hf_quantizer", None) is None and not getattr(model, "is_quantized", False)
    assert not hasattr(model.config, "quantization_config")
    assert model.config.hfaccel == {"format": FORMAT, **model._hfaccel.config.to_dict()}
    hfaccel.unpatch(model)
    assert not hasattr(model.config, "hfaccel")


def test_tie_weights_keeps_a_packed_head(tmp_path):
    """transformers pads the bias of a tied head to the rows of its weight, which are fewer when packed."""
    model = tiny("bert")
    patched(model, hfaccel.RTN(bits=8, targets="cls.predictions.decoder", ignore=()))
    expected, bias = logits(model), model.cls.predictions.decoder.bias
    model.save_pretrained(tmp_path)
    loaded = reload(model, tmp_path)
    assert torch.equal(logits(loaded), expected)
    for each in (model, loaded):
        each.tie_weights()
        assert each.cls.predictions.decoder.bias.shape == bias.shape
        assert torch.equal(logits(each), expected)


def test_a_head_of_its_own_where_the_flag_means_something_else(tmp_path):
    """T5's config takes tie_word_embeddings=False for "do not scale the decoder's output"."""
    model = tiny("t5")
    patched(model, hfaccel.RTN(bits=8, targets="lm_head", ignore=()))
    model.save_pretrained(tmp_path)
    loaded = reload(model, tmp_path)
    assert isinstance(loaded.lm_head, QuantLinear) and not isinstance(loaded.shared, QuantEmbedding)
    assert loaded.encoder.embed_tokens.weight is loaded.shared.weight
    assert torch.equal(logits(loaded), logits(model))


RECORD = {
    "transforms": [{"name": "int", "bits": 4}],
    "packed": [
        {
            "kind": "linear",
            "step": "int4",
            "layout": Layout(4, 64, False, "fp16").to_dict(),
            "modules": {"a.b": "16x64"},
        }
    ],
}


def damaged(*path, value):
    record = json.loads(json.dumps(SavedConfig.empty() | RECORD))
    at = record
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return record


@pytest.mark.parametrize(
    "record, error, words",
    [
        (damaged("format", value=2), CheckpointError, "format 2; this hfaccel reads formats up to 1"),
        (damaged("format", value="1"), CheckpointError, "format '1'"),
        (damaged("format", value=True), CheckpointError, "format True"),
        (damaged("more", value=0), CheckpointError, "more"),
        (damaged("dtype", value="float23"), CheckpointError, "float23"),
        (damaged("dtypes", value={"a": "int8"}), CheckpointError, "int8"),
        (damaged("tied", value=["a"]), CheckpointError, "tied"),
        (damaged("packed", value="int4"), CheckpointError, "packed"),
        (damaged("packed", 0, "kind", value="conv"), CheckpointError, "'conv'; known are linear"),
        (
            damaged("packed", 0, "layout", "bits", value=7),
            CheckpointError,
            r"bits=7: known are \[2, 3, 4, 5, 6, 8\]",
        ),
        (damaged("packed", 0, "layout", "group", value=0), CheckpointError, "group=0"),
        (damaged("packed", 0, "layout", "shape", value=1), CheckpointError, "shape"),
        (
            damaged("packed", 0, "layout", "symmetric", value=0),
            CheckpointError,
            "symmetric is not of type bool",
        ),
        (
            damaged("packed", 0, "layout", value={"bits": 4}),
            CheckpointError,
            "must have the fields .*act_bits",
        ),
        (damaged("packed", 0, "kind", value=[]), CheckpointError, r"\[\]; known are linear"),
        (damaged("packed", 0, "step", value=None), CheckpointError, "step None"),
        (damaged("hfaccel_version", value=3), CheckpointError, "hfaccel_version"),
        (damaged("packed", 0, "modules", value={"a.b": "16x0"}), CheckpointError, "a.b: '16x0'"),
        (damaged("packed", 0, "modules", value={"a.b": "4x16x64"}), CheckpointError, "packed linear"),
        (damaged("transforms", value=[{"name": "gtpq"}]), UnknownName, "'gtpq'; known are .*int"),
        (damaged("transforms", value=[{"name": "int", "bits": 7}]), PatchError, "bits=7"),
        (damaged("transforms", value=[{"name": "int", "bit": 4}]), UnknownName, "'bit'; known are"),
        (damaged("transforms", value=3), PatchError, "transforms"),
    ],
)
def test_a_damaged_record_is_refused_by_name(record, error, words):
    SavedConfig.from_dict(json.loads(json.dumps(SavedConfig.empty() | RECORD)))
    with pytest.raises(error, match=words):
        SavedConfig.from_dict(record)
    del record["packed"]
    with pytest.raises(PatchError):
        SavedConfig.from_dict(record)


def test_names_without_adapters():
    model = nn.Module()
    model.q = nn.Module()
    model.q.base_layer = nn.Linear(2, 2)
    model.q.lora_A = nn.Linear(2, 2)
    model.base = nn.Linear(2, 2)
    assert plain_name("q.base_layer.weight") == "q.weight"
    kept = [name for name in model.state_dict() if not in_adapter(model, name)]
    assert kept == ["q.base_layer.weight", "q.base_layer.bias", "base.weight", "base.bias"]
