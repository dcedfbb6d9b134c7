"""AWQ folders in AutoAWQ's GEMM form: 4 bits, groups of consecutive columns.

A quantized linear `m` with weight [N, K] has

    m.qweight  int32 [K, N / 8]   codes packed along N, eight a word
    m.qzeros   int32 [G, N / 8]   zero points, likewise
    m.scales   float [G, N]

    w[n, k] = scales[k // group_size, n] (code[k, n] - zero[k // group_size, n])

A word holds its eight values in the order 0, 2, 4, 6, 1, 3, 5, 7, lowest bits first. config.json says under
"quantization_config": quant_method "awq", version "gemm", bits 4, group_size, zero_point true and
modules_to_not_convert, the names of the linears that are left in float. A symmetric grid has zeros of 8.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from hfaccel.errors import PatchError, UnknownName
from hfaccel.formats import words
from hfaccel.formats.folder import left_alone, say_dequantized, write_folder
from hfaccel.formats.matrix import Matrix
from hfaccel.formats.quantized import quantized

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
BITS = 4


def write(
    model: nn.Module,
    tokenizer: Any,
    variant: str | None,
    output: str | Path,
    *,
    calibration: Any = None,
    progress: bool = True,
) -> None:
    """Write an AWQ folder. An unpatched model is rounded as `awq4`, in the largest group of 128, 64 and 32
    that divides every row.

    Raises: PatchError for grids that the format does not have, naming a module.
    """
    if variant is not None:
        raise UnknownName(f"awq:{variant}: awq has no variants")
    recipe = "awq4{group}"
    with quantized(model, "awq", recipe, tokenizer, calibration, progress) as linears:
        groups = {name: module.layout.group for name, module in linears.items()}
        group, _ = Counter(groups.values()).most_common(1)[0]
        for name, module in linears.items():
            (n, k), layout = module.size, module.layout
            fits = layout.code == "int" and layout.bits == BITS and not layout.has_minimum
            if not fits or layout.group != group:
                raise PatchError(
                    f"{name}: {module.extra_repr()}; an awq folder holds integers of 4 bits, all in one size "
                    f"of group (most here are in {group})"
                )
            if n % 8 or k % layout.group_len(k):
                raise PatchError(
                    f"{name} is {n}x{k}: awq files pack 8 rows a word, in whole groups of {group}"
                )
        held = {name: tensors(Matrix.of(module)) for name, module in linears.items()}
        left = left_alone(model, held)
        record = {
            "quant_method": "awq",
            "version": "gemm",
            "bits": BITS,
            "group_size": group,
            "zero_point": True,
            "modules_to_not_convert": left or None,
        }
        say_dequantized(model, "awq")
        write_folder(model, tokenizer, output, held=held, quantization=record)


def tensors(matrix: Matrix) -> dict[str, Tensor]:
    """What a file has of one matrix."""
    return {
        "qweight": words.pack(matrix.codes.t(), BITS, ORDER).contiguous(),
        "qzeros": words.pack(matrix.zeros().t(), BITS, ORDER).contiguous(),
        "scales": matrix.scale.t().contiguous(),
    }
