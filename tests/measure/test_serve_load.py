"""measure/serve_load.py: what is sent comes from the seed alone, and what was got is summed up right."""

import math
import time
from collections import Counter

import numpy
import pytest

from hfaccel.errors import PatchError, UnknownName
from hfaccel.measure import serve_load
from hfaccel.measure.serve_load import Load, bench_serve, combined, parse_peer, percentile, summary
from test_readme import _tokenizer
from tiny import tiny

TOKENS = list(range(1000))


def test_the_same_seed_sends_the_same_requests_and_rounds_differ():
    load = Load(users=5, requests=20, prompt=(4, 40), new=(2, 9), rate=3.0, adapters=("a", "b"))
    assert load.jobs(TOKENS, 1) == load.jobs(TOKENS, 1)
    assert load.jobs(TOKENS, 0) != load.jobs(TOKENS, 1)
    assert load.jobs(TOKENS) != Load(**{**vars(load), "seed": 1}).jobs(TOKENS)


def test_lengths_are_within_their_ends_and_reach_them():
    jobs = Load(requests=400, prompt=(4, 16), new=(1, 3)).jobs(TOKENS)
    assert {len(job["prompt"]) for job in jobs} == set(range(4, 17))
    assert {job["new_tokens"] for job in jobs} == {1, 2, 3}
    short = sum(len(job["prompt"]) <= 8 for job in jobs)
    assert short > 200  # evenly in the logarithm: half of them lie in 4 to 8


def test_prompts_are_cut_one_after_the_other_behind_what_they_share():
    jobs = Load(users=3, prompt=(10, 10), new=(1, 1), shared=5).jobs(TOKENS)
    assert all(job["prompt"][:5] == TOKENS[:5] and len(job["prompt"]) == 15 for job in jobs)
    own = [token for job in jobs for token in job["prompt"][5:]]
    assert len(set(own)) == 30 and min(own) >= 5
    with pytest.raises(PatchError, match="too short for prompts of 15"):
        Load(prompt=(10, 10), shared=5).jobs(TOKENS[:12])


def test_poisson_times_rise_with_the_mean_that_was_asked_for():
    times = [job["at"] for job in Load(requests=2000, rate=4.0).jobs(TOKENS)]
    gaps = numpy.diff([0.0, *times])
    assert (gaps > 0).all()
    assert gaps.mean() == pytest.approx(0.25, rel=0.1)
    assert gaps.std() == pytest.approx(0.25, rel=0.15)  # of an exponential: as large as the mean
    assert "at" not in Load().jobs(TOKENS)[0]


def test_adapters_follow_zipf():
    names = tuple("abcd")
    found = Counter(job["adapter"] for job in Load(requests=4000, adapters=names, zipf=1.0).jobs(TOKENS))
    total = sum(1 / (n + 1) for n in range(4))
    for n, name in enumerate(names):
        assert found[name] / 4000 == pytest.approx(1 / (n + 1) / total, abs=0.03)
    even = Counter(job["adapter"] for job in Load(requests=4000, adapters=names, zipf=0.0).jobs(TOKENS))
    assert max(even.values()) - min(even.values()) < 200


@pytest.mark.parametrize(
    "given, named",
    [
        ({"users": 0}, "users"),
        ({"requests": 0}, "requests"),
        ({"prompt": (5, 4)}, "prompt"),
        ({"new": (0, 4)}, "new"),
        ({"rate": 0.0}, "rate"),
        ({"rate": math.inf}, "rate"),
        ({"shared": -1}, "shared"),
        ({"zipf": math.nan}, "zipf"),
    ],
)
def test_a_load_that_cannot_be_is_refused_by_name(given, named):
    with pytest.raises(PatchError, match=named):
        Load(**given)


@pytest.mark.parametrize("share", [0, 1, 50, 90, 99, 100])
def test_percentiles_are_numpys(share):
    values = numpy.random.default_rng(0).exponential(size=37).tolist()
    assert percentile(values, share) == pytest.approx(numpy.percentile(values, share))
    assert math.isnan(percentile([], share))


def record(at, times, error=None):
    return {"at": at, "times": times, "tokens": len(times), "error": error}


def test_a_summary_of_requests_by_hand():
    made = summary([record(0.0, [1.0, 1.5, 3.0]), record(1.0, [2.0, 4.0]), record(0.5, [0.6], "lost")])
    assert (made["requests"], made["failed"], made["output_tokens"]) == (3, 1, 5)
    assert made["seconds"] == 4.0 and made["output_tokens_s"] == 1.25 and made["requests_s"] == 0.5
    assert made["ttft_s_p50"] == 1.0
    assert made["inter_token_s_p50"] == 1.5 and made["inter_token_s_max"] == 2.0
    assert made["end_to_end_s_max"] == 3.0
    assert made["errors"] == {"lost": 1}


def test_nothing_but_errors_is_a_rate_of_zero():
    made = summary([record(0.0, [], "refused"), record(0.0, [], "refused")])
    assert made["output_tokens_s"] == 0 and made["errors"] == {"refused": 2}


def test_rounds_are_combined_by_their_medians():
    rounds = [summary([record(0.0, [float(end)])]) for end in (1, 2, 10)]
    rounds[1]["errors"], rounds[1]["failed"] = {"lost": 2}, 2
    made = combined(rounds)
    assert made["ttft_s_p50"] == 2.0 and made["output_tokens_s"] == 0.5
    assert made["requests"] == 3 and made["failed"] == 2 and made["errors"] == {"lost": 2}


def test_peers_have_names_and_variants():
    assert parse_peer("vllm") == ("vllm", "bf16")
    assert parse_peer("llama-server:Q8_0") == ("llama-server", "Q8_0")
    with pytest.raises(UnknownName, match="vllm, hf, llama-server"):
        parse_peer("sglang")
    with pytest.raises(UnknownName, match="bf16, fp32"):
        parse_peer("vllm:int3")


def test_our_server_and_peers_that_are_not_there_are_rows(tmp_path, monkeypatch):
    """The whole way, through a process of its own, with adapters that are made for it."""
    monkeypatch.setattr(serve_load, "read_bandwidth", lambda threads: 10.0)
    model = tiny("llama")
    model.save_pretrained(tmp_path / "model")
    _tokenizer(model.config.vocab_size).save_pretrained(tmp_path / "model")
    monkeypatch.setattr(serve_load, "text", lambda name: "a b c d e f g h " * 40)
    folder, load = str(tmp_path / "model"), Load(users=3, prompt=(4, 9), new=(3, 3))
    with pytest.raises(PatchError, match="adapters"):
        bench_serve(folder, ["int8"], Load(adapters=("a",)), against=["hf"])
    named = {**vars(load), "adapters": ("a", "b"), "requests": 6}
    made = bench_serve(folder, ["int8"], Load(**named), adapter_rank=2, rounds=1, threads=1)
    (ours,) = made["rows"]
    assert ours["failed"] == 0 and ours["output_tokens"] == 18 and ours["ratio"] == 1
    python = tmp_path / "python"
    python.write_text("""#!/bin/sh\necho '{"error": "ModuleNotFoundError: No module named vllm"}'\n""")
    python.chmod(0o755)
    missing = bench_serve(folder, [], load, against=["vllm"], peer_python={"vllm": str(python)}, rounds=1)
    assert "vllm=PATH" in missing["rows"][0]["error"]


def test_the_cpu_time_of_asking_a_url_is_counted_apart(tmp_path, monkeypatch):
    class Busy:
        def __init__(self, url, model, headers):
            pass

        def send(self, job, record):
            end = time.process_time() + 0.02
            while time.process_time() < end:
                pass
            record.came(job["new_tokens"])
            record.over()

    monkeypatch.setattr(serve_load, "read_bandwidth", lambda threads: 10.0)
    monkeypatch.setattr(serve_load, "text", lambda name: "a b c d e f g h " * 40)
    monkeypatch.setattr(serve_load, "Url", Busy)
    _tokenizer(64).save_pretrained(tmp_path)
    (row,) = bench_serve(str(tmp_path), [], Load(users=2, prompt=(4, 4)), urls=["there"], rounds=1)["rows"]
    assert row["failed"] == 0 and row["client_cpu_s"] >= 2 * 0.02
