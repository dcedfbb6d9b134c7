"""`hfaccel eval`: one table of several recipes, as text, JSON and picture."""

import json

import pytest
import torch
from typer.testing import CliRunner

import hfaccel
from hfaccel.cli import app
from hfaccel.measure import runner_report
from hfaccel.measure.perplexity import kl, perplexity
from test_readme import _tokenizer
from tiny import tiny

WORDS = "The three laws of motion are "


def run(*args: str):
    done = CliRunner().invoke(app, ["eval", *args], catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout


@pytest.fixture
def data(tmp_path):
    place = tmp_path / "text.txt"
    place.write_text(WORDS * 400)
    return place


def test_rows_of_one_table(folder, data, monkeypatch):
    """Patched models go through their runner, and every figure is what the functions behind it give."""
    chunks, paged_logits = [], runner_report.paged_logits
    monkeypatch.setattr(
        runner_report, "paged_logits", lambda *args: chunks.append(args[1].shape) or paged_logits(*args)
    )
    args = (str(folder), "--data", str(data), "--windows", "2", "--recipe", "bf16,int8,int4", "--json")
    made = json.loads(run(*args))
    assert chunks == [(1, 1024)] * 4 and made["windows"] == 2 and made["tokens"] == 2046
    rows = {row["recipe"]: row for row in made["rows"]}
    assert list(rows) == ["original", "bf16", "int8", "int4"]
    tokenizer = _tokenizer(256)
    original = tiny("llama")
    plain = perplexity(original, tokenizer, WORDS * 400, windows=2)
    assert rows["original"]["perplexity"] == pytest.approx(plain.perplexity, rel=1e-6)
    assert rows["original"]["kl"] == 0 and rows["original"]["top1_agreement"] == 1
    assert rows["bf16"]["bits_per_weight"] == 16 and rows["original"]["bits_per_weight"] == 32
    assert 0 < rows["bf16"]["kl"] < rows["int8"]["kl"] < rows["int4"]["kl"]
    for recipe in ("int8", "int4"):
        twin = hfaccel.patch(tiny("llama"), recipe)
        wanted = kl(
            lambda ids, twin=twin: paged_logits(twin, ids), original, tokenizer, WORDS * 400, windows=2
        )
        for key in ("perplexity", "kl", "top1_agreement"):
            assert rows[recipe][key] == pytest.approx(getattr(wanted, key), rel=1e-5), key
        assert rows[recipe]["executor"] == "native"
        assert rows[recipe]["applied"] == twin._hfaccel.config.to_dict()
    assert rows["int4"]["bits_per_weight"] < rows["int8"]["bits_per_weight"] < 9


def test_a_table_and_a_picture(folder, data, tmp_path):
    picture = tmp_path / "made" / "eval.png"
    printed = run(
        str(folder), "--data", str(data), "--windows", "1", "--recipe", "int8,int4", "--png", str(picture)
    )
    assert "1 window of 1,024 tokens" in printed
    heading, *rows = [line.split() for line in printed.splitlines()[1:5]]
    assert heading[:1] == ["bits/weight"] and [row[0] for row in rows] == ["original", "int8", "int4"]
    assert len(rows[1]) == len(rows[2]) == 10
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")


def test_a_patched_folder_is_measured_as_it_is(folder, data, tmp_path):
    hfaccel.patch(hfaccel.from_pretrained(folder), "int8").save_pretrained(tmp_path / "packed")
    _tokenizer(256).save_pretrained(tmp_path / "packed")
    (row,) = json.loads(run(str(tmp_path / "packed"), "--data", str(data), "--windows", "1", "--json"))[
        "rows"
    ]
    assert row["executor"] == "native" and 8 < row["bits_per_weight"] < 9
    assert row["recipe"] == "int8"


def test_a_peer_sees_the_same_windows(folder, data):
    """transformers in a process of its own: in fp32 it is the original."""
    made = json.loads(
        run(str(folder), "--data", str(data), "--windows", "1", "--against", "hf:fp32", "--json")
    )
    original, peer = made["rows"]
    assert peer["recipe"] == "hf fp32" and peer["kl"] < 1e-6
    assert peer["perplexity"] == pytest.approx(original["perplexity"], rel=1e-5)


def test_a_peer_that_fails_is_a_row_with_its_error(folder, data, tmp_path):
    """When it is loaded, and in the middle: what the others found is not lost."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho \'{"info": {"version": "9"}}\'\n')  # and ends
    python.chmod(0o755)
    args = ("--windows", "1", "--data", str(data), "--json", "--recipe", "int8", "--against", "hf:fp32")
    made = json.loads(run(str(folder), *args, "--peer-python", f"hf={python}"))
    original, int8, peer = made["rows"]
    assert "the process ended" in peer["error"] and "perplexity" not in peer
    assert original["perplexity"] > 1 and int8["kl"] > 0


def test_a_picture_of_nothing_is_refused_before_the_questions(folder, tmp_path):
    result = CliRunner().invoke(
        app, ["eval", str(folder), "--windows", "0", "--tasks", "none", "--png", str(tmp_path / "x.png")]
    )
    assert result.exit_code == 2 and "--windows 0 measures none" in result.output


def test_questions_without_perplexity(folder, tmp_path):
    place = tmp_path / "questions.jsonl"
    rows = [
        {"question": "The three laws", "choices": ["of motion are", "laws laws"], "answer": 0},
        {"question": "The", "answer": "nothing that it says"},
    ]
    place.write_text("\n".join(map(json.dumps, rows)))
    args = ("--windows", "0", "--tasks", str(place), "--max-new-tokens", "3", "--recipe", "int8", "--json")
    for row in json.loads(run(str(folder), *args))["rows"]:
        assert row["choices"] == row["answers"] == 1 and row["exact_match"] == 0
        assert row["accuracy"] in (0, 1) and "perplexity" not in row


def test_lm_eval_gets_the_patched_object(folder, monkeypatch):
    """A stand-in of its public calls: the harness itself needs data sets from a hub."""
    import sys
    from types import ModuleType

    seen = []

    class HFLM:
        def __init__(self, pretrained, tokenizer):
            self.pretrained, self.tokenizer = pretrained, tokenizer

    def simple_evaluate(model, tasks, limit):
        seen.append((type(model), hasattr(model.pretrained, "_hfaccel"), tasks, limit))
        with torch.no_grad():
            model.pretrained(torch.tensor([[1, 2, 3]]))
        return {"results": {tasks[0]: {"alias": "x", "acc,none": 0.5, "acc_stderr,none": "N/A"}}}

    harness, models, inner = ModuleType("lm_eval"), ModuleType("lm_eval.models"), ModuleType("x")
    harness.simple_evaluate, inner.HFLM = simple_evaluate, HFLM
    monkeypatch.setitem(sys.modules, "lm_eval", harness)
    monkeypatch.setitem(sys.modules, "lm_eval.models", models)
    monkeypatch.setitem(sys.modules, "lm_eval.models.huggingface", inner)
    args = (str(folder), "--windows", "0", "--lm-eval", "arc_easy", "--limit", "7", "--recipe", "int8")
    made = json.loads(run(*args, "--json"))
    assert seen == [(HFLM, False, ["arc_easy"], 7), (HFLM, True, ["arc_easy"], 7)]
    assert [row["lm_eval"] for row in made["rows"]] == [{"arc_easy": {"acc": 0.5}}] * 2
    assert "int8, arc_easy: acc 0.5000" in run(*args)
