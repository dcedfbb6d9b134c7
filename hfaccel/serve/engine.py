"""The engine: requests in, tokens out, one step of the runner at a time.

`Engine.step` takes in what was submitted, asks the scheduler what to compute, runs it through a runner over
pages of its own, chooses a token for each request whose tokens are all computed, and lets go of those that
are over. Whatever else is in a step, a request gets the tokens that it would get alone.

Any thread may `submit` and `cancel`; one at a time steps. While requests are under way the model is in use:
`patch`, `unpatch` and `original` are refused as they are during `generate`.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import nn

from hfaccel.errors import PatchError, UnsupportedModel
from hfaccel.generate import gate, mixin
from hfaccel.generate.checks import position_limit
from hfaccel.lora.adapters import Adapter
from hfaccel.lora.reserved import reserved
from hfaccel.lora.slots import AdapterSlots
from hfaccel.runtime.modules import WHOLE_INPUT_ROPE, rope_types, unpackable
from hfaccel.runtime.runner import Runner
from hfaccel.serve.adapters import KnownAdapters
from hfaccel.serve.budget import budget_of
from hfaccel.serve.forward import Chosen, Forward
from hfaccel.serve.prefix import PrefixTree
from hfaccel.serve.requests import Refused, Request, State
from hfaccel.serve.scheduler import Limits, Scheduler, Step
from hfaccel.serve.turns import Turns

log = logging.getLogger("hfaccel")

CONTEXT_TOKENS = 4096  # of a model whose config names no length


class Engine:
    """Serves requests on one patched model.

    Args:
        pages: KV pages of the pool; else as many as `memory_utilization` of the device's memory leaves room
            for, but no more than `limits.max_running` contexts.
        limits: of a step, with the policy. prefix_cache: pages of prompts and answers are found again.
        adapters: PEFT folders by name, as `load_adapter` takes them; the budget counts their slots.
        lora_slots: adapters in memory at once, of any number that `load_adapter` was given.
        lora_max_rank: of their matrices. Both as the model's recipe says (`LoRASlots`), else 32 and 64.
        clock: seconds, for ranks.
    Raises: PatchError for a model that is not patched; UnsupportedModel for one that steps cannot serve.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        pages: int | None = None,
        memory_utilization: float = 0.9,
        limits: Limits | None = None,
        prefix_cache: bool = True,
        adapters: Mapping[str, str | Path] | None = None,
        lora_slots: int | None = None,
        lora_max_rank: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.model, self.limits, self.clock = model, limits or Limits(), clock
        self._runtime = mixin.runtime(model)
        if reason := unserved(model):
            raise UnsupportedModel(f"{type(model).__name__} cannot be served: {reason}")
        barred = self._runtime.decide(model)
        kv_bits, page_tokens = self._runtime.kv_bits, self._runtime.page_tokens
        self._stepping = Turns()
        said = reserved(model)
        self.slots = AdapterSlots(
            model,
            slots=said.slots if lora_slots is None else lora_slots,
            max_rank=said.max_rank if lora_max_rank is None else lora_max_rank,
        )
        self._known = KnownAdapters(self)
        first = self._known.read(adapters or {})
        if pages is None:
            rows = min(self.limits.max_running, self.limits.token_budget)
            budget = budget_of(
                model,
                kv_bits=kv_bits,
                utilization=memory_utilization,
                token_budget=self.limits.token_budget,
                rows=rows,
                barred=barred,
                adapter_bytes=self.slots.bytes_for(first),
            )
            context = getattr(model.config, "max_position_embeddings", None) or CONTEXT_TOKENS
            pages = min(budget.pages(page_tokens), self.limits.max_running * -(-context // page_tokens))
        if isinstance(pages, bool) or not isinstance(pages, int) or pages < 1:
            raise PatchError(f"pages is a whole number, 1 or more, not {pages!r}")
        self._tables = self.slots.version
        self.runner = Runner(
            model,
            kv_bits=kv_bits,
            page_tokens=page_tokens,
            budget_pages=pages,
            barred=barred,
            lora=self.slots,
        )
        self.pool = self.runner.pool
        self.tree = PrefixTree(self.pool) if prefix_cache else None
        self.scheduler = Scheduler(self.pool, self.tree, self.limits, self.slots)
        self.steps = 0
        self._positions = position_limit(model)
        self._vocab = _vocabulary(model)
        self.forward = Forward(self.runner, self.slots, self._vocab)
        self._order = itertools.count()
        self._submitted: deque[Request] = deque()
        self._cancelled: deque[Request] = deque()
        self._inside = ExitStack()
        self._entered = False
        self._closed = False
        self._place = (model.dtype, model.device)
        self._weights: list | None = None
        self._version = 0
        self._seen: tuple | None = None  # executor and what it was made for, as `_refresh` last saw them
        for adapter in first:
            self._known.put(adapter)

    # -- from any thread

    def check(self, request: Request) -> None:
        """Raises: Refused for a request that can never be served."""
        if self._closed:
            raise Refused("the engine is closed")
        self._check_patched()
        if self.model.training:
            raise Refused("the model is in training mode: call model.eval() first")
        if request.order >= 0:
            raise Refused("the request was submitted before: make another one")
        self._known.find(request.adapter)
        request.check(
            pool_pages=self.pool.capacity,
            page_tokens=self.pool.page_tokens,
            vocab=self._vocab,
            positions=self._positions,
        )

    def submit(self, request: Request) -> Request:
        """Put a request in line. Raises: as `check`."""
        self.check(request)
        request.lora = self._known.find(request.adapter)
        request.arrival, request.order = self.clock(), next(self._order)
        request.ends = frozenset() if request.options.ignore_eos else frozenset(self._ends())
        self._submitted.append(request)
        if request.lora is not None:
            self._known.ahead(request.lora)
        if self._closed:  # meanwhile: nobody takes it in any more
            request.end(State.CANCELLED, "cancelled")
        return request

    def load_adapter(self, name: str, path: str | Path) -> Adapter:
        """Know a PEFT folder by a name that requests choose. One that was known by it is replaced: requests
        that were submitted before keep theirs.

        Raises: BadAdapter for one that does not fit; nothing has changed then.
        """
        return self._known.load(name, path)

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter; requests that were submitted with it keep it. Raises: Refused for none."""
        self._known.unload(name)

    @property
    def adapters(self) -> dict[str, Adapter]:
        """What is known, by name."""
        return self._known.by_name

    def cancel(self, request: Request) -> None:
        """End a request at the next step; nothing happens to one that is over."""
        request.cancelled = True
        self._cancelled.append(request)

    @property
    def busy(self) -> bool:
        """Whether a step has something to do."""
        scheduler = self.scheduler
        return bool(self._submitted or self._cancelled or scheduler.waiting or scheduler.running)

    def stats(self) -> dict[str, int]:
        """What it holds now, and counts since it began."""
        scheduler = self.scheduler
        return {
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting) + len(self._submitted),
            "pages": self.pool.capacity,
            "used_pages": self.pool.used_pages,
            "cached_pages": 0 if self.tree is None else len(self.tree),
            "steps": self.steps,
            "preemptions": scheduler.preemptions,
            "swapped_bytes": 0 if scheduler.swap is None else scheduler.swap.used_bytes,
            "admitted_tokens": scheduler.admitted_tokens,
            "cached_tokens": scheduler.cached_tokens,
        }

    # -- from the thread that steps

    @torch.no_grad()
    def step(self) -> bool:
        """One step. Returns: whether there was anything to do.

        An error in it fails the requests that were in it; the others go on.
        """
        with self._stepping:
            new = self._take_in()
            scheduler = self.scheduler
            if not (scheduler.waiting or scheduler.running):
                self._leave()
                return False
            step = None
            try:
                self._enter()
                if new or self._weights is None or self._tables != self.slots.version:
                    self._refresh()
                step = scheduler.schedule()
                for request, error in step.failed:
                    request.end(State.FAILED, "error", error)
                    self._known.left(request.lora)
                for request in step.begun:
                    request.began = self.clock() if request.began is None else request.began
                if not step.chunks and not step.preempted and not step.failed:
                    raise PatchError("the next request needs more pages than there are")
                tokens = self._timed(step) if step.chunks else []
            except Exception as error:
                self._fail(step, error)
                return True
            for request, token in tokens:
                self._take(request, token)
            if not self.busy:
                self._leave()
            return True

    def _timed(self, step: Step) -> list[Chosen]:
        began = time.perf_counter()
        tokens = self._run(step)
        self.scheduler.pace.took(time.perf_counter() - began, step.decodes, step.tokens - step.decodes)
        return tokens

    def drain(self) -> None:
        """Step until nothing is left to do."""
        while self.step():
            pass

    def close(self) -> None:
        """Cancel what is left and give all memory back; whatever is submitted afterwards is refused."""
        with self._stepping:
            self._closed = True
            self._take_in()
            for request in [*self.scheduler.running, *self.scheduler.waiting]:
                self._end(request, State.CANCELLED, "cancelled", keep=False)
            if self.tree is not None:
                self.tree.clear()
            self.pool.trim()
            self._leave()

    # -- what a step is made of

    def _take_in(self) -> bool:
        """Submitted requests come in, cancelled ones go. Returns: whether one is new."""
        new = False
        while self._submitted:
            request = self._submitted.popleft()
            if not request.cancelled:
                self.scheduler.add(request)
                new = True
            else:
                self._end(request, State.CANCELLED, "cancelled")
        while self._cancelled:
            request = self._cancelled.popleft()
            if not request.state.over and request.order >= 0:
                self._end(request, State.CANCELLED, "cancelled")
        return new

    def _refresh(self) -> None:
        """See what the model is now: pages of other weights are not found again, and one that was moved or
        re-typed begins with empty pages."""
        self._check_patched()
        place = (self.model.dtype, self.model.device)
        if place != self._place:
            self.scheduler.preempt_all()
            if self.tree is not None:
                self.tree.clear()
            self.pool.trim()
            self.slots.forget()
            self._place = place
        executor, self._tables = self.runner.refresh(), self.slots.version
        # Tables alone change no bit of who has no adapter there: what is made for them anew is the same.
        before, self._seen = self._seen, (type(executor), self.runner.changes)
        same = before == self._seen
        weights = weights_of(self.model)
        if not same or weights != self._weights:
            self._weights = weights
            self._version += 1
            self.scheduler.version = self._version
            self.scheduler.forget_swapped()
            if self.tree is not None:
                self.tree.clear()

    def _run(self, step: Step) -> list[Chosen]:
        """Compute a step's tokens."""
        self.steps += 1
        return self.forward.run(step.chunks)

    def _take(self, request: Request, token: int | Exception | None) -> None:
        """Give a request its next token, or none, and see whether it is over."""
        if token is None:
            self._end(request, State.FINISHED, "stop")
            return
        if not isinstance(token, Exception) and token >= self._vocab:  # heads may have more rows
            token = PatchError(f"the model chose token {token}, which its {self._vocab} embeddings lack")
        if isinstance(token, Exception):
            self._end(request, State.FAILED, "error", token)
            return
        if not request.output:
            self.scheduler.keep(request)  # the prompt, for who comes next
        request.output.append(token)
        try:
            if request.listener is not None:
                request.listener(request, token)
            full = request.constraint is not None and request.constraint.take(token)
            stopped = (request.stop is not None and request.stop(request.output)) or full
        except Exception as error:
            self._end(request, State.FAILED, "error", error)
            return
        options = request.options
        ended = len(request.output) >= options.min_tokens and (
            token in options.stop_ids or token in request.ends
        )
        if stopped or ended:
            self._end(request, State.FINISHED, "stop")
        elif len(request.output) >= options.max_new_tokens:
            self._end(request, State.FINISHED, "length")

    def _ends(self) -> set[int]:
        """The model's end tokens."""
        ends = self.model.generation_config.eos_token_id
        return set() if ends is None else {ends} if isinstance(ends, int) else set(ends)

    def _end(self, request: Request, state: State, reason: str, error=None, *, keep: bool = True) -> None:
        self.scheduler.remove(request, keep=keep and state is not State.FAILED)
        request.end(state, reason, error)
        if request.lora is not None:
            self._known.left(request.lora)

    def _fail(self, step: Step | None, error: Exception) -> None:
        """The requests of a step end with its error; without a step, or with an empty one, all there are."""
        failed = list(step.chunks) if step is not None else []
        if not failed:
            self.fail_all(error)
            return
        # As text: a record that is kept would keep the error, its frames and their requests.
        log.warning("a step failed, %d requests with it: %s", len(failed), _told(error))
        for request in failed:
            self._end(request, State.FAILED, "error", error)

    def fail_all(self, error: Exception) -> None:
        """End every request with an error, and go on with what comes next."""
        with self._stepping:
            self._take_in()
            failed = [*self.scheduler.running, *self.scheduler.waiting]
            log.warning("%d requests failed: %s", len(failed), _told(error))
            for request in failed:
                self._end(request, State.FAILED, "error", error)
            self._leave()

    def _check_patched(self) -> None:
        if vars(self.model).get(mixin.ATTRIBUTE) is not self._runtime:
            raise Refused("the model was patched anew or unpatched since the engine was made: make another")

    def _enter(self) -> None:
        if not self._entered:
            self._check_patched()
            self._inside.enter_context(vars(self.model)[gate.ATTRIBUTE].working())
            self._entered = True

    def _leave(self) -> None:
        self._entered = False
        self._inside.close()


def unserved(model: nn.Module) -> str | None:
    """Why the engine cannot serve a model, or None."""
    if reason := unpackable(model):
        return reason
    if whole := rope_types(model.config) & WHOLE_INPUT_ROPE:
        return f"its {'/'.join(sorted(whole))} rope looks at the whole input, which steps cut"
    if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
        return "it is spread over devices"
    return None


def weights_of(model: nn.Module) -> list:
    """What differs once a tensor was replaced or written to in place, by an optimizer, `load_state_dict` or
    an edit of packed codes; not after writes that torch does not count (`.data`, inference tensors)."""
    found: list = []
    for module in model.modules():
        found.append(vars(module).get("weights_version", 0))
        for tensors in (module._parameters, module._buffers):
            for x in tensors.values():
                if x is not None:
                    found += (x.data_ptr(), -1 if x.is_inference() else x._version)
    return found


def _vocabulary(model: nn.Module) -> int:
    """Rows of the embedding."""
    embedding = model.get_input_embeddings()
    embedding = getattr(embedding, "base_layer", embedding)
    return getattr(embedding, "num_embeddings", None) or embedding.weight.shape[0]


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
