"""GPTQ: weights rounded one input column at a time, each error made up for by the columns still to come.

With H = mean of x x^T over calibration and U the upper Cholesky factor of its inverse, H^-1 = U^T U, columns
in order j = 0, 1, ...:

    q_j = round(w_j)        e = (w_j - q_j) / U_jj        w_i -= e U_ji   for all i > j

(Frantar et al. 2022, arXiv:2210.17323.) The grid is chosen before (`grid.py`: extremes shrunken, weighted by
H's diagonal) from the untouched weights, so columns may go in any order: by default those with the largest
inputs first. Nothing of that order remains: the result is an ordinary packed weight.

U comes from one Cholesky factorization of H with its axes reversed and one triangular inverse, not from H^-1.
A damping of `damp` x mean(diagonal) is added; where the factorization still fails, ten times as much, up to
the mean itself. Inputs that are always zero get the mean on the diagonal and so are rounded to nearest.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from hfaccel.errors import PatchError
from hfaccel.observers import Stats, Want
from hfaccel.quant.awq import best_scale, fold_scales
from hfaccel.quant.grid import bounds, divisor, search_grid
from hfaccel.quant.packing import Round
from hfaccel.quant.rounding import Options, Rounding
from hfaccel.quant.rtn import round_to_nearest
from hfaccel.quant.tune import Tuning, check_tunable, tune
from hfaccel.transform import Fold, Site
from hfaccel_kernels.layouts import Layout

log = logging.getLogger("hfaccel")

_BLOCK = 64  # columns whose errors are held back and applied to the later ones as one product


@dataclass(frozen=True, kw_only=True)
class GPTQ(Rounding):
    """Calibrated rounding with error compensation.

    Attributes:
        bits: 2, 3, 4 (the default here) or 8.
        order: columns by the size of their inputs, largest first; False: as they come.
        damp: share of the mean diagonal added to the Hessian.
        search: the weighted search for the grid; False: each group's own extremes.
        awq: before, scale input channels as AWQ does (`awq.py`).
        tuned: afterwards train scales and norms towards the original, codes fixed (`tune.py`).
    """

    name: ClassVar[str] = "gptq"
    steps: ClassVar[tuple[tuple[str, str], ...]] = (
        ("gptq4", "calibrated INT4, asymmetric, groups of 64; -gN, -row, -sym, -noorder, -awq, -tuned"),
        ("gptq3", "the same in 3 bits"),
        ("gptq2", "the same in 2 bits"),
        ("gptq8", "the same in 8 bits, symmetric, one scale a row"),
    )

    bits: int = 4
    order: bool = True
    damp: float = 0.1
    search: bool = True
    awq: bool = False
    tuned: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("order", "search", "awq", "tuned"):
            if not isinstance(getattr(self, key), bool):
                raise PatchError(f"GPTQ: {key}={getattr(self, key)!r}; True or False")
        if not isinstance(self.damp, float | int) or not 0 <= self.damp <= 1:
            raise PatchError(f"GPTQ: damp={self.damp!r}; a number between 0 and 1")

    @classmethod
    def parse(cls, rest: str, options: list[str]) -> GPTQ:
        mine: Options = {"noorder": ("order", False), "awq": ("awq", True), "tuned": ("tuned", True)}
        return cls(**cls.parse_bits(rest, options, mine))

    def step(self) -> str:
        return self.step_bits() + "-noorder" * (not self.order) + "-awq" * self.awq + "-tuned" * self.tuned

    def check(self, model: nn.Module) -> None:
        if self.tuned:
            check_tunable(model)

    def observer(self, site: Site) -> Want | None:
        return None if isinstance(site.module, nn.Embedding) else Want(hessian=True)

    def smooth(self, model, anatomy, sites, stats, journal) -> dict[str, Fold]:
        return fold_scales(model, anatomy, sites, stats, journal, best_scale(self)) if self.awq else {}

    def refine(self, model, anatomy, sites, samples, journal, progress) -> None:
        if self.tuned:
            tune(model, anatomy, sites, samples, journal, Tuning(), progress)

    def rounder(self, matrix: Tensor, stats: Stats | None) -> Round:
        if stats is None or not stats.tokens:
            return round_to_nearest
        order, factor = self._factor(stats)

        def rounding(weight: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor | None]:
            if self.search:
                scale, zero = search_grid(weight, stats.diagonal(), layout)
            else:
                _, scale, zero = round_to_nearest(weight, layout)
            return gptq_codes(weight, scale, zero, layout, order, factor), scale, zero

        return rounding

    def _factor(self, stats: Stats) -> tuple[Tensor, Tensor]:
        """The order of columns and the factor U; found once for all matrices with the same inputs."""
        key = ("gptq", self.order, self.damp)
        if key not in stats.derived:
            order = column_order(stats.hessian) if self.order else torch.arange(len(stats.hessian))
            stats.derived[key] = order, inverse_factor(stats.hessian, order, self.damp)
        return stats.derived[key]


def column_order(hessian: Tensor) -> Tensor:
    """[K] int64: columns by falling diagonal."""
    return torch.argsort(hessian.diagonal(), descending=True, stable=True)


def inverse_factor(hessian: Tensor, order: Tensor, damp: float) -> Tensor:
    """Upper triangular U [K, K] with U^T U the inverse of the damped Hessian, its axes in `order`.

    Raises: PatchError if the Hessian is not positive definite whatever is added, or is not finite.
    """
    diagonal = hessian.diagonal()
    if not torch.isfinite(diagonal).all():
        raise PatchError("the second moments of its inputs are not finite")
    mean = diagonal.mean().clamp_min(torch.finfo(hessian.dtype).tiny)
    flipped = order.flip(0)
    h = hessian[flipped][:, flipped]
    base = torch.where(diagonal > 0, diagonal, mean)[flipped]
    share = damp
    while True:
        h.diagonal().copy_(base + share * mean)
        lower, info = torch.linalg.cholesky_ex(h)
        if not info and bool(torch.isfinite(lower.diagonal()).all()):
            break
        if share >= 1:
            raise PatchError(
                f"the second moments of its {len(h)} inputs are not positive definite: minor {int(info)} "
                "fails with the mean of the diagonal added to it"
            )
        share = min(1.0, max(10 * share, 1e-3))
        log.info("GPTQ: a Hessian of %d inputs is singular, damping %.3g is tried", len(h), share)
    # h = P H P = L L^T with P the reversal, so H = (P L P)(P L P)^T, whose factors are upper triangular.
    eye = torch.eye(len(h), dtype=h.dtype, device=h.device)
    return torch.linalg.solve_triangular(lower, eye, upper=False).flip(0, 1).contiguous()


def gptq_codes(
    weight: Tensor, scale: Tensor, zero: Tensor | None, layout: Layout, order: Tensor, factor: Tensor
) -> Tensor:
    """Codes uint8 [N, K] of `weight` [N, K] on the grid of scales and zeros [N, G].

    Args:
        order: [K] int64, the columns in the order of rounding.
        factor: `inverse_factor` in that order.
    The arithmetic is that of `weight.dtype`.
    """
    k = weight.shape[1]
    low, high = bounds(layout)
    w = weight.t()[order]  # a copy [K, N]: a column of the weight is a contiguous row here
    steps = divisor(scale.to(w.dtype)).t().contiguous()
    shifts = None if zero is None else zero.to(w.dtype).t().contiguous()
    groups = (order // layout.group_len(k)).tolist()
    codes = torch.empty_like(w)
    diagonal = factor.diagonal().tolist()
    for start in range(0, k, _BLOCK):
        stop = min(start + _BLOCK, k)
        block, errors = w[start:stop], torch.empty_like(w[start:stop])
        for i in range(stop - start):
            j = start + i
            step = steps[groups[j]]
            shift = layout.zero if shifts is None else shifts[groups[j]]
            code = torch.div(block[i], step, out=codes[j]).round_().add_(shift).clamp_(low, high)
            error = torch.sub(code, shift, out=errors[i]).mul_(step).sub_(block[i]).div_(-diagonal[j])
            if j + 1 < stop:
                block[i + 1 :].addcmul_(factor[j, j + 1 : stop, None], error[None], value=-1)
        w[stop:].addmm_(factor[start:stop, stop:].t(), errors, alpha=-1)
    out = torch.empty_like(codes)
    out[order] = codes
    return out.t().to(torch.uint8)
