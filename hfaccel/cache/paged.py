"""The face that transformers sees: a `Cache` whose rows are sequences of a page pool.

Two users. `PagedCache` serves transformers' own loops and scripts that pass, crop, reorder or copy a cache:
one row per sequence of the batch, all rows of the same logical length, padding included. `StepCache` serves
one packed forward of the runner: one row of T tokens that belong to many sequences.

Either hands itself over inside `update`: attention functions registered by `attention.backend` find the pages
in their kwargs and never see dense K or V; models that do not pass kwargs on get the dense form.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from itertools import accumulate

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from hfaccel.attention import backend
from hfaccel.attention.backend import KEY, Step
from hfaccel.cache.pool import PagePool, Sequence
from hfaccel.errors import PatchError


class NotPackable(Exception):
    """A forward cannot be packed: the model bypasses what makes it right. Names what."""


class PagedLayer(CacheLayerMixin):
    """One layer of a paged cache; what changes rows goes through the cache, since all layers share its
    pages."""

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, cache: Cache, index: int):
        self._cache, self.index = weakref.ref(cache), index
        self.seen = 0  # logical length that this layer has stored
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None: ...

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        return self._cache().update(key_states, value_states, self.index, *args, **kwargs)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return self._cache().layer_length(self.index)

    def get_max_length(self) -> int:
        return -1

    @property
    def keys(self) -> torch.Tensor | None:
        return self._cache().dense(self.index)[0] if self.seen else None

    @property
    def values(self) -> torch.Tensor | None:
        return self._cache().dense(self.index)[1] if self.seen else None

    def _refuse(self, *args, **kwargs):
        raise PatchError(
            "the layers of a paged cache share their pages: call this on the cache, not on a layer"
        )

    reset = crop = reorder_cache = batch_repeat_interleave = batch_select_indices = offload = prefetch = (
        _refuse
    )


def _drop(pool: PagePool, sequences: list[Sequence]) -> None:
    pool.drop(sequences)
    sequences.clear()


class PagedCache(Cache):
    """A batch of sequences over a pool, in the shape that transformers' loops expect.

    Args:
        pool: where the pages are; given back when the cache is released or collected.
        layers: how many layers the model has.
        sequences, pads: rows that exist already, and how many masked slots each has in front of its first
            token: those are counted in the length, hold nothing and read as zeros. Pads without sequences
            speak of the rows of the first forward, whose masks say no more than that (`pads_are_mask`):
            they are not computed with, and no mask is.
        real: [B, n] bool, which of the first n slots of each row hold a token, where masked slots lie
            elsewhere than in front; None where they do not.
    """

    def __init__(
        self,
        pool: PagePool,
        layers: int,
        *,
        sequences: list[Sequence] | None = None,
        pads: list[int] | None = None,
        dtype: torch.dtype | None = None,
        real: torch.Tensor | None = None,
    ):
        super().__init__(layers=[PagedLayer(self, i) for i in range(layers)])
        self.pool, self.dtype = pool, dtype
        self.sequences: list[Sequence] = sequences or []
        self.pads = pads or [0] * len(self.sequences)
        self.real = real
        self.pads_are_mask = bool(pads) and not self.sequences
        self._step: tuple[int, int, Step] | None = None
        self._ours: set[int] = set()  # layers whose keys our attention function got, see `_without_kwargs`
        rows = () if self.pads_are_mask else zip(self.pads, self.sequences, strict=True)
        lengths = {pad + s.length for pad, s in rows}
        if len(lengths) > 1:
            raise PatchError(f"the rows of a cache have one length, padding included, not {sorted(lengths)}")
        for layer in self.layers:
            layer.seen = max(lengths, default=0)
        self._finalizer = weakref.finalize(self, _drop, pool, self.sequences)

    # -- what transformers calls

    def update(self, key_states, value_states, layer_idx, *args, kwargs=None, **unused):
        """Store k, v [B, G, L, D]; hand the pages to the attention function, or return dense K and V."""
        layer = self.layers[layer_idx]
        batch, _, length, _ = key_states.shape
        self.dtype = key_states.dtype
        if not self.sequences:
            self.sequences.extend(Sequence(self.pool, expect_tokens=2 * length) for _ in range(batch))
            self.pads = self.pads or [0] * batch
        if not batch == len(self.sequences) == len(self.pads):
            raise PatchError(f"the cache holds {len(self.sequences)} rows, the forward has {batch}")
        step = self._next(layer.seen, length, key_states.device)
        packed = [x.transpose(1, 2).flatten(0, 1) for x in (key_states, value_states)]
        if step.real is not None:
            packed = [x[step.real] for x in packed]
        with self.pool.lock:  # a thread that grows the pool copies the pages
            pages = self.pool.layer(layer_idx, key_states.transpose(1, 2), value_states.transpose(1, 2))
            pages.write(*packed, step.slots)
        layer.seen += length
        cache = weakref.proxy(self)  # views outlive a forward whose attention does not take them
        view = (step, pages, lambda dtype: cache.dense(layer_idx, dtype))
        if kwargs is not None:
            kwargs[KEY] = view
            return key_states, value_states
        return self._without_kwargs(layer_idx, key_states, value_states, view)

    def _without_kwargs(self, layer: int, key_states, value_states, view):
        """For models that do not say which attention call is meant: dense K and V, until every layer has
        been seen to hand them to our attention function; from then on pages, as for all others."""
        if len(self._ours) == len(self.layers):
            if backend.refused(view[0]):
                raise PatchError("the model's attention was changed while a paged cache was in use")
            backend.offer(key_states, view, lambda: None)
            return key_states, value_states
        dense = self.dense(layer, key_states.dtype)
        ours = self._ours
        backend.offer(dense[0], None, lambda: ours.add(layer))
        return dense

    def _next(self, seen: int, length: int, device: torch.device) -> Step:
        """The step that appends `length` slots behind `seen`: made by the first layer, used by all."""
        if self._step is not None and self._step[:2] == (seen, length):
            return self._step[2]
        size = self.pool.page_tokens
        for pad, sequence in zip(self.pads, self.sequences, strict=True):
            missing = seen + length - pad - sequence.length
            if missing > 0:
                sequence.extend(missing)
        table = self._table(device)
        starts = [seen - pad for pad in self.pads]
        ends = [0, *accumulate(min(length, max(0, start + length)) for start in starts)]
        position = torch.tensor(starts, device=device)[:, None] + torch.arange(length, device=device)
        page = torch.take_along_dim(table, position.clamp_min(0) // size, dim=1).long()
        slots, real = (page * size + position % size).flatten(), None
        if min(starts) < 0:
            real = (position >= 0).flatten().nonzero().flatten()
            slots = slots[real]
        step = Step(
            table,
            torch.tensor(ends, dtype=torch.int32, device=device),
            torch.tensor([max(0, start + length) for start in starts], dtype=torch.int32, device=device),
            slots,
            size,
            real=real,
            pads_are_mask=self.pads_are_mask,
        )
        self._step = (seen, length, step)
        return step

    def _table(self, device: torch.device) -> torch.Tensor:
        blocks = max((len(s.pages) for s in self.sequences), default=1)
        table = torch.full((len(self.sequences), max(blocks, 1)), -1, dtype=torch.int32)
        for row, sequence in zip(table, self.sequences, strict=True):
            row[: len(sequence.pages)] = torch.tensor(sequence.pages, dtype=torch.int32)
        return table.to(device)

    def dense(self, layer: int, dtype: torch.dtype | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """A copy of a layer's K [B, G, S, D] and V [B, G, S, Dv]; zeros where a row is padded."""
        pages, length, size = self.pool.layers[layer], self.layers[layer].seen, self.pool.page_tokens
        table = self._table(pages.k.device)
        real = self._real(length, table.device)
        inside = real[:, None, :, None]
        position = (real.cumsum(-1) - 1).clamp_min(0)
        slots = torch.take_along_dim(table, position // size, dim=1).long() * size + position % size
        k, v = pages.read(slots, dtype or self.dtype or pages.k.dtype)
        return k.transpose(1, 2) * inside, v.transpose(1, 2) * inside

    def _real(self, length: int, device: torch.device) -> torch.Tensor:
        """[B, length] bool, which slots hold a token."""
        if self.real is not None:
            after = self.real.new_ones(len(self.real), max(0, length - self.real.shape[1]))
            return torch.cat([self.real[:, :length], after], dim=1).to(device)
        return torch.arange(length, device=device) >= torch.tensor(self.pads, device=device)[:, None]

    def layer_length(self, layer: int) -> int:
        return self.layers[layer].seen

    @property
    def batch_size(self) -> int:
        return len(self.sequences) or -1

    # -- rows

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens of every row."""
        tokens_to_remove = int(tokens_to_remove)  # a tensor in 5.17, which the layers would share
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes a number of tokens to remove as 0 or less, not {tokens_to_remove}")
        if tokens_to_remove:
            length = self.get_seq_length() + tokens_to_remove
            if length < 0:
                raise PatchError(f"cannot crop {-tokens_to_remove} of {self.get_seq_length()} tokens")
            kept = self._real(length, torch.device("cpu")).sum(-1).tolist()
            for keep, sequence in zip(kept, self.sequences, strict=True):
                sequence.rollback(sequence.length - keep)
            self.pads = [length - keep for keep in kept]
            self.real = None if self.real is None else self.real[:, :length]
            self._set(length)

    def _set(self, length: int) -> None:
        self._step = None
        for layer in self.layers:
            layer.seen = length

    def rollback(self, rows: list[int], tokens: list[int]) -> None:
        """Forget the last `tokens[i]` tokens of row `rows[i]`: what is left moves to the end of the row, so
        that all rows keep one length; the freed slots in front count as padding."""
        if self.real is not None:
            raise PatchError("rows with masked slots between their tokens cannot be rolled back one by one")
        for row, count in zip(rows, tokens, strict=True):
            self.sequences[row].rollback(count)
            self.pads[row] += count
        spare = min(self.pads, default=0)
        self.pads = [pad - spare for pad in self.pads]
        self._set(self.get_seq_length() - spare)

    def _replace(self, rows: list[int]) -> None:
        old, pads = list(self.sequences), self.pads
        new = [old[row].fork() for row in rows]
        self.sequences[:] = new  # in place: the finalizer watches this list
        self.pads = [pads[row] for row in rows]
        self.real = None if self.real is None else self.real[rows]
        self._step = None
        for sequence in old:
            sequence.free()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i becomes what row beam_idx[i] was; only tables move, pages are shared until written."""
        if self.sequences:
            self._replace(beam_idx.tolist())

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if indices.dtype == torch.bool:
            indices = indices.nonzero().flatten()
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._replace([row for row in range(len(self.sequences)) for _ in range(repeats)])

    def reset(self) -> None:
        while self.sequences:
            self.sequences.pop().free()
        self.pads, self.real = [], None
        self._set(0)

    def release(self) -> None:
        """Return all pages; the cache is empty afterwards and may be used again."""
        self.reset()

    def __deepcopy__(self, memo) -> PagedCache:
        """The same past on shared pages: a copy costs no memory until one of the two writes."""
        twin = PagedCache(
            self.pool,
            len(self.layers),
            sequences=[s.fork() for s in self.sequences],
            pads=copy.copy(self.pads),
            dtype=self.dtype,
            real=self.real,
        )
        memo[id(self)] = twin
        return twin


class StepCache(Cache):
    """The cache argument of one packed forward: writes the T new tokens, hands `Step` to the attention
    calls."""

    def __init__(self, pool: PagePool, layers: int):
        super().__init__(layers=[PagedLayer(self, i) for i in range(layers)])
        self.pool = pool
        self.step: Step | None = None
        self.length = 0  # what masks and positions count from, in row-by-row forwards
        self.dense_rows: Callable | None = None  # for models whose attention is not ours
        self.writes = 0

    def update(self, key_states, value_states, layer_idx, *args, kwargs=None, **unused):
        k, v = key_states[0].transpose(0, 1), value_states[0].transpose(0, 1)  # [T, G, D]
        pages = self.pool.layer(layer_idx, k, v)
        pages.write(k, v, self.step.slots)
        self.writes += 1
        if self.dense_rows is not None:
            return self.dense_rows(pages, key_states.dtype)
        if kwargs is None:
            self.step.pending = (key_states, pages)
        else:
            kwargs[KEY] = (self.step, pages, self._refuse)
        return key_states, value_states

    @staticmethod
    def _refuse(dtype):
        raise NotPackable("its attention brings a mask of its own")

    def layer_length(self, layer: int) -> int:
        return self.length
