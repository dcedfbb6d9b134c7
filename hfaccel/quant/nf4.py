"""NF4: sixteen levels at the quantiles of a normal distribution, no data needed.

    s = max|w| of a group of 64,   code = the level nearest to w / s

(Dettmers et al. 2023, QLoRA, arXiv:2305.14314.) The scales are 8-bit numbers themselves, double quantization,
in tiles of at most 256 (`hfaccel_kernels.double_scales`): 4.13 bits a weight. Codes are chosen beside the
scales as they are stored. Levels are the paper's in steps of 1/127 (`hfaccel_kernels.codebook`), so that
products run in integers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from hfaccel.errors import PatchError
from hfaccel.observers import Stats
from hfaccel.quant.packing import Round
from hfaccel.quant.rounding import GROUPS, Rounding
from hfaccel.quant.rtn import round_to_nearest
from hfaccel.transform import Site
from hfaccel_kernels.layouts import Layout


@dataclass(frozen=True, kw_only=True)
class NF4(Rounding):
    """Rounding to the levels of NF4, double-quantized scales.

    Attributes:
        group: input elements that share a scale, -1 for a whole row; default 64.
    Raises: PatchError for other bits than 4, or zero points.
    """

    name: ClassVar[str] = "nf4"
    steps: ClassVar[tuple[tuple[str, str], ...]] = (
        ("nf4", "normal-float levels in 4 bits, groups of 64, double-quantized scales, no data; -gN, -row"),
    )

    bits: int = 4

    def __post_init__(self) -> None:
        if self.symmetric is None:
            self._set("symmetric", True)
        super().__post_init__()
        if self.bits != 4 or not self.symmetric:
            raise PatchError(
                f"NF4: bits={self.bits}, symmetric={self.symmetric}; it has 4 and no zero points"
            )

    @classmethod
    def parse(cls, rest: str, options: list[str]) -> NF4:
        return cls(**cls.parse_alone(rest, options, GROUPS))

    def step(self) -> str:
        return "nf4" + {64: "", -1: "-row"}.get(self.group, f"-g{self.group}")

    def layout(self, site: Site) -> Layout:
        return replace(super().layout(site), code="nf4", scale_dtype="double")

    def rounder(self, matrix: Tensor, stats: Stats | None) -> Round:
        return round_to_nearest
