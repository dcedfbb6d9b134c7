"""GGUF blocks from codes and scales: how each type lies in bytes. What chose the codes is not said here.

A row of a matrix is cut into blocks of 32 elements, of k-types into superblocks of 256; M blocks are encoded
at a time, to uint8 [M, bytes]. `d` and `m` are fp16. One block, by type:

    Q8_0   d, 32 codes                                      34 bytes   d * code, code int8
    Q4_0   d, 16 bytes of nibbles                           18         d * (code - 8)
    Q4_1   d, m, 16 bytes of nibbles                        20         d * code + m
    Q5_0   d, 32 high bits, 16 bytes of nibbles             22         d * (code - 16)
    Q5_1   d, m, 32 high bits, 16 bytes of nibbles          24         d * code + m
    Q4_K   d, dmin, 12 bytes of 8 scales and 8 mins of six bits, 128 bytes of nibbles
                                                            144        d * scale * code - dmin * min
    Q5_K   the same with 32 bytes of high bits before the nibbles
                                                            176
    Q6_K   128 bytes of low nibbles, 64 of high pairs, 16 scales int8, d
                                                            210        d * scale * (code - 32)
"""

from __future__ import annotations

import torch
from torch import Tensor

from hfaccel.formats.gguf_file import TYPES

# Elements and bytes of a block, of the types that are written.
_WRITTEN = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
BLOCKS = {kind.name: (kind.size, kind.bytes) for kind in TYPES.values() if kind.name in _WRITTEN}


def q8_0(codes: Tensor, d: Tensor) -> Tensor:
    """codes int8 [M, 32], d fp16 [M]."""
    return torch.cat([_half(d), codes.view(torch.uint8)], 1)


def q4_0(codes: Tensor, d: Tensor) -> Tensor:
    """codes uint8 [M, 32] in 0 .. 15, d fp16 [M]."""
    return torch.cat([_half(d), _nibbles(codes)], 1)


def q4_1(codes: Tensor, d: Tensor, m: Tensor) -> Tensor:
    """codes uint8 [M, 32] in 0 .. 15, d and m fp16 [M]."""
    return torch.cat([_half(d), _half(m), _nibbles(codes)], 1)


def q5_0(codes: Tensor, d: Tensor) -> Tensor:
    """codes uint8 [M, 32] in 0 .. 31, d fp16 [M]."""
    return torch.cat([_half(d), _high_bits(codes), _nibbles(codes & 15)], 1)


def q5_1(codes: Tensor, d: Tensor, m: Tensor) -> Tensor:
    """codes uint8 [M, 32] in 0 .. 31, d and m fp16 [M]."""
    return torch.cat([_half(d), _half(m), _high_bits(codes), _nibbles(codes & 15)], 1)


def q4_k(codes: Tensor, scales: Tensor, mins: Tensor, d: Tensor, dmin: Tensor) -> Tensor:
    """codes uint8 [M, 256] in 0 .. 15, scales and mins uint8 [M, 8] in 0 .. 63, d and dmin fp16 [M]."""
    return torch.cat([_half(d), _half(dmin), _six_bits(scales, mins), _pairs_of_32(codes)], 1)


def q5_k(codes: Tensor, scales: Tensor, mins: Tensor, d: Tensor, dmin: Tensor) -> Tensor:
    """codes uint8 [M, 256] in 0 .. 31, the rest as in `q4_k`."""
    high = _gathered(codes.view(-1, 8, 32) >> 4, 1)  # bit i of byte l: that of code 32 * i + l
    return torch.cat(
        [_half(d), _half(dmin), _six_bits(scales, mins), high, _pairs_of_32(codes & 15)],
        1,
    )


def q6_k(codes: Tensor, scales: Tensor, d: Tensor) -> Tensor:
    """codes uint8 [M, 256] in 0 .. 63, scales int8 [M, 16], d fp16 [M]."""
    c = codes.view(-1, 2, 4, 32)  # halves of 128, each in four quarters
    low = c & 15
    nibbles = low[:, :, :2] | low[:, :, 2:] << 4
    high = c >> 4
    pairs = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    parts = nibbles.reshape(-1, 128), pairs.reshape(-1, 64), scales.view(torch.uint8), _half(d)
    return torch.cat(parts, 1)


def _half(values: Tensor) -> Tensor:
    return values.to(torch.float16).contiguous().view(torch.uint8).view(-1, 2)


def _nibbles(codes: Tensor) -> Tensor:
    """The first half of a block in the low nibbles, the second in the high ones."""
    return codes[:, :16] | codes[:, 16:] << 4


def _pairs_of_32(codes: Tensor) -> Tensor:
    c = codes.view(-1, 4, 2, 32)
    return (c[:, :, 0] | c[:, :, 1] << 4).reshape(-1, 128)


def _high_bits(codes: Tensor) -> Tensor:
    """Bit 4 of 32 codes as a little-endian word: bit j is that of code j."""
    return _gathered((codes >> 4).view(-1, 4, 8), 2)


def _gathered(bits: Tensor, dim: int) -> Tensor:
    """Eight bits along `dim` as a byte, the first one lowest."""
    out = bits.select(dim, 0).clone()
    for i in range(1, 8):
        out |= bits.select(dim, i) << i
    return out


def _six_bits(scales: Tensor, mins: Tensor) -> Tensor:
    """The first four of both whole in bytes 0-3 and 4-7; of the others the low four bits side by side in
    bytes 8-11, the high two on top of the first four."""
    first = scales[:, :4] | scales[:, 4:] >> 4 << 6
    second = mins[:, :4] | mins[:, 4:] >> 4 << 6
    return torch.cat([first, second, scales[:, 4:] & 15 | (mins[:, 4:] & 15) << 4], 1)
