"""The checks of triton_values.py by each engine that this machine has.

Triton decides at import whether it interprets, and ttsem replaces its driver and parts of torch.cuda: each
engine has a process of its own.
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
pytestmark = pytest.mark.kernels

HERE = Path(__file__).parent


def run(engine: str, *extra: str, **env: str) -> int:
    """Passed checks of triton_values.py; fails with their output unless all pass."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "--noconftest",
            "-p",
            "no:cacheprovider",
            "-W",
            "ignore",
            *extra,
        ]
        + ["--override-ini=addopts=", "--override-ini=pythonpath=kernels", str(HERE / "triton_values.py")],
        cwd=HERE.parents[1],
        env={**os.environ, "HFACCEL_TRITON_ENGINE": engine, **env},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout.splitlines()[-1]
    return int(re.search(r"(\d+) passed", done.stdout)[1])


def test_in_the_interpreter():
    assert run("interpreter", TRITON_INTERPRET="1") > 80


@pytest.mark.skipif(importlib.util.find_spec("ttsem") is None, reason="ttsem is not installed")
def test_in_ttsem():
    """bf16 as the hardware has it, every access within its tensor, no two programs on one element."""
    assert run("ttsem", "-m", "ttsem") > 15


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_the_gpu():
    assert run("cuda") > 80
