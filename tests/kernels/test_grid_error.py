"""grid_error.py: the reference against the formula, C++ against the reference, on every instruction set."""

import pytest
import torch

from hfaccel_kernels import native
from hfaccel_kernels.grid_error import grid_error, grid_error_native, grid_error_reference

# (groups, size, rows): less than a vector, one, a part of a tile, tiles and a rest
SHAPES = [(1, 1, 1), (2, 7, 16), (3, 64, 37), (2, 32, 64), (1, 40, 200)]


def case(groups, size, n, top=15):
    generator = torch.Generator().manual_seed(groups * size * n)
    w = torch.randn(groups, size, n, generator=generator)
    h = torch.rand(groups, size, generator=generator)
    scale = torch.rand(groups, n, generator=generator) / top + 0.01
    scale[:, ::5] *= -1  # symmetric grids have them
    scale[0, 0] = 0
    zero = torch.randint(0, top + 1, (groups, n), generator=generator).float()
    return w, h, scale, zero, 0, top


def in_fp64(w, h, scale, zero, low, high):
    """sum_j h_j (w_j - s (q_j - z))^2, the codes found in fp32 as the docstring says."""
    step = torch.where(scale == 0, 1.0, scale)[:, None]
    q = torch.round(w * step.reciprocal() + zero[:, None]).clamp(low, high)
    off = w.double() - step.double() * (q.double() - zero[:, None].double())
    return (h[..., None].double() * off.square()).sum(1)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_reference_is_the_formula(shape):
    args = case(*shape)
    # off is x's fraction: x of up to 30 is rounded by 2e-6, its square's relative error follows
    torch.testing.assert_close(grid_error_reference(*args).double(), in_fp64(*args), rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("isa", native.supported_isas())
@pytest.mark.parametrize("shape", SHAPES)
def test_native_is_the_reference(shape, isa, monkeypatch):
    monkeypatch.setenv("HFACCEL_ISA", isa)
    args = case(*shape)
    # the same products; only the order of a sum of positive numbers differs
    torch.testing.assert_close(grid_error_native(*args), grid_error_reference(*args), rtol=1e-5, atol=0)


def test_native_has_the_same_bits_whatever_stands_beside_a_row(monkeypatch):
    w, h, scale, zero, low, high = case(2, 64, 200)
    found = {}
    for isa in native.supported_isas():
        monkeypatch.setenv("HFACCEL_ISA", isa)
        found[isa] = grid_error(w, h, scale, zero, low, high)
        for rows in (slice(3, 4), slice(60, 83)):
            alone = grid_error(w[:, :, rows], h, scale[:, rows], zero[:, rows], low, high)
            assert torch.equal(alone, found[isa][:, rows])
    first = next(iter(found.values()))
    assert all(torch.equal(other, first) for other in found.values())


def test_what_does_not_fit_is_refused():
    w, h, scale, zero, low, high = case(2, 8, 16)
    with pytest.raises(ValueError, match=r"h is torch.float32 \(2, 7\)"):
        grid_error(w, h[:, :7], scale, zero, low, high)
    with pytest.raises(ValueError, match="zero is torch.uint8"):
        grid_error(w, h, scale, zero.byte(), low, high)
    with pytest.raises(ValueError, match="w is torch.float64"):
        grid_error(w.double(), h, scale, zero, low, high)
    assert grid_error(w[:, :, :0], h, scale[:, :0], zero[:, :0], low, high).shape == (2, 0)
