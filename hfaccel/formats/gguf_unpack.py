"""Packed tensors of a layout as blocks of a GGUF tensor, bit for bit: `gguf_pack` the other way.

A layout that holds a type (`gguf_pack.GRIDS`) need not come from a file: int4 in groups of 32 with fp16
scales is Q4_0 whoever rounded it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hfaccel.errors import PatchError
from hfaccel.formats import gguf_encode
from hfaccel.formats.gguf_encode import BLOCKS
from hfaccel.formats.gguf_pack import GRIDS
from hfaccel_kernels.layouts import ROWS, Layout
from hfaccel_kernels.packing import scale_rows, unpack_codes, unpack_rows
from hfaccel_kernels.super_scales import NUMBERS, TILE

_ENCODE = {
    "Q8_0": gguf_encode.q8_0,
    "Q4_0": gguf_encode.q4_0,
    "Q5_0": gguf_encode.q5_0,
    "Q4_1": gguf_encode.q4_1,
    "Q5_1": gguf_encode.q5_1,
    "Q4_K": gguf_encode.q4_k,
    "Q5_K": gguf_encode.q5_k,
    "Q6_K": gguf_encode.q6_k,
}


def type_of(layout: Layout, k: int) -> str | None:
    """The type whose blocks hold a layout's rows of `k`; None if there is none, or it is not written."""
    if layout.code != "int" or not layout.symmetric:
        return None
    grid = (layout.bits, layout.group, layout.scale_dtype)
    name = next((name for name in _ENCODE if GRIDS[name] == grid), None)
    return name if name is not None and k % BLOCKS[name][0] == 0 else None


def unpack_blocks(weight: Tensor, scale: Tensor, layout: Layout, n: int, k: int) -> Tensor:
    """Blocks uint8 [n, bytes] of a packed [n, k], of the type that `type_of` names.

    Raises: PatchError for integer scales beyond the six bits that Q4_K and Q5_K have.
    """
    name = type_of(layout, k)
    codes = unpack_codes(weight, layout, n, k).reshape(-1, BLOCKS[name][0])
    if name == "Q8_0":
        codes = (codes ^ 128).view(torch.int8)
    if layout.scale_dtype in TILE:
        factors, integers = _super(scale, layout.scale_dtype, n)
        if layout.scale_dtype == "super":
            return _ENCODE[name](codes, integers[0].view(torch.int8), *factors).view(n, -1)
        if max(int(each.max()) for each in integers) > 63:
            raise PatchError(f"integer scales beyond 63: {name} has six bits")
        return _ENCODE[name](codes, *integers, *factors).view(n, -1)
    scales, minimums = scale_rows(scale, layout)
    rows = [unpack_rows(each, n).reshape(-1) for each in (scales, minimums) if each is not None]
    return _ENCODE[name](codes, *rows).view(n, -1)


def _super(scale: Tensor, kind: str, n: int) -> tuple[list[Tensor], list[Tensor]]:
    """Factors fp16 [M] and integers uint8 [M, groups], of scales and of minimums; all tiles are full."""
    numbers, tile = NUMBERS[kind], TILE[kind]
    head, each = 2 * ROWS * numbers, ROWS * numbers
    tiles = scale.view(len(scale), -1, head + tile * each)  # [NB, tiles, bytes]
    factors = tiles[:, :, :head].contiguous().view(torch.float16).view(*tiles.shape[:2], numbers, ROWS)
    integers = tiles[:, :, head:].reshape(*tiles.shape[:2], tile, numbers, ROWS)
    factors = factors.permute(2, 0, 3, 1).reshape(numbers, -1, tiles.shape[1])[:, :n]
    integers = integers.permute(3, 0, 4, 1, 2).reshape(numbers, -1, tiles.shape[1], tile)[:, :n]
    return [f.reshape(-1) for f in factors], [i.reshape(-1, tile).contiguous() for i in integers]
