"""Half-quadratic rounding: the grid that leaves the smallest robust error of the weights, without data.

For every group, x = w / s in steps, q = clamp(round(x + z), 0, 2^b - 1):

    minimize over s, z    sum_j |sqrt(h_j) (w_j - s (q_j - z))|^p,    p < 1

which forgives a few large errors for many small ones. For a given s it is solved by half-quadratic splitting
(Badri and Shaji 2023): an auxiliary e that takes the large errors, and a rising penalty b on the rest,

    e_j = sign(d_j) max(0, |d_j| - |d_j|^(p-1) / b),    d_j = x_j - (q_j - z)
    z   = sum_j h_j (q_j - x_j + e_j) / sum_j h_j

in fp32. Zero points are integers here, so both neighbours of z are tried, for every s of a line of shrunken
ranges, and of all grids the one of the smallest sum is taken. Round-to-nearest's is the first of them.
Symmetric grids have no z to solve for: the line alone is searched, with a negative scale too.

Only grids that reach every weight within half a step are taken. With an integer zero a grid cannot shift by
part of a step, so what p < 1 would buy with the errors that it forgives is a finer step for cut-off extremes:
on the demo model's twin ranges shrunken by up to a quarter raised perplexity from 27.3 to 34.9.

No data, but not no knowledge: a norm's output is its gain times something normalized. So h_j = gain_j^2 +
bias_j^2 where a norm feeds the matrix, 1 elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hfaccel import compat
from hfaccel.anatomy import Anatomy
from hfaccel.journal import Journal
from hfaccel.observers import SiteStats, Stats
from hfaccel.quant.grid import bounds, divisor, round_to_grid
from hfaccel.quant.packing import Round
from hfaccel.quant.rounding import Rounding, group_scale
from hfaccel.quant.rtn import grouped
from hfaccel.transform import Fold, Site
from hfaccel_kernels.layouts import Layout

P = 0.5
_STEPS = 7  # scales tried, from the whole range down to the least that still reaches it
_ROUNDS = 3  # of the splitting
_PENALTY, _RISE = 8.0, 1.3
_CHUNK_ELEMENTS = 1 << 18


@dataclass(frozen=True, kw_only=True)
class HQQ(Rounding):
    """Half-quadratic rounding without calibration.

    Attributes:
        bits: 2, 3, 4 (the default here) or 8.
    """

    name: ClassVar[str] = "hqq"
    steps: ClassVar[tuple[tuple[str, str], ...]] = (
        ("hqq4", "half-quadratic grids without calibration, INT4, asymmetric, groups of 64; -gN, -row, -sym"),
        ("hqq3", "the same in 3 bits"),
        ("hqq2", "the same in 2 bits"),
        ("hqq8", "the same in 8 bits, symmetric, one scale a row"),
    )

    bits: int = 4

    @classmethod
    def parse(cls, rest: str, options: list[str]) -> HQQ:
        return cls(**cls.parse_bits(rest, options))

    def step(self) -> str:
        return self.step_bits()

    def smooth(
        self, model: nn.Module, anatomy: Anatomy, sites: list[Site], stats: SiteStats, journal: Journal
    ) -> dict[str, Fold]:
        """Nothing moves: what norms say of the inputs that they make."""
        norms = {name for block in anatomy.blocks for name in block.norms.values()}
        one_plus = anatomy.facts is not None and anatomy.facts.norm == "rms1p"
        known: dict[str, Fold] = {}
        out: dict[str, Fold] = {}
        for site in sites:
            if site.feeder not in norms:
                continue
            if site.feeder not in known:
                norm = model.get_submodule(site.feeder)
                with compat.materialized(norm):
                    known[site.feeder] = Fold(stats=Stats(0, square_mean=expected_square(norm, one_plus)))
            out[site.name] = known[site.feeder]
        return out

    def rounder(self, matrix: Tensor, stats: Stats | None) -> Round:
        importance = None if stats is None else stats.square_mean

        def rounding(weight: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor | None]:
            scale, zero = half_quadratic(weight, layout, importance)
            return round_to_grid(weight, scale, zero, layout), scale, zero

        return rounding


def expected_square(norm: nn.Module, one_plus: bool) -> Tensor:
    """Mean square of each output of a norm over inputs of no preference, fp32 [K]."""
    square = (norm.weight.detach().float() + float(one_plus)).square()
    bias = getattr(norm, "bias", None)
    return square if bias is None else square + bias.detach().float().square()


def half_quadratic(
    weight: Tensor, layout: Layout, importance: Tensor | None = None, p: float = P
) -> tuple[Tensor, Tensor | None]:
    """The grid of every group.

    Args:
        weight: fp32 [N, K]; importance: [K], not negative, or None for all the same.
    Returns: scales fp32 [N, G] that the layout's dtype can hold, and zeros uint8 [N, G] or None.
    """
    k = weight.shape[1]
    size, groups = layout.group_len(k), layout.groups(k)
    h = torch.ones(k, device=weight.device) if importance is None else importance.float()
    # What the norm shuts out still has to round to something near itself.
    h = h / h.mean().clamp_min(torch.finfo(torch.float32).tiny) + 1e-4
    h = F.pad(h, (0, size * groups - k)).view(groups, size)
    rows = max(16, _CHUNK_ELEMENTS // max(k, 1))
    parts = [_solve(grouped(part, layout), h, layout, p) for part in weight.float().split(rows)]
    scale = torch.cat([scale for scale, _ in parts])
    return scale, None if layout.symmetric else torch.cat([zero for _, zero in parts]).to(torch.uint8)


def robust_error(w: Tensor, h: Tensor, scale: Tensor, zero: Tensor, layout: Layout, p: float = P) -> Tensor:
    """The sum above [N, G] of w [N, G, size] with h [G, size], on grids [N, G]."""
    step, shift = divisor(scale)[..., None], zero[..., None]
    x = w / step
    code = torch.round(x).add_(shift).clamp_(*bounds(layout))
    wrong = code.sub_(shift).sub_(x).mul_(step).abs_()
    return wrong.mul_(h.sqrt()).pow_(p).sum(-1)


def _solve(w: Tensor, h: Tensor, layout: Layout, p: float) -> tuple[Tensor, Tensor]:
    """w [N, G, size], h [G, size] -> scales and zeros [N, G]."""
    low, high = w.amin(-1).clamp_max_(0), w.amax(-1).clamp_min_(0)
    bottom, top = bounds(layout)
    line = torch.linspace(1, top / (top + 1), _STEPS).tolist()
    if layout.symmetric:
        above, below = top - layout.zero, layout.zero - bottom
        zero = torch.full_like(low, layout.zero)
        peak = torch.maximum(-low, high)
        scale = group_scale(peak, max(above, 1), layout)
        best = robust_error(w, h, scale, zero, layout, p)
        covers = [torch.maximum(-low / below, high / max(above, 1))]
        if below != above:
            covers.append(-torch.maximum(-low / max(above, 1), high / below))
        grids = ((_held(cover * shrink, layout), zero) for cover in covers for shrink in line)
    else:
        scale = group_scale(high - low, top, layout)
        zero = torch.round(-low / divisor(scale)).clamp_(0, top)
        best = robust_error(w, h, scale, zero, layout, p)
        grids = _asymmetric(w, h, low, high, line, layout, p)
    for s, z in grids:
        error = robust_error(w, h, s, z, layout, p)
        ends = s * (bottom - 0.5 - z), s * (top + 0.5 - z)
        reaches = (torch.minimum(*ends) <= low) & (torch.maximum(*ends) >= high)
        better = (error < best) & reaches
        best = torch.where(better, error, best)
        scale, zero = torch.where(better, s, scale), torch.where(better, z, zero)
    return scale, zero


def _asymmetric(w: Tensor, h: Tensor, low: Tensor, high: Tensor, line: list[float], layout: Layout, p: float):
    """Grids [N, G]: for every scale the integers around the zero that the splitting finds."""
    _, top = bounds(layout)
    weight = h / h.sum(-1, keepdim=True)
    for shrink in line:
        scale = _held((high - low) * (shrink / top), layout)
        x = w / divisor(scale)[..., None]
        zero = top / 2 - (low + high) / 2 / divisor(scale)
        penalty = _PENALTY
        for _ in range(_ROUNDS):
            miss = torch.round(x + zero[..., None]).clamp_(0, top).sub_(x)  # q - x
            d = zero[..., None] - miss
            size = d.abs()
            kept = size.clamp_min(1e-6).pow_(p - 1).div_(-penalty).add_(size).clamp_min_(0).copysign_(d)
            zero = miss.add_(kept).mul_(weight).sum(-1)
            penalty *= _RISE
        zero = zero.clamp_(0, top)
        yield scale, zero.floor()
        yield scale, zero.ceil()


def _held(scale: Tensor, layout: Layout) -> Tensor:
    """The nearest scale that the layout's dtype holds; one that vanishes there becomes its smallest."""
    smallest = 2.0**-24 if layout.dtype is torch.float16 else torch.finfo(torch.float32).tiny
    held = scale.to(layout.dtype).float()
    return torch.where((held.abs() < smallest) & (scale != 0), torch.sign(scale) * smallest, held)
