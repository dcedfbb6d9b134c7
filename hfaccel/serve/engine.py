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
from hfaccel.lora.slots import AdapterSlots
from hfaccel.runtime.modules import WHOLE_INPUT_ROPE, rope_types, unpackable
from hfaccel.runtime.runner import Runner
from hfaccel.serve.adapters import KnownAdapters
from hfaccel.serve.budget import budget_of
from hfaccel.serve.draw import draw, wanted
from hfaccel.serve.prefix import PrefixTree
from hfaccel.serve.requests import Refused, Request, State
from hfaccel.serve.sampling import scores
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
        lora_max_rank: of their matrices.
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
        lora_slots: int = 32,
        lora_max_rank: int = 64,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.model, self.limits, self.clock = model, limits or Limits(), clock
        self._runtime = mixin.runtime(model)
        if reason := unserved(model):
            raise UnsupportedModel(f"{type(model).__name__} cannot be served: {reason}")
        barred = self._runtime.decide(model)
        kv_bits, page_tokens = self._runtime.kv_bits, self._runtime.page_tokens
        self._stepping = Turns()
        self.slots = AdapterSlots(model, slots=lora_slots, max_rank=lora_max_rank)
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
        self._most_candidates = min(
            self._vocab, getattr(model.get_output_embeddings(), "out_features", self._vocab)
        )
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

    def _timed(self, step: Step) -> list[tuple[Request, int | Exception]]:
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
                request.end(State.CANCELLED, "cancelled")
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

    def _run(self, step: Step) -> list[tuple[Request, int | Exception | None]]:
        """Compute a step's tokens: the next one of each request that is complete now, or why it has none;
        None for one that is embedded."""
        slots = {request: self.slots.slot(request.lora) for request in step.chunks}
        # Tokens of one adapter lie together: the kernels read its matrices once.
        chunks = {request: step.chunks[request] for request in sorted(slots, key=slots.get)}
        self.steps += 1
        done: list[tuple[Request, int | Exception | None]] = []
        if any(request.options.embed for request in chunks):
            embedded = {request: count for request, count in chunks.items() if request.options.embed}
            done += self._embed(embedded, slots)
            chunks = {request: count for request, count in chunks.items() if not request.options.embed}
        return done + self._next(chunks, slots) if chunks else done

    def _next(self, chunks: dict[Request, int], slots) -> list[tuple[Request, int | Exception | None]]:
        """The next token of each request that is complete now, or why it has none."""
        ids, positions, asked, ready, end = [], [], [], [], 0
        prompts: list[tuple[Request, range]] = []  # tokens of prompts that are scored, and their rows after
        for request, count in chunks.items():
            at = request.computed
            ids += request.part(at, count)
            positions += range(at, at + count)
            end += count
            if count == request.left:
                asked.append(end - 1)
                ready.append(request)
                if request.constraint is not None:
                    request.constraint.prepare()
            if request.options.prompt_logprobs is not None and not request.output:
                prompts.append((request, range(at + 1, min(at + count + 1, len(request.prompt)))))
        starts = itertools.accumulate((0, *chunks.values()))
        begins = dict(zip(chunks, starts, strict=False))
        asked += [begins[request] + n for request, scored in prompts for n in range(len(scored))]
        device = self.model.device
        inputs = [torch.tensor(x, dtype=torch.long, device=device) for x in (ids, positions, asked)]
        sequences, counts = [r.sequence for r in chunks], list(chunks.values())
        adapters = [slots[request] for request in chunks]
        drawn = [n for n, request in enumerate(ready) if not request.plain]
        top = min(max([1, *(wanted(ready[n]) for n in drawn)]), self._most_candidates)
        if asked and hasattr(self.runner.executor, "best"):
            rows = {"counts": counts, "rows": inputs[2], "adapters": adapters}
            values, ids, logits = self.runner.candidates(*inputs[:2], sequences, top, **rows)
        else:
            logits = self.runner.step(*inputs[:2], sequences, counts, inputs[2], adapters=adapters)
            values, ids = _best(logits[: len(ready)], top)
        found: list[int | Exception] = ids[: len(ready), 0].tolist()
        if drawn:
            values, ids = values.cpu().numpy(), ids.cpu().numpy()
        for n in drawn:
            found[n] = _drawn(logits[n], ready[n], values[n], ids[n])
        self._score(logits, ready, found)
        self._score_prompts(logits[len(ready) :], prompts)
        return list(zip(ready, found, strict=True))

    def _score(self, logits: torch.Tensor, ready: list[Request], found: list[int | Exception]) -> None:
        """Scores of the tokens that were found, for those who ask."""
        rows = [
            n
            for n, (request, token) in enumerate(zip(ready, found, strict=True))
            if request.options.logprobs is not None and isinstance(token, int) and token < self._vocab
        ]
        if rows:
            tops = [ready[n].options.logprobs for n in rows]
            of = scores(logits[rows][:, : self._vocab], [found[n] for n in rows], tops)
            for n, score in zip(rows, of, strict=True):
                ready[n].scores.append(score)

    def _score_prompts(self, logits: torch.Tensor, prompts: list[tuple[Request, range]]) -> None:
        """Scores of tokens of prompts, by the rows before them."""
        at = 0
        for request, scored in prompts:
            rows, at = logits[at : at + len(scored), : self._vocab], at + len(scored)
            if scored.start == 1:  # anew, where it was preempted
                request.prompt_scores = []
            if len(scored):
                tokens = request.prompt[scored.start : scored.stop]
                tops = [request.options.prompt_logprobs] * len(tokens)
                request.prompt_scores += scores(rows, tokens, tops)

    def _embed(self, chunks: dict[Request, int], slots) -> list[tuple[Request, int | Exception | None]]:
        """Add up hidden states of prompts; those that are complete have their mean."""
        device, counts = self.model.device, list(chunks.values())
        begins = [request.computed for request in chunks]
        ids = [i for request, count in chunks.items() for i in request.part(request.computed, count)]
        at = [p for begin, count in zip(begins, counts, strict=True) for p in range(begin, begin + count)]
        inputs = [torch.tensor(x, dtype=torch.long, device=device) for x in (ids, at, range(len(ids)))]
        sequences, adapters = [r.sequence for r in chunks], [slots[r] for r in chunks]
        complete = [request for request, count in chunks.items() if count == request.left]
        states = self.runner.step(
            *inputs[:2], sequences, counts, inputs[2], hidden=True, adapters=adapters
        ).split(counts)
        for request, begin, rows in zip(chunks, begins, states, strict=True):
            added = rows.float().sum(0).cpu()
            request.embedding = added if begin == 0 else request.embedding + added
        for request in complete:
            request.embedding /= len(request.prompt)
        return [(request, None) for request in complete]

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
        log.warning("a step failed, %d requests with it: %s: %s", len(failed), type(error).__name__, error)
        for request in failed:
            self._end(request, State.FAILED, "error", error)

    def fail_all(self, error: Exception) -> None:
        """End every request with an error, and go on with what comes next."""
        with self._stepping:
            self._take_in()
            failed = [*self.scheduler.running, *self.scheduler.waiting]
            log.warning("%d requests failed: %s: %s", len(failed), type(error).__name__, error)
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


def _best(logits: torch.Tensor, top: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `top` largest logits of each row, fp32, and their ids, as `Runner.candidates` has them."""
    if top == 1:
        values, ids = logits.max(-1, keepdim=True)
        return values.float(), ids
    values, ids = logits.float().topk(top, dim=-1)
    ids, order = ids.sort(-1)  # equal ones by id
    values, again = values.gather(-1, order).sort(-1, descending=True, stable=True)
    return values, ids.gather(-1, again)


def _drawn(row: torch.Tensor, request: Request, values, ids) -> int | Exception:
    try:
        return draw(row, request, values, ids)
    except Exception as error:
        return error
