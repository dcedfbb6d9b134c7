"""PEFT's LoRA layers over packed weights: the forward is PEFT's own, merging rounds.

    merge      codes' = round(dequantize(codes) + sum of the deltas) on the layout of the codes, round to
               nearest; the error of a weight is at most half a step of its new group
    unmerge    the former codes, bit for bit

All adapters merged at a time are rounded once, from the codes as they were before the first of them. Tensors
are replaced, never written to: a tied embedding, a copy of the model and the originals that `unpatch` gives
back do not see a merge. Adapters that read the float weight below (DoRA, PiSSA, ...) are refused by name.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from peft.tuners.lora.layer import Embedding, Linear
from peft.tuners.tuners_utils import BaseTunerLayer, check_adapters_to_merge
from torch import Tensor, nn

from hfaccel import compat
from hfaccel.errors import PatchError
from hfaccel.quant.linear import QuantEmbedding, QuantLinear, ScaledLinear, describe, is_packed
from hfaccel.quant.packing import pack_matrix
from hfaccel.quant.rtn import round_to_nearest

_WEIGHT_READERS = ("DoraLinearVariant", "DoraEmbeddingVariant", "KasaLinearVariant")
KEPT = 0.5  # share of an adapter's change below which a merge warns
# Ways to start an adapter without a look at the weight below it.
_FREE_INITS = (True, False, None, "gaussian", "eva")


class _Merging:
    """The merge of both layer classes; `_deltas` names the attribute that holds an adapter's matrices."""

    _before: dict[str, Tensor | None] | None = None  # the base's tensors while something is merged

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Round the active (or named) adapters into the codes.

        Raises: PatchError if the merged weight is not finite or fits no scale; nothing has changed then.
        """
        names = [
            name for name in check_adapters_to_merge(self, adapter_names) or () if name in self._matrices
        ]
        if not names:
            return
        if special := [name for name in names if name in self.lora_variant]:
            raise PatchError(
                f"adapter {special[0]!r} is a {type(self.lora_variant[special[0]]).__name__}: it cannot "
                "be merged into codes"
            )
        base = self.get_base_layer()
        if base.layout.has_minimum or base.layout.scale_dtype == "super":
            raise PatchError(
                f"adapter {names[0]!r} cannot be merged into {describe(base.layout)}, a grid of GGUF files "
                "that is read, not rounded to; keep it beside, or load the file with a recipe and merge then"
            )
        before = self._before or base.stored
        former, bias = base.dequantize(before), before.get("bias")
        merged = former.clone()
        for name in [*(name for name in self.merged_adapters if name in self._matrices), *names]:
            merged += self._delta(name).to(merged)
            if self.lora_bias.get(name):
                if bias is None:
                    raise PatchError(f"adapter {name!r} has a bias, the layer it is merged into has none")
                bias = bias + (self.lora_B[name].bias.detach() * self.scaling[name]).to(bias)
        if not torch.isfinite(merged).all() or (bias is not None and not torch.isfinite(bias).all()):
            raise PatchError(
                f"merging {', '.join(names)}: NaN or infinite values; the adapter seems to be broken"
            )
        codes = merged / base.input_scale if isinstance(base, ScaledLinear) else merged
        packed = pack_matrix(codes, base.layout, round_to_nearest)
        if bias is not None and bias is not before["bias"]:
            packed["bias"] = nn.Parameter(bias.detach(), requires_grad=before["bias"].requires_grad)
        base.store(before | packed)
        _warn_of_loss(merged - former, base.dequantize(base.stored) - former)
        self._before = before
        self.merged_adapters.extend(names)
        base.merged_adapters = (*base.merged_adapters, *names)

    def unmerge(self) -> None:
        """Put the codes back that the first merge found."""
        if not self.merged:
            warnings.warn("Already unmerged. Nothing to do.", stacklevel=2)
            return
        if self._before is not None:
            base = self.get_base_layer()
            base.store(self._before)
            base.merged_adapters = base.merged_adapters[: -len(self.merged_adapters)]
        self._before = None
        self.merged_adapters.clear()

    def _delta(self, name: str) -> Tensor:
        """An adapter's contribution to the weight, [rows, columns] of the packed matrix."""
        delta = self.get_delta_weight(name).detach()
        return delta.T if self.fan_in_fan_out else delta  # the base was a Conv1D, whose weight lay transposed

    def resolve_lora_variant(self, *, config, **kwargs):
        refuse(config)
        return super().resolve_lora_variant(config=config, **kwargs)


def _warn_of_loss(wanted: Tensor, done: Tensor) -> None:
    """Say that a merge was rounded away: <done, wanted> / <wanted, wanted> is what is left of it."""
    kept, whole = (done * wanted).sum(dtype=torch.float64), (wanted * wanted).sum(dtype=torch.float64)
    if kept < KEPT * whole:
        warnings.warn(
            "merging into codes: less than half of the change to a matrix survives rounding, the steps of "
            "the codes are too coarse for it; keep the adapter beside them, or merge before patching",
            stacklevel=3,
        )


class PackedLinear(_Merging, Linear):
    """`peft.tuners.lora.Linear` over a QuantLinear."""

    @property
    def _matrices(self) -> nn.ModuleDict:
        return self.lora_A


class PackedEmbedding(_Merging, Embedding):
    """`peft.tuners.lora.Embedding` over a QuantEmbedding."""

    @property
    def _matrices(self) -> nn.ParameterDict:
        return self.lora_embedding_A

    def _delta(self, name: str) -> Tensor:
        return self.get_delta_weight(name).detach()


_OURS = {Linear: PackedLinear, Embedding: PackedEmbedding}


def dispatch(
    target: nn.Module, adapter_name: str, config: Any, parameter_name: str | None = None, **kwargs: Any
):
    """PEFT's question which layer class takes a target with a packed base."""
    base = target.get_base_layer() if isinstance(target, BaseTunerLayer) else target
    if parameter_name is not None or not isinstance(base, QuantLinear | QuantEmbedding):
        raise PatchError(
            f"LoRA on the packed parameter {parameter_name or 'of ' + type(base).__name__!r}: fused experts "
            "have adapters only where they are not quantized; patch with ignore=('**.experts.**',)"
        )
    refuse(config)
    if config.fan_in_fan_out:
        warnings.warn("fan_in_fan_out is set to False: a quantized layer is [out, in].", stacklevel=2)
        config.fan_in_fan_out = False
    layer = PackedEmbedding if isinstance(base, QuantEmbedding) else PackedLinear
    return layer(target, adapter_name, config=config, **kwargs)


def refuse(config: Any) -> None:
    """Raise PatchError for an adapter whose start or forward needs the float weight."""
    init = config.init_lora_weights
    for key in ("use_dora", "kasa_config"):
        if getattr(config, key, None):
            raise PatchError(
                f"{key}: such an adapter reads the float weights, which a quantized layer does not have"
            )
    if init not in _FREE_INITS:
        raise PatchError(
            f"init_lora_weights={init!r} needs the float weights, which a quantized layer does not have; "
            f"known are {', '.join(map(repr, _FREE_INITS))}"
        )


def check_saved(model: nn.Module, config: Any) -> None:
    """Refuse `modules_to_save` that are packed: codes have no gradient. Raises: PatchError."""
    for wanted in config.modules_to_save or ():
        for name, module in model.named_modules():
            if name.endswith(wanted) and is_packed(compat.base_layer(module)):
                raise PatchError(
                    f"modules_to_save={wanted!r}: {name} is quantized, and codes cannot be trained in full; "
                    "name it in target_modules for LoRA, or patch so that it stays in float "
                    f"(ignore=({name!r},); for the head and what is tied to it: head16)"
                )


def check(name: str, wrapper: nn.Module) -> None:
    """Refuse to pack what lies under an adapter that needs it in float. Raises: PatchError."""
    if not isinstance(wrapper, BaseTunerLayer):
        return
    if type(wrapper) not in (*_OURS, *_OURS.values()):
        raise PatchError(
            f"{name}: {type(wrapper).__module__}.{type(wrapper).__name__} needs the float weight below it; "
            f"ignore it or remove the adapter"
        )
    if wrapper.merged_adapters:
        raise PatchError(f"{name}: adapter {wrapper.merged_adapters[0]!r} is merged into it; unmerge first")
    for adapter, variant in wrapper.lora_variant.items():
        if type(variant).__name__ in _WEIGHT_READERS:
            raise PatchError(
                f"{name}: adapter {adapter!r} is a {type(variant).__name__}, "
                "which needs the float weight below it"
            )


def fit(wrapper: nn.Module, packed: bool) -> None:
    """Give a LoRA layer the class that its base needs, packed or float."""
    for theirs, ours in _OURS.items():
        if type(wrapper) in (theirs, ours):
            wrapper.__class__ = ours if packed else theirs
