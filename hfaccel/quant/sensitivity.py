"""What rounding one matrix at a time does to a model's predictions, measured on a few windows of text.

A forward with one changed matrix differs from the original's only from its block on: all earlier blocks give
the outputs that were recorded once. Modules are swapped while it is measured and put back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hfaccel import compat
from hfaccel.anatomy import Anatomy
from hfaccel.errors import PatchError
from hfaccel.measure.perplexity import evaluating
from hfaccel.progress import progress_bar
from hfaccel.quant.linear import show_as_int8
from hfaccel.quant.rounding import Rounding
from hfaccel.transform import Fold, Site

ROWS = 16  # of logits at a time: they stay in cache


@torch.no_grad()
def sensitivities(
    model: nn.Module,
    parts: Anatomy,
    probes: Sequence[tuple[Rounding, list[Site]]],
    known: dict[str, Fold],
    windows: Tensor,
    progress: bool = True,
) -> list[float]:
    """Mean KL(original || changed) of each probe: a transform and the sites that it changes together.

    Args:
        known: site's name -> what its rounding is told of its inputs.
        windows: ids [W, T].
    Returns: of each probe; infinite where it makes logits NaN.
    Raises: PatchError if the original's logits are.
    """
    with evaluating(model), Replay(model, parts, windows) as replay:
        replay.record()
        found = []
        with progress_bar("measuring", len(probes), progress) as advance:
            for transform, sites in probes:
                with rounded(model, transform, sites, known):
                    found.append(replay.divergence(first_block(sites, parts)))
                advance()
    return found


def first_block(sites: list[Site], parts: Anatomy) -> int:
    """The first block that a change of these sites may reach."""
    if any(isinstance(site.module, nn.Embedding) for site in sites):
        return 0
    return min(len(parts.blocks) if site.block is None else site.block for site in sites)


@contextmanager
def rounded(
    model: nn.Module, transform: Rounding, sites: list[Site], known: dict[str, Fold]
) -> Iterator[None]:
    """The model with packed modules at some sites."""
    before: list[tuple[nn.Module, str, nn.Module]] = []
    try:
        for site in sites:
            with compat.materialized(site.module):
                new = transform.apply(replace(site, fold=known.get(site.name)), None)
            if site.as_int8:
                show_as_int8(new)
            compat.move_inputs_as(site.module, new)
            for alias in site.aliases:
                parent, _, attribute = alias.rpartition(".")
                parent = model.get_submodule(parent)
                before.append((parent, attribute, site.module))
                setattr(parent, attribute, new)
        yield
    finally:
        for parent, attribute, module in before:
            setattr(parent, attribute, module)


class Replay:
    """A model's forward over fixed windows from any block on; earlier ones give what they gave."""

    def __init__(self, model: nn.Module, parts: Anatomy, windows: Tensor) -> None:
        self.model, self.windows = model, windows
        self.blocks = [block.module for block in parts.blocks]
        self.outputs: list[Any] = [None] * len(self.blocks)
        self.probabilities = self.negative_entropy = torch.empty(0)
        self.own = [vars(block).get("forward") for block in self.blocks]

    def __enter__(self) -> Replay:
        return self

    def __exit__(self, *error: Any) -> None:
        self.outputs.clear()
        self.probabilities = torch.empty(0)

    def record(self) -> None:
        """Run the original once, and keep what its blocks give and its distribution."""
        handles = [
            block.register_forward_hook(lambda module, args, out, at=at: self.outputs.__setitem__(at, out))
            for at, block in enumerate(self.blocks)
        ]
        try:
            logits = self._forward()
        finally:
            for handle in handles:
                handle.remove()
        # In place: of a vocabulary of 256k each copy in fp32 takes half a gigabyte.
        self.probabilities = logits.float()
        self.negative_entropy = torch.empty(len(logits), device=logits.device)
        for p, negative_entropy in zip(
            self.probabilities.split(ROWS), self.negative_entropy.split(ROWS), strict=True
        ):
            if p.isnan().any():
                raise PatchError(f"{type(self.model).__name__}: its logits are not numbers")
            log_p = p.log_softmax(-1)
            torch.exp(log_p, out=p)
            negative_entropy.copy_((p * log_p).masked_fill_(p == 0, 0.0).sum(-1))

    def divergence(self, first: int) -> float:
        """Mean KL(original || now), of which only blocks from `first` on may differ."""
        with self._replayed(first):
            logits = self._forward()
        total = 0.0
        for at in range(0, len(logits), ROWS):
            q, p = logits[at : at + ROWS].float().clamp_min_(-1e4), self.probabilities[at : at + ROWS]
            total += float(
                (q.logsumexp(-1) - (p * q).sum(-1)).add_(self.negative_entropy[at : at + ROWS]).sum()
            )
        return max(0.0, total / len(logits)) if total == total else math.inf

    def _forward(self) -> Tensor:
        """Logits [W x T, V]."""
        return self.model(input_ids=self.windows, use_cache=False).logits.flatten(0, 1)

    @contextmanager
    def _replayed(self, first: int) -> Iterator[None]:
        try:
            for at in range(first):
                self.blocks[at].forward = self._recorded(at)
            yield
        finally:
            for block, own in zip(self.blocks[:first], self.own, strict=False):
                if own is None:
                    vars(block).pop("forward", None)
                else:
                    block.forward = own

    def _recorded(self, at: int) -> Callable[..., Any]:
        return lambda *args, **kwargs: self.outputs[at]
