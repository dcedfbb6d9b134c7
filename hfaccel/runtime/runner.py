"""The step that generate, speculation and the server share: packed tokens of many sequences in, logits out.

A step appends `counts[b]` tokens to each sequence and returns the logits of the rows asked for. Prefill,
chunked prefill, decode, verification and a mixed batch are all this one call; `prefill` only cuts prompts
into steps of bounded size. Sequences live in a page pool; executors (`EXECUTORS`) do the arithmetic and know
nothing of them: they get plain tensors, so that one may be C++.

Lengths are the truth: after an exception every sequence has the length it had before the step.
"""

from __future__ import annotations

import logging
import os
from contextlib import contextmanager
from importlib import import_module
from typing import Protocol

import numpy as np
import torch
from torch import nn

from hfaccel.cache.pool import PagePool, Sequence
from hfaccel.errors import PatchError
from hfaccel.lora.slots import AdapterSlots
from hfaccel.runtime import Unsupported

log = logging.getLogger("hfaccel")

CHUNK_TOKENS = 512  # a prefill step: large enough for the matrix products, small enough to bound activations

# name -> (where its factory `(model) -> executor` is, on which devices `auto` tries it); the order is the
# choice
EXECUTORS = {
    "graphs": ("hfaccel.runtime.graphs:Graphs", {"cuda"}),
    "native": ("hfaccel.runtime.native:executor", {"cpu"}),
    "modules": ("hfaccel.runtime.modules:Modules", {"cpu", "cuda", "mps", "xpu"}),
}


_SETTINGS = (bool, int, float, str)  # plain attributes of a module or a config
_ASKED = ("HFACCEL_EXECUTOR", "HFACCEL_BACKEND", "HFACCEL_ISA", "HFACCEL_STRICT")


class Executor(Protocol):
    """What runs a step. A factory that cannot serve a model raises `Unsupported` with the reason."""

    name: str

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
        """See `modules.Modules.step`, the specification."""


def strict() -> bool:
    return os.environ.get("HFACCEL_STRICT", "") not in ("", "0")


def choose(
    model: nn.Module, barred: dict[str, str] | None = None, lora: AdapterSlots | None = None
) -> tuple[Executor, dict[str, str]]:
    """The executor for this model on its device, and why each one before it was passed over.

    `barred` names executors that are no choice here, with the reason; none of them counts as a fallback.
    `lora`: adapters that the steps' tokens may have.

    Raises: PatchError when the one that HFACCEL_EXECUTOR names does not serve the model, when none does, or,
    under HFACCEL_STRICT=1, when the first choice does not.
    """
    asked = os.environ.get("HFACCEL_EXECUTOR", "auto") or "auto"
    if asked != "auto" and asked not in EXECUTORS:
        raise PatchError(f"HFACCEL_EXECUTOR={asked!r}; known are auto, {', '.join(EXECUTORS)}")
    skipped: dict[str, str] = {}
    for name, (place, devices) in EXECUTORS.items():
        module, factory = place.split(":")
        if asked not in ("auto", name) or (asked == "auto" and name in (barred or ())):
            continue
        if asked == "auto" and model.device.type not in devices:
            continue
        try:
            if skipped and strict():
                break
            args = (model, lora) if lora is not None and lora.tables else (model,)
            return getattr(import_module(module), factory)(*args), skipped
        except Unsupported as why:
            skipped[name] = str(why)
    reasons = "; ".join(f"{name}: {why}" for name, why in skipped.items())
    raise PatchError(f"no executor serves {type(model).__name__} ({reasons or f'device {model.device}'})")


def fingerprint(model: nn.Module) -> list:
    """What differs once a module, its code or a setting is replaced, a tensor moved or re-typed, an adapter
    or hook changed. Compared whole: hashes of -1 and -2 are equal."""
    every = nn.modules.module
    parts: list = [*every._global_forward_hooks, None, *every._global_forward_pre_hooks]
    for name, value in vars(model.config).items():
        if type(value) in _SETTINGS:
            parts += (name, value)
        elif isinstance(value, (list, tuple, dict)):  # layer types, rope parameters
            parts += (name, repr(value))
    for module in model.modules():
        own = vars(module)
        parts += (module, type(module), type(module).forward, own.get("forward"))
        parts += (*module._forward_hooks, None, *module._forward_pre_hooks)  # ids that are not given twice
        for name, value in own.items():  # eps, scaling, top_k, ...
            if type(value) in _SETTINGS:
                parts += (name, value)
        for tensors in (module._parameters, module._buffers):
            for name, x in tensors.items():
                if x is not None:
                    parts += (name, x.data_ptr(), x.dtype, x.shape)
        parts.append(str(own.get("_active_adapter", "")) + str(own.get("_disable_adapters", "")))
    return parts


class Runner:
    """Steps of one model over one pool of pages. Thread-safe: a step holds the lock, sequences interleave.

    Args:
        kv_bits, page_tokens, budget_pages: as `PagePool` takes them. barred: as `choose` takes it.
        lora: adapters that sequences may have.
    Attributes: steps: so far. changes: how often the model or a setting was another one, adapters aside.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        kv_bits: int | None = None,
        page_tokens: int = 16,
        budget_pages: int | None = None,
        barred: dict[str, str] | None = None,
        lora: AdapterSlots | None = None,
    ):
        self.model, self.barred, self.lora = model, barred or {}, lora
        self.pool = PagePool(page_tokens=page_tokens, bits=kv_bits, budget_pages=budget_pages)
        self.lock = self.pool.lock  # one lock: no thread may move the pages that a step is writing to
        self.executor: Executor | None = None
        self.skipped: dict[str, str] = {}
        self._fingerprint: list | None = None
        self._asked: list[str] | None = None
        self._tables: int | None = None
        self._placed = self._place()
        self.steps = self.changes = 0

    def refresh(self) -> Executor:
        """The executor, rebuilt if the model is no longer what it was built for; call once per request."""
        with self.lock:
            now = fingerprint(self.model)
            asked = [os.environ.get(name, "") for name in _ASKED]
            tables = None if self.lora is None else self.lora.version
            changed = now != self._fingerprint or asked != self._asked
            if self.executor is None or changed or tables != self._tables:
                self.changes += changed
                self.executor = None
                self.executor, self.skipped = choose(self.model, self.barred, self.lora)
                self.skipped = {**self.barred, **self.skipped}
                self._fingerprint, self._asked, self._tables = now, asked, tables
            self.pages()
            return self.executor

    def pages(self) -> PagePool:
        """The pool for new sequences: another one if the model was moved or re-typed while somebody held
        pages of the one before."""
        with self.lock:
            if self._placed != self._place():
                self._placed = self._place()
                if self.pool.used_pages:
                    self.pool = self.pool.renewed()
            return self.pool

    def _place(self) -> tuple[torch.dtype, torch.device]:
        return self.model.dtype, self.model.device

    def sequence(self, *, expect_tokens: int = 0) -> Sequence:
        """An empty sequence; whoever asks for it calls `free`."""
        return Sequence(self.pool, expect_tokens=expect_tokens)

    @torch.no_grad()
    def step(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        sequences: list[Sequence],
        counts: list[int],
        rows: torch.Tensor,
        *,
        hidden: bool = False,
        adapters: list[int] | None = None,
    ) -> torch.Tensor:
        """Append tokens to sequences and run the model on them.

        Args:
            ids, positions: [T] int64, sequence after sequence; positions are what rotary or learned position
                embeddings see.
            counts: new tokens of each sequence; their sum is T.
            rows: [R] int64, indices into the T tokens.
            hidden: last hidden states instead of logits.
            adapters: of each sequence, the slot of its adapter; -1 for none.
        Returns: [R, vocab] or [R, hidden size].
        Raises: PatchError without free pages; whatever the model raises, with all sequences as before.
        """
        with self.lock:
            executor = self.executor or self.refresh()
            if 0 in counts:
                used = [i for i, count in enumerate(counts) if count]
                sequences, counts = [sequences[i] for i in used], [counts[i] for i in used]
                adapters = adapters and [adapters[i] for i in used]
            if not sequences:
                raise PatchError("a step needs at least one token")
            with self._appending(sequences, counts) as tensors:
                more = self._adapters(adapters, counts)
                return executor.step(self.pool, ids, positions, *tensors, rows, hidden=hidden, **more)

    @torch.no_grad()
    def greedy(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        sequences: list[Sequence],
        *,
        ahead: int,
        ends: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Append one token to each sequence and go on with the best ones: the tokens that follow.

        Args:
            tokens, positions: [B] int64.
            ahead: steps wished for; an executor may run fewer, and stops after a step that chose one of
                `ends` [E] int64.
        Returns: [n, B] int64, 1 <= n <= ahead; the last row is not appended yet.
        Raises: as `step`, with all sequences as before.
        """
        with self.lock:
            executor, count = self.executor or self.refresh(), len(sequences)
            rows = torch.arange(count, device=tokens.device)
            if not hasattr(executor, "best"):
                return self.step(tokens, positions, sequences, [1] * count, rows).argmax(-1)[None]
            ahead = self._room(sequences, ahead)
            with self._appending(sequences, [1] * count, ahead - 1) as tensors:
                args = (self.pool, tokens, positions, *tensors, rows)
                chosen = executor.best(*args, ahead=ahead, ends=ends)[1]
            for sequence in sequences:
                sequence.rollback(ahead - len(chosen))
            return chosen[:, :, 0]

    @torch.no_grad()
    def candidates(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        sequences: list[Sequence],
        top: int,
        *,
        counts: list[int] | None = None,
        rows: torch.Tensor | None = None,
        adapters: list[int] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Append one token to each sequence: its `top` largest logits.

        Args:
            counts, rows: as `step` takes them, where it is not one token each and all rows.
            adapters: as `step` takes them.
        Returns: [R, top] fp32, best first and equal ones by id; their ids [R, top] int64; all logits
            [R, vocab].
        """
        with self.lock:
            executor, count = self.executor or self.refresh(), len(sequences)
            if rows is None:
                rows, counts = torch.arange(count, device=tokens.device), [1] * count
            if not hasattr(executor, "best"):
                logits = self.step(tokens, positions, sequences, counts, rows, adapters=adapters)
                values, ids = logits.float().sort(dim=-1, descending=True, stable=True)
                return values[:, :top], ids[:, :top], logits
            with self._appending(sequences, counts) as tensors:
                args = (self.pool, tokens, positions, *tensors, rows)
                values, ids, logits = executor.best(*args, top=top, **self._adapters(adapters, counts))
            return values[0], ids[0], logits

    def _adapters(self, adapters: list[int] | None, counts: list[int]) -> dict[str, torch.Tensor]:
        """What an executor is told of the tokens' adapters; nothing where none has one."""
        if adapters is None or max(adapters) < 0:
            return {}
        slots = np.repeat(np.array(adapters, np.int32), counts)
        return {"adapters": torch.from_numpy(slots).to(self.model.device)}

    def _room(self, sequences: list[Sequence], tokens: int) -> int:
        """How many tokens, `tokens` at most, each of the sequences can append within a budget; 1 at least."""
        free = self.pool.free_pages
        while tokens > 1 and self.pool.budget_pages is not None:
            if sum(s.pages_for(tokens) for s in sequences) <= free:
                break
            tokens //= 2
        return tokens

    @contextmanager
    def _appending(self, sequences: list[Sequence], counts: list[int], more: int = 0):
        """Slots for `counts` new tokens and `more`, and a step's tensors; slots go back if the block
        raises."""
        if any(s.pool is not self.pool for s in sequences):
            raise PatchError("the model was moved or re-typed since these sequences began")
        before = [s.length for s in sequences]
        try:
            for sequence, count in zip(sequences, counts, strict=True):
                sequence.extend(count + more)
            self.steps += 1
            yield self._tensors(sequences, counts, more)
        except BaseException:
            for sequence, length in zip(sequences, before, strict=True):
                sequence.rollback(max(0, sequence.length - length))
            raise

    def _tensors(
        self, sequences: list[Sequence], counts: list[int], more: int = 0
    ) -> tuple[torch.Tensor, ...]:
        """block_tables [B, max_blocks], q_starts [B + 1], lengths [B], all int32 on the model's device."""
        blocks = max((len(s.pages) for s in sequences), default=1)
        tables = np.full((len(sequences), max(1, blocks)), -1, np.int32)
        for row, sequence in zip(tables, sequences, strict=True):
            used = len(sequence.pages)
            row[:used] = sequence.table[:used]
        starts = np.zeros(len(sequences) + 1, np.int32)
        np.cumsum(counts, out=starts[1:])
        lengths = np.fromiter((s.length - more for s in sequences), np.int32, len(sequences))
        found = [torch.from_numpy(x) for x in (tables, starts, lengths)]
        device = self.model.device
        return tuple(found if device.type == "cpu" else [x.to(device) for x in found])

    def prefill(
        self,
        ids: list[torch.Tensor],
        positions: list[torch.Tensor],
        sequences: list[Sequence],
        *,
        chunk_tokens: int | None = None,
    ) -> torch.Tensor:
        """Run prompts through steps of at most `chunk_tokens` tokens: [B, vocab] logits of their last tokens.

        Args:
            ids, positions: [n_b] int64 each, n_b >= 1, appended to sequences[b].
        """
        chunk_tokens = chunk_tokens or CHUNK_TOKENS
        executor = self.refresh()
        whole = getattr(executor, "whole_prompts", False)
        done = [0] * len(ids)
        logits: list[torch.Tensor | None] = [None] * len(ids)
        first = 0
        while first < len(ids):
            left, batch = chunk_tokens, []
            for b in range(first, len(ids)):
                count = len(ids[b]) - done[b]
                if not whole:
                    count = min(count, left)
                elif batch and count > left:
                    break
                batch.append((b, done[b], count))
                done[b] += count
                left -= count
                if left <= 0:
                    break
            counts = [count for _, _, count in batch]
            ends = [sum(counts[: i + 1]) - 1 for i in range(len(counts))]
            last = [(end, b) for end, (b, _, _) in zip(ends, batch, strict=True) if done[b] == len(ids[b])]
            device = ids[0].device
            out = self.step(
                torch.cat([ids[b][at : at + count] for b, at, count in batch]),
                torch.cat([positions[b][at : at + count] for b, at, count in batch]),
                [sequences[b] for b, _, _ in batch],
                counts,
                torch.tensor([end for end, _ in last], dtype=torch.long, device=device),
            )
            for (_, b), row in zip(last, out, strict=False):
                logits[b] = row
            first = next((b for b in range(first, len(ids)) if done[b] < len(ids[b])), len(ids))
        return torch.stack(logits)
