"""Where the parts of a Hugging Face model are: layers, attention, MLP, experts, norms, embeddings, head.

`anatomy(model)` returns full dotted names and facts, never copies of weights. A family that `FAMILIES` knows
is read through its one row; what its row cannot explain completely (an unknown family, cross-attention bolted
on, a linear somebody added) is read by structure alone, with `family` and `facts` None.

Groups and feeders. A `Group` is the linears of a block that read one tensor; its `feeder` is the norm or
linear whose output nobody else reads. So for any positive s, dividing output row r of the feeder (bias too)
by s[r] and multiplying input column j of every reader by s[rows[j]] changes nothing, where rows is
`Anatomy.feeder_rows(group)`: this is what AWQ and SmoothQuant fold into. `feeder` is None where that does not
hold: a residual also reads the tensor, it went through something that is not homogeneous (GELU, clamps), or
one of the weights has an adapter beside it or is used elsewhere too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from hfaccel.blocks import Block, blocks_by_structure, blocks_of_row, features, find, is_linear, unwrap, walk
from hfaccel.errors import UnsupportedModel
from hfaccel.families import FAMILIES, Family

__all__ = [
    "FAMILIES",
    "Anatomy",
    "Block",
    "Facts",
    "Family",
    "Group",
    "anatomy",
    "builtin_ignore",
    "default_sites",
    "is_linear",
]


@dataclass(frozen=True, kw_only=True)
class Group:
    """Linears of one block that read the same tensor, and what feeds it.

    Attributes:
        block: position of the block in `Anatomy.blocks`.
        readers: names of the linears, the router and fused experts among them.
        feeder: name of the norm, linear or fused experts whose output only the readers read, or None.
        via: how the readers' columns follow from the feeder's rows: "same", "value" (through the attention),
            "up" (through a gated MLP or a ReLU); see `Anatomy.feeder_rows`.
        width: input features of the readers.
    """

    block: int
    readers: tuple[str, ...]
    feeder: str | None
    via: str
    width: int


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a runtime plan must know and a config does not say (or says under another name in each family).

    Attributes:
        norm: "rms", "rms1p" (weight + 1, Gemma) or "layernorm".
        placement: "pre"; "sandwich" (also norms on what is added); "parallel" (attention and MLP read the
            same residual); "post" (norms after the addition).
        residual_from_norm: the residual is the norm's output (a BLOOM option).
        qkv: rows of a fused matrix: "concat" [q | k | v] or "grouped" (each KV head's query heads, k, v).
        gate_up: rows of a fused matrix: "halves" [gate | up] or "interleaved".
        activation: a name of transformers' ACT2FN, or "swiglu_clamped" (gpt-oss).
        embedding_multiplier: what the looked-up embedding is multiplied by (rounded to its dtype).
        position: "rotary" (half-split), "learned", "alibi", "alibi_scaled" (Falcon: bf16 slopes, added before
            the softmax scaling) or "relative".
        rotary_dim: leading channels of a head that rotate.
        position_offset: added to a position that indexes the learned table.
        router_renormalize: the chosen experts' shares of a softmax over all are divided by their sum (that is
            a softmax over the chosen, as gpt-oss does it).
    """

    norm: str
    placement: str
    residual_from_norm: bool
    qkv: str
    gate_up: str
    activation: str
    embedding_multiplier: float
    position: str
    rotary_dim: int
    position_offset: int
    attention_softcap: float | None
    final_softcap: float | None
    router_renormalize: bool


@dataclass(frozen=True, kw_only=True)
class Anatomy:
    """The parts of one model.

    Attributes:
        family: row name in FAMILIES, or None when read by structure alone; facts: None in that case.
        kind: "decoder", "encoder" or "encoder-decoder".
        backbone: name of the module that holds the layers ("" if it is the model itself).
        embeddings: role -> name: tok, pos, type, norm, project_in.
        final_norm, encoder_norm: after the last layer of the decoder, of the encoder.
        project_out: OPT-350m's linear between the final norm and the head.
        head, tied: the output embedding, and whether its weight is the token embedding's tensor.
        matrices: every name that a target pattern can mean, in the model's order: all linears, embeddings,
            routers and fused experts, also those outside the layers.
        in_axes: name -> axis of the input features where it is not 1 (Conv1D: 0; fused experts, while they
            are not packed: 1 or 2).
    """

    family: str | None
    kind: str
    backbone: str
    blocks: tuple[Block, ...]
    groups: tuple[Group, ...]
    embeddings: dict[str, str] = field(hash=False)
    final_norm: str | None
    encoder_norm: str | None
    project_out: str | None
    head: str | None
    tied: bool
    facts: Facts | None
    matrices: tuple[str, ...]
    in_axes: dict[str, int] = field(hash=False)

    def locate(self, name: str) -> tuple[Block | None, str]:
        """The block and role of a matrix; outside the blocks None and the role ("head", "tok", ... or "")."""
        for block in self.blocks:
            for role, known in block.roles.items():
                if known == name:
                    return block, role
        outside = {
            **{v: k for k, v in self.embeddings.items()},
            self.head: "head",
            self.project_out: "project_out",
        }
        return None, outside.get(name, "")

    def qkv_rows(self, block: Block) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """int64 rows of q [heads x head_dim], k and v [kv_heads x head_dim] in `block.roles["qkv"]`."""
        heads, kv_heads = block.heads, block.kv_heads
        if self.facts.qkv == "concat":
            order = torch.arange(heads + 2 * kv_heads)
            q, k, v = order.split([heads, kv_heads, kv_heads])
        else:
            order = torch.arange(heads + 2 * kv_heads).view(kv_heads, -1)
            q, k, v = order[:, :-2].flatten(), order[:, -2], order[:, -1]
        channel = torch.arange(block.head_dim)
        return tuple((rows[:, None] * block.head_dim + channel).flatten() for rows in (q, k, v))

    def feeder_rows(self, group: Group) -> torch.Tensor:
        """[width] int64: the output row of `group.feeder` that each input column of a reader comes from."""
        column = torch.arange(group.width)
        block = self.blocks[group.block]
        if group.via == "value":
            head, channel = column // block.head_dim, column % block.head_dim
            # Consecutive query heads share a KV head.
            row = head // (block.heads // block.kv_heads) * block.head_dim + channel
            return self.qkv_rows(block)[2][row] if group.feeder == block.roles.get("qkv") else row
        if group.via == "up" and group.feeder in (
            block.roles.get("gate_up"),
            block.roles.get("experts_gate_up"),
        ):
            return column + group.width if self.facts.gate_up == "halves" else 2 * column + 1
        return column


def default_sites(anatomy: Anatomy) -> tuple[str, ...]:
    """What is quantized unless targets say more: the layers' linears, fused experts, a decoder's head.

    Not embeddings, routers, classifier heads, projections around the layers, vision towers; a tied head is.
    """
    sites = [name for block in anatomy.blocks for name in block.linears]
    if anatomy.kind == "decoder" and anatomy.head in anatomy.matrices:
        sites.append(anatomy.head)
    return tuple(sites)


def builtin_ignore(anatomy: Anatomy) -> tuple[str, ...]:
    """The other matrices of the model: those that a pattern reaches only with an explicit `ignore=()`."""
    sites = set(default_sites(anatomy))
    return tuple(name for name in anatomy.matrices if name not in sites)


def anatomy(model: nn.Module) -> Anatomy:
    """The parts of `model`, an unpatched or patched transformers model of any family.

    Raises: UnsupportedModel if it is no transformers model or no layers are found in it.
    """
    config = _text_config(model)
    modules = dict(walk(model))
    family = config.model_type if config.model_type in FAMILIES else None
    found = blocks_of_row(model, modules, config, FAMILIES[family]) if family else None
    if found is None:
        family, found = None, blocks_by_structure(model, modules, config)
    backbone, blocks = found
    row = FAMILIES[family] if family else None
    facts = _facts(config, row, blocks[-1]) if row else None

    if row:
        inside = modules[backbone] if backbone else model
        hits = {role: find(inside, paths, backbone) for role, paths in row.outside.items()}
        places = {role: hit[0] for role, hit in hits.items() if hit}
    else:
        tok = _name_of(modules, _input_embedding(model))
        places = {"tok": tok} if tok else {}
    head = _name_of(modules, getattr(model, "get_output_embeddings", lambda: None)())
    routers = {name for b in blocks for role, name in b.roles.items() if role.split(".")[0] == "router"}
    axes = {name: 0 for name, module in modules.items() if isinstance(module, Conv1D)}
    fused = [name for b in blocks for role, name in b.roles.items() if role.startswith("experts")]
    for name in fused:
        holder = modules.get(name.rpartition(".")[0])
        swapped = getattr(holder, "is_transposed", False) if row is None else row.experts_in_axis == 1
        if name not in modules and not hasattr(holder, "sizes"):
            axes[name] = 1 if swapped else 2
    kinds = {block.stack for block in blocks}
    return Anatomy(
        family=family,
        kind="encoder-decoder" if len(kinds) == 2 else kinds.pop(),
        backbone=backbone,
        blocks=blocks,
        groups=_Grouping(model, modules, axes).of(blocks, row, facts),
        embeddings={r: n for r, n in places.items() if r in ("tok", "pos", "type", "norm", "project_in")},
        final_norm=places.get("final_norm"),
        encoder_norm=places.get("encoder_norm"),
        project_out=places.get("project_out"),
        head=head,
        tied=_same_weight(modules.get(head), modules.get(places.get("tok"))),
        facts=facts,
        matrices=_matrices(modules, routers, fused),
        in_axes=axes,
    )


def _text_config(model: nn.Module):
    config = getattr(model, "config", None)
    if not isinstance(model, nn.Module) or not hasattr(config, "model_type"):
        raise UnsupportedModel(f"{type(model).__name__} is not a transformers model: it has no config")
    return config if config.model_type in FAMILIES else config.get_text_config()


def _input_embedding(model: nn.Module) -> nn.Module | None:
    try:
        found = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):  # vision and speech models
        return None
    return (
        found if hasattr(unwrap("", found)[1], "weight") else None
    )  # ViT gives the module that cuts patches


def _name_of(modules: dict[str, nn.Module], module) -> str | None:
    _, module = unwrap("", module)
    return next((name for name, known in modules.items() if known is module), None)


def _same_weight(a, b) -> bool:
    a, b = getattr(a, "weight", None), getattr(b, "weight", None)
    if a is None or b is None or a is b:
        return a is not None and a is b
    return (
        a.shape == b.shape
        and a.device == b.device
        and a.device.type != "meta"
        and a.data_ptr() == b.data_ptr()
    )


def _matrices(modules: dict[str, nn.Module], routers: set[str], fused: list[str]) -> tuple[str, ...]:
    names = []
    for name, module in modules.items():
        if is_linear(module) or isinstance(module, nn.Embedding) or name in routers:
            names.append(name)
        names += [path for path in fused if path.rpartition(".")[0] == name and path not in modules]
    return tuple(dict.fromkeys(names))


def _facts(config, row: Family, block: Block) -> Facts:
    def flag(name: str) -> bool:
        return bool(getattr(config, name, False))

    placement = "parallel" if any(map(flag, row.parallel)) else row.placement
    rope = getattr(config, "rope_parameters", None) or {}
    rope = next((value for value in rope.values() if isinstance(value, dict)), rope)  # one a layer type
    position = "alibi_scaled" if row.alibi and flag(row.alibi) else row.position
    activation = row.activation
    partial = rope.get("partial_rotary_factor", 1.0) if position == "rotary" else 0
    return Facts(
        norm=row.norm,
        placement="post" if row.pre_norm and not flag(row.pre_norm) else placement,
        residual_from_norm=flag(row.residual_from_norm),
        qkv=row.qkv,
        gate_up=row.gate_up,
        activation=activation[1:] if activation.startswith("=") else getattr(config, activation),
        embedding_multiplier=config.hidden_size**0.5 if row.scaled_embedding else 1.0,
        position=position,
        rotary_dim=int(block.head_dim * partial),
        position_offset=row.position_offset,
        attention_softcap=getattr(config, row.attention_softcap, None) if row.attention_softcap else None,
        final_softcap=getattr(config, row.final_softcap, None) if row.final_softcap else None,
        router_renormalize=row.router_renormalize == "=" or flag(row.router_renormalize),
    )


class _Grouping:
    """Builds the groups; knows which weights are used in more than one place."""

    def __init__(self, model: nn.Module, modules: dict[str, nn.Module], axes: dict[str, int]):
        self.modules, self.axes = modules, axes
        self.uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))

    def of(self, blocks: tuple[Block, ...], row: Family | None, facts: Facts | None) -> tuple[Group, ...]:
        groups = []
        for index, block in enumerate(blocks):
            alone = (([name], None, "same") for name in block.roles.values())
            plan = self.plan(block, row, facts) if row else alone
            for readers, feeder, via in plan:
                if readers:
                    groups.append(self.group(index, block, tuple(readers), feeder, via))
        return tuple(groups)

    def plan(self, block: Block, row: Family, facts: Facts) -> Iterator[tuple[list[str], str | None, str]]:
        def named(*keys: str) -> list[str]:
            return [block.roles[key] for key in keys if key in block.roles]

        norms = {} if facts.residual_from_norm else block.norms
        attention = named("q", "k", "v", "qkv")
        mlp = named("gate", "up", "gate_up", "fc1", "router", "experts_gate_up")
        if facts.placement == "parallel" and "mlp_in" not in block.norms:
            attention, mlp = attention + mlp, []
        yield attention, norms.get("attn_in"), "same"
        yield named("o"), next(iter(named("v", "qkv")), None), "value"
        yield named("cross_q"), norms.get("cross_in"), "same"
        yield (
            named("cross_k", "cross_v"),
            None,
            "same",
        )  # the encoder's output, which every decoder layer reads
        yield named("cross_o"), next(iter(named("cross_v")), None), "value"
        yield mlp, norms.get("mlp_in"), "same"
        up = named("up", "gate_up", "experts_gate_up") if row.up_is_linear else []
        if facts.activation == "relu":
            up = up or named("fc1")
        yield named("down", "fc2", "experts_down"), next(iter(up), None), "up"

    def group(self, index: int, block: Block, readers: tuple[str, ...], feeder: str | None, via: str):
        whole = via != "value" or (block.kv_heads and block.heads % block.kv_heads == 0)
        if feeder and not (whole and all(map(self.alone, (feeder, *readers)))):
            feeder = None
        owner, _, leaf = readers[0].rpartition(".")
        if readers[0] in self.modules:
            width = features(self.modules[readers[0]], self.axes.get(readers[0], 1))[0]
        elif sizes := getattr(self.modules[owner], "sizes", None):  # packed experts
            width = sizes[leaf][1]
        else:
            width = features(getattr(self.modules[owner], leaf), self.axes[readers[0]])[0]
        return Group(block=index, readers=readers, feeder=feeder, via=via if feeder else "same", width=width)

    def alone(self, name: str) -> bool:
        """Whether the weight exists, has no adapter beside it and is used under this one name."""
        owner, _, leaf = name.rpartition(".")
        found = self.modules[name] if name in self.modules else getattr(self.modules[owner], leaf)
        parameters = [found] if isinstance(found, torch.Tensor) else list(found.parameters(recurse=False))
        return (
            bool(parameters) and ".base_layer" not in name and all(self.uses[id(p)] == 1 for p in parameters)
        )
