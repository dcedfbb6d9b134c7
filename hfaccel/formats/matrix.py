"""One quantized matrix between formats: codes, scales and zero points, as every such format has them.

    w[n, k] = scale[n, g(k)] (code[n, k] - zero[n, g(k)])

with unsigned codes of `bits` bits, groups of consecutive columns, and the constant zero 2^(bits-1) where
`zero` is None; or scale times an 8-bit float. It is what a packed module of ours stores, and what GPTQ, AWQ
and compressed-tensors files store, in other orders of bits: nothing is rounded on the way.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hfaccel.errors import PatchError
from hfaccel.quant.linear import QuantLinear, codes_of, describe
from hfaccel_kernels.layouts import Layout
from hfaccel_kernels.packing import (
    dequantize_codes,
    pack_codes,
    pack_rows,
    pack_scales,
    unpack_rows,
    unpack_scales,
)

CODES = ("int", "e4m3")


@dataclass(frozen=True)
class Matrix:
    """A quantized `[N, K]`.

    Attributes:
        codes: uint8 [N, K]; of "e4m3" the bits of the float.
        scale: float [N, G], G = ceil(K / group).
        zero: uint8 [N, G], or None for symmetric grids.
        bits: 2, 3, 4 or 8; group: input elements a scale, -1 for all of a row.
        code, act, act_scale: as `Layout` has them.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    bits: int
    group: int
    code: str = "int"
    act: str = "chunk"
    act_scale: float = 0.0

    @staticmethod
    def of(module: QuantLinear) -> Matrix:
        """Of a packed linear. Raises: PatchError for grids with minimums, and other codes."""
        layout, n = module.layout, module.size[0]
        if not held(layout):
            raise PatchError(f"{describe(layout)}: no matrix of integers or E4M3 with scales alone")
        zero = module.weight_zero
        return Matrix(
            codes_of(module),
            unpack_scales(module.weight_scale, layout, n),
            None if zero is None else unpack_rows(zero, n),
            layout.bits,
            layout.group,
            layout.code,
            layout.act,
            layout.act_scale,
        )

    def layout(self, act_bits: int = 8) -> Layout:
        """The layout that holds it bit for bit."""
        scale = "fp16" if self.scale.dtype == torch.float16 and self.act == "chunk" else "fp32"
        act_bits = 8 if self.act == "token" else act_bits
        return Layout(
            self.bits,
            self.group,
            self.zero is None,
            scale,
            act_bits,
            self.code,
            self.act,
            self.act_scale,
        )

    def packed(self, layout: Layout) -> dict[str, Tensor]:
        """The tensors of a module of that layout."""
        out = {"weight": pack_codes(self.codes, layout), "weight_scale": pack_scales(self.scale, layout)}
        if self.zero is not None:
            out["weight_zero"] = pack_rows(self.zero)
        return out

    def dequantize(self) -> Tensor:
        """fp32 [N, K]."""
        return dequantize_codes(self.codes, self.scale, self.zero, self.layout())

    def zeros(self) -> Tensor:
        """uint8 [N, G], the constant one spelled out."""
        if self.zero is not None:
            return self.zero
        return torch.full(self.scale.shape, 1 << (self.bits - 1), dtype=torch.uint8)


def held(layout: Layout) -> bool:
    """Whether a matrix of that layout is codes and scales alone."""
    return layout.code in CODES and not layout.has_minimum
