"""Weights into the bytes that `layouts` describes and back: codes, scales, and what both stand for."""

from __future__ import annotations

from functools import lru_cache

import torch

from . import codebook, double_scales, super_scales
from .layouts import ROWS, Layout, round_up


@lru_cache(maxsize=256)
def _padding_index(layout: Layout, k: int) -> torch.Tensor | None:
    """Where each K-element lies in the padded K axis; None when nothing is padded."""
    if layout.padded_k(k) == k:
        return None
    index, at = [], 0
    for start, stop in layout.spans(k):
        index.extend(range(at, at + stop - start))
        at += round_up(stop - start, layout.k_step)
    return torch.tensor(index)


def pack_codes(codes: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Pack codes of one weight.

    Args:
        codes: [N, K] uint8, 0 .. 2^bits - 1 (symmetric codes c are passed as c + 2^(bits-1); float8 as its
            bits).
    Returns: uint8 [NB, block_bytes], on the device of `codes`.
    """
    n, k = codes.shape
    blocks, k_pad = -(-n // ROWS), layout.padded_k(k)
    index = _padding_index(layout, k)
    if index is not None or n % ROWS:
        full = codes.new_full((blocks * ROWS, k_pad), layout.zero)
        full[:n, index.to(codes.device) if index is not None else slice(None)] = codes
        codes = full
    # A quad is one int32 word, so that four codes are shifted at once: [blocks, steps, quad, row]
    steps = k_pad // layout.k_step
    quads = _words(codes).view(blocks, ROWS, steps, layout.k_step // 4).permute(0, 2, 3, 1)
    if layout.bits == 8:
        out = quads ^ _each(_flip(layout))
    elif layout.bits == 4:
        out = quads[:, :, 0] | quads[:, :, 1] << 4
    elif layout.bits == 2:
        out = _planes2(quads)
    elif layout.bits > 4:
        quads = quads.contiguous()
        low, high = quads & _each(15), quads >> 4 & _each(3)
        lines = [low[:, :, j] | low[:, :, j + 1] << 4 for j in range(0, quads.shape[2], 2)]
        out = torch.stack([*lines, _planes2(high) if layout.bits == 6 else _planes1(high)], 2)
    else:
        quads = quads.contiguous()
        low, high = quads & _each(3), quads >> 2 & _each(1)
        out = torch.stack([_planes2(low[:, :, :4]), _planes2(low[:, :, 4:]), _planes1(high)], 2)
    return out.reshape(blocks, -1).contiguous().view(torch.uint8)


def _words(codes: torch.Tensor) -> torch.Tensor:
    """Bytes as int32, four to one; neither shifts below nor masks carry anything from byte to byte."""
    return codes.contiguous().view(torch.int32)


def _each(byte: int) -> int:
    """The int32 that has this byte four times."""
    return byte * 0x01010101 - (1 << 32 if byte > 127 else 0)


def _flip(layout: Layout) -> int:
    """What 8-bit codes are stored with: the sign bit of integers turned over."""
    return 0 if layout.is_float else 128


def _planes2(quads: torch.Tensor) -> torch.Tensor:
    return quads[:, :, 0] | quads[:, :, 1] << 2 | quads[:, :, 2] << 4 | quads[:, :, 3] << 6


def _planes1(quads: torch.Tensor) -> torch.Tensor:
    line = quads[:, :, 0].clone()
    for j in range(1, 8):
        line |= quads[:, :, j] << j
    return line


def unpack_codes(weight: torch.Tensor, layout: Layout, n: int, k: int) -> torch.Tensor:
    """The inverse of `pack_codes`: uint8 [n, k] unsigned codes (8 bits: signed code + 128)."""
    blocks, k_pad = weight.shape[0], layout.padded_k(k)
    steps = k_pad // layout.k_step
    lines = _words(weight).view(blocks, steps, -1, ROWS)
    if layout.bits == 8:
        quads = lines ^ _each(_flip(layout))
    elif layout.bits == 4:
        quads = torch.cat([lines & _each(15), lines >> 4 & _each(15)], 2)
    elif layout.bits == 2:
        quads = torch.cat([lines >> 2 * j & _each(3) for j in range(4)], 2)
    elif layout.bits > 4:
        more, high = layout.bits - 4, lines[:, :, -1]
        mask = _each((1 << more) - 1)
        quads = torch.stack(
            [
                (lines[:, :, j // 2] >> 4 * (j % 2) & _each(15)) | (high >> more * j & mask) << 4
                for j in range(layout.k_step // 4)
            ],
            2,
        )
    else:
        high = lines[:, :, 2]
        quads = torch.stack(
            [(lines[:, :, j // 4] >> 2 * (j % 4) & _each(3)) | (high >> j & _each(1)) << 2 for j in range(8)],
            2,
        )
    codes = quads.permute(0, 3, 1, 2).reshape(-1).view(torch.uint8).view(blocks * ROWS, k_pad)
    index = _padding_index(layout, k)
    return codes[:n] if index is None else codes[:n, index.to(codes.device)]


def pack_rows(per_row: torch.Tensor) -> torch.Tensor:
    """Scales or zeros [N, G] -> [NB, G, 16]; padding rows 0."""
    n, g = per_row.shape
    blocks = -(-n // ROWS)
    if n % ROWS:
        per_row = torch.cat([per_row, per_row.new_zeros(blocks * ROWS - n, g)])
    return per_row.view(blocks, ROWS, g).transpose(1, 2).contiguous()


def unpack_rows(packed: torch.Tensor, n: int) -> torch.Tensor:
    """The inverse of `pack_rows`: [NB, G, 16] -> [n, G]."""
    return packed.transpose(1, 2).reshape(-1, packed.shape[1])[:n]


def pack_scales(scale: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Scales [N, G] of any float dtype as `weight_scale`."""
    if layout.has_minimum or layout.scale_dtype == "super":
        raise ValueError(f"scale_dtype={layout.scale_dtype!r}: packed by pack_minimums or super_scales.pack")
    if layout.scale_dtype != "double":
        return pack_rows(scale.to(layout.dtype))
    n = scale.shape[0]
    if n % ROWS:  # the last row again: a tile's extremes are those of real rows
        scale = torch.cat([scale, scale[-1:].expand(ROWS - n % ROWS, -1)])
    return double_scales.pack(pack_rows(scale.float()), n % ROWS or ROWS)


def pack_minimums(scale: torch.Tensor, minimum: torch.Tensor) -> torch.Tensor:
    """Scales and minimums [N, G] as the `weight_scale` of "fp16_min"."""
    return torch.stack([pack_rows(scale.half()), pack_rows(minimum.half())], 2)


def scale_rows(scale: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`weight_scale` as float scales and minimums (None where there are none), [NB, G, 16] each."""
    if layout.scale_dtype == "double":
        return double_scales.unpack(scale), None
    if layout.scale_dtype == "fp16_min":
        return scale[:, :, 0], scale[:, :, 1]
    if layout.scale_dtype in super_scales.TILE:
        return super_scales.unpack(scale, layout.scale_dtype)
    return scale, None


def unpack_scales(scale: torch.Tensor, layout: Layout, n: int) -> torch.Tensor:
    """The scales that `weight_scale` stands for: float [n, G]."""
    return unpack_rows(scale_rows(scale, layout)[0], n)


def dequantize(
    weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, layout: Layout, n: int, k: int
) -> torch.Tensor:
    """The weight itself, fp32 [n, k]: scale * (code - zero), scale * code + minimum, or scale * what the code
    stands for."""
    codes = unpack_codes(weight, layout, n, k)
    sides = (*scale_rows(scale, layout), zero)
    scale, minimum, zero = (None if side is None else unpack_rows(side, n) for side in sides)
    return dequantize_codes(codes, scale, zero, layout, minimum)


def dequantize_codes(
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    layout: Layout,
    minimum: torch.Tensor | None = None,
) -> torch.Tensor:
    """What unsigned codes [n, k], float scales, zeros and minimums [n, G] stand for; fp32 [n, k]."""
    k = codes.shape[1]
    group = layout.group_len(k)
    integer = layout.code == "int"
    out = codes.to(torch.float32) if integer else codebook.values(codes, layout.code)
    if layout.groups(k) * group == k:
        grouped = out.view(codes.shape[0], -1, group)
        if integer and minimum is None:
            grouped -= layout.zero if zero is None else zero.float()[:, :, None]
        grouped *= scale.float()[:, :, None]
        if minimum is not None:
            grouped += minimum.float()[:, :, None]
        return out
    for g, (start, stop) in enumerate(layout.spans(k)):  # the last group is short
        if integer and minimum is None:
            out[:, start:stop] -= layout.zero if zero is None else zero[:, g : g + 1].float()
        out[:, start:stop] *= scale[:, g : g + 1].float()
        if minimum is not None:
            out[:, start:stop] += minimum[:, g : g + 1].float()
    return out


def gather_rows(
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    layout: Layout,
    k: int,
    rows: torch.Tensor,
) -> torch.Tensor:
    """Embedding look-up in a packed weight: fp32 [*rows.shape, k], the rows of `dequantize` bit for bit."""
    flat = rows.reshape(-1)
    if not flat.numel():
        return torch.empty(*rows.shape, k, device=weight.device)
    block, lane = flat // ROWS, flat % ROWS
    lines = weight[block].view(flat.numel(), -1, ROWS, 4)
    mine = lines.gather(2, lane.view(-1, 1, 1, 1).expand(-1, lines.shape[1], 1, 4))
    # A block whose 16 rows are all this row decodes with the same code as any other; keep one row of it.
    codes = unpack_codes(
        mine.expand(-1, -1, ROWS, 4).reshape(flat.numel(), -1), layout, flat.numel() * ROWS, k
    )
    codes = codes.view(flat.numel(), ROWS, k)[:, 0]

    each = torch.arange(len(flat))
    scales, minimum = (
        side if side is None else side[each, :, lane] for side in scale_rows(scale[block], layout)
    )
    out = dequantize_codes(codes, scales, None if zero is None else zero[block, :, lane], layout, minimum)
    return out.view(*rows.shape, k)
