"""engine.py under traffic: submissions, cancels and refusals at any step, from any thread."""

import itertools
import random
import threading

import pytest

from engines import check_pages_are_back, exact, mixed, patched, prompt_of
from hfaccel.serve.engine import Engine
from hfaccel.serve.requests import Options, Refused, Request, State
from hfaccel.serve.scheduler import Limits


@pytest.fixture(autouse=True)
def _strict(monkeypatch):
    monkeypatch.setenv("HFACCEL_STRICT", "1")


@pytest.fixture(scope="module")
def llama():
    return patched()


@exact
@pytest.mark.parametrize("policy", ["sjf", "priority"])
def test_random_traffic(llama, policy):
    """Submissions, cancels and refusals at any step: right answers, and the pages of the beginning."""
    draw = random.Random(policy)
    asked = mixed(llama, 14, seed=3)
    limits = Limits(token_budget=13, max_running=5, policy=policy)
    engine = Engine(llama, pages=18, limits=limits, clock=itertools.count().__next__)
    every = []
    for _ in range(120):
        if draw.random() < 0.4:
            prompt, new, want = draw.choice(asked)
            request = Request(prompt, Options(max_new_tokens=new), priority=draw.randrange(3))
            every.append((engine.submit(request), want))
        if draw.random() < 0.1:
            with pytest.raises(Refused):
                engine.submit(Request(prompt_of(20), Options(max_new_tokens=400)))
        if every and draw.random() < 0.1:
            engine.cancel(draw.choice(every)[0])
        engine.step()
    engine.drain()
    ends = [request.state for request, _ in every]
    assert ends.count(State.CANCELLED) > 2 and ends.count(State.FINISHED) > 20
    assert set(ends) == {State.CANCELLED, State.FINISHED} and engine.stats()["preemptions"]
    for request, want in every:
        assert request.output == want[: len(request.output)]
        assert request.state is State.CANCELLED or request.output == want
    check_pages_are_back(engine)


def test_threads_submit_while_another_steps(llama):
    engine, prompts = (
        Engine(llama, pages=60, limits=Limits(token_budget=16)),
        [prompt_of(n) for n in range(3, 15)],
    )
    requests = [Request(prompt, Options(max_new_tokens=5)) for prompt in prompts]
    over = threading.Event()

    def serve():
        while not over.is_set():
            engine.step()

    threads = [threading.Thread(target=engine.submit, args=(request,)) for request in requests]
    server = threading.Thread(target=serve)
    for thread in (server, *threads):
        thread.start()
    try:
        assert all(request.done.wait(60) for request in requests)
    finally:
        over.set()
        server.join()
    assert all(len(request.output) == 5 for request in requests)
    assert sorted(request.order for request in requests) == list(range(12))
    check_pages_are_back(engine)


def test_cancelled_requests_free_their_pages_at_the_next_step(llama):
    engine = Engine(llama, pages=50, limits=Limits(max_running=2, token_budget=8))
    long = Request(prompt_of(30, 1), Options(max_new_tokens=9))
    short, queued, unseen = (Request(prompt_of(5, n), Options(max_new_tokens=9)) for n in (2, 3, 4))
    for request in (short, long, queued):
        engine.submit(request)
    engine.step()
    assert long.computed and long.left  # in the middle of its prompt
    engine.submit(unseen)
    for request in (long, queued, unseen):
        engine.cancel(request)
    engine.step()
    for request in (long, queued, unseen):
        assert request.state is State.CANCELLED and request.sequence is None and request.done.is_set()
    engine.drain()
    assert short.finish_reason == "length"
    engine.cancel(short)
    engine.step()
    assert short.state is State.FINISHED
    check_pages_are_back(engine)
