"""Which grid a group of weights is rounded to: its extremes shrunken, and the best of the grids taken.

For every group and row, with h_j the mean square of input j over calibration (GPTQ's Hessian's diagonal):

    minimize over the grids    sum_j h_j (w_j - s (q_j - z))^2,    q_j = clamp(round(w_j / s) + z, 0, 2^b - 1)

Asymmetric: min and max are shrunken independently, STEPS x STEPS pairs. Symmetric: STEPS^2 / 2 shrunken
extremes, and as many with a negative scale, which puts the additional code of the negative end at the
positive one. The unshrunken grid is among them, so the weighted error is never more than round-to-nearest's.

Weighting is what makes it work: on the demo model's twin an unweighted search is worse than no search at all.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from hfaccel.quant.rounding import group_scale
from hfaccel.quant.rtn import nonzero
from hfaccel_kernels.layouts import Layout

STEPS = 12
_SMALLEST = 0.4  # of the extremes, at the last step
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
    best = scale = zero = None
    buffers = torch.empty_like(w), torch.empty_like(w)
    for s, z in _candidates(w, layout):
        error = _error(w, h, s, z, layout, *buffers)
        if best is None:
            best, scale, zero = error, s, z
            continue
        better = error < best
        best = torch.where(better, error, best)
        scale, zero = torch.where(better, s, scale), torch.where(better, z, zero)
    return scale, zero


def _candidates(w: Tensor, layout: Layout) -> Iterator[tuple[Tensor, Tensor]]:
    """(scales, zeros) [G, n] of unsigned codes; the first are round-to-nearest's own."""
    low, high = w.amin(1), w.amax(1)
    low_code, high_code = bounds(layout)
    if layout.symmetric:
        zero = torch.full_like(low, layout.zero)
        below, above = layout.zero - low_code, high_code - layout.zero
        yield group_scale(torch.maximum(-low, high), above, layout), zero
        both = [torch.maximum(-low / below, high / above)]
        if below != above:
            both.append(-torch.maximum(-low / above, high / below))
        for cover in both:
            for shrink in torch.linspace(1, _SMALLEST, STEPS**2 // 2).tolist():
                yield _held(cover * shrink, layout), zero
        return
    low, high = low.clamp_max_(0), high.clamp_min_(0)
    yield _asymmetric(low, high, group_scale(high - low, high_code, layout), high_code)
    for a in torch.linspace(1, _SMALLEST, STEPS).tolist():
        for b in torch.linspace(1, _SMALLEST, STEPS).tolist():
            shrunk = low * a, high * b
            yield _asymmetric(*shrunk, _held((shrunk[1] - shrunk[0]) / high_code, layout), high_code)


def _asymmetric(low: Tensor, high: Tensor, scale: Tensor, top: int) -> tuple[Tensor, Tensor]:
    return scale, torch.round(-low / nonzero(scale)).clamp_(0, top)


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


def round_to_grid(weight: Tensor, scale: Tensor, zero: Tensor | None, layout: Layout) -> Tensor:
    """Nearest codes uint8 [N, K] on a grid of scales and zeros [N, G]."""
    k = weight.shape[1]
    size = layout.group_len(k)
    step = divisor(scale).repeat_interleave(size, 1)[:, :k]
    shift = float(layout.zero) if zero is None else zero.float().repeat_interleave(size, 1)[:, :k]
    return (weight / step).round_().add_(shift).clamp_(*bounds(layout)).to(torch.uint8)
