"""PEFT around patched models: training, mixed batches, and adapters that were there before."""

import copy
import subprocess
import sys
from pathlib import Path

import peft
import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners import lora
from torch import nn

import hfaccel
from adapters import ALL, adapted, layers, logits, steps
from hfaccel import RTN, PatchError
from hfaccel.quant.linear import QuantLinear, is_packed
from tiny import ids, tiny

pytestmark = pytest.mark.usefixtures("spill")

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
    script = SCRIPT.format(first=first, imported=bool(first), tests=str(Path(__file__).parent))
    subprocess.run([sys.executable, "-c", script], check=True)


def test_private_api_is_where_it_was():
    from hfaccel import compat

    assert compat.self_test() == []
