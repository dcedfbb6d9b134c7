"""Half-quadratic grids: a smaller robust error than round-to-nearest, no data, what norms say is used."""

import numpy as np
import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

import hfaccel
from hfaccel import PatchError
from hfaccel.quant.grid import round_to_grid
from hfaccel.quant.hqq import HQQ, P, expected_square, half_quadratic
from hfaccel.quant.linear import codes_of, is_packed
from hfaccel.quant.rtn import round_to_nearest
from hfaccel.transform import Site
from hfaccel_kernels.layouts import Layout
from hfaccel_kernels.packing import dequantize_codes
from saved import logits, reload
from tiny import tiny

LAYOUTS = [
    pytest.param(Layout(bits, group, symmetric, "fp16"), id=f"int{bits}-g{group}-{'a' * (not symmetric)}sym")
    for bits in (2, 3, 4, 8)
    for group, symmetric in ((32, False), (40, True), (-1, False))
]


def robust(weight, back, importance, p=P):
    """The objective in fp64, written once more, over the whole matrix."""
    wrong = (weight.double() - back.double()).abs() * importance.double().sqrt()
    return float(wrong.pow(p).sum())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_less_robust_error_than_rounding_to_nearest(layout):
    k = 150  # short last groups
    weight, importance = torch.randn(24, k), torch.rand(k) ** 2 + 0.05
    weight[torch.rand(24, k) < 0.01] *= 6
    scale, zero = half_quadratic(weight, layout, importance)
    assert torch.equal(scale, scale.to(layout.dtype).float())
    if zero is not None:
        assert zero.dtype is torch.uint8 and int(zero.max()) < 1 << layout.bits
    codes = round_to_grid(weight, scale, zero, layout)
    found = robust(weight, dequantize_codes(codes, scale, zero, layout), importance)
    nearest = robust(weight, dequantize_codes(*round_to_nearest(weight, layout), layout), importance)
    assert found < nearest
    back = dequantize_codes(codes, scale, zero, layout)
    step = scale.abs().repeat_interleave(layout.group_len(k), 1)[:, :k]
    assert ((weight - back).abs() <= 0.501 * step).all()  # nothing is cut off


def test_the_zero_is_nearly_the_best_of_all_at_its_scale():
    """Every integer zero and every scale of the line, one by one in fp64."""
    layout, k = Layout(3, 32, False, "fp16"), 32
    weight = torch.randn(40, k)
    scale, zero = half_quadratic(weight, layout)
    codes = round_to_grid(weight, scale, zero, layout)
    mine = (weight - dequantize_codes(codes, scale, zero, layout)).double().abs().pow(P).sum(1).numpy()
    w = weight.double().numpy()
    span = np.maximum(w.max(1), 0) - np.minimum(w.min(1), 0)
    best = np.full(len(w), np.inf)
    for shrink in np.linspace(1, 7 / 8, 26):
        s = (span * shrink / 7).astype(np.float16).astype(np.float64)[:, None]
        for z in range(8):
            q = np.clip(np.round(w / s) + z, 0, 7)
            wrong = np.abs(w - s * (q - z))
            best = np.where(wrong.max(1) <= 0.5 * s[:, 0], np.minimum(best, (wrong**P).sum(1)), best)
    assert mine.mean() < 1.03 * best.mean()


def test_zeros_single_values_and_huge_weights():
    for layout in (Layout(4, 8, False, "fp16"), Layout(4, 8, True, "fp16")):
        weight = torch.zeros(2, 16)
        weight[1, 3], weight[1, 9] = 2.0, -1e-6
        scale, zero = half_quadratic(weight, layout, torch.zeros(16))
        back = dequantize_codes(round_to_grid(weight, scale, zero, layout), scale, zero, layout)
        assert torch.allclose(back, weight, rtol=2e-3, atol=2e-6) and torch.isfinite(scale).all()
        with pytest.raises(PatchError, match="beyond fp16's range"):
            half_quadratic(torch.full((1, 8), 1e7), layout)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "mixtral"])
def test_norms_say_what_their_readers_get(family):
    model, seen = tiny(family), {}
    rounder = HQQ.rounder

    def noted(self, matrix, stats):
        seen[tuple(matrix.shape), float(matrix.flatten()[0])] = stats
        return rounder(self, matrix, stats)

    block = model.get_submodule("transformer.h.1" if family == "gpt2" else "model.layers.1")
    first = block.attn.c_attn if family == "gpt2" else block.self_attn.k_proj
    last = block.attn.c_proj if family == "gpt2" else block.self_attn.o_proj
    norm = block.ln_1 if family == "gpt2" else block.input_layernorm
    keys = [(tuple(w.shape), float(w.flatten()[0])) for w in (_matrix(first), _matrix(last))]
    gain = norm.weight.detach() + (family == "gemma2")
    wanted = gain**2 + (norm.bias.detach() ** 2 if family == "gpt2" else 0)
    experts, into = ([], []), None
    if family == "mixtral":  # every expert's first matrix is fed by the norm, its second one is not
        into = block.post_attention_layernorm.weight.detach() ** 2
        fused = block.mlp.experts.gate_up_proj, block.mlp.experts.down_proj
        experts = [[(tuple(w.shape), float(w.flatten()[0])) for w in x.detach()] for x in fused]
        assert len(experts[0]) == 4
    with pytest.MonkeyPatch.context() as patcher:
        patcher.setattr(HQQ, "rounder", noted)
        hfaccel.patch(model, "hqq4", progress=False)
    assert torch.allclose(seen[keys[0]].square_mean, wanted)
    assert seen[keys[1]] is None  # no norm feeds it
    for up, down in zip(*experts, strict=True):
        assert torch.allclose(seen[up].square_mean, into) and seen[down] is None
    x = nn.functional.layer_norm(torch.randn(20000, 64), (64,), gain, getattr(norm, "bias", None))
    if family != "gemma2":
        assert torch.allclose(expected_square(norm, False), x.square().mean(0), rtol=0.1)


def _matrix(module):
    return (module.weight.T if isinstance(module, Conv1D) else module.weight).detach()


def test_no_data_is_asked_for_and_everything_comes_back(tmp_path):
    model = tiny("TL")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    hfaccel.patch(model, "hqq3", calibration=3.5, progress=False)  # never looked at
    assert sum(map(is_packed, model.modules())) == 4 * 7 + 1
    wanted = logits(model)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(reload(model, tmp_path)), wanted)
    hfaccel.unpatch(model)
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], tensor) for name, tensor in after.items())


def test_conv1d_is_the_linear_of_its_transpose():
    linear, conv = nn.Linear(64, 48), Conv1D(48, 64)
    conv.weight.data.copy_(linear.weight.t())
    ours, theirs = (HQQ().apply(Site(module, "it"), None) for module in (conv, linear))
    assert torch.equal(codes_of(ours), codes_of(theirs))


def test_weights_that_are_not_finite_are_refused_by_name():
    model = tiny("TL")
    model.model.layers[2].mlp.up_proj.weight.data[3, 4] = float("nan")
    with pytest.raises(PatchError, match="layers.2.mlp.up_proj.weight: 1 of .* NaN"):
        hfaccel.patch(model, "hqq4", progress=False)
    assert not any(map(is_packed, model.modules()))
