"""metrics.py: times are counted as tokens come, not when their request is over."""

import asyncio
import threading

import pytest

from hfaccel.serve.api import create_app
from hfaccel.serve.server import Server

ASKED = {"model": "m", "prompt": [5, 6, 7], "max_tokens": 40, "ignore_eos": True}


@pytest.fixture
def server(model):
    with Server(model, pages=60) as server:
        yield server


@pytest.fixture
def permits(server, monkeypatch):
    """One for each step of the engine."""
    permits, step = threading.Semaphore(0), server.engine.step

    def permitted():
        permits.acquire(timeout=20)
        return step()

    monkeypatch.setattr(server.engine, "step", permitted)
    yield permits
    permits.release(1000)


async def counted(http):
    """Name -> value of the metrics without labels of their own."""
    lines = [line for line in (await http.get("/metrics")).text.splitlines() if line.startswith("vllm:")]
    found = {line.split("{")[0]: float(line.rsplit(" ", 1)[1]) for line in lines}
    return {name.removeprefix("vllm:").removesuffix("_seconds_count"): n for name, n in found.items()}


def test_tokens_are_timed_while_their_request_runs(server, permits, talk):
    app = create_app(server, model_name="m")

    async def conversation(http):
        call = asyncio.create_task(http.post("/v1/completions", json=ASKED))
        for _ in range(30):
            permits.release()
            await asyncio.sleep(0.02)
            if (during := await counted(http))["inter_token_latency"] >= 2:
                break
        permits.release(100)
        assert (await call).json()["usage"]["completion_tokens"] == 40
        return during, await counted(http)

    during, after = talk(app, conversation)
    assert during["inter_token_latency"] == during["generation_tokens_total"] - 1 >= 2
    for name, of_running in {
        "time_to_first_token": 1,
        "request_queue_time": 1,
        "prompt_tokens_total": 3,
        "e2e_request_latency": 0,
        "request_time_per_output_token": 0,
        "request_generation_tokens_count": 0,
    }.items():
        assert during[name] == of_running and after[name] == max(of_running, 1), name
    assert after["inter_token_latency"] == 39 and after["request_generation_tokens_sum"] == 40
    mean_s = after["request_time_per_output_token_seconds_sum"]
    assert after["inter_token_latency_seconds_sum"] == pytest.approx(39 * mean_s)
    both_s = after["time_to_first_token_seconds_sum"] + after["inter_token_latency_seconds_sum"]
    assert both_s == pytest.approx(after["e2e_request_latency_seconds_sum"])


def test_each_choice_is_counted_and_an_embedding_has_no_first_token(server, talk):
    app = create_app(server, model_name="m")

    async def conversation(http):
        await http.post("/v1/completions", json=ASKED | {"n": 3, "max_tokens": 2})
        some = await counted(http)
        await http.post("/v1/embeddings", json={"model": "m", "input": [5, 6, 7, 8]})
        return some, await counted(http)

    some, after = talk(app, conversation)
    assert some["time_to_first_token"] == some["inter_token_latency"] == some["e2e_request_latency"] == 3
    assert after["time_to_first_token"] == 3 and after["e2e_request_latency"] == 4
    assert after["request_queue_time"] == 4 and after["prompt_tokens_total"] == 3 * 3 + 4
