"""Plain folders: everything merged, nothing of hfaccel left, loaded by transformers alone."""

import json
import subprocess
import sys

import pytest
import torch

import hfaccel
from hfaccel.errors import PatchError, UnknownName
from hfaccel.formats.export import export
from hfaccel.quant.linear import is_packed
from saved import config_json, patched, stored
from tiny import FAMILIES, ids, tiny


def plain(folder, **kwargs):
    """The folder through transformers, in a process that never saw hfaccel: logits of fixed ids."""
    code = """
import json, sys, torch, transformers
folder, ids = json.loads(sys.argv[1])
model, info = transformers.AutoModelForCausalLM.from_pretrained(
    folder, attn_implementation="eager", output_loading_info=True, dtype="auto")
assert "hfaccel" not in sys.modules and not any(info.values()), info
tied = model.lm_head.weight is model.get_input_embeddings().weight
with torch.no_grad():
    print(json.dumps([tied, str(model.dtype), model(torch.tensor(ids)).logits.tolist()]))
"""
    spec = json.dumps([str(folder), ids(1, 9).tolist()])
    done = subprocess.run([sys.executable, "-c", code, spec], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    tied, dtype, logits = json.loads(done.stdout.splitlines()[-1])
    return tied, dtype, torch.tensor(logits)


def expected(model) -> dict[str, torch.Tensor]:
    """What a packed model's matrices stand for, by name."""
    return {f"{n}.weight": m.dequantize() for n, m in model.named_modules() if is_packed(m)}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("recipe", ["int4-g16", "nf4+head8"])
def test_transformers_loads_a_packed_model(tmp_path, tied, recipe):
    model = patched(tiny("llama", tie_word_embeddings=tied), recipe)
    export(model, None, "dense", tmp_path / "out")
    found, config = stored(tmp_path / "out"), config_json(tmp_path / "out")
    assert not {"quantization_config", "hfaccel", "transformers_weights"} & config.keys()
    assert config["dtype"] == "bfloat16" and config["tie_word_embeddings"] is tied
    assert ("lm_head.weight" in found) is not tied
    for name, weight in expected(model).items():
        if name in found:
            assert torch.equal(found[name], weight.bfloat16())
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    was_tied, dtype, _ = plain(tmp_path / "out")
    assert was_tied is tied and dtype == "torch.bfloat16"


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in ("bert", "t5")])
def test_every_family_in_fp32_is_the_model_itself(tmp_path, family):
    model = tiny(family)
    export(model, None, "dense:fp32", tmp_path / "out")
    attn = model.config._attn_implementation
    back, info = type(model).from_pretrained(
        tmp_path / "out", attn_implementation=attn, output_loading_info=True
    )
    assert not any(info.values()), info
    with torch.no_grad():
        assert torch.equal(back(ids(2, 7)).logits, model(ids(2, 7)).logits)


@pytest.mark.parametrize("family", ["gpt2", "mixtral", "gpt_oss"])
def test_shapes_of_the_class_come_back(tmp_path, family):
    """Conv1D lies transposed, experts are fused or one by one in files."""
    model = patched(tiny(family), "int8")
    export(model, None, "dense:fp32", tmp_path / "out")
    back = type(model).from_pretrained(tmp_path / "out", attn_implementation="eager")
    for name, module in model.named_modules():
        if not is_packed(module):
            continue
        if hasattr(module, "PROJECTIONS"):
            for leaf in module.PROJECTIONS:
                found = getattr(back.get_submodule(name), leaf)
                found = found.transpose(1, 2) if module.is_transposed else found
                assert torch.equal(found, module.dequantize(leaf))
        else:
            found = back.get_submodule(name).weight
            assert torch.equal(
                found,
                module.dequantize().T if "Conv1D" in repr(back.get_submodule(name)) else module.dequantize(),
            )


@pytest.mark.parametrize("recipe", [None, "int8"])
def test_adapters_are_merged_and_stay_attached(tmp_path, recipe):
    from peft import LoraConfig, get_peft_model

    base = tiny("llama")
    model = base if recipe is None else patched(base, recipe)
    names = ["q_proj", "down_proj", "embed_tokens"]
    model = get_peft_model(model, LoraConfig(r=4, target_modules=names, use_rslora=True))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.05)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    export(model, None, "dense:fp32", tmp_path / "out")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    found = stored(tmp_path / "out")
    for name in ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj", "model.embed_tokens"):
        layer = model.base_model.model.get_submodule(name)
        inner = layer.base_layer
        weight = inner.dequantize() if is_packed(inner) else inner.weight
        assert torch.equal(found[f"{name}.weight"], weight + layer.get_delta_weight("default"))
    merged = type(base).from_pretrained(tmp_path / "out", attn_implementation="eager")
    if recipe is None:
        with torch.no_grad():
            wanted, logits = model(ids(1, 9)).logits, merged(ids(1, 9)).logits
        assert (wanted - logits).abs().max() < 1e-4


def test_an_adapter_on_a_tied_head_unties(tmp_path):
    """L1: the embedding is untouched, and the config says that the head is another tensor."""
    from peft import LoraConfig, get_peft_model

    base = tiny("llama", tie_word_embeddings=True)
    table = base.model.embed_tokens.weight.detach().clone()
    config = LoraConfig(r=4, target_modules=["lm_head"], init_lora_weights=False)
    model = get_peft_model(base, config)
    export(model, None, "dense:fp32", tmp_path / "out")
    found = stored(tmp_path / "out")
    assert torch.equal(found["model.embed_tokens.weight"], table)
    assert not torch.equal(found["lm_head.weight"], table)
    assert config_json(tmp_path / "out")["tie_word_embeddings"] is False
    tied, _, logits = plain(tmp_path / "out")
    with torch.no_grad():
        assert not tied and (model(ids(1, 9)).logits - logits).abs().max() < 1e-4


def test_other_adapters_are_refused_by_name(tmp_path):
    from peft import IA3Config, LoraConfig, get_peft_model

    model = get_peft_model(tiny("llama"), LoraConfig(target_modules=["q_proj"], use_dora=True))
    with pytest.raises(PatchError, match="q_proj: adapter 'default' is a DoraLinearVariant"):
        export(model, None, "dense", tmp_path / "out")
    ia3 = IA3Config(target_modules=["k_proj"], feedforward_modules=[])
    with pytest.raises(PatchError, match="k_proj: a .*ia3.* cannot be merged on the way"):
        export(get_peft_model(tiny("llama"), ia3), None, "dense", tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_values_survive_or_are_refused(tmp_path):
    """G4: bf16 keeps subnormals and the sign of zero; fp16 does not reach 7e4."""
    model = tiny("llama").bfloat16()
    odd = torch.tensor([1e-39, -1e-39, 7e4, -0.0]).bfloat16()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, :4] = odd
    export(model, None, "dense", tmp_path / "out")
    name = "model.layers.0.mlp.up_proj.weight"
    kept = stored(tmp_path / "out")[name][0, :4]
    assert torch.equal(kept.view(torch.int16), odd.view(torch.int16)) and odd[0] != 0
    with pytest.raises(PatchError, match=f"{name}: .* is beyond the range of fp16; bf16 holds it"):
        export(model, None, "dense:fp16", tmp_path / "half")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_is_kept_in_another_dtype_stays(tmp_path):
    model = tiny("llama").bfloat16()
    model.model.norm.float()
    with torch.no_grad():
        model.model.norm.weight[0] = 1 + 2**-20
    export(model, None, "dense", tmp_path / "out")
    found = stored(tmp_path / "out")
    assert torch.equal(found["model.norm.weight"], model.model.norm.weight)
    assert found["model.embed_tokens.weight"].dtype is torch.bfloat16


def test_unknown_variants(tmp_path):
    with pytest.raises(UnknownName, match="dense:int8: known are dense:bf16, dense:fp16, dense:fp32"):
        export(tiny("llama"), None, "dense:int8", tmp_path / "out")


def test_a_model_changed_by_hand_is_refused(tmp_path):
    model = tiny("llama")
    model.model.layers[0].mlp.up_proj = torch.nn.Linear(64, 96, bias=False)
    with pytest.raises(PatchError, match=r"up_proj.weight is \[96, 64\], its config says \[112, 64\]"):
        export(model, None, "dense", tmp_path / "out")


def test_hfaccel_loads_it_too(tmp_path):
    model = patched(tiny("llama"), "int8")
    export(model, None, "dense:fp32", tmp_path / "out")
    back = hfaccel.from_pretrained(tmp_path / "out", "int8")
    for name, weight in expected(model).items():
        assert torch.allclose(
            back.get_submodule(name.removesuffix(".weight")).dequantize(), weight, atol=1e-6
        )
