"""Which backend runs an op: visible predicates, a priority, one way to force it, one way to ask.

`HFACCEL_BACKEND=auto|reference|native|triton` forces the choice; forcing a backend that cannot serve a call
is an error that says why. In `auto` the first backend in order of priority whose predicate holds is taken;
`reference`, plain PyTorch, takes everything.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

BACKENDS = ("auto", "reference", "native", "triton")


class BackendError(RuntimeError):
    """The forced backend cannot serve this call."""


class Call(NamedTuple):
    """What a predicate may look at."""

    device: str  # "cpu", "cuda", "meta"
    dtype: torch.dtype  # of the activations
    layout: Any = None  # layouts.Layout, or None for a plain weight
    m: int | None = None  # rows, where they are known
    k: int | None = None  # inputs, where they are known


class Backend(NamedTuple):
    name: str
    priority: int  # higher is asked first
    refusal: Callable[[Call], str]  # "" when it can serve the call, else why not
    function: Callable[..., Any]


_ops: dict[str, list[Backend]] = {}
_chosen: dict[tuple, Backend] = {}  # answers of `choose`, which is on the way of every call


def register(op: str, backend: str, *, priority: int, refusal: Callable[[Call], str]) -> Callable:
    """Decorator: the function serves `op` wherever `refusal(call)` is empty."""
    if backend not in BACKENDS[1:]:
        raise ValueError(f"backend {backend!r}: known are {', '.join(BACKENDS[1:])}")

    def add(function: Callable) -> Callable:
        others = [b for b in _ops.get(op, []) if b.name != backend]
        _chosen.clear()
        _ops[op] = sorted([*others, Backend(backend, priority, refusal, function)], key=lambda b: -b.priority)
        return function

    return add


def backends(op: str) -> tuple[Backend, ...]:
    """Those registered for `op`, in the order in which they are asked."""
    if op not in _ops:
        raise KeyError(f"no op {op!r}: known are {', '.join(sorted(_ops))}")
    return tuple(_ops[op])


def forced() -> str:
    """`HFACCEL_BACKEND`, checked."""
    name = os.environ.get("HFACCEL_BACKEND", "auto") or "auto"
    if name not in BACKENDS:
        raise ValueError(f"HFACCEL_BACKEND={name!r}: known are {', '.join(BACKENDS)}")
    return name


def choose(
    op: str, device: str, dtype: torch.dtype, layout: Any = None, m: int | None = None, k: int | None = None
) -> Backend:
    """The backend that serves such a call; see `Call` for the arguments.

    Raises: BackendError if `HFACCEL_BACKEND` names one that cannot.
    """
    key = (op, device, dtype, layout, m, k, os.environ.get("HFACCEL_BACKEND"), os.environ.get("HFACCEL_ISA"))
    found = _chosen.get(key)
    if found is None:
        if len(_chosen) >= 4096:
            _chosen.clear()
        found = _chosen[key] = _choose(op, Call(device, dtype, layout, m, k))
    return found


def _choose(op: str, call: Call) -> Backend:
    want = forced()
    for backend in backends(op):
        if want in ("auto", backend.name):
            why_not = backend.refusal(call)
            if not why_not:
                return backend
            if want != "auto":
                raise BackendError(f"HFACCEL_BACKEND={want}: {op} on {call.device}, {call.dtype}: {why_not}")
    raise BackendError(f"HFACCEL_BACKEND={want}: {op} has no such backend, only {[b.name for b in _ops[op]]}")


def explain(
    op: str, device: str, dtype: torch.dtype = torch.float32, layout: Any = None, m: int | None = None
) -> str:
    """One line for reports: who serves such a call, and why nobody before it does."""
    want, call, said = forced(), Call(device, dtype, layout, m), []
    for backend in backends(op):
        if want not in ("auto", backend.name):
            said.append(f"{backend.name}: not forced")
            continue
        why_not = backend.refusal(call)
        if not why_not:
            by = f" (HFACCEL_BACKEND={want})" if want != "auto" else ""
            return "; ".join([backend.name + by, *said])
        said.append(f"{backend.name}: {why_not}")
    return "; ".join(["none", *said])
