"""One quantized matrix between formats: integer codes, scales, zero points, as every integer grid has them.

    w[n, k] = scale[n, g(k)] (code[n, k] - zero[n, g(k)])

with unsigned codes of `bits` bits, groups of consecutive columns, and the constant zero 2^(bits-1) where `zero`
is None. It is what a packed module of ours stores and what GPTQ, AWQ and compressed-tensors files store, in
other orders of bits: nothing is rounded on the way.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hfaccel.errors import PatchError
from hfaccel.quant.linear import QuantLinear, codes_of, describe
from hfaccel_kernels.layouts import (
    Layout,
    dequantize_codes,
    pack_codes,
    pack_rows,
    pack_scales,
    unpack_rows,
    unpack_scales,
)


@dataclass(frozen=True)
class Matrix:
    """A quantized `[N, K]`.

    Attributes:
        codes: uint8 [N, K].
        scale: float [N, G], G = ceil(K / group).
        zero: uint8 [N, G], or None for symmetric grids.
        bits: 2, 3, 4 or 8; group: input elements a scale, -1 for all of a row.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    bits: int
    group: int

    @staticmethod
    def of(module: QuantLinear) -> Matrix:
        """Of a packed linear. Raises: PatchError for codes that are no integers."""
        layout, n = module.layout, module.size[0]
        if layout.code != "int":
            raise PatchError(f"{describe(layout)}: its codes are no integers")
        zero = module.weight_zero
        return Matrix(
            codes_of(module),
            unpack_scales(module.weight_scale, layout, n),
            None if zero is None else unpack_rows(zero, n),
            layout.bits,
            layout.group,
        )

    @property
    def symmetric(self) -> bool:
        return self.zero is None

    def grid(self) -> str:
        """ "int4 g64 asymmetric", for messages."""
        return describe(Layout(self.bits, self.group, self.symmetric))

    def layout(self, act_bits: int = 8, act: str = "chunk", act_scale: float = 0.0) -> Layout:
        """The layout that holds it bit for bit."""
        scale = "fp16" if self.scale.dtype == torch.float16 else "fp32"
        return Layout(self.bits, self.group, self.symmetric, scale, act_bits, act=act, act_scale=act_scale)

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
