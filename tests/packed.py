"""Random packed weights and the fp64 oracle of a product with one."""

import torch

from hfaccel_kernels import activations, layouts, packing, super_scales
from hfaccel_kernels.layouts import Layout

LAYOUTS = [
    Layout(bits, group, symmetric, scale_dtype, act_bits)
    for bits in (8, 4, 3, 2)
    for group, symmetric, scale_dtype, act_bits in (
        (-1, True, "fp32", 8),
        (64, False, "fp16", 8),
        (32, True, "fp32", 16),
        (40, False, "fp32", 8),
        (128, False, "fp16", 16),
        (16, True, "fp16", 8),
    )
]
LAYOUTS += [Layout(4, *rest, code="nf4") for rest in ((64, True, "double"), (40, True, "fp16", 16), (-1,))]
LAYOUTS += [Layout(8, code=code, act="token") for code in ("e4m3", "e5m2")]
LAYOUTS += [
    Layout(8, act="token"),
    Layout(8, act="token", act_scale=0.02),
    Layout(3, 16, False, "double", 16),
]
LAYOUTS += [
    Layout(4, 32, True, "fp16_min"),
    Layout(5, 40, True, "fp16_min", 16),
    Layout(4, 32, True, "super_min", 16),
    Layout(2, 16, True, "super_min"),
    Layout(6, 16, True, "super"),
    Layout(6, 16, True, "super", 16),
    Layout(5, 32, True, "fp16"),
    Layout(5, 32, True, "super_min"),
    Layout(6, 64, True, "fp32", 16),
]
# M, N, K: ragged rows, short last groups, one element, groups of 128 in 576, nothing
SHAPES = [(1, 48, 70), (3, 515, 64), (1, 1, 1), (29, 33, 576), (5, 16, 200), (0, 16, 32)]


def name(layout: Layout) -> str:
    zero = "sym" if layout.symmetric else "asym"
    code = layout.code if layout.code != "int" else f"int{layout.bits}"
    act = f"a{layout.act_bits}" if layout.act == "chunk" else "static" if layout.static else "token"
    return f"{code}-g{layout.group}-{zero}-{layout.scale_dtype}-{act}"


def random_codes(layout: Layout, n: int, k: int) -> torch.Tensor:
    """Of all that stand for a number."""
    codes = torch.randint(0, 1 << layout.bits, (n, k), dtype=torch.uint8)
    if layout.is_float:
        codes = torch.where(layouts.codebook.values(codes, layout.code).isfinite(), codes, codes & 0x3F)
    return codes


def random_packed(layout: Layout, n: int, k: int) -> tuple:
    """weight, scale, zero of random codes."""
    codes = random_codes(layout, n, k)
    groups = layout.groups(k)
    zero = None if layout.symmetric else torch.randint(0, 1 << layout.bits, (n, groups), dtype=torch.uint8)
    packed = packing.pack_codes(codes, layout), random_scales(layout, n, groups)
    return *packed, None if zero is None else packing.pack_rows(zero)


def random_scales(layout: Layout, n: int, groups: int) -> torch.Tensor:
    """`weight_scale`; minimums of either sign where a file may have them."""
    scale = torch.rand(n, groups) * 0.1 + 0.01
    if layout.scale_dtype == "fp16_min":
        return packing.pack_minimums(scale, torch.randn(n, groups) * 0.3)
    if layout.scale_dtype not in super_scales.TILE:
        return packing.pack_scales(scale, layout)
    tiles = -(-groups // super_scales.TILE[layout.scale_dtype])
    factors = [(torch.rand(n, tiles) * 2e-3 + 1e-4).half() for _ in range(2)]
    if layout.scale_dtype == "super":
        return super_scales.pack(
            "super", (factors[0], torch.randint(-128, 128, scale.shape, dtype=torch.int8))
        )
    codes = torch.randint(0, 256, (2, *scale.shape), dtype=torch.uint8)
    return super_scales.pack("super_min", (factors[0], codes[0]), (factors[1] * 8, codes[1]))


def oracle(x, weight, scale, zero, bias, layout: Layout, n: int, k: int) -> torch.Tensor:
    """Quantized activations times the dequantized weight in fp64, [M, N]."""
    w = packing.dequantize(weight, scale, zero, layout, n, k).double()
    codes, scales = activations.quantize_activations(x.reshape(-1, k), layout)
    y = torch.zeros(codes.shape[0], n, dtype=torch.float64)
    for c, (start, stop) in enumerate(layout.chunks(k)):
        y += (codes[:, start:stop].double() @ w[:, start:stop].t()) * scales[:, c : c + 1].double()
    return y if bias is None else y + bias.double()
