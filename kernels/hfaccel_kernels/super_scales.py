"""Scales in two steps under fp16 ones: integers per group, a common factor per row and tile of groups.

    "super"       tile of 16 groups:  s = d * c,                    c int8
    "super_min"   tile of 8 groups:   s = d * c,  m = -(e * b),     c and b uint8;  w = s * code + m

d and e are fp16, so both products are exact in fp32. A block of 16 rows stores its tiles one after the other,
each as d of its rows (and then e), fp16 [16], and for every group its codes c (and then b), [16]. That is
9 bits a scale, and 18 or 20 bits for both of a group, in tiles that are full.
"""

from __future__ import annotations

import torch

ROWS = 16
TILE = {"super": 16, "super_min": 8}  # groups
NUMBERS = {"super": 1, "super_min": 2}  # of a group


def row_bytes(groups: int, kind: str) -> int:
    """Bytes of the scales of one block of 16 rows."""
    return (-(-groups // TILE[kind]) * 2 + groups) * ROWS * NUMBERS[kind]


def pack(kind: str, *pairs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """uint8 [NB, row_bytes] of N rows.

    Args:
        pairs: of scales and, for "super_min", of minimums: (factors fp16 [N, tiles], codes [N, G], int8 or
            uint8).
    """
    n, groups = pairs[0][1].shape
    blocks, tile = -(-n // ROWS), TILE[kind]
    out = torch.empty(blocks, row_bytes(groups, kind), dtype=torch.uint8, device=pairs[0][0].device)
    # [NB, tiles or G, number, 16 rows]
    factors = torch.stack([_blocks(factor) for factor, _ in pairs], 2).view(torch.uint8)
    codes = torch.stack([_blocks(code.view(torch.uint8)) for _, code in pairs], 2)
    at = 0
    for i, start in enumerate(range(0, groups, tile)):
        for piece in (factors[:, i], codes[:, start : start + tile]):
            flat = piece.reshape(blocks, -1)
            out[:, at : at + flat.shape[1]] = flat
            at += flat.shape[1]
    return out


def _blocks(rows: torch.Tensor) -> torch.Tensor:
    """[N, G] -> [NB, G, 16]; rows that fill up the last block are 0."""
    n, columns = rows.shape
    if n % ROWS:
        rows = torch.cat([rows, rows.new_zeros(-n % ROWS, columns)])
    return rows.view(-1, ROWS, columns).transpose(1, 2).contiguous()


def unpack(packed: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """uint8 [NB, row_bytes] -> scales and, of "super_min", minimums: fp32 [NB, G, 16]."""
    numbers, tile = NUMBERS[kind], TILE[kind]
    head, each = 2 * ROWS * numbers, ROWS * numbers
    tiles = -(-packed.shape[1] // (head + tile * each))
    groups = (packed.shape[1] - tiles * head) // each
    out = torch.empty(len(packed), groups, numbers, ROWS, device=packed.device)
    pieces = packed.split(head + tile * each, 1) if groups else ()
    for to, piece in zip(out.split(tile, 1), pieces, strict=False):
        factors = piece[:, :head].contiguous().view(torch.float16).float().view(-1, 1, numbers, ROWS)
        codes = piece[:, head:]
        codes = (codes.contiguous().view(torch.int8) if kind == "super" else codes).float()
        torch.mul(codes.view(to.shape), factors, out=to)
    return out[:, :, 0], None if numbers == 1 else out[:, :, 1].neg()
