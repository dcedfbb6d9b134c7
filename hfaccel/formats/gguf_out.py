"""A model as a GGUF file for llama.cpp and what reads its files: metadata, tokenizer, tensors.

Which type each tensor gets is said in `gguf_mix`, names and orders of rows in `gguf_names`, how blocks are
rounded in `kquants`. A packed matrix whose grid is that of the type, or of the file's main type, is written
code for code (`gguf_unpack`): what was loaded from a GGUF, int8 and symmetric int4 in groups of 32 with fp16
scales. Other packed matrices are dequantized first, and the log says how many. Adapters are merged.

The file is written tensor by tensor beside its place and moved there when it is complete.
"""

from __future__ import annotations

import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hfaccel.errors import PatchError, UnknownName, UnsupportedModel
from hfaccel.formats import gguf_config, gguf_encode, gguf_mix, gguf_names, gguf_vocab, kquants
from hfaccel.formats.folder import empty_twin, tensor_makers
from hfaccel.formats.gguf_rope import rope_tensors
from hfaccel.formats.gguf_unpack import type_of, unpack_blocks
from hfaccel.formats.importance import input_squares
from hfaccel.progress import progress_bar
from hfaccel.quant.linear import QuantEmbedding, QuantExperts, QuantLinear, ScaledLinear, is_packed

log = logging.getLogger("hfaccel")


def write(
    model: nn.Module,
    tokenizer: Any,
    variant: str | None,
    output: str | Path,
    *,
    calibration: Any = None,
    importance: dict[str, Tensor] | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Write `model` as a GGUF file.

    Args:
        tokenizer: goes into the file, chat template included; None writes a file without one, which llama.cpp
            runs on token ids alone.
        variant: a name of `gguf_mix.VARIANTS`, in any case.
        calibration: as `patch` takes it: errors are weighed by the inputs they meet. None weighs nothing.
        importance: what `importance.input_squares` gave, in place of calibration.
    Returns: the file's path, size and variant, and how many tensors have which type.
    Raises: PatchError, before anything is written, for a type, an architecture, a config or a tokenizer that
        such files have no place for, and for a place that cannot be written; while writing, for values beyond
        fp16, naming the tensor.
    """
    if variant is None:
        raise UnknownName(f"gguf: a type is missing, as in gguf:Q4_K_M; known are {_known()}")
    variant = gguf_mix.variant_named(variant)
    target = Path(output).absolute()
    _check_target(target)
    row = gguf_names.architecture_of_model(model.config)
    metadata = gguf_config.metadata_of(row, model.config)
    entries = _entries(model, row)
    heads = {entry.pair.gguf for entry in entries}
    if row.tied and "output.weight" in heads:
        raise UnsupportedModel(f"the head is no copy of the embedding: a GGUF {row.gguf} has no other")
    rows = next(entry.shape[0] for entry in entries if entry.pair.gguf == "token_embd.weight")
    metadata |= _general(model, variant, sum(math.prod(entry.shape) for entry in entries))
    if tokenizer is None:
        log.warning("gguf: no tokenizer is written; programs that read the file need token ids")
        metadata["tokenizer.ggml.model"] = "none"
    else:
        metadata |= gguf_vocab.metadata_of(tokenizer, rows) | _other_end(model, tokenizer)
    weights = dict(importance or {})
    if importance is None and calibration is not None and variant not in ("F32", "F16", "BF16", "Q8_0"):
        weights = input_squares(model, calibration, tokenizer, f"gguf:{variant}", progress=progress)
    if "output.weight" not in heads and "lm_head.weight" in weights:
        weights[_name_of(entries, "token_embd.weight")] = weights["lm_head.weight"]
    queries = metadata[f"{row.gguf}.attention.head_count"]
    for entry in entries:
        entry.kind = gguf_mix.tensor_type(
            variant,
            entry.pair.gguf,
            entry.shape,
            architecture=row.gguf,
            layers=model.config.num_hidden_layers,
            experts=metadata.get(f"{row.gguf}.expert_count", 0),
            shared_heads=metadata.get(f"{row.gguf}.attention.head_count_kv", queries) < queries,
            tied="output.weight" not in heads,
            weighted=bool(weights),
        )
        _keep_packed(entry, variant)
    _say_requantized(entries)
    rope = rope_tensors(row, model.config)
    with _replacing(target) as partial:
        _write(partial, metadata, rope, entries, model.config, weights, progress)
    kinds = Counter(entry.kind for entry in entries) + Counter("F32" for _ in rope)
    return {
        "file": str(target),
        "variant": variant,
        "bytes": target.stat().st_size,
        "tensors": len(entries) + len(rope),
        "types": dict(kinds),
        "as_packed": sum(entry.exact is not None for entry in entries),
        "weighted": bool(weights),
    }


def _known() -> str:
    return ", ".join(gguf_mix.VARIANTS)


# What is written --------------------------------------------------------------------------------------------


@dataclass
class _Entry:
    """One tensor of the file.

    Attributes:
        shape: in the file, as torch has it, slowest first.
        make: the tensor as transformers has it.
        packed: its module, where that is packed, no adapter adds to it and its inputs are not scaled.
        was_packed: its module is packed.
        kind: its type in the file.
        exact: what gives its blocks [N, bytes] without rounding, our order of rows; None where it is rounded.
    """

    pair: gguf_names.Pair
    shape: tuple[int, ...]
    make: Callable[[], Tensor]
    packed: QuantLinear | QuantEmbedding | QuantExperts | None = None
    was_packed: bool = False
    kind: str = "F32"
    exact: Callable[[], Tensor] | None = None


def _entries(model: nn.Module, row: gguf_names.Architecture) -> list[_Entry]:
    """Every tensor of the file. Raises: UnsupportedModel for tensors and shapes that it has no place for."""
    twin = empty_twin(model)
    wanted = twin.state_dict(keep_vars=True)
    found: dict[str, tuple[Any, Any, Callable]] = {}
    for name, key, alive, make in tensor_makers(model, twin):
        found.setdefault(name, (key, alive, make))
    out, used = [], set()
    pairs = gguf_names.pairs(row, twin.config)
    tied = next((pair.name for pair in pairs if pair.gguf == "token_embd.weight"), "")
    for pair in pairs:
        if pair.name not in found:
            continue
        used.add(pair.name)
        key, alive, make = found[pair.name]
        if pair.gguf == "output.weight" and tied in found and found[tied][0] == key:
            continue
        if pair.name not in wanted:
            raise UnsupportedModel(f"{pair.name}: {type(twin).__name__} of this config has no such tensor")
        owner, delta = alive if isinstance(alive, tuple) else (None, None)
        packed = isinstance(owner, nn.Module) and is_packed(owner)
        as_it_is = packed and delta is None and not isinstance(owner, ScaledLinear)
        shape = _file_shape(pair, tuple(wanted[pair.name].shape))
        out.append(_Entry(pair, shape, make, owner if as_it_is else None, packed))
    if missing := sorted(name for name in wanted if name not in found):
        raise PatchError(f"{missing[0]}: {type(twin).__name__} has it, this model does not")
    if extra := sorted(set(found) - used):
        raise UnsupportedModel(f"{extra[0]}: a GGUF {row.gguf} has no place for it")
    return out


def _file_shape(pair: gguf_names.Pair, shape: tuple[int, ...]) -> tuple[int, ...]:
    if pair.transposed:
        shape = shape[::-1]
    if pair.half is not None:
        shape = (shape[0], shape[1] // 2, *shape[2:])
    return shape


def _keep_packed(entry: _Entry, variant: str) -> None:
    """Write a packed matrix as it is, where its type is what it would become or the file's main one."""
    if (module := entry.packed) is None:
        return
    pair, layout = entry.pair, module.layout
    kind = type_of(layout, entry.shape[-1])
    if kind is None or kind not in (entry.kind, gguf_mix.VARIANTS[variant][0]):
        return
    entry.kind = kind
    if not isinstance(module, QuantExperts):
        scale = module.packed["weight_scale"]
        entry.exact = lambda: unpack_blocks(module.packed["weight"], scale, layout, *module.size)
        return
    name = pair.name.rpartition(".")[2]

    def experts() -> Tensor:
        each = zip(getattr(module, name), getattr(module, f"{name}_scale"), strict=True)
        blocks = torch.stack([unpack_blocks(*tensors, layout, *module.sizes[name]) for tensors in each])
        return blocks if pair.half is None else blocks.chunk(2, 1)[pair.half]

    entry.exact = experts


def _say_requantized(entries: list[_Entry]) -> None:
    rounded = [entry for entry in entries if entry.was_packed and entry.exact is None]
    if rounded:
        log.warning(
            "gguf: %d of %d packed matrices have a grid of their own and are dequantized first, %s",
            len(rounded),
            sum(entry.was_packed for entry in entries),
            rounded[0].pair.name + (", ..." if rounded[1:] else ""),
        )


def _name_of(entries: list[_Entry], gguf: str) -> str:
    return next(entry.pair.name for entry in entries if entry.pair.gguf == gguf)


# Metadata ---------------------------------------------------------------------------------------------------


def _general(model: nn.Module, variant: str, parameters: int) -> dict[str, Any]:
    out: dict[str, Any] = {"general.type": "model"}
    path = getattr(model, "name_or_path", None)
    if path and path != "None" and (name := Path(path).name):
        out["general.name"] = name
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if parameters >= size:
            digits = max(2 - len(f"{parameters / size:.0f}"), 0)  # two at least, as in 7.2B and 135M
            out["general.size_label"] = f"{parameters / size:.{digits}f}{letter}"
            break
    main, number = gguf_mix.VARIANTS[variant]
    out["general.file_type"] = number
    if main not in ("F32", "F16", "BF16"):
        out["general.quantization_version"] = 2
    return out


def _other_end(model: nn.Module, tokenizer: Any) -> dict[str, int]:
    """A token that ends turns, where generation stops at another one than the tokenizer's own end."""
    ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    others = [end for end in ends if end != tokenizer.eos_token_id] if isinstance(ends, list) else []
    return {"tokenizer.ggml.eot_token_id": others[-1]} if others else {}


def _add(writer: Any, key: str, value: Any) -> None:
    import gguf

    kinds = gguf.GGUFValueType
    if key == "general.architecture":  # the writer has it
        return
    if not isinstance(value, list):
        kind = {bool: kinds.BOOL, int: kinds.UINT32, float: kinds.FLOAT32, str: kinds.STRING}[type(value)]
        writer.add_key_value(key, value, kind)
        return
    kind = {int: kinds.INT32, float: kinds.FLOAT32, str: kinds.STRING, bool: kinds.BOOL}[type(value[0])]
    writer.add_key_value(key, value, kinds.ARRAY, kind)


# The file ---------------------------------------------------------------------------------------------------


def _write(
    path: Path,
    metadata: dict[str, Any],
    rope: dict[str, Tensor],
    entries: list[_Entry],
    config: Any,
    weights: dict[str, Tensor],
    progress: bool,
) -> None:
    import gguf
    import numpy

    logging.getLogger("gguf").setLevel(logging.WARNING)
    writer = gguf.GGUFWriter(path, metadata["general.architecture"])
    try:
        for key, value in metadata.items():
            if value != []:
                _add(writer, key, value)
        for name, tensor in rope.items():
            writer.add_tensor_info(name, tensor.shape, numpy.dtype("float32"), 4 * tensor.numel())
        for entry in entries:
            size, each = gguf_encode.BLOCKS[entry.kind]
            shape = (*entry.shape[:-1], entry.shape[-1] // size * each)
            writer.add_tensor_info(
                entry.pair.gguf,
                shape,
                numpy.dtype("uint8"),
                math.prod(shape),
                raw_dtype=gguf.GGMLQuantizationType[entry.kind],
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in rope.values():
            writer.write_tensor_data(tensor.float().numpy())
        with progress_bar("writing", len(entries), progress) as advance:
            for entry in entries:
                writer.write_tensor_data(_blocks(entry, config, weights.get(entry.pair.name)).numpy())
                advance()
    finally:
        writer.close()


@torch.no_grad()
def _blocks(entry: _Entry, config: Any, weight: Tensor | None) -> Tensor:
    """The tensor as it lies in the file, uint8 [..., bytes]."""
    pair = entry.pair
    order = gguf_names.row_order(pair, config)
    if entry.exact is not None:
        out = entry.exact()
        return (out if order is None else out[order]).contiguous().cpu()
    value = entry.make().detach()
    if pair.transposed:
        value = value.t()
    if pair.half is not None:
        value = value.chunk(2, 1)[pair.half]
    if tuple(value.shape) != entry.shape:
        raise UnsupportedModel(
            f"{pair.name} is {list(value.shape)} in the order of the file, its config says "
            f"{list(entry.shape)}: a GGUF has one shape for all layers"
        )
    if pair.offset:
        value = value.float() + pair.offset
    if order is not None:
        value = value[order.to(value.device)]
    value = value.cpu()
    try:
        if value.dim() == 3:
            each = weight if weight is not None and weight.dim() == 2 else [weight] * len(value)
            return torch.stack([kquants.quantize(v, entry.kind, w) for v, w in zip(value, each, strict=True)])
        matrix = value.reshape(-1, value.shape[-1])
        return kquants.quantize(matrix, entry.kind, weight).view(*value.shape[:-1], -1)
    except PatchError as error:
        raise type(error)(f"{pair.name}: {error}") from None


def _check_target(target: Path) -> None:
    if target.is_dir():
        raise PatchError(f"{target} is a folder; a GGUF is one file")
    if not target.parent.is_dir():
        raise PatchError(f"{target.parent} is no folder")
    if not os.access(target.parent, os.W_OK):
        raise PatchError(f"{target.parent} cannot be written to")


@contextmanager
def _replacing(target: Path) -> Iterator[Path]:
    """A new file beside `target`, which becomes it at the end or vanishes."""
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        yield partial
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)
