"""AWQ: scales that change nothing before rounding and help after it, folded and given back bit for bit."""

import copy

import pytest
import torch
from torch import nn

import hfaccel
from hfaccel import PatchError
from hfaccel.anatomy import anatomy
from hfaccel.calibrate import BlockLoop
from hfaccel.journal import Journal
from hfaccel.observers import Stats, Want
from hfaccel.quant.awq import AWQ, fold_scales, matrix_of, output_error, search_scale
from hfaccel.quant.linear import ScaledLinear, is_conv1d, is_packed
from hfaccel.quant.rtn import round_to_nearest
from hfaccel.recipe import PatchConfig
from hfaccel.sites import Plan
from hfaccel_kernels.layouts import Layout
from hfaccel_kernels.packing import dequantize_codes
from plans import record_errors
from saved import logits, reload
from tiny import FAMILIES, ids, tiny

ROWS = [ids(1, length, seed=length)[0] for length in (60, 41, 35)]
INT3 = Layout(3, 32, False, "fp16")


def inputs(tokens: int, k: int) -> torch.Tensor:
    """[tokens, k], correlated, a few channels much larger than the others."""
    size = torch.ones(k)
    size[torch.randperm(k)[: k // 16 + 1]] = 15.0
    return torch.randn(tokens, k) @ (torch.eye(k) + 0.3 * torch.randn(k, k) / k**0.5) * size


def moments(x):
    return x.t() @ x / len(x)


def folded(model, recipe="awq4+head16", change=True):
    """What AWQ would fold, block by block, also written into the dense weights: all but the rounding."""
    plan = Plan.of(model, PatchConfig.from_recipe(recipe))
    ((awq, sites),) = [(t, s) for t, s in plan.work if t.name == "awq"]
    loop = BlockLoop(model, plan.anatomy, ROWS, [(s, Want(hessian=True)) for s in sites])
    journal, folds = Journal(model), {}
    for index, stats in loop:
        now = [site for site in sites if site.block == index]
        folds |= awq.smooth(model, plan.anatomy, now, stats, journal)
        for site in now if change else ():
            fold = folds.get(site.name)
            if fold is None or (fold.columns is None and fold.rows is None):
                continue
            matrix = matrix_of(site.module).clone()
            if fold.columns is not None:
                matrix *= fold.columns
            if fold.rows is not None:
                matrix /= fold.rows[:, None]
                if site.module.bias is not None:
                    site.module.bias.data /= fold.rows
            site.module.weight.data = matrix.T.contiguous() if is_conv1d(site.module) else matrix
            if fold.inputs is not None:
                site.module.register_forward_pre_hook(lambda _, args, by=fold.inputs: (args[0] * by,))
    return folds


@pytest.mark.parametrize("family", FAMILIES)
def test_folding_alone_changes_nothing(family):
    model = tiny(family)
    wanted = logits(model)
    folds = folded(model)
    scaled = {name for name, fold in folds.items() if fold.columns is not None}
    itself = {name for name, fold in folds.items() if fold.inputs is not None}
    assert torch.allclose(logits(model), wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))
    parts = anatomy(model)
    groups = [g for g in parts.groups if "experts" not in str(g.readers)]
    readers = {n for g in groups if g.feeder for n in g.readers}
    assert scaled - itself == readers & set(folds)
    assert itself <= {n for g in groups if not g.feeder for n in g.readers}
    # Scales of one everywhere would pass the first assertion too.
    assert max(float((folds[name].columns - 1).abs().max()) for name in scaled) > 0.1
    for name, fold in folds.items():
        assert name in scaled or fold.note or fold.rows is not None, name


def test_query_heads_that_share_a_value_head_share_its_scale():
    model = tiny("TL")  # 8 query heads, 2 value heads of 8
    folds = folded(model, change=False)
    columns = folds["model.layers.1.self_attn.o_proj"].columns.view(2, 4, 8)
    assert (columns == columns[:, :1]).all()
    assert torch.equal(folds["model.layers.1.self_attn.v_proj"].rows, columns[:, 0].flatten())
    assert folds["model.layers.1.self_attn.q_proj"].rows is None


@pytest.mark.parametrize("layout", [Layout(4, 32, False, "fp16"), INT3, Layout(4, 40, True, "fp16")])
def test_scales_err_no_more_than_none_on_the_calibration_data(layout):
    x = inputs(500, 96)
    weights = [torch.randn(40, 96), torch.randn(24, 96) * 0.1]
    scale = search_scale(weights, moments(x), [layout] * 2)

    def loss(s):
        """By the tokens themselves: relative errors of the outputs, added."""
        total = 0.0
        for w in weights:
            back = dequantize_codes(*round_to_nearest(w * s, layout), layout) / s
            total += float(
                (x @ (back - w).t()).double().square().mean() / (x @ w.t()).double().square().mean()
            )
        return total

    assert (scale - 1).abs().max() > 0.1
    assert loss(scale) < 0.8 * loss(torch.ones(96))  # 0.5 and less here


def test_the_error_by_second_moments_is_that_of_the_tokens():
    x, wrong = inputs(300, 50).double(), torch.randn(9, 50, dtype=torch.float64)
    wanted = float((x @ wrong.t()).square().sum(1).mean())
    assert output_error(wrong, moments(x)) == pytest.approx(wanted, rel=1e-9)


def test_dead_channels_and_zero_weights_keep_their_size():
    x = inputs(300, 64)
    x[:, 5:9] = 0
    weight = torch.randn(16, 64)
    weight[:, 20] = 0
    scale = search_scale([weight], moments(x), [INT3])
    assert (scale[5:9] == 1).all() and scale[20] == 1 and torch.isfinite(scale).all() and (scale > 0).all()
    nothing = search_scale([weight], torch.zeros(64, 64), [INT3])
    assert (nothing == 1).all()
    assert (search_scale([torch.zeros(16, 64)], moments(x), [INT3]) == 1).all()


def test_products_that_are_not_finite_are_refused():
    h = moments(inputs(100, 32))
    h[3, 3] = float("inf")
    with pytest.raises(PatchError, match="not finite"):
        search_scale([torch.randn(8, 32)], h, [INT3])


def test_the_norm_of_a_narrow_dtype_and_its_readers_agree():
    model = tiny("llama").bfloat16()
    norm = model.model.layers[0].input_layernorm
    gain = norm.weight.detach().float()
    folds = folded(model, change=False)
    new = model.model.layers[0].input_layernorm
    assert new is not norm and new.weight.dtype is torch.bfloat16
    scale = folds["model.layers.0.self_attn.q_proj"].columns
    assert torch.allclose(new.weight.float() * scale, gain, rtol=1e-6)
    assert torch.equal(norm.weight.float(), gain)


@pytest.mark.parametrize("recipe", ["awq4", "awq3-sym", "gptq4-awq", "gptq2-awq-tuned"])
@pytest.mark.parametrize("family", ["TL", "gpt2", "gemma2", "phi3"])
def test_unpatch_and_reload_are_bit_for_bit(family, recipe, tmp_path, monkeypatch):
    from hfaccel.quant.tune import Tuning

    monkeypatch.setattr("hfaccel.quant.gptq.Tuning", lambda: Tuning(steps=2, step_tokens=32))
    model = tiny(family)
    before, modules = copy.deepcopy(model.state_dict()), dict(model.named_modules())
    wanted = logits(model)
    hfaccel.patch(model, recipe, calibration=ROWS, progress=False)
    packed = logits(model)
    assert any(map(is_packed, model.modules())) and not torch.equal(packed, wanted)
    with hfaccel.original(model):
        assert torch.equal(logits(model), wanted)
    assert torch.equal(logits(model), packed)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(reload(model, tmp_path)), packed)
    hfaccel.unpatch(model)
    assert dict(model.named_modules()) == modules and torch.equal(logits(model), wanted)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_closer_to_the_original_than_the_same_without_scales():
    def distance(recipe):
        model = tiny("TL")
        norm = model.model.layers[1].post_attention_layernorm  # channels of very different sizes
        norm.weight.data[::9] *= 8
        wanted = logits(model)
        data = [ids(1, 200, seed=seed, vocab=512) for seed in range(6)]
        hfaccel.patch(model, recipe, calibration=data, progress=False)
        return float((logits(model) - wanted).square().mean())

    assert distance("awq4-noclip+head16") < 0.9 * distance("int4+head16")


@pytest.mark.parametrize("recipe", ["awq3", "w8a8", "gptq3-awq", "w8a8-static"])
def test_inputs_behind_a_gelu_are_scaled_by_their_reader(recipe, tmp_path):
    """gpt2's c_proj: its layout, its file, adapters and the plan hold what the module multiplies by."""
    model = tiny("gpt2")
    block = model.transformer.h[0].mlp
    block.c_fc.bias.data[::16] += 10.0  # channels far larger than the others
    dense = block.c_proj.weight.detach().T.clone()
    hfaccel.patch(model, recipe, calibration=ROWS, progress=False)
    module = block.c_proj
    assert isinstance(module, ScaledLinear) and module.input_scale.dtype is torch.float32
    assert float(module.input_scale.max() / module.input_scale.min()) > 2
    details = {record.name: record.detail for record in hfaccel.report(model).records}
    detail = details["transformer.h.0.mlp.c_proj"]
    assert "it scales its inputs itself: what feeds them" in detail
    # The same weight as before, but for rounding: relative to each column's size in the codes.
    error = (module.dequantize() - dense) / module.input_scale
    assert float(error.abs().max()) < (0.02 if recipe.startswith("w8a8") else 0.4) * float(
        (dense / module.input_scale).abs().max()
    )
    seen = []
    with module.register_forward_pre_hook(lambda _, args: seen.append(args[0])), torch.no_grad():
        model(input_ids=ROWS[0][None])
        x = seen[0]
        wanted = x @ module.dequantize().T + module.bias
        assert float((module(x) - wanted).norm() / wanted.norm()) < 0.02
    half = copy.deepcopy(module).bfloat16()
    assert half(x.bfloat16()).dtype is torch.bfloat16 and half.input_scale.dtype is torch.float32
    errors = record_errors(model, ids(1, 9)[0])
    assert "Scale" in errors and max(errors.values()) < 1e-5
    packed = logits(model)
    model.save_pretrained(tmp_path)
    again = reload(model, tmp_path)
    assert torch.equal(logits(again), packed)
    assert torch.equal(again.transformer.h[0].mlp.c_proj.input_scale, module.input_scale)


def test_merging_an_adapter_counts_the_scale_of_the_inputs():
    from peft import LoraConfig, get_peft_model

    model = tiny("gpt2")
    hfaccel.patch(model, "awq8", calibration=ROWS, progress=False)
    peft = get_peft_model(model, LoraConfig(target_modules=["mlp.c_proj"], fan_in_fan_out=False, r=4))
    for name, parameter in peft.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    wanted = logits(peft)
    merged = peft.merge_and_unload()
    assert isinstance(merged.transformer.h[0].mlp.c_proj, ScaledLinear)
    gap = (logits(merged) - wanted).norm() / (wanted - logits(tiny("gpt2"))).norm()
    assert float(gap) < 0.2  # 8 bits round the sum; a forgotten scale misses it by more than its size


def test_groups_that_are_not_folded_say_so():
    model = tiny("TL")
    hfaccel.patch(model, AWQ(ignore=("**.k_proj",)), calibration=ROWS, progress=False)
    details = {record.name: record.detail for record in hfaccel.report(model).records}
    assert "scales its inputs itself: k_proj reads the same" in details["model.layers.0.self_attn.q_proj"]
    assert "itself" not in details["model.layers.0.self_attn.o_proj"]
    model = tiny("TX")
    hfaccel.patch(model, "awq4", calibration=ROWS, progress=False)
    details = {record.name: record.detail for record in hfaccel.report(model).records}
    assert "inputs not scaled: fused experts" in details["model.layers.0.mlp.experts"]
    model = tiny("TL")
    hfaccel.patch(model, AWQ(targets=("**.down_proj",)), calibration=ROWS, progress=False)
    details = {record.name: record.detail for record in hfaccel.report(model).records}
    assert "up_proj feeds them and is not rounded" in details["model.layers.0.mlp.down_proj"]


def test_a_failure_in_the_middle_gives_the_norms_back(monkeypatch):
    model = tiny("TL")
    wanted, modules = logits(model), dict(model.named_modules())
    apply = AWQ.apply

    def interrupted(self, site, stats):
        if site.block == 2 and site.role == "up":
            raise KeyboardInterrupt
        return apply(self, site, stats)

    monkeypatch.setattr(AWQ, "apply", interrupted)
    with pytest.raises(KeyboardInterrupt):
        hfaccel.patch(model, "awq4", calibration=ROWS, progress=False)
    assert dict(model.named_modules()) == modules and torch.equal(logits(model), wanted)


def test_bad_data_is_refused_by_name():
    model = tiny("TL")
    with pytest.raises(PatchError, match="0 tokens in 0 samples"):
        hfaccel.patch(model, "awq4", calibration=[], progress=False)
    model.model.embed_tokens.weight.data[7] = float("nan")
    data = [torch.cat([torch.tensor([7]), ids(1, 40)[0]])]
    with pytest.raises(PatchError, match="layers.0.self_attn.q_proj: .* NaN or infinite"):
        hfaccel.patch(model, "awq4", calibration=data, progress=False)
    assert not any(map(is_packed, model.modules()))
    with pytest.raises(PatchError, match="clip=1"):
        AWQ(clip=1)


def test_without_tokens_nothing_is_scaled():
    model = tiny("TL")
    plan = Plan.of(model, PatchConfig.from_recipe("awq4+head16"))
    sites = [site for _, sites in plan.work for site in sites if site.block == 0]
    stats = {site.name: (Stats(0, torch.zeros(*2 * [site.module.in_features])),) for site in sites}
    journal = Journal(model)
    folds = fold_scales(model, plan.anatomy, sites, stats, journal, AWQ().layout)
    assert not journal.swaps and all("no token reached" in fold.note for fold in folds.values())
    assert len(folds) == 7 and isinstance(model.model.layers[0].input_layernorm, nn.Module)
