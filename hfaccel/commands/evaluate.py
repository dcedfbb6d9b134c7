"""`hfaccel eval`: what recipes do to quality."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from hfaccel.commands.terminal import (
    AsJson,
    Model,
    OffGrid,
    PeerPython,
    counted,
    peer_pythons,
    print_table,
    recipe_names,
    say,
)


def _four(value: float) -> str:
    return f"{value:.4f}"


def _share(value: float) -> str:
    return f"{100 * value:.1f} %"


COLUMNS = {
    "recipe": ("", str),
    "bits_per_weight": ("bits/weight", "{:.3f}".format),
    "layer_bits_per_weight": ("in the layers", "{:.3f}".format),
    "packed_bytes": ("packed MB", lambda v: f"{v / 1e6:.1f}"),
    "model_bytes": ("model MB", lambda v: f"{v / 1e6:.1f}"),
    "perplexity": ("perplexity", _four),
    "kl": ("KL", _four),
    "top1_agreement": ("top-1 agreement", _four),
    "accuracy": ("accuracy", _share),
    "accuracy_normalized": ("by length", _share),
    "exact_match": ("exact match", _share),
    "patch_s": ("patch s", "{:.0f}".format),
    "executor": ("served by", str),
    "error": ("error", str),
}


def evaluate(
    model: Model,
    recipe: Annotated[
        str, typer.Option(help="One row each, separated by commas; fp32 and bf16 are the model as it is.")
    ] = "",
    against: Annotated[
        str,
        typer.Option(
            help="Other tools: hf, llama.cpp, torchao, gptqmodel, each with :variant, separated by commas."
        ),
    ] = "",
    peer_python: PeerPython = None,
    windows: Annotated[int, typer.Option(min=0, help="Windows of 1,024 tokens; 0: no perplexity.")] = 40,
    data: Annotated[
        str, typer.Option(help="wikitext2_test, wikitext2_valid, or a text file.")
    ] = "wikitext2_test",
    calibration: Annotated[
        str | None, typer.Option(help="For recipes that need data: a text file, or wikitext2_valid.")
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            help='Questions, one JSON object a line: {"question", "choices", "answer"}, or without choices '
            "for an answer that is generated (GSM8K)."
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many questions a task.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Of a generated answer.")] = 256,
    lm_eval: Annotated[
        str,
        typer.Option(
            "--lm-eval", help="Tasks of lm-evaluation-harness, or .yaml files of some, if installed."
        ),
    ] = "",
    off_grid: OffGrid = True,
    png: Annotated[
        Path | None, typer.Option(help="Draw perplexity against bits per weight into this file.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Quality beside bits: perplexity, KL and top-1 agreement to the model as it is, answers to questions.

    Every row sees the same windows. A patched model is measured through the runner that serves its
    `generate`. Bits per weight count codes, scales and zero points of the layers' matrices and the head.
    """
    from hfaccel.measure import chart, evaluation
    from hfaccel.measure.rows import UNPATCHED

    pythons = peer_pythons(peer_python)
    recipes = recipe_names(recipe, "auto", *UNPATCHED) if recipe else []
    if png is not None:
        if not windows:
            raise typer.BadParameter("--png draws perplexity, of which --windows 0 measures none")
        chart.check(png)
    settings = evaluation.Settings(
        off_grid=off_grid,
        data=data,
        windows=windows,
        calibration=calibration,
        questions=tasks,
        limit=limit,
        max_new_tokens=max_new_tokens,
        lm_eval=_names(lm_eval),
    )
    result = evaluation.evaluate(
        model,
        recipes,
        _names(against),
        settings,
        peer_python=pythons,
        say=say,
    )
    if png is not None:
        result["png"] = str(png)
    if as_json:
        print(json.dumps(result, indent=1))
    else:
        _print(result)
    if png is not None:
        title = f"{model}{', off-grid twin' if result['off_grid'] else ''}, {_measured_on(result)}"
        axes = ("bits_per_weight", "bits per weight, layers and head"), ("perplexity", "perplexity")
        chart.points(result["rows"], *axes, title, png, level=evaluation.ORIGINAL)


def _print(result: dict[str, Any]) -> None:
    print(f"{result['model']}{', off-grid twin' if result['off_grid'] else ''}; {_measured_on(result)}")
    print_table(result["rows"], COLUMNS)
    for row in result["rows"]:
        for task, metrics in row.get("lm_eval", {}).items():
            print(f"{row['recipe']}, {task}: {', '.join(f'{k} {v:.4f}' for k, v in metrics.items())}")
    if "png" in result:
        print(f"chart: {result['png']}")


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _measured_on(result: dict[str, Any]) -> str:
    if not result["windows"]:
        return "no perplexity"
    return f"{counted(result['windows'], 'window')} of 1,024 tokens of {result['data']}"
