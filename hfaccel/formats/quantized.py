"""What packed formats do with a model that nobody has quantized: quantize it while it is written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from hfaccel.anatomy import anatomy, default_sites
from hfaccel.checkpoint import packed_kind
from hfaccel.errors import PatchError
from hfaccel.formats.folder import check_plain, packed_linears
from hfaccel.quant.linear import QuantLinear, size_of

GROUPS = (128, 64, 32)  # which engines have kernels for


@contextmanager
def quantized(
    model: nn.Module, format: str, recipe: str, tokenizer: Any, calibration: Any, progress: bool
) -> Iterator[dict[str, QuantLinear]]:
    """The packed linears of the layers, of a model that is patched with `recipe` inside the block; one that
    is packed already is taken as it is.

    Args:
        recipe: a step, for all but the head; `{group}` in it becomes `-gN` with the largest of GROUPS that
            divides every row.
    Raises: PatchError for what no packed file can hold, naming a module.
    """
    from hfaccel.patch import patch, unpatch

    check_plain(model, format)
    packed = any(packed_kind(module) for module in model.modules())
    if not packed:
        if getattr(model, "_hfaccel", None) is not None:
            raise PatchError(
                f"this model is patched with {model._hfaccel.config.describe()!r}, which packs no weights; "
                "unpatch it first, and it is quantized while it is written"
            )
        recipe = recipe.replace("{group}", _group(model, format)) + "+head16"
        patch(model, recipe, tokenizer=tokenizer, calibration=calibration, progress=progress)
    try:
        check_plain(model, format)
        if not (linears := packed_linears(model)):
            raise PatchError(f"{format}: no linear of this model's layers is quantized")
        yield linears
    finally:
        if not packed:
            unpatch(model)


def _group(model: nn.Module, format: str) -> str:
    """Of the recipe. Raises: PatchError for fused experts, before anything is calibrated."""
    parts, columns = anatomy(model), {}
    for name in default_sites(parts):
        try:
            columns[name] = size_of(model.get_submodule(name))[1]
        except AttributeError:  # a parameter of fused experts
            raise PatchError(
                f"{name}: quantized experts are not written as {format}; patch with "
                "ignore=('**.experts.**',) before the export, or export as dense"
            ) from None
    columns.pop(parts.head, None)
    for group in GROUPS:
        if all(k % group == 0 for k in columns.values()):
            return f"-g{group}"
    name = next(name for name, k in columns.items() if k % GROUPS[-1])
    raise PatchError(
        f"{name} has rows of {columns[name]}, which no group of {', '.join(map(str, GROUPS))} divides; patch "
        "with a recipe of your own before the export"
    )
