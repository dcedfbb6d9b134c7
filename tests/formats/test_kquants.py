import gguf
import pytest
import torch
from gguf import quants

from hfaccel.errors import PatchError
from hfaccel.formats import kquants
from hfaccel.formats.gguf_encode import BLOCKS

KINDS = [kind for kind in BLOCKS if kind not in ("F32", "F16", "BF16")]


def weights(rows=24, k=512, seed=0, outliers=4):
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(rows, k, generator=generator) * torch.rand(rows, 1, generator=generator)
    return w * (1 + outliers * (torch.rand(rows, k, generator=generator) > 0.99))


def decoded(weight, kind, importance=None):
    """By the `gguf` package, which shares nothing with ours."""
    blocks = kquants.quantize(weight, kind, importance)
    return torch.from_numpy(quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[kind]))


def error(weight, found, importance=1.0):
    return float((importance * (found - weight).square()).sum() / (importance * weight.square()).sum())


# Of normal weights: an error of step^2 / 12, equal steps covering 4.2 deviations of 32 elements, 3.5 of 16.
MOST = {
    "Q8_0": 4e-5,
    "Q4_0": 8e-3,
    "Q4_1": 6e-3,
    "Q5_0": 2e-3,
    "Q5_1": 1.5e-3,
    "Q4_K": 6e-3,
    "Q5_K": 1.5e-3,
    "Q6_K": 5e-4,
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_an_independent_reader_finds_is_near_the_weights(kind):
    w = weights(outliers=0)
    blocks = kquants.quantize(w, kind)
    size, each = BLOCKS[kind]
    assert blocks.dtype == torch.uint8 and blocks.shape == (24, 512 // size * each)
    assert error(w, decoded(w, kind)) < MOST[kind]


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_no_more_error_than_plain_rounding(kind):
    w = weights()
    plain = quants.quantize(w.numpy(), gguf.GGMLQuantizationType[kind])
    theirs = torch.from_numpy(quants.dequantize(plain, gguf.GGMLQuantizationType[kind]))
    limit = error(w, theirs)
    assert error(w, decoded(w, kind)) <= limit * (1.001 if kind == "Q8_0" else 0.97)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "Q8_0"])
def test_importance_takes_error_from_where_it_matters(kind):
    w = weights()
    h = torch.exp(1.5 * torch.randn(512, generator=torch.Generator().manual_seed(1)))
    weighted, plain = decoded(w, kind, h), decoded(w, kind)
    assert error(w, weighted, h) < 0.97 * error(w, plain, h)
    assert error(w, weighted) < 4 * error(w, plain)


@pytest.mark.parametrize("kind", KINDS)
def test_what_no_input_reaches_is_still_rounded_to_something_near(kind):
    w = weights()
    h = torch.zeros(512)
    h[::7] = 1.0
    assert error(w, decoded(w, kind, h)) < 0.05
    w = weights(outliers=0)
    assert error(w, decoded(w, kind, torch.zeros(512))) < MOST[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_rounded_alone(kind):
    w = weights(rows=300, k=1024)  # more than one chunk
    whole = kquants.quantize(w, kind)
    assert torch.equal(whole[137:139], kquants.quantize(w[137:139], kind))


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_without_a_range(kind):
    w = torch.zeros(5, 256)
    w[1] = 0.5
    w[2] = -0.25
    w[3, 17] = 3.0
    w[4] = 1e-9  # below what fp16 scales hold
    found = decoded(w, kind)
    assert found.isfinite().all()
    assert not found[0].any()
    torch.testing.assert_close(found[:4], w[:4], rtol=4e-3, atol=0.0)
    assert found[4].abs().max() < 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_one_sign_alone(kind):
    w = 1 + torch.rand(4, 256, generator=torch.Generator().manual_seed(0))
    for each in (w, -w):
        assert error(each, decoded(each, kind)) < MOST[kind]


def test_plain_types_are_casts():
    w = torch.tensor([[1e-39, -0.0, 7e4, 1.0009765625, 3.3895314e38]]).to(torch.bfloat16)
    assert torch.equal(kquants.quantize(w, "F32").view(torch.float32), w.float())
    back = kquants.quantize(w, "BF16").view(torch.bfloat16)
    assert torch.equal(back.view(torch.int16), w.view(torch.int16))  # subnormals and the sign of zero too
    with pytest.raises(PatchError, match="fp16 ends at 65504"):
        kquants.quantize(w, "F16")
    assert torch.equal(kquants.quantize(w[:, :2], "F16").view(torch.float16), w[:, :2].half())


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q4_1", "Q4_K", "Q6_K"])
def test_refusals(kind):
    w = weights(2, 256)
    with pytest.raises(PatchError, match="not finite"):
        kquants.quantize(torch.where(w > 1, torch.inf, w * 100), kind)
    with pytest.raises(PatchError, match="fp16 ends at 65504"):
        kquants.quantize(w * 1e9, kind)
    with pytest.raises(PatchError, match="blocks of"):
        kquants.quantize(w[:, :100], kind)
    with pytest.raises(PatchError, match=r"importance of shape \[3\]"):
        kquants.quantize(w, kind, torch.ones(3))
    for odd in (torch.nan, torch.inf, -1.0):
        with pytest.raises(PatchError, match="importance has NaN, infinite or negative values"):
            kquants.quantize(w, kind, torch.ones(256).index_fill(0, torch.tensor([7]), odd))
    with pytest.raises(PatchError, match="IQ2_XXS.*known are F32"):
        kquants.quantize(w, "IQ2_XXS")
