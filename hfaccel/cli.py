"""The `hfaccel` command: the same words as the Python API. Exit codes: 0 done, 1 failed, 2 wrong usage."""

from __future__ import annotations

import json
import logging
import os
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from hfaccel.errors import PatchError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

MODEL_HELP = "A folder, a hub id, a .gguf file, or 'demo' (SmolLM2-135M-Instruct)."
Model = Annotated[str, typer.Argument(help=MODEL_HELP)]
Recipe = Annotated[
    str, typer.Option(help="What to do, e.g. int4, int8+kv8; `hfaccel recipes` lists the steps.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON in place of the table.")]
OffGrid = Annotated[bool, typer.Option(help="With 'demo': its twin whose weights lie on no rounding grid.")]
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
    from hfaccel.measure.chart import bars
    from hfaccel.measure.rows import UNPATCHED, Spec, measure_apart
    from hfaccel.saving import check_writable

    names = _recipes(recipes, *UNPATCHED)
    check_writable(output)
    demo_folder(off_grid=off_grid)
    rows = []
    for recipe in names:
        _say(f"measuring {recipe} ...")
        rows.append(measure_apart(Spec("demo", recipe, off_grid=off_grid, windows=windows)))
    if as_json:
        return print(json.dumps(rows, indent=1))
    print(
        f"SmolLM2-135M-Instruct{', off-grid twin' if off_grid else ''}, {rows[0]['threads']} threads, "
        f"batch 1, 128 tokens in, 64 out; perplexity over {windows} windows of wikitext2_test "
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
    _print_table(rows, columns)
    for row in rows:
        print(f"  {row['recipe']}: {row['text']!r}")
    for row in rows:
        row |= {"weight_mb": row["weight_bytes"] / 1e6, "ttft_ms": row["ttft_s"] * 1e3}
    shown = {
        "weight_mb": "weights, MB",
        "ttft_ms": "time to first token, ms",
        "decode_tokens_s": "decode, tokens/s",
        "perplexity": f"perplexity, {windows} windows",
    }
    print(f"chart: {bars(rows, shown, 'SmolLM2-135M-Instruct, measured in this run', output)}")


@app.command()
def patch(
    model: Model,
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder to write.", parser=_place)],
    recipe: Recipe = "int8",
    calibration: Annotated[
        str | None, typer.Option(help="For methods that need data: a text file, or wikitext2_valid.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Patch a model and save it; hfaccel.from_pretrained loads the folder."""
    import hfaccel
    from hfaccel.measure.corpus import text
    from hfaccel.measure.rows import load
    from hfaccel.recipe import AUTO
    from hfaccel.saving import check_target

    if recipe != AUTO:
        _recipes(recipe)
    check_target(output)
    if Path(model).is_dir() and output.exists() and output.samefile(model):
        raise PatchError(f"{output} is MODEL itself, whose weights would be lost; give another folder")
    texts = None if calibration is None else [text(calibration)]
    loaded, tokenizer = load(model)
    start = time.perf_counter()
    hfaccel.patch(loaded, recipe, calibration=texts, tokenizer=tokenizer, keep_original=False)
    loaded.save_pretrained(output)
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

    loaded, tokenizer = load(model)
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
    _print_table(rows, {"step": ("step", str), "means": ("means", str)})


@app.command()
def report(
    model: Model,
    recipe: Annotated[str | None, typer.Option(help="Patch first.")] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Print the native plan's records.")] = False,
    as_json: AsJson = False,
) -> None:
    """Say what a patch changed: modules, bytes, kernels, what runs what, what was left alone and why."""
    import hfaccel
    from hfaccel.measure.rows import load

    loaded, tokenizer = load(model)
    if recipe is not None:
        hfaccel.patch(loaded, recipe, tokenizer=tokenizer, keep_original=False)
    made = hfaccel.report(loaded)
    print(json.dumps(made.to_dict(), indent=1) if as_json else made)
    if plan:
        from hfaccel.runtime.native import executor

        print(executor(loaded).plan)


@app.command("eval")
def evaluate(
    model: Model,
    recipe: Annotated[
        str | None, typer.Option(help="Patch first; quality is then against the unpatched model.")
    ] = None,
    windows: Annotated[int, typer.Option(min=1, help="Windows of 1,024 tokens.")] = 40,
    data: Annotated[
        str, typer.Option(help="wikitext2_test, wikitext2_valid, or a text file.")
    ] = "wikitext2_test",
    off_grid: OffGrid = True,
    as_json: AsJson = False,
) -> None:
    """Perplexity and, with a recipe, KL and top-1 agreement to the model before.

    A patched model is measured through the runner that serves its `generate`.
    """
    import hfaccel
    from hfaccel.generate import mixin
    from hfaccel.measure.corpus import text
    from hfaccel.measure.perplexity import kl, perplexity
    from hfaccel.measure.rows import load
    from hfaccel.measure.runner_report import paged_logits

    loaded, tokenizer = load(model, off_grid=off_grid)
    if recipe is not None:
        reference, _ = load(model, off_grid=off_grid)
        hfaccel.patch(loaded, recipe, tokenizer=tokenizer, keep_original=False)
    served = partial(paged_logits, loaded) if hasattr(loaded, mixin.ATTRIBUTE) else loaded
    if recipe is None:
        result = perplexity(served, tokenizer, text(data), windows=windows)
    else:
        result = kl(served, reference, tokenizer, text(data), windows=windows)
    values = vars(result)
    if as_json:
        return print(json.dumps({"model": model, "recipe": recipe, "data": data, **values}, indent=1))
    _print_table(
        [values],
        {
            key: (key.replace("_", " "), lambda v: f"{v:.4f}" if isinstance(v, float) else str(v))
            for key in values
        },
    )


@app.command()
def bench(
    model: Annotated[
        str, typer.Argument(help="A folder, 'demo', or 'random-1.17b' (a shape, random weights).")
    ] = "demo",
    recipe: Annotated[str, typer.Option(help="Ours, separated by commas; ratios are to the first.")] = "int4",
    against: Annotated[
        str,
        typer.Option(help="hf, llama.cpp, openvino, vllm, torchao, each with :variant, separated by commas."),
    ] = "hf",
    peer_python: Annotated[
        list[str] | None, typer.Option(help="NAME=PATH of the python that has the peer.")
    ] = None,
    prompt: Annotated[int, typer.Option(min=1, help="Prompt tokens.")] = 128,
    new: Annotated[int, typer.Option(min=2, help="New tokens.")] = 64,
    batch: Annotated[int, typer.Option(min=1)] = 1,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    threads: Annotated[int, typer.Option(min=1)] = os.cpu_count() or 1,
    off_grid: Annotated[bool, typer.Option(help="With 'demo': the off-grid twin.")] = False,
    profile: Annotated[bool, typer.Option(help="Time of one decode step by op kind instead.")] = False,
    context: Annotated[
        str | None,
        typer.Option(help="Time of a token at these contexts instead, and what explains it: 128,1024,4096."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Folder for bench.json and bench.png.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Time `generate` side by side with other tools: same token counts, alternating order, median ratios."""
    from hfaccel.measure import bench as benches
    from hfaccel.measure.rows import UNPATCHED

    ours = _recipes(recipe, "auto", *UNPATCHED)
    if profile:
        from hfaccel.measure.profile import profile_step

        return print(profile_step(model, ours[0], prompt_tokens=prompt, batch=batch, threads=threads))
    if context is not None:
        return _bench_context(model, ours[0], context, rounds, threads, off_grid, as_json)
    if odd := [pair for pair in peer_python or [] if "=" not in pair]:
        raise typer.BadParameter(f"--peer-python {odd[0]!r} is not NAME=PATH")
    pythons = dict(pair.split("=", 1) for pair in peer_python or [])
    result = benches.bench(
        model,
        ours,
        [name.strip() for name in against.split(",") if name.strip()],
        peer_python=pythons,
        prompt_tokens=prompt,
        new_tokens=new,
        batch=batch,
        rounds=rounds,
        threads=threads,
        off_grid=off_grid,
        say=_say,
    )
    if output is not None:
        from hfaccel.measure.chart import bars

        output.mkdir(parents=True, exist_ok=True)
        (output / "bench.json").write_text(json.dumps(result, indent=1))
        shown = {"decode_tokens_s": "decode, tokens/s", "ttft_ms": "time to first token, ms"}
        drawn = [
            {**row, "recipe": row["name"], "ttft_ms": row["ttft_s"] * 1e3}
            for row in result["rows"]
            if "ttft_s" in row
        ]
        bars(
            drawn,
            shown,
            f"{model}, batch {batch}, {prompt} in, {new} out, {result['cpu']}",
            output / "bench.png",
        )
    if as_json:
        return print(json.dumps(result, indent=1))
    low, high = min(result["read_bandwidth_gb_s"]), max(result["read_bandwidth_gb_s"])
    print(
        f"{model}, batch {batch}, {prompt} tokens in, {new} out, {threads} threads, {result['cpu']}; "
        f"read bandwidth {low:.1f} to {high:.1f} GB/s in this run; "
        f"ratios: {result['rows'][0]['name']} over the row"
    )
    _print_table(
        result["rows"],
        {
            "name": ("", str),
            "ttft_s": ("TTFT ms", lambda v: f"{v * 1e3:.1f}"),
            "ttft_ratio": ("TTFT ratio", lambda v: f"{v:.2f}"),
            "decode_tokens_s": ("decode tokens/s", lambda v: f"{v:.1f}"),
            "decode_ratio": ("decode ratio", lambda v: f"{v:.2f}"),
            "gb_s": ("GB/s", lambda v: f"{v:.1f}"),
            "bandwidth_share": ("of bandwidth", lambda v: f"{100 * v:.0f} %"),
            "error": ("error", str),
        },
    )


def _bench_context(
    model: str, recipe: str, context: str, rounds: int, threads: int, off_grid: bool, as_json: bool
) -> None:
    from hfaccel.measure.context import growth

    numbers = context.split(",")
    if not all(number.strip().isdigit() for number in numbers):
        raise typer.BadParameter(f"--context {context!r} is not a list of numbers")
    options = {"rounds": rounds, "threads": threads, "off_grid": off_grid}
    result = growth(model, recipe, [int(number) for number in numbers], **options)
    if as_json:
        return print(json.dumps(result, indent=1))
    print(
        f"{model}, {recipe}, batch 1, {threads} threads, {result['cpu']}; in this run "
        f"{statistics.median(result['read_bandwidth_gb_s']):.1f} GB/s read, "
        f"{statistics.median(result['attention_gflop_s']):.0f} GFLOP/s of attention; "
        "model: time at the shortest context + pages / GB/s + FLOPs / rate"
    )
    milliseconds = "{:.3f}".format
    _print_table(
        result["rows"],
        {
            "context": ("context", str),
            "ms": ("ms a token", milliseconds),
            "model_ms": ("model ms", milliseconds),
            "kv_mb": ("pages MB", "{:.1f}".format),
            "attention_mflop": ("MFLOP", "{:.0f}".format),
            "bytes_ms": ("by pages", milliseconds),
            "flops_ms": ("by FLOPs", milliseconds),
            "share": ("of the growth explained", lambda v: f"{100 * v:.0f} %"),
        },
    )


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Check this machine: compiler, instruction sets, kernels, caches, versions."""
    from hfaccel.doctor import examine

    rows = examine()
    if as_json:
        print(json.dumps(rows, indent=1))
    else:
        _print_table(rows, {"what": ("what", str), "found": ("found", str), "state": ("", str)})
    if any(row["state"] == "wrong" for row in rows):
        raise typer.Exit(1)


def _print_table(rows: list[dict[str, Any]], columns: dict[str, tuple[str, Any]]) -> None:
    """Rows of dicts as a table: key -> (heading, format); columns that no row has are left out."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    kept = {key: spec for key, spec in columns.items() if any(key in row for row in rows)}
    for key, (heading, _) in kept.items():
        number = all(isinstance(row.get(key, 0), int | float) for row in rows)
        table.add_column(heading, justify="right" if number else "left")
    for row in rows:
        table.add_row(
            *(form(row[key]) if row.get(key) is not None else "-" for key, (_, form) in kept.items())
        )
    wide = None if sys.stdout.isatty() else 160
    Console(width=wide, highlight=False).print(table)


def _recipes(text: str, *others: str) -> list[str]:
    """The names of a list separated by commas: `others`, or recipes, which are checked before hours pass."""
    from hfaccel.recipe import PatchConfig

    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in others:
            PatchConfig.from_recipe(name)
    return names


def _say(message: str) -> None:
    """Progress on a terminal, nothing in a pipe."""
    if sys.stderr.isatty():
        print(message, file=sys.stderr)


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
