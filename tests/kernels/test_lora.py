"""lora.py: the operator and its reference. What the Triton kernels compute is in triton_values.py."""

import pytest
import torch

from hfaccel_kernels import dispatch
from hfaccel_kernels.lora import lora_add

ADAPTERS = [2, -1, 0, 2, 3, 1, 0, -1]
RANKS = [4, 0, 3, 1]


def case(dtype=torch.float32, tables=None, adapters=ADAPTERS, n=10, k=7):
    """y, x, adapters and the tables, NaN beyond each slot's rank."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.full((len(RANKS), max(RANKS), size), float("nan")) for size in (k, n))
    for slot, rank in enumerate(RANKS):
        for table in (a, b):
            table[slot, :rank] = torch.randn(rank, table.shape[2], generator=generator)
    y, x = (torch.randn(len(adapters), size, generator=generator).to(dtype) for size in (n, k))
    scale = torch.rand(len(RANKS), generator=generator) + 0.5
    ints = torch.tensor(adapters, dtype=torch.int32), torch.tensor(RANKS, dtype=torch.int32)
    return y, x, ints[0], a.to(tables or dtype), b.to(tables or dtype), scale, ints[1]


def in_fp64(y, x, adapters, a, b, scale, rank):
    """The formula, token by token."""
    found = y.double()
    for t, slot in enumerate(adapters.tolist()):
        if slot >= 0:
            down, up = (table[slot, : rank[slot]].double() for table in (a, b))
            found[t] += scale[slot].double() * ((x[t].double() @ down.T) @ up)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wide", [False, True], ids=["tables as x", "fp32 tables"])
def test_each_token_has_its_own(dtype, wide):
    args = case(dtype, torch.float32 if wide else None)
    y, before, want = args[0], args[0].clone(), in_fp64(*args)
    assert lora_add(*args) is None
    # one rounding to y's dtype, at most half its last place, and fp32 sums of a dozen products
    error = (y.double() - want).abs()
    assert (error <= torch.finfo(dtype).eps / 2 * want.abs() + 1e-5).all()
    bare = torch.tensor([slot < 0 or RANKS[slot] == 0 for slot in ADAPTERS])
    assert torch.equal(y[bare], before[bare]) and (y[~bare] != before[~bare]).any(-1).all()


def test_y_may_have_a_dtype_and_strides_of_its_own():
    y, x, *rest = case(torch.bfloat16)
    wide = torch.full((len(y), 25), 3.0)
    want = in_fp64(y.float(), x, *rest)
    view = wide[:, 4:14]
    view.copy_(y)
    lora_add(view, x, *rest)
    torch.testing.assert_close(view.double(), want, atol=1e-5, rtol=1e-6)
    assert (wide[:, :4] == 3).all() and (wide[:, 14:] == 3).all()


@pytest.mark.parametrize("adapters", [[], [-1, -1], [1]])
def test_where_nothing_is_to_be_added_no_bit_changes(adapters):
    args = case(adapters=adapters)
    args[0].neg_().abs_().mul_(-0.0)  # minus zero stays minus zero
    before = args[0].clone()
    lora_add(*args)
    assert torch.equal(args[0].view(torch.int32), before.view(torch.int32))


def test_order_does_not_matter():
    args = case()
    y, x, adapters, *tables = args
    order = torch.tensor([4, 1, 7, 0, 2, 6, 3, 5])
    turned = y[order]
    lora_add(turned, x[order], adapters[order], *tables)
    lora_add(*args)
    torch.testing.assert_close(turned, y[order], atol=1e-6, rtol=1e-6)


def test_it_is_an_operator():
    args = case(tables=torch.float32)
    torch.library.opcheck(torch.ops.hfaccel.lora_add.default, args)
    y, *rest = args
    want = y.clone()
    lora_add(want, *rest)

    def twice(y):
        y = y * 1.0
        lora_add(y, *rest)
        return y

    assert torch.equal(torch.compile(twice, backend="eager", fullgraph=True)(y), want)


WRONG = {
    "x is": {1: torch.zeros(8, 6)},
    "adapters is torch.int64": {2: torch.zeros(8, dtype=torch.long)},
    "adapters is": {2: torch.zeros(7, dtype=torch.int32)},
    "b is": {4: torch.zeros(4, 4, 9)},
    "b is torch.float64": {4: torch.zeros(4, 4, 10, dtype=torch.float64)},
    "scale is": {5: torch.zeros(3)},
    "rank is": {6: torch.zeros(4)},
    "wanted": {0: torch.zeros(8, 1, 10)},
    "or fp32": {3: torch.zeros(4, 4, 7).half(), 4: torch.zeros(4, 4, 10).half()},
    "slot 4, the tables have 4": {2: torch.full((8,), 4, dtype=torch.int32)},
    "slot -2": {2: torch.full((8,), -2, dtype=torch.int32)},
    "rank on meta": {6: torch.zeros(4, dtype=torch.int32, device="meta")},
}


@pytest.mark.parametrize("message", WRONG)
def test_refuses(message):
    args = list(case())
    for at, tensor in WRONG[message].items():
        args[at] = tensor
    with pytest.raises(ValueError, match=message):
        lora_add(*args)


def test_refuses_gradients():
    args = list(case())
    args[1].requires_grad_()
    with pytest.raises(ValueError, match="no gradients"):
        lora_add(*args)
    with torch.no_grad():
        lora_add(*args)


def test_who_serves():
    assert dispatch.choose("lora_add", "cpu", torch.float32).name == "reference"
    assert [b.name for b in dispatch.backends("lora_add")] == ["triton", "reference"]
    assert "triton: GPUs only" in dispatch.explain("lora_add", "cpu")
