"""Bits for every matrix under a budget: `auto@4.5bpw`, `auto@300MB`.

What a matrix costs the model is measured (`sensitivity.py`): it alone is rounded to a probe's width, and the
mean KL(original || changed) over a few windows of text is taken. Errors this small act on the logits
linearly, so that KL grows with their square, and what other widths cost follows from the squared errors:

    cost(matrix, width) = KL(matrix, probe) x error(matrix, width) / error(matrix, probe)

Small changes add up, so the choice is a knapsack (`allocation.py`).

Without measuring, sensitivities are those of a prior: the number of weights, times a factor for the role
(values and what writes to the residual stream count more) and for the first and last blocks.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hfaccel import auto, compat
from hfaccel.anatomy import Anatomy
from hfaccel.errors import PatchError
from hfaccel.measure.storage import bytes_of, weights_of
from hfaccel.observers import Stats
from hfaccel.quant.allocation import allocate
from hfaccel.quant.gptq import GPTQ
from hfaccel.quant.head import Head
from hfaccel.quant.hqq import HQQ
from hfaccel.quant.linear import is_conv1d, is_fused_experts
from hfaccel.quant.rounding import Rounding
from hfaccel.quant.sensitivity import sensitivities
from hfaccel.recipe import Budget, PatchConfig
from hfaccel.report import model_bytes
from hfaccel.samples import CalibrationData, calibration_data, read_samples
from hfaccel.sites import Plan, check_materialized
from hfaccel.transform import Fold, Site
from hfaccel_kernels.packing import dequantize_codes

log = logging.getLogger("hfaccel")

# (bits, group) that a matrix may get; None: left as it is.
WIDTHS = ((2, 64), (3, 64), (3, 32), (4, 128), (4, 64), (4, 32), (8, -1), None)
HEAD_WIDTHS = ((4, 64), (4, 32), (4, 16), (8, -1), None)
PROBE = (3, 64)
HEAD_PROBE = (4, 64)
WINDOWS, WINDOW_TOKENS = 4, 128
_ROWS = 64  # of a matrix, on which the errors of its widths are compared
_ENDS = 2  # blocks at either end that the prior favours
# KL by squared error and weight, on the demo model's twin; q, o, gate and what is not named: 1.
_PRIOR = {"v": 6.0, "k": 3.0, "qkv": 2.5, "up": 1.5, "gate_up": 1.2, "fc1": 1.2, "head": 2.5}
_PRIOR |= dict.fromkeys(("down", "fc2", "experts_down"), 1.8)
_PRIOR_ENDS = 3.0
_WORST = 1e6  # of a KL that is infinite


@dataclass
class Unit:
    """What gets one width: a matrix, or fused experts as a whole.

    Attributes:
        sites: one, or head and embedding where they share a tensor.
        names: every matrix name that leads there.
        errors: width -> (bytes, relative squared error), of those it may get.
        sensitivity: cost of an error of 1.
    """

    sites: list[Site]
    names: list[str]
    weights: int
    head: bool = False
    errors: dict[tuple[int, int] | None, tuple[int, float]] = field(default_factory=dict)
    sensitivity: float = 0.0

    @property
    def probe(self) -> tuple[int, int]:
        return HEAD_PROBE if self.head else PROBE

    @property
    def costs(self) -> dict[tuple[int, int] | None, tuple[int, float]]:
        """Width -> (bytes, cost)."""
        return {width: (size, self.sensitivity * error) for width, (size, error) in self.errors.items()}


def search(
    model: nn.Module,
    budget: Budget | str,
    *,
    calibration: Any = None,
    tokenizer: Any = None,
    progress: bool = True,
) -> PatchConfig:
    """The best widths under a budget, as an ordinary config; the model is left as it was.

    Args:
        budget: `auto@4.5bpw` (bits a weight, over the layers' matrices and the head: codes, scales, zero
            points and padding), `auto@300MB` (all of the model's tensors), with `-prior` not to measure.
        calibration: as `patch` takes it; None: the shipped text where a tokenizer is at hand. Widths are
            measured on it, and matrices rounded by GPTQ. Without any, and with `-prior` unless it is given,
            matrices are rounded by HQQ, and widths measured on what the model itself says.
    Raises: PatchError for models that predict no next token, and for budgets out of reach, with the smallest
        one in reach.
    """
    if isinstance(budget, str):
        budget = Budget.parse(budget)
    check_materialized(model)
    data, tokenizer = _text(model, budget, calibration, tokenizer)
    family = HQQ if data is None else GPTQ
    plan = Plan.of(model, PatchConfig((family(bits=PROBE[0]),)))
    parts = plan.anatomy
    if parts.kind != "decoder" or not model.can_generate():
        raise PatchError(
            f"{budget}: {type(model).__name__} predicts no next token, on which widths are chosen"
        )
    units = _units(model, plan)
    if not units:
        raise PatchError(f"{budget}: {type(model).__name__} has no matrix that can be packed")
    known = _expected_inputs(model, parts, units)
    for unit in units:
        unit.errors = _errors(unit, family, known)
    limit = _limit(model, budget, units)
    _check_reach(budget, units, limit, model)
    probed = [unit for unit in units if unit.probe in unit.errors]
    if budget.measure:
        probes = [(_transform(unit, unit.probe, HQQ), unit.sites) for unit in probed]
        windows = _windows(model, data, tokenizer)
        measured = sensitivities(model, parts, probes, known, windows, progress)
    else:
        measured = [_prior(unit, parts) * unit.errors[unit.probe][1] for unit in probed]
    for unit, sensitivity in zip(probed, measured, strict=True):
        unit.sensitivity = min(sensitivity, _WORST) / max(unit.errors[unit.probe][1], 1e-30)
    chosen = allocate([unit.costs for unit in units], limit)
    config = _config(units, chosen, family, parts, budget)
    total = sum(unit.costs[width][0] for unit, width in zip(units, chosen, strict=True))
    log.warning(
        "%s: %.3f bits a weight, %.1f MB of %.1f MB, expected KL %.3f; to repeat it without measuring, "
        "give as a dict, or in a .json file that is the recipe: %s",
        budget,
        8 * total / sum(unit.weights for unit in units),
        total / 1e6,
        limit / 1e6,
        sum(unit.costs[width][1] for unit, width in zip(units, chosen, strict=True)),
        json.dumps(config.to_dict()),
    )
    return config


# What can be chosen ---------------------------------------------------------------------------------------


def _units(model: nn.Module, plan: Plan) -> list[Unit]:
    out = []
    for transform, sites in plan.work:
        if isinstance(transform, Head):
            if sites:
                names = [site.name for site in sites]
                out.append(Unit(list(sites), names, weights_of(sites[0].module), head=True))
            continue
        shared: dict[int, Unit] = {}
        for site in sites:
            weight = next(site.module.parameters(recurse=False))
            inside = [n for n in plan.anatomy.matrices if n.rpartition(".")[0] == site.name]
            names = inside if is_fused_experts(site.module) else list(site.aliases)
            if id(weight) in shared:  # two modules around one tensor are rounded alike
                shared[id(weight)].sites.append(site)
                shared[id(weight)].names += names
                continue
            shared[id(weight)] = Unit([site], names, weights_of(site.module))
        out += shared.values()
    return out


def _transform(unit: Unit, width: tuple[int, int], family: type[Rounding]) -> Rounding:
    bits, group = width
    return (Head if unit.head else family)(bits=bits, group=group)


def _expected_inputs(model: nn.Module, parts: Anatomy, units: list[Unit]) -> dict[str, Fold]:
    """What norms say of the inputs of the matrices that they feed."""
    return HQQ().smooth(model, parts, [site for unit in units for site in unit.sites], {}, None)


def _matrices(module: nn.Module) -> Iterator[tuple[Tensor, int]]:
    """Some matrices [N, K] of a module, and how many of its matrices each stands for."""
    if is_fused_experts(module):
        for name in ("gate_up_proj", "down_proj"):
            stack = getattr(module, name).detach()
            yield (stack[0].T if module.is_transposed else stack[0]), stack.shape[0]
    else:
        yield (module.weight.T if is_conv1d(module) else module.weight).detach(), 1


def _errors(
    unit: Unit, family: type[Rounding], known: dict[str, Fold]
) -> dict[tuple[int, int] | None, tuple[int, float]]:
    """Width -> (bytes, squared error of some rows over that of zeros, weighted by the expected inputs).

    Widths whose scales cannot hold the weights are left out, and without the probe's all but None.
    """
    site = unit.sites[0]
    fold = known.get(site.name)
    stats = None if fold is None else fold.stats
    out: dict[tuple[int, int] | None, tuple[int, float]] = {}
    with compat.materialized(site.module), torch.no_grad():
        for width in HEAD_WIDTHS if unit.head else WIDTHS:
            if width is None:
                out[None] = (bytes_of(site.module), 0.0)
                continue
            try:
                out[width] = _error(unit, _transform(unit, width, family), stats)
            except PatchError as error:
                log.info("%s: %s", site.name, error)
    return out if unit.probe in out else {None: out[None]}


def _error(unit: Unit, transform: Rounding, stats: Stats | None) -> tuple[int, float]:
    size, wrong, whole = 0, 0.0, 0.0
    layout = transform.layout(unit.sites[0])
    for matrix, times in _matrices(unit.sites[0].module):
        size += times * layout.bytes(*matrix.shape)
        rows = matrix[:: -(-len(matrix) // _ROWS)].float()
        fed = stats if stats is not None and len(stats.square_mean) == matrix.shape[1] else None
        weight = 1.0 if fed is None else fed.square_mean.to(rows.device)
        rounding = transform.rounder(rows, fed if isinstance(transform, HQQ) else None)
        rounded = dequantize_codes(*rounding(rows, layout), layout)
        wrong += times * float((rounded - rows).square_().mul(weight).sum())
        whole += times * float(rows.square().mul(weight).sum())
    return size, wrong / max(whole, 1e-30)


# The budget -----------------------------------------------------------------------------------------------


def _limit(model: nn.Module, budget: Budget, units: list[Unit]) -> int:
    """Bytes that the units may take together."""
    if budget.bits_per_weight is not None:
        return math.floor(budget.bits_per_weight * sum(unit.weights for unit in units) / 8)
    return budget.bytes - _rest(model, units)


def _rest(model: nn.Module, units: list[Unit]) -> int:
    """Bytes of all that is not rounded."""
    return model_bytes(model) - sum(bytes_of(unit.sites[0].module) for unit in units)


def _check_reach(budget: Budget, units: list[Unit], limit: int, model: nn.Module) -> None:
    least = sum(min(size for size, _ in unit.errors.values()) for unit in units)
    if least <= limit:
        return
    if budget.bits_per_weight is not None:
        bits = math.ceil(8000 * least / sum(unit.weights for unit in units)) / 1000
        smallest = f"auto@{bits:.3f}bpw"
    else:
        smallest = f"auto@{math.ceil((least + _rest(model, units)) / 1e5) / 10:.1f}MB"
    raise PatchError(f"{budget} is out of reach for this model; the smallest is {smallest}")


def _text(
    model: nn.Module, budget: Budget, calibration: Any, tokenizer: Any
) -> tuple[CalibrationData | None, Any]:
    """What to measure and to calibrate on, if there is any, and a tokenizer for it."""
    if calibration is None and not budget.measure:
        return None, tokenizer
    try:
        return calibration_data(calibration, model, tokenizer, str(budget))
    except PatchError as error:
        if calibration is not None:
            raise
        log.info("%s: the model's own samples are used (%s)", budget, error)
        return None, None


def _windows(model: nn.Module, data: CalibrationData | None, tokenizer: Any) -> Tensor:
    """Ids [W, T]."""
    if data is None:
        return torch.cat(auto.texts(model, None, WINDOW_TOKENS)[:WINDOWS])
    stream = torch.cat(read_samples(data, model, tokenizer))
    tokens = min(WINDOW_TOKENS, len(stream))
    cut = stream[: len(stream) // tokens * tokens].view(-1, tokens)
    every = torch.linspace(0, len(cut) - 1, min(WINDOWS, len(cut))).round().long()
    device = next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))
    return cut[every].to(device)


def _prior(unit: Unit, parts: Anatomy) -> float:
    """What an error of this relative size is taken to cost."""
    site = unit.sites[0]
    factor = _PRIOR["head"] if unit.head else _PRIOR.get(site.role, 1.0)
    if site.block is not None and not _ENDS <= site.block < len(parts.blocks) - _ENDS:
        factor *= _PRIOR_ENDS
    return factor * unit.weights


# The result -----------------------------------------------------------------------------------------------


def _config(
    units: list[Unit],
    chosen: list[tuple[int, int] | None],
    family: type[Rounding],
    parts: Anatomy,
    budget: Budget,
) -> PatchConfig:
    out: list[Any] = []
    widths: dict[tuple[int, int] | None, list[str]] = {}
    head: tuple[int, int] | None = None
    for unit, width in zip(units, chosen, strict=True):
        if unit.head:
            head = width
        else:
            widths.setdefault(width, []).extend(unit.names)
    numbers = [block.name for block in parts.blocks]
    for width in sorted((width for width in widths if width is not None), reverse=True):
        bits, group = width
        targets = None if len(widths) == 1 else patterns(widths[width], numbers)
        out.append(family(bits=bits, group=group, targets=targets))
    if any(unit.head for unit in units) and (out or head is not None):
        out.append(Head(bits=16) if head is None else Head(bits=head[0], group=head[1]))
    return PatchConfig((*out, *budget.others))


def patterns(names: list[str], blocks: list[str]) -> tuple[str, ...]:
    """Target patterns that match exactly these names: one for the same matrix of several blocks."""
    places: dict[tuple[str, str], list[str]] = {}
    for name in names:
        block = next((block for block in blocks if name.startswith(f"{block}.")), None)
        if block is None:
            places[name, ""] = []
            continue
        stack, _, number = block.rpartition(".")
        places.setdefault((stack, name.removeprefix(f"{block}.")), []).append(number)
    out = []
    for (stack, rest), numbers in places.items():
        every = [block for block in blocks if block.rpartition(".")[0] == stack]
        if not numbers:
            out.append(stack)
        elif len(numbers) == 1:
            out.append(f"{stack}.{numbers[0]}.{rest}")
        elif len(numbers) == len(every):
            out.append(f"{stack}.*.{rest}")
        else:
            out.append(f"re:{re.escape(stack)}\\.(?:{'|'.join(numbers)})\\.{re.escape(rest)}")
    return tuple(out)
