"""engine.py: what is refused before it starts, and what fails alone."""

import pytest

from engines import check_pages_are_back, exact, patched, prompt_of, run, solo
from hfaccel.errors import PatchError, UnsupportedModel
from hfaccel.generate import gate, mixin
from hfaccel.serve.engine import Engine
from hfaccel.serve.requests import Options, Refused, Request, State
from hfaccel.serve.scheduler import Limits, Step
from tiny import tiny

pytestmark = pytest.mark.usefixtures("strict")


@exact
def test_an_error_in_a_step_fails_those_in_it_and_nobody_else(model, monkeypatch):
    engine = Engine(model, pages=50, limits=Limits(max_running=2))
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
        assert request.output == solo(model, prompt, new)
    check_pages_are_back(engine)


@exact
def test_an_error_of_a_listener_or_of_its_logits_is_its_own(model, monkeypatch):
    from hfaccel.serve import forward as module

    def broken(request, token):
        if len(request.output) == 2:
            raise ZeroDivisionError

    engine = Engine(model, pages=50)
    prompts = [prompt_of(6, n) for n in range(3)]
    bad = Request(prompts[0], Options(max_new_tokens=6), listener=broken)
    cursed = Request(prompts[1], Options(max_new_tokens=6, temperature=1.0, seed=0))
    good = Request(prompts[2], Options(max_new_tokens=6))
    real = module.draw

    def draw(row, request, values, ids):
        broken = float("nan") if request is cursed else 1.0
        return real(row * broken, request, values * broken, ids)

    monkeypatch.setattr(module, "draw", draw)
    run(engine, bad, cursed, good)
    assert bad.state is cursed.state is State.FAILED
    assert isinstance(bad.error, ZeroDivisionError) and len(bad.output) == 2
    assert isinstance(cursed.error, ValueError) and not cursed.output
    assert good.output == solo(model, prompts[2], 6)
    check_pages_are_back(engine)


def test_a_step_that_only_preempts_is_no_error(model, monkeypatch):
    engine, prompt = Engine(model, pages=50), prompt_of(6)
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
    assert request.output == solo(model, prompt, 4) and request.preemptions == 1
    check_pages_are_back(engine)


def test_a_token_without_an_embedding_fails_its_request_alone(model, monkeypatch):
    from hfaccel.serve import forward as module

    monkeypatch.setattr(module, "draw", lambda row, request, values, ids: 256)
    engine = Engine(model, pages=50)
    odd = Request(prompt_of(4, 1), Options(max_new_tokens=4, temperature=1.0))
    good = Request(prompt_of(4, 2), Options(max_new_tokens=4))
    run(engine, odd, good)
    assert odd.state is State.FAILED and "256 embeddings" in str(odd.error)
    assert len(good.output) == 4
    check_pages_are_back(engine)


def test_what_can_never_be_served_is_refused_at_once(model):
    engine = Engine(model, pages=5)
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
