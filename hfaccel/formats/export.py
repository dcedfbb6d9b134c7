"""`export`: a model, patched or not, in the format of another program.

name                 variants (the first is the default)
gguf:TYPE            see `gguf_out.py`
gptq                 v1, v2: GPTQ folders as AutoGPTQ and GPTQModel have them
awq                  AutoAWQ's GEMM folders, 4 bits
compressed-tensors   folders of vLLM and SGLang: W4A16, W8A16, W8A8, FP8, whichever the model is
dense                bf16, fp16, fp32: plain folders, everything merged
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from hfaccel.errors import PatchError, UnknownName

FORMATS = {  # name -> "module:function(model, tokenizer, variant, output, *, calibration, progress)"
    "gguf": "hfaccel.formats.gguf_out:write",
    "gptq": "hfaccel.formats.gptq:write",
    "awq": "hfaccel.formats.awq:write",
    "compressed-tensors": "hfaccel.formats.compressed_tensors:write",
    "dense": "hfaccel.formats.dense:write",
}


def parse(format: str) -> tuple[str, str | None]:
    """Name and variant of "name" or "name:variant". Raises: UnknownName listing the known ones."""
    name, colon, variant = str(format).partition(":")
    if name not in FORMATS:
        raise UnknownName(f"unknown format {format!r}; known are {', '.join(FORMATS)}")
    if colon and not variant:
        raise UnknownName(f"format {format!r}: nothing follows the colon")
    return name, variant or None


def export(
    model: Any,
    tokenizer: Any,
    format: str,
    output: str | Path,
    *,
    calibration: Any = None,
    progress: bool = True,
) -> None:
    """Write `model` in another program's format; the model is afterwards what it was.

    Args:
        model: a transformers model, a PeftModel or a pipeline, patched or not. What is packed on a grid that
            the format has is written code for code. An unpatched model is quantized on the way to a packed
            format, by the recipe that suits it best (each format's module names it).
        tokenizer: written beside it; None leaves it out. GGUF files need one.
        format: "name" or "name:variant", as in the table above.
        output: folder, or file for GGUF. It appears when it is complete.
        calibration: as `hfaccel.patch` takes it, for formats that quantize on the way.
        progress: a bar on a terminal.
    Raises: PatchError, before anything is written, for a format that is not known or cannot hold the model.
    """
    from hfaccel.patch import inner_model

    name, variant = parse(format)
    target = inner_model(model)
    state = getattr(target, "_hfaccel", None)
    if state is not None and state.lent:
        raise PatchError("export: inside original(model); leave that block first")
    module, function = FORMATS[name].split(":")
    write = getattr(import_module(module), function)
    write(target, tokenizer, variant, output, calibration=calibration, progress=progress)
