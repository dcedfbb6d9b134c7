"""GPTQ folders read: other writers' ways, and everything that can be wrong."""

import logging

import pytest
import torch

import hfaccel
from exported import edit, matrices, same_packed, small
from hfaccel.errors import CheckpointError
from hfaccel.formats import words
from hfaccel.formats.export import export
from hfaccel.quant.linear import is_packed
from tiny import ids

NAME = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def folder(tmp_path):
    export(small("gptq4-sym-g32"), None, "gptq", tmp_path / "out")
    return tmp_path / "out"


def test_columns_in_another_order_are_dequantized_and_said(folder, caplog):
    """desc_act: groups of columns that lie apart. Weights are those of the description all the same."""
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    index = torch.arange(64)[order] // 32

    def change(tensors):
        tensors[f"{NAME}.g_idx"] = index.int()

    edit(folder, change, lambda record: record.update(desc_act=True))
    with caplog.at_level(logging.WARNING, "hfaccel"):
        model = hfaccel.from_pretrained(folder)
    assert f"{NAME}: no layout holds its columns, dequantized to torch.float32" in caplog.text
    linear = model.get_submodule(NAME)
    assert not is_packed(linear) and is_packed(model.get_submodule("model.layers.0.self_attn.k_proj"))
    from saved import stored

    found = stored(folder)
    codes = words.unpack(found[f"{NAME}.qweight"].t(), 4, 64).float()
    assert torch.equal(linear.weight, (codes - 8) * found[f"{NAME}.scales"].float().t()[:, index])
    assert model.generate(ids(1, 5), max_new_tokens=3).shape == (1, 8)
    said = hfaccel.report(model)
    assert said.skipped == {NAME: "dequantized to float32: groups of its columns lie apart"}
    assert f"left alone: {NAME.replace('0', '*')}: dequantized to float32" in str(said)


def test_a_folder_of_which_nothing_stays_packed_is_served_by_the_runtime_and_reported(folder):
    def change(tensors):
        for name in [n for n in tensors if n.endswith(".g_idx")]:
            tensors[name] = tensors[name].flip(0)

    edit(folder, change, lambda record: record.update(desc_act=True))
    model = hfaccel.from_pretrained(folder, "kv8")
    said = hfaccel.report(model)
    assert len(said.skipped) == 14 and said.recipe == "kv8" and not said.records
    assert "executor" in said.runs["generate"]


def test_desc_act_with_static_groups_stays_packed(folder):
    first = hfaccel.from_pretrained(folder)
    edit(folder, config=lambda record: record.update(desc_act=True, static_groups=True))
    same_packed(first, hfaccel.from_pretrained(folder))


def test_without_g_idx_groups_are_consecutive(folder):
    first = hfaccel.from_pretrained(folder)

    def change(tensors):
        for name in [n for n in tensors if n.endswith(".g_idx")]:
            del tensors[name]

    same_packed(first, hfaccel.from_pretrained(edit(folder, change)))


def test_a_borrow_between_zero_points_of_v1(tmp_path):
    """Writers subtract one from whole words: a zero point of 0 borrows from its neighbour."""
    model = small("int4-g32")
    module = model.get_submodule(NAME)
    module.weight_zero[0, 0, :4] = torch.tensor([0, 5, 0, 0], dtype=torch.uint8)
    export(model, None, "gptq:v2", tmp_path / "out")

    def change(tensors):
        for name in [n for n in tensors if n.endswith(".qzeros")]:
            tensors[name] -= 0x11111111

    edit(tmp_path / "out", change, lambda record: record.update(checkpoint_format="gptq"))
    same_packed(model, hfaccel.from_pretrained(tmp_path / "out"))


def test_the_config_beside_the_config(folder):
    """AutoGPTQ wrote quantize_config.json, and a file with a name of its own."""
    import json

    first = hfaccel.from_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    record = config.pop("quantization_config")
    del record["quant_method"], record["checkpoint_format"]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "quantize_config.json").write_text(json.dumps(record))
    (folder / "model.safetensors").rename(folder / "gptq_model-4bit-32g.safetensors")
    same_packed(first, hfaccel.from_pretrained(folder))


def test_biases_of_zero_where_the_class_has_none(folder):
    def change(value):
        return lambda tensors: tensors.update({f"{NAME}.bias": torch.full((64,), value, dtype=torch.float16)})

    assert hfaccel.from_pretrained(edit(folder, change(0.0))).get_submodule(NAME).bias is None
    with pytest.raises(CheckpointError, match=f"{NAME}.bias is not zero, and LlamaForCausalLM has no bias"):
        hfaccel.from_pretrained(edit(folder, change(0.5)))


@pytest.mark.parametrize("isa", ["auto", "scalar"])
def test_8_bit_codes_of_minus_128(tmp_path, monkeypatch, isa):
    """GPTQ's symmetric 8 bits use them, our own rounding does not."""
    monkeypatch.setenv("HFACCEL_ISA", isa)
    export(small("int8"), None, "gptq", tmp_path / "out")
    edit(tmp_path / "out", lambda tensors: tensors[f"{NAME}.qweight"].zero_())
    linear = hfaccel.from_pretrained(tmp_path / "out").get_submodule(NAME)
    weight = linear.dequantize()
    assert torch.equal(weight, -128 * linear.weight_scale.transpose(1, 2).reshape(-1, 1).expand(64, 64))
    x = torch.randn(3, 64)
    assert torch.allclose(linear(x), x @ weight.t(), rtol=1e-3, atol=1e-3)


def put(name, value):
    return lambda tensors: tensors.update({name: value(tensors[name])})


BAD = [
    (dict(bits=5), None, "quantization_config: bits 5; known are 2, 3, 4, 8"),
    (dict(bits="4"), None, "bits '4'; known are"),
    (dict(bits=8), None, r"down_proj.qweight is I32 \[16, 64\], its config and architecture say int32 \[32"),
    (dict(group_size=0), None, "group_size 0; a positive number, or -1"),
    (
        dict(group_size=64),
        None,
        r"down_proj.scales is \[4, 64\]: groups of 64 make 2 scales, the group",
    ),
    (dict(checkpoint_format="marlin"), None, "checkpoint_format 'marlin'; known are gptq, gptq_v2"),
    (dict(pack_dtype="int64"), None, "pack_dtype 'int64'; known is int32"),
    (dict(desc_act="yes"), None, "desc_act 'yes'; true or false"),
    (dict(dynamic=[1]), None, r"dynamic \[1\] is not a mapping"),
    (dict(dynamic={"+:(": {}}), None, r"dynamic '\+:\('"),
    (dict(dynamic={"-:.*q_proj": {}}), None, "q_proj is quantized, and dynamic '-:.*q_proj' says"),
    ({}, put(f"{NAME}.g_idx", lambda t: t + 1), f"{NAME}.g_idx has group 2; the scales have groups 0 to 1"),
    ({}, put(f"{NAME}.g_idx", lambda t: t - 1), f"{NAME}.g_idx has group -1"),
    ({}, put(f"{NAME}.g_idx", lambda t: t.flip(0)), f"{NAME}.g_idx puts columns in another order, and desc_"),
    (dict(desc_act=True), put(f"{NAME}.g_idx", torch.zeros_like), "g_idx has 64 columns in group 0, group_s"),
    ({}, put(f"{NAME}.qweight", lambda t: t[:-1].clone()), f"{NAME}.qweight is I32 .*7, 64"),
    ({}, put(f"{NAME}.qweight", lambda t: t.float()), f"{NAME}.qweight is F32 "),
    ({}, put(f"{NAME}.qzeros", lambda t: t[:, :-1].clone()), f"{NAME}.qzeros is I32 "),
    ({}, put(f"{NAME}.scales", lambda t: t.int()), f"{NAME}.scales is I32 .* say float32 or float16"),
    ({}, lambda t: t.pop(f"{NAME}.qzeros"), f"{NAME}.qzeros is missing"),
    ({}, lambda t: t.pop(f"{NAME}.scales"), f"{NAME}.scales is missing"),
    ({}, lambda t: t.pop(f"{NAME}.qweight"), f"{NAME}"),
    ({}, lambda t: t.update({"model.layers.9.x.qweight": torch.zeros(1)}), "model.layers.9.x: quantized in"),
]


@pytest.mark.parametrize(("config", "change", "words"), BAD, ids=[case[2][:40] for case in BAD])
def test_what_is_wrong_is_named(folder, config, change, words):
    edit(folder, change, lambda record: record.update(config))
    with pytest.raises(CheckpointError, match=words):
        hfaccel.from_pretrained(folder)


def test_what_is_read_is_saved_as_ours(folder, tmp_path):
    model = hfaccel.from_pretrained(folder)
    model.save_pretrained(tmp_path / "ours")
    back = hfaccel.from_pretrained(tmp_path / "ours")
    same_packed(model, back)
    assert torch.equal(model(ids(1, 9)).logits, back(ids(1, 9)).logits)
    assert matrices(back).keys() == matrices(model).keys()
