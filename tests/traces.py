"""Variants of the tiny models, and what passes through the modules of one in a forward."""

import pytest
import torch

from tiny import FAMILIES

VARIANTS = [
    ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}),
    ("phi", {"qk_layernorm": True}),
    ("opt", {"do_layer_norm_before": False}),
    ("opt", {"word_embed_proj_dim": 32}),
    ("opt", {"activation_function": "gelu"}),
    ("bloom", {"apply_residual_connection_post_layernorm": True}),
    ("falcon", {"num_ln_in_parallel_attn": 1}),
    ("falcon_mq", {"multi_query": False, "num_kv_heads": 4}),
    ("gpt_neox", {"use_parallel_residual": False}),
    ("qwen3_moe", {"mlp_only_layers": [0]}),
    ("t5", {"feed_forward_proj": "gated-gelu"}),
]
CASES = [(family, {}) for family in FAMILIES] + VARIANTS
IDS = [family + "".join(f"-{key}" for key in fields) for family, fields in CASES]
every_case = pytest.mark.parametrize(("family", "fields"), CASES, ids=IDS)


def logits(model, x):
    extra = {"decoder_input_ids": x.flip(1)} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model(x, **extra).logits


def tensor_of(model, name):
    """A linear's or router's weight, or a fused expert parameter."""
    found = model.get_submodule(name) if name in dict(model.named_modules()) else model.get_parameter(name)
    return found if isinstance(found, torch.Tensor) else found.weight


def trace(model, x):
    """name -> (first tensor argument, output) of every submodule in one forward."""
    seen = {}

    def hook(name):
        def store(module, args, kwargs, output):
            given = args[0] if args else kwargs.get("hidden_states")
            output = output[0] if isinstance(output, tuple) else output
            seen[name] = (given, output.clone() if isinstance(output, torch.Tensor) else output)

        return store

    handles = [m.register_forward_hook(hook(n), with_kwargs=True) for n, m in model.named_modules() if n]
    out = logits(model, x)
    for handle in handles:
        handle.remove()
    return seen, out
