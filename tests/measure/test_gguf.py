import json
import subprocess
import sys

import pytest

from formats.test_gguf import of_blocks
from hfaccel.measure import gguf


def test_a_row_of_a_small_file(tmp_path, capsys, monkeypatch):
    path = str(of_blocks("Q4_1", tmp_path / "m.gguf"))
    gguf.forget(path)
    row = gguf.measure(path)
    assert 0.9 * row["file_bytes"] < row["packed_bytes"] < 1.05 * row["file_bytes"]
    assert row["imported_s"] < row["loaded_s"] < row["first_token_s"]
    assert row["allowed_bytes"] == row["packed_bytes"] + 100_000_000


@pytest.mark.real
def test_the_demo_models_own_file_takes_its_packed_size():
    command = [sys.executable, "-m", "hfaccel.measure.gguf", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout.splitlines()[-1])
    assert row["packed_bytes"] <= 1.05 * row["file_bytes"]
    assert row["rise_bytes"] <= row["allowed_bytes"]
