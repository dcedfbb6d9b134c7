"""ops_lora.h: the adapters' part of a token, in numbers and in bits, whatever stands beside it."""

import pytest
import torch

from hfaccel.cache.pool import PagePool
from hfaccel.lora.slots import Table
from hfaccel.runtime.native import Native
from hfaccel.runtime.plan import ASKED, Buffer, Matrix, Plan
from hfaccel.runtime.plan_lora import LoraExpand, LoraShrink
from hfaccel.runtime.plan_ops import Embed, Gather, Logits, Matmul
from hfaccel_kernels import native

pytestmark = pytest.mark.skipif(not native.available(), reason=f"no C++ kernels: {native.reason()}")

ISAS = native.supported_isas()
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
VOCAB = 40


class Product:
    """A plan of one matrix [n, k] on looked-up rows, with adapters of the given ranks beside it."""

    def __init__(self, n, k, ranks, dtype=torch.float32, *, isa=None, replicate=2, seed=0):
        draw = torch.Generator().manual_seed(seed)
        widest = -(-max(ranks) // 8) * 8
        a, b = (torch.full((len(ranks), widest, size), float("nan")) for size in (k, n))
        for slot, rank in enumerate(ranks):
            a[slot, :rank] = torch.randn(rank, k, generator=draw) / k**0.5
            b[slot, :rank] = torch.randn(rank, n, generator=draw) / max(1, rank) ** 0.5
        scale = torch.rand(len(ranks), generator=draw) + 0.5
        self.table = Table(a.to(dtype), b.to(dtype), scale, torch.tensor(ranks, dtype=torch.int32))
        self.rows = torch.randn(VOCAB, k, generator=draw)
        self.weight = torch.randn(n, k, generator=draw).to(dtype)
        buffers = [
            Buffer("x", k),
            Buffer("lora", widest),
            Buffer("y", n),
            Buffer("asked", n, ASKED),
        ]
        ops = [
            Embed(name="e", out=0, table=Matrix(VOCAB, k, self.rows)),
            LoraShrink(name="a", x=0, out=1, table=self.table),
            Matmul(name="m", x=0, outs=(2,), parts=(Matrix(n, k, self.weight),)),
            LoraExpand(name="b", x=1, y=2, table=self.table),
            Gather(name="g", x=2, out=3),
            Logits(name="l", x=3, n=n),
        ]
        plan = Plan(ops, buffers, VOCAB, n, torch.float32)
        plan.check()
        self.executor = Native(None, plan)
        self.executor.replicate = replicate
        if isa is not None:
            self.executor.library = native.library(isa)

    def __call__(self, ids, adapters, threads=1):
        count = len(ids)
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            return self.executor.step(
                PagePool(budget_pages=1 + count),
                ids,
                torch.arange(count),
                torch.arange(1 + count, dtype=torch.int32)[None],
                torch.tensor([0, count], dtype=torch.int32),
                torch.tensor([count], dtype=torch.int32),
                torch.arange(count),
                adapters=adapters,
            )
        finally:
            torch.set_num_threads(before)

    def wanted(self, ids, adapters):
        x = self.rows[ids].double()
        y = x @ self.weight.double().T
        for t, slot in enumerate(adapters.tolist()):
            rank = 0 if slot < 0 else int(self.table.rank[slot])
            if rank:
                a, b = self.table.a[slot, :rank].double(), self.table.b[slot, :rank].double()
                y[t] += float(self.table.scale[slot]) * ((x[t] @ a.T) @ b)
        return y


def tokens(count, slots, seed):
    draw = torch.Generator().manual_seed(seed)
    return (
        torch.randint(0, VOCAB, (count,), generator=draw),
        torch.randint(-1, slots, (count,), generator=draw, dtype=torch.int32),
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("isa", ISAS)
def test_against_fp64(isa, dtype):
    """Ranks, rows and columns that no step of 4, 16 or 32 divides, slots without a rank; NaN beyond ranks."""
    for n, k, ranks in [(1, 1, [1]), (19, 5, [3, 0, 1]), (90, 33, [17, 2, 64, 0]), (33, 300, [5, 16, 31])]:
        product = Product(n, k, ranks, dtype, isa=isa)
        for count in (1, 2, 9, 26):
            ids, adapters = tokens(count, len(ranks), seed=count)
            want = product.wanted(ids, adapters)
            got = product(ids, adapters, threads=2)
            # fp32 sums of K and R terms; the table's own values are exact in fp64
            assert (got - want).abs().max() <= 3e-6 * max(1.0, want.abs().max().item()), (n, k, count)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tokens_bits_do_not_depend_on_neighbours_order_threads_or_isa(dtype):
    n, k, ranks = 83, 74, [16, 3, 1, 40]
    product = Product(n, k, ranks, dtype)
    ids, adapters = tokens(61, len(ranks), seed=1)
    adapters[20:52] = 3  # a long run, in panels
    whole = product(ids, adapters)
    bare = product(ids, torch.full_like(adapters, -1))
    none = adapters < 0
    assert torch.equal(whole[none], bare[none]) and torch.equal(bare, product(ids, None))
    assert not torch.equal(whole, bare)
    for threads in (2, 3, 7):
        assert torch.equal(product(ids, adapters, threads), whole)
    draw = torch.Generator().manual_seed(2)
    for _ in range(6):
        order = torch.randperm(len(ids), generator=draw)
        cuts = sorted(torch.randint(1, len(ids), (5,), generator=draw).tolist())
        edges = [0, *sorted(set(cuts)), len(ids)]
        parts = [order[first:last] for first, last in zip(edges[:-1], edges[1:], strict=True)]
        pieces = [product(ids[part], adapters[part], threads=2) for part in parts]
        assert torch.equal(torch.cat(pieces), whole[order])
    for isa in ISAS:
        for replicate in (0, 2, 100):
            other = Product(n, k, ranks, dtype, isa=isa, replicate=replicate)
            assert torch.equal(other(ids, adapters, threads=2), whole), (isa, replicate)


def test_columns_cut_out_of_a_fused_matrix():
    """Two matrices whose rows lie in one module: each takes its columns of B."""
    n, k, ranks = 40, 20, [7, 4]
    product = Product(n, k, ranks)
    ids, adapters = tokens(12, 2, seed=3)
    want = product.wanted(ids, adapters)
    plan, (embed, shrink, _, _, _, _) = product.executor.plan, product.executor.plan.ops
    cut = 19
    for first, count in ((0, cut), (cut, n - cut)):
        buffers = [*plan.buffers[:2], Buffer("y", count), Buffer("asked", count, ASKED)]
        rows = product.weight[first : first + count].contiguous()
        ops = [
            embed,
            shrink,
            Matmul(name="m", x=0, outs=(2,), parts=(Matrix(count, k, rows),)),
            LoraExpand(name="b", x=1, y=2, table=product.table, offset=first),
            Gather(name="g", x=2, out=3),
            Logits(name="l", x=3, n=count),
        ]
        part = Plan(ops, buffers, VOCAB, count, torch.float32)
        part.check()
        product.executor = Native(None, part)
        got = product(ids, adapters)
        assert (got - want[:, first : first + count]).abs().max() <= 1e-5
