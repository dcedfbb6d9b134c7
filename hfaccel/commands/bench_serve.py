"""`hfaccel bench-serve`: many users at once, beside other engines or against servers that run already."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from hfaccel.commands.terminal import (
    AsJson,
    OffGrid,
    PeerPython,
    counted,
    peer_pythons,
    print_table,
    recipe_names,
    say,
)

COLUMNS = {  # key -> heading of the table, heading of the chart, unit
    "output_tokens_s": ("output tokens/s", "output, tokens/s", 1),
    "ttft_s_p50": ("TTFT ms p50", "time to first token p50, ms", 1e3),
    "ttft_s_p99": ("p99", "time to first token p99, ms", 1e3),
    "inter_token_s_p50": ("inter-token ms p50", None, 1e3),
    "inter_token_s_p99": ("p99", "between tokens p99, ms", 1e3),
    "end_to_end_s_p50": ("end to end ms p50", None, 1e3),
    "end_to_end_s_p99": ("p99", None, 1e3),
}


def bench_serve(
    model: Annotated[
        str, typer.Argument(help="A folder, 'demo', or 'random-1.17b' (a shape, random weights).")
    ] = "demo",
    recipe: Annotated[
        str, typer.Option(help="Ours, separated by commas, or '' for none; ratios are to the first.")
    ] = "bf16",
    users: Annotated[int, typer.Option(min=1, help="Requests at once: one ends, the next is sent.")] = 50,
    requests: Annotated[int | None, typer.Option(min=1, help="In all; else one a user.")] = None,
    prompt: Annotated[str, typer.Option(help="Prompt tokens: a number, or least:most.")] = "128",
    new: Annotated[str, typer.Option(help="New tokens: a number, or least:most.")] = "64",
    rate: Annotated[
        float | None,
        typer.Option(help="Requests a second at Poisson times, whatever still runs, in place of users."),
    ] = None,
    shared: Annotated[int, typer.Option(min=0, help="Tokens before each prompt that all share.")] = 0,
    adapters: Annotated[
        int, typer.Option(min=0, help="LoRA adapters with random weights, one of them a request.")
    ] = 0,
    adapter: Annotated[
        list[str] | None, typer.Option(help="Name of an adapter that the servers of --url have.")
    ] = None,
    adapter_rank: Annotated[int, typer.Option(min=1)] = 16,
    adapter_targets: Annotated[str, typer.Option(help="Linears, separated by commas.")] = "q_proj,v_proj",
    zipf: Annotated[float, typer.Option(help="The nth adapter is chosen with weight 1/n^ZIPF.")] = 1.0,
    against: Annotated[
        str, typer.Option(help="vllm, hf, llama-server, each with :variant, separated by commas.")
    ] = "",
    peer_python: PeerPython = None,
    llama_server: Annotated[str | None, typer.Option(help="Path of llama.cpp's llama-server.")] = None,
    url: Annotated[
        list[str] | None, typer.Option(help="A server with OpenAI's completions, e.g. http://host:8000/v1.")
    ] = None,
    url_model: Annotated[str | None, typer.Option(help="What --url calls the model; else its first.")] = None,
    api_key: Annotated[str | None, typer.Option(help="For --url.", envvar="OPENAI_API_KEY")] = None,
    token_budget: Annotated[int | None, typer.Option(min=1, help="Of our steps.")] = None,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    threads: Annotated[int, typer.Option(min=1)] = os.cpu_count() or 1,
    seed: int = 0,
    off_grid: OffGrid = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Folder for bench-serve.json and bench-serve.png.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Send the same requests to our engine, others and URLs: tokens a second, time to first token, gaps.

    \b
    hfaccel bench-serve demo --recipe bf16,int8,int4 --users 50 --against hf
    hfaccel bench-serve demo --against vllm --peer-python vllm=/opt/vllm/bin/python
    hfaccel bench-serve demo --recipe '' --url http://localhost:8000/v1 --rate 4 --requests 100
    hfaccel bench-serve demo --prompt 16:512 --new 16:128 --adapters 64 --zipf 1.2
    """
    from hfaccel.measure import serve_load
    from hfaccel.measure.rows import UNPATCHED

    ours = recipe_names(recipe, "auto", *UNPATCHED) if recipe else []
    peers = [name.strip() for name in against.split(",") if name.strip()]
    pythons = peer_pythons(peer_python, serve_load.PEERS)
    if not (ours or peers or url):
        raise typer.BadParameter("nothing to measure: give --recipe, --against or --url")
    if adapters and adapter:
        raise typer.BadParameter("--adapters makes some for our engine, --adapter names those of --url")
    if output is not None:
        from hfaccel.measure import chart
        from hfaccel.saving import check_target

        check_target(output)
        chart.check(output / "bench-serve.png")
    load = serve_load.Load(
        users=users,
        requests=requests,
        prompt=_ends("--prompt", prompt),
        new=_ends("--new", new),
        rate=rate,
        shared=shared,
        adapters=tuple(adapter or (f"adapter-{n + 1}" for n in range(adapters))),
        zipf=zipf,
        seed=seed,
    )
    result = serve_load.bench_serve(
        model,
        ours,
        load,
        against=peers,
        urls=url,
        url_model=url_model,
        headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
        peer_python=pythons,
        llama_server=llama_server,
        adapter_rank=adapter_rank,
        adapter_targets=tuple(name.strip() for name in adapter_targets.split(",")),
        options={} if token_budget is None else {"token_budget": token_budget},
        rounds=rounds,
        threads=threads,
        off_grid=off_grid,
        say=say,
    )
    title = _title(model, load, result)
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        (output / "bench-serve.json").write_text(json.dumps(result, indent=1))
        _draw(result, title, output / "bench-serve.png")
    if as_json:
        return print(json.dumps(result, indent=1))
    low, high = min(result["read_bandwidth_gb_s"]), max(result["read_bandwidth_gb_s"])
    print(
        f"{title}, {counted(threads, 'thread')}; {counted(rounds, 'round')}, "
        f"read bandwidth {low:.1f} to {high:.1f} GB/s in this run; "
        f"ratios of output tokens/s: {result['rows'][0]['name']} over the row"
    )
    shown: dict[str, Any] = {"name": ("", str)}
    for key, (heading, _, unit) in COLUMNS.items():
        shown[key] = (heading, lambda v, unit=unit: f"{v * unit:.{1 if v * unit < 100 else 0}f}")
        if key == "output_tokens_s":
            shown["ratio"] = ("ratio", "{:.2f}".format)
    print_table(result["rows"], {**shown, "error": ("error", str)})
    for row in result["rows"]:
        if "client_cpu_s" in row:
            print(f"{row['name']}: asking and reading took {row['client_cpu_s']:.2f} s of CPU a round")


def _ends(option: str, given: str) -> tuple[int, int]:
    least, _, most = given.partition(":")
    if not least.isdigit() or not (most or least).isdigit():
        raise typer.BadParameter(f"{option} {given!r} is neither a number of tokens nor least:most")
    return int(least), int(most or least)


def _title(model: str, load, result: dict[str, Any]) -> str:
    sizes = [str(least) if least == most else f"{least} to {most}" for least, most in (load.prompt, load.new)]
    who = f"{load.users} users" if load.rate is None else f"{load.rate:g} requests/s"
    extra = f", {load.shared} shared tokens" if load.shared else ""
    extra += f", {counted(len(load.adapters), 'adapter')}" if load.adapters else ""
    return (
        f"{model}, {who}, {counted(load.count, 'request')}, {sizes[0]} in, {sizes[1]} out{extra}, "
        f"{result['cpu']}"
    )


def _draw(result: dict[str, Any], title: str, path: Path) -> None:
    from hfaccel.measure import chart

    drawn = [row for row in result["rows"] if "output_tokens_s" in row]
    keys = {key: (heading, unit) for key, (_, heading, unit) in COLUMNS.items() if heading}
    scaled = [{"recipe": row["name"]} | {key: row[key] * keys[key][1] for key in keys} for row in drawn]
    if scaled:
        chart.bars(scaled, {key: heading for key, (heading, _) in keys.items()}, title, path)
