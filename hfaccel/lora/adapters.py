"""PEFT's LoRA folders as they are served: read, checked against the model, refused by name.

A folder holds `adapter_config.json` and `adapter_model.safetensors`. Served are plain and rank-stabilized
LoRA (Hu et al., arXiv:2106.09685; Kalajdzievski, arXiv:2312.03732) on linear layers, packed or not, and on
the head, with ranks and alphas of their own per module. What changes more than `y += scale * (x A^T) B^T` is
refused: DoRA, biases, whole modules, embeddings, fused experts.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import nn
from transformers.pytorch_utils import Conv1D

from hfaccel.errors import PatchError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
CONFIG_BYTES = 1 << 20
_PREFIX = "base_model.model."
_MATRIX = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
_numbers = itertools.count(1)


class BadAdapter(PatchError):
    """An adapter that cannot be served on this model; what is served already is not touched."""


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
    number: int = field(default_factory=lambda: next(_numbers))

    @property
    def rank(self) -> int:
        """The largest of any module."""
        return max(part.rank for part in self.parts.values())

    def tensors(self):
        """Yields (module, a [rank, k], b [n, rank]) as the file has them.

        Raises: BadAdapter where the file is no longer what was read at first.
        """
        with _open(self.name, self.path) as file:
            names = {_strip(key): key for key in file.keys()}
            for module, part in self.parts.items():
                keys = [names.get(f"{module}.lora_{side}.weight") for side in "AB"]
                if None in keys:
                    raise BadAdapter(f"adapter {self.name!r}: {self.path} has changed, {module} is gone")
                a, b = (file.get_tensor(key) for key in keys)
                if tuple(a.shape) != (part.rank, part.k) or tuple(b.shape) != (part.n, part.rank):
                    raise BadAdapter(
                        f"adapter {self.name!r}: {self.path} has changed, {module} has another size"
                    )
                yield module, a, b


def read_adapter(name: str, path: str | Path, model: nn.Module, *, max_rank: int = 64) -> Adapter:
    """Read a PEFT folder and hold it against a model; only headers are read.

    Raises: BadAdapter, naming the adapter and the file, setting, module or tensor that does not fit.
    """
    path = Path(path)
    try:
        return Adapter(name, path, _parts(path, name, model, max_rank))
    except BadAdapter as why:
        raise BadAdapter(f"adapter {name!r}: {why}") from why.__cause__


def _parts(path: Path, name: str, model: nn.Module, max_rank: int) -> dict[str, Part]:
    config = _config(path)
    _refuse_settings(config)
    shapes = _shapes(name, path)
    modules = dict(model.named_modules(remove_duplicate=False))
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    for key, shape in shapes.items():
        match = _MATRIX.fullmatch(_strip(key))
        if match is None and _is_base(key, shape, modules):
            continue
        if match is None:
            raise BadAdapter(f"{key} in {WEIGHTS}: {_why(key)}")
        if len(shape) != 2:
            raise BadAdapter(f"{key} has shape {list(shape)}, not that of a matrix")
        found.setdefault(match["module"], {})[match["side"]] = shape
    if not found:
        raise BadAdapter(f"{path / WEIGHTS} has no LoRA matrices")
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
    module = modules.get(_strip(key).removesuffix(".weight").removesuffix(".base_layer"))
    if not key.endswith(".base_layer.weight") and not isinstance(module, nn.Embedding):
        return False
    rows = getattr(module, "num_embeddings", None) or getattr(module, "out_features", None)
    if rows != shape[0]:
        raise BadAdapter(f"{key} has {shape[0]} rows, the model's {rows}: the vocabulary was resized")
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
    expected = _pattern(config.get("rank_pattern"), module, config["r"])
    if rank != expected:
        raise BadAdapter(f"{module} has rank {rank}, {CONFIG} says {expected}")
    if not 1 <= rank <= max_rank:
        raise BadAdapter(f"{module} has rank {rank}; at most {max_rank} is served (lora_max_rank)")
    alpha = _pattern(config.get("alpha_pattern"), module, config["lora_alpha"])
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return Part(rank, scale, k, n)


def linear_size(module: nn.Module) -> tuple[int, int] | None:
    """(out features, in features) of what LoRA can stand beside, or None."""
    if isinstance(module, Conv1D):
        return module.nf, module.nx
    if isinstance(module, nn.Linear):
        return module.out_features, module.in_features
    return None


def _config(path: Path) -> dict[str, Any]:
    file = path / CONFIG
    if not path.is_dir():
        raise BadAdapter(f"{path} is no folder")
    if not file.is_file():
        raise BadAdapter(f"{path} has no {CONFIG}: it is no PEFT adapter")
    if file.stat().st_size > CONFIG_BYTES:
        raise BadAdapter(f"{file} has more than {CONFIG_BYTES} bytes")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as why:
        raise BadAdapter(f"{file} is no JSON: {why}") from why
    if not isinstance(config, dict):
        raise BadAdapter(f"{file} holds no settings")
    for key in ("r", "lora_alpha"):
        if not _is_number(config.get(key)):
            raise BadAdapter(f"{key} in {CONFIG} is {config.get(key)!r}, not a number")
    for key in ("rank_pattern", "alpha_pattern"):
        patterns = config.get(key) or {}
        if not isinstance(patterns, dict) or not all(_is_number(v) for v in patterns.values()):
            raise BadAdapter(f"{key} in {CONFIG} is {patterns!r}, not numbers by module")
    return config


def _is_number(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _refuse_settings(config: dict[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise BadAdapter(f"peft_type {config.get('peft_type')!r} is not served, only LORA is")
    for key, meant in {
        "use_dora": "DoRA",
        "lora_bias": "biases in lora_B",
        "modules_to_save": "whole modules",
        "trainable_token_indices": "trained tokens",
        "target_parameters": "LoRA on parameters (fused experts)",
        "layer_replication": "repeated layers",
        "alora_invocation_tokens": "activated LoRA",
    }.items():
        if config.get(key):
            raise BadAdapter(f"{key} in {CONFIG}: {meant} cannot be served beside other adapters")
    if config.get("bias", "none") != "none":
        raise BadAdapter(
            f"bias={config['bias']!r} in {CONFIG}: trained biases cannot be served beside other adapters"
        )


def _why(key: str) -> str:
    if "lora_embedding" in key:
        return "LoRA on embeddings is not served"
    if "magnitude" in key:
        return "DoRA cannot be served beside other adapters"
    if key.endswith(".bias"):
        return "trained biases cannot be served beside other adapters"
    return "no LoRA matrix of one module; whole modules cannot be served beside other adapters"


def _pattern(patterns: dict[str, float] | None, module: str, otherwise: float) -> float:
    """PEFT's rule: the first pattern that the end of the module's name matches, from a dot on."""
    for pattern, value in (patterns or {}).items():
        try:
            if re.match(rf"(.*\.)?({pattern})$", module):
                return value
        except re.error as why:
            raise BadAdapter(f"pattern {pattern!r} in {CONFIG}: {why}") from why
    return otherwise


def _strip(key: str) -> str:
    return key.removeprefix(_PREFIX)


def _open(name: str, path: Path):
    try:
        return safe_open(path / WEIGHTS, framework="pt")
    except (OSError, SafetensorError) as why:
        raise BadAdapter(f"adapter {name!r}: {path / WEIGHTS} cannot be read: {why}") from why


def _shapes(name: str, path: Path) -> dict[str, tuple[int, ...]]:
    file = path / WEIGHTS
    if not file.is_file():
        pickled = sorted(p.name for p in path.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".pkl"))
        if pickled:
            raise BadAdapter(f"{path / pickled[0]} is a pickle, which can run code: save it as {WEIGHTS}")
        raise BadAdapter(f"{path} has no {WEIGHTS}")
    try:
        with safe_open(file, framework="pt") as opened:
            slices = {key: opened.get_slice(key) for key in opened.keys()}
            kinds = {key: part.get_dtype() for key, part in slices.items()}
            shapes = {key: tuple(part.get_shape()) for key, part in slices.items()}
    except (OSError, SafetensorError) as why:
        raise BadAdapter(f"{file} cannot be read: {why}") from why
    for key, kind in kinds.items():
        if kind not in ("F32", "F16", "BF16"):
            raise BadAdapter(f"{key} is {kind}; known are F32, F16, BF16")
    return shapes
