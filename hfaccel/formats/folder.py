"""Writing a model as a folder that knows nothing of hfaccel: a twin, saved by transformers itself.

The twin is a model of the same class on the meta device. Its parameters become the tensors that are to be
written - packed ones dequantized, adapters merged - and in packed formats some of its linears become modules
that hold a file's tensors under the file's names. `save_pretrained` of transformers writes it, so names,
ties, shards, generation config and the shapes of experts are what any other model's are.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hfaccel.attention.backend import NAMES
from hfaccel.checkpoint import in_adapter, packed_kind
from hfaccel.compat import WRAPPED, plain_name
from hfaccel.errors import PatchError
from hfaccel.quant.linear import QuantEmbedding, QuantExperts, QuantLinear, describe, is_conv1d
from hfaccel.saving import check_target, replacing
from hfaccel.sites import check_materialized

log = logging.getLogger("hfaccel")

Cast = Callable[[str, Tensor], Tensor]  # (name, float tensor as the model has it) -> what is written

_RECORDS = ("quantization_config", "hfaccel", "transformers_weights")  # of config.json, of the patched model


def write_folder(
    model: nn.Module,
    tokenizer: Any,
    output: str | Path,
    *,
    held: dict[str, dict[str, Tensor]] | None = None,
    quantization: dict[str, Any] | None = None,
    extra: dict[str, str] | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write `model` into the folder `output`, whose files appear when all of them are there.

    Args:
        held: name of a linear -> what the file has in place of its `weight`, by leaf name.
        quantization: `quantization_config` of config.json.
        extra: further text files, by name.
        dtype: of the other float tensors, by default the model's; what the model keeps in another than its
            own, such as routers in fp32, keeps it.
    Raises: PatchError for a target that cannot be written, adapters that cannot be merged, values that the
        dtype does not reach.
    """
    target = Path(output).absolute()
    check_target(target)
    twin = twin_of(model, held or {}, _cast(model, dtype or model.dtype))
    twin.config.quantization_config = quantization
    if quantization is None:
        del twin.config.quantization_config
    with replacing(target) as folder:
        type(twin).save_pretrained(twin, folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        for name, text in (extra or {}).items():
            (folder / name).write_text(text, "utf-8")


def _cast(model: nn.Module, dtype: torch.dtype) -> Cast:
    kept = {
        plain_name(name)
        for name, tensor in model.state_dict(keep_vars=True).items()
        if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.dtype != model.dtype
    }

    def cast(name: str, tensor: Tensor) -> Tensor:
        if name in kept:
            return tensor
        out = tensor.to(dtype)
        if dtype == torch.float16 and (~torch.isfinite(out) & torch.isfinite(tensor)).any():
            peak = float(tensor[torch.isfinite(tensor)].abs().max())
            raise PatchError(f"{name}: {peak:.4g} is beyond the range of fp16; bf16 holds it")
        return out

    return cast


def twin_of(model: nn.Module, held: dict[str, dict[str, Tensor]], cast: Cast) -> nn.Module:
    """A model of the same class whose tensors are those to be written. Raises: PatchError."""
    twin = empty_twin(model)
    for name, tensors in held.items():
        parent, _, key = name.rpartition(".")
        bias = twin.get_submodule(name).bias
        holder = nn.Module()
        for leaf, tensor in tensors.items():
            holder.register_buffer(leaf, tensor)
        if bias is not None:
            holder.register_parameter("bias", bias)
        twin.get_submodule(parent)._modules[key] = holder
    _fill(twin, float_tensors(model, twin, set(held), cast), held)
    _tell_tying(twin)
    return twin.eval()


def empty_twin(model: nn.Module) -> nn.Module:
    """A model of the same class and config on the meta device, with no record of ours. Raises: PatchError."""
    check_materialized(model)
    config = copy.deepcopy(model.config)
    for part in {id(c): c for c in (config, config.get_text_config())}.values():
        for key in _RECORDS:
            vars(part).pop(key, None)
    plain = {ours: name for name, ours in NAMES.items()}
    name = getattr(config, "_attn_implementation", None)
    config._attn_implementation = plain.get(name, name)
    cls = getattr(type(model), "_hfaccel_class", type(model))
    with torch.device("meta"):
        twin = cls(config)
    if getattr(model, "generation_config", None) is not None:
        twin.generation_config = copy.deepcopy(model.generation_config)
    return twin


def _fill(twin: nn.Module, tensors: dict[str, Tensor], held: dict[str, dict[str, Tensor]]) -> None:
    ours = {f"{name}.{leaf}" for name, leaves in held.items() for leaf in leaves}
    made: dict[int, nn.Parameter] = {}
    for name, wanted in twin.state_dict(keep_vars=True).items():
        if name in ours:
            continue
        if (tensor := tensors.pop(name, None)) is None:
            raise PatchError(f"{name}: {type(twin).__name__} has it, this model does not")
        if tensor.shape != wanted.shape:
            raise PatchError(
                f"{name} is {list(tensor.shape)}, its config says {list(wanted.shape)}: structure that was "
                "changed by hand cannot be exported"
            )
        owner, _, leaf = name.rpartition(".")
        module = twin.get_submodule(owner)
        if leaf in module._parameters:
            if id(tensor) not in made:
                made[id(tensor)] = nn.Parameter(tensor, requires_grad=False)
            module._parameters[leaf] = made[id(tensor)]
        else:
            module._buffers[leaf] = tensor
    if tensors:
        raise PatchError(f"{next(iter(tensors))}: {type(twin).__name__} of this config has no such tensor")


def _tell_tying(twin: nn.Module) -> None:
    """Make config and ties say whether head and embedding are one tensor."""
    weights = [
        getattr(getattr(twin, f"get_{end}_embeddings", lambda: None)(), "weight", None)
        for end in ("input", "output")
    ]
    if None in (weights[0], weights[1]) or weights[0] is weights[1]:
        return
    for config in {id(c): c for c in (twin.config, twin.config.get_text_config())}.values():
        if hasattr(config, "tie_word_embeddings"):
            config.tie_word_embeddings = False
    twin.all_tied_weights_keys = {
        target: source
        for target, source in getattr(twin, "all_tied_weights_keys", {}).items()
        if twin.get_parameter(target) is twin.get_parameter(source)
    }


# The tensors ----------------------------------------------------------------------------------------------


def packed_linears(model: nn.Module) -> dict[str, QuantLinear]:
    """Plain name -> packed linear of the layers: without heads, which packed files have in float."""
    ends = [getattr(model, f"get_{end}_embeddings", lambda: None)() for end in ("input", "output")]
    return {
        plain_name(name): module
        for name, module in model.named_modules()
        if isinstance(module, QuantLinear) and not any(module is end for end in ends)
    }


def left_alone(model: nn.Module, held: dict[str, Any]) -> list[str]:
    """Names of the linears that are written in float: heads, routers, what was ignored."""
    return [
        plain_name(name)
        for name, module in model.named_modules()
        if (isinstance(module, nn.Linear) or is_conv1d(module))
        and plain_name(name) not in held
        and not in_adapter(model, name)
    ]


def check_plain(model: nn.Module, format: str) -> None:
    """Refuse adapters and packed experts, by name, for formats that cannot hold them. Raises: PatchError."""
    for name, module in model.named_modules():
        if set(WRAPPED) & module._modules.keys():
            raise PatchError(
                f"{name}: an adapter is attached, which {format} files cannot hold; merge it first "
                "(merge_and_unload), or export as dense, which merges it"
            )
        if isinstance(module, QuantExperts):
            raise PatchError(
                f"{name}: quantized fused experts are not written as {format}; patch with "
                "ignore=('**.experts.**',), or export as dense"
            )
        if isinstance(module, QuantLinear) and "input_scale" in module._buffers:
            raise PatchError(
                f"{name} scales its inputs itself, which {format} files cannot hold; name it in the recipe's "
                "ignore, or export as dense"
            )


def say_dequantized(model: nn.Module, format: str) -> None:
    """Log which packed modules are written in float because the format has no place for them."""
    ends = [getattr(model, f"get_{end}_embeddings", lambda: None)() for end in ("input", "output")]
    for end in ends:
        if end is not None and packed_kind(end):
            name = next(name for name, module in model.named_modules() if module is end)
            log.warning("%s: %s is written in float, as %s files have it", name, describe(end.layout), format)


@dataclass(frozen=True)
class _Delta:
    """What the active adapters add to a layer."""

    weight: Tensor
    bias: Tensor | None


def float_tensors(model: nn.Module, twin: nn.Module, skip: set[str], cast: Cast) -> dict[str, Tensor]:
    """Plain name -> tensor of everything but the weights of `skip`; shared ones are one object."""
    out: dict[str, Tensor] = {}
    made: dict[Any, tuple[Tensor, Any]] = {}  # the second keeps what the key's id is of
    for name, key, alive, make in tensor_makers(model, twin, skip):
        if key not in made:
            tensor = make().detach()
            made[key] = cast(name, tensor) if tensor.is_floating_point() else tensor, alive
        out[name] = made[key][0]
    return out


def tensor_makers(
    model: nn.Module, twin: nn.Module, skip: Collection[str] = ()
) -> Iterator[tuple[str, tuple, Any, Callable[[], Tensor]]]:
    """Of every tensor but the weights of `skip`: plain name, what is equal where tensors are shared, what
    that is the identity of (of a matrix its module and what adapters add), and what makes the tensor."""
    for name, module in model.named_modules(remove_duplicate=False):
        if in_adapter(model, name):
            continue
        plain = plain_name(name)
        module, delta = _effective(model, name, module)
        matrices = {} if plain in skip else _matrices(module, twin, plain)
        for leaf, (key, make) in matrices.items():
            if delta is not None and leaf == "weight":
                key, make = (*key, id(delta)), lambda make=make, d=delta: _add(make, d.weight)
            yield _join(plain, leaf), key, (module, delta), make
        for leaf, tensor in (module._parameters | module._buffers).items():
            skipped = tensor is None or leaf in matrices or leaf in module._non_persistent_buffers_set
            if skipped or (packed_kind(module) and leaf.endswith(("_scale", "_zero"))):
                continue
            if leaf == "weight" and plain in skip:
                continue
            key, make = (id(tensor),), lambda tensor=tensor: tensor
            if leaf == "bias" and delta is not None and delta.bias is not None:
                key, make = (*key, id(delta)), lambda make=make, d=delta: _add(make, d.bias)
            yield _join(plain, leaf), key, (tensor, delta), make


def _join(module: str, leaf: str) -> str:
    return f"{module}.{leaf}" if module else leaf


def _add(make: Callable[[], Tensor], delta: Tensor) -> Tensor:
    """In fp32, as it is cast afterwards."""
    base = make()
    if delta.shape != base.shape:
        delta = delta.t()
    return base.float() + delta.float().to(base.device)


def _matrices(module: nn.Module, twin: nn.Module, name: str) -> dict[str, tuple[tuple, Callable[[], Tensor]]]:
    """Of a module, leaf -> (what is equal where tensors are shared, the matrix as the twin has it)."""
    if isinstance(module, QuantLinear | QuantEmbedding):
        turned = is_conv1d(twin.get_submodule(name))

        def matrix() -> Tensor:
            return module.dequantize().t() if turned else module.dequantize()

        return {"weight": ((module.packed["weight"].data_ptr(), module.size), matrix)}
    if isinstance(module, QuantExperts):

        def experts(leaf: str) -> Tensor:
            each = module.dequantize(leaf)
            return each.transpose(1, 2) if module.is_transposed else each

        return {leaf: ((id(module), leaf), lambda leaf=leaf: experts(leaf)) for leaf in module.PROJECTIONS}
    weight = module._parameters.get("weight")
    return {} if weight is None else {"weight": ((id(weight),), lambda: weight)}


def _effective(model: nn.Module, name: str, module: nn.Module) -> tuple[nn.Module, _Delta | None]:
    """What stands at a place once its adapters are merged: the module, and what is added to it.

    Raises: PatchError for an adapter that is no plain LoRA.
    """
    place, _, leaf = name.rpartition(".")
    if leaf not in WRAPPED:
        return module, None
    wrapper = model.get_submodule(place)
    active = list(getattr(wrapper, "active_adapters", ()))
    if getattr(wrapper, "disable_adapters", False):
        active = []
    if leaf == "original_module":
        trained = [wrapper.modules_to_save[a] for a in active if a in wrapper.modules_to_save]
        return (trained[0] if trained else module), None
    from peft.tuners.lora.layer import Embedding, Linear

    from hfaccel.lora.packed import PackedEmbedding, PackedLinear

    if type(wrapper) not in (Linear, Embedding, PackedLinear, PackedEmbedding):
        raise PatchError(
            f"{place}: a {type(wrapper).__module__}.{type(wrapper).__name__} cannot be merged on the way; "
            "call merge_and_unload() first"
        )
    weight = bias = None
    matrices = wrapper.lora_embedding_A if isinstance(wrapper, Embedding) else wrapper.lora_A
    for adapter in active:
        if adapter in wrapper.merged_adapters or adapter not in matrices:
            continue
        if adapter in wrapper.lora_variant:
            raise PatchError(
                f"{place}: adapter {adapter!r} is a {type(wrapper.lora_variant[adapter]).__name__}; call "
                "merge_and_unload() before patching"
            )
        packed = isinstance(wrapper, PackedLinear | PackedEmbedding)
        one = (wrapper._delta(adapter) if packed else wrapper.get_delta_weight(adapter)).detach().float()
        weight = one if weight is None else weight + one
        if wrapper.lora_bias.get(adapter):
            if getattr(module, "bias", None) is None:
                raise PatchError(f"{place}: adapter {adapter!r} has a bias, the layer below has none")
            shift = wrapper.lora_B[adapter].bias.detach().float() * wrapper.scaling[adapter]
            bias = shift if bias is None else bias + shift
    return module, None if weight is None else _Delta(weight, bias)
