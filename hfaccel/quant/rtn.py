"""Round to nearest: the grid from each group's own extremes, no data needed.

Symmetric, b bits:   s = max|x| / (2^(b-1) - 1),  q = round(x / s)
    8 bits: codes -127..127; below: clamp to -2^(b-1) .. 2^(b-1) - 1.
Asymmetric, b bits:  lo = min(x, 0), hi = max(x, 0),  s = (hi - lo) / (2^b - 1),  z = round(-lo / s),
    q = clamp(round(x / s) + z, 0, 2^b - 1),  x ~ s (q - z);  z is an integer, so 0 is exact.

(Jacob et al. 2018, arXiv:1712.05877.) An fp16 scale is rounded up: the error stays within half a step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from hfaccel.errors import PatchError
from hfaccel.observers import Stats, Want
from hfaccel.quant.grid import searched
from hfaccel.quant.packing import Round
from hfaccel.quant.rounding import Options, Rounding, group_scale
from hfaccel.transform import Site
from hfaccel_kernels import codebook
from hfaccel_kernels.layouts import Layout
from hfaccel_kernels.packing import pack_scales, unpack_scales


@dataclass(frozen=True, kw_only=True)
class RTN(Rounding):
    """Round-to-nearest weights.

    Attributes:
        per_tensor: one scale for the whole matrix (symmetric, group -1), stored on every row.
        search: each group's grid by the search of `grid.py`, weighted by the inputs of calibration data.
    """

    name: ClassVar[str] = "int"
    steps: ClassVar[tuple[tuple[str, str], ...]] = (
        ("int8", "round to nearest, symmetric, one scale a row; -gN, -asym, -tensor"),
        ("int4", "round to nearest, asymmetric, groups of 64; -gN, -row, -sym, -search (with data)"),
        ("int3", "the same in 3 bits"),
        ("int2", "the same in 2 bits"),
    )

    per_tensor: bool = False
    search: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("per_tensor", "search"):
            if not isinstance(getattr(self, key), bool):
                raise PatchError(f"RTN: {key}={getattr(self, key)!r}; True or False")
        if self.per_tensor and (self.group != -1 or not self.symmetric):
            raise PatchError("RTN: per_tensor goes with symmetric codes and no group")
        if self.per_tensor and self.search:
            raise PatchError("RTN: search is by group, per_tensor has none")

    @classmethod
    def parse(cls, rest: str, options: list[str]) -> RTN:
        mine: Options = {"tensor": ("per_tensor", True), "search": ("search", True)}
        values = cls.parse_bits(rest, options, mine)
        return cls(**({"group": -1, "symmetric": True} if "per_tensor" in values else {}) | values)

    def step(self) -> str:
        if self.per_tensor:
            return replace(self, per_tensor=False, group=None, symmetric=None).step_bits() + "-tensor"
        return self.step_bits() + "-search" * self.search

    def observer(self, site: Site) -> Want | None:
        return Want(channels=True) if self.search and not isinstance(site.module, nn.Embedding) else None

    def rounder(self, matrix: Tensor, stats: Stats | None) -> Round:
        if self.search and stats is not None and stats.tokens:
            return searched(stats.diagonal())
        if not self.per_tensor:
            return round_to_nearest
        return one_scale(matrix)


def one_scale(matrix: Tensor) -> Round:
    """Rounds rows of a matrix to nearest, all of them with the scale of its own largest value."""
    low, high = matrix.aminmax()
    peak = torch.maximum(-low, high).float()
    return lambda rows, layout: round_to_peak(rows, layout, peak.expand(rows.shape[0], 1))


def round_to_nearest(weight: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes uint8 [N, K], scales fp32 [N, G], zeros uint8 [N, G] or None of a float [N, K] weight."""
    groups = grouped(weight, layout)
    low, high = groups.amin(-1), groups.amax(-1)
    if layout.symmetric:
        return round_to_peak(weight, layout, torch.maximum(-low, high))
    top = (1 << layout.bits) - 1
    low, high = low.clamp_max_(0), high.clamp_min_(0)
    scale = group_scale(high - low, top, layout)
    step = nonzero(scale)
    zero = torch.round(-low / step).clamp_(0, top)
    codes = (groups / step[..., None]).round_().add_(zero[..., None]).clamp_(0, top)
    return ungrouped(codes.to(torch.uint8), weight.shape[1]), scale, zero.to(torch.uint8)


def round_to_peak(weight: Tensor, layout: Layout, peak: Tensor) -> tuple[Tensor, Tensor, None]:
    """Symmetric codes for given peaks [N, G]."""
    if layout.code != "int":
        return _round_to_codebook(weight, layout, peak)
    top = (1 << (layout.bits - 1)) - 1
    scale = group_scale(peak, max(top, 1), layout)
    codes = (grouped(weight, layout) / nonzero(scale)[..., None]).round_()
    codes.clamp_(-top if layout.bits == 8 else -top - 1, top).add_(layout.zero)
    return ungrouped(codes.to(torch.uint8), weight.shape[1]), scale, None


def _round_to_codebook(weight: Tensor, layout: Layout, peak: Tensor) -> tuple[Tensor, Tensor, None]:
    """Codes that stand for the nearest multiples of the scale as it will be stored."""
    scale = group_scale(peak, codebook.TOP[layout.code], layout)
    held = unpack_scales(pack_scales(scale, layout), layout, len(scale))
    codes = codebook.nearest(grouped(weight, layout) / nonzero(held)[..., None], layout.code)
    return ungrouped(codes, weight.shape[1]), scale, None


def nonzero(scale: Tensor) -> Tensor:
    """The scale to divide by: 1 where it is 0 (an all-zero group, whose codes are all zero too)."""
    return torch.where(scale > 0, scale, 1.0)


def grouped(weight: Tensor, layout: Layout) -> Tensor:
    """[N, K] -> [N, G, group], a short last group filled up with zeros, which no grid minds."""
    n, k = weight.shape
    size, groups = layout.group_len(k), layout.groups(k)
    if size * groups != k:
        weight = torch.nn.functional.pad(weight, (0, size * groups - k))
    return weight.view(n, groups, size)


def ungrouped(codes: Tensor, k: int) -> Tensor:
    """The inverse of `grouped`."""
    return codes.view(codes.shape[0], -1)[:, :k]
