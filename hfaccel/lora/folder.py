"""A PEFT folder as files: its settings, the header of its weights, its matrices. Nothing in it is trusted.

The weights are read, not mapped: a file that somebody shortens meanwhile is an error here, and would end the
process by a signal there. What was read at first is told by size, time and inode of the file: another one
under the same name is another adapter.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hfaccel.errors import PatchError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
CONFIG_BYTES, HEADER_BYTES = 1 << 20, 16 << 20
PREFIX = "base_model.model."
PATTERN_REPEATS = 3  # of a pattern over module names: more can take hours, and none that PEFT writes has more
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_REFUSED = {
    "use_dora": "DoRA",
    "lora_bias": "biases in lora_B",
    "modules_to_save": "whole modules",
    "trainable_token_indices": "trained tokens",
    "target_parameters": "LoRA on parameters (fused experts)",
    "layer_replication": "repeated layers",
    "alora_invocation_tokens": "activated LoRA",
    "use_qalora": "QALoRA",
    "use_bdlora": "block-diagonal LoRA",
    "arrow_config": "routed adapters (Arrow)",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
}
# What says how an adapter was trained or where it stands, which its matrices say themselves.
_FREE = {
    *("peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
    *("inference_mode", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "bias"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "fan_in_fan_out"),
    *("lora_dropout", "init_lora_weights", "megatron_config", "megatron_core", "qalora_group_size"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "velora_config", "runtime_config"),
    "ensure_weight_tying",
}
# Ways to start that leave the base's weights alone; PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA do not.
_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")


class BadAdapter(PatchError):
    """An adapter that cannot be served on this model; what is served already is not touched."""


@dataclass(frozen=True)
class Tensor:
    """Where a tensor lies in its file, in bytes from the beginning."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class Weights:
    """The header of `adapter_model.safetensors`: tensors by their key without PEFT's prefix."""

    file: Path
    tensors: dict[str, Tensor]
    stamp: tuple[int, ...]

    def read(self, names: Iterable[str]) -> Iterator[torch.Tensor]:
        """The tensors of these names. Raises: BadAdapter where the file is no longer the one it was."""
        try:
            with self.file.open("rb") as file:
                if stamp_of(file) != self.stamp:
                    raise BadAdapter(f"{self.file} has changed since it was loaded: load it again")
                for name in names:
                    tensor = self.tensors[name]
                    raw = torch.empty(tensor.bytes, dtype=torch.uint8)
                    file.seek(tensor.start)
                    if file.readinto(memoryview(raw.numpy())) != tensor.bytes:
                        raise BadAdapter(f"{self.file} has changed: it ends within {tensor.key}")
                    yield raw.view(tensor.dtype).view(tensor.shape)
        except (OSError, RuntimeError, MemoryError) as why:
            raise BadAdapter(f"{self.file} cannot be read: {why}") from why


def stamp_of(file) -> tuple[int, ...]:
    stat = os.fstat(file.fileno())
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


def read_weights(path: Path) -> Weights:
    """The header of the folder's weights. Raises: BadAdapter for what is no such file, or pickled."""
    file = path / WEIGHTS
    if not file.is_file():
        pickled = sorted(p.name for p in path.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".pkl"))
        if pickled:
            raise BadAdapter(f"{path / pickled[0]} is a pickle, which can run code: save it as {WEIGHTS}")
        raise BadAdapter(f"{path} has no {WEIGHTS}")
    with file.open("rb") as opened:
        stamp, size = stamp_of(opened), os.fstat(opened.fileno()).st_size
        length = int.from_bytes(opened.read(8), "little")
        if size < 8 + length or not length:
            raise BadAdapter(f"{file} cannot be read: a header of {length} bytes in a file of {size}")
        if length > HEADER_BYTES:
            raise BadAdapter(f"{file} cannot be read: its header has more than {HEADER_BYTES} bytes")
        text = opened.read(length)
    try:
        header = json.loads(text)
        if not isinstance(header, dict):
            raise ValueError("no table of tensors")
        header.pop("__metadata__", None)
        found = [_tensor(key, entry, 8 + length, size) for key, entry in header.items()]
    except (ValueError, TypeError, KeyError, RecursionError) as why:
        raise BadAdapter(f"{file} cannot be read: its header is broken: {why}") from why
    tensors = {tensor.key.removeprefix(PREFIX): tensor for tensor in found}
    if len(tensors) != len(found):
        raise BadAdapter(f"{file} names a tensor twice, with and without {PREFIX}")
    return Weights(file, tensors, stamp)


def _tensor(key: str, entry: dict, data: int, size: int) -> Tensor:
    """Raises: ValueError, TypeError, KeyError for an entry that does not lie in the file."""
    kind, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    if kind not in _DTYPES:
        raise BadAdapter(f"{key} is {kind}; known are {', '.join(_DTYPES)}")
    if any(type(n) is not int or n < 0 for n in (*shape, start, end)):
        raise ValueError(f"{key} has the shape {list(shape)} at {[start, end]}")
    tensor = Tensor(key, _DTYPES[kind], shape, data + start)
    if end - start != tensor.bytes or data + end > size:
        raise ValueError(f"{key} does not lie in the file")
    return tensor


def read_config(path: Path) -> dict[str, Any]:
    """The folder's settings. Raises: BadAdapter, also for one that cannot be served."""
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
            raise BadAdapter(f"{key} in {CONFIG} is {repr(config.get(key))[:40]}, not a number")
    for key in ("rank_pattern", "alpha_pattern"):
        patterns = config.get(key) or {}
        if not isinstance(patterns, dict) or not all(_is_number(v) for v in patterns.values()):
            raise BadAdapter(f"{key} in {CONFIG} is {str(patterns)[:80]}, not numbers by module")
    _refuse(config)
    return config


def _is_number(value) -> bool:
    """Whether it is a number of fp32's size."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return -3e38 < value < 3e38  # exact for whole numbers of any size, and false for NaN


def _refuse(config: dict[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise BadAdapter(f"peft_type {config.get('peft_type')!r} is not served, only LORA is")
    for key, value in config.items():
        if value and key in _REFUSED:
            raise BadAdapter(f"{key} in {CONFIG}: {_REFUSED[key]} cannot be served beside other adapters")
        if value and key not in _FREE:
            raise BadAdapter(f"{key} in {CONFIG} is not known, and may mean more than LoRA")
    if config.get("bias") not in (None, "none"):
        raise BadAdapter(
            f"bias={config['bias']!r} in {CONFIG}: trained biases cannot be served beside other adapters"
        )
    if (start := config.get("init_lora_weights")) not in _STARTS:
        raise BadAdapter(
            f"init_lora_weights={start!r} in {CONFIG}: such an adapter may belong to a base with other "
            "weights; save it converted to plain LoRA (path_initial_model_for_weight_conversion)"
        )


def pattern(patterns: dict[str, float] | None, module: str, otherwise: float) -> float:
    """PEFT's rule: the first pattern that the end of the module's name matches, from a dot on."""
    for one, value in (patterns or {}).items():
        repeats = len(re.findall(r"[*+{]", one))
        if repeats > PATTERN_REPEATS or re.search(r"\)[*+{]", one):
            raise BadAdapter(f"pattern {one[:80]!r} in {CONFIG} repeats too much: it could take for ever")
        try:
            if re.match(rf"(.*\.)?({one})$", module):
                return value
        except (re.error, OverflowError, RecursionError) as why:
            raise BadAdapter(f"pattern {one[:80]!r} in {CONFIG}: {why}") from why
    return otherwise
