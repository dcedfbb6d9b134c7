"""Linear layers: packed weights (`qlinear`) and weights read as they are (`plain_linear`).

    qlinear        y = q(x) W^T + bias,  W [N, K] packed as layouts.py says
    plain_linear   y = x W^T + bias,     W [N, K] fp32, bf16 or fp16, row-major

Limits and accumulation, by what the layout says of activations (`Layout.act`); y is rounded once to the dtype
of x. "chunk": on a CPU x becomes 8- or 16-bit integers per token and chunk
(`activations.quantize_activations`), dots of a chunk are exact int32 and are added in fp32 in chunk order; on
CUDA the weight alone is quantized. "token": x is quantized on every device, to int8 with one exact int32 dot
(rows longer than `layouts.TOKEN_K` go to the reference), or beside float8 weights to E4M3 with sums in fp32.
`plain_linear` multiplies and adds in fp32. Gradients of `qlinear` flow to x (through the dequantized weight,
the rounding of x taken as the identity) and to bias; codes and scales have none. `plain_linear` is no torch
operator: where gradients or a trace are wanted its reference, plain PyTorch, serves.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch
import torch.nn.functional as F

from . import activations, dispatch, native, packing, triton_support
from .layouts import Layout

Tensor = torch.Tensor

_library = torch.library.Library("hfaccel", "DEF")
_library.define(
    "qlinear(Tensor x, Tensor weight, Tensor scale, Tensor? zero, Tensor? bias, str layout, int n, int k)"
    " -> Tensor"
)


def qlinear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    layout: Layout,
    n: int,
    k: int,
) -> Tensor:
    """Linear layer with a packed weight.

    Args:
        x: [..., K] of any float dtype.
        weight, scale, zero: `layout.shapes(n, k)`.
        bias: [N] of any float dtype, or None.
    Returns: [..., N] in the dtype of x.
    Raises: ValueError if shapes or dtypes are not those of the layout, or devices differ.
    """
    if _unwatched(x, bias):
        return _qlinear_run(x, weight, scale, zero, bias, layout, n, k)
    return torch.ops.hfaccel.qlinear(x, weight, scale, zero, bias, layout.text, n, k)


def plain_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear(x.float(), weight.float(), bias.float())` in the dtype of x, without a copy of the weight.

    Args:
        x: [..., K] of any float dtype.
        weight: [N, K] fp32, bf16 or fp16, unit stride along K.
        bias: [N] of any float dtype, or None.
    Returns: [..., N] in the dtype of x.
    Raises: ValueError if shapes do not fit, the weight has another dtype, or devices differ.
    """
    if weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"plain_linear: x {tuple(x.shape)} times weight {tuple(weight.shape)}")
    if weight.dtype not in native.PLAIN:
        raise ValueError(
            f"plain_linear: weight is {weight.dtype}, known are {', '.join(map(str, native.PLAIN))}"
        )
    if bias is not None and bias.shape != (weight.shape[0],):
        raise ValueError(f"plain_linear: bias is {tuple(bias.shape)}, wanted ({weight.shape[0]},)")
    _one_device("plain_linear", x, weight, bias)
    if not _unwatched(x, bias) or (torch.is_grad_enabled() and weight.requires_grad):
        return plain_linear_reference(x, weight, bias)
    backend = dispatch.choose("plain_linear", x.device.type, x.dtype)
    if weight.stride(1) != 1 and weight.shape[1] > 1:
        weight = weight.contiguous()
    return backend.function(x, weight, _usable_bias(bias))


def _unwatched(x: Tensor, bias: Tensor | None) -> bool:
    """Whether nothing wants to see the call: no gradient, trace, subclass or mode. Then torch's dispatcher,
    20 us for an operator with Python autograd, can be left out."""
    return (
        not torch.compiler.is_compiling()
        and type(x) is Tensor
        and not (torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)))
        and not torch._C._len_torch_dispatch_stack()
        and not torch.jit.is_tracing()
        and not x.is_meta
    )


# ---------------------------------------------------------------- reference


def qlinear_reference(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    layout: Layout,
    n: int,
    k: int,
    quantize: bool | None = None,
) -> Tensor:
    """The specification in plain PyTorch, fp32. `quantize`: x as on CPUs (default: on a CPU, and wherever a
    scale of x belongs to a token)."""
    w = packing.dequantize(weight, scale, zero, layout, n, k)
    rows = x.reshape(-1, k).float()
    if quantize is None:
        quantize = x.device.type == "cpu" or layout.act == "token"
    if quantize:
        codes, scales = activations.quantize_activations(rows, layout)
        lengths = torch.tensor([stop - start for start, stop in layout.chunks(k)], device=x.device)
        rows = codes * scales.repeat_interleave(lengths, 1, output_size=k)
    y = rows @ w.t()
    if bias is not None:
        y = y + bias.float()
    return y.to(x.dtype).view(*x.shape[:-1], n)


def plain_linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The specification of `plain_linear`."""
    return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)


# ---------------------------------------------------------------- native


def _too_long(call: dispatch.Call) -> str:
    return "" if call.layout is None or call.k is None else call.layout.too_long(call.k)


def _refuses(call: dispatch.Call) -> str:
    if call.device != "cpu":
        return "CPU only"
    if why := _too_long(call):
        return why
    return "" if native.available() else f"no C++ kernels: {native.reason()}"


@dispatch.register("qlinear", "native", priority=20, refusal=_refuses)
def qlinear_native(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    layout: Layout,
    n: int,
    k: int,
) -> Tensor:
    described = native.Weight(
        weight.data_ptr(),
        scale.data_ptr(),
        None if zero is None else zero.data_ptr(),
        None if bias is None else bias.data_ptr(),
        n,
        k,
        **native.packed(layout),
        bias_dtype=0 if bias is None else native.DTYPES[bias.dtype],
    )
    return _linear(described, x, n, k)


@dispatch.register("plain_linear", "native", priority=20, refusal=_refuses)
def plain_linear_native(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    n, k = weight.shape
    described = native.Weight(
        weight.data_ptr(),
        None,
        None,
        None if bias is None else bias.data_ptr(),
        n,
        k,
        weight.stride(0),
        native.PLAIN[weight.dtype],
        bias_dtype=0 if bias is None else native.DTYPES[bias.dtype],
    )
    return _linear(described, x, n, k)


def _linear(described: native.Weight, x: Tensor, n: int, k: int) -> Tensor:
    rows = x.reshape(-1, k) if k else x.new_empty(x.shape[:-1].numel(), 0)
    if rows.dtype not in native.DTYPES:
        return _linear(described, rows.float(), n, k).to(x.dtype).view(*x.shape[:-1], n)
    if rows.stride(-1) != 1 and k > 1:
        rows = rows.contiguous()
    m = rows.shape[0]
    y = rows.new_empty(m, n)
    dtype = native.DTYPES[rows.dtype]
    failed = native.library().hfa_linear(
        ctypes.byref(described),
        rows.data_ptr(),
        dtype,
        rows.stride(0),
        m,
        y.data_ptr(),
        dtype,
        n,
        torch.get_num_threads(),
    )
    if failed:
        raise MemoryError(f"no scratch memory for {m} x {k} activations")
    return y.view(*x.shape[:-1], n)


dispatch.register("qlinear", "reference", priority=0, refusal=lambda call: "")(qlinear_reference)


def _triton_refuses(call: dispatch.Call) -> str:
    if call.layout is not None and (
        call.layout.bits in (5, 6) or call.layout.scale_dtype not in TRITON_SCALES
    ):
        return f"no kernel for {call.layout.bits} bits with scale_dtype={call.layout.scale_dtype!r}"
    return _too_long(call) or triton_support.refusal(call)


TRITON_SCALES = ("fp32", "fp16", "double")
triton_support.register("qlinear", "triton_linear:linear", _triton_refuses)
dispatch.register("plain_linear", "reference", priority=0, refusal=lambda call: "")(plain_linear_reference)


# ---------------------------------------------------------------- torch operators


@lru_cache(maxsize=1024)
def _wanted(layout: Layout, n: int, k: int) -> tuple:
    return tuple((torch.Size(shape), dtype) for shape, dtype in layout.shapes(n, k).values())


def _check(x: Tensor, weight: Tensor, scale: Tensor, zero, bias, layout: Layout, n: int, k: int) -> None:
    if x.shape[-1:] != (k,) or not x.is_floating_point():
        raise ValueError(f"qlinear: x is {x.dtype} {tuple(x.shape)}, wanted a float dtype and [..., {k}]")
    given = (weight, scale) if zero is None else (weight, scale, zero)
    wanted = _wanted(layout, n, k)
    if len(given) != len(wanted):
        raise ValueError(f"qlinear: {layout} and {'no' if zero is None else 'given'} zero points")
    for tensor, (shape, dtype) in zip(given, wanted, strict=True):
        if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous():
            raise ValueError(
                f"qlinear: {tensor.dtype} {tuple(tensor.shape)} strides {tensor.stride()}, "
                f"{layout} of [{n}, {k}] wants contiguous {dtype} {tuple(shape)}"
            )
    if bias is not None and bias.shape != (n,):
        raise ValueError(f"qlinear: bias is {tuple(bias.shape)}, wanted ({n},)")
    _one_device("qlinear", x, weight, scale, zero, bias)


def _one_device(op: str, x: Tensor, *others: Tensor | None) -> None:
    """C++ reads addresses: those of another device would be a crash, or garbage."""
    for tensor in others:
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"{op}: x is on {x.device}, a weight, scale or bias on {tensor.device}")


def _usable_bias(bias: Tensor | None) -> Tensor | None:
    if bias is None or (bias.dtype in native.DTYPES and bias.is_contiguous()):
        return bias
    return bias.float().contiguous()


def _qlinear_run(x, weight, scale, zero, bias, layout, n, k):
    _check(x, weight, scale, zero, bias, layout, n, k)
    backend = dispatch.choose("qlinear", x.device.type, x.dtype, layout, k=k)
    return backend.function(x, weight, scale, zero, _usable_bias(bias), layout, n, k)


def _qlinear_op(x, weight, scale, zero, bias, layout, n, k):
    return _qlinear_run(x, weight, scale, zero, bias, Layout.parse(layout), n, k)


_library.impl("qlinear", _qlinear_op, "CPU")
_library.impl("qlinear", _qlinear_op, "CUDA")


@torch.library.register_fake("hfaccel::qlinear", lib=_library)
def _(x, weight, scale, zero, bias, layout, n, k):
    _one_device("qlinear", x, weight, scale, zero, bias)
    return x.new_empty(*x.shape[:-1], n)


def _qlinear_save(ctx, inputs, output):
    x, weight, scale, zero, bias, layout, ctx.n, ctx.k = inputs
    ctx.layout = Layout.parse(layout)
    ctx.x_dtype, ctx.bias_dtype = x.dtype, None if bias is None else bias.dtype
    ctx.save_for_backward(weight, scale, zero)


def _qlinear_backward(ctx, grad):
    weight, scale, zero = ctx.saved_tensors
    to_x = to_bias = None
    if ctx.needs_input_grad[0]:
        w = packing.dequantize(weight, scale, zero, ctx.layout, ctx.n, ctx.k)
        exact = torch.promote_types(grad.dtype, torch.float32)
        to_x = (grad.to(exact) @ w.to(exact)).to(ctx.x_dtype)
    if ctx.bias_dtype is not None and ctx.needs_input_grad[4]:
        to_bias = grad.reshape(-1, ctx.n).sum(0).to(ctx.bias_dtype)
    return to_x, None, None, None, to_bias, None, None, None


torch.library.register_autograd(
    "hfaccel::qlinear", _qlinear_backward, setup_context=_qlinear_save, lib=_library
)
