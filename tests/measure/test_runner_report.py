"""measure/runner_report.py: its figures on tiny models, and that they would fail where they must."""

import pytest
import torch

from hfaccel.generate import mixin
from hfaccel.measure import runner_report
from tiny import ids, tiny


def patched(kv_bits=None, **kwargs):
    model = tiny("TL", **kwargs)
    mixin.install(model, kv_bits=kv_bits, page_tokens=16)
    return model


@pytest.fixture(autouse=True)
def _modules_only(monkeypatch):
    monkeypatch.setenv("HFACCEL_EXECUTOR", "modules")


def test_pages_waste_under_four_percent():
    found = runner_report.waste(sequences=60, alive=16)
    assert 0 < found["waste_paged"] < 0.04 < 0.3 < found["waste_contiguous"]
    coarse = runner_report.waste(page_tokens=256, sequences=60, alive=16)
    assert coarse["waste_paged"] > found["waste_paged"]


@pytest.mark.parametrize("kv_bits", [None, 8])
def test_memory_of_decode_does_not_follow_context(kv_bits):
    """64 rows on 1,024 and 2,048 slots: nothing made is larger, and nothing is as large as one dense K."""
    model = patched(kv_bits, max_position_embeddings=4096, vocab_size=1024)
    found = runner_report.memory(model, rows=64, context=1024)
    assert found["bytes_per_token"] == found["bytes_per_token_arithmetic"]
    short, long = found["largest_allocation_bytes"].values()
    assert short == long < found["one_dense_k_bytes"] / 4
    assert mixin.runner_of(model).pool.used_pages == 0


def test_steady_decode_takes_a_page_per_sixteen_tokens_and_no_storage():
    model = patched()
    run = mixin.runner_of(model)
    sequence = run.sequence(expect_tokens=400)
    zero = torch.zeros(1, dtype=torch.long)
    run.step(zero, zero, [sequence], [1], zero)
    version, pages = run.pool.version, run.pool.used_pages
    for i in range(1, 161):
        run.step(zero, zero + i, [sequence], [1], zero)
    assert run.pool.version == version and run.pool.used_pages - pages == 160 // 16
    sequence.free()


@pytest.mark.parametrize("kv_bits", [None, 8])
def test_paged_logits_equal_a_dense_forward(kv_bits):
    model, x = patched(kv_bits), ids(2, 50, vocab=512)
    got = runner_report.paged_logits(model, x, chunk_tokens=16)
    with torch.no_grad():
        want = model(x, use_cache=False).logits
    if kv_bits is None:
        torch.testing.assert_close(got, want, atol=1e-4, rtol=0)
    else:
        assert 0 < (got - want).std() < 0.05 * want.std()


def test_equality_counts_a_wrong_model_as_wrong():
    plain, x = tiny("TL"), [ids(1, 9, vocab=512)[0], ids(1, 4, seed=1, vocab=512)[0]]
    found = runner_report.equality(plain, patched(), x, 12)
    assert (found["wrong"], found["tokens"], found["calls"]) == (0, 24, {"modules": 1})
    assert runner_report.equality(plain, patched(seed=1), x, 12)["wrong"] > 12


def test_verdicts_fail_where_a_limit_is_passed():
    def equality(wrong, share):
        return {"equality": {"modules": {"wrong": wrong, "ignored_share": share}}}

    def kv8(value):
        return {"perplexity": {"fp32 pages": {"perplexity": 10.0}, "kv8": {"perplexity": value}}}

    for good, bad in (
        ({"waste": {"waste_paged": 0.03}}, {"waste": {"waste_paged": 0.05}}),
        (equality(0, 0.02), equality(1, 0.0)),
        (equality(0, 0.0), equality(0, 0.021)),
        (kv8(10.01), kv8(10.03)),
        (
            {"speed": [{"batch": 1, "times_faster": 1.0}, {"batch": 8, "times_faster": 1.2}]},
            {"speed": [{"batch": 8, "times_faster": 0.99}]},
        ),
        ({"sampling": {"chi_square": 9.0}}, {"sampling": {"chi_square": 30.0}}),
    ):
        assert all(runner_report.verdicts(good).values()) and runner_report.verdicts(good)
        assert not all(runner_report.verdicts(bad).values())


def test_sampling_draws_only_from_the_cells():
    found = runner_report.sampling(patched(), draws=400, cells=4)
    assert found["draws"] == 400 and found["degrees_of_freedom"] == 3 and found["chi_square"] < 16.3


def test_speed_compares_the_same_steps():
    one, eight = runner_report.speed(tiny("TL"), patched(), lengths=(3, 5, 9), new_tokens=4, rounds=1)
    assert (one["batch"], eight["batch"]) == (1, 3)
    assert one["times_faster"] == pytest.approx(one["plain_ms"] / one["patched_ms"])
