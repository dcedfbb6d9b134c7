"""Models of block types out of GGUF files: packed bit for bit, run in the plan, saved, adapted."""

import pytest
import torch

import hfaccel
from dequantized import oracle
from gguf_bytes import BY_NAME
from gguf_models import logits, of_blocks, unrounded
from hfaccel.errors import PatchError
from hfaccel.formats.gguf import GGUFModel
from hfaccel.formats.gguf_pack import GRIDS
from hfaccel.quant.linear import QuantEmbedding, QuantExperts, QuantLinear
from hfaccel.runtime import plan_reference
from hfaccel.runtime.native import executor
from hfaccel.runtime.plan_build import build
from hfaccel.runtime.plan_reference import Reference
from plans import Steps, close, record_errors
from saved import attention
from tiny import ids


def dense_twin(path, model):
    return GGUFModel(path).load(packed=False, dtype=torch.float32, **attention(model))


def near(found, wanted):
    """As near as rounded inputs allow: a value between two codes may fall to either (tests/runtime)."""
    close(found, wanted, 2e-2)
    assert (found - wanted).abs().mean() < 2e-3 * wanted.abs().mean()


@pytest.mark.parametrize("kind", GRIDS)
def test_every_type_loads_packed_and_runs_in_the_plan(kind, tmp_path):
    path = of_blocks(kind, tmp_path / "m.gguf")
    model = hfaccel.from_pretrained(path)
    dense = dense_twin(path, model)
    assert model.dtype == torch.float32
    packed = [m for m in model.modules() if isinstance(m, QuantLinear | QuantEmbedding)]
    assert len(packed) == 7 * model.config.num_hidden_layers + 2
    assert not any(type(m) in (torch.nn.Linear, torch.nn.Embedding) for m in model.modules())
    for name, module in model.named_modules():
        if isinstance(module, QuantLinear | QuantEmbedding):
            assert torch.equal(module.dequantize(), dense.get_submodule(name).weight), name
    prompt = ids(1, 40)[0]
    errors = record_errors(model, prompt[:5])
    assert max(errors.values()) < 1e-5, errors
    steps = Steps(model, executor(model))
    found = steps.run(prompt)[0]
    near(found, logits(oracle(dense, model), prompt[None])[0])
    near(found, Steps(model, Reference(model)).run(prompt)[0])
    assert torch.equal(steps.run(prompt, cuts=[1, 5, 33])[0], found)


def test_the_reference_executor_without_rounded_inputs_is_the_dequantized_model(tmp_path, monkeypatch):
    path = of_blocks("Q4_1", tmp_path / "m.gguf")
    model = hfaccel.from_pretrained(path)
    monkeypatch.setattr(plan_reference, "quantize_activations", unrounded)
    prompt = ids(1, 30)
    found = Steps(model, Reference(model)).run(prompt[0])[0]
    assert (found - logits(dense_twin(path, model), prompt)[0]).abs().max() <= 1e-4


@pytest.mark.parametrize("family", ["gpt2", "falcon", "phi3", "gemma2", "qwen2", "mixtral"])
def test_other_families_packed(family, tmp_path):
    config = {"hidden_size": 256, "num_attention_heads": 4}
    config |= {"gpt2": {"n_inner": 512}, "falcon": {"ffn_hidden_size": 512}}.get(
        family, {"intermediate_size": 512, "num_key_value_heads": 2}
    )
    if family == "gemma2":
        config |= {"head_dim": 64, "query_pre_attn_scalar": 64}
    path = of_blocks("Q4_K", tmp_path / "m.gguf", family=family, **config)
    model = hfaccel.from_pretrained(path)
    dense = dense_twin(path, model)
    for name, module in model.named_modules():
        if isinstance(module, QuantExperts):
            for key in module.PROJECTIONS:
                assert torch.equal(module.dequantize(key), getattr(dense.get_submodule(name), key)), name
        elif isinstance(module, QuantLinear | QuantEmbedding):
            weight = dense.get_submodule(name).weight
            weight = (
                weight.T if family == "gpt2" and isinstance(module, QuantLinear) and ".h." in name else weight
            )
            assert torch.equal(module.dequantize(), weight), name
    prompt = ids(1, 20)[0]
    if family != "falcon":  # whose alibi variant keeps the family from the plan's table
        found = Steps(model, executor(model)).run(prompt)[0]
        near(found, Steps(model, Reference(model)).run(prompt)[0])
    assert logits(model, prompt[None]).isfinite().all()


def test_experts_of_two_types_are_dequantized_and_said(tmp_path, caplog):
    config = {
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 512,
    }
    path = of_blocks("Q4_K", tmp_path / "m.gguf", family="mixtral", **config)
    model = GGUFModel(path)
    down = model.sources["model.layers.0.mlp.experts.down_proj"]
    assert down.infos[0].type.name == "Q4_K"
    down.infos[0] = type(down.infos[0])(
        down.infos[0].name, BY_NAME["Q4_0"], down.infos[0].shape, down.infos[0].start, down.infos[0].bytes
    )
    assert BY_NAME["Q4_0"].bytes * 8 == BY_NAME["Q4_K"].bytes  # the same bytes, read as the other type
    loaded = model.load()
    assert "model.layers.0.mlp.experts: experts of two types are dequantized" in caplog.text
    assert loaded.dtype == torch.bfloat16
    said = hfaccel.report(loaded).skipped
    assert said == {"model.layers.0.mlp.experts": "dequantized to bfloat16: experts of two types"}
    assert [type(layer.mlp.experts).__name__ for layer in loaded.model.layers] == [
        "MixtralExperts",
        "QuantExperts",
    ]


def test_a_packed_model_is_saved_loaded_generated_from_and_reported(tmp_path, monkeypatch):
    monkeypatch.setenv("HFACCEL_STRICT", "1")
    monkeypatch.setenv("HFACCEL_EXECUTOR", "native")
    path = of_blocks("Q4_1", tmp_path / "m.gguf", head="Q8_0")
    model = hfaccel.from_pretrained(path)
    text = str(hfaccel.report(model))
    assert "int4 g32 with minimums" in text and "int8 g32 symmetric" in text and "executor native" in text
    prompt = ids(2, 9)
    tokens = model.generate(prompt, max_new_tokens=6, do_sample=False)
    model.save_pretrained(tmp_path / "out")
    again = hfaccel.from_pretrained(tmp_path / "out")
    assert torch.equal(logits(again, prompt), logits(model, prompt))
    assert torch.equal(again.generate(prompt, max_new_tokens=6, do_sample=False), tokens)
    assert {type(m) for m in again.modules()} >= {QuantLinear, QuantEmbedding}
    with pytest.raises(PatchError, match="no originals"):
        hfaccel.unpatch(model)


def test_recipes_of_the_runtime_keep_weights_packed_others_do_not(tmp_path):
    path = of_blocks("Q4_0", tmp_path / "m.gguf")
    model = hfaccel.from_pretrained(path, "kv8")
    assert model._hfaccel.config.to_recipe() == "kv8"
    assert {m.layout.group for m in model.modules() if isinstance(m, QuantLinear)} == {32}
    dense = hfaccel.from_pretrained(path, "int8", dtype=torch.float32)
    assert {m.layout.bits for m in dense.modules() if isinstance(m, QuantLinear)} == {8}
    assert {m.layout.group for m in dense.modules() if isinstance(m, QuantLinear)} == {-1}


def test_adapters_lie_beside_packed_blocks_and_are_not_merged_into_them(tmp_path):
    peft = pytest.importorskip("peft")
    model = hfaccel.from_pretrained(of_blocks("Q4_K", tmp_path / "m.gguf"))
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    before = logits(model, ids(1, 5))
    adapted = peft.get_peft_model(model, config)
    assert not torch.equal(logits(adapted, ids(1, 5)), before)
    with pytest.raises(PatchError, match="cannot be merged into int4 g32 with minimums"):
        adapted.merge_adapter()


def test_a_plan_of_a_loaded_model_is_that_of_a_patched_one(tmp_path):
    plan = build(hfaccel.from_pretrained(of_blocks("Q4_1", tmp_path / "m.gguf")))
    assert sum(type(op).__name__ == "Matmul" for op in plan.ops) >= 5
