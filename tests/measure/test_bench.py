"""measure/bench.py: a peer that cannot run is a row with its error, beside the rows that were measured."""

import os
import signal
import subprocess
import sys
import time

import pytest

from hfaccel.measure import bench as benches
from test_readme import _tokenizer
from tiny import tiny


@pytest.fixture
def folder(tmp_path):
    model = tiny("llama")
    model.save_pretrained(tmp_path / "model")
    _tokenizer(model.config.vocab_size).save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def test_a_peer_that_cannot_run_is_a_row(folder, tmp_path, monkeypatch):
    """No such python, and a python that has not the peer: the hint says how to name another one."""
    monkeypatch.setattr(benches, "read_bandwidth", lambda threads: 10.0)
    python = tmp_path / "python"
    python.write_text("""#!/bin/sh\necho '{"error": "ModuleNotFoundError: No module named torchao"}'\n""")
    python.chmod(0o755)
    made = benches.bench(
        folder,
        ["int8"],
        ["vllm", "torchao"],
        peer_python={"vllm": str(tmp_path / "none"), "torchao": str(python)},
        prompt_tokens=8,
        new_tokens=4,
        rounds=1,
        threads=1,
    )
    ours, vllm, torchao = made["rows"]
    assert ours["decode_tokens_s"] > 0 and ours["decode_ratio"] == 1
    assert "No such file" in vllm["error"] and vllm["samples"] == []
    assert torchao["error"] == (
        "ModuleNotFoundError: No module named torchao; --peer-python torchao=PATH of a python that has it"
    )


SLEEPER = """
import subprocess, time, traffic

def load(spec):
    child = subprocess.Popen(["sleep", "1000"], preexec_fn=traffic.die_with_parent)
    return None, {"child": child.pid}
"""
STARTER = """
import os, signal
from hfaccel.measure.bench import Contender

row = Contender("sleeper")
row.start("sleeper", None, {})
print(row.process.pid, row.ask()["info"]["child"], flush=True)  # stopped from now on
signal.pause()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells children that their parent is gone")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_bench_leaves_no_process(tmp_path, number):
    (tmp_path / "peer_sleeper.py").write_text(SLEEPER)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    pids = [int(word) for word in starter.stdout.readline().split()]
    assert len(pids) == 2 and all(map(alive, pids))
    starter.send_signal(number)
    starter.wait()
    end = time.monotonic() + 30
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(map(alive, pids))


def alive(pid):
    """Whether it is there and no zombie, which nobody may have waited for yet."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
