import json
import subprocess
import sys

import pytest

from gguf_models import of_blocks
from hfaccel.measure import gguf


def test_a_row_of_a_small_file(tmp_path, capsys, monkeypatch):
    path = str(of_blocks("Q4_1", tmp_path / "m.gguf"))
    gguf.forget(path)
    row = gguf.measure(path)
    assert 0.9 * row["file_bytes"] < row["packed_bytes"] < 1.05 * row["file_bytes"]
    assert row["imported_s"] < row["loaded_s"] < row["first_token_s"]
    assert row["allowed_bytes"] == row["packed_bytes"] + 100_000_000


def test_decoding_is_compared_by_what_a_token_reads(tmp_path, monkeypatch):
    """Of two models that take the same time, the ratio is that of their bytes."""
    path = of_blocks("Q8_0", tmp_path / "m.gguf")
    monkeypatch.setattr("hfaccel.measure.speed.generate_once", lambda model, ids, new: (1.0, 2.0))
    found = gguf.decode(path, 2)
    assert found["tokens_s"] == {"file": 63.0, "int4": 63.0}
    read = found["bytes_per_token"]
    assert read["file"] > read["int4"] and found["ratio"] == read["file"] / read["int4"]


@pytest.mark.real
def test_the_demo_models_own_file_takes_its_packed_size():
    command = [sys.executable, "-m", "hfaccel.measure.gguf", "--rounds", "0", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout.splitlines()[-1])
    assert row["packed_bytes"] <= 1.05 * row["file_bytes"]
    assert row["rise_bytes"] <= row["allowed_bytes"]
