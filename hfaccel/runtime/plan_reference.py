"""A plan in plain PyTorch: slow, dense, obvious. The oracle that csrc/plan.cpp must match."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn

from hfaccel.cache.pool import LayerPages, PagePool
from hfaccel.lora.slots import AdapterSlots
from hfaccel.runtime.plan import ASKED, Matrix, Op, Plan, View
from hfaccel.runtime.plan_build import build
from hfaccel.runtime.plan_lora import LoraExpand, LoraShrink
from hfaccel.runtime.plan_ops import (
    Act,
    Add,
    Attend,
    CacheWrite,
    Dispatch,
    Embed,
    Experts,
    Gather,
    Join,
    Logits,
    Matmul,
    Mix,
    Norm,
    Quant,
    Rope,
    Rotary,
    Route,
    Scale,
)
from hfaccel_kernels.activations import quantize_activations
from hfaccel_kernels.packing import dequantize, gather_rows
from hfaccel_kernels.paged import paged_attention_reference
from hfaccel_kernels.pages import cache_write

_ACTS = {
    "none": lambda x: x,
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_erf": F.gelu,
    "relu": F.relu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu2": lambda x: F.relu(x).square(),
}


@dataclass
class Step:
    """What records read besides the model's tensors, and the buffers they leave."""

    plan: Plan
    ids: torch.Tensor
    positions: torch.Tensor
    block_tables: torch.Tensor
    q_starts: torch.Tensor
    lengths: torch.Tensor
    rows: torch.Tensor
    slots: torch.Tensor
    pages: list[LayerPages]
    adapters: torch.Tensor | None = None
    out: torch.Tensor | None = None
    buffers: list[torch.Tensor] = field(default_factory=list)


class Reference:
    """Runs steps of one plan record by record; the interface of `native.Native`."""

    name = "reference"

    def __init__(self, model: nn.Module, plan: Plan | None = None, lora: AdapterSlots | None = None):
        self.model, self.lora = model, lora
        self.plan = build(model, lora=lora) if plan is None else plan

    @torch.no_grad()
    def step(
        self,
        pool: PagePool,
        ids: torch.Tensor,
        positions: torch.Tensor,
        block_tables: torch.Tensor,
        q_starts: torch.Tensor,
        lengths: torch.Tensor,
        rows: torch.Tensor,
        *,
        hidden: bool = False,
        adapters: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One step; arguments and result as `modules.Modules.step`."""
        plan = build(self.model, hidden=True, lora=self.lora) if hidden else self.plan
        pages = [
            pool.ensure_layer(op.layer, op.k.count, op.k.size, op.v.size, plan.dtype, ids.device)
            for op in plan.layers().values()
        ]
        step = Step(
            plan,
            ids,
            positions,
            block_tables,
            q_starts,
            lengths,
            rows,
            _slots(block_tables, q_starts, lengths, pool.page_tokens),
            pages,
            adapters,
        )
        for buffer in plan.buffers:
            count = (rows if buffer.rows == ASKED else ids).shape[0] * buffer.per_row
            step.buffers.append(torch.zeros(count, buffer.width))
        for index in range(len(plan.ops)):
            run_record(step, index)
        if step.out is None:
            step.out = step.buffers[_out_buffer(plan)]
        return step.out.to(plan.dtype)


def run_record(step: Step, index: int) -> None:
    """One record of the step's plan, on the buffers as they are."""
    op = step.plan.ops[index]
    layers = list(step.plan.layers())
    _RUN[type(op)](op, step, step.pages[layers.index(op.layer)] if op.layer in layers else None)


def _out_buffer(plan: Plan) -> int:
    return next(number for number, buffer in enumerate(plan.buffers) if buffer.kind == "out")


def _slots(block_tables, q_starts, lengths, page_tokens) -> torch.Tensor:
    """Flat slot of each token of the step."""
    found = []
    starts = q_starts.tolist()
    for b, (start, stop) in enumerate(zip(starts[:-1], starts[1:], strict=True)):
        at = torch.arange(int(lengths[b]) - (stop - start), int(lengths[b]))
        found.append(block_tables[b].long()[at // page_tokens] * page_tokens + at % page_tokens)
    return torch.cat(found)


def heads_of(view: View, buffers: list[torch.Tensor]) -> torch.Tensor:
    """[rows, count, size] of a view, no copy."""
    x = buffers[view.buffer]
    return x.as_strided(
        (x.shape[0], view.count, view.size), (x.stride(0), view.stride, 1), x.storage_offset() + view.offset
    )


def weight_of(matrix: Matrix) -> torch.Tensor:
    """fp32 [n, k]."""
    if matrix.layout is None:
        return (matrix.weight.T if matrix.transposed else matrix.weight).float()
    return dequantize(matrix.weight, matrix.scale, matrix.zero, matrix.layout, matrix.n, matrix.k)


def _embed(op: Embed, step: Step, _) -> None:
    table = op.table
    if table.layout is None:
        x = table.weight[step.ids].float()
    else:
        x = gather_rows(table.weight, table.scale, table.zero, table.layout, table.k, step.ids)
    x = x * op.multiplier
    if op.positions is not None:
        x = x + op.positions[step.positions + op.position_offset].float()
    step.buffers[op.out] = x


def _rope(op: Rope, step: Step, _) -> None:
    angles = step.positions[:, None].float() * op.inv_freq
    step.buffers[op.out] = torch.cat([angles.cos(), angles.sin()], 1) * op.scaling


def _norm(op: Norm, step: Step, _) -> None:
    x = heads_of(op.x, step.buffers)
    if op.centered:
        x = x - x.mean(-1, keepdim=True)
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + op.eps)
    if op.weight is not None:
        x = x * (op.weight.float() + (1.0 if op.unit_offset else 0.0))
    if op.bias is not None:
        x = x + op.bias.float()
    step.buffers[op.out] = x.flatten(1)


def product(x: torch.Tensor, part: Matrix) -> torch.Tensor:
    """x [T, k] times one matrix, x rounded as its layout says: fp32 [T, n]."""
    if part.layout is not None:
        codes, scales = quantize_activations(x, part.layout)
        lengths = torch.tensor([stop - start for start, stop in part.layout.chunks(part.k)])
        x = codes * scales.repeat_interleave(lengths, 1)
    y = (x.double() @ weight_of(part).double().T).float()
    return y if part.bias is None else y + part.bias.float()


def _matmul(op: Matmul, step: Step, _) -> None:
    for out, part in zip(op.outs, op.parts, strict=True):
        step.buffers[out] = product(step.buffers[op.x], part)


def _slots_of(step: Step, buffer: int) -> list[int]:
    """The slot of each row's adapter, -1 for none."""
    if step.adapters is None:
        return [-1] * step.buffers[buffer].shape[0]
    return (step.adapters[step.rows] if step.plan.buffers[buffer].rows == ASKED else step.adapters).tolist()


def _lora_shrink(op: LoraShrink, step: Step, _) -> None:
    out = torch.zeros_like(step.buffers[op.out])
    for row, slot in enumerate(_slots_of(step, op.x)):
        if slot >= 0 and (rank := int(op.table.rank[slot])):
            a = op.table.a[slot, :rank].double()
            out[row, :rank] = (a @ step.buffers[op.x][row].double()).float() * op.table.scale[slot]
    step.buffers[op.out] = out


def _lora_expand(op: LoraExpand, step: Step, _) -> None:
    y = step.buffers[op.y].clone()
    for row, slot in enumerate(_slots_of(step, op.x)):
        if slot >= 0 and (rank := int(op.table.rank[slot])):
            b = op.table.b[slot, :rank, op.offset : op.offset + y.shape[1]].double()
            y[row] += (step.buffers[op.x][row, :rank].double() @ b).float()
    step.buffers[op.y] = y


def _rotary(op: Rotary, step: Step, _) -> None:
    x = heads_of(op.x, step.buffers)
    cos, sin = step.buffers[op.table].chunk(2, 1)
    half = cos.shape[1]
    if op.interleaved:
        a, b = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
    else:
        a, b = x[..., :half], x[..., half : 2 * half]
    cos, sin = cos[:, None], sin[:, None]
    first, second = a * cos - b * sin, b * cos + a * sin
    if op.interleaved:
        turned = torch.stack([first, second], -1).flatten(-2)
    else:
        turned = torch.cat([first, second], -1)
    step.buffers[op.out] = torch.cat([turned, x[..., 2 * half :]], -1).flatten(1)


def _cache_write(op: CacheWrite, step: Step, pages: LayerPages) -> None:
    k, v = heads_of(op.k, step.buffers), heads_of(op.v, step.buffers)
    cache_write(k, v, pages.k, pages.v, step.slots, pages.k_scale, pages.v_scale)


def _attend(op: Attend, step: Step, pages: LayerPages) -> None:
    out = paged_attention_reference(
        heads_of(op.q, step.buffers),
        pages.k,
        pages.v,
        step.block_tables,
        step.q_starts,
        step.lengths,
        scale=op.scale,
        window=op.window or None,
        softcap=op.softcap or None,
        sinks=op.sinks,
        alibi_slopes=op.slopes,
        k_scale=pages.k_scale,
        v_scale=pages.v_scale,
    )
    step.buffers[op.out] = out.flatten(1)


def _copy(op: Join | Quant, step: Step, _) -> None:
    """Join copies; Quant's rounding belongs to the matrices and is done where they are multiplied."""
    step.buffers[op.out] = step.buffers[op.x].clone()


def _act(op: Act, step: Step, _) -> None:
    x = _ACTS[op.kind](heads_of(op.gate, step.buffers))
    if op.up is not None:
        x = x * heads_of(op.up, step.buffers)
    step.buffers[op.out] = x.flatten(1)


def _scale(op: Scale, step: Step, _) -> None:
    step.buffers[op.out] = step.buffers[op.x] * op.scale


def _add(op: Add, step: Step, _) -> None:
    step.buffers[op.x] = step.buffers[op.x] + step.buffers[op.y]


def _gather(op: Gather, step: Step, _) -> None:
    step.buffers[op.out] = step.buffers[op.x][step.rows]


def _route(op: Route, step: Step, _) -> None:
    weights, chosen = step.buffers[op.x].softmax(-1).topk(step.plan.buffers[op.chosen].width)
    chosen, order = chosen.sort(-1)
    weights = weights.gather(1, order)
    step.buffers[op.chosen] = chosen.int()
    step.buffers[op.weights] = weights / weights.sum(-1, keepdim=True) if op.renormalize else weights


def _by_expert(chosen: torch.Tensor) -> torch.Tensor:
    """[T * k] choices in the order of experts, tokens of one in order."""
    return chosen.flatten().argsort(stable=True)


def _dispatch(op: Dispatch, step: Step, _) -> None:
    chosen = step.buffers[op.chosen]
    step.buffers[op.out] = step.buffers[op.x][_by_expert(chosen) // chosen.shape[1]]


def _experts(op: Experts, step: Step, _) -> None:
    matrix, x = op.matrix, step.buffers[op.x]
    counts = step.buffers[op.chosen].flatten().long().bincount(minlength=matrix.experts).tolist()
    out = step.buffers[op.outs[0].buffer]
    at = 0
    for expert, count in enumerate(counts):
        pick = [t if t is None else t[expert] for t in (matrix.weight, matrix.scale, matrix.zero)]
        one = Matrix(matrix.n, matrix.k, pick[0], matrix.layout, pick[1], pick[2])
        out[at : at + count] = product(x[at : at + count], one)
        at += count


def _mix(op: Mix, step: Step, _) -> None:
    weights, y = step.buffers[op.weights], step.buffers[op.y]
    back = torch.empty_like(y)
    back[_by_expert(step.buffers[op.chosen])] = y
    step.buffers[op.out] = (back.view(*weights.shape, -1) * weights[..., None]).sum(1)


def _logits(op: Logits, step: Step, _) -> None:
    x = step.buffers[op.x] * op.scale
    step.out = op.softcap * torch.tanh(x / op.softcap) if op.softcap else x


_RUN: dict[type[Op], object] = {
    Embed: _embed,
    Rope: _rope,
    Norm: _norm,
    Quant: _copy,
    Matmul: _matmul,
    Rotary: _rotary,
    CacheWrite: _cache_write,
    Attend: _attend,
    Join: _copy,
    Act: _act,
    Scale: _scale,
    LoraShrink: _lora_shrink,
    LoraExpand: _lora_expand,
    Add: _add,
    Gather: _gather,
    Route: _route,
    Dispatch: _dispatch,
    Experts: _experts,
    Mix: _mix,
    Logits: _logits,
}
