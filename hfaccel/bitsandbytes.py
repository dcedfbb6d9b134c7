"""bitsandbytes' configuration in our words: `load_in_8bit` is `int8`, `load_in_4bit` with NF4 is `nf4`."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn

from hfaccel.errors import PatchError, UnknownName
from hfaccel.recipe import PatchConfig

log = logging.getLogger("hfaccel")

# Options without a counterpart: which mode reads it, its default, what holds here instead.
_WITHOUT = {
    "llm_int8_threshold": ("int8", "6.0", "outliers are rounded as well, beside activations of 16 bits"),
    "llm_int8_has_fp16_weight": ("int8", "False", "there are no float weights beside the codes"),
    "llm_int8_enable_fp32_cpu_offload": ("int8", "False", "modules on the CPU are packed as well"),
    "bnb_4bit_compute_dtype": ("nf4", "float32", "products are those of the layout; dtype= is the model's"),
    "bnb_4bit_quant_storage": ("nf4", "uint8", "codes are stored in the kernels' layout"),
}
_KNOWN = {"load_in_8bit", "load_in_4bit", "llm_int8_skip_modules", "bnb_4bit_quant_type", *_WITHOUT}
_KNOWN |= {"bnb_4bit_use_double_quant", "quant_method", "_load_in_8bit", "_load_in_4bit"}


def translated(hf_kwargs: dict[str, Any], recipe: Any) -> tuple[Any, tuple[str, ...]]:
    """The recipe and the modules to skip that a bitsandbytes `quantization_config` (object or dict) means.

    It is taken out of `hf_kwargs`; any other configuration stays, for transformers. Options that have no
    counterpart and are not at their default are named in a warning.

    Raises: PatchError for what hfaccel lacks; UnknownName for an option that bitsandbytes has not.
    """
    given = hf_kwargs.get("quantization_config")
    if given is None:
        return recipe, ()
    if recipe is not None:
        raise PatchError("recipe and quantization_config: a model is quantized once, give one of them")
    values = given if isinstance(given, dict) else given.to_dict()
    if "load_in_8bit" not in values and "load_in_4bit" not in values:
        return recipe, ()
    if unknown := sorted(set(values) - _KNOWN):
        raise UnknownName(
            f"BitsAndBytesConfig: unknown option {unknown[0]!r}; known are {', '.join(sorted(_KNOWN))}"
        )
    del hf_kwargs["quantization_config"]
    if values.get("load_in_8bit"):
        step = "int8"
    elif values.get("load_in_4bit"):
        step = values.get("bnb_4bit_quant_type") or "fp4"
        if step != "nf4":
            raise PatchError(
                f"BitsAndBytesConfig(load_in_4bit=True) means {step}, of which hfaccel knows nf4 alone; "
                "recipe='int4' is 4 bits"
            )
    else:
        raise PatchError(
            "BitsAndBytesConfig: neither load_in_8bit nor load_in_4bit is set; it asks for nothing"
        )
    for name, (mode, default, instead) in _WITHOUT.items():
        value = str(values.get(name, default)).removeprefix("torch.")
        if mode == step and value not in (default, "None") and value != default.removesuffix(".0"):
            log.warning("BitsAndBytesConfig: %s=%s has no counterpart: %s", name, value, instead)
    return step, tuple(values.get("llm_int8_skip_modules") or ())


def without(config: PatchConfig, skipped: tuple[str, ...], model: nn.Module) -> PatchConfig:
    """The config with the modules left alone that one of the names in `skipped` leads to or into."""
    from hfaccel.anatomy import anatomy
    from hfaccel.quant.head import Head

    parts = anatomy(model)
    inside = tuple(f".{name}." for name in skipped)
    hit = [name for name in parts.matrices if any(part in f".{name}." for part in inside)]
    out = []
    for transform in config.transforms:
        ignore = tuple(name for name in transform.default_targets(parts) if name in hit)
        out.append(
            type(transform).from_dict(transform.to_dict() | {"ignore": ignore}) if ignore else transform
        )
    if parts.head in hit:
        out.append(Head(bits=16))
    return PatchConfig(tuple(out))
