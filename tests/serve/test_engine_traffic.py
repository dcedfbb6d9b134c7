"""engine.py under traffic: submissions, cancels, refusals and errors at any step, from any thread."""

import gc
import itertools
import os
import random
import threading
import time
import weakref

import pytest

from engines import check_pages_are_back, exact, mixed, patched, prompt_of, run, solo
from hfaccel.lora.adapters import BadAdapter
from hfaccel.measure.adapters import random_adapters
from hfaccel.serve.engine import Engine
from hfaccel.serve.requests import Options, Refused, Request, State
from hfaccel.serve.scheduler import Limits

pytestmark = pytest.mark.usefixtures("strict")


class Traffic:
    """Random submissions, cancels, refusals and errors at any step of one engine; every answer is known.

    Args:
        asked: prompts, options, adapters, and what these give alone. errors: share of steps that fail.
        folders: of adapters, loaded, replaced by themselves and unloaded at any step.
    """

    def __init__(self, engine, asked, seed, *, errors=0.0, folders=None):
        self.engine, self.asked, self.draw, self.errors = engine, asked, random.Random(seed), errors
        self.folders = folders or {}
        self.every: list[tuple[Request, list[int]]] = []

    def submit(self):
        draw = self.draw
        prompt, options, adapter, want = draw.choice(self.asked)
        request = Request(prompt, options, priority=draw.randrange(3), adapter=adapter)
        if adapter is not None and adapter not in self.engine.adapters:
            with pytest.raises(Refused, match="adapter"):
                self.engine.submit(request)
            return
        if draw.random() < 0.05:
            request.listener = lambda request, token: 1 / 0
        self.every.append((self.engine.submit(request), want))

    def step(self):
        draw, engine = self.draw, self.engine
        if draw.random() < 0.4:
            self.submit()
        if draw.random() < 0.1:
            with pytest.raises(Refused, match="never fit"):
                engine.submit(Request(prompt_of(20), Options(max_new_tokens=400)))
        if self.every and draw.random() < 0.1:
            engine.cancel(draw.choice(self.every)[0])
        if self.folders and draw.random() < 0.1:
            self.swap()
        if draw.random() < self.errors:
            self.fail()
        else:
            engine.step()
        held = [r for r in engine.scheduler.running if r.sequence is None]
        assert not held and engine.pool.free_pages >= 0

    def swap(self):
        """An adapter goes, comes or is replaced; a folder that is none changes nothing."""
        name = self.draw.choice([*self.folders, "broken"])
        if name == "broken":
            with pytest.raises(BadAdapter):
                self.engine.load_adapter(name, os.devnull)
        elif name in self.engine.adapters and self.draw.random() < 0.5:
            self.engine.unload_adapter(name)
        else:
            self.engine.load_adapter(name, self.folders[name])

    def fail(self):
        """A step whose computation fails, before or after it has written to pages."""
        engine, real = self.engine, self.engine._run
        late = self.draw.random() < 0.5

        def run(step):
            if late:
                real(step)
            raise ConnectionError("in a step")

        engine._run = run
        before = {r for r, _ in self.every if r.state.over}
        try:
            engine.step()
        finally:
            del engine._run
        failed = [r for r, _ in self.every if r not in before and isinstance(r.error, ConnectionError)]
        assert all(r.sequence is None and r.done.is_set() for r in failed)

    def check(self):
        """Everything is over, right, and gives its pages back."""
        self.engine.drain()
        for request, want in self.every:
            assert request.state.over and request.output == want[: len(request.output)]
            if request.state is State.FINISHED:
                assert request.output == want
            elif request.state is State.FAILED:
                assert isinstance(request.error, (ConnectionError, ZeroDivisionError))
        check_pages_are_back(self.engine)
        assert self.engine.slots.stats()["in_use"] == 0


def known(model, count=14, seed=3, folders=None):
    """Greedy requests with the answers of `generate`, drawn ones and those with adapters with what they get
    alone, and prompts of whole pages."""
    asked = [
        (prompt, Options(max_new_tokens=new), None, want) for prompt, new, want in mixed(model, count, seed)
    ]
    alone = Engine(model, pages=50, adapters=folders, lora_slots=1)
    settings = ({}, {"top_k": 20}, {"top_p": 0.9}, {"repetition_penalty": 1.3})
    drawn = [Options(max_new_tokens=12, temperature=1.0, seed=n, **each) for n, each in enumerate(settings)]
    plain = [Options(max_new_tokens=9)] * 2
    for adapter in (None, *(folders or ())):
        for n, options in enumerate(drawn if adapter is None else plain):
            (request,) = run(alone, Request(prompt_of(8 + 4 * n, 50 + n), options, adapter=adapter))
            asked.append((request.prompt, options, adapter, request.output))
    for length in (4, 8, 12):
        prompt = prompt_of(length, 99)
        asked.append((prompt, Options(max_new_tokens=9), None, solo(model, prompt, 9)))
    return asked


@exact
@pytest.mark.parametrize("policy", ["fcfs", "sjf", "priority"])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("chunked", [True, False])
def test_random_traffic(model, policy, preemption, chunked):
    """At any step: right answers in the end, and every page is back."""
    limits = Limits(
        token_budget=13,
        max_running=5,
        policy=policy,
        chunked=chunked,
        preemption=preemption,
        swap_bytes=16_000,  # not enough for all
    )
    engine = Engine(model, pages=18, limits=limits, clock=itertools.count().__next__)
    traffic = Traffic(engine, known(model), f"{policy}{preemption}{chunked}", errors=0.02)
    for _ in range(160):
        traffic.step()
    traffic.check()
    ends = [request.state for request, _ in traffic.every]
    assert ends.count(State.CANCELLED) > 2 and ends.count(State.FINISHED) > 20 and State.FAILED in ends
    assert engine.stats()["preemptions"] and engine.stats()["cached_tokens"]
    if preemption == "swap":
        assert engine.scheduler.swap.restored and engine.scheduler.swap.refused


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@exact
@pytest.mark.slow
@pytest.mark.skipif("HFACCEL_SOAK_S" not in os.environ, reason="minutes: HFACCEL_SOAK_S=180 runs it")
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="resident memory is read from /proc")
@pytest.mark.timeout(0)
def test_soak(tmp_path):
    """Minutes of traffic (HFACCEL_SOAK_S): after each round no page and no slot is held, no request is alive,
    and the memory of the process stays what it was after a third of the time."""
    models = [patched(), patched("gemma2", kv_bits=8)]
    folders = {
        model: random_adapters(model, tmp_path / str(n), ["a", "b", "c"], rank=3, size=0.3)
        for n, model in enumerate(models)
    }
    every = []
    for model, policy, preemption, prefix in itertools.product(
        models, ("sjf", "priority"), ("recompute", "swap"), (True, False)
    ):
        limits = Limits(
            token_budget=13, max_running=6, policy=policy, preemption=preemption, swap_bytes=20_000
        )
        clock = itertools.count().__next__
        engine = Engine(model, pages=18, limits=limits, prefix_cache=prefix, lora_slots=2, clock=clock)
        every.append((engine, model))
    answers = {model: known(model, folders=folders[model]) for model in models}
    seconds, begin, early, rounds = float(os.environ.get("HFACCEL_SOAK_S", 180)), time.monotonic(), None, 0
    while (now := time.monotonic() - begin) < seconds or rounds < 2 * len(every):
        engine, model = every[rounds % len(every)]
        traffic = Traffic(engine, answers[model], rounds, errors=0.01, folders=folders[model])
        for _ in range(120):
            traffic.step()
        traffic.check()
        alive = weakref.WeakSet(request for request, _ in traffic.every)
        del traffic
        gc.collect()
        assert not alive and not engine._submitted and not engine._cancelled
        rounds += 1
        if early is None and now > seconds / 3 and rounds >= len(every):
            early = resident_bytes()
    assert early is not None and resident_bytes() <= early * 1.05


def test_threads_submit_while_another_steps(model):
    engine, prompts = (
        Engine(model, pages=60, limits=Limits(token_budget=16)),
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


def test_cancelled_requests_free_their_pages_at_the_next_step(model):
    engine = Engine(model, pages=50, limits=Limits(max_running=2, token_budget=8))
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
