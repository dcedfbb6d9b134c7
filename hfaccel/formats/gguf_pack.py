"""Blocks of a GGUF tensor as the packed tensors of a layout, bit for bit: no value is rounded again.

Q4_0, Q5_0, Q8_0   codes, fp16 scales                    4.5, 5.5, 8.5 bits a weight, as in the file
Q4_1, Q5_1         codes, fp16 scales and minimums       5.0, 6.0
Q4_K, Q5_K         scales and minimums of 6 bits take 8  4.625, 5.625; the file has 4.5, 5.5
Q6_K               as in the file                        6.5625
Q2_K               scales and minimums of 4 bits take 8  3.25; the file has 2.625
Q3_K               codes take 4 bits, scales 8           4.5625; the file has 3.4375
"""

from __future__ import annotations

import torch
from torch import Tensor

from hfaccel.formats.gguf_blocks import Parts, parts
from hfaccel.formats.gguf_file import BlockType
from hfaccel_kernels.layouts import ROWS, Layout
from hfaccel_kernels.packing import pack_codes, pack_minimums, pack_rows
from hfaccel_kernels.super_scales import TILE, pack

# type -> bits, group, how scales lie
GRIDS = {
    "Q4_0": (4, 32, "fp16"),
    "Q5_0": (5, 32, "fp16"),
    "Q8_0": (8, 32, "fp16"),
    "Q4_1": (4, 32, "fp16_min"),
    "Q5_1": (5, 32, "fp16_min"),
    "Q2_K": (2, 16, "super_min"),
    "Q3_K": (4, 16, "super"),
    "Q4_K": (4, 32, "super_min"),
    "Q5_K": (5, 32, "super_min"),
    "Q6_K": (6, 16, "super"),
}
_CHUNK_ELEMENTS = 1 << 20


def layout_of(kind: str, *, wide: bool) -> Layout:
    """The layout that holds a type. `wide`: inputs with outliers, 16-bit activations on CPUs; so beside 8, 6
    and 2 bits, as in `quant/rounding.py`."""
    bits, group, scales = GRIDS[kind]
    return Layout(bits, group, True, scales, 16 if wide or bits in (8, 6, 2) else 8)


def pack_blocks(rows: Tensor, block: BlockType, layout: Layout) -> dict[str, Tensor]:
    """The tensors of `layout.shapes(N, K)` from rows of blocks uint8 [N, row bytes], some rows at a time."""
    n, k = len(rows), rows.shape[1] // block.bytes * block.size
    out = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in layout.shapes(n, k).items()}
    step = max(ROWS, _CHUNK_ELEMENTS // max(k, 1) // ROWS * ROWS)
    for start in range(0, n, step):
        piece = rows[start : start + step]
        taken = parts(piece.reshape(-1, block.bytes), block.name)
        to = slice(start // ROWS, -(-(start + len(piece)) // ROWS))
        codes = taken.codes.view(len(piece), k)
        if taken.m is None and taken.zero != layout.zero:
            codes = codes + (layout.zero - taken.zero)
        out["weight"][to] = pack_codes(codes, layout)
        out["weight_scale"][to] = _scales(taken, layout, len(piece))
    return out


def _scales(taken: Parts, layout: Layout, n: int) -> Tensor:
    d = taken.d.view(n, -1)
    if layout.scale_dtype == "fp16":
        return pack_rows(d)
    if layout.scale_dtype == "fp16_min":
        return pack_minimums(d, taken.m.view(n, -1))
    # A tile has no more groups than a superblock: the factor serves all tiles of its superblock.
    tiles = taken.scale.shape[1] // TILE[layout.scale_dtype]
    pairs = [(d, taken.scale.to(torch.int8 if taken.m is None else torch.uint8))]
    if taken.m is not None:
        pairs.append((taken.m.view(n, -1), taken.minimum))
    return pack(
        layout.scale_dtype,
        *((factor.repeat_interleave(tiles, 1), codes.reshape(n, -1)) for factor, codes in pairs),
    )
