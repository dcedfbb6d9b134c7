"""Every method, one line each; a class is imported when its name is used."""

from __future__ import annotations

from importlib import import_module

from hfaccel.errors import UnknownName
from hfaccel.transform import Transform

TRANSFORMS = {  # name in recipes and in config.json -> "module:Class"
    "int": "hfaccel.quant.rtn:RTN",
    "gptq": "hfaccel.quant.gptq:GPTQ",
    "awq": "hfaccel.quant.awq:AWQ",
    "hqq": "hfaccel.quant.hqq:HQQ",
    "nf4": "hfaccel.quant.nf4:NF4",
    "fp8": "hfaccel.quant.fp8:FP8",
    "w8a8": "hfaccel.quant.smoothquant:SmoothQuant",
    "head": "hfaccel.quant.head:Head",
    "kv": "hfaccel.cache.quantized:KVCache",
    "lora": "hfaccel.lora.reserved:LoRASlots",
}


def transform_class(name: str) -> type[Transform]:
    """The class behind a method's name; UnknownName lists the known ones."""
    try:
        module, attribute = TRANSFORMS[name].split(":")
    except (KeyError, TypeError):
        raise UnknownName(f"unknown transform {name!r}; known are {', '.join(sorted(TRANSFORMS))}") from None
    return getattr(import_module(module), attribute)


def all_transforms() -> dict[str, type[Transform]]:
    """Every class, imported."""
    return {name: transform_class(name) for name in TRANSFORMS}
