"""Weights of modules as a plan sees them, in place; and what stands in a plan's way."""

from __future__ import annotations

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.pytorch_utils import Conv1D

from hfaccel.quant.linear import QuantEmbedding, QuantExperts, QuantLinear, ScaledLinear
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


_LIBRARIES = ("torch.", "transformers.", "hfaccel.")  # whose forwards the records describe
_CAPTURE = "transformers.utils.output_capturing"  # its hooks stay, and act only when outputs are asked for


def refuse_wrapped(model: nn.Module) -> None:
    """Raise Unsupported for what the records do not say and a forward does: hooks, adapters, dropout, other
    code."""
    every = nn.modules.module
    if every._global_forward_hooks or every._global_forward_pre_hooks:
        raise Unsupported("forward hooks on every module")
    for name, module in model.named_modules():
        kind = type(module)
        if "base_layer" in module._modules:
            raise Unsupported(f"adapters: {name} is a {kind.__name__}")
        if "parametrizations" in module._modules:
            raise Unsupported(f"{name}: its tensors are computed, not stored")
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        if any(getattr(hook, "__module__", "") != _CAPTURE for hook in hooks):
            raise Unsupported(f"forward hooks on {name or kind.__name__}")
        if _replaced(module, top=module is model):
            raise Unsupported(f"the forward of {name or kind.__name__} has been replaced")
        if not str(kind.forward.__module__).startswith(_LIBRARIES):
            raise Unsupported(f"{name or kind.__name__} is a {kind.__name__} with a forward of its own")
        if model.training and isinstance(module, nn.Dropout) and module.p > 0:
            raise Unsupported(f"training mode with dropout at {name}")
    if model.training:
        rates = {
            key: rate for key, rate in vars(model.config).items() if "drop" in key or key.endswith("pdrop")
        }
        on = [key for key, rate in rates.items() if isinstance(rate, float) and rate > 0]
        if on:
            raise Unsupported(f"training mode with {', '.join(on)}")


def _replaced(module: nn.Module, top: bool) -> bool:
    """Whether the instance has a forward other than its class's, compiled or not."""
    own = vars(module).get("forward")
    if own is None and "forward" not in vars(module):
        return False
    if top and hasattr(module, "_hf_hook"):  # accelerate moves inputs and outputs of the whole model
        return False
    own = getattr(own, "_torchdynamo_orig_callable", own)
    return getattr(own, "__func__", None) is not type(module).forward


def activation(name: str, owner: nn.Module) -> str:
    """What the plan calls transformers' activation `name`, which `owner` applies.

    Raises: Unsupported where the owner's module is not the one that the name stands for.
    """
    for attribute in ("act_fn", "act", "activation_fn"):
        found = getattr(owner, attribute, None)
        if isinstance(found, nn.Module) and type(found) is not type(ACT2FN[name]):
            raise Unsupported(f"{attribute} is a {type(found).__name__}, the config says {name}")
    return ACTIVATION_OF[name]


def matrix_of(name: str, module: nn.Module) -> Matrix:
    """The weight of a linear, Conv1D or embedding, packed or not, in place.

    Raises: Unsupported for anything that multiplies by more (or less) than a stored weight.
    """
    kind, bias = type(module), getattr(module, "bias", None)
    if kind in (QuantLinear, QuantEmbedding, ScaledLinear):
        stored = module.weight, module.layout, module.weight_scale, module.weight_zero, bias
        return Matrix(*module.size, *stored, input_scale=getattr(module, "input_scale", None))
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
            input_scale=matrix.input_scale,
        )
        for i, part in enumerate(rows)
    ]
