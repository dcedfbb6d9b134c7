"""What the Triton kernels share: whether they can run, how they are launched, and their tables of launch
configs.

Importing this file imports no Triton; the kernel files (`triton_linear`, `triton_paged`) do, and are imported
on first use. The tables are data, so that `aot` can compile every entry without a GPU: a config is chosen by
shape alone, never by a timing, so that one shape always runs the same arithmetic.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version

import torch

from . import dispatch

OLDEST = (3, 6)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Shared memory a program may use, in bytes, by compute capability. The oldest is what the kernels need: bf16
# tensor cores and cp.async.
SHARED_BYTES = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}


@dataclass(frozen=True)
class Config:
    """One launch config. `tile` is what the kernel's table says it is; the rest is Triton's."""

    tile: tuple[int, ...]
    num_warps: int
    num_stages: int


@lru_cache(maxsize=1)
def missing() -> str | None:
    """Why Triton kernels cannot be built here, or None."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    try:
        found = version("triton")
    except PackageNotFoundError:  # a build from source without metadata
        return None
    if tuple(int(part) for part in found.split(".")[:2]) < OLDEST:
        return f"triton {found} is older than {OLDEST[0]}.{OLDEST[1]}"
    return None


def interpreting() -> bool:
    """Whether Triton's interpreter runs the kernels, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")


@lru_cache(maxsize=16)
def _of_device(index: int) -> int:
    major, minor = torch.cuda.get_device_capability(index)
    return 10 * major + minor


_assumed: int | None = None


@contextlib.contextmanager
def assume(capability: int) -> Iterator[None]:
    """Take CPU tensors for tensors of a GPU of this compute capability (80 for 8.0), to compile for it."""
    global _assumed
    before, _assumed = _assumed, capability
    try:
        yield
    finally:
        _assumed = before


def capability(device: torch.device) -> int:
    """Compute capability of the device, 90 for 9.0: it chooses between tables of launch configs."""
    if device.type == "cuda":
        return _of_device(torch.cuda.current_device() if device.index is None else device.index)
    return _assumed or min(SHARED_BYTES)


def refusal(call: dispatch.Call) -> str:
    """Why the kernels cannot serve such a call; "" when they can."""
    if call.device == "cpu" and not interpreting() and _assumed is None:
        return "GPUs only"
    if call.device not in ("cpu", "cuda"):
        return f"no kernels for {call.device}"
    if call.dtype not in DTYPES:
        return f"{call.dtype} is none of {', '.join(map(str, DTYPES))}"
    if missing():
        return missing()
    if call.device == "cuda" and (torch.version.hip or capability(torch.device("cuda")) < min(SHARED_BYTES)):
        return f"wants an NVIDIA GPU of compute capability {min(SHARED_BYTES) / 10} or more"
    return ""


def register(op: str, target: str, refusal: Callable[[dispatch.Call], str] = refusal) -> None:
    """Make `module:function` of this package the Triton backend of `op`, imported at the first call."""
    module, name = target.split(":")

    def function(x, *args, **kwargs):
        launch = getattr(importlib.import_module(f"{__package__}.{module}"), name)
        if x.device.type != "cuda" or x.device.index == torch.cuda.current_device():
            return launch(x, *args, **kwargs)
        with torch.cuda.device(x.device):  # Triton launches on the current device
            return launch(x, *args, **kwargs)

    function.__name__ = name
    dispatch.register(op, "triton", priority=10, refusal=refusal)(function)
