"""The attention function that models call through transformers' `AttentionInterface`.

Two names are registered, and neither changes a model that does not ask for it:
    hfa        masks and dense attention as `sdpa` does them
    hfa_eager  masks and dense attention as `eager` does them, for models loaded that way
A call that reaches a paged cache finds it in its kwargs, where the cache's `update` put it (or knows it by
the key states that `update` returned), and attends over pages: K and V are the new tokens only. Where such a
call comes with a mask that says more than the cache does (holes, a pattern of the caller's own) the pages
are gathered and the former implementation serves. Every other call (training, `forward`, a user's own cache)
is exactly the implementation that the model had before.

The mask functions return None while a packed step runs in this thread: the step's own lengths say what each
query sees. What masks the model asked for meanwhile is noted, so that a model whose masks say more than its
attention calls (chunked attention, custom patterns) is found out and not packed.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from hfaccel.cache.pool import LayerPages
from hfaccel_kernels.paged import paged_attention, step_rows

NAMES = {"sdpa": "hfa", "eager": "hfa_eager"}  # implementation of the unpatched model -> ours
MARK, NOT_MARKED = "_hfa_window", -1  # attribute of a plain mask: its window, or None
KEY = "hfa_pages"  # where a paged cache layer puts its view into the attention call's kwargs


@dataclass
class Step:
    """What the attention of one packed forward needs, as tensors, and what it saw on the way.

    block_tables [B, max_blocks] int32 (-1 unused), q_starts [B + 1] int32, lengths [B] int32 counting the new
    tokens; `slots` are the flat slots of the T new tokens, [T] int64 or a slice where they follow each other.
    """

    block_tables: torch.Tensor
    q_starts: torch.Tensor
    lengths: torch.Tensor
    slots: torch.Tensor | slice
    page_tokens: int
    rows: list[tuple[int, int, int, int]] | None = None
    windows: list[int | None] = field(default_factory=list)  # of the attention calls
    masks: set[int | None | str] = field(default_factory=set)  # of the masks asked for
    real: torch.Tensor | None = None  # [T] int64, which of the B x L queries of a padded batch are tokens
    pads_are_mask: bool = False  # the masks of this forward hide the padding, and else are plain
    # (key states, pages) of the last write by a model that does not pass its kwargs to the cache
    pending: tuple[torch.Tensor, LayerPages] | None = None

    def host_rows(self, device: torch.device) -> list[tuple[int, int, int, int]] | None:
        """What the operators of PyTorch loop over, made once a step. Not on a GPU: kernels read the tensors
        there, and a look at them would wait for the device, or break a capture."""
        if self.rows is None and device.type == "cpu":
            self.rows = step_rows(self.block_tables, self.q_starts, self.lengths, self.page_tokens)
        return self.rows

    def hides(self, mask: torch.Tensor | None, window: int | None) -> bool:
        """Whether the mask hides nothing but what lengths, pads and the window hide."""
        return mask is None or (self.pads_are_mask and getattr(mask, MARK, NOT_MARKED) == window)

    def attend(self, q: torch.Tensor, pages: LayerPages, *, window: int | None, **options) -> torch.Tensor:
        """q [T, H, D] over the layer's pages: [T, H, Dv]."""
        self.windows.append(window)
        if self.real is not None:
            every = q
            q = q[self.real]
        found = paged_attention(
            q,
            pages.k,
            pages.v,
            self.block_tables,
            self.q_starts,
            self.lengths,
            window=window,
            k_scale=pages.k_scale,
            v_scale=pages.v_scale,
            rows=self.host_rows(q.device),
            **options,
        )
        if self.real is not None:
            return found.new_zeros(every.shape[0], *found.shape[1:]).index_copy_(0, self.real, found)
        return found


class _Current(threading.local):
    step: Step | None = None
    marking = False  # masks are told apart, for a cache that can do without them
    offer: tuple[weakref.ref, tuple | None, Callable[[], None]] | None = None  # see `offer`


_current = _Current()


@contextmanager
def packed(step: Step):
    """While it lasts, models of this thread build no masks."""
    before, _current.step = _current.step, step
    try:
        yield step
    finally:
        _current.step = before


@contextmanager
def marked():
    """While it lasts, the plain masks that models of this thread build carry their window."""
    before, _current.marking = _current.marking, True
    try:
        yield
    finally:
        _current.marking = before


def offer(key: torch.Tensor, view: tuple | None, taken: Callable[[], None]) -> None:
    """What a cache's `update` returns as keys to a model that does not pass its kwargs on. The attention call
    that gets this very tensor calls `taken`, and attends over `view` where there is one."""
    _current.offer = weakref.ref(key), view, taken


def refused(step: Step) -> bool:
    """Whether a view of this step was offered that no attention call has taken."""
    view = None if _current.offer is None else _current.offer[1]
    return view is not None and view[0] is step


def _taken(key: torch.Tensor) -> tuple | None:
    if _current.offer is None or _current.offer[0]() is not key:
        return None
    (_, view, taken), _current.offer = _current.offer, None
    taken()
    return view


def _masked(base):
    def mask(*args, **kwargs):
        step = _current.step
        if step is None:
            found = base(*args, **kwargs)
            if _current.marking and isinstance(found, torch.Tensor) and not kwargs.get("use_vmap"):
                setattr(found, MARK, kwargs.get("local_size"))
            return found
        step.masks.add("custom" if kwargs.get("use_vmap") else kwargs.get("local_size"))
        return None

    return mask


def _attention(dense):
    def attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
        view = kwargs.pop(KEY, None)
        current = _current.step
        if view is None and current is not None and current.pending and current.pending[0] is key:
            view = current, current.pending[1], None
        if view is None:
            view = _taken(key)
        if view is None:
            return dense(
                module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
            )
        step, pages, gather = view
        window = kwargs.get("sliding_window")
        if not step.hides(attention_mask, window):
            key, value = gather(query.dtype)
            return dense(
                module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
            )
        batch, heads, length, size = query.shape
        out = step.attend(
            query.transpose(1, 2).reshape(batch * length, heads, size),
            pages,
            scale=scaling,
            window=window,
            softcap=kwargs.get("softcap"),
            sinks=kwargs.get("s_aux"),
        )
        return out.view(batch, length, heads, -1), None

    return attention


def _eager(module, *args, **kwargs):
    """The model's own eager attention: it lives beside the attention class, in the model's file."""
    for cls in type(module).__mro__:
        function = getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None)
        if function is not None:
            return function(module, *args, **kwargs)
    raise NotImplementedError(f"{type(module).__name__} has no eager attention beside it")


def register() -> None:
    """Make the two names known to transformers; the process has them once, models choose them one by one."""
    for name, dense, mask in (("hfa", sdpa_attention_forward, sdpa_mask), ("hfa_eager", _eager, eager_mask)):
        AttentionInterface.register(name, _attention(dense))
        AttentionMaskInterface.register(name, _masked(mask))


register()
