"""budget.py: memory = weights + KV + activations + overhead."""

import pytest
import torch

from hfaccel.errors import PatchError
from hfaccel.report import model_bytes
from hfaccel.serve import budget
from hfaccel.serve.budget import Budget, budget_of, kv_bytes_per_token
from tiny import ids, tiny

GB = 10**9


def test_llama_3_8b_on_80_gb():
    """16 GB of weights and 2 GB of overhead leave 54 GB of 80 at 0.90, for 131 KB a token."""
    token = kv_bytes_per_token(layers=32, kv_heads=8, head_size=128)
    assert token == 131_072
    found = Budget(80 * GB, 0.90, 16 * GB, token, overhead_bytes=2 * GB)
    assert found.kv_bytes == 54 * GB
    assert found.tokens == 54 * GB // 131_072
    assert found.requests(4096) == pytest.approx(100.6, abs=0.05)
    assert found.requests(4000) == pytest.approx(103, abs=0.05)
    assert found.pages(16) * 16 <= found.tokens < (found.pages(16) + 1) * 16


def test_eight_bit_pages_take_half_and_their_scales():
    assert kv_bytes_per_token(2, 3, 64, bits=8) == 2 * 2 * 3 * (64 + 4)


@pytest.mark.parametrize("kv_bits", [None, 8])
@pytest.mark.parametrize("family", ["TL", "gpt2"])
def test_the_budget_of_a_model_counts_what_is_there(family, kv_bits):
    model = tiny(family)
    config = model.config
    found = budget_of(model, kv_bits=kv_bits, memory_bytes=10**8, overhead_bytes=10**6, token_budget=8)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = config.hidden_size // config.num_attention_heads
    assert found.kv_bytes_per_token == kv_bytes_per_token(
        config.num_hidden_layers, heads, size, bits=kv_bits or 32
    )
    assert found.weights_bytes == model_bytes(model) > 0
    spent = found.weights_bytes + found.activation_bytes + found.overhead_bytes + found.kv_bytes
    assert spent == 9 * 10**7


def test_pages_that_fit_hold_what_the_budget_says():
    from hfaccel.runtime.runner import Runner

    model = tiny("llama")
    found = budget_of(
        model, memory_bytes=2 * 10**6, utilization=1.0, overhead_bytes=0, token_budget=4, rows=1
    )
    run = Runner(model, page_tokens=4, budget_pages=found.pages(4))
    sequence = run.sequence()
    run.step(ids(1, 3)[0], torch.arange(3), [sequence], [3], torch.tensor([2]))
    stored = sum(x.nbytes for pages in run.pool.layers.values() for x in pages.tensors())
    assert found.kv_bytes - 4 * found.kv_bytes_per_token < stored <= found.kv_bytes


def test_activations_grow_with_tokens_and_rows():
    model = tiny("llama")
    small = budget.activation_bytes(model, 8, 1)
    assert budget.activation_bytes(model, 16, 1) - small == 8 * 4 * (2 * 64 + 2 * 112)
    assert budget.activation_bytes(model, 8, 3) - small == 2 * 256 * 8


def test_what_leaves_nothing_is_refused_with_the_figures():
    with pytest.raises(PatchError, match=r"nothing is left.*10.00 GB less 16.00 GB of weights"):
        Budget(10 * GB, 0.9, 16 * GB, 100)
    for wrong in (0, -1, 1.5, float("nan")):
        with pytest.raises(PatchError, match="memory_utilization"):
            Budget(10 * GB, wrong, 0, 100)
    with pytest.raises(PatchError, match="at least one byte"):
        Budget(10 * GB, 0.9, 0, 0)


def test_free_memory_is_the_smaller_of_machine_and_group(tmp_path):
    info = tmp_path / "meminfo"
    info.write_text("MemTotal:  999 kB\nMemAvailable:  500 kB\n")
    assert budget.available_host_bytes(str(info), str(tmp_path)) == 512_000
    (tmp_path / "memory.max").write_text("400000\n")
    (tmp_path / "memory.current").write_text("100000\n")
    assert budget.available_host_bytes(str(info), str(tmp_path)) == 300_000
    (tmp_path / "memory.max").write_text("max\n")
    assert budget.available_host_bytes(str(info), str(tmp_path)) == 512_000
    with pytest.raises(PatchError, match="does not say"):
        budget.available_host_bytes(str(tmp_path / "none"), str(tmp_path / "none"))


def test_the_device_default_is_what_is_free_and_the_weights():
    model = tiny("llama")
    assert budget.memory_of(model) > model_bytes(model)
    assert budget_of(model).pages(16) > 0
