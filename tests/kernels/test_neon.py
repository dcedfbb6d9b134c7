"""The NEON kernels, cross-compiled and run by qemu: bit for bit what this machine itself computes."""

import ctypes
import shutil
import struct
import subprocess
from pathlib import Path

import pytest
import torch

from hfaccel_kernels import native
from packed import LAYOUTS, SHAPES, random_packed

CROSS, QEMU = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64-static")
pytestmark = [
    pytest.mark.neon,
    pytest.mark.skipif(not (CROSS and QEMU), reason="wants g++-aarch64-linux-gnu and qemu-user-static"),
    pytest.mark.skipif(not native.available(), reason=f"no C++ kernels: {native.reason()}"),
]


def raw(tensor: torch.Tensor | None) -> bytes:
    data = b"" if tensor is None else tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return struct.pack("q", len(data)) + data


def cases():
    for layout in LAYOUTS:
        for m, n, k in SHAPES[1:5]:
            for dtype in (torch.float32, torch.bfloat16):
                x, bias = torch.randn(m, k).to(dtype), torch.randn(n).to(dtype)
                weight = random_packed(layout, n, k)
                yield {"n": n, "k": k, **native.packed(layout)}, weight, bias, x
    for dtype in native.PLAIN:
        for m, n, k in [*SHAPES[1:5], (3, 3, 33)]:
            x, bias = torch.randn(m, k).half(), torch.randn(n).to(dtype)
            weight = torch.randn(n, k).to(dtype)
            yield {"n": n, "k": k, "ld": k, "kind": native.PLAIN[dtype]}, (weight, None, None), bias, x


def here(w: native.Weight, weight, bias, x) -> torch.Tensor:
    w.data, w.scale, w.zero, w.bias = (None if t is None else t.data_ptr() for t in (*weight, bias))
    n, k = w.n, w.k
    y = torch.empty(x.shape[0], n, dtype=x.dtype)
    dtype = native.DTYPES[x.dtype]
    native.library().hfa_linear(
        ctypes.byref(w), x.data_ptr(), dtype, k, x.shape[0], y.data_ptr(), dtype, n, 1
    )
    return y


@pytest.fixture(scope="module")
def driver(tmp_path_factory) -> Path:
    """The matmul sources and linear_driver.cpp as an aarch64 program."""
    out = tmp_path_factory.mktemp("neon") / "driver"
    plan = {"plan.cpp", "attend_block.cpp"}
    sources = [
        *(source for source in native.sources() if source.name not in plan),
        Path(__file__).with_name("linear_driver.cpp"),
    ]
    flags = (*native._FLAGS, "-DHFA_ISA_NEON", *native.ISAS["neon"].flags)
    subprocess.run(
        [CROSS, *flags, "-static", "-pthread", f"-I{native.CSRC}", *map(str, sources), "-o", str(out)],
        check=True,
    )
    return out


def test_values_are_those_of_this_machine(driver, tmp_path):
    want = []
    with open(tmp_path / "in", "wb") as file:
        for fields, weight, bias, x in cases():
            w = native.Weight(**fields, bias_dtype=native.DTYPES[bias.dtype])
            y = here(w, weight, bias, x)
            want.append(y)
            file.write(bytes(w) + struct.pack("3q", native.DTYPES[x.dtype], x.shape[0], y.nbytes))
            for tensor in (*weight, bias, x):
                file.write(raw(tensor))
    subprocess.run([QEMU, str(driver), str(tmp_path / "in"), str(tmp_path / "out")], check=True, timeout=250)
    got = (tmp_path / "out").read_bytes()
    assert len(got) == sum(y.nbytes for y in want)
    at = 0
    for i, y in enumerate(want):
        mine = torch.frombuffer(bytearray(got[at : at + y.nbytes]), dtype=y.dtype).view_as(y)
        assert torch.equal(mine, y), f"case {i}"
        at += y.nbytes


@pytest.mark.parametrize("source", [path.name for path in native.sources()])
def test_every_source_compiles_for_neon(source, tmp_path):
    flags = (*native._FLAGS, "-DHFA_ISA_NEON", *native.ISAS["neon"].flags, "-O0", "-fsyntax-only")
    done = subprocess.run([CROSS, *flags, str(native.CSRC / source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
