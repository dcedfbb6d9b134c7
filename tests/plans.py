"""Steps of an executor over a pool of its own, and random packed models: what the tests of plans share."""

from __future__ import annotations

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from hfaccel.cache.pool import PagePool, Sequence
from hfaccel.quant.linear import QuantEmbedding, QuantExperts, QuantLinear, is_fused_experts
from hfaccel.runtime.native import Native
from hfaccel.runtime.plan import Plan
from hfaccel.runtime.plan_build import build
from hfaccel.runtime.plan_ops import CacheWrite, Logits, Quant
from hfaccel.runtime.plan_reference import Step, run_record
from hfaccel.runtime.runner import Runner
from hfaccel_kernels.layouts import Layout
from hfaccel_kernels.packing import pack_codes, pack_rows

FAMILIES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "phi",
    "phi3",
    "gpt2",
    "opt",
    "gpt_neox",
    "starcoder2",
    "mixtral",
    "qwen3_moe",
    "bloom",
)


class Steps:
    """An executor under a runner with its own pages."""

    def __init__(self, model, executor, **runner):
        self.runner = Runner(model, **runner)
        self.runner.executor = executor

    def run(self, *rows: torch.Tensor, cuts: list[int] | None = None, hidden: bool = False) -> list:
        """Logits of every token of each row of ids; `cuts`: token numbers at which every row is split."""
        sequences = [self.runner.sequence() for _ in rows]
        longest = max(len(ids) for ids in rows)
        edges = [0, *(cuts or []), longest]
        found: list[list[torch.Tensor]] = [[] for _ in rows]
        try:
            for start, stop in zip(edges[:-1], edges[1:], strict=True):
                parts = [ids[start:stop] for ids in rows]
                counts = [len(part) for part in parts]
                total = sum(counts)
                if not total:
                    continue
                positions = torch.cat([torch.arange(start, start + count) for count in counts])
                out = self.runner.step(
                    torch.cat(parts), positions, sequences, counts, torch.arange(total), hidden=hidden
                )
                for row, part in zip(found, out.split(counts), strict=True):
                    row.append(part)
        finally:
            for sequence in sequences:
                sequence.free()
        return [torch.cat(row) for row in found]


def close(got, want, relative=1e-5):
    assert got.shape == want.shape and torch.isfinite(got).all()
    error = (got - want).abs().max() / want.abs().max()
    assert error <= relative, f"relative error {error:.2e}"


@torch.no_grad()
def logits(model, ids):
    return model(ids[None]).logits[0]


def round_to_nearest(weight: torch.Tensor, layout: Layout) -> dict[str, torch.Tensor]:
    """The packed tensors of a matrix [N, K], rounded group by group."""
    n, k = weight.shape
    scales, zeros, codes = [], [], torch.empty(n, k, dtype=torch.uint8)
    top = 2**layout.bits - 1
    for start, stop in layout.spans(k):
        w = weight[:, start:stop].detach().float()
        if layout.symmetric:
            scale = (w.abs().amax(1) / (top // 2)).clamp_min(1e-8)
            zero = torch.full((n,), float(layout.zero))
        else:
            low, high = w.amin(1).clamp_max(0), w.amax(1).clamp_min(0)
            scale = ((high - low) / top).clamp_min(1e-8)
            zero = (-low / scale).round().clamp(0, top)
        codes[:, start:stop] = ((w / scale[:, None]).round() + zero[:, None]).clamp(0, top).to(torch.uint8)
        scales.append(scale)
        zeros.append(zero)
    packed = {
        "weight": pack_codes(codes, layout),
        "weight_scale": pack_rows(torch.stack(scales, 1).to(layout.dtype)),
    }
    if not layout.symmetric:
        packed["weight_zero"] = pack_rows(torch.stack(zeros, 1).to(torch.uint8))
    return packed


def quantize(model: nn.Module, layout: Layout, embedding: Layout | None = None) -> nn.Module:
    """Every linear of the model packed, in place; the token embedding too where `embedding` says how."""
    for name, module in list(model.named_modules()):
        owner = model.get_submodule(name.rpartition(".")[0])
        if isinstance(module, nn.Linear | Conv1D):
            weight = module.weight.T if isinstance(module, Conv1D) else module.weight
            packed = round_to_nearest(weight, layout)
            new = QuantLinear(weight.shape[1], weight.shape[0], layout, packed, bias=module.bias)
        elif is_fused_experts(module):
            packed = {}
            for key in QuantExperts.PROJECTIONS:
                each = [round_to_nearest(w, layout) for w in getattr(module, key)]
                packed[key] = {part: torch.stack([one[part] for one in each]) for part in each[0]}
            new = QuantExperts(module, layout, packed)
        elif embedding is not None and module is model.get_input_embeddings():
            packed = round_to_nearest(module.weight, embedding)
            multiplier = getattr(module, "scalar_embed_scale", None)
            new = QuantEmbedding(*module.weight.shape, embedding, packed, multiplier=multiplier)
        else:
            continue
        setattr(owner, name.rpartition(".")[2], new)
    return model.eval()


def record_errors(model: nn.Module, ids: torch.Tensor) -> dict[str, float]:
    """Each record on its own: C++'s output against the reference run on what C++ left in its inputs.

    Returns the largest error of each kind of record, relative to the largest value. Rounding of activations
    cannot cascade here, so packed weights are held to the same bound as others.
    """
    plan, found = build(model), {}
    before = _left_behind(model, plan, 1, ids)
    for index, op in enumerate(plan.ops):
        if index + 1 < len(plan.ops):
            after = _left_behind(model, plan, index + 1, ids)
        if index and not isinstance(op, Quant | CacheWrite | Logits):
            outs = {number for number, _, _, write, _ in op.accesses(plan) if write}
            for quant in plan.ops[:index]:
                if isinstance(quant, Quant):
                    before.buffers[quant.out] = before.buffers[quant.x]
            run_record(before, index)
            for out in outs:
                if plan.buffers[out].kind != "out":
                    want, got = before.buffers[out], after.buffers[out]
                    error = ((got - want).abs().max() / want.abs().max()).item()
                    found[type(op).__name__] = max(found.get(type(op).__name__, 0.0), error)
        before = after
    return found


def _left_behind(model: nn.Module, plan: Plan, count: int, ids: torch.Tensor) -> Step:
    """The state after the plan's first `count` records have run in C++ on one prompt."""
    executor = Native(model, plan.with_ops(plan.ops[:count]))
    executor.replicate = 0
    pool = PagePool()
    sequence = Sequence(pool)
    sequence.extend(len(ids))
    positions = torch.arange(len(ids))
    tables = torch.tensor([sequence.pages], dtype=torch.int32)
    starts = torch.tensor([0, len(ids)], dtype=torch.int32)
    lengths = starts[1:].clone()
    executor.step(pool, ids, positions, tables, starts, lengths, positions)
    pages = [
        pool.ensure_layer(op.layer, op.k.count, op.k.size, op.v.size, plan.dtype, ids.device)
        for op in plan.layers().values()
    ]
    buffers = executor.buffers()
    return Step(plan, ids, positions, tables, starts, lengths, positions, positions, pages, buffers=buffers)
