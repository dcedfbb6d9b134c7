"""swap.py: pages that left and came back hold the same bits, and what is kept of them is let go of."""

import itertools

import pytest
import torch

from engines import check_pages_are_back, exact, mixed, patched, prompt_of, run, solo
from hfaccel.cache.pool import PagePool, Sequence
from hfaccel.serve.engine import Engine
from hfaccel.serve.requests import Options, Request, State
from hfaccel.serve.scheduler import Limits
from hfaccel.serve.swap import SwapSpace
from hfaccel_kernels.layouts import Layout

pytestmark = pytest.mark.usefixtures("strict")
SHAPES = ((2, 8, 8), (1, 16, 4))  # heads and sizes of K and V, of two layers


def filled(bits=None, dtype=torch.float32, pages=12):
    """A pool with random bits in every page."""
    pool = PagePool(page_tokens=4, bits=bits, budget_pages=pages)
    torch.manual_seed(0)
    for index, shape in enumerate(SHAPES):
        for x in pool.ensure_layer(index, *shape, dtype, torch.device("cpu")).tensors():
            x.copy_(torch.randint(-128, 127, x.shape) if x.dtype == torch.int8 else torch.randn(x.shape))
    return pool


def holding(pool, tokens):
    request = Request([1] * (tokens + 1))
    request.sequence = Sequence(pool)
    request.sequence.extend(tokens)
    return request


def content(pool, sequence):
    """All bytes of the tokens of a sequence."""
    at = [
        sequence.pages[n // pool.page_tokens] * pool.page_tokens + n % pool.page_tokens
        for n in range(sequence.length)
    ]
    return [x.flatten(0, 1)[at].clone() for layer in pool.layers.values() for x in layer.tensors()]


@pytest.mark.parametrize("bits, dtype", [(None, torch.float32), (None, torch.bfloat16), (8, torch.bfloat16)])
@pytest.mark.parametrize("tokens", [1, 4, 11, 12])
def test_pages_come_back_as_they_were(bits, dtype, tokens):
    pool = filled(bits, dtype)
    swap, request = SwapSpace(pool, 1 << 20), holding(pool, tokens)
    before = content(pool, request.sequence)
    assert len(before) == (8 if bits else 4)
    assert swap.save(request) and len(swap) == 1
    assert swap.used_bytes == sum(x[0].nbytes for x in before) * -(-tokens // 4) * 4  # whole pages
    request.sequence.empty()
    other = holding(pool, 6)  # takes the pages that it had
    for layer in pool.layers.values():
        for x in layer.tensors():
            x.zero_()
    request.sequence = Sequence(pool)
    assert swap.restore(request) and request.sequence.length == tokens
    assert not set(other.sequence.pages) & set(request.sequence.pages)
    for x, y in zip(before, content(pool, request.sequence), strict=True):
        assert torch.equal(x, y)
    assert not any(x.any() for x in content(pool, other.sequence))
    swap.drop(request)
    swap.drop(request)
    assert swap.used_bytes == len(swap) == 0


def test_pages_that_are_still_somewhere_are_shared():
    pool = filled()
    swap, request = SwapSpace(pool, 1 << 20), holding(pool, 10)
    keeper = request.sequence.fork()
    before = content(pool, request.sequence)
    swap.save(request)
    request.sequence.empty()
    request.sequence = Sequence(pool)
    request.sequence.share(keeper.pages[:1], 4)
    assert swap.restore(request) and swap.of(request, None).found == 4
    assert request.sequence.pages[0] == keeper.pages[0] and request.sequence.pages[1] != keeper.pages[1]
    for x, y in zip(before, content(pool, request.sequence), strict=True):
        assert torch.equal(x, y)


def test_the_limit_and_what_is_not_right_any_more():
    pool = filled()
    page = 4 * pool.bytes_per_token()
    swap = SwapSpace(pool, 5 * page)
    first, second, third = holding(pool, 12), holding(pool, 9), holding(pool, 8)
    assert swap.save(first) and not swap.save(second) and swap.save(third)
    assert (swap.used_bytes, swap.saved, swap.refused) == (5 * page, 2, 1)
    assert swap.of(second, None) is None
    assert swap.of(first, "edited") is None and swap.used_bytes == 2 * page
    for request in (first, second, third):
        request.sequence.empty()
    pool.trim()  # the storage is gone
    assert swap.of(third, None) is None and swap.used_bytes == 0


def test_without_memory_it_is_computed_anew(monkeypatch):
    from hfaccel.serve import swap as module

    def broken(*args):
        raise RuntimeError("out of memory")

    pool = filled()
    swap, request, other = SwapSpace(pool, 1 << 20), holding(pool, 8), holding(pool, 3)
    swap.save(request)
    request.sequence.empty()
    request.sequence = Sequence(pool)
    monkeypatch.setattr(module, "_back", broken)
    assert not swap.restore(request) and request.sequence.length == len(swap) == swap.used_bytes == 0
    monkeypatch.setattr(module, "_out", broken)
    assert not swap.save(other) and swap.used_bytes == 0 and other.sequence.length == 3


# -- in the engine


def counted(engine):
    """Tokens that its steps compute, as they come."""
    real, tokens = engine.scheduler.schedule, []

    def schedule():
        step = real()
        tokens.append(step.tokens)
        return step

    engine.scheduler.schedule = schedule
    return tokens


@exact
@pytest.mark.parametrize(
    "variant",
    [
        {"family": "llama"},
        {"family": "gemma2"},
        {"family": "llama", "layout": Layout(8), "dtype": torch.bfloat16, "kv_bits": 8},
    ],
    ids=str,
)
def test_no_token_is_computed_twice(variant):
    """Bit for bit the answers of `generate`; beyond the limit tokens are computed anew."""
    model = patched(**variant)
    asked = mixed(model)
    for swap_bytes, twice in ((1 << 30, False), (3000, True), (0, True)):
        limits = Limits(token_budget=11, preemption="swap", swap_bytes=swap_bytes)
        engine = Engine(model, pages=17, limits=limits, prefix_cache=False)
        tokens = counted(engine)
        requests = run(engine, *(Request(prompt, Options(max_new_tokens=new)) for prompt, new, _ in asked))
        assert [request.output for request in requests] == [want for *_, want in asked]
        assert engine.stats()["preemptions"]
        assert (sum(tokens) > sum(request.most_tokens for request in requests)) == twice
        assert bool(engine.scheduler.swap.refused) == twice  # victims larger than what is left of the limit
        assert bool(engine.scheduler.swap.restored) or twice
        check_pages_are_back(engine)


@exact
def test_drawn_requests_go_on_with_their_draws(model):
    options = [Options(max_new_tokens=20, temperature=1.0, top_p=0.9, seed=n) for n in range(6)]
    prompts = [prompt_of(5 + n, n) for n in range(6)]
    asked = list(zip(prompts, options, strict=True))
    alone = [run(Engine(model, pages=50), Request(*ask))[0].output for ask in asked]
    engine = Engine(model, pages=14, limits=Limits(token_budget=6, preemption="swap"))
    assert [request.output for request in run(engine, *(Request(*ask) for ask in asked))] == alone
    assert engine.scheduler.swap.restored
    check_pages_are_back(engine)


def swapped(model, **kwargs):
    """An engine with a request whose pages are in the host's memory, and one that runs."""
    limits = Limits(policy="priority", preemption="swap")
    engine = Engine(model, pages=8, limits=limits, clock=itertools.count().__next__, **kwargs)
    slow = engine.submit(Request(prompt_of(12, 1), Options(max_new_tokens=12), priority=3))
    for _ in range(3):
        engine.step()
    fast = engine.submit(Request(prompt_of(16, 2), Options(max_new_tokens=10)))
    engine.step()
    assert slow.state is State.WAITING and slow.preemptions == 1 and len(slow.output) == 3
    assert engine.stats()["swapped_bytes"] == 4 * 4 * engine.pool.bytes_per_token()
    return engine, slow, fast


def test_a_cancelled_request_lets_go_of_its_copy(model):
    engine, slow, fast = swapped(model)
    engine.cancel(slow)
    engine.step()
    assert slow.state is State.CANCELLED and engine.stats()["swapped_bytes"] == 0
    engine.drain()
    assert len(fast.output) == 10
    check_pages_are_back(engine)


@pytest.mark.parametrize("end", ["fail_all", "close"])
def test_the_end_of_all_lets_go_of_copies(model, end):
    engine, slow, fast = swapped(model)
    engine.close() if end == "close" else engine.fail_all(RuntimeError("out of luck"))
    assert slow.state.over and fast.state.over
    check_pages_are_back(engine)


@exact
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_failed_step_leaves_those_that_wait_their_copies(model, prefix_cache, monkeypatch):
    engine, slow, fast = swapped(model, prefix_cache=prefix_cache)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_run", lambda step: 1 / 0)
        engine.step()
    assert isinstance(fast.error, ZeroDivisionError) and engine.stats()["swapped_bytes"]
    engine.drain()
    assert slow.output == solo(model, slow.prompt, 12)
    check_pages_are_back(engine)


@exact
@pytest.mark.parametrize("change", ["edited", "retyped"])
def test_copies_of_former_weights_are_not_used(change):
    model = patched()
    engine, slow, fast = swapped(model)
    with torch.no_grad():
        if change == "edited":
            model.model.layers[0].self_attn.v_proj.weight.mul_(-1)
        else:
            model.to(torch.bfloat16)
    begun, late = list(slow.output), engine.submit(Request(prompt_of(3), Options(max_new_tokens=2)))
    engine.step()
    assert engine.stats()["swapped_bytes"] == 0
    engine.drain()
    want = solo(model, slow.prompt + begun, 12 - len(begun))
    assert slow.output == begun + want and len(fast.output) == 10 and len(late.output) == 2
    assert not engine.scheduler.swap.restored
    check_pages_are_back(engine)
