"""A plain folder for tools that know nothing: packed weights dequantized, adapters merged, no record left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from hfaccel.errors import UnknownName
from hfaccel.formats.folder import write_folder

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def write(
    model: nn.Module,
    tokenizer: Any,
    variant: str | None,
    output: str | Path,
    *,
    calibration: Any = None,
    progress: bool = True,
) -> None:
    """Write a folder that transformers and every engine load.

    Args:
        variant: "bf16" (the default), "fp16" or "fp32".
    Raises: PatchError for values beyond fp16's range; UnknownName for another variant.
    """
    if (variant or "bf16") not in DTYPES:
        raise UnknownName(f"dense:{variant}: known are {', '.join(f'dense:{name}' for name in DTYPES)}")
    write_folder(model, tokenizer, output, dtype=DTYPES[variant or "bf16"])
