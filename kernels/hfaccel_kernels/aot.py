"""Compile the Triton kernels for GPUs that are not here, through the ops' public functions, and look at what comes out.

`compiling(capability)` puts a driver in place that knows a target and no device: what an op would launch on that GPU is
compiled from the arguments it was given, CPU tensors, and not run. `inspect` disassembles the machine code: spills to
local memory (LDL, STL) and the stack must be none, since Triton compiles such a kernel without a word, as it does one
whose shared memory no multiprocessor has. `python -m hfaccel_kernels.aot` prints the table for all cases below.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from . import paged, qlinear, triton_support
from .layouts import Layout
from .triton_support import SHARED_BYTES

CAPABILITIES = (80, 90, 100)


class _Driver:
    """A target without a device. Triton keeps compiled kernels by device number: the capability serves as one."""

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


@dataclass(frozen=True)
class Launch:
    """A kernel as an op launched it. `constants`: its constexpr arguments and Triton's options, by name."""

    name: str
    capability: int
    constants: dict[str, Any]
    kernel: Any  # triton's CompiledKernel


@contextlib.contextmanager
def compiling(capability: int) -> Iterator[list[Launch]]:
    """While open, ops choose their Triton backend on CPU tensors; launches compile for that GPU and run nothing."""
    launches: list[Launch] = []
    before, run, forced = driver._active, JITFunction.run, os.environ.get("HFACCEL_BACKEND")

    def compile_only(self, *args, grid, warmup, **kwargs):
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        constants = {name: value for name, value in kwargs.items() if not isinstance(value, torch.Tensor)}
        launches.append(Launch(self.fn.__name__, capability, constants, kernel))
        return kernel

    driver.set_active(_Driver(capability))
    JITFunction.run = compile_only
    os.environ["HFACCEL_BACKEND"] = "triton"
    try:
        with triton_support.assume(capability):
            yield launches
    finally:
        JITFunction.run = run
        driver._active = before
        del os.environ["HFACCEL_BACKEND"]
        if forced is not None:
            os.environ["HFACCEL_BACKEND"] = forced


@dataclass(frozen=True)
class Machine:
    """What a launch became. Counts are of instructions in the code, not of those executed."""

    launch: Launch
    shared_bytes: int
    stack_bytes: int
    spills: int
    registers: int
    wide_loads: int  # of 16 bytes from global memory, to registers or to shared memory
    async_copies: int
    tensor_core: int

    @property
    def faults(self) -> list[str]:
        """What makes the kernel unfit for its GPU."""
        most = SHARED_BYTES[self.launch.capability]
        found = []
        if self.spills or self.stack_bytes:
            found.append(f"{self.spills} spills, {self.stack_bytes} bytes of stack")
        if self.shared_bytes > most:
            found.append(f"{self.shared_bytes} bytes of shared memory, the GPU has {most}")
        return found

    def __str__(self) -> str:
        interesting = {k: v for k, v in self.launch.constants.items() if v is not False and k != "enable_fp_fusion"}
        return (
            f"sm_{self.launch.capability:<3} {self.launch.name:9} shared {self.shared_bytes:6}  registers "
            f"{self.registers:3}  16-byte loads {self.wide_loads:3}  cp.async {self.async_copies:3}  tensor core "
            f"{self.tensor_core:3}  " + " ".join(f"{k}={v}" for k, v in interesting.items())
        )


def inspect(launch: Launch) -> Machine:
    """Disassemble a launch's machine code with the tools that come with Triton."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(launch.kernel.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-sass", "-res-usage", file.name]
        tool_path = {**os.environ, "PATH": f"{os.path.dirname(command[0])}{os.pathsep}{os.environ.get('PATH', '')}"}
        text = subprocess.run(command, check=True, capture_output=True, text=True, env=tool_path).stdout
    if not re.search(r"\bEXIT\b", text):
        raise RuntimeError(f"no machine code of {launch.name} for sm_{launch.capability} in:\n{text[:500]}")

    def count(pattern: str) -> int:
        return len(re.findall(pattern, text))

    return Machine(
        launch,
        shared_bytes=launch.kernel.metadata.shared,
        stack_bytes=int(re.search(r"STACK:(\d+)", text)[1]),
        spills=count(r"\b(?:LDL|STL)\b"),
        registers=int(re.search(r"REG:(\d+)", text)[1]),
        wide_loads=count(r"\b(?:LDG|LDGSTS)\S*\.128\b"),
        async_copies=count(r"\bLDGSTS\b"),
        tensor_core=count(r"\b(?:HMMA|HGMMA|UTCHMMA|UTCQMMA|UTCIMMA)\b"),
    )


# ---------------------------------------------------------------- cases: op -> calls that cover its kernels and configs


def _linear(m: int, layout: Layout, dtype=torch.bfloat16, n: int = 4096, k: int = 512, bias: bool = False):
    stored = {name: torch.empty(shape, dtype=d) for name, (shape, d) in layout.shapes(n, k).items()}
    qlinear.qlinear(
        torch.empty(m, k, dtype=dtype),
        stored["weight"],
        stored["weight_scale"],
        stored.get("weight_zero"),
        torch.empty(n, dtype=dtype) if bias else None,
        layout,
        n,
        k,
    )


def _attention(counts, dtype=torch.bfloat16, size=64, ratio=4, keys=256, int8=False, **kw):
    sequences, tokens, page_tokens = len(counts), sum(counts), 16
    per_sequence = keys // page_tokens
    pages = torch.empty(1, page_tokens, 2, size, dtype=torch.int8 if int8 else dtype)
    scales = torch.empty(1, page_tokens, 2) if int8 else None
    paged.paged_attention(
        torch.empty(tokens, 2 * ratio, size, dtype=dtype),
        pages,
        pages,
        torch.empty(sequences, per_sequence, dtype=torch.int32),
        torch.empty(sequences + 1, dtype=torch.int32),
        torch.empty(sequences, dtype=torch.int32),
        k_scale=scales,
        v_scale=scales,
        **kw,
    )


def _write(dtype=torch.bfloat16, size=64, int8=False):
    x = torch.empty(16, 2, size, dtype=dtype)
    pages = torch.empty(1, 16, 2, size, dtype=torch.int8 if int8 else dtype)
    scales = torch.empty(1, 16, 2) if int8 else None
    paged.cache_write(x, x, pages, pages, torch.empty(16, dtype=torch.int64), scales, scales)


_INT8, _INT8_ASYM = Layout(8), Layout(8, 64, False, "fp16")
_INT4, _INT4_SYM = Layout(4, 64, False, "fp16"), Layout(4, 32, True, "fp16")
_INT3, _INT2 = Layout(3, 64, False, "fp16"), Layout(2, 64, False, "fp16")
_FP16, _FP32 = torch.float16, torch.float32
_FEW = [1] * 8  # decode, keys in parts when there are more than 256
_MANY = [256] * 2  # prefill
_SINKS = {"sinks": torch.empty(8)}
_ALL = {"window": 64, "softcap": 30.0, "alibi_slopes": torch.empty(8)}

# For every GPU: each launch config of each table at least once.
CASES: dict[str, list[Callable[[], None]]] = {
    "qlinear": [
        *(partial(_linear, 4, layout) for layout in (_INT8, _INT4, _INT3, _INT2)),
        *(partial(_linear, 1, layout) for layout in (_INT8, _INT4)),
        partial(_linear, 16, _INT4, n=256, k=4096, bias=True),  # in parts, and their sum
        *(partial(_linear, m, _INT4) for m in (32, 64, 128)),
        *(partial(_linear, m, _INT8) for m in (16, 128)),
        *(partial(_linear, m, _INT4, _FP32) for m in (16, 128)),
    ],
    "cache_write": [_write, partial(_write, int8=True)],
    "paged_attention": [
        *(partial(_attention, _FEW, size=size) for size in (64, 128, 256)),
        *(partial(_attention, _FEW, _FP32, size) for size in (128, 256)),
        partial(_attention, _FEW, size=128, keys=4096, int8=True, **_SINKS),  # in parts, and their join
        *(partial(_attention, _MANY, size=size) for size in (64, 128, 256)),
        *(partial(_attention, _MANY, _FP32, size) for size in (128, 256)),
    ],
}
# For one GPU: the specializations that the configs meet besides.
MORE: dict[str, list[Callable[[], None]]] = {
    "qlinear": [
        partial(_linear, 2, _INT4),
        partial(_linear, 1, _INT4, _FP16, bias=True),
        partial(_linear, 1, _INT8_ASYM, _FP32),
        partial(_linear, 1, _INT4, n=256, k=4096),
        partial(_linear, 1, _INT4_SYM),
        partial(_linear, 3, Layout(4, 20, False), n=70, k=130),  # gaps, and nothing divisible by 16
        partial(_linear, 7, Layout(3, 20, False), n=70, k=130),
        partial(_linear, 16, _INT8_ASYM, _FP16, bias=True),
        partial(_linear, 128, _INT8_ASYM, _FP32),
        *(partial(_linear, m, layout) for m in (16, 128) for layout in (_INT4_SYM, _INT3, _INT2)),
    ],
    "cache_write": [partial(_write, _FP32, 80, int8=True), partial(_write, _FP16, 80)],
    "paged_attention": [
        partial(_attention, _FEW, _FP16, 80, 3, **_SINKS, **_ALL),
        partial(_attention, _FEW, size=128, int8=True),
        partial(_attention, _MANY, size=128, int8=True, **_SINKS, **_ALL),
        partial(_attention, _MANY, _FP32, 64, int8=True, **_SINKS),
        partial(_attention, _FEW, size=64, ratio=71),
    ],
}


def build(capability: int, cases: dict[str, list[Callable[[], None]]] = CASES) -> dict[str, list[Machine]]:
    """Compile and disassemble `cases` for one GPU; per op, each kernel once."""
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        waiting = {}
        for op, calls in cases.items():
            with compiling(capability) as launches:
                for call in calls:
                    call()
            unique = {id(launch.kernel): launch for launch in launches}
            waiting[op] = [pool.submit(inspect, launch) for launch in unique.values()]
        return {op: [future.result() for future in futures] for op, futures in waiting.items()}


def main() -> int:
    """Print what each kernel became on each GPU; 1 if one is unfit."""
    unfit = 0
    for capability in CAPABILITIES:
        for cases in (CASES, MORE):
            for machines in build(capability, cases).values():
                for machine in machines:
                    print(machine, *machine.faults, sep="\n    UNFIT: ", flush=True)
                    unfit += bool(machine.faults)
    return int(unfit > 0)


if __name__ == "__main__":
    sys.exit(main())
