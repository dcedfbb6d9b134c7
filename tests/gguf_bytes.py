"""GGUF files byte by byte, so that each may be wrong in one place; and random blocks of every type."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any

import torch

from hfaccel.formats.gguf_file import TYPES, BlockType

BY_NAME = {block.name: block for block in TYPES.values()}
# where the fp16 numbers of a block lie
HALVES = {
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}


def blocks_of(block: BlockType, count: int, seed: int = 0, top: int = 0x7C00) -> torch.Tensor:
    """Random blocks whose fp16 numbers are of either sign, with bits below `top`: by default any finite."""
    generator = torch.Generator().manual_seed(seed)
    out = torch.randint(0, 256, (count, block.bytes), dtype=torch.uint8, generator=generator)
    for at in HALVES.get(block.name, (0,)):
        halves = torch.randint(0, top, (count, 1), generator=generator).to(torch.int16)
        halves[0::2] += -32768
        out[:, at : at + 2] = halves.view(torch.uint8).view(count, 2)
    return out


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def value_of(value: Any) -> bytes:
    """Type and value of a metadata entry; bytes are taken as they are."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, bool):
        return struct.pack("<IB", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    each = [value_of(one) for one in value]
    return struct.pack("<I", 9) + each[0][:4] + struct.pack("<Q", len(each)) + b"".join(e[4:] for e in each)


@dataclass
class Tensor:
    """A tensor of the table; `shape` as torch has it. `offset` None: where the one before ends."""

    name: str | bytes
    shape: tuple[int, ...]
    type: int = 0
    data: bytes = b""
    offset: int | None = None


@dataclass
class File:
    """Everything that a file says; `bytes` writes it down without looking at it."""

    metadata: list[tuple[str | bytes, Any]] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    magic: bytes = b"GGUF"
    version: bytes = struct.pack("<I", 3)
    tensor_count: int | None = None
    key_count: int | None = None
    alignment: int = 32

    def bytes(self) -> bytes:
        def count(given: int | None, found: list) -> int:
            return len(found) if given is None else given

        counts = count(self.tensor_count, self.tensors), count(self.key_count, self.metadata)
        out = self.magic + self.version + struct.pack("<QQ", *counts)
        for key, value in self.metadata:
            out += text(key) + value_of(value)
        data = b""
        for tensor in self.tensors:
            data += b"\0" * (-len(data) % self.alignment)
            offset = len(data) if tensor.offset is None else tensor.offset
            shape = tensor.shape[::-1]
            out += text(tensor.name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape)
            out += struct.pack("<IQ", tensor.type, offset)
            data += tensor.data
        return out + b"\0" * (-len(out) % self.alignment) + data


def small_file() -> File:
    """A sound file of two tensors and metadata of every kind."""
    metadata: list[tuple[str | bytes, Any]] = [
        ("general.architecture", "llama"),
        ("some.flag", True),
        ("some.number", 7),
        ("some.real", 0.5),
        ("some.texts", ["a", "bc", ""]),
        ("some.numbers", [1, 2, 3]),
        ("some.flags", [True, False]),
    ]
    rows = blocks_of(BY_NAME["Q8_0"], 6).numpy().tobytes()
    tensors = [
        Tensor("first", (5,), 0, struct.pack("<5f", 1, 2, 3, 4, 5)),
        Tensor("second", (3, 64), 8, rows),
    ]
    return File(metadata, tensors)
