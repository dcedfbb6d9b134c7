"""FP8: weights and activations as 8-bit floats, no data needed.

    w ~ s q,   s = max|w| of a row (or of the matrix) / top,   q = float8(w / s)

top is 448 for E4M3, 57344 for E5M2 (Micikevicius et al. 2022, arXiv:2209.05433); rounding is half to even.
Activations are E4M3 beside either, per token, scale max|x| / 448 found on the way: on every device, so that a
model says the same wherever it runs. CPUs have no such products: there both factors are widened, which is
exact, and multiplied in fp32, and so the rounding of activations is a loss without a gain. It is kept because
the other way perplexity would depend on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from hfaccel.errors import PatchError
from hfaccel.observers import Stats
from hfaccel.quant.packing import Round
from hfaccel.quant.rounding import Rounding
from hfaccel.quant.rtn import one_scale, round_to_nearest
from hfaccel.transform import Site
from hfaccel_kernels.codebook import FLOAT8
from hfaccel_kernels.layouts import Layout


@dataclass(frozen=True, kw_only=True)
class FP8(Rounding):
    """Rounding to 8-bit floats.

    Attributes:
        format: "e4m3" or "e5m2", of the weights.
        per_tensor: one scale for the whole matrix, stored on every row.
    Raises: PatchError for other bits than 8, groups or zero points.
    """

    name: ClassVar[str] = "fp8"
    steps: ClassVar[tuple[tuple[str, str], ...]] = (
        ("fp8", "8-bit floats (E4M3), one scale a row, E4M3 activations per token, no data; -e5m2, -tensor"),
    )

    format: str = "e4m3"
    per_tensor: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.bits, self.group, self.symmetric) != (8, -1, True):
            raise PatchError("FP8: it has 8 bits, one scale a row and no zero points")
        if self.format not in FLOAT8:
            raise PatchError(f"FP8: format={self.format!r}; known are {', '.join(FLOAT8)}")
        if not isinstance(self.per_tensor, bool):
            raise PatchError(f"FP8: per_tensor={self.per_tensor!r}; True or False")

    @classmethod
    def parse(cls, rest: str, options: list[str]) -> FP8:
        known = {"e5m2": ("format", "e5m2"), "tensor": ("per_tensor", True)}
        return cls(**cls.parse_alone(rest, options, known))

    def step(self) -> str:
        return "fp8" + "-e5m2" * (self.format == "e5m2") + "-tensor" * self.per_tensor

    def layout(self, site: Site) -> Layout:
        return Layout(8, code=self.format, act="token")

    def rounder(self, matrix: Tensor, stats: Stats | None) -> Round:
        return one_scale(matrix) if self.per_tensor else round_to_nearest
