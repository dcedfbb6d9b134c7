"""measure/bench.py: a peer that cannot run is a row with its error, beside the rows that were measured."""

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
