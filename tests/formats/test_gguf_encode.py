import gguf
import pytest
import torch
from gguf import quants

from hfaccel.formats import gguf_encode

M = 6


def drawn(high, *shape, low=0, seed=0):
    generator = torch.Generator().manual_seed(seed + high)
    return torch.randint(low, high, shape, generator=generator)


def halves(seed):
    return (torch.rand(M, generator=torch.Generator().manual_seed(seed)) - 0.5).half()


def read(blocks, kind):
    """By the `gguf` package."""
    assert blocks.shape == (M, gguf_encode.BLOCKS[kind][1])
    return torch.from_numpy(quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[kind]))


@pytest.mark.parametrize("kind", gguf_encode.BLOCKS)
def test_sizes_are_those_of_the_format(kind):
    assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]] == gguf_encode.BLOCKS[kind]


def test_blocks_of_32():
    d, m = halves(1), halves(2)
    codes = drawn(128, M, 32, low=-128).to(torch.int8)
    assert torch.equal(read(gguf_encode.q8_0(codes, d), "Q8_0"), d.float()[:, None] * codes)
    four, five = drawn(16, M, 32).to(torch.uint8), drawn(32, M, 32).to(torch.uint8)
    for codes, plain, with_minimum, kind in (
        (four, gguf_encode.q4_0, gguf_encode.q4_1, "Q4"),
        (five, gguf_encode.q5_0, gguf_encode.q5_1, "Q5"),
    ):
        zero = 8 if kind == "Q4" else 16
        wanted = d.float()[:, None] * (codes.float() - zero)
        assert torch.equal(read(plain(codes, d), f"{kind}_0"), wanted)
        wanted = d.float()[:, None] * codes + m.float()[:, None]
        assert torch.equal(read(with_minimum(codes, d, m), f"{kind}_1"), wanted)


@pytest.mark.parametrize("kind, encode, levels", [("Q4_K", "q4_k", 16), ("Q5_K", "q5_k", 32)])
def test_superblocks_with_minimums(kind, encode, levels):
    codes, d, dmin = drawn(levels, M, 256).to(torch.uint8), halves(3).abs(), halves(4).abs()
    scales, mins = (drawn(64, M, 8, seed=s).to(torch.uint8) for s in (5, 6))
    found = read(getattr(gguf_encode, encode)(codes, scales, mins, d, dmin), kind)
    scale, minimum = d.float()[:, None] * scales, dmin.float()[:, None] * mins
    wanted = scale[:, :, None] * codes.view(M, 8, 32) - minimum[:, :, None]
    assert torch.equal(found, wanted.view(M, 256))


def test_superblocks_of_six_bits():
    codes, d = drawn(64, M, 256).to(torch.uint8), halves(7)
    scales = drawn(128, M, 16, low=-128).to(torch.int8)
    found = read(gguf_encode.q6_k(codes, scales, d), "Q6_K")
    scale = d.float()[:, None] * scales
    wanted = scale[:, :, None] * (codes.view(M, 16, 16).float() - 32)
    assert torch.equal(found, wanted.view(M, 256))
