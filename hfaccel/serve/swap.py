"""Pages of preempted requests, kept in the memory of the host until these run again.

All pages of a victim are copied, as they are (codes and scales of quantized ones): those that the prefix tree
holds as well are the first to be evicted, since pages were short. When the victim returns, the full pages
that the tree still has are shared and the rest is copied back into fresh ones, so that it goes on from the
same bits. What does not fit `limit_bytes` is not kept, and is computed anew.

On CUDA the copies are in pinned memory and in the order of the stream: nothing waits for them.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from hfaccel.cache.pool import PagePool
from hfaccel.serve.requests import Request

log = logging.getLogger("hfaccel")


@dataclass
class Saved:
    """The pages of one sequence of `length` tokens.

    Attributes:
        layers: of each layer its tensors [pages, page_tokens, ...] in the order of `LayerPages.tensors`.
        version: of the weights that they were computed with.
        found: tokens that the tree still had when they were last copied back.
    """

    length: int
    version: object
    layers: dict[int, list[torch.Tensor]]
    bytes: int
    found: int = 0


class SwapSpace:
    """Saved pages of one pool, by request. Not thread-safe: it is the scheduler's.

    Attributes:
        used_bytes: held now. saved, restored: requests so far. refused: those beyond the limit.
    """

    def __init__(self, pool: PagePool, limit_bytes: int):
        self.pool, self.limit_bytes = pool, limit_bytes
        self._saved: dict[Request, Saved] = {}
        self.used_bytes = self.saved = self.restored = self.refused = 0

    def __len__(self) -> int:
        """Requests that it holds pages of."""
        return len(self._saved)

    def of(self, request: Request, version: object) -> Saved | None:
        """What is saved of a request; pages of other weights, or of storage that is gone, are let go of."""
        saved = self._saved.get(request)
        if saved is not None and (saved.version != version or saved.layers.keys() != self.pool.layers.keys()):
            self.drop(request)
            return None
        return saved

    def save(self, request: Request) -> bool:
        """Copy the pages of a request that runs. Returns: whether there was room for them."""
        self.drop(request)
        pages, pool = request.sequence.pages, self.pool
        if not pages:
            return False
        size = len(pages) * pool.page_tokens * pool.bytes_per_token()
        if self.used_bytes + size > self.limit_bytes:
            self.refused += 1
            return False
        try:
            with pool.lock:
                layers = {
                    index: [_out(x, pages) for x in layer.tensors()] for index, layer in pool.layers.items()
                }
        except (RuntimeError, MemoryError) as error:  # no memory left, or none that can be pinned
            log.warning("pages of a preempted request are computed anew: %s", str(error))
            self.refused += 1
            return False
        self._saved[request] = Saved(request.sequence.length, request.version, layers, size)
        self.used_bytes += size
        self.saved += 1
        return True

    def restore(self, request: Request) -> bool:
        """Append what is saved of a request to its sequence, which holds the full pages that the tree still
        has and for which there are free pages. The copies stay until they are dropped.

        Returns: whether it could; else the sequence is as it was, and nothing is saved any more.
        """
        saved, pool, sequence = self._saved[request], self.pool, request.sequence
        saved.found, first = sequence.length, len(sequence.pages)
        sequence.extend(saved.length - saved.found)
        try:
            with pool.lock:
                for index, kept in saved.layers.items():
                    for x, copy in zip(pool.layers[index].tensors(), kept, strict=True):
                        _back(x, sequence.pages[first:], copy[first:])
        except (RuntimeError, MemoryError) as error:
            log.warning("saved pages of a request are computed anew: %s", str(error))
            sequence.rollback(saved.length - saved.found)
            self.drop(request)
            return False
        self.restored += 1
        return True

    def drop(self, request: Request) -> None:
        """Let go of what is saved of a request, if anything is."""
        saved = self._saved.pop(request, None)
        if saved is not None:
            self.used_bytes -= saved.bytes

    def clear(self) -> None:
        """Let go of everything."""
        self._saved.clear()
        self.used_bytes = 0


def _out(x: torch.Tensor, pages: list[int]) -> torch.Tensor:
    """Rows `pages` of x [capacity, ...], in the host's memory."""
    rows = x[torch.tensor(pages, device=x.device)]
    if x.device.type != "cuda":
        return rows.cpu()
    return torch.empty(rows.shape, dtype=x.dtype, pin_memory=True).copy_(rows, non_blocking=True)


def _back(x: torch.Tensor, pages: list[int], copy: torch.Tensor) -> None:
    """Rows `pages` of x [capacity, ...] from a copy of them."""
    if pages:
        at = torch.tensor(pages, device=x.device)
        x.index_copy_(0, at, copy.to(x.device, non_blocking=True))
