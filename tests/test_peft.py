"""PEFT over packed weights: training, mixed batches, merging that rounds, and adapters that were there "
"before."""

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn

import hfaccel
from hfaccel import RTN, PatchError
from hfaccel.quant.linear import QuantEmbedding, QuantLinear, codes_of, is_packed
from tiny import ids, tiny

peft = pytest.importorskip("peft")
from peft import LoraConfig, get_peft_model  # noqa: E402
from peft.tuners import lora  # noqa: E402

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(autouse=True)
def spill(tmp_path, monkeypatch):
    monkeypatch.setenv("HFACCEL_SPILL_DIR", str(tmp_path / "spill"))


def adapted(model, seed=1, b=0.3, name="default", **config):
    """`model` with an adapter whose B is not zero."""
    torch.manual_seed(seed)
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ALL, "task_type": "CAUSAL_LM"} | config
    settings = LoraConfig(**settings)
    if isinstance(model, peft.PeftModel):
        model.add_adapter(name, settings)
    else:
        model = get_peft_model(model, settings, adapter_name=name)
    shake(model, name, b)
    return model


def shake(model, name="default", b=0.3):
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if f"lora_B.{name}" in key or f"lora_embedding_B.{name}" in key:
                parameter.copy_(b * torch.randn_like(parameter))


def logits(model, x=None, **kwargs):
    with torch.no_grad():
        return model(input_ids=ids(3, 10) if x is None else x, **kwargs).logits


def layers(model):
    return [module for module in model.modules() if isinstance(module, lora.LoraLayer)]


# Training ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["int8", "int4"])
def test_the_loss_falls(recipe):
    model = get_peft_model(
        hfaccel.patch(tiny("TL"), recipe), LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    assert {module.get_base_layer().__class__ for module in layers(model)} == {QuantLinear}
    codes = {name: b.clone() for name, b in model.named_parameters() if b.dtype == torch.uint8}
    trained = [p for p in model.parameters() if p.requires_grad]
    assert trained and all("lora_" in name for name, p in model.named_parameters() if p.requires_grad)
    model.train()
    optimizer, x, losses = torch.optim.AdamW(trained, lr=1e-2), ids(4, 16), []
    for _ in range(12):
        loss = model(input_ids=x, labels=x).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0], losses
    assert all(torch.equal(p, codes[name]) for name, p in model.named_parameters() if name in codes)


def gradients(recipe, checkpointing, before):
    """Adapter gradients of one step."""
    model = tiny("TL", tie_word_embeddings=True)

    def enable():
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
        model.enable_input_require_grads()

    if checkpointing and before:
        enable()
    hfaccel.patch(model, recipe)
    if checkpointing and not before:
        enable()
    wrapped = adapted(model)
    wrapped.train()
    x = ids(2, 9)
    wrapped(input_ids=x, labels=x).loss.backward()
    out = {name: p.grad for name, p in wrapped.named_parameters() if p.requires_grad}
    assert len(out) == 2 * 7 * 4 and all(grad is not None and grad.abs().max() > 0 for grad in out.values())
    with torch.no_grad():
        tokens = wrapped.eval().generate(input_ids=x, max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert tokens.shape == (2, 12)
    return out


@pytest.mark.parametrize("recipe", ["int4", "int8"])
def test_gradient_checkpointing(recipe):  # case D4
    wanted = gradients(recipe, "", False)
    for checkpointing in ("reentrant", "non-reentrant"):
        for before in (True, False):
            found = gradients(recipe, checkpointing, before)
            for name, grad in wanted.items():
                torch.testing.assert_close(
                    found[name], grad, rtol=1e-6, atol=1e-6, msg=f"{checkpointing} {name}"
                )


# Inference ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["int8", "int4"])
def test_mixed_batch_equals_solo_runs(recipe):
    model = adapted(hfaccel.patch(tiny("TL"), recipe), name="a")
    adapted(model, 2, name="b", r=8, target_modules=["q_proj", "down_proj"])
    model.eval()
    x, who = ids(5, 10), ["b", "__base__", "a", "b", "__base__"]
    mixed = logits(model, x, adapter_names=who)
    for row, name in enumerate(who):
        if name == "__base__":
            with model.disable_adapter():
                solo = logits(model, x[row : row + 1])
        else:
            model.set_adapter(name)
            solo = logits(model, x[row : row + 1])
        torch.testing.assert_close(mixed[row : row + 1], solo, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(mixed[1], mixed[2])


def test_the_adapter_is_added_in_the_dtype_of_the_model():
    model = adapted(hfaccel.patch(tiny("TL").to(torch.bfloat16), "int4"))
    assert logits(model).dtype == torch.bfloat16


# Merging ------------------------------------------------------------------------------------------------


def steps(module):
    """[out, in] the step of each weight's group."""
    from hfaccel_kernels.layouts import unpack_rows

    scale = unpack_rows(module.weight_scale.float(), module.size[0])
    return scale.repeat_interleave(module.layout.group_len(module.size[1]), 1)[:, : module.size[1]]


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


# Adapters that were there before, patches that come and go --------------------------------------------------


def dense_with_rounded_base(model, patched):
    """The unpatched twin of an adapted model, with the dequantized weights under the adapters."""
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for name, module in patched.named_modules():
            if isinstance(module, QuantLinear):
                target = twin.get_submodule(name)
                weight = module.dequantize()
                target.weight.copy_(weight.T if hasattr(target, "nf") else weight)
    return twin


@pytest.mark.parametrize("family", ["TL", "TG"])
def test_adapters_attached_before_stay(family):
    model = adapted(tiny(family), target_modules=ALL if family == "TL" else ["c_attn", "c_proj"])
    plain = copy.deepcopy(model)
    adapters = {name: p.clone() for name, p in model.named_parameters() if "lora_" in name}
    config, dense = model.config, logits(model)
    assert hfaccel.patch(model, "int8") is model
    assert all(isinstance(layer.get_base_layer(), QuantLinear) for layer in layers(model))
    assert all(torch.equal(p, adapters[name]) for name, p in model.named_parameters() if name in adapters)
    assert model.config is model.get_base_model().config is not config
    found, wanted = logits(model), logits(dense_with_rounded_base(plain, model))
    assert (found - wanted).norm() < 0.05 * wanted.norm()
    assert (found - logits(model.get_base_model())).norm() == 0
    with model.disable_adapter():
        assert (logits(model) - wanted).norm() > 0.1 * wanted.norm()
    deltas = [layer.get_base_layer().dequantize() for layer in layers(model)]
    model.merge_adapter()
    for layer, before in zip(layers(model), deltas, strict=True):
        base, delta = layer.get_base_layer(), layer.get_delta_weight("default")
        merged = before + (delta.T if family == "TG" else delta)
        assert ((base.dequantize() - merged).abs() <= steps(base) * (0.5 + 1e-4)).all()
    model.unmerge_adapter()
    with hfaccel.original(model):
        assert torch.equal(logits(model), dense)
    assert torch.equal(logits(model), found)
    hfaccel.unpatch(model)
    assert {type(layer) for layer in layers(model)} == {lora.Linear} and not any(
        map(is_packed, model.modules())
    )
    assert torch.equal(logits(model), dense) and model.config is config
    model.merge_adapter()


def test_failure_leaves_an_adapted_model_as_it_was(monkeypatch):
    model = adapted(tiny("TL"))
    modules, dense, config = dict(model.named_modules()), logits(model), model.config
    monkeypatch.setattr("hfaccel.generate.mixin.install", lambda *a, **k: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        hfaccel.patch(model, "int4")
    assert (
        dict(model.named_modules()) == modules
        and torch.equal(logits(model), dense)
        and model.config is config
    )
    assert {type(layer) for layer in layers(model)} == {lora.Linear}


def test_adapters_attached_after_survive_unpatch():
    bare = tiny("TL")
    model = adapted(hfaccel.patch(bare, "int4"))
    state = {name: p.clone() for name, p in model.named_parameters() if "lora_" in name}
    hfaccel.unpatch(model)
    assert {type(layer) for layer in layers(model)} == {lora.Linear}
    assert all(type(layer.get_base_layer()) is nn.Linear for layer in layers(model))
    assert all(torch.equal(p, state[name]) for name, p in model.named_parameters() if name in state)
    wanted = adapted(tiny("TL"))
    wanted.load_state_dict({**wanted.state_dict(), **state})
    assert torch.equal(logits(model), logits(wanted))


def test_unpatch_after_merge_and_unload_gives_the_originals_and_says_so(caplog):
    plain = tiny("TL")
    dense = logits(plain)
    model = adapted(hfaccel.patch(plain, "int4"), name="first").merge_and_unload()
    second = adapted(model, 2, name="second", target_modules=["q_proj"])
    model = second.merge_and_unload()
    caplog.clear()
    hfaccel.unpatch(model)
    assert torch.equal(logits(model), dense)
    wanted = "unpatch: 'first', 'second', merged into the codes of 28 modules, is not in their originals"
    assert caplog.messages == [wanted]


def test_unpatch_has_nothing_to_say_of_an_adapter_that_was_taken_out(caplog):
    model = adapted(hfaccel.patch(tiny("TL"), "int4"))
    model.merge_adapter()
    model.unmerge_adapter()
    caplog.clear()
    hfaccel.unpatch(model.unload())
    assert caplog.messages == []


def test_a_merged_adapter_is_in_the_way_of_unpatch():
    model = adapted(hfaccel.patch(tiny("TL"), "int4"))
    model.merge_adapter()
    for call in (hfaccel.unpatch, lambda m: hfaccel.original(m).__enter__()):
        with pytest.raises(PatchError, match="an adapter is merged into .*q_proj; call unmerge_adapter"):
            call(model)
    model.unmerge_adapter()
    hfaccel.unpatch(model)


def test_merged_and_weight_reading_adapters_are_refused_before_anything_changes():
    merged = adapted(tiny("TL"))
    merged.merge_adapter()
    dora = adapted(tiny("TL"), use_dora=True)
    ia3 = get_peft_model(
        tiny("TL"),
        peft.IA3Config(
            target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM"
        ),
    )
    for model, message in (
        (merged, "adapter 'default' is merged into it; unmerge first"),
        (dora, "adapter 'default' is a DoraLinearVariant, which needs the float weight"),
        (ia3, "ia3.* needs the float weight below it"),
    ):
        modules = dict(model.named_modules())
        with pytest.raises(PatchError, match=message):
            hfaccel.patch(model, "int4")
        assert dict(model.named_modules()) == modules
    hfaccel.patch(ia3, RTN(bits=4, ignore=("**.k_proj", "**.down_proj")))


def test_modules_to_save_are_left_alone():
    model = adapted(tiny("TL"), modules_to_save=["lm_head"])
    hfaccel.patch(model, "int4")
    inner = model.get_base_model()
    assert not any(is_packed(module) for module in inner.lm_head.modules())
    assert isinstance(inner.model.layers[0].mlp.up_proj.base_layer, QuantLinear)
    assert "lm_head" in " ".join(hfaccel.report(model).skipped)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("wanted", ["lm_head", "embed_tokens", "q_proj"])
def test_modules_to_save_that_are_packed_are_refused_by_name(tied, wanted):
    model = hfaccel.patch(tiny("TL", tie_word_embeddings=tied), "int4")
    names = [name for name, _ in model.named_modules()]
    settings = {"target_modules": ["v_proj"], "modules_to_save": [wanted]}
    if wanted == "embed_tokens" and not tied:  # it is not packed
        trained = get_peft_model(model, LoraConfig(**settings))
        trained(ids(2, 8), labels=ids(2, 8)).loss.backward()
        assert trained.get_base_model().model.embed_tokens.modules_to_save["default"].weight.grad.norm() > 0
        return
    with pytest.raises(PatchError, match=rf"modules_to_save='{wanted}': \S+ is quantized.*target_modules"):
        get_peft_model(model, LoraConfig(**settings))
    assert [name for name, _ in model.named_modules()] == names
    get_peft_model(model, LoraConfig(target_modules=["v_proj"]))(ids(2, 8), labels=ids(2, 8)).loss.backward()


def test_modules_to_save_beside_a_head_left_in_float():
    model = hfaccel.patch(tiny("TL"), "int4+head16")
    model = get_peft_model(model, LoraConfig(target_modules=["v_proj"], modules_to_save=["lm_head"]))
    model(ids(2, 8), labels=ids(2, 8)).loss.backward()
    assert model.get_base_model().lm_head.modules_to_save["default"].weight.grad.norm() > 0


def test_report_names_of_an_adapted_model():
    model = adapted(tiny("TL"), target_modules=["q_proj"])
    hfaccel.patch(model, RTN(bits=4, targets="**.q_proj"))
    assert len(hfaccel.report(model).records) == 4


def test_copies_of_an_adapted_model():
    model = adapted(hfaccel.patch(tiny("TL"), "int4"))
    copied = copy.deepcopy(model)
    assert torch.equal(logits(copied), logits(model))
    copied.merge_adapter()
    assert all(not layer.merged for layer in layers(model)) and all(layer.merged for layer in layers(copied))
    copied.unmerge_adapter()
    assert torch.equal(logits(copied), logits(model))


# Import -----------------------------------------------------------------------------------------------------

SCRIPT = """
import sys
import torch
{first}
sys.path.insert(0, {tests!r})
import hfaccel
from tiny import tiny
model = hfaccel.patch(tiny("TL", num_hidden_layers=1), "int8", keep_original=False)
assert {imported} == ("peft" in sys.modules), "peft"
import peft
config = peft.LoraConfig(target_modules=["q_proj"])
layer = peft.get_peft_model(model, config).base_model.model.model.layers[0].self_attn.q_proj
assert type(layer).__name__ == "PackedLinear", type(layer)
plain = peft.get_peft_model(tiny("TL", num_hidden_layers=1), config)
layer = plain.base_model.model.model.layers[0].self_attn.q_proj
assert type(layer) is peft.tuners.lora.Linear, type(layer)
"""


@pytest.mark.parametrize("first", ["", "import peft"])
def test_either_order_of_imports(first):
    """hfaccel imports PEFT only if the user does."""
    from pathlib import Path

    script = SCRIPT.format(first=first, imported=bool(first), tests=str(Path(__file__).parent))
    subprocess.run([sys.executable, "-c", script], check=True)


def test_private_api_is_where_it_was():
    from hfaccel import compat

    assert compat.self_test() == []
