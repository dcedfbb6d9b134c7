"""Executor `graphs` (CUDA): the modules executor, with decode steps replayed from captured graphs.

A decode step (one token a sequence) of B sequences runs in the smallest bucket that holds it. A bucket has
tensors of its own for ids, positions, tables and lengths; a step copies its inputs there and replays. Rows
that fill a bucket up read and write a scratch page, so that they touch nobody's past. Everything else -
prefill, chunks, verification, buckets not captured - runs as modules. What a graph points to is compared at
each step (the pool's storage, the width of the tables): a mismatch captures anew.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from hfaccel.attention.backend import Step, packed
from hfaccel.cache.paged import StepCache
from hfaccel.cache.pool import PagePool, Sequence
from hfaccel.runtime import Unsupported
from hfaccel.runtime.modules import Modules

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
BLOCKS = 64  # tables are widened by this many pages at a time, so that growth seldom captures anew


def capture_cuda(run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
    """Warm up and capture `run`: (replay, the tensor that holds its result)."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    return graph.replay, out


class _Bucket:
    """Static inputs of `size` decode rows, and the graph over them."""

    def __init__(self, size: int, blocks: int, device: torch.device):
        self.ids = torch.zeros(size, dtype=torch.long, device=device)
        self.positions = torch.zeros(size, dtype=torch.long, device=device)
        self.tables = torch.full((size, blocks), -1, dtype=torch.int32, device=device)
        self.starts = torch.arange(size + 1, dtype=torch.int32, device=device)
        self.lengths = torch.ones(size, dtype=torch.int32, device=device)
        self.slots = torch.zeros(size, dtype=torch.long, device=device)
        self.replay: Callable[[], None] | None = None
        self.out: torch.Tensor | None = None

    def fill(self, ids, positions, tables, lengths, scratch: int, page_tokens: int) -> None:
        rows, width = tables.shape
        self.ids.zero_()[:rows] = ids
        self.positions.zero_()[:rows] = positions
        self.tables.fill_(-1)[:rows, :width] = tables
        self.tables[rows:, 0] = scratch
        self.lengths.fill_(1)[:rows] = lengths
        last = self.lengths.long() - 1
        page = torch.take_along_dim(self.tables, (last // page_tokens)[:, None], dim=1)[:, 0].long()
        self.slots.copy_(page * page_tokens + last % page_tokens)


class Graphs(Modules):
    """See the module. `capture` and `device` are what a test without a GPU replaces."""

    name = "graphs"

    def __init__(self, model: nn.Module, *, capture=capture_cuda, device: str = "cuda"):
        if model.device.type != device:
            raise Unsupported(f"the model is on {model.device}")
        super().__init__(model)
        if self.mode != "packed":
            raise Unsupported(f"{self.why_rows}: decode cannot be captured")
        self.capture = capture
        self.buckets: dict[int, _Bucket] = {}
        self.captures = self.replays = 0
        self._of: tuple | None = None
        self._scratch: Sequence | None = None

    def step(self, pool, ids, positions, block_tables, q_starts, lengths, rows, *, hidden=False):
        """As `Modules.step`; decode of all rows in order is replayed."""
        count = ids.shape[0]
        decode = count == lengths.shape[0] == rows.shape[0] <= BUCKETS[-1] and not hidden and count
        if not decode or self.mode != "packed" or not self.verified:
            return super().step(pool, ids, positions, block_tables, q_starts, lengths, rows, hidden=hidden)
        if self._scratch is None or not self._scratch.pages or self._scratch.pool is not pool:
            self._scratch = Sequence(pool)
            self._scratch.extend(1)
        try:
            return self._decode(pool, ids, positions, block_tables, lengths)[rows]
        finally:
            self._scratch.free()  # the page stays zero-length for others; taken anew for the next step
            self._scratch = None

    def _decode(self, pool: PagePool, ids, positions, block_tables, lengths) -> torch.Tensor:
        count = ids.shape[0]
        size = next(b for b in BUCKETS if b >= count)
        blocks = -(-block_tables.shape[1] // BLOCKS) * BLOCKS
        if self._of != (id(pool), pool.version, blocks):
            self.buckets.clear()
            self._of = (id(pool), pool.version, blocks)
        bucket = self.buckets.get(size)
        if bucket is None:
            bucket = self.buckets[size] = _Bucket(size, blocks, ids.device)
        bucket.fill(ids, positions, block_tables, lengths, self._scratch.pages[0], pool.page_tokens)
        if bucket.replay is None:
            bucket.replay, bucket.out = self.capture(lambda: self._run(pool, bucket))
            self.captures += 1
        bucket.replay()
        self.replays += 1
        return bucket.out[:count].clone()

    def _run(self, pool: PagePool, bucket: _Bucket) -> torch.Tensor:
        """The forward that a graph holds: no shape and no branch depends on what the tensors contain."""
        step = Step(
            bucket.tables,
            bucket.starts,
            bucket.lengths,
            bucket.slots,
            pool.page_tokens,
            rows=self._rows(bucket),
        )
        cache = StepCache(pool, self.layers)
        cache.step = step
        every = torch.arange(bucket.ids.shape[0], device=bucket.ids.device)
        with packed(step):
            return self._forward(bucket.ids, bucket.positions, cache, every, False)

    @staticmethod
    def _rows(bucket: _Bucket) -> list | None:
        """What only the PyTorch backend reads, and a kernel on a GPU does not: no look at the lengths
        there."""
        return [] if bucket.ids.device.type == "cuda" else None
