"""Executor `graphs` (CUDA): the modules executor, with decode steps replayed from captured graphs.

A decode step (one token a sequence) of B sequences runs in the smallest bucket that holds it. A bucket has
tensors of its own for ids, positions, tables and lengths; a step copies its inputs there and replays. Rows
that fill a bucket up read and write a scratch page, so that they touch nobody's past. Steps with adapters
have buckets of their own, which say each row's slot too; one graph serves whatever adapters the slots hold.
Everything else - prefill, chunks, verification, buckets not captured - runs as modules. What a graph points
to is compared at each step (the storage of the pool and of the adapters' tables): a mismatch captures anew. A
model that cannot be captured, because its forward looks at what tensors hold, is found out at the first try
and runs as modules from then on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import nn

from hfaccel.attention.backend import Step, packed
from hfaccel.cache.paged import StepCache
from hfaccel.cache.pool import PagePool, Sequence
from hfaccel.errors import PatchError
from hfaccel.lora.slots import AdapterSlots
from hfaccel.runtime import Unsupported
from hfaccel.runtime.modules import Modules
from hfaccel.runtime.runner import strict

log = logging.getLogger("hfaccel")

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
BLOCKS = 64  # tables are widened by this many pages at a time, so that growth seldom captures anew
MOST_GRAPHS = 32  # kept at once, the oldest goes first


def capture_cuda(run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
    """Warm up and capture `run`: (replay, the tensor that holds its result)."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()  # compiles kernels and makes workspaces, which a capture may not
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # What other threads do on the device meanwhile is no part of this capture and no fault of it.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = run()
    return graph.replay, out


class _Bucket:
    """Static inputs of `size` decode rows, and the graph over them; `lora`: rows may have adapters."""

    def __init__(self, size: int, blocks: int, lora: bool, device: torch.device):
        self.ids = torch.zeros(size, dtype=torch.long, device=device)
        self.positions = torch.zeros(size, dtype=torch.long, device=device)
        self.tables = torch.full((size, blocks), -1, dtype=torch.int32, device=device)
        self.starts = torch.arange(size + 1, dtype=torch.int32, device=device)
        self.lengths = torch.ones(size, dtype=torch.int32, device=device)
        self.slots = torch.zeros(size, dtype=torch.long, device=device)
        self.every = torch.arange(size, device=device)
        self.adapters = torch.full((size,), -1, dtype=torch.int32, device=device) if lora else None
        self.replay: Callable[[], None] | None = None
        self.out: torch.Tensor | None = None

    def fill(self, ids, positions, tables, lengths, adapters, scratch: int, page_tokens: int) -> None:
        """Copy a step's inputs in; nothing here waits for the device."""
        rows, width = tables.shape
        self.ids.zero_()[:rows] = ids
        self.positions.zero_()[:rows] = positions
        self.tables.fill_(-1)[:rows, :width] = tables
        self.tables[rows:, 0] = scratch
        self.lengths.fill_(1)[:rows] = lengths
        if self.adapters is not None:
            self.adapters.fill_(-1)[:rows] = adapters
        last = self.lengths.long() - 1
        page = torch.take_along_dim(self.tables, (last // page_tokens)[:, None], dim=1)[:, 0].long()
        self.slots.copy_(page * page_tokens + last % page_tokens)


class Graphs(Modules):
    """See the module. `capture` and `device` are what a test without a GPU replaces."""

    name = "graphs"

    def __init__(
        self,
        model: nn.Module,
        lora: AdapterSlots | None = None,
        *,
        capture=capture_cuda,
        device: str = "cuda",
    ):
        if model.device.type != device:
            raise Unsupported(f"the model is on {model.device}")
        super().__init__(model, lora)
        if self.mode != "packed":
            raise Unsupported(f"{self.why_rows}: decode cannot be captured")
        self.capture = capture
        # (rows, width of the tables, whether rows have adapters), oldest first
        self.buckets: dict[tuple[int, int, bool], _Bucket] = {}
        self.captures = self.replays = 0
        self.why_not = ""  # what a capture failed with
        self._of: tuple[PagePool, int, int] | None = None

    def step(
        self, pool, ids, positions, block_tables, q_starts, lengths, rows, *, hidden=False, adapters=None
    ):
        """As `Modules.step`; decode of all rows is replayed. Every sequence has a new token (the runner sends
        no others), so that as many tokens as sequences means one each."""
        args = (pool, ids, positions, block_tables, q_starts, lengths, rows)
        count = ids.shape[0]
        decode = 0 < count == lengths.shape[0] == rows.shape[0] <= BUCKETS[-1] and not hidden
        if not decode or self.mode != "packed" or not self.verified or self.why_not:
            return super().step(*args, hidden=hidden, adapters=adapters)
        self._check(adapters)
        size = next(b for b in BUCKETS if b >= count)
        scratch = None
        try:
            if size > count:
                scratch = Sequence(pool)
                scratch.extend(1)  # before the pool's version is looked at: it may grow
            bucket = self._bucket(pool, size, block_tables.shape[1], adapters is not None, ids.device)
            page = scratch.pages[0] if scratch is not None else 0
            bucket.fill(ids, positions, block_tables, lengths, adapters, page, pool.page_tokens)
            if bucket.replay is None and not self._capture(pool, bucket):
                return super().step(*args, adapters=adapters)
            bucket.replay()
            self.replays += 1
            return bucket.out[:count][rows]  # a copy: the next replay writes over it
        except PatchError:  # no page to spare for rows that fill up
            if scratch is None or scratch.pages:
                raise
            return super().step(*args, adapters=adapters)
        finally:
            if scratch is not None:
                scratch.free()

    def _bucket(self, pool: PagePool, size: int, width: int, lora: bool, device: torch.device) -> _Bucket:
        now = (pool, pool.version, 0 if self.lora is None else self.lora.version)
        if self._of != now:
            self.buckets.clear()
            self._of = now
        key = (size, -(-width // BLOCKS) * BLOCKS, lora)
        if key not in self.buckets:
            while len(self.buckets) >= MOST_GRAPHS:
                del self.buckets[next(iter(self.buckets))]
            self.buckets[key] = _Bucket(*key, device)
        return self.buckets[key]

    def _capture(self, pool: PagePool, bucket: _Bucket) -> bool:
        """Whether the bucket has a graph now."""
        try:
            bucket.replay, bucket.out = self.capture(lambda: self._run(pool, bucket))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # CUDA's word for an operation that may not be captured
            if strict():
                raise PatchError(f"HFACCEL_STRICT=1: decode cannot be captured: {error}") from error
            self.why_not = f"decode cannot be captured: {str(error).splitlines()[0]}"
            self.why_rows = self.why_not
            self.buckets.clear()
            log.info("%s: %s", type(self.model).__name__, self.why_not)
            return False
        self.captures += 1
        return True

    def _run(self, pool: PagePool, bucket: _Bucket) -> torch.Tensor:
        """The forward that a graph holds: no shape and no branch depends on what the tensors contain."""
        step = Step(bucket.tables, bucket.starts, bucket.lengths, bucket.slots, pool.page_tokens)
        cache = StepCache(pool, self.layers)
        cache.step = step
        with packed(step):
            return self._forward(bucket.ids, bucket.positions, cache, bucket.every, False, bucket.adapters)
