"""Makes `from_pretrained` of transformers read folders that hfaccel saved, in either import order.

transformers looks quantization methods up in two tables of `transformers.quantizers.auto`, and importing that
module takes seconds. So `import hfaccel` enters itself at once only where the module is loaded already; else
it waits for its import, which every `from_pretrained` makes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

TABLES = "transformers.quantizers.auto"


def register() -> None:
    """Enter "hfaccel" as a quantization method now, or as soon as transformers' tables exist."""
    # If hfaccel.loading is what imports the tables, it is half-way in and enters itself at its end.
    after_import(TABLES, lambda tables: import_module("hfaccel.loading"))


def after_import(name: str, act: Callable[[ModuleType], Any]) -> None:
    """Call `act(module)` now if the module is imported, else when it has been."""
    if (module := sys.modules.get(name)) is not None:
        act(module)
    else:
        sys.meta_path.insert(0, _Watch(name, act))


class _Watch(MetaPathFinder):
    """Finds the one module as Python would, and leaves once it is imported."""

    def __init__(self, name: str, act: Callable[[ModuleType], Any]) -> None:
        self.name, self.act = name, act

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != self.name:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Then(spec.loader, self.arrived)
        return spec

    def arrived(self, module: ModuleType) -> None:
        sys.meta_path.remove(self)
        self.act(module)


class _Then(Loader):
    """Loads a module with its own loader, then acts."""

    def __init__(self, loader: Loader, act: Callable[[ModuleType], Any]) -> None:
        self.loader, self.act = loader, act

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        self.act(module)
