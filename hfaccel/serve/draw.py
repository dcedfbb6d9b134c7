"""The next token of a request whose options leave the logits as they are, from the few best of them.

The executor finds the largest logits of a row where it computes them (`Runner.candidates`). What can be
chosen is mostly among those: `draw` cuts and draws over them, and looks at the whole row only for what it
cannot know otherwise, the mass of all tokens and who is in the tail:

    top_k, at most 256          the candidates alone
    min_p                       the candidates alone, where the cut lies among them
    temperature, with top_p     one exp and sum over the row; more only if the draw, or the cut, lies behind
                                the candidates

Cuts are those of `sampling.choose`, which is asked for everything else; the order that a draw goes by is its
too, but with a temperature alone, where the candidates come first. A choice depends on the request's own row,
options and generator: how many candidates a step fetches for its neighbours does not matter.
"""

from __future__ import annotations

import numpy as np
import torch

from hfaccel.generate.sampling import MOST, SPARE
from hfaccel.serve.requests import Request
from hfaccel.serve.sampling import choose

FEW = 64  # candidates where no top-k says how many; they have most of the mass of a text's next token


def wanted(request: Request) -> int:
    """How many candidates its choice is over: 1 for the best one, 0 where all logits are needed."""
    options = request.options
    if request.plain:
        return 1
    if request.constraint is not None or options.edits or options.top_k > MOST:
        return 0
    return options.top_k + SPARE if options.top_k else FEW


def draw(row: torch.Tensor, request: Request, values: np.ndarray, ids: np.ndarray) -> int:
    """The next token, from logits [vocab] of any dtype, which are not changed.

    Args:
        values, ids: the largest of them, [n], fp32 and best first; n as `wanted` says, or more, or all:
            with less, all of the row is looked at.
    Raises: ValueError where they give no probabilities.
    """
    options, count = request.options, min(wanted(request), len(row))
    if request.plain:
        return int(ids[0])
    if count == 0 or count > len(values):
        return choose(row, request)
    values, ids = values[:count], ids[:count]
    if not np.isfinite(values[0]):  # NaN come first
        raise ValueError("the logits give no probabilities: they are not finite")
    with np.errstate(all="ignore"):
        scores = (values - values[0]) / np.float32(options.temperature)
    closed = count == len(row)  # nothing that is not here can be chosen
    if 0 < options.top_k < len(row):  # all that equal the last one are in
        kept = int((scores >= scores[options.top_k - 1]).sum())
        if kept == count and not closed:
            return choose(row, request)
        closed = True
    else:  # which of those that equal the last one were fetched is an accident
        kept = count if closed else int((scores > scores[-1]).sum())
    weights, ids = np.exp(scores[:kept], dtype=np.float64), ids[:kept]
    reach = np.cumsum(weights)
    if not kept:
        return choose(row, request)
    whole = not closed and (options.top_p < 1 or options.min_p == 0)
    total = _mass(row, float(values[0]), options.temperature) if whole else reach[-1]
    if options.top_p < 1:
        if not closed and reach[-1] < options.top_p * total:
            return choose(row, request)
        kept = max(1, int((reach - weights < options.top_p * total).sum()))
        weights, ids, closed = weights[:kept], ids[:kept], True
    if options.min_p > 0:
        kept = int((weights >= options.min_p * weights[0]).sum())
        if kept == len(weights) and not closed:
            return choose(row, request)
        weights, ids, closed = weights[:kept], ids[:kept], True
    at = float(torch.rand(1, generator=request.generator, dtype=torch.float64))
    if closed:
        if options.top_p == 1:  # the order in which `choose` has them
            order = ids.argsort()
            weights, ids = weights[order], ids[order]
        reach = np.cumsum(weights)
        total = reach[-1]
    elif at * total >= reach[-1]:
        return _behind(row, at * total - reach[-1], ids, float(values[0]), options.temperature)
    return int(ids[min(np.searchsorted(reach, at * total, side="right"), len(ids) - 1)])


def _weights(row: torch.Tensor, top: float, temperature: float) -> torch.Tensor:
    """exp((row - top) / temperature), fp32."""
    return row.to(torch.float32, copy=True).sub_(top).div_(temperature).exp_()


def _mass(row: torch.Tensor, top: float, temperature: float) -> float:
    return float(_weights(row, top, temperature).sum(dtype=torch.float64))


def _behind(row: torch.Tensor, at: float, ids: np.ndarray, top: float, temperature: float) -> int:
    """The token that the mass `at` of those without `ids`, by id, falls on."""
    weights = _weights(row, top, temperature).double()
    weights[torch.from_numpy(ids).to(row.device)] = 0
    reach = weights.cumsum(0)
    total = reach[-1].item()
    if total == 0:  # `at` is a rounding error
        return int(ids[-1])
    at = torch.tensor(min(at, np.nextafter(total, 0)), dtype=torch.float64, device=row.device)
    return int(torch.searchsorted(reach, at, right=True))
