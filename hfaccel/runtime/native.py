"""Executor `native`: a whole step in C++ with one call from Python (kernels' csrc/plan.cpp walks the plan).

The plan is a view: records point into the modules' own tensors. Whoever keeps an executor compares the
runner's fingerprint at each request and builds a new one on a mismatch; tensors that were replaced stay alive
as long as the plan that points at them.
"""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass

import torch
from torch import nn

from hfaccel.cache.pool import PagePool
from hfaccel.errors import PatchError
from hfaccel.lora.slots import AdapterSlots
from hfaccel.runtime import Unsupported
from hfaccel.runtime.plan import ASKED, Op, Plan
from hfaccel.runtime.plan_abi import PAGES_I8, Encoded, Pages, Step, bind
from hfaccel.runtime.plan_build import build
from hfaccel_kernels import dispatch, native

REPLICATE_TOKENS = 2  # steps up to this size do row records in every thread; see csrc/plan.h

# Return values of hfa_plan_run: csrc/plan_check.h's Error
_ARENA = 8
_REFUSALS = {
    2: "the step's sizes contradict each other",
    3: "a token id outside the vocabulary of {vocab}",
    4: "a position that is negative or beyond the model's table of {max_positions}",
    5: "a sequence shorter than its new tokens",
    6: "a block table entry outside the pool of {pages} pages",
    7: "a row outside the step",
    9: "pages that do not fit the model",
    10: "an adapter's slot that no table has",
}

_INPUTS = (  # fields of the step's struct, in the order of `step`'s arguments
    ("ids", torch.int64),
    ("positions", torch.int64),
    ("block_tables", torch.int32),
    ("q_starts", torch.int32),
    ("lengths", torch.int32),
    ("rows", torch.int64),
)


@dataclass
class Timing:
    """Nanoseconds of one record, in its own work and in its barriers, over the profiled steps."""

    op: Op
    work_ns: int
    wait_ns: int


class Native:
    """Runs steps of one plan. Thread-safe: a step holds the lock, scratch memory belongs to it.

    Args:
        plan: of `model`, checked (`Plan.check`); default: a new one.
        lora: adapters that tokens may have, where a plan is built.
    Raises: Unsupported, with the reason: no C++ kernels, or a model that no plan describes.
    """

    name = "native"

    def __init__(self, model: nn.Module, plan: Plan | None = None, lora: AdapterSlots | None = None):
        try:
            self.library = native.library()
        except native.NativeError as error:
            raise Unsupported(f"C++ kernels: {error}") from error
        bind(self.library)
        self.model, self.lora = model, lora
        self.plan = build(model, lora=lora) if plan is None else plan
        self.lock = threading.Lock()
        self.replicate = REPLICATE_TOKENS
        self._encoded = Encoded(self.plan)
        self._hidden: Encoded | None = None
        self._step = Step(ahead=1)
        self._arena = torch.empty(0, dtype=torch.uint8)
        self._pages = None
        self._pages_of: tuple[PagePool, int] | None = None
        self._profile: dict[int, torch.Tensor] | None = None

    # -- what the runner calls

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
        """One step; arguments and result as `modules.Modules.step`.

        Raises: PatchError for ids, positions, rows or pages outside their range, before anything is written.
        """
        with self.lock:
            encoded = self._of(hidden)
            out = torch.empty(rows.shape[0], encoded.plan.out_width, dtype=encoded.plan.dtype)
            inputs = (ids, positions, block_tables, q_starts, lengths, rows)
            self._run(encoded, pool, inputs, out, adapters)
            return out

    def best(
        self,
        pool: PagePool,
        ids: torch.Tensor,
        positions: torch.Tensor,
        block_tables: torch.Tensor,
        q_starts: torch.Tensor,
        lengths: torch.Tensor,
        rows: torch.Tensor,
        *,
        top: int = 1,
        ahead: int = 1,
        ends: torch.Tensor | None = None,
        adapters: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A step, or a run of greedy steps, and the best candidates in place of all logits.

        Args:
            top: candidates of each asked row, best first; equal ones by id, NaN before all (as `argmax` and
                `topk` have it).
            ahead: steps to run, each with the best candidate of the one before as every sequence's next token
                (one token a sequence, rows 0 .. B - 1, top 1; the block tables reach to the last). It ends
                early after a step in which a row's best is in `ends` [E], or is no token that the
                embedding knows (a head may have more rows than it).
        Returns: values [steps run, R, top] fp32, their ids int64, and the last step's logits
            [R, vocab]. The tensors given are not changed.
        Raises: as `step`.
        """
        with self.lock:
            encoded, asked, step = self._encoded, rows.shape[0], self._step
            out = torch.empty(asked, encoded.plan.out_width, dtype=encoded.plan.dtype)
            values = torch.empty(ahead, asked, top)
            found = torch.empty(ahead, asked, top, dtype=torch.int64)
            if ahead > 1:  # moved on in place
                ids, positions, lengths = ids.clone(), positions.clone(), lengths.clone()
            step.best, step.best_ids = values.data_ptr(), found.data_ptr()
            step.top, step.ahead = top, ahead
            if ends is not None:
                ends = ends.to(torch.int64).contiguous()
                step.ends, step.ends_count = ends.data_ptr(), ends.shape[0]
            try:
                inputs = (ids, positions, block_tables, q_starts, lengths, rows)
                self._run(encoded, pool, inputs, out, adapters)
            finally:
                step.top, step.ahead, step.ends, step.ends_count = 0, 1, None, 0
            return values[: step.done], found[: step.done], out

    def _of(self, hidden: bool) -> Encoded:
        """The plan up to the logits, or to the hidden states."""
        if not hidden:
            return self._encoded
        if self._hidden is None:
            self._hidden = Encoded(build(self.model, hidden=True, lora=self.lora))
        return self._hidden

    def _run(
        self,
        encoded: Encoded,
        pool: PagePool,
        inputs: tuple[torch.Tensor, ...],
        out: torch.Tensor,
        adapters: torch.Tensor | None,
    ) -> None:
        """Fill the step's struct, run it, and grow the arena where it is short. Holds the lock."""
        step, plan, keep = self._step, encoded.plan, []
        for (field, dtype), tensor in zip(_INPUTS, inputs, strict=True):
            if tensor.dtype != dtype or not tensor.is_contiguous():
                tensor = tensor.to(dtype).contiguous()
                keep.append(tensor)
            setattr(step, field, tensor.data_ptr())
        ids, positions, block_tables, q_starts, lengths, rows = inputs
        one_each = positions.shape[0] == ids.shape[0] and block_tables.shape[0] == lengths.shape[0]
        if not one_each or q_starts.shape[0] != lengths.shape[0] + 1:
            raise PatchError(_REFUSALS[2])
        step.tokens, step.asked, step.sequences = ids.shape[0], rows.shape[0], lengths.shape[0]
        step.table_stride = block_tables.shape[1]
        step.logits, step.logits_ld = out.data_ptr(), plan.out_width
        step.logits_dtype = native.DTYPES[plan.dtype]
        step.threads, step.replicate = torch.get_num_threads(), self.replicate
        if self._pages_of is None or self._pages_of[0] is not pool or self._pages_of[1] != pool.version:
            self._find_pages(pool)
        step.adapters = None
        if adapters is not None:
            if adapters.shape != ids.shape:
                raise PatchError(_REFUSALS[2])
            adapters = adapters.to(torch.int32).contiguous()
            step.adapters = adapters.data_ptr()
        step.profile = self._profile_of(encoded)
        code = self.library.hfa_plan_run(ctypes.byref(encoded.c), ctypes.byref(step))
        if code == _ARENA:
            bytes_ = self.library.hfa_plan_arena(ctypes.byref(encoded.c), ctypes.byref(step))
            self._arena, step.arena, step.arena_bytes = None, None, 0  # free before allocating the larger one
            self._arena = torch.empty(bytes_ + bytes_ // 4, dtype=torch.uint8)
            step.arena, step.arena_bytes = self._arena.data_ptr(), self._arena.numel()
            code = self.library.hfa_plan_run(ctypes.byref(encoded.c), ctypes.byref(step))
        if code:
            raise PatchError(
                _REFUSALS.get(code, f"native step failed with {code}").format(
                    vocab=plan.vocab, max_positions=plan.max_positions, pages=step.pages_count
                )
            )

    def _find_pages(self, pool: PagePool) -> None:
        layers = self.plan.layers()
        array = (Pages * len(layers))()
        count = pool.capacity
        for c, op in zip(array, layers.values(), strict=True):
            pages = pool.ensure_layer(
                op.layer, op.k.count, op.k.size, op.v.size, self.plan.dtype, torch.device("cpu")
            )
            c.k, c.v = pages.k.data_ptr(), pages.v.data_ptr()
            c.kv_heads, c.k_size, c.v_size = op.k.count, op.k.size, op.v.size
            if pages.k_scale is None:
                c.dtype = native.DTYPES[pages.k.dtype]
            else:
                c.dtype = PAGES_I8
                c.k_scale, c.v_scale = pages.k_scale.data_ptr(), pages.v_scale.data_ptr()
            count = min(count, pages.k.shape[0])
        self._pages = array
        self._step.pages = ctypes.addressof(array)
        self._step.pages_count, self._step.page_tokens = count, pool.page_tokens
        self._pages_of = (pool, pool.version)  # the pool itself: another may get its number

    def buffers(self) -> list[torch.Tensor | None]:
        """What the last step left in each fp32 buffer, [rows, width]; only after steps with `replicate` 0."""
        step, plan = self._step, self.plan
        offsets = torch.zeros(len(plan.buffers), dtype=torch.int64)
        self.library.hfa_plan_offsets(ctypes.byref(self._encoded.c), ctypes.byref(step), offsets.data_ptr())
        found: list[torch.Tensor | None] = []
        for buffer, at in zip(plan.buffers, offsets.tolist(), strict=True):
            rows = (step.asked if buffer.rows == ASKED else step.tokens) * buffer.per_row
            size = rows * buffer.width * 4
            raw = self._arena[at : at + size] if buffer.kind in ("f32", "i32") else None
            dtype = torch.float32 if buffer.kind == "f32" else torch.int32
            found.append(None if raw is None else raw.view(dtype).view(rows, buffer.width).clone())
        return found

    # -- timing

    def profile(self, on: bool = True) -> None:
        """Start (from zero) or stop to time every record, as thread 0 sees it."""
        with self.lock:
            self._profile = {} if on else None

    def timings(self) -> list[Timing]:
        """What the profiled steps took, record by record."""
        found = self._profile or {}
        ns = found.get(id(self._encoded))
        ns = ns.tolist() if ns is not None else [[0, 0]] * len(self.plan.ops)
        return [Timing(op, work, wait) for op, (work, wait) in zip(self.plan.ops, ns, strict=True)]

    def _profile_of(self, encoded: Encoded) -> int | None:
        if self._profile is None:
            return None
        if id(encoded) not in self._profile:
            self._profile[id(encoded)] = torch.zeros(len(encoded.plan.ops), 2, dtype=torch.int64)
        return self._profile[id(encoded)].data_ptr()


def executor(model: nn.Module, lora: AdapterSlots | None = None) -> Native:
    """The executor of a CPU model; `lora`: adapters that tokens may have.

    Raises: Unsupported, with the reason: another device or backend, else as `Native`.
    """
    if model.device.type != "cpu":
        raise Unsupported(f"the model is on {model.device}")
    if (backend := dispatch.forced()) not in ("auto", "native"):
        raise Unsupported(f"HFACCEL_BACKEND={backend}")
    return Native(model, lora=lora)
