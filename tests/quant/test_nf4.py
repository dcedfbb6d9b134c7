"""NF4: the paper's codebook and double quantization once more in fp64, and what becomes of a model."""

import numpy as np
import pytest
import torch
from torch import nn

import hfaccel
from hfaccel import NF4, PatchError
from hfaccel.quant.linear import codes_of, is_packed
from hfaccel.transform import Site
from hfaccel_kernels import codebook, double_scales
from hfaccel_kernels.layouts import Layout
from hfaccel_kernels.packing import unpack_scales
from saved import logits, reload
from tiny import tiny


def quantile(p):
    """Of the normal distribution."""
    return torch.special.ndtri(torch.from_numpy(p)).numpy()


LEVELS = np.array(codebook.NF4_LEVELS)


def packed(weight, **fields):
    linear = nn.Linear(*reversed(weight.shape), bias=False)
    linear.weight.data.copy_(weight)
    return NF4(**fields).apply(Site(linear, "it"), None)


def test_the_codebook_is_that_of_the_paper():
    """Quantiles of N(0, 1), eight positive and seven negative ones (appendix E)."""
    offset = 1 - (1 / 32 + 1 / 30) / 2
    positive = quantile(np.linspace(offset, 0.5, 9)[:-1])
    negative = -quantile(np.linspace(offset, 0.5, 8)[:-1])
    want = np.sort(np.concatenate([positive, [0], negative])) / positive.max()
    assert np.abs(np.array(codebook.NF4) - want).max() < 1e-3
    assert LEVELS.tolist() == [round(127 * level) for level in codebook.NF4]
    assert LEVELS[codebook.NF4_ZERO] == 0


def test_equals_the_formula_in_fp64():
    """Group by group and tile by tile: scales from 255 steps above the least, codes nearest to w / s."""
    weight = (torch.randn(40, 1100) * torch.logspace(-1, 1, 40)[:, None]).float()
    module = packed(weight)
    w = np.pad(weight.double().numpy(), ((0, 0), (0, 18 * 64 - 1100))).reshape(40, 18, 64)
    peak = np.abs(w).max(2) / 127
    scale = np.empty_like(peak)
    for rows in (slice(0, 16), slice(16, 32), slice(32, 40)):
        for groups in (slice(0, 16), slice(16, 18)):
            tile = peak[rows, groups]
            step = (tile.max() - tile.min()) / 255
            scale[rows, groups] = tile.min() + step * np.round((tile - tile.min()) / step)
    found = unpack_scales(module.weight_scale, module.layout, 40).double().numpy()
    assert np.abs(found / scale - 1).max() < 1e-5
    error = np.abs(w[..., None] - found[..., None, None] * LEVELS)
    least = error.min(-1).reshape(40, -1)[:, :1100]
    mine = np.abs(weight.double().numpy() - module.dequantize().double().numpy())
    assert (mine <= least + 1e-6 * np.abs(weight.numpy()).max(1, keepdims=True)).all()


def test_normal_weights_err_as_the_paper_s_levels_do():
    """What levels in steps of 1/127 and 8-bit scales add to the mean square error: less than 2 %."""
    weight = torch.randn(512, 1024, generator=torch.Generator().manual_seed(0))
    mine = (packed(weight).dequantize() - weight).square().mean()
    groups = weight.view(512, -1, 64)
    scale = groups.abs().amax(-1, keepdim=True)
    levels = torch.tensor(codebook.NF4)
    exact = levels[torch.bucketize(groups / scale, (levels[1:] + levels[:-1]) / 2)] * scale
    assert 0.98 < mine / (exact - groups).square().mean() < 1.02


def test_bits_a_weight():
    assert Layout(4, 64, True, "double", code="nf4").bytes(2048, 2048) * 8 / 2048**2 == pytest.approx(
        4.129, abs=1e-3
    )


def test_scales_survive_to_half_a_step_whatever_their_spread():
    rows = torch.rand(3, 21, 16) ** 4
    back = double_scales.unpack(double_scales.pack(rows))
    for tile, mine in zip(rows.split(16, 1), back.split(16, 1), strict=True):
        step = (tile.amax((1, 2)) - tile.amin((1, 2))) / 255
        assert ((tile - mine).abs().amax((1, 2)) <= 0.5001 * step).all()
    same = torch.full((2, 3, 16), 0.3)
    assert torch.equal(double_scales.unpack(double_scales.pack(same)), same)
    assert double_scales.unpack(double_scales.pack(rows[:, :0])).shape == (3, 0, 16)


def test_zeros_stay_zeros_and_a_small_group_vanishes_beside_a_group_of_zeros_and_a_large_one():
    """With a tile's least scale 0, scales below max / 510 are rounded to it."""
    weight = torch.zeros(20, 128)
    assert not packed(weight).dequantize().any()
    weight[3, 70], weight[4, 5], weight[5, 5] = 5.0, -5 / 515, -5 / 505
    weight[17, 5] = -1e-6  # in a tile of its own
    back = packed(weight).dequantize()
    assert not back[weight == 0].any() and torch.allclose(back[3, 70], torch.tensor(5.0))
    assert back[4, 5] == 0 and back[5, 5] == pytest.approx(-5 / 505, rel=0.1)
    assert torch.allclose(back[17, 5], torch.tensor(-1e-6))


def test_no_group_vanishes_in_a_tile_without_a_group_of_zeros():
    weight = torch.full((16, 128), 1e-6)
    weight[3, 70] = 5.0
    back = packed(weight).dequantize()
    assert torch.allclose(back[4], weight[4]) and torch.allclose(back[3, 70], torch.tensor(5.0))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused_by_name(bad):
    model = tiny("TL")
    model.model.layers[2].mlp.up_proj.weight.data[3, 4] = bad
    with pytest.raises(PatchError, match="layers.2.mlp.up_proj.weight: 1 of .* NaN"):
        hfaccel.patch(model, "nf4", progress=False)
    assert not any(map(is_packed, model.modules()))


@pytest.mark.parametrize("fields", [{"bits": 8}, {"symmetric": False}, {"group": 0}, {"group": 1 << 21}])
def test_fields_it_cannot_have(fields):
    with pytest.raises(PatchError, match="NF4"):
        NF4(**fields)


@pytest.mark.parametrize("family", ["gpt2", "mixtral"])
def test_other_families_come_back(family, tmp_path):
    model = tiny(family)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    hfaccel.patch(model, "nf4-g32", progress=False)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(reload(model, tmp_path)), logits(model))
    hfaccel.unpatch(model)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_a_gradient_reaches_the_input():
    module = packed(torch.randn(24, 70))
    x = torch.randn(3, 70, requires_grad=True)
    module(x).sum().backward()
    assert torch.allclose(x.grad[0], module.dequantize().sum(0), atol=1e-5)
    assert codes_of(module).max() <= 15
