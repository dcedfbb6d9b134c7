"""The answers of one HTTP request: some prompts, some choices of each, as parts that one loop gets.

The engine's thread puts parts into a `Post`, which wakes the loop once for all that come meanwhile. Choices
of one prompt after the first are opened when the first one's prompt is computed: they find its pages.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from hfaccel.serve.errors import ApiError, of_failure, of_refusal
from hfaccel.serve.requests import Constraint, Refused
from hfaccel.serve.server import Answer, Part, Server

SHARED_PAGES = 2  # of a prompt: below, choices do not wait for the first one's


class Post:
    """Parts from the engine's thread to the loop's."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.loop, self._parts, self._called = loop, deque(), False

    def put(self, take: Callable[[Part, float], None], part: Part) -> None:
        """Have the loop call `take(part, time)`, with the time of now."""
        self._parts.append((take, part, time.perf_counter()))
        if not self._called:
            self._called = True
            try:
                self.loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # the loop is over, and with it whoever waits
                self._parts.clear()

    def _deliver(self) -> None:
        self._called = False  # first: what is put meanwhile calls again, or is seen below
        while self._parts:
            take, part, at_s = self._parts.popleft()
            take(part, at_s)


@dataclass(eq=False)
class Choice:
    """One answer: the prompt's place among the prompts, its options, what was opened for it; `constraint`
    makes what rules it."""

    index: int
    prompt: list[int]
    options: dict[str, Any]
    follows: Choice | None = None  # whose prompt it shares
    constraint: Callable[[], Constraint] | None = None
    opened: Any = None
    answer: Answer | None = None
    began_s: float = 0.0
    first_s: float | None = None  # when its first token came
    last_s: float | None = None  # its newest token, or its end without one


class Answers:
    """Choices on their way.

    Args:
        heard: called with a choice whose token came, or whose answer without one, and the seconds since the
            token before, None for the first. ended: called once with this when all is over, whatever the
            outcome.
        prompt_field: where the prompts came from, for errors.
    Attributes:
        error: what ended them before their time.
    """

    def __init__(
        self,
        server: Server,
        post: Post,
        choices: list[Choice],
        *,
        heard: Callable[[Choice, float | None], None],
        ended: Callable[[Answers], None],
        prompt_field: str = "prompt",
    ):
        self.server, self.post, self.choices = server, post, choices
        self.heard, self.ended, self.prompt_field = heard, ended, prompt_field
        self.error: ApiError | None = None
        self.began_s = time.perf_counter()
        self._parts: list[tuple[Choice, Part]] = []
        self._woken = asyncio.Event()
        self._closed = False

    def start(self) -> None:
        """Open the first choice of each prompt. Raises: ApiError, with none of them open."""
        try:
            for choice in self.choices:
                if choice.follows is None:
                    self._open(choice)
        except ApiError as error:
            self.error = error
            self.close()
            raise

    def fail(self, error: ApiError) -> None:
        """End them all; whoever takes parts is told why."""
        if self.error is None and not self._closed:
            self.error = error
            self._cancel()
            self._woken.set()

    async def parts(self) -> AsyncIterator[list[tuple[Choice, Part]]]:
        """What came since the last time. Raises: ApiError where they failed."""
        left = len(self.choices)
        try:
            while left:
                await self._woken.wait()
                self._woken.clear()
                batch, self._parts = self._parts, []
                for choice, part in batch:
                    left -= part.answer is not None
                    self._follow(choice)
                if batch:
                    yield batch
                if self.error is not None and left:
                    raise self.error
        except ApiError as error:
            self.error = self.error or error
            raise
        finally:
            self.close()

    async def all(self) -> list[Answer]:
        """The answers, when all are over. Raises: ApiError."""
        async for _ in self.parts():
            pass
        return [choice.answer for choice in self.choices]

    def close(self) -> None:
        """Cancel what still runs; free to call again."""
        if not self._closed:
            self._closed = True
            self._cancel()
            self.ended(self)

    def _open(self, choice: Choice) -> None:
        """Raises: ApiError."""
        choice.began_s = time.perf_counter()

        def sink(part: Part) -> None:
            self.post.put(take, part)

        def take(part: Part, at_s: float) -> None:
            self._take(choice, part, at_s)

        try:
            more = {} if choice.constraint is None else {"constraint": choice.constraint()}
            choice.opened = self.server.open(choice.prompt, sink, **choice.options, **more)
        except Refused as error:
            raise of_refusal(error, prompt=self.prompt_field) from error
        except Exception as error:  # no thread for its adapter, ...
            raise of_failure(error) from error

    def _take(self, choice: Choice, part: Part, at_s: float) -> None:
        if part.token is not None:
            gap_s = None if choice.last_s is None else at_s - choice.last_s
            choice.first_s, choice.last_s = choice.first_s or at_s, at_s
            self.heard(choice, gap_s)
        elif part.answer is not None:
            choice.answer = part.answer
            if choice.last_s is None:
                choice.last_s = at_s
                self.heard(choice, None)
        elif self.error is None and not self._closed:
            try:
                choice.opened.answer()  # raises why
            except Exception as error:
                self.error = of_failure(error)
                self._cancel()
        self._parts.append((choice, part))
        self._woken.set()

    def _follow(self, first: Choice) -> None:
        """Open those who waited for the pages of its prompt."""
        for choice in self.choices:
            if choice.follows is first and choice.opened is None and self.error is None:
                self._open(choice)

    def _cancel(self) -> None:
        for choice in self.choices:
            if choice.opened is not None and choice.answer is None:
                self.server.cancel(choice.opened)


def choices_of(
    prompts: list[list[int]],
    n: int,
    options: list[dict[str, Any]] | dict[str, Any],
    shared_tokens: int,
    constraint: Callable[[], Constraint] | None = None,
) -> list[Choice]:
    """n choices of each prompt, index by index; each but the first has a seed of its own.

    Args:
        options: of all, or of each prompt. shared_tokens: prompts from this length on are computed once.
    """
    found: list[Choice] = []
    for at, prompt in enumerate(prompts):
        common = options[at] if isinstance(options, list) else options
        first = None
        for number in range(n):
            own = dict(common)
            if number and own.get("seed") is not None:
                own["seed"] = own["seed"] + number
            shares = first if len(prompt) >= shared_tokens and not own.get("prompt_logprobs") else None
            found.append(Choice(at * n + number, prompt, own, shares, constraint))
            first = first or found[-1]
    return found
