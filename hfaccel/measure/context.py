"""How the time of a decoded token grows with the context, beside what the attention's own work explains.

One token at context S costs, over all attention records of the plan (their windows counted),

    bytes(S) = sum of  keys(S) x KV heads x (bytes of K + bytes of V)        pages read
    FLOPs(S) = sum of  keys(S) x query heads x 2 (size of K + size of V)     products

so from the shortest context S0 on, with rates measured in the same run, a token may take

    time(S) = time(S0) + (bytes(S) - bytes(S0)) / bandwidth + (FLOPs(S) - FLOPs(S0)) / rate

`bandwidth` is what the threads read from memory (`bench.read_bandwidth`). `rate` is what the same attention
code reaches where bytes are no matter: its records in a prefill step, whose rows share every page read.
"""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

import torch

from hfaccel.cache.pool import PagePool, Sequence
from hfaccel.errors import PatchError
from hfaccel.measure import artifacts
from hfaccel.measure.bench import cpu_name, read_bandwidth
from hfaccel.runtime import Unsupported
from hfaccel.runtime.plan import Plan
from hfaccel.runtime.plan_ops import Attend
from hfaccel.runtime.runner import Runner

CHUNK = 256  # tokens of the prefill step that gives the rate


def growth(
    model: str,
    recipe: str,
    contexts: list[int],
    *,
    steps: int = 16,
    rounds: int = 5,
    threads: int = os.cpu_count() or 1,
    off_grid: bool = False,
) -> dict[str, Any]:
    """Decode time a token at each context, with the model above, as one JSON-ready dict.

    Args:
        steps: greedy steps of one native call; they lie around the context that they are printed under.
        rounds: every round measures every context, in alternating order.
    Raises: PatchError for contexts that the model has no positions for, Unsupported without a native plan.
    """
    from transformers import AutoModelForCausalLM

    import hfaccel
    from hfaccel.generate.mixin import runner_of

    contexts = sorted(set(contexts))
    if len(contexts) < 2 or contexts[0] < steps or contexts[-1] <= CHUNK:
        raise PatchError(f"contexts {contexts}: two or more, from {steps} tokens on, the last beyond {CHUNK}")
    torch.set_num_threads(threads)
    loaded = AutoModelForCausalLM.from_pretrained(artifacts.folder(model, off_grid=off_grid)).eval()
    limit = getattr(loaded.config, "max_position_embeddings", None) or contexts[-1] + steps
    if contexts[-1] + steps > limit:
        raise PatchError(
            f"context {contexts[-1]}: {model} has {limit} positions, {steps} of them for the steps"
        )
    hfaccel.patch(loaded, recipe, keep_original=False, progress=False)
    runner = runner_of(loaded)
    if (native := runner.refresh()).name != "native":
        raise Unsupported(f"the {native.name} executor serves this model: {runner.skipped}")
    ids = torch.randint(
        10, loaded.config.vocab_size, (contexts[-1],), generator=torch.Generator().manual_seed(0)
    )
    sequence, rows = _filled(runner, ids, contexts, steps)
    try:
        samples, bandwidth, rates = {context: [] for context in contexts}, [], []
        for context in contexts:
            _decode(runner, rows[context], steps)
        for turn in range(rounds):
            bandwidth.append(read_bandwidth(threads))
            rates.append(_attention_rate(runner, ids, sequence))
            for context in contexts if turn % 2 == 0 else contexts[::-1]:
                samples[context].append(_decode(runner, rows[context], steps))
        costs = {context: attention_cost(native.plan, runner.pool, context) for context in contexts}
    finally:
        for row in (sequence, *rows.values()):
            row.free()
    return {
        "model": model,
        "recipe": recipe,
        "threads": threads,
        "cpu": cpu_name(),
        "steps": steps,
        "read_bandwidth_gb_s": bandwidth,
        "attention_gflop_s": rates,
        "rows": _explained(samples, costs, statistics.median(bandwidth), statistics.median(rates)),
    }


def attention_cost(plan: Plan, pool: PagePool, context: int) -> tuple[int, int]:
    """(bytes of pages, FLOPs) of the attention of one token that sees `context` keys, itself included."""
    bytes_, flops = 0, 0
    for op in plan.ops:
        if isinstance(op, Attend):
            keys = min(context, op.window) if op.window else context
            bytes_ += keys * sum(x[0, 0].numel() * x.element_size() for x in pool.layers[op.layer].tensors())
            flops += keys * op.q.count * 2 * (op.k.size + op.v.size)
    return bytes_, flops


def _filled(
    runner: Runner, ids: torch.Tensor, contexts: list[int], steps: int
) -> tuple[Sequence, dict[int, Sequence]]:
    """A sequence of all ids; for each context one that shares its pages and ends half the steps before it."""
    longest = runner.sequence(expect_tokens=len(ids))
    runner.prefill([ids], [torch.arange(len(ids))], [longest])
    rows = {}
    for context in contexts:
        rows[context] = runner.sequence(expect_tokens=steps + 2 * runner.pool.page_tokens)
        rows[context].share(longest.pages, context - steps // 2)
    return longest, rows


def _decode(runner: Runner, row: Sequence, steps: int) -> float:
    """Seconds a token of a run of greedy steps, after which the sequence is what it was."""
    token, length = torch.tensor([1]), row.length
    start = time.perf_counter()
    done = runner.greedy(token, torch.tensor([length]), [row], ahead=steps)
    seconds = time.perf_counter() - start
    row.rollback(row.length - length)
    return seconds / len(done)


def _attention_rate(runner: Runner, ids: torch.Tensor, past: Sequence) -> float:
    """GFLOP/s of the attention records of a prefill step at the end of the longest context."""
    native, start = runner.executor, past.length - CHUNK
    row = past.fork()
    try:
        row.rollback(CHUNK)
        native.profile(True)
        args = (ids[start:], torch.arange(start, start + CHUNK), [row], [CHUNK], torch.tensor([CHUNK - 1]))
        runner.step(*args)
        spent = sum(t.work_ns for t in native.timings() if isinstance(t.op, Attend))
    finally:
        native.profile(False)
        row.free()
    each = (attention_cost(native.plan, runner.pool, start + i + 1)[1] for i in range(CHUNK))
    return sum(each) / spent


def _explained(
    samples: dict[int, list[float]], costs: dict[int, tuple[int, int]], bandwidth: float, rate: float
) -> list[dict[str, Any]]:
    """Medians beside the model; `share` is the part of the growth that it explains, 1 or more if all."""
    first, out = min(samples), []
    base = statistics.median(samples[first])
    for context, seconds in samples.items():
        extra_bytes, extra_flops = (a - b for a, b in zip(costs[context], costs[first], strict=True))
        by_bytes, by_flops = extra_bytes / bandwidth / 1e6, extra_flops / rate / 1e6
        ms = 1e3 * statistics.median(seconds)
        entry = {
            "context": context,
            "ms": ms,
            "kv_mb": costs[context][0] / 1e6,
            "attention_mflop": costs[context][1] / 1e6,
            "bytes_ms": by_bytes,
            "flops_ms": by_flops,
            "model_ms": 1e3 * base + by_bytes + by_flops,
            "samples_ms": [1e3 * s for s in seconds],
        }
        if context != first:
            entry["share"] = (by_bytes + by_flops) / max(ms - 1e3 * base, 1e-9)
        out.append(entry)
    return out
