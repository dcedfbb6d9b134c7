"""Random-weight models of every family, small enough that a forward takes milliseconds.

`tiny(family)` gives an fp32 model in eval mode whose weights depend on its shapes, the seed and nothing else.
Weights are drawn here and not by transformers: every bias, norm weight and sink differs from its neutral
value, so that code which forgets one is seen, and logits spread over several units, so that the arg-max has
margins. Sizes tell dimensions apart: MLP widths are not multiples of the usual group sizes, and head size x
heads differs from the hidden size in several families.
"""

import inspect
import math

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    LlamaForCausalLM,
)

VOCAB = 256
# What this transformers calls the cache, as an argument and in an output: the name changed after 5.17.
CACHE = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"
_SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
_GQA = {**_SMALL, "num_key_value_heads": 2, "intermediate_size": 112}
_TIED = {"tie_word_embeddings": True}
_TWO_KINDS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
_GEMMA = {**_GQA, **_TIED, **_TWO_KINDS, "head_dim": 32, "query_pre_attn_scalar": 24}
_MOE = {**_GQA, "num_experts_per_tok": 2}
_LLAMA = {**_SMALL, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2}

# name -> (transformers' model_type, config). The families first, then the shapes that CASES.md names.
_CONFIGS = {
    "llama": ("llama", _GQA),
    "mistral": ("mistral", {**_GQA, "sliding_window": 8}),
    "qwen2": ("qwen2", _GQA),
    "qwen3": ("qwen3", {**_GQA, "head_dim": 32}),
    "gemma2": (
        "gemma2",
        {**_GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 10.0},
    ),
    "gemma3": ("gemma3_text", _GEMMA),
    "phi": (
        "phi",
        {
            **_GQA,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
    ),
    "phi3": ("phi3", _GQA),
    "gpt2": ("gpt2", {**_SMALL, **_TIED, "n_inner": 112}),
    "opt": ("opt", {**_SMALL, **_TIED, "ffn_dim": 112, "word_embed_proj_dim": 64}),
    "bloom": ("bloom", {**_SMALL, **_TIED}),
    "falcon": (
        "falcon",
        {**_SMALL, "new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 112},
    ),
    "falcon_mq": ("falcon", {**_SMALL, "multi_query": True, "parallel_attn": True, "bias": True}),
    "falcon_alibi": (
        "falcon",
        {**_SMALL, "alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
    ),
    "gpt_neox": (
        "gpt_neox",
        {
            **_SMALL,
            "intermediate_size": 112,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
        },
    ),
    "starcoder2": ("starcoder2", {**_GQA, **_TIED}),
    "mixtral": ("mixtral", {**_MOE, "num_local_experts": 4}),
    "qwen3_moe": (
        "qwen3_moe",
        {**_MOE, "head_dim": 32, "num_experts": 4, "moe_intermediate_size": 48, "norm_topk_prob": False},
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            **_MOE,
            **_TWO_KINDS,
            "head_dim": 32,
            "num_local_experts": 4,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 32.0,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "bert": ("bert", {**_SMALL, **_TIED, "intermediate_size": 112}),
    "t5": (
        "t5",
        {
            "vocab_size": VOCAB,
            "d_model": 64,
            "d_kv": 24,
            "d_ff": 112,
            "num_layers": 2,
            "num_heads": 4,
            "pad_token_id": 0,
            "eos_token_id": None,
            "decoder_start_token_id": 0,
        },
    ),
    "TL": ("llama", {**_LLAMA, "vocab_size": 512, "intermediate_size": 176}),
    "TG": ("gpt2", {**_SMALL, **_TIED, "vocab_size": 512}),
    "TX": ("mixtral", {**_MOE, "vocab_size": 512, "num_local_experts": 4}),
    "S135": (
        "llama",
        {
            **_SMALL,
            **_TIED,
            "vocab_size": 49152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "max_position_embeddings": 2048,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e5},
        },
    ),
}
FAMILIES = tuple(name for name in _CONFIGS if name not in ("TL", "TG", "TX", "S135"))
DECODERS = tuple(name for name in FAMILIES if name not in ("bert", "t5"))
_AUTO = {"bert": AutoModelForMaskedLM, "t5": AutoModelForSeq2SeqLM}


def tiny(family: str, *, attn: str | None = None, seed: int = 0, auto=None, **overrides):
    """A random model of `family`: one of FAMILIES, or of the shapes TL, TG, TX, S135 (here 2 layers, not 30).

    `overrides` are config fields; `auto` is another class to build with, such as `AutoModel`. Attention is
    eager, the oracle, but for alibi Falcon: its eager path adds the bias twice (5.17 to 5.24), sdpa once.
    """
    attn = attn or ("sdpa" if family == "falcon_alibi" else "eager")
    model_type, fields = _CONFIGS[family]
    config = AutoConfig.for_model(model_type, **{**fields, **overrides})
    auto = auto or _AUTO.get(model_type, AutoModelForCausalLM)
    with torch.random.fork_rng(devices=[]):  # building draws from the global generator: leave it as it was
        model = auto.from_config(config, dtype=torch.float32, attn_implementation=attn)
    randomize(model, seed)
    return model.eval()


@torch.no_grad()
def randomize(model: nn.Module, seed: int = 0) -> None:
    """Draw every parameter anew: matrices about 1/sqrt(fan-in), vectors off neutral, a wide head."""
    generator = torch.Generator().manual_seed(seed)
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and head.weight is embeddings.weight
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 1:  # a norm's weight, a bias, attention sinks
            neutral = parameter.round() if "bias" not in name and "sinks" not in name else torch.zeros(())
            parameter.copy_(neutral + 0.2 * noise)
        elif parameter.dim() == 2 and "bias" in name:  # of fused experts, or a table of relative positions
            parameter.copy_(0.2 * noise)
        elif head is not None and parameter is head.weight and not tied:
            parameter.copy_(0.5 * noise)
        elif id(parameter) in tables:  # small where tied, or the head would answer every token with itself
            parameter.copy_((0.5 if tied else 1.5) / math.sqrt(parameter.shape[1]) * noise)
        else:
            fan_in = min(parameter.shape[-2:])  # or the fan-out, whichever is less: close enough
            parameter.copy_(1.5 / math.sqrt(fan_in) * noise)
            if name.endswith("Attention.q.weight"):  # T5 does not scale its scores
                parameter.div_(math.sqrt(model.config.d_kv))
    norm = _last_norm(model)
    if tied and norm is not None:  # a tied head cannot be scaled alone, so the norm before it is
        scale = 8.0 * (math.sqrt(model.config.d_model) if model.config.model_type == "t5" else 1.0)
        one_plus = norm.weight.mean() < 0.5  # Gemma multiplies by 1 + weight
        norm.weight.mul_(scale).add_(scale - 1 if one_plus else 0.0)
        if getattr(norm, "bias", None) is not None:
            norm.bias.mul_(scale)


def _last_norm(model: nn.Module) -> nn.Module | None:
    """The norm before the head: of the norms outside the layers, the last one. OPT-350m has none."""
    norms = [
        module
        for name, module in model.named_modules()
        if not any(part.isdigit() for part in name.split("."))
        and getattr(module, "weight", None) is not None
        and module.weight.shape == (model.config.get_text_config().hidden_size,)
    ]
    return norms[-1] if norms else None


def ids(batch: int, length: int, seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    """[batch, length] random token ids, none of which is the pad or the start token (0 and 1)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, vocab, (batch, length), generator=generator)
