"""What calibration collects of the inputs of a matrix, and how.

    second moments  H = mean over tokens of x x^T, fp32 [K, K]          GPTQ, SparseGPT
    per channel     max |x|, mean |x|, mean x^2, each fp32 [K]          SmoothQuant, AWQ, Wanda, scale search
    rows            up to R of the inputs themselves, evenly spread     AWQ, clip search

Linears that read one tensor share one collector. Fused experts have one per expert and projection, fed with
the tokens that the router sent there.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hfaccel.errors import PatchError
from hfaccel.quant.linear import QuantExperts, is_fused_experts, matrix_size
from hfaccel.transform import Site

log = logging.getLogger("hfaccel")

_TILE = 256  # only tiles of H on and above the diagonal are multiplied: 10.6 ms against 15.3 at K = 1,536


@dataclass(frozen=True, kw_only=True)
class Want:
    """What a transform asks for at one site."""

    hessian: bool = False
    channels: bool = False
    rows: int = 0

    def __or__(self, other: Want) -> Want:
        return Want(
            hessian=self.hessian or other.hessian,
            channels=self.channels or other.channels,
            rows=max(self.rows, other.rows),
        )


@dataclass
class Stats:
    """The inputs [tokens, K] of one matrix; what was not asked for is None.

    Attributes:
        tokens: how many were seen; 0 at an expert that no token was sent to, where all is zero.
        derived: what a transform computes from these and wants to find again at a matrix with the same
            inputs.
    """

    tokens: int
    hessian: Tensor | None = None  # [K, K]
    abs_max: Tensor | None = None  # [K]
    abs_mean: Tensor | None = None  # [K]
    square_mean: Tensor | None = None  # [K]
    rows: Tensor | None = None  # [R, K]
    derived: dict = field(default_factory=dict, repr=False)

    def diagonal(self) -> Tensor:
        """Mean x^2 of each input, [K], whichever way it was collected."""
        return self.hessian.diagonal() if self.square_mean is None else self.square_mean

    @property
    def device(self) -> torch.device:
        return (self.abs_max if self.hessian is None else self.hessian).device

    def over(self, scale: Tensor) -> Stats:
        """Of the same inputs, each divided by its scale [K]."""

        def divided(values: Tensor | None, by: Tensor) -> Tensor | None:
            return None if values is None else values / by

        hessian = None if self.hessian is None else self.hessian / scale[:, None] / scale
        once = [divided(values, scale) for values in (self.abs_max, self.abs_mean)]
        square = divided(self.square_mean, scale.square())
        return Stats(self.tokens, hessian, *once, square, divided(self.rows, scale))


class Collector:
    """Adds up what `want` names.

    Args:
        expected_tokens: how many will come at most, so that `rows` spread evenly.
    """

    def __init__(self, want: Want, width: int, device: torch.device, expected_tokens: int) -> None:
        self.want, self.width, self.tokens, self.bad = want, width, 0, 0
        self.hessian = torch.zeros(width, width, device=device) if want.hessian else None
        # max |x|, sum |x|, sum x^2
        self.sums = torch.zeros(3, width, device=device) if want.channels else None
        self.stride = max(1, -(-expected_tokens // want.rows)) if want.rows else 0
        self.rows: list[Tensor] = []

    def add(self, x: Tensor) -> None:
        """x [..., K], any float dtype."""
        x = x.detach().reshape(-1, self.width).float()
        if not x.shape[0]:
            return
        self.bad += x.shape[0] - int(torch.isfinite(x.sum(1)).sum())
        if self.hessian is not None:
            for a in range(0, self.width, _TILE):
                self.hessian[a : a + _TILE, a:].addmm_(x[:, a : a + _TILE].t(), x[:, a:])
        if self.sums is not None:
            size = x.abs()
            torch.maximum(self.sums[0], size.amax(0), out=self.sums[0])
            self.sums[1] += size.sum(0)
            self.sums[2] += size.square_().sum(0)
        if self.stride:
            self.rows.append(x[-self.tokens % self.stride :: self.stride].clone())
        self.tokens += x.shape[0]

    def finish(self) -> Stats:
        n = max(self.tokens, 1)
        if (h := self.hessian) is not None:
            for a in range(0, self.width, _TILE):
                b = a + _TILE
                h[a:b, a:b].copy_(h[a:b, a:b].triu().add_(h[a:b, a:b].triu(1).t()))
                h[b:, a:b].copy_(h[a:b, b:].t())
            h.div_(n)
        sums = self.sums if self.sums is not None else (None, None, None)
        if self.sums is not None:
            self.sums[1:].div_(n)
        rows = None
        if self.stride:
            rows = torch.cat(self.rows) if self.rows else torch.zeros(0, self.width)
        return Stats(self.tokens, h, *sums, rows)


def expert_inputs(experts: nn.Module, hidden: Tensor, index: Tensor) -> Iterator[tuple[str, int, Tensor]]:
    """(projection, expert, its inputs) of fused experts, as their own forward computes them.

    Args:
        hidden: [T, K].
        index: [T, k], the experts of each token; numbers beyond the last expert are foreign ones.
    """
    gate_up = experts.gate_up_proj
    for expert in index.unique().tolist():
        if expert >= gate_up.shape[0]:
            continue
        x = hidden[(index == expert).any(-1)]
        yield "gate_up_proj", expert, x
        weight = gate_up[expert].t() if experts.is_transposed else gate_up[expert]
        bias = getattr(experts, "gate_up_proj_bias", None)
        y = F.linear(x, weight, None if bias is None else bias[expert])
        yield "down_proj", expert, type(experts)._apply_gate(experts, y)


SiteStats = dict[str, tuple[Stats, ...]]  # site's name -> of each of its matrices, in the order of packing


class Left(Exception):
    """The forward has done what this pass needs of it."""


class Observed:
    """Collectors at the sites of one block, and the hooks that feed them."""

    def __init__(
        self, sites: list[tuple[Site, Want]], first: dict[str, str], device: torch.device, tokens: int
    ) -> None:
        self.device, self.tokens, self.on = device, tokens, False
        self.sites: dict[str, tuple[Site, Want]] = {}
        for site, want in sites:
            known = self.sites.get(site.name, (site, want))[1]
            self.sites[site.name] = site, known | want
        self.collectors: dict[tuple, Collector] = {}
        # Readers of one tensor share a collector: site's name -> the name under which it collects.
        self.shared: dict[str, str] = {}
        leaders: dict[str, str] = {}
        for name, (site, _) in self.sites.items():
            alone = is_fused_experts(site.module)
            self.shared[name] = name if alone else leaders.setdefault(first.get(name, name), name)
        wants: dict[str, Want] = {}
        for name, (_, want) in self.sites.items():
            leader = self.shared[name]
            wants[leader] = wants.get(leader, Want()) | want
        self.wants = wants
        self.calls: list[str] = []  # in this sample
        self.order: list[str] | None = None  # of the first observed sample
        self.hooks = ExitStack()

    def __enter__(self) -> Observed:
        for name, (site, _) in self.sites.items():
            hook = partial(self._before, name)
            handle = site.module.register_forward_pre_hook(hook, with_kwargs=True)
            self.hooks.callback(handle.remove)
        return self

    def __exit__(self, *error: Any) -> None:
        self.hooks.close()

    def _before(self, name: str, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if not self.on:
            return
        self.calls.append(name)
        if is_fused_experts(module):
            hidden = args[0] if args else kwargs["hidden_states"]
            index = args[1] if len(args) > 1 else kwargs["top_k_index"]
            for projection, expert, x in expert_inputs(module, hidden, index):
                self._collector(name, projection, expert, width=x.shape[-1]).add(x)
        elif self.shared[name] == name:
            x = args[0] if args else kwargs["input"]
            self._collector(name, width=x.shape[-1]).add(x)
        # Left early only where every sample calls the same matrices, each once.
        if self.order is not None and name == self.order[-1] and self.calls == self.order:
            self.calls.clear()
            raise Left

    def _collector(self, name: str, *at: Any, width: int) -> Collector:
        key = (name, *at)
        if key not in self.collectors:
            self.collectors[key] = Collector(self.wants[name], width, self.device, self.tokens)
        return self.collectors[key]

    def end_of_sample(self) -> None:
        if self.on and self.order is None and sorted(self.calls) == sorted(self.sites):
            self.order = list(self.calls)
        self.calls.clear()

    def finish(self, thin: list[str]) -> SiteStats:
        finished = {key: collector.finish() for key, collector in self.collectors.items()}
        for key, collector in self.collectors.items():
            _check(key, collector, finished[key])
        out: SiteStats = {}
        unreached: list[str] = []
        for name, (site, want) in self.sites.items():
            if is_fused_experts(site.module):
                keys = [
                    (name, projection, expert)
                    for projection in QuantExperts.PROJECTIONS
                    for expert in range(getattr(site.module, projection).shape[0])
                ]
                widths = [matrix_size(site.module, key[1])[1] for key in keys]
            else:
                keys, widths = [(self.shared[name],)], [0]
            each = []
            for key, width in zip(keys, widths, strict=True):
                if key not in finished:
                    unreached.append(_said(key) if key[1:] else name)
                    width = width or _width(site.module)
                    finished[key] = Collector(want, width, self.device, self.tokens).finish()
                found = finished[key]
                if 0 < found.tokens < (wide := self._wide(found, width, site)):
                    thin.append(f"{_said(key) if key[1:] else name}: {found.tokens} of {wide}")
                each.append(found)
            out[name] = tuple(each)
        if unreached:
            message = "calibration: no token reached %d of %d matrices, which are rounded without data: %s%s"
            more = "; ..." if len(unreached) > 3 else ""
            log.warning(message, len(unreached), len(finished), "; ".join(unreached[:3]), more)
        return out

    @staticmethod
    def _wide(stats: Stats, width: int, site: Site) -> int:
        return width or (0 if stats.hessian is None else stats.hessian.shape[0])


def _said(key: tuple) -> str:
    return ".".join(map(str, key))


def _width(module: nn.Module) -> int:
    return module.nx if hasattr(module, "nx") else module.weight.shape[1]


def _check(key: tuple, collector: Collector, stats: Stats) -> None:
    if collector.bad:
        raise PatchError(
            f"{_said(key)}: {collector.bad} of {collector.tokens} calibration tokens have NaN or infinite "
            "activations there"
        )
    for tensor in (stats.hessian, stats.square_mean):
        if tensor is not None and not torch.isfinite(tensor).all():
            raise PatchError(f"{_said(key)}: the squares of its inputs overflow fp32")
