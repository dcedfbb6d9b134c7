"""Encoders: bert and t5, and what of them is packed."""

import copy

import pytest
import torch
from torch import nn
from transformers import AutoModel, AutoModelForSequenceClassification

import hfaccel
from dequantized import difference, oracle
from hfaccel.quant.linear import QuantLinear
from tiny import ids, tiny


@pytest.fixture(autouse=True)
def spill(tmp_path, monkeypatch):
    monkeypatch.setenv("HFACCEL_SPILL_DIR", str(tmp_path / "spill"))


def packed(model):
    return {name for name, module in model.named_modules() if isinstance(module, QuantLinear)}


@pytest.mark.parametrize("recipe", ["int8", "int4"])
@pytest.mark.parametrize("masked", [False, True])
def test_bert(recipe, masked):
    model = tiny("bert")
    dense, x = copy.deepcopy(model), ids(3, 9)
    mask = torch.ones_like(x)
    mask[1, 5:] = 0 if masked else 1
    hfaccel.patch(model, recipe)
    with torch.no_grad():
        found = model(input_ids=x, attention_mask=mask).logits
        wanted = oracle(dense, model)(input_ids=x, attention_mask=mask).logits
        loose = oracle(dense, model, rounds=False)(input_ids=x, attention_mask=mask).logits
    assert difference(found, wanted) < 3e-3
    assert difference(found, loose) < 0.03  # 8-bit activations: about 0.01
    inside = [name for name, m in dense.bert.encoder.named_modules() if isinstance(m, nn.Linear)]
    assert packed(model) == {f"bert.encoder.{name}" for name in inside}


@pytest.mark.parametrize("fields", [{}, {"feed_forward_proj": "gated-gelu"}], ids=["relu", "gated"])
def test_t5(fields):
    """Its last matrix casts what comes in to the dtype of its weight, which codes must not look like."""
    model = tiny("t5", **fields)
    dense, x = copy.deepcopy(model), ids(3, 9)
    hfaccel.patch(model, "int8")
    with torch.no_grad():
        found = model(input_ids=x, decoder_input_ids=x[:, :5]).logits
        wanted = oracle(dense, model)(input_ids=x, decoder_input_ids=x[:, :5]).logits
    # Activations in the middle between two codes, to which the gated form is more sensitive; loose: 0.04.
    assert difference(found, wanted) < (0.02 if fields else 3e-3)
    inside = {name for name, m in dense.named_modules() if ".block." in name and isinstance(m, nn.Linear)}
    assert packed(model) == inside
    last = model.decoder.block[1].layer[2].DenseReluDense.wo
    assert last.weight.dtype == torch.int8 and dict(last.named_parameters())["weight"].dtype == torch.uint8


def test_t5_is_saved_and_comes_back(tmp_path):
    model = tiny("t5")
    hfaccel.patch(model, "int4")
    model.save_pretrained(tmp_path)
    loaded = hfaccel.from_pretrained(tmp_path, attn_implementation="eager")
    x = ids(3, 9)
    with torch.no_grad():
        wanted = model(input_ids=x, decoder_input_ids=x[:, :5]).logits
        for other in (loaded, copy.deepcopy(model)):
            assert torch.equal(other(input_ids=x, decoder_input_ids=x[:, :5]).logits, wanted)


class _Casting(nn.Module):
    """A parent that casts to any dtype of weight."""

    def __init__(self, inner):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = inner.gate_proj, inner.up_proj, inner.down_proj

    def forward(self, x):
        x = torch.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(x.to(self.down_proj.weight.dtype))


def test_a_parent_that_always_casts_keeps_its_linear():
    model = tiny("TL")
    model.model.layers[1].mlp = _Casting(model.model.layers[1].mlp)
    hfaccel.patch(model, "int8")
    mlp = model.model.layers[1].mlp
    assert type(mlp.down_proj) is nn.Linear and isinstance(mlp.up_proj, QuantLinear)
    assert hfaccel.report(model).skipped["model.layers.1.mlp.down_proj"] == "_Casting casts to its dtype"
    with torch.no_grad():
        assert torch.isfinite(model(input_ids=ids(1, 5)).logits).all()


def test_t5_generates():
    model = tiny("t5")
    options = {"max_new_tokens": 5, "do_sample": False}
    before = model.generate(ids(2, 6), **options)
    hfaccel.patch(model, "int8")
    assert model.generate(ids(2, 6), **options).shape == before.shape
    assert "encoder-decoder" in str(hfaccel.report(model))
    hfaccel.unpatch(model)
    assert torch.equal(model.generate(ids(2, 6), **options), before)


def test_classifier_heads_stay():
    model = tiny("bert", auto=AutoModelForSequenceClassification, num_labels=3)
    hfaccel.patch(model, "int8")
    assert type(model.classifier) is nn.Linear and type(model.bert.pooler.dense) is nn.Linear
    with torch.no_grad():
        assert model(input_ids=ids(2, 5)).logits.shape == (2, 3)


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_bare_models(family):
    model = tiny(family, auto=AutoModel)
    x = ids(2, 5)
    with torch.no_grad():
        before = model(input_ids=x).last_hidden_state
        hfaccel.patch(model, "int8")
        found = model(input_ids=x).last_hidden_state
        assert 1e-4 < difference(found, before) < 0.1
        hfaccel.unpatch(model)
        assert torch.equal(model(input_ids=x).last_hidden_state, before)
