"""Tensors of a GGUF file as tensors of the model: taken apart when they are asked for, and let go of."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from hfaccel.formats.gguf_blocks import decode_rows
from hfaccel.formats.gguf_file import GGUFFile, TensorInfo
from hfaccel.formats.gguf_names import Pair, inverse, row_order
from hfaccel.formats.gguf_pack import pack_blocks
from hfaccel.mapped import drop_pages
from hfaccel_kernels.layouts import Layout

# What is read row by row or is no matrix of a layer: stays a float tensor.
_DENSE = ("position_embd", "ffn_gate_inp")


@dataclass
class Source:
    """One tensor of the model, and where it lies in the file.

    Attributes:
        infos: one tensor, or gate and up of all experts.
        layout: of the packed form; None: a float tensor.
    """

    file: GGUFFile
    pair: Pair
    infos: list[TensorInfo]
    config: Any
    layout: Layout | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    @cached_property
    def order(self) -> Tensor | None:
        """`row_order`; asked for once the shape is known to be right."""
        return row_order(self.pair, self.config)

    @property
    def shape(self) -> tuple[int, ...]:
        """As the model has it, not packed."""
        shape = self.infos[0].shape
        if len(self.infos) > 1:  # [E, out, in] twice
            return shape[0], sum(info.shape[1] for info in self.infos), shape[2]
        return shape[::-1] if self.pair.transposed else shape

    def rows(self, info: TensorInfo) -> Tensor:
        return self.file.rows(info.name)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The float tensor."""
        parts = []
        for info in self.infos:
            rows = self.rows(info)
            found = decode_rows(rows, info.type.name, info.type.bytes, dtype).view(info.shape)
            self.let_go(rows)
            parts.append(found)
        out = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        if self.pair.offset:
            out = (out.float() - self.pair.offset).to(dtype)
        if self.order is not None:
            out = out[inverse(self.order)]
        return out.T.contiguous() if self.pair.transposed else out

    def packed(self) -> dict[str, Tensor]:
        """The tensors of the layout, of experts [E, ...]."""
        info = self.infos[0]
        rows = [self.rows(info) for info in self.infos]
        if not self.pair.stacked:
            (whole,) = rows
            out = pack_blocks(
                whole if self.order is None else whole[inverse(self.order)], info.type, self.layout
            )
        else:
            experts = info.shape[0]
            matrices = (
                torch.cat([part.view(experts, -1, part.shape[1])[e] for part in rows]) for e in range(experts)
            )
            each = [pack_blocks(matrix, info.type, self.layout) for matrix in matrices]
            out = {name: torch.stack([one[name] for one in each]) for name in each[0]}
        for part in rows:
            self.let_go(part)
        return out

    def let_go(self, rows: Tensor) -> None:
        drop_pages(rows, str(self.file.path))


@dataclass
class Lazy:
    """A tensor for transformers' loader, made when it is asked for: `lazy[...]`."""

    source: Source
    dtype: torch.dtype
    part: str = ""  # of the packed form
    made: dict[str, Tensor] = field(default_factory=dict)  # shared by the parts of one matrix

    def is_floating_point(self) -> bool:
        return self.source.layout is None or (
            self.part == "weight_scale" and self.source.layout.dtype.is_floating_point
        )

    def __getitem__(self, _: Any) -> Tensor:
        if self.source.layout is None:
            return self.source.dense(self.dtype)
        with self.source.lock:
            if not self.made:
                self.made.update(self.source.packed())
            return self.made.pop(self.part)


def is_matrix(source: Source) -> bool:
    """Whether it is a matrix of a layer, of the head or of the embedding."""
    if source.pair.stacked:
        return True
    stem, _, suffix = source.pair.gguf.rpartition(".")
    return suffix == "weight" and len(source.infos[0].shape) == 2 and stem.split(".")[-1] not in _DENSE
