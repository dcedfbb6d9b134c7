"""Folders that other quantizers wrote - GPTQ, AWQ, compressed-tensors - as models packed in our own layouts.

`QUANTIZERS` says what reads each. A reader turns what a file has of one linear into a `Source`: the matrix in
our codes, scales and zero points, and the layout that holds it bit for bit; where none does (columns whose
groups are not consecutive) the linear is dequantized, and a warning and `report` say which. Everything small
- names, shapes, scales' dtypes, zero points, the groups of columns - is checked before anything is loaded;
the codes are mapped and taken over one matrix at a time. The result is a patched model as from a folder of
ours.
"""

from __future__ import annotations

import copy
import json
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from hfaccel import compat
from hfaccel.checkpoint import Packed, SavedConfig
from hfaccel.errors import AlreadyPatched, CheckpointError, PatchError
from hfaccel.formats.matrix import Matrix
from hfaccel.mapped import drop_pages
from hfaccel.recipe import PatchConfig
from hfaccel.transform import Stage
from hfaccel_kernels.layouts import Layout

log = logging.getLogger("hfaccel")

QUANTIZERS = {  # quant_method of config.json -> "module:class"
    "gptq": "hfaccel.formats.gptq_in:Reader",
    "awq": "hfaccel.formats.awq_in:Reader",
    "compressed-tensors": "hfaccel.formats.compressed_tensors_in:Reader",
}
WIDE = ("q", "k", "v", "qkv", "head")  # roles whose inputs have 16 bits, as in `quant/rounding.py`

_TYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
}
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class Tensors:
    """The tensors of safetensors files by name, mapped. Raises: CheckpointError naming file or tensor."""

    def __init__(self, files: list[str]) -> None:
        self._open: dict[str, Any] = {}
        self._file: dict[str, str] = {}
        for file in files:
            try:
                opened = safe_open(file, "pt")
                names = list(opened.keys())
            except (SafetensorError, OSError, ValueError) as error:
                raise CheckpointError(f"{file} is truncated or damaged: {error}") from error
            for name in names:
                if name in self._file:
                    raise CheckpointError(f"{name} is both in {Path(self._file[name]).name} and in {file}")
                self._file[name] = file
            self._open[file] = opened

    def __contains__(self, name: str) -> bool:
        return name in self._file

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._file)

    def slice(self, name: str) -> Any:
        """As transformers' loader takes it."""
        return self._open[self._file[name]].get_slice(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype | None:
        return _TYPES.get(self.slice(name).get_dtype())

    def get(self, name: str, dtypes: tuple[torch.dtype, ...], *shapes: tuple[int, ...]) -> Tensor:
        """A tensor, mapped, of one of the dtypes and shapes."""
        self.check(name, dtypes, *shapes)
        return self._open[self._file[name]].get_tensor(name)

    def check(self, name: str, dtypes: tuple[torch.dtype, ...], *shapes: tuple[int, ...]) -> None:
        if name not in self._file:
            raise CheckpointError(f"{name} is missing")
        shape, dtype = self.shape(name), self.dtype(name)
        if shape not in shapes or dtype not in dtypes:
            found = f"{self.slice(name).get_dtype()} {list(shape)}"
            wanted = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
            sizes = " or ".join(str(list(s)) for s in shapes)
            raise CheckpointError(f"{name} is {found}, its config and architecture say {wanted} {sizes}")

    def let_go(self, name: str, tensor: Tensor) -> None:
        drop_pages(tensor, self._file[name])


@dataclass
class Source:
    """What a folder has of one quantized linear.

    Attributes:
        leaves: names of its tensors behind the linear's own, without the bias.
        make: reads the matrix, its columns in the order that the layout has them.
        layout: that holds it; None: it is dequantized, by `dense`.
        dense: fp32 [N, K] in the original order of columns, where that is not `make`'s.
    """

    name: str
    size: tuple[int, int]
    leaves: tuple[str, ...]
    make: Callable[[], Matrix]
    layout: Layout | None
    dense: Callable[[], Tensor] | None = None
    turned: bool = False  # the model has the weight as [in, out]
    lock: threading.Lock = field(default_factory=threading.Lock)
    made: dict[str, Tensor] = field(default_factory=dict)

    def part(self, key: str) -> Tensor:
        """One tensor of the packed form; of all of them the matrix is read once."""
        with self.lock:
            if key not in self.made:
                self.made.update(self.make().packed(self.layout))
            return self.made.pop(key)

    def weight(self) -> Tensor:
        weight = self.make().dequantize() if self.dense is None else self.dense()
        return weight.t() if self.turned else weight


@dataclass
class Lazy:
    """A tensor for transformers' loader, made when it is asked for."""

    source: Source
    key: str | None  # of the packed form, or None: the dequantized weight
    dtype: torch.dtype

    def is_floating_point(self) -> bool:
        return self.key in (None, "weight_scale")

    def __getitem__(self, _: Any) -> Tensor:
        return self.source.weight().to(self.dtype) if self.key is None else self.source.part(self.key)


@dataclass(frozen=True)
class Place:
    """A linear of the model that a reader is asked about."""

    name: str
    size: tuple[int, int]
    kind: str  # of its class
    act_bits: int


class Check:
    """What `loading.FOREIGN` holds: tensors are checked already, and have the names of the class's files."""

    converts = True

    def __call__(self, model: nn.Module) -> None:
        """Nothing is left to check."""


# From a folder --------------------------------------------------------------------------------------------


def method_of(config: Any, path: str) -> dict[str, Any] | None:
    """The `quantization_config` of another quantizer that hfaccel reads, or None.

    AutoGPTQ once wrote it beside the config, into quantize_config.json.
    """
    record = getattr(config, "quantization_config", None)
    if record is None:
        beside = Path(path) / "quantize_config.json"
        if not beside.is_file():
            return None
        try:
            record = json.loads(beside.read_text("utf-8"))
        except ValueError as error:
            raise CheckpointError(f"{beside} is damaged: {error}") from error
        if isinstance(record, dict) and "bits" in record:
            record = {"quant_method": "gptq"} | record
    if not isinstance(record, dict) or record.get("quant_method") not in QUANTIZERS:
        return None
    return record


def load(
    path: str,
    config: Any,
    record: Mapping[str, Any],
    model_class: Any,
    recipe: PatchConfig | str | None,
    *,
    dtype: Any = "auto",
    device: Any = None,
    **hf_kwargs: Any,
) -> nn.Module:
    """The model of a folder that another quantizer wrote, in eval mode.

    Args:
        record: its `quantization_config`.
        recipe: choices of adapters and the runtime.
    Raises: CheckpointError naming the key or tensor that is wrong; AlreadyPatched for a recipe that rounds.
    """
    from hfaccel.loading import FOREIGN
    from hfaccel.patch import patch

    method = record["quant_method"]
    if isinstance(recipe, str) or any(t.stage < Stage.ADAPTER for t in getattr(recipe, "transforms", ())):
        asked = recipe if isinstance(recipe, str) else recipe.describe()
        raise AlreadyPatched(
            f"{path} is quantized by {method} already; {asked!r} would change its weights again"
        )
    config = copy.deepcopy(config)
    vars(config).pop("quantization_config", None)
    hf_kwargs.pop("config", None)
    if (place := hf_kwargs.pop("device_map", None)) is not None:
        if not isinstance(place, str | torch.device) or place in ("auto", "balanced", "sequential"):
            raise PatchError(f"device_map={place!r}: a {method} folder is loaded onto one device")
        device = place
    tensors = Tensors(compat.weight_files(path, hf_kwargs))
    module, name = QUANTIZERS[method].split(":")
    reader = getattr(import_module(module), name)(record, tensors)
    with torch.device("meta"):
        skeleton = _skeleton(model_class, config, hf_kwargs)
    sources = _sources(reader, skeleton, tensors)
    dtype = _dtype(dtype, config)
    given = _given(sources, skeleton, tensors, dtype)
    saved = SavedConfig(**SavedConfig.empty())
    saved.dtype, saved.config = dtype, recipe or PatchConfig()
    for source in sources.values():
        if source.layout is not None:
            saved.packed[source.name] = Packed("linear", method, source.layout, source.size)
    _tie(saved, skeleton, config, tensors, given)
    dequantized = [source.name for source in sources.values() if source.layout is None]
    if dequantized:
        more = f" and {len(dequantized) - 1} others" if dequantized[1:] else ""
        log.warning("%s%s: no layout holds its columns, dequantized to %s", dequantized[0], more, dtype)
    if saved.packed:
        config.quantization_config = saved
    token = FOREIGN.set(Check())
    try:
        model, info = model_class.from_pretrained(
            None, config=config, state_dict=given, dtype=dtype, output_loading_info=True, **hf_kwargs
        )
    finally:
        FOREIGN.reset(token)
    if missing := sorted(set(info["missing_keys"]) - set(saved.tied)):
        raise CheckpointError(f"{missing[0]} is missing from {path} ({len(missing)} tensors are)")
    if unexpected := sorted(info["unexpected_keys"]):
        raise CheckpointError(f"{unexpected[0]} is not a tensor of {type(model).__name__}")
    model.config.name_or_path = str(path)
    if not saved.packed:  # nothing is, and the runtime serves it all the same
        patch(model, saved.config, keep_original=False)
    why = f"dequantized to {str(dtype).removeprefix('torch.')}: groups of its columns lie apart"
    model._hfaccel.skipped |= dict.fromkeys(dequantized, why)
    if device is not None:
        model.to(device)
    return model.eval()


def _skeleton(model_class: Any, config: Any, hf_kwargs: Mapping[str, Any]) -> nn.Module:
    if hasattr(model_class, "from_config"):  # an AutoModel
        return model_class.from_config(config, trust_remote_code=hf_kwargs.get("trust_remote_code"))
    return model_class(config)


def _dtype(dtype: Any, config: Any) -> torch.dtype:
    given = dtype
    if dtype in ("auto", None):
        dtype = getattr(config.get_text_config(), "dtype", None) or getattr(config, "dtype", None)
        dtype = dtype or torch.float16
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise PatchError(f"dtype={given!r}: 'auto' or a float dtype of torch")
    return dtype


def _sources(reader: Any, model: nn.Module, tensors: Tensors) -> dict[str, Source]:
    from hfaccel.anatomy import anatomy
    from hfaccel.quant.linear import is_conv1d, size_of

    parts = anatomy(model)
    modules = dict(model.named_modules())
    out = {}
    for name in reader.quantized():
        module = modules.get(name)
        if not (isinstance(module, nn.Linear) or (module is not None and is_conv1d(module))):
            raise CheckpointError(
                f"{name}: quantized in this folder, and no linear of {type(model).__name__}"
                + (": quantized experts are not read" if ".experts." in name else "")
            )
        role = "head" if name == parts.head else parts.locate(name)[1]
        wide = role in WIDE or role.startswith("attn.")
        place = Place(name, size_of(module), type(module).__name__, 16 if wide else 8)
        out[name] = reader.source(place)
        out[name].turned = is_conv1d(module)
    if not out:
        raise CheckpointError("no tensor of this folder is quantized as its config says")
    return out


def _given(
    sources: dict[str, Source], model: nn.Module, tensors: Tensors, dtype: torch.dtype
) -> dict[str, Any]:
    """What transformers loads, by name: ours of quantized linears, everything else as it is in the files."""
    taken: set[str] = set()
    given: dict[str, Any] = {}
    for name, source in sources.items():
        taken |= {f"{name}.{leaf}" for leaf in source.leaves}
        if source.layout is None:
            given[f"{name}.weight"] = Lazy(source, None, dtype)
        else:
            for key in source.layout.shapes(*source.size):
                given[f"{name}.{key}"] = Lazy(source, key, dtype)
        if (bias := f"{name}.bias") in tensors and model.get_submodule(name).bias is None:
            # Old GPTQ files have one everywhere.
            if bool(tensors.get(bias, FLOATS, (source.size[0],)).any()):
                raise CheckpointError(f"{bias} is not zero, and {type(model).__name__} has no bias there")
            taken.add(bias)
    known = model.state_dict()
    for name in tensors.names:
        if name in taken or name.endswith("rotary_emb.inv_freq"):
            continue
        wanted = known.get(name)
        if wanted is not None and tensors.shape(name) != tuple(wanted.shape):
            found, size = list(tensors.shape(name)), list(wanted.shape)
            raise CheckpointError(f"{name} is {found}, {type(model).__name__} of this config says {size}")
        given[name] = tensors.slice(name)
    return given


def _tie(saved: SavedConfig, model: nn.Module, config: Any, tensors: Tensors, given: dict[str, Any]) -> None:
    """Ties of the class that hold in the files: those of a head that is not there, or is the embedding."""
    untied = False
    for target, source in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        owner = target.rpartition(".")[0]
        if owner in saved.packed:
            untied = True
        elif target not in given or source not in given:
            saved.tied[target] = source
        elif torch.equal(*(tensors.slice(name)[...] for name in (target, source))):
            saved.tied[target] = source
            del given[target]
        else:
            untied = True
    if untied:
        for part in {id(c): c for c in (config, config.get_text_config())}.values():
            if hasattr(part, "tie_word_embeddings"):
                part.tie_word_embeddings = False
