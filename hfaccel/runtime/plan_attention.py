"""The records of an attention: projections, rotation, pages, and the heads joined."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hfaccel.families import FAMILIES
from hfaccel.runtime import Unsupported
from hfaccel.runtime.plan import TOKENS, Matrix, View
from hfaccel.runtime.plan_ops import Attend, CacheWrite, Join, Rope, Rotary

if TYPE_CHECKING:
    from hfaccel.blocks import Block
    from hfaccel.runtime.plan_build import Builder

_STATEFUL_ROPE = {"dynamic", "longrope"}


def attention(builder: Builder, block: Block, normed: int, more: list[tuple[str, Matrix, int]]) -> int:
    """Projections (and `more` products of the same input) up to the joined heads: their buffer."""
    layer, roles = block.index, block.roles
    heads, kv_heads, size = block.heads, block.kv_heads, block.head_dim
    if not heads or not kv_heads or not size:
        raise Unsupported(f"{block.name}: heads unknown")
    if block.sinks:
        raise Unsupported(f"{block.name}: attention sinks")
    if "qkv" in roles:
        matrix = builder.matrix(roles["qkv"])
        out = builder.buffer("qkv", matrix.n, TOKENS)
        parts = [(roles["qkv"], matrix, out)]
        if builder.facts.qkv == "concat":
            q = View(out, 0, heads, size, size)
            k = View(out, heads * size, kv_heads, size, size)
            v = View(out, (heads + kv_heads) * size, kv_heads, size, size)
        elif heads == kv_heads:
            q, k, v = (View(out, at * size, heads, size, 3 * size) for at in range(3))
        else:
            raise Unsupported(f"{roles['qkv']}: fused heads in groups of {heads // kv_heads} queries")
    else:
        parts, views = [], {}
        for role, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            matrix = builder.matrix(roles[role])
            out = builder.buffer(role, matrix.n, TOKENS)
            parts.append((roles[role], matrix, out))
            views[role] = View(out, 0, count, size, size)
        q, k, v = views["q"], views["k"], views["v"]
    builder.matmul(normed, parts + more, layer)
    q, k = _heads(builder, block, "q", q), _heads(builder, block, "k", k)
    builder.ops.append(CacheWrite(name=f"{block.attention}.cache", layer=layer, k=k, v=v))
    attended = builder.buffer("attended", heads * size, TOKENS)
    attend = Attend(
        name=block.attention,
        layer=layer,
        q=q,
        k=k,
        v=v,
        out=attended,
        scale=block.scaling,
        window=block.window or 0,
        softcap=_softcap(builder, block),
        slopes=alibi_slopes(heads) if builder.facts.position == "alibi" else None,
    )
    joined = builder.buffer("joined", heads * size, TOKENS)
    builder.ops += [
        attend,
        Join(name=f"{block.attention}.join", layer=layer, x=attended, out=joined, attend=attend),
    ]
    return joined


def _softcap(builder: Builder, block: Block) -> float:
    """As the attention module has it, which is what its forward reads; 0 for none."""
    field = FAMILIES[builder.parts.family].attention_softcap
    if not field:
        return 0.0
    return getattr(builder.modules[block.attention], field, builder.facts.attention_softcap) or 0.0


def _heads(builder: Builder, block: Block, role: str, view: View) -> View:
    """Norm and rotation of q or k."""
    width = view.count * view.size
    if role in block.norms:
        out = builder.buffer(f"{role}_normed", width, TOKENS)
        builder.norm(block.norms[role], view, out, block.index)
        view = View(out, 0, view.count, view.size, view.size)
    if builder.facts.position == "rotary":
        table = _rope(builder, block)
        out = builder.buffer(f"{role}_rotated", width, TOKENS)
        builder.ops.append(
            Rotary(name=f"{block.attention}.{role}", layer=block.index, x=view, table=table, out=out)
        )
        view = View(out, 0, view.count, view.size, view.size)
    return view


def _rope(builder: Builder, block: Block) -> int:
    """The buffer of cos and sin for this block, computed once a step."""
    owner = builder.modules[builder.parts.backbone] if builder.parts.backbone else builder.model
    module = getattr(owner, "rotary_emb", None)
    kinds = getattr(builder.config, "layer_types", None)
    kind = kinds[block.index] if kinds else ""
    prefix = f"{kind}_" if hasattr(module, f"{kind}_inv_freq") else ""
    inv_freq, scaling = (
        getattr(module, f"{prefix}inv_freq", None),
        getattr(module, f"{prefix}attention_scaling", None),
    )
    if inv_freq is None or scaling is None:
        raise Unsupported("no rotary embedding with inv_freq and attention_scaling beside the layers")
    types = module.rope_type if isinstance(module.rope_type, dict) else {"": module.rope_type}
    if _STATEFUL_ROPE & set(types.values()):
        raise Unsupported(f"rope type {', '.join(map(str, types.values()))} looks at the whole input")
    if 2 * inv_freq.numel() != builder.facts.rotary_dim:
        raise Unsupported(f"{2 * inv_freq.numel()} rotary channels, the row says {builder.facts.rotary_dim}")
    if prefix not in builder.ropes:
        out = builder.buffer(f"{prefix}rope", 2 * inv_freq.numel(), TOKENS)
        builder.ops.insert(
            1 + len(builder.ropes),
            Rope(
                name=f"rotary_emb.{prefix}inv_freq",
                out=out,
                inv_freq=inv_freq.detach().float().contiguous(),
                scaling=float(scaling),
            ),
        )
        builder.ropes[prefix] = out
    return builder.ropes[prefix]


def alibi_slopes(heads: int) -> torch.Tensor:
    """[H] fp32: 2^(-8 i / n) for i = 1 .. n, n the power of two at or below H; the other heads take every
    second one of 2 n (Press et al., 2108.12409)."""
    n = 1 << heads.bit_length() - 1
    found = [2.0 ** (-8 * i / n) for i in range(1, n + 1)]
    found += [2.0 ** (-4 * i / n) for i in range(1, 2 * (heads - n), 2)]
    return torch.tensor(found)
