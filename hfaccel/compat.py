"""The only file that touches private API of transformers, accelerate and peft.

`self_test`, a row of `hfaccel doctor`, says what of it has moved.
"""

from __future__ import annotations

import copy
import dis
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path

from torch import nn

from hfaccel.errors import PatchError
from hfaccel.registration import after_import


def private_config(root: nn.Module, on_undo: Callable[[Callable[[nn.Module], None]], None]) -> None:
    """Give the model, its wrapper and every submodule that refers to its config, a copy of their own.

    Two models built from one config object share it, and would change together.
    """
    memo: dict[int, object] = {}
    copies: dict[int, tuple[object, object]] = {}  # id of a copy -> the copy and what it is a copy of

    def undo(root: nn.Module) -> None:
        for module in root.modules():
            if (pair := copies.get(id(vars(module).get("config")))) is not None:
                module.config = pair[1]

    on_undo(undo)
    for module in root.modules():
        config = vars(module).get("config")
        if config is None or not hasattr(config, "to_dict"):
            continue
        if id(config) not in memo:
            # One memo: a text config inside a composite config stays the one its submodules hold.
            copy.deepcopy(config, memo)
        mine = memo[id(config)]
        copies[id(mine)] = (mine, config)
        module.config = mine


def checkpoint_file(model: nn.Module, place: str, name: str) -> str | None:
    """Path of file `name` in the folder or cached hub id `place`; None where it is not on this disk."""
    if not place:
        return None
    if os.path.isdir(place):
        path = os.path.join(place, name)
        return path if os.path.isfile(path) else None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(place, name, revision=getattr(model.config, "_commit_hash", None))
    except HFValidationError:  # a name that is no hub id
        return None
    return found if isinstance(found, str) else None


def weight_files(path: str, hub: dict) -> list[str]:
    """The safetensors files of a folder or hub id, on this disk. Raises: PatchError if there are none."""
    from transformers.utils.hub import cached_file

    known = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")
    given = {key: hub[key] for key in known if key in hub}

    def find(name: str) -> str | None:
        return cached_file(
            path,
            name,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
            **given,
        )

    if (single := find("model.safetensors")) is not None:
        return [single]
    if (index := find("model.safetensors.index.json")) is not None:
        names = sorted(set(json.loads(Path(index).read_text("utf-8"))["weight_map"].values()))
        files = [find(Path(name).name) for name in names]
        if None in files:
            raise PatchError(f"{path}: {names[files.index(None)]} is missing")
        return files
    others = sorted(Path(path).glob("*.safetensors")) if os.path.isdir(path) else []
    if len(others) != 1:
        raise PatchError(f"{path} has no model.safetensors")
    return [str(others[0])]


def check_unquantized(model: nn.Module) -> None:
    """Refuse a model that another method has quantized. One from GGUF says it is, but comes in float."""
    method = getattr(model, "quantization_method", None)
    method = getattr(method, "value", method)
    if method not in (None, "gguf"):
        raise PatchError(f"{type(model).__name__} is quantized by {method!r} already; load its float weights")


# What a model says of itself ------------------------------------------------------------------------------


def attention_name(config) -> str | None:
    """The attention implementation that a model of this config runs."""
    return config._attn_implementation


def can_choose_attention(model: nn.Module) -> bool:
    """Whether all of the model's attention goes through transformers' interface."""
    return model._can_set_attn_implementation()


def has_default_cache(model: nn.Module) -> bool:
    """Whether the model's cache is keys and values by layer, not one of its own."""
    return model._supports_default_dynamic_cache()


def is_stateful(model: nn.Module) -> bool:
    """Whether the model keeps state that cannot be taken back to an earlier token."""
    return bool(model._is_stateful)


# Weights that accelerate keeps elsewhere ------------------------------------------------------------------


def _hooks(module: nn.Module) -> tuple:
    hook = getattr(module, "_hf_hook", None)
    return tuple(getattr(hook, "hooks", () if hook is None else (hook,)))


def is_offloaded(module: nn.Module) -> bool:
    """Whether accelerate keeps this module's weights elsewhere and brings them in for each forward."""
    return any(getattr(hook, "offload", False) for hook in _hooks(module))


def check_offload(model: nn.Module) -> None:
    """Refuse an offload that fetches a whole subtree's weights by name: it would undo what a patch put in."""
    for name, module in model.named_modules():
        if is_offloaded(module) and any(getattr(hook, "place_submodules", False) for hook in _hooks(module)):
            if next(module.children(), None) is not None:
                raise PatchError(
                    f"{name or type(model).__name__}: its weights are offloaded as one piece "
                    "(preload_module_classes); load the model without that option, or without offloading"
                )


def _offload_index(module: nn.Module) -> tuple[dict[str, dict], str]:
    """Where accelerate finds a module's offloaded weights: name -> place in files, and the name's prefix."""
    for hook in _hooks(module):
        weights = getattr(hook, "weights_map", None)
        if index := getattr(getattr(weights, "dataset", None), "index", None):
            return index, weights.prefix
    return {}, ""


def offload_files(module: nn.Module) -> set[str]:
    """The files from which accelerate reads the weights of this module."""
    index, prefix = _offload_index(module)
    return {
        entry["safetensors_file"]
        for name, entry in index.items()
        if name.startswith(prefix) and "weight_name" in entry
    }


def offload_place(module: nn.Module, key: str) -> tuple[str, str] | None:
    """File of a module's offloaded tensor and its name there, which tied tensors share."""
    index, prefix = _offload_index(module)
    entry = index.get(f"{prefix}{key}", {})
    return (entry["safetensors_file"], entry["weight_name"]) if "weight_name" in entry else None


def retie_offloaded(model: nn.Module) -> None:
    """Give tied offloaded weights one placeholder again, where a forward left each with one of its own."""
    seen: dict[tuple[str, str], nn.Parameter] = {}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta and (place := offload_place(module, key)):
                module._parameters[key] = seen.setdefault(place, parameter)


@contextmanager
def materialized(module: nn.Module) -> Iterator[None]:
    """An offloaded module's weights in memory inside the block; anything else as it is."""
    if not is_offloaded(module):
        yield
        return
    placeholders = dict(module._parameters)
    module._hf_hook.pre_forward(module)
    try:
        yield
    finally:
        module._hf_hook.post_forward(module, None)
        module._parameters.update(placeholders)  # the hook makes new ones, which would untie tied weights


def move_inputs_as(original: nn.Module, module: nn.Module) -> None:
    """Let `module` take its inputs to where accelerate ran `original`; its weights stay where they are."""
    for hook in _hooks(original):
        if getattr(hook, "execution_device", None) is not None:
            from accelerate.hooks import AlignDevicesHook, add_hook_to_module

            add_hook_to_module(
                module,
                AlignDevicesHook(
                    execution_device=hook.execution_device,
                    io_same_device=hook.io_same_device,
                    skip_keys=hook.skip_keys,
                ),
            )


# What a module's surroundings do with its weight ----------------------------------------------------------


def casts_to_weight(parent: nn.Module, attribute: str) -> str:
    """Whether the parent's code casts what it passes in to `self.<attribute>.weight.dtype`, as T5 does.

    Such code takes codes for weights: its activations would become integers. Returns: "" if it does not or
    knows of uint8, "int8" if it spares weights of that dtype, else "always".
    """
    return _casts(type(parent)).get(attribute, "")


@cache
def _casts(cls: type) -> dict[str, str]:
    found = {}
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] == "torch":
            break
        for function in vars(base).values():
            code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
            chain: list[str] = []
            for step in (
                dis.get_instructions(code) if code is not None and "uint8" not in code.co_names else ()
            ):
                chain = [*chain, step.argval] if step.opname == "LOAD_ATTR" else []
                if chain[-2:] == ["weight", "dtype"] and len(chain) > 2:
                    found[chain[-3]] = "int8" if "int8" in code.co_names else "always"
    return found


def tell_tying(model: nn.Module) -> None:
    """Make the config say whether head and embedding share a weight; it is the model's own."""
    retie_offloaded(model)
    weights = []
    for end in ("input", "output"):
        module = getattr(model, f"get_{end}_embeddings", lambda: None)()
        while module is not None and (inner := set(WRAPPED) & module._modules.keys()):
            module = module._modules[inner.pop()]
        weights.append(getattr(module, "weight", None))
    if weights[0] is None or weights[1] is None:
        return
    for config in {id(c): c for c in (model.config, model.config.get_text_config())}.values():
        if hasattr(config, "tie_word_embeddings"):
            config.tie_word_embeddings = weights[0] is weights[1]


# PEFT -----------------------------------------------------------------------------------------------------

WRAPPED = ("base_layer", "original_module")  # under which a wrapper of PEFT's holds what it wraps


def plain_name(name: str) -> str:
    """A dotted name without the wrappers that an adapter put around layers."""
    return ".".join(part for part in name.split(".") if part not in WRAPPED)


def base_layer(module: nn.Module) -> nn.Module:
    """The layer inside PEFT's wrapper, or the module itself."""
    while "base_layer" in module._modules:
        module = module._modules["base_layer"]
    return module


def is_adapter_part(name: str) -> bool:
    """Whether a dotted name leads into what PEFT added (an adapter's own matrices), not into the model."""
    parts = name.split(".")
    return any(part.startswith("lora_") or part in ("modules_to_save", "original_module") for part in parts)


def extend_peft() -> None:
    """Let PEFT make LoRA layers that merge into packed weights; now, or when the user imports PEFT.

    PEFT's own LoRA layer would add a merged adapter to the codes. Unpacked models keep that layer. What a
    config wants trained in full is refused by name where it is packed, before a layer is wrapped.
    """
    after_import("peft.tuners.lora.model", _teach)


def _teach(lora_model) -> None:
    default = lora_model.dispatch_default
    if getattr(default, "_hfaccel", False):
        return

    def dispatch_default(target, adapter_name, config, **kwargs):
        from hfaccel.quant.linear import is_packed

        if is_packed(base_layer(target)):
            return import_module("hfaccel.lora.packed").dispatch(target, adapter_name, config, **kwargs)
        return default(target, adapter_name, config, **kwargs)

    check = lora_model.LoraModel._check_new_adapter_config

    def check_new_adapter_config(self, config):
        check(self, config)
        import_module("hfaccel.lora.packed").check_saved(self.model, config)

    dispatch_default._hfaccel = True
    lora_model.dispatch_default = dispatch_default
    lora_model.LoraModel._check_new_adapter_config = check_new_adapter_config


def fit_wrapper(wrapper: nn.Module, packed: bool) -> None:
    """Give a LoRA layer the merge that its base needs: a packed one ours, a float one PEFT's."""
    if _is_peft(wrapper):
        import_module("hfaccel.lora.packed").fit(wrapper, packed)


def check_wrapper(name: str, wrapper: nn.Module) -> None:
    """Refuse adapters that read the float weight below them. Raises: PatchError naming adapter and module."""
    if _is_peft(wrapper):
        import_module("hfaccel.lora.packed").check(name, wrapper)


def merged_adapters(model: nn.Module) -> list[str]:
    """Names of modules into which PEFT has merged an adapter that it can take out again."""
    return [
        name
        for name, module in model.named_modules()
        if _is_peft(module) and getattr(module, "merged_adapters", ())
    ]


def _is_peft(module: nn.Module) -> bool:
    return "base_layer" in module._modules and "peft" in sys.modules


_PRIVATE = {  # where it is -> its names
    "transformers.modeling_utils:PreTrainedModel": (
        "tie_weights",
        "get_output_embeddings",
        "set_attn_implementation",
        "_can_set_attn_implementation",
        "_is_stateful",
    ),
    "transformers.configuration_utils:PreTrainedConfig": ("_attn_implementation",),
    # Methods that `generate` calls on the model, and ours in front of its class answer.
    "transformers.generation.utils:GenerationMixin": (
        "_supports_default_dynamic_cache",
        "_validate_generation_mode",
        "_prepare_model_inputs",
        "_prepare_cache_for_generation",
        "_sample",
        "_beam_search",
        "_assisted_decoding",
    ),
    "accelerate.hooks:AlignDevicesHook": ("pre_forward", "post_forward"),
    "peft.tuners.lora.model": ("dispatch_default",),
    "peft.tuners.lora.model:LoraModel": ("_check_new_adapter_config",),
    "peft.tuners.lora.layer:Linear": ("merge", "unmerge", "get_delta_weight", "resolve_lora_variant"),
}
_ARGUMENTS = {  # function -> arguments by which it is called, or of which we read
    "transformers.masking_utils:sdpa_mask": ("local_size", "use_vmap"),
    "transformers.generation.utils:GenerationMixin._sample": (
        "input_ids",
        "logits_processor",
        "stopping_criteria",
        "generation_config",
        "synced_gpus",
        "streamer",
    ),
    "transformers.generation.utils:GenerationMixin._prepare_cache_for_generation": (
        "generation_config",
        "model_kwargs",
        "generation_mode",
        "batch_size",
        "max_cache_length",
    ),
    "transformers.generation.utils:GenerationMixin._validate_generation_mode": (
        "generation_mode",
        "generation_config",
        "generation_mode_kwargs",
    ),
}


def self_test() -> list[str]:
    """What of the private API used here has moved; empty when all is where it was."""
    wrong = []
    for place, names in _PRIVATE.items():
        owner = _find(place)
        if owner is not _ABSENT:
            wrong += [f"{place}.{name}" for name in names if not hasattr(owner, name)]
    for place, names in _ARGUMENTS.items():
        function = _find(place)
        if function is _ABSENT or function is None:
            continue  # named above
        known = inspect.signature(function).parameters
        wrong += [f"{place}({name})" for name in names if name not in known]
    return wrong


_ABSENT = object()  # an optional package


def _find(place: str):
    module, _, path = place.partition(":")
    try:
        found = import_module(module)
    except ImportError:
        return _ABSENT
    for name in path.split(".") if path else ():
        found = getattr(found, name, None)
    return found
