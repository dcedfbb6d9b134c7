"""compressed-tensors folders, which vLLM, SGLang and transformers (with that package) load.

A quantized linear `m` with weight [N, K] has, by its scheme

    W4A16, W8A16   m.weight_packed      int32 [N, ceil(K / (32 / bits))]   unsigned codes packed along K
                   m.weight_scale       float [N, G], G = 1 for strategy "channel"
                   m.weight_zero_point  int32 [ceil(N / (32 / bits)), G]   packed along N; asymmetric grids
                   m.weight_shape       int64 [2]                          N, K
                   m.weight_g_idx       int32 [K]                          actorder "group" alone
    W8A8           m.weight int8 [N, K], m.weight_scale [N, 1]; m.input_scale [1] where activations are static
    FP8            m.weight float8_e4m3fn [N, K], m.weight_scale [N, 1]

    w = scale (code - zero), codes and zero points both counted from 2^(bits-1) in packed form

config.json says under "quantization_config": quant_method "compressed-tensors", format ("pack-quantized",
"int-quantized", "float-quantized", or "mixed-precision" of several), quantization_status "compressed", ignore
(names left in float) and config_groups, each with targets ("Linear", or names), weights, input_activations
and its format.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hfaccel.compat import plain_name
from hfaccel.errors import PatchError, UnknownName
from hfaccel.formats import words
from hfaccel.formats.folder import left_alone, say_dequantized, write_folder
from hfaccel.formats.matrix import Matrix
from hfaccel.formats.quantized import quantized
from hfaccel.quant.linear import QuantLinear, codes_of
from hfaccel_kernels.packing import unpack_scales

RECIPES = {"w4a16": "gptq4-sym{group}", "w8a16": "int8", "w8a8": "w8a8", "fp8": "fp8"}
BITS = (4, 8)
PACKED, INT, FLOAT, MIXED = "pack-quantized", "int-quantized", "float-quantized", "mixed-precision"


def write(
    model: nn.Module,
    tokenizer: Any,
    variant: str | None,
    output: str | Path,
    *,
    calibration: Any = None,
    progress: bool = True,
) -> None:
    """Write a compressed-tensors folder.

    Args:
        variant: of an unpatched model what it becomes: "w4a16" (the default; symmetric GPTQ), "w8a16", "w8a8"
            or "fp8". A patched one is written as what it is, and a variant is checked against that.
    Raises: PatchError for grids that the format does not have, naming a module.
    """
    if (variant or "w4a16") not in RECIPES:
        raise UnknownName(
            f"compressed-tensors:{variant}: known are {', '.join(f'compressed-tensors:{v}' for v in RECIPES)}"
        )
    recipe = RECIPES[variant or "w4a16"]
    with quantized(model, "compressed-tensors", recipe, tokenizer, calibration, progress) as linears:
        kinds = {plain_name(record.name): record.kind for record in model._hfaccel.records}
        schemes: dict[str, dict[str, Any]] = {}
        for name, module in linears.items():
            if kinds.get(name) == "Conv1D":
                raise PatchError(f"{name} is a Conv1D, which compressed-tensors folders do not have")
            schemes[name] = _scheme(name, module)
            if variant is not None and _variant(schemes[name]) != variant:
                raise PatchError(f"{name}: {module.extra_repr()} is {_variant(schemes[name])}, not {variant}")
        held = {name: tensors(module) for name, module in linears.items()}
        say_dequantized(model, "compressed-tensors")
        record = config(schemes, left_alone(model, held))
        write_folder(model, tokenizer, output, held=held, quantization=record)


def _variant(scheme: dict[str, Any]) -> str:
    if scheme["format"] == PACKED:
        return f"w{scheme['weights']['num_bits']}a16"
    return "w8a8" if scheme["format"] == INT else "fp8"


def _scheme(name: str, module: QuantLinear) -> dict[str, Any]:
    """A config group, without targets. Raises: PatchError for what the format does not have."""
    layout, k = module.layout, module.size[1]
    acts = None
    if layout.code == "e4m3":
        format, acts = FLOAT, _args(8, "float", strategy="token", dynamic=True)
    elif layout.code == "int" and layout.act == "token":
        static = {"strategy": "tensor", "dynamic": False, "observer": "minmax"}
        format, acts = (
            INT,
            _args(8, "int", **(static if layout.static else {"strategy": "token", "dynamic": True})),
        )
    elif layout.code == "int" and layout.bits in BITS and not layout.has_minimum:
        format = PACKED
    else:
        raise PatchError(
            f"{name}: {module.extra_repr()}; compressed-tensors folders hold integers of 4 or 8 bits and E4M3"
        )
    if k % layout.group_len(k):
        raise PatchError(
            f"{name} has rows of {k}: compressed-tensors files have whole groups of {layout.group}"
        )
    grouped = layout.groups(k) > 1 or layout.group == k
    weights = _args(
        layout.bits,
        "float" if format == FLOAT else "int",
        symmetric=layout.symmetric,
        strategy="group" if grouped else "channel",
        group_size=layout.group if grouped else None,
        observer="minmax",
    )
    return {"weights": weights, "input_activations": acts, "output_activations": None, "format": format}


def _args(bits: int, type: str, **given: Any) -> dict[str, Any]:
    return {
        "num_bits": bits,
        "type": type,
        "symmetric": True,
        "strategy": None,
        "group_size": None,
        "block_structure": None,
        "dynamic": False,
        "actorder": None,
        "observer": None,
        "observer_kwargs": {},
    } | given


def tensors(module: QuantLinear) -> dict[str, Tensor]:
    """What a file has of one matrix."""
    layout, (n, k) = module.layout, module.size
    scale = unpack_scales(module.weight_scale, layout, n).contiguous()
    if layout.code == "e4m3":
        return {"weight": codes_of(module).view(torch.float8_e4m3fn).contiguous(), "weight_scale": scale}
    if layout.act == "token":
        out = {"weight": (codes_of(module) ^ 128).view(torch.int8).contiguous(), "weight_scale": scale}
        return out | ({"input_scale": torch.tensor([layout.act_scale])} if layout.static else {})
    matrix = Matrix.of(module)
    out = {
        "weight_packed": words.pack(matrix.codes, matrix.bits),
        "weight_scale": scale,
        "weight_shape": torch.tensor([n, k]),
    }
    if matrix.zero is not None:
        out["weight_zero_point"] = words.pack(matrix.zero.t(), matrix.bits).t().contiguous()
    return out


def config(schemes: dict[str, dict[str, Any]], left: list[str]) -> dict[str, Any]:
    """`quantization_config`: one group a scheme."""
    groups: list[tuple[dict[str, Any], list[str]]] = []
    for name, scheme in schemes.items():
        names = next((names for known, names in groups if known == scheme), None)
        if names is None:
            groups.append((scheme, names := []))
        names.append(name)
    formats = {scheme["format"] for scheme, _ in groups}
    one = len(groups) == 1
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else MIXED,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "ignore": left,
        "config_groups": {
            f"group_{i}": {"targets": ["Linear"] if one else names} | scheme
            for i, (scheme, names) in enumerate(groups)
        },
    }
