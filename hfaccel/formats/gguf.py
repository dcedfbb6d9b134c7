"""A model from a GGUF file: its config, and its weights as they are in the file wherever a layout holds them.

Matrices of block types stay packed (`gguf_pack`), in the plan's own layouts; for a recipe that rounds anew
everything is dequantized. What is loaded packed is a patched model as one from a folder of ours is: `report`,
`save_pretrained` and `generate` know it.

Tensors are mapped, taken apart one matrix at a time, and let go of: memory grows by what is packed. Every
tensor of the file must be one of the model's, and every one of the model's must be there.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from reprlib import repr as shown  # long text and lists cut short
from typing import Any

import torch
from torch import Tensor, nn

from hfaccel.checkpoint import Packed, SavedConfig
from hfaccel.errors import PatchError, UnsupportedModel
from hfaccel.formats.gguf_config import config_of
from hfaccel.formats.gguf_file import GGUFError, GGUFFile, TensorInfo
from hfaccel.formats.gguf_names import Architecture, architecture_of_file, pairs
from hfaccel.formats.gguf_pack import GRIDS, layout_of
from hfaccel.formats.gguf_rope import ROPE_TENSORS
from hfaccel.formats.gguf_source import Lazy, Source, is_matrix
from hfaccel.formats.gguf_vocab import USUAL_IDS
from hfaccel.mapped import drop_pages
from hfaccel.recipe import PatchConfig

log = logging.getLogger("hfaccel")

# Inputs with outliers (see `quant/rounding.py`).
_WIDE = ("attn_q", "attn_k", "attn_v", "attn_qkv", "output", "token_embd")
_IDS = {"bos": "bos", "eos": "eos", "pad": "padding"}  # transformers' -> GGUF's
_FLOATS = {"F16": torch.float16, "BF16": torch.bfloat16}


class GGUFModel:
    """What a file says of a model: `config`, `sources`, and `load`.

    Raises: GGUFError, UnsupportedModel, each naming the file and the key or tensor.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.file = GGUFFile(path)
        with self._named():
            if self.file.metadata.get("split.count", 1) not in (0, 1):  # 0: joined again
                raise GGUFError(
                    "split.count: one of several files; llama.cpp's gguf-split --merge joins them"
                )
            self.row: Architecture = architecture_of_file(self.file.metadata)
            self.config = self._config()
            self.sources = self._sources()
        self.mixed: list[str] = []  # experts that no one layout holds

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Errors of the pieces name the file."""
        try:
            yield
        except GGUFError as error:
            if str(error).startswith(f"{self.path}: "):
                raise
            raise GGUFError(f"{self.path}: {error}") from None
        except UnsupportedModel as error:
            raise UnsupportedModel(f"{self.path}: {error}") from None

    # What the file says -----------------------------------------------------------------------------------

    def _config(self) -> Any:
        from huggingface_hub.errors import StrictDataclassError
        from transformers import AutoConfig

        tensors, metadata = self.file.tensors, self.file.metadata
        rope = {name: self._factors(tensors[name]) for name in ROPE_TENSORS if name in tensors}
        fields = config_of(self.row, metadata, tensors, rope)
        table = tensors.get("token_embd.weight")
        if table is None or len(table.shape) != 2:
            raise GGUFError("tensor token_embd.weight is missing or no matrix")
        fields["vocab_size"] = table.shape[0]
        if self._same_head():
            fields["tie_word_embeddings"] = True
        fields |= {f"{ours}_token_id": self._token_id(theirs) for ours, theirs in _IDS.items()}
        try:
            config = AutoConfig.for_model(self.row.model_type, **fields)
            # Kept by what the class derives of its fields, such as the size of a head.
            config.num_hidden_layers, config.num_attention_heads, config.hidden_size  # noqa: B018
        except (
            StrictDataclassError,
            ValueError,
            TypeError,
            ArithmeticError,
            LookupError,
            AttributeError,
        ) as error:
            reason = str(error).strip().replace("\n", " ")
            raise GGUFError(f"{self.row.model_type} cannot be made of its metadata: {reason}") from error
        config.architectures = [self.row.model_class]
        return config

    def _factors(self, info: TensorInfo) -> list[float]:
        """Rotary factors, of half a head."""
        if info.type.name != "F32" or len(info.shape) != 1 or info.shape[0] > 1 << 16:
            raise GGUFError(f"tensor {info.name} is {info.type.name} {list(info.shape)}: no rotary factors")
        return self.file.rows(info.name).view(torch.float32)[0].tolist()

    def _same_head(self) -> bool:
        """Whether the head is stored, and is the embedding again."""
        head, table = (self.file.tensors.get(f"{name}.weight") for name in ("output", "token_embd"))
        if head is None or (head.type, head.shape) != (table.type, table.shape):
            return False
        first, second = self.file.rows(head.name), self.file.rows(table.name)
        try:
            return all(torch.equal(a, b) for a, b in zip(first.split(4096), second.split(4096), strict=True))
        finally:
            for rows in (first, second):
                drop_pages(rows, str(self.path))

    def _token_id(self, name: str) -> int | None:
        metadata = self.file.metadata
        usual = USUAL_IDS if metadata.get("tokenizer.ggml.model") == "llama" else {}
        value = metadata.get(f"tokenizer.ggml.{name}_token_id", usual.get(name))
        if value is not None and (type(value) is not int or not 0 <= value < 1 << 31):
            raise GGUFError(f"tokenizer.ggml.{name}_token_id is {shown(value)}")
        return value

    def _sources(self) -> dict[str, Source]:
        """Our name -> where it lies. Raises: GGUFError for a tensor that the model has no place for."""
        left = dict(self.file.tensors)
        for name in ROPE_TENSORS:
            left.pop(name, None)
        if self.config.tie_word_embeddings:
            left.pop("output.weight", None)
        out: dict[str, Source] = {}
        for pair in pairs(self.row, self.config):
            info = left.pop(pair.gguf, None)
            if pair.stacked and info is None:
                raise GGUFError(f"tensor {pair.gguf} is missing")
            if info is None:
                continue
            if pair.stacked and len(info.shape) != 3:
                raise GGUFError(f"tensor {pair.gguf} is {list(info.shape)}: experts have three dimensions")
            if pair.half == 1:
                first = out[pair.name].infos[0]
                if (first.shape[0], first.shape[2]) != (info.shape[0], info.shape[2]):
                    raise GGUFError(
                        f"tensor {pair.gguf} is {list(info.shape)}, {first.name} {list(first.shape)}"
                    )
                out[pair.name].infos.append(info)
                continue
            out[pair.name] = Source(self.file, pair, [info], self.config)
        if left:
            more = f" and {len(left) - 1} others" if len(left) > 1 else ""
            raise GGUFError(f"tensor {next(iter(left))}{more}: not one that a {self.row.gguf} has")
        return out

    @cached_property
    def _types(self) -> set[str]:
        """Types of the matrices that could be packed."""
        return {
            info.type.name for source in self.sources.values() if is_matrix(source) for info in source.infos
        }

    @property
    def dtype(self) -> torch.dtype:
        """Of what is not packed: the file's where its matrices are floats of one type, else fp32, which every
        norm is stored in."""
        floats = self._types - set(GRIDS)
        return _FLOATS.get(next(iter(floats)), torch.float32) if len(floats) == 1 else torch.float32

    # Loading ----------------------------------------------------------------------------------------------

    def load(
        self,
        *,
        packed: bool = True,
        dtype: Any = "auto",
        transforms: PatchConfig | None = None,
        **hf_kwargs: Any,
    ) -> nn.Module:
        """The model, in eval mode.

        Args:
            packed: keep matrices of block types packed; else everything becomes `dtype`.
            dtype: of what is not packed; "auto": see `dtype`, and bf16 for what is dequantized.
            transforms: choices of the runtime for a packed model.
            hf_kwargs: for transformers' `from_pretrained`, such as `attn_implementation`.
        """
        with self._named():
            if packed:
                self._choose_layouts()
            given = dtype
            if dtype in ("auto", None):
                dequantized = {t for t in self._types if t in GRIDS} if not packed else self._dequantized()
                dtype = torch.bfloat16 if dequantized else self.dtype
            elif isinstance(dtype, str):
                dtype = getattr(torch, dtype, None)
            if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
                raise PatchError(f"dtype={given!r}: 'auto' or a float dtype of torch")
            return self._load(dtype, transforms, hf_kwargs).eval()

    def dense(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Every tensor of the model by our name, as floats; those of a tied head once."""
        import transformers

        with self._named():
            self._check_class(getattr(transformers, self.row.model_class))
            return {name: source.dense(dtype) for name, source in self.sources.items()}

    def _choose_layouts(self) -> None:
        for source in self.sources.values():
            kinds = {info.type.name for info in source.infos}
            if is_matrix(source) and len(kinds) == 1 and kinds <= set(GRIDS):
                stem = source.infos[0].name.split(".")[-2]
                source.layout = layout_of(kinds.pop(), wide=stem in _WIDE)
        # Both matrices of an expert have one layout (`QuantExperts`).
        for name, source in self.sources.items():
            if name.endswith(".gate_up_proj") and source.pair.stacked:
                other = self.sources[name.removesuffix("gate_up_proj") + "down_proj"]
                if source.layout != other.layout:
                    holder = name.rpartition(".")[0]
                    log.warning("%s: experts of two types are dequantized", holder)
                    self.mixed.append(holder)
                    source.layout = other.layout = None

    def _dequantized(self) -> bool:
        return any(
            is_matrix(source) and source.layout is None and source.infos[0].type.name in GRIDS
            for source in self.sources.values()
        )

    def _load(self, dtype: torch.dtype, transforms: PatchConfig | None, hf_kwargs: dict) -> nn.Module:
        import transformers
        from transformers import GenerationConfig

        from hfaccel.loading import FOREIGN

        cls = getattr(transformers, self.row.model_class)
        given: dict[str, Lazy] = {}
        for name, source in self.sources.items():
            if source.layout is None:
                given[name] = Lazy(source, dtype)
                continue
            made: dict[str, Tensor] = {}
            for part in ("weight", "weight_scale"):
                key = name.removesuffix("weight") + part if name.endswith(".weight") else name
                key += "_scale" if key == name and part == "weight_scale" else ""
                given[key] = Lazy(source, dtype, part, made)
        ids = {f"{ours}_token_id": getattr(self.config, f"{ours}_token_id") for ours in _IDS}
        ends = [ids["eos_token_id"], *(self._token_id(name) for name in ("eot", "eom"))]
        ends = list(dict.fromkeys(each for each in ends if each is not None))
        ids["eos_token_id"] = ends[0] if len(ends) == 1 else ends or None
        generation = GenerationConfig(**ids)
        record = self._record(dtype, transforms)
        if record.packed:
            self.config.quantization_config = record
        else:
            self._check_class(cls)
        token = FOREIGN.set(self._check)
        try:
            model = cls.from_pretrained(
                None,
                config=self.config,
                state_dict=given,
                dtype=dtype,
                generation_config=generation,
                **hf_kwargs,
            )
        finally:
            FOREIGN.reset(token)
            vars(self.config).pop("quantization_config", None)
        model.config.name_or_path = str(self.path)
        if record.packed:
            why = f"dequantized to {str(dtype).removeprefix('torch.')}: experts of two types"
            model._hfaccel.skipped |= dict.fromkeys(self.mixed, why)
        return model

    def _record(self, dtype: torch.dtype, transforms: PatchConfig | None) -> SavedConfig:
        """What a folder of the packed model would say."""
        record = SavedConfig(**SavedConfig.empty())
        record.dtype, record.config = dtype, transforms or PatchConfig()
        for name, source in self.sources.items():
            if source.layout is None:
                continue
            step = f"gguf:{source.infos[0].type.name}"
            if source.pair.stacked:
                holder = name.rpartition(".")[0]
                sizes = tuple(
                    size
                    for leaf in ("gate_up_proj", "down_proj")
                    for size in self.sources[f"{holder}.{leaf}"].shape
                )
                record.packed[holder] = Packed("experts", step, source.layout, sizes)
                continue
            kind = "embedding" if source.pair.gguf == "token_embd.weight" else "linear"
            record.packed[name.removesuffix(".weight")] = Packed(
                kind, step, source.layout, source.infos[0].shape
            )
        table, head = (self.row.outside[stem] for stem in ("token_embd", "output"))
        if self.config.tie_word_embeddings and table in record.packed:
            of_table = record.packed[table]
            record.packed[head] = Packed("linear", of_table.step, of_table.layout, of_table.sizes)
            record.tied = {f"{head}.{part}": f"{table}.{part}" for part in ("weight", "weight_scale")}
        return record

    def _check_class(self, cls: type[nn.Module]) -> None:
        with torch.device("meta"):
            self._check(cls(self.config))

    def _check(self, model: nn.Module) -> None:
        """Every tensor of the model is in the file, with its shape. Raises: GGUFError."""
        theirs = {pair.name: pair.gguf for pair in reversed(pairs(self.row, self.config))}
        head = f"{self.row.outside['output']}.weight"
        for name, tensor in model.state_dict().items():
            if name == head and self.config.tie_word_embeddings:
                continue
            source = self.sources.get(name)
            if source is None:
                raise GGUFError(f"tensor {theirs.get(name, name)} is missing")
            if source.shape != tuple(tensor.shape):
                wanted = list(tensor.shape[::-1] if source.pair.transposed else tensor.shape)
                found = source.infos[0]
                raise GGUFError(f"tensor {found.name} is {list(found.shape)}, the metadata makes it {wanted}")
        if extra := set(self.sources) - set(model.state_dict()):
            raise GGUFError(f"tensor {self.sources[min(extra)].infos[0].name}: not one that this model has")
