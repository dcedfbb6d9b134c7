"""Never slower: which executor serves a model on a CPU, by a short measurement of the plan and of its
modules.

The two round differently, so the choice is made once and recorded as `config.hfaccel["executor"]`: copies and
saved folders repeat it. It is measured
- at the end of `patch`, unless the config names an executor already; what `auto` patches to try it is
  measured too;
- at the first `generate` (or whatever else asks for the runner) of a model whose config names none: it was in
  training mode or on another device when it was patched, or was saved without a record;
- never in a forked child, for a model in training mode or off the CPU, for one that the plan or the modules
  do not serve or whose position table is too short for a prompt, nor where HFACCEL_EXECUTOR or
  HFACCEL_BACKEND names one or HFACCEL_MEASURE is 0. There `Runner` takes the first executor that serves.

The native plan is kept unless the modules are faster both at a decode step and at a prompt, by more than
`MARGIN`; where it loses one of the two, `report()` says so.

It takes about `BUDGET_S` at most: a prompt is measured only where both are expected to end in time, and
models with a native step above `LONG_S` are not measured. There a step is the time to read the weights, which
the plan does once and from their packed form, and one step of the modules could take seconds.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hfaccel.errors import PatchError
from hfaccel.runtime import Unsupported
from hfaccel.runtime.runner import Runner

log = logging.getLogger("hfaccel")

PROMPT_TOKENS = 128
TRIAL_TOKENS = 8  # of the prompt from which the time of a long one is foretold
REPEATS = 4
BUDGET_S = 1.0
LONG_S = 0.1  # about 8 GB of weights
MARGIN = 1.05  # what two timings of the same thing differ by


@dataclass(frozen=True)
class Choice:
    """The executor taken, and what was measured: executor -> milliseconds; empty where it was not."""

    executor: str
    decode_ms: dict[str, float] = field(default_factory=dict)
    prompt_ms: dict[str, float] = field(default_factory=dict)
    prompt_tokens: int = PROMPT_TOKENS
    why: str = ""  # why nothing was measured

    def __str__(self) -> str:
        parts = [self.why] if self.why else []
        for values, what in (
            (self.decode_ms, "a token"),
            (self.prompt_ms, f"for {self.prompt_tokens} tokens of prompt"),
        ):
            if values:
                said = ", ".join(f"{name} {ms:.3g} ms" for name, ms in values.items()) + f" {what}"
                parts.append(said + (" (the plan is slower there)" if _loses(values) else ""))
        return "; ".join(parts)

    def barred(self) -> dict[str, str]:
        """What `Runner` takes: executors that are no choice, with the reason."""
        return {} if self.executor == "native" else {"native": f"its modules are faster: {self}"}


def choose(model: nn.Module, *, kv_bits: int | None = None) -> Choice | None:
    """The recorded choice, or a new one, recorded now; None where there is nothing to choose.

    The model must not be used meanwhile.
    """
    if (name := recorded(model.config)) is not None:
        return Choice(name, why="as measured when it was patched")
    if not _wanted(model):
        return None
    found = measure(model, kv_bits=kv_bits)
    if found is not None:
        record(model.config, found.executor)
        log.info("%s: %s", found.executor, found)
    return found


def _wanted(model: nn.Module) -> bool:
    free = all(
        os.environ.get(name, "auto") in ("", "auto") for name in ("HFACCEL_EXECUTOR", "HFACCEL_BACKEND")
    )
    on = os.environ.get("HFACCEL_MEASURE", "1") not in ("", "0")
    return on and free and model.device.type == "cpu" and not model.training


def measure(model: nn.Module, *, kv_bits: int | None = None) -> Choice | None:
    """Time both executors on a pool of their own; None if one of them does not serve the model."""
    from hfaccel.runtime.modules import Modules
    from hfaccel.runtime.native import executor

    start = time.perf_counter()
    try:
        plan, modules = executor(model), Modules(model)
    except Unsupported:
        return None
    vocab, tokens = plan.plan.vocab, PROMPT_TOKENS
    if plan.plan.max_positions:
        tokens = min(tokens, plan.plan.max_positions - REPEATS)
    if tokens <= TRIAL_TOKENS:
        return None
    ids = torch.randint(0, vocab, (tokens,), generator=torch.Generator().manual_seed(0))
    timed = {each.name: _Timed(model, each, ids, kv_bits) for each in (plan, modules)}
    try:
        native = timed["native"].decode()
        if native > LONG_S:
            return Choice("native", why=f"not measured: a step takes {native:.2g} s")
        decode = {"native": native, "modules": timed["modules"].decode()}
        left = BUDGET_S - (time.perf_counter() - start)
        prompt = {}
        if 2 * sum(each.foretold() for each in timed.values()) < left:
            prompt = {name: each.prompt() for name, each in timed.items()}
    except (PatchError, RuntimeError, TypeError) as error:  # the modules of a class that asks for more
        log.info("%s: executors cannot be compared: %s", type(model).__name__, error)
        return None
    values = [{name: 1e3 * seconds for name, seconds in each.items()} for each in (decode, prompt)]
    loses = all(_loses(each) for each in values if each)
    return Choice("modules" if loses else "native", *values, tokens)


def _loses(ms: dict[str, float]) -> bool:
    return ms["native"] > MARGIN * ms["modules"]


class _Timed:
    """One executor on pages of its own: best of a few."""

    def __init__(self, model: nn.Module, executor: Any, ids: torch.Tensor, kv_bits: int | None):
        self.runner, self.ids = Runner(model, kv_bits=kv_bits), ids
        self.runner.executor = executor
        self.step_s = self.trial_s = 0.0

    def _best(self, tokens: int, past: int, repeats: int) -> float:
        """Seconds of a step that appends `tokens` behind `past` others."""
        sequence, best, spent = self.runner.sequence(expect_tokens=past + tokens), float("inf"), 0.0
        try:
            if past:
                self._append(sequence, past)
            for _ in range(repeats):
                start = time.perf_counter()
                self._append(sequence, tokens)
                seconds = time.perf_counter() - start
                sequence.rollback(tokens)
                best, spent = min(best, seconds), spent + seconds
                if spent > BUDGET_S / 4:
                    break
        finally:
            sequence.free()
        return best

    def _append(self, sequence: Any, tokens: int) -> None:
        positions = torch.arange(sequence.length, sequence.length + tokens)
        rows = torch.tensor([tokens - 1])
        self.runner.step(self.ids[:tokens], positions, [sequence], [tokens], rows)

    def decode(self) -> float:
        self._best(1, 0, 1)  # warm
        self.trial_s = self._best(TRIAL_TOKENS, 0, 2)
        self.step_s = self._best(1, TRIAL_TOKENS, REPEATS)
        return self.step_s

    def foretold(self) -> float:
        """What the whole prompt should take, by a line through one token and the trial."""
        more = max(0.0, self.trial_s - self.step_s) / (TRIAL_TOKENS - 1)
        return self.step_s + more * (len(self.ids) - 1)

    def prompt(self) -> float:
        return self._best(len(self.ids), 0, 2)


# The record -----------------------------------------------------------------------------------------------

NAMES = ("native", "modules")


def recorded(config: Any) -> str | None:
    """The executor that a config names, or None."""
    stored = getattr(config, "hfaccel", None)
    name = stored.get("executor") if isinstance(stored, dict) else None
    return name if name in NAMES else None


def record(config: Any, executor: str) -> None:
    """Write the choice down; the config must be the model's own."""
    from hfaccel.checkpoint import FORMAT

    stored = getattr(config, "hfaccel", None)
    config.hfaccel = {"format": FORMAT, **(stored if isinstance(stored, dict) else {}), "executor": executor}
