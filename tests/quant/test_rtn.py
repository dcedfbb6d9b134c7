"""Round to nearest against five lines of fp64 numpy, on every grid, row length and magnitude."""

import numpy as np
import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

import hfaccel
from hfaccel.errors import PatchError, UnknownName
from hfaccel.quant.linear import QuantEmbedding, QuantExperts, QuantLinear, codes_of
from hfaccel.quant.packing import pack_matrix
from hfaccel.quant.rtn import RTN, round_to_nearest
from hfaccel.transform import Site
from hfaccel_kernels.layouts import Layout
from hfaccel_kernels.packing import dequantize, unpack_codes, unpack_rows
from tiny import tiny

GRIDS = [
    pytest.param(bits, group, symmetric, id=f"int{bits}-{'row' if group < 0 else f'g{group}'}-{kind}")
    for bits in (8, 4, 3, 2)
    for group in (-1, 64, 24, 5)
    for symmetric, kind in ((True, "sym"), (False, "asym"))
]
SHAPES = ((48, 70), (33, 64), (1, 1), (17, 129))


def reference(w, bits, group, symmetric, half):
    """(dequantized, scale, whether the code is beyond doubt), each [N, K], in fp64; `half`: fp16 scales,
    rounded up.

    In fp32, what lies in the middle between two codes may fall either way; a zero point moves its whole
    group.
    """
    w = w.double().numpy()
    group = w.shape[1] if group < 0 else group
    out, steps, sure = np.empty_like(w), np.empty_like(w), np.empty(w.shape, bool)
    for a in range(0, w.shape[1], group):
        x = w[:, a : a + group]
        top = 2 ** (bits - 1) - 1 if symmetric else 2**bits - 1
        low, high = np.minimum(x.min(1), 0), np.maximum(x.max(1), 0)
        exact = (np.abs(x).max(1) if symmetric else high - low)[:, None] / top
        s = exact.astype(np.float16 if half else np.float32)
        edge = half & (np.abs(s.astype(np.float64) - exact) < 1e-6 * exact)  # fp32 may round it the other way
        s = np.where(s.astype(np.float64) < exact, np.nextafter(s, s.dtype.type(np.inf)), s) if half else s
        s = np.where(s > 0, s, 1).astype(np.float64)
        z = 0 if symmetric else np.round(-low[:, None] / s)
        bottom = (-top if bits == 8 else -top - 1) if symmetric else 0
        out[:, a : a + group] = s * (np.clip(np.round(x / s) + z, bottom, top) - z)
        steps[:, a : a + group] = s
        firm = [np.abs(np.abs(np.modf(v)[0]) - 0.5) > 1e-4 for v in (x / s, low[:, None] / s)]
        sure[:, a : a + group] = firm[0] & (firm[1] | symmetric) & ~edge
    return torch.from_numpy(out), torch.from_numpy(steps), torch.from_numpy(sure)


def rtn(bits, group, symmetric):
    return RTN(bits=bits, group=group, symmetric=symmetric)


def applied(module, transform, role=""):
    return transform.apply(Site(module, "it", role), None)


def test_the_worked_example():
    row = torch.tensor([[-0.8, -0.2, 0.1, 0.5, 0.9]])
    codes, scale, zero = round_to_nearest(row, Layout(8))
    assert scale.item() == pytest.approx(0.9 / 127, rel=1e-7)
    assert (codes.int() - 128).tolist() == [[-113, -28, 14, 71, 127]]
    assert zero is None


@pytest.mark.parametrize(("bits", "group", "symmetric"), GRIDS)
def test_equals_the_reference_and_errs_by_half_a_step(bits, group, symmetric):
    for n, k in SHAPES:
        weight = torch.randn(n, k) * torch.logspace(-2, 1, n)[:, None]
        linear = nn.Linear(k, n)
        linear.weight.data.copy_(weight)
        packed = applied(linear, rtn(bits, group, symmetric))
        found = packed.dequantize().double()
        wanted, step, sure = reference(weight, bits, group, symmetric, bits < 8)
        # Half a step, and what 255 steps in fp32 lose against fp64.
        assert ((found - weight).abs() <= step * (0.5 + 255 * 2**-23)).all(), (n, k)
        assert ((found - wanted).abs() <= 1e-4 * step)[sure].all(), (n, k)
        assert sure.double().mean() > 0.9


@pytest.mark.parametrize(("bits", "group", "symmetric"), GRIDS)
def test_zero_is_exact(bits, group, symmetric):
    weight = torch.randn(20, 70)
    weight[torch.rand(20, 70) < 0.3] = 0.0
    weight[3] = 0.0
    weight[4] = weight[4].abs()
    weight[5] = -weight[5].abs()
    layout = rtn(bits, group, symmetric).layout(Site(nn.Linear(1, 1), "it"))
    packed = pack_matrix(weight, layout, round_to_nearest)
    found = dequantize(packed["weight"], packed["weight_scale"], packed.get("weight_zero"), layout, 20, 70)
    assert (found[weight == 0] == 0).all()
    assert torch.isfinite(found).all()


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
@pytest.mark.parametrize("magnitude", [3e4, 1.0, 1e-3, 1e-7, 1e-30])
def test_magnitudes(bits, magnitude):
    weight = torch.randn(16, 64).clamp(-2, 2) * magnitude
    for symmetric in (True, False):
        layout = Layout(bits, 32, symmetric, "fp32" if bits == 8 else "fp16")
        codes, scale, zero = round_to_nearest(weight, layout)
        assert torch.equal(scale, scale.to(layout.dtype).float())
        step = scale.repeat_interleave(32, 1)
        zeros = layout.zero if zero is None else zero.repeat_interleave(32, 1).float()
        error = (step * (codes.float() - zeros) - weight).abs()
        assert (error <= step * (0.5 + 255 * 2**-23)).all()


def test_all_zero_matrix():
    for bits in (8, 4):
        packed = applied(nn.Linear(40, 10).requires_grad_(False), RTN(bits=bits))
        packed.weight_scale.zero_()
        assert (packed.dequantize() == 0).all()
        linear = nn.Linear(40, 10)
        linear.weight.data.zero_()
        packed = applied(linear, RTN(bits=bits))
        assert (packed.dequantize() == 0).all()
        assert (packed.weight_scale == 0).all()


def test_scale_beyond_the_range_is_refused_by_name():
    linear = nn.Linear(8, 2)
    linear.weight.data.fill_(3e6)
    with pytest.raises(PatchError, match="it: weights of magnitude 3e\\+06 need an INT4 scale beyond fp16"):
        applied(linear, RTN(bits=4))
    linear.weight.data[0] = -3e38
    linear.weight.data[:, 1] = 3e38
    with pytest.raises(PatchError, match="beyond fp32"):
        applied(linear, RTN(bits=8, symmetric=False))
    applied(linear, RTN(bits=8))  # the symmetric scale fits


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_not_finite_is_refused_by_name(bad):
    linear = nn.Linear(8, 2)
    linear.weight.data[1, 3] = bad
    with pytest.raises(PatchError, match=r"it\.weight: 1 of 16 values are NaN or infinite"):
        applied(linear, RTN(bits=8))


def test_per_tensor():
    weight = torch.randn(40, 30)
    linear = nn.Linear(30, 40)
    linear.weight.data.copy_(weight)
    packed = applied(linear, RTN(per_tensor=True))
    scale = weight.abs().max() / 127
    assert torch.equal(unpack_rows(packed.weight_scale, 40), scale.expand(40, 1))
    assert (packed.dequantize() - weight).abs().max() <= scale / 2 * (1 + 1e-5)


def test_per_tensor_of_experts_is_one_scale_a_matrix():
    from tiny import tiny

    experts = tiny("mixtral").model.layers[0].mlp.experts
    packed = applied(experts, RTN(per_tensor=True))
    for expert in range(4):
        scale = experts.down_proj[expert].abs().max() / 127
        found = unpack_rows(packed.down_proj_scale[expert], packed.sizes["down_proj"][0])
        assert torch.equal(found, scale.expand_as(found))


def test_a_matrix_is_rounded_alike_in_pieces(monkeypatch):
    weight = torch.randn(70, 33)
    whole = pack_matrix(weight, Layout(4, 16, False, "fp16"), round_to_nearest)
    monkeypatch.setattr("hfaccel.quant.packing._CHUNK_ELEMENTS", 1)
    pieces = pack_matrix(weight, Layout(4, 16, False, "fp16"), round_to_nearest)
    assert all(torch.equal(whole[name], pieces[name]) for name in whole)


def test_conv1d_is_rounded_along_its_inputs():
    conv = Conv1D(24, 70)  # [70 in, 24 out]
    nn.init.normal_(conv.bias)
    packed = applied(conv, RTN(bits=4))
    assert isinstance(packed, QuantLinear) and (packed.in_features, packed.out_features) == (70, 24)
    assert packed.bias is conv.bias
    wanted, *_ = reference(conv.weight.detach().T, 4, 64, False, True)
    assert torch.allclose(packed.dequantize().double(), wanted, atol=1e-6)


def test_embedding():
    table = nn.Embedding(50, 24, padding_idx=3)
    packed = applied(table, RTN(bits=8), "tok")
    assert isinstance(packed, QuantEmbedding) and packed.padding_idx == 3
    wanted, *_ = reference(table.weight.detach(), 8, -1, True, False)
    look = torch.tensor([[0, 49, 3], [7, 7, 1]])
    assert torch.allclose(packed(look).double(), wanted[look], atol=1e-6)
    assert (packed(torch.tensor([3])) == 0).all()
    for bad in (-1, 50):
        with pytest.raises(IndexError, match=f"token id {bad} is not in 0 .. 49"):
            packed(torch.tensor([0, bad]))


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("bits", [8, 4])
def test_fused_experts(family, bits):
    from tiny import tiny

    experts = tiny(family).model.layers[0].mlp.experts
    packed = applied(experts, RTN(bits=bits))
    assert isinstance(packed, QuantExperts)
    for name in packed.PROJECTIONS:
        found = packed.dequantize(name)
        for expert, weight in enumerate(getattr(experts, name).detach()):
            weight = weight.T if family == "gpt_oss" else weight
            wanted, *_ = reference(weight, bits, -1 if bits == 8 else 64, bits == 8, bits < 8)
            assert torch.allclose(found[expert].double(), wanted, atol=1e-6)
    for name, parameter in experts.named_parameters():
        if name.endswith("bias"):
            assert getattr(packed, name) is parameter


def test_reads_any_float_dtype():
    weight = torch.randn(16, 64).to(torch.bfloat16)
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        linear = nn.Linear(64, 16, dtype=dtype)
        linear.weight.data.copy_(weight)
        packed = applied(linear, RTN(bits=8))
        assert torch.equal(unpack_codes(packed.weight, packed.layout, 16, 64), codes_of(packed))
        assert packed.compute_dtype == dtype
        wanted, *_ = reference(weight, 8, -1, True, False)
        assert torch.allclose(packed.dequantize().double(), wanted, atol=1e-6)


@pytest.mark.parametrize(
    "fields",
    [
        {"bits": 5},
        {"bits": "4"},
        {"bits": True},
        {"bits": 4.0},
        {"bits": 16},
        {"group": 0},
        {"group": -2},
        {"group": 1.5},
        {"group": True},
        {"group": 1 << 21},
        {"symmetric": "yes"},
        {"per_tensor": 1},
        {"per_tensor": True, "group": 64},
        {"per_tensor": True, "symmetric": False},
        {"targets": 3},
        {"targets": (3,)},
        {"ignore": 3},
    ],
)
def test_bad_fields_are_refused(fields):
    with pytest.raises(PatchError, match="RTN"):
        RTN(**fields)


def test_unknown_fields_are_refused():
    with pytest.raises(UnknownName, match="unknown field 'bit'; known are bits, group"):
        RTN.from_dict({"name": "int", "bit": 4})


@pytest.mark.parametrize("recipe, wide", [("int8", True), ("int4", False), ("int3", False), ("int2", True)])
def test_activations_have_16_bits_where_8_would_move_perplexity(recipe, wide):
    """Beside the finest and the coarsest weights; in between only where inputs have outliers."""
    model = hfaccel.patch(tiny("llama"), recipe, progress=False)
    bits = {name: m.layout.act_bits for name, m in model.named_modules() if isinstance(m, QuantLinear)}
    for name, found in bits.items():
        outliers = name.endswith(("q_proj", "k_proj", "v_proj", "lm_head"))
        assert found == (16 if wide or outliers else 8), name
    assert len(bits) == 2 * 7 + 1
