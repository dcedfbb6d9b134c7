"""measure/engine.py: each part over a tiny model, and how gaps are told apart."""

import pytest

from hfaccel.measure import engine
from tiny import tiny

TOKENS = [(7 * n) % 90 + 1 for n in range(4000)]


@pytest.fixture(scope="module")
def model():
    import hfaccel

    made = tiny("llama")
    hfaccel.patch(made, "int8", progress=False)
    return made


def test_a_shared_prompt_is_found_again_and_a_new_one_each_round_is_not(model):
    made = engine.prefix(model, TOKENS, shared=64, own=8, rounds=3)
    assert 48 <= made["cached_tokens"] <= 64 and len(made["ratios"]) == 3
    assert made["first_ttft_s"] > 0 and made["ratio"] > 0


def test_a_long_prompt_is_cut_and_not_cut(model):
    made = engine.long(model, TOKENS, prompt=200, streams=2, new=60, rounds=1, budgets=(16,))
    cut, whole = made["rows"]
    assert cut["chunked"] and not whole["chunked"]
    assert all(row["worst_gap_s"] > 0 and row["median_gap_s"] > 0 for row in made["rows"])


def test_gaps_are_those_before_the_prompt_came_and_those_until_its_first_token():
    class Stream:
        def __init__(self, times):
            self.times = times

    streams = [Stream([0.0, 1.0, 2.0, 3.0, 7.0, 8.0, 9.0]), Stream([1.0, 2.5, 3.5, 8.5])]
    before, during = engine._gaps(streams, came=3.2, first=7.5)
    assert before == [1.0, 1.0, 1.5]
    assert during == [4.0, 1.0, 1.0, 5.0]


def test_adapters_beside_the_base(model):
    made = engine.lora(model, TOKENS, requests=3, loaded=4, prompt=8, new=4, rounds=1)
    few, all_ = made["rows"]
    assert few["targets"] == list(engine.QV) and len(all_["targets"]) == 7
    hidden, keys = model.config.hidden_size, model.config.num_key_value_heads * model.config.head_dim
    values = 2 * engine.RANK * (2 * hidden + hidden + keys)  # two layers, queries and values
    assert few["adapter_bytes"] == values * model.dtype.itemsize
    assert few["step_bytes"]["adapters"] == 3 * few["adapter_bytes"]
    assert few["over_base"]["base"] == 1 and few["over_base"]["distinct"] > 0


def test_figures_are_shown(model):
    made = {"model": "m", "recipe": "int8", "threads": 1, "cpu": "c"}
    for part, sizes in (
        ("prefix", {"shared": 32, "own": 4}),
        ("long", {"prompt": 64, "streams": 2, "new": 24, "budgets": (16,)}),
        ("lora", {"requests": 2, "loaded": 2, "prompt": 4, "new": 3}),
    ):
        made[part] = {"read_bandwidth_gb_s": 10.0, **engine.PARTS[part](model, TOKENS, rounds=1, **sizes)}
    shown = engine.show(made)
    assert "32 shared tokens" in shown and "64 tokens beside 2 streams" in shown and "all linears" in shown
