"""GPTQ folders written: read by the format's description, and by hfaccel."""

import logging

import pytest
import torch

import hfaccel
from exported import linears, matrices, nibbles, same_packed, small
from hfaccel.errors import PatchError, UnknownName
from hfaccel.formats.export import export
from saved import config_json, patched, stored
from tiny import tiny


def by_description(tensors, name: str, bits: int, stored_zero: int) -> torch.Tensor:
    """The weight [N, K] of a linear, word by word. `stored_zero` is what a reader adds to zero points."""
    qweight, qzeros = tensors[f"{name}.qweight"], tensors[f"{name}.qzeros"]
    codes = [sum((nibbles(w, bits) for w in column.tolist()), []) for column in qweight.t()]
    zeros = [sum((nibbles(w, bits) for w in row.tolist()), []) for row in qzeros]
    codes, zeros = torch.tensor(codes).float(), torch.tensor(zeros).float().t() + stored_zero
    index = tensors[f"{name}.g_idx"].long()
    return (codes - zeros[:, index]) * tensors[f"{name}.scales"].float().t()[:, index]


@pytest.mark.parametrize("recipe", ["gptq4-sym-g32", "int4-g64", "int8", "int8-asym-g32", "int2-g32"])
@pytest.mark.parametrize("variant", ["v1", "v2"])
def test_files_hold_what_the_model_holds(tmp_path, recipe, variant):
    model = small(recipe)
    export(model, None, f"gptq:{variant}", tmp_path / "out")
    tensors, record = stored(tmp_path / "out"), config_json(tmp_path / "out")["quantization_config"]
    added = {"gptq": 1, "gptq_v2": 0}[record["checkpoint_format"]]
    assert variant == "v1" or added == 0
    layout = next(iter(linears(model).values())).layout
    assert (record["bits"], record["group_size"]) == (layout.bits, layout.group)
    assert record["sym"] is layout.symmetric and record["desc_act"] is False
    wanted = matrices(model)
    assert {n.removesuffix(".qweight") for n in tensors if n.endswith(".qweight")} == set(wanted)
    for name, weight in wanted.items():
        assert torch.equal(by_description(tensors, name, layout.bits, added), weight)
        assert f"{name}.weight" not in tensors


@pytest.mark.parametrize("recipe", ["gptq4-sym-g32", "int4", "int8", "int8-asym-g32", "int3-g32", "int2-g16"])
@pytest.mark.parametrize("variant", ["v1", "v2"])
def test_round_trip(tmp_path, recipe, variant):
    model = small(recipe)
    export(model, None, f"gptq:{variant}", tmp_path / "out")
    same_packed(model, hfaccel.from_pretrained(tmp_path / "out"))


def test_a_zero_point_of_0_is_written_as_v2(tmp_path, caplog):
    model = small("int4-g32")
    name, module = next(iter(linears(model).items()))
    module.weight_zero[0, 0, 3] = 0
    with caplog.at_level(logging.WARNING, "hfaccel"):
        export(model, None, "gptq", tmp_path / "out")
    assert config_json(tmp_path / "out")["quantization_config"]["checkpoint_format"] == "gptq_v2"
    assert f"{name} has a zero point of 0" in caplog.text
    same_packed(model, hfaccel.from_pretrained(tmp_path / "out"))


def test_a_quantized_head_is_written_in_float_and_said(tmp_path, caplog):
    model = small("int4-g32", tie_word_embeddings=True)
    with caplog.at_level(logging.WARNING, "hfaccel"):
        export(model, None, "gptq:v2", tmp_path / "out")
    assert "lm_head: int8 row symmetric is written in float, as gptq files have it" in caplog.text
    tensors = stored(tmp_path / "out")
    assert "lm_head.weight" not in tensors and config_json(tmp_path / "out")["tie_word_embeddings"] is True
    assert torch.equal(tensors["model.embed_tokens.weight"], model.lm_head.dequantize())
    back = hfaccel.from_pretrained(tmp_path / "out")
    assert back.lm_head.weight is back.model.embed_tokens.weight


def test_grids_that_differ_and_linears_left_alone_are_named(tmp_path):
    from hfaccel import RTN

    model = patched(
        tiny("llama", intermediate_size=128),
        [
            RTN(bits=4, group=32, ignore=("**.down_proj", "**.o_proj")),
            RTN(bits=8, targets=("**.down_proj",)),
            hfaccel.Head(bits=16),
        ],
    )
    export(model, None, "gptq:v2", tmp_path / "out")
    record = config_json(tmp_path / "out")["quantization_config"]
    assert (record["bits"], record["group_size"], record["sym"]) == (4, 32, False)
    plus = {"bits": 8, "group_size": -1, "sym": True}
    assert record["dynamic"] == {
        r"+:^model\.layers\.0\.mlp\.down_proj$": plus,
        r"+:^model\.layers\.1\.mlp\.down_proj$": plus,
        r"-:^model\.layers\.0\.self_attn\.o_proj$": {},
        r"-:^model\.layers\.1\.self_attn\.o_proj$": {},
        r"-:^lm_head$": {},
    }
    same_packed(model, hfaccel.from_pretrained(tmp_path / "out"))


def test_gpt2s_conv1d(tmp_path):
    model = patched(tiny("gpt2"), "int4-g16")
    export(model, None, "gptq:v2", tmp_path / "out")
    back = hfaccel.from_pretrained(tmp_path / "out")
    for name, weight in ((n, m.dequantize()) for n, m in model.named_modules() if ".attn.c_" in n):
        assert torch.equal(back.get_submodule(name).dequantize(), weight)
        assert torch.equal(back.get_submodule(name).bias, model.get_submodule(name).bias)


@pytest.mark.parametrize(
    ("family", "recipe", "words"),
    [
        ("llama", "nf4", "model.layers.0.self_attn.q_proj: .*nf4 g64; gptq files hold integers"),
        ("llama", "w8a8", "q_proj: .*dynamic int8 activations; gptq files hold"),
        ("llama", "int3-g16", "mlp.gate_proj is 112x64: gptq files pack 32 values of 3 bits"),
        (
            "mixtral",
            "int4-g16",
            "model.layers.0.mlp.experts: quantized fused experts are not written as gptq",
        ),
        ("llama", "kv8", "patched with 'kv8', which packs no weights"),
    ],
)
def test_what_the_format_cannot_hold_is_refused_by_name(tmp_path, family, recipe, words):
    model = patched(tiny(family), recipe)
    with pytest.raises(PatchError, match=words):
        export(model, None, "gptq", tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_unknown_variants(tmp_path):
    with pytest.raises(UnknownName, match="gptq:v3: known are gptq:v1, gptq:v2"):
        export(small("int4-g32"), None, "gptq:v3", tmp_path / "out")


def test_an_adapter_is_refused(tmp_path):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(small("int4-g32"), LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(PatchError, match="q_proj: an adapter is attached, which gptq files cannot hold"):
        export(model, None, "gptq", tmp_path / "out")
