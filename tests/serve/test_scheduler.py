"""scheduler.py over a pool without a model: what goes into a step, who waits, who loses his pages."""

import random

import pytest

from hfaccel.cache.pool import PagePool
from hfaccel.errors import PatchError
from hfaccel.lora.adapters import BadAdapter
from hfaccel.serve.prefix import PrefixTree
from hfaccel.serve.requests import Options, Request, State
from hfaccel.serve.scheduler import Limits, Scheduler

SIZE = 4


class Slots:
    """So many adapters at once; the one called "broken" cannot be read."""

    def __init__(self, count):
        self.count, self.held = count, {}

    def acquire(self, adapter):
        if adapter == "broken":
            raise BadAdapter("gone")
        if adapter not in self.held and len(self.held) == self.count:
            return False
        self.held[adapter] = self.held.get(adapter, 0) + 1
        return True

    def release(self, adapter):
        self.held[adapter] -= 1
        if not self.held[adapter]:
            del self.held[adapter]


class Loop:
    """Steps as an engine runs them, whose model says `order * 1000 + place` for every token."""

    def __init__(self, pages=64, cached=True, slots=8, **limits):
        self.pool = PagePool(page_tokens=SIZE, budget_pages=pages)
        self.tree = PrefixTree(self.pool) if cached else None
        self.scheduler = Scheduler(self.pool, self.tree, Limits(**limits), Slots(slots))
        self.count, self.finished = 0, []

    def add(self, prompt, new=4, *, arrival=0.0, priority=0, adapter=None):
        prompt = list(range(prompt)) if isinstance(prompt, int) else prompt
        request = Request(prompt, Options(max_new_tokens=new), priority=priority)
        request.lora = adapter  # any object is one here
        request.arrival, request.order = arrival, self.count
        request.check(pool_pages=self.pool.capacity, page_tokens=SIZE, vocab=10**9, positions=None)
        self.count += 1
        self.scheduler.add(request)
        return request

    def step(self):
        step = self.scheduler.schedule()
        assert step.tokens <= self.scheduler.limits.token_budget or not self.scheduler.limits.chunked
        assert len(self.scheduler.running) <= self.scheduler.limits.max_running
        assert step.needed == sum(step.pages.values()) <= self.pool.free_pages
        assert all(r.sequence is not None for r in step.chunks)
        for request, count in step.chunks.items():
            request.sequence.extend(count)  # raises without a page
        for request in step.chunks:
            if request.left:
                continue
            if not request.output:
                self.scheduler.keep(request)
            request.output.append(request.order * 1000 + len(request.output))
            if len(request.output) == request.options.max_new_tokens:
                self.scheduler.remove(request)
                request.end(State.FINISHED, "length")
                self.finished.append(request)
        if self.tree is not None:
            assert self.tree.evictable == self.can_go()
        return step

    def can_go(self):
        """Pages of the tree without one behind them that somebody holds."""

        def below(node):
            found = [below(child) for child in node.children.values()]
            held = any(h for _, h in found) or (node.page >= 0 and self.pool.references[node.page] > 1)
            return sum(count for count, _ in found) + (node.page >= 0 and not held), held

        return sum(below(root)[0] for root in self.tree.roots.values())

    def drain(self, most=500):
        steps = []
        while self.scheduler.waiting or self.scheduler.running:
            steps.append(self.step())
            assert len(steps) < most
        return steps


def counts(step):
    return {request.order: count for request, count in step.chunks.items()}


def test_decodes_go_first_and_prompts_fill_the_rest_of_a_step():
    loop = Loop(token_budget=8, cached=False)
    loop.add(3, new=6)
    assert counts(loop.step()) == {0: 3}
    loop.add(18)
    loop.add(3)
    assert counts(loop.step()) == {0: 1, 1: 7}
    assert counts(loop.step()) == {0: 1, 1: 7}
    assert counts(loop.step()) == {0: 1, 1: 4, 2: 3}
    assert counts(loop.step()) == {0: 1, 1: 1, 2: 1}
    loop.drain()
    assert loop.pool.used_pages == 0


def test_whole_prompts_take_a_step_each():
    loop = Loop(token_budget=8, chunked=False, cached=False)
    for prompt in (3, 18, 18, 2):
        loop.add(prompt, new=9)
    assert counts(loop.step()) == {0: 3}
    assert counts(loop.step()) == {0: 1, 1: 18}
    assert counts(loop.step()) == {0: 1, 1: 1, 2: 18}
    assert counts(loop.step()) == {0: 1, 1: 1, 2: 1, 3: 2}


def test_a_request_joins_and_leaves_at_any_step():
    loop = Loop(max_running=2, cached=False)
    first, second, third = loop.add(2, new=3), loop.add(2, new=1), loop.add(2, new=2)
    loop.step()
    assert loop.finished == [second] and first.state is State.RUNNING and third.state is State.WAITING
    assert counts(loop.step()) == {0: 1, 2: 2}
    assert counts(loop.step()) == {0: 1, 2: 1}
    assert loop.finished == [second, first, third]


def test_policies_order_who_waits():
    def finish(policy, *requests, **limits):
        loop = Loop(max_running=1, policy=policy, cached=False, **limits)
        for arrival, prompt, priority in requests:
            loop.add(prompt, new=1, arrival=arrival, priority=priority)
        loop.drain()
        return [request.order for request in loop.finished]

    jobs = [(0.0, 40, 1), (1.0, 9, 2), (2.0, 20, 0)]
    assert finish("fcfs", *jobs) == [0, 1, 2]
    assert finish("sjf", *jobs, aging_s=1000.0) == [1, 2, 0]
    assert finish("sjf", *jobs, aging_s=10.0) == [0, 1, 2]  # waiting counts for more than 40 tokens
    assert finish("priority", *jobs, aging_s=10.0) == [2, 0, 1]
    assert finish("priority", *jobs, aging_s=0.5) == [0, 1, 2]


def test_aging_lets_nobody_starve():
    """A stream of urgent requests: one that is not waits for aging_s and no longer."""
    loop = Loop(max_running=1, policy="priority", aging_s=5.0, cached=False)
    loop.add(2, new=1, priority=1)
    for now in range(12):
        loop.add(2, new=1, arrival=now + 0.5)
        loop.step()
    assert loop.finished.index(next(r for r in loop.finished if r.priority)) == 5


def test_the_last_in_rank_gives_its_pages_up():
    loop = Loop(pages=6, cached=False)
    first, second = loop.add(4, new=13), loop.add(7, new=13)
    steps = loop.drain()
    assert [r for step in steps for r in step.preempted] == [second] * second.preemptions
    assert first.preemptions == 0 < second.preemptions
    assert loop.finished == [first, second]
    assert second.output == [1000 + n for n in range(13)]
    assert loop.pool.used_pages == 0


def test_what_was_preempted_finds_its_pages_again():
    loop = Loop(pages=8)
    first, second = loop.add([1] * 4, new=20), loop.add([2] * 9, new=12)
    computed = sum(step.tokens for step in loop.drain())
    assert first.preemptions == 0 < second.preemptions
    cold = Loop(pages=8, cached=False)
    cold.add([1] * 4, new=20), cold.add([2] * 9, new=12)
    assert computed < sum(step.tokens for step in cold.drain())
    assert loop.pool.used_pages == len(loop.tree)


def test_swapped_pages_are_not_computed_again_and_not_counted_as_found():
    loop = Loop(pages=6, cached=False, preemption="swap")
    first, second = loop.add(4, new=13), loop.add(7, new=13)
    steps = loop.drain()
    assert second.preemptions and sum(step.tokens for step in steps) == 4 + 12 + 7 + 12
    assert loop.scheduler.cached_tokens == 0
    # the prompts, and behind each preemption the token that was chosen last
    assert loop.scheduler.admitted_tokens == 4 + 7 + second.preemptions
    assert [r for step in steps for r in step.begun] == [first, second] + [second] * second.preemptions


def test_urgent_requests_take_pages_and_places():
    loop = Loop(pages=8, policy="priority", aging_s=10.0, cached=False)
    slow = loop.add(20, new=9, priority=3)
    loop.step()
    equal, urgent = loop.add(20, arrival=1.0, priority=3), loop.add(16, arrival=2.0)
    step = loop.step()
    assert step.preempted == [slow] and counts(step) == {urgent.order: 16}
    loop.drain()
    assert loop.finished == [urgent, slow, equal] and not urgent.preemptions

    loop = Loop(max_running=1, policy="priority", aging_s=10.0)
    old = loop.add(4, priority=1)
    loop.step()
    loop.add(4, arrival=60.0)  # the old one has aged past it
    loop.drain()
    assert old.preemptions == 0 and loop.finished[0] is old


def test_a_hopeless_claim_preempts_nobody():
    loop = Loop(pages=8, policy="priority", cached=False)
    first, second = loop.add(12, new=5, priority=-1), loop.add(8, new=4, priority=2)
    loop.step()
    third = loop.add(24, new=2, arrival=1.0)  # more than the second one could give
    step = loop.step()
    assert not step.preempted and third.state is State.WAITING and second.state is State.RUNNING
    loop.drain()
    assert len(loop.finished) == 3 and first.preemptions == 0


def test_a_request_waits_for_a_slot_of_its_adapter_and_nobody_overtakes_it():
    loop = Loop(slots=1)
    first, second, third = loop.add(4, adapter="a"), loop.add(4, adapter="b"), loop.add(4)
    assert counts(loop.step()) == {first.order: 4}
    assert second.state is third.state is State.WAITING
    loop.drain()
    assert loop.finished[0] is first and len(loop.finished) == 3
    assert loop.scheduler.adapters.held == {}


def test_an_adapter_that_cannot_be_read_fails_its_request_alone():
    loop = Loop()
    bad, good = loop.add(4, adapter="broken"), loop.add(4)
    step = loop.step()
    assert counts(step) == {good.order: 4} and bad not in loop.scheduler.waiting
    assert [request for request, _ in step.failed] == [bad]
    loop.drain()
    assert loop.scheduler.adapters.held == {}


def test_cached_beginnings_are_not_computed():
    loop = Loop()
    first = loop.add(10, new=1)
    assert counts(loop.step()) == {0: 10} and first.cached_tokens == 0
    second, other, third = loop.add(10, new=1), loop.add(10, new=1, adapter="a"), loop.add(8, new=1)
    assert counts(loop.step()) == {1: 2, 2: 10, 3: 1}
    assert (second.cached_tokens, other.cached_tokens, third.cached_tokens) == (8, 0, 7)
    assert loop.scheduler.cached_tokens == 15 and loop.scheduler.admitted_tokens == 38
    loop.scheduler.version = "edited"
    again = loop.add(10, new=1)
    loop.step()
    assert again.cached_tokens == 0


def test_pages_of_former_weights_stay_out_of_the_tree():
    loop = Loop()
    loop.add(4, new=9)
    loop.step()
    kept = len(loop.tree)
    loop.scheduler.version = "edited"
    loop.drain()
    assert len(loop.tree) == kept == loop.pool.used_pages


def test_a_full_tree_makes_room_for_all_that_fits():
    """A request that needs the whole pool runs, though every page is cached and its prompt is among them."""
    loop = Loop(pages=4)
    loop.add(8, new=1), loop.add([9] * 8, new=1)
    loop.drain()
    assert len(loop.tree) == 4
    whole = loop.add(8, new=9)
    loop.drain()
    assert whole.state is State.FINISHED and whole.cached_tokens == 4  # no page is spare for a copy


def test_pages_behind_those_of_another_are_not_counted_as_free():
    loop = Loop(pages=8)
    short, long = loop.add(8, new=1), loop.add(16, new=9)  # side by side: neither finds the other's pages
    loop.step()
    assert short.state is State.FINISHED and long.state is State.RUNNING
    assert loop.pool.used_pages == len(loop.tree) == 4 and loop.tree.evictable == 0
    loop.add([9] * 20, new=1)
    loop.drain()
    assert len(loop.finished) == 3


def test_preempting_all_frees_every_page():
    loop = Loop()
    requests = [loop.add(6), loop.add(9)]
    loop.step()
    loop.scheduler.preempt_all()
    assert loop.scheduler.waiting == requests and not loop.scheduler.running
    loop.tree.clear()
    assert loop.pool.used_pages == 0
    loop.drain()
    assert [len(r.output) for r in requests] == [4, 4]


@pytest.mark.parametrize("policy", ["fcfs", "sjf", "priority"])
@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_random_traffic_ends_with_every_page_back(policy, cached, chunked, preemption):
    draw = random.Random(f"{policy}{cached}{chunked}")
    limits = {"policy": policy, "chunked": chunked, "preemption": preemption}
    loop = Loop(pages=14, cached=cached, token_budget=9, max_running=5, **limits)
    every, cancelled = [], 0
    for now in range(160):
        if draw.random() < 0.35:
            prompt = [draw.randrange(2) for _ in range(draw.randrange(1, 24))]
            priority = draw.randrange(3)
            every.append(loop.add(prompt, draw.randrange(1, 20), arrival=now * 2.0, priority=priority))
        if every and draw.random() < 0.06 and not (request := draw.choice(every)).state.over:
            loop.scheduler.remove(request)
            request.end(State.CANCELLED, "cancelled")
            cancelled += 1
        loop.step()
    loop.drain(3000)
    assert len(loop.finished) + cancelled == len(every) and cancelled
    assert loop.scheduler.preemptions
    if preemption == "swap":
        assert loop.scheduler.swap.restored and not len(loop.scheduler.swap)
    for request in loop.finished:
        assert request.output == [request.order * 1000 + n for n in range(request.options.max_new_tokens)]
    assert loop.pool.used_pages == (len(loop.tree) if cached else 0)
    if cached:
        loop.tree.clear()
        assert loop.pool.used_pages == 0


def test_limits_are_checked():
    for wrong in (
        {"token_budget": 0},
        {"max_running": True},
        {"policy": "lifo"},
        {"aging_s": -1.0},
        {"preemption": "drop"},
        {"swap_bytes": -1},
    ):
        with pytest.raises(PatchError, match=next(iter(wrong))):
            Limits(**wrong)


def test_prompts_beside_decodes_keep_the_pace():
    loop = Loop(token_budget=64, stretch=2.0)
    first = loop.add(4, new=40)
    assert counts(loop.step()) == {first.order: 4}
    long = loop.add(100)
    assert counts(loop.step()) == {first.order: 1, long.order: 16}  # nothing measured yet
    loop.scheduler.pace.took(0.010, 1, 0)
    loop.scheduler.pace.took(0.020, 1, 10)  # 10 tokens are as long as a step of decodes
    assert counts(loop.step()) == {first.order: 1, long.order: 10}
    other = loop.add(3)  # two without a first token: by heads, half a step is theirs
    assert counts(loop.step()) == {first.order: 1, long.order: 32}
    assert other.state is State.WAITING
    loop.drain()
    assert len(loop.finished) == 3

    loop = Loop(token_budget=64, max_running=2, stretch=2.0)
    first = loop.add(4, new=40)
    loop.step()
    long = loop.add(100)
    for _ in range(5):
        loop.add(3)  # they find no place: no crowd, the stream keeps its pace
    assert counts(loop.step()) == {first.order: 1, long.order: 16}
    assert counts(loop.step()) == {first.order: 1, long.order: 16}

    loop = Loop(token_budget=64, stretch=None)
    first, long = loop.add(4, new=40), None
    loop.step()
    long = loop.add(100)
    assert counts(loop.step()) == {first.order: 1, long.order: 63}
