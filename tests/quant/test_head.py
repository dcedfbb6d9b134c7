"""The head and what is tied to it (case P1)."""

import copy
import pickle

import pytest
import torch
from torch import nn

import hfaccel
from hfaccel import RTN
from hfaccel.quant.linear import QuantEmbedding, QuantLinear
from snapshot import Snapshot, names_of, tied
from tiny import tiny

pytestmark = pytest.mark.usefixtures("spill")


def test_tied_head_and_embedding_stay_one_tensor():  # P1 a
    model = tied()
    hfaccel.patch(model, "int4")
    head, table = model.lm_head, model.model.embed_tokens
    assert isinstance(head, QuantLinear) and isinstance(table, QuantEmbedding)
    assert head.layout.bits == 8 and head.layout.group == -1
    assert head.weight is table.weight and head.weight_scale is table.weight_scale
    assert model.config.tie_word_embeddings
    assert torch.equal(table(torch.arange(512)), head.dequantize())
    stored = sum(t.nbytes for t in head.packed.values())
    record = {r.name: r for r in hfaccel.report(model).records}
    assert (record["lm_head"].bytes_after, record["model.embed_tokens"].bytes_after) == (stored, 0)
    for moved in (model.to(torch.bfloat16), copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert moved.lm_head.weight is moved.model.embed_tokens.weight


def test_head_alone_is_untied_and_lookups_stay():  # P1 b
    model = tied()
    before, table = Snapshot(model), model.model.embed_tokens
    hfaccel.patch(model, RTN(targets="lm_head"))
    assert model.model.embed_tokens is table and torch.equal(
        table.weight, before.state["model.embed_tokens.weight"]
    )
    assert isinstance(model.lm_head, QuantLinear) and not model.config.tie_word_embeddings
    model.tie_weights()
    assert isinstance(model.lm_head, QuantLinear) and model.lm_head.weight.dtype == torch.uint8
    hfaccel.unpatch(model)
    before.check()


def test_each_end_with_its_own_setting():  # P1 c
    model = tied()
    before = Snapshot(model)
    hfaccel.patch(model, [RTN(targets="lm_head"), RTN(bits=4, targets="model.embed_tokens", ignore=())])
    assert (model.lm_head.layout.bits, model.model.embed_tokens.layout.bits) == (8, 4)
    assert not model.config.tie_word_embeddings
    hfaccel.unpatch(model)
    before.check()


def test_head16_leaves_both_ends():
    model = tied()
    hfaccel.patch(model, "int4+head16")
    assert type(model.lm_head) is nn.Linear and model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.tie_word_embeddings
    untied = tiny("TL")
    hfaccel.patch(untied, "int8+head16")
    assert type(untied.lm_head) is nn.Linear


@pytest.mark.parametrize("recipe", ["head8", "head4", "head4-row-sym"])
def test_head_alone_by_its_step(recipe):
    model = tiny("TL")
    hfaccel.patch(model, recipe)
    assert names_of(model) == {"lm_head"}
    assert model.lm_head.layout.bits == int(recipe[4])


def test_untied_embedding_stays():
    model = tiny("TL")
    table = model.model.embed_tokens
    hfaccel.patch(model, "int4")
    assert model.model.embed_tokens is table
