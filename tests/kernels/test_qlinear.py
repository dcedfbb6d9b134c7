import os
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F

from hfaccel_kernels import OPS, dispatch, native, packing
from hfaccel_kernels.layouts import Layout
from hfaccel_kernels.qlinear import plain_linear, qlinear, qlinear_reference
from packed import LAYOUTS, SHAPES, name, oracle, random_packed

BACKENDS = [
    pytest.param(
        "native", marks=pytest.mark.skipif(not native.available(), reason=f"no kernels: {native.reason()}")
    ),
    "reference",
]
INT4 = Layout(4, 64, False, "fp16")


@pytest.fixture(params=BACKENDS)
def backend(request, monkeypatch):
    monkeypatch.setenv("HFACCEL_BACKEND", request.param)
    return request.param


@pytest.mark.parametrize("layout", LAYOUTS, ids=name)
def test_values_against_fp64(backend, layout):
    for m, n, k in SHAPES:
        packed, bias, x = random_packed(layout, n, k), torch.randn(n), torch.randn(m, k)
        y = qlinear(x, *packed, bias, layout, n, k)
        want = oracle(x, *packed, bias, layout, n, k)
        assert y.shape == (m, n) and y.dtype == torch.float32
        assert (y - want).abs().max().item() <= 3e-6 * want.abs().max().item() if m else True


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(70,), (2, 3, 70), (0, 70), (4, 0, 70)], ids=str)
def test_any_float_dtype_and_leading_shape(backend, dtype, shape):
    n, k = 37, 70
    packed, x = random_packed(INT4, n, k), torch.randn(shape).to(dtype)
    bias = torch.randn(n).to(dtype)
    y = qlinear(x, *packed, bias, INT4, n, k)
    assert y.shape == (*shape[:-1], n) and y.dtype == dtype
    want = oracle(x, *packed, bias, INT4, n, k).view(y.shape)
    if y.numel():
        tolerance = {torch.bfloat16: 2**-8, torch.float16: 2**-11}.get(dtype, 3e-6)  # one rounding at the end
        assert ((y - want).abs() <= tolerance * want.abs() + 3e-6 * want.abs().max()).all()


def test_strided_rows_need_no_copy_to_be_right(backend):
    n, k = 20, 64
    packed, wide = random_packed(INT4, n, k), torch.randn(5, 200)
    view = wide[:, 30 : 30 + k]
    turned = torch.randn(k, 5).t()
    for x in (view, turned, view.view(5, 1, k).expand(5, 3, k)):
        assert torch.equal(
            qlinear(x, *packed, None, INT4, n, k), qlinear(x.contiguous(), *packed, None, INT4, n, k)
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_plain_linear(backend, dtype):
    for m, n, k in SHAPES:
        weight, bias, x = torch.randn(n, k).to(dtype), torch.randn(n).to(dtype), torch.randn(m, k)
        want = F.linear(x.double(), weight.double(), bias.double())
        got = plain_linear(x, weight, bias)
        assert got.shape == (m, n) and got.dtype == torch.float32
        assert (got - want).abs().max().item() <= 3e-6 * want.abs().max().item() if m else True
        assert plain_linear(x.to(dtype), weight).dtype == dtype
    big = torch.randn(24, 100).to(dtype)
    assert torch.equal(
        plain_linear(x32 := torch.randn(3, 40), big[:, 50:90]), plain_linear(x32, big[:, 50:90].clone())
    )


def test_a_plain_weight_without_inputs_gives_the_bias(backend):
    bias = torch.randn(5)
    for m in (1, 9, 30):
        for dtype in (torch.float32, torch.bfloat16):
            y = plain_linear(torch.empty(m, 0), torch.empty(5, 0, dtype=dtype), bias)
            assert torch.equal(y, bias.expand(m, 5))


def test_a_group_beyond_int32_is_the_whole_row(backend):
    x, packed = torch.randn(3, 128), random_packed(Layout(4), 20, 128)
    want = qlinear(x, *packed, None, Layout(4), 20, 128)
    assert torch.equal(qlinear(x, *packed, None, Layout(4, 2**32 + 64), 20, 128), want)


def test_longer_rows_than_an_int32_dot_go_to_the_reference(monkeypatch):
    layout, k = Layout(8, act="token"), 140_000
    codes, scale = torch.full((16, k), 255, dtype=torch.uint8), torch.full((16, 1), 0.5)
    packed = packing.pack_codes(codes, layout), packing.pack_rows(scale)
    y = qlinear(torch.ones(2, k), *packed, None, None, layout, 16, k)
    assert torch.allclose(y, torch.full((2, 16), 0.5 * 127 * k), rtol=1e-5)
    monkeypatch.setenv("HFACCEL_BACKEND", "native")
    with pytest.raises(dispatch.BackendError, match="140000 inputs: one int32"):
        qlinear(torch.ones(2, k), *packed, None, None, layout, 16, k)


def test_gradients_reach_x_and_bias(backend):
    n, k = 37, 70
    packed = random_packed(INT4, n, k)
    w = packing.dequantize(*packed, INT4, n, k)
    x = torch.randn(2, 3, k, requires_grad=True)
    bias = torch.randn(n, requires_grad=True)
    y = qlinear(x, *packed, bias, INT4, n, k)
    grad = torch.randn_like(y)
    y.backward(grad)
    assert torch.allclose(x.grad, grad @ w, atol=1e-5) and torch.allclose(
        bias.grad, grad.sum((0, 1)), atol=1e-5
    )
    with torch.no_grad():
        assert torch.equal(qlinear(x, *packed, bias, INT4, n, k), y)


def test_half_precision_gradients_keep_their_dtype(backend):
    n, k = 37, 70
    packed = random_packed(INT4, n, k)
    x = torch.randn(3, k, dtype=torch.bfloat16, requires_grad=True)
    qlinear(x, *packed, None, INT4, n, k).sum().backward()
    assert x.grad.dtype == torch.bfloat16
    want = packing.dequantize(*packed, INT4, n, k).sum(0)
    assert torch.allclose(x.grad[1].float(), want, rtol=2**-7, atol=1e-2)


def test_plain_linear_gradients_are_those_of_a_linear(backend):
    tensors = [torch.randn(shape, requires_grad=True) for shape in ((2, 3, 20), (7, 20), (7,))]
    grad = torch.randn(2, 3, 7)
    got = torch.autograd.grad(plain_linear(*tensors), tensors, grad)
    want = torch.autograd.grad(F.linear(*tensors), tensors, grad)
    for a, b in zip(got, want, strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_the_operators_are_well_formed():
    n, k = 20, 64
    weight, scale, zero = random_packed(INT4, n, k)
    x, bias = torch.randn(2, k, requires_grad=True), torch.randn(n, requires_grad=True)
    # The gradient is the straight-through one, so it is not that of finite differences; see the tests above.
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(
        torch.ops.hfaccel.qlinear.default, (x, weight, scale, zero, bias, INT4.text, n, k), test_utils=tests
    )


def test_compiles_without_a_graph_break():
    n, k = 20, 64
    packed = random_packed(INT4, n, k)

    def layer(x):
        return qlinear(torch.relu(x), *packed, None, INT4, n, k) * 2

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for rows in (1, 3):
        x = torch.randn(rows, k)
        with torch.no_grad():
            assert torch.equal(compiled(x), layer(x))
    x = torch.randn(2, k, requires_grad=True)
    compiled(x).sum().backward()
    y = x.detach().clone().requires_grad_()
    layer(y).sum().backward()
    assert torch.equal(x.grad, y.grad)


def test_meta_tensors_give_shapes():
    n, k = 37, 70
    packed = [None if t is None else t.to("meta") for t in random_packed(INT4, n, k)]
    y = qlinear(torch.empty(2, k, device="meta", dtype=torch.bfloat16), *packed, None, INT4, n, k)
    assert y.is_meta and y.shape == (2, n) and y.dtype == torch.bfloat16


@pytest.mark.parametrize("place", ["weight", "scale", "zero", "bias"])
@pytest.mark.parametrize("gradient", [False, True])
def test_operands_of_another_device_are_refused(backend, place, gradient):
    """With gradients too, where the dispatcher would ask the operator's fake."""
    n, k = 37, 70
    weight, scale, zero = random_packed(INT4, n, k)
    given = {"weight": weight, "scale": scale, "zero": zero, "bias": torch.randn(n)}
    given[place] = given[place].to("meta")
    with pytest.raises(ValueError, match="x is on cpu, a weight, scale or bias on meta"):
        qlinear(torch.randn(2, k, requires_grad=gradient), **given, layout=INT4, n=n, k=k)
    if place in ("weight", "bias"):
        plain = {"weight": torch.randn(n, k), "bias": torch.randn(n)}
        plain[place] = plain[place].to("meta")
        with pytest.raises(ValueError, match="x is on cpu, a weight, scale or bias on meta"):
            plain_linear(torch.randn(2, k, requires_grad=gradient), **plain)


def test_a_trace_calls_the_operator(backend):
    """And not memory that was there when it was made."""
    n, k = 37, 70
    packed, bias = random_packed(INT4, n, k), torch.randn(n)
    weight = torch.randn(n, k)

    def layers(x):
        return qlinear(x, *packed, bias, INT4, n, k), plain_linear(x, weight, bias)

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", torch.jit.TracerWarning)  # shapes are compared in Python
        traced = torch.jit.trace(layers, (torch.randn(3, k),), check_trace=False)
        x = torch.randn(3, k)
        packed_result, plain_result = traced(x)
        assert torch.equal(packed_result, qlinear(x, *packed, bias, INT4, n, k))
    assert torch.allclose(plain_result, F.linear(x, weight, bias), atol=1e-5)


def test_threads_do_not_share_scratch():
    n, k = 256, 512
    packed = random_packed(INT4, n, k)
    inputs = [torch.randn(1 + i % 3, k) for i in range(8)]
    want = [qlinear(x, *packed, None, INT4, n, k) for x in inputs]
    wrong = []

    def work(i):
        for _ in range(30):
            if not torch.equal(qlinear(inputs[i], *packed, None, INT4, n, k), want[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.skipif(not native.available(), reason="no kernels")
def test_a_forked_child_computes_the_same():
    n, k = 512, 512
    packed, x = random_packed(INT4, n, k), torch.randn(4, k)
    want = qlinear(x, *packed, None, INT4, n, k)  # the parent's pool has run
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, b"1" if torch.equal(qlinear(x, *packed, None, INT4, n, k), want) else b"0")
        finally:
            os._exit(0)
    os.close(writer)
    answer = os.read(reader, 1)  # a hung child is ended by the test's own timeout
    os.close(reader)
    os.waitpid(child, 0)
    assert answer == b"1"


@pytest.mark.parametrize("spoil, word", [
    (lambda a: {"x": a["x"][:, :60]}, r"\[\.\.\., 70\]"),
    (lambda a: {"x": a["x"].int()}, "float dtype"),
    (lambda a: {"weight": a["weight"][:, :-1]}, "wants contiguous torch.uint8"),
    (lambda a: {"weight": a["weight"].view(torch.int8)}, "torch.int8"),
    (lambda a: {"scale": a["scale"].float()}, "wants contiguous torch.float16"),
    (lambda a: {"zero": None}, "no zero points"),
    (lambda a: {"zero": a["zero"][:1]}, "wants contiguous torch.uint8"),
    (lambda a: {"bias": torch.randn(36)}, r"wanted \(37,\)"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(spoil, word):
    n, k = 37, 70
    weight, scale, zero = random_packed(INT4, n, k)
    good = dict(x=torch.randn(2, k), weight=weight, scale=scale, zero=zero, bias=None, layout=INT4, n=n, k=k)
    with pytest.raises(ValueError, match=word):
        qlinear(**good | spoil(good))


def test_the_gpu_reference_leaves_activations_alone():
    n, k = 20, 64
    packed, x = random_packed(INT4, n, k), torch.randn(3, k)
    y = qlinear_reference(x, *packed, None, INT4, n, k, quantize=False)
    assert torch.allclose(y, x @ packing.dequantize(*packed, INT4, n, k).t(), atol=1e-4)


def test_backends_are_forced_explained_and_refused(monkeypatch):
    monkeypatch.setenv("HFACCEL_BACKEND", "reference")
    assert dispatch.choose("qlinear", "cpu", torch.float32).name == "reference"
    assert dispatch.explain("qlinear", "cpu").startswith("reference (HFACCEL_BACKEND=reference)")
    monkeypatch.setenv("HFACCEL_BACKEND", "native")
    with pytest.raises(dispatch.BackendError, match="HFACCEL_BACKEND=native.*CPU only"):
        dispatch.choose("qlinear", "cuda", torch.float32)
    monkeypatch.setenv("HFACCEL_BACKEND", "fastest")
    with pytest.raises(ValueError, match="known are auto, reference, native, triton"):
        dispatch.choose("qlinear", "cpu", torch.float32)
    monkeypatch.delenv("HFACCEL_BACKEND")
    with pytest.raises(KeyError, match="plain_linear, qlinear"):
        dispatch.backends("qlinaer")
    monkeypatch.setenv("HFACCEL_ISA", "sse9")
    with pytest.raises(ValueError, match="known are auto, avx512, avx2, neon, scalar"):
        qlinear(torch.randn(1, 64), *random_packed(INT4, 16, 64), None, INT4, 16, 64)


def test_every_op_can_be_imported_and_has_a_reference():
    import importlib

    for op, where in OPS.items():
        module, function = where.split(":")
        assert callable(getattr(importlib.import_module(module), function)), op
