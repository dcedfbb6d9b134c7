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
    """A table of microseconds a step, of `steps` greedy steps (a multiple of 8) through `generate`'s runner.

    recipe: as `hfaccel bench` takes it: "bf16" and "fp32" are `runtime` in that dtype.

    Raises: Unsupported if the native plan does not serve the model.
    """
    import hfaccel
    from hfaccel.generate.mixin import runner_of
    from hfaccel.measure.artifacts import RANDOM, folder
    from hfaccel.measure.corpus import text

    torch.set_num_threads(threads)
    kind = {"bf16": torch.bfloat16, "fp32": torch.float32}.get(recipe)
    loaded, tokenizer = load(str(folder(model)) if model in RANDOM else model, dtype=kind or "auto")
    hfaccel.patch(
        loaded, "runtime" if kind else recipe, tokenizer=tokenizer, keep_original=False, progress=False
    )
    ids = prompt_ids(tokenizer, text("wikitext2_test"), prompt_tokens, batch)
    runner = runner_of(loaded)
    native = runner.refresh()
    if native.name != "native":
        from hfaccel.runtime import Unsupported

        raise Unsupported(f"the {native.name} executor serves this model: {runner.skipped}")
    sequences = [runner.sequence(expect_tokens=prompt_tokens + 3 * steps) for _ in range(batch)]
    try:
        tokens = runner.prefill(list(ids), [torch.arange(prompt_tokens)] * batch, sequences).argmax(-1)

        def decode(each: int) -> float:
            """Seconds a step, `steps` of them, `each` a call."""
            nonlocal tokens
            start = time.perf_counter()
            for _ in range(0, steps, each):
                at = torch.tensor([s.length for s in sequences])
                tokens = runner.greedy(tokens, at, sequences, ahead=each)[-1]
            return (time.perf_counter() - start) / steps

        decode(4)
        native.profile(True)
        profiled = decode(8)
        timings = native.timings()
        native.profile(False)
        runs, singles = decode(8), decode(1)
    finally:
        for sequence in sequences:
            sequence.free()
    kinds: dict[str, list[int]] = {}
    for one in timings:
        kind = kinds.setdefault(type(one.op).__name__, [0, 0, 0])
        kind[0] += 1
        kind[1] += one.work_ns
        kind[2] += one.wait_ns
    per_step = 1e3 * steps
    rows = [("record", "n", "work us", "wait us")]
    for name, (count, work, wait) in sorted(kinds.items(), key=lambda item: -item[1][1]):
        rows.append((name, str(count), f"{work / per_step:.1f}", f"{wait / per_step:.1f}"))
    inside = sum(work + wait for _, work, wait in kinds.values()) / per_step
    rows.append(("Python and the rest", "", f"{profiled * 1e6 - inside:.1f}", ""))
    rows.append(("a step, profiled, 8 a call", "", f"{profiled * 1e6:.1f}", ""))
    rows.append(("a step, 8 a call", "", f"{runs * 1e6:.1f}", ""))
    rows.append(("a step, 1 a call", "", f"{singles * 1e6:.1f}", ""))
    return table(rows)
