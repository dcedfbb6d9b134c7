"""How many bits the weights take as they are stored: codes, scales, zero points, padding included."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from hfaccel import compat
from hfaccel.anatomy import anatomy, default_sites
from hfaccel.checkpoint import packed_sizes
from hfaccel.quant.linear import is_fused_experts, is_packed, size_of


@dataclass(frozen=True)
class Storage:
    """Bytes of the matrices that a weight recipe rounds, a shared tensor counted once.

    Attributes:
        weights, bytes: of the linears and fused experts of all layers.
        head_weights, head_bytes: of the output head, which a tied embedding shares.
    """

    weights: int
    bytes: int
    head_weights: int
    head_bytes: int

    @property
    def bits_per_weight(self) -> float:
        """Of layers and head together."""
        return 8 * (self.bytes + self.head_bytes) / max(1, self.weights + self.head_weights)

    @property
    def layer_bits_per_weight(self) -> float:
        """Of the layers' matrices alone, the figure that papers give."""
        return 8 * self.bytes / max(1, self.weights)


def storage(model: nn.Module) -> Storage:
    """What a model's matrices take now, packed or not."""
    parts = anatomy(model)
    layers, head = [0, 0], [0, 0]
    seen: set[int] = set()
    for name in default_sites(parts):
        module = matrix_owner(model, name)
        weight = next(module.parameters(recurse=False))
        if id(weight) in seen:
            continue
        seen.add(id(weight))
        total = head if name == parts.head else layers
        total[0] += weights_of(module)
        total[1] += bytes_of(module)
    return Storage(*layers, *head)


def matrix_owner(model: nn.Module, name: str) -> nn.Module:
    """The module that a matrix's name leads to: itself, or the fused experts that hold it."""
    try:
        found = model.get_submodule(name)
    except AttributeError:
        found = model.get_submodule(name.rpartition(".")[0])
    return compat.base_layer(found)


def weights_of(module: nn.Module) -> int:
    """Elements of a module's matrices, packed or not."""
    if is_fused_experts(module) or hasattr(module, "sizes"):
        e1, n1, k1, e2, n2, k2 = packed_sizes(module)
        return e1 * n1 * k1 + e2 * n2 * k2
    n, k = size_of(module)
    return n * k


def bytes_of(module: nn.Module) -> int:
    """Bytes of a module's matrices with their scales and zero points; biases and other buffers not."""
    if is_packed(module):
        own = {**module._parameters, **module._buffers}
        stored = [t for name, t in own.items() if "bias" not in name and name != "out_like"]
    elif is_fused_experts(module):
        stored = [module.gate_up_proj, module.down_proj]
    else:
        stored = [module.weight]
    return sum(t.numel() * t.element_size() for t in stored if t is not None)
