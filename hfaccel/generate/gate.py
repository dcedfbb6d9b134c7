"""Who may use a model now: many threads generate at once, one that changes it has it for itself.

Whoever changes a model (`patch`, `unpatch`, `original`) is refused while a thread generates with it; a
`generate` that starts meanwhile waits, and then runs on what the model has become. After a fork the child
finds every gate open, since the threads that were inside do not exist there, and generates on one thread.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin

from hfaccel.classes import Mixin, extend, restore
from hfaccel.errors import PatchError

ATTRIBUTE = "_hfaccel_gate"
RUNTIME = "_hfaccel_runtime"  # what a patched model has; it keeps its gate


class Gate:
    """`active` threads are inside, or one thread owns it."""

    def __init__(self):
        self._open()
        self.forked = False  # this process is a child of the one that made it
        _GATES.add(self)

    def _open(self) -> None:
        self.active = 0
        self.owner: int | None = None
        self.lock = threading.RLock()
        self._free = threading.Condition(self.lock)

    def __deepcopy__(self, memo: dict) -> Gate:
        return Gate()

    def __reduce__(self):
        return Gate, ()

    @property
    def mine(self) -> bool:
        """Whether this thread has the model for itself."""
        return self.owner == threading.get_ident()

    def wait(self) -> None:
        if self.forked and torch.get_num_threads() > 1:
            torch.set_num_threads(1)  # the parent's OpenMP threads are not here: torch would wait for them
        with self.lock:
            while self.owner not in (None, threading.get_ident()):
                self._free.wait()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Inside; waits for the owner to go."""
        with self.lock:
            self.wait()
            self.active += 1
        try:
            yield
        finally:
            with self.lock:
                self.active -= 1

    @contextmanager
    def alone(self, what: str) -> Iterator[None]:
        """The gate for this thread. Raises: PatchError naming `what` if a thread is inside."""
        with self.lock:
            if self.active:
                raise PatchError(f"{what}: a thread is generating with this model")
            if self.owner not in (None, threading.get_ident()):
                raise PatchError(f"{what}: another thread is changing this model")
            before, self.owner = self.owner, threading.get_ident()
        try:
            yield
        finally:
            with self.lock:
                self.owner = before
                self._free.notify_all()


_GATES: weakref.WeakSet[Gate] = weakref.WeakSet()


def _reopen() -> None:
    for gate in list(_GATES):
        gate._open()
        gate.forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reopen)


class Gated(Mixin):
    """In front of the class of a model that is being patched: its `generate` waits for the end of that."""

    @wraps(GenerationMixin.generate)
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        gate = vars(self).get(ATTRIBUTE)
        if gate is not None and not gate.mine:
            gate.wait()
        plain = type(self)._hfaccel_class if isinstance(self, Gated) else type(self)
        return plain.generate(self, *args, **kwargs)


@contextmanager
def alone(model: nn.Module, what: str) -> Iterator[None]:
    """No other thread generates meanwhile: one that starts to waits. Generation by this thread is
    transformers' own.

    Raises: PatchError if a `generate` is under way.
    """
    gate = vars(model).get(ATTRIBUTE)
    if gate is not None:
        with gate.alone(what):
            yield
        return
    if not isinstance(model, GenerationMixin):
        yield
        return
    gate = Gate()
    with gate.alone(what):
        setattr(model, ATTRIBUTE, gate)
        extend(model, Gated)
        try:
            if _generates(model):
                raise PatchError(f"{what}: a thread is generating with this model")
            yield
        finally:
            if isinstance(model, Gated):  # nothing else went in front of its class
                restore(model)
            if RUNTIME not in vars(model):
                vars(model).pop(ATTRIBUTE, None)


def _generates(model: nn.Module) -> bool:
    """Whether another thread is inside transformers' `generate` of this model, which knows no gate."""
    frames = sys._current_frames()
    del frames[threading.get_ident()]  # this very frame: it would hold itself, and the model
    for frame in frames.values():
        while frame is not None:
            if frame.f_code.co_name == "generate" and frame.f_locals.get("self") is model:
                return True
            frame = frame.f_back
    return False
