"""The records of a mixture of experts: router, dispatch, the experts' gated MLPs, and the sum."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hfaccel.runtime import Unsupported
from hfaccel.runtime.plan import Matrix, View, acts_key
from hfaccel.runtime.plan_ops import Act, Dispatch, Experts, Mix, Quant, Route
from hfaccel.runtime.plan_weights import activation, expert_matrix
from hfaccel_kernels.layouts import ROWS as BLOCK_ROWS

if TYPE_CHECKING:
    from hfaccel.blocks import Block
    from hfaccel.runtime.plan_build import Builder


def experts(builder: Builder, block: Block, normed: int, rows: str) -> int:
    """Router, and the chosen experts' gated MLPs on rows sorted by expert."""
    roles, layer, facts = block.roles, block.index, builder.facts
    if facts.gate_up != "halves":
        raise Unsupported(f"{block.name}: gate and up {facts.gate_up}")
    router = builder.modules[roles["router"]]
    if getattr(router, "bias", None) is not None or "weight" not in router._parameters:
        raise Unsupported(f"{roles['router']} is a {type(router).__name__}")
    count = router.weight.shape[0]
    k = next((getattr(router, name) for name in ("top_k", "num_experts_per_tok") if hasattr(router, name)), 0)
    if not 0 < k <= count:
        raise Unsupported(f"{roles['router']}: {k} experts of {count}")
    holder = builder.modules[roles["experts_gate_up"].rpartition(".")[0]]
    up_gate, down = (expert_matrix(roles[r], holder) for r in ("experts_gate_up", "experts_down"))
    scores = builder.buffer("router_scores", count, rows)
    builder.matmul(
        normed, [(roles["router"], Matrix(count, router.weight.shape[1], router.weight), scores)], layer
    )
    chosen = builder.buffer("chosen", k, rows, kind="i32")
    weights = builder.buffer("chosen_weights", k, rows)
    builder.ops.append(
        Route(
            name=f"{roles['router']}.choice",
            layer=layer,
            x=scores,
            chosen=chosen,
            weights=weights,
            renormalize=bool(getattr(router, "norm_topk_prob", facts.router_renormalize)),
        )
    )
    sent = builder.buffer("dispatched", up_gate.k, rows, per_row=k)
    builder.ops.append(
        Dispatch(name=f"{block.name}.dispatch", layer=layer, x=normed, chosen=chosen, out=sent, experts=count)
    )
    out, half = builder.buffer("experts_gate_up", up_gate.n, rows, per_row=k), up_gate.n // 2
    gate, up = View(out, 0, 1, half, half), View(out, half, 1, half, half)
    whole = half % BLOCK_ROWS == 0
    _product(
        builder,
        roles["experts_gate_up"],
        up_gate,
        sent,
        chosen,
        (gate, up) if whole else (builder.whole(out),),
        layer,
    )
    active = builder.buffer("experts_active", half, rows, per_row=k)
    kind = activation(facts.activation, holder)
    builder.ops.append(
        Act(name=f"{block.name}.experts.act", layer=layer, gate=gate, up=up, out=active, kind=kind)
    )
    each = builder.buffer("experts_out", down.n, rows, per_row=k)
    _product(builder, roles["experts_down"], down, active, chosen, (builder.whole(each),), layer)
    mixed = builder.buffer("mlp_out", down.n, rows)
    builder.ops.append(
        Mix(
            name=f"{block.name}.mix",
            layer=layer,
            y=each,
            chosen=chosen,
            weights=weights,
            out=mixed,
            experts=count,
        )
    )
    return mixed


def _product(
    builder: Builder, name: str, matrix: Matrix, x: int, chosen: int, outs: tuple[View, ...], layer: int
) -> None:
    """One matrix of every expert on rows sorted by expert."""
    if acts_key(matrix) is not None:
        kind = {"kind": "acts", "acts": matrix, "per_row": builder.buffers[x].per_row}
        acts = builder.buffer("experts_acts", matrix.k, builder.rows(x), **kind)
        builder.ops.append(Quant(name=f"{name} input", layer=layer, x=x, out=acts))
        x = acts
    builder.ops.append(Experts(name=name, layer=layer, x=x, chosen=chosen, outs=outs, matrix=matrix))
