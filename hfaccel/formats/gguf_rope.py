"""Rotary positions: `rope_parameters` of a transformers config <-> metadata and tensors of a GGUF file.

A file has a base, perhaps a type of scaling with its numbers, and factors of each frequency as a tensor:
llama 3's in `rope_freqs.weight`, LongRoPE's in two. What it does not say is as in llama.cpp: a factor without
a type is linear, the original context the whole one, the factor of attention 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from reprlib import repr as shown  # long text and lists cut short
from typing import Any

import torch
from torch import Tensor

from hfaccel.errors import UnsupportedModel
from hfaccel.formats.gguf_file import GGUFError
from hfaccel.formats.gguf_names import Architecture, head_size

_LONG = ("rope_factors_long.weight", "rope_factors_short.weight")
ROPE_TENSORS = ("rope_freqs.weight", *_LONG)
# What llama.cpp has of YaRN without being told.
_YARN = {"beta_fast": 32, "beta_slow": 1, "truncate": True, "mscale": None, "mscale_all_dim": None}

# File -> config -------------------------------------------------------------------------------------------


def rope_of(row: Architecture, get: Any, rope: Mapping[str, list[float]], head: int, out: dict) -> dict:
    """`rope_parameters`.

    Args:
        get: value of a key behind "ARCHITECTURE.", checked, or the default given.
        rope: values of `ROPE_TENSORS` that the file has, by name.
        head: size of a head.
        out: the other fields of the config; gets `original_max_position_embeddings` where a phi3 has it.
    Raises: GGUFError naming a key or tensor that is odd; UnsupportedModel for what transformers has not.
    """
    theta = {"rope_theta": get("rope.freq_base", 10000.0)}
    kind = get("rope.scaling.type", "linear")
    factor = get("rope.scaling.factor", get("rope.scale_linear", 1.0))
    attention = get("rope.scaling.attn_factor", 1.0)
    length = get("rope.scaling.original_context_length")
    if factor == 1.0 and kind == "linear":
        kind = "none"
    rotary = get("rope.dimension_count", head)
    for name, factors in rope.items():
        if len(factors) != rotary // 2 or not all(0 < each < math.inf for each in factors):
            raise GGUFError(f"tensor {name} has {len(factors)} values for {rotary // 2}, or odd ones")
        if name in _LONG and row.model_type != "phi3":
            raise GGUFError(f"tensor {name}: not one that a {row.gguf} has")
    if row.model_type == "phi3":
        if rotary > head or rotary % 2:
            raise GGUFError(f"{row.gguf}.rope.dimension_count is {rotary}, heads have {head}")
        theta["partial_rotary_factor"] = rotary / head
        if found := [name for name in _LONG if name in rope]:
            if missing := [name for name in _LONG if name not in rope]:
                raise GGUFError(f"tensor {missing[0]} is missing, {found[0]} is there")
            if length is None:
                raise GGUFError(f"{row.gguf}.rope.scaling.original_context_length is missing")
            if kind not in ("none", "longrope"):
                raise UnsupportedModel(f"{row.gguf}.rope.scaling.type is {shown(kind)} beside {found[0]}")
            out["original_max_position_embeddings"] = length
            return theta | {
                "rope_type": "longrope",
                "short_factor": rope["rope_factors_short.weight"],
                "long_factor": rope["rope_factors_long.weight"],
                "original_max_position_embeddings": length,
                "attention_factor": attention,
            }
        kind = "none" if kind == "longrope" else kind
    if "rope_freqs.weight" in rope and kind == "none":
        scaled = _llama3(row, rope["rope_freqs.weight"], theta["rope_theta"], head)
    elif kind == "none":
        scaled = {"rope_type": "default"}
    elif kind == "linear":
        scaled = {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        length = length or out["max_position_embeddings"]
        scaled = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": length}
        if attention != 1.0:
            scaled["attention_factor"] = attention * yarn_attention(factor)
    else:
        raise UnsupportedModel(f"{row.gguf}.rope.scaling.type is {shown(kind)}; known are none, linear, yarn")
    if attention != 1.0 and kind != "yarn":
        raise UnsupportedModel(f"{row.gguf}.rope.scaling.attn_factor is {attention}: {kind} has none")
    if "rope_freqs.weight" in rope and kind != "none":
        raise UnsupportedModel(f"{row.gguf}.rope.scaling.type is {shown(kind)} beside rope_freqs.weight")
    if row.model_type == "gemma3_text":
        local = get("rope.freq_base_swa", 10000.0)
        return {
            "full_attention": theta | scaled,
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        }
    return theta | scaled


def yarn_attention(factor: float) -> float:
    """What YaRN multiplies cosines and sines by, where nothing else is said."""
    return 0.1 * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _llama3(row: Architecture, factors: list[float], theta: float, head: int) -> dict[str, Any]:
    """The published settings whose factors these are; others have no name in transformers."""
    for length in (8192, 4096, 16384, 32768):
        for factor in (8.0, 32.0, 16.0, 4.0, 2.0, 64.0):
            found = {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": length,
            }
            made = llama3_factors(found | {"rope_theta": theta}, head)
            if len(made) == len(factors) and all(
                math.isclose(a, b, rel_tol=1e-4) for a, b in zip(made, factors, strict=True)
            ):
                return found
    raise UnsupportedModel(
        "rope_freqs.weight: not the factors of llama 3 (low_freq_factor 1, high_freq_factor 4)"
    )


def llama3_factors(rope: Mapping[str, Any], head: int) -> list[float]:
    """What llama 3 divides each rotary frequency by: 1 where short waves turn, `factor` where long ones do,
    between them a blend that is linear in 1 / factor."""
    length, factor = rope["original_max_position_embeddings"], rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    out = []
    for i in range(0, head, 2):
        wave = 2 * math.pi * rope["rope_theta"] ** (i / head)
        smooth = min(max((length / wave - low) / (high - low), 0.0), 1.0)
        out.append(1 / ((1 - smooth) / factor + smooth))
    return out


# Config -> file -------------------------------------------------------------------------------------------


def put_rope(row: Architecture, config: Any, put: Callable[[str, Any], None]) -> None:
    """Every "rope." key, behind the architecture's name, to `put`. Raises: UnsupportedModel for what no such
    file can say."""
    rope, size = config.rope_parameters, head_size(config)
    if row.model_type == "gemma3_text":
        if (local := rope["sliding_attention"])["rope_theta"] != 10000.0 or local["rope_type"] != "default":
            raise UnsupportedModel(f"sliding_attention={local}: a GGUF gemma3 has rope_theta 10000 there")
        rope = rope["full_attention"]
    partial = rope.get("partial_rotary_factor", 1.0)
    if partial != 1.0 and row.model_type != "phi3":
        raise UnsupportedModel(f"partial_rotary_factor={partial}: a GGUF {row.gguf} turns whole heads")
    put("rope.dimension_count", int(size * partial))
    put("rope.freq_base", float(rope["rope_theta"]))
    kind = rope.get("rope_type", "default")
    if kind == "linear":
        put("rope.scaling.type", kind)
        put("rope.scaling.factor", float(rope["factor"]))
    elif kind == "yarn":
        for name, usual in _YARN.items():
            if rope.get(name) not in (None, usual):
                raise UnsupportedModel(f"yarn with {name}={rope[name]!r}: no place in a GGUF {row.gguf}")
        length = rope["original_max_position_embeddings"]
        factor = float(rope["factor"] or config.max_position_embeddings / length)
        put("rope.scaling.type", kind)
        put("rope.scaling.factor", factor)
        put("rope.scaling.original_context_length", length)
        if attention := rope.get("attention_factor"):
            put("rope.scaling.attn_factor", attention / yarn_attention(factor))
    elif kind == "longrope" and row.model_type == "phi3":
        length = config.original_max_position_embeddings
        scale = config.max_position_embeddings / length
        plain = 1.0 if scale <= 1 else math.sqrt(1 + math.log(scale) / math.log(length))
        put("rope.scaling.original_context_length", length)
        put("rope.scaling.attn_factor", float(rope.get("attention_factor") or plain))
    elif kind != "default" and (kind, row.gguf) != ("llama3", "llama"):
        raise UnsupportedModel(f"rope_type={kind!r}: no place in a GGUF {row.gguf}")


def rope_tensors(row: Architecture, config: Any) -> dict[str, Tensor]:
    """fp32 tensors of rotary factors that go into a file beside the weights."""
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "llama3":
        return {"rope_freqs.weight": torch.tensor(llama3_factors(rope, head_size(config)))}
    if rope.get("rope_type") == "longrope":
        return {
            f"rope_factors_{kind}.weight": torch.tensor(rope[f"{kind}_factor"]) for kind in ("long", "short")
        }
    return {}
