"""What a patched model carries, and how it is found in what a user gives."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn
from transformers import pipeline

import hfaccel
from hfaccel import PatchError
from hfaccel.errors import AlreadyPatched
from hfaccel.quant.linear import QuantLinear
from snapshot import logits
from tiny import tiny

pytestmark = pytest.mark.usefixtures("spill")


@pytest.mark.parametrize("thing", [nn.Linear(3, 3), object(), "model", None])
def test_other_things_are_no_models(thing):
    with pytest.raises(PatchError, match="not a transformers model, a PeftModel or a pipeline"):
        hfaccel.patch(thing, "int8")


def test_what_is_not_patched_is_said_so():
    model = tiny("TL")
    for call in (hfaccel.unpatch, hfaccel.report, lambda m: hfaccel.original(m).__enter__()):
        with pytest.raises(PatchError, match="LlamaForCausalLM is not patched"):
            call(model)


def test_copies_have_no_originals():
    model = hfaccel.patch(tiny("TL"), "int4")
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(copied), logits(model))
        assert hfaccel.report(copied).to_dict()["modules"] == hfaccel.report(model).to_dict()["modules"]
        for call in (hfaccel.unpatch, lambda m: hfaccel.original(m).__enter__()):
            with pytest.raises(PatchError, match="no originals: it is a copy of a patched model"):
                call(copied)
        assert hfaccel.patch(copied, "int4") is copied
        with pytest.raises(AlreadyPatched, match="load the original model instead"):
            hfaccel.patch(copied, "int8")
        copied.lm_head.weight_scale.mul_(2)
    assert not torch.equal(copied.lm_head.weight_scale, model.lm_head.weight_scale)


def test_a_pipeline_is_taken_as_its_model():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(512)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")), pad_token="w0", unk_token="w0"
    )
    pipe = pipeline("text-generation", model=tiny("TL"), tokenizer=tokenizer)
    assert hfaccel.patch(pipe, "int8") is pipe
    assert isinstance(pipe.model.lm_head, QuantLinear)
    assert "lm_head" in str(hfaccel.report(pipe))
    hfaccel.unpatch(pipe)
    assert type(pipe.model.lm_head) is nn.Linear


def test_a_patched_model_is_freed_without_the_collector():
    model = hfaccel.patch(tiny("TL"), "int4")
    logits(model)
    codes = weakref.ref(model.lm_head.weight)
    gc.disable()
    try:
        del model
        assert codes() is None
    finally:
        gc.enable()
