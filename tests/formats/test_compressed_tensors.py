"""compressed-tensors folders written: read by the format's description, and by hfaccel."""

import pytest
import torch

import hfaccel
from exported import matrices, nibbles, same_packed, small
from hfaccel import RTN
from hfaccel.errors import PatchError, UnknownName
from hfaccel.formats.export import export
from saved import config_json, patched, stored
from tiny import tiny


def by_description(tensors, name: str, weights: dict) -> torch.Tensor:
    """The weight [N, K] of a linear."""
    scale = tensors[f"{name}.weight_scale"].float()
    if (plain := tensors.get(f"{name}.weight")) is not None:
        return plain.float() * scale
    bits, (n, k) = weights["num_bits"], tensors[f"{name}.weight_shape"].tolist()
    middle = 1 << (bits - 1)  # codes and zero points are signed numbers, stored from 0 on
    rows = [
        sum((nibbles(word, bits) for word in row.tolist()), []) for row in tensors[f"{name}.weight_packed"]
    ]
    codes = torch.tensor(rows)[:, :k].float() - middle
    zero = torch.zeros_like(scale)
    if not weights["symmetric"]:
        packed = tensors[f"{name}.weight_zero_point"]
        columns = [sum((nibbles(word, bits) for word in column.tolist()), []) for column in packed.t()]
        zero = torch.tensor(columns).t()[:n].float() - middle
    index = torch.arange(k) // (weights["group_size"] or k)
    return (codes - zero[:, index]) * scale[:, index]


SCHEMES = [
    ("int4-g32", "pack-quantized", ("int", 4, "group", 32, False), None),
    ("gptq4-sym-g64", "pack-quantized", ("int", 4, "group", 64, True), None),
    ("int8", "pack-quantized", ("int", 8, "channel", None, True), None),
    ("int8-asym", "pack-quantized", ("int", 8, "channel", None, False), None),
    ("w8a8", "int-quantized", ("int", 8, "channel", None, True), ("int", "token", True)),
    ("w8a8-static", "int-quantized", ("int", 8, "channel", None, True), ("int", "tensor", False)),
    ("fp8", "float-quantized", ("float", 8, "channel", None, True), ("float", "token", True)),
]


@pytest.mark.parametrize(("recipe", "format", "weights", "acts"), SCHEMES, ids=lambda value: str(value))
def test_files_hold_what_the_model_holds(tmp_path, recipe, format, weights, acts):
    model = small(recipe)
    export(model, None, "compressed-tensors", tmp_path / "out")
    tensors, record = stored(tmp_path / "out"), config_json(tmp_path / "out")["quantization_config"]
    (group,) = record["config_groups"].values()
    assert record["quant_method"] == "compressed-tensors" and record["quantization_status"] == "compressed"
    assert record["format"] == group["format"] == format
    assert record["ignore"] == ["lm_head"] and group["targets"] == ["Linear"]
    found = group["weights"]
    keys = ("type", "num_bits", "strategy", "group_size", "symmetric")
    assert tuple(found[key] for key in keys) == weights
    given = group["input_activations"]
    assert acts == (given and (given["type"], given["strategy"], given["dynamic"]))
    for name, weight in matrices(model).items():
        assert torch.equal(by_description(tensors, name, found), weight)
        if recipe == "w8a8-static":
            assert float(tensors[f"{name}.input_scale"]) == model.get_submodule(name).layout.act_scale


@pytest.mark.parametrize("recipe", [scheme[0] for scheme in SCHEMES] + ["int8-asym-g32"])
def test_round_trip(tmp_path, recipe):
    model = small(recipe)
    export(model, None, "compressed-tensors", tmp_path / "out")
    back = hfaccel.from_pretrained(tmp_path / "out")
    same_packed(model, back)
    name = "model.layers.0.self_attn.q_proj"
    assert back.get_submodule(name).layout == model.get_submodule(name).layout


def test_schemes_side_by_side(tmp_path):
    model = patched(
        tiny("llama", intermediate_size=128),
        [
            RTN(bits=4, group=32, targets=("**.self_attn.*",)),
            hfaccel.FP8(targets=("**.mlp.*",)),
            hfaccel.Head(bits=16),
        ],
    )
    export(model, None, "compressed-tensors", tmp_path / "out")
    record = config_json(tmp_path / "out")["quantization_config"]
    assert record["format"] == "mixed-precision"
    first, second = record["config_groups"].values()
    assert (first["format"], second["format"]) == ("pack-quantized", "float-quantized")
    assert first["targets"][0] == "model.layers.0.self_attn.q_proj" and len(second["targets"]) == 6
    same_packed(model, hfaccel.from_pretrained(tmp_path / "out"))


@pytest.mark.parametrize(
    ("family", "recipe", "format", "words"),
    [
        ("llama", "nf4", "compressed-tensors", "q_proj: .*nf4 g64; compressed-tensors folders hold"),
        ("llama", "fp8-e5m2", "compressed-tensors", "e5m2 row; compressed-tensors folders hold integers"),
        ("llama", "int3", "compressed-tensors", "int3 g64 .*; compressed-tensors folders hold"),
        ("llama", "int4-g64", "compressed-tensors", "mlp.down_proj has rows of 112: .* whole groups of 64"),
        ("llama", "int8", "compressed-tensors:w8a8", "int8 row symmetric is w8a16, not w8a8"),
        ("gpt2", "int8", "compressed-tensors", "transformer.h.0.attn.c_attn is a Conv1D"),
        ("mixtral", "int8", "compressed-tensors", "mlp.experts: quantized fused experts are not written"),
    ],
)
def test_what_the_format_cannot_hold_is_refused_by_name(tmp_path, family, recipe, format, words):
    with pytest.raises(PatchError, match=words):
        export(patched(tiny(family), recipe), None, format, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_unknown_variants(tmp_path):
    with pytest.raises(UnknownName, match="known are compressed-tensors:w4a16, compressed-tensors:w8a16"):
        export(small("int8"), None, "compressed-tensors:w2", tmp_path / "out")
