"""The table of GGUF architectures, one row each, read in both directions.

A row says which tensor of a GGUF file is which of a transformers model, which metadata is which field of its
config, and where values lie otherwise:

    order        GGUF pairs the two halves of each head's rotary rows in llama files (queries and keys, each
                 with its own head count), and has falcon's q, k, v of each group as all q, all k, all v
    transposed   transformers stores gpt2's matrices [in, out]
    offset       gemma's norms multiply by 1 + weight; files hold the sum
    half         gate and up of all experts are two tensors in a file and the halves of one here

`pairs` lists the tensors; `gguf_config.py` turns metadata into config fields and back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from reprlib import repr as shown  # long text and lists cut short
from typing import Any

import torch
from torch import Tensor

from hfaccel.errors import UnsupportedModel

Metadata = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One row.

    Attributes:
        gguf: `general.architecture`; metadata keys start with it.
        model_type, model_class: of transformers.
        layers: path of the layers.
        outside, block: tensor of the file, without "blk.N." and suffix -> module, without `layers` and N.
        stacked: tensor of all experts [E, out, in] -> (parameter of the layer, half of its rows or None).
        fields: metadata key behind "ARCHITECTURE." -> config field.
        order: tensors whose rows are in another order -> "q", "k" or "qkv".
        transposed: tensors that transformers stores [in, out].
        offset: what the file's norm weights are more than ours.
        fixed: config fields that the architecture implies; a model with others has no such file.
        period: every this many layers one has no sliding window, 0 without any pattern.
        wide_layers: layer count of the one size whose queries are scaled by hidden size / heads (gemma).
        tied: llama.cpp takes no head but the embedding.
    """

    gguf: str
    model_type: str
    model_class: str
    layers: str = "model.layers"
    outside: Mapping[str, str]
    block: Mapping[str, str]
    stacked: Mapping[str, tuple[str, int | None]] = field(default_factory=dict)
    fields: Mapping[str, str]
    order: Mapping[str, str] = field(default_factory=dict)
    transposed: frozenset[str] = frozenset()
    offset: float = 0.0
    fixed: Mapping[str, Any] = field(default_factory=dict)
    period: int = 0
    wide_layers: int = 0
    tied: bool = False


_SIZES = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "vocab_size": "vocab_size",
}
_FIELDS = _SIZES | {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}
_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_PRE = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_GATED = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_QK_NORM = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_SILU = {"hidden_act": "silu"}

_LLAMA = Architecture(
    gguf="llama",
    model_type="llama",
    model_class="LlamaForCausalLM",
    outside=_OUTSIDE,
    block=_ATTENTION | _PRE | _GATED,
    fields=_FIELDS | {"attention.key_length": "head_dim"},
    order={"attn_q": "q", "attn_k": "k"},
    fixed=_SILU,
)
_QWEN2 = replace(
    _LLAMA,
    gguf="qwen2",
    model_type="qwen2",
    model_class="Qwen2ForCausalLM",
    fields=_FIELDS,
    order={},
    fixed=_SILU | {"sliding_window": None},
)
_GEMMA_FIELDS = _FIELDS | {
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "final_logit_softcapping": "final_logit_softcapping",
}
_GEMMA2 = Architecture(
    gguf="gemma2",
    model_type="gemma2",
    model_class="Gemma2ForCausalLM",
    outside=_OUTSIDE,
    block=_ATTENTION
    | _GATED
    | {
        "attn_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    fields=_GEMMA_FIELDS | {"attn_logit_softcapping": "attn_logit_softcapping"},
    offset=1.0,
    fixed={"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False},
    period=2,
    wide_layers=46,
    tied=True,
)

ARCHITECTURES: dict[str, Architecture] = {  # by model_type
    "llama": _LLAMA,
    # A mistral is a llama in GGUF, and is read as one; its window has no place there.
    "mistral": replace(
        _LLAMA, model_type="mistral", model_class="MistralForCausalLM", fixed=_SILU | {"sliding_window": None}
    ),
    "mixtral": replace(
        _LLAMA,
        model_type="mixtral",
        model_class="MixtralForCausalLM",
        block=_ATTENTION | _PRE | {"ffn_gate_inp": "mlp.gate"},
        stacked={
            "ffn_gate_exps": ("mlp.experts.gate_up_proj", 0),
            "ffn_up_exps": ("mlp.experts.gate_up_proj", 1),
            "ffn_down_exps": ("mlp.experts.down_proj", None),
        },
        fields=_LLAMA.fields
        | {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
        fixed=_SILU | {"sliding_window": None},
    ),
    "qwen2": _QWEN2,
    "qwen3": replace(
        _QWEN2,
        gguf="qwen3",
        model_type="qwen3",
        model_class="Qwen3ForCausalLM",
        block=_QWEN2.block | _QK_NORM,
        fields=_FIELDS | {"attention.key_length": "head_dim"},
        fixed=_QWEN2.fixed | {"attention_bias": False},
    ),
    "gemma2": _GEMMA2,
    "gemma3_text": replace(
        _GEMMA2,
        gguf="gemma3",
        model_type="gemma3_text",
        model_class="Gemma3ForCausalLM",
        block=_GEMMA2.block | _QK_NORM,
        fields=_GEMMA_FIELDS,  # transformers has a field of attn_logit_softcapping, and does not read it
        fixed=_GEMMA2.fixed | {"use_bidirectional_attention": False},
        period=6,
        wide_layers=62,
        tied=False,
    ),
    "phi3": replace(
        _LLAMA,
        gguf="phi3",
        model_type="phi3",
        model_class="Phi3ForCausalLM",
        block=_PRE
        | {
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        },
        fields=_FIELDS | {"attention.sliding_window": "sliding_window"},
        order={},
    ),
    "gpt2": Architecture(
        gguf="gpt2",
        model_type="gpt2",
        model_class="GPT2LMHeadModel",
        layers="transformer.h",
        outside={
            "token_embd": "transformer.wte",
            "position_embd": "transformer.wpe",
            "output_norm": "transformer.ln_f",
            "output": "lm_head",
        },
        block={
            "attn_norm": "ln_1",
            "attn_qkv": "attn.c_attn",
            "attn_output": "attn.c_proj",
            "ffn_norm": "ln_2",
            "ffn_up": "mlp.c_fc",
            "ffn_down": "mlp.c_proj",
        },
        fields={
            "context_length": "n_positions",
            "block_count": "n_layer",
            "feed_forward_length": "n_inner",
            "embedding_length": "n_embd",
            "attention.head_count": "n_head",
            "attention.layer_norm_epsilon": "layer_norm_epsilon",
            "vocab_size": "vocab_size",
        },
        transposed=frozenset({"attn_qkv", "attn_output", "ffn_up", "ffn_down"}),
        fixed={
            "activation_function": "gelu_new",
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
        },
    ),
    "falcon": Architecture(
        gguf="falcon",
        model_type="falcon",
        model_class="FalconForCausalLM",
        layers="transformer.h",
        outside={
            "token_embd": "transformer.word_embeddings",
            "output_norm": "transformer.ln_f",
            "output": "lm_head",
        },
        # `pairs` takes of these what the model has: one norm before both branches, or one before each.
        block={
            "attn_norm": "input_layernorm",
            "attn_qkv": "self_attention.query_key_value",
            "attn_output": "self_attention.dense",
            "ffn_up": "mlp.dense_h_to_4h",
            "ffn_down": "mlp.dense_4h_to_h",
        },
        fields={
            "context_length": "max_position_embeddings",
            "block_count": "num_hidden_layers",
            "feed_forward_length": "ffn_hidden_size",
            "embedding_length": "hidden_size",
            "attention.head_count": "num_attention_heads",
            "attention.head_count_kv": "num_kv_heads",
            "attention.layer_norm_epsilon": "layer_norm_epsilon",
            "vocab_size": "vocab_size",
        },
        order={"attn_qkv": "qkv"},
        fixed={"alibi": False, "activation": "gelu", "bias": False},
    ),
    "starcoder2": Architecture(
        gguf="starcoder2",
        model_type="starcoder2",
        model_class="Starcoder2ForCausalLM",
        outside=_OUTSIDE,
        block=_ATTENTION | _PRE | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        fields=_SIZES | {"attention.layer_norm_epsilon": "norm_epsilon"},
        fixed={"hidden_act": "gelu_pytorch_tanh", "sliding_window": None, "use_bias": True},
    ),
}
_TWO_NORMS = {"attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"}  # falcon's


# Tensors --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """One tensor under both names; the other fields are explained at the top."""

    gguf: str
    name: str
    order: str = ""
    transposed: bool = False
    offset: float = 0.0
    half: int | None = None
    stacked: bool = False


def architecture_of_model(config: Any) -> Architecture:
    """The row of a transformers model. Raises: UnsupportedModel listing the known ones."""
    found = ARCHITECTURES.get(config.model_type)
    if found is None:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UnsupportedModel(f"no GGUF architecture for {config.model_type!r}; known are {known}")
    return found


def architecture_of_file(metadata: Metadata) -> Architecture:
    """The row of a file. Raises: UnsupportedModel listing the known ones."""
    name = metadata.get("general.architecture")
    if name == "llama":
        return ARCHITECTURES["mixtral" if metadata.get("llama.expert_count") else "llama"]
    found = next((row for row in ARCHITECTURES.values() if row.gguf == name), None)
    if found is None:
        known = ", ".join(sorted({row.gguf for row in ARCHITECTURES.values()}))
        raise UnsupportedModel(f"general.architecture is {shown(name)}; known are {known}")
    return found


def pairs(row: Architecture, config: Any) -> list[Pair]:
    """Every tensor that a file of this config may hold, weights and biases; some have no bias, or no head."""
    out = []

    def add(stem: str, gguf: str, name: str, prefix: str = "") -> None:
        for suffix in ("weight", "bias"):
            weight = suffix == "weight"
            out.append(
                Pair(
                    f"{prefix}{gguf}.{suffix}",
                    f"{name}.{suffix}",
                    order=row.order.get(stem, ""),
                    transposed=weight and stem in row.transposed,
                    offset=row.offset if weight and stem.endswith("norm") else 0.0,
                )
            )

    for stem, name in row.outside.items():
        add(stem, stem, name)
    block = dict(row.block)
    if two_norms(row, config):
        block |= _TWO_NORMS
    for i in range(config.num_hidden_layers):
        for stem, name in block.items():
            add(stem, stem, f"{row.layers}.{i}.{name}", f"blk.{i}.")
        for stem, (name, half) in row.stacked.items():
            where = f"{row.layers}.{i}.{name}"
            out.append(Pair(f"blk.{i}.{stem}.weight", where, half=half, stacked=True))
    return out


def two_norms(row: Architecture, config: Any) -> bool:
    """Whether a falcon has a norm before each branch."""
    return row.model_type == "falcon" and bool(
        config.new_decoder_architecture and config.num_ln_in_parallel_attn != 1
    )


def row_order(pair: Pair, config: Any) -> Tensor | None:
    """Which of our rows each row of the file is: file = ours[order]; None where they are the same."""
    if not pair.order:
        return None
    heads, size = config.num_attention_heads, head_size(config)
    if pair.order == "qkv":
        kv = falcon_kv_heads(config)
        rows = torch.arange((heads + 2 * kv) * size).view(kv, heads // kv + 2, size)
        return torch.cat([rows[:, :-2].flatten(), rows[:, -2].flatten(), rows[:, -1].flatten()])
    count = heads if pair.order == "q" else config.num_key_value_heads
    return torch.arange(count * size).view(count, 2, size // 2).transpose(1, 2).flatten()


def inverse(order: Tensor) -> Tensor:
    """The order that takes the file's rows back: ours = file[inverse(order)]."""
    return torch.argsort(order)


def head_size(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def falcon_kv_heads(config: Any) -> int:
    if config.new_decoder_architecture:
        return config.num_kv_heads
    return 1 if config.multi_query else config.num_attention_heads
