"""measure/context.py: what the plan says attention costs, and a run over a saved model."""

import pytest
import torch

from hfaccel.cache.pool import PagePool
from hfaccel.errors import PatchError
from hfaccel.generate import mixin
from hfaccel.measure import context
from hfaccel.runtime.native import Native
from tiny import tiny

CONTEXTS = [64, 300]


@pytest.mark.parametrize("kv_bits, bytes_", [(None, 4 * 16), (8, 16 + 4)])
def test_cost_is_counted_from_the_plan(kv_bits, bytes_):
    """llama: 2 layers, 4 heads of 16, 2 KV heads; mistral the same with windows of 8."""
    for family, keys in (("llama", 100), ("mistral", 8)):
        native, pool = Native(tiny(family)), PagePool(bits=kv_bits)
        pool.reserve(1)
        native._find_pages(pool)
        wanted = 2 * keys * 2 * 2 * bytes_, 2 * keys * 4 * 2 * 2 * 16
        assert context.attention_cost(native.plan, pool, 100) == wanted


@pytest.fixture
def folder(tmp_path):
    tiny("llama").save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def test_growth_of_a_model(folder, monkeypatch):
    monkeypatch.setattr(context, "read_bandwidth", lambda threads: 10.0)
    runners = []
    real = mixin.runner_of
    monkeypatch.setattr(mixin, "runner_of", lambda model: runners.append(real(model)) or runners[-1])
    result = context.growth(folder, "int8", CONTEXTS, steps=4, rounds=2, threads=1)
    first, last = result["rows"]
    assert [first["context"], last["context"]] == CONTEXTS and "share" not in first
    assert first["model_ms"] == first["ms"] and len(last["samples_ms"]) == 2
    by_bytes = (last["kv_mb"] - first["kv_mb"]) / 10
    assert last["bytes_ms"] == pytest.approx(by_bytes) and last["flops_ms"] > 0
    assert last["model_ms"] == pytest.approx(first["ms"] + by_bytes + last["flops_ms"])
    assert runners[0].pool.used_pages == 0
    torch.set_num_threads(1)


def test_contexts_that_cannot_be_measured_are_refused(folder):
    for contexts, words in (([128], "two or more"), ([64, 128], "beyond 256"), ([64, 510], "512 positions")):
        with pytest.raises(PatchError, match=words):
            context.growth(folder, "int8", contexts, threads=1)
