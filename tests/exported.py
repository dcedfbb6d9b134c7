"""What the tests of other quantizers' folders share: a small model, its matrices, edits of a folder."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from hfaccel.quant.linear import is_packed
from saved import patched
from tiny import tiny


def small(recipe: str | None, **overrides):
    """A random Llama whose sizes are multiples of 32, patched."""
    model = tiny("llama", **{"intermediate_size": 128, **overrides})
    return model if recipe is None else patched(model, recipe)


def linears(model) -> dict:
    """Name -> packed linear of the layers."""
    return {name: m for name, m in model.named_modules() if is_packed(m) and ".layers." in name}


def matrices(model) -> dict[str, torch.Tensor]:
    """Name -> what a packed linear of the layers stands for, fp32."""
    return {name: module.dequantize() for name, module in linears(model).items()}


def nibbles(word: int, bits: int = 4) -> list[int]:
    """The values of one int32, lowest bits first."""
    return [(word & 0xFFFFFFFF) >> at & ((1 << bits) - 1) for at in range(0, 32, bits)]


def edit(folder: Path, change=None, config=None) -> Path:
    """Change a folder's tensors by `change(dict)` and its quantization_config by `config(dict)`."""
    if change is not None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    if config is not None:
        whole = json.loads((folder / "config.json").read_text())
        config(whole["quantization_config"])
        (folder / "config.json").write_text(json.dumps(whole))
    return folder


def same_packed(a, b) -> None:
    """Codes, scales and zero points of two models' layers are equal, bit for bit."""
    first, second = linears(a), linears(b)
    assert first and first.keys() == second.keys()
    for name, module in first.items():
        other = second[name].packed
        assert module.packed.keys() == other.keys()
        for key, tensor in module.packed.items():
            assert tensor.dtype == other[key].dtype and torch.equal(tensor, other[key]), (name, key)
