"""What goes into the next step: iteration-level scheduling over one pool of pages.

Every step is put together anew from what runs: one token of each request that decodes, then chunks of the
prompts that are under way, then requests that wait, until the step's tokens or the pages are used up. So a
request joins or leaves at any step, and a long prompt is cut into pieces beside which the others go on.

Rank is a number fixed at arrival, lower first, so that two requests never change places and none starves:

    fcfs      the order of arrival
    sjf       arrival + aging_s for each 1,000 tokens of prompt and answer
    priority  arrival + aging_s for each level: after that long, a level does not count any more

Without pages for a request that runs, the last in rank gives its own up and waits again: its tokens are
computed anew, from those of its pages that are still in the prefix tree, or, where preemption is by "swap",
its pages wait in the host's memory (`swap.py`). Under `priority` a waiting request
takes pages and places from requests of a worse level that are behind it in rank, too. The first in rank is
never preempted and everything that is admitted fits the pool alone, so there always is progress.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field

from hfaccel.cache.pool import PagePool, Sequence
from hfaccel.errors import PatchError
from hfaccel.lora.adapters import BadAdapter
from hfaccel.lora.slots import AdapterSlots
from hfaccel.serve.pace import Pace
from hfaccel.serve.prefix import PrefixTree
from hfaccel.serve.requests import Request, State
from hfaccel.serve.swap import SwapSpace

JOB_TOKENS = 1000  # what weighs as much as aging_s under `sjf`

PREEMPTION = ("recompute", "swap")

POLICIES: dict[str, Callable[[Request, float], float]] = {
    "fcfs": lambda request, aging_s: 0.0,  # then by order
    "sjf": lambda request, aging_s: request.arrival + aging_s * request.most_tokens / JOB_TOKENS,
    "priority": lambda request, aging_s: request.arrival + aging_s * request.priority,
}


@dataclass(frozen=True)
class Limits:
    """What a step may be.

    Args:
        token_budget: tokens of a step. max_running: requests that hold pages.
        policy: one of POLICIES. aging_s: see there.
        chunked: prompts are cut where a step's tokens end; else a prompt is one step's, however long.
        stretch: about how many times as long chunks may make a step as its decodes alone are; None: any.
        preemption: one of PREEMPTION. swap_bytes: of the host's memory, for "swap"; what is beyond them is
            computed anew.
    """

    token_budget: int = 512
    max_running: int = 256
    policy: str = "fcfs"
    aging_s: float = 10.0
    chunked: bool = True
    preemption: str = "recompute"
    swap_bytes: int = 4 << 30
    stretch: float | None = 1.8

    def __post_init__(self):
        for name, least in (("token_budget", 1), ("max_running", 1), ("swap_bytes", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise PatchError(f"{name} is a whole number, {least} or more, not {value!r}")
        if self.preemption not in PREEMPTION:
            raise PatchError(f"preemption {self.preemption!r}; known are {', '.join(PREEMPTION)}")
        if self.policy not in POLICIES:
            raise PatchError(f"policy {self.policy!r}; known are {', '.join(POLICIES)}")
        if not (math.isfinite(self.aging_s) and self.aging_s >= 0):
            raise PatchError(f"aging_s is a time in seconds, not {self.aging_s!r}")
        if self.stretch is not None and not (math.isfinite(self.stretch) and self.stretch > 1):
            raise PatchError(f"stretch is None or a number above 1, not {self.stretch!r}")


@dataclass
class Step:
    """The next step: how many tokens each request computes.

    Attributes: begun, preempted: requests that got pages for it, and that lost theirs. failed: those whose
        adapter cannot be read any more.
        pages: new pages promised to each; needed: their sum. decoding: who computes the last of its tokens.
        crowd: prompts under way, and those that wait and find a place.
    """

    chunks: dict[Request, int] = field(default_factory=dict)
    pages: dict[Request, int] = field(default_factory=dict)
    needed: int = 0
    begun: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    failed: list[tuple[Request, Exception]] = field(default_factory=list)
    decoding: set[Request] = field(default_factory=set)
    crowd: int = 0

    @property
    def tokens(self) -> int:
        return sum(self.chunks.values())

    @property
    def decodes(self) -> int:
        return len(self.decoding)

    def put(self, request: Request, count: int) -> None:
        self.chunks[request] = count
        self.pages[request] = request.sequence.pages_for(count)
        self.needed += self.pages[request]
        if request.output and request.left == 1:
            self.decoding.add(request)

    def drop(self, request: Request) -> None:
        self.chunks.pop(request, None)
        self.decoding.discard(request)
        self.needed -= self.pages.pop(request, 0)


class Scheduler:
    """Requests that wait and that run, and the pages of those that run. Not thread-safe.

    Attributes:
        version: of the weights; requests admitted under another one leave nothing in the tree.
        swap: pages of preempted requests, None where they are computed anew.
        cached_tokens, admitted_tokens: found in the tree, of all that were to be computed at admissions.
    """

    def __init__(
        self,
        pool: PagePool,
        tree: PrefixTree | None = None,
        limits: Limits | None = None,
        adapters: AdapterSlots | None = None,
    ):
        self.pool, self.tree, self.limits, self.adapters = pool, tree, limits or Limits(), adapters
        self.waiting: list[Request] = []  # by rank
        self.running: list[Request] = []  # by rank
        self.swap = SwapSpace(pool, self.limits.swap_bytes) if self.limits.preemption == "swap" else None
        self.pace = Pace(self.limits.stretch if self.limits.chunked else None)
        self.version: object = None
        self.preemptions = self.cached_tokens = self.admitted_tokens = 0
        self._evictable: int | None = None  # pages of the tree alone, once counted

    def rank(self, request: Request) -> tuple[float, int]:
        return POLICIES[self.limits.policy](request, self.limits.aging_s), request.order

    def add(self, request: Request) -> None:
        insort(self.waiting, request, key=self.rank)

    def remove(self, request: Request, *, keep: bool = True) -> None:
        """Forget a request and free its pages; keep: what is whole stays in the tree."""
        for queue in (self.waiting, self.running):
            if request in queue:
                queue.remove(request)
        self._release(request, keep)
        self._forget(request)

    def keep(self, request: Request) -> None:
        """Put its full pages into the tree, for others and for itself."""
        if self.tree is not None and request.sequence is not None and request.version == self.version:
            done = request.tokens[: request.computed]
            self.tree.insert((request.version, request.lora), done, request.sequence)

    def preempt_all(self) -> None:
        """Everything waits; no request holds a page, here or in the host's memory."""
        for request in reversed(list(self.running)):
            self._preempt(request, Step(), keep=False)
        self.forget_swapped()

    def forget_swapped(self) -> None:
        """Pages of preempted requests are computed anew: those of former weights would not be right."""
        if self.swap is not None:
            self.swap.clear()

    # -- one step

    def schedule(self) -> Step:
        """The next step; afterwards there are free pages for all of it."""
        places = self.limits.max_running - len(self.running)
        step = Step(crowd=min(len(self.waiting), places) + sum(r.left > 1 for r in self.running))
        self._evictable = None
        self._run(step)
        if not step.preempted:
            self._admit(step)
        short = step.needed - self.pool.free_pages
        if short > 0 and self.tree is not None:
            self.tree.evict(short)
        return step

    def _run(self, step: Step) -> None:
        """Those that run: decodes first, so that no prompt stalls them."""
        decodes = [r for r in self.running if r.left == 1]
        prompts = [r for r in self.running if r.left != 1]
        for request in decodes + prompts:
            if request.sequence is None:  # preempted for one before it
                continue
            count = self._count(request, step)
            if count and self._make_room(request, count, step):
                step.put(request, count)

    def _count(self, request: Request, step: Step) -> int:
        """Tokens of it that the step still has room for."""
        budget = self.limits.token_budget - step.tokens
        if self.limits.chunked:
            return max(0, min(request.left, budget if request.left == 1 else self._room(step)))
        if request.left <= budget:
            return max(0, request.left)
        alone = all(count == 1 for count in step.chunks.values())
        return request.left if alone and budget > 0 else 0

    def _room(self, step: Step) -> int:
        """Tokens of prompts that the step still takes."""
        room = self.limits.token_budget - step.tokens
        if step.decodes:
            paced = self.pace.tokens(self.limits.token_budget, step.decodes, step.crowd)
            room = min(room, paced - (step.tokens - step.decodes))
        return room

    def _make_room(self, request: Request, count: int, step: Step) -> bool:
        """Take pages for `count` tokens from the last in rank where there are none: whether there are now."""
        while not self._fits(step.needed + request.sequence.pages_for(count)):
            victim = self.running[-1]
            self._preempt(victim, step)
            if victim is request:
                return False
        return True

    def _fits(self, pages: int) -> bool:
        free = self.pool.free_pages
        if pages <= free or self.tree is None:
            return pages <= free
        if self._evictable is None:
            self._evictable = self.tree.evictable
        return pages <= free + self._evictable

    def _admit(self, step: Step) -> None:
        """Those that wait, in rank, as long as there are tokens, places and pages for the whole of each."""
        while self.waiting and self._room(step) > 0:
            request = self.waiting[0]
            try:
                if not self._begin(request, step):
                    return
            except BadAdapter as error:
                self.waiting.remove(request)
                self._forget(request)
                step.failed.append((request, error))
                continue
            count = self._count(request, step)
            if not count:  # a whole prompt, beside another one
                self._withdraw(request)
                return
            step.put(request, count)
            self._count_in(request)
            step.begun.append(request)

    def _begin(self, request: Request, step: Step) -> bool:
        """Give a waiting request its sequence and what is cached or saved of it, if it finds a place and
        pages."""
        victims = self._victims(request)
        while True:
            if len(self.running) < self.limits.max_running and self._start(request):
                if self._fits(self._promised(request)):
                    self._restore(request)
                    self.waiting.remove(request)
                    insort(self.running, request, key=self.rank)
                    request.state = State.RUNNING
                    return True
                self._release(request, keep=False)
            if not victims:
                return False
            held = sum(len(victim.sequence.pages) for victim in victims)
            if not self._fits(-(-request.length // self.pool.page_tokens) - held):
                return False
            self._preempt(victims.pop(), step)

    def _promised(self, request: Request) -> int:
        """Pages for the rest of all prompts under way and of this one, and one for each that runs to go on
        with: who is admitted is not preempted at once."""
        running = sum(r.sequence.pages_for(r.left) + 1 for r in self.running)
        return running + request.sequence.pages_for(request.left)

    def _victims(self, request: Request) -> list[Request]:
        """Who loses pages or a place to a waiting request; the last one first."""
        if self.limits.policy != "priority":
            return []
        rank = self.rank(request)
        return [r for r in self.running if r.priority > request.priority and self.rank(r) > rank]

    def _start(self, request: Request) -> bool:
        """Its sequence, with what is cached of it; False where every slot for adapters is in use."""
        if request.lora is not None and not self.adapters.acquire(request.lora):
            return False
        self._evictable = None
        request.sequence = Sequence(self.pool)
        request.version = self.version
        saved = None if self.swap is None else self.swap.of(request, self.version)
        if self.tree is None or (request.options.whole and saved is None):
            return True
        tokens = request.tokens
        limit = len(tokens) - 1 if saved is None else saved.length
        # The copy of a page that ends in the middle needs a page more than the request has.
        spare = -(-request.most_tokens // self.pool.page_tokens) < self.pool.capacity
        key = (request.version, request.lora)
        partial = spare and saved is None
        request.sequence.share(*self.tree.match(key, tokens, limit=limit, partial=partial))
        return True

    def _restore(self, request: Request) -> None:
        """Copy what is saved of it into pages that it was promised."""
        saved = None if self.swap is None else self.swap.of(request, self.version)
        if saved is None:
            return
        short = request.sequence.pages_for(saved.length - request.computed) - self.pool.free_pages
        if short > 0:
            self.tree.evict(short)
        self._evictable = None
        self.swap.restore(request)

    def _count_in(self, request: Request) -> None:
        """It is admitted: what it found, of what it had to compute."""
        found, length = request.computed, request.length
        saved = None if self.swap is None else self.swap.of(request, self.version)
        if saved is not None:
            found, length = saved.found, length - (saved.length - saved.found)
            self.swap.drop(request)
        if request.cached_tokens is None:
            request.cached_tokens = found
        self.cached_tokens += found
        self.admitted_tokens += length

    def _forget(self, request: Request) -> None:
        if self.swap is not None:
            self.swap.drop(request)

    def _withdraw(self, request: Request) -> None:
        """Take back what `_begin` did."""
        self.running.remove(request)
        self._release(request, keep=False)
        request.state = State.WAITING
        self.add(request)

    def _preempt(self, request: Request, step: Step, *, keep: bool = True) -> None:
        self.running.remove(request)
        if keep and self.swap is not None and request.version == self.version:
            self.swap.save(request)
        self._release(request, keep)
        request.state = State.WAITING
        request.preemptions += 1
        self.preemptions += 1
        step.drop(request)
        step.preempted.append(request)
        self.add(request)

    def _release(self, request: Request, keep: bool) -> None:
        self._evictable = None
        if request.sequence is not None:
            if keep:
                self.keep(request)
            request.sequence.empty()
            request.sequence = None
            if request.lora is not None:
                self.adapters.release(request.lora)
