"""Random packed weights and the fp64 oracle of a product with one."""

import torch

from hfaccel_kernels import layouts
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
# M, N, K: ragged rows, short last groups, one element, groups of 128 in 576, nothing
SHAPES = [(1, 48, 70), (3, 515, 64), (1, 1, 1), (29, 33, 576), (5, 16, 200), (0, 16, 32)]


def name(layout: Layout) -> str:
    zero = "sym" if layout.symmetric else "asym"
    return f"int{layout.bits}-g{layout.group}-{zero}-{layout.scale_dtype}-a{layout.act_bits}"


def random_packed(layout: Layout, n: int, k: int) -> tuple:
    """weight, scale, zero of random codes."""
    codes = torch.randint(0, 1 << layout.bits, (n, k), dtype=torch.uint8)
    scale = (torch.rand(n, layout.groups(k)) * 0.1 + 0.01).to(layout.dtype)
    zero = None if layout.symmetric else torch.randint(0, 1 << layout.bits, scale.shape, dtype=torch.uint8)
    packed = layouts.pack_codes(codes, layout), layouts.pack_rows(scale)
    return *packed, None if zero is None else layouts.pack_rows(zero)


def oracle(x, weight, scale, zero, bias, layout: Layout, n: int, k: int) -> torch.Tensor:
    """Quantized activations times the dequantized weight in fp64, [M, N]."""
    w = layouts.dequantize(weight, scale, zero, layout, n, k).double()
    codes, scales = layouts.quantize_activations(x.reshape(-1, k), layout)
    y = torch.zeros(codes.shape[0], n, dtype=torch.float64)
    for c, (start, stop) in enumerate(layout.chunks(k)):
        y += (codes[:, start:stop].double() @ w[:, start:stop].t()) * scales[:, c : c + 1].double()
    return y if bias is None else y + bias.double()
