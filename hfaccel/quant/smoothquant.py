"""SmoothQuant: INT8 weights and INT8 activations, outliers of the inputs moved into the weights first.

    W x = (W diag(s)) (x / s),      s_j = max|x_j|^alpha / max|w_j|^(1 - alpha)

with x_j input j over calibration and w_j its column over all its readers (Xiao et al. 2022,
arXiv:2211.10438). The inverse goes where AWQ's goes (`awq.fold_scales`): into the norm or the rows of the
linear that feeds the readers, else into the readers, which then scale their inputs themselves.

Then weights are rounded to nearest, one scale a row, and activations as they come, one scale a token (max|x|
/ 127), or with `static` one for all tokens, the largest of calibration: products are int8 x int8, sums exact.
These keep a scale a token: inputs with a largest value beyond 50 times their root mean square, whose other
tokens one scale would round away (9 of 210 in the demo model's twin, down projections: with them perplexity
rises by 1.9 % over a scale a token everywhere, without by 18 %), and those of fused experts, which see few
tokens each.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from decimal import Decimal
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from hfaccel.anatomy import Anatomy
from hfaccel.errors import PatchError
from hfaccel.journal import Journal
from hfaccel.observers import SiteStats, Stats, Want
from hfaccel.quant.awq import fold_scales
from hfaccel.quant.packing import Round
from hfaccel.quant.rounding import Rounding
from hfaccel.quant.rtn import round_to_nearest
from hfaccel.transform import Fold, Site
from hfaccel_kernels.layouts import Layout

_SMALLEST = 1e-5  # of the scales
_SPREAD = 50  # largest value over root mean square that one scale for all tokens can serve


@dataclass(frozen=True, kw_only=True)
class SmoothQuant(Rounding):
    """INT8 weights and activations.

    Attributes:
        alpha: how much of the inputs' sizes moves into the weights, 0 to 1; None: nothing, and no data is
            asked for unless `static`.
        static: one activation scale for all tokens, from calibration; False: one a token.
    Raises: PatchError for other bits than 8, groups or zero points.
    """

    name: ClassVar[str] = "w8a8"
    steps: ClassVar[tuple[tuple[str, str], ...]] = (
        (
            "w8a8",
            "calibrated INT8 weights (a row) and activations (a token), smoothed; -static, -aN, -nosmooth",
        ),
    )

    alpha: float | None = 0.5
    static: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.bits, self.group, self.symmetric) != (8, -1, True):
            raise PatchError("SmoothQuant: it has 8 bits, one scale a row and no zero points")
        number = isinstance(self.alpha, float | int) and not isinstance(self.alpha, bool)
        if self.alpha is not None and not (number and 0 <= self.alpha <= 1):
            raise PatchError(f"SmoothQuant: alpha={self.alpha!r}; a number between 0 and 1, or None")
        if self.alpha is not None:
            self._set("alpha", abs(float(self.alpha)))  # -0.0 is 0
        if not isinstance(self.static, bool):
            raise PatchError(f"SmoothQuant: static={self.static!r}; True or False")

    @classmethod
    def parse(cls, rest: str, options: list[str]) -> SmoothQuant:
        known = {"static": ("static", True), "nosmooth": ("alpha", None), "aN": ("alpha", float)}
        return cls(**cls.parse_alone(rest, options, known))

    def step(self) -> str:
        smoothed = "-nosmooth" if self.alpha is None else f"-a{Decimal(repr(self.alpha)):f}"
        return "w8a8" + "-static" * self.static + smoothed * (self.alpha != type(self).alpha)

    def observer(self, site: Site) -> Want | None:
        needless = isinstance(site.module, nn.Embedding) or (self.alpha is None and not self.static)
        return None if needless else Want(channels=True)

    def smooth(
        self, model: nn.Module, anatomy: Anatomy, sites: list[Site], stats: SiteStats, journal: Journal
    ) -> dict[str, Fold]:
        if self.alpha is None:
            return {}
        return fold_scales(model, anatomy, sites, stats, journal, partial(_choose, alpha=self.alpha))

    def layout(self, site: Site) -> Layout:
        return Layout(8, act="token")

    def observed_layout(self, site: Site, stats: tuple[Stats, ...] | None) -> Layout:
        layout = self.layout(site)
        if not self.static or stats is None or len(stats) > 1 or not stats[0].tokens:
            return layout
        most, typical = stats[0].abs_max.max(), stats[0].square_mean.mean().sqrt()
        return layout if most > _SPREAD * typical else replace(layout, act_scale=float(most / 127))

    def rounder(self, matrix: Tensor, stats: Stats | None) -> Round:
        return round_to_nearest


def _choose(
    readers: list[Site], weights: list[Tensor], found: Stats, into: Tensor | None, *, alpha: float
) -> Tensor:
    return migration(found.abs_max, torch.stack([w.abs().amax(0) for w in weights]).amax(0), alpha, into)


def migration(inputs: Tensor, columns: Tensor, alpha: float, into: Tensor | None = None) -> Tensor:
    """The scale [K] of input channels.

    Args:
        inputs: max |x_j|, columns: max |w_j|, both fp32 [K].
        into: [K] int64; columns of equal numbers have equal scales. None: each its own.
    Returns: 1 for a channel without inputs or without weights.
    """
    if into is not None:
        same = into.unique(return_inverse=True)[1]
        inputs, columns = (
            torch.zeros_like(v[: int(same.max()) + 1]).scatter_reduce(0, same, v, "amax")[same]
            for v in (inputs, columns.float())
        )
    scale = (inputs.double() ** alpha / columns.double() ** (1 - alpha)).float().clamp_min(_SMALLEST)
    return torch.where((inputs > 0) & (columns > 0), scale, 1.0)
