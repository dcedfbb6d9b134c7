"""The only file that touches private API of transformers, accelerate and peft; `self_test` says what has moved."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn



def private_config(model: nn.Module, on_undo: Callable[[Callable[[], None]], None]) -> None:
    """Give the model, and every submodule that refers to its config, a copy of its own.

    Two models built from one config object share it, and would change together.
    """
    memo: dict[int, object] = {}
    for module in model.modules():
        shared = vars(module).get("config")
        if shared is None or not hasattr(shared, "to_dict"):
            continue
        if id(shared) not in memo:
            # One memo: a text config inside a composite config stays the one its submodules hold.
            copy.deepcopy(shared, memo)
        module.config = memo[id(shared)]
        on_undo(lambda module=module, shared=shared: setattr(module, "config", shared))


def base_layer(module: nn.Module) -> nn.Module:
    """The layer inside PEFT's wrapper, or the module itself."""
    while "base_layer" in module._modules:
        module = module._modules["base_layer"]
    return module


def is_adapter_part(name: str) -> bool:
    """Whether a dotted name leads into what PEFT added (an adapter's own matrices), not into the model."""
    parts = name.split(".")
    return any(part.startswith("lora_") or part in ("modules_to_save", "original_module") for part in parts)


def is_offloaded(module: nn.Module) -> bool:
    """Whether accelerate keeps this module's weights elsewhere and brings them in for each forward."""
    hook = getattr(module, "_hf_hook", None)
    hooks = getattr(hook, "hooks", (hook,))
    return any(getattr(each, "offload", False) for each in hooks)


@contextmanager
def materialized(module: nn.Module) -> Iterator[None]:
    """An offloaded module's weights in memory inside the block; anything else as it is."""
    if not is_offloaded(module):
        yield
        return
    module._hf_hook.pre_forward(module)
    try:
        yield
    finally:
        module._hf_hook.post_forward(module, None)
