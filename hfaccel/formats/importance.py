"""What each input of a matrix weighs: its mean square over calibration, as rounding takes it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hfaccel.anatomy import anatomy
from hfaccel.compat import plain_name
from hfaccel.measure.perplexity import evaluating
from hfaccel.observers import Left, Observed, Want
from hfaccel.progress import progress_bar
from hfaccel.quant.linear import QuantExperts, is_conv1d, is_fused_experts
from hfaccel.samples import calibration_data, read_samples
from hfaccel.transform import Site


def input_squares(
    model: nn.Module, calibration: Any, tokenizer: Any, why: str, *, progress: bool = True
) -> dict[str, Tensor]:
    """Mean x^2 of each input of every linear, fp32 [K] by the plain name of its weight; experts' [E, K].

    The model runs as it is, one sample after the other; of samples with more tokens than the settings'
    `capture_tokens` evenly spread ones are taken. A matrix that no token reached is left out.

    Args:
        calibration: as `patch` takes it.
        why: the step that needs it, for messages.
    Raises: PatchError for data that cannot be used, NaN and infinite activations.
    """
    settings, tokenizer = calibration_data(calibration, model, tokenizer, why)
    samples = read_samples(settings, model, tokenizer)
    if settings.capture_tokens is not None:
        mean = sum(len(sample) for sample in samples) / len(samples)
        samples = samples[:: max(1, -(-len(samples) // max(1, int(settings.capture_tokens / mean))))]
    matrices = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) or is_conv1d(module) or is_fused_experts(module)
    ]
    first = {reader: group.readers[0] for group in anatomy(model).groups for reader in group.readers[1:]}
    sites = [(Site(module, name), Want(channels=True)) for name, module in matrices]
    device = next(p.device for p in model.parameters() if not p.is_meta)
    observed = Observed(sites, first, device, sum(len(sample) for sample in samples))
    observed.on = True
    with progress_bar("calibrating", len(samples), progress) as advance, observed, evaluating(model):
        for sample in samples:
            try:
                model(input_ids=sample[None].to(device), use_cache=False)
            except Left:
                pass
            observed.end_of_sample()
            advance()
    stats = observed.finish([])
    out: dict[str, Tensor] = {}
    for name, module in matrices:
        each = stats[name]
        if is_fused_experts(module):
            for place, projection in enumerate(QuantExperts.PROJECTIONS):
                count = len(each) // len(QuantExperts.PROJECTIONS)
                some = each[place * count : (place + 1) * count]
                mean = torch.stack([s.diagonal() for s in some]).cpu()
                # An expert that no token reached has the inputs of the others.
                empty = torch.tensor([s.tokens == 0 for s in some])
                mean[empty] = mean.mean(0)
                out[plain_name(f"{name}.{projection}")] = mean
        elif each[0].tokens:
            out[plain_name(f"{name}.weight")] = each[0].diagonal().cpu()
    return out
