"""engine.py: whatever shares a step, every request gets what it gets alone, and every page comes back."""

import itertools
import random
import threading

import pytest
import torch

from hfaccel.errors import PatchError, UnsupportedModel
from hfaccel.generate import gate, mixin
from hfaccel.serve.engine import Engine
from hfaccel.serve.requests import Options, Refused, Request, State
from hfaccel.serve.scheduler import Limits, Step
from hfaccel_kernels import native
from hfaccel_kernels.layouts import Layout
from plans import quantize
from tiny import ids, tiny

exact = pytest.mark.skipif(not native.available(), reason=f"no C++ kernels: {native.reason()}")


@pytest.fixture(autouse=True)
def _strict(monkeypatch):
    monkeypatch.setenv("HFACCEL_STRICT", "1")


def patched(family="llama", *, layout=None, dtype=torch.float32, kv_bits=None):
    model = tiny(family)
    if layout is not None:
        quantize(model, layout)
    model.to(dtype)
    mixin.install(model, kv_bits=kv_bits, page_tokens=4)
    return model


@pytest.fixture(scope="module")
def llama():
    return patched()


def solo(model, prompt, new, **kwargs):
    options = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0} | kwargs
    return model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()


def prompt_of(length, seed=0):
    return ids(1, length, seed=seed)[0].tolist()


def run(engine, *requests):
    for request in requests:
        engine.submit(request)
    engine.drain()
    return requests


def check_pages_are_back(engine):
    stats = engine.stats()
    assert stats["running"] == stats["waiting"] == 0 and stats["used_pages"] == stats["cached_pages"]
    if engine.tree is not None:
        assert engine.tree.evictable == len(engine.tree)
        engine.tree.clear()
    assert engine.pool.used_pages == 0 and not any(engine.pool.references)


def mixed(model, count=9, seed=0):
    """Prompts of many lengths, half of them with a common beginning, and their own answers."""
    draw, head = random.Random(seed), prompt_of(13, 99)
    asked = []
    for n in range(count):
        prompt = (head if n % 2 else []) + prompt_of(draw.randrange(1, 24), n)
        new = draw.choice((1, 8, 19, 29))
        asked.append((prompt, new, solo(model, prompt, new)))
    return asked


@exact
@pytest.mark.parametrize(
    "variant",
    [
        {"family": "llama"},
        {"family": "gemma2"},
        {"family": "gpt2", "kv_bits": 8},
        {"family": "llama", "layout": Layout(8), "dtype": torch.bfloat16},
        {"family": "llama", "layout": Layout(4, 64, False, "fp16"), "kv_bits": 8},
    ],
    ids=str,
)
@pytest.mark.parametrize("chunked", [True, False])
def test_greedy_answers_are_those_of_generate(variant, chunked):
    """Bit for bit in the native plan, with chunks, hits in the prefix tree and preemption."""
    model = patched(**variant)
    asked = mixed(model)
    limits = Limits(token_budget=11, chunked=chunked)
    engine = Engine(model, pages=17, limits=limits)
    assert engine.runner.refresh().name == "native"
    requests = run(engine, *(Request(prompt, Options(max_new_tokens=new)) for prompt, new, _ in asked))
    for request, (_, _, want) in zip(requests, asked, strict=True):
        assert request.output == want and request.finish_reason == "length"
    stats = engine.stats()
    assert stats["preemptions"] and stats["cached_tokens"]
    check_pages_are_back(engine)


@pytest.mark.parametrize("family", ["llama", "gemma2", "bloom"])
def test_modules_answer_with_the_best_tokens_of_a_dense_forward(family, monkeypatch):
    """Where a sum may differ by an ulp: each token is the best one of transformers' own forward, or as good
    as that."""
    monkeypatch.setenv("HFACCEL_EXECUTOR", "modules")
    model = patched(family)
    engine = Engine(model, pages=17, limits=Limits(token_budget=11))
    assert engine.runner.refresh().name == "modules"
    head = prompt_of(9, 99)
    prompts = [(head if n % 2 else []) + prompt_of(3 + 4 * n, n) for n in range(6)]
    for request in run(engine, *(Request(prompt, Options(max_new_tokens=9)) for prompt in prompts)):
        with torch.no_grad():
            logits = model(torch.tensor([request.tokens]), use_cache=False).logits[0]
        at = torch.arange(len(request.prompt) - 1, request.length - 1)
        chosen = logits[at, torch.tensor(request.output)]
        assert len(request.output) == 9 and (logits[at].max(-1).values - chosen).max() < 1e-3
    assert engine.stats()["preemptions"] and engine.stats()["cached_tokens"]
    check_pages_are_back(engine)


@exact
def test_prompts_that_are_all_cached(llama):
    """Case K6: lengths around and at multiples of the page, then shared beginnings, then recycled pages."""
    engine = Engine(llama, pages=20)
    for length in (3, 4, 5, 8, 12):
        prompt = prompt_of(length, 40 + length)
        want = solo(llama, prompt, 4)
        first, second = (run(engine, Request(prompt, Options(max_new_tokens=4)))[0] for _ in range(2))
        assert first.output == second.output == want
        assert first.cached_tokens == 0
        # whole pages of the prompt, and of the answer behind it; one token is always computed
        assert second.cached_tokens == min(length - 1, (length + 3) // 4 * 4)
    for _ in range(2):
        head = prompt_of(8, 7)
        for tail in (1, 2):
            prompt = head + prompt_of(3, tail)
            (request,) = run(engine, Request(prompt, Options(max_new_tokens=4)))
            assert request.output == solo(llama, prompt, 4)
        assert request.cached_tokens >= 8
        for seed in range(100, 106):  # every page is used again
            run(engine, Request(prompt_of(15, seed), Options(max_new_tokens=2)))
        assert engine.tree.evicted
    check_pages_are_back(engine)


@exact
def test_seeded_draws_repeat_whatever_runs_beside_them(llama):
    options = Options(max_new_tokens=24, temperature=1.2, top_k=40, top_p=0.95, seed=5)
    prompt = prompt_of(9, 1)
    torch.manual_seed(3)
    state = torch.random.get_rng_state()
    (alone,) = run(Engine(llama, pages=50), Request(prompt, options))
    torch.manual_seed(4)
    crowd = Engine(llama, pages=14, limits=Limits(token_budget=6))
    others = [Request(prompt_of(5 + n, n), Options(max_new_tokens=24, temperature=1.0)) for n in range(6)]
    found = run(crowd, *others[:3], Request(prompt, options), *others[3:])[3]
    assert found.output == alone.output and crowd.stats()["preemptions"]
    torch.manual_seed(3)
    (again,) = run(Engine(llama, pages=50), Request(prompt, options))
    assert again.output == alone.output
    assert torch.equal(torch.random.get_rng_state(), state)
    (other,) = run(Engine(llama, pages=50), Request(prompt, Options(**(vars(options) | {"seed": 6}))))
    assert other.output != alone.output


@exact
def test_greedy_and_drawn_requests_share_steps(llama):
    """Chunks, plain rows and drawn ones in one step: each is what it is alone."""
    prompts = [prompt_of(5 + 3 * n, n) for n in range(6)]
    options = [Options(max_new_tokens=8, temperature=float(n % 2), seed=n) for n in range(6)]
    alone = [
        run(Engine(llama, pages=50), Request(*ask))[0].output for ask in zip(prompts, options, strict=True)
    ]
    engine = Engine(llama, pages=50, limits=Limits(token_budget=9))
    together = run(engine, *(Request(*ask) for ask in zip(prompts, options, strict=True)))
    assert [request.output for request in together] == alone
    assert alone[0] == solo(llama, prompts[0], 8) and alone[1] != solo(llama, prompts[1], 8)


@exact
def test_ends(llama):
    prompt = prompt_of(7, 3)
    free = solo(llama, prompt, 12)
    end = free[5]
    at = free.index(end) + 1
    engine = Engine(llama, pages=50)

    def answer(**options):
        (request,) = run(engine, Request(prompt, Options(max_new_tokens=12, **options)))
        return request.output, request.finish_reason

    assert answer() == (free, "length")
    assert answer(stop_ids=[end]) == (free[:at], "stop")
    before = llama.generation_config.eos_token_id
    try:
        for ends in (end, [255, end]):
            llama.generation_config.eos_token_id = ends
            assert answer() == (free[:at], "stop")
            assert answer()[0] == solo(llama, prompt, 12)
            assert answer(ignore_eos=True) == (free, "length")
            assert answer(ignore_eos=True, stop_ids=[end]) == (free[:at], "stop")
    finally:
        llama.generation_config.eos_token_id = before
    seen = []
    (request,) = run(
        engine,
        Request(
            prompt,
            Options(max_new_tokens=12),
            listener=lambda r, token: seen.append(token),
            stop=lambda output: len(output) == 3,
        ),
    )
    assert (request.output, request.finish_reason) == (free[:3], "stop") and seen == [*free[:3], None]


@exact
def test_an_error_in_a_step_fails_those_in_it_and_nobody_else(llama, monkeypatch):
    engine = Engine(llama, pages=50, limits=Limits(max_running=2))
    asked = [(prompt_of(6, n), 6) for n in range(4)]
    requests = [engine.submit(Request(p, Options(max_new_tokens=new))) for p, new in asked]
    engine.step()
    real = type(engine.runner.executor).best
    broken = iter([True])

    def best(self, *args, **kwargs):
        if next(broken, False):
            raise RuntimeError("out of luck")
        return real(self, *args, **kwargs)

    monkeypatch.setattr(type(engine.runner.executor), "best", best)
    engine.step()
    for request in requests[:2]:
        assert request.state is State.FAILED and request.finish_reason == "error" and request.done.is_set()
        assert isinstance(request.error, RuntimeError) and request.sequence is None
    engine.drain()
    for request, (prompt, new) in zip(requests[2:], asked[2:], strict=True):
        assert request.output == solo(llama, prompt, new)
    check_pages_are_back(engine)


@exact
def test_an_error_of_a_listener_or_of_its_logits_is_its_own(llama, monkeypatch):
    from hfaccel.serve import engine as module

    def broken(request, token):
        if len(request.output) == 2:
            raise ZeroDivisionError

    engine = Engine(llama, pages=50)
    prompts = [prompt_of(6, n) for n in range(3)]
    bad = Request(prompts[0], Options(max_new_tokens=6), listener=broken)
    cursed = Request(prompts[1], Options(max_new_tokens=6, temperature=1.0, seed=0))
    good = Request(prompts[2], Options(max_new_tokens=6))
    real = module.choose

    def choose(row, request):
        return real(row * float("nan") if request is cursed else row, request)

    monkeypatch.setattr(module, "choose", choose)
    run(engine, bad, cursed, good)
    assert bad.state is cursed.state is State.FAILED
    assert isinstance(bad.error, ZeroDivisionError) and len(bad.output) == 2
    assert isinstance(cursed.error, ValueError) and not cursed.output
    assert good.output == solo(llama, prompts[2], 6)
    check_pages_are_back(engine)


def test_a_step_that_only_preempts_is_no_error(llama, monkeypatch):
    engine, prompt = Engine(llama, pages=50), prompt_of(6)
    request = engine.submit(Request(prompt, Options(max_new_tokens=4)))
    engine.step()
    real, first = engine.scheduler.schedule, iter([True])

    def schedule():
        if next(first, False):
            engine.scheduler.preempt_all()
            return Step(preempted=[request])
        return real()

    monkeypatch.setattr(engine.scheduler, "schedule", schedule)
    engine.drain()
    assert request.output == solo(llama, prompt, 4) and request.preemptions == 1
    check_pages_are_back(engine)


def test_a_token_without_an_embedding_fails_its_request_alone(llama, monkeypatch):
    from hfaccel.serve import engine as module

    monkeypatch.setattr(module, "choose", lambda row, request: 256)
    engine = Engine(llama, pages=50)
    odd = Request(prompt_of(4, 1), Options(max_new_tokens=4, temperature=1.0))
    good = Request(prompt_of(4, 2), Options(max_new_tokens=4))
    run(engine, odd, good)
    assert odd.state is State.FAILED and "256 embeddings" in str(odd.error)
    assert len(good.output) == 4
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


@exact
def test_edited_weights_find_no_pages_of_former_ones():
    model = patched()
    engine, prompt = Engine(model, pages=50), prompt_of(12, 1)
    run(engine, Request(prompt, Options(max_new_tokens=4)))
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.mul_(-1)
    (after,) = run(engine, Request(prompt, Options(max_new_tokens=4)))
    assert after.cached_tokens == 0 and after.output == solo(model, prompt, 4)
    (again,) = run(engine, Request(prompt, Options(max_new_tokens=4)))
    assert again.cached_tokens == 11 and again.output == after.output


@exact
def test_a_retyped_model_goes_on_over_new_pages():
    model = patched()
    engine, prompt = Engine(model, pages=50), prompt_of(12, 1)
    run(engine, Request(prompt, Options(max_new_tokens=4)))
    under_way = engine.submit(Request(prompt_of(9, 2), Options(max_new_tokens=20)))
    engine.step()
    model.to(torch.bfloat16)
    (after,) = run(engine, Request(prompt, Options(max_new_tokens=4)))
    assert after.cached_tokens == 0 and after.output == solo(model, prompt, 4)
    assert len(under_way.output) == 20 and under_way.preemptions == 1
    assert engine.pool.layers[0].k.dtype == torch.bfloat16
    check_pages_are_back(engine)


def test_the_model_is_in_use_while_requests_are_under_way():
    model = patched()
    engine = Engine(model, pages=50)
    request = engine.submit(Request(prompt_of(4), Options(max_new_tokens=3)))
    engine.step()
    with pytest.raises(PatchError, match="generating"), gate.alone(model, "unpatch"):
        pass
    engine.drain()
    assert request.state is State.FINISHED
    with gate.alone(model, "unpatch"):
        pass
    mixin.uninstall(model)
    with pytest.raises(Refused, match="unpatched"):
        engine.submit(Request(prompt_of(4)))
    mixin.install(model, page_tokens=4)
    engine = Engine(model, pages=50)
    model.train()
    with pytest.raises(Refused, match="training mode"):
        engine.submit(Request(prompt_of(4)))


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


def test_what_can_never_be_served_is_refused_at_once(llama):
    engine = Engine(llama, pages=5)
    running = engine.submit(Request(prompt_of(6), Options(max_new_tokens=3)))
    engine.step()
    for request, why in (
        (Request(prompt_of(18), Options(max_new_tokens=4)), "can never fit"),
        (Request([256]), "vocabulary of 256"),
        (Request([5], adapter="mine"), "'mine' is not loaded"),
        (running, "submitted before"),
    ):
        with pytest.raises(Refused, match=why):
            engine.submit(request)
    engine.drain()
    assert len(running.output) == 3
    engine.submit(late := Request(prompt_of(3), Options(max_new_tokens=3)))
    engine.close()
    assert late.state is State.CANCELLED and engine.pool.used_pages == 0
    with pytest.raises(Refused, match="closed"):
        engine.submit(Request(prompt_of(3)))


def test_learned_positions_end_a_request_before_it_starts():
    engine = Engine(patched("gpt2"), pages=200)
    with pytest.raises(Refused, match="512 learned positions"):
        engine.submit(Request(prompt_of(500), Options(max_new_tokens=14)))
    engine.submit(Request(prompt_of(500), Options(max_new_tokens=13)))
    engine.close()


def test_models_that_steps_cannot_serve_are_refused_by_name():
    with pytest.raises(PatchError, match="not patched"):
        Engine(tiny("llama"), pages=4)
    dynamic = tiny("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    mixin.install(dynamic)
    with pytest.raises(UnsupportedModel, match="dynamic rope"):
        Engine(dynamic, pages=4)
    for pages in (0, True, 2.0):
        with pytest.raises(PatchError, match="pages"):
            Engine(patched(), pages=pages)


def test_pages_come_from_the_memory_budget(llama):
    """Room for every request at the model's full context, where memory allows for that much."""
    assert Engine(llama, limits=Limits(max_running=3)).pool.capacity == 3 * 512 // 4
    with pytest.raises(PatchError, match="nothing is left for keys and values"):
        Engine(llama, memory_utilization=1e-9)
