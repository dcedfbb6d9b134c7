"""`hfaccel serve`: a model behind OpenAI's API."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Annotated

import typer

from hfaccel.commands.terminal import Model, recipe_names, say


def serve(
    model: Model,
    recipe: Annotated[
        str | None,
        typer.Option(
            help="Patch first, e.g. int4+kv8; without one int8, and a folder that hfaccel saved as it is."
        ),
    ] = None,
    calibration: Annotated[
        str | None, typer.Option(help="For recipes that need data: a text file, or wikitext2_valid.")
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="What requests call the model; else its folder's name.")
    ] = None,
    lora: Annotated[
        list[str] | None, typer.Option(help="NAME=PATH of a PEFT folder; requests name it as their model.")
    ] = None,
    lora_dir: Annotated[
        Path | None,
        typer.Option(help="Folder that adapters may be loaded from while it serves; without one none may."),
    ] = None,
    lora_slots: Annotated[
        int | None, typer.Option(min=1, help="Adapters in memory at once; else as patched (lora64), or 32.")
    ] = None,
    lora_max_rank: Annotated[
        int | None, typer.Option(min=1, help="Of adapters; else as patched (lora32-r128), or 64.")
    ] = None,
    host: Annotated[
        str, typer.Option(help="0.0.0.0 is every interface: give an API key then.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one and says which.")] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help="One of these must come with requests; better in the environment.", envvar="HFACCEL_API_KEY"
        ),
    ] = None,
    max_running: Annotated[int, typer.Option(min=1, help="Requests that run at once.")] = 256,
    max_queue: Annotated[
        int, typer.Option(min=0, help="Requests that wait; more get 429 and Retry-After.")
    ] = 256,
    token_budget: Annotated[
        int, typer.Option(min=1, help="Tokens of a step: more is more throughput, less is a steadier stream.")
    ] = 512,
    stretch: Annotated[
        float,
        typer.Option(min=1.01, help="How many times as long prompts may make a step of streams; inf: any."),
    ] = 1.8,
    policy: Annotated[str, typer.Option(help="Who is first: fcfs, sjf or priority.")] = "fcfs",
    memory: Annotated[float, typer.Option(help="Share of the memory for weights, keys and values.")] = 0.9,
    pages: Annotated[
        int | None, typer.Option(min=1, help="KV pages, in place of what the memory leaves room for.")
    ] = None,
    request_timeout: Annotated[float, typer.Option(min=0.1, help="Seconds a request may take.")] = 600.0,
    max_body: Annotated[int, typer.Option(min=1, help="Bytes a request may have.")] = 8 << 20,
    drain: Annotated[float, typer.Option(min=0, help="Seconds that streams may go on after SIGTERM.")] = 30.0,
) -> None:
    """Serve a model: /v1/chat/completions, /v1/completions, /v1/embeddings and what belongs to them.

    Greedy or sampled, streamed, with adapters, prefix cache and continuous batching. Metrics for Prometheus
    are at /metrics, the endpoints' fields at /docs, the log is JSON lines on stderr without prompts.

    \b
    hfaccel serve demo --recipe int4+kv8
    hfaccel serve ./model --lora sql=./adapters/sql --lora-dir ./adapters --port 9000
    HFACCEL_API_KEY=secret hfaccel serve ./model --host 0.0.0.0
    curl localhost:8000/v1/completions -H 'content-type: application/json' \\
        -d '{"model": "demo", "prompt": "Gravity is", "max_tokens": 20}'
    """
    try:
        from hfaccel.serve import process
        from hfaccel.serve.api import create_app
    except ImportError as why:
        raise _missing(why) from why
    import hfaccel
    from hfaccel.errors import AlreadyPatched, PatchError
    from hfaccel.generate import mixin
    from hfaccel.measure.corpus import text
    from hfaccel.measure.rows import load_model, tokenizer_beside
    from hfaccel.recipe import AUTO
    from hfaccel.serve.scheduler import POLICIES
    from hfaccel.serve.server import Server

    adapters = _adapters(lora)
    if recipe is not None:
        recipe_names(recipe, AUTO)
    if policy not in POLICIES:
        raise typer.BadParameter(f"{policy!r}; known are {', '.join(POLICIES)}", param_hint="--policy")
    if lora_dir is not None and not lora_dir.is_dir():
        raise typer.BadParameter(f"{lora_dir} is no folder", param_hint="--lora-dir")
    keys = [key for key in api_key or () if key]
    name = name or Path(model).name or model
    if name in adapters:
        raise PatchError(f"--lora {name}=...: that is the model's own name")
    sock = process.listen(host, port)
    process.log_lines(_level())
    texts = None if calibration is None else [text(calibration)]
    say(f"loading {model} ...")
    loaded = load_model(model, packed=recipe is None, recipe=recipe)
    tokenizer = tokenizer_beside(model)
    if recipe is not None or mixin.ATTRIBUTE not in vars(loaded):
        how = {"calibration": texts, "tokenizer": tokenizer, "keep_original": False}
        try:
            hfaccel.patch(loaded, recipe or "int8", **how)
        except AlreadyPatched as why:
            raise PatchError(f"{model} is patched already: leave --recipe out") from why
    loaded.eval()
    with Server(
        loaded,
        tokenizer,
        pages=pages,
        memory_utilization=memory,
        adapters=adapters,
        lora_slots=lora_slots,
        lora_max_rank=lora_max_rank,
        policy=policy,
        token_budget=token_budget,
        max_running=max_running,
        stretch=None if math.isinf(stretch) else stretch,
    ) as server:
        server.generate(
            [0], max_new_tokens=2, ignore_eos=True
        )  # builds what the first request would wait for
        app = create_app(
            server,
            model_name=name,
            api_keys=keys,
            max_body_bytes=max_body,
            max_queue=max_queue,
            request_timeout_s=request_timeout,
            lora_dir=lora_dir,
        )
        service = app.service
        where = f"http://{host if ':' not in host else f'[{host}]'}:{sock.getsockname()[1]}"
        process.tell(
            "serving",
            url=where,
            model=name,
            adapters=sorted(adapters),
            context_tokens=service.max_tokens,
            kv_pages=server.engine.pool.capacity,
            page_tokens=service.page_tokens,
            api_key=bool(keys),
        )
        if not keys and host not in ("127.0.0.1", "::1", "localhost"):
            process.tell("no API key: whoever reaches this address can use it", host=host, level=30)
        process.serve(app, sock, drain_s=drain)
    process.tell("stopped")


def _adapters(pairs: list[str] | None) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for pair in pairs or ():
        name, given, path = pair.partition("=")
        if not (name and given and path):
            raise typer.BadParameter(f"{pair!r} is not NAME=PATH", param_hint="--lora")
        if name in found:
            raise typer.BadParameter(f"two adapters are called {name!r}", param_hint="--lora")
        if not Path(path).is_dir():  # said before a model is loaded for nothing
            raise typer.BadParameter(f"{path} is no folder", param_hint="--lora")
        found[name] = Path(path)
    return found


def _level() -> int:
    """HFACCEL_LOG, which says warning by itself: requests are logged unless it asks for less."""
    import logging

    return getattr(logging, (os.environ.get("HFACCEL_LOG") or "info").upper())


def _missing(why: ImportError):
    from hfaccel.errors import PatchError

    return PatchError(f"hfaccel serve needs {why.name}: pip install 'hfaccel[serve]'")
