"""AWQ folders read: see `awq.py` for what is in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hfaccel.errors import CheckpointError
from hfaccel.formats import words
from hfaccel.formats.awq import BITS, ORDER
from hfaccel.formats.matrix import Matrix
from hfaccel.formats.reading import FLOATS, Place, Source, Tensors

_INT = (torch.int32,)


class Reader:
    """Reads the linears of one folder. Raises: CheckpointError naming the key of the config."""

    def __init__(self, record: Mapping[str, Any], tensors: Tensors) -> None:
        self.tensors = tensors
        bits = record.get("bits", record.get("w_bit"))
        group = record.get("group_size", record.get("q_group_size"))
        version = str(record.get("version", "gemm")).lower()
        if bits != BITS:
            raise CheckpointError(f"quantization_config: bits {bits!r}; awq has {BITS}")
        if type(group) is not int or (group != -1 and group < 1):
            raise CheckpointError(f"quantization_config: group_size {group!r}; a positive number, or -1")
        if version != "gemm":
            raise CheckpointError(f"quantization_config: version {version!r}; known is gemm")
        if record.get("zero_point", True) is not True:
            raise CheckpointError(f"quantization_config: zero_point {record['zero_point']!r}; known is true")
        self.group = group

    def quantized(self) -> list[str]:
        return [name.removesuffix(".qweight") for name in self.tensors.names if name.endswith(".qweight")]

    def source(self, place: Place) -> Source:
        name, (n, k) = place.name, place.size
        size = k if self.group == -1 else self.group
        if k % size:
            raise CheckpointError(f"{name} has rows of {k}, which groups of {size} do not divide")
        groups, columns = k // size, -(-n // 8)
        self.tensors.check(f"{name}.qweight", _INT, (k, columns))
        self.tensors.check(f"{name}.scales", FLOATS, (groups, n))
        zeros = words.unpack(self.tensors.get(f"{name}.qzeros", _INT, (groups, columns)), BITS, n, ORDER)
        zeros = zeros.t().contiguous()
        zeros = None if bool((zeros == 1 << (BITS - 1)).all()) else zeros

        def matrix() -> Matrix:
            packed = self.tensors.get(f"{name}.qweight", _INT, (k, columns))
            codes = words.unpack(packed, BITS, n, ORDER).t().contiguous()
            self.tensors.let_go(f"{name}.qweight", packed)
            scale = self.tensors.get(f"{name}.scales", FLOATS, (groups, n)).t().contiguous()
            return Matrix(codes, scale, zeros, BITS, self.group)

        kind = self.tensors.dtype(f"{name}.scales")
        empty = Matrix(torch.empty(0, k), torch.empty(0, groups, dtype=kind), zeros, BITS, self.group)
        leaves = ("qweight", "qzeros", "scales")
        return Source(name, (n, k), leaves, matrix, empty.layout(place.act_bits))
