"""What packed formats do with a model that nobody has quantized: quantize it while it is written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from hfaccel.anatomy import anatomy, default_sites
from hfaccel.checkpoint import packed_kind
from hfaccel.errors import PatchError
from hfaccel.quant.linear import is_fused_experts, size_of

GROUPS = (128, 64, 32)  # which engines have kernels for


@contextmanager
def quantized(
    model: nn.Module, recipe: str, tokenizer: Any, calibration: Any, progress: bool
) -> Iterator[None]:
    """The model patched with `recipe`, beside an untouched head, inside the block; one that is packed already
    is taken as it is.

    Args:
        recipe: a step; `{group}` in it becomes `-gN` with the largest of GROUPS that divides every row.
    """
    from hfaccel.patch import patch, unpatch

    if any(packed_kind(module) for module in model.modules()):
        yield
        return
    if getattr(model, "_hfaccel", None) is not None:
        raise PatchError(
            f"this model is patched with {model._hfaccel.config.describe()!r}, which packs no weights; "
            "unpatch it first, and it is quantized while it is written"
        )
    parts = anatomy(model)
    names = [name for name in default_sites(parts) if name != parts.head]
    recipe = recipe.replace("{group}", f"-g{_group(model, names)}") + "+head16"
    patch(model, recipe, tokenizer=tokenizer, calibration=calibration, progress=progress)
    try:
        yield
    finally:
        unpatch(model)


def _group(model: nn.Module, names: list[str]) -> int:
    columns = {}
    for name in names:
        try:
            module = model.get_submodule(name)
        except AttributeError:
            module = model.get_submodule(name.rpartition(".")[0])
        if not is_fused_experts(module):
            columns[name] = size_of(module)[1]
    for group in GROUPS:
        if all(k % group == 0 for k in columns.values()):
            return group
    name = next(name for name, k in columns.items() if k % GROUPS[-1])
    raise PatchError(
        f"{name} has rows of {columns[name]}, which no group of {', '.join(map(str, GROUPS))} divides; patch "
        "with a recipe of your own before the export"
    )
