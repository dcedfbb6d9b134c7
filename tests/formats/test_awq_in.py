"""AWQ folders read: everything that can be wrong."""

import pytest

import hfaccel
from exported import edit, small
from hfaccel.errors import CheckpointError
from hfaccel.formats.export import export

NAME = "model.layers.1.mlp.down_proj"


@pytest.fixture
def folder(tmp_path):
    export(small("int4-g32"), None, "awq", tmp_path / "out")
    return tmp_path / "out"


def put(name, value):
    return lambda tensors: tensors.update({name: value(tensors[name])})


BAD = [
    (dict(bits=8), None, "quantization_config: bits 8; awq has 4"),
    (dict(group_size=None), None, "group_size None; a positive number, or -1"),
    (dict(group_size=24), None, "down_proj has rows of 128, which groups of 24 do not divide"),
    (dict(group_size=64), None, "down_proj.scales is F16 .*4, 64.*, its config and architecture say .*2, 64"),
    (dict(version="gemv"), None, "version 'gemv'; known is gemm"),
    (dict(zero_point=False), None, "zero_point False; known is true"),
    ({}, put(f"{NAME}.qweight", lambda t: t[:, 1:].clone()), f"{NAME}.qweight is I32 .*128, 7"),
    ({}, put(f"{NAME}.qzeros", lambda t: t.short()), f"{NAME}.qzeros is I16 "),
    ({}, put(f"{NAME}.scales", lambda t: t[1:].clone()), f"{NAME}.scales is F16 .*3, 64"),
    ({}, lambda t: t.pop(f"{NAME}.qzeros"), f"{NAME}.qzeros is missing"),
    ({}, lambda t: t.pop("model.norm.weight"), "model.norm.weight is missing"),
    ({}, put("model.norm.weight", lambda t: t[1:].clone()), r"model.norm.weight is \[63\], LlamaForCausalLM"),
]


@pytest.mark.parametrize(("config", "change", "words"), BAD, ids=[case[2][:40] for case in BAD])
def test_what_is_wrong_is_named(folder, config, change, words):
    edit(folder, change, lambda record: record.update(config))
    with pytest.raises(CheckpointError, match=words):
        hfaccel.from_pretrained(folder)


def test_names_of_the_first_versions(folder):
    def old(record):
        record["w_bit"], record["q_group_size"] = record.pop("bits"), record.pop("group_size")
        record["version"] = "GEMM"

    assert hfaccel.from_pretrained(edit(folder, config=old)).get_submodule(NAME).layout.group == 32
