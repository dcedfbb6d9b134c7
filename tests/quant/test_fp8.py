"""FP8: torch's float8 on the formula's scales, every code through the product, and a model end to end."""

import pytest
import torch
from torch import nn

import hfaccel
from hfaccel import FP8, PatchError
from hfaccel.quant.linear import codes_of, is_packed
from hfaccel.transform import Site
from hfaccel_kernels.codebook import FLOAT8, TOP, round_e4m3
from hfaccel_kernels.packing import unpack_scales
from tiny import ids, tiny


def packed(weight, **fields):
    linear = nn.Linear(*reversed(weight.shape), bias=False)
    linear.weight.data.copy_(weight)
    return FP8(**fields).apply(Site(linear, "it"), None)


@pytest.mark.parametrize("per_tensor", [False, True])
@pytest.mark.parametrize("format", FLOAT8)
def test_equals_torch_s_float8_on_the_formula_s_scales(format, per_tensor):
    weight = torch.randn(40, 300) * torch.logspace(-6, 1, 40)[:, None]  # per tensor: subnormals and zeros too
    module = packed(weight, format=format, per_tensor=per_tensor)
    peak = weight.abs().amax() if per_tensor else weight.abs().amax(1, keepdim=True)
    scale = (peak.double() / TOP[format]).float()
    stored = unpack_scales(module.weight_scale, module.layout, 40)
    assert torch.allclose(stored, scale.expand(40, 1), rtol=1e-6)
    codes = codes_of(module)
    assert torch.equal(
        codes, (weight / stored).clamp(-TOP[format], TOP[format]).to(FLOAT8[format]).view(torch.uint8)
    )
    values = codes.view(FLOAT8[format]).double() * stored.double()
    assert torch.allclose(module.dequantize().double(), values, rtol=1e-6, atol=0)
    top = torch.tensor(TOP[format])
    if not per_tensor:
        assert (codes.view(FLOAT8[format]).float().abs().amax(1) == top).all()


def by_hand(x: float) -> float:
    """The nearest e4m3 number to x: of all there are, the one with the even last bit at a tie."""
    every = torch.arange(128, dtype=torch.uint8).view(torch.float8_e4m3fn).double()[:127]
    gap = (every - abs(x)).abs()
    best = (gap == gap.min()).nonzero().flatten().tolist()
    code = next(c for c in best if len(best) == 1 or c % 2 == 0)
    return float(every[code]) * (1 if x >= 0 else -1)


def test_activations_round_half_to_even_and_saturate():
    ties = torch.tensor([464.0, 1e6, -1e6, 17.0, 19.0, 2.0**-10, 3 * 2.0**-10, 2.0**-6 * 1.0625])
    x = torch.cat([torch.randn(200) * torch.logspace(-4, 2.5, 200), torch.arange(0, 40) * 2.0**-10, ties])
    assert round_e4m3(x).tolist() == [by_hand(value) for value in x.tolist()]


def test_every_float8_there_is_through_every_product():
    """Each code as a weight, times one: the product is the code's value, subnormals included."""
    from hfaccel_kernels.layouts import Layout
    from hfaccel_kernels.packing import pack_codes, pack_scales
    from hfaccel_kernels.qlinear import qlinear

    for format, dtype in FLOAT8.items():
        codes = torch.arange(256, dtype=torch.uint8)[:, None]
        values = codes.view(dtype).float()
        codes = torch.where(values.isfinite(), codes, 0)
        layout = Layout(8, code=format, act="token")
        weight, scale = pack_codes(codes, layout), pack_scales(torch.ones(256, 1), layout)
        y = qlinear(torch.ones(1, 1), weight, scale, None, None, layout, 256, 1)
        assert torch.allclose(y[0], codes.view(dtype).float()[:, 0], rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "fields", [{"format": "e3m4"}, {"bits": 4}, {"group": 64}, {"symmetric": False}, {"per_tensor": 1}]
)
def test_fields_it_cannot_have(fields):
    with pytest.raises(PatchError, match="FP8"):
        FP8(**fields)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused_by_name(bad):
    model = tiny("TL")
    model.model.layers[2].mlp.up_proj.weight.data[3, 4] = bad
    with pytest.raises(PatchError, match="layers.2.mlp.up_proj.weight: 1 of .* NaN"):
        hfaccel.patch(model, "fp8", progress=False)
    assert not any(map(is_packed, model.modules()))


@pytest.mark.parametrize("recipe", ["nf4", "fp8", "fp8-e5m2-tensor"])
def test_a_model_generates_through_the_native_plan_and_comes_back(recipe, monkeypatch):
    monkeypatch.setenv("HFACCEL_STRICT", "1")
    model, x = tiny("TL"), ids(2, 12)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    hfaccel.patch(model, recipe, progress=False)
    assert "executor native" in str(hfaccel.report(model))
    found = model.generate(x, max_new_tokens=6, do_sample=False)
    with torch.no_grad():
        for _ in range(6):
            x = torch.cat([x, model(x).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(found, x)
    hfaccel.unpatch(model)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
