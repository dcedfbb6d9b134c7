"""hfaccel: `hfaccel.patch(model, config)`, and a Hugging Face model is smaller and faster in place."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hfaccel.errors import PatchError
from hfaccel.registration import register

if TYPE_CHECKING:
    from hfaccel.cache.quantized import KVCache
    from hfaccel.demo import demo_model
    from hfaccel.lora.reserved import LoRASlots
    from hfaccel.patch import original, patch, report, unpatch
    from hfaccel.quant.awq import AWQ
    from hfaccel.quant.fp8 import FP8
    from hfaccel.quant.gptq import GPTQ
    from hfaccel.quant.head import Head
    from hfaccel.quant.hqq import HQQ
    from hfaccel.quant.nf4 import NF4
    from hfaccel.quant.rtn import RTN
    from hfaccel.quant.smoothquant import SmoothQuant
    from hfaccel.recipe import PatchConfig
    from hfaccel.samples import CalibrationData
    from hfaccel.serve.grammar import structured
    from hfaccel.serve.server import Server
    from hfaccel.source import from_pretrained

__version__ = "0.1.0"

_PUBLIC = {  # name -> module, imported on use: `import hfaccel` stays quick
    "patch": "hfaccel.patch",
    "unpatch": "hfaccel.patch",
    "original": "hfaccel.patch",
    "report": "hfaccel.patch",
    "from_pretrained": "hfaccel.source",
    "demo_model": "hfaccel.demo",
    "PatchConfig": "hfaccel.recipe",
    "RTN": "hfaccel.quant.rtn",
    "GPTQ": "hfaccel.quant.gptq",
    "AWQ": "hfaccel.quant.awq",
    "HQQ": "hfaccel.quant.hqq",
    "NF4": "hfaccel.quant.nf4",
    "FP8": "hfaccel.quant.fp8",
    "SmoothQuant": "hfaccel.quant.smoothquant",
    "CalibrationData": "hfaccel.samples",
    "Head": "hfaccel.quant.head",
    "KVCache": "hfaccel.cache.quantized",
    "LoRASlots": "hfaccel.lora.reserved",
    "Server": "hfaccel.serve.server",
    "structured": "hfaccel.serve.grammar",
}
__all__ = [
    "AWQ",
    "CalibrationData",
    "FP8",
    "GPTQ",
    "HQQ",
    "Head",
    "KVCache",
    "LoRASlots",
    "NF4",
    "PatchConfig",
    "PatchError",
    "RTN",
    "Server",
    "SmoothQuant",
    "__version__",
    "demo_model",
    "from_pretrained",
    "original",
    "patch",
    "report",
    "structured",
    "unpatch",
]


def __getattr__(name: str) -> Any:
    try:
        module = _PUBLIC[name]
    except KeyError:
        raise AttributeError(f"module 'hfaccel' has no attribute {name!r}") from None
    value = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


class _Package(ModuleType):
    """`hfaccel.patch` is a function and a submodule: importing the module must not hide the function."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _PUBLIC and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
register()  # transformers reads the folders that patched models save
