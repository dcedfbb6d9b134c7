"""Packed modules: values against fp64, gradients, moves and casts, copies."""

import copy
import pickle

import pytest
import torch
from torch import nn
from transformers.models.bart.modeling_bart import BartScaledWordEmbedding
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

from dequantized import rounded
from hfaccel.quant.linear import QuantEmbedding, QuantExperts, QuantLinear
from hfaccel.quant.packing import pack_module, unpackable
from hfaccel.quant.rtn import round_to_nearest
from hfaccel_kernels.layouts import Layout
from tiny import tiny

LAYOUTS = [
    Layout(8),
    Layout(8, 40, False, "fp32", 16),
    Layout(4, 64, False, "fp16"),
    Layout(4, -1, True, "fp16", 16),
    Layout(3, 24, False, "fp16"),
    Layout(2, 16, True, "fp16"),
]
IDS = [f"int{layout.bits}-g{layout.group}-a{layout.act_bits}" for layout in LAYOUTS]


def packed(module: nn.Module, layout: Layout) -> nn.Module:
    return pack_module(module, layout, lambda matrix: round_to_nearest)


@pytest.mark.parametrize("layout", LAYOUTS, ids=IDS)
@pytest.mark.parametrize(("k", "n", "bias"), [(70, 48, True), (64, 515, True), (129, 17, False)])
def test_forward(layout, k, n, bias):
    linear = nn.Linear(k, n, bias=bias)
    module = packed(linear, layout)
    assert module.bias is linear.bias
    for shape in ((k,), (3, k), (2, 5, k), (0, k)):
        x = torch.randn(shape)
        y = module(x)
        wanted = rounded(x, layout) @ module.dequantize().double().T
        wanted = wanted if not bias else wanted + linear.bias.double()
        assert y.shape == (*shape[:-1], n) and y.dtype == torch.float32
        # fp32 sums, and an activation in the middle between two codes may fall either way.
        torch.testing.assert_close(y.double(), wanted, rtol=1e-3, atol=2e-2 if layout.act_bits == 8 else 2e-4)
        assert (y.double() - wanted).square().mean().sqrt() < 2e-3 or not y.numel()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_output_has_the_dtype_of_the_input(dtype):
    module = packed(nn.Linear(64, 32), LAYOUTS[0])
    x = torch.randn(4, 64).to(dtype)
    y = module(x)
    assert y.dtype == dtype
    torch.testing.assert_close(y, module(x.float()).to(dtype), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("layout", LAYOUTS, ids=IDS)
def test_gradients(layout):
    module = packed(nn.Linear(70, 48), layout)
    x = torch.randn(2, 3, 70, requires_grad=True)
    seed = torch.randn(2, 3, 48)
    module(x).backward(seed)
    wanted = seed.double() @ module.dequantize().double()
    torch.testing.assert_close(x.grad.double(), wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(module.bias.grad, seed.sum((0, 1)), rtol=1e-4, atol=1e-4)
    assert module.weight.grad is None and not module.weight.requires_grad
    assert not any(buffer.requires_grad for buffer in module.buffers())


def test_casts_leave_codes_and_scales():
    model = nn.Sequential(packed(nn.Linear(64, 32), LAYOUTS[2]), packed(nn.Embedding(20, 64), LAYOUTS[0]))
    before = [{name: tensor.clone() for name, tensor in module.packed.items()} for module in model]
    for cast in (lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.double(), lambda m: m.cpu()):
        cast(model)
        for module, tensors in zip(model, before, strict=True):
            for name, tensor in module.packed.items():
                assert tensor.dtype == tensors[name].dtype and torch.equal(tensor, tensors[name])
    assert model[0].bias.dtype == torch.float64 == model[0].compute_dtype
    assert model[1](torch.tensor([3])).dtype == torch.float64
    assert model[0](torch.randn(2, 64, dtype=torch.float64)).dtype == torch.float64
    model.to("meta")
    assert all(tensor.is_meta for module in model for tensor in module.packed.values())


@pytest.mark.parametrize(
    "make", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"]
)
def test_copies_are_equal_and_separate(make):
    for module in (
        packed(nn.Linear(70, 33), LAYOUTS[2]),
        packed(tiny("gpt_oss").model.layers[0].mlp.experts, LAYOUTS[0]),
    ):
        copied = make(module)
        ours, theirs = module.state_dict(), copied.state_dict()
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
        name = next(name for name in ours if name.endswith("_scale"))
        getattr(copied, name).mul_(2)
        assert not torch.equal(getattr(copied, name), getattr(module, name))


def test_state_dict_goes_into_another_module():
    first, second = packed(nn.Linear(70, 33), LAYOUTS[2]), packed(nn.Linear(70, 33), LAYOUTS[2])
    assert list(first.state_dict()) == ["weight", "bias", "weight_scale", "weight_zero"]
    second.load_state_dict(first.state_dict(), strict=True)
    assert torch.equal(first.dequantize(), second.dequantize())


def test_store_replaces_and_counts():
    first, second = packed(nn.Linear(70, 33), LAYOUTS[2]), packed(nn.Linear(70, 33), LAYOUTS[2])
    before, weight = first.stored, first.weight
    codes = weight.clone()
    first.store(second.stored)
    assert first.weights_version == 1 and torch.equal(first.dequantize(), second.dequantize())
    assert torch.equal(weight, codes)  # not written to
    first.store(before)
    assert first.weight is weight and first.bias is before["bias"]


def test_embedding_rows_are_those_of_the_weight():
    for layout in LAYOUTS:
        module = packed(nn.Embedding(37, 70, padding_idx=0), layout)
        look = torch.tensor([[0, 36, 15], [16, 1, 1]])
        assert torch.equal(module(look), module.dequantize()[look])
        assert module(look[:0]).shape == (0, 3, 70)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embeddings_that_multiply(dtype):
    look = torch.tensor([[0, 19], [5, 5]])
    for original in (
        Gemma3TextScaledWordEmbedding(20, 64, 0, 27.7),
        BartScaledWordEmbedding(20, 64, 0, 27.7),
    ):
        original.to(dtype)
        assert not unpackable(original)
        module = packed(original, Layout(8))
        with torch.no_grad():
            original.weight.copy_(module.dequantize())
        assert torch.equal(module(look), original(look))
        torch.testing.assert_close(torch.as_tensor(module.embed_scale), torch.tensor(27.7))
    assert not hasattr(packed(nn.Embedding(20, 64), Layout(8)), "embed_scale")


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_experts_do_what_the_dense_class_does(family):
    model = tiny(family)
    experts = model.model.layers[0].mlp.experts
    module = packed(experts, Layout(8, 32, True, "fp32", 16))
    with torch.no_grad():
        for name in module.PROJECTIONS:
            weight = module.dequantize(name)
            getattr(experts, name).copy_(weight.mT if family == "gpt_oss" else weight)
    hidden = torch.randn(11, 64)
    index = torch.stack([torch.randperm(4)[:2] for _ in range(11)])
    weights = torch.rand(11, 2)
    found, wanted = module(hidden, index, weights), experts(hidden, index, weights)
    assert (found - wanted).norm() < 3e-4 * wanted.norm()  # 16-bit activations: about 1e-4
    index[0, 0] = 4  # an expert that lives elsewhere
    assert torch.isfinite(module(hidden, index, weights)).all()


def test_experts_are_differentiable():
    module = packed(tiny("gpt_oss").model.layers[0].mlp.experts, Layout(4, 32, False, "fp16"))
    hidden = torch.randn(5, 64, requires_grad=True)
    weights = torch.rand(5, 2, requires_grad=True)
    module(hidden, torch.tensor([[0, 1]] * 5), weights).sum().backward()
    assert hidden.grad.abs().sum() > 0 and weights.grad.abs().sum() > 0


def test_types():
    assert issubclass(QuantLinear, nn.Linear) and issubclass(QuantEmbedding, nn.Embedding)
    assert not issubclass(QuantExperts, nn.Linear)
