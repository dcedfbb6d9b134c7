"""Scales and norms of a quantized model trained towards the original, with every code fixed.

    minimize  mean over positions of KL(original || quantized)     over     s (1 + t)  for every scale s,
                                                                            w + u d    for every norm weight w

with t and d trained by Adam from zero, u the mean size of that norm's weights, and a learning rate that warms
up and falls to zero as a cosine. The original's logits are made when they are needed, by lending the model
its original weights for one forward. Zero points stay: they are integers, and a step of one is a whole code.

What is trained is what the file holds: scales are rounded to the layout's dtype at the end, nothing is added.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hfaccel.anatomy import Anatomy
from hfaccel.errors import PatchError
from hfaccel.journal import Journal
from hfaccel.progress import progress_bar
from hfaccel.quant.linear import QuantExperts, QuantLinear, ScaledLinear
from hfaccel.transform import Site
from hfaccel_kernels.packing import dequantize, pack_rows, unpack_rows

log = logging.getLogger("hfaccel")

_ROWS = 64  # positions whose softmax is taken at a time


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """Settings of the training.

    Attributes:
        steps: of Adam; lr: of the relative change of scales and norms.
        step_tokens: samples are added up to so many tokens a step.
        warmup: share of the steps.
        seed: of the order of samples.
    """

    steps: int = 64
    lr: float = 1e-3
    step_tokens: int = 1024
    warmup: float = 0.1
    seed: int = 0


def check_tunable(model: nn.Module) -> None:
    """Raises: PatchError for a model that gives no logits."""
    if getattr(model, "get_output_embeddings", lambda: None)() is None:
        raise PatchError(f"tuning needs logits, {type(model).__name__} has no output head")


def tune(
    model: nn.Module,
    anatomy: Anatomy,
    sites: Iterable[Site],
    samples: list[Tensor],
    journal: Journal,
    settings: Tuning,
    progress: bool = True,
) -> tuple[float, float]:
    """Train the scales of the packed modules at `sites` and the norms of the blocks.

    Args:
        journal: lends the original weights and takes down what is replaced.
    Returns: the divergence, in nats, over the first and the last quarter of the steps, before each was taken.
    Raises: PatchError if the loss is not finite; the journal's rollback is the caller's.
    """
    modules = [(site, model.get_submodule(site.name)) for site in sites]
    scaled = [_Scaled(m) for _, m in modules if isinstance(m, QuantLinear | QuantExperts)]
    norms = [_Norm(model, name, anatomy, journal) for name in _norm_names(anatomy)]
    parameters = [p for part in (*scaled, *norms) for p in part.parameters]
    optimizer = torch.optim.Adam(parameters, lr=settings.lr, betas=(0.9, 0.95))
    losses: list[float] = []
    frozen = [p for p in model.parameters() if p.requires_grad]
    training = [m for m in model.modules() if m.training]
    try:
        for p in frozen:
            p.requires_grad_(False)
        for m in training:
            m.training = False
        with progress_bar("tuning", settings.steps, progress) as advance, torch.enable_grad():
            for step, batch in enumerate(_batches(samples, settings)):
                for group in optimizer.param_groups:
                    group["lr"] = settings.lr * _schedule(step, settings)
                targets = _originals(model, batch, journal)
                losses.append(_step(model, batch, targets, scaled, norms))
                if not math.isfinite(losses[-1]):
                    raise PatchError(f"tuning: the divergence is {losses[-1]} at step {step}")
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                log.debug("tuning: step %d, KL %.5f", step, losses[-1])
                advance()
        with torch.no_grad():
            for part in (*scaled, *norms):
                part.settle()
    finally:
        for p in frozen:
            p.requires_grad_(True)
        for m in training:
            m.training = True
    quarter = max(1, len(losses) // 4)
    first, last = (sum(part) / quarter for part in (losses[:quarter], losses[-quarter:]))
    log.info("tuning: KL %.4f -> %.4f in %d steps", first, last, len(losses))
    return first, last


def _norm_names(anatomy: Anatomy) -> list[str]:
    names = [name for block in anatomy.blocks for name in block.norms.values()]
    return [*dict.fromkeys(names), *filter(None, (anatomy.encoder_norm, anatomy.final_norm))]


def _batches(samples: list[Tensor], settings: Tuning) -> Iterator[list[Tensor]]:
    """Samples in a random order, again and again, as many a step as make up its tokens."""
    generator = torch.Generator().manual_seed(settings.seed)
    queue: list[int] = []
    for _ in range(settings.steps):
        batch: list[Tensor] = []
        while sum(map(len, batch)) < settings.step_tokens:
            queue = queue or torch.randperm(len(samples), generator=generator).tolist()
            batch.append(samples[queue.pop()])
        yield batch


def _schedule(step: int, settings: Tuning) -> float:
    warm = max(1, round(settings.warmup * settings.steps))
    if step < warm:
        return (step + 1) / warm
    return 0.5 + 0.5 * math.cos(math.pi * (step - warm) / max(1, settings.steps - warm))


def _logits(model: nn.Module, sample: Tensor) -> Tensor:
    ids = sample[None].to(next(p.device for p in model.parameters() if not p.is_meta))
    extra = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    return model(input_ids=ids, use_cache=False, **extra).logits[0]


@torch.no_grad()
def _originals(model: nn.Module, batch: list[Tensor], journal: Journal) -> list[Tensor]:
    give_back = journal.borrow(model)
    try:
        return [_logits(model, sample) for sample in batch]
    finally:
        give_back()


def _step(
    model: nn.Module,
    batch: list[Tensor],
    targets: list[Tensor],
    scaled: list[_Scaled],
    norms: list[_Norm],
) -> float:
    """Gradients of the mean divergence over the batch's positions, which is returned."""
    total, positions = 0.0, sum(map(len, batch))
    for sample, target in zip(batch, targets, strict=True):
        for part in (*scaled, *norms):
            part.install()
        try:
            logits = _logits(model, sample)
        finally:
            for part in (*scaled, *norms):
                part.remove()
        # d KL / d logits = softmax(quantized) - softmax(original); the target's memory holds it.
        for mine, theirs in zip(logits.detach().split(_ROWS), target.split(_ROWS), strict=True):
            q, p = mine.float().log_softmax(-1), theirs.float().log_softmax(-1)
            total += float(F.kl_div(q, p, reduction="sum", log_target=True))
            theirs.copy_((q.exp_() - p.exp_()) / positions)
        logits.backward(target)
    return total / positions


class _Scaled:
    """The scales of one packed module under training: a relative change [.., N, G] of each."""

    def __init__(self, module: QuantLinear | QuantExperts) -> None:
        self.module = module
        self.changes: dict[str, Tensor] = {}
        for prefix, (n, k) in self._matrices().items():
            lead = getattr(module, f"{prefix}_scale").shape[:-3]
            shape = (*lead, n, module.layout.groups(k))
            self.changes[prefix] = torch.zeros(shape, device=self._device(), requires_grad=True)

    def _device(self) -> torch.device:
        return next(self.module.parameters()).device

    def _matrices(self) -> dict[str, tuple[int, int]]:
        return self.module.sizes if isinstance(self.module, QuantExperts) else {"weight": self.module.size}

    @property
    def parameters(self) -> list[Tensor]:
        return list(self.changes.values())

    def install(self) -> None:
        if isinstance(self.module, QuantExperts):
            self.module.project = self._project
        else:
            self.module.forward = self._forward

    def remove(self) -> None:
        vars(self.module).pop("project", None)
        vars(self.module).pop("forward", None)

    def _forward(self, x: Tensor) -> Tensor:
        module = self.module
        if isinstance(module, ScaledLinear):
            x = (x.float() * module.input_scale).to(x.dtype)
        y = _Product.apply(x, self.changes["weight"], module, "weight", None, module.size)
        return y if module.bias is None else y + module.bias.to(y.dtype)

    def _project(self, name: str, expert: int, x: Tensor) -> Tensor:
        bias = getattr(self.module, f"{name}_bias", None)
        size = self.module.sizes[name]
        y = _Product.apply(x, self.changes[name][expert], self.module, name, expert, size)
        return y if bias is None else y + bias[expert].to(y.dtype)

    def settle(self) -> None:
        for prefix, (n, _) in self._matrices().items():
            stored, change = getattr(self.module, f"{prefix}_scale"), self.changes[prefix]
            flat = stored.view(-1, *stored.shape[-3:])
            parts = [
                pack_rows(unpack_rows(scale, n).float() * (1 + t)).to(stored.dtype)
                for scale, t in zip(flat, change.reshape(-1, *change.shape[-2:]), strict=True)
            ]
            if not all(torch.isfinite(part).all() for part in parts):
                raise PatchError(f"tuning: a scale leaves the range of {self.module.layout.scale_dtype}")
            setattr(self.module, f"{prefix}_scale", torch.stack(parts).view(stored.shape))
        self.module.weights_version += 1


class _Product(torch.autograd.Function):
    """x W^T with W = s (1 + t) (code - zero), made from the codes forwards and backwards, never kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Tensor, module: nn.Module, prefix: str, expert, size) -> Tensor:
        ctx.save_for_backward(x, change)
        ctx.at = module, prefix, expert, size
        weight, _ = _weight(change, *ctx.at)
        return F.linear(x.float(), weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        x, change = ctx.saved_tensors
        module, _, _, (n, k) = ctx.at
        weight, base = _weight(change, *ctx.at)
        rows = grad.reshape(-1, n).float()
        to_x = (rows @ weight).view(x.shape).to(x.dtype) if ctx.needs_input_grad[0] else None
        product = (rows.t() @ x.reshape(-1, k).float()).mul_(base)
        size, groups = module.layout.group_len(k), module.layout.groups(k)
        to_change = F.pad(product, (0, size * groups - k)).view(n, groups, size).sum(-1)
        return to_x, to_change, None, None, None, None


def _weight(change: Tensor, module: nn.Module, prefix: str, expert: int | None, size: tuple[int, int]):
    """The weight with changed scales and with those that are stored, both fp32 [N, K]."""
    names = (prefix, f"{prefix}_scale", f"{prefix}_zero")
    # A linear shows its codes as int8 where its parent wants that: take what is stored.
    tensors = [{**module._parameters, **module._buffers}[name] for name in names]
    if expert is not None:
        tensors = [None if t is None else t[expert] for t in tensors]
    base = dequantize(*tensors, module.layout, *size)
    spread = (1 + change.detach()).repeat_interleave(module.layout.group_len(size[1]), 1)[:, : size[1]]
    return base * spread, base


class _Norm:
    """One norm under training. The original module stays as it is: a copy of it takes its place."""

    def __init__(self, model: nn.Module, name: str, anatomy: Anatomy, journal: Journal) -> None:
        parent_name, _, attribute = name.rpartition(".")
        parent = model.get_submodule(parent_name)
        original = getattr(parent, attribute)
        self.module = copy.copy(original)
        self.module._parameters = {
            key: None if p is None else nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad)
            for key, p in original._parameters.items()
        }
        journal.swap(parent, attribute, self.module)
        self.kept = {key: p for key, p in self.module._parameters.items() if p is not None}
        one_plus = anatomy.facts is not None and anatomy.facts.norm == "rms1p"
        self.units = {key: float(p.detach().float().abs().mean()) + one_plus for key, p in self.kept.items()}
        self.deltas = {
            key: torch.zeros_like(p, dtype=torch.float32, requires_grad=True) for key, p in self.kept.items()
        }

    @property
    def parameters(self) -> list[Tensor]:
        return list(self.deltas.values())

    def _now(self, key: str) -> Tensor:
        kept = self.kept[key].detach()
        return (kept.float() + self.units[key] * self.deltas[key]).to(kept.dtype)

    def install(self) -> None:
        for key in self.kept:
            del self.module._parameters[key]
            self.module.__dict__[key] = self._now(key)

    def remove(self) -> None:
        for key, parameter in self.kept.items():
            self.module.__dict__.pop(key, None)
            self.module._parameters[key] = parameter

    def settle(self) -> None:
        for key, parameter in self.kept.items():
            parameter.data.copy_(self._now(key))
