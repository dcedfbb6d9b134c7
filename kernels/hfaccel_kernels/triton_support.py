"""What the Triton kernels share: whether they can run, how they are launched, and their tables of launch configs.

Importing this file imports no Triton; the kernel files (`triton_linear`, `triton_paged`) do, and are imported on
first use. The tables are data, so that `aot` can compile every entry without a GPU: a config is chosen by shape
alone, never by a timing, so that one shape always runs the same arithmetic.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version

import torch

OLDEST = (3, 6)
CAPABILITY = (8, 0)  # bf16 tensor cores and cp.async
# Shared memory a program may use, in bytes, by compute capability: the kernels must fit all of them.
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
def _capable(index: int) -> bool:
    return torch.cuda.get_device_capability(index) >= CAPABILITY


def runs_on(device: torch.device) -> bool:
    """Whether the kernels run on tensors of this device."""
    if missing() is not None:
        return False
    if device.type == "cuda":
        return torch.version.hip is None and _capable(device.index or 0)
    return device.type == "cpu" and interpreting()
