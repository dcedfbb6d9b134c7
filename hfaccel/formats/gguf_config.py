"""Metadata of a GGUF file <-> fields of a transformers config, by the rows of `gguf_names`.

`config_of` reads, `metadata_of` and `rope_tensors` write. What files leave to the reader (gemma's pattern of
windows and scale of queries, falcon's parallel branches) is here in one place for both, and a config that
says otherwise is refused.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import numpy
import torch
from torch import Tensor

from hfaccel.errors import UnsupportedModel
from hfaccel.formats.gguf_file import GGUFError
from hfaccel.formats.gguf_names import Architecture, Metadata, falcon_kv_heads, head_size

ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")

# Metadata -> config ---------------------------------------------------------------------------------------


def config_of(
    row: Architecture, metadata: Metadata, names: Collection[str], rope: Mapping[str, list[float]]
) -> dict[str, Any]:
    """Fields of the transformers config that a file describes.

    Args:
        names: of its tensors: biases, head and norms are where there is a tensor.
        rope: values of `rope_freqs.weight` and the like, by name.
    Raises: GGUFError naming a key that is missing or odd; UnsupportedModel for what transformers has not.
    """

    def get(key: str, default: Any = None) -> Any:
        return _checked(f"{row.gguf}.{key}", metadata.get(f"{row.gguf}.{key}"), default)

    out: dict[str, Any] = dict(row.fixed)
    for key, name in row.fields.items():
        value = get(key)
        if value is not None:
            out[name] = value
        elif key not in _OPTIONAL:
            raise GGUFError(f"{row.gguf}.{key} is missing")
    heads = get("attention.head_count")
    out["tie_word_embeddings"] = "output.weight" not in names
    if row.model_type == "gpt2":
        return out
    if get("attention.head_count_kv") is None:
        out[row.fields["attention.head_count_kv"]] = heads
    key_length = get("attention.key_length")
    rotary = get("rope.dimension_count")
    head = key_length or (rotary if "head_dim" in row.fields.values() else None)
    head = head or get("embedding_length") // heads
    if head % 2 or not head:
        raise UnsupportedModel(f"heads of size {head}: rotary positions want an even one")
    if get("attention.value_length", head) != head:
        raise UnsupportedModel(f"{row.gguf}.attention.value_length: keys and values of different sizes")
    if "head_dim" in row.fields.values():
        out["head_dim"] = head
    elif key_length is not None and key_length * heads != get("embedding_length"):
        raise UnsupportedModel(f"{row.gguf}.attention.key_length: {row.model_type} has heads x size = hidden")
    if rotary is not None and rotary != head and row.model_type != "phi3":
        raise UnsupportedModel(f"{row.gguf}.rope.dimension_count is {rotary}, heads have {head}")
    out["rope_parameters"] = _rope(row, get, rope, head, out)
    _FAMILY.get(row.model_type, lambda *_: None)(row, get, names, out)
    return out


# What is no positive integer.
_REALS = ("epsilon", "softcapping", "freq_base", "freq_base_swa", "factor", "attn_factor", "scale_linear")
_TEXTS = ("scaling.type", "tensor_data_layout")
_LISTS = ("sliding_window_pattern",)
_NONE = (0,)  # of what there may be none of


def _checked(key: str, value: Any, default: Any) -> Any:
    """A value of the kind that its key has: counts below 2^31, finite positive numbers, text."""
    if value is None:
        return default
    if key.endswith(_TEXTS):
        good = isinstance(value, str)
    elif key.endswith(_LISTS) and isinstance(value, list):
        good = all(type(each) is bool for each in value)
    elif key.endswith(_REALS):
        good = type(value) in (int, float) and 0 <= value < math.inf
        value = shortest(value) if good else value
        if value in _NONE and key.endswith("softcapping"):
            return default
    else:
        good = type(value) is int and 0 < value < 1 << 31
        if value in _NONE and key.endswith(("expert_count", "sliding_window")):
            return default
    if not good:
        text = f"{len(value)} values" if isinstance(value, list) else repr(value)
        raise GGUFError(f"{key} is {text}")
    return value


_OPTIONAL = (
    "vocab_size",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.sliding_window",
    "attn_logit_softcapping",
    "final_logit_softcapping",
)


def _rope(row: Architecture, get: Any, rope: Mapping[str, list[float]], head: int, out: dict) -> dict:
    theta = {"rope_theta": get("rope.freq_base", 10000.0)}
    kind = get("rope.scaling.type", "none")
    factor = get("rope.scaling.factor", 1.0)
    if (old := get("rope.scale_linear")) is not None:
        kind, factor = "linear", old
    if factor in (0.0, 1.0) and kind == "linear":
        kind = "none"
    length = get("rope.scaling.original_context_length")
    if row.model_type == "phi3":
        rotary = get("rope.dimension_count", head)
        theta["partial_rotary_factor"] = rotary / head
        if "rope_factors_long.weight" in rope:
            if length is None:
                raise GGUFError(f"{row.gguf}.rope.scaling.original_context_length is missing")
            out["original_max_position_embeddings"] = length
            found = {
                "rope_type": "longrope",
                "short_factor": rope["rope_factors_short.weight"],
                "long_factor": rope["rope_factors_long.weight"],
                "original_max_position_embeddings": length,
            }
            if (attention := get("rope.scaling.attn_factor")) is not None:
                found["attention_factor"] = attention
            return theta | found
        kind = "none" if kind == "longrope" else kind
    if "rope_freqs.weight" in rope:
        return theta | _llama3(row, rope["rope_freqs.weight"], theta["rope_theta"], head)
    if kind == "none":
        scaled: dict[str, Any] = {"rope_type": "default"}
    elif kind == "linear":
        scaled = {"rope_type": "linear", "factor": factor}
    elif kind == "yarn" and length is not None:
        scaled = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": length}
    else:
        raise UnsupportedModel(f"{row.gguf}.rope.scaling.type is {kind!r}; known are none, linear, yarn")
    if row.model_type == "gemma3_text":
        local = get("rope.freq_base_swa", 10000.0)
        return {
            "full_attention": theta | scaled,
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        }
    return theta | scaled


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


def _llama(row: Architecture, get: Any, names: Collection[str], out: dict) -> None:
    if row.model_type == "llama":
        out["attention_bias"] = "blk.0.attn_q.bias" in names
        out["mlp_bias"] = "blk.0.ffn_gate.bias" in names


def _gemma(row: Architecture, get: Any, names: Collection[str], out: dict) -> None:
    layers = out["num_hidden_layers"]
    period = get("attention.sliding_window_pattern", row.period)
    if isinstance(period, list):
        out["layer_types"] = ["sliding_attention" if each else "full_attention" for each in period]
    else:
        out["layer_types"] = layer_types(layers, period)
    out["query_pre_attn_scalar"] = query_scalar(row, layers, out)
    out.setdefault("sliding_window", 4096)
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if row.model_type == "gemma3_text":
            out.setdefault(key, None)


def layer_types(layers: int, period: int) -> list[str]:
    """Every `period`-th layer sees all, the others a window."""
    return [
        "full_attention" if period and i % period == period - 1 else "sliding_attention"
        for i in range(layers)
    ]


def query_scalar(row: Architecture, layers: int, config: Mapping[str, Any]) -> int:
    """What gemma's queries are divided by the root of; files do not say."""
    if layers == row.wide_layers:
        return config["hidden_size"] // config["num_attention_heads"]
    return config["head_dim"]


def _qwen(row: Architecture, get: Any, names: Collection[str], out: dict) -> None:
    out["use_sliding_window"] = False
    if row.model_type == "qwen3":
        out["attention_bias"] = "blk.0.attn_q.bias" in names


def _falcon(row: Architecture, get: Any, names: Collection[str], out: dict) -> None:
    both = "blk.0.attn_norm_2.weight" in names
    new = both or out["num_kv_heads"] != 1
    out |= {"new_decoder_architecture": new, "parallel_attn": True, "multi_query": not new}
    out["bias"] = "blk.0.attn_qkv.bias" in names
    if new:
        out["num_ln_in_parallel_attn"] = 2 if both else 1


def _starcoder2(row: Architecture, get: Any, names: Collection[str], out: dict) -> None:
    out["use_bias"] = "blk.0.attn_q.bias" in names


_FAMILY = {
    "llama": _llama,
    "gemma2": _gemma,
    "gemma3_text": _gemma,
    "qwen2": _qwen,
    "qwen3": _qwen,
    "falcon": _falcon,
    "starcoder2": _starcoder2,
}


def shortest(value: float) -> float:
    """The shortest decimal with this fp32 value: 1e-05, not 9.999999747378752e-06."""
    return float(str(numpy.float32(value)))


# Config -> metadata ---------------------------------------------------------------------------------------


def metadata_of(row: Architecture, config: Any) -> dict[str, Any]:
    """`general.architecture` and every "ARCHITECTURE." key: int for UINT32, float for FLOAT32, text, bool.

    Raises: UnsupportedModel for what no such file can say.
    """
    for name, wanted in row.fixed.items():
        found = getattr(config, name, wanted)
        if found != wanted and {found, wanted} != {"silu", "swish"}:
            raise UnsupportedModel(f"{name}={found!r}: a GGUF {row.gguf} has {wanted!r}")
    out: dict[str, Any] = {"general.architecture": row.gguf}

    def put(key: str, value: Any) -> None:
        out[f"{row.gguf}.{key}"] = value

    for key, name in row.fields.items():
        value = getattr(config, name, None)
        if name == "head_dim":
            value = head_size(config)
        elif name == "num_kv_heads":
            value = falcon_kv_heads(config)
        elif name == "n_inner":
            value = value or 4 * config.n_embd
        if value is not None:
            put(key, value)
    if row.model_type == "gpt2":
        return out
    size = head_size(config)
    if "head_dim" in row.fields.values():
        put("attention.value_length", size)
    rope = config.rope_parameters
    _refuse_unsaid(row, config)
    if row.model_type == "gemma3_text":
        if (local := rope["sliding_attention"])["rope_theta"] != 10000.0 or local["rope_type"] != "default":
            raise UnsupportedModel(f"sliding_attention={local}: a GGUF gemma3 has rope_theta 10000 there")
        rope = rope["full_attention"]
    put("rope.dimension_count", int(size * rope.get("partial_rotary_factor", 1.0)))
    put("rope.freq_base", float(rope["rope_theta"]))
    kind = rope.get("rope_type", "default")
    if kind in ("linear", "yarn"):
        put("rope.scaling.type", kind)
        put("rope.scaling.factor", float(rope["factor"]))
        if kind == "yarn":
            put("rope.scaling.original_context_length", rope["original_max_position_embeddings"])
    elif kind == "longrope" and row.model_type == "phi3":
        length = config.original_max_position_embeddings
        scale = config.max_position_embeddings / length
        plain = 1.0 if scale <= 1 else math.sqrt(1 + math.log(scale) / math.log(length))
        put("rope.scaling.original_context_length", length)
        put("rope.scaling.attn_factor", float(rope.get("attention_factor") or plain))
    elif kind not in ("default", "llama3"):
        raise UnsupportedModel(f"rope_type={kind!r}: no place in a GGUF {row.gguf}")
    if row.model_type == "falcon":
        put("tensor_data_layout", "jploski")
    return out


def _refuse_unsaid(row: Architecture, config: Any) -> None:
    """What files leave to the reader must be what readers take."""
    if row.period:
        layers = config.num_hidden_layers
        if list(config.layer_types) != layer_types(layers, row.period):
            raise UnsupportedModel(
                f"layer_types: a GGUF {row.gguf} sees all in every {row.period}th layer alone"
            )
        wanted = query_scalar(row, layers, vars(config) | {"head_dim": head_size(config)})
        if config.query_pre_attn_scalar != wanted:
            raise UnsupportedModel(
                f"query_pre_attn_scalar={config.query_pre_attn_scalar}: a GGUF {row.gguf} has {wanted}"
            )
    if row.model_type == "falcon" and not (config.new_decoder_architecture or config.parallel_attn):
        raise UnsupportedModel("parallel_attn=False: a GGUF falcon has parallel branches")


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
