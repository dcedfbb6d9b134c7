"""`hfaccel eval`: what a recipe does to quality."""

from __future__ import annotations

import json
from functools import partial
from typing import Annotated

import typer

from hfaccel.commands.terminal import AsJson, Model, OffGrid, print_table


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
    print_table(
        [values],
        {
            key: (key.replace("_", " "), lambda v: f"{v:.4f}" if isinstance(v, float) else str(v))
            for key in values
        },
    )
