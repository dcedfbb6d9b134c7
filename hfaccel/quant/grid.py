"""Which grid a group of weights is rounded to: its extremes shrunken, and the best of the grids taken.

For every group and row, with h_j the mean square of input j over calibration (GPTQ's Hessian's diagonal):

    minimize over the grids    sum_j h_j (w_j - s (q_j - z))^2,    q_j = clamp(round(w_j / s) + z, 0, 2^b - 1)

Asymmetric: min and max are shrunken independently, STEPS x STEPS pairs, then around the best pair of each
group by half a step and by a quarter. Symmetric: the same along one axis, and with a negative scale too,
which puts the additional code of the negative end at the positive one. Round-to-nearest's grid is the first
tried, so the weighted error is never more than its own.

Weighting is what makes it work: on the demo model's twin an unweighted search is worse than no search at all.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from hfaccel.quant.packing import Round
from hfaccel.quant.rounding import group_scale
from hfaccel_kernels.layouts import Layout

STEPS = 7
_SMALLEST = 0.3  # of the extremes, at the last step
_HALVINGS = 2  # of a step, around the best
_CHUNK_ELEMENTS = 1 << 18  # searched at a time: three buffers of them stay in cache


def search_grid(weight: Tensor, importance: Tensor, layout: Layout) -> tuple[Tensor, Tensor | None]:
    """The best grid of every group.

    Args:
        weight: fp32 [N, K]; importance: [K], not negative.
    Returns: scales fp32 [N, G] that the layout's dtype can hold, and zeros uint8 [N, G] or None.
    """
    n, k = weight.shape
    size, groups = layout.group_len(k), layout.groups(k)
    pad = size * groups - k
    h = F.pad(importance.float(), (0, pad)).view(groups, 1, size)
    # What no input ever reaches still has to round to something near itself, should one come.
    h = h + 1e-4 * h.mean() + torch.finfo(torch.float32).tiny
    rows = max(16, _CHUNK_ELEMENTS // max(k, 1))
    parts = [
        _search(F.pad(part, (0, pad)).view(-1, groups, size).permute(1, 2, 0).contiguous(), h, layout)
        for part in weight.float().split(rows)
    ]
    scale = torch.cat([scale for scale, _ in parts], 1).t().contiguous()
    if layout.symmetric:
        return scale, None
    return scale, torch.cat([zero for _, zero in parts], 1).t().to(torch.uint8).contiguous()


def _search(w: Tensor, h: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """w [G, size, n], h [G, 1, size] -> scales and zeros [G, n]."""
    low, high = w.amin(1), w.amax(1)
    buffers = torch.empty_like(w), torch.empty_like(w)
    best = _Best(lambda scale, zero: _error(w, h, scale, zero, layout, *buffers))
    bottom, top = bounds(layout)
    if not layout.symmetric:
        low, high = low.clamp_max_(0), high.clamp_min_(0)
        best.offer(*_asymmetric(low, group_scale(high - low, top, layout), top))

        def pair(a: Tensor | float, b: Tensor | float) -> tuple[Tensor, Tensor]:
            return _asymmetric(low * a, _held((high * b - low * a) / top, layout), top)

        best.look(pair, 2, STEPS)
        return best.scale, best.zero
    zero = torch.full_like(low, layout.zero)
    below, above = layout.zero - bottom, top - layout.zero
    best.offer(group_scale(torch.maximum(-low, high), above, layout), zero)
    covers = [torch.maximum(-low / below, high / above)]
    if below != above:
        covers.append(-torch.maximum(-low / above, high / below))
    for cover in covers:
        best.look(lambda a, cover=cover: (_held(cover * a, layout), zero), 1, 3 * STEPS)
    return best.scale, best.zero


class _Best:
    """The best grid [G, n] of those offered."""

    def __init__(self, error: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.error_of = error
        self.error = self.scale = self.zero = None

    def offer(self, scale: Tensor, zero: Tensor) -> Tensor:
        """Where [G, n] it is better than all before."""
        error = self.error_of(scale, zero)
        if self.error is None:
            self.error, self.scale, self.zero = error, scale, zero
            return torch.ones_like(error, dtype=torch.bool)
        better = error < self.error
        self.error = torch.where(better, error, self.error)
        self.scale, self.zero = torch.where(better, scale, self.scale), torch.where(better, zero, self.zero)
        return better

    def look(self, grid: Callable[..., tuple[Tensor, Tensor]], axes: int, steps: int) -> None:
        """Offer `grid` at shrunken extremes: on a lattice, then around the best point of it."""
        line = torch.linspace(1, _SMALLEST, steps)
        at = [torch.ones_like(self.scale) for _ in range(axes)]

        def offer(*point: Tensor | float) -> None:
            better = self.offer(*grid(*point))
            at[:] = [torch.where(better, p, a) for a, p in zip(at, point, strict=True)]

        for point in product(line.tolist(), repeat=axes):
            offer(*point)
        step = float(line[0] - line[1])
        for _ in range(_HALVINGS):
            step /= 2
            center = tuple(at)
            for sides in product((-1, 0, 1), repeat=axes):
                if any(sides):
                    offer(*(c + step * d for c, d in zip(center, sides, strict=True)))


def _asymmetric(low: Tensor, scale: Tensor, top: int) -> tuple[Tensor, Tensor]:
    return scale, torch.round(-low / divisor(scale)).clamp_(0, top)


def _held(scale: Tensor, layout: Layout) -> Tensor:
    """The nearest scale that the layout's dtype holds; one that vanishes there becomes its smallest."""
    held = scale.to(layout.dtype).float()
    smallest = 2.0**-24 if layout.dtype is torch.float16 else torch.finfo(torch.float32).tiny
    return torch.where((held.abs() < smallest) & (scale != 0), torch.sign(scale) * smallest, held)


def _error(w: Tensor, h: Tensor, scale: Tensor, zero: Tensor, layout: Layout, x: Tensor, q: Tensor) -> Tensor:
    """The weighted error [G, n]; x and q are scratch like w."""
    step = divisor(scale)
    torch.mul(w, step.reciprocal()[:, None], out=x)
    x.add_(zero[:, None])
    torch.round(x, out=q)
    q.clamp_(*bounds(layout)).sub_(x).square_()
    return torch.bmm(h, q)[:, 0] * step.square()


def bounds(layout: Layout) -> tuple[int, int]:
    """The lowest and highest unsigned code: symmetric 8 bits leave -128 out."""
    return int(layout.bits == 8 and layout.symmetric), (1 << layout.bits) - 1


def divisor(scale: Tensor) -> Tensor:
    """The scale to divide by: 1 where it is 0, as of an all-zero group."""
    return torch.where(scale == 0, 1.0, scale)


def searched(importance: Tensor) -> Round:
    """Rounding to the nearest code of the searched grid."""

    def rounding(weight: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor | None]:
        scale, zero = search_grid(weight, importance, layout)
        return round_to_grid(weight, scale, zero, layout), scale, zero

    return rounding


def round_to_grid(weight: Tensor, scale: Tensor, zero: Tensor | None, layout: Layout) -> Tensor:
    """Nearest codes uint8 [N, K] on a grid of scales and zeros [N, G]."""
    k = weight.shape[1]
    size = layout.group_len(k)
    step = divisor(scale).repeat_interleave(size, 1)[:, :k]
    shift = float(layout.zero) if zero is None else zero.float().repeat_interleave(size, 1)[:, :k]
    return (weight / step).round_().add_(shift).clamp_(*bounds(layout)).to(torch.uint8)
