"""PEFT's LoRA folders as they are served: read, checked against the model, refused by name.

A folder holds `adapter_config.json` and `adapter_model.safetensors`. Served are plain and rank-stabilized
LoRA (Hu et al., arXiv:2106.09685; Kalajdzievski, arXiv:2312.03732) on linear layers, packed or not, and on
the head, with ranks and alphas of their own per module. What changes more than `y += scale * (x A^T) B^T` is
refused: DoRA, biases, whole modules, embeddings, fused experts.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from hfaccel.lora.folder import CONFIG, WEIGHTS, BadAdapter, Weights, pattern, read_config, read_weights

_MATRIX = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
SCALE_MOST = 1e6  # of x A^T B^T; beyond it is a mistake, and fp16 knows no larger number than 65,504
_numbers = itertools.count(1)


@dataclass(frozen=True)
class Part:
    """One module's share: y += scale * (x a^T) b^T, a [rank, k], b [n, rank]."""

    rank: int
    scale: float
    k: int
    n: int


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter folder that was read and fits the model.

    Attributes:
        number: given once; the same name loaded again is another one, and shares no cached page with it.
        parts: of each module, by the model's name for it.
    """

    name: str
    path: Path
    parts: dict[str, Part]
    weights: Weights = field(repr=False)
    number: int = field(default_factory=lambda: next(_numbers))

    @property
    def rank(self) -> int:
        """The largest of any module."""
        return max(part.rank for part in self.parts.values())

    def tensors(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Yields (module, a [rank, k], b [n, rank]) as the file has them.

        Raises: BadAdapter where the file is no longer what was read at first.
        """
        try:
            names = [f"{module}.lora_{side}.weight" for module in self.parts for side in "AB"]
            matrices = self.weights.read(names)
            for module in self.parts:
                yield module, next(matrices), next(matrices)
        except BadAdapter as why:
            raise BadAdapter(f"adapter {self.name!r}: {why}") from why.__cause__


def read_adapter(name: str, path: str | Path, model: nn.Module, *, max_rank: int = 64) -> Adapter:
    """Read a PEFT folder and hold it against a model; only headers are read.

    Raises: BadAdapter, naming the adapter and the file, setting, module or tensor that does not fit.
    """
    try:
        path = Path(path)
        config, weights = read_config(path), read_weights(path)
        return Adapter(name, path, _parts(config, weights, model, max_rank), weights)
    except BadAdapter as why:
        raise BadAdapter(f"adapter {name!r}: {why}") from why.__cause__
    except (OSError, TypeError, ValueError) as why:  # no path, too long, not allowed, a NUL in it
        raise BadAdapter(f"adapter {name!r}: {path!r} cannot be read: {why}") from why


def _parts(config: dict, weights: Weights, model: nn.Module, max_rank: int) -> dict[str, Part]:
    modules = dict(model.named_modules(remove_duplicate=False))
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    for key, tensor in weights.tensors.items():
        match, shape = _MATRIX.fullmatch(key), tensor.shape
        if match is None and _is_base(key, shape, modules):
            continue
        if match is None:
            raise BadAdapter(f"{key} in {WEIGHTS}: {_why(key)}")
        if len(shape) != 2:
            raise BadAdapter(f"{key} has shape {list(shape)}, not that of a matrix")
        found.setdefault(match["module"], {})[match["side"]] = shape
    if not found:
        raise BadAdapter(f"{weights.file} has no LoRA matrices")
    parts = {}
    for module, sides in found.items():
        if sides.keys() != {"A", "B"}:
            raise BadAdapter(f"{module} has lora_{next(iter(sides))} alone")
        parts[module] = _part(module, sides["A"], sides["B"], modules, config, max_rank)
    return parts


def _is_base(key: str, shape: tuple[int, ...], modules: dict) -> bool:
    """Whether it is the base's own frozen weight, which PEFT saves beside an adapter on the head.

    Raises: BadAdapter where it has another size: the vocabulary was resized.
    """
    module = modules.get(key.removesuffix(".weight").removesuffix(".base_layer"))
    if not key.endswith(".base_layer.weight") and not isinstance(module, nn.Embedding):
        return False
    rows = getattr(module, "num_embeddings", None) or getattr(module, "out_features", None)
    if shape[:1] != (rows,):
        raise BadAdapter(f"{key} is {list(shape)}, the model has {rows} rows: the vocabulary was resized")
    return True


def _part(
    module: str, a: tuple, b: tuple, modules: dict[str, nn.Module], config: dict, max_rank: int
) -> Part:
    target = modules.get(module)
    if target is None:
        raise BadAdapter(f"the model has no module {module}: it is for another base")
    size = linear_size(target)
    if size is None:
        raise BadAdapter(
            f"target {module} is a {type(target).__name__}; served are linear layers and the head"
        )
    rank, (n, k) = a[0], size
    if rank != b[1]:
        raise BadAdapter(f"{module}: lora_A has rank {rank}, lora_B {b[1]}")
    if a[1] != k or b[0] != n:
        raise BadAdapter(f"{module} maps {a[1]} to {b[0]}, the model's {k} to {n}: it is for another base")
    expected = pattern(config.get("rank_pattern"), module, config["r"])
    if rank != expected:
        raise BadAdapter(f"{module} has rank {rank}, {CONFIG} says {expected}")
    if not 1 <= rank <= max_rank:
        raise BadAdapter(f"{module} has rank {rank}; at most {max_rank} is served (lora_max_rank)")
    alpha = pattern(config.get("alpha_pattern"), module, config["lora_alpha"])
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    if abs(scale) > SCALE_MOST:
        raise BadAdapter(f"{module} is scaled by {scale:g}; at most {SCALE_MOST:g} is served (lora_alpha)")
    return Part(rank, scale, k, n)


def linear_size(module: nn.Module) -> tuple[int, int] | None:
    """(out features, in features) of what LoRA can stand beside, or None."""
    if isinstance(module, Conv1D):
        return module.nf, module.nx
    if isinstance(module, nn.Linear):
        return module.out_features, module.in_features
    return None


def _why(key: str) -> str:
    if "lora_embedding" in key:
        return "LoRA on embeddings is not served"
    if "magnitude" in key:
        return "DoRA cannot be served beside other adapters"
    if key.endswith(".bias"):
        return "trained biases cannot be served beside other adapters"
    return "no LoRA matrix of one module; whole modules cannot be served beside other adapters"
