"""A GGUF file as data: its metadata and its table of tensors, checked, and its tensors mapped into memory.

    magic "GGUF", version u32 (2 or 3), tensors u64, keys u64
    keys times      name, type u32, value; an array is type u32, count u64 and its values
    tensors times   name, dimensions u32, each u64 (the fastest first), type u32, offset u64
    padding to `general.alignment` (32), then the tensors, each at its offset from here, a multiple of it

All little-endian; text is a u64 length and UTF-8. The file is from outside: every count and length is
compared with the bytes that are left before anything is made of it, so that a lie costs nothing.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hfaccel.errors import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_NAME_BYTES = 1 << 16
MAX_DIMENSIONS = 4

# Value types of metadata, in the order of their numbers; None where a value has no fixed size.
_SCALARS = ("B", "b", "H", "h", "I", "i", "f", "?", None, None, "Q", "q", "d")
_BOOL, _STRING, _ARRAY = 7, 8, 9


@dataclass(frozen=True)
class BlockType:
    """How a tensor's elements lie: blocks of `size` elements in `bytes` bytes."""

    number: int
    name: str
    size: int
    bytes: int


TYPES = {
    row[0]: BlockType(*row)
    for row in (
        (0, "F32", 1, 4),
        (1, "F16", 1, 2),
        (2, "Q4_0", 32, 18),
        (3, "Q4_1", 32, 20),
        (6, "Q5_0", 32, 22),
        (7, "Q5_1", 32, 24),
        (8, "Q8_0", 32, 34),
        (10, "Q2_K", 256, 84),
        (11, "Q3_K", 256, 110),
        (12, "Q4_K", 256, 144),
        (13, "Q5_K", 256, 176),
        (14, "Q6_K", 256, 210),
        (30, "BF16", 1, 2),
    )
}
# Known by name, and not read: codes that are looked up in tables, types of intermediate results, no weights.
UNREAD = {
    4: "Q4_2",
    5: "Q4_3",
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
}


class GGUFError(CheckpointError):
    """A GGUF file that cannot be read; the message names the file and the key or tensor."""


@dataclass(frozen=True)
class TensorInfo:
    """One row of the table of tensors.

    Attributes:
        shape: the slowest dimension first, as torch has it.
        start, bytes: where it lies in the file.
    """

    name: str
    type: BlockType
    shape: tuple[int, ...]
    start: int
    bytes: int


class GGUFFile:
    """An opened file.

    Attributes:
        metadata: key -> int, float, bool, text or a list of one of these.
        tensors: name -> TensorInfo, in the order of the file.
    Raises: GGUFError for a damaged file; OSError for one that cannot be opened.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        with self.path.open("rb") as file:
            size = file.seek(0, 2)
            if size < 24:
                self._fail(f"{size} bytes are no GGUF file")
            # A private map: torch wants memory that could be written to. Nobody writes, nothing is copied.
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        try:
            self._read()
        except BaseException:
            self._map.close()
            raise

    @property
    def bytes(self) -> int:
        """Of the whole file."""
        return len(self._map)

    def rows(self, name: str) -> Tensor:
        """The blocks of a tensor as they lie in the file: uint8 [rows, bytes of a row], mapped, not read."""
        info = self.tensors[name]
        flat = torch.frombuffer(self._map, dtype=torch.uint8, count=info.bytes, offset=info.start)
        return flat.view(-1, info.shape[-1] // info.type.size * info.type.bytes)

    # Reading ----------------------------------------------------------------------------------------------

    def _fail(self, what: str) -> None:
        raise GGUFError(f"{self.path}: {what}")

    def _read(self) -> None:
        data = self._map
        if data[:4] != MAGIC:
            self._fail(f"starts with {bytes(data[:4])!r}, a GGUF file with {MAGIC!r}")
        (version,) = struct.unpack_from("<I", data, 4)
        if version not in VERSIONS:
            swapped = int.from_bytes(data[4:8], "big") in VERSIONS
            why = "big-endian" if swapped else f"of version {version}"
            self._fail(f"{why}; known are little-endian files of versions {VERSIONS[0]} and {VERSIONS[1]}")
        tensors, keys = struct.unpack_from("<QQ", data, 8)
        self._at = 24
        self._fits(tensors, 24, f"{tensors} tensors")  # bytes of the least that describes one
        self._fits(keys, 13, f"{keys} metadata keys")
        for number in range(keys):
            key = self._text(f"name of metadata key {number}", MAX_NAME_BYTES)
            if not key or key in self.metadata:
                self._fail(f"metadata key {key!r} {'is there twice' if key else 'has no name'}")
            self.metadata[key] = self._value(key)
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 0 < alignment <= 1 << 20 or alignment & (alignment - 1):
            self._fail(f"general.alignment is {alignment!r}, not a power of two")
        infos = [self._tensor(number) for number in range(tensors)]
        self._place(infos, -(-self._at // alignment) * alignment, alignment)

    def _fits(self, count: int, each: int, what: str) -> None:
        left = len(self._map) - self._at
        if count * each > left:
            self._fail(f"{what} of at least {each} bytes, and {left} bytes are left: truncated or damaged")

    def _take(self, form: str, what: str) -> Any:
        size = struct.calcsize(f"<{form}")
        self._fits(1, size, what)
        (value,) = struct.unpack_from(f"<{form}", self._map, self._at)
        self._at += size
        return value

    def _text(self, what: str, most: int = 1 << 62) -> str:
        length = self._take("Q", what)
        if length > most:
            self._fail(f"{what} has {length} bytes, {most} at most")
        self._fits(1, length, what)
        raw = self._map[self._at : self._at + length]
        self._at += length
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            self._fail(f"{what} is not UTF-8: {error.reason} at byte {error.start} of {length}")

    def _value(self, key: str) -> Any:
        kind = self._take("I", f"type of {key}")
        if kind != _ARRAY:
            return self._scalar(key, kind)
        kind = self._take("I", f"type of {key}")
        count = self._take("Q", f"length of {key}")
        if kind == _ARRAY:
            self._fail(f"{key} is an array of arrays")
        if kind == _STRING:
            self._fits(count, 8, f"{key}: {count} texts")
            return [self._text(key) for _ in range(count)]
        form = self._form(key, kind)
        self._fits(count, struct.calcsize(f"<{form}"), f"{key}: {count} values")
        size = count * struct.calcsize(f"<{form}")
        if kind == _BOOL:
            return [self._flag(key) for _ in range(count)]
        out = list(struct.unpack_from(f"<{count}{form}", self._map, self._at))
        self._at += size
        return out

    def _scalar(self, key: str, kind: int) -> Any:
        if kind == _STRING:
            return self._text(key)
        form = self._form(key, kind)
        return self._flag(key) if kind == _BOOL else self._take(form, key)

    def _form(self, key: str, kind: int) -> str:
        if kind >= len(_SCALARS) or _SCALARS[kind] is None:
            self._fail(f"{key} is of the unknown type {kind}")
        return _SCALARS[kind]

    def _flag(self, key: str) -> bool:
        value = self._take("B", key)
        if value > 1:
            self._fail(f"{key} is a truth value of {value}")
        return bool(value)

    def _tensor(self, number: int) -> TensorInfo:
        """One row of the table; `start` is still an offset from the first tensor."""
        name = self._text(f"name of tensor {number}", MAX_NAME_BYTES)
        if not name:
            self._fail(f"tensor {number} has no name")
        dimensions = self._take("I", f"tensor {name}")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            self._fail(f"tensor {name} has {dimensions} dimensions; 1 to {MAX_DIMENSIONS} are known")
        shape = tuple(self._take("Q", f"tensor {name}") for _ in range(dimensions))[::-1]
        kind, offset = self._take("I", f"tensor {name}"), self._take("Q", f"tensor {name}")
        if kind not in TYPES:
            known = ", ".join(each.name for each in TYPES.values())
            self._fail(f"tensor {name} is of type {UNREAD.get(kind, kind)}; read are {known}")
        block, elements = TYPES[kind], math.prod(shape)
        if not 0 < elements < 1 << 62:
            self._fail(f"tensor {name} has the dimensions {list(shape)}")
        if shape[-1] % block.size:
            self._fail(f"tensor {name}: rows of {shape[-1]} in blocks of {block.size} ({block.name})")
        return TensorInfo(name, block, shape, offset, elements // block.size * block.bytes)

    def _place(self, infos: list[TensorInfo], base: int, alignment: int) -> None:
        for info in infos:
            if info.start % alignment:
                self._fail(f"tensor {info.name} lies at offset {info.start}, no multiple of {alignment}")
            if base + info.start + info.bytes > len(self._map):
                self._fail(
                    f"tensor {info.name} ends at byte {base + info.start + info.bytes} of "
                    f"{len(self._map)}: truncated or damaged"
                )
            if info.name in self.tensors:
                self._fail(f"tensor {info.name} is there twice")
            self.tensors[info.name] = TensorInfo(
                info.name, info.type, info.shape, base + info.start, info.bytes
            )
        ordered = sorted(self.tensors.values(), key=lambda info: info.start)
        for before, after in zip(ordered, ordered[1:], strict=False):
            if before.start + before.bytes > after.start:
                self._fail(f"tensors {before.name} and {after.name} overlap")
