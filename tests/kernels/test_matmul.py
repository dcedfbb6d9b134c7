"""The C++ matmuls below the operator: one arithmetic for all rows, threads, tiles and instruction sets."""

import ctypes

import pytest
import torch

from hfaccel_kernels import activations, layouts, native
from hfaccel_kernels.layouts import Layout
from packed import LAYOUTS, SHAPES, name, oracle, random_packed

pytestmark = pytest.mark.skipif(not native.available(), reason=f"no C++ kernels: {native.reason()}")

ISAS = native.supported_isas()
PLAIN = [torch.float32, torch.bfloat16, torch.float16]


class Acts(ctypes.Structure):
    _fields_ = [(f, ctypes.c_void_p) for f in ("codes", "low", "scales", "minus_sums")] + [
        ("ldq", ctypes.c_int64),
        ("lds", ctypes.c_int64),
    ]


def pointer(tensor):
    return None if tensor is None else tensor.data_ptr()


def describe(layout: Layout, n, k, weight, scale, zero, bias=None) -> native.Weight:
    return native.Weight(
        *map(pointer, (weight, scale, zero, bias)),
        n,
        k,
        **native.packed(layout),
        bias_dtype=native.DTYPES[bias.dtype] if bias is not None else 0,
    )


def describe_plain(weight: torch.Tensor, bias=None) -> native.Weight:
    n, k = weight.shape
    bias_dtype = native.DTYPES[bias.dtype] if bias is not None else 0
    return native.Weight(
        weight.data_ptr(), None, None, pointer(bias), n, k, weight.stride(0), native.PLAIN[weight.dtype],
        bias_dtype=bias_dtype,
    )  # fmt: skip


def linear(w: native.Weight, x: torch.Tensor, threads=1, isa=None, dtype=None) -> torch.Tensor:
    y = torch.full((x.shape[0], w.n), float("nan"), dtype=dtype or x.dtype)
    failed = native.library(isa).hfa_linear(
        ctypes.byref(w), x.data_ptr(), native.DTYPES[x.dtype], x.stride(0), x.shape[0],
        y.data_ptr(), native.DTYPES[y.dtype], w.n, threads,
    )  # fmt: skip
    assert failed == 0
    return y


def quantized(w: native.Weight, x: torch.Tensor, isa=None, threads=1) -> tuple[Acts, torch.Tensor]:
    lib, m = native.library(isa), x.shape[0]
    buffer = torch.full((lib.hfa_acts_bytes(ctypes.byref(w), m) + 64,), 0x55, dtype=torch.uint8)
    acts = Acts()
    lib.hfa_acts_view(
        ctypes.byref(w), ctypes.c_void_p(buffer.data_ptr()), ctypes.c_int64(m), ctypes.byref(acts)
    )
    for tid in range(threads):
        lib.hfa_quantize_rows(
            ctypes.byref(w), ctypes.c_void_p(x.data_ptr()), native.DTYPES[x.dtype],
            ctypes.c_int64(x.stride(0)), ctypes.c_int64(m), ctypes.byref(acts), tid, threads,
        )  # fmt: skip
    return acts, buffer


def view(address: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    if not count:
        return torch.empty(0, dtype=dtype)
    raw = ctypes.string_at(address, count * dtype.itemsize)
    return torch.frombuffer(bytearray(raw), dtype=dtype)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("x_dtype", PLAIN, ids=str)
@pytest.mark.parametrize(
    "group, act_bits", [(-1, 8), (64, 8), (40, 8), (7, 8), (-1, 16), (40, 16), (192, 16)]
)
def test_activation_codes_are_the_reference_bit_for_bit(isa, x_dtype, group, act_bits):
    layout, m, k = Layout(4, group, act_bits=act_bits), 5, 300
    x = (torch.randn(m, k) * torch.logspace(-4, 3, m)[:, None]).to(x_dtype)
    x[1, 32:90] = 0
    x[3, 64:128] = 1e-38
    w = describe(layout, 16, k, *random_packed(layout, 16, k))
    acts, _kept = quantized(w, x, isa, threads=3)
    codes, scales = activations.quantize_activations(x, layout)
    assert torch.equal(view(acts.scales, m * acts.lds, torch.float32).view(m, -1), scales)
    planes = [view(acts.codes, m * acts.ldq, torch.int8).view(m, -1).int()]
    if act_bits == 16:
        planes.append(view(acts.low, m * acts.ldq, torch.int8).view(m, -1).int())
    got = planes[0] if act_bits == 8 else planes[0] * 128 + planes[1]
    sums = view(acts.minus_sums, m * acts.lds, torch.int32).view(m, -1)
    at, size = 0, layouts.ACT_CHUNK[act_bits]
    for c, (start, stop) in enumerate(layout.chunks(k)):
        padded = -(-(stop - start) // 32) * 32
        assert torch.equal(got[:, at : at + stop - start], codes[:, start:stop].int())
        assert (got[:, at + stop - start : at + padded] == 0).all()
        assert act_bits == 8 or (planes[1][:, at : at + padded].abs() <= 64).all()
        assert torch.equal(-sums[:, c], codes[:, start:stop].sum(1, dtype=torch.int32))
        at += padded
        assert padded <= size


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("x_dtype", PLAIN[:2], ids=str)
@pytest.mark.parametrize("layout", [lay for lay in LAYOUTS if lay.act == "token"], ids=name)
def test_codes_of_a_token_are_the_reference_bit_for_bit(isa, x_dtype, layout):
    """What is far beyond a static scale, and no number at all, too: no int32 holds 1e38 times anything."""
    m, k = 6, 100
    x = torch.randn(m, k)
    x[1, 3:9] = torch.tensor([1e8, -1e8, 4.3e7, 3e38, -3e38, 2.54])
    x[2, 40], x[3, 1], x[4, 99] = float("nan"), float("inf"), -float("inf")
    x[5] = 0
    x = x.to(x_dtype)
    w = describe(layout, 16, k, *random_packed(layout, 16, k))
    acts, _kept = quantized(w, x, isa, threads=2)
    codes, scales = activations.quantize_activations(x, layout)
    assert torch.equal(view(acts.scales, m, torch.float32).nan_to_num(), scales[:, 0].nan_to_num())
    if layout.is_float:
        rows = view(acts.codes, m * acts.ldq // 4, torch.float32).view(m, -1)
        codes = torch.nn.functional.pad(codes, (0, rows.shape[1] - k))
        assert torch.equal(rows.view(m, -1, 4)[..., [0, 2, 1, 3]].flatten(1), codes)
    else:
        assert torch.equal(view(acts.codes, m * acts.ldq, torch.int8).view(m, -1)[:, :k], codes)
        if layout.static:
            assert codes[1, 3:9].tolist() == [127, -127, 127, 127, -127, 127]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=name)
def test_packed_product_against_fp64(isa, layout):
    for m, n, k in SHAPES:
        packed, bias, x = random_packed(layout, n, k), torch.randn(n), torch.randn(m, k)
        y = linear(describe(layout, n, k, *packed, bias), x, threads=2, isa=isa)
        want = oracle(x, *packed, bias, layout, n, k)
        # fp32 sums of K / 32 terms: a few ulp of the largest term
        assert (y - want).abs().max().item() <= 2e-6 * want.abs().max().item() if m else y.numel() == 0


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", PLAIN, ids=str)
def test_plain_product_against_fp64(isa, dtype):
    for m, n, k in [*SHAPES, (7, 19, 16), (130, 40, 1100)]:
        weight, bias, x = torch.randn(n, k).to(dtype), torch.randn(n).to(dtype), torch.randn(m, k)
        y = linear(describe_plain(weight, bias), x, threads=2, isa=isa)
        want = x.double() @ weight.double().t() + bias.double()
        assert (y - want).abs().max().item() <= 2e-6 * want.abs().max().item() if m else y.numel() == 0


def splits(m: int) -> list[int]:
    """Random cuts of m rows."""
    sizes = []
    while sum(sizes) < m:
        sizes.append(min(int(torch.randint(1, 17, ())), m - sum(sizes)))
    return sizes


def same_whatever_the_blocking(make, n, k, x):
    """`make(first_row, rows)` describes those rows of the weight, `first_row` a multiple of 16."""
    whole = linear(make(0, n), x)
    for threads in (2, 3, 7):
        assert torch.equal(linear(make(0, n), x, threads), whole)
    for _ in range(3):
        pieces = [linear(make(0, n), part.clone()) for part in x.split(splits(len(x)))]
        assert torch.equal(torch.cat(pieces), whole)
    order = torch.randperm(len(x))
    assert torch.equal(linear(make(0, n), x[order]), whole[order])
    for first, rows in ((0, 16), (16, n - 16), (32, 5)):
        assert torch.equal(linear(make(first, rows), x), whole[:, first : first + rows])
    for isa in ISAS:
        assert torch.equal(linear(make(0, n), x, 2, isa), whole), isa


@pytest.mark.parametrize("layout", LAYOUTS, ids=name)
def test_packed_bits_do_not_depend_on_rows_threads_offsets_or_isa(layout):
    n, k = 90, 296
    weight, scale, zero = random_packed(layout, n, k)
    bias = torch.randn(n)

    def make(first, rows):
        b = first // 16
        return describe(
            layout, rows, k, weight[b:], scale[b:], None if zero is None else zero[b:], bias[first:]
        )

    same_whatever_the_blocking(make, n, k, torch.randn(41, k))


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("dtype", PLAIN, ids=str)
def test_plain_bits_do_not_depend_on_rows_threads_offsets_or_isa(dtype, biased):
    n, k = 90, 1290
    weight, bias = torch.randn(n, k).to(dtype), torch.randn(n)
    same_whatever_the_blocking(
        lambda first, rows: describe_plain(weight[first : first + rows], bias[first:] if biased else None),
        n,
        k,
        torch.randn(41, k),
    )


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", PLAIN, ids=str)
def test_plain_sums_go_straight_into_y(dtype, isa):
    """Without a bias, around the token counts where rows begin to be kept."""
    for m, n, k in [(13, 83, 576), (25, 3, 40), (25, 121, 1536), (130, 83, 96)]:
        weight, x = torch.randn(n, k).to(dtype), torch.randn(m, k)
        want = x.double() @ weight.double().t()
        y = linear(describe_plain(weight), x, threads=3, isa=isa)
        assert (y - want).abs().max().item() <= 2e-6 * want.abs().max().item()


def test_many_rows_equal_few():
    # More rows than one pass over the weights takes: 384 KiB of codes.
    layout, n, k, m = Layout(4, 64), 48, 512, 900
    w, x = describe(layout, n, k, *(packed := random_packed(layout, n, k))), torch.randn(m, k)
    assert packed and torch.equal(
        linear(w, x, 2), torch.cat([linear(w, part.clone()) for part in x.split(13)])
    )
    plain = torch.randn(n, k).bfloat16()
    w = describe_plain(plain)
    assert torch.equal(linear(w, x, 2), torch.cat([linear(w, part.clone()) for part in x.split(13)]))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_in_and_out_round_once(isa, dtype):
    layout, n, k = Layout(8), 37, 100
    packed = random_packed(layout, n, k)
    x = torch.randn(6, k).to(dtype)
    weight = torch.randn(n, k).to(dtype)
    for w in (describe(layout, n, k, *packed), describe_plain(weight)):
        exact = linear(w, x.float(), isa=isa)
        assert torch.equal(linear(w, x, isa=isa), exact.to(dtype))


@pytest.mark.parametrize("isa", ISAS)
def test_float16_limits_survive_the_conversions(isa):
    # subnormals, the largest value, overflow to infinity, ties
    values = torch.tensor(
        [6e-8, 2.0**-25, 2.0**-24 * 1.5, 65504.0, 65519.9, 65520.0, 1e6, -0.0, 1 + 2.0**-11]
    )
    one = torch.ones(1, 1)
    for dtype in (torch.float16, torch.bfloat16):
        y = linear(describe_plain(values[:, None].contiguous()), one, isa=isa, dtype=dtype)
        assert torch.equal(y[0].float(), (values + 0.0).to(dtype).float())
        w = values.to(dtype)[:, None].contiguous()
        assert torch.equal(linear(describe_plain(w), one, isa=isa)[0], w[:, 0].float() + 0.0)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_poisoned_token_poisons_itself_and_nothing_else(isa, poison):
    layout, n, k = Layout(4, 64), 40, 128
    packed, x = random_packed(layout, n, k), torch.randn(5, k)
    w = describe(layout, n, k, *packed)
    clean = linear(w, x, isa=isa)
    x[2, 77] = poison
    y = linear(w, x, isa=isa)
    assert not y[2].isfinite().any()
    keep = [0, 1, 3, 4]
    assert torch.equal(y[keep], clean[keep])


def test_columns_behind_the_weights_rows_are_left_alone():
    layout, n, k, m = Layout(4, 64, False), 37, 96, 3
    packed, x, bias = random_packed(layout, n, k), torch.randn(m, k), torch.randn(n)
    w = describe(layout, n, k, *packed, bias)
    y = torch.randn(m, 50)
    before = y.clone()
    acts, _kept = quantized(w, x)
    native.library().hfa_matmul(
        ctypes.byref(w), ctypes.byref(acts), None, ctypes.c_int64(0), ctypes.c_int64(m),
        ctypes.c_void_p(y.data_ptr()), 0, ctypes.c_int64(50), 0, 1,
    )  # fmt: skip
    assert torch.equal(y[:, :n], linear(w, x))
    assert torch.equal(y[:, n:], before[:, n:])


def test_equal_keys_share_activations():
    def key(layout, k=256):
        w = describe(layout, 16, k, *random_packed(layout, 16, k))
        return native.library().hfa_acts_key(ctypes.byref(w))

    assert (
        key(Layout(4, 64)) == key(Layout(8, -1)) == key(Layout(3, 128, False, "fp16")) == key(Layout(2, 32))
    )
    assert (
        len({key(Layout(4, 64)), key(Layout(4, 40)), key(Layout(4, 16)), key(Layout(4, 64, act_bits=16))})
        == 4
    )


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("threads", [1, 3, 7, 64])
def test_shares_of_any_number_of_threads_make_the_whole(isa, threads):
    # hfa_linear wakes few threads for small products, so the shares are called one by one here.
    n, k, m = 90, 200, 30
    layout, x = Layout(4, 64, False), torch.randn(m, k)
    packed, weight = random_packed(layout, n, k), torch.randn(n, k)
    packed_weight = describe(layout, n, k, *packed)
    for w in (packed_weight, describe_plain(weight)):
        y = torch.full((m, n), float("nan"))
        acts, _kept = quantized(packed_weight, x, isa, threads)
        for tid in range(threads):
            native.library(isa).hfa_matmul(
                ctypes.byref(w), ctypes.byref(acts), ctypes.c_void_p(x.data_ptr()), ctypes.c_int64(k),
                ctypes.c_int64(m), ctypes.c_void_p(y.data_ptr()), 0, ctypes.c_int64(n), tid, threads,
            )  # fmt: skip
        assert torch.equal(y, linear(w, x, isa=isa))
