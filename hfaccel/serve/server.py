"""`Server`: text, messages or token ids in, text out, over an engine that a thread of its own runs.

with Server(model, tokenizer) as server:
    answers = server.generate(["Hello", "Hi"], max_new_tokens=20)
    async for part in server.stream("Hello", temperature=0.7, seed=1):
        print(part.text, end="")
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hfaccel.serve.engine import Engine
from hfaccel.serve.requests import Options, Refused, Request, Score, State
from hfaccel.serve.scheduler import Limits
from hfaccel.serve.text import Text

log = logging.getLogger("hfaccel")

_OPTIONS = tuple(option.name for option in fields(Options))
_PLACED = ("priority", "adapter", "constraint")  # of a `Request` beside its options
_TEXT = ("keep_special", "keep_stop")  # of a `Text`
KNOWN = (*_OPTIONS, "stop", *_PLACED, *_TEXT)
STOPS = 16  # strings a request may name


@dataclass(frozen=True)
class Answer:
    """What a request got.

    Attributes:
        text: None without a tokenizer. ids: with the token that ended it.
        scores, prompt_scores: as `Request` has them. stop: the stop string that ended it.
        finish_reason: "stop" or "length". prompt_tokens, cached_tokens: of the prompt, and how many of them
            were found in pages of earlier requests.
    """

    text: str | None
    ids: list[int]
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    scores: list[Score] = field(default_factory=list)
    prompt_scores: list[Score] = field(default_factory=list)
    stop: str | None = None

    @property
    def usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": len(self.ids),
            "total_tokens": self.prompt_tokens + len(self.ids),
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(frozen=True)
class Part:
    """What a stream gives out: text that is certain now (None without a tokenizer), the new token, and in the
    last part, which has no token, the whole answer. `score` is the token's, where the options ask for it."""

    text: str | None
    token: int | None
    answer: Answer | None = None
    score: Score | None = None


class _Answering:
    """Between a request and who waits for it: text as tokens come, stop strings, parts for a sink."""

    def __init__(self, prompt: list[int], given: dict[str, Any], tokenizer, sink=None):
        stops = _stops(given.pop("stop", None))
        if stops and tokenizer is None:
            raise Refused("stop strings need a tokenizer: give the Server one, or stop_ids", "stop")
        shown = {name: given.pop(name) for name in _TEXT if name in given}
        self.text = None if tokenizer is None else Text(tokenizer, stops, **shown)
        self.sink, self.pieces = sink, []
        placed = {name: given.pop(name) for name in _PLACED if name in given}
        self.request = Request(prompt, Options(**given), listener=self._heard, stop=self._stops, **placed)

    def _stops(self, output: list[int]) -> bool:
        piece, request = None, self.request
        if self.text is not None:
            piece = self.text.put(output[-1], search=len(output) >= request.options.min_tokens)
            self.pieces.append(piece)
        if self.sink is not None:
            score = None if request.options.logprobs is None else request.scores[-1]
            self.sink(Part(piece, output[-1], None, score))
        return self.text is not None and self.text.stopped

    def _heard(self, request: Request, token: int | None) -> None:
        if token is not None or not request.state.over:
            return
        rest = None
        if self.text is not None:
            rest = self.text.end() if request.state is State.FINISHED else ""
            self.pieces.append(rest)
        if self.sink is not None:
            answer = self.answer() if request.state is State.FINISHED else None
            self.sink(Part(rest, None, answer))

    def answer(self) -> Answer:
        """What it got. Raises: the error that ended it, or Refused where it was cancelled."""
        request = self.request
        if request.state is State.FAILED:
            raise request.error
        if request.state is State.CANCELLED:
            raise Refused("the request was cancelled")
        text = None if self.text is None else "".join(self.pieces)
        cached = request.cached_tokens or 0
        return Answer(
            text,
            list(request.output),
            request.finish_reason,
            len(request.prompt),
            cached,
            request.scores,
            request.prompt_scores,
            None if self.text is None else self.text.stop,
        )


class Server:
    """Answers many requests at once on one patched model.

    Args:
        tokenizer: of transformers, for prompts that are text or messages, and for the text of answers.
        pages, memory_utilization, prefix_cache, lora_slots, lora_max_rank: as `Engine` takes them.
        adapters: PEFT folders by name, as `load_adapter` takes them.
        policy, token_budget, max_running, aging_s, chunked, preemption, swap_bytes, stretch: as `Limits`
            takes them.

    Options of a request: those of `Options`, and `stop`, a string or strings that end the text before them,
    `keep_special` and `keep_stop` as `Text` takes them, `priority`, `adapter` and `constraint` as `Request`
    takes them. Greedy unless a temperature is given.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer=None,
        *,
        pages: int | None = None,
        memory_utilization: float = 0.9,
        prefix_cache: bool = True,
        adapters: Mapping[str, str | Path] | None = None,
        lora_slots: int | None = None,
        lora_max_rank: int | None = None,
        policy: str = "fcfs",
        token_budget: int = 512,
        max_running: int = 256,
        aging_s: float = 10.0,
        chunked: bool = True,
        preemption: str = "recompute",
        swap_bytes: int = 4 << 30,
        stretch: float | None = 1.8,
    ):
        self.tokenizer = tokenizer
        self.engine = Engine(
            model,
            pages=pages,
            memory_utilization=memory_utilization,
            limits=Limits(
                token_budget,
                max_running,
                policy,
                aging_s,
                chunked,
                preemption=preemption,
                swap_bytes=swap_bytes,
                stretch=stretch,
            ),
            prefix_cache=prefix_cache,
            adapters=adapters,
            lora_slots=lora_slots,
            lora_max_rank=lora_max_rank,
        )
        self._wake = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="hfaccel-server", daemon=True)
        self._thread.start()

    # -- requests

    def generate(
        self, prompts, options: Sequence[Mapping[str, Any]] | None = None, **common: Any
    ) -> list[Answer] | Answer:
        """Answer prompts and wait for all of them.

        Args:
            prompts: a list; each is text, a list of messages, or token ids. One alone gives one Answer.
            options: of each prompt, over those that all have in `common`.
        Raises: Refused before any of them runs, if one can never be served; else, when all are over, the
            first error.
        """
        one = _is_one(prompts)
        prompts = [prompts] if one else list(prompts)
        each = [{}] * len(prompts) if options is None else list(options)
        if len(each) != len(prompts):
            raise Refused(f"{len(prompts)} prompts, but options for {len(each)}")
        every = [
            self._answering(prompt, {**common, **own}) for prompt, own in zip(prompts, each, strict=True)
        ]
        self._wait(every)
        answers = [answering.answer() for answering in every]
        return answers[0] if one else answers

    def _wait(self, every: list[_Answering]) -> None:
        """Submit all, or none if one is refused, and wait until they are over."""
        for answering in every:
            self.engine.check(answering.request)
        submitted: list[_Answering] = []
        try:
            for answering in every:
                self.engine.submit(answering.request)
                submitted.append(answering)
            self._wake.set()
            for answering in every:
                answering.request.done.wait()
        except BaseException:
            for answering in submitted:
                self._cancel(answering.request)
            raise

    async def stream(self, prompt, **options: Any) -> AsyncIterator[Part]:
        """Parts of one answer as they come; who leaves the loop early cancels the request.

        Raises: Refused at the first step of the loop; later the error that ended the request.
        """
        loop, parts = asyncio.get_running_loop(), asyncio.Queue()

        def sink(part: Part) -> None:
            loop.call_soon_threadsafe(parts.put_nowait, part)

        answering = self.open(prompt, sink, **options)
        try:
            while True:
                part = await parts.get()
                if part.token is None and part.answer is None:
                    answering.answer()  # raises why
                yield part
                if part.token is None:
                    return
        finally:
            if not answering.request.state.over:
                self._cancel(answering.request)

    def open(self, prompt, sink: Callable[[Part], None] | None = None, **options: Any) -> _Answering:
        """Begin one answer: `sink` gets its parts from the engine's thread, and a last one without a token;
        where that has no answer either, `answer()` raises why.

        Raises: Refused.
        """
        answering = self._answering(prompt, options, sink)
        self.engine.submit(answering.request)
        self._wake.set()
        return answering

    def cancel(self, answering: _Answering) -> None:
        """End what `open` began, at the next step; nothing happens if it is over."""
        if not answering.request.state.over:
            self._cancel(answering.request)

    def embed(self, prompts, **options: Any) -> torch.Tensor:
        """The mean of the last hidden states of each prompt: [prompts, hidden size] fp32.

        Args:
            prompts: as `generate` takes them. options: adapter, priority.
        Raises: as `generate`.
        """
        prompts = [prompts] if _is_one(prompts) else list(prompts)
        given = {**options, "embed": True, "max_new_tokens": 1}
        every = [self._answering(prompt, given) for prompt in prompts]
        self._wait(every)
        for answering in every:
            answering.answer()
        return torch.stack([answering.request.embedding for answering in every])

    # -- adapters

    def load_adapter(self, name: str, path: str | Path) -> None:
        """As `Engine.load_adapter`, while requests run."""
        self.engine.load_adapter(name, path)

    def unload_adapter(self, name: str) -> None:
        """As `Engine.unload_adapter`, while requests run."""
        self.engine.unload_adapter(name)

    def adapters(self) -> dict[str, Path]:
        """The folders that are known, by name."""
        return {name: adapter.path for name, adapter in self.engine.adapters.items()}

    def _answering(self, prompt, given: dict[str, Any], sink=None) -> _Answering:
        unknown = sorted(given.keys() - set(KNOWN))
        if unknown:
            raise Refused(f"unknown option {unknown[0]!r}; known are {', '.join(KNOWN)}")
        return _Answering(self._ids(prompt), dict(given), self.tokenizer, sink)

    def _ids(self, prompt) -> list[int]:
        """Token ids of text, messages or token ids."""
        messages = _is_messages(prompt)
        if not isinstance(prompt, str) and not messages:
            return prompt
        if self.tokenizer is None:
            raise Refused("text and messages need a tokenizer: give the Server one, or token ids")
        if not messages:
            return self.tokenizer(prompt)["input_ids"]
        if not getattr(self.tokenizer, "chat_template", None):
            raise Refused("the tokenizer has no chat template: give text or token ids", "messages")
        try:
            found = self.tokenizer.apply_chat_template(
                list(prompt), add_generation_prompt=True, return_dict=True
            )
        except Exception as why:  # whatever a template raises is about the messages
            raise Refused(f"the chat template refuses these messages: {why}", "messages") from why
        return found["input_ids"]

    def _cancel(self, request: Request) -> None:
        self.engine.cancel(request)
        self._wake.set()

    # -- the thread

    def _serve(self) -> None:
        try:
            while not self._closing:
                try:
                    if self.engine.step():
                        continue
                except BaseException as error:  # a panic in a library's Rust is no Exception
                    log.exception("the engine failed in a step")
                    told = error if isinstance(error, Exception) else RuntimeError(repr(error))
                    self.engine.fail_all(told)
                    continue
                self._wake.wait()
                self._wake.clear()
        finally:
            self.engine.close()

    @property
    def alive(self) -> bool:
        """Whether its thread runs: else nothing is answered any more."""
        return self._thread.is_alive() and not self._closing

    def stats(self) -> dict[str, int]:
        """As `Engine.stats`."""
        return self.engine.stats()

    def close(self) -> None:
        """Cancel what runs, end the thread and give the pages back; free to call again."""
        self._closing = True
        self._wake.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _is_messages(prompt) -> bool:
    return isinstance(prompt, Sequence) and len(prompt) > 0 and all(isinstance(m, Mapping) for m in prompt)


def _is_one(prompts) -> bool:
    """Whether this is one prompt and not a list of them."""
    if isinstance(prompts, str) or _is_messages(prompts):
        return True
    dims = getattr(prompts, "ndim", None)
    if dims is not None:
        return dims < 2
    return isinstance(prompts, Sequence) and len(prompts) > 0 and isinstance(prompts[0], int)


def _stops(given) -> tuple[str, ...]:
    stops = [] if given is None else [given] if isinstance(given, str) else given
    if not isinstance(stops, Sequence) or not all(isinstance(stop, str) and stop for stop in stops):
        raise Refused(f"stop is a string that is not empty, or some of them, not {given!r}", "stop")
    if len(stops) > STOPS:
        raise Refused(f"{len(stops)} stop strings; {STOPS} are allowed", "stop")
    return tuple(stops)
