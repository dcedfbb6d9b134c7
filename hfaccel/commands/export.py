"""`hfaccel export`: a model in another program's format."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer

from hfaccel.commands.terminal import AsJson, Model, OffGrid, Overwrite, recipe_names


def export(
    model: Model,
    format: Annotated[
        str,
        typer.Option(
            "--format",
            "-f",
            help="gguf:TYPE, gptq[:v2], awq, compressed-tensors[:w4a16|w8a16|w8a8|fp8] or dense[:fp16|fp32].",
        ),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder to write; a file for gguf.")],
    recipe: Annotated[
        str | None,
        typer.Option(help="Quantize with it first; without one each packed format has a recipe of its own."),
    ] = None,
    calibration: Annotated[
        str | None,
        typer.Option(help="For what is calibrated on the way: a text file, or wikitext2_valid."),
    ] = None,
    off_grid: OffGrid = False,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Write a model for other programs: llama.cpp, vLLM, SGLang, transformers.

    MODEL may be a folder that `hfaccel patch` saved: what is packed is written code for code, and nothing is
    rounded a second time. A model in float is quantized on the way. Heads are written in float.

    \b
    gguf:TYPE           one file for llama.cpp and what is built on it
    gptq                vLLM, SGLang, transformers with GPTQModel; gptq:v2 where zero points of 0 are needed
    awq                 the same engines, 4 bits
    compressed-tensors  vLLM and SGLang: 4 and 8 bit weights, int8 or FP8 activations
    dense               anything that reads safetensors: all merged to bf16

    \b
    hfaccel export demo --format gptq -o demo-gptq
    hfaccel patch demo -o packed --recipe gptq4-sym
    hfaccel export packed --format compressed-tensors -o out
    """
    import hfaccel
    from hfaccel.errors import PatchError
    from hfaccel.formats.export import export as write
    from hfaccel.formats.export import parse
    from hfaccel.measure.corpus import text
    from hfaccel.measure.rows import load_model, tokenizer_beside
    from hfaccel.recipe import AUTO
    from hfaccel.saving import check_free, check_target, check_writable

    name, _ = parse(format)
    if recipe is not None:
        recipe_names(recipe, AUTO)
    if not str(output) or str(output) == ".":
        raise typer.BadParameter("an empty path", param_hint="--output")
    if name == "gguf":
        check_writable(output)
    else:
        check_target(output)
    if Path(model).exists() and output.exists() and output.samefile(model):
        raise PatchError(f"{output} is MODEL itself, whose weights would be lost; give another place")
    if not overwrite:
        check_free(output)
    texts = None if calibration is None else [text(calibration)]
    loaded = load_model(model, off_grid=off_grid, packed=recipe is None)
    tokenizer = tokenizer_beside(model)
    start = time.perf_counter()
    if recipe is not None:
        hfaccel.patch(loaded, recipe, calibration=texts, tokenizer=tokenizer, keep_original=False)
    write(loaded, tokenizer, format, output, calibration=texts)
    files = sorted(path for path in output.rglob("*") if path.is_file()) if output.is_dir() else [output]
    row = {
        "format": format,
        "output": str(output),
        "bytes": sum(path.stat().st_size for path in files),
        "seconds": time.perf_counter() - start,
    }
    if as_json:
        return print(json.dumps(row, indent=1))
    print(f"{output}: {format}, {row['bytes'] / 1e6:.1f} MB, written in {row['seconds']:.1f} s")
