"""Compile the Triton kernels for GPUs that are not here, through the ops' public functions, and look at them.

`compiling(capability)` puts a driver in place that knows a target and no device: what an op would launch on
that GPU is compiled from the arguments it was given, CPU tensors, and not run. `inspect` reads the machine
code: spills to local memory (LDL, STL) and stack must be none, since Triton compiles such a kernel without a
word, as it does one that wants more shared memory than a multiprocessor has.
`python -m hfaccel_kernels.aot` prints the table for all cases below.
"""

from __future__ import annotations

import ast
import contextlib
import os
import re
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from . import lora, paged, pages, qlinear, triton_support
from .layouts import Layout
from .triton_support import SHARED_BYTES

CAPABILITIES = (80, 90, 100, 120)


class _Driver:
    """A target without a device. Triton keeps kernels by device number: the capability serves as one."""

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

    module: str
    name: str
    capability: int
    constants: dict[str, Any]
    kernel: Any  # triton's CompiledKernel


@contextlib.contextmanager
def compiling(capability: int) -> Iterator[list[Launch]]:
    """While open, ops choose their Triton backend on CPU tensors; launches compile for that GPU and run
    nothing.

    Kernels compile in threads (LLVM and ptxas leave Python's lock alone) and are ready when the context is
    left.
    """
    launches: list[Launch] = []
    active, run, forced = driver._active, JITFunction.run, os.environ.get("HFACCEL_BACKEND")
    line_info = triton.knobs.compilation.disable_line_info
    parse, one_at_a_time = ast.parse, threading.Lock()

    def compile_only(self, *args, grid, warmup, **kwargs):
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        constants = {name: value for name, value in kwargs.items() if not isinstance(value, torch.Tensor)}
        launches.append(Launch(self.fn.__module__, self.fn.__name__, capability, constants, kernel))

    def parse_alone(*args, **kwargs):
        with one_at_a_time:
            return parse(*args, **kwargs)

    driver.set_active(_Driver(capability))
    JITFunction.run = compile_only
    # Python 3.11 counts the depth of the trees that threads build in one place (gh-106905): SystemError
    ast.parse = parse_alone
    os.environ["HFACCEL_BACKEND"] = "triton"
    triton.knobs.compilation.disable_line_info = True
    try:
        with (
            ThreadPoolExecutor(os.cpu_count() or 1) as pool,
            triton.AsyncCompileMode(pool),
            triton_support.assume(capability),
        ):
            yield launches
        launches[:] = [replace(one, kernel=_done(one.kernel)) for one in launches]
    finally:
        triton.knobs.compilation.disable_line_info = line_info
        JITFunction.run = run
        ast.parse = parse
        driver._active = active
        del os.environ["HFACCEL_BACKEND"]
        if forced is not None:
            os.environ["HFACCEL_BACKEND"] = forced


def _done(kernel: Any) -> Any:
    return kernel.result() if isinstance(kernel, triton.FutureKernel) else kernel


@dataclass(frozen=True)
class Machine:
    """What a launch became. Counts are of instructions in the code, not of those executed."""

    launch: Launch
    shared_bytes: int
    stack_bytes: int
    spills: int  # loads and stores of local memory, in the machine code
    registers: int
    wide_loads: (
        int  # of 16 bytes from global memory, to registers or to shared memory; this and the rest in the PTX
    )
    async_copies: int
    mma: int  # mma.sync
    wgmma: int
    tcgen05: int

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
        shown = {k: v for k, v in self.launch.constants.items() if v is not False and k != "enable_fp_fusion"}
        return (
            f"sm_{self.launch.capability:<3} {self.launch.name:8} shared {self.shared_bytes:6}  "
            f"registers {self.registers:3}  16-byte loads {self.wide_loads:2}  "
            f"cp.async {self.async_copies:2}  "
            f"mma {self.mma:3}  wgmma {self.wgmma:2}  tcgen05 {self.tcgen05:2}  "
            + " ".join(f"{k}={v}" for k, v in shown.items())
        )


def machine_code(cubin: bytes) -> list[int]:
    """Opcodes of a cubin's text sections: the low 9 bits of each 16-byte instruction (sm_70 and later)."""
    (sections_at,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<3H", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", cubin, sections_at + i * size) for i in range(count)]
    opcodes: list[int] = []
    for name, _, _, _, start, length in sections:
        if cubin.startswith(b".text.", sections[names][4] + name):
            words = struct.unpack_from(f"<{length // 8}Q", cubin, start)
            opcodes += [word & 0x1FF for word in words[::2]]
    return opcodes


LDL, STL = 0x183, 0x187


def inspect(launch: Launch) -> Machine:
    """Look at a launch's PTX, machine code and resource usage."""
    ptx, cubin = launch.kernel.asm["ptx"], launch.kernel.asm["cubin"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    opcodes = machine_code(cubin)
    wide = re.findall(r"\bld\.global\S*\.v4\.b32|\bcp\.async\.c\S+ \[[^]]*\], \[[^]]*\], 0x10\b", ptx)
    return Machine(
        launch,
        shared_bytes=launch.kernel.metadata.shared,
        stack_bytes=int(re.search(r"STACK:(\d+)", usage)[1]),
        spills=opcodes.count(LDL) + opcodes.count(STL),
        registers=int(re.search(r"REG:(\d+)", usage)[1]),
        wide_loads=len(wide),
        async_copies=len(re.findall(r"\bcp\.async\.c[ag]\.", ptx)),
        mma=len(re.findall(r"\bmma\.sync", ptx)),
        wgmma=len(re.findall(r"\bwgmma\.mma_async", ptx)),
        tcgen05=len(re.findall(r"\btcgen05\.mma\b", ptx)),
    )


# ---------------------------------------------------------------- cases: op -> calls that cover its kernels
# and configs


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
    held = torch.empty(1, 16, 2, size, dtype=torch.int8 if int8 else dtype)
    scales = torch.empty(1, 16, 2) if int8 else None
    pages.cache_write(x, x, held, held, torch.empty(16, dtype=torch.int64), scales, scales)


def _lora(tokens, ranks=64, dtype=torch.bfloat16, n=4096, k=4096, tables=None, y=None):
    slots, tables = 32, tables or dtype
    lora.lora_add(
        torch.empty(tokens, n, dtype=y or dtype),
        torch.empty(tokens, k, dtype=dtype),
        torch.empty(tokens, dtype=torch.int32),
        torch.empty(slots, ranks, k, dtype=tables),
        torch.empty(slots, ranks, n, dtype=tables),
        torch.empty(slots),
        torch.empty(slots, dtype=torch.int32),
    )


_INT8, _INT8_ASYM = Layout(8), Layout(8, 64, False, "fp16")
_INT4, _INT4_SYM = Layout(4, 64, False, "fp16"), Layout(4, 32, True, "fp16")
_INT3, _INT2 = Layout(3, 64, False, "fp16"), Layout(2, 64, False, "fp16")
_NF4 = Layout(4, 64, True, "double", code="nf4")
_E4M3, _E5M2 = (Layout(8, code=code, act="token") for code in ("e4m3", "e5m2"))
_W8A8, _STATIC = Layout(8, act="token"), Layout(8, act="token", act_scale=0.02)
_FP16, _FP32 = torch.float16, torch.float32
_FEW = [1] * 8  # decode, keys in parts when there are more than 256
_MANY = [256] * 2  # prefill
_SINKS = {"sinks": torch.empty(8)}
_ALL = {"window": 64, "softcap": 30.0, "alibi_slopes": torch.empty(8)}

# For every GPU: each launch config of each table at least once, where it takes most registers.
CASES: dict[str, list[Callable[[], None]]] = {
    "qlinear": [
        *(partial(_linear, 4, layout) for layout in (_INT8, _INT4, _INT3, _INT2)),
        partial(_linear, 16, _INT4, n=256, k=4096, bias=True),  # in parts, and their sum
        *(partial(_linear, m, _INT4) for m in (32, 64, 128)),
        *(partial(_linear, m, _INT4, _FP32) for m in (16, 128)),
        partial(_linear, 128, _INT8),
        *(partial(_linear, m, layout) for layout in (_NF4, _E4M3, _W8A8) for m in (4, 16, 128)),
        partial(_linear, 64, _E4M3),
    ],
    "cache_write": [partial(_write, int8=True)],
    "paged_attention": [
        *(partial(_attention, _FEW, size=size) for size in (64, 256)),
        *(partial(_attention, _FEW, _FP32, size) for size in (128, 256)),
        partial(_attention, _FEW, size=128, keys=4096, int8=True, **_SINKS),  # in parts, and their join
        *(partial(_attention, _MANY, size=size) for size in (64, 128, 256)),
        partial(_attention, _MANY, _FP32, 128),
    ],
    "lora_add": [
        partial(_lora, tokens, dtype=dtype) for tokens in (32, 512) for dtype in (torch.bfloat16, _FP32)
    ],
}
# For one GPU: the specializations that the configs meet besides.
MORE: dict[str, list[Callable[[], None]]] = {
    "qlinear": [
        partial(_linear, 1, _INT8),
        partial(_linear, 1, _INT4),
        partial(_linear, 2, _INT4, _FP16, bias=True),
        partial(_linear, 1, _INT8_ASYM, _FP32),
        partial(_linear, 1, _INT4, n=256, k=4096),
        partial(_linear, 4, _INT4_SYM),
        partial(_linear, 1, Layout(4, 20, False), n=70, k=130),  # gaps, and nothing divisible by 16
        partial(_linear, 7, Layout(3, 20, False), n=70, k=130),
        partial(_linear, 16, _INT8_ASYM, _FP16, bias=True),
        partial(_linear, 128, _INT8_ASYM, _FP32),
        *(partial(_linear, 128, layout) for layout in (_INT4_SYM, _INT3, _INT2)),
        *(partial(_linear, m, layout) for layout in (_NF4, _E4M3, _E5M2, _W8A8) for m in (1, 32)),
        *(partial(_linear, m, _E5M2) for m in (4, 128)),
        partial(_linear, 1, _NF4, n=256, k=4096),
        partial(_linear, 1, Layout(4, -1, True, "double", code="nf4")),
        partial(_linear, 4, _W8A8, n=256, k=4096),  # in parts of int32
        partial(_linear, 128, _NF4, _FP32),
        partial(_linear, 2, _STATIC, _FP16, bias=True),
        partial(_linear, 16, Layout(4, 20, False, "double"), n=70, k=130),
    ],
    "cache_write": [partial(_write, _FP16, 80)],
    "paged_attention": [
        partial(_attention, _FEW, _FP16, 80, 3, **_SINKS, **_ALL),
        partial(_attention, _MANY, size=128, int8=True, **_SINKS, **_ALL),
        partial(_attention, _MANY, _FP32, 64, int8=True, **_SINKS),
        *(partial(_attention, _FEW, size=size, ratio=71) for size in (64, 256)),
        partial(_attention, _FEW, _FP32, 128, 48),  # heads of a KV head in pieces
    ],
    "lora_add": [
        *(partial(_lora, tokens, 8, _FP16) for tokens in (1, 512)),
        partial(_lora, 32, 136),  # ranks in tiles
        *(partial(_lora, tokens, 32, tables=_FP32, y=_FP32) for tokens in (7, 200)),
        *(partial(_lora, tokens, 8, n=70, k=130) for tokens in (7, 200)),  # nothing divisible by 16
    ],
}


def build(capability: int, cases: dict[str, list[Callable[[], None]]] = CASES) -> dict[str, list[Machine]]:
    """Compile `cases` for one GPU and look at the outcome; per op, each kernel once."""
    ends = [0]
    with compiling(capability) as launches:
        for calls in cases.values():
            for call in calls:
                call()
            ends.append(len(launches))
    found = {}
    for op, start, end in zip(cases, ends, ends[1:], strict=False):
        unique = {id(launch.kernel): launch for launch in launches[start:end]}
        found[op] = [inspect(launch) for launch in unique.values()]
    return found


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
