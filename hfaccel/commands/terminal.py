"""What the commands share: their arguments, tables, and messages."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Collection
from typing import Annotated, Any

import typer

MODEL_HELP = "A folder, a hub id, a .gguf file, or 'demo' (SmolLM2-135M-Instruct)."
Model = Annotated[str, typer.Argument(help=MODEL_HELP)]
Recipe = Annotated[
    str,
    typer.Option(
        help="What to do, e.g. int4, int8+kv8 (`hfaccel recipes` lists the steps), or a config's .json file."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON in place of the table.")]
OffGrid = Annotated[bool, typer.Option(help="With 'demo': its twin whose weights lie on no rounding grid.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Write over what the output holds already.")]
PeerPython = Annotated[list[str] | None, typer.Option(help="NAME=PATH of the python that has the peer.")]


def peer_pythons(pairs: list[str] | None, peers: Collection[str] | None = None) -> dict[str, str]:
    """Peer -> path of what `--peer-python` was given; peers: those of `hfaccel bench` without them.

    Raises: typer.BadParameter, also for no such python.
    """
    from hfaccel.measure.bench import PEERS

    known = PEERS if peers is None else peers
    found = {}
    for pair in pairs or []:
        name, given, path = pair.partition("=")
        if not given:
            raise typer.BadParameter(f"--peer-python {pair!r} is not NAME=PATH")
        if name not in known:
            raise typer.BadParameter(f"--peer-python {pair!r}: peers are {', '.join(known)}")
        if shutil.which(path) is None:  # as files are found that are run
            raise typer.BadParameter(f"--peer-python {pair!r}: {path!r} is no file that can be run")
        found[name] = path
    return found


def print_table(rows: list[dict[str, Any]], columns: dict[str, tuple[str, Any]]) -> None:
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


def recipe_names(text: str, *others: str) -> list[str]:
    """The names of a list separated by commas: `others`, or recipes, which are checked before hours pass."""
    from hfaccel.recipe import PatchConfig, check_question, is_question

    names = [name.strip() for name in text.split(",")]
    for name in names:
        if is_question(name) and name != "auto":
            check_question(name)
        elif name not in others:
            PatchConfig.from_recipe(name)
    return names


def counted(number: int, thing: str) -> str:
    """ "1 thread", "2 threads"."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def say(message: str) -> None:
    """Progress on a terminal, nothing in a pipe."""
    if sys.stderr.isatty():
        print(message, file=sys.stderr)
