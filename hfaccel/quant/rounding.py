"""What every method that chooses codes shares: bits, group, grid, and packing a module."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hfaccel.anatomy import Anatomy, default_sites
from hfaccel.errors import PatchError, UnknownName
from hfaccel.observers import Stats
from hfaccel.quant.linear import QuantExperts, is_conv1d, is_fused_experts
from hfaccel.quant.packing import Round, pack_matrix, pack_module, packed_like
from hfaccel.transform import Fold, Site, Stage, Transform, Unit
from hfaccel_kernels.layouts import Layout

# Roles whose activations are worth 16 bits beside weights of fewer than 8: on the demo model INT8 activations
# there cost 0.29 % of perplexity, in all other linears together 0.09 %. Beside INT8 weights, whose own KL to
# the original is 0.0044, all activations have 16 bits: INT8 ones in the other linears raise it to 0.0061.
# Beside INT2 weights too: a model that coarse passes errors on, and INT8 activations move its perplexity by
# 2.4 %. An embedding tied to the head shares the head's layout.
_WIDE_INPUTS = ("q", "k", "v", "qkv", "head", "tok")

Options = dict[str, tuple[str, Any]]  # name -> (field, value); of one that ends with N: int or float, of N
GROUPS: Options = {"gN": ("group", int), "row": ("group", -1)}
_DIGITS = {int: "[1-9][0-9]*", float: r"[0-9]+(?:\.[0-9]+)?"}


@dataclass(frozen=True, kw_only=True)
class Rounding(Transform):
    """Base of the methods that choose codes of weights; some round activations as well (`layout`).

    Attributes:
        bits: 2, 3, 4 or 8.
        group: input elements that share a scale, -1 for a whole row; default -1 at 8 bits, else 64.
        symmetric: scale alone, or scale and integer zero point; default symmetric at 8 bits, else asymmetric.
    Raises: PatchError for values outside of these.
    """

    stage: ClassVar[Stage] = Stage.PRECISION
    unit: ClassVar[Unit] = Unit.LINEAR
    rounds: ClassVar[bool] = True

    bits: int = 8
    group: int | None = None
    symmetric: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.bits) is not int or self.bits not in (2, 3, 4, 8):
            raise PatchError(f"{type(self).__name__}: bits={self.bits!r}; known are 2, 3, 4, 8")
        if self.group is None:
            self._set("group", -1 if self.bits == 8 else 64)
        if self.symmetric is None:
            self._set("symmetric", self.bits == 8)
        if not isinstance(self.symmetric, bool):
            raise PatchError(
                f"{type(self).__name__}: symmetric={self.symmetric!r}; True, False, or None for the default"
            )
        if type(self.group) is not int or not (self.group == -1 or self.group > 0):
            raise PatchError(
                f"{type(self).__name__}: group={self.group!r}; "
                "a positive number of input elements, or -1 for a row"
            )
        if self.group > 1 << 20:
            raise PatchError(f"{type(self).__name__}: group={self.group} is out of range (at most {1 << 20})")

    def layout(self, site: Site) -> Layout:
        """Grid and arithmetic at one site; 16 bits where inputs have outliers, and beside INT8 and INT2."""
        wide = self.bits in (8, 2) or site.role in _WIDE_INPUTS or site.role.startswith("attn.")
        return Layout(
            self.bits, self.group, self.symmetric, "fp32" if self.bits == 8 else "fp16", 16 if wide else 8
        )

    def observed_layout(self, site: Site, stats: tuple[Stats, ...] | None) -> Layout:
        """The same, given what `apply` is given."""
        return self.layout(site)

    def default_targets(self, anatomy: Anatomy) -> tuple[str, ...]:
        return tuple(name for name in default_sites(anatomy) if name != anatomy.head)

    def rounder(self, matrix: Tensor, stats: Stats | None) -> Round:
        """What rounds rows of one whole matrix [N, K], given what calibration collected (None without)."""
        raise NotImplementedError

    def apply(self, site: Site, stats: tuple[Stats, ...] | None) -> nn.Module:
        check_finite(site)
        fold = site.fold
        if fold is not None and fold.stats is not None:
            stats = (fold.stats,)
            if is_fused_experts(site.module):  # what feeds them, the first projection of each expert reads
                stats *= len(getattr(site.module, QuantExperts.PROJECTIONS[0]))
        each = iter(stats or ())
        try:
            layout = self.observed_layout(site, stats)
            if fold is not None and (fold.columns is not None or fold.rows is not None):
                return self._folded(site, fold, layout, next(each, None))
            return pack_module(site.module, layout, lambda matrix: self.rounder(matrix, next(each, None)))
        except PatchError as error:
            raise PatchError(f"{site.name}: {error}") from None

    def _folded(self, site: Site, fold: Fold, layout: Layout, stats: Stats | None) -> nn.Module:
        """The packed form of a linear or Conv1D whose columns and rows are scaled first, in fp32."""
        module = site.module
        matrix = (module.weight.T if is_conv1d(module) else module.weight).detach().float()
        bias = module.bias
        if fold.columns is not None:
            matrix = matrix * fold.columns
        if fold.rows is not None:
            matrix = matrix / fold.rows[:, None]
            if bias is not None:
                bias = nn.Parameter((bias.detach().float() / fold.rows).to(bias.dtype), bias.requires_grad)
        packed = pack_matrix(matrix, layout, self.rounder(matrix, stats))
        new = packed_like(module, layout, packed, fold.inputs)
        new.bias = bias
        return new

    # Recipe steps: name, bits, then options -----------------------------------------------------------------

    @classmethod
    def parse_bits(cls, rest: str, options: list[str], extra: Options | None = None) -> dict[str, Any]:
        """Fields from the bits and from the options: those that every such method has, and `extra`."""
        if rest not in ("2", "3", "4", "8"):
            raise UnknownName(
                f"recipe step {cls.name}{rest!s}: known are {', '.join(cls.name + b for b in '8432')}"
            )
        known = GROUPS | {"asym": ("symmetric", False), "sym": ("symmetric", True)} | (extra or {})
        return {"bits": int(rest)} | parse_options(cls.name + rest, options, known)

    @classmethod
    def parse_alone(cls, rest: str, options: list[str], known: Options) -> dict[str, Any]:
        """Fields from the options, of a method whose step says no bits."""
        if rest:
            raise UnknownName(f"recipe step {cls.name}{rest}: known is {cls.name}")
        return parse_options(cls.name, options, known)

    def step_bits(self) -> str:
        """The step that `parse_bits` reads back, without what equals the default."""
        default = type(self)(bits=self.bits)
        out = f"{self.name}{self.bits}"
        if self.group != default.group:
            out += "-row" if self.group == -1 else f"-g{self.group}"
        if self.symmetric != default.symmetric:
            out += "-sym" if self.symmetric else "-asym"
        return out


def parse_options(step: str, options: list[str], known: Options) -> dict[str, Any]:
    """Field -> value of what follows a step. Raises: UnknownName; PatchError for a field given twice."""
    values: dict[str, Any] = {}
    for option in options:
        name = next((name for name in known if re.fullmatch(_pattern(name, known), option)), None)
        if name is None:
            raise UnknownName(f"{step}: unknown option -{option}; known are -{', -'.join(known)}")
        field, value = known[name]
        if value in _DIGITS:
            value = value(option.removeprefix(name[:-1]))
        if field in values:
            raise PatchError(f"{step}-{'-'.join(options)}: {field} is given twice")
        values[field] = value
    return values


def _pattern(name: str, known: Options) -> str:
    digits = _DIGITS.get(known[name][1])
    return re.escape(name) if digits is None else re.escape(name[:-1]) + digits


def check_finite(site: Site) -> None:
    """Refuse NaN and infinite weights, which no grid can hold."""
    for name, tensor in site.module.named_parameters(recurse=False):
        # The extremes carry a NaN along, and take no memory as isfinite of everything would.
        if (
            tensor.is_floating_point()
            and tensor.numel()
            and not all(map(torch.isfinite, tensor.detach().aminmax()))
        ):
            bad = int((~torch.isfinite(tensor)).sum())
            raise PatchError(f"{site.name}.{name}: {bad} of {tensor.numel()} values are NaN or infinite")


def group_scale(peak: Tensor, steps: int, layout: Layout) -> Tensor:
    """peak / steps in fp32, rounded up to a value of the layout's scale dtype so that the grid covers peak.

    0 for a peak of 0, else no less than the smallest (fp16) or smallest normal (fp32) number.
    Raises: PatchError when a scale would overflow.
    """
    scale = peak / steps
    if layout.dtype is torch.float16:
        half = scale.half()
        above = torch.nextafter(half, torch.full_like(half, torch.inf))
        scale = torch.where(half.float() < scale, above, half).float()
    else:
        scale = torch.where(peak > 0, scale.clamp_min(torch.finfo(torch.float32).tiny), scale)
    if not torch.isfinite(scale).all():
        raise PatchError(
            f"weights of magnitude {peak.max():.3g} need an INT{layout.bits} scale beyond "
            f"{layout.scale_dtype}'s range"
        )
    return scale
