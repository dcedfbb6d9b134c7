"""Rotary positions through metadata, in both directions; llama.cpp's own defaults where a file is silent."""

import math
import struct

import pytest
import torch

import hfaccel
from gguf_bytes import File, Tensor
from gguf_configs import GEMMA3, LLAMA3, metadata, read
from gguf_models import written
from hfaccel.errors import UnsupportedModel
from hfaccel.formats.gguf_file import GGUFError, GGUFFile
from hfaccel.formats.gguf_names import ARCHITECTURES
from hfaccel.formats.gguf_rope import llama3_factors, rope_tensors
from tiny import tiny

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 128,
}


def rope(given, **changes):
    return read("llama", given, **{f"rope.{key}": value for key, value in changes.items()})["rope_parameters"]


def test_what_a_file_does_not_say_is_as_in_llama_cpp():
    plain = metadata("llama")
    assert rope(plain) == {"rope_theta": 10000.0, "rope_type": "default"}
    assert rope(plain, freq_base=None)["rope_theta"] == 10000.0
    linear = {"rope_theta": 10000.0, "rope_type": "linear", "factor": 4.0}
    assert rope(plain, **{"scaling.factor": 4.0}) == linear  # no type: linear
    assert rope(plain, scale_linear=4.0) == linear  # the key's old name
    assert rope(plain, **{"scaling.type": "linear", "scaling.factor": 0.0})["rope_type"] == "default"
    assert rope(plain, **{"scaling.type": "none", "scaling.factor": 4.0})["rope_type"] == "default"
    yarn = rope(plain, **{"scaling.type": "yarn", "scaling.factor": 4.0})
    assert yarn == YARN | {"original_max_position_embeddings": 512}  # the whole context
    with pytest.raises(UnsupportedModel, match="llama.rope.scaling.attn_factor is 1.5: none has none"):
        rope(plain, **{"scaling.attn_factor": 1.5})


@pytest.mark.parametrize("more", [{}, {"attention_factor": 1.5}, {"beta_fast": 32.0, "truncate": True}])
def test_yarn_comes_back(more):
    given = metadata("llama", rope_parameters=YARN | more)
    # ggml multiplies what the file says by 1 + 0.1 ln(factor)
    if "attention_factor" in more:
        wanted = 1.5 / (1 + 0.1 * math.log(4))
        assert given["llama.rope.scaling.attn_factor"] == pytest.approx(wanted)
    else:
        assert "llama.rope.scaling.attn_factor" not in given
    found = rope(given)
    assert found.pop("attention_factor", None) == pytest.approx(more.get("attention_factor"))
    assert found == YARN


@pytest.mark.parametrize(
    "family, more, words",
    [
        ("llama", YARN | {"beta_fast": 64.0}, "yarn with beta_fast=64.0: no place in a GGUF llama"),
        ("llama", YARN | {"truncate": False}, "yarn with truncate=False"),
        ("llama", YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}, "yarn with mscale=1.0"),
        ("llama", {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, "rope_type='dynamic'"),
        ("qwen2", LLAMA3, "rope_type='llama3': no place in a GGUF qwen2"),  # whose reader has no such tensor
        ("llama", LONG, "rope_type='longrope': no place in a GGUF llama"),
    ],
)
def test_what_no_file_can_say_is_refused(family, more, words):
    with pytest.raises(UnsupportedModel, match=words):
        metadata(family, rope_parameters=more)


def test_gemma3s_two_kinds():
    scaled = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
    local = {"rope_type": "default", "rope_theta": 1e4}
    both = {"full_attention": scaled, "sliding_attention": local}
    given = metadata("gemma3", **GEMMA3, rope_parameters=both)
    assert read("gemma3", given)["rope_parameters"] == both
    assert read("gemma3", given, **{"rope.freq_base_swa": 2e4})["rope_parameters"]["sliding_attention"] == (
        local | {"rope_theta": 2e4}
    )
    with pytest.raises(UnsupportedModel, match="a GGUF gemma3 has rope_theta 10000 there"):
        metadata("gemma3", **GEMMA3, rope_parameters=both | {"sliding_attention": scaled})


def test_llama_3s_factors():
    config = tiny("llama", rope_parameters=LLAMA3).config
    (factors,) = rope_tensors(ARCHITECTURES["llama"], config).values()
    assert factors.dtype == torch.float32 and factors.tolist()[:3] == [1.0, 1.0, 1.0]
    given = metadata("llama", rope_parameters=LLAMA3)
    found = read("llama", given, rope={"rope_freqs.weight": factors.tolist()})["rope_parameters"]
    assert llama3_factors(found, 16) == llama3_factors(LLAMA3, 16)
    with pytest.raises(UnsupportedModel, match="not the factors of llama 3"):
        read("llama", given, rope={"rope_freqs.weight": [1.0] * 7 + [9.0]})
    with pytest.raises(UnsupportedModel, match="scaling.type is 'linear' beside rope_freqs.weight"):
        read("llama", given, rope={"rope_freqs.weight": [1.0] * 8}, **{"rope.scaling.factor": 2.0})


def test_long_rope_without_a_factor_of_attention_has_1():
    config = {"rope_parameters": LONG, "original_max_position_embeddings": 128}
    given = metadata("phi3", **config)
    tensors = {
        k: v.tolist() for k, v in rope_tensors(ARCHITECTURES["phi3"], tiny("phi3", **config).config).items()
    }
    assert read("phi3", given, rope=tensors)["rope_parameters"]["attention_factor"] == pytest.approx(
        math.sqrt(1 + math.log(4) / math.log(128))
    )
    silent = read("phi3", given, rope=tensors, **{"rope.scaling.attn_factor": None})
    assert silent["rope_parameters"]["attention_factor"] == 1.0
    for half in (0, 1):
        name = list(tensors)[half]
        with pytest.raises(GGUFError, match=f"tensor rope_factors_(long|short).weight is missing, {name}"):
            read("phi3", given, rope={name: tensors[name]})
    with pytest.raises(UnsupportedModel, match="scaling.type is 'yarn' beside rope_factors_long.weight"):
        read("phi3", given, rope=tensors, **{"rope.scaling.type": "yarn"})
    for turned in (18, 2**31 - 2, 7):
        with pytest.raises(GGUFError, match=f"phi3.rope.dimension_count is {turned}, heads have 16"):
            read("phi3", given, **{"rope.dimension_count": turned})


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_factors_are_positive_numbers(value):
    with pytest.raises(GGUFError, match="tensor rope_freqs.weight has 8 values for 8, or odd ones"):
        read("llama", metadata("llama"), rope={"rope_freqs.weight": [1.0] * 7 + [value]})


@pytest.mark.parametrize(
    "name, shape, kind, words",
    [
        ("rope_freqs.weight", (8,), 1, r"is F16 \[8\]: no rotary factors"),
        ("rope_freqs.weight", (2, 4), 0, r"is F32 \[2, 4\]: no rotary factors"),
        ("rope_freqs.weight", (1 << 17,), 0, r"is F32 \[131072\]: no rotary factors"),
        ("rope_freqs.weight", (9,), 0, "has 9 values for 8"),
        ("rope_factors_long.weight", (8,), 0, "not one that a llama has"),
    ],
)
def test_tensors_of_factors_that_are_none(name, shape, kind, words, tmp_path):
    file = GGUFFile(written(tiny("llama"), tmp_path / "m.gguf"))
    count = math.prod(shape)
    data = struct.pack(f"<{count}{'fe'[kind]}", *[1.0] * count)
    tensors = [
        Tensor(n, info.shape, info.type.number, file.rows(n).numpy().tobytes())
        for n, info in file.tensors.items()
    ]
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(File(list(file.metadata.items()), [*tensors, Tensor(name, shape, kind, data)]).bytes())
    with pytest.raises(GGUFError, match=f"bad.gguf: tensor {name}:? {words}"):
        hfaccel.from_pretrained(bad)
