"""The oracle against transformers: plain models in fp32, packed ones through their own modules."""

import pytest
import torch

import tiny
from hfaccel.runtime.plan_reference import Reference
from hfaccel_kernels.layouts import Layout
from plans import FAMILIES, Steps, logits, quantize


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_transformers(family):
    model, ids = tiny.tiny(family), tiny.ids(1, 40)[0]
    steps = Steps(model, Reference(model))
    want = logits(model, ids)
    bound = 2e-5 * want.abs().max()  # fp32 in another order; logits are as large as 20
    assert (steps.run(ids)[0] - want).abs().max() < bound
    assert (steps.run(ids, cuts=[13, 14, 30])[0] - want).abs().max() < bound


def test_packed_models_equal_their_modules():
    model, ids = quantize(tiny.tiny("qwen2"), Layout(4, 32, False)), tiny.ids(1, 12)[0]
    got, want = Steps(model, Reference(model)).run(ids)[0], logits(model, ids)
    # a rounding of activations that falls the other way is a code, 1/127 of its chunk
    assert (got - want).abs().mean() < 2e-3 * want.abs().mean()


def test_hidden_states_and_rows_of_several_lengths():
    model = tiny.tiny("gemma2")
    rows = [tiny.ids(1, n, seed=n)[0] for n in (11, 3, 20)]
    steps = Steps(model, Reference(model))
    for ids, got in zip(rows, steps.run(*rows, hidden=True), strict=True):
        with torch.no_grad():
            want = model.base_model(ids[None]).last_hidden_state[0]
        assert (got - want).abs().max() < 1e-4
