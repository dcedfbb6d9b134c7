"""Packed bytes are what `layouts` says, and come back."""

import pytest
import torch

from hfaccel_kernels import packing
from hfaccel_kernels.codebook import FLOAT8, NF4
from hfaccel_kernels.layouts import Layout
from packed import LAYOUTS, SHAPES, name, random_codes, random_packed, random_scales

GRIDS = sorted({(n, k) for _, n, k in SHAPES})


def by_the_docstring(weight: torch.Tensor, layout: Layout, k: int, row: int, at: int) -> int:
    """The unsigned code of one element, read from the bytes as the module's docstring describes them."""
    group = k if layout.group == -1 else min(layout.group, k)
    sizes = {8: (4, 64), 6: (16, 192), 5: (32, 320), 4: (8, 64), 3: (32, 192), 2: (16, 64)}
    step_k, step_bytes = sizes[layout.bits]
    steps_a_group = -(-group // step_k)
    step = at // group * steps_a_group + at % group // step_k
    j, i = at % group % step_k // 4, at % group % step_k % 4
    line = weight[row // 16, step * step_bytes : (step + 1) * step_bytes].tolist()
    byte = 4 * (row % 16) + i
    if layout.bits == 8:
        return line[byte] if layout.code in ("e4m3", "e5m2") else line[byte] ^ 128
    if layout.bits == 4:
        return line[byte] >> 4 * j & 15
    if layout.bits == 2:
        return line[byte] >> 2 * j & 3
    if layout.bits == 5:
        return (line[64 * (j // 2) + byte] >> 4 * (j % 2) & 15) | (line[256 + byte] >> j & 1) << 4
    if layout.bits == 6:
        return (line[64 * (j // 2) + byte] >> 4 * (j % 2) & 15) | (line[128 + byte] >> 2 * j & 3) << 4
    return (line[64 * (j // 4) + byte] >> 2 * (j % 4) & 3) | (line[128 + byte] >> j & 1) << 2


def _plain_scales(layout: Layout) -> bool:
    return layout.scale_dtype in ("fp32", "fp16", "double")


@pytest.mark.parametrize("layout", LAYOUTS, ids=name)
@pytest.mark.parametrize("n, k", GRIDS)
def test_codes_lie_where_the_docstring_says_and_come_back(layout, n, k):
    codes = torch.randint(0, 1 << layout.bits, (n, k), dtype=torch.uint8)
    weight = packing.pack_codes(codes, layout)
    assert torch.equal(packing.unpack_codes(weight, layout, n, k), codes)
    for row, at in zip(torch.randint(n, (20,)).tolist(), torch.randint(k, (20,)).tolist(), strict=True):
        assert by_the_docstring(weight, layout, k, row, at) == codes[row, at]


@pytest.mark.parametrize("layout", [lay for lay in LAYOUTS if _plain_scales(lay)], ids=name)
def test_dequantize_is_scale_times_code_minus_zero(layout):
    n, k = 37, 200
    codes = random_codes(layout, n, k)
    groups = layout.groups(k)
    scale = torch.rand(n, groups).to(torch.float16 if layout.scale_dtype == "fp16" else torch.float32)
    zero = None if layout.symmetric else torch.randint(0, 1 << layout.bits, (n, groups), dtype=torch.uint8)
    got = packing.dequantize(
        packing.pack_codes(codes, layout),
        packed_scale := packing.pack_scales(scale, layout),
        None if zero is None else packing.pack_rows(zero),
        layout,
        n,
        k,
    )
    group_of = [0] * k if layout.group == -1 else [at // layout.group for at in range(k)]
    if layout.scale_dtype == "double":
        step = (scale.max() - scale.min()) / 255 * 0.501
        scale, exact = packing.unpack_scales(packed_scale, layout, n), scale
        assert (scale - exact).abs().max() <= step
    if layout.code == "int":
        value = codes.float() - (1 << (layout.bits - 1) if zero is None else zero.float()[:, group_of])
    elif layout.code == "nf4":
        value = torch.tensor([round(127 * level) for level in NF4])[codes.long()].float()
    else:
        value = codes.view(FLOAT8[layout.code]).float()
    assert torch.equal(got, value * scale.float()[:, group_of])


def by_the_scales_docstring(
    packed: torch.Tensor, layout: Layout, row: int, group: int
) -> tuple[float, float]:
    """Scale and minimum of one group of one row, read from the bytes as `super_scales` and `layouts` say."""
    block, lane = packed[row // 16], row % 16
    if layout.scale_dtype == "fp16_min":
        return block[group, 0, lane].double().item(), block[group, 1, lane].double().item()
    numbers, tile = (1, 16) if layout.scale_dtype == "super" else (2, 8)
    start = group // tile * (32 * numbers + tile * 16 * numbers)
    factors = block[start : start + 32 * numbers].clone().view(torch.float16).double()
    at = start + 32 * numbers + group % tile * 16 * numbers + lane
    if layout.scale_dtype == "super":
        return (factors[lane] * block[at : at + 1].clone().view(torch.int8).double()).item(), 0.0
    return (factors[lane] * block[at]).item(), -(factors[16 + lane] * block[at + 16]).item()


@pytest.mark.parametrize("layout", [lay for lay in LAYOUTS if not _plain_scales(lay)], ids=name)
@pytest.mark.parametrize("k", [70, 200, 576])
def test_what_files_keep_two_numbers_or_steps_for_is_what_the_docstrings_say(layout, k):
    n = 37
    codes, scale = random_codes(layout, n, k), random_scales(layout, n, layout.groups(k))
    got = packing.dequantize(packing.pack_codes(codes, layout), scale, None, layout, n, k)
    for row, at in zip(torch.randint(n, (40,)).tolist(), torch.randint(k, (40,)).tolist(), strict=True):
        s, m = by_the_scales_docstring(scale, layout, row, at // layout.group)
        code = codes[row, at].item()
        exact = s * code + m if layout.has_minimum else s * (code - layout.zero)
        assert got[row, at] == torch.tensor(exact, dtype=torch.float64).float()


@pytest.mark.parametrize("layout", LAYOUTS, ids=name)
def test_gathered_rows_equal_the_dequantized_matrix(layout):
    n, k = 37, 70
    packed = random_packed(layout, n, k)
    rows = torch.tensor([[36, 0, 5], [16, 16, 31]])
    got = packing.gather_rows(*packed, layout, k, rows)
    assert torch.equal(got, packing.dequantize(*packed, layout, n, k)[rows])
    assert packing.gather_rows(*packed, layout, k, rows[:, :0]).shape == (2, 0, k)
