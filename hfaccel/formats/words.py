"""Small unsigned integers packed into int32 words, as GPTQ, AWQ and compressed-tensors files have them.

Values follow each other from the lowest bit up, along the last axis:

    2, 4, 8 bits   32 / bits values a word
    3 bits         32 values in three words, one stream of 96 bits (GPTQ)

`order` says which of a word's values lies at each place, lowest bits first, where that is not 0, 1, 2, ...
"""

from __future__ import annotations

import torch
from torch import Tensor


def period(bits: int) -> tuple[int, int]:
    """(values, words) after which the pattern repeats."""
    return (32, 3) if bits == 3 else (32 // bits, 1)


def pack(values: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """uint8 [..., n] -> int32 [..., words]; a last word that is not full is filled with zeros."""
    per, words = period(bits)
    n = values.shape[-1]
    full = torch.nn.functional.pad(values, (0, -n % per)) if n % per else values
    each = full.reshape(*values.shape[:-1], -1, per)
    out = each.new_zeros(*each.shape[:-1], words, dtype=torch.int64)
    for i in range(per):
        word, at = divmod(i * bits, 32)
        value = each[..., i if order is None else order[i]].to(torch.int64)
        out[..., word] |= value << at
        if at + bits > 32:
            out[..., word + 1] |= value >> (32 - at)
    # The low 32 bits, as the signed number that has them.
    out = (out & 0xFFFFFFFF) - ((out & 0x80000000) << 1)
    return out.to(torch.int32).flatten(-2)


def unpack(packed: Tensor, bits: int, n: int, order: tuple[int, ...] | None = None) -> Tensor:
    """int32 [..., words] -> uint8 [..., n], the inverse of `pack`."""
    per, words = period(bits)
    each = packed.reshape(*packed.shape[:-1], -1, words).to(torch.int64) & 0xFFFFFFFF
    out = torch.empty(*each.shape[:-1], per, dtype=torch.uint8, device=packed.device)
    mask = (1 << bits) - 1
    for i in range(per):
        word, at = divmod(i * bits, 32)
        value = each[..., word] >> at
        if at + bits > 32:
            value = value | each[..., word + 1] << (32 - at)
        out[..., i if order is None else order[i]] = (value & mask).to(torch.uint8)
    return out.flatten(-2)[..., :n]
