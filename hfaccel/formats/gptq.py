"""GPTQ folders, as AutoGPTQ and GPTQModel have them.

A quantized linear `m` with weight [N, K] and G = ceil(K / group_size) groups has

    m.qweight  int32 [K / 32 * bits, N]   codes packed along K (`words.py`)
    m.qzeros   int32 [G, N / 32 * bits]   zero points packed along N; "gptq" (v1) stores zero - 1, and its
                                          readers add one; "gptq_v2" stores zero
    m.scales   float [G, N]
    m.g_idx    int32 [K]                  the group of each column

    w[n, k] = scales[g_idx[k], n] (code[k, n] - zero[g_idx[k], n])

and config.json says under "quantization_config": quant_method "gptq", bits, group_size (-1: one group), sym,
desc_act, checkpoint_format, lm_head, and "dynamic": regular expressions of names, with "-:" in front for
linears that are left alone and "+:" with what differs from the general values for others.

Our groups are of consecutive columns, whatever the order of rounding was, so desc_act is false in what is
written. A v1 file cannot hold a zero point of 0: a model that has one is written as v2.
"""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hfaccel.errors import PatchError, UnknownName
from hfaccel.formats import words
from hfaccel.formats.folder import left_alone, say_dequantized, write_folder
from hfaccel.formats.matrix import Matrix
from hfaccel.formats.quantized import quantized

log = logging.getLogger("hfaccel")

BITS = (2, 3, 4, 8)
FORMATS = {"v1": "gptq", "v2": "gptq_v2"}  # variant -> checkpoint_format


def write(
    model: nn.Module,
    tokenizer: Any,
    variant: str | None,
    output: str | Path,
    *,
    calibration: Any = None,
    progress: bool = True,
) -> None:
    """Write a GPTQ folder. An unpatched model is rounded as `gptq4-sym`, in the largest group of 128, 64 and
    32 that divides every row.

    Args:
        variant: "v1" (the default) or "v2".
    Raises: PatchError for grids that the format does not have, naming a module.
    """
    if (variant or "v1") not in FORMATS:
        raise UnknownName(f"gptq:{variant}: known are {', '.join(f'gptq:{name}' for name in FORMATS)}")
    recipe = "gptq4-sym{group}"
    with quantized(model, "gptq", recipe, tokenizer, calibration, progress) as linears:
        matrices: dict[str, Matrix] = {}
        for name, module in linears.items():
            layout = module.layout
            if layout.code != "int" or layout.act != "chunk" or layout.has_minimum or layout.bits not in BITS:
                raise PatchError(
                    f"{name}: {module.extra_repr()}; gptq files hold integers of 2, 3, 4 or 8 bits"
                )
            n, k = module.size
            values = words.period(layout.bits)[0]
            if n % values or k % values:
                raise PatchError(
                    f"{name} is {n}x{k}: gptq files pack {values} values of {layout.bits} bits, in rows and "
                    "columns; leave it out of the recipe's targets"
                )
            matrices[name] = Matrix.of(module)
        format = FORMATS[variant or "v1"]
        lowest = {name: int(m.zeros().min()) for name, m in matrices.items()}
        if format == "gptq" and 0 in lowest.values():
            first = next(name for name, low in lowest.items() if low == 0)
            log.warning("%s has a zero point of 0, which v1 files cannot hold: written as gptq_v2", first)
            format = "gptq_v2"
        held = {name: tensors(matrix, format) for name, matrix in matrices.items()}
        record = config(matrices, left_alone(model, held), format)
        say_dequantized(model, "gptq")
        write_folder(
            model,
            tokenizer,
            output,
            held=held,
            quantization=record,
            extra={"quantize_config.json": json.dumps(record, indent=2)},
        )


def tensors(matrix: Matrix, format: str) -> dict[str, Tensor]:
    """What a file has of one matrix."""
    zeros = matrix.zeros()
    if format == "gptq":
        zeros = zeros - 1
    k = matrix.codes.shape[1]
    group = k if matrix.group == -1 else matrix.group
    return {
        "qweight": words.pack(matrix.codes, matrix.bits).t().contiguous(),
        "qzeros": words.pack(zeros.t(), matrix.bits).contiguous(),
        "scales": matrix.scale.t().contiguous(),
        "g_idx": (torch.arange(k) // group).to(torch.int32),
    }


def config(matrices: dict[str, Matrix], left: list[str], format: str) -> dict[str, Any]:
    """`quantization_config`: what most matrices are, and the others by name."""
    from hfaccel import __version__

    grids = {name: (m.bits, m.group, m.zero is None) for name, m in matrices.items()}
    (bits, group, symmetric), _ = Counter(grids.values()).most_common(1)[0]
    dynamic: dict[str, dict[str, Any]] = {
        f"+:^{re.escape(name)}$": {"bits": b, "group_size": g, "sym": s}
        for name, (b, g, s) in grids.items()
        if (b, g, s) != (bits, group, symmetric)
    }
    dynamic |= {f"-:^{re.escape(name)}$": {} for name in left}
    return {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "sym": symmetric,
        "desc_act": False,
        "static_groups": False,
        "lm_head": False,
        "checkpoint_format": format,
        "pack_dtype": "int32",
        "dynamic": dynamic,
        "meta": {"quantizer": [f"hfaccel:{__version__}"]},
    }
