"""measure/tasks.py: what is read, how choices are scored, which answers are equal."""

import json
import math
from functools import partial

import pytest
import torch

from hfaccel.errors import PatchError
from hfaccel.measure.perplexity import logits_of
from hfaccel.measure.tasks import (
    Choices,
    Open,
    accuracy,
    choice_scores,
    generator,
    prompt,
    read_tasks,
    same_answer,
)
from test_readme import _tokenizer
from tiny import tiny

VOCAB = 256


def write(tmp_path, *rows):
    place = tmp_path / "tasks.jsonl"
    place.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return place


def test_both_kinds_and_both_forms_of_an_answer(tmp_path):
    place = write(
        tmp_path,
        {"question": "a?", "choices": ["x", "y"], "answer": 1},
        "",
        {"question": "b?", "choices": ["x", "y"], "answer": "x", "source": "ours"},
        {"question": "c?", "answer": "so #### 3"},
        {"question": "d?", "answer": 4},
    )
    found = read_tasks(place)
    assert found == [
        Choices("a?", ("x", "y"), 1),
        Choices("b?", ("x", "y"), 0),
        Open("c?", "so #### 3"),
        Open("d?", "4"),
    ]
    assert read_tasks(place, limit=2) == found[:2]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("{", "tasks.jsonl, line 2: no JSON"),
        ("[1]", "no JSON object"),
        ({"choices": ["a", "b"], "answer": 0}, "no 'question'"),
        ({"question": "a?", "choices": ["a", "b"]}, "no 'answer'"),
        ({"question": "", "answer": "1"}, "question='' is no text"),
        ({"question": "a?", "choices": ["a"], "answer": 0}, "two or more"),
        ({"question": "a?", "choices": ["a", 2], "answer": 0}, "two or more"),
        ({"question": "a?", "choices": ["a", " "], "answer": 0}, "an empty choice"),
        ({"question": "a?", "choices": ["a", "b"], "answer": 2}, "answer=2 is neither a choice nor 0 .. 1"),
        ({"question": "a?", "choices": ["a", "b"], "answer": True}, "answer=True"),
        ({"question": "a?", "choices": ["a", "b"], "answer": "c"}, "answer='c'"),
        ({"question": "a?", "answer": None}, "answer=None is neither text nor a number"),
    ],
)
def test_lines_that_are_no_question(tmp_path, row, words):
    with pytest.raises(PatchError, match=words):
        read_tasks(write(tmp_path, {"question": "a?", "answer": "1"}, row))


def test_files_that_are_none(tmp_path):
    with pytest.raises(PatchError, match="no such tasks file"):
        read_tasks(tmp_path / "nowhere")
    with pytest.raises(PatchError, match="has no questions"):
        read_tasks(write(tmp_path, ""))
    (tmp_path / "x").write_bytes(b"\xff\xfe")
    with pytest.raises(PatchError, match="not UTF-8"):
        read_tasks(tmp_path / "x")


def test_scores_are_the_tokens_log_likelihoods():
    """Against one forward a token in fp64."""
    model, tokenizer = tiny("llama"), _tokenizer(VOCAB)
    task = Choices("The three", ("laws", "of motion are"), 0)
    with torch.no_grad():
        scores = choice_scores(task, partial(logits_of, model), tokenizer)
    head = tokenizer("Question: The three\nAnswer:")["input_ids"]
    for choice, score in zip(task.choices, scores, strict=True):
        ids, wanted = list(head), 0.0
        for token in tokenizer(choice)["input_ids"]:
            with torch.no_grad():
                wanted += float(model(torch.tensor([ids])).logits[0, -1].double().log_softmax(-1)[token])
            ids.append(token)
        assert score == pytest.approx(wanted, rel=1e-5)


def test_length_decides_one_figure_and_not_the_other():
    """Every token costs the same: few tokens win by the sum, many letters a token by length."""
    tokenizer = _tokenizer(VOCAB)
    tasks = [Choices("The", ("of", "motion motion"), 1)]
    even = accuracy(tasks, lambda ids: torch.zeros(1, ids.shape[1], VOCAB), str, tokenizer)
    assert (even.choices, even.accuracy, even.accuracy_normalized) == (1, 0.0, 1.0)
    assert (even.answers, even.exact_match) == (0, None)


def test_a_choice_that_merges_with_the_context():
    """A tokenizer that makes one token of the context's end and the choice's start."""

    class Merging:
        def __call__(self, text, verbose=True):
            merged = text.replace("Answer: x", "@")
            return {"input_ids": [ord(c) % VOCAB for c in merged]}

    seen = []

    def logits(ids):
        seen.append(ids.shape[1])
        return torch.zeros(1, ids.shape[1], VOCAB)

    scores = choice_scores(Choices("q", ("xy", "b"), 0), logits, Merging())
    uniform = math.log(VOCAB)
    assert scores[0] == pytest.approx(-2 * uniform, rel=1e-6)  # "@" and "y"
    assert scores[1] == pytest.approx(-2 * uniform, rel=1e-6)  # " " and "b"


@pytest.mark.parametrize(
    ("said", "wanted", "same"),
    [
        ("The answer is 72.", "He sold 24.\n#### 72", True),
        ("It is 1,200.00 dollars", "#### 1200", True),
        ("#### 5\nbut 6", "5", True),
        ("5 apples, then 6", "#### 5", False),
        ("nothing", "#### 5", False),
        ("-3", "3", False),
        ("72", "#### 72.5", False),
        ("So: #### Paris.", "paris", True),
        ("London", "Paris", False),
        ("CO2", "H2O", False),
        ("BRCA1", "vitamin B1", False),
        ("It is May 4, 1999.", "June 7, 1999", False),
        ("It is between 10-12", "12", True),
        ("12 in all, as #### says", "12", True),
        ("vitamin B1.", "Vitamin B1", True),
    ],
)
def test_answers(said, wanted, same):
    assert same_answer(said, wanted) is same


def test_answers_are_generated_greedily():
    model, tokenizer = tiny("llama"), _tokenizer(VOCAB)
    said = generator(model, tokenizer, 4)("The three laws")
    ids = tokenizer("The three laws", return_tensors="pt")["input_ids"]
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
    assert said == tokenizer.decode(out[0, 3:], skip_special_tokens=True)
    exact = accuracy([Open("q", "1"), Open("r", "2")], None, lambda text: "#### 1", tokenizer)
    assert (exact.answers, exact.exact_match, exact.accuracy) == (2, 0.5, None)


def test_the_chat_template_is_used_where_there_is_one():
    tokenizer = _tokenizer(VOCAB)
    assert prompt("Why?", tokenizer).startswith("Question: Why?\nThink")
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    assert prompt("Why?", tokenizer).startswith("<user>Why?\nThink")
