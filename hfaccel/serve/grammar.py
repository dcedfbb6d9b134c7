"""Answers that are what a JSON schema, a regular expression or a grammar says, through llguidance.

    model.generate(**inputs, logits_processor=hfaccel.structured(Person, tokenizer))

A mask of the tokens that can come next is computed beside the model's step; what it bars is -inf. JSON is
written in one line, ", " and ": " between its parts: a model cannot lose itself in white space. What a schema
asks for and cannot be enforced is refused by name, never passed over.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from hfaccel.errors import PatchError
from hfaccel.serve.requests import Refused

JSON_FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
KEPT = 128  # grammars that are known to be right
MASK_THREADS = 4

_pool = ThreadPoolExecutor(MASK_THREADS, "hfaccel-masks")


class BadGrammar(Refused):
    """A schema, expression or grammar that cannot be enforced."""


def _closed(schema: Any) -> Any:
    """A class's schema, objects with named fields closed to others: a model that may add fields adds them."""
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(part) for key, part in schema.items()}
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        closed.setdefault("additionalProperties", False)
    return closed


def json_grammar(schema: Any) -> str:
    """Of a JSON schema as a dict, bool or text, or a Pydantic class, whose objects have its fields alone
    unless it says otherwise (`extra="allow"`). Raises: BadGrammar."""
    from llguidance import LLMatcher

    if hasattr(schema, "model_json_schema"):
        schema = _closed(schema.model_json_schema())
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except ValueError as why:
            raise BadGrammar(f"the schema is no JSON: {why}") from why
    if not isinstance(schema, dict | bool):
        raise BadGrammar("a schema is an object, true or false, or a Pydantic class")
    try:
        return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=JSON_FORM)
    except (ValueError, RecursionError) as why:
        raise BadGrammar(f"the schema cannot be enforced: {why}") from why


def grammar_of(kind: str, what: Any) -> str:
    """Of kind json, json_object, regex, choice, or grammar, which is Lark's or GBNF. Raises: BadGrammar."""
    from llguidance import LLMatcher, grammar_from

    if kind == "json":
        return json_grammar(what)
    if kind == "json_object":
        return json_grammar({"type": "object"})
    if kind == "choice":
        texts = (json.dumps(text) for text in what)
        return LLMatcher.grammar_from_lark("start: " + " | ".join(texts))
    try:
        if kind == "regex":
            return LLMatcher.grammar_from_regex(what)
        return grammar_from("gbnf" if "::=" in what else "lark", what)
    except Exception as why:  # whatever a converter raises is about the grammar
        raise BadGrammar(f"the {kind} is not valid: {why}") from why


class Grammars:
    """Of one tokenizer and model.

    Args:
        vocab: rows of the model's logits at least. ends: tokens that end an answer.
    Raises: PatchError without llguidance, or for a tokenizer that it cannot read.
    """

    def __init__(self, tokenizer, vocab: int, ends=()):
        try:
            from llguidance.hf import from_tokenizer
        except ImportError as why:
            raise PatchError("structured output needs llguidance: pip install 'hfaccel[serve]'") from why
        own = getattr(tokenizer, "eos_token_id", None)
        found = sorted({*ends, *([] if own is None else [own])})
        if not found:
            raise PatchError("structured output needs a tokenizer or model with an end token")
        try:
            self._tokens = from_tokenizer(tokenizer, n_vocab=max(vocab, len(tokenizer)), eos_token=found)
        except Exception as why:
            raise PatchError(f"structured output cannot read this tokenizer: {why}") from why
        self._right: OrderedDict[str, None] = OrderedDict()
        self._lock = threading.Lock()

    def check(self, grammar: str) -> None:
        """Raises: BadGrammar, naming what cannot be enforced."""
        from llguidance import LLMatcher

        with self._lock:
            if grammar in self._right:
                self._right.move_to_end(grammar)
                return
        wrong, said = LLMatcher.validate_grammar_with_warnings(grammar, self._tokens)
        if wrong:
            raise BadGrammar(f"cannot be enforced: {'; '.join(said)}")
        with self._lock:
            self._right[grammar] = None
            while len(self._right) > KEPT:
                self._right.popitem(last=False)

    def constraint(self, grammar: str) -> Grammar:
        """For one answer. Raises: BadGrammar."""
        self.check(grammar)
        return Grammar(self._tokens, grammar)


class Grammar:
    """Where one answer stands in its grammar: a `Constraint`."""

    def __init__(self, tokens, grammar: str | None = None, matcher=None):
        from llguidance import LLMatcher

        self._tokens = tokens
        self._matcher = LLMatcher(tokens, grammar) if matcher is None else matcher
        self._mask: Future | None = None

    def copy(self) -> Grammar:
        return Grammar(self._tokens, matcher=self._matcher.deep_copy())

    def prepare(self) -> None:
        if self._mask is None:
            self._mask = _pool.submit(self._matcher.compute_bitmask)

    def mask(self, row: torch.Tensor) -> None:
        self.prepare()
        bits, self._mask = self._mask.result(), None
        allowed = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")[: len(row)]
        barred = np.ones(len(row), bool)
        barred[: len(allowed)] = allowed == 0
        if barred.all():
            raise self._stuck("no token can follow")
        row.masked_fill_(torch.from_numpy(barred), -torch.inf)

    def take(self, token: int) -> bool:
        self._mask = None
        if not self._matcher.consume_token(token):
            raise self._stuck(f"token {token} does not follow")
        return self._matcher.is_stopped()

    def _stuck(self, what: str) -> PatchError:
        """BadGrammar where its own limits end it, e.g. a repetition of repetitions, seen on the way alone."""
        why = (self._matcher.get_error() or "it ended").split("\n")[0]
        broken = why.startswith("Parser Error")  # a token that its mask should have barred
        return (PatchError if broken else BadGrammar)(f"{what} in the grammar: {why}")


class Structured:
    """A logits processor for `generate`, of any batch, beams included."""

    def __init__(self, grammars: Grammars, grammar: str, ends: list[int]):
        self.grammars, self.grammar, self.ends = grammars, grammar, ends
        self._prompt: int | None = None
        self._rows: dict[tuple[int, ...], tuple[Grammar, bool]] = {}

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self._prompt is None or input_ids.shape[1] <= self._prompt:
            self._prompt = input_ids.shape[1]
            self._rows = {}
        out = scores.float().cpu().clone()
        rows: dict[tuple[int, ...], tuple[Grammar, bool]] = {}
        for at, ids in enumerate(input_ids[:, self._prompt :].tolist()):
            key = tuple(ids)
            if key not in rows:
                rows[key] = self._state(key)
            grammar, over = rows[key]
            if over:
                end = out[at, self.ends].clone()
                out[at] = -torch.inf
                out[at, self.ends] = end
            else:
                grammar.mask(out[at])
        self._rows = rows
        return out.to(scores)

    def _state(self, ids: tuple[int, ...]) -> tuple[Grammar, bool]:
        """Where an answer stands: a token on from the last call, or else read again from its beginning."""
        if ids and (before := self._rows.get(ids[:-1])) is not None:
            grammar, over = before
            grammar = grammar.copy()  # beams have it in common
            return grammar, over or grammar.take(ids[-1])
        matcher, over = self.grammars.constraint(self.grammar), False
        for token in ids:
            if over:
                break
            over = matcher.take(token)
        return matcher, over


def structured(schema: Any, tokenizer, *, model=None):
    """A logits processor that makes `generate` write JSON of a schema.

    Args:
        schema: a Pydantic class, a JSON schema as a dict or text; `{"regex": ...}`, `{"choice": [...]}` and
            `{"grammar": ...}` alone in a dict are those.
        tokenizer: of transformers, a fast one. model: names its end tokens, where they differ from the
            tokenizer's.
    Returns: for `generate(logits_processor=...)`.
    Raises: BadGrammar for what cannot be enforced.
    """
    from transformers import LogitsProcessorList

    ends = [] if model is None else model.generation_config.eos_token_id or []
    ends = [ends] if isinstance(ends, int) else list(ends)
    grammars = Grammars(tokenizer, len(tokenizer), ends)
    other = schema.keys() if isinstance(schema, dict) and len(schema) == 1 else set()
    kind = next((name for name in ("regex", "choice", "grammar") if name in other), None)
    grammar = json_grammar(schema) if kind is None else grammar_of(kind, schema[kind])
    grammars.check(grammar)
    own = tokenizer.eos_token_id
    return LogitsProcessorList(
        [Structured(grammars, grammar, sorted({*ends, *([] if own is None else [own])}))]
    )
