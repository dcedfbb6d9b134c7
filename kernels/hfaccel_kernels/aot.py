"""Compile Triton kernels for GPUs that are not here, through the functions that launch them.

`compiling(capability)` puts a driver in place that knows a target and no device: what a public function would
launch on that GPU is compiled from the very arguments it was given, CPU tensors, and not run.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from . import triton_support


class _Driver:
    """A target without a device. Triton keys its per-process caches by device: the capability serves as one."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def is_active(self) -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0


@contextlib.contextmanager
def compiling(capability: int) -> Iterator[list]:
    """While open, a launch compiles for sm_`capability` and runs nothing; yields the list of compiled kernels."""
    from triton.runtime import driver

    compiled: list = []
    before, run = driver._active, JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        compiled.append(kernel)
        return kernel

    driver.set_active(_Driver(capability))
    JITFunction.run = compile_only
    try:
        with triton_support.assume(capability):
            yield compiled
    finally:
        JITFunction.run = run
        driver._active = before
