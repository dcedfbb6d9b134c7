"""The README's code and commands, and every example, are run."""

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

import hfaccel
from tiny import tiny

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)


@pytest.mark.real
def test_the_ten_lines_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    scope: dict = {}
    exec(compile(blocks("python")[0], "README.md", "exec"), scope)
    printed = capsys.readouterr().out
    assert printed.startswith("Gravity is")
    assert "int4 g64 asymmetric" in printed
    fresh, _ = hfaccel.demo_model()
    ids = torch.tensor([[5, 9, 200, 31]])
    with torch.no_grad():
        loaded = scope["model"](ids).logits
        hfaccel.patch(fresh, "int4")
        assert torch.equal(loaded, fresh(ids).logits)


def test_the_config_in_python_patches_a_model():
    scope: dict = {}
    exec(compile(blocks("python")[1], "README.md", "exec"), scope)
    model = tiny("llama")
    hfaccel.patch(model, scope["config"])
    changed = {record.name for record in hfaccel.report(model).records}
    assert "model.layers.0.mlp.up_proj" in changed and "lm_head" in changed
    assert not any("down_proj" in name for name in changed)


def first_cells(section: str) -> list[str]:
    """Of the rows of its tables that begin with code."""
    text = README.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| (`.*?) \|", text, re.M)


def test_the_table_of_formats_is_what_export_knows():
    from hfaccel.formats.export import FORMATS, parse
    from hfaccel.formats.gguf_mix import VARIANTS

    cells = [row for row in first_cells("Other programs' files") if row not in ("`model.gguf`", "`--format`")]
    named = {parse(name)[0] for row in cells for name in re.findall(r"`([\w:-]+)`", row)}
    assert named == set(FORMATS)
    types = re.search(r"`gguf:TYPE` \| llama.cpp: (.*?) \|", README)[1]
    assert set(types.split(", ")) == set(VARIANTS)


def test_the_table_of_steps_is_what_the_command_knows():
    from hfaccel.recipe import PatchConfig, known_steps

    named = {
        step
        for row in first_cells("What it can do to a model")
        for step in re.findall(r"`([a-z][a-z\d]*(?:@[\d.]+bpw)?)`", row)
    }
    assert set(known_steps()) == named
    for step in sorted(step for step in named if not step.startswith("auto")):
        assert PatchConfig.from_recipe(step).to_recipe() == step


def test_make_targets_exist():
    targets = re.findall(r"^make (\w+)", README, re.M)
    assert targets == ["demo", "test"]
    makefile = (ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{target}:", makefile, re.M) for target in targets)


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.stem)
def test_examples_run(example, tmp_path, monkeypatch, capsys):
    model = tiny("llama")
    model.save_pretrained(tmp_path / "model")
    _tokenizer(model.config.vocab_size).save_pretrained(tmp_path / "model")
    monkeypatch.setattr(sys, "argv", [example.name, str(tmp_path / "model"), "int8", str(tmp_path / "out")])
    runpy.run_path(str(example), run_name="__main__")
    printed = capsys.readouterr().out
    assert printed.count("True") == 3 and "False" not in printed


def _tokenizer(vocab: int):
    """One token a word, for models without a real vocabulary."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = "The three laws of motion are".split()
    table = {
        word: i for i, word in enumerate([*words, "[UNK]", *(f"w{i}" for i in range(vocab - len(words) - 1))])
    }
    backend = Tokenizer(WordLevel(table, unk_token="[UNK]"))
    backend.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")
