"""Weights of modules as a plan sees them, in place; and what stands in a plan's way."""

from __future__ import annotations

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from hfaccel.quant.linear import QuantEmbedding, QuantExperts, QuantLinear
from hfaccel.runtime import Unsupported
from hfaccel.runtime.plan import Matrix
from hfaccel_kernels.layouts import ROWS as BLOCK_ROWS

# names of transformers' ACT2FN -> those of plan_ops
ACTIVATION_OF = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu_erf",
    "gelu_python": "gelu_erf",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "relu": "relu",
    "quick_gelu": "quick_gelu",
    "relu2": "relu2",
}


def refuse_wrapped(model: nn.Module) -> None:
    """Raise Unsupported for what the records do not say and a forward does: hooks, adapters, dropout."""
    for name, module in model.named_modules():
        if "base_layer" in module._modules:
            raise Unsupported(f"adapters: {name} is a {type(module).__name__}")
        hooks = len(module._forward_hooks) + len(module._forward_pre_hooks)
        if module is not model and hooks:
            raise Unsupported(f"forward hooks on {name}")
        if "forward" in vars(module) and module is not model:
            raise Unsupported(f"the forward of {name} has been replaced")
        if model.training and isinstance(module, nn.Dropout) and module.p > 0:
            raise Unsupported(f"training mode with dropout at {name}")
    if model.training:
        rates = {
            key: rate for key, rate in vars(model.config).items() if "drop" in key or key.endswith("pdrop")
        }
        on = [key for key, rate in rates.items() if isinstance(rate, float) and rate > 0]
        if on:
            raise Unsupported(f"training mode with {', '.join(on)}")


def matrix_of(name: str, module: nn.Module) -> Matrix:
    """The weight of a linear, Conv1D or embedding, packed or not, in place.

    Raises: Unsupported for anything that multiplies by more (or less) than a stored weight.
    """
    kind, bias = type(module), getattr(module, "bias", None)
    if kind in (QuantLinear, QuantEmbedding):
        n, k = module.size
        return Matrix(n, k, module.weight, module.layout, module.weight_scale, module.weight_zero, bias)
    if "weight" not in module._parameters:
        raise Unsupported(f"{name} ({kind.__name__}): its weight is computed, not stored")
    weight = module.weight
    if isinstance(module, nn.Embedding):
        if module.max_norm is not None:
            raise Unsupported(f"{name}: embedding with max_norm")
        return Matrix(*weight.shape, weight)
    if kind.forward is Conv1D.forward:
        return Matrix(module.nf, module.nx, weight, bias=bias, transposed=True)
    if kind.forward is nn.Linear.forward:
        return Matrix(*weight.shape, weight, bias=bias)
    raise Unsupported(f"{name} is a {kind.__name__}")


def expert_matrix(name: str, holder: nn.Module) -> Matrix:
    """The stacked weights of fused experts, packed or not. Raises: Unsupported."""
    leaf = name.rpartition(".")[2]
    if getattr(holder, "is_transposed", False) or getattr(holder, f"{leaf}_bias", None) is not None:
        raise Unsupported(f"{name}: experts stored transposed or with biases")
    weight = getattr(holder, leaf, None)
    if type(holder) is QuantExperts:
        scale, zero = getattr(holder, f"{leaf}_scale"), getattr(holder, f"{leaf}_zero")
        return Matrix(*holder.sizes[leaf], weight, holder.layout, scale, zero, experts=weight.shape[0])
    if not isinstance(weight, torch.Tensor) or weight.dim() != 3:
        raise Unsupported(f"{name} is not one stack of matrices")
    return Matrix(weight.shape[1], weight.shape[2], weight, experts=weight.shape[0])


def split_rows(matrix: Matrix, pieces: int) -> list[Matrix] | None:
    """Views of `pieces` equal parts of the rows; None for a Conv1D or where a packed block would be cut."""
    n = matrix.n // pieces
    if matrix.transposed or matrix.n % pieces or (matrix.layout is not None and n % BLOCK_ROWS):
        return None
    if matrix.layout is None:
        rows = [slice(i * n, (i + 1) * n) for i in range(pieces)]
    else:
        rows = [slice(i * n // BLOCK_ROWS, (i + 1) * n // BLOCK_ROWS) for i in range(pieces)]

    def cut(tensor: torch.Tensor | None, part: slice) -> torch.Tensor | None:
        return None if tensor is None else tensor.detach()[part]

    return [
        Matrix(
            n,
            matrix.k,
            cut(matrix.weight, part),
            matrix.layout,
            cut(matrix.scale, part),
            cut(matrix.zero, part),
            cut(matrix.bias, slice(i * n, (i + 1) * n)),
        )
        for i, part in enumerate(rows)
    ]
