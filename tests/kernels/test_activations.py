"""The reference that C++ and Triton are compared with, against what its docstring says."""

import pytest
import torch

from hfaccel_kernels.activations import quantize_activations
from hfaccel_kernels.layouts import Layout


@pytest.mark.parametrize("act_bits, top", [(8, 127), (16, 16256)])
def test_activations_round_to_half_a_step(act_bits, top):
    layout = Layout(4, 40, act_bits=act_bits)
    x = torch.randn(5, 100) * torch.logspace(-3, 3, 5)[:, None]
    x[2, :40] = 0
    codes, scales = quantize_activations(x, layout)
    assert codes.dtype == (torch.int8 if act_bits == 8 else torch.int16) and codes.abs().max() == top
    for c, (start, stop) in enumerate(layout.chunks(100)):
        part, scale = x[:, start:stop], scales[:, c : c + 1]
        assert torch.allclose(scale[:, 0], part.abs().amax(1) / top)
        assert ((codes[:, start:stop] * scale - part).abs() <= scale * 0.5001).all()
    assert scales[2, 0] == 0 and (codes[2, :40] == 0).all()


@pytest.mark.parametrize("layout", [Layout(8), Layout(8, act="token"), Layout(8, code="e5m2", act="token")])
def test_codes_and_scales_of_what_is_not_finite(layout):
    x = torch.ones(3, 40)
    x[0, 3], x[1, 4] = float("nan"), float("-inf")
    codes, scales = quantize_activations(x, layout)
    top = 448 if layout.is_float else 127
    assert not scales[:2, 0].isfinite().any() and scales[2].isfinite().all()
    assert codes[0, 3] == codes[1, 4] == -top and (codes[2] == top).all()


def test_a_fixed_scale_saturates_at_both_ends():
    x = torch.tensor([[1e8, -1e8, 3e38, 0.03, 2.55, 0.0]])
    codes, scales = quantize_activations(x, Layout(8, act="token", act_scale=0.02))
    assert codes.tolist() == [[127, -127, 127, 2, 127, 0]] and scales.tolist() == [[pytest.approx(0.02)]]
