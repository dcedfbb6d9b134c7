"""The `hfaccel` command: the same words as the Python API. Exit codes: 0 done, 1 failed, 2 wrong usage."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from hfaccel.commands.bench import bench
from hfaccel.commands.bench_serve import bench_serve
from hfaccel.commands.evaluate import evaluate
from hfaccel.commands.export import export
from hfaccel.commands.serve import serve
from hfaccel.commands.terminal import (
    AsJson,
    Model,
    OffGrid,
    Overwrite,
    Recipe,
    counted,
    print_table,
    recipe_names,
    say,
)
from hfaccel.errors import PatchError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


def _place(text: str) -> Path:
    if not text:
        raise typer.BadParameter("an empty path")
    return Path(text)


@app.callback()
def _main() -> None:
    """Make a Hugging Face model smaller and faster, in place."""
    level = (os.environ.get("HFACCEL_LOG") or "warning").upper()
    if level not in LOG_LEVELS:
        raise PatchError(
            f"HFACCEL_LOG={os.environ['HFACCEL_LOG']!r}; known are {', '.join(LOG_LEVELS).lower()}"
        )
    logging.basicConfig(format="%(name)s: %(message)s")
    logging.getLogger("huggingface_hub").propagate = False  # it prints by itself
    logging.getLogger("hfaccel").setLevel(level)
    if level != "DEBUG":
        from transformers.utils import logging as hf_logging

        hf_logging.set_verbosity_error()
        hf_logging.disable_progress_bar()


@app.command()
def demo(
    output: Annotated[Path, typer.Option("-o", "--output", help="Where the chart goes.")] = Path("demo.png"),
    windows: Annotated[
        int, typer.Option(min=0, help="Perplexity windows of 1,024 tokens a row (the protocol has 40).")
    ] = 4,
    recipes: Annotated[str, typer.Option(help="Rows, separated by commas.")] = "fp32,bf16,int8,int4",
    off_grid: OffGrid = True,
    as_json: AsJson = False,
) -> None:
    """Patch a real model as int8 and int4, generate, and print one measured table and a chart.

    Each row is measured in a process of its own, in this run. Quality is taken on the off-grid twin: the
    demo model's own weights come from a 4-bit file, and a method that finds their grid looks lossless.
    """
    from hfaccel.demo import demo_folder
    from hfaccel.measure import chart
    from hfaccel.measure.rows import UNPATCHED, Spec, measure_apart

    names = recipe_names(recipes, *UNPATCHED)
    if not as_json:
        chart.check(output)
    demo_folder(off_grid=off_grid)
    rows = []
    for recipe in names:
        say(f"measuring {recipe} ...")
        rows.append(measure_apart(Spec("demo", recipe, off_grid=off_grid, windows=windows)))
    if as_json:
        return print(json.dumps(rows, indent=1))
    print(
        f"SmolLM2-135M-Instruct{', off-grid twin' if off_grid else ''}, "
        f"{counted(rows[0]['threads'], 'thread')}, batch 1, 128 tokens in, 64 out; "
        f"perplexity over {counted(windows, 'window')} of wikitext2_test "
        "(the protocol has 40)"
    )
    columns = {
        "recipe": ("recipe", str),
        "weight_bytes": ("weights MB", lambda v: f"{v / 1e6:.1f}"),
        "peak_rss_bytes": ("peak RSS MB", lambda v: f"{v / 1e6:.0f}"),
        "ttft_s": ("TTFT ms", lambda v: f"{v * 1e3:.0f}"),
        "decode_tokens_s": ("decode tokens/s", lambda v: f"{v:.1f}"),
        "perplexity": ("perplexity", lambda v: f"{v:.2f}"),
        "top1_agreement": ("top-1 agreement", lambda v: f"{v:.3f}"),
    }
    print_table(rows, columns)
    for row in rows:
        print(f"  {row['recipe']}: {row['text']!r}")
    for row in rows:
        row |= {"weight_mb": row["weight_bytes"] / 1e6, "ttft_ms": row["ttft_s"] * 1e3}
    shown = {
        "weight_mb": "weights, MB",
        "ttft_ms": "time to first token, ms",
        "decode_tokens_s": "decode, tokens/s",
        "perplexity": f"perplexity, {counted(windows, 'window')}",
    }
    print(f"chart: {chart.bars(rows, shown, 'SmolLM2-135M-Instruct, measured in this run', output)}")


@app.command()
def patch(
    model: Model,
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder to write.", parser=_place)],
    recipe: Recipe = "int8",
    calibration: Annotated[
        str | None, typer.Option(help="For methods that need data: a text file, or wikitext2_valid.")
    ] = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Patch a model and save it; hfaccel.from_pretrained loads the folder."""
    import hfaccel
    from hfaccel.measure.corpus import text
    from hfaccel.measure.rows import load_model, tokenizer_beside
    from hfaccel.recipe import AUTO
    from hfaccel.saving import check_free, check_target

    recipe_names(recipe, AUTO)
    check_target(output)
    if Path(model).is_dir() and output.exists() and output.samefile(model):
        raise PatchError(f"{output} is MODEL itself, whose weights would be lost; give another folder")
    if not overwrite:
        check_free(output)
    texts = None if calibration is None else [text(calibration)]
    loaded, tokenizer = load_model(model), tokenizer_beside(model)
    start = time.perf_counter()
    hfaccel.patch(loaded, recipe, calibration=texts, tokenizer=tokenizer, keep_original=False)
    loaded.save_pretrained(output)
    if tokenizer is not None:
        tokenizer.save_pretrained(output)
    made, seconds = hfaccel.report(loaded), time.perf_counter() - start
    if as_json:
        return print(json.dumps({"output": str(output), "seconds": seconds, **made.to_dict()}, indent=1))
    print(made)
    print(f"{output}: patched and saved in {seconds:.1f} s")


@app.command()
def generate(
    model: Model,
    prompt: Annotated[str, typer.Argument(help="What to continue; with --chat, the user's message.")],
    recipe: Annotated[
        str | None, typer.Option(help="Patch first; a folder that hfaccel saved is patched.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    seed: int = 0,
    chat: Annotated[bool, typer.Option(help="Wrap the prompt in the model's chat template.")] = False,
) -> None:
    """Generate text and stream it to the terminal."""
    import torch
    from transformers import TextStreamer

    import hfaccel
    from hfaccel.measure.rows import load

    loaded, tokenizer = load(model, packed=recipe is None, recipe=recipe)
    if recipe is not None:
        hfaccel.patch(loaded, recipe, tokenizer=tokenizer, keep_original=False)
    torch.manual_seed(seed)
    if chat:
        message = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(
            message, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        inputs = tokenizer(prompt, return_tensors="pt")
    if not inputs["input_ids"].numel():
        raise PatchError(f"the prompt {prompt!r} has no tokens")
    sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    loaded.generate(**inputs, max_new_tokens=max_new_tokens, streamer=streamer, **sampling)


@app.command()
def recipes(as_json: AsJson = False) -> None:
    """List the recipe steps, joined with + into a recipe."""
    from hfaccel.recipe import recipe_table

    rows = [{"step": step, "means": means} for step, means in recipe_table()]
    if as_json:
        return print(json.dumps(rows, indent=1))
    print_table(rows, {"step": ("step", str), "means": ("means", str)})


@app.command()
def report(
    model: Model,
    recipe: Annotated[str | None, typer.Option(help="Patch first.")] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Print the native plan's records.")] = False,
    as_json: AsJson = False,
) -> None:
    """Say what a patch changed: modules, bytes, kernels, what runs what, what was left alone and why."""
    import hfaccel
    from hfaccel.measure.rows import load_model, tokenizer_beside

    loaded = load_model(model, packed=recipe is None, recipe=recipe)
    if recipe is not None:
        hfaccel.patch(loaded, recipe, tokenizer=tokenizer_beside(model), keep_original=False)
    elif getattr(loaded, "_hfaccel", None) is None:
        raise PatchError(f"{model} is not patched; --recipe int4 would patch it first")
    made = hfaccel.report(loaded)
    print(json.dumps(made.to_dict(), indent=1) if as_json else made)
    if plan:
        from hfaccel.runtime.native import executor

        print(executor(loaded).plan)


app.command("eval")(evaluate)
app.command()(bench)
app.command("bench-serve")(bench_serve)
app.command()(export)
app.command()(serve)


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Check this machine: compiler, instruction sets, kernels, caches, versions."""
    from hfaccel.doctor import examine

    rows = examine()
    if as_json:
        print(json.dumps(rows, indent=1))
    else:
        print_table(rows, {"what": ("what", str), "found": ("found", str), "state": ("", str)})
    if any(row["state"] == "wrong" for row in rows):
        raise typer.Exit(1)


def main() -> None:
    """Entry point: user errors are one line and exit code 1."""
    try:
        app()
    except (OSError, ValueError, RuntimeError) as error:
        if os.environ.get("HFACCEL_LOG", "").lower() == "debug":
            raise
        kind = "" if isinstance(error, PatchError) else f"{type(error).__name__}: "
        print(f"hfaccel: {kind}{' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
