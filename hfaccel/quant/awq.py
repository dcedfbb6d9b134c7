"""AWQ: input channels scaled up where rounding hurts most, the inverse folded into what feeds them.

    W x = (W diag(s)) (x / s),      s_j = a_j^alpha / m_j^beta

with a_j the root mean square of input j over calibration and m_j the mean |w| of its column over all its
readers. Of 20 pairs - alpha in ten steps with beta = 0 (Lin et al. 2023, arXiv:2306.00978), and with beta =
1 - alpha, which does not depend on how sizes were shared between columns and inputs before - the one is taken
whose rounded readers err least at their outputs, by the inputs' second moments H:

    loss = sum over readers  tr(E H E^T) / tr(W H W^T),      E = round(W diag(s)) diag(1/s) - W

s = 1 is among them. Then the range of every group is clipped by the weighted search of `grid.py`.

The inverse goes into the norm or into the rows of the linear that feeds the readers. Where something else
reads the same, or what feeds them is not in proportion (a GELU; `Anatomy.groups`), the readers multiply their
inputs by it themselves (`linear.ScaledLinear`), and the report says why. What passes through fused experts is
rounded without scales. Between v and o one scale serves the columns of all query heads that share a value
head. Where a norm's dtype cannot hold its new weight the columns take the quotient that it does hold.

What was trained on the inputs of a folded group, such as an adapter made for the model before, does not fit
the model after.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from hfaccel import compat
from hfaccel.anatomy import Anatomy, Group
from hfaccel.errors import PatchError
from hfaccel.journal import Journal
from hfaccel.observers import SiteStats, Stats, Want
from hfaccel.quant.grid import round_to_grid, search_grid
from hfaccel.quant.linear import is_conv1d, is_fused_experts, size_of
from hfaccel.quant.packing import Round
from hfaccel.quant.rounding import Rounding, check_finite
from hfaccel.quant.rtn import round_to_nearest
from hfaccel.transform import Fold, Site
from hfaccel_kernels.layouts import Layout
from hfaccel_kernels.packing import dequantize_codes

_ALPHAS = tuple(i / 10 for i in range(10))
_RANGE = 1e4  # of the scales, around their middle
_ROWS = 512  # of each reader, evenly spread, that the pairs are compared on


@dataclass(frozen=True, kw_only=True)
class AWQ(Rounding):
    """Activation-aware scaling, clipping, and rounding to nearest.

    Attributes:
        bits: 2, 3, 4 (the default here) or 8.
        clip: the weighted search for each group's range; False: its own extremes.
    """

    name: ClassVar[str] = "awq"
    steps: ClassVar[tuple[tuple[str, str], ...]] = (
        (
            "awq4",
            "calibrated scales of input channels, INT4, asymmetric, groups of 64; -gN, -row, -sym, -noclip",
        ),
        ("awq3", "the same in 3 bits"),
        ("awq2", "the same in 2 bits"),
        ("awq8", "the same in 8 bits, symmetric, one scale a row"),
    )

    bits: int = 4
    clip: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.clip, bool):
            raise PatchError(f"AWQ: clip={self.clip!r}; True or False")

    @classmethod
    def parse(cls, rest: str, options: list[str]) -> AWQ:
        return cls(**cls.parse_bits(rest, options, {"noclip": ("clip", False)}))

    def step(self) -> str:
        return self.step_bits() + "-noclip" * (not self.clip)

    def observer(self, site: Site) -> Want | None:
        return None if isinstance(site.module, nn.Embedding) else Want(hessian=True)

    def smooth(
        self, model: nn.Module, anatomy: Anatomy, sites: list[Site], stats: SiteStats, journal: Journal
    ) -> dict[str, Fold]:
        return fold_scales(model, anatomy, sites, stats, journal, best_scale(self))

    def rounder(self, matrix: Tensor, stats: Stats | None) -> Round:
        if stats is None or not stats.tokens or not self.clip:
            return round_to_nearest
        importance = stats.diagonal()

        def rounding(weight: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor | None]:
            scale, zero = search_grid(weight, importance, layout)
            return round_to_grid(weight, scale, zero, layout), scale, zero

        return rounding


# (readers, their weights [N, K], what was observed of their inputs, [K] int64: columns of equal numbers have
# equal scales, None: each its own) -> the scale [K] of their input channels
Choose = Callable[[list[Site], list[Tensor], Stats, Tensor | None], Tensor]


def best_scale(transform: Rounding) -> Choose:
    """AWQ's scale for the grids of a transform, from second moments."""

    def choose(readers: list[Site], weights: list[Tensor], found: Stats, into: Tensor | None) -> Tensor:
        return search_scale(weights, found.hessian, [transform.layout(site) for site in readers], into)

    return choose


def fold_scales(
    model: nn.Module,
    anatomy: Anatomy,
    sites: list[Site],
    stats: SiteStats,
    journal: Journal,
    choose: Choose,
) -> dict[str, Fold]:
    """Choose the scales of every group of linears among `sites`, and where their inverses go.

    Args:
        sites: those of one block that are about to be rounded.
        stats: what `choose` needs.
        journal: takes down the norms that are replaced.
    Returns: site's name -> what its packed form must hold.
    """
    mine = {alias: site for site in sites for alias in (site.name, *site.aliases)}
    for site in sites:
        if is_fused_experts(site.module):  # whose matrices have names of their own
            mine |= {f"{site.name}.{key}": site for key in site.module._parameters}
    columns: dict[str, Tensor] = {}
    rows: dict[str, Tensor] = {}
    inputs: dict[str, Tensor] = {}
    after: dict[str, Stats] = {}
    notes: dict[str, str] = {}
    for group in anatomy.groups:
        readers = {mine[name].name: mine[name] for name in group.readers if name in mine}
        if not readers:
            continue
        found = stats[next(iter(readers))][0]
        if why := _unscalable(readers, found):
            notes |= dict.fromkeys(readers, f"inputs not scaled: {why}")
            continue
        apart = _unfoldable(anatomy, group, mine)
        with ExitStack() as stack:
            for site in readers.values():
                stack.enter_context(compat.materialized(site.module))
                check_finite(site)
            weights = [matrix_of(site.module) for site in readers.values()]
            into = None if apart else anatomy.feeder_rows(group).to(found.device)
            try:
                scale = choose(list(readers.values()), weights, found, into)
            except PatchError as error:
                raise PatchError(f"{group.readers[0]}: {error}") from None
        if apart:
            if bool((scale == 1).all()):
                continue
            inputs |= dict.fromkeys(readers, scale.reciprocal())
            notes |= dict.fromkeys(readers, f"it scales its inputs itself: {apart}")
        elif group.feeder in mine:
            site = mine[group.feeder]
            part = torch.ones(size_of(site.module)[0], device=scale.device)
            part[into] = scale
            rows[site.name] = part
        else:
            one_plus = anatomy.facts is not None and anatomy.facts.norm == "rms1p"
            scale = _fold_norm(model, group.feeder, scale, float(one_plus), journal)
        scaled = found.over(scale)
        for name in readers:
            columns[name], after[name] = scale, scaled
    return {
        name: Fold(
            columns=columns.get(name),
            rows=rows.get(name),
            inputs=inputs.get(name),
            stats=after.get(name),
            note=notes.get(name, ""),
        )
        for name in {**columns, **rows, **notes}
    }


def _unscalable(readers: dict[str, Site], found: Stats) -> str:
    """Why the inputs of a group keep their sizes; "" if they need not."""
    if any(is_fused_experts(site.module) for site in readers.values()):
        return "fused experts"
    return "" if found.tokens else "no token reached them"


def _unfoldable(anatomy: Anatomy, group: Group, mine: dict[str, Site]) -> str:
    """Why what feeds a group cannot take the inverse of its scale; "" if it can."""
    if group.feeder is None:
        return "what feeds them is read elsewhere or not in proportion"
    if left := [name for name in group.readers if name not in mine]:
        return f"{left[0].rpartition('.')[2]} reads the same and is not rounded with them"
    if group.feeder not in mine and group.feeder not in anatomy.blocks[group.block].norms.values():
        return f"{group.feeder.rpartition('.')[2]} feeds them and is not rounded with them"
    return ""


def matrix_of(module: nn.Module) -> Tensor:
    """The weight of a linear or Conv1D, [out, in], detached."""
    return (module.weight.T if is_conv1d(module) else module.weight).detach()


def search_scale(
    weights: list[Tensor], hessian: Tensor, layouts: list[Layout], into: Tensor | None = None
) -> Tensor:
    """The best scale [K] of the input channels that `weights` [N, K] each read.

    Args:
        hessian: mean of x x^T over calibration, fp32 [K, K].
        layouts: the grid of each weight.
        into: [K] int64; columns of equal numbers have equal scales. None: each its own.
    Raises: PatchError if a product is not finite.
    """
    same = (
        torch.arange(len(hessian), device=hessian.device)
        if into is None
        else into.unique(return_inverse=True)[1]
    )
    count = torch.zeros(int(same.max()) + 1, device=hessian.device)
    count.index_add_(0, same, torch.ones(len(same), device=same.device))

    def pooled(values: Tensor) -> Tensor:
        return (torch.zeros_like(count).index_add_(0, same, values) / count)[same]

    size = pooled(hessian.diagonal()).sqrt()
    height = pooled(sum(weight.float().abs().sum(0) for weight in weights) / sum(map(len, weights)))
    plain = torch.ones_like(size)
    some = [weight[:: -(-len(weight) // _ROWS)] for weight in weights]
    energy = [output_error(weight.float(), hessian) for weight in some]
    best, least = plain, relative_error(some, plain, hessian, layouts, energy)
    if not math.isfinite(least):
        raise PatchError("the products of its weights and calibration inputs are not finite")
    for alpha, beta in [(a, b) for a in _ALPHAS for b in (0.0, 1 - a) if a or b]:
        scale = _balanced(size, height, alpha, beta)
        error = relative_error(some, scale, hessian, layouts, energy)
        if error < least:
            best, least = scale, error
    # What is best of some rows is taken if it is good for all of them.
    if best is not plain and any(len(part) < len(weight) for part, weight in zip(some, weights, strict=True)):
        energy = [output_error(weight.float(), hessian) for weight in weights]
        ours, theirs = (relative_error(weights, s, hessian, layouts, energy) for s in (best, plain))
        best = best if ours < theirs else plain
    return best


def relative_error(
    weights: list[Tensor], scale: Tensor, hessian: Tensor, layouts: list[Layout], energy: list[float]
) -> float:
    """The loss above, with `energy` below the fractions; infinite where a grid would leave its range."""
    loss = 0.0
    for weight, layout, own in zip(weights, layouts, energy, strict=True):
        weight = weight.float()
        try:
            rounded = dequantize_codes(*round_to_nearest(weight * scale, layout), layout)
        except PatchError:
            return math.inf
        loss += output_error(rounded.div_(scale).sub_(weight), hessian) / max(own, 1e-30)
    return loss


def output_error(wrong: Tensor, hessian: Tensor) -> float:
    """Mean over calibration of |E x|^2 for E = `wrong` [N, K]: tr(E H E^T)."""
    return float((wrong @ hessian).mul_(wrong).sum())


def _balanced(size: Tensor, height: Tensor, alpha: float, beta: float) -> Tensor:
    """a^alpha / m^beta around 1; 1 for a channel without inputs or without weights."""
    alive = (size > 0) & (height > 0)
    if not alive.any():
        return torch.ones_like(size)
    log = alpha * size.clamp_min(1e-30).log() - beta * height.clamp_min(1e-30).log()
    low, high = log[alive].aminmax()
    limit = torch.log(torch.tensor(_RANGE)).item()
    return torch.where(alive, (log - (low + high) / 2).clamp(-limit, limit).exp(), 1.0)


def _fold_norm(model: nn.Module, name: str, scale: Tensor, one: float, journal: Journal) -> Tensor:
    """Replace a norm by a copy that gives x / scale.

    Args:
        one: what its forward adds to its weight.
    Returns: the scale that its dtype lets it have.
    """
    parent_name, _, attribute = name.rpartition(".")
    parent = model.get_submodule(parent_name)
    original = getattr(parent, attribute)
    norm = copy.copy(original)
    for wrapped in ("forward", "_hf_hook", "_old_forward"):  # by accelerate, around the original
        vars(norm).pop(wrapped, None)
    with compat.materialized(original):
        norm._parameters = dict(original._parameters)
        weight = norm.weight.detach()
        gain = weight.float() + one
        new = (gain / scale - one).to(weight.dtype)
        held = new.float() + one
        scale = torch.where(held != 0, gain / held, scale)
        norm._parameters["weight"] = nn.Parameter(new, norm.weight.requires_grad)
        if (bias := norm._parameters.get("bias")) is not None:
            shifted = (bias.detach().float() / scale).to(bias.dtype)
            norm._parameters["bias"] = nn.Parameter(shifted, bias.requires_grad)
    compat.move_inputs_as(original, norm)
    journal.swap(parent, attribute, norm)
    return scale
