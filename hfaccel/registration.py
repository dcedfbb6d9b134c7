"""Makes `from_pretrained` of transformers read folders that hfaccel saved, in either import order.

transformers looks quantization methods up in two tables of `transformers.quantizers.auto`, and importing that
module takes seconds. So `import hfaccel` enters itself at once only where the module is loaded already; else
it waits for its import, which every `from_pretrained` makes.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

TABLES = "transformers.quantizers.auto"


def register() -> None:
    """Enter "hfaccel" as a quantization method now, or as soon as transformers' tables exist."""
    if hasattr(sys.modules.get(TABLES), "register_quantizer"):
        import_module("hfaccel.loading")
    elif not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch())


class _Watch(MetaPathFinder):
    """Finds the one module as Python would, and leaves."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != TABLES:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Then(spec.loader)
        return spec


class _Then(Loader):
    """Loads the module with its own loader, then enters the method."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        # If hfaccel.loading is what imports the tables, it is half-way in and enters itself at its end.
        import_module("hfaccel.loading")
