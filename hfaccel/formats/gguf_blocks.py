"""What the blocks of a GGUF tensor stand for.

A row of a matrix is cut into blocks of 32 elements, of k-types into superblocks of 256; blocks come as uint8
[M, bytes]. d, m and dmin are fp16, nibbles hold the first half of a block in their low bits:

    Q4_0   d, 16 bytes of nibbles                                 d (c - 8)
    Q4_1   d, m, 16 bytes of nibbles                              d c + m
    Q5_0   d, 32 high bits, 16 bytes of nibbles                   d (c - 16)
    Q5_1   d, m, 32 high bits, 16 bytes of nibbles                d c + m
    Q8_0   d, 32 codes                                            d c, int8
    Q2_K   16 x (scale, min) of 4 bits, 64 bytes of 2 bits, d, dmin
                                                                  d scale c - dmin min, groups of 16
    Q3_K   32 bytes of high bits, 64 bytes of 2 bits, 12 of 16 scales, d
                                                                  d (scale - 32) (c - 4), groups of 16
    Q4_K   d, dmin, 12 bytes of 8 x (scale, min) of 6 bits, 128 of nibbles
                                                                  d scale c - dmin min, groups of 32
    Q5_K   the same with 32 bytes of high bits before the nibbles
    Q6_K   128 bytes of low nibbles, 64 of 2 high bits, 16 scales int8, d
                                                                  d scale (c - 32), groups of 16

`parts` takes a block apart, `decode` gives the values in fp32, rounded at most once (products of fp16 with
these integers are exact but for Q6_K's and Q3_K's last one).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_CHUNK_BYTES = 1 << 22  # of blocks that `decode_rows` takes at a time


@dataclass(frozen=True)
class Parts:
    """M blocks of one type: w = (d scale) (code - zero) + (m or -dmin min), per group of `size / G` elements.

    Attributes:
        codes: uint8 [M, size], unsigned (Q8_0: code + 128).
        zero: the code that stands for 0, where there is no minimum.
        d: fp16 [M].
        scale: int16 [M, G], or None where each block is one group.
        m: fp16 [M], the minimum itself (no `minimum`) or dmin; or None.
        minimum: uint8 [M, G], or None.
    """

    codes: Tensor
    zero: int
    d: Tensor
    scale: Tensor | None = None
    m: Tensor | None = None
    minimum: Tensor | None = None

    @property
    def scales(self) -> Tensor:
        """fp32 [M, G], exact."""
        d = self.d.float()[:, None]
        return d if self.scale is None else d * self.scale.float()

    @property
    def minimums(self) -> Tensor | None:
        """What is added, fp32 [M, G], exact."""
        if self.m is None:
            return None
        m = self.m.float()[:, None]
        return m if self.minimum is None else -(m * self.minimum.float())


def parts(blocks: Tensor, name: str) -> Parts:
    """Blocks uint8 [M, bytes] of a quantized type, taken apart."""
    return _PARTS[name](blocks)


def decode(blocks: Tensor, name: str) -> Tensor:
    """fp32 [M, size] of blocks uint8 [M, bytes] of any type."""
    if name in FLOATS:
        return blocks.view(FLOATS[name]).float()
    taken = parts(blocks, name)
    scales, minimums = taken.scales, taken.minimums
    out = taken.codes.float().view(len(blocks), scales.shape[1], -1)
    if minimums is None:
        out = (out - taken.zero).mul_(scales[:, :, None])
    else:
        out = out.mul_(scales[:, :, None]).add_(minimums[:, :, None])
    return out.view(len(blocks), -1)


def decode_rows(rows: Tensor, name: str, bytes_: int, dtype: torch.dtype) -> Tensor:
    """[N, K] of rows uint8 [N, row bytes] of blocks of `bytes_` bytes, a bounded number at a time."""
    if name in FLOATS:
        kept = rows.view(FLOATS[name])
        return kept.clone() if kept.dtype == dtype else kept.to(dtype)
    out = None
    for start in range(0, len(rows), step := max(1, _CHUNK_BYTES // max(rows.shape[1], 1))):
        piece = rows[start : start + step]
        values = decode(piece.reshape(-1, bytes_), name).view(len(piece), -1)
        if out is None:
            out = torch.empty(len(rows), values.shape[1], dtype=dtype)
        out[start : start + step] = values
    return out


FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def _half(blocks: Tensor, at: int) -> Tensor:
    return blocks[:, at : at + 2].contiguous().view(torch.float16)[:, 0]


def _nibbles(packed: Tensor) -> Tensor:
    """The low nibbles of [M, n] bytes, then the high ones."""
    return torch.cat([packed & 15, packed >> 4], -1)


def _bits(packed: Tensor) -> Tensor:
    """Eight bits of each byte, the lowest first: [..., n] -> [..., n, 8]."""
    return packed[..., None] >> torch.arange(8, dtype=torch.uint8) & 1


def _q4_0(b: Tensor) -> Parts:
    return Parts(_nibbles(b[:, 2:]), 8, _half(b, 0))


def _q4_1(b: Tensor) -> Parts:
    return Parts(_nibbles(b[:, 4:]), 0, _half(b, 0), m=_half(b, 2))


def _q5_0(b: Tensor) -> Parts:
    return Parts(_nibbles(b[:, 6:]) | _bits(b[:, 2:6]).flatten(1) << 4, 16, _half(b, 0))


def _q5_1(b: Tensor) -> Parts:
    return Parts(_nibbles(b[:, 8:]) | _bits(b[:, 4:8]).flatten(1) << 4, 0, _half(b, 0), m=_half(b, 2))


def _q8_0(b: Tensor) -> Parts:
    return Parts(b[:, 2:] ^ 128, 128, _half(b, 0))


def _pairs(packed: Tensor) -> Tensor:
    """2-bit planes: [M, 64] -> [M, 256], of each 32 bytes first all lowest pairs."""
    planes = packed.view(-1, 2, 1, 32) >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None] & 3
    return planes.flatten(1)


def _q2_k(b: Tensor) -> Parts:
    both = b[:, :16]
    return Parts(
        _pairs(b[:, 16:80].contiguous()),
        0,
        _half(b, 80),
        scale=(both & 15).short(),
        m=_half(b, 82),
        minimum=both >> 4,
    )


def _q3_k(b: Tensor) -> Parts:
    high = _bits(b[:, :32]).transpose(1, 2).flatten(1)  # bit i of byte l: that of code 32 * i + l
    packed = b[:, 96:108]
    low = _nibbles(packed[:, :8])
    top = torch.cat([packed[:, 8:] >> 2 * i & 3 for i in range(4)], 1)
    scale = (low | top << 4).short() - 32
    return Parts(_pairs(b[:, 32:96].contiguous()) | high << 2, 4, _half(b, 108), scale=scale)


def _six_bits(packed: Tensor) -> tuple[Tensor, Tensor]:
    """8 scales and 8 minimums out of 12 bytes: four of each whole, four with their high bits above those."""
    first, second, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat([first & 63, rest & 15 | first >> 6 << 4], 1)
    return scales, torch.cat([second & 63, rest >> 4 | second >> 6 << 4], 1)


def _q4_k(b: Tensor) -> Parts:
    scales, minimums = _six_bits(b[:, 4:16])
    codes = _nibbles(b[:, 16:].reshape(-1, 4, 32)).flatten(1)
    return Parts(codes, 0, _half(b, 0), scale=scales.short(), m=_half(b, 2), minimum=minimums)


def _q5_k(b: Tensor) -> Parts:
    scales, minimums = _six_bits(b[:, 4:16])
    high = _bits(b[:, 16:48]).transpose(1, 2).flatten(1)
    codes = _nibbles(b[:, 48:].reshape(-1, 4, 32)).flatten(1) | high << 4
    return Parts(codes, 0, _half(b, 0), scale=scales.short(), m=_half(b, 2), minimum=minimums)


def _q6_k(b: Tensor) -> Parts:
    low = _nibbles(b[:, :128].reshape(-1, 2, 64)).flatten(1)
    high = _pairs(b[:, 128:192].contiguous())
    scale = b[:, 192:208].contiguous().view(torch.int8).short()
    return Parts(low | high << 4, 32, _half(b, 208), scale=scale)


_PARTS: dict[str, Callable[[Tensor], Parts]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
