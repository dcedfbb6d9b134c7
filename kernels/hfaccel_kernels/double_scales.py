"""Double quantization: scales that are 8-bit integers themselves (Dettmers et al. 2023, arXiv:2305.14314).

The at most 256 scales of a tile, 16 rows and 16 groups, are

    s = least + step * c,   step = (maximum - least) / 255,   c = round((s - least) / step)

in fp32. (The paper takes the mean off and has a sign; with the least no scale falls below zero, and no step
is longer.) A block of 16 rows stores its tiles one after the other, each as step, least (fp32) and then the
16 codes of every group: 8.25 bits a scale, beside 16 groups.

A scale errs by up to half a step. So in a tile with a group of zeros, whose least scale is 0, a group whose
largest weight is below 1/510 of the tile's is rounded to zeros as a whole; in a tile without one none is.

Product and sum are each rounded here and in C++; a fused multiply-add, as in Triton's kernels, rounds once,
and a scale there may differ by 2^-24 of the larger of both.
"""

from __future__ import annotations

import torch

TILE = 16  # groups
ROWS = 16
HEAD_BYTES = 8


def row_bytes(groups: int) -> int:
    """Bytes of the scales of one block of 16 rows."""
    return -(-groups // TILE) * HEAD_BYTES + groups * ROWS


def pack(rows: torch.Tensor, last: int = ROWS) -> torch.Tensor:
    """fp32 scales [NB, G, 16] -> uint8 [NB, row_bytes]; of the last block only `last` rows are real, the
    others get the code 0."""
    blocks, groups, _ = rows.shape
    out = torch.zeros(blocks, row_bytes(groups), dtype=torch.uint8, device=rows.device)
    for tile, to in _tiles(rows, out):
        least, most = tile.amin((1, 2)), tile.amax((1, 2))
        step = (most - least) / 255
        by = torch.where(step > 0, step, 1.0)[:, None, None]
        codes = torch.round((tile - least[:, None, None]) / by).clamp_(0, 255).to(torch.uint8)
        codes[-1:, :, last:] = 0
        to[:, :HEAD_BYTES] = torch.stack([step, least], 1).view(torch.uint8)
        to[:, HEAD_BYTES:] = codes.flatten(1)
    return out


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [NB, row_bytes] -> fp32 scales [NB, G, 16]."""
    tiles = -(-packed.shape[1] // (HEAD_BYTES + TILE * ROWS))
    groups = (packed.shape[1] - tiles * HEAD_BYTES) // ROWS
    out = torch.empty(len(packed), groups, ROWS, device=packed.device)
    for tile, of in _tiles(out, packed):
        step, least = of[:, :HEAD_BYTES].contiguous().view(torch.float32)[:, :, None, None].unbind(1)
        tile.copy_(of[:, HEAD_BYTES:].unflatten(1, (-1, ROWS)).float() * step + least)
    return out


def _tiles(rows: torch.Tensor, packed: torch.Tensor):
    """Views of both forms, tile by tile."""
    if rows.shape[1]:
        yield from zip(rows.split(TILE, 1), packed.split(HEAD_BYTES + TILE * ROWS, 1), strict=True)
