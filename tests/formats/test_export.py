"""`export` and its command: names, models in float, targets that exist."""

import json

import pytest
import torch

import hfaccel
from exported import small
from hfaccel.errors import PatchError, UnknownName
from hfaccel.formats import export as module
from hfaccel.formats.export import FORMATS, export, parse
from saved import config_json, logits, patched, stored
from test_cli import run
from tiny import ids, tiny
from vocabularies import byte_level


def test_names_and_variants():
    assert parse("gguf:Q4_K_M") == ("gguf", "Q4_K_M") and parse("awq") == ("awq", None)
    for bad in ("onnx", "", "gptq4", "GPTQ"):
        with pytest.raises(UnknownName, match=f"unknown format {bad!r}; known are {', '.join(FORMATS)}"):
            parse(bad)
    with pytest.raises(UnknownName, match="nothing follows the colon"):
        parse("gptq:")


def test_a_writer_is_imported_when_it_is_used(monkeypatch, tmp_path):
    """One line of the table is all that a format needs."""
    seen = []
    monkeypatch.setitem(FORMATS, "mine", "exported_format:write")
    monkeypatch.setattr(
        module,
        "import_module",
        lambda name: type("M", (), {"write": lambda *a, **k: seen.append((name, a, k))}),
    )
    model = tiny("llama")
    export(model, "tok", "mine:x", tmp_path, calibration=["text"], progress=False)
    assert seen == [
        ("exported_format", (model, "tok", "x", tmp_path), {"calibration": ["text"], "progress": False})
    ]


@pytest.mark.parametrize(
    ("format", "group", "bits"), [("gptq", 64, 4), ("awq", 64, 4), ("compressed-tensors", 64, 4)]
)
def test_a_model_in_float_is_quantized_on_the_way_and_given_back(tmp_path, format, group, bits):
    model = small(None)  # rows of 64 and 128
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    export(model, None, format, tmp_path / "out", calibration=[ids(1, 64)], progress=False)
    assert not hasattr(model, "_hfaccel")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    back = hfaccel.from_pretrained(tmp_path / "out")
    layout = back.get_submodule("model.layers.0.mlp.down_proj").layout
    assert (layout.group, layout.bits) == (group, bits)
    assert torch.equal(back.lm_head.weight, before["lm_head.weight"])


@pytest.mark.parametrize("variant", ["w8a16", "w8a8", "fp8"])
def test_schemes_of_a_model_in_float(tmp_path, variant):
    model = small(None)
    export(model, None, f"compressed-tensors:{variant}", tmp_path / "out", calibration=[ids(1, 64)])
    (group,) = config_json(tmp_path / "out")["quantization_config"]["config_groups"].values()
    assert group["weights"]["num_bits"] == 8 and (group["input_activations"] is None) == (variant == "w8a16")


def test_experts_in_float_are_refused_before_calibration(tmp_path):
    with pytest.raises(
        PatchError, match="mlp.experts.gate_up_proj: quantized experts are not written as gptq"
    ):
        export(tiny("mixtral"), None, "gptq", tmp_path / "out")


def test_rows_that_no_group_divides(tmp_path):
    with pytest.raises(PatchError, match="down_proj has rows of 112, which no group of 128, 64, 32 divides"):
        export(tiny("llama"), None, "gptq", tmp_path / "out")


def test_experts_left_alone_lie_in_the_files_of_their_class(tmp_path):
    model = patched(tiny("mixtral"), [hfaccel.RTN(bits=4, group=16, ignore=("**.experts.**",))])
    for format in ("gptq:v2", "awq", "compressed-tensors"):
        export(model, None, format, tmp_path / format)
        found = stored(tmp_path / format)
        assert "model.layers.0.block_sparse_moe.experts.0.w1.weight" in found
        back = hfaccel.from_pretrained(tmp_path / format)
        assert back.lm_head.weight.shape == model.lm_head.size
        experts = model.model.layers[0].mlp.experts
        assert torch.equal(back.model.layers[0].mlp.experts.gate_up_proj, experts.gate_up_proj)
        assert torch.equal(
            back.model.layers[1].self_attn.q_proj.dequantize(),
            model.model.layers[1].self_attn.q_proj.dequantize(),
        )


def test_inside_original_it_is_refused(tmp_path):
    model = small("int4-g32")
    with hfaccel.original(model), pytest.raises(PatchError, match="inside original"):
        export(model, None, "dense", tmp_path / "out")


def test_a_pipeline_or_peft_model_is_taken_as_its_model(tmp_path):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(small(None), LoraConfig(target_modules=["q_proj"]))
    export(model, None, "dense:fp32", tmp_path / "out")
    back = type(model.get_base_model()).from_pretrained(tmp_path / "out", attn_implementation="eager")
    assert torch.allclose(logits(back), logits(model), atol=1e-5)


# The command ----------------------------------------------------------------------------------------------


def test_the_command_writes_a_packed_folder_code_for_code(folder, tmp_path):
    packed, out = tmp_path / "packed", tmp_path / "out"
    assert run("patch", str(folder), "-o", str(packed), "--recipe", "int4-g16").exit_code == 0
    done = run("export", str(packed), "--format", "awq", "-o", str(out), "--json")
    row = json.loads(done.stdout)
    assert row["format"] == "awq" and row["bytes"] == sum(f.stat().st_size for f in out.iterdir())
    assert (out / "tokenizer.json").is_file()
    a, b = hfaccel.from_pretrained(packed), hfaccel.from_pretrained(out)
    name = "model.layers.0.mlp.up_proj"
    assert torch.equal(a.get_submodule(name).dequantize(), b.get_submodule(name).dequantize())


def test_the_command_quantizes_with_a_recipe(folder, tmp_path):
    out = tmp_path / "out"
    done = run("export", str(folder), "-f", "compressed-tensors", "-o", str(out), "--recipe", "int8")
    assert done.exit_code == 0 and f"{out}: compressed-tensors, " in done.stdout
    assert config_json(out)["quantization_config"]["format"] == "pack-quantized"


@pytest.mark.parametrize(("format", "name"), [("gguf:Q8_0", "m.gguf"), ("dense:fp32", "out")])
def test_what_is_there_is_written_over_when_asked(tmp_path, format, name):
    folder = tmp_path / "model"
    tiny("llama", vocab_size=300).save_pretrained(folder)
    byte_level().save_pretrained(folder)  # GGUF is written of BPE
    args = ("export", str(folder), "--format", format, "-o", str(tmp_path / name))
    assert run(*args).exit_code == 0
    file = next(path for path in (tmp_path / name / "model.safetensors", tmp_path / name) if path.is_file())
    written = file.read_bytes()
    file.write_bytes(b"mine")
    with pytest.raises(ValueError, match="already; give another .*--overwrite"):
        run(*args)
    assert file.read_bytes() == b"mine"
    assert run(*args, "--overwrite").exit_code == 0 and file.read_bytes() == written


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("{model}", "--format", "onnx", "-o", "{out}"), "unknown format 'onnx'; known are gguf, gptq, awq"),
        (("{model}", "--format", "gptq:v9", "-o", "{out}"), "gptq:v9: known are gptq:v1, gptq:v2"),
        (("{model}", "--format", "dense", "-o", "{model}"), "is MODEL itself, whose weights would be lost"),
        (("{model}", "--format", "dense", "-o", "{model}/config.json"), "is a file, not a folder"),
        (("{model}", "--format", "dense", "-o", "{out}", "--recipe", "int9"), "int9"),
        (("{model}", "--format", "gptq", "-o", "{out}", "--calibration", "{out}"), "no text"),
        (("{out}", "--format", "dense", "-o", "{out}"), "no such folder"),
    ],
)
def test_misuse_is_refused(folder, tmp_path, args, words):
    out = tmp_path / "out"
    before = (folder / "model.safetensors").read_bytes()
    with pytest.raises(ValueError, match=words):
        run("export", *(arg.format(model=folder, out=out) for arg in args))
    assert not out.exists() and (folder / "model.safetensors").read_bytes() == before
