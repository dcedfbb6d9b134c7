"""The next token of one request: of its own logits, options, tokens and generator alone.

Edits and cuts are those of transformers in the order in which `generate` applies them: bias, repetition
penalty, temperature, top-k, top-p, min-p; presence and frequency penalties come after the first penalty.
"""

from __future__ import annotations

from collections import Counter

import torch

from hfaccel.serve.requests import Options, Request, Score

LEAST_LOGPROB = -9999.0  # of what cannot be: JSON has no infinity


def choose(logits: torch.Tensor, request: Request) -> int:
    """The next token, from logits [vocab] of any dtype, which are not changed.

    Raises: ValueError where they give no probabilities.
    """
    options = request.options
    if request.plain:
        return int(logits.argmax())
    row = logits.to(device="cpu", dtype=torch.float32, copy=True)
    if options.edits:
        edit(row, request)
    if request.constraint is not None:
        request.constraint.mask(row)
    if options.temperature == 0:
        return int(row.argmax())
    ids, weights = candidates(row, options)
    reach = weights.double().cumsum(0)
    if not (torch.isfinite(reach[-1]) and reach[-1] > 0):
        raise ValueError("the logits give no probabilities: they are not finite")
    at = torch.rand(1, generator=request.generator, dtype=torch.float64) * reach[-1]
    index = min(int(torch.searchsorted(reach, at, right=True)), len(reach) - 1)
    return int(ids[index])


def edit(row: torch.Tensor, request: Request) -> None:
    """Bias, penalties and tokens that may not come yet, on logits [vocab] fp32 in place."""
    options = request.options
    if options.logit_bias:
        row[list(options.logit_bias)] += torch.tensor(list(options.logit_bias.values()), dtype=row.dtype)
    if options.repetition_penalty != 1:
        seen = sorted(set(request.prompt) | set(request.output))
        values = row[seen]
        penalty = options.repetition_penalty
        row[seen] = torch.where(values < 0, values * penalty, values / penalty)
    if (options.presence_penalty or options.frequency_penalty) and request.output:
        times = Counter(request.output)
        counts = torch.tensor(list(times.values()), dtype=row.dtype)
        row[list(times)] -= options.presence_penalty + options.frequency_penalty * counts
    if barred := [token for token in request.barred if token < len(row)]:
        row[barred] = -torch.inf


def candidates(row: torch.Tensor, options: Options) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens that can be chosen and their weights, from logits [vocab] fp32: ids [n] int64, weights [n]."""
    scores = (row - row.max()) / options.temperature
    if options.top_k and options.top_k < len(scores):  # all that equal the last one are in
        ids = (scores >= scores.topk(options.top_k).values[-1]).nonzero().flatten()
    else:
        ids = torch.arange(len(scores))
    weights = torch.softmax(scores[ids], dim=0)
    if options.top_p < 1:
        weights, order = weights.sort(descending=True, stable=True)
        ids = ids[order]
        before = weights.cumsum(0) - weights
        kept = max(1, int((before < options.top_p).sum()))
        ids, weights = ids[:kept], weights[:kept]
    if options.min_p > 0:
        likely = weights >= options.min_p * weights.max()
        ids, weights = ids[likely], weights[likely]
    return ids, weights


def scores(logits: torch.Tensor, tokens: list[int], tops: list[int]) -> list[Score]:
    """How likely tokens [R] are by logits [R, vocab] of any dtype, each with so many alternatives."""
    logprobs = logits.float().log_softmax(-1).clamp_min(LEAST_LOGPROB)
    most = min(max(tops), logits.shape[-1])
    chosen = logprobs.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0].tolist()
    values, ids = (x.tolist() for x in logprobs.topk(most)) if most else ([[]] * len(tokens),) * 2
    return [
        Score(token, logprob, tuple(zip(ids[n][:top], values[n][:top], strict=True)))
        for n, (token, logprob, top) in enumerate(zip(tokens, chosen, tops, strict=True))
    ]
