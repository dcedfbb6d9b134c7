"""lm-evaluation-harness itself over a patched model, on tasks in files; skipped where it is not installed.

tests/commands/test_evaluate.py has a stand-in of its calls.
"""

import json

import pytest
import torch

import hfaccel
from hfaccel.errors import PatchError
from hfaccel.measure import tasks
from test_readme import _tokenizer
from tiny import tiny

pytest.importorskip("lm_eval", reason="pip install 'lm-eval[hf]'")

CHOICES = [
    {"question": "The capital of France is", "choices": ["Berlin", "Paris", "Rome"], "answer": 1},
    {"question": "Two plus two equals", "choices": ["four", "seven"], "answer": 0},
    {"question": "The sun rises in the", "choices": ["west", "east", "north"], "answer": 1},
]
TASK = """task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: answer
"""
KINDS = {
    "chosen": "output_type: multiple_choice\ndoc_to_choice: choices\nmetric_list:\n  - metric: acc\n",
    "said": "output_type: generate_until\ngeneration_kwargs: {until: ['@@@'], max_gen_toks: 4}\n"
    "metric_list:\n  - metric: exact_match\n",
}


@pytest.fixture
def model():
    torch.manual_seed(0)
    return hfaccel.patch(tiny("llama"), "int4")


@pytest.fixture
def tokenizer(model):
    tokenizer = _tokenizer(model.config.vocab_size)
    tokenizer.eos_token = tokenizer.pad_token = "[UNK]"  # the harness wants both
    return tokenizer


@pytest.fixture
def task(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))

    def write(kind, rows):
        data = tmp_path / f"{kind}.jsonl"
        data.write_text("\n".join(map(json.dumps, rows)))
        (tmp_path / f"{kind}.yaml").write_text(TASK.format(name=kind, data=data) + KINDS[kind])
        return str(tmp_path / f"{kind}.yaml")

    return write


def test_choices_are_what_the_patched_forward_says(model, tokenizer, task):
    right = []
    for row in CHOICES:
        scores = []
        for choice in row["choices"]:
            start = len(tokenizer(row["question"])["input_ids"])
            ids = tokenizer(f"{row['question']} {choice}", return_tensors="pt")["input_ids"]
            with torch.no_grad():
                logp = model(ids).logits[0, :-1].float().log_softmax(-1)
            scores.append(logp.gather(-1, ids[0, 1:, None])[start - 1 :].sum())
        right.append(int(torch.stack(scores).argmax()) == row["answer"])
    found = tasks.lm_eval(model, tokenizer, [task("chosen", CHOICES)])
    assert set(found) == {"chosen"} and set(found["chosen"]) == {"acc", "acc_stderr"}
    assert found["chosen"]["acc"] == pytest.approx(sum(right) / len(right))


def test_answers_are_what_the_patched_generate_says(model, tokenizer, task):
    rows = [{"question": row["question"], "answer": "?"} for row in CHOICES]
    ask = tasks.generator(model, tokenizer, 4)
    for row in rows[:2]:
        row["answer"] = ask(row["question"])
    found = tasks.lm_eval(model, tokenizer, [task("said", rows)])
    assert found["said"]["exact_match"] == pytest.approx(2 / 3)


def test_unknown_tasks_and_missing_data_are_refused(model, tokenizer, task, tmp_path):
    with pytest.raises(PatchError, match="lm-eval does not know the task.*no-such-task"):
        tasks.lm_eval(model, tokenizer, ["no-such-task"])
    place = task("chosen", CHOICES)
    (tmp_path / "chosen.jsonl").unlink()
    with pytest.raises(PatchError, match="lm-eval: data of .*chosen.yaml"):
        tasks.lm_eval(model, tokenizer, [place])
