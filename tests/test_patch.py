"""patch, unpatch, original: values over every family, refusals, other threads, patching twice."""

import copy
import threading

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

import hfaccel
from dequantized import difference, oracle
from hfaccel import RTN, PatchError
from hfaccel.errors import AlreadyPatched, UnsupportedModel
from hfaccel.quant.linear import QuantExperts, is_packed
from snapshot import Snapshot, logits
from tiny import DECODERS, FAMILIES, ids, tiny

pytestmark = pytest.mark.usefixtures("spill")

EXPERTS = ("mixtral", "qwen3_moe", "gpt_oss")


# Values ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["int8", "int4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family, recipe):
    model = tiny(family)
    dense, before = copy.deepcopy(model), Snapshot(model)
    assert hfaccel.patch(model, recipe) is model
    assert type(model).__name__ == before.cls.__name__ and isinstance(model, before.cls)
    found = logits(model)
    wanted = logits(oracle(dense, model))
    # Equal but for activations in the middle between two codes; experts round their inputs beside that (1 to
    # 2 %).
    assert difference(found, wanted) < (0.04 if family in EXPERTS else 3e-3)
    assert difference(found, before.logits) > 1e-3  # something was rounded
    packed = [module for module in model.modules() if is_packed(module)]
    assert len(packed) == len(hfaccel.report(model).records)
    assert all(p.dtype == torch.uint8 and not p.requires_grad for m in packed for p in _codes(m))
    hfaccel.unpatch(model)
    before.check()


def _codes(module):
    names = module.PROJECTIONS if isinstance(module, QuantExperts) else ("weight",)
    return [module._parameters[name] for name in names]


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "gpt_oss"])
@pytest.mark.parametrize(
    "recipe", ["int8-g32-asym", "int8-tensor", "int4-sym", "int4-row", "int3", "int2+head4"]
)
def test_other_grids(family, recipe):
    model = tiny(family)
    dense = copy.deepcopy(model)
    hfaccel.patch(model, recipe)
    assert difference(logits(model), logits(oracle(dense, model))) < (0.08 if family in EXPERTS else 3e-3)


@pytest.mark.parametrize("recipe", ["int8", "int4-g128"])
def test_group_that_does_not_divide_a_row(recipe):  # case P3
    model = tiny("S135", vocab_size=512)
    dense = copy.deepcopy(model)
    hfaccel.patch(model, recipe)
    assert model.model.layers[0].mlp.up_proj.layout.groups(576) == (1 if recipe == "int8" else 5)
    # Wider rows have more activations in the middle; without rounding them in the oracle it would be 0.02.
    assert difference(logits(model), logits(oracle(dense, model))) < 0.01


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models(dtype):
    model = tiny("llama").to(dtype)
    before = Snapshot(model)
    hfaccel.patch(model, "int8")
    found = logits(model)
    assert found.dtype == dtype and model.dtype == dtype
    assert difference(found.float(), before.logits.float()) < 0.1
    hfaccel.unpatch(model)
    before.check()


# What is refused, and a second time ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("int9", "unknown recipe step 'int9' .* known are int8, int4"),
        ("int4+int8", "given twice"),
        ("int4-g0", "unknown option -g0"),
        ("w4a4", "unknown recipe step 'w4a4'"),
        ({"transforms": [{"name": "int", "bits": 1}]}, "bits=1"),
        (3, "config=3"),
        (["int8"], "'int8' is not a transform"),
    ],
)
def test_bad_configs_change_nothing(config, message):
    model = tiny("TL")
    before = Snapshot(model)
    with pytest.raises(PatchError, match=message):
        hfaccel.patch(model, config)
    before.check()


def test_models_without_layers_are_refused():
    model = tiny("TL")
    model.model.layers = nn.ModuleList()
    with pytest.raises(UnsupportedModel):
        hfaccel.patch(model, "int8")


def test_kv8_needs_a_model_that_generates():
    model = tiny("bert")
    before = Snapshot(model)
    with pytest.raises(PatchError, match="does not generate"):
        hfaccel.patch(model, "int8+kv8")
    before.check()


def test_patch_twice():
    model = tiny("TL")
    hfaccel.patch(model, "int4")
    state, modules = model._hfaccel, dict(model.named_modules())
    for same in (
        "int4",
        RTN(bits=4),
        [RTN(bits=4, group=64)],
        {"transforms": [{"name": "int", "bits": 4}]},
    ):
        assert hfaccel.patch(model, same) is model
    assert model._hfaccel is state and dict(model.named_modules()) == modules
    for other in ("int8", "int4-sym", "int4+kv8", "runtime"):
        with pytest.raises(
            AlreadyPatched, match=r"patched with 'int4' already; call hfaccel\.unpatch\(model\)"
        ):
            hfaccel.patch(model, other)
    for measured in (None, "auto"):  # near-lossless or nothing: never what is there
        with pytest.raises(
            AlreadyPatched, match=r"'int4' already, and auto chooses 'int8' or 'runtime'; call"
        ):
            hfaccel.patch(model, measured)
    for chosen in ("int8", "runtime"):
        hfaccel.patch(hfaccel.unpatch(model), chosen)
        state = model._hfaccel
        assert hfaccel.patch(model) is hfaccel.patch(model, "auto") is model and model._hfaccel is state


def test_half_is_refused_as_transformers_does():
    model = hfaccel.patch(tiny("TL"), "int8")
    for cast in (model.half, model.float):
        with pytest.raises(ValueError, match="not supported for quantized model"):
            cast()
    hfaccel.patch(tiny("TL"), "runtime").half()  # nothing of it is quantized


# original ---------------------------------------------------------------------------------------------------


def generated(model, **kwargs):
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, **kwargs}
    return model.generate(ids(2, 5), attention_mask=torch.ones(2, 5, dtype=torch.long), **options)


@pytest.mark.parametrize("family", ["TL", "gpt2", "gemma3", "gpt_oss", "bert", "t5"])
def test_original(family):
    model = tiny(family)
    before = logits(model)
    hfaccel.patch(model, "int4")
    patched, modules = logits(model), dict(model.named_modules())
    for _ in range(2):
        with hfaccel.original(model) as inside:
            assert inside is model
            assert torch.equal(logits(model), before)
        assert torch.equal(logits(model), patched)
        assert dict(model.named_modules()) == modules
    assert all(p.numel() == 0 for p in model._hfaccel.journal.saved)


def test_original_generates_as_before():
    model = tiny("TL")
    greedy, beams = generated(model), generated(model, num_beams=3)
    hfaccel.patch(model, "int2+kv8")
    patched = generated(model)
    with hfaccel.original(model):
        assert torch.equal(generated(model), greedy)
        assert torch.equal(generated(model, num_beams=3), beams)
    assert torch.equal(generated(model), patched)
    assert not torch.equal(patched, greedy)


def test_original_gives_back_after_an_error():
    model = hfaccel.patch(tiny("TL"), "int4")
    patched = logits(model)
    with pytest.raises(KeyError), hfaccel.original(model):
        raise KeyError
    assert torch.equal(logits(model), patched)


def test_original_within_original_and_what_is_refused_there():
    model = tiny("TL")
    before = Snapshot(model)
    hfaccel.patch(model, "int4")
    patched = logits(model)
    with hfaccel.original(model):
        with hfaccel.original(model):
            assert torch.equal(logits(model), before.logits)
        assert torch.equal(logits(model), before.logits)
        with pytest.raises(PatchError, match="inside original"):
            hfaccel.unpatch(model)
    assert torch.equal(logits(model), patched)
    hfaccel.unpatch(model)
    before.check()


class Stopping:
    """A streamer that holds a `generate` after its first token."""

    def __init__(self):
        self.reached, self.go, self.prompt = threading.Event(), threading.Event(), None

    def put(self, value):
        if self.prompt is None:
            self.prompt = value
            return
        self.reached.set()
        assert self.go.wait(60)

    def end(self):
        pass


def test_original_is_refused_while_another_thread_generates():
    model = tiny("TL")
    hfaccel.patch(model, "int4")
    x, streamer, out = ids(1, 5), Stopping(), []
    options = {
        "max_new_tokens": 5,
        "do_sample": False,
        "pad_token_id": 0,
        "attention_mask": torch.ones_like(x),
    }
    wanted = model.generate(x, **options)
    thread = threading.Thread(target=lambda: out.append(model.generate(x, streamer=streamer, **options)))
    thread.start()
    try:
        assert streamer.reached.wait(60)
        for call in (lambda: hfaccel.original(model).__enter__(), lambda: hfaccel.unpatch(model)):
            with pytest.raises(PatchError, match="generating with this model"):
                call()
    finally:
        streamer.go.set()
        thread.join()
    assert torch.equal(out[0], wanted)
    hfaccel.unpatch(model)


def test_generate_of_another_thread_waits_for_original():
    model = tiny("TL")
    hfaccel.patch(model, "int2")
    wanted, out = generated(model), []
    thread = threading.Thread(target=lambda: out.append(generated(model)))
    with hfaccel.original(model):
        thread.start()
        thread.join(0.3)
        assert thread.is_alive() and not out
    thread.join()
    assert torch.equal(out[0], wanted)


# Other models, the runtime alone -------------------------------------------------------------------------


def test_original_behaviour_needs_no_patch_of_other_models():
    first, second = tiny("TL"), tiny("TL")
    before = logits(second)
    hfaccel.patch(first, "int2")
    assert torch.equal(logits(second), before) and type(second) is LlamaForCausalLM
    assert type(first).__name__ == "LlamaForCausalLM" and type(first) is not LlamaForCausalLM


@pytest.mark.parametrize("family", DECODERS)
def test_runtime_alone_changes_no_weight(family):
    model = tiny(family)
    before = Snapshot(model)
    hfaccel.patch(model, "runtime")
    assert torch.equal(logits(model), before.logits)
    assert dict(model.named_parameters()).keys() == before.parameters.keys() - _aliases(model)
    hfaccel.unpatch(model)
    before.check()


def _aliases(model):
    names = set(dict(model.named_parameters(remove_duplicate=False)))
    return names - set(dict(model.named_parameters()))
