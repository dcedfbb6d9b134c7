"""SmoothQuant: the formula, an unchanged function before rounding, static scales, and a model end to end."""

import numpy as np
import pytest
import torch

import hfaccel
from hfaccel import PatchError, SmoothQuant
from hfaccel.errors import UnknownName
from hfaccel.observers import Stats
from hfaccel.quant.linear import QuantLinear, codes_of, is_packed
from hfaccel.quant.smoothquant import migration
from hfaccel.transform import Site
from saved import logits, patched, reload
from tiny import ids, tiny


def test_the_formula_in_fp64():
    inputs, columns = torch.rand(50) * 30, torch.rand(50)
    for alpha in (0.0, 0.5, 0.8, 1.0):
        want = inputs.double().numpy() ** alpha / columns.double().numpy() ** (1 - alpha)
        assert np.allclose(migration(inputs, columns, alpha).double().numpy(), want, rtol=1e-6)


def test_dead_channels_and_shared_scales():
    inputs, columns = torch.tensor([4.0, 0.0, 9.0, 1.0]), torch.tensor([1.0, 1.0, 0.0, 4.0])
    assert migration(inputs, columns, 0.5).tolist() == [2.0, 1.0, 1.0, 0.5]
    into = torch.tensor([7, 3, 3, 7])  # columns 0 and 3 as one: max 4 and 4; 1 and 2: 9 and 1
    assert migration(inputs, columns, 0.5, into).tolist() == [1.0, 3.0, 3.0, 1.0]


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_what_moves_leaves_the_function_as_it_was(family):
    """Norms and matrices hold the same product: dequantized weights in place, only INT8 rounding differs."""
    model, plain = tiny(family), tiny(family)
    patched(model, "w8a8+head16")
    norms = [name for name, _ in model.named_parameters() if "norm.weight" in name or ".ln_1.weight" in name]
    assert any(not torch.equal(model.get_parameter(n), plain.get_parameter(n)) for n in norms)
    for name, module in model.named_modules():
        if is_packed(module):
            weight = module.dequantize()
            twin = plain.get_submodule(name)
            twin.weight.data = (weight.T if type(twin).__name__ == "Conv1D" else weight).contiguous()
        for key, theirs in plain.get_submodule(name).named_parameters(recurse=False):
            if key != "weight" or not is_packed(module):
                theirs.data = getattr(module, key).data
    original = logits(tiny(family))
    assert (logits(plain) - original).norm() < 0.05 * original.norm()


def test_activations_of_a_layer_have_one_scale_a_token_or_one_for_all():
    dynamic, static = patched(tiny("TL"), "w8a8"), patched(tiny("TL"), "w8a8-static")
    for model, fixed in ((dynamic, False), (static, True)):
        layers = [m for n, m in model.named_modules() if isinstance(m, QuantLinear) and n != "lm_head"]
        assert len(layers) == 28 and all(m.layout.act == "token" and m.layout.static == fixed for m in layers)
    attention = static.model.layers[1].self_attn
    assert attention.q_proj.layout == attention.k_proj.layout == attention.v_proj.layout
    seen = []
    attention.q_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach().abs().max()))
    for length in (7, 12, 16):  # the calibration of `patched`
        static(ids(1, length, seed=length))
    # Before rounding the blocks below, the largest input was that of the scale, nearly.
    assert attention.q_proj.layout.act_scale * 127 == pytest.approx(float(max(seen)), rel=0.2)


def test_a_static_scale_is_the_largest_input_and_none_where_that_says_little():
    site = Site(torch.nn.Linear(4, 4), "it")
    for most, static in ((30.0, True), (80.0, False), (0.0, False)):
        size = torch.tensor([0.0, 0.0, 0.0, most])
        stats = Stats(9, abs_max=size, square_mean=torch.full((4,), float(most > 0)))
        layout = SmoothQuant(static=True).observed_layout(site, (stats,))
        assert layout.static == (static and most > 0)
        assert not layout.static or layout.act_scale == pytest.approx(most / 127)
    assert not SmoothQuant(static=True).observed_layout(site, (Stats(0, abs_max=size),)).static


def test_without_data_it_is_refused_and_unsmoothed_it_needs_none():
    model = tiny("TL")
    with pytest.raises(PatchError, match="w8a8"):
        hfaccel.patch(model, "w8a8", progress=False)
    with pytest.raises(PatchError, match="w8a8-static-nosmooth"):
        hfaccel.patch(model, "w8a8-static-nosmooth", progress=False)
    assert not any(map(is_packed, model.modules()))
    hfaccel.patch(model, "w8a8-nosmooth", progress=False)
    plain = hfaccel.patch(tiny("TL"), "int8", progress=False)
    for name, module in model.named_modules():
        if is_packed(module):
            assert torch.equal(codes_of(module), codes_of(plain.get_submodule(name)))


@pytest.mark.parametrize("recipe", ["w8a8", "w8a8-static"])
def test_a_model_generates_through_the_native_plan_and_comes_back(recipe, monkeypatch, tmp_path):
    monkeypatch.setenv("HFACCEL_STRICT", "1")
    model, x = tiny("TL"), ids(2, 12)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    patched(model, recipe)
    assert "executor native" in str(hfaccel.report(model))
    found = model.generate(x, max_new_tokens=6, do_sample=False)
    with torch.no_grad():
        for _ in range(6):
            x = torch.cat([x, model(x).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(found, x)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(reload(model, tmp_path)), logits(model))
    hfaccel.unpatch(model)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_an_overflowing_token_poisons_itself_alone():
    model = patched(tiny("TL"), "w8a8-static")
    module = model.model.layers[0].mlp.up_proj
    x = torch.randn(4, 64)
    clean = module(x)
    x[1, 3], x[2, 5] = float("nan"), float("-inf")
    y = module(x)
    assert not y[1:3].isfinite().any() and torch.equal(y[[0, 3]], clean[[0, 3]])


@pytest.mark.parametrize(
    "fields", [{"alpha": 1.5}, {"alpha": True}, {"static": 1}, {"bits": 4}, {"group": 64}]
)
def test_fields_it_cannot_have(fields):
    with pytest.raises(PatchError, match="SmoothQuant"):
        SmoothQuant(**fields)


def test_weights_that_are_not_finite_are_refused_by_name():
    model = tiny("TL")
    model.model.layers[2].mlp.down_proj.weight.data[3, 4] = float("nan")
    with pytest.raises((PatchError, UnknownName), match="layers.2.mlp.down_proj"):
        patched(model, "w8a8")
    assert not any(map(is_packed, model.modules()))
