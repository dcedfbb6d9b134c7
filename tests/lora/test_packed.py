"""LoRA layers over packed weights: merging rounds, what needs the float weight is refused."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners import lora

import hfaccel
from adapters import ALL, adapted, layers, logits, steps
from hfaccel import PatchError
from hfaccel.quant.linear import QuantEmbedding, QuantLinear, codes_of
from tiny import ids, tiny

pytestmark = pytest.mark.usefixtures("spill")


@pytest.mark.parametrize("recipe", ["int8", "int4", "int4-g48-sym", "int3"])
@pytest.mark.parametrize("safe", [False, True])
def test_merge_is_right_within_half_a_step(recipe, safe):
    model = adapted(hfaccel.patch(tiny("TL"), recipe))
    found = layers(model)
    wanted = [layer.get_base_layer().dequantize() + layer.get_delta_weight("default") for layer in found]
    before, apart = [copy.deepcopy(layer.get_base_layer()) for layer in found], logits(model)
    unmerged = [layer.get_base_layer().weight for layer in found]
    model.merge_adapter(safe_merge=safe)
    for layer, weight, old in zip(found, wanted, before, strict=True):
        base = layer.get_base_layer()
        assert base.layout == old.layout and base.weights_version == 1
        assert ((base.dequantize() - weight).abs() <= steps(base) * (0.5 + 1e-4)).all()
    together = logits(model)
    assert (together - apart).norm() < (0.1 if recipe == "int8" else 0.8) * apart.norm()
    model.unmerge_adapter()
    for layer, old, weight in zip(found, before, unmerged, strict=True):
        base = layer.get_base_layer()
        assert base.weight is weight and base.weights_version == 2
        assert all(torch.equal(t, old.packed[name]) for name, t in base.packed.items())
    assert torch.equal(logits(model), apart)


def test_adapters_merged_one_by_one_are_rounded_once():
    first = adapted(hfaccel.patch(tiny("TL"), "int4"), name="a")
    adapted(first, 2, name="b")
    second = copy.deepcopy(first)
    first.base_model.merge_adapter(["a"])
    first.base_model.merge_adapter(["b"])
    second.base_model.merge_adapter(["a", "b"])
    for one, two in zip(layers(first), layers(second), strict=True):
        assert one.merged_adapters == ["a", "b"]
        assert torch.equal(one.get_base_layer().weight, two.get_base_layer().weight)
    before = [codes_of(layer.get_base_layer()) for layer in layers(first)]
    first.base_model.merge_adapter(["a"])  # merged already: PEFT warns and does nothing
    assert all(
        torch.equal(codes_of(m.get_base_layer()), b) for m, b in zip(layers(first), before, strict=True)
    )


def test_merge_and_unload():
    patched = hfaccel.patch(tiny("TL"), "int8")
    model = adapted(patched)
    apart = logits(model)
    merged = model.merge_and_unload()
    assert merged is patched and not layers(merged)
    assert isinstance(merged.model.layers[0].mlp.up_proj, QuantLinear)
    assert (logits(merged) - apart).norm() < 0.1 * apart.norm()
    greedy = merged.generate(ids(1, 5), max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert greedy.shape == (1, 9)


@pytest.mark.parametrize("size, lost", [(0.01, True), (4.0, False)])
def test_a_merge_that_rounding_swallows_warns(size, lost, recwarn):
    """A change of a hundredth of a step is lost, one of several steps is not."""
    model = adapted(hfaccel.patch(tiny("TL"), "int8"))
    (layer, *_) = layers(model)
    base = layer.get_base_layer()
    step = float(steps(base).mean())
    delta = layer.get_delta_weight("default")
    layer.lora_B["default"].weight.data *= size * step / float(delta.abs().mean())
    layer.merge()
    found = [str(w.message) for w in recwarn if "survives rounding" in str(w.message)]
    assert len(found) == lost


def test_generate_sees_a_merge(monkeypatch):
    """A plan that was built before the merge is not run after it."""
    monkeypatch.setenv("HFACCEL_STRICT", "1")
    model, x = hfaccel.patch(tiny("TL"), "int4"), ids(16, 6)
    options = {
        "max_new_tokens": 1,
        "do_sample": False,
        "pad_token_id": 0,
        "attention_mask": torch.ones_like(x),
    }

    def check(model):
        top = logits(model, x)[:, -1].topk(2)
        sure = top.values[:, 0] - top.values[:, 1] > 0.05
        tokens = model.generate(x, **options)[:, -1]
        assert sure.sum() > 8 and torch.equal(tokens[sure], top.indices[sure, 0])
        return tokens

    before = check(model)
    merged = adapted(model).merge_and_unload()
    assert not torch.equal(check(merged), before)


def test_a_broken_adapter_is_refused_and_nothing_merged():
    model = adapted(hfaccel.patch(tiny("TL"), "int4"))
    layer = layers(model)[-1]
    layer.lora_B["default"].weight.data[3, 1] = float("nan")
    codes = layer.get_base_layer().weight
    for safe in (False, True):
        with pytest.raises(PatchError, match="merging default: NaN or infinite"):
            layer.merge(safe_merge=safe)
    assert layer.get_base_layer().weight is codes and not layer.merged


def test_merging_a_bias():
    patched = hfaccel.patch(tiny("qwen2"), "int8")
    bias = patched.model.layers[0].self_attn.q_proj.bias
    value = bias.clone()
    model = adapted(patched, target_modules=["q_proj"], lora_bias=True)
    layer = layers(model)[0]
    with torch.no_grad():
        layer.lora_B["default"].bias.fill_(0.5)
    apart = logits(model)
    model.merge_adapter()
    torch.testing.assert_close(layer.get_base_layer().bias, value + 0.5 * 2)
    assert torch.equal(bias, value)  # it is the original module's too
    assert (logits(model) - apart).norm() < 0.05 * apart.norm()
    model.unmerge_adapter()
    assert layer.get_base_layer().bias is bias
    bare = adapted(hfaccel.patch(tiny("TL"), "int8"), target_modules=["q_proj"], lora_bias=True)
    with pytest.raises(PatchError, match="'default' has a bias, the layer it is merged into has none"):
        bare.merge_adapter()


def test_merging_into_a_tied_embedding_leaves_the_head():
    patched = hfaccel.patch(tiny("TL", tie_word_embeddings=True), "int4")
    model = adapted(patched, target_modules=["embed_tokens"])
    table = layers(model)[0]
    assert isinstance(table, lora.Embedding) and isinstance(table.get_base_layer(), QuantEmbedding)
    look = ids(2, 6)
    wanted = table.get_base_layer().dequantize() + table.get_delta_weight("default")
    head = patched.lm_head.weight.clone()
    with torch.no_grad():
        torch.testing.assert_close(table(look), wanted[look], rtol=1e-4, atol=1e-4)
    model.merge_adapter()
    base = table.get_base_layer()
    assert ((base.dequantize() - wanted).abs() <= steps(base) * (0.5 + 1e-4)).all()
    assert torch.equal(patched.lm_head.weight, head) and patched.lm_head.weight is not base.weight
    model.unmerge_adapter()
    assert patched.lm_head.weight is base.weight


def test_a_merge_that_unties_is_saved_as_untied(tmp_path):
    patched = hfaccel.patch(tiny("TL", tie_word_embeddings=True), "int4")
    merged = adapted(patched, target_modules=["embed_tokens"]).merge_and_unload()
    wanted = logits(merged)
    merged.save_pretrained(tmp_path)
    loaded = hfaccel.from_pretrained(tmp_path, attn_implementation="eager")
    assert not loaded.config.tie_word_embeddings and torch.equal(logits(loaded), wanted)


def test_merging_into_a_scaled_embedding():
    patched = hfaccel.patch(tiny("gemma3"), "int8")
    model = adapted(patched, target_modules=["embed_tokens"])
    look, table = ids(2, 6), layers(model)[0]
    with torch.no_grad():
        apart = table(look)
        model.merge_adapter()
        step = steps(table.get_base_layer())[look] * table.get_base_layer().multiplier
        assert ((table(look) - apart).abs() <= step * 0.51).all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"init_lora_weights": "olora"}, "init_lora_weights='olora'"),
        ({"init_lora_weights": "orthogonal"}, "init_lora_weights='orthogonal'"),
        ({"init_lora_weights": "mica"}, "init_lora_weights='mica'"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4'"),
    ],
)
def test_adapters_that_read_the_weight_are_refused_by_name(settings, message):
    with pytest.raises(PatchError, match=message):
        get_peft_model(hfaccel.patch(tiny("TL"), "int4"), LoraConfig(target_modules=ALL, **settings))


@pytest.mark.parametrize("init", [True, False, "gaussian"])
def test_adapters_that_start_without_the_weight(init):
    config = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=init)
    model = get_peft_model(hfaccel.patch(tiny("TL"), "int4"), config)
    assert torch.isfinite(logits(model)).all()


def test_adapters_on_packed_experts_are_refused_by_name():
    patched = hfaccel.patch(tiny("mixtral"), "int4")
    config = LoraConfig(r=2, target_modules=["q_proj"], target_parameters=["experts.down_proj"])
    with pytest.raises(PatchError, match="fused experts .*have adapters only where they are not quantized"):
        get_peft_model(patched, config)


def test_unpatched_models_get_the_layers_of_peft():
    model = adapted(tiny("TL"))
    assert {type(layer) for layer in layers(model)} == {lora.Linear}
    apart = logits(model)
    model.merge_adapter()
    torch.testing.assert_close(logits(model), apart, rtol=1e-4, atol=1e-4)
