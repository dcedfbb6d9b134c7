"""Reading a saved folder: the quantizer that transformers calls, and checks before a model is returned."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer

from hfaccel import compat
from hfaccel.checkpoint import (
    IMPORT_FIRST,
    METHOD,
    WEIGHTS_KEY,
    Packed,
    SavedConfig,
    describe,
    leave_bias,
    packed_kind,
    packed_sizes,
    size_text,
    stored_tensors,
)
from hfaccel.errors import CheckpointError

register_quantization_config(METHOD)(SavedConfig)

# Set while tensors come from another format's file (`formats`): what checks them against the model, which is
# as its class made it, on the meta device. Where it has `converts`, names are those of the class's files,
# which transformers translates. None: they come from a folder of ours.
FOREIGN: ContextVar[Callable[[nn.Module], None] | None] = ContextVar("hfaccel_foreign", default=None)


@register_quantizer(METHOD)
class Quantizer(HfQuantizer):
    """Puts packed modules in before weights are read, checks the files, makes the result a patched model."""

    requires_calibration = True  # a record only: `patch` is what quantizes

    def __init__(self, quantization_config: SavedConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._loading: Loading | None = None

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True  # with adapters: packed layers are differentiable in their input

    def update_attn_implementation(self, config: Any) -> Any:
        """Before files are looked for: they have the usual names, not that of the note."""
        if getattr(config, WEIGHTS_KEY, None) == IMPORT_FIRST:
            delattr(config, WEIGHTS_KEY)
        return config

    update_tp_plan = update_attn_implementation  # transformers 5.17 calls only this one

    def update_weight_conversions(self, weight_conversions: list, *args: Any) -> list:
        return weight_conversions if getattr(FOREIGN.get(), "converts", False) else []

    def get_state_dict_and_metadata(self, model: nn.Module) -> tuple[dict[str, Tensor] | None, dict]:
        if getattr(model, "_hf_peft_config_loaded", False):  # transformers saves the adapter alone then
            return None, {}
        self.quantization_config = model.config.quantization_config = describe(model, model._hfaccel)
        return {name: tensor.detach() for name, tensor in stored_tensors(model)[0].items()}, {}

    def _process_model_before_weight_loading(self, model: nn.Module, **kwargs: Any) -> None:
        self._loading = Loading(model, self.quantization_config)
        self._loading.before(kwargs.get("checkpoint_files"))

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        loading, self._loading = self._loading, None
        loading.after()
        return model


@dataclass
class Loading:
    """One run of `from_pretrained` over a model whose parameters are on the meta device."""

    model: nn.Module
    record: SavedConfig
    originals: dict[str, tuple[str, int]] = field(default_factory=dict)  # name -> class and bytes before
    doubles: list[tuple[nn.Module, str, nn.Module]] = field(default_factory=list)
    buffers: list[tuple[str, str]] = field(default_factory=list)

    # Before weights: modules, ties, files ------------------------------------------------------------------

    def before(self, files: list[str] | None) -> None:
        check = FOREIGN.get()
        if check is not None:
            check(self.model)
        elif not files:
            raise CheckpointError(
                "state_dict=: a packed model is loaded from its folder, or by load_state_dict"
            )
        elif not all(file.endswith(".safetensors") for file in files):
            raise CheckpointError(f"{files[0]}: packed models are safetensors files")
        rename = self._names()

        def renamed(entries: dict[str, Any]) -> dict[str, Any]:
            return {new: value for name, value in entries.items() if (new := rename(name)) is not None}

        tied = {name: rename(source) for name, source in renamed(self.record.tied).items()}
        dtypes, packed = renamed(self.record.dtypes), renamed(self.record.packed)
        # A second name that somebody gave a module is no part of the class, and nothing is lost without it.
        known = {name for name, _ in self.model.named_modules(remove_duplicate=False)}
        extra = {name for name in packed if name not in known and f"{name}.weight" in tied}
        if self.model.dtype == self.record.dtype:  # loaded as it was saved
            self._set_dtypes({n: d for n, d in dtypes.items() if n.rpartition(".")[0] not in extra})
        for name, module in packed.items():
            if name not in extra:
                self._swap(name, module)
        expected = self._expected(dtypes)
        tied = {target: source for target, source in tied.items() if {target, source} <= set(expected)}
        if check is None:
            check_files(files, {n: want for n, want in expected.items() if n not in tied}, rename)
        self._tie(tied)

    def _names(self) -> Callable[[str], str | None]:
        """Record and file name -> name in this model, None if it lies outside.

        They differ where the base model is loaded out of a model with a head.
        """
        prefix = f"{self.model.base_model_prefix}."
        inner = [name for name in self.record.packed if name.startswith(prefix)]
        if inner and not hasattr(self.model, self.model.base_model_prefix):
            return lambda name: name[len(prefix) :] if name.startswith(prefix) else None
        return lambda name: name

    def _set_dtypes(self, dtypes: dict[str, torch.dtype]) -> None:
        for name, dtype in dtypes.items():
            owner, _, leaf = name.rpartition(".")
            module = _module(self.model, owner, name)
            parameter = module._parameters.get(leaf)
            if parameter is not None and parameter.dtype != dtype:
                new = nn.Parameter(parameter.to(dtype), requires_grad=parameter.requires_grad)
                module.register_parameter(leaf, new)
            elif leaf in module._buffers:
                module._buffers[leaf] = module._buffers[leaf].to(dtype)

    def _swap(self, name: str, packed: Packed) -> None:
        from hfaccel.quant.linear import is_fused_experts, is_packed, show_as_int8
        from hfaccel.quant.packing import skeleton, unpackable
        from hfaccel.swap import tensor_bytes

        original = _module(self.model, name, name)
        if is_packed(original):  # one module under two names, swapped under the first
            return
        kind = "experts" if is_fused_experts(original) else "linear"
        kind = "embedding" if isinstance(original, nn.Embedding) else kind
        scaled = kind == "linear" and packed.kind == "scaled"
        kind = "scaled" if scaled else kind
        found = unpackable(original) or f"{kind} {size_text(packed_sizes(original))}"
        if found != (wanted := f"{packed.kind} {size_text(packed.sizes)}"):
            raise CheckpointError(f"{name}: the record says {wanted}, the architecture says {found}")
        new = skeleton(original, packed.layout, scaled=scaled)
        new._is_hf_initialized = True  # nothing in it is to be filled at random, also not what stays on disk
        self.originals[name] = type(original).__name__, tensor_bytes(original)
        for parent in self.model.modules():
            for key, child in parent._modules.items():
                if child is original:
                    if compat.casts_to_weight(parent, key) == "int8":
                        show_as_int8(new)
                    setattr(parent, key, new)

    def _expected(self, dtypes: dict[str, torch.dtype]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of every tensor that the model has."""
        out = {}
        for name, tensor in self.model.state_dict().items():
            owner, _, leaf = name.rpartition(".")
            dtype = tensor.dtype
            own = packed_kind(self.model.get_submodule(owner)) and (
                not dtype.is_floating_point or "_scale" in leaf
            )
            if dtype.is_floating_point and not own:
                dtype = dtypes.get(name, self.record.dtype)
            out[name] = tuple(tensor.shape), dtype
        ignored = getattr(self.model, "_keys_to_ignore_on_save", None) or ()
        return {name: want for name, want in out.items() if name not in ignored}

    def _tie(self, tied: dict[str, str]) -> None:
        """Let transformers tie parameters; it knows no tied buffers, and would fill them from nowhere."""
        ties: dict[str, str] = {}
        for target, source in tied.items():
            owner, _, leaf = target.rpartition(".")
            module = self.model.get_submodule(owner)
            if module is self.model.get_submodule(source.rpartition(".")[0]):
                self._set_aside(owner)
            elif leaf in module._parameters:
                ties[target] = source
            else:
                module._non_persistent_buffers_set.add(leaf)
                self.buffers.append((target, source))
        self.model.all_tied_weights_keys = ties
        self.model._adjust_bias = leave_bias

    def _set_aside(self, name: str) -> None:
        """Hide the second name of one module while weights are read: its tensors come by the first."""
        parent, _, key = name.rpartition(".")
        parent = self.model.get_submodule(parent)
        if not any(held is parent and at == key for held, at, _ in self.doubles):
            self.doubles.append((parent, key, getattr(parent, key)))
            setattr(parent, key, nn.Module())

    # After weights: ties, state ----------------------------------------------------------------------------

    def after(self) -> None:
        from hfaccel.quant.linear import is_packed
        from hfaccel.sites import check_materialized
        from hfaccel.state import State
        from hfaccel.swap import settle

        for parent, key, module in self.doubles:
            setattr(parent, key, module)
        for target, source in self.buffers:
            owner, _, leaf = target.rpartition(".")
            module = self.model.get_submodule(owner)
            setattr(module, leaf, self.model.get_buffer(source))
            module._non_persistent_buffers_set.discard(leaf)
        for module in self.model.modules():
            if is_packed(module):
                for name, buffer in module._buffers.items():
                    if name.endswith("_scale"):  # fp16 models keep some modules in fp32, with what is in them
                        dtype = torch.float32 if name == "input_scale" else module.layout.dtype
                        module._buffers[name] = buffer.to(dtype)
        check_materialized(self.model)
        state = State(self.record.config, self._records(), origin="loaded")
        # A loaded model has no originals, so nothing is to be undone.
        settle(self.model, list(state.config.transforms), state, lambda undo: None)
        self.model._hfaccel = state

    def _records(self) -> list:
        from hfaccel.swap import tensor_bytes
        from hfaccel.transform import Record

        out, seen = [], set()
        rename = self._names()
        # Of a tied pair the head counts, as in a patch.
        for name, saved in sorted(self.record.packed.items(), key=lambda entry: entry[1].kind == "embedding"):
            if (name := rename(name)) not in self.originals:
                continue
            module, (kind, before) = self.model.get_submodule(name), self.originals[name]
            weight = next(iter(module.parameters(recurse=False)))
            twin, _ = id(weight) in seen, seen.add(id(weight))
            sizes = (0, 0) if twin else (before, tensor_bytes(module))
            out.append(Record(name, kind, saved.step, *sizes, detail=module.extra_repr()))
        return out


def _module(model: nn.Module, owner: str, name: str) -> nn.Module:
    try:
        return model.get_submodule(owner)
    except AttributeError:
        raise CheckpointError(f"{name}: the record names what {type(model).__name__} does not have") from None


_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def check_files(files: list[str], expected: dict[str, tuple], rename: Callable[[str], str | None]) -> None:
    """Every expected tensor once, with its shape and dtype, and nothing else.

    Raises: CheckpointError naming the tensor and the file.
    """
    from safetensors import SafetensorError, safe_open

    found: dict[str, str] = {}
    for file in files:
        short = Path(file).name
        if not Path(file).is_file():
            raise CheckpointError(f"{file} is missing")
        try:
            with safe_open(file, "pt") as opened:
                headers = {key: opened.get_slice(key) for key in opened.keys()}
                headers = {key: (tuple(s.get_shape()), s.get_dtype()) for key, s in headers.items()}
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(f"{file} is truncated or damaged: {error}") from error
        for key, (shape, dtype) in headers.items():
            name = rename(key)
            if name is None:
                continue
            if name not in expected:
                raise CheckpointError(f"{key} in {short} is not a tensor of the record")
            if name in found:
                raise CheckpointError(f"{key} is both in {found[name]} and in {short}")
            found[name] = short
            want_shape, want = expected[name]
            if shape != want_shape or _DTYPES.get(dtype) != want:
                raise CheckpointError(
                    f"{key} in {short} is {dtype} {list(shape)}, the record says {want} {list(want_shape)}"
                )
    if missing := [name for name in expected if name not in found]:
        others = f" and {len(missing) - 1} other tensors are" if missing[1:] else " is"
        raise CheckpointError(f"{missing[0]}{others} missing from {Path(files[0]).parent}")
