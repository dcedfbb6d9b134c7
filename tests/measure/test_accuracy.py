"""measure/accuracy.py: the two sides of the table are what they are called."""

import copy
from functools import partial

import pytest
import torch

import dequantized
import hfaccel
from hfaccel.errors import PatchError
from hfaccel.measure import accuracy
from hfaccel.measure.perplexity import perplexity
from hfaccel.measure.runner_report import paged_logits
from tiny import ids, tiny


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_the_fp32_side_has_the_weights_of_the_patch(family):
    """gpt2: Conv1D and a tied head; mixtral: fused experts."""
    plain, x = tiny(family), ids(1, 12)
    patched = hfaccel.patch(copy.deepcopy(plain), "int4-g32", progress=False)
    wanted = dequantized.oracle(plain, patched, rounds=False)
    found = accuracy.dequantized(copy.deepcopy(plain), patched)
    with torch.no_grad():
        assert not torch.equal(found(x).logits, plain(x).logits)
        torch.testing.assert_close(found(x).logits, wanted(x).logits, atol=1e-5, rtol=1e-5)


def test_a_row_is_the_perplexity_of_both_and_the_distance_of_their_logits(tmp_path, monkeypatch):
    monkeypatch.setenv("HFACCEL_STRICT", "1")
    plain, windows = tiny("llama"), ids(2, 24)
    plain.save_pretrained(tmp_path / "model")
    row = accuracy.accuracy(str(tmp_path / "model"), "int4+kv8", windows, off_grid=False, chunk_tokens=7)
    patched = hfaccel.patch(copy.deepcopy(plain), "int4+kv8", progress=False)
    wanted = dequantized.oracle(plain, patched, rounds=False)
    sizes = {"windows": 2, "window_tokens": 24, "progress": False}
    mine = perplexity(partial(paged_logits, patched), None, windows.flatten(), **sizes).perplexity
    theirs = perplexity(wanted, None, windows.flatten(), **sizes).perplexity
    assert row["perplexity"] == pytest.approx(mine) and row["perplexity_fp32"] == pytest.approx(theirs)
    assert row["difference_percent"] == pytest.approx(100 * (mine / theirs - 1), abs=1e-4)
    with torch.no_grad():
        a, b = (
            x - x.mean(-1, keepdim=True) for x in (paged_logits(patched, windows), wanted(windows).logits)
        )
    assert row["logits_rms"] == pytest.approx(float((a - b).norm() / b.norm()), rel=1e-4)
    assert row["logits_max"] == pytest.approx(float((a - b).abs().max()), rel=1e-4)
    assert 0 < row["logits_rms"] < 0.1
    assert accuracy.table_row(row).startswith(f"| `int4+kv8` | {row['perplexity']:.4f} | ")


def test_only_the_native_plan_is_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("HFACCEL_EXECUTOR", "modules")
    tiny("llama").save_pretrained(tmp_path / "model")
    with pytest.raises(PatchError, match="modules executor"):
        accuracy.accuracy(str(tmp_path / "model"), "int8", ids(1, 8), off_grid=False)
