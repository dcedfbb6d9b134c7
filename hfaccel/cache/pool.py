"""Pages of keys and values, who owns them, and the sequences that read and write through them.

A layer's pages are one tensor [capacity, page_tokens, G, D] for K and one for V (int8 codes with fp32 scales
[capacity, page_tokens, G] beside them when `bits` is 8): contiguous, so that a native kernel needs one
pointer a layer. A layer's shape is fixed by its first write, so layers may differ in heads and head sizes.

Capacity grows on demand by half, layer by layer, copying what is in use; `reserve` sizes it once for a known
job. On CPU fresh pages come from calloc: the operating system backs them when they are first written, so
capacity costs address space, not memory. When the last sequence is freed, all storage goes back.

A sequence claims a stretch of pages it expects to need: others take them only when nothing else is free, so
that sequences do not interleave and a reader sees one view per sequence. A pool that grows on demand grows
rather than touch another's claim; one with a budget gives claimed pages away before it refuses.

A cache that nobody holds any more is freed by the garbage collector, which may run in the middle of anything
here: it only puts the sequences down (`drop`), and the next call that starts takes them up.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from dataclasses import dataclass

import numpy as np
import torch

from hfaccel.errors import PatchError
from hfaccel_kernels.pages import cache_write, dequantize_kv


@dataclass
class LayerPages:
    """Storage of one layer: k [capacity, page_tokens, G, D], v [capacity, page_tokens, G, Dv], scales or
    None."""

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None

    def tensors(self) -> list[torch.Tensor]:
        return [x for x in (self.k, self.v, self.k_scale, self.v_scale) if x is not None]

    def write(self, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor | slice) -> None:
        """Store k [T, G, D] and v [T, G, Dv] at flat slots [T] (a slice where they follow each other)."""
        if isinstance(slots, slice):
            if self.k_scale is None:
                self.k.view(-1, *self.k.shape[2:])[slots] = k
                self.v.view(-1, *self.v.shape[2:])[slots] = v
                return
            slots = torch.arange(slots.start, slots.stop, device=k.device)
        cache_write(k, v, self.k, self.v, slots, self.k_scale, self.v_scale)

    def read(self, slots: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """K [*slots, G, D] and V [*slots, G, Dv] of any shape of flat slots, dequantized: a dense copy."""
        found = []
        for pages, scale in ((self.k, self.k_scale), (self.v, self.v_scale)):
            x = pages.view(-1, *pages.shape[2:])[slots]
            if scale is not None:
                x = dequantize_kv(x, scale.view(-1, scale.shape[2])[slots], dtype)
            found.append(x.to(dtype))
        return found[0], found[1]


@torch.inference_mode(False)  # pages outlive the call that grows them, and are written outside of it
def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros that the operating system backs with memory when they are first written, on CPU."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return torch.from_numpy(np.zeros(count, np.uint8)).view(dtype).view(shape)


class PagePool:
    """Pages of `page_tokens` slots for every layer of one model.

    Args:
        page_tokens: slots of a page.
        bits: 8 for int8 codes with per-token-and-head scales, None for the dtype of what is written.
        budget_pages: a fixed number of pages (a server), or None to grow on demand (generate).
    """

    def __init__(self, *, page_tokens: int = 16, bits: int | None = None, budget_pages: int | None = None):
        if page_tokens < 1:
            raise PatchError(f"page_tokens must be at least 1, not {page_tokens}")
        if bits not in (None, 8):
            raise PatchError(f"KV pages have 8 bits or the model's dtype (None), not {bits!r}")
        self.page_tokens, self.bits, self.budget_pages = page_tokens, bits, budget_pages
        self.layers: dict[int, LayerPages] = {}
        self.lock = threading.RLock()
        self._dropped: deque[Sequence] = deque()
        _POOLS.add(self)
        self.version = 0  # bumped whenever a storage pointer changes: what a native plan compares
        self._clear()

    def _clear(self) -> None:
        self.layers.clear()
        self.capacity = self.budget_pages or 0
        self.references = [0] * self.capacity
        self._busy = bytearray(self.capacity)  # 1 = in use or claimed
        self._claimed = bytearray(self.capacity)
        self.used_pages = 0
        self.version += 1

    # -- storage

    def layer(self, index: int, k: torch.Tensor, v: torch.Tensor) -> LayerPages:
        """The layer's pages, made for keys k [..., G, D] and values v [..., G, Dv] if this is its first
        write."""
        pages = self.layers.get(index)
        shape, dtype = k.shape[-2:], torch.int8 if self.bits == 8 else k.dtype
        if pages is None or pages.k.shape[2:] != shape or pages.k.dtype != dtype:
            pages = self.ensure_layer(index, *shape, v.shape[-1], k.dtype, k.device)
        return pages

    def ensure_layer(
        self, index: int, kv_heads: int, k_size: int, v_size: int, dtype: torch.dtype, device: torch.device
    ) -> LayerPages:
        """Storage for a layer of the given shape; refuses one that holds pages of another."""
        pages = self.layers.get(index)
        stored = torch.int8 if self.bits == 8 else dtype
        if pages is not None:
            want, have = (kv_heads, k_size, stored), (pages.k.shape[2], pages.k.shape[3], pages.k.dtype)
            if want != have or pages.v.shape[3] != v_size:
                raise PatchError(
                    f"layer {index}: the pages hold {have[0]} heads of {have[1]} in {have[2]}, "
                    f"not {want[0]} of {want[1]} in {want[2]}: the cache is of another model"
                )
            return pages
        with self.lock:
            shape = (self.capacity, self.page_tokens, kv_heads)
            pages = LayerPages(
                zeros((*shape, k_size), stored, device), zeros((*shape, v_size), stored, device)
            )
            if self.bits == 8:
                pages.k_scale = zeros(shape, torch.float32, device)
                pages.v_scale = zeros(shape, torch.float32, device)
            self.layers[index] = pages
            self.version += 1
            return pages

    def reserve(self, pages: int) -> None:
        """Make room for this many more pages now, in one growth."""
        with self.lock:
            self._settle()
            free = self.capacity - sum(self._busy)
            if self.budget_pages is None and free < pages:
                self._grow(self.capacity + pages - free)

    def _grow(self, capacity: int) -> None:
        if self.budget_pages is not None:
            raise PatchError(f"all {self.budget_pages} KV pages of {self.page_tokens} tokens are in use")
        extra = capacity - self.capacity
        kept = self._last_used() + 1
        self.version += 1  # before the first layer moves: growth may end half-way, out of memory
        for pages in self.layers.values():  # one layer at a time: the peak is one layer's copy
            for name in ("k", "v", "k_scale", "v_scale"):
                old = getattr(pages, name)
                if old is not None:
                    new = zeros((capacity, *old.shape[1:]), old.dtype, old.device)
                    new[:kept] = old[:kept]
                    setattr(pages, name, new)
        self.capacity = capacity
        self.references += [0] * extra
        self._busy += bytes(extra)
        self._claimed += bytes(extra)

    def _last_used(self) -> int:
        return max((p for p, count in enumerate(self.references) if count), default=-1)

    # -- pages

    @property
    def free_pages(self) -> int:
        return self.capacity - self.used_pages

    def claim(self, pages: int) -> range:
        """A stretch of free pages kept for one sequence, as long as nobody else needs them; may be empty."""
        with self.lock:
            self._settle()
            start = self._busy.find(bytes(pages)) if pages else -1
            if start < 0:
                if self.budget_pages is not None or not pages:
                    return range(0)
                start = self.capacity
                while start and not self._busy[start - 1]:
                    start -= 1
                self._grow(max(start + pages, self.capacity + self.capacity // 2))
            self._busy[start : start + pages] = b"\1" * pages
            self._claimed[start : start + pages] = b"\1" * pages
            return range(start, start + pages)

    def unclaim(self, claim: range) -> None:
        with self.lock:
            for page in claim:
                if page < self.capacity:
                    self._claimed[page] = 0
                    self._busy[page] = self.references[page] > 0

    def take(self, after: int | None, claim: range) -> int:
        """One free page with reference count 1: the one behind `after` or the first of the claim if it can
        be."""
        with self.lock:
            self._settle()
            page = after + 1 if after is not None else -1
            fits = 0 <= page < self.capacity and not self.references[page]
            if not (fits and (page in claim or not self._claimed[page])):
                page = next((p for p in claim if not self.references[p]), -1)
            if page < 0:
                page = self._busy.find(0)
                if page < 0 and self.budget_pages is None:
                    page = self.capacity
                    self._grow(self.capacity + max(4, self.capacity // 2))
                elif page < 0:  # only claimed pages are left
                    try:
                        page = self.references.index(0)
                    except ValueError:
                        self._grow(self.capacity + 1)
            self.references[page] = 1
            self._busy[page] = 1
            self.used_pages += 1
            return page

    def share(self, page: int) -> None:
        with self.lock:
            self.references[page] += 1

    def release(self, page: int) -> None:
        with self.lock:
            self.references[page] -= 1
            if not self.references[page]:
                self.used_pages -= 1
                self._busy[page] = self._claimed[page]

    def copy(self, source: int, target: int) -> None:
        """Copy a page of every layer: what a writer does to a page that others read."""
        with self.lock:
            for pages in self.layers.values():
                for x in pages.tensors():
                    x[target] = x[source]

    def trim(self) -> None:
        """Give all storage back if no page is in use."""
        with self.lock:
            self._settle()
            if not self.used_pages and not any(self._claimed):
                self._clear()

    def drop(self, sequences: list[Sequence]) -> None:
        """Free sequences from a finalizer: at once, or when who is using the pool has come to an end."""
        self._dropped.extend(sequences)
        if not self.lock._is_owned() and self.lock.acquire(blocking=False):
            try:
                self.trim()
            finally:
                self.lock.release()

    def _settle(self) -> None:
        while self._dropped:
            self._dropped.popleft().empty()

    def renewed(self) -> PagePool:
        """An empty pool of the same settings under the same lock; sequences stay with the old one."""
        twin = PagePool(page_tokens=self.page_tokens, bits=self.bits, budget_pages=self.budget_pages)
        twin.lock = self.lock
        return twin

    def bytes_per_token(self) -> int:
        """Bytes that one slot takes over all layers, from the tensors themselves."""
        return sum(
            x[0, 0].numel() * x.element_size() for pages in self.layers.values() for x in pages.tensors()
        )


_POOLS: weakref.WeakSet[PagePool] = weakref.WeakSet()


def _unlock() -> None:
    for pool in list(_POOLS):
        pool.lock = threading.RLock()


if hasattr(os, "register_at_fork"):  # whoever held a lock in the parent is not in the child
    os.register_at_fork(after_in_child=_unlock)


class Sequence:
    """The slots of one row: `length` tokens in `pages`, mirrored in `table` [>= len(pages)] int32, -1 unused.

    Forked sequences share full and partial pages; a shared page is copied when one of them writes into it.

    Args:
        expect_tokens: how long it is expected to grow, to place its pages next to each other.
    """

    def __init__(self, pool: PagePool, *, expect_tokens: int = 0):
        self.pool, self.length = pool, 0
        self.pages: list[int] = []
        self.table = np.full(8, -1, np.int32)
        self.claim = pool.claim(-(-expect_tokens // pool.page_tokens))

    def extend(self, tokens: int) -> None:
        """Make the next `tokens` slots writable: new pages, and a copy of the last one if it is shared.

        Either all slots are there afterwards or, after an error, the sequence is as it was.
        """
        pool, size = self.pool, self.pool.page_tokens
        before = self.length
        with pool.lock:
            try:
                if before % size and tokens:
                    last = before // size
                    shared = self.pages[last]
                    if pool.references[shared] > 1:
                        page = pool.take(None, self.claim)
                        try:
                            pool.copy(shared, page)
                        except BaseException:
                            pool.release(page)
                            raise
                        self._put(last, page)
                        pool.release(shared)
                while len(self.pages) * size < before + tokens:
                    after = self.pages[-1] if self.pages else None
                    self._put(len(self.pages), pool.take(after, self.claim))
            except BaseException:
                self.rollback(0)
                raise
            self.length = before + tokens

    def pages_for(self, tokens: int) -> int:
        """How many pages `extend` would take: new ones, and a copy of the last one if it is shared."""
        size = self.pool.page_tokens
        copied = self.length % size and self.pool.references[self.pages[self.length // size]] > 1
        return -(-(self.length + tokens) // size) - len(self.pages) + bool(copied)

    def _put(self, index: int, page: int) -> None:
        if index == len(self.pages):
            self.pages.append(page)
            if index == len(self.table):
                self.table = np.concatenate([self.table, np.full(index, -1, np.int32)])
        else:
            self.pages[index] = page
        self.table[index] = page

    def rollback(self, tokens: int) -> None:
        """Forget the last `tokens` tokens; pages that hold none of the rest are released."""
        if not 0 <= tokens <= self.length:
            raise PatchError(f"cannot roll back {tokens} of {self.length} tokens")
        with self.pool.lock:
            self.length -= tokens
            keep = -(-self.length // self.pool.page_tokens)
            while len(self.pages) > keep:
                self.table[len(self.pages) - 1] = -1
                self.pool.release(self.pages.pop())

    def fork(self, *, expect_tokens: int = 0) -> Sequence:
        """A second sequence with the same past, on the same pages."""
        with self.pool.lock:
            twin = Sequence(self.pool, expect_tokens=expect_tokens)
            twin.share(self.pages, self.length)
            return twin

    def share(self, pages: list[int], length: int) -> None:
        """Start this empty sequence with `length` tokens that lie in pages of others (a cached prefix)."""
        if self.pages or not 0 <= length <= len(pages) * self.pool.page_tokens:
            raise PatchError(
                f"cannot start a sequence of {len(self.pages)} pages with {length} shared tokens"
            )
        with self.pool.lock:
            for page in pages[: -(-length // self.pool.page_tokens)]:
                self.pool.share(page)
                self._put(len(self.pages), page)
            self.length = length

    def adopt(self, index: int, page: int) -> None:
        """Read a page of others, which holds the same tokens, in place of its own full page `index`."""
        if not (index + 1) * self.pool.page_tokens <= self.length:
            raise PatchError(f"page {index} of {self.length} tokens is not full: it is still written to")
        with self.pool.lock:
            self.pool.share(page)
            own = self.pages[index]
            self._put(index, page)
            self.pool.release(own)

    def empty(self) -> None:
        """Return every page and the claim; the pool keeps its storage."""
        with self.pool.lock:
            self.rollback(self.length)
            self.pool.unclaim(self.claim)
            self.claim = range(0)

    def free(self) -> None:
        """Return every page, and the storage of a pool that nobody uses; free to call again."""
        with self.pool.lock:
            self.empty()
            self.pool.trim()
