"""Which modules a config changes: targets, what is ignored, shared modules, what is refused beforehand."""

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import hfaccel
from hfaccel import RTN, PatchError
from hfaccel.measure import memory
from hfaccel.quant.linear import QuantEmbedding, QuantLinear, codes_of
from hfaccel.recipe import PatchConfig
from hfaccel.sites import Plan
from snapshot import Snapshot, names_of
from tiny import tiny

pytestmark = pytest.mark.usefixtures("spill")


def test_targets_and_ignore():
    model = tiny("TL")
    hfaccel.patch(model, RTN(targets="model.layers.*.mlp.**", ignore="**.down_proj"))
    assert names_of(model) == {f"model.layers.{i}.mlp.{x}_proj" for i in range(4) for x in ("gate", "up")}
    hfaccel.unpatch(model)
    hfaccel.patch(model, RTN(bits=4, ignore="model.layers.0.**"))
    assert names_of(model) == {
        f"model.layers.{i}.{x}_proj"
        for i in (1, 2, 3)
        for x in (*(f"self_attn.{r}" for r in "qkvo"), "mlp.gate", "mlp.up", "mlp.down")
    } | {"lm_head"}
    skipped = hfaccel.report(model).skipped
    assert skipped["model.layers.0.mlp.up_proj"] == "ignored by 'model.layers.0.**'"
    hfaccel.unpatch(model)
    hfaccel.patch(model, RTN(targets="model.embed_tokens", ignore=()))
    assert names_of(model) == {"model.embed_tokens"}
    assert isinstance(model.model.embed_tokens, QuantEmbedding)


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (RTN(targets="model.layers.*.mlp.up"), "matches nothing"),
        (RTN(ignore="**.up"), "matches nothing"),
        (RTN(targets="model.embed_tokens"), "left alone by default"),
        (RTN(targets=()), "selects nothing"),
        (RTN(targets="re:("), "regular expression"),
    ],
)
def test_patterns_that_are_wrong(transform, message):
    model = tiny("TL")
    before = Snapshot(model)
    with pytest.raises(PatchError, match=message):
        hfaccel.patch(model, transform)
    before.check()


def test_two_roundings_of_one_weight_are_refused():
    model = tiny("TL")
    before = Snapshot(model)
    with pytest.raises(PatchError, match="layers.0.mlp.up_proj: rounded by both 'int4' and 'int8'"):
        hfaccel.patch(model, [RTN(bits=4), RTN(bits=8, targets="**.up_proj")])
    before.check()


def test_mixed_precision_by_targets():
    model = tiny("TL")
    hfaccel.patch(model, [RTN(bits=8, targets="**.down_proj"), RTN(bits=4, ignore="**.down_proj")])
    bits = {
        name: module.layout.bits for name, module in model.named_modules() if isinstance(module, QuantLinear)
    }
    assert all(bits[name] == (8 if name.endswith(("down_proj", "lm_head")) else 4) for name in bits)
    assert len(bits) == 4 * 7 + 1


def test_experts_are_targeted_whole():
    model = tiny("mixtral")
    with pytest.raises(PatchError, match="experts.down_proj is not among the targets"):
        hfaccel.patch(model, RTN(targets="**.experts.gate_up_proj"))
    hfaccel.patch(model, RTN(targets="**.experts.*"))
    assert names_of(model) == {f"model.layers.{i}.mlp.experts" for i in (0, 1)}


def test_a_linear_with_a_forward_of_its_own_is_left_alone():
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = tiny("TL")
    model.model.layers[1].mlp.up_proj.__class__ = Doubled
    hfaccel.patch(model, "int8")
    assert type(model.model.layers[1].mlp.up_proj) is Doubled
    assert hfaccel.report(model).skipped["model.layers.1.mlp.up_proj"] == "Doubled has a forward of its own"
    hfaccel.unpatch(model)
    with pytest.raises(PatchError, match="layers.1.mlp.up_proj: Doubled has a forward of its own"):
        hfaccel.patch(model, RTN(targets="model.layers.1.mlp.up_proj"))


SMOLLM2 = {  # 135M
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49_152,
    "tie_word_embeddings": True,
}


@pytest.mark.parametrize("shape", [SMOLLM2, memory.SHAPE], ids=["SmolLM2", "1.17B"])
def test_share_of_packed_bytes(shape):
    """At least 95 % of the bytes of the linears, at the shapes themselves and without their data."""
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**shape))
    linears = {name: m.weight.nbytes for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    assert len(linears) == 7 * shape["num_hidden_layers"] + 1
    plan = Plan.of(model, PatchConfig.of("int4"))
    packed = {site.name for transform, sites in plan.work if transform.rounds for site in sites}
    assert sum(linears.get(name, 0) for name in packed) >= 0.95 * sum(linears.values())


def test_one_module_under_two_names():  # P1 d
    def shared():
        model = tiny("TL")
        model.model.layers[1].mlp.up_proj = model.model.layers[0].mlp.up_proj
        return model

    model, single = shared(), tiny("TL")
    before = Snapshot(model)
    hfaccel.patch(model, "int4")
    hfaccel.patch(single, "int4")
    layers = model.model.layers
    assert layers[0].mlp.up_proj is layers[1].mlp.up_proj and isinstance(layers[0].mlp.up_proj, QuantLinear)
    assert torch.equal(codes_of(layers[0].mlp.up_proj), codes_of(single.model.layers[0].mlp.up_proj))
    hfaccel.unpatch(model)
    before.check()


def test_tables_that_are_one_are_packed_as_one():
    model = tiny("t5")
    before = Snapshot(model)
    hfaccel.patch(model, RTN(targets="shared", ignore=()))
    tables = [model.shared, model.encoder.embed_tokens, model.decoder.embed_tokens]
    assert all(isinstance(t, QuantEmbedding) and t.weight is model.shared.weight for t in tables)
    hfaccel.unpatch(model)
    before.check()


def test_meta_is_refused():
    with torch.device("meta"):
        model = LlamaForCausalLM(tiny("TL").config)
    with pytest.raises(PatchError, match="model.embed_tokens.weight is on the meta device and has no data"):
        hfaccel.patch(model, "int8")
    with pytest.raises(PatchError, match="is on the meta device"):
        hfaccel.patch(model)


def test_a_model_that_another_method_quantized_is_refused():
    model = tiny("TL")
    model.quantization_method = "bitsandbytes"
    with pytest.raises(PatchError, match="LlamaForCausalLM is quantized by 'bitsandbytes' already"):
        hfaccel.patch(model, "int8")
    hfaccel.unpatch(hfaccel.patch(model, "runtime"))
    model.quantization_method = "gguf"
    hfaccel.patch(model, "int8")
