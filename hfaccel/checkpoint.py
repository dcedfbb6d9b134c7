"""Saved folders: the format, and the record in `config.json`.

A folder is an ordinary one of transformers - config.json, model.safetensors or numbered shards with their
index - and `AutoModel...from_pretrained` loads it once hfaccel is imported. Tensors lie under the names of
the modules in memory (fused experts too), each tensor once. A packed module `m` stores

    m.weight        uint8 [NB, block_bytes]     fused experts: m.gate_up_proj and m.down_proj, [E, ...] each
    m.weight_scale  fp32 or fp16 [NB, G, 16]    (m.gate_up_proj_scale, ...)
    m.weight_zero   uint8 [NB, G, 16], asymmetric grids only
    m.bias          as it was

as `hfaccel_kernels.layouts` describes it, and `config.json` says under "quantization_config" how to read it:

    quant_method     "hfaccel"
    format           1; a reader refuses what is newer than itself
    hfaccel_version  what wrote it
    transforms       every transform of the patch in order, also those of the runtime, as `Transform.to_dict`
    dtype            of every float tensor that is not packed, but for
    dtypes           name -> another dtype; for the `weight` of a packed module: the dtype it computes in
    packed           list of {kind, step, layout, modules}: kind is linear, scaled (a linear with an
                     `input_scale` fp32 [in] of its own), embedding or experts, step the
                     recipe step that rounded them, layout `Layout.to_dict`, modules name -> "ROWSxCOLUMNS"
                     of the matrix (experts: "ExROWSxCOLUMNS" of gate_up_proj, a comma, that of down_proj)
    tied             name -> name of the stored tensor that it shares; only the latter is in the files

"transformers_weights", by which transformers knows a file, says to import hfaccel: without it transformers
refuses the folder and prints that, where it would take codes for weights. `loading.Quantizer` takes it out.

A patch that stores no other weights (`kv8`, `runtime`) leaves a plain folder that any transformers loads. Its
config has {"format": 1, "transforms": [...]} under "hfaccel", which `hfaccel.from_pretrained` applies. Any
patched folder may have "executor" there: what was measured to serve it best (`runtime/choice.py`).

Everything is checked before a model is returned: the name, shape and dtype of each tensor against record and
architecture, and that none is missing or left over. Nothing is ever initialised at random.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.utils.quantization_config import QuantizationConfigMixin

from hfaccel.classes import extend, restore
from hfaccel.compat import WRAPPED, offload_place, plain_name
from hfaccel.errors import CheckpointError

if TYPE_CHECKING:
    from hfaccel.recipe import PatchConfig
    from hfaccel.state import State
    from hfaccel_kernels.layouts import Layout

METHOD = "hfaccel"
FORMAT = 1
WEIGHTS_KEY = "transformers_weights"
IMPORT_FIRST = "the weights are packed by hfaccel: `import hfaccel` before from_pretrained"

OnUndo = Callable[[Callable[[nn.Module], None]], None]


# The record -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Packed:
    """One packed module; sizes are those of its matrix (experts: E, rows, columns, twice)."""

    kind: str
    step: str
    layout: Layout
    sizes: tuple[int, ...]


class SavedConfig(QuantizationConfigMixin):
    """`config.quantization_config` of a patched model: the record above, parsed and checked.

    Raises: CheckpointError for a damaged record or one newer than this hfaccel; UnknownName for transforms.
    """

    quant_method = METHOD

    def __init__(self, **record: Any) -> None:
        version = record.get("format")
        if isinstance(version, int) and not isinstance(version, bool) and version > FORMAT:
            raise CheckpointError(
                f"saved by hfaccel {record.get('hfaccel_version')} in format {version}; this hfaccel reads "
                f"formats up to {FORMAT}: install a newer one"
            )
        known = set(SavedConfig.empty())
        if version != FORMAT or isinstance(version, bool) or set(record) != known:
            odd = sorted(known ^ set(record)) or [f"format {version!r}"]
            raise CheckpointError(f"quantization_config is damaged: {', '.join(odd)} missing or not known")
        if not isinstance(record["hfaccel_version"], str):
            raise CheckpointError("quantization_config is damaged: hfaccel_version is not text")
        self.config: PatchConfig = parse_transforms(record["transforms"])
        self.hfaccel_version = record["hfaccel_version"]
        self.dtype = _dtype(record["dtype"])
        self.dtypes = {name: _dtype(value) for name, value in _mapping(record, "dtypes")}
        self.tied = {name: value for name, value in _mapping(record, "tied")}
        self.packed: dict[str, Packed] = {}
        for entry in record["packed"] if isinstance(record["packed"], list) else [None]:
            self._parse(entry)

    @staticmethod
    def empty() -> dict[str, Any]:
        """The fields of a record, without content."""
        from hfaccel import __version__

        return {
            "quant_method": METHOD,
            "format": FORMAT,
            "hfaccel_version": __version__,
            "transforms": [],
            "dtype": "float32",
            "dtypes": {},
            "packed": [],
            "tied": {},
        }

    def _parse(self, entry: Any) -> None:
        if not isinstance(entry, dict) or set(entry) != {"kind", "step", "layout", "modules"}:
            raise CheckpointError("quantization_config is damaged: an entry of packed has other fields")
        if not isinstance(entry["step"], str):
            raise CheckpointError(f"quantization_config is damaged: step {entry['step']!r} is not text")
        if not isinstance(entry["kind"], str) or entry["kind"] not in KINDS:
            raise CheckpointError(f"unknown kind of module {entry['kind']!r}; known are {', '.join(KINDS)}")
        layout = _layout(entry["layout"])
        for name, text in _mapping(entry, "modules"):
            if not re.fullmatch(KINDS[entry["kind"]], text):
                raise CheckpointError(f"{name}: {text!r} is not the size of a packed {entry['kind']}")
            sizes = tuple(int(number) for number in re.findall(r"\d+", text))
            self.packed[name] = Packed(entry["kind"], entry["step"], layout, sizes)

    def get(self, key: str, default: Any = None) -> Any:
        """One field, as of the dict that transformers may take a config for."""
        return self.to_dict().get(key, default)

    def shares(self, a: str, b: str) -> bool:
        """Whether two names lead to one tensor."""
        a, b = (self.tied.get(name, name) for name in (plain_name(a), plain_name(b)))
        return a == b

    @classmethod
    def from_dict(cls, config_dict: dict, return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        out = cls(**config_dict)
        return (out, kwargs) if return_unused_kwargs else out

    def to_dict(self) -> dict[str, Any]:
        groups: dict[tuple, dict[str, str]] = {}
        for name, module in self.packed.items():
            key = (module.kind, module.step, module.layout)
            groups.setdefault(key, {})[name] = size_text(module.sizes)
        return SavedConfig.empty() | {
            "hfaccel_version": self.hfaccel_version,
            "transforms": self.config.to_dict()["transforms"],
            "dtype": str(self.dtype).removeprefix("torch."),
            "dtypes": {name: str(dtype).removeprefix("torch.") for name, dtype in self.dtypes.items()},
            "packed": [
                {"kind": kind, "step": step, "layout": layout.to_dict(), "modules": modules}
                for (kind, step, layout), modules in groups.items()
            ],
            "tied": dict(self.tied),
        }


_MATRIX = r"[1-9]\d{0,8}x[1-9]\d{0,8}"
_FUSED = rf"[1-9]\d{{0,5}}x{_MATRIX}"
KINDS = {"linear": _MATRIX, "scaled": _MATRIX, "embedding": _MATRIX, "experts": f"{_FUSED},{_FUSED}"}


def size_text(sizes: tuple[int, ...]) -> str:
    """ "ROWSxCOLUMNS", or both of fused experts."""
    texts = [str(size) for size in sizes]
    return "x".join(texts) if len(texts) == 2 else f"{'x'.join(texts[:3])},{'x'.join(texts[3:])}"


def parse_transforms(entries: Any) -> PatchConfig:
    """The transforms of a record. Raises: PatchError kinds; an unknown name lists the known ones."""
    from hfaccel.recipe import PatchConfig

    return PatchConfig.from_dict({"transforms": entries})


def _dtype(text: Any) -> torch.dtype:
    found = getattr(torch, text, None) if isinstance(text, str) else None
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise CheckpointError(f"quantization_config is damaged: {text!r} is not a float dtype")
    return found


def _layout(fields: Any) -> Layout:
    """A layout of which every field is said: a default in place of a lost one would change the arithmetic."""
    from hfaccel_kernels.layouts import Layout

    known = Layout(8).to_dict()
    if not isinstance(fields, dict) or set(fields) != set(known):
        raise CheckpointError(f"layout {fields!r} must have the fields {', '.join(known)}")
    for name, value in fields.items():
        if type(value) is not type(known[name]):
            raise CheckpointError(f"layout {fields!r}: {name} is not of type {type(known[name]).__name__}")
    try:
        return Layout(**fields)
    except ValueError as error:
        raise CheckpointError(f"unknown layout {fields!r}: {error}") from error


def _mapping(record: dict, key: str) -> Iterator[tuple[str, str]]:
    value = record[key]
    if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
        raise CheckpointError(f"quantization_config is damaged: {key} must map names to text")
    yield from value.items()


# Marking a patched model ----------------------------------------------------------------------------------


def describe(model: nn.Module, state: State) -> SavedConfig:
    """The record of a patched model as it is now."""
    from hfaccel import __version__

    steps = {plain_name(record.name): record.transform for record in state.records}
    out = SavedConfig(**SavedConfig.empty())
    out.config, out.hfaccel_version = state.config, __version__
    first: dict[int, str] = {}  # a module under several names keeps the step of the first
    computes: dict[str, torch.dtype] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if (kind := packed_kind(module)) is None or in_adapter(model, name):
            continue
        name = plain_name(name)
        step = steps.get(name) or steps.get(first.setdefault(id(module), name), "")
        out.packed[name] = Packed(kind, step, module.layout, packed_sizes(module))
        for tensor in ("gate_up_proj", "down_proj") if kind == "experts" else ("weight",):
            computes[f"{name}.{tensor}"] = compute_dtype(module, model)
    stored, out.tied = stored_tensors(model)
    dtypes = {name: tensor.dtype for name, tensor in stored.items() if tensor.is_floating_point()}
    dtypes = {n: d for n, d in dtypes.items() if not _of_packed(n, out.packed)} | computes
    out.dtype = model.dtype
    out.dtypes = {name: dtype for name, dtype in dtypes.items() if dtype != out.dtype}
    return out


def _of_packed(name: str, packed: dict[str, Packed]) -> bool:
    owner, _, leaf = name.rpartition(".")
    return owner in packed and leaf.endswith("_scale")


def packed_kind(module: nn.Module) -> str | None:
    from hfaccel.quant.linear import QuantEmbedding, QuantExperts, QuantLinear, ScaledLinear

    kinds = {ScaledLinear: "scaled", QuantLinear: "linear", QuantEmbedding: "embedding"}
    kinds[QuantExperts] = "experts"
    return next((kind for cls, kind in kinds.items() if isinstance(module, cls)), None)


def packed_sizes(module: nn.Module) -> tuple[int, ...]:
    """Sizes of a packed module or of one that can be packed."""
    from hfaccel.quant.linear import QuantExperts, is_fused_experts, matrix_size, size_of

    if isinstance(module, QuantExperts):
        return tuple(
            size for name in module.PROJECTIONS for size in (module.num_experts, *module.sizes[name])
        )
    if is_fused_experts(module):
        names = QuantExperts.PROJECTIONS
        return tuple(size for name in names for size in (module.num_experts, *matrix_size(module, name)))
    return size_of(module)


def compute_dtype(module: nn.Module, model: nn.Module) -> torch.dtype:
    like = getattr(module, "out_like", None)
    return model.dtype if like is None else like.dtype


def stored_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """What files hold: name -> tensor, each once and no adapters; and name -> stored name of shared ones."""
    seen: dict[Any, str] = {}
    stored, tied = {}, {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor) or in_adapter(model, name):
            continue
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.is_meta or not tensor.numel():
            owner, _, leaf = name.rpartition(".")
            key = offload_place(model.get_submodule(owner), leaf) or id(tensor)
        name = plain_name(name)
        if (source := seen.setdefault(key, name)) != name:
            tied[name] = source
        else:
            stored[name] = tensor
    return stored, tied


def in_adapter(model: nn.Module, name: str) -> bool:
    """Whether a dotted name leads into what an adapter added beside the layer that it wraps."""
    module: nn.Module | None = model
    for part in name.split("."):
        if any(wrapped in module._modules and part != wrapped for wrapped in WRAPPED):
            return True
        module = module._modules.get(part)
        if module is None:
            break
    return False


def mark(model: nn.Module, state: State, on_undo: OnUndo) -> None:
    """Set on a patched model what makes saving, reload and copies right; its config is its own by now."""
    from hfaccel.loading import Quantizer
    from hfaccel.runtime import choice
    from hfaccel.saving import SavingMixin

    on_undo(restore)
    extend(model, SavingMixin)
    before = vars(model.config).pop("hfaccel", None)
    packed = any(packed_kind(module) for module in model.modules())
    if not packed:
        model.config.hfaccel = {"format": FORMAT, **state.config.to_dict()}
    if isinstance(before, dict) and "executor" in before:  # the choice of this very patch, not of another one
        if state.origin == "loaded" or before.get("transforms") == state.config.to_dict()["transforms"]:
            choice.record(model.config, before["executor"])
    if not packed:
        return
    record = describe(model, state)
    model.config.quantization_config = record
    _set(model, "hf_quantizer", Quantizer(record), on_undo)
    _set(model, "is_quantized", True, on_undo)
    _set(model, "quantization_method", METHOD, on_undo)
    _set(model, "_weight_conversions", [], on_undo)  # files hold the names and shapes of the modules
    _set(model, "_adjust_bias", leave_bias, on_undo)
    ties = getattr(model, "all_tied_weights_keys", {})
    _set(model, "all_tied_weights_keys", {t: s for t, s in ties.items() if record.shares(t, s)}, on_undo)
    for module in model.modules():
        if hasattr(config := getattr(module, "config", None), "to_dict"):
            config._is_quantized = True


def leave_bias(*args: Any) -> None:
    """`tie_weights` pads a head's bias to the rows of its weight, which a packed weight has fewer of."""


def _set(model: nn.Module, name: str, value: Any, on_undo: OnUndo) -> None:
    missing = object()
    before = vars(model).get(name, missing)
    setattr(model, name, value)

    def undo(model: nn.Module) -> None:
        if before is missing:
            vars(model).pop(name, None)
        else:
            setattr(model, name, before)

    on_undo(undo)
