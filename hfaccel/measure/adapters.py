"""LoRA adapters with random weights, as PEFT folders: what their matrices cost depends on no value."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from hfaccel.errors import PatchError
from hfaccel.lora.adapters import CONFIG, WEIGHTS, linear_size

LINEARS = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
)


def random_adapters(
    model: nn.Module,
    place: str | Path,
    names: Iterable[str],
    *,
    rank: int = 16,
    targets: Iterable[str] = ("q_proj", "v_proj"),
    size: float = 0.02,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Path]:
    """Write a folder a name below `place`; every linear of the layers whose last name is in `targets` is one.

    Args: size: standard deviation of the values; at the default answers change, and stay finite.
    Returns: name -> folder. Raises: PatchError if there is no such linear.
    """
    targets = list(targets)
    modules = {name: linear_size(module) for name, module in model.named_modules()}
    found = {name: size for name, size in modules.items() if size and name.rpartition(".")[2] in targets}
    if not found:
        raise PatchError(f"no linear of {type(model).__name__} is called {' or '.join(targets)}")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets}
    made = {}
    for number, name in enumerate(names):
        draw = torch.Generator().manual_seed(number)
        tensors = {}
        for module, (rows, columns) in found.items():
            for side, shape in (("A", (rank, columns)), ("B", (rows, rank))):
                values = torch.randn(shape, generator=draw) * size
                tensors[f"base_model.model.{module}.lora_{side}.weight"] = values.to(dtype)
        made[name] = Path(place) / name
        made[name].mkdir(parents=True)
        (made[name] / CONFIG).write_text(json.dumps(config))
        save_file(tensors, made[name] / WEIGHTS)
    return made
