"""One request: what it asks for, where it stands, what it has got.

`Options` is checked when it is made and `Request` when it is submitted, so that a request which can never be
served is refused before it costs a page; what the engine holds can fail only by an error of its own.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from numbers import Integral, Real
from typing import Protocol

import torch

from hfaccel.cache.pool import Sequence
from hfaccel.errors import PatchError
from hfaccel.lora.adapters import Adapter

SEED_BITS = 63
PENALTY_LIMIT = 1e4


MOST_LOGPROBS = 100  # alternatives of a token: more is a dump of the vocabulary


class Refused(PatchError):
    """A request that can never be served; nothing that runs is touched.

    Attributes: option: what was wrong, by its name here; None where it is no single one.
    """

    def __init__(self, message: str, option: str | None = None):
        super().__init__(message)
        self.option = option


@dataclass(frozen=True)
class Score:
    """How likely a token was: natural logarithms of the model's own probabilities, before any edit.

    Attributes: top: the most likely ones and theirs, best first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Constraint(Protocol):
    """What the tokens of one answer must be, e.g. a grammar. Called by the engine's thread."""

    def prepare(self) -> None:
        """A step begins whose last token of it is known: the next mask may be computed beside the model."""

    def mask(self, row: torch.Tensor) -> None:
        """Put -inf where a token cannot come next, in logits [vocab] fp32."""

    def take(self, token: int) -> bool:
        """A token was chosen. Returns: whether nothing can follow."""


class State(Enum):
    WAITING = "waiting"  # no pages: new, or preempted
    RUNNING = "running"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"

    @property
    def over(self) -> bool:
        return self not in (State.WAITING, State.RUNNING)


@dataclass(frozen=True)
class Options:
    """How a request's tokens are chosen and where they end.

    Args:
        max_new_tokens: 1 or more. temperature: 0 is greedy. top_k: 0 is off. top_p, min_p: shares.
        repetition_penalty: as transformers has it, of prompt and answer; 1 is off.
        presence_penalty, frequency_penalty: taken off the logits of tokens of the answer, once and per time.
        logit_bias: token id -> added to its logit.
        seed: what repeats the draws, whatever runs beside; None draws one.
        stop_ids: tokens that end the answer, which keeps them, beside the model's end tokens.
        ignore_eos: the model's end tokens are tokens like others.
        min_tokens: end tokens, `stop_ids` and stop strings count only after so many tokens.
        logprobs: a `Score` of each token of the answer, with so many alternatives; None is off.
        prompt_logprobs: of each token of the prompt but the first, which is computed whole for it.
        embed: no answer, but the mean of the last hidden states of the prompt.
    Raises: Refused, naming the option.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    embed: bool = False

    def __post_init__(self):
        _whole("max_new_tokens", self.max_new_tokens, 1)
        _whole("top_k", self.top_k, 0)
        _real("temperature", self.temperature, 0, 1e4)
        _real("top_p", self.top_p, 0, 1, open_below=True)
        _real("min_p", self.min_p, 0, 1)
        _real("repetition_penalty", self.repetition_penalty, 0, PENALTY_LIMIT, open_below=True)
        for name in ("presence_penalty", "frequency_penalty"):
            _real(name, getattr(self, name), -PENALTY_LIMIT, PENALTY_LIMIT)
        _whole("min_tokens", self.min_tokens, 0)
        if self.min_tokens > self.max_new_tokens:
            raise Refused(
                f"min_tokens {self.min_tokens} is more than max_new_tokens {self.max_new_tokens}",
                "min_tokens",
            )
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), 0, MOST_LOGPROBS)
        if not isinstance(self.logit_bias, Mapping):
            raise Refused(
                f"logit_bias is a dict of token ids and numbers, not {self.logit_bias!r}", "logit_bias"
            )
        for token, bias in self.logit_bias.items():
            _whole("logit_bias' token", token, 0)
            _real("logit_bias", bias, -PENALTY_LIMIT, PENALTY_LIMIT)
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        if self.seed is not None:
            _whole("seed", self.seed, -(2**63), 2**64 - 1)
        try:
            object.__setattr__(self, "stop_ids", tuple(self.stop_ids))
        except TypeError:
            raise Refused(f"stop_ids is a list of token ids, not {self.stop_ids!r}", "stop_ids") from None
        for token in self.stop_ids:
            _whole("stop_ids' token", token, 0)

    @property
    def plain(self) -> bool:
        """Whether the next token is the best one of the model's own logits."""
        return self.temperature == 0 and not self.edits

    @property
    def edits(self) -> bool:
        """Whether logits are changed before a choice."""
        return bool(
            self.repetition_penalty != 1
            or self.presence_penalty
            or self.frequency_penalty
            or len(self.logit_bias)
            or self.min_tokens
        )

    @property
    def whole(self) -> bool:
        """Whether each token of the prompt must be computed, cached or not."""
        return self.embed or self.prompt_logprobs is not None


def _whole(name: str, value, least: int, most: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise Refused(f"{name} is a whole number, not {value!r}", name.split("'")[0])
    if value < least or (most is not None and value > most):
        at_most = f" and {most} at most" if most else ""
        raise Refused(f"{name} is {least} or more{at_most}, not {value}", name.split("'")[0])


def _real(name: str, value, least: float, most: float, *, open_below: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, Real) or value != value:  # NaN
        raise Refused(f"{name} is a number, not {value!r}", name)
    if value > most or value < least or (open_below and value == least):
        raise Refused(f"{name} is {'above' if open_below else 'from'} {least} to {most}, not {value}", name)


@dataclass(eq=False)
class Request:
    """A prompt on its way to an answer. Fields below `adapter` are the engine's.

    Args:
        prompt: token ids. priority: lower is served first, under the policy `priority`.
        adapter: name of the adapter that it is for, None for the base.
        listener: called by the engine's thread as `listener(request, token)` for each token and with None
            once at the end; an error of its own fails this request alone.
        stop: called as `stop(output)` after each token; true ends the answer.
        constraint: what the answer must be.

    Attributes:
        output: token ids so far. scores, prompt_scores: of the answer, and of the prompt from its second
            token, where the options ask for them. embedding: [hidden size] fp32, likewise.
        finish_reason: "stop", "length", "cancelled" or "error"; None before.
        cached_tokens: of the prompt, found in pages of others when it was first admitted.
        computed: tokens whose keys and values are in its pages.
        arrival, began: seconds on the engine's clock, submitted and first admitted; order: the place among
            all requests. ends: the model's end tokens, none with `ignore_eos`.
    """

    prompt: list[int]
    options: Options = field(default_factory=Options)
    priority: int = 0
    adapter: str | None = None
    listener: Callable[[Request, int | None], None] | None = None
    stop: Callable[[list[int]], bool] | None = None
    constraint: Constraint | None = None

    output: list[int] = field(default_factory=list)
    state: State = State.WAITING
    finish_reason: str | None = None
    error: BaseException | None = None
    cached_tokens: int | None = None
    preemptions: int = 0
    scores: list[Score] = field(default_factory=list)
    prompt_scores: list[Score] = field(default_factory=list)
    embedding: torch.Tensor | None = None
    arrival: float = 0.0
    began: float | None = None
    ends: frozenset[int] = frozenset()
    order: int = -1
    sequence: Sequence | None = None
    lora: Adapter | None = None  # what `adapter` named when it was submitted
    version: object = None  # of the weights that its pages were computed with
    cancelled: bool = False  # asked for; the engine's next step sees it
    done: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self):
        self.prompt = token_ids(self.prompt)
        if not isinstance(self.options, Options):
            raise Refused(f"options are an Options, not {self.options!r}")
        _whole("priority", self.priority, -(2**31), 2**31)
        if self.adapter is not None and not isinstance(self.adapter, str):
            raise Refused(f"adapter is a name, not {self.adapter!r}")
        self._generator: torch.Generator | None = None

    @property
    def plain(self) -> bool:
        """Whether its next token is the best one of the model's own logits."""
        return self.constraint is None and self.options.plain

    @property
    def barred(self) -> frozenset[int]:
        """Tokens that would end the answer before its `min_tokens`."""
        if len(self.output) >= self.options.min_tokens:
            return frozenset()
        return self.ends | frozenset(self.options.stop_ids)

    @property
    def tokens(self) -> list[int]:
        """Prompt and answer."""
        return self.prompt + self.output

    def part(self, at: int, count: int) -> list[int]:
        """`count` of its tokens from the one at `at`."""
        start = at - len(self.prompt)
        if start >= 0:
            return self.output[start : start + count]
        return self.prompt[at : at + count] + self.output[: max(0, start + count)]

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def computed(self) -> int:
        return 0 if self.sequence is None else self.sequence.length

    @property
    def left(self) -> int:
        """Tokens to compute before the next one can be chosen."""
        return self.length - self.computed

    @property
    def most_tokens(self) -> int:
        """How long its sequence can get: the last token of an answer is not computed any more."""
        return len(self.prompt) + self.options.max_new_tokens - 1

    @property
    def generator(self) -> torch.Generator:
        """Its own source of random numbers: torch's global one is neither read nor moved."""
        if self._generator is None:
            seed = self.options.seed
            self._generator = torch.Generator()
            self._generator.manual_seed(secrets.randbits(SEED_BITS) if seed is None else int(seed))
        return self._generator

    def check(self, *, pool_pages: int, page_tokens: int, vocab: int, positions: int | None) -> None:
        """Refuse what can never be served.

        Args:
            pool_pages, page_tokens: all there are. vocab: rows of the embedding. positions: size of a table
                of learned positions, None without one.
        Raises: Refused.
        """
        wrong = next((token for token in self.prompt if not 0 <= token < vocab), None)
        if wrong is not None:
            raise Refused(f"token id {wrong} is not in the model's vocabulary of {vocab}", "prompt")
        for name in ("logit_bias", "stop_ids"):
            for token in getattr(self.options, name):
                if token >= vocab:
                    raise Refused(
                        f"token id {token} of the options is not in the model's vocabulary of {vocab}", name
                    )
        asked = f"{len(self.prompt)} tokens and {self.options.max_new_tokens} new ones"
        if positions is not None and self.most_tokens > positions:
            raise Refused(f"{asked} lie beyond the model's table of {positions} learned positions", "prompt")
        pages = -(-self.most_tokens // page_tokens)
        if pages > pool_pages:
            raise Refused(
                f"{asked} need {pages} pages of {page_tokens} tokens, and there are {pool_pages}: "
                "it can never fit",
                "prompt",
            )

    def end(self, state: State, reason: str, error: BaseException | None = None) -> None:
        """It is over; its pages are the caller's to free. Nothing happens if it was before."""
        if self.state.over:
            return
        self.state, self.finish_reason, self.error = state, reason, error
        try:
            if self.listener is not None:
                self.listener(self, None)
        except Exception as broken:
            self.error = self.error or broken
        finally:
            self.done.set()


def token_ids(ids) -> list[int]:
    """A prompt as a list. Raises: Refused for an empty one, or what is not token ids."""
    if isinstance(ids, torch.Tensor):
        if ids.dim() == 2 and ids.shape[0] == 1:
            ids = ids[0]
        if ids.dim() != 1 or ids.is_floating_point() or ids.dtype == torch.bool:
            raise Refused(f"a prompt is one row of token ids, not {[*ids.shape]} {ids.dtype}", "prompt")
        ids = ids.tolist()
    if isinstance(ids, (str, bytes)):
        raise Refused("a prompt is token ids here, not text", "prompt")
    try:
        ids = list(ids)
    except TypeError:
        raise Refused(f"a prompt is a list of token ids, not {ids!r}", "prompt") from None
    if not ids:
        raise Refused("the prompt is empty", "prompt")
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, Integral):
            raise Refused(f"a prompt is a list of token ids, not of {token!r}", "prompt")
    return [int(token) for token in ids]
