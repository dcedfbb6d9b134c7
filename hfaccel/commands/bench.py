"""`hfaccel bench`: speed beside other tools, by op, or by context."""

from __future__ import annotations

import json
import os
import statistics
from pathlib import Path
from typing import Annotated

import typer

from hfaccel.commands.terminal import (
    AsJson,
    PeerPython,
    counted,
    peer_pythons,
    print_table,
    recipe_names,
    say,
)


def bench(
    model: Annotated[
        str, typer.Argument(help="A folder, 'demo', or 'random-1.17b' (a shape, random weights).")
    ] = "demo",
    recipe: Annotated[str, typer.Option(help="Ours, separated by commas; ratios are to the first.")] = "int4",
    against: Annotated[
        str,
        typer.Option(help="hf, llama.cpp, openvino, vllm, torchao, each with :variant, separated by commas."),
    ] = "hf",
    peer_python: PeerPython = None,
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

    pythons = peer_pythons(peer_python)
    ours = recipe_names(recipe, "auto", *UNPATCHED)
    if output is not None:
        from hfaccel.measure import chart
        from hfaccel.saving import check_target

        check_target(output)
        chart.check(output / "bench.png")
    if profile:
        from hfaccel.measure.profile import profile_step

        return print(profile_step(model, ours[0], prompt_tokens=prompt, batch=batch, threads=threads))
    if context is not None:
        return _bench_context(model, ours[0], context, rounds, threads, off_grid, as_json)
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
        say=say,
    )
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        (output / "bench.json").write_text(json.dumps(result, indent=1))
        shown = {"decode_tokens_s": "decode, tokens/s", "ttft_ms": "time to first token, ms"}
        drawn = [
            {**row, "recipe": row["name"], "ttft_ms": row["ttft_s"] * 1e3}
            for row in result["rows"]
            if "ttft_s" in row
        ]
        chart.bars(
            drawn,
            shown,
            f"{model}, batch {batch}, {prompt} in, {new} out, {result['cpu']}",
            output / "bench.png",
        )
    if as_json:
        return print(json.dumps(result, indent=1))
    low, high = min(result["read_bandwidth_gb_s"]), max(result["read_bandwidth_gb_s"])
    print(
        f"{model}, batch {batch}, {counted(prompt, 'token')} in, {new} out, "
        f"{counted(threads, 'thread')}, {result['cpu']}; "
        f"read bandwidth {low:.1f} to {high:.1f} GB/s in this run; "
        f"ratios: {result['rows'][0]['name']} over the row"
    )
    print_table(
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
        f"{model}, {recipe}, batch 1, {counted(threads, 'thread')}, {result['cpu']}; in this run "
        f"{statistics.median(result['read_bandwidth_gb_s']):.1f} GB/s read, "
        f"{statistics.median(result['attention_gflop_s']):.0f} GFLOP/s of attention; "
        "model: time at the shortest context + pages / GB/s + FLOPs / rate"
    )
    milliseconds = "{:.3f}".format
    print_table(
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
