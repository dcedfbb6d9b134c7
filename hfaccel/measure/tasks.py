"""Accuracy on questions: choices by likelihood, answers by generation.

A tasks file has one JSON object a line, of two kinds that may be mixed:

    {"question": ..., "choices": [...], "answer": index of the right choice, or its text}
    {"question": ..., "answer": ...}        what the answer ends with counts: "... #### 72" means 72

Choices. Each is what may follow "Question: ...\\nAnswer:", after a space, and scored by the sum of the
log-likelihood of its tokens there, teacher forced. Right by the sum, and right by the sum over the choice's
characters (which takes away what long choices lose by their length), are two figures; a tie goes to the
first choice.

Answers. The question is asked in the model's chat template where it has one, else as above with the request
to end with the number after "####"; the greedy continuation's answer is what follows "####", else its last
number. Numbers compare as numbers, "1,200.00" equals "1200"; other answers as text without case.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hfaccel.errors import PatchError
from hfaccel.progress import progress_bar

CONTEXT = "Question: {}\nAnswer:"
REQUEST = "\nThink step by step and end with the number alone after ####."
# A minus between two numbers is a dash, and a digit behind a letter part of a name.
_NUMBER = re.compile(r"(?:(?<![\w.])-)?(?<![A-Za-z_\d])\d[\d,]*(?:\.\d+)?")
MARK = "####"


@dataclass(frozen=True)
class Choices:
    """A question of which one choice is right."""

    question: str
    choices: tuple[str, ...]
    answer: int


@dataclass(frozen=True)
class Open:
    """A question whose answer is generated."""

    question: str
    answer: str


def read_tasks(path: str | Path, limit: int | None = None) -> list[Choices | Open]:
    """The first `limit` questions of a tasks file.

    Raises: PatchError naming the line for what is no JSON object or lacks a field, and for an empty file.
    """
    path = Path(path)
    if not path.is_file():
        raise PatchError(f"{path}: no such tasks file")
    found: list[Choices | Open] = []
    try:
        lines = path.read_text("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise PatchError(f"{path} is not UTF-8 text: {error}") from error
    for number, line in enumerate(lines, 1):
        if limit is not None and len(found) >= limit:
            break
        if line.strip():
            found.append(_task(line, f"{path.name}, line {number}"))
    if not found:
        raise PatchError(f"{path} has no questions")
    return found


def _task(line: str, place: str) -> Choices | Open:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise PatchError(f"{place}: no JSON ({error})") from error
    if not isinstance(row, dict):
        raise PatchError(f"{place}: {line[:40]!r} is no JSON object")
    if missing := [key for key in ("question", "answer") if key not in row]:
        raise PatchError(f"{place}: no {missing[0]!r}; a question has question, answer and maybe choices")
    question, answer, choices = row["question"], row["answer"], row.get("choices")
    if not isinstance(question, str) or not question.strip():
        raise PatchError(f"{place}: question={question!r} is no text")
    if choices is None:
        if isinstance(answer, bool) or not isinstance(answer, str | int | float) or not str(answer).strip():
            raise PatchError(f"{place}: answer={answer!r} is neither text nor a number")
        return Open(question, str(answer))
    if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(c, str) for c in choices):
        raise PatchError(f"{place}: choices={choices!r} is no list of two or more texts")
    if not all(choice.strip() for choice in choices):
        raise PatchError(f"{place}: an empty choice")
    if isinstance(answer, str) and answer in choices:
        answer = choices.index(answer)
    if type(answer) is not int or not 0 <= answer < len(choices):
        raise PatchError(f"{place}: answer={answer!r} is neither a choice nor 0 .. {len(choices) - 1}")
    return Choices(question, tuple(choices), answer)


@dataclass(frozen=True)
class Accuracy:
    """Shares of right answers; None where there was no such question."""

    choices: int
    accuracy: float | None
    accuracy_normalized: float | None
    answers: int
    exact_match: float | None

    def to_dict(self) -> dict[str, Any]:
        return vars(self).copy()


def accuracy(
    tasks: list[Choices | Open],
    logits: Callable[[Tensor], Tensor],
    generate: Callable[[str], str],
    tokenizer: Any,
    *,
    progress: bool = True,
) -> Accuracy:
    """Ask every question.

    Args:
        logits: ids [1, T] -> [1, T, V].
        generate: prompt -> the greedy continuation's text.
    """
    plain, normalized, exact = [], [], []
    with progress_bar("questions", len(tasks), progress) as advance:
        for task in tasks:
            if isinstance(task, Choices):
                scores = choice_scores(task, logits, tokenizer)
                by_length = [s / len(c) for s, c in zip(scores, task.choices, strict=True)]
                plain.append(_best(scores) == task.answer)
                normalized.append(_best(by_length) == task.answer)
            else:
                exact.append(same_answer(generate(prompt(task.question, tokenizer)), task.answer))
            advance()
    return Accuracy(len(plain), _share(plain), _share(normalized), len(exact), _share(exact))


def _best(scores: list[float]) -> int:
    return max(range(len(scores)), key=scores.__getitem__)


def _share(right: list[bool]) -> float | None:
    return sum(right) / len(right) if right else None


def choice_scores(task: Choices, logits: Callable[[Tensor], Tensor], tokenizer: Any) -> list[float]:
    """Sum of log p of each choice's tokens behind the question."""
    context = CONTEXT.format(task.question)
    head = _ids(tokenizer, context)
    scores = []
    for choice in task.choices:
        whole = _ids(tokenizer, f"{context} {choice}")
        start = len(head)
        if whole[:start] != head:  # the last token of the context grew into the choice
            start = next(i for i, (a, b) in enumerate(zip(whole, head, strict=False)) if a != b)
        if not 0 < start < len(whole):
            raise PatchError(f"the choice {choice!r} of {task.question[:40]!r} has no tokens of its own")
        ids = torch.tensor([whole])
        rows = logits(ids)[0, start - 1 : -1].float().log_softmax(-1)
        targets = ids[0, start:, None].to(rows.device)
        scores.append(float(rows.gather(-1, targets).sum(dtype=torch.float64)))
    return scores


def _ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, verbose=False)["input_ids"]


def prompt(question: str, tokenizer: Any) -> str:
    """What the model is asked."""
    if getattr(tokenizer, "chat_template", None):
        message = [{"role": "user", "content": question + REQUEST}]
        return tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
    return CONTEXT.format(question + REQUEST)


def same_answer(said: str, wanted: str) -> bool:
    """Whether a generated text has the wanted answer: as a number, where that is what is wanted."""
    wanted = wanted.rpartition(MARK)[2].strip()
    if _NUMBER.fullmatch(wanted):
        behind = said.rpartition(MARK)[2].strip().partition("\n")[0] if MARK in said else ""
        found = _NUMBER.findall(behind)[:1] or _NUMBER.findall(said)[-1:]
        return bool(found) and _value(found[0]) == _value(wanted)
    if MARK in said:
        said = said.rpartition(MARK)[2].strip().partition("\n")[0]
    return said.strip().casefold().rstrip(".") == wanted.casefold().rstrip(".")


def _value(number: str) -> float:
    return float(number.replace(",", ""))


def generator(model: Any, tokenizer: Any, max_new_tokens: int) -> Callable[[str], str]:
    """`model.generate`, greedy, of one prompt's text to the continuation's text."""

    def generate(text: str) -> str:
        special = not getattr(tokenizer, "chat_template", None)  # a template writes its own
        inputs = tokenizer(text, return_tensors="pt", add_special_tokens=special).to(model.device)
        pad = model.generation_config.pad_token_id
        out = model.generate(
            **inputs, max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=0 if pad is None else pad
        )
        return tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    return generate


# lm-eval --------------------------------------------------------------------------------------------------


def lm_eval(model: Any, tokenizer: Any, names: Iterable[str], limit: int | None = None) -> dict[str, Any]:
    """lm-evaluation-harness with this very object: task -> its metrics.

    Args:
        names: of its tasks, or paths of .yaml files that describe one.
    Raises: PatchError if lm-eval is not installed, does not know a task or cannot have its data.
    """
    harness, wrapper = require_lm_eval()
    names = list(names)
    lm = wrapper(pretrained=model, tokenizer=tokenizer)
    try:
        found = harness.simple_evaluate(model=lm, tasks=names, limit=limit)
    except KeyError as error:
        raise PatchError(f"lm-eval does not know the task: {error.args[0] if error.args else ''}") from error
    except OSError as error:
        raise PatchError(f"lm-eval: data of {', '.join(names)}: {error}") from error
    return {name: dict(_figures(metrics)) for name, metrics in found["results"].items()}


def require_lm_eval() -> tuple[Any, Any]:
    """lm-eval and its wrapper around transformers' models. Raises: PatchError where it is not installed."""
    try:
        import lm_eval as harness
        from lm_eval.models.huggingface import HFLM
    except ImportError as error:
        raise PatchError(f"lm-eval is not installed ({error}): pip install 'lm-eval[hf]'") from None
    return harness, HFLM


def _figures(metrics: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for (
        key,
        value,
    ) in metrics.items():  # "acc,none": a metric and the filter of answers; the rest counts samples
        if "," in key and isinstance(value, int | float) and not isinstance(value, bool):
            yield key.removesuffix(",none"), value
