"""Metadata of a GGUF file <-> fields of a transformers config, by the rows of `gguf_names`.

`config_of` reads, `metadata_of` writes; rotary positions are `gguf_rope`'s. What files leave to the reader
(gemma's pattern of windows and scale of queries, falcon's parallel branches) is here in one place for both,
and a config that says otherwise is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from reprlib import repr as shown  # long text and lists cut short
from typing import Any

import numpy

from hfaccel.errors import UnsupportedModel
from hfaccel.formats.gguf_file import GGUFError
from hfaccel.formats.gguf_names import Architecture, Metadata, falcon_kv_heads, head_size
from hfaccel.formats.gguf_rope import put_rope, rope_of

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
        if value is not None or f"{row.gguf}.{key}" in metadata:  # None: a cap or a window of 0
            out[name] = value
        elif key not in _OPTIONAL:
            raise GGUFError(f"{row.gguf}.{key} is missing")
    layers = get("block_count")
    for i in range(layers):
        if (norm := f"blk.{i}.attn_norm.weight") not in names:
            raise GGUFError(f"{row.gguf}.block_count is {layers}, tensor {norm} is missing")
    heads = get("attention.head_count")
    out["tie_word_embeddings"] = "output.weight" not in names
    if row.model_type == "gpt2":
        if get("embedding_length") % heads:
            raise GGUFError(f"gpt2.attention.head_count is {heads}, of a width of {get('embedding_length')}")
        return out
    shared = out[row.fields["attention.head_count_kv"]] = get("attention.head_count_kv", heads)
    if heads % shared:
        raise GGUFError(f"{row.gguf}.attention.head_count_kv is {shared}, of {heads} heads")
    if row.stacked and get("expert_used_count") > get("expert_count"):
        raise GGUFError(f"{row.gguf}.expert_used_count is above the count of experts")
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
    out["rope_parameters"] = rope_of(row, get, rope, head, out)
    _FAMILY.get(row.model_type, lambda *_: None)(row, get, names, out)
    return out


# What is no positive integer.
_REALS = ("epsilon", "softcapping", "freq_base", "freq_base_swa", "factor", "scale_linear")
_DIVISORS = ("freq_base", "freq_base_swa", "attn_factor")  # 0 means nothing
_TEXTS = ("scaling.type", "tensor_data_layout")
_LISTS = ("sliding_window_pattern",)
_LARGEST = float(numpy.finfo(numpy.float32).max)


def _checked(key: str, value: Any, default: Any) -> Any:
    """A value of the kind that its key has: counts below 2^31, finite positive numbers, text."""
    if value is None:
        return default
    if key.endswith(_TEXTS):
        good = isinstance(value, str)
    elif key.endswith(_LISTS) and isinstance(value, list):
        good = all(type(each) is bool for each in value)
    elif key.endswith(_REALS):
        good = type(value) in (int, float) and 0 <= value <= _LARGEST
        value = shortest(value) if good else value
        if value == 0 and key.endswith(_DIVISORS):
            good = False
        elif value == 0 and key.endswith(("softcapping", "scaling.factor", "scale_linear")):
            return default
    else:
        good = type(value) is int and 0 < value < 1 << 31
        if value == 0 and key.endswith("sliding_window"):
            return default
    if not good:
        text = f"{len(value)} values" if isinstance(value, list) else shown(value)
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


def _llama(row: Architecture, get: Any, names: Collection[str], out: dict) -> None:
    if row.model_type == "llama":
        out["attention_bias"] = "blk.0.attn_q.bias" in names
        out["mlp_bias"] = "blk.0.ffn_gate.bias" in names


def _gemma(row: Architecture, get: Any, names: Collection[str], out: dict) -> None:
    layers = out["num_hidden_layers"]
    period = get("attention.sliding_window_pattern", row.period)
    if isinstance(period, list) and len(period) != layers:
        raise GGUFError(f"{row.gguf}.attention.sliding_window_pattern has {len(period)} of {layers} values")
    if row.model_type == "gemma2":
        out.setdefault("sliding_window", 4096)
    if out.get("sliding_window") is None:
        out["layer_types"] = ["full_attention"] * layers
        out["sliding_window"] = 4096  # transformers makes a mask of it, and no layer takes it
    elif isinstance(period, list):
        out["layer_types"] = ["sliding_attention" if each else "full_attention" for each in period]
    else:
        out["layer_types"] = layer_types(layers, period)
    out["query_pre_attn_scalar"] = query_scalar(row, layers, out)
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
        elif name == "sliding_window" and row.model_type == "phi3":
            value = value or 0  # says that there is none
        if value is not None:
            put(key, float(value) if key.endswith(_REALS) else value)
    if row.model_type == "gpt2":
        return out
    size = head_size(config)
    if "head_dim" in row.fields.values():
        put("attention.value_length", size)
    _refuse_unsaid(row, config)
    put_rope(row, config, put)
    if row.model_type == "falcon":
        put("tensor_data_layout", "jploski")
    return out


def _refuse_unsaid(row: Architecture, config: Any) -> None:
    """What files leave to the reader must be what readers take."""
    if row.model_type == "gemma2":
        for name in ("attn_logit_softcapping", "final_logit_softcapping"):
            if getattr(config, name) is None:
                raise UnsupportedModel(f"{name}=None: a GGUF gemma2 has one")
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
