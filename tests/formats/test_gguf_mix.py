import pytest

from hfaccel.errors import UnknownName
from hfaccel.formats.gguf_mix import VARIANTS, fitting, tensor_type, variant_named


def kind(variant, name, shape=(512, 512), **more):
    return tensor_type(variant, name, shape, **{"architecture": "llama", "layers": 32, **more})


@pytest.mark.parametrize("variant", VARIANTS)
def test_vectors_and_routers_stay_fp32(variant):
    assert kind(variant, "blk.0.attn_norm.weight", (512,)) == "F32"
    assert kind(variant, "blk.0.attn_q.bias", (512,)) == "F32"
    assert kind(variant, "blk.0.ffn_gate_inp.weight", (8, 512)) == "F32"
    assert kind(variant, "position_embd.weight", (1024, 512)) == "F32"


def test_plain_types():
    for variant in ("F32", "F16", "BF16", "Q8_0"):
        for name in ("token_embd.weight", "output.weight", "blk.0.attn_v.weight", "blk.31.ffn_down.weight"):
            assert kind(variant, name) == variant
    for variant in ("Q4_0", "Q4_1", "Q6_K"):
        assert kind(variant, "blk.0.ffn_down.weight") == variant
        assert kind(variant, "token_embd.weight") == variant
        assert kind(variant, "output.weight") == "Q6_K"
        assert kind(variant, "token_embd.weight", tied=True) == "Q6_K"
    assert kind("Q4_0", "blk.3.ffn_down.weight", weighted=True) == "Q4_1"
    assert kind("Q4_0", "blk.4.ffn_down.weight", weighted=True) == "Q4_0"


@pytest.mark.parametrize("variant, main", [("Q4_K_M", "Q4_K"), ("Q5_K_M", "Q5_K")])
def test_mixtures(variant, main):
    for role in ("attn_v", "attn_qkv", "ffn_down"):
        more = [i for i in range(32) if kind(variant, f"blk.{i}.{role}.weight") == "Q6_K"]
        # the first and the last four, and every third between
        assert more == [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]
        assert kind(variant, f"blk.4.{role}.weight") == main
    assert kind(variant, "blk.0.attn_q.weight") == main
    assert kind(variant, "blk.0.attn_output.weight") == main
    assert kind(variant, "output.weight") == "Q6_K"


def test_falcon_and_eight_experts():
    falcon = {"architecture": "falcon"}
    assert kind("Q4_K_M", "output.weight", **falcon) == "Q8_0"
    assert kind("Q4_K_M", "blk.1.ffn_down.weight", **falcon) == "Q6_K"
    assert kind("Q4_K_M", "blk.2.ffn_down.weight", **falcon) == "Q5_K"
    assert kind("Q4_K_M", "blk.4.ffn_down.weight", **falcon) == "Q4_K"
    assert kind("Q4_K_M", "blk.4.attn_v.weight", experts=8) == "Q8_0"
    assert kind("Q4_K_M", "blk.4.attn_k.weight", experts=8) == "Q8_0"
    assert kind("Q4_K_M", "blk.4.attn_output.weight", experts=8) == "Q5_K"
    assert kind("Q4_K_M", "blk.4.attn_v.weight", experts=4) == "Q4_K"
    assert kind("Q4_K_M", "blk.0.ffn_down_exps.weight", (8, 512, 512), experts=8) == "Q6_K"


def test_eighty_layers_of_shared_key_heads():
    """llama 70B and qwen2 72B, by llama.cpp's own count of layers."""
    shared = {"layers": 80, "shared_heads": True}
    for layer, wanted in ((0, "Q6_K"), (10, "Q5_K"), (12, "Q6_K"), (79, "Q6_K")):
        assert kind("Q4_K_M", f"blk.{layer}.attn_v.weight", **shared) == wanted
        assert kind("Q4_K_M", f"blk.{layer}.attn_v.weight", layers=80, architecture="qwen2") == wanted
    others = ({"layers": 80}, {"layers": 79, "shared_heads": True}, shared | {"architecture": "gemma2"})
    for other in others:
        assert kind("Q4_K_M", "blk.10.attn_v.weight", **other) == "Q4_K"
    assert kind("Q4_K_M", "blk.10.attn_k.weight", **shared) == "Q4_K"
    assert kind("Q5_K_M", "blk.10.attn_v.weight", **shared) == "Q5_K"
    assert kind("Q4_K_M", "blk.10.attn_v.weight", (512, 96), **shared) == "Q5_1"  # Q5_K's, not Q4_K's


def test_rows_that_a_block_does_not_divide():
    wide, narrow = {"shape": (512, 576)}, {"shape": (512, 100)}
    assert kind("Q4_K_M", "blk.4.attn_q.weight", **wide) == "Q5_0"
    assert kind("Q5_K_M", "blk.4.attn_q.weight", **wide) == "Q5_1"
    assert kind("Q4_K_M", "blk.0.attn_v.weight", **wide) == "Q8_0"
    assert kind("Q6_K", "output.weight", **wide) == "Q8_0"
    assert kind("Q4_0", "output.weight", **wide) == "Q8_0"
    assert kind("Q4_0", "blk.4.attn_q.weight", **wide) == "Q4_0"
    for variant in ("Q4_K_M", "Q4_0", "Q8_0", "Q6_K"):
        assert kind(variant, "blk.4.attn_q.weight", **narrow) == "F16"
    assert fitting("F32", 7) == "F32"


def test_names():
    assert variant_named("q4_k_m") == "Q4_K_M"
    with pytest.raises(UnknownName, match="'Q2_K': known are F32, F16"):
        variant_named("Q2_K")
