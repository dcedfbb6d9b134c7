"""The layers of a model: read through a family's row, or by structure where no row explains them completely.

By structure the layers are the ModuleLists whose elements contain an attention, which is the submodule with a
`layer_idx` (or, in encoders, an `is_causal`), and every other linear of a layer is MLP.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from hfaccel.errors import UnsupportedModel
from hfaccel.families import Family

_HEAD_DIM = ("head_dim", "head_size", "attention_head_size", "key_value_proj_dim")
_SCALING = ("scaling", "inv_norm_factor")  # of the softmax; BLOOM and Falcon use the second name
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, kw_only=True)
class Block:
    """One transformer layer.

    Attributes:
        index: its position within its stack.
        stack: "decoder" or "encoder"; name, module: the layer itself.
        attention: name of the self-attention module, or None.
        roles: role -> name of the linear. Known families have q k v or qkv, o; cross_q cross_k cross_v
            cross_o; gate up or gate_up, down; fc1 fc2; router, and the 3-D parameters experts_gate_up,
            experts_down.
            Unknown ones have "attn.<path>", "mlp.<path>", "router.<path>", "experts.<path>".
        norms: role -> name: attn_in, mlp_in, cross_in feed linears, attn_out and mlp_out follow; q and k.
        mlp: "gated", "plain", "moe", or "" when unknown.
        heads, kv_heads, head_dim: as the weights are, 0 when unknown; scaling: what multiplies q.k.
        window: tokens that a token sees, itself included, or None for all.
        sinks: name of the parameter with attention sinks, or None.
    """

    index: int
    stack: str
    name: str
    module: nn.Module = field(repr=False, compare=False)
    attention: str | None
    roles: dict[str, str] = field(hash=False)
    norms: dict[str, str] = field(hash=False)
    mlp: str
    heads: int
    kv_heads: int
    head_dim: int
    scaling: float
    window: int | None
    sinks: str | None

    @property
    def linears(self) -> tuple[str, ...]:
        """Every linear and fused expert matrix but the routers."""
        return tuple(name for role, name in self.roles.items() if role.split(".")[0] != "router")


def is_linear(module: object) -> bool:
    """Whether `module` multiplies by one 2-D weight: nn.Linear (quantized ones too) or GPT-2's Conv1D."""
    return isinstance(module, nn.Linear | Conv1D)


def walk(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Every submodule with its name, in order; of an adapter's wrapper the wrapped layer only."""
    for name, child in module._modules.items():
        if child is None:
            continue
        name, child = unwrap(prefix + name, child)
        yield name, child
        if not is_linear(child):
            yield from walk(child, name + ".")


def unwrap(name: str, module):
    while isinstance(module, nn.Module) and "base_layer" in module._modules:
        name, module = f"{name}.base_layer", module.base_layer
    return name, module


def find(root: nn.Module, paths: str | tuple[str, ...], prefix: str):
    """(full name, object) of the first of `paths` below `root` that exists and is not None, or None."""
    for path in (paths,) if isinstance(paths, str) else paths:
        name, found = prefix, root
        for part in path.split("."):
            name, found = unwrap(f"{name}.{part}" if name else part, getattr(found, part, None))
            if found is None:
                break
        else:
            return name, found
    return None


def blocks_of_row(model, modules, config, row: Family) -> tuple[str, tuple[Block, ...]] | None:
    """Name of the module that holds the layers, and the layers as `row` reads them; None if one cannot."""
    backbone, blocks = "", []
    for path in row.layers:
        lists = [
            (name, module)
            for name, module in modules.items()
            if isinstance(module, nn.ModuleList) and len(module) and f".{name}".endswith(f".{path}")
        ]
        lists.sort(key=lambda item: len(item[1]) != config.num_hidden_layers)
        fits = (_fit(name, layers, config, row, path) for name, layers in lists)
        stack = next((stack for stack in fits if stack), None)
        if lists and stack is None:
            return None
        if stack:
            backbone = stack[0].name.rpartition(".")[0].removesuffix(path).removesuffix(".")
            blocks += stack
    return (backbone, tuple(blocks)) if blocks else None


def _fit(name: str, layers: nn.ModuleList, config, row: Family, path: str) -> list[Block] | None:
    blocks = []
    for index, layer in enumerate(layers):
        prefix = f"{name}.{index}"
        attention = find(layer, row.attention, prefix)
        hits = {role: hit for role, paths in row.roles.items() if (hit := find(layer, paths, prefix))}
        if attention is None or "o" not in hits or not _complete(layer, prefix, hits):
            return None
        norms = {role: hit[0] for role, paths in row.norms.items() if (hit := find(layer, paths, prefix))}
        roles = {role: hit[0] for role, hit in hits.items()}
        if "cross_q" not in roles:
            norms.pop("cross_in", None)
        if "gate" in roles and "fc2" in roles:  # T5 calls the last matrix wo, gated or not
            roles["down"] = roles.pop("fc2")
        if row.pre_norm and not getattr(config, row.pre_norm, True):
            norms = {role.replace("_in", "_out"): norm for role, norm in norms.items()}
        mlp = "gated" if {"gate", "gate_up"} & roles.keys() else "plain"
        causal = getattr(attention[1], "is_causal", not path.startswith("encoder"))
        blocks.append(
            Block(
                index=index,
                stack="decoder" if causal else "encoder",
                name=prefix,
                module=layer,
                attention=attention[0],
                roles=roles,
                norms=norms,
                mlp="moe" if "router" in roles else mlp,
                **_attention_facts(attention, config, index, {role: hit[1] for role, hit in hits.items()}),
            )
        )
    return blocks


def _complete(layer: nn.Module, prefix: str, hits: dict[str, tuple[str, object]]) -> bool:
    """Whether the row names every matrix of the layer."""
    seen = {id(found) for _, found in hits.values()}
    holders = {name.rpartition(".")[0] for name, found in hits.values() if isinstance(found, torch.Tensor)}
    for name, module in walk(layer):
        if is_linear(module) and id(module) not in seen:
            return False
        fused = any(p is not None and p.dim() == 3 for p in module._parameters.values())
        if fused and f"{prefix}.{name}" not in holders:
            return False
    return True


def _attention_facts(
    attention: tuple[str, nn.Module], config, index: int, linears: dict[str, object]
) -> dict:
    name, module = attention
    head_dim = next((getattr(module, key) for key in _HEAD_DIM if hasattr(module, key)), 0)
    heads = kv_heads = 0
    if head_dim and "o" in linears:
        heads = features(linears["o"])[0] // head_dim
        outputs = features(linears["k" if "k" in linears else "qkv"])[1] // head_dim
        kv_heads = outputs if "k" in linears else (outputs - heads) // 2
    scaling = (getattr(module, key) for key in _SCALING if hasattr(module, key))
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if kinds and index < len(kinds) and kinds[index] != "sliding_attention":
        window = None
    return {
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "scaling": float(next(scaling, (head_dim or 1) ** -0.5)),
        "window": window,
        "sinks": f"{name}.sinks" if isinstance(getattr(module, "sinks", None), torch.Tensor) else None,
    }


def features(linear, in_axis: int = 1) -> tuple[int, int]:
    """(input, output) features of a linear, a router or fused experts."""
    if hasattr(linear, "in_features"):
        return linear.in_features, linear.out_features
    if isinstance(linear, Conv1D):
        return linear.nx, linear.nf
    shape = linear.shape if isinstance(linear, torch.Tensor) else linear.weight.shape
    return shape[in_axis], shape[-1 if in_axis != len(shape) - 1 else -2]


def blocks_by_structure(model, modules, config) -> tuple[str, tuple[Block, ...]]:
    """The same without a row: roles by path, no norms.

    Raises: UnsupportedModel if nothing looks like a stack of layers.
    """
    decoder = model.get_decoder() if config is not model.config and hasattr(model, "get_decoder") else None
    inside = {id(module) for module in (decoder or model).modules()}  # a vision tower may be equally deep
    numbers = config.to_dict().items()
    depths = {value for key, value in numbers if key.endswith("layers") and isinstance(value, int)}
    depths |= {getattr(config, "num_hidden_layers", 0)}
    stacks: dict[str, nn.ModuleList] = {}
    for name, module in modules.items():
        nested = id(module) not in inside or any(name.startswith(f"{outer}.") for outer in stacks)
        if isinstance(module, nn.ModuleList) and len(module) in depths and not nested:
            if any(_attentions(layer) for layer in module):
                stacks[name] = module
    if not stacks:
        raise UnsupportedModel(
            f"{type(model).__name__}: no layers found; looked for a list of {sorted(depths)} modules with an "
            "attention, which is a submodule that has a layer_idx or is_causal"
        )
    experts = next((getattr(config, key) for key in _EXPERTS if getattr(config, key, None)), None)
    blocks = []
    for name, layers in stacks.items():
        paired = config.is_encoder_decoder and len(stacks) > 1
        crossed = any(len(_attentions(layer)) > 1 for layer in layers)
        for index, layer in enumerate(layers):
            prefix = f"{name}.{index}"
            attentions = _attentions(layer)
            path, attention = next(iter(attentions.items()), (None, layer))
            causal = crossed if paired else getattr(attention, "is_causal", True)
            blocks.append(
                Block(
                    index=index,
                    stack="decoder" if causal else "encoder",
                    name=prefix,
                    module=layer,
                    attention=f"{prefix}.{path}" if path else None,
                    roles=_roles_by_structure(layer, prefix, attentions, experts),
                    norms={},
                    mlp="",
                    **_attention_facts((f"{prefix}.{path}", attention), config, index, {}),
                )
            )
    return next(iter(stacks)).rpartition(".")[0], tuple(blocks)


def _attentions(layer: nn.Module) -> dict[str, nn.Module]:
    """Submodules with a `layer_idx` or `is_causal` and linears of their own, outermost ones."""
    found: dict[str, nn.Module] = {}
    for name, module in walk(layer):
        marked = hasattr(module, "layer_idx") or hasattr(module, "is_causal")
        if marked and not any(name.startswith(f"{outer}.") for outer in found):
            if any(is_linear(child) for _, child in walk(module)):
                found[name] = module
    return found


def _roles_by_structure(layer, prefix: str, attentions, experts: int | None) -> dict[str, str]:
    roles = {}
    for name, module in walk(layer):
        owner = "attn" if any(name.startswith(f"{outer}.") for outer in attentions) else "mlp"
        if is_linear(module):
            routes = experts and owner == "mlp" and features(module)[1] in (experts, 1)
            roles[f"{'router' if routes else owner}.{name}"] = f"{prefix}.{name}"
            continue
        for key, parameter in module._parameters.items():
            if parameter is None or owner == "attn":
                continue
            if parameter.dim() == 3 and parameter.shape[0] == experts:
                roles[f"experts.{name}.{key}"] = f"{prefix}.{name}.{key}"
            elif experts and key == "weight" and parameter.dim() == 2 and parameter.shape[0] == experts:
                roles[f"router.{name}"] = f"{prefix}.{name}"
    return roles
