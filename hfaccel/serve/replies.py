"""OpenAI's objects out of answers and their parts, whole or as chunks of a stream.

A stream's chunks have one choice each; `finish_reason` is null until the one chunk that ends a choice. Whole
answers are put together from the same parts, so that the two agree.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from typing import Any

from hfaccel.serve.answers import Answers, Choice
from hfaccel.serve.pieces import Pieces
from hfaccel.serve.requests import Score
from hfaccel.serve.server import Answer, Part


class Form:
    """What completions and chat have in common.

    Args:
        model: its name as the client gave it. with_usage: a stream's last chunk has the usage.
    Attributes: dropped: answers are not shown, for max_tokens: 0.
    """

    dropped = False
    prefix, whole_kind, chunk_kind = "", "", ""

    def __init__(self, answers: Answers, model: str, pieces: Pieces | None, *, with_usage: bool = False):
        self.answers, self.pieces, self.with_usage = answers, pieces, with_usage
        self._fixed = {"id": self.prefix + secrets.token_hex(16), "created": int(time.time()), "model": model}

    def whole(self) -> dict[str, Any]:
        choices = [self.choice(choice) for choice in self.answers.choices]
        return {**self._fixed, "object": self.whole_kind, "choices": choices, "usage": self.usage()}

    def head(self) -> Iterator[dict[str, Any]]:
        return iter(())

    def chunks(self, batch: list[tuple[Choice, Part]]) -> Iterator[dict[str, Any]]:
        """A chunk of each choice with the text that came, and one of its end."""
        texts: dict[Choice, list[Part]] = {}
        for choice, part in batch:
            texts.setdefault(choice, []).append(part)
        for choice, parts in texts.items():
            yield from map(self._chunk, self.deltas(choice, parts))

    def tail(self) -> Iterator[dict[str, Any]]:
        if self.with_usage:
            yield {**self._fixed, "object": self.chunk_kind, "choices": [], "usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        """Tokens of prompts, each counted once, and of answers, of which `best_of` shows some."""
        done = [choice for choice in self.answers.choices if choice.answer is not None]
        first: dict[int, Choice] = {}
        for choice in done:
            first.setdefault(id(choice.prompt), choice)
        prompt = sum(len(choice.prompt) for choice in first.values())
        cached = sum(choice.answer.cached_tokens for choice in first.values())
        count = 0 if self.dropped else sum(len(choice.answer.ids) for choice in done)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": count,
            "total_tokens": prompt + count,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def choice(self, choice: Choice) -> dict[str, Any]:
        raise NotImplementedError

    def deltas(self, choice: Choice, parts: list[Part]) -> Iterator[dict[str, Any]]:
        raise NotImplementedError

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        made = {**self._fixed, "object": self.chunk_kind, "choices": [choice]}
        return made | {"usage": None} if self.with_usage else made


class CompletionForm(Form):
    """Of /v1/completions.

    Args:
        echoes: text of each prompt where it comes before the answer, by the choice's index. scored:
            log-probabilities are asked for.
        best_of, n: choices of each prompt, and how many of them are shown.
    """

    prefix, whole_kind, chunk_kind = "cmpl-", "text_completion", "text_completion"

    def __init__(
        self, *args, echoes: list[str] | None = None, scored=False, dropped=False, best_of=0, n=1, **how
    ):
        super().__init__(*args, **how)
        self.echoes, self.scored, self.dropped = echoes, scored, dropped
        self.n, self.best_of = n, best_of
        self._offsets: dict[int, int] = {}
        self._begun: set[int] = set()

    def whole(self) -> dict[str, Any]:
        made = super().whole()
        if self.best_of > self.n:
            made["choices"] = self._best(made["choices"])
        return made

    def choice(self, choice: Choice) -> dict[str, Any]:
        answer = choice.answer
        text = "" if self.dropped else answer.text or ""
        scores = [] if self.dropped else answer.scores
        logprobs = self._logprobs(choice, scores, answer if self.echoes else None) if self.scored else None
        if self.echoes:
            text = self.echoes[choice.index] + text
        return self._of(choice, text, logprobs, "length" if self.dropped else answer.finish_reason, answer)

    def deltas(self, choice: Choice, parts: list[Part]) -> Iterator[dict[str, Any]]:
        if self.dropped:
            if parts[-1].answer is not None:
                yield self.choice(choice)
            return
        text = "".join(part.text or "" for part in parts)
        scores = [part.score for part in parts if part.score is not None]
        answer, first = parts[-1].answer, choice.index not in self._begun
        self._begun.add(choice.index)
        before = choice.opened if first and self.echoes else None
        if before is not None:
            text = self.echoes[choice.index] + text
        logprobs = None
        if self.scored and (scores or before is not None):
            logprobs = self._logprobs(choice, scores, before and before.request)
        if text or logprobs or answer is not None:
            yield self._of(choice, text, logprobs, answer and answer.finish_reason, answer)

    def _of(self, choice, text, logprobs, reason, answer: Answer | None) -> dict[str, Any]:
        made = {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        if answer is not None and reason == "stop":
            made["stop_reason"] = answer.stop
        return made

    def _logprobs(self, choice: Choice, scores: list[Score], before) -> dict[str, Any]:
        """Of tokens of an answer; with `before`, of the prompt's too, whose first token has none."""
        tokens = [score.token for score in scores]
        known: list[Score | None] = list(scores)
        if before is not None:
            tokens = choice.prompt + tokens
            known = [None, *before.prompt_scores, *scores]
        texts = [self.pieces[token][0] for token in tokens]
        at, offsets = self._offsets.get(choice.index, 0), []
        for text in texts:
            offsets.append(at)
            at += len(text)
        self._offsets[choice.index] = at
        tops = [
            None if score is None else {self.pieces[token][0]: value for token, value in score.top} or None
            for score in known
        ]
        return {
            "tokens": texts,
            "token_logprobs": [None if score is None else score.logprob for score in known],
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _best(self, made: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The n of each prompt's best_of choices whose tokens are likeliest on the mean."""
        kept = []
        for start in range(0, len(made), self.best_of):
            group = range(start, start + self.best_of)
            order = sorted(group, key=lambda at: -_mean(self.answers.choices[at].answer.scores))
            kept += [made[at] for at in order[: self.n]]
        for index, one in enumerate(kept):
            one["index"] = index
            if not self.scored:
                one["logprobs"] = None
        return kept


def _mean(scores: list[Score]) -> float:
    return sum(score.logprob for score in scores) / max(1, len(scores))


class ChatForm(Form):
    """Of /v1/chat/completions.

    Args:
        scored: log-probabilities are asked for. parser: makes what takes an answer's text apart into content
            and tool calls, one of each choice; None where there are no tools.
    """

    prefix, whole_kind, chunk_kind = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, *args, scored: bool = False, parser=None, **how):
        super().__init__(*args, **how)
        self.scored, self.parser = scored, parser
        self._parsers: dict[int, Any] = {}

    def head(self) -> Iterator[dict[str, Any]]:
        for choice in self.answers.choices:
            delta = {"role": "assistant", "content": ""}
            yield self._chunk(
                {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}
            )

    def choice(self, choice: Choice) -> dict[str, Any]:
        answer = choice.answer
        message: dict[str, Any] = {"role": "assistant", "content": answer.text or "", "refusal": None}
        reason = answer.finish_reason
        if self.parser is not None:
            found = self.parser()
            message["content"], calls = found.whole(answer.text or "", cut=reason == "length")
            if calls:
                message["tool_calls"] = calls
                message["content"] = message["content"] or None
            reason = found.reason(reason)
        logprobs = self._logprobs(answer.scores) if self.scored else None
        return self._with_stop(
            {"index": choice.index, "message": message, "logprobs": logprobs, "finish_reason": reason}, answer
        )

    def deltas(self, choice: Choice, parts: list[Part]) -> Iterator[dict[str, Any]]:
        text = "".join(part.text or "" for part in parts)
        scores = [part.score for part in parts if part.score is not None]
        answer = parts[-1].answer
        reason = answer and answer.finish_reason
        logprobs = self._logprobs(scores) if self.scored and scores else None
        found: list[dict[str, Any]] = [{"content": text}] if text else []
        if self.parser is not None:
            if choice.index not in self._parsers:
                self._parsers[choice.index] = self.parser()
            own = self._parsers[choice.index]
            found = own.put(text)
            if answer is not None:
                found += own.end(cut=reason == "length")
                reason = own.reason(reason)
        if not found and logprobs:
            found = [{"content": ""}]
        for at, delta in enumerate(found):
            scored = logprobs if at == 0 else None
            yield {"index": choice.index, "delta": delta, "logprobs": scored, "finish_reason": None}
        if answer is not None:
            end = {"index": choice.index, "delta": {}, "logprobs": None, "finish_reason": reason}
            yield self._with_stop(end, answer)

    def _with_stop(self, made: dict[str, Any], answer: Answer) -> dict[str, Any]:
        return made | {"stop_reason": answer.stop} if made["finish_reason"] == "stop" else made

    def _logprobs(self, scores: list[Score]) -> dict[str, Any]:
        def one(token: int, value: float) -> dict[str, Any]:
            text, raw = self.pieces[token]
            return {"token": text, "logprob": value, "bytes": raw}

        content = [
            one(score.token, score.logprob) | {"top_logprobs": [one(*pair) for pair in score.top]}
            for score in scores
        ]
        return {"content": content, "refusal": None}
