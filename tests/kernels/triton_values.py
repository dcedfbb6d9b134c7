"""What the Triton kernels compute, against fp64: run by test_triton_values.py, once per engine, in its own
process.

HFACCEL_TRITON_ENGINE says what runs the kernels: `interpreter` (with TRITON_INTERPRET=1), `ttsem` (the
compiler's IR, with checks of bounds and races) or `cuda`. Memory that nobody wrote is NaN everywhere.
"""

from __future__ import annotations

import os

import pytest
import torch

from hfaccel_kernels import triton_activations, triton_linear, triton_lora, triton_paged, triton_split
from hfaccel_kernels.activations import quantize_activations
from hfaccel_kernels.layouts import Layout
from hfaccel_kernels.packing import dequantize, pack_codes, pack_rows, pack_scales, unpack_scales
from hfaccel_kernels.pages import cache_write, cache_write_reference, dequantize_kv, quantize_kv

ENGINE = os.environ["HFACCEL_TRITON_ENGINE"]
DEVICE = "cuda" if ENGINE == "cuda" else "cpu"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Largest relative error of one rounding. The interpreter cuts bf16 off instead of rounding it.
ROUNDING = {FP32: 2.0**-24, FP16: 2.0**-11, BF16: 2.0**-7 if ENGINE == "interpreter" else 2.0**-8}
SUMS = 2.0**-18  # of fp32 sums and products, relative to the sum of magnitudes

ttsem_too = pytest.mark.ttsem  # the cases that also run in the slow engine


@pytest.fixture(autouse=True, scope="module")
def _engine():
    if ENGINE != "ttsem":
        yield
        return
    from ttsem import sanitize

    with sanitize.session(cc=80, cuda_is_cpu=False) as state:
        yield
        assert state.launches and not state.races_unchecked


@pytest.fixture(autouse=True)
def _poison(monkeypatch):
    """torch.empty hands out NaN."""
    torch.manual_seed(0)
    empty = torch.empty

    def poisoned(*args, **kwargs):
        made = empty(*args, **kwargs)
        return made.fill_(float("nan")) if made.is_floating_point() else made.fill_(85)

    monkeypatch.setattr(torch, "empty", poisoned)


def assert_within(got: torch.Tensor, want: torch.Tensor, bound: torch.Tensor) -> None:
    excess = (got.double().cpu() - want).abs() / bound.clamp_min(1e-30)
    assert got.shape == want.shape
    assert excess.numel() == 0 or excess.max() <= 1, f"{excess.max():.2f} times the bound"


# ---------------------------------------------------------------- linear


def linear_case(bits, group, m, n, k, dtype=BF16, symmetric=False, scale_dtype="fp16", bias=True):
    return bits, group, m, n, k, dtype, symmetric, scale_dtype, bias


LINEAR = {
    # every width of code through both kernels; K is no multiple of a tile, N none of 16
    **{
        f"{bits}-bit-m{m}": linear_case(bits, -1 if bits == 8 else 64, m, 40, 300)
        for bits in (8, 4, 3, 2)
        for m in (1, 2, 3, 4, 5, 40)
    },
    **{f"{bits}-sym-m{m}": linear_case(bits, 64, m, 17, 128, symmetric=True)
       for bits in (8, 4, 3, 2) for m in (1, 5)},
    "int8-row-sym": linear_case(8, -1, 1, 33, 96, symmetric=True, scale_dtype="fp32", bias=False),
    "int8-row-sym-gemm": linear_case(8, -1, 20, 33, 96, symmetric=True, scale_dtype="fp32", bias=False),
    "int4-row": linear_case(4, -1, 2, 48, 70),
    "int4-row-gemm": linear_case(4, -1, 9, 48, 70),
    # groups that no step divides leave gaps on the padded axis; odd ones share scales with nobody
    **{f"gaps-{bits}-{group}-m{m}": linear_case(bits, group, m, 17, 100, FP16)
       for bits, group in ((4, 20), (3, 20), (2, 24), (8, 6)) for m in (1, 7)},
    "group-96-m1": linear_case(4, 96, 1, 16, 200),
    "group-96-m8": linear_case(4, 96, 8, 16, 200),
    "group-32-m1": linear_case(4, 32, 1, 16, 160),
    "group-32-m30": linear_case(4, 32, 30, 16, 160),
    "group-beyond-k": linear_case(4, 128, 1, 16, 70),
    "one-element": linear_case(4, 64, 1, 1, 1),
    "fp16-m1": linear_case(4, 64, 1, 24, 128, FP16),
    "fp16-m70": linear_case(4, 64, 70, 24, 128, FP16),
    "fp32-m1": linear_case(4, 64, 1, 24, 128, FP32),
    "fp32-m6": linear_case(4, 64, 6, 24, 128, FP32),
    "fp32-m70": linear_case(8, -1, 70, 24, 128, FP32),
    # K in parts
    "parts-m1": linear_case(4, 64, 1, 40, 2100),
    "parts-m3-row": linear_case(8, -1, 3, 20, 2100),
    "parts-m16": linear_case(4, 64, 16, 40, 1100),
    "parts-m16-row": linear_case(8, -1, 16, 20, 1100, bias=False),
    # several tiles either way, and more of them down than go together
    "tiles": linear_case(4, 64, 140, 150, 64),
    "tall": linear_case(4, 64, 1200, 140, 64),
    "empty": linear_case(4, 64, 0, 24, 64),
}  # fmt: skip
LINEAR_TTSEM = {
    "8-bit-m1", "4-bit-m1", "4-bit-m5", "3-bit-m1", "2-bit-m5", "gaps-3-20-m7", "parts-m1",
    "int8-row-sym-gemm",
}  # fmt: skip


NF4, NF4_ROW = Layout(4, 64, True, "double", code="nf4"), Layout(4, -1, True, "fp16", code="nf4")
NF4_DOUBLE_ROW = Layout(4, -1, True, "double", code="nf4")
NF4_GAPS, INT4_DOUBLE = Layout(4, 20, True, "fp32", code="nf4"), Layout(4, 16, False, "double")
E4M3, E5M2 = (Layout(8, code=code, act="token") for code in ("e4m3", "e5m2"))
W8A8, STATIC = Layout(8, act="token"), Layout(8, act="token", act_scale=0.02)
CODES = {
    **{f"nf4-m{m}": (NF4, m, 40, 300, BF16) for m in (1, 3, 40)},
    "nf4-tiles": (NF4, 7, 40, 64 * 19, FP16),  # more groups than one tile of scales has
    "nf4-parts": (NF4, 1, 20, 2100, FP32),
    **{f"nf4-row-m{m}": (NF4_ROW, m, 33, 100, FP16) for m in (2, 9)},
    **{f"nf4-double-row-m{m}": (NF4_DOUBLE_ROW, m, 33, 100, FP32) for m in (1, 9)},
    **{f"nf4-gaps-m{m}": (NF4_GAPS, m, 17, 90, FP32) for m in (1, 6)},
    **{f"double-m{m}": (INT4_DOUBLE, m, 40, 16 * 18, BF16) for m in (1, 8)},
    **{f"{layout.code}-m{m}": (layout, m, 40, 300, dtype)
       for layout in (E4M3, E5M2) for m, dtype in ((1, BF16), (3, FP32), (20, BF16))},
    "e4m3-parts": (E4M3, 2, 20, 2100, BF16),
    **{f"{name}-m{m}": (layout, m, 40, 300, dtype)
       for name, layout in (("w8a8", W8A8), ("static", STATIC))
       for m, dtype in ((1, BF16), (3, FP32), (20, BF16))},
    "w8a8-parts": (W8A8, 9, 20, 2100, BF16),
}  # fmt: skip
CODES_TTSEM = {"nf4-m1", "nf4-double-row-m1", "nf4-m40", "e4m3-m1", "e4m3-m20", "w8a8-m20", "static-m3"}


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=i, marks=ttsem_too if i in CODES_TTSEM else ()) for i, c in CODES.items()]
)
def test_linear_of_other_codes(case):
    """NF4, double-quantized scales, float8, and activations with one scale a token."""
    layout, m, n, k, dtype = case
    codes = torch.randint(0, 2**layout.bits, (n, k)).to(torch.uint8)
    if layout.is_float:
        codes &= 0xBF  # all of them finite
    elif layout.act == "token":
        codes.clamp_min_(1)
    scale = pack_scales(torch.rand(n, layout.groups(k)) * 0.02 + 0.01, layout)
    zero = None
    if not layout.symmetric:
        zero = pack_rows(torch.randint(0, 16, (n, layout.groups(k))).to(torch.uint8))
    weight = pack_codes(codes, layout)
    x, bias = torch.randn(m, k).to(dtype), torch.randn(n).to(dtype)
    w = dequantize(weight, scale, zero, layout, n, k).double()
    seen = x.double()
    if layout.act == "token":
        rounded, by = quantize_activations(x, layout)
        seen = rounded.double() * by.double()
        mine, mine_by = triton_activations.quantize(x.to(DEVICE), layout)
        assert torch.equal(mine.float().cpu(), rounded.float()) and torch.equal(mine_by.cpu(), by[:, 0])
    want = seen @ w.T + bias.double()
    reach = w.abs() if layout.symmetric else w.abs() + 32 * 0.03
    bound = SUMS * (seen.abs() @ reach.T) + SUMS * want.abs() + ROUNDING[dtype] * want.abs()
    if m > 4 and layout.groups(k) > 1 and ENGINE != "interpreter":  # s * level is rounded
        bound += ROUNDING[dtype] * (seen.abs() @ w.abs().T)
    args = [None if t is None else t.to(DEVICE) for t in (x, weight, scale, zero, bias)]
    assert_within(triton_linear.linear(*args, layout, n, k), want, bound)


@pytest.mark.parametrize(
    ("m", "parts", "scale_dtype"),
    [
        (1, False, "fp32"),
        pytest.param(1, True, "fp32", marks=ttsem_too),
        (4, False, "double"),
        (4, True, "fp32"),
        (9, False, "fp32"),
        pytest.param(9, True, "double", marks=ttsem_too),
        (20, False, "fp32"),
    ],
)
def test_dots_of_int8_are_exact(m, parts, scale_dtype, monkeypatch):
    """Bit for bit the int32 dot, beyond what fp32 sums hold, times the product of both scales."""
    if not parts:
        monkeypatch.setattr(triton_split, "FILL", 1)
    n, k, layout = 20, 4100, Layout(8, scale_dtype=scale_dtype, act="token")
    codes = torch.randint(150, 256, (n, k)).to(torch.uint8)
    weight, scale = pack_codes(codes, layout), pack_scales(torch.rand(n, 1) + 0.1, layout)
    x = torch.rand(m, k) + 0.5
    seen, by = quantize_activations(x, layout)
    dot = seen.long() @ (codes.long() - 128).T
    assert dot.max() > 2**24 and dot.max() < 2**31
    want = dot.float() * (unpack_scales(scale, layout, n).T * by)
    got = triton_linear.linear(x.to(DEVICE), weight.to(DEVICE), scale.to(DEVICE), None, None, layout, n, k)
    if scale_dtype == "double":  # scale = code * step + least, which a GPU may round once
        assert torch.allclose(got.cpu(), want, rtol=2.0**-22, atol=0)
    else:
        assert torch.equal(got.cpu(), want)


@ttsem_too
@pytest.mark.parametrize("layout", [E4M3, W8A8, STATIC], ids=["e4m3", "w8a8", "static"])
def test_what_is_not_finite_poisons_its_token_alone(layout):
    x = torch.randn(4, 40)
    x[1, 3], x[2, 30] = float("nan"), float("-inf")
    x[3] = 0
    _, scale = triton_activations.quantize(x.to(DEVICE), layout)
    assert scale.isfinite().tolist() == [True, False, False, True]


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=i, marks=ttsem_too if i in LINEAR_TTSEM else ()) for i, c in LINEAR.items()]
)
def test_linear(case):
    bits, group, m, n, k, dtype, symmetric, scale_dtype, with_bias = case
    layout = Layout(bits, group, symmetric, scale_dtype)
    groups = layout.groups(k)
    codes = torch.randint(0, 2**bits, (n, k)).to(torch.uint8)
    scale = pack_rows((torch.rand(n, groups) * 0.02 + 0.01).to(layout.dtype))
    zero = None if symmetric else pack_rows(torch.randint(0, 2**bits, (n, groups)).to(torch.uint8))
    weight = pack_codes(codes, layout)
    x = torch.randn(m, k).to(dtype)
    bias = torch.randn(n).to(dtype) if with_bias else None
    w = dequantize(weight, scale, zero, layout, n, k).double()
    want = x.double() @ w.T + (bias.double() if with_bias else 0)

    # The sums of a group are of x * (2^bits + u), or of x * w: both are at most 2^(bits+1) * scale a product.
    per_k = torch.cat([scale.transpose(1, 2).reshape(-1, groups)[:n, g : g + 1].double().expand(-1, b - a)
                       for g, (a, b) in enumerate(layout.spans(k))], 1)  # fmt: skip
    bound = SUMS * (x.double().abs() @ (per_k * 2.0 ** (bits + 1)).T) + SUMS * want.abs()
    bound += ROUNDING[dtype] * want.abs()
    if m > 4 and groups > 1 and ENGINE != "interpreter":  # s * (u - z) is rounded; the interpreter keeps fp32
        bound += ROUNDING[dtype] * (x.double().abs() @ w.abs().T)

    args = [None if t is None else t.to(DEVICE) for t in (x, weight, scale, zero, bias)]
    assert_within(triton_linear.linear(*args, layout, n, k), want, bound)


@ttsem_too
def test_linear_takes_views():
    """Leading dimensions, rows that do not follow each other, a column-major x."""
    layout = Layout(4, 32, True)
    weight = pack_codes(torch.randint(0, 16, (16, 64)).to(torch.uint8), layout).to(DEVICE)
    scale = pack_rows(torch.rand(16, 2)).to(DEVICE)
    fused = torch.randn(2, 3, 96, device=DEVICE)
    x = fused[..., 32:]
    plain = triton_linear.linear(x.contiguous(), weight, scale, None, None, layout, 16, 64)
    assert plain.shape == (2, 3, 16)
    assert torch.equal(triton_linear.linear(x, weight, scale, None, None, layout, 16, 64), plain)
    turned = x.reshape(6, 64).t().contiguous().t()
    assert torch.equal(
        triton_linear.linear(turned, weight, scale, None, None, layout, 16, 64), plain.view(6, 16)
    )


def test_linear_refuses_other_shapes():
    layout = Layout(4, 32, True)
    weight, scale = torch.zeros(1, 512, dtype=torch.uint8), torch.zeros(1, 2, 16)
    with pytest.raises(ValueError, match="weight_scale is"):
        triton_linear.linear(torch.zeros(1, 64), weight, scale[:, :1], None, None, layout, 16, 64)
    with pytest.raises(ValueError, match="weight_zero is"):
        triton_linear.linear(torch.zeros(1, 64), weight, scale, None, None, Layout(4, 32, False), 16, 64)


# ---------------------------------------------------------------- cache


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=str)
@pytest.mark.parametrize("int8", [False, pytest.param(True, marks=ttsem_too)], ids=["pages", "int8"])
def test_cache_write(dtype, int8):
    """Bit for bit what the reference stores, other slots untouched, strided K and V of different sizes."""
    tokens, heads, size, size_v, pages = 7, 3, 20, 12, 4
    fused = torch.randn(tokens, heads, size + size_v).to(dtype)
    fused[2] = 0
    fused[3] *= 1e-3
    slots = torch.tensor([5, 0, 63, 17, 16, 31, 32])
    stores = []
    for write, device in ((triton_paged.cache_write, DEVICE), (cache_write_reference, "cpu")):
        k, v = fused.to(device).split([size, size_v], -1)
        store = [
            torch.full((pages, 16, heads, d), 7).to(torch.int8 if int8 else dtype) for d in (size, size_v)
        ]
        store += [torch.full((pages, 16, heads), -1.0) for _ in range(2)] if int8 else [None, None]
        store = [None if t is None else t.to(device) for t in store]
        write(k, v, *store[:2], slots.to(device), *store[2:])
        stores.append(store)
    for got, want in zip(*stores, strict=True):
        assert (got is None) == (want is None)
        assert want is None or torch.equal(got.cpu(), want)


@ttsem_too
def test_cache_write_leaves_out_negative_slots():
    k = torch.randn(6, 2, 16, device=DEVICE)
    slots = torch.tensor([3, -1, 4, -1, 5, -1], device=DEVICE)
    pages = torch.zeros(2, 2, 16, 2, 16, device=DEVICE)
    triton_paged.cache_write(k, -k, pages[0], pages[1], slots)
    want = torch.zeros_like(pages)
    want[0, 0, 3:6], want[1, 0, 3:6] = k[::2], -k[::2]
    assert torch.equal(pages, want)
    triton_paged.cache_write(k[:0], k[:0], pages[0], pages[1], slots[:0])
    assert torch.equal(pages, want)


# ---------------------------------------------------------------- attention


def attend_case(
    counts, lengths, heads, kv_heads, size, size_v=None, dtype=FP32, page_tokens=16, int8=False, spare=0, **kw
):
    return counts, lengths, heads, kv_heads, size, size_v or size, dtype, page_tokens, int8, spare, kw


ATTEND = {
    "decode-ratio-1": attend_case([1, 1, 1], [1, 37, 16], 2, 2, 16),
    "decode-ratio-3": attend_case([1, 1], [5, 70], 6, 2, 24),
    "decode-ratio-8": attend_case([1, 1], [33, 50], 8, 1, 64),
    "decode-ratio-71": attend_case([1, 1], [9, 20], 71, 1, 16),
    "decode-ratio-48": attend_case([1, 1], [600, 20], 96, 2, 16, page_tokens=64, sinks=True),
    "prefill-ratio-71": attend_case([5, 2], [30, 2], 142, 2, 16, sinks=True, alibi=True),
    "decode-fp16": attend_case([1, 1], [33, 150], 4, 2, 32, dtype=FP16),
    "decode-bf16": attend_case([1, 1], [33, 150], 4, 2, 32, dtype=BF16),
    "decode-int8": attend_case([1, 1, 1], [3, 70, 33], 6, 2, 32, int8=True),
    "decode-int8-bf16": attend_case([1, 1], [3, 70], 8, 1, 32, dtype=BF16, int8=True),
    "decode-many": attend_case([1] * 130, [1 + i % 5 for i in range(130)], 1, 1, 16, page_tokens=4),
    "verify": attend_case([4, 3], [40, 3], 6, 2, 16),
    "prefill": attend_case([70], [70], 4, 2, 16),
    "prefill-ratio-8": attend_case([21], [21], 8, 1, 32, dtype=FP16),
    "prefill-bf16": attend_case([40, 9], [40, 9], 4, 2, 64, dtype=BF16),
    "prefill-int8": attend_case([30, 9], [30, 41], 6, 2, 32, int8=True),
    "chunk": attend_case([33], [90], 3, 1, 16, page_tokens=8),
    "mixed": attend_case([1, 0, 20, 1, 0, 3], [30, 12, 20, 1, 0, 50], 6, 2, 16),
    "no-slots": attend_case([1, 2], [0, 9], 2, 1, 16),
    "sizes-differ": attend_case([1, 5], [20, 30], 4, 2, 24, 40),
    "size-96": attend_case([1, 5], [20, 30], 2, 1, 96),
    "size-256": attend_case([1, 9], [20, 30], 2, 1, 256, dtype=FP16),
    "window": attend_case([1, 30, 1], [60, 50, 4], 4, 2, 16, window=20),
    "window-1": attend_case([1, 9], [60, 9], 2, 1, 16, window=1),
    "softcap": attend_case([1, 12], [30, 12], 4, 2, 16, softcap=1.5),
    "sinks": attend_case([1, 12], [30, 12], 4, 2, 16, sinks=True),
    "alibi": attend_case([1, 12], [30, 12], 3, 1, 16, alibi=True),
    "everything": attend_case([1, 12], [50, 30], 6, 2, 16, int8=True, window=25, softcap=2.0, sinks=True,
    alibi=True,
                              scale=0.3),
    "parts": attend_case([1, 1], [600, 30], 4, 2, 16, page_tokens=64),
    "parts-int8-sinks": attend_case([1, 2], [300, 520], 6, 2, 16, page_tokens=64, int8=True, sinks=True),
    "parts-window": attend_case([1, 1], [520, 700], 2, 1, 16, page_tokens=64, window=300),
    "parts-bf16": attend_case([1], [530], 8, 1, 32, page_tokens=64, dtype=BF16),
    "parts-no-slots": attend_case([1, 1], [0, 300], 2, 1, 16, page_tokens=64, spare=3),
    "single": attend_case([1], [1], 1, 1, 16),
    "empty": attend_case([0, 0], [0, 5], 2, 1, 16),
}  # fmt: skip
ATTEND_TTSEM = {"decode-int8-bf16", "mixed", "prefill-bf16", "everything", "parts-int8-sinks"}


def dense(q, k, v, slots_q, scale, window=None, softcap=None, sinks=None, slopes=None):
    """One sequence in fp64: q [n, H, D], k [S, H, D], v [S, H, Dv] -> out, sum of p |v|, both [n, H, Dv]."""
    x = torch.einsum("nhd,shd->hns", q, k) * scale
    if softcap is not None:
        x = softcap * torch.tanh(x / softcap)
    gap = torch.arange(k.shape[0]) - slots_q[:, None]
    if slopes is not None:
        x = x + slopes.double()[:, None, None] * gap
    x = x.masked_fill((gap > 0) | (gap <= -(window or 10**9)), float("-inf"))
    if sinks is not None:
        x = torch.cat([x, sinks.double()[:, None, None].expand(-1, x.shape[1], 1)], -1)
    p = x.softmax(-1)[..., : k.shape[0]]
    return torch.einsum("hns,shd->nhd", p, v), torch.einsum("hns,shd->nhd", p, v.abs())


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=i, marks=ttsem_too if i in ATTEND_TTSEM else ()) for i, c in ATTEND.items()]
)
def test_attention(case):
    counts, lengths, heads, kv_heads, size, size_v, dtype, page_tokens, int8, spare, kw = case
    kw = dict(kw)
    if kw.pop("sinks", False):
        kw["sinks"] = torch.randn(heads)
    if kw.pop("alibi", False):
        kw["alibi_slopes"] = torch.rand(heads) * 0.3
    used = [-(-n // page_tokens) for n in lengths]
    order = torch.randperm(sum(used) + 2).int()
    tables = torch.full((len(lengths), max(used) + spare), -1, dtype=torch.int32)
    # What no sequence wrote must not be looked at: NaN, or for int8 codes scales of NaN.
    pools = [torch.full((sum(used) + 2, page_tokens, kv_heads, d), float("nan")) for d in (size, size_v)]
    scales = [torch.full(pools[0].shape[:3], float("nan")) for _ in range(2)] if int8 else [None, None]
    if int8:
        pools = [torch.full(p.shape, 99, dtype=torch.int8) for p in pools]
    pools = [p if int8 else p.to(dtype) for p in pools]
    q = torch.randn(sum(counts), heads, size).to(dtype)
    wants, magnitudes, at, page = [], [], 0, 0
    for b, (n, length) in enumerate(zip(counts, lengths, strict=True)):
        tables[b, : used[b]] = order[page : page + used[b]]
        page += used[b]
        k, v = torch.randn(length, kv_heads, size).to(dtype), torch.randn(length, kv_heads, size_v).to(dtype)
        slot = torch.arange(length)
        slots = tables[b].long()[slot // page_tokens] * page_tokens + slot % page_tokens
        cache_write(k, v, *pools, slots, *scales)
        if int8:
            k, v = (dequantize_kv(*quantize_kv(t)) for t in (k, v))
        if n and length:
            k, v = (t.double().repeat_interleave(heads // kv_heads, 1) for t in (k, v))
            got = dense(q[at : at + n].double(), k, v, torch.arange(length - n, length), kw.get("scale",
            size**-0.5),
                        kw.get("window"), kw.get("softcap"), kw.get("sinks"),
                        kw.get("alibi_slopes"))  # fmt: skip
        else:
            got = (torch.zeros(n, heads, size_v, dtype=torch.float64),) * 2
        at += n
        wants.append(got[0])
        magnitudes.append(got[1])
    want, magnitude = torch.cat(wants), torch.cat(magnitudes)

    starts = torch.tensor([0, *torch.tensor(counts).cumsum(0)], dtype=torch.int32)
    tensors = [q, *pools, tables, starts, torch.tensor(lengths, dtype=torch.int32)]
    on_device = {n: t.to(DEVICE) if isinstance(t, torch.Tensor) else t for n, t in kw.items()}
    on_device |= dict(
        zip(("k_scale", "v_scale"), (None if s is None else s.to(DEVICE) for s in scales), strict=True)
    )
    got = triton_paged.paged_attention(*(t.to(DEVICE) for t in tensors), **on_device)
    assert got.dtype == dtype
    # Scores of about 20 at most carry their fp32 error into the exponential; P is rounded to the dtype of q.
    bound = (2.0**-16 + (0 if ENGINE == "interpreter" else ROUNDING[dtype])) * magnitude + ROUNDING[
        dtype
    ] * want.abs()
    assert_within(got, want, bound + 1e-12)


def test_attention_refuses():
    q, pages = torch.zeros(1, 2, 16), torch.zeros(1, 16, 1, 16)
    rest = torch.zeros(1, 1).int(), torch.tensor([0, 1]).int(), torch.ones(1).int()
    with pytest.raises(ValueError, match="at most 256"):
        wide = torch.zeros(1, 16, 1, 512)
        triton_paged.paged_attention(torch.zeros(1, 2, 512), wide, wide, *rest)
    with pytest.raises(ValueError, match="head size 16"):
        triton_paged.paged_attention(q, torch.zeros(1, 16, 1, 8), pages, *rest)


# ---------------------------------------------------------------- LoRA


def lora_case(adapters, ranks, n=40, k=70, dtype=BF16, most=None, y_dtype=None, tables=None):
    return adapters, ranks, n, k, dtype, most or max(ranks), y_dtype or dtype, tables or dtype


LORA = {
    # decode: 32 adapters, a token each; all of one; none; holes
    "32-adapters": lora_case([*range(32)], [8] * 32),
    "shuffled": lora_case([3, -1, 0, 3, 1, 0, -1, 3, 2, 1, 0, 2, 3, -1, 1, 0, 2, 2, 3, 0], [4, 16, 1, 8]),
    "one": lora_case([0], [8], k=2100),
    "one-adapter": lora_case([1] * 20, [2, 5], dtype=FP16),
    "nobody": lora_case([-1] * 5, [8]),
    "rank-0": lora_case([0, 1, 0, 1, -1], [0, 3]),
    "empty": lora_case([], [8]),
    "fp32": lora_case([2, 0, 1, 2, -1, 1], [4, 8, 7], n=150, k=300, dtype=FP32),
    "fp32-parts": lora_case([1, 0], [16, 8], k=1100, dtype=FP32),
    "fp32-tables": lora_case([0, 1, -1, 0], [4, 8], tables=FP32),
    "fp32-y": lora_case([0, 1, -1, 0], [4, 8], y_dtype=FP32),
    "one-element": lora_case([0, -1], [1], n=1, k=1),
    "large-ranks": lora_case([1, 0, -1, 2], [100, 64, 130], dtype=FP32, most=136),
    # prefill: runs with an end in a tile, and runs of all lengths
    "runs": lora_case([0] * 70 + [2] * 60 + [-1] * 9 + [1] * 20 + [0] * 3, [8, 16, 4]),
    "runs-fp32": lora_case([1] * 100 + [0] * 33, [8, 20], k=1100, dtype=FP32),
    "many-shuffled": lora_case([t * 7 % 5 - 1 for t in range(140)], [8, 0, 4, 2], n=70),
}  # fmt: skip
LORA_TTSEM = {"shuffled", "fp32", "rank-0", "runs"}


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=i, marks=ttsem_too if i in LORA_TTSEM else ()) for i, c in LORA.items()]
)
def test_lora(case):
    """Each token gets its own adapter's product; where it has none its bits stay."""
    adapters, ranks, n, k, dtype, most, y_dtype, tables = case
    slots, tokens = len(ranks), len(adapters)
    # beyond a slot's rank lies what nobody may read
    a, b = torch.full((slots, most, k), float("nan")), torch.full((slots, most, n), float("nan"))
    for slot, rank in enumerate(ranks):
        a[slot, :rank], b[slot, :rank] = torch.randn(rank, k), torch.randn(rank, n)
    a, b, scale = a.to(tables), b.to(tables), torch.rand(slots) + 0.5
    x, y = torch.randn(tokens, k).to(dtype), torch.randn(tokens, n).to(y_dtype)
    want, reach = y.double(), torch.zeros(tokens, n, dtype=torch.float64)
    for token, slot in enumerate(adapters):
        if slot >= 0:
            xs, (down, up) = x[token].double(), (t[slot, : ranks[slot]].double() for t in (a, b))
            want[token] += scale[slot].double() * ((xs @ down.T) @ up)
            reach[token] = scale[slot].double() * ((xs.abs() @ down.abs().T) @ up.abs())
    padded = torch.full((tokens, n + 3), float("nan"), dtype=y_dtype)
    padded[:, :n] = y
    padded = padded.to(DEVICE)
    found = padded[:, :n]
    rest = (torch.tensor(adapters, dtype=torch.int32), a, b, scale, torch.tensor(ranks, dtype=torch.int32))
    triton_lora.lora_add(found, x.to(DEVICE), *(t.to(DEVICE) for t in rest))
    assert_within(found, want, SUMS * reach + (ROUNDING[y_dtype] + SUMS) * want.abs())
    bare = torch.tensor([slot < 0 or not ranks[slot] for slot in adapters], dtype=torch.bool)
    assert torch.equal(found.cpu()[bare], y[bare]) and padded[:, n:].isnan().all()


def test_lora_of_neighbours():
    """A token's bits do not depend on whose tokens stand beside it."""
    adapters = torch.tensor([2, 0, 1, 2, 1, -1, 0, 2], dtype=torch.int32)
    a, b, x, y = (torch.randn(shape) for shape in ((3, 8, 96), (3, 8, 40), (8, 96), (8, 40)))
    tables = [t.to(DEVICE) for t in (a, b, torch.rand(3), torch.tensor([8, 4, 6], dtype=torch.int32))]

    def run(order):
        found = y[order].to(DEVICE)
        triton_lora.lora_add(found, x[order].to(DEVICE), adapters[order].to(DEVICE), *tables)
        return found.cpu()

    together, order = run(torch.arange(8)), torch.tensor([5, 2, 7, 0, 6, 1, 3, 4])
    assert torch.equal(run(order), together[order])
    assert all(torch.equal(run(torch.tensor([t]))[0], together[t]) for t in (0, 3))


def test_lora_refuses():
    ints = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match="contiguous"):
        rest = (torch.zeros(1, 1, 3), torch.zeros(1, 1, 4), torch.ones(1), ints[:1])
        triton_lora.lora_add(torch.zeros(4, 2).T, torch.zeros(2, 3), ints, *rest)
