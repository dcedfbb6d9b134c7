"""LoRA of many adapters at once (Hu et al., arXiv:2106.09685), each token with one of its own or none.

    y[t] += scale[s] * ((x[t] @ a[s]^T) @ b[s]),  s = adapters[t] >= 0, rank[s] > 0

Tables hold one adapter a slot: a [S, R, K], b [S, R, N]; rows from `rank[s]` on are not looked at. Products
and sums are fp32 in every backend, and y is rounded once. A token without an adapter, or whose adapter has
rank 0, keeps its bits of y. Tokens of one adapter may stand anywhere; next to each other they cost least. No
gradients.
"""

from __future__ import annotations

import torch

from . import dispatch, triton_support

Tensor = torch.Tensor

_library = torch.library.Library("hfaccel", "FRAGMENT")
_library.define(
    "lora_add(Tensor(a!) y, Tensor x, Tensor adapters, Tensor a, Tensor b, Tensor scale, Tensor rank) -> ()"
)


def lora_add(
    y: Tensor, x: Tensor, adapters: Tensor, a: Tensor, b: Tensor, scale: Tensor, rank: Tensor
) -> None:
    """Add each token's adapter to a linear layer's output, in place.

    Args:
        y: [T, N], x: [T, K], any float dtypes.
        adapters: [T] int32, slot of each token's adapter, -1 for none. One that is no slot raises on a CPU;
            on a GPU nobody looks.
        a, b: [S, R, K] and [S, R, N], both of x's dtype or both fp32.
        scale: [S] fp32. rank: [S] int32, R at most.
    Raises: ValueError if shapes, dtypes or devices do not fit, or gradients are wanted.
    """
    torch.ops.hfaccel.lora_add(y, x, adapters, a, b, scale, rank)


def _check(y, x, adapters, a, b, scale, rank) -> None:
    if y.dim() != 2 or x.dim() != 2 or a.dim() != 3 or b.dim() != 3:
        raise ValueError(
            f"lora_add: y {tuple(y.shape)}, x {tuple(x.shape)}, a {tuple(a.shape)}, b {tuple(b.shape)}, "
            "wanted [T, N], [T, K], [S, R, K], [S, R, N]"
        )
    (tokens, n), (slots, most, k) = y.shape, a.shape
    for name, tensor, shape, dtype in (
        ("x", x, (tokens, k), x.dtype),
        ("adapters", adapters, (tokens,), torch.int32),
        ("b", b, (slots, most, n), a.dtype),
        ("scale", scale, (slots,), torch.float32),
        ("rank", rank, (slots,), torch.int32),
    ):
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            raise ValueError(
                f"lora_add: {name} is {tensor.dtype} {tuple(tensor.shape)}, wanted {dtype} {shape}"
            )
        if tensor.device != y.device:
            raise ValueError(f"lora_add: y is on {y.device}, {name} on {tensor.device}")
    if a.device != y.device:
        raise ValueError(f"lora_add: y is on {y.device}, a on {a.device}")
    if not y.is_floating_point() or not x.is_floating_point() or a.dtype not in (x.dtype, torch.float32):
        raise ValueError(f"lora_add: y {y.dtype}, x {x.dtype}, a and b {a.dtype}; tables are as x, or fp32")


@dispatch.register("lora_add", "reference", priority=0, refusal=lambda call: "")
def lora_add_reference(
    y: Tensor, x: Tensor, adapters: Tensor, a: Tensor, b: Tensor, scale: Tensor, rank: Tensor
) -> None:
    """The specification: the tokens of one adapter after those of another."""
    for slot in adapters.unique().tolist():
        if not -1 <= slot < len(rank):
            raise ValueError(f"lora_add: a token's adapter is in slot {slot}, the tables have {len(rank)}")
        r = int(rank[slot]) if slot >= 0 else 0
        if r:
            rows = (adapters == slot).nonzero()[:, 0]
            narrow = x[rows].float() @ a[slot, :r].float().T
            delta = (narrow @ b[slot, :r].float()) * scale[slot]
            y[rows] = (y[rows].float() + delta).to(y.dtype)


triton_support.register("lora_add", "triton_lora:lora_add")


def _lora_add_op(y, x, adapters, a, b, scale, rank):
    _check(y, x, adapters, a, b, scale, rank)
    backend = dispatch.choose("lora_add", x.device.type, x.dtype)
    backend.function(y, x, adapters, a, b, scale, rank)


def _refuse_gradients(keys, y, x, adapters, a, b, scale, rank):
    if torch.is_grad_enabled() and any(t.requires_grad for t in (y, x, a, b)):
        raise ValueError("lora_add: it has no gradients; call it under torch.no_grad()")
    torch.ops.hfaccel.lora_add.default.redispatch(
        keys & torch._C._after_autograd_keyset, y, x, adapters, a, b, scale, rank
    )


_library.impl("lora_add", _lora_add_op, "CPU")
_library.impl("lora_add", _lora_add_op, "CUDA")
_library.impl("lora_add", _refuse_gradients, "Autograd", with_keyset=True)


@torch.library.register_fake("hfaccel::lora_add", lib=_library)
def _(y, x, adapters, a, b, scale, rank):
    _check(y, x, adapters, a, b, scale, rank)
