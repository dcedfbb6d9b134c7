"""Activations as a layout's product takes them: the specification, in plain PyTorch.

`csrc/quantize.cpp` and `triton_activations.py` give the same codes and scales bit for bit.
"""

from __future__ import annotations

import torch

from . import codebook
from .layouts import Layout

ACT_TOP = {8: 127, 16: 127 * 128}  # largest activation code
PEAK_FLOOR = 2.0**-100  # smaller chunks are zeros: the reciprocal must stay finite


def quantize_activations(x: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
    """Per-token, per-chunk symmetric integers.

    Args:
        x: [M, K], any float dtype; computed in fp32.
    Returns: codes [M, K] int8 (act_bits 8) or int16 (16), and scales fp32 [M, chunks]; with top = 127 or
        16256: scale = max|x| / top, code = round half to even of x * (1 / max|x| * top), each operation in
        fp32; codes are 0 where max|x| <= PEAK_FLOOR. A NaN or infinity makes the scale one, and with it
        every output of the token; the code of NaN is -top. A fixed scale: code = round(x * (1 / scale)),
        from -127 to 127. Beside float8 top is 448 and the codes are fp32, rounded to what e4m3 holds.
    """
    x = x.float()
    spans, top = layout.chunks(x.shape[1]), ACT_TOP[layout.act_bits]
    if layout.is_float:
        top = codebook.TOP["e4m3"]
    dtype = torch.float32 if layout.is_float else torch.int8 if layout.act_bits == 8 else torch.int16
    codes = torch.empty(x.shape, dtype=dtype, device=x.device)
    scales = torch.empty(x.shape[0], len(spans), device=x.device)
    for c, (start, stop) in enumerate(spans):
        part = x[:, start:stop]
        peak = part.abs().amax(1)
        inverse = torch.where(peak > PEAK_FLOOR, peak.reciprocal() * top, torch.zeros_like(peak))
        scales[:, c] = peak / top
        if layout.static:
            fixed = torch.full_like(peak, layout.act_scale)
            inverse = fixed.reciprocal()
            scales[:, c] = torch.where(peak.isfinite(), fixed, torch.nan)
        scaled = part * inverse[:, None]
        scaled = torch.where(scaled.isnan(), -top, scaled.clamp_(-top, top))
        if layout.is_float:
            codes[:, start:stop] = codebook.round_e4m3(scaled)
        else:
            codes[:, start:stop] = torch.round(scaled).to(codes.dtype)
    return codes, scales
