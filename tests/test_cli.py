"""The `hfaccel` command: tables, JSON, exit codes."""

import json
import shutil
import subprocess
import sys
from functools import partial

import pytest
import torch
from typer.testing import CliRunner

import hfaccel
from hfaccel.cli import app, main
from tiny import tiny


def run(*args: str):
    return CliRunner().invoke(app, list(args), catch_exceptions=False)


def test_recipes_lists_every_step():
    from hfaccel.recipe import known_steps

    printed = run("recipes").stdout
    assert all(step in printed for step in known_steps())
    rows = json.loads(run("recipes", "--json").stdout)
    assert [row["step"] for row in rows] == known_steps()


def test_patch_writes_a_folder_that_computes_the_same(folder, tmp_path):
    from transformers import AutoModelForCausalLM

    out = tmp_path / "out"
    done = run("patch", str(folder), "-o", str(out), "--recipe", "int4-g32")
    assert done.exit_code == 0 and "int4 g32 asymmetric" in done.stdout
    twin = hfaccel.patch(AutoModelForCausalLM.from_pretrained(folder), "int4-g32")
    ids = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(hfaccel.from_pretrained(out)(ids).logits, twin(ids).logits)


def test_patch_writes_over_a_folder_only_when_told(folder, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    out.mkdir()  # an empty folder is as good as none
    args = ("patch", str(folder), "-o", str(out), "--json")
    assert json.loads(run(*args).stdout)["recipe"] == "int8"
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    monkeypatch.setattr(sys, "argv", ["hfaccel", *args, "--recipe", "int4"])
    with pytest.raises(SystemExit) as ended:
        main()
    wanted = f"hfaccel: {out} holds README.md and {len(before) - 1} more already; give another folder, or "
    assert ended.value.code == 1 and capsys.readouterr().err == wanted + "--overwrite\n"
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert json.loads(run(*args, "--recipe", "int4", "--overwrite").stdout)["recipe"] == "int4"
    assert hfaccel.from_pretrained(out)._hfaccel.config.describe() == "int4"


def test_report_of_a_saved_folder_as_json(folder, tmp_path):
    run("patch", str(folder), "-o", str(tmp_path / "out"), "--recipe", "int8")
    made = json.loads(run("report", str(tmp_path / "out"), "--json").stdout)
    assert made["recipe"] == "int8" and made["bytes"] < made["bytes_before"]
    assert {row["name"] for row in made["modules"]} >= {"lm_head", "model.layers.1.mlp.down_proj"}


def test_patch_as_json(folder, tmp_path):
    made = json.loads(run("patch", str(folder), "-o", str(tmp_path / "out"), "--json").stdout)
    assert made["recipe"] == "int8" and made["output"] == str(tmp_path / "out") and made["seconds"] > 0


def test_generate_streams_text_and_repeats_with_a_seed(folder):
    args = (
        "generate",
        str(folder),
        "The three laws",
        "--max-new-tokens",
        "5",
        "--temperature",
        "1",
        "--seed",
        "3",
    )
    first = run(*args)
    assert first.exit_code == 0 and len(first.stdout.split()) >= 1
    assert run(*args).stdout == first.stdout


def test_a_folder_without_a_tokenizer(tmp_path, monkeypatch, capsys):
    """A report and most patches need none; what reads text says how to give it one."""
    bare, out = str(tmp_path / "bare"), str(tmp_path / "out")
    tiny("llama").save_pretrained(bare)
    assert json.loads(run("patch", bare, "-o", out, "--json").stdout)["recipe"] == "int8"
    assert json.loads(run("report", out, "--json").stdout)["recipe"] == "int8"
    assert json.loads(run("report", bare, "--recipe", "int4", "--json").stdout)["recipe"] == "int4"
    for args in (("generate", out, "The"), ("eval", out), ("bench", out)):
        monkeypatch.setattr(sys, "argv", ["hfaccel", *args])
        with pytest.raises(SystemExit) as ended:
            main()
        wanted = f'hfaccel: {out} has no tokenizer: tokenizer.save_pretrained("{out}")\n'
        assert ended.value.code == 1 and capsys.readouterr().err == wanted


def command(*args: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "hfaccel.cli", *args], capture_output=True, text=True)


def test_exit_codes_and_one_line_errors(folder, tmp_path):
    unknown = command("patch", str(folder), "-o", str(tmp_path / "x"), "--recipe", "int9")
    assert unknown.returncode == 1 and not (tmp_path / "x").exists()
    assert unknown.stderr.strip().count("\n") == 0 and "int8" in unknown.stderr
    missing = command("report", str(tmp_path / "nowhere"))
    assert missing.returncode == 1 and "nowhere" in missing.stderr
    assert command("patch", str(folder)).returncode == 2


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("patch", "{model}", "-o", "", "--recipe", "int8"), 2, "an empty path"),
        (("patch", "{model}", "-o", "{model}"), 1, "whose weights would be lost"),
        (("patch", "{model}", "-o", "{model}/config.json"), 1, "is a file"),
        (("patch", "{model}", "-o", "{model}/config.json/x"), 1, "config.json is a file"),
        (("patch", "{model}", "-o", "{out}", "--recipe", ""), 1, "an empty step"),
        (("patch", "{model}", "-o", "{out}", "--calibration", "{out}"), 1, "no text"),
        (("patch", "{out}", "-o", "{out}"), 1, "no such folder"),
        (("patch", "{model}/config.json", "-o", "{out}"), 1, "config.json is a file, and no .gguf"),
        (("generate", "no-folder/", "The"), 1, "no-folder/: no such folder"),
        (("patch", "{broken}", "-o", "{out}"), 1, "truncated or damaged"),
        (("generate", "{model}", ""), 1, "the prompt '' has no tokens"),
        (("generate", "{model}", "The", "--max-new-tokens", "0"), 2, "max-new-tokens"),
        (("generate", "{model}", "The", "--temperature", "-1"), 2, "temperature"),
        (("report", "{model}"), 1, "is not patched; --recipe"),
        (("serve", "{model}", "--lora", "a={out}"), 2, "is no folder"),
        (("demo", "--windows", "-1"), 2, "windows"),
        (("demo", "--recipes", "fp32,int9"), 1, "int9"),
        (("demo", "--recipes", "int8", "-o", "{model}/config.json/chart.png"), 1, "is a file"),
        (("bench", "{model}", "--recipe", "int9"), 1, "int9"),
        (("bench", "{model}", "--peer-python", "python3"), 2, "NAME=PATH"),
        (
            ("patch", "dmeo", "-o", "{out}"),
            1,
            "no model 'dmeo' (did you mean 'demo'?): known are a folder, a",
        ),
        (("bench", "{model}", "-o", "/proc/nope"), 1, "/proc/nope/config.json cannot be written"),
        (("patch", "{model}", "-o", "/proc/nope"), 1, "/proc/nope/config.json cannot be written"),
        (("eval", "{model}", "--png", "{out}.xyz"), 1, "out.xyz: a chart's file ends in ."),
        (("eval", "{model}", "--png", "{model}"), 1, "a chart's file ends in ."),
        (("demo", "--recipes", "int8", "-o", "{out}"), 1, "out: a chart's file ends in ."),
        (("bench", "{model}", "--context", "128,4k"), 2, "not a list of numbers"),
        (("bench", "{model}", "--context", "128"), 1, "two or more"),
        (("eval", "{model}", "--data", "{out}"), 1, "no text"),
        (("eval", "{model}", "--recipe", "int8,int9"), 1, "int9"),
        (("eval", "{model}", "--recipe", "int8,"), 1, "an empty step"),
        (("eval", "{model}", "--against", "vllm"), 1, "peers that give logits are hf, llama.cpp, torchao"),
        (("eval", "{model}", "--against", "hf:int1"), 1, "unknown variant 'int1'"),
        (("eval", "{model}", "--against", "hf", "--peer-python", "python3"), 2, "NAME=PATH"),
        (("eval", "{model}", "--tasks", "{out}"), 1, "no such tasks file"),
        (("eval", "{model}", "--tasks", "{model}/config.json"), 1, "config.json, line 1: no JSON"),
        (("eval", "{model}", "--calibration", "{out}"), 1, "no text"),
        (("eval", "{model}", "--lm-eval", "arc_easy"), 1, "lm-eval is not installed"),
        (("eval", "{model}", "--png", "{model}/config.json/x.png"), 1, "is a file"),
        (("eval", "{model}", "--windows", "-1"), 2, "windows"),
    ],
)
def test_misuse_is_refused_at_once(folder, tmp_path, capsys, monkeypatch, args, code, words):
    out, broken = tmp_path / "out", tmp_path / "broken"
    shutil.copytree(folder, broken)
    weights = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(weights[:-8])
    args = [arg.format(model=folder, out=out, broken=broken) for arg in args]
    monkeypatch.setattr(sys, "argv", ["hfaccel", *args])
    before = (folder / "model.safetensors").read_bytes()
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().err
    assert ended.value.code == code and words in " ".join(said.replace("│", " ").split())
    assert code == 2 or (said.startswith("hfaccel: ") and said.count("\n") == 1)
    assert not out.exists() and (folder / "model.safetensors").read_bytes() == before


def test_a_log_level_that_does_not_exist(capsys, monkeypatch):
    monkeypatch.setenv("HFACCEL_LOG", "loud")
    monkeypatch.setattr(sys, "argv", ["hfaccel", "recipes"])
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().err == "hfaccel: HFACCEL_LOG='loud'; known are debug, info, warning, error\n"


def test_a_backend_that_cannot_serve_is_one_line(folder, monkeypatch):
    monkeypatch.setenv("HFACCEL_BACKEND", "triton")
    monkeypatch.setenv("HFACCEL_EXECUTOR", "modules")
    done = command("generate", str(folder), "The three laws", "--recipe", "int8", "--max-new-tokens", "2")
    assert done.returncode == 1 and "HFACCEL_BACKEND=triton" in done.stderr
    assert done.stderr.strip().count("\n") == 0


@pytest.mark.real
@pytest.mark.slow
def test_demo_measures_every_row(tmp_path, monkeypatch):
    """On few tokens: a row a recipe with a figure in every column, and the chart."""
    from hfaccel.measure import rows

    short = partial(rows.Spec, prompt_tokens=16, new_tokens=6, repeats=1)
    monkeypatch.setattr(rows, "Spec", short)
    chart = tmp_path / "demo.png"
    done = run("demo", "--recipes", "fp32,int4", "--windows", "1", "-o", str(chart))
    assert done.exit_code == 0
    found = {}
    for line in done.stdout.splitlines():
        if line.split()[:1] and line.split()[0] in ("fp32", "int4"):
            found[line.split()[0]] = [float(value) for value in line.split()[1:]]
    assert list(found) == ["fp32", "int4"] and all(len(row) == 6 for row in found.values())
    weights, peak, ttft, decode, ppl, agreement = zip(*found.values(), strict=True)
    assert weights == (538.1, 86.7)
    assert all(value > row for value, row in zip(peak, weights, strict=True))
    assert all(value > 0 for value in (*ttft, *decode))
    assert ppl[0] == 10.96 and 11.5 < ppl[1] < 16
    assert agreement[0] == 1.0 and 0.6 < agreement[1] < 0.94
    assert done.stdout.count("Gravity is") == 2 and "1 window of wikitext2_test" in done.stdout
    assert chart.read_bytes().startswith(b"\x89PNG\r\n") and f"chart: {chart}" in done.stdout


def test_doctor_finds_nothing_wrong_here():
    rows = json.loads(run("doctor", "--json").stdout)
    assert {"python", "torch", "C++ kernels", "cache folder"} <= {row["what"] for row in rows}
    assert {"fastapi", "uvicorn", "prometheus_client", "llguidance"} <= {row["what"] for row in rows}
    assert all(row["state"] in ("ok", "absent") for row in rows)
