"""GPTQ folders read: see `gptq.py` for what is in them.

Where `g_idx` gives consecutive groups, as it does without desc_act and with desc_act and static groups, the
matrix is taken over bit for bit. Columns in another order have no layout: such linears are dequantized.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hfaccel.errors import CheckpointError
from hfaccel.formats import words
from hfaccel.formats.gptq import BITS, FORMATS
from hfaccel.formats.matrix import Matrix
from hfaccel.formats.reading import FLOATS, Place, Source, Tensors

_INT = (torch.int32,)
# A word of ones: v1 files are written by subtracting it from words, and borrows pass from value to value.
_ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}


class Reader:
    """Reads the linears of one folder. Raises: CheckpointError naming the key of the config."""

    def __init__(self, record: Mapping[str, Any], tensors: Tensors) -> None:
        self.record, self.tensors = record, tensors
        self.format = record.get("checkpoint_format") or "gptq"
        if self.format not in FORMATS.values():
            raise CheckpointError(
                f"quantization_config: checkpoint_format {self.format!r}; known are "
                f"{', '.join(FORMATS.values())}"
            )
        if record.get("pack_dtype") not in (None, "int32"):
            raise CheckpointError(f"quantization_config: pack_dtype {record['pack_dtype']!r}; known is int32")
        self.dynamic = record.get("dynamic") or {}
        if not isinstance(self.dynamic, dict):
            raise CheckpointError(f"quantization_config: dynamic {self.dynamic!r} is not a mapping")
        self._grid(record, "quantization_config")

    def quantized(self) -> list[str]:
        return [name.removesuffix(".qweight") for name in self.tensors.names if name.endswith(".qweight")]

    def source(self, place: Place) -> Source:
        name, (n, k) = place.name, place.size
        bits, group, ordered = self._grid(self._values(name), name)
        per, each = words.period(bits)
        size = k if group == -1 else group
        groups = -(-k // size)
        self.tensors.check(f"{name}.qweight", _INT, (-(-k // per) * each, n))
        self._check_groups(f"{name}.scales", groups, group)
        self.tensors.check(f"{name}.scales", FLOATS, (groups, n))
        zeros = self._zeros(name, bits, groups, n)
        leaves = ["qweight", "qzeros", "scales"]
        index = None
        if f"{name}.g_idx" in self.tensors:
            leaves.append("g_idx")
            index = self._index(f"{name}.g_idx", k, size, groups, ordered)

        def matrix() -> Matrix:
            packed = self.tensors.get(f"{name}.qweight", _INT, (-(-k // per) * each, n))
            codes = words.unpack(packed.t(), bits, k)
            self.tensors.let_go(f"{name}.qweight", packed)
            scale = self.tensors.get(f"{name}.scales", FLOATS, (groups, n)).t().contiguous()
            return Matrix(codes, scale, zeros, bits, group)

        def dense() -> Tensor:
            whole = matrix()
            scale, zero = (side[:, index].float() for side in (whole.scale, whole.zeros()))
            return (whole.codes.float() - zero) * scale

        kind = self.tensors.dtype(f"{name}.scales")
        empty = Matrix(torch.empty(0, k), torch.empty(0, groups, dtype=kind), zeros, bits, group)
        layout = None if index is not None else empty.layout(16 if bits in (2, 8) else place.act_bits)
        return Source(name, (n, k), tuple(leaves), matrix, layout, None if index is None else dense)

    # The pieces -------------------------------------------------------------------------------------------

    def _values(self, name: str) -> dict[str, Any]:
        """The general values, and what "dynamic" changes for a linear: the first pattern that fits counts."""
        for pattern, values in self.dynamic.items():
            negative = pattern.startswith("-:")
            try:
                fits = re.match(pattern.removeprefix("-:").removeprefix("+:"), name)
            except re.error as error:
                raise CheckpointError(f"quantization_config: dynamic {pattern!r}: {error}") from None
            if fits and negative:
                raise CheckpointError(f"{name} is quantized, and dynamic {pattern!r} says that it is not")
            if fits:
                return {**self.record, **(values or {})}
        return dict(self.record)

    def _grid(self, values: Mapping[str, Any], where: str) -> tuple[int, int, bool]:
        bits, group = values.get("bits"), values.get("group_size", -1)
        ordered = values.get("desc_act", False)
        if type(bits) is not int or bits not in BITS:
            raise CheckpointError(f"{where}: bits {bits!r}; known are {', '.join(map(str, BITS))}")
        if type(group) is not int or (group != -1 and group < 1):
            raise CheckpointError(f"{where}: group_size {group!r}; a positive number, or -1")
        if not isinstance(ordered, bool):
            raise CheckpointError(f"{where}: desc_act {ordered!r}; true or false")
        return bits, group, ordered

    def _check_groups(self, name: str, groups: int, group: int) -> None:
        if name in self.tensors and (shape := self.tensors.shape(name))[:1] != (groups,):
            raise CheckpointError(
                f"{name} is {list(shape)}: groups of {group} make {groups} scales, the group sizes disagree"
            )

    def _zeros(self, name: str, bits: int, groups: int, n: int) -> Tensor | None:
        """uint8 [N, G], None where all are the constant of a symmetric grid."""
        key = f"{name}.qzeros"
        per, each = words.period(bits)
        packed = self.tensors.get(key, _INT, (groups, -(-n // per) * each))
        if self.format == "gptq" and bits in _ONES:
            packed = (packed.to(torch.int64) + _ONES[bits]).to(torch.int32)  # the low 32 bits
        zeros = words.unpack(packed, bits, n)
        if self.format == "gptq" and bits not in _ONES:
            if int(zeros.max()) == (1 << bits) - 1:
                raise CheckpointError(f"{key}: a stored {int(zeros.max())} stands for two zero points in v1")
            zeros = zeros + 1
        zeros = zeros.t().contiguous()
        return None if bool((zeros == 1 << (bits - 1)).all()) else zeros

    def _index(self, key: str, k: int, size: int, groups: int, ordered: bool) -> Tensor | None:
        """The group of each column, int64 [K]; None where groups are consecutive."""
        index = self.tensors.get(key, (torch.int32, torch.int64), (k,)).long()
        if k and (int(index.min()) < 0 or int(index.max()) >= groups):
            bad = index[(index < 0) | (index >= groups)][0]
            raise CheckpointError(f"{key} has group {int(bad)}; the scales have groups 0 to {groups - 1}")
        if torch.equal(index, torch.arange(k) // size):
            return None
        if not ordered:
            raise CheckpointError(f"{key} puts columns in another order, and desc_act is false")
        counts = torch.bincount(index, minlength=groups)
        if int(counts.max()) > size:
            at = int(counts.argmax())
            raise CheckpointError(f"{key} has {int(counts[at])} columns in group {at}, group_size is {size}")
        return index
