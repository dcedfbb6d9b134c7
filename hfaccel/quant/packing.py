"""From a module to its packed form: what has one, how its matrix is rounded, the empty form for loading."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from hfaccel.quant.linear import (
    QuantEmbedding,
    QuantExperts,
    QuantLinear,
    ScaledLinear,
    is_conv1d,
    is_fused_experts,
    is_packed,
    matrix_size,
    size_of,
)
from hfaccel_kernels.layouts import ROWS, Layout
from hfaccel_kernels.packing import pack_codes, pack_rows, pack_scales

# (weight fp32 [rows, K], layout) -> codes uint8 [rows, K], scales fp32 [rows, G] that the layout's dtype can
# hold (double-quantized ones are what `pack_scales` makes of them), zeros uint8 [rows, G] or None
Round = Callable[[Tensor, Layout], tuple[Tensor, Tensor, Tensor | None]]

_CHUNK_ELEMENTS = 1 << 22  # rows are rounded in pieces of this many elements, so that fp32 copies stay small


def pack_matrix(weight: Tensor, layout: Layout, rounding: Round) -> dict[str, Tensor]:
    """Round and pack a matrix `[N, K]` of any float dtype, a bounded number of rows at a time."""
    n, k = weight.shape
    out = {
        name: torch.empty(shape, dtype=dtype, device=weight.device)
        for name, (shape, dtype) in layout.shapes(n, k).items()
    }
    rows = max(ROWS, _CHUNK_ELEMENTS // max(k, 1) // ROWS * ROWS)
    for start in range(0, n, rows):
        stop = min(start + rows, n)
        codes, scale, zero = rounding(weight[start:stop].detach().float(), layout)
        blocks = slice(start // ROWS, -(-stop // ROWS))
        out["weight"][blocks] = pack_codes(codes, layout)
        out["weight_scale"][blocks] = pack_scales(scale, layout)
        if zero is not None:
            out["weight_zero"][blocks] = pack_rows(zero)
    return out


def pack_module(module: nn.Module, layout: Layout, rounding: Callable[[Tensor], Round]) -> nn.Module:
    """The packed form of a linear, Conv1D, embedding or fused experts module.

    Args:
        rounding: given a whole matrix [N, K], the function that rounds rows of it.
    """
    if is_fused_experts(module):
        packed = {}
        for name in QuantExperts.PROJECTIONS:
            matrices = (w.T if module.is_transposed else w for w in getattr(module, name).detach())
            each = [pack_matrix(matrix, layout, rounding(matrix)) for matrix in matrices]
            packed[name] = {key: torch.stack([one[key] for one in each]) for key in each[0]}
        return _like(module, QuantExperts(module, layout, packed))
    matrix = (module.weight.T if is_conv1d(module) else module.weight).detach()
    return packed_like(module, layout, pack_matrix(matrix, layout, rounding(matrix)))


def packed_like(
    module: nn.Module, layout: Layout, packed: dict[str, Tensor], input_scale: Tensor | None = None
) -> nn.Module:
    """The module of `packed` tensors that takes the place of a linear, Conv1D or embedding.

    Args:
        input_scale: fp32 [K], what a linear multiplies its inputs by first.
    """
    dtype = module.weight.dtype if module.weight.is_floating_point() else module.out_like.dtype
    if isinstance(module, nn.Embedding):
        multiplier, rounds = embed_scale(module)
        return _like(
            module,
            QuantEmbedding(
                *size_of(module),
                layout,
                packed,
                padding_idx=module.padding_idx,
                compute_dtype=dtype,
                multiplier=multiplier,
                rounds_multiplier=rounds,
            ),
        )
    n, k = size_of(module)
    kind, more = (QuantLinear, {}) if input_scale is None else (ScaledLinear, {"input_scale": input_scale})
    return _like(module, kind(k, n, layout, packed, bias=module.bias, compute_dtype=dtype, **more))


def skeleton(module: nn.Module, layout: Layout, *, scaled: bool = False) -> nn.Module:
    """The packed form of `module` with empty tensors on the meta device, for loading.

    Args:
        scaled: of a linear with a scale of its inputs.
    """

    def empty(n: int, k: int, lead: tuple[int, ...] = ()) -> dict[str, Tensor]:
        return {
            name: torch.empty(lead + tuple(shape), dtype=dtype, device="meta")
            for name, (shape, dtype) in layout.shapes(n, k).items()
        }

    if is_fused_experts(module):
        packed = {
            name: empty(*matrix_size(module, name), (module.num_experts,))
            for name in QuantExperts.PROJECTIONS
        }
        return _like(module, QuantExperts(module, layout, packed))
    n, k = size_of(module)
    scale = torch.empty(k, dtype=torch.float32, device="meta") if scaled else None
    return packed_like(module, layout, empty(n, k), scale)


def unpackable(module: nn.Module) -> str:
    """Why a module has no packed form; "" if it has one.

    A subclass with a forward of its own is tried: it must do what a linear or an embedding (times a
    multiplier) does.
    """
    kind = type(module).__name__
    if is_packed(module):
        return "it is packed already"
    if is_fused_experts(module):
        return ""
    weight = getattr(module, "weight", None)
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return f"{kind}: its parent reads the weight itself"
    if not (isinstance(module, nn.Linear | nn.Embedding) or is_conv1d(module)):
        return f"{kind} has no packed form"
    if not isinstance(weight, Tensor) or not weight.is_floating_point() or weight.dim() != 2:
        return f"{kind}: its weight is no float matrix"
    if isinstance(module, nn.Embedding) and (module.max_norm is not None or module.sparse):
        return f"{kind} renormalizes its rows or has sparse gradients"
    if (
        weight.is_meta
        or type(module).forward in (nn.Linear.forward, nn.Embedding.forward)
        or is_conv1d(module)
    ):
        return ""
    return "" if _behaves(module) else f"{kind} has a forward of its own"


@torch.no_grad()
def _behaves(module: nn.Module) -> bool:
    """Whether an unusual linear or embedding gives what a plain one gives."""
    weight = module.weight
    if isinstance(module, nn.Embedding):
        x = torch.tensor([[0, weight.shape[0] - 1]], device=weight.device)
        multiplier, rounds = embed_scale(module)
        wanted = nn.functional.embedding(x, weight)
        if multiplier is not None:
            wanted = wanted * (torch.tensor(multiplier).to(wanted.dtype) if rounds else multiplier)
    else:
        x = torch.linspace(-1, 1, weight.shape[1], device=weight.device).to(weight.dtype)[None]
        wanted = nn.functional.linear(x, weight, module.bias)
    try:
        found = type(module).forward(module, x)
    except (TypeError, RuntimeError, AttributeError, ValueError, IndexError):
        return False  # it takes something else
    return (
        isinstance(found, Tensor)
        and found.shape == wanted.shape
        and torch.allclose(found, wanted, 1e-2, 1e-3)
    )


def embed_scale(module: nn.Embedding) -> tuple[float | None, bool]:
    """What an embedding multiplies its rows by, and whether it rounds that to their dtype first."""
    scale = getattr(module, "scalar_embed_scale", getattr(module, "embed_scale", None))
    rounds = isinstance(getattr(module, "embed_scale", None), Tensor)
    return (None if scale is None else float(scale)), rounds


_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)


def _like(original: nn.Module, module: nn.Module) -> nn.Module:
    # The same dicts: a handle given out before removes its hook from both, and unpatch keeps later hooks.
    for name in _HOOKS:
        setattr(module, name, getattr(original, name))
    return module.train(original.training)
