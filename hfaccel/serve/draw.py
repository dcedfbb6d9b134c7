"""The next token of a request whose options leave the logits as they are, from the few best of them.

The executor finds the largest logits of a row where it computes them (`Runner.candidates`). What can be
chosen is mostly among those: `draw` cuts and draws over them, and looks at the whole row only for what it
cannot know otherwise, the mass of all tokens and who is in the tail:

    top_k, at most 256          the candidates alone
    min_p                       the candidates alone, where the cut lies among them
    temperature, with top_p     one exp and sum over the row; more of it only if the draw, or the cut, lies
                                behind the candidates

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
    if whole:
        everyone = _weights(row, values[0], np.float32(options.temperature))
    total = float(everyone.sum()) if whole else reach[-1]
    if options.top_p < 1:
        if not closed and reach[-1] < options.top_p * total:
            weights, ids = _best_of(everyone, (1 - options.top_p) * total / len(row))
            reach = np.cumsum(weights)
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
        return _behind(everyone, at * total - reach[-1], ids)
    return int(ids[min(np.searchsorted(reach, at * total, side="right"), len(ids) - 1)])


def _weights(row: torch.Tensor, top: np.float32, temperature: np.float32) -> np.ndarray:
    """exp((row - top) / temperature) of all tokens, fp32. In numpy: threads that meet at five barriers for a
    row of 100 KB cost more than they save, most of all on a busy machine."""
    row = row.cpu()
    if row.dtype == torch.bfloat16:  # numpy has none: the upper half of fp32
        weights = (row.view(torch.uint16).numpy().astype(np.uint32) << 16).view(np.float32)
    else:
        weights = row.numpy().astype(np.float32)
    weights -= top
    with np.errstate(all="ignore"):
        weights /= temperature
        return np.exp(weights, out=weights)


def _best_of(everyone: np.ndarray, least: float) -> tuple[np.ndarray, np.ndarray]:
    """Weights of a row down to `least`, best first and equal ones by id, and their ids.

    All that weigh less than the cut-off mass over the size of the vocabulary weigh less than that mass
    together, so the cut is before them: some thousands of 49,152 are left to sort.
    """
    ids = np.flatnonzero(everyone >= least / 2).astype(np.uint64)
    bits = everyone[ids].view(np.uint32).astype(np.uint64)  # of positive numbers: in their order
    keys = np.sort((np.uint64(0xFFFFFFFF) - bits) << np.uint64(32) | ids)
    ids = (keys & np.uint64(0xFFFFFFFF)).astype(np.int64)
    return everyone[ids].astype(np.float64), ids


def _behind(everyone: np.ndarray, at: float, ids: np.ndarray) -> int:
    """The token that the mass `at` of those without `ids`, by id, falls on."""
    weights = everyone.astype(np.float64)
    weights[ids] = 0
    reach = np.cumsum(weights)
    if reach[-1] == 0:  # `at` is a rounding error
        return int(ids[-1])
    return int(np.searchsorted(reach, min(at, np.nextafter(reach[-1], 0)), side="right"))
