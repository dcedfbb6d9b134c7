"""Where the time of one decode step goes: by kind of record, waiting at barriers, and Python around it."""

from __future__ import annotations

import time

import torch

from hfaccel.measure.rows import load
from hfaccel.measure.speed import prompt_ids
from hfaccel.report import table


def profile_step(
    model: str, recipe: str, *, prompt_tokens: int = 128, batch: int = 1, steps: int = 64, threads: int = 2
) -> str:
    """A table of microseconds a step, of `steps` decode steps through `generate`'s own runner.

    Raises: Unsupported if the native plan does not serve the model.
    """
    import hfaccel
    from hfaccel.generate.mixin import runner_of
    from hfaccel.measure.corpus import text

    torch.set_num_threads(threads)
    loaded, tokenizer = load(model)
    hfaccel.patch(loaded, recipe, tokenizer=tokenizer, keep_original=False, progress=False)
    ids = prompt_ids(tokenizer, text("wikitext2_test"), prompt_tokens, batch)
    runner = runner_of(loaded)
    native = runner.refresh()
    if native.name != "native":
        from hfaccel.runtime import Unsupported

        raise Unsupported(f"the {native.name} executor serves this model: {runner.skipped}")
    sequences = [runner.sequence(expect_tokens=prompt_tokens + steps + 2) for _ in range(batch)]
    try:
        positions = torch.arange(prompt_tokens)
        logits = runner.prefill(list(ids), [positions] * batch, sequences)
        rows, counts = torch.arange(batch), [1] * batch

        def decode(count: int) -> float:
            nonlocal logits
            start = time.perf_counter()
            for _ in range(count):
                at = torch.tensor([s.length for s in sequences])
                logits = runner.step(logits.argmax(-1), at, sequences, counts, rows)
            return time.perf_counter() - start

        decode(2)
        native.profile(True)
        profiled = decode(steps // 2)
        timings = native.timings()
        native.profile(False)
        plain = decode(steps - steps // 2)
    finally:
        for sequence in sequences:
            sequence.free()
    kinds: dict[str, list[int]] = {}
    for one in timings:
        kind = kinds.setdefault(type(one.op).__name__, [0, 0, 0])
        kind[0] += 1
        kind[1] += one.work_ns
        kind[2] += one.wait_ns
    per_step = 1e3 * (steps // 2)
    rows_ = [("record", "n", "work us", "wait us")]
    for name, (count, work, wait) in sorted(kinds.items(), key=lambda item: -item[1][1]):
        rows_.append((name, str(count), f"{work / per_step:.1f}", f"{wait / per_step:.1f}"))
    inside = sum(work + wait for _, work, wait in kinds.values()) / per_step
    whole = profiled / (steps // 2) * 1e6
    rows_.append(("Python and the rest", "", f"{whole - inside:.1f}", ""))
    rows_.append(("a step, profiled", "", f"{whole:.1f}", ""))
    rows_.append(("a step, not profiled", "", f"{plain / (steps - steps // 2) * 1e6:.1f}", ""))
    return table(rows_)
