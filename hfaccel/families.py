"""The table of model families: one row each, data only, read by `blocks.py` and `anatomy.py`.

A row says where a family keeps its parts and what its config does not say. Paths are relative to a layer
(`roles`, `norms`) or to the module that holds the layers (`outside`); of several alternatives the first that
exists counts, as variants of a family differ. Where a config field decides, the row names the field. Each row
was read off the family's modeling code in transformers 5.17 and 5.24; tests/test_families.py checks it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

Paths = dict[str, str | tuple[str, ...]]


@dataclass(frozen=True, kw_only=True)
class Family:
    """One row. Field names and values are explained at `anatomy.Block` and `anatomy.Facts`."""

    layers: tuple[str, ...] = ("layers",)  # one path for each stack of layers
    attention: str = "self_attn"
    roles: Paths
    norms: Paths
    outside: Paths
    norm: str = "rms"
    placement: str = "pre"
    parallel: tuple[str, ...] = ()  # config fields, any of which makes the placement "parallel"
    pre_norm: str = ""  # a config field that makes the placement "post" when false
    residual_from_norm: str = ""  # a config field
    qkv: str = "concat"
    gate_up: str = "halves"
    up_is_linear: bool = True  # the gate multiplies the up half itself, not a clamped or shifted one
    activation: str = "hidden_act"  # a config field, or "=name" where it is fixed
    scaled_embedding: bool = False  # times sqrt(hidden_size)
    position: str = "rotary"
    alibi: str = ""  # a config field that makes the position "alibi_scaled"
    position_offset: int = 0
    attention_softcap: str = ""  # config fields
    final_softcap: str = ""
    router_renormalize: str = "="  # a config field; "=" always
    experts_in_axis: int = 2


_QKVO = {role: f"self_attn.{role}_proj" for role in "qkvo"}
_GATED = {role: f"mlp.{role}_proj" for role in ("gate", "up", "down")}
_EXPERTS = {"experts_gate_up": "mlp.experts.gate_up_proj", "experts_down": "mlp.experts.down_proj"}
_PRE = {"attn_in": "input_layernorm", "mlp_in": "post_attention_layernorm"}
_QK_NORM = {"q": "self_attn.q_norm", "k": "self_attn.k_norm"}
_OUTSIDE = {"tok": "embed_tokens", "final_norm": "norm"}
_BLOOM_MLP = {"fc1": "mlp.dense_h_to_4h", "fc2": "mlp.dense_4h_to_h"}
_BLOOM_OUTSIDE = {"tok": "word_embeddings", "norm": "word_embeddings_layernorm", "final_norm": "ln_f"}

_LLAMA = Family(roles=_QKVO | _GATED, norms=_PRE, outside=_OUTSIDE)
_GEMMA = replace(
    _LLAMA,
    norms={
        "attn_in": "input_layernorm",
        "attn_out": "post_attention_layernorm",
        "mlp_in": "pre_feedforward_layernorm",
        "mlp_out": "post_feedforward_layernorm",
    }
    | _QK_NORM,
    norm="rms1p",
    placement="sandwich",
    activation="hidden_activation",
    scaled_embedding=True,
    final_softcap="final_logit_softcapping",
)
_MIXTRAL = replace(_LLAMA, roles=_QKVO | {"router": "mlp.gate"} | _EXPERTS)

FAMILIES: dict[str, Family] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": replace(_LLAMA, norms=_PRE | _QK_NORM),
    "gemma2": replace(_GEMMA, attention_softcap="attn_logit_softcapping"),
    "gemma3_text": _GEMMA,  # has the field attn_logit_softcapping too, and does not read it
    "phi": Family(
        roles=_QKVO | {"o": "self_attn.dense", "fc1": "mlp.fc1", "fc2": "mlp.fc2"},
        norms={"attn_in": "input_layernorm", "q": "self_attn.q_layernorm", "k": "self_attn.k_layernorm"},
        outside={"tok": "embed_tokens", "final_norm": "final_layernorm"},
        norm="layernorm",
        placement="parallel",
    ),
    "phi3": replace(
        _LLAMA,
        roles={
            "qkv": "self_attn.qkv_proj",
            "o": "self_attn.o_proj",
            "gate_up": "mlp.gate_up_proj",
            "down": "mlp.down_proj",
        },
    ),
    "gpt2": Family(
        layers=("h",),
        attention="attn",
        roles={"qkv": "attn.c_attn", "o": "attn.c_proj", "fc1": "mlp.c_fc", "fc2": "mlp.c_proj"},
        norms={"attn_in": "ln_1", "mlp_in": "ln_2"},
        outside={"tok": "wte", "pos": "wpe", "final_norm": "ln_f"},
        norm="layernorm",
        activation="activation_function",
        position="learned",
    ),
    "opt": Family(
        layers=("decoder.layers",),
        roles=_QKVO | {"o": "self_attn.out_proj", "fc1": "fc1", "fc2": "fc2"},
        norms={"attn_in": "self_attn_layer_norm", "mlp_in": "final_layer_norm"},
        outside={
            "tok": "decoder.embed_tokens",
            "pos": "decoder.embed_positions",
            "project_in": "decoder.project_in",
            "final_norm": "decoder.final_layer_norm",
            "project_out": "decoder.project_out",
        },
        norm="layernorm",
        pre_norm="do_layer_norm_before",
        activation="activation_function",
        position="learned",
        position_offset=2,
    ),
    "bloom": Family(
        layers=("h",),
        attention="self_attention",
        roles={"qkv": "self_attention.query_key_value", "o": "self_attention.dense"} | _BLOOM_MLP,
        norms=_PRE,
        outside=_BLOOM_OUTSIDE,
        norm="layernorm",
        residual_from_norm="apply_residual_connection_post_layernorm",
        qkv="grouped",
        activation="=gelu_pytorch_tanh",
        position="alibi",
    ),
    "falcon": Family(
        layers=("h",),
        attention="self_attention",
        roles={"qkv": "self_attention.query_key_value", "o": "self_attention.dense"} | _BLOOM_MLP,
        norms={
            "attn_in": ("ln_attn", "input_layernorm"),
            "mlp_in": ("ln_mlp", "post_attention_layernorm"),
        },
        outside={"tok": "word_embeddings", "final_norm": "ln_f"},
        norm="layernorm",
        parallel=("new_decoder_architecture", "parallel_attn"),
        qkv="grouped",
        activation="activation",
        alibi="alibi",
    ),
    "gpt_neox": Family(
        attention="attention",
        roles={"qkv": "attention.query_key_value", "o": "attention.dense"} | _BLOOM_MLP,
        norms=_PRE,
        outside={"tok": "embed_in", "final_norm": "final_layer_norm"},
        norm="layernorm",
        parallel=("use_parallel_residual",),
        qkv="grouped",
    ),
    "starcoder2": replace(_LLAMA, roles=_QKVO | {"fc1": "mlp.c_fc", "fc2": "mlp.c_proj"}, norm="layernorm"),
    "mixtral": _MIXTRAL,
    "qwen3_moe": replace(  # some layers may be dense
        _MIXTRAL, roles=_MIXTRAL.roles | _GATED, norms=_PRE | _QK_NORM, router_renormalize="norm_topk_prob"
    ),
    "gpt_oss": replace(
        _MIXTRAL,
        roles=_QKVO | {"router": "mlp.router"} | _EXPERTS,
        gate_up="interleaved",
        up_is_linear=False,  # clamp(up) + 1
        activation="=swiglu_clamped",
        experts_in_axis=1,
    ),
    "bert": Family(
        layers=("encoder.layer",),
        attention="attention.self",
        roles={
            "q": "attention.self.query",
            "k": "attention.self.key",
            "v": "attention.self.value",
            "o": "attention.output.dense",
            "fc1": "intermediate.dense",
            "fc2": "output.dense",
        },
        norms={"attn_out": "attention.output.LayerNorm", "mlp_out": "output.LayerNorm"},
        outside={
            "tok": "embeddings.word_embeddings",
            "pos": "embeddings.position_embeddings",
            "type": "embeddings.token_type_embeddings",
            "norm": "embeddings.LayerNorm",
        },
        norm="layernorm",
        placement="post",
        position="learned",
    ),
    "t5": Family(
        layers=("encoder.block", "decoder.block"),
        attention="layer.0.SelfAttention",
        roles={role: f"layer.0.SelfAttention.{role}" for role in "qkvo"}
        | {f"cross_{role}": f"layer.1.EncDecAttention.{role}" for role in "qkvo"}
        | {
            "fc1": ("layer.1.DenseReluDense.wi", "layer.2.DenseReluDense.wi"),
            "gate": ("layer.1.DenseReluDense.wi_0", "layer.2.DenseReluDense.wi_0"),
            "up": ("layer.1.DenseReluDense.wi_1", "layer.2.DenseReluDense.wi_1"),
            "fc2": ("layer.1.DenseReluDense.wo", "layer.2.DenseReluDense.wo"),
        },
        norms={
            "attn_in": "layer.0.layer_norm",
            "cross_in": "layer.1.layer_norm",
            "mlp_in": ("layer.2.layer_norm", "layer.1.layer_norm"),
        },
        outside={
            "tok": "shared",
            "encoder_norm": "encoder.final_layer_norm",
            "final_norm": "decoder.final_layer_norm",
        },
        activation="dense_act_fn",
        position="relative",
    ),
}
