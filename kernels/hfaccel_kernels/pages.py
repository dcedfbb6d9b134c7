"""Pages of a KV cache: what lies in them, and the op that writes new keys and values there.

A layer's cache is `k_pages`, `v_pages` [pages, page_tokens, G, D] in the model's dtype, or int8 codes with
`k_scale`, `v_scale` [pages, page_tokens, G] fp32 beside them: value = code * scale, one scale per token and
KV head. `paged` reads them.
"""

from __future__ import annotations

import torch

from . import dispatch, triton_support


def quantize_kv(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round [..., D] to int8 codes in -127..127 and one fp32 scale per vector, scale = max|x| / 127.

    A zero vector gets scale 0 and codes 0. Rounding is to nearest, ties to even.
    """
    x = x.float()
    scale = x.abs().amax(-1) / 127.0
    inverse = torch.where(scale > 0, 1.0 / scale.clamp_min(torch.finfo(torch.float32).tiny), 0.0)
    codes = (x * inverse[..., None]).round_().clamp_(-127, 127).to(torch.int8)
    return codes, scale


def dequantize_kv(
    codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Invert `quantize_kv`: codes [..., D] int8 and scale [...] fp32 to values in `dtype`."""
    return (codes.float() * scale[..., None]).to(dtype)


def cache_write(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slots: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Store new keys and values in their slots, in place.

    Args:
        k, v: [T, G, D] (V may have a head size of its own).
        k_pages, v_pages: [pages, page_tokens, G, D], k's dtype or int8.
        slots: [T] int64, page * page_tokens + offset; distinct.
        k_scale, v_scale: [pages, page_tokens, G] fp32, exactly when the pages are int8.
    """
    backend = dispatch.choose("cache_write", k.device.type, k.dtype)
    backend.function(k, v, k_pages, v_pages, slots, k_scale, v_scale)


@dispatch.register("cache_write", "reference", priority=0, refusal=lambda call: "")
def cache_write_reference(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slots: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """The specification of `cache_write`."""
    for x, pages, scales in ((k, k_pages, k_scale), (v, v_pages, v_scale)):
        flat = pages.view(-1, *pages.shape[2:])
        if pages.dtype == torch.int8:
            x, scale = quantize_kv(x)
            scales.view(-1, pages.shape[2]).index_copy_(0, slots, scale)
        flat.index_copy_(0, slots, x.to(pages.dtype))


triton_support.register("cache_write", "triton_paged:cache_write")
