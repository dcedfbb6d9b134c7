"""Packed modules: `QuantLinear`, `QuantEmbedding`, `QuantExperts`.

Their `weight` is the kernel's own layout (`hfaccel_kernels.layouts`) and what files hold; beside it lie
`weight_scale` and, for asymmetric grids, `weight_zero`. Codes never require grad. Scales are buffers that follow a
module's device but not its dtype: `model.to(torch.bfloat16)` changes what is not quantized and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from hfaccel_kernels.layouts import (
    ROWS,
    Layout,
    dequantize,
    gather_rows,
    pack_codes,
    pack_rows,
    unpack_codes,
)
from hfaccel_kernels.qlinear import qlinear

# (weight fp32 [rows, K], layout) -> codes uint8 [rows, K], scales fp32 [rows, G], zeros uint8 [rows, G] or None
Round = Callable[[Tensor, Layout], tuple[Tensor, Tensor, Tensor | None]]

_CHUNK_ELEMENTS = 1 << 22  # rows are rounded in pieces of this many elements, so that fp32 copies stay small


class _Packed:
    """What the packed modules share: storage under the names `weight`, `weight_scale`, `weight_zero`."""

    layout: Layout

    def _apply(self, fn, recurse=True):
        # `fn` may cast (`.to(bf16)`); scales keep their dtype and take only the device.
        kept = {name: buffer for name, buffer in self._buffers.items() if name.endswith("_scale")}
        by_id = {id(buffer) for buffer in kept.values()}

        def guarded(tensor: Tensor) -> Tensor:
            out = fn(tensor)
            if id(tensor) in by_id and out.dtype != tensor.dtype:
                return tensor.to(out.device)
            return out

        return super()._apply(guarded, recurse)

    def _store(self, tensors: dict[str, Tensor | None], prefix: str = "weight") -> None:
        weight = tensors["weight"]
        if not isinstance(weight, nn.Parameter):
            weight = nn.Parameter(weight, requires_grad=False)
        setattr(self, prefix, weight)
        self.register_buffer(f"{prefix}_scale", tensors["weight_scale"])
        self.register_buffer(f"{prefix}_zero", tensors.get("weight_zero"))

    @property
    def packed(self) -> dict[str, Tensor]:
        """The stored tensors by name, shared, not copied."""
        out = {"weight": self.weight, "weight_scale": self.weight_scale}
        if self.weight_zero is not None:
            out["weight_zero"] = self.weight_zero
        return out


class QuantLinear(_Packed, nn.Linear):
    """A linear over a packed weight, differentiable in its input.

    Args:
        packed: tensors of `layout.shapes(out_features, in_features)`.
        bias: [out_features] or None, kept as it is.
    Forward: x [..., in_features], any float dtype -> [..., out_features] of the same dtype. On CPUs activations are
        quantized to int8 per token and chunk on the fly (`layouts.quantize_activations`); on GPUs they are not.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        layout: Layout,
        packed: dict[str, Tensor],
        bias: nn.Parameter | None = None,
        compute_dtype: torch.dtype = torch.float32,
    ) -> None:
        nn.Module.__init__(self)  # nn.Linear's own would allocate and fill a full weight
        self.in_features, self.out_features, self.layout = in_features, out_features, layout
        self._store(packed)
        self.register_parameter("bias", bias)
        self.register_buffer("out_like", torch.empty(0, dtype=compute_dtype), persistent=False)

    @property
    def compute_dtype(self) -> torch.dtype:
        """What an adapter on top should compute in: the dtype of the model around it."""
        return self.out_like.dtype

    def forward(self, x: Tensor) -> Tensor:
        return qlinear(
            x,
            self.weight,
            self.weight_scale,
            self.weight_zero,
            self.bias,
            self.layout,
            self.out_features,
            self.in_features,
        )

    def dequantize(self) -> Tensor:
        """The weight the codes stand for, fp32 [out_features, in_features]."""
        return dequantize(
            self.weight, self.weight_scale, self.weight_zero, self.layout, self.out_features, self.in_features
        )

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, {describe(self.layout)}"


class QuantEmbedding(_Packed, nn.Embedding):
    """Look-ups in a packed weight `[num_embeddings, embedding_dim]`; shares its tensors with a tied head.

    The original's `scale` (Gemma's multiplier) and padding index are kept.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        layout: Layout,
        packed: dict[str, Tensor],
        padding_idx: int | None = None,
        compute_dtype: torch.dtype = torch.float32,
        multiplier: float | None = None,
    ) -> None:
        nn.Module.__init__(self)
        self.num_embeddings, self.embedding_dim, self.padding_idx = num_embeddings, embedding_dim, padding_idx
        self.max_norm = None
        self.layout, self.multiplier = layout, multiplier
        self._store(packed)
        self.register_buffer("out_like", torch.empty(0, dtype=compute_dtype), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        rows = gather_rows(
            self.weight, self.weight_scale, self.weight_zero, self.layout, self.embedding_dim, ids
        ).to(self.out_like.dtype)
        return rows if self.multiplier is None else rows * torch.tensor(self.multiplier, dtype=rows.dtype)

    def dequantize(self) -> Tensor:
        return dequantize(
            self.weight,
            self.weight_scale,
            self.weight_zero,
            self.layout,
            self.num_embeddings,
            self.embedding_dim,
        )

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, {describe(self.layout)}"


class QuantExperts(_Packed, nn.Module):
    """Fused experts (3-D `gate_up_proj`, `down_proj`) with every expert's matrices packed.

    Stored per projection: `<name>` uint8 [E, NB, block_bytes], `<name>_scale`, `<name>_zero` [E, NB, G, 16];
    biases as they were. The gate function is the original class's own.
    """

    PROJECTIONS = ("gate_up_proj", "down_proj")

    def __init__(self, original: nn.Module, layout: Layout, packed: dict[str, dict[str, Tensor]]) -> None:
        nn.Module.__init__(self)
        tensors = {*original._parameters, *original._buffers}
        for key, value in vars(original).items():
            if key not in vars(self) and key not in tensors:
                self.__dict__[key] = value
        self._modules.update(original._modules)  # act_fn
        self.layout, self.gate_class = layout, type(original)
        self.sizes = {name: matrix_size(original, name) for name in self.PROJECTIONS}  # (out, in)
        for name in self.PROJECTIONS:
            self._store(packed[name], name)
        for key, parameter in original._parameters.items():
            if key not in self.PROJECTIONS:
                self.register_parameter(key, parameter)

    def project(self, name: str, expert: int, x: Tensor) -> Tensor:
        """x [T, in] through one expert's matrix: [T, out]."""
        zero, bias = getattr(self, f"{name}_zero"), getattr(self, f"{name}_bias", None)
        out_features, in_features = self.sizes[name]
        return qlinear(
            x,
            getattr(self, name)[expert],
            getattr(self, f"{name}_scale")[expert],
            None if zero is None else zero[expert],
            None if bias is None else bias[expert],
            self.layout,
            out_features,
            in_features,
        )

    def dequantize(self, name: str) -> Tensor:
        """All experts' matrices of one projection, fp32 [E, out, in]."""
        zero = getattr(self, f"{name}_zero")
        return torch.stack(
            [
                dequantize(
                    getattr(self, name)[e],
                    getattr(self, f"{name}_scale")[e],
                    None if zero is None else zero[e],
                    self.layout,
                    *self.sizes[name],
                )
                for e in range(self.num_experts)
            ]
        )

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states [T, hidden], top_k_index and top_k_weights [T, k] -> [T, hidden]."""
        out = torch.zeros_like(hidden_states)
        for expert in top_k_index.unique().tolist():
            if expert >= self.num_experts:  # expert parallelism marks foreign experts so
                continue
            tokens, slot = (top_k_index == expert).nonzero(as_tuple=True)
            gated = self.gate_class._apply_gate(self, self.project("gate_up_proj", expert, hidden_states[tokens]))
            y = self.project("down_proj", expert, gated) * top_k_weights[tokens, slot, None]
            out.index_add_(0, tokens, y.to(out.dtype))
        return out

    def extra_repr(self) -> str:
        return f"{self.num_experts} experts, {self.sizes}, {describe(self.layout)}"


def describe(layout: Layout) -> str:
    """"int4 g64 asymmetric", for tables."""
    group = "row" if layout.group == -1 else f"g{layout.group}"
    return f"int{layout.bits} {group} {'symmetric' if layout.symmetric else 'asymmetric'}"


def matrix_size(experts: nn.Module, name: str) -> tuple[int, int]:
    """(out, in) of one expert's matrix in fused experts."""
    _, rows, columns = getattr(experts, name).shape
    return (columns, rows) if experts.is_transposed else (rows, columns)


def is_fused_experts(module: nn.Module) -> bool:
    return all(
        isinstance(p := module._parameters.get(name), nn.Parameter) and p.dim() == 3 and p.is_floating_point()
        for name in QuantExperts.PROJECTIONS
    ) and hasattr(module, "is_transposed")


def is_conv1d(module: nn.Module) -> bool:
    """transformers' Conv1D: a linear with its weight stored `[in, out]`."""
    return hasattr(module, "nf") and hasattr(module, "nx") and getattr(module, "weight", None) is not None


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
        out["weight_scale"][blocks] = pack_rows(scale.to(layout.dtype))
        if zero is not None:
            out["weight_zero"][blocks] = pack_rows(zero)
    return out


def pack_module(module: nn.Module, layout: Layout, rounding: Round) -> nn.Module:
    """The packed form of a linear, Conv1D, embedding or fused experts module."""
    if is_fused_experts(module):
        packed = {}
        for name in QuantExperts.PROJECTIONS:
            each = [
                pack_matrix(w.T if module.is_transposed else w, layout, rounding) for w in getattr(module, name)
            ]
            packed[name] = {key: torch.stack([one[key] for one in each]) for key in each[0]}
        return _like(module, QuantExperts(module, layout, packed))
    matrix = module.weight.T if is_conv1d(module) else module.weight
    return packed_like(module, layout, pack_matrix(matrix, layout, rounding))


def packed_like(module: nn.Module, layout: Layout, packed: dict[str, Tensor]) -> nn.Module:
    """The module of `packed` tensors that takes the place of a linear, Conv1D or embedding."""
    dtype = module.weight.dtype if module.weight.is_floating_point() else module.out_like.dtype
    if isinstance(module, nn.Embedding):
        return _like(
            module,
            QuantEmbedding(
                module.num_embeddings,
                module.embedding_dim,
                layout,
                packed,
                padding_idx=module.padding_idx,
                compute_dtype=dtype,
                multiplier=getattr(module, "scalar_embed_scale", None),
            ),
        )
    n, k = (module.nf, module.nx) if is_conv1d(module) else (module.out_features, module.in_features)
    return _like(module, QuantLinear(k, n, layout, packed, bias=module.bias, compute_dtype=dtype))


def skeleton(module: nn.Module, layout: Layout) -> nn.Module:
    """The packed form of `module` with empty tensors on the meta device, for loading."""

    def empty(n: int, k: int, lead: tuple[int, ...] = ()) -> dict[str, Tensor]:
        return {
            name: torch.empty(lead + tuple(shape), dtype=dtype, device="meta")
            for name, (shape, dtype) in layout.shapes(n, k).items()
        }

    if is_fused_experts(module):
        packed = {
            name: empty(*matrix_size(module, name), (module.num_experts,)) for name in QuantExperts.PROJECTIONS
        }
        return _like(module, QuantExperts(module, layout, packed))
    n, k = module.weight.shape[::-1] if is_conv1d(module) else module.weight.shape
    return packed_like(module, layout, empty(n, k))


def _like(original: nn.Module, module: nn.Module) -> nn.Module:
    return module.train(original.training)


def codes_of(module: QuantLinear | QuantEmbedding) -> Tensor:
    """Unsigned codes uint8 [N, K] of a packed module (8 bits: signed code + 128)."""
    n, k = (
        (module.num_embeddings, module.embedding_dim)
        if isinstance(module, nn.Embedding)
        else (module.out_features, module.in_features)
    )
    return unpack_codes(module.weight, module.layout, n, k)
