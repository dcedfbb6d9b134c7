"""Folders of other quantizers as a whole: files, ties, dtypes, recipes."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import hfaccel
from exported import edit, linears, same_packed, small
from hfaccel.errors import AlreadyPatched, CheckpointError, PatchError
from hfaccel.formats.export import export
from tiny import ids

FORMATS = ("gptq:v2", "awq", "compressed-tensors")


@pytest.fixture
def folder(tmp_path):
    export(small("int4-g32"), None, "gptq:v2", tmp_path / "out")
    return tmp_path / "out"


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_codes_and_scales_do_not_depend_on_the_dtype(tmp_path, format, dtype):
    model = small("int4-g32")
    export(model, None, format, tmp_path / "out")
    back = hfaccel.from_pretrained(tmp_path / "out", dtype=dtype)
    same_packed(model, back)
    assert back.dtype is dtype and not back.training
    assert {p.dtype for p in back.parameters() if p.is_floating_point()} == {dtype}


@pytest.mark.parametrize("format", FORMATS)
def test_it_is_a_patched_model(tmp_path, format):
    model = small("int4-g32+head16")
    export(model, None, format, tmp_path / "out")
    back = hfaccel.from_pretrained(tmp_path / "out", attn_implementation="eager")
    x = ids(1, 9)
    with torch.no_grad():
        assert torch.equal(back(x).logits, model(x).logits)
    assert torch.equal(back.generate(x, max_new_tokens=6), model.generate(x, max_new_tokens=6))
    records = {record.name: record for record in hfaccel.report(back).records}
    assert records.keys() == linears(model).keys()
    assert {record.transform for record in records.values()} == {format.split(":")[0]}
    with pytest.raises(AlreadyPatched):
        hfaccel.patch(back, "int8")


def test_recipes_of_the_runtime_alone(folder):
    model = hfaccel.from_pretrained(folder, "kv8")
    assert hfaccel.report(model).to_dict()["recipe"] == "kv8"
    for recipe in ("int8", "auto", "int4+kv8"):
        with pytest.raises(AlreadyPatched, match="is quantized by gptq already; .* would change its weights"):
            hfaccel.from_pretrained(folder, recipe)


def test_tied_heads(tmp_path):
    """G4: stored once; stored twice and equal; stored twice and different; never filled at random."""
    model = small("int4-g32+head16", tie_word_embeddings=True)
    export(model, None, "awq", tmp_path / "out")
    once = hfaccel.from_pretrained(tmp_path / "out")
    assert once.lm_head.weight is once.model.embed_tokens.weight and once.config.tie_word_embeddings

    def head(shift):
        return lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + shift})

    twice = hfaccel.from_pretrained(edit(tmp_path / "out", head(0.0)))
    assert twice.lm_head.weight is twice.model.embed_tokens.weight
    other = hfaccel.from_pretrained(edit(tmp_path / "out", head(1.0)))
    assert torch.equal(other.lm_head.weight, other.model.embed_tokens.weight + 1)
    assert other.config.tie_word_embeddings is False
    other.save_pretrained(tmp_path / "ours")
    back = hfaccel.from_pretrained(tmp_path / "ours")
    assert torch.equal(back.lm_head.weight, other.lm_head.weight)
    with pytest.raises(CheckpointError, match="embed_tokens.weight is missing"):
        edit(tmp_path / "out", lambda t: (t.pop("lm_head.weight"), t.pop("model.embed_tokens.weight")))
        hfaccel.from_pretrained(tmp_path / "out")


def test_shards(folder):
    first = hfaccel.from_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()
    same_packed(first, hfaccel.from_pretrained(folder))
    (folder / "b.safetensors").unlink()
    with pytest.raises(CheckpointError, match="b.safetensors is missing"):
        hfaccel.from_pretrained(folder)


def test_truncated_files(folder):
    weights = (folder / "model.safetensors").read_bytes()
    for size in (0, 7, 100, len(weights) - 1):
        (folder / "model.safetensors").write_bytes(weights[:size])
        with pytest.raises(CheckpointError, match="model.safetensors is truncated or damaged"):
            hfaccel.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(PatchError, match="has no model.safetensors"):
        hfaccel.from_pretrained(folder)


def test_tensors_that_nothing_is_for(folder):
    edit(folder, lambda tensors: tensors.update({"model.extra.weight": torch.zeros(2)}))
    with pytest.raises(CheckpointError, match="model.extra.weight is not a tensor of LlamaForCausalLM"):
        hfaccel.from_pretrained(folder)


def test_a_folder_without_a_quantized_tensor(folder):
    edit(folder, lambda tensors: [tensors.pop(n) for n in list(tensors) if "qweight" in n])
    with pytest.raises(CheckpointError, match="no tensor of this folder is quantized as its config says"):
        hfaccel.from_pretrained(folder)


def test_quantized_experts_are_refused_by_name(folder):
    name = "model.layers.0.block_sparse_moe.experts.0.w1"
    edit(folder, lambda tensors: tensors.update({f"{name}.qweight": torch.zeros(8, 8, dtype=torch.int32)}))
    with pytest.raises(CheckpointError, match=f"{name}: .*: quantized experts are not read"):
        hfaccel.from_pretrained(folder)


def test_devices(folder):
    assert hfaccel.from_pretrained(folder, device="cpu").device.type == "cpu"
    with pytest.raises(PatchError, match="device_map='auto': a gptq folder is loaded onto one device"):
        hfaccel.from_pretrained(folder, device_map="auto")
    with pytest.raises(PatchError, match="dtype='int8': 'auto' or a float dtype"):
        hfaccel.from_pretrained(folder, dtype="int8")
