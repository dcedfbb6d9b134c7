"""Configs through metadata: what files leave to readers is as in llama.cpp, other configs are refused."""

import pytest

from gguf_configs import GEMMA2, GEMMA3, metadata, read
from hfaccel.errors import UnsupportedModel
from hfaccel.formats.gguf_config import metadata_of
from hfaccel.formats.gguf_file import GGUFError
from hfaccel.formats.gguf_names import ARCHITECTURES
from tiny import tiny


@pytest.mark.parametrize(
    "family, config, words",
    [
        ("qwen3", {"attention_bias": True}, "attention_bias=True: a GGUF qwen3 has False"),
        ("gemma2", GEMMA2 | {"attention_bias": True}, "attention_bias=True: a GGUF gemma2 has False"),
        ("gemma2", GEMMA2 | {"attn_logit_softcapping": None}, "attn_logit_softcapping=None: a GGUF gemma2"),
        ("gemma2", GEMMA2 | {"final_logit_softcapping": None}, "final_logit_softcapping=None"),
        ("gemma2", {"query_pre_attn_scalar": 24}, "query_pre_attn_scalar=24: a GGUF gemma2 has 32"),
        ("gemma3", GEMMA2, "layer_types: a GGUF gemma3 sees all in every 6th layer"),
        ("gemma3", GEMMA3 | {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ("starcoder2", {"use_bias": False}, "use_bias=False: a GGUF starcoder2 has True"),
        ("mistral", {}, "sliding_window=8: a GGUF llama has None"),
        ("falcon_alibi", {"bias": False}, "alibi=True"),
    ],
)
def test_what_llama_cpp_takes_for_granted_is_refused_otherwise(family, config, words):
    with pytest.raises(UnsupportedModel, match=words):
        metadata(family, **config)


def test_numbers_have_the_type_of_their_key():
    given = metadata("gemma2", **GEMMA2, attn_logit_softcapping=50.0)
    assert type(given["gemma2.attn_logit_softcapping"]) is float
    model = tiny("gemma2", **GEMMA2)
    object.__setattr__(model.config, "final_logit_softcapping", 30)  # as a config.json may have it
    assert type(metadata_of(ARCHITECTURES["gemma2"], model.config)["gemma2.final_logit_softcapping"]) is float


def test_a_phi3_without_a_window_says_so():
    given = metadata("phi3", sliding_window=None)
    assert given["phi3.attention.sliding_window"] == 0 and read("phi3", given)["sliding_window"] is None
    given = metadata("phi3", sliding_window=7)
    assert given["phi3.attention.sliding_window"] == 7 and read("phi3", given)["sliding_window"] == 7


def test_gemmas_windows():
    two, three = metadata("gemma2", **GEMMA2), metadata("gemma3", **GEMMA3)
    key = "attention.sliding_window"
    assert read("gemma2", two)["layer_types"] == ["sliding_attention", "full_attention"]
    assert read("gemma2", two, **{key: None})["sliding_window"] == 4096
    assert read("gemma3", three)["layer_types"] == GEMMA3["layer_types"]
    for none in (None, 0):
        found = read("gemma3", three, **{key: none})
        assert found["layer_types"] == ["full_attention"] * 6 and found["sliding_window"]
    assert read("gemma3", three, **{f"{key}_pattern": 2})["layer_types"] == two_kinds(3)
    assert read("gemma3", three, **{f"{key}_pattern": [True, False] * 3})["layer_types"] == two_kinds(3)
    with pytest.raises(GGUFError, match="gemma3.attention.sliding_window_pattern has 5 of 6 values"):
        read("gemma3", three, **{f"{key}_pattern": [True] * 5})


def two_kinds(times):
    return ["sliding_attention", "full_attention"] * times


def test_gemma2s_caps():
    given = metadata("gemma2", **GEMMA2)
    assert read("gemma2", given)["attn_logit_softcapping"] == 5.0
    assert read("gemma2", given, attn_logit_softcapping=0.0)["attn_logit_softcapping"] is None
    assert "attn_logit_softcapping" not in read("gemma2", given, attn_logit_softcapping=None)  # 50 for both


@pytest.mark.parametrize("family, config", [("llama", {}), ("gemma2", GEMMA2), ("gpt2", {})])
def test_an_absurd_count_of_layers_makes_no_list_of_them(family, config):
    given, absurd = metadata(family, **config), 2**31 - 1
    names = {"blk.0.attn_norm.weight", f"blk.{absurd - 1}.attn_norm.weight"}
    with pytest.raises(GGUFError, match=f"block_count is {absurd}, tensor blk.1.attn_norm.weight is missing"):
        read(family, given, names=names, block_count=absurd)


def test_counts_that_do_not_go_together():
    with pytest.raises(GGUFError, match="llama.attention.head_count_kv is 3, of 4 heads"):
        read("llama", metadata("llama"), **{"attention.head_count_kv": 3})
    with pytest.raises(GGUFError, match="gpt2.attention.head_count is 3, of a width of 64"):
        read("gpt2", metadata("gpt2"), **{"attention.head_count": 3})
    with pytest.raises(GGUFError, match="llama.expert_used_count is above the count of experts"):
        read("mixtral", metadata("mixtral"), expert_used_count=5)


@pytest.mark.parametrize(
    "key, value",
    [
        ("rope.freq_base", 0.0),
        ("rope.freq_base", 1e300),
        ("rope.freq_base", 1e-300),
        ("rope.scaling.attn_factor", 0.0),
        ("rope.scaling.factor", -1.0),
        ("attention.layer_norm_rms_epsilon", True),
        ("rope.scaling.type", 1),
        ("context_length", 0),
    ],
)
def test_numbers_that_nothing_can_be_made_of(key, value):
    with pytest.raises(GGUFError, match=f"llama.{key} is "):
        read("llama", metadata("llama"), **{key: value})
