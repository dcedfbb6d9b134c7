"""compressed-tensors folders read: see `compressed_tensors.py` for what is in them.

Weights are taken over bit for bit. Activations follow the layout: per token as the scheme says for symmetric
dynamic INT8 and for FP8, with the scheme's scale for static INT8; what a layout does not have (asymmetric or
grouped activations, static FP8) is replaced by a finer one, and a warning says so.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hfaccel.errors import CheckpointError
from hfaccel.formats import words
from hfaccel.formats.compressed_tensors import BITS
from hfaccel.formats.matrix import Matrix
from hfaccel.formats.reading import FLOATS, Place, Source, Tensors

log = logging.getLogger("hfaccel")

_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision")
_FLOAT8 = torch.float8_e4m3fn


class Reader:
    """Reads the linears of one folder. Raises: CheckpointError naming the key of the config."""

    def __init__(self, record: Mapping[str, Any], tensors: Tensors) -> None:
        self.tensors, self.warned = tensors, set()
        if record.get("format") not in _FORMATS:
            raise CheckpointError(
                f"quantization_config: format {record.get('format')!r}; known are {', '.join(_FORMATS)}"
            )
        groups = record.get("config_groups")
        if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
            raise CheckpointError(f"quantization_config: config_groups {groups!r} is no mapping of groups")
        self.groups = groups
        for key in ("transform_config", "sparsity_config"):
            held = record.get(key)
            if isinstance(held, dict) and (
                held.get("config_groups") or held.get("format", "dense") != "dense"
            ):
                raise CheckpointError(f"quantization_config: {key} is not read by hfaccel")
        if record.get("kv_cache_scheme"):
            log.warning("compressed-tensors: kv_cache_scheme is left out; the recipe step kv8 is ours")

    def quantized(self) -> list[str]:
        """Linears with a scale. Raises: CheckpointError for one that has either codes or scales alone."""
        names = set(self.tensors.names)
        scaled = [name.removesuffix(".weight_scale") for name in names if name.endswith(".weight_scale")]
        packed = [name.removesuffix(".weight_packed") for name in names if name.endswith(".weight_packed")]
        coded = [
            name.removesuffix(".weight")
            for name in names
            if name.endswith(".weight") and self.tensors.dtype(name) in (torch.int8, _FLOAT8)
        ]
        for name in sorted({*packed, *coded} - {*scaled}):
            raise CheckpointError(f"{name}.weight_scale is missing")
        for name in sorted({*scaled} - {*packed, *coded}):
            raise CheckpointError(
                f"{name}: its scales are there, its weight is missing or is no integer or FP8"
            )
        return [
            name for name in dict.fromkeys(n.rpartition(".")[0] for n in self.tensors.names) if name in scaled
        ]

    def source(self, place: Place) -> Source:
        weights, acts = self._scheme(place)
        if f"{place.name}.weight_packed" in self.tensors:
            return self._packed(place, weights)
        return self._plain(place, weights, acts)

    # The scheme -------------------------------------------------------------------------------------------

    def _scheme(self, place: Place) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Of the most specific target: a name or pattern before a class."""
        by_class = None
        for group in self.groups.values():
            for target in group.get("targets") or ():
                if _fits(target, place.name):
                    return self._checked(place.name, group)
                if target == place.kind or target == "Linear":
                    by_class = by_class or group
        if by_class is None:
            raise CheckpointError(f"{place.name} is quantized, and no target of config_groups names it")
        return self._checked(place.name, by_class)

    def _checked(self, name: str, group: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any] | None]:
        weights, acts = group.get("weights"), group.get("input_activations")
        if not isinstance(weights, dict) or not (acts is None or isinstance(acts, dict)):
            raise CheckpointError(f"{name}: its config group has no weights")
        bits, kind = weights.get("num_bits"), weights.get("type", "int")
        if (kind, bits) not in {("int", 4), ("int", 8), ("float", 8)}:
            raise CheckpointError(
                f"{name}: num_bits {bits!r} of type {kind!r}; known are float of 8 and int of "
                f"{' and '.join(map(str, BITS))}"
            )
        size, strategy = weights.get("group_size"), weights.get("strategy")
        if strategy is None:
            strategy = "tensor" if size is None else "channel" if size == -1 else "group"
        if strategy not in ("group", "channel", "tensor"):
            raise CheckpointError(f"{name}: strategy {strategy!r}; known are group, channel, tensor")
        if strategy == "group" and (type(size) is not int or size < 1):
            raise CheckpointError(f"{name}: group_size {size!r}; a positive number for strategy group")
        return dict(weights, strategy=strategy), acts

    def _groups(self, place: Place, weights: Mapping[str, Any]) -> tuple[int, int]:
        """(our group, number of groups)."""
        if weights["strategy"] != "group":
            return -1, 1
        size = weights["group_size"]
        return size, -(-place.size[1] // size)

    # Tensors ----------------------------------------------------------------------------------------------

    def _scales(self, place: Place, groups: int, strategy: str) -> Tensor:
        n = place.size[0]
        shapes = [(n, groups)] if strategy != "tensor" else [(1,), (), (1, 1)]
        if strategy == "channel":
            shapes.append((n,))
        scale = self.tensors.get(f"{place.name}.weight_scale", FLOATS, *shapes)
        return (
            scale.reshape(1, 1).expand(n, 1) if strategy == "tensor" else scale.reshape(n, groups)
        ).contiguous()

    def _packed(self, place: Place, weights: dict[str, Any]) -> Source:
        name, (n, k) = place.name, place.size
        bits = weights["num_bits"]
        if weights.get("type", "int") != "int":
            raise CheckpointError(f"{name}.weight_packed holds integers, its scheme says {weights['type']}")
        group, groups = self._groups(place, weights)
        per, _ = words.period(bits)
        shape = self.tensors.get(f"{name}.weight_shape", (torch.int64, torch.int32), (2,))
        if tuple(shape.tolist()) != (n, k):
            raise CheckpointError(f"{name}.weight_shape says {shape.tolist()}, the architecture {[n, k]}")
        self.tensors.check(f"{name}.weight_packed", (torch.int32,), (n, -(-k // per)))
        scale = self._scales(place, groups, weights["strategy"])
        leaves = ["weight_packed", "weight_scale", "weight_shape"]
        zero = None
        if not weights.get("symmetric", True):
            leaves.append("weight_zero_point")
            packed = self.tensors.get(f"{name}.weight_zero_point", (torch.int32,), (-(-n // per), groups))
            zero = words.unpack(packed.t(), bits, n).t().contiguous()
        index = None
        if f"{name}.weight_g_idx" in self.tensors:
            leaves.append("weight_g_idx")
            index = self._index(f"{name}.weight_g_idx", k, group, groups)

        def matrix() -> Matrix:
            packed = self.tensors.get(f"{name}.weight_packed", (torch.int32,), (n, -(-k // per)))
            codes = words.unpack(packed, bits, k)
            self.tensors.let_go(f"{name}.weight_packed", packed)
            return Matrix(codes, scale, zero, bits, group)

        def dense() -> Tensor:
            whole = matrix()
            return (whole.codes.float() - whole.zeros()[:, index].float()) * scale[:, index].float()

        layout = Matrix(scale, scale, zero, bits, group).layout(16 if bits == 8 else place.act_bits)
        if index is not None:
            return Source(name, (n, k), tuple(leaves), matrix, None, dense)
        return Source(name, (n, k), tuple(leaves), matrix, layout)

    def _index(self, key: str, k: int, group: int, groups: int) -> Tensor | None:
        index = self.tensors.get(key, (torch.int32, torch.int64), (k,)).long()
        if int(index.min()) < 0 or int(index.max()) >= groups:
            bad = int(index[(index < 0) | (index >= groups)][0])
            raise CheckpointError(f"{key} has group {bad}; the scales have groups 0 to {groups - 1}")
        size = k if group == -1 else group
        return None if torch.equal(index, torch.arange(k) // size) else index

    def _plain(self, place: Place, weights: dict[str, Any], acts: dict[str, Any] | None) -> Source:
        name, (n, k) = place.name, place.size
        float8 = weights.get("type", "int") == "float"
        dtype = _FLOAT8 if float8 else torch.int8
        self.tensors.check(f"{name}.weight", (dtype,), (n, k))
        group, groups = self._groups(place, weights)
        scale = self._scales(place, groups, weights["strategy"])
        leaves = ["weight", "weight_scale"]
        zero = None
        if f"{name}.weight_zero_point" in self.tensors:
            leaves.append("weight_zero_point")
            shapes = (n, groups), (n,), (1,)
            stored = self.tensors.get(f"{name}.weight_zero_point", (torch.int8,), *shapes).reshape(-1, groups)
            zero = (stored.expand(n, groups).int() + 128).to(torch.uint8).contiguous()
            zero = None if float8 or bool((zero == 128).all()) else zero
        act, act_scale = self._acts(place, acts, group, zero, float8, leaves)

        def matrix() -> Matrix:
            stored = self.tensors.get(f"{name}.weight", (dtype,), (n, k))
            codes = stored.view(torch.uint8) if float8 else stored.view(torch.uint8) ^ 128
            codes = codes.clone() if float8 else codes
            self.tensors.let_go(f"{name}.weight", stored)
            return Matrix(
                codes, scale.float() if act == "token" else scale, zero, 8, group, code, act, act_scale
            )

        code = "e4m3" if float8 else "int"
        if float8 and group != -1:
            raise CheckpointError(f"{name}: FP8 in groups of {group}; known are channel and tensor")
        layout = Matrix(scale, scale, zero, 8, group, code, act, act_scale).layout(16)
        return Source(name, (n, k), tuple(leaves), matrix, layout)

    def _acts(
        self,
        place: Place,
        acts: dict[str, Any] | None,
        group: int,
        zero: Tensor | None,
        float8: bool,
        leaves: list[str],
    ) -> tuple[str, float]:
        """What activations become: "chunk" or "token", and a static scale."""
        for leaf in ("input_scale", "input_zero_point"):
            if f"{place.name}.{leaf}" in self.tensors:
                leaves.append(leaf)
        dynamic = (
            acts is not None and acts.get("dynamic") is True and acts.get("strategy", "token") == "token"
        )
        if float8:
            if not dynamic or acts.get("num_bits") != 8:
                self._say(
                    "activations of FP8 weights are E4M3 with one scale a token, not as its scheme says"
                )
            return "token", 0.0
        if acts is None:
            return "chunk", 0.0
        plain = acts.get("num_bits") == 8 and acts.get("type", "int") == "int" and acts.get("symmetric", True)
        if plain and dynamic and group == -1 and zero is None:
            return "token", 0.0
        static = acts.get("strategy", "tensor") == "tensor" and not acts.get("dynamic")
        if plain and static and group == -1 and zero is None:
            scale = self.tensors.get(f"{place.name}.input_scale", FLOATS, (1,), ())
            if not torch.finfo(torch.float32).tiny <= float(scale) < float("inf"):
                raise CheckpointError(f"{place.name}.input_scale is {float(scale)}")
            return "token", float(scale.float())
        self._say("activations stay finer than its scheme says, which no layout has")
        return "chunk", 0.0

    def _say(self, message: str) -> None:
        if message not in self.warned:
            self.warned.add(message)
            log.warning("compressed-tensors: %s", message)


def _fits(target: str, name: str) -> bool:
    if not target.startswith("re:"):
        return target == name
    try:
        return re.match(target.removeprefix("re:"), name) is not None
    except re.error as error:
        raise CheckpointError(f"quantization_config: target {target!r}: {error}") from None
