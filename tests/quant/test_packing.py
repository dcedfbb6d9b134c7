"""From a module to its packed form: what has one and why not, what comes along, the empty form."""

import pytest
import torch
from torch import nn
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.models.opt.modeling_opt import OPTLearnedPositionalEmbedding
from transformers.pytorch_utils import Conv1D

from hfaccel.quant.linear import QuantLinear, is_packed
from hfaccel.quant.packing import pack_module, packed_like, skeleton, unpackable
from hfaccel.quant.rtn import round_to_nearest
from hfaccel_kernels.layouts import Layout
from tiny import tiny

LAYOUTS = [
    Layout(8),
    Layout(8, 40, False, "fp32", 16),
    Layout(4, 64, False, "fp16"),
    Layout(3, 24, True, "fp16"),
]
IDS = [f"int{layout.bits}-g{layout.group}" for layout in LAYOUTS]


def packed(module: nn.Module, layout: Layout) -> nn.Module:
    return pack_module(module, layout, lambda matrix: round_to_nearest)


class _Doubled(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


def test_one_packed_weight_serves_two_modules():
    linear, table = nn.Linear(70, 33, bias=True), nn.Embedding(33, 70)
    table.weight = linear.weight
    one = packed(linear, Layout(8))
    two = packed_like(table, one.layout, dict(one.packed))
    assert isinstance(one, QuantLinear) and two.weight is one.weight and two.weight_scale is one.weight_scale
    assert torch.equal(two(torch.arange(33)), one.dequantize())


def test_what_cannot_be_packed_says_why():
    assert unpackable(_Doubled(8, 8)) == "_Doubled has a forward of its own"
    assert "forward of its own" in unpackable(OPTLearnedPositionalEmbedding(20, 8))
    assert unpackable(nn.LayerNorm(8)) == "LayerNorm has no packed form"
    assert unpackable(packed(nn.Linear(8, 8), Layout(8))) == "it is packed already"
    assert "its parent reads the weight" in unpackable(nn.MultiheadAttention(8, 2).out_proj)
    assert "renormalizes" in unpackable(nn.Embedding(8, 8, max_norm=1.0))
    integer = nn.Linear(8, 8)
    integer.weight = nn.Parameter(torch.zeros(8, 8, dtype=torch.int8), requires_grad=False)
    assert unpackable(integer) == "Linear: its weight is no float matrix"
    for fine in (nn.Linear(8, 8), FalconLinear(8, 8), Conv1D(8, 8), nn.Embedding(8, 8)):
        assert unpackable(fine) == ""


def test_hooks_come_along():
    linear, seen = nn.Linear(8, 8), []
    before = linear.register_forward_hook(lambda *_: seen.append("before"))
    module = packed(linear, Layout(8))
    after = module.register_forward_pre_hook(lambda *_: seen.append("after"))
    module(torch.randn(1, 8))
    assert seen == ["after", "before"]
    before.remove()
    linear(torch.randn(1, 8))
    assert seen == ["after", "before", "after"]
    after.remove()
    module(torch.randn(1, 8))
    assert seen == ["after", "before", "after"]


def test_training_flag_comes_along():
    assert not packed(nn.Linear(8, 8).eval(), Layout(8)).training
    assert packed(nn.Linear(8, 8).train(), Layout(8)).training


@pytest.mark.parametrize("layout", LAYOUTS, ids=IDS)
def test_skeleton_has_the_form_of_the_packed(layout):
    experts = tiny("gpt_oss").model.layers[0].mlp.experts
    for original in (nn.Linear(70, 33), Conv1D(33, 70), nn.Embedding(33, 70), experts):
        module, empty = packed(original, layout), skeleton(original, layout)
        assert type(empty) is type(module) and is_packed(empty)
        ours, theirs = module.state_dict(), empty.state_dict()
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            assert tensor.shape == ours[name].shape and tensor.dtype == ours[name].dtype
            assert tensor.is_meta or "bias" in name
