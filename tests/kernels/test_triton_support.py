"""When Triton serves an op, and when it says why not."""

import subprocess
import sys

import pytest
import torch

from hfaccel_kernels import dispatch, triton_support
from hfaccel_kernels.dispatch import Call


@pytest.fixture(autouse=True)
def _no_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def test_cpu_tensors_are_refused_unless_interpreted(monkeypatch):
    call = Call("cpu", torch.float32)
    assert triton_support.refusal(call) == "GPUs only"
    monkeypatch.setattr(triton_support, "missing", lambda: None)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert triton_support.refusal(call) == ""
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with triton_support.assume(90):
        assert triton_support.refusal(call) == ""
        assert triton_support.capability(torch.device("cpu")) == 90
    assert triton_support.refusal(call) == "GPUs only"


def test_other_devices_dtypes_and_old_gpus_are_refused_by_name(monkeypatch):
    monkeypatch.setattr(triton_support, "missing", lambda: None)
    monkeypatch.setattr(triton_support, "capability", lambda device: 75)
    assert "mps" in triton_support.refusal(Call("mps", torch.float32))
    assert "float64" in triton_support.refusal(Call("cuda", torch.float64))
    assert "8.0" in triton_support.refusal(Call("cuda", torch.float16))
    monkeypatch.setattr(triton_support, "capability", lambda device: 90)
    monkeypatch.setattr(torch.version, "hip", None)
    assert triton_support.refusal(Call("cuda", torch.bfloat16)) == ""


@pytest.mark.parametrize("found, why", [("3.5.1", "older than 3.6"), ("3.6.0", None), ("3.10.0+git1", None)])
def test_version(monkeypatch, found, why):
    triton_support.missing.cache_clear()
    monkeypatch.setattr(triton_support.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(triton_support, "version", lambda name: found)
    try:
        said = triton_support.missing()
    finally:
        triton_support.missing.cache_clear()
    assert said is None if why is None else why in said


def test_without_triton_ops_run_and_say_why(monkeypatch):
    triton_support.missing.cache_clear()
    monkeypatch.setattr(triton_support.importlib.util, "find_spec", lambda name: None)
    try:
        assert triton_support.missing() == "triton is not installed"
        assert triton_support.refusal(Call("cuda", torch.float16)) == "triton is not installed"
    finally:
        triton_support.missing.cache_clear()


def test_an_op_forced_to_triton_on_a_cpu_is_an_error(monkeypatch):
    from hfaccel_kernels.pages import cache_write

    monkeypatch.setenv("HFACCEL_BACKEND", "triton")
    x, pages = torch.zeros(1, 1, 4), torch.zeros(1, 16, 1, 4)
    with pytest.raises(dispatch.BackendError, match="GPUs only"):
        cache_write(x, x, pages, pages, torch.zeros(1, dtype=torch.int64))


def test_triton_is_imported_by_its_first_call_only():
    code = (
        "import sys; from hfaccel_kernels import paged, qlinear, dispatch; "
        "print([b.name for b in dispatch.backends('qlinear')], 'triton' in sys.modules, "
        "'hfaccel_kernels.triton_linear' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "'triton'" in done.stdout
    assert done.stdout.strip().endswith("False False")
