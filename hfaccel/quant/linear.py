"""Packed modules: `QuantLinear`, `QuantEmbedding`, `QuantExperts`.

Their `weight` is the kernel's own layout (`hfaccel_kernels.layouts`) and what files hold; beside it lie
`weight_scale` and, for asymmetric grids, `weight_zero`. Codes never require grad. Scales are buffers that
follow a module's device but not its dtype: `model.to(torch.bfloat16)` changes what is not quantized and
nothing else.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hfaccel import compat
from hfaccel_kernels.layouts import Layout
from hfaccel_kernels.packing import dequantize, gather_rows, unpack_codes
from hfaccel_kernels.qlinear import qlinear


class _Packed:
    """What the packed modules share: storage under the names `weight`, `weight_scale`, `weight_zero`.

    `weights_version` counts edits of the codes; whoever keeps results of them (a plan, pages) compares it.
    `merged_adapters` names what merges have rounded into the codes, as long as it is in them.
    """

    layout: Layout
    weights_version: int = 0
    merged_adapters: tuple[str, ...] = ()

    def _apply(self, fn, recurse=True):
        # `fn` may cast (`.to(bf16)`); scales keep their dtype and take only the device.
        scales = {id(buffer) for name, buffer in self._buffers.items() if name.endswith("_scale")}

        def guarded(tensor: Tensor) -> Tensor:
            out = fn(tensor)
            if id(tensor) in scales and out.dtype != tensor.dtype:
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


class _PackedMatrix(_Packed):
    """One packed weight `[out, in]`; subclasses say its `size`."""

    size: tuple[int, int]

    @property
    def packed(self) -> dict[str, Tensor]:
        """The tensors of the layout by name, shared, not copied."""
        out = {"weight": self._parameters["weight"], "weight_scale": self.weight_scale}
        if self.weight_zero is not None:
            out["weight_zero"] = self.weight_zero
        return out

    @property
    def stored(self) -> dict[str, Tensor | None]:
        """What `store` takes: the tensors of the layout and the bias."""
        return self.packed | ({"bias": self.bias} if "bias" in self._parameters else {})

    def store(self, tensors: dict[str, Tensor | None]) -> None:
        """Take other tensors of the same layout; the former ones are not written to."""
        at = self.weight.device
        self._store({name: t if t is None or t.device == at else t.to(at) for name, t in tensors.items()})
        if "bias" in self._parameters:
            self.bias = tensors["bias"]
        self.weights_version += 1

    def dequantize(self, tensors: dict[str, Tensor] | None = None) -> Tensor:
        """The weight that the codes (or those of `tensors`) stand for, fp32 [out, in]."""
        tensors = tensors or self.packed
        return dequantize(
            tensors["weight"], tensors["weight_scale"], tensors.get("weight_zero"), self.layout, *self.size
        )


class QuantLinear(_PackedMatrix, nn.Linear):
    """A linear over a packed weight, differentiable in its input.

    Args:
        packed: tensors of `layout.shapes(out_features, in_features)`.
        bias: [out_features] or None, kept as it is.
    Forward: x [..., in_features], any float dtype -> [..., out_features] of the same dtype. On CPUs
        activations are quantized on the fly as the layout says (`activations.quantize_activations`); on GPUs
        they are not, unless it says one scale a token.
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
        self.register_buffer("out_like", packed["weight"].new_empty(0, dtype=compute_dtype), persistent=False)

    @property
    def size(self) -> tuple[int, int]:
        """(out, in) of the weight."""
        return self.out_features, self.in_features

    @property
    def compute_dtype(self) -> torch.dtype:
        """What an adapter on top should compute in: the dtype of the model around it."""
        return self.out_like.dtype

    def forward(self, x: Tensor) -> Tensor:
        return qlinear(
            x,
            self._parameters["weight"],
            self.weight_scale,
            self.weight_zero,
            self.bias,
            self.layout,
            *self.size,
        )

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, {describe(self.layout)}"


class ScaledLinear(QuantLinear):
    """A QuantLinear whose inputs are multiplied by `input_scale` (fp32 [in]) first.

    AWQ and SmoothQuant leave it where nothing before the module can take the inverse of its columns' scale.
    """

    def __init__(self, *args, input_scale: Tensor, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.register_buffer("input_scale", input_scale)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float() * self.input_scale).to(x.dtype)

    def dequantize(self, tensors: dict[str, Tensor] | None = None) -> Tensor:
        """What the module multiplies its inputs by, fp32 [out, in]."""
        return super().dequantize(tensors) * self.input_scale


class _ShownAsInt8:
    """A packed linear that shows its codes as int8, for parents that cast inputs to any other dtype (T5)."""

    @property
    def weight(self) -> Tensor:
        if (codes := self._parameters.get("weight")) is None:
            raise AttributeError("weight")
        shown = codes.view(torch.int8)
        if not torch.compiler.is_compiling():
            # Read from a file already: transformers, which fills what is not, looks at this.
            shown._is_hf_initialized = getattr(codes, "_is_hf_initialized", False)
        return shown


class Int8Linear(_ShownAsInt8, QuantLinear):
    pass


class Int8ScaledLinear(_ShownAsInt8, ScaledLinear):
    pass


class QuantEmbedding(_PackedMatrix, nn.Embedding):
    """Look-ups in a packed weight `[num_embeddings, embedding_dim]`; shares its tensors with a tied head.

    Args:
        multiplier: what rows are multiplied by (Gemma, BART), or None.
        rounds_multiplier: the multiplier is rounded to the dtype of the rows first, as Gemma does.
    """

    # What PEFT's embedding layer reads of its base.
    max_norm, norm_type, scale_grad_by_freq, sparse = None, 2.0, False, False

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        layout: Layout,
        packed: dict[str, Tensor],
        padding_idx: int | None = None,
        compute_dtype: torch.dtype = torch.float32,
        multiplier: float | None = None,
        rounds_multiplier: bool = True,
    ) -> None:
        nn.Module.__init__(self)
        self.num_embeddings, self.embedding_dim, self.padding_idx = num_embeddings, embedding_dim, padding_idx
        self.layout, self.multiplier, self.rounds_multiplier = layout, multiplier, rounds_multiplier
        self._store(packed)
        self.register_buffer("out_like", packed["weight"].new_empty(0, dtype=compute_dtype), persistent=False)

    @property
    def size(self) -> tuple[int, int]:
        """(rows, columns) of the weight."""
        return self.num_embeddings, self.embedding_dim

    @property
    def embed_scale(self) -> Tensor | float:
        """The multiplier under the name that the original module has it."""
        if self.multiplier is None:
            raise AttributeError("embed_scale")
        return torch.tensor(self.multiplier) if self.rounds_multiplier else self.multiplier

    def forward(self, ids: Tensor) -> Tensor:
        if not ids.numel():
            return self.out_like.new_empty(*ids.shape, self.embedding_dim)
        if ids.device.type == "cpu" and not torch.compiler.is_compiling():
            low, high = ids.aminmax()
            if low < 0 or high >= self.num_embeddings:
                raise IndexError(
                    f"token id {int(low if low < 0 else high)} is not in 0 .. {self.num_embeddings - 1}"
                )
        rows = gather_rows(
            self.weight, self.weight_scale, self.weight_zero, self.layout, self.embedding_dim, ids
        ).to(self.out_like.dtype)
        if self.multiplier is None:
            return rows
        return rows * (self.embed_scale.to(rows.dtype) if self.rounds_multiplier else self.multiplier)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, {describe(self.layout)}"


class QuantExperts(_Packed, nn.Module):
    """Fused experts (3-D `gate_up_proj`, `down_proj`) with every expert's matrices packed.

    Stored per projection: `<name>`, `<name>_scale` and, if asymmetric, `<name>_zero`, each [E, ...] of what
    `Layout.shapes` says of one matrix; biases as they were. The gate function is the original class's own.
    """

    PROJECTIONS = ("gate_up_proj", "down_proj")

    def __init__(self, original: nn.Module, layout: Layout, packed: dict[str, dict[str, Tensor]]) -> None:
        nn.Module.__init__(self)
        tensors = {*original._parameters, *original._buffers}
        wrapped = {"forward", "_hf_hook", "_old_forward"}  # by accelerate, around the original
        for key, value in vars(original).items():
            if key not in vars(self) and key not in tensors | wrapped:
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
        bias = getattr(self, f"{name}_bias", None)
        return qlinear(
            x,
            *self._matrix(name, expert),
            None if bias is None else bias[expert],
            self.layout,
            *self.sizes[name],
        )

    def dequantize(self, name: str) -> Tensor:
        """All experts' matrices of one projection, fp32 [E, out, in]."""
        experts = (self._matrix(name, e) for e in range(self.num_experts))
        return torch.stack([dequantize(*tensors, self.layout, *self.sizes[name]) for tensors in experts])

    def _matrix(self, name: str, expert: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Codes, scales and zeros of one expert's matrix."""
        zero = getattr(self, f"{name}_zero")
        return (
            getattr(self, name)[expert],
            getattr(self, f"{name}_scale")[expert],
            None if zero is None else zero[expert],
        )

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states [T, hidden], top_k_index and top_k_weights [T, k] -> [T, hidden]."""
        out = torch.zeros_like(hidden_states)
        for expert in top_k_index.unique().tolist():
            if expert >= self.num_experts:  # expert parallelism marks foreign experts so
                continue
            tokens, slot = (top_k_index == expert).nonzero(as_tuple=True)
            gated = self.gate_class._apply_gate(
                self, self.project("gate_up_proj", expert, hidden_states[tokens])
            )
            y = self.project("down_proj", expert, gated) * top_k_weights[tokens, slot, None]
            out.index_add_(0, tokens, y.to(out.dtype))
        return out

    def extra_repr(self) -> str:
        return f"{self.num_experts} experts, {self.sizes}, {describe(self.layout)}"


def describe(layout: Layout) -> str:
    """ "int4 g64 asymmetric", for tables."""
    group = "row" if layout.group == -1 else f"g{layout.group}"
    if layout.code != "int":
        return f"{layout.code} {group}"
    if layout.act == "token":
        return f"int8 {group} with {'static' if layout.static else 'dynamic'} int8 activations"
    if layout.has_minimum:
        return f"int{layout.bits} {group} with minimums"
    return f"int{layout.bits} {group} {'symmetric' if layout.symmetric else 'asymmetric'}"


def matrix_size(experts: nn.Module, name: str) -> tuple[int, int]:
    """(out, in) of one expert's matrix in fused experts."""
    _, rows, columns = getattr(experts, name).shape
    return (columns, rows) if experts.is_transposed else (rows, columns)


def is_packed(module: nn.Module) -> bool:
    return isinstance(module, _Packed)


def is_fused_experts(module: nn.Module) -> bool:
    """Whether a module is experts with 3-D parameters, gate and up in one, as transformers fuses them."""
    return (
        all(
            isinstance(p := module._parameters.get(name), nn.Parameter)
            and p.dim() == 3
            and p.is_floating_point()
            for name in QuantExperts.PROJECTIONS
        )
        and hasattr(module, "is_transposed")
        and hasattr(module, "_apply_gate")
        and getattr(module, "has_gate", True)
        and not getattr(module, "has_post_expert_norm", False)
    )


def is_conv1d(module: nn.Module) -> bool:
    """transformers' Conv1D: a linear with its weight stored `[in, out]`."""
    return hasattr(module, "nf") and hasattr(module, "nx") and getattr(module, "weight", None) is not None


def size_of(module: nn.Module) -> tuple[int, int]:
    """(out, in) of the matrix of a linear, Conv1D or embedding, packed or not."""
    if isinstance(module, nn.Embedding):
        return module.num_embeddings, module.embedding_dim
    return (module.nf, module.nx) if is_conv1d(module) else (module.out_features, module.in_features)


def show_as_int8(module: nn.Module) -> nn.Module:
    """The module as a parent that spares int8 weights must see it."""
    kinds = {QuantLinear: Int8Linear, ScaledLinear: Int8ScaledLinear}
    if type(module) in kinds:
        module.__class__ = kinds[type(module)]
    return module


def codes_of(module: QuantLinear | QuantEmbedding) -> Tensor:
    """Unsigned codes uint8 [N, K] of a packed module (8 bits: signed code + 128)."""
    return unpack_codes(module.packed["weight"], module.layout, *module.size)


compat.extend_peft()
