"""A patched model's class: the same name, the same pickle, and other models of the class left alone."""

import copy
import pickle

import pytest
import torch

import hfaccel
from hfaccel.classes import extend, restore
from hfaccel.saving import SavingMixin
from saved import logits, patched
from tiny import tiny


@pytest.mark.parametrize("family", ["TL", "bert"])
def test_the_class_is_extended_for_one_model(family):
    model, other = tiny(family), tiny(family)
    own = type(model)
    patched(model, "int8")
    assert type(other) is own and type(model) is not own and isinstance(model, own)
    assert (type(model).__name__, type(model).__module__) == (own.__name__, own.__module__)
    assert type(model) is type(patched(other, "int8"))
    assert type(type(model)(model.config)) is own
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(twin) is type(model)
        assert torch.equal(logits(twin), logits(model))
    hfaccel.unpatch(model)
    assert type(model) is own


def test_one_mixin_at_a_time():
    model = tiny("TL")
    own = type(model)
    extend(model, SavingMixin)
    once = type(model)
    extend(model, SavingMixin)
    assert type(model) is once and once.__mro__[:3] == (once, SavingMixin, SavingMixin.__mro__[1])
    restore(model)
    restore(model)
    assert type(model) is own
