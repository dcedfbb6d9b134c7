"""Where values lie in files, by the converter's rules written out."""

import pytest
import torch
from gguf import GGUFReader

from gguf_models import written
from hfaccel.errors import UnsupportedModel
from hfaccel.formats.gguf_names import (
    ARCHITECTURES,
    architecture_of_file,
    inverse,
    pairs,
    row_order,
)
from tiny import tiny


def tensors(model, path):
    return {t.name: torch.from_numpy(t.data.copy()) for t in GGUFReader(written(model, path)).tensors}


@pytest.mark.parametrize(
    "family, config, kv",
    [
        ("falcon", {"num_attention_heads": 8, "num_kv_heads": 2}, 2),
        ("falcon", {"num_attention_heads": 6, "num_kv_heads": 3, "hidden_size": 96}, 3),
        ("falcon", {"num_attention_heads": 4, "num_kv_heads": 4}, 4),
        ("falcon_mq", {"bias": False}, 1),
    ],
)
def test_falcons_groups_come_apart(family, config, kv, tmp_path):
    """[q q .. k v] of each group -> all q, all k, all v."""
    model = tiny(family, **config)
    heads, hidden = model.config.num_attention_heads, model.config.hidden_size
    found = tensors(model, tmp_path / "m.gguf")["blk.1.attn_qkv.weight"]
    fused = model.transformer.h[1].self_attention.query_key_value.weight.detach()
    groups = fused.view(kv, heads // kv + 2, hidden // heads, hidden)
    wanted = [groups[:, :-2], groups[:, -2], groups[:, -1]]
    assert torch.equal(found, torch.cat([part.reshape(-1, hidden) for part in wanted]))


def test_gpt2s_matrices_are_transposed_and_its_tables_are_not(tmp_path):
    model = tiny("gpt2")
    found, block = tensors(model, tmp_path / "m.gguf"), model.transformer.h[1]
    assert torch.equal(found["blk.1.attn_qkv.weight"], block.attn.c_attn.weight.t())
    assert torch.equal(found["blk.1.ffn_up.weight"], block.mlp.c_fc.weight.t())
    assert torch.equal(found["position_embd.weight"], model.transformer.wpe.weight)
    assert torch.equal(found["token_embd.weight"], model.transformer.wte.weight)


def test_gate_comes_before_up(tmp_path):
    model = tiny("mixtral")
    found, experts = tensors(model, tmp_path / "m.gguf"), model.model.layers[1].mlp.experts
    gate, up = experts.gate_up_proj.chunk(2, 1)
    assert torch.equal(found["blk.1.ffn_gate_exps.weight"], gate)
    assert torch.equal(found["blk.1.ffn_up_exps.weight"], up)
    assert torch.equal(found["blk.1.ffn_down_exps.weight"], experts.down_proj)


def test_gemmas_norms_are_what_is_multiplied_by(tmp_path):
    model = tiny("gemma2", query_pre_attn_scalar=32)
    found = tensors(model, tmp_path / "m.gguf")
    layer = model.model.layers[1]
    for name, norm in (
        ("blk.1.attn_norm", layer.input_layernorm),
        ("blk.1.post_attention_norm", layer.post_attention_layernorm),
        ("blk.1.ffn_norm", layer.pre_feedforward_layernorm),
        ("blk.1.post_ffw_norm", layer.post_feedforward_layernorm),
        ("output_norm", model.model.norm),
    ):
        assert torch.equal(found[f"{name}.weight"], norm.weight + 1), name


@pytest.mark.parametrize("family", ["llama", "falcon"])
def test_orders_go_back(family):
    config = tiny(family).config
    orders = [row_order(pair, config) for pair in pairs(ARCHITECTURES[family], config)]
    orders = [order for order in orders if order is not None]
    assert orders
    for order in orders:
        rows = torch.arange(len(order)) * 3
        assert torch.equal(rows[order][inverse(order)], rows)
        assert not torch.equal(order, torch.arange(len(order)))


@pytest.mark.parametrize(
    "metadata, model_type",
    [
        ({"general.architecture": "llama"}, "llama"),
        ({"general.architecture": "llama", "llama.expert_count": 0}, "llama"),
        ({"general.architecture": "llama", "llama.expert_count": 8}, "mixtral"),
        ({"general.architecture": "gemma3"}, "gemma3_text"),
    ],
)
def test_architectures_of_files(metadata, model_type):
    assert architecture_of_file(metadata).model_type == model_type


def test_architectures_that_are_not_known():
    with pytest.raises(UnsupportedModel, match="is 'mamba'; known are falcon, gemma2, gemma3, gpt2, llama"):
        architecture_of_file({"general.architecture": "mamba"})
