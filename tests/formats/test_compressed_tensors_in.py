"""compressed-tensors folders read: other writers' ways, and everything that can be wrong."""

import logging

import pytest
import torch

import hfaccel
from exported import edit, same_packed, small
from hfaccel.errors import CheckpointError
from hfaccel.formats.export import export
from hfaccel.quant.linear import is_packed

NAME = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def folder(tmp_path):
    return lambda recipe: (
        export(small(recipe), None, "compressed-tensors", tmp_path / "out") or tmp_path / "out"
    )


def scheme(record) -> dict:
    return record["config_groups"]["group_0"]


def put(name, value):
    return lambda tensors: tensors.update({name: value(tensors[name])})


def test_scales_of_a_channel_and_of_the_tensor(folder):
    out = folder("fp8")
    first = hfaccel.from_pretrained(out)
    edit(out, put(f"{NAME}.weight_scale", lambda t: t[:, 0].clone()))
    same_packed(first, hfaccel.from_pretrained(out))

    def one(tensors):
        for name in [n for n in tensors if n.endswith("weight_scale")]:
            tensors[name] = tensors[name].flatten()[:1].bfloat16()

    edit(out, one, lambda record: scheme(record)["weights"].update(strategy="tensor"))
    linear = hfaccel.from_pretrained(out).get_submodule(NAME)
    whole = first.get_submodule(NAME)
    peak = whole.weight_scale[0, 0, 0].bfloat16().float()
    assert torch.equal(linear.weight_scale, torch.full_like(whole.weight_scale, float(peak)))
    assert torch.equal(linear.weight, whole.weight)


def test_targets_are_names_patterns_and_classes(folder):
    out = folder("int4-g32")
    first = hfaccel.from_pretrained(out)

    def split(record):
        group = scheme(record)
        record["config_groups"] = {
            "one": dict(group, targets=["re:.*self_attn.*"]),
            "two": dict(group, targets=["Linear"]),
        }

    same_packed(first, hfaccel.from_pretrained(edit(out, config=split)))


def test_columns_in_another_order_are_dequantized_and_said(folder, caplog):
    out = folder("gptq4-sym-g32")
    index = torch.arange(64).flip(0) // 32
    edit(out, lambda tensors: tensors.update({f"{NAME}.weight_g_idx": index.int()}))
    packed = hfaccel.from_pretrained(out).get_submodule("model.layers.0.self_attn.k_proj")
    assert is_packed(packed) and f"{NAME}: no layout holds its columns" in caplog.text


@pytest.mark.parametrize(
    ("recipe", "acts", "act", "words"),
    [
        ("w8a8", {"symmetric": False}, "chunk", "activations stay finer than its scheme says"),
        ("w8a8", None, "chunk", ""),
        ("fp8", {"dynamic": False, "strategy": "tensor"}, "token", "E4M3 with one scale a token"),
    ],
)
def test_activations_that_no_layout_has(folder, caplog, recipe, acts, act, words):
    out = folder(recipe)

    def change(record):
        group = scheme(record)
        group["input_activations"] = acts and dict(group["input_activations"], **acts)

    with caplog.at_level(logging.WARNING, "hfaccel"):
        layout = hfaccel.from_pretrained(edit(out, config=change)).get_submodule(NAME).layout
    assert layout.act == act and words in caplog.text
    assert caplog.text.count("compressed-tensors:") == bool(words)  # once, not once a linear


def weights(**values):
    return lambda record: scheme(record)["weights"].update(values)


BAD = [
    (
        "int4-g32",
        weights(num_bits=3),
        None,
        "num_bits 3 of type 'int'; known are float of 8 and int of 4 and 8",
    ),
    ("int4-g32", weights(type="float"), None, "num_bits 4 of type 'float'; known are"),
    ("int4-g32", weights(strategy="block"), None, "strategy 'block'; known are group, channel, tensor"),
    ("int4-g32", weights(group_size=None), None, "group_size None; a positive number for strategy group"),
    ("int4-g32", weights(group_size=64), None, "down_proj.weight_scale is F16 .*64, 4.* say .*64, 2"),
    (
        "int4-g32",
        lambda r: r.update(format="marlin-24"),
        None,
        "format 'marlin-24'; known are pack-quantized",
    ),
    ("int4-g32", lambda r: r.update(config_groups=None), None, "config_groups None is no mapping of groups"),
    (
        "int4-g32",
        lambda r: r.update(config_groups={}),
        None,
        "down_proj is quantized, and no target of config_",
    ),
    ("int4-g32", lambda r: scheme(r).pop("weights"), None, "down_proj: its config group has no weights"),
    ("int4-g32", lambda r: scheme(r).update(targets=["re:("]), None, r"target 're:\('"),
    ("int4-g32", lambda r: r.update(sparsity_config={"format": "sparse-24"}), None, "sparsity_config is not"),
    (
        "int4-g32",
        None,
        put(f"{NAME}.weight_shape", lambda t: t + 1),
        r"weight_shape says \[65, 65\], the arch",
    ),
    ("int4-g32", None, put(f"{NAME}.weight_packed", lambda t: t[1:].clone()), "weight_packed is I32 .*63, 8"),
    ("int4-g32", None, put(f"{NAME}.weight_zero_point", lambda t: t.long()), "weight_zero_point is I64 "),
    ("int4-g32", None, lambda t: t.pop(f"{NAME}.weight_zero_point"), "weight_zero_point is missing"),
    ("int4-g32", None, lambda t: t.pop(f"{NAME}.weight_scale"), f"{NAME}.weight_scale is missing"),
    (
        "int4-g32",
        None,
        lambda t: t.pop(f"{NAME}.weight_packed"),
        f"{NAME}: its scales are there, its weight is",
    ),
    (
        "w8a8",
        None,
        put(f"{NAME}.weight", lambda t: t.float()),
        f"{NAME}: its scales are there, its weight is",
    ),
    ("w8a8-static", None, lambda t: t.pop(f"{NAME}.input_scale"), f"{NAME}.input_scale is missing"),
    ("w8a8-static", None, put(f"{NAME}.input_scale", lambda t: -t), f"{NAME}.input_scale is -"),
    ("w8a8-static", None, put(f"{NAME}.input_scale", lambda t: t * 0 + 1e-40), f"{NAME}.input_scale is 9.99"),
]


@pytest.mark.parametrize(("recipe", "config", "change", "words"), BAD, ids=[case[3][:40] for case in BAD])
def test_what_is_wrong_is_named(folder, recipe, config, change, words):
    out = edit(folder(recipe), change, config)
    with pytest.raises(CheckpointError, match=words):
        hfaccel.from_pretrained(out)


def test_a_group_index_out_of_range(folder):
    out = folder("gptq4-sym-g32")
    edit(out, lambda t: t.update({f"{NAME}.weight_g_idx": torch.arange(64).int()}))
    with pytest.raises(
        CheckpointError, match=f"{NAME}.weight_g_idx has group 2; the scales have groups 0 to 1"
    ):
        hfaccel.from_pretrained(out)
