"""What the endpoints share: the server's models and limits, who may come in, how it is, and how it ends."""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hfaccel.errors import PatchError
from hfaccel.serve.answers import SHARED_PAGES, Answers, Choice, Post
from hfaccel.serve.engine import CONTEXT_TOKENS
from hfaccel.serve.errors import ApiError
from hfaccel.serve.grammar import Grammars, grammar_of
from hfaccel.serve.metrics import Metrics
from hfaccel.serve.pieces import Pieces
from hfaccel.serve.requests import Constraint
from hfaccel.serve.server import Server

log = logging.getLogger("hfaccel.serve")

INLINE_CHARACTERS = 4096  # of a text that is tokenized in the loop's own thread: under a millisecond
GENERATION_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
RATE_S = 30.0  # over which the rate of finishing is taken, for Retry-After


@dataclass(frozen=True)
class Bounds:
    """What one client may cost the others.

    Args:
        max_queue: requests that wait beyond those that run; more are told to come again.
        request_timeout_s: from a request's arrival to its last token. send_timeout_s: for a client to take a
            piece of a stream. body_timeout_s: to send a request. max_body_bytes: of a request.
        stall_s: without a step while there is work: the engine is taken for stuck.
    """

    max_queue: int = 256
    request_timeout_s: float = 600.0
    send_timeout_s: float = 30.0
    body_timeout_s: float = 30.0
    max_body_bytes: int = 8 << 20
    stall_s: float = 60.0


class Service:
    """One model behind HTTP.

    Args:
        model_name: what requests call the base. lora_dir: the folder of adapters that may be loaded.
    Attributes: draining: nothing new is taken.
    """

    def __init__(
        self, server: Server, model_name: str, bounds: Bounds | None = None, lora_dir: Path | None = None
    ):
        self.server, self.model_name, self.bounds = server, model_name, bounds or Bounds()
        self.lora_dir = None if lora_dir is None else Path(lora_dir).resolve()
        self.started = int(time.time())
        engine = server.engine
        self.page_tokens = engine.pool.page_tokens
        config = engine.model.config.get_text_config(decoder=True)
        context = getattr(config, "max_position_embeddings", None) or CONTEXT_TOKENS
        self.max_tokens = min(context, engine.pool.capacity * self.page_tokens)
        self.most = engine.limits.max_running + self.bounds.max_queue
        self.tokenizer = copy.deepcopy(server.tokenizer)  # the engine's thread decodes with the other one
        self.pieces = Pieces(self.tokenizer) if self.tokenizer is not None else None
        generation = engine.model.generation_config
        found = {name: getattr(generation, name, None) for name in GENERATION_DEFAULTS}
        self.defaults = {"temperature": 1.0} | {k: v for k, v in found.items() if v is not None}
        self.metrics = Metrics(model_name, self._stats, lambda: sorted(server.adapters()))
        self.draining = False
        self._held = 0
        self._answered_tokens = 0  # of requests that are over
        self._live: set[Answers] = set()
        self._finished: deque[float] = deque(maxlen=256)
        self._texts = ThreadPoolExecutor(1, "hfaccel-tokenizer")
        self._post: Post | None = None
        self._grammars: Grammars | None = None
        self._making = threading.Lock()
        self._steps, self._moved_s = -1, time.monotonic()

    # -- names

    def adapter_of(self, model: str) -> str | None:
        """The adapter that a request's model names, None for the base. Raises: ApiError 404."""
        if model == self.model_name:
            return None
        known = self.server.adapters()
        if model in known:
            return model
        names = ", ".join([self.model_name, *sorted(known)])
        raise ApiError(
            404,
            f"the model {model!r} does not exist; there are {names}",
            param="model",
            code="model_not_found",
        )

    def adapter_path(self, path: str) -> Path:
        """A folder that a client may load. Raises: ApiError."""
        if self.lora_dir is None:
            raise ApiError(403, "no adapter can be loaded: the server was started without --lora-dir")
        if "\0" in path:
            raise ApiError(400, "lora_path is no path", param="lora_path")
        found = (self.lora_dir / path).resolve()
        if not found.is_relative_to(self.lora_dir) or found == self.lora_dir:
            raise ApiError(400, "lora_path is not inside of --lora-dir", param="lora_path")
        if not os.path.isdir(found):  # false for names that no file system takes, too
            raise ApiError(404, "lora_path is no folder in --lora-dir", param="lora_path")
        return found

    # -- texts

    async def ids_of(
        self, prompts: list[str] | list[list[int]], *, special: bool = True, param: str = "prompt"
    ) -> list[list[int]]:
        """Token ids of each prompt. Raises: ApiError."""
        if not isinstance(prompts[0], str):
            return prompts
        tokenizer = self._tokenizer(param)

        def encode() -> list[list[int]]:
            return [tokenizer(text, add_special_tokens=special)["input_ids"] for text in prompts]

        found = await self._apart(encode, sum(map(len, prompts)))
        if not all(found):
            raise ApiError(400, f"{param} has no tokens", param=param)
        return found

    async def ids_of_messages(
        self, messages: Sequence[Mapping[str, Any]], tools=None, **how: Any
    ) -> list[int]:
        """Token ids of a conversation by the tokenizer's chat template. Raises: ApiError."""
        tokenizer = self._tokenizer("messages")
        if not getattr(tokenizer, "chat_template", None):
            raise ApiError(400, "the model has no chat template: use /v1/completions", param="messages")

        def encode() -> list[int]:
            made = tokenizer.apply_chat_template(list(messages), tools=tools, return_dict=True, **how)
            return made["input_ids"]

        try:
            return await self._apart(encode, len(str(messages)) + len(str(tools or "")))
        except Exception as why:  # whatever a template raises is about the messages
            raise ApiError(400, f"the chat template refuses these messages: {why}", param="messages") from why

    async def constrained(self, kind: str, what: Any, param: str) -> Callable[[], Constraint]:
        """Makes what rules an answer; see `grammar.grammar_of`. Raises: ApiError."""
        tokenizer = self._tokenizer(param)

        def make() -> Callable[[], Constraint]:
            grammar = grammar_of(kind, what)
            with self._making:
                if self._grammars is None:
                    model = self.server.engine.model
                    ends = model.generation_config.eos_token_id
                    ends = [] if ends is None else [ends] if isinstance(ends, int) else ends
                    vocab = model.config.get_text_config(decoder=True).vocab_size
                    self._grammars = Grammars(tokenizer, vocab, ends)
            self._grammars.check(grammar)
            return lambda: self._grammars.constraint(grammar)

        try:
            return await asyncio.to_thread(make)
        except (PatchError, ImportError) as error:
            raise ApiError(400, f"{param}: {error}", param=param) from error

    async def _apart(self, work, characters: int):
        if characters <= INLINE_CHARACTERS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._texts, work)

    def _tokenizer(self, param: str):
        if self.tokenizer is None:
            raise ApiError(400, "the server has no tokenizer: give token ids", param=param)
        return self.tokenizer

    def room(
        self, prompt: list[int], asked: int | None, field: str, *, source: str = "prompt", least: int = 1
    ) -> int:
        """How many tokens may follow a prompt; more than that are not given.

        Args:
            field: that asked for them. source: the field of the prompt. least: that must have room.
        Raises: ApiError.
        """
        if asked is not None and asked < least:
            raise ApiError(400, f"{field} is {least} or more, not {asked}", param=field)
        left = self.max_tokens - len(prompt)
        if left < least:
            raise ApiError(
                400,
                f"this model's maximum context length is {self.max_tokens} tokens, but the prompt has "
                f"{len(prompt)} tokens: shorten it",
                param=source,
                code="context_length_exceeded",
            )
        return left if asked is None else min(asked, left)

    # -- requests

    def begin(self, choices: list[Choice], record: dict[str, Any], prompt_field: str = "prompt") -> Answers:
        """Take choices in and open them. record: what the log says of the request.

        Raises: ApiError, with none of them open.
        """
        self._admit(len(choices))
        loop = asyncio.get_running_loop()
        if self._post is None or self._post.loop is not loop:
            self._post = Post(loop)
        answers = Answers(
            self.server,
            self._post,
            choices,
            heard=self._heard,
            ended=lambda one: self._end(one, record),
            prompt_field=prompt_field,
        )
        self._held += len(choices)
        self._live.add(answers)
        answers.deadline = asyncio.get_running_loop().call_later(
            self.bounds.request_timeout_s, answers.fail, self._late()
        )
        answers.start()
        return answers

    @property
    def shared_tokens(self) -> int:
        """Prompts from this length on are computed once for all their choices."""
        return SHARED_PAGES * self.page_tokens if self.server.engine.tree is not None else 1 << 62

    def _late(self) -> ApiError:
        return ApiError(
            504, f"the request took longer than {self.bounds.request_timeout_s:g} s", code="request_timeout"
        )

    def _admit(self, count: int) -> None:
        if self.draining:
            raise going_down()
        if (state := self.state()) != "ok":
            raise ApiError(503, f"the engine is {state}", code="engine_unavailable")
        self.check_count(count, "n")
        waiting = len(self.server.engine.scheduler.waiting)
        full = waiting >= self.bounds.max_queue > 0 or self._held + count > self.most
        if full:
            raise ApiError(
                429,
                f"{self._held} requests are under way and the queue of {self.bounds.max_queue} is full",
                code="queue_full",
                headers={"retry-after": str(self._retry_after())},
            )

    def check_count(self, count: int, field: str) -> None:
        """Raises: ApiError for more answers in one request than ever run and wait."""
        if count > self.most:
            raise ApiError(400, f"{count} answers at once; this server takes {self.most}", param=field)

    def check_priority(self, priority: int) -> None:
        """Raises: ApiError for one that would not count."""
        if priority and self.server.engine.limits.policy != "priority":
            raise ApiError(400, "priority counts under --policy priority alone", param="priority")

    def _retry_after(self) -> int:
        """Seconds until what waits now is probably served."""
        now = time.monotonic()
        recent = sum(now - at < RATE_S for at in self._finished)
        waiting = max(1, self._held - self.server.engine.limits.max_running)
        return 1 if not recent else max(1, min(60, math.ceil(waiting * RATE_S / recent / 10)))

    def _heard(self, choice: Choice, gap_s: float | None) -> None:
        if gap_s is None:
            self.metrics.began(choice)
        else:
            self.metrics.gap.observe(gap_s)

    def _end(self, answers: Answers, record: dict[str, Any]) -> None:
        answers.deadline.cancel()
        self._live.discard(answers)
        self._held -= len(answers.choices)
        tokens = 0
        for choice in answers.choices:
            if choice.opened is not None:
                tokens += len(choice.opened.request.output)
            if choice.answer is not None:
                self._finished.append(time.monotonic())
                self.metrics.finished(choice)
        self._answered_tokens += tokens
        firsts = [choice.first_s for choice in answers.choices if choice.first_s is not None]
        reasons = sorted({choice.answer.finish_reason for choice in answers.choices if choice.answer})
        said = record | {
            "status": 200 if answers.error is None else answers.error.status,
            "finish": ",".join(reasons) or None,
            "error": None if answers.error is None else answers.error.code or answers.error.message,
            "prompt_tokens": sum(map(len, {id(c.prompt): c.prompt for c in answers.choices}.values())),
            "cached_tokens": sum(c.answer.cached_tokens for c in answers.choices if c.answer),
            "completion_tokens": tokens,
            "first_ms": round(1e3 * (min(firsts) - answers.began_s), 1) if firsts else None,
            "total_ms": round(1e3 * (time.perf_counter() - answers.began_s), 1),
        }
        tell("request", **{key: value for key, value in said.items() if value is not None})

    def refused(self, path: str, name: str, error: ApiError) -> None:
        """Count and log what got an error in place of an answer."""
        self.metrics.failed(error.status, error.code)
        said = {"status": error.status, "code": error.code, "param": error.param}
        tell("refused", id=name, path=path[:200], **{k: v for k, v in said.items() if v is not None})

    def _stats(self) -> dict[str, Any]:
        choices = [choice for answers in self._live for choice in answers.choices if choice.opened]
        tokens = self._answered_tokens + sum(len(choice.opened.request.output) for choice in choices)
        more = {"lora_slots": self.server.engine.slots.count, "answer_tokens": tokens}
        return {**self.server.stats(), **more}

    # -- how it is

    def state(self) -> str:
        """ "ok", "dead" or "stuck"."""
        if not self.server.alive:
            return "dead"
        engine, now = self.server.engine, time.monotonic()
        if engine.steps != self._steps or not engine.busy:
            self._steps, self._moved_s = engine.steps, now
        return "stuck" if now - self._moved_s > self.bounds.stall_s else "ok"

    async def watch(self) -> None:
        """Look at the engine once a second, so that `state` knows since when it stands still."""
        before = "ok"
        while True:
            now = self.state()
            if now != before:
                tell("engine", state=now, level=logging.ERROR if now != "ok" else logging.WARNING)
                before = now
            await asyncio.sleep(min(1.0, self.bounds.stall_s / 4))

    def drain(self) -> None:
        """Take nothing new in."""
        self.draining = True

    def expire(self) -> None:
        """End what is still under way, with an error that says why."""
        for answers in list(self._live):
            answers.fail(going_down())

    def close(self) -> None:
        self.expire()
        self._texts.shutdown(wait=False, cancel_futures=True)


def going_down() -> ApiError:
    return ApiError(
        503,
        "the server is shutting down",
        code="shutting_down",
        headers={"retry-after": "5", "connection": "close"},
    )


def tell(event: str, *, level: int = logging.INFO, **fields: Any) -> None:
    """A line of JSON in the log; never a prompt or an answer."""
    log.log(level, "%s", json.dumps({"event": event, **fields}))
