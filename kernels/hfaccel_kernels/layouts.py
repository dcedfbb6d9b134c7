"""How quantized weights lie in memory: the one format that module, file, C++ plan and Triton kernels share.

A weight `[N, K]` (out, in) is cut into blocks of `ROWS` = 16 output rows. Inside a block, groups of `group`
K-elements follow each other (the last may be short), and inside a group *steps* of `k_step` K-elements. A
step interleaves 16 rows of 4 consecutive K-elements (a *quad*), so that one 64-byte line times one broadcast
of four activations is one `vpdpbusd` (AVX-512 VNNI) for 16 outputs:

    bits  k_step  bytes a step  where element (row r, k = 4*j + i inside the step) lies
    8     4       64            byte 16*0 + 4*r + i, the signed code in two's complement
    4     8       64            byte 4*r + i; quad j in bits 4*j .. 4*j+3 (j = 0, 1)
    2     16      64            byte 4*r + i; quad j in bits 2*j .. 2*j+1 (j = 0..3)
    3     32      192           low two bits: two lines as for 2 bits (quads 0-3, 4-7); high bit: byte
                                128 + 4*r + i, quad j in bit j (j = 0..7)
    5     32      320           low four bits: four lines as for 4 bits (quads 0-1, 2-3, 4-5, 6-7); high bit:
                                byte 256 + 4*r + i, quad j in bit j (j = 0..7)
    6     16      192           low four bits: two lines as for 4 bits (quads 0-1, 2-3); high two bits: byte
                                128 + 4*r + i, quad j in bits 2*j .. 2*j+1 (j = 0..3)

What a code stands for is `code`:

    int    below 8 bits unsigned, 0 .. 2^bits - 1. Asymmetric: w = scale * (code - zero), `zero` a uint8.
           Symmetric: the same with the constant zero 2^(bits-1); at 8 bits the stored code is already signed,
           w = scale * code (asymmetric 8 bits stores code - 128 and zero stays 0..255, so that w = scale *
           (stored + 128 - zero)). With a minimum (`scale_dtype`) unsigned, without a zero point:
           w = scale * code + minimum.
    nf4    4 bits, w = scale * codebook.NF4_LEVELS[code]: integers, so products are those of 8-bit codes
    e4m3   8 bits, w = scale * the float8 of these bits; `e5m2` likewise. One group a row

A short group is padded to whole steps and a ragged last block to 16 rows; padding codes decode to zero when
symmetric and are never read back by `packing.unpack_codes`.

    weight        uint8 [NB, block_bytes]   NB = ceil(N / 16)
    weight_scale  fp32 or fp16 [NB, G, 16]  G = ceil(K / group), 1 for group -1; padding rows 0
                  "double": uint8 [NB, ceil(G / 16) * 8 + G * 16], see `double_scales`, also for
                  which groups become zero
                  "fp16_min": fp16 [NB, G, 2, 16], each group's scales and then its minimums
                  "super", "super_min": uint8 [NB, ...], see `super_scales`; the latter has minimums
    weight_zero   uint8 [NB, G, 16] or None

The arithmetic of a product belongs to the layout as well (`act`). "chunk": on GPUs activations stay as they
are; on CPUs they are quantized per token in chunks (`chunks`), symmetric, one fp32 scale a chunk: `act_bits`
8 in chunks of 32 with scale max|x| / 127, or 16 in chunks of 64 with scale max|x| / 16256 and the code split
into two int8 planes, code = 128 * high + low, -64 <= low <= 63. Each chunk's int32 dot is exact and is added
in fp32 in chunk order, and after each, where there are minimums, minimum times the chunk's exact int32 sum.
Blocking over tokens, rows or threads cannot change a bit of it. 16 bits cost nothing
where reading the weights is the limit and twice the products where it is not: they are for the few inputs
with outliers (queries, keys, values and the head; see kernels/README.md for the figures).

"token", for 8 bits and one group a row: one scale a token, and on every device. Beside `int` max|x| / 127, or
`act_scale` where that is not 0, int8 codes and one exact int32 dot over K, times the product of both scales;
kernels refuse a K above `TOKEN_K`. Beside float8 max|x| / 448, x / scale rounded to e4m3, whose products with
the weights are exact in fp32 and are added there: of each four elements of K the first two to one sum, the
others to a second.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import lru_cache

import torch

from . import codebook, double_scales, super_scales

ROWS = 16
ACT_CHUNK = {8: 32, 16: 64}  # K-elements that share one activation scale, by act_bits
TOKEN_K = (2**31 - 1) // (128 * 127)  # as many products of int8 codes fit an int32 in any case
_K_STEP = {8: 4, 6: 16, 5: 32, 4: 8, 3: 32, 2: 16}
_STEP_BYTES = {8: 64, 6: 192, 5: 320, 4: 64, 3: 192, 2: 64}
SCALE_DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "double": torch.uint8,
    "fp16_min": torch.float16,
    "super": torch.uint8,
    "super_min": torch.uint8,
}
CODES = {"int": (8, 6, 5, 4, 3, 2), "nf4": (4,), "e4m3": (8,), "e5m2": (8,)}  # bits of each


@dataclass(frozen=True)
class Layout:
    """Grid of a packed weight and precision of what it is multiplied with.

    Attributes:
        bits: 8, 6, 5, 4, 3 or 2.
        group: input elements a scale, -1 for one group per output row.
        symmetric: no zero points.
        scale_dtype: "fp32", "fp16", "double" (8 bits themselves, with fp32 scales of their own), "fp16_min"
            (beside a minimum), "super" or "super_min" (integers under fp16, alone or beside a minimum).
        act_bits: 8 or 16, of activations in chunks, on CPUs.
        code: "int", "nf4", "e4m3" or "e5m2".
        act: "chunk" or "token", whatever shares a scale of the activations.
        act_scale: that scale, of all tokens; 0: each token's own.
        text: all this as the operators take it; `Layout.parse` reads it back.
    """

    bits: int
    group: int = -1
    symmetric: bool = True
    scale_dtype: str = "fp32"
    act_bits: int = 8
    code: str = "int"
    act: str = "chunk"
    act_scale: float = 0.0

    def __post_init__(self) -> None:
        if self.bits not in _K_STEP:
            raise ValueError(f"bits={self.bits!r}: known are {sorted(_K_STEP)}")
        if (
            isinstance(self.group, bool)
            or not isinstance(self.group, int)
            or self.group == 0
            or self.group < -1
        ):
            raise ValueError(
                f"group={self.group!r}: a positive number of input elements, or -1 for a whole row"
            )
        if self.scale_dtype not in SCALE_DTYPES:
            raise ValueError(f"scale_dtype={self.scale_dtype!r}: known are {', '.join(SCALE_DTYPES)}")
        if self.act_bits not in ACT_CHUNK:
            raise ValueError(f"act_bits={self.act_bits!r}: known are {sorted(ACT_CHUNK)}")
        if self.code not in CODES:
            raise ValueError(f"code={self.code!r}: known are {', '.join(CODES)}")
        if self.bits not in CODES[self.code]:
            raise ValueError(f"bits={self.bits}: {self.code} has {CODES[self.code][0]}")
        if self.has_minimum and (not self.symmetric or self.code != "int" or self.bits == 8):
            raise ValueError(f"scale_dtype={self.scale_dtype!r}: a minimum goes with unsigned codes alone")
        if self.bits in (5, 6) and not self.symmetric:
            raise ValueError(f"bits={self.bits}, symmetric=False: these have no zero points")
        if self.code != "int" and not self.symmetric:
            raise ValueError(f"symmetric=False: {self.code} has no zero points")
        if self.act not in ("chunk", "token"):
            raise ValueError(f"act={self.act!r}: known are chunk, token")
        if self.is_float and self.act != "token":
            raise ValueError(f"act={self.act!r}: {self.code} goes with token")
        if self.act == "token" and (self.bits, self.group, self.symmetric, self.act_bits) != (8, -1, True, 8):
            raise ValueError("act='token' goes with 8 bits, symmetric, one group a row, act_bits=8")
        fp32 = torch.finfo(torch.float32)
        if self.act_scale != 0 and not (self.static and fp32.tiny <= self.act_scale <= fp32.max):
            raise ValueError(
                f"act_scale={self.act_scale!r}: a positive fp32 number, with int and act='token'"
            )
        # Not a cached property: torch.compile cannot trace the lock that Python 3.11 takes in one.
        object.__setattr__(self, "text", json.dumps(self.to_dict()))

    @property
    def dtype(self) -> torch.dtype:
        """Of the stored scales."""
        return SCALE_DTYPES[self.scale_dtype]

    @property
    def has_minimum(self) -> bool:
        """Whether codes count from a float of each group, which lies beside its scale."""
        return self.scale_dtype in ("fp16_min", "super_min")

    @property
    def is_float(self) -> bool:
        return self.code in codebook.FLOAT8

    @property
    def static(self) -> bool:
        """Whether the activations' scale is fixed."""
        return self.act_scale != 0 and self.act == "token" and self.code == "int"

    @property
    def acts_key(self) -> tuple:
        """What of the layout, beside `chunks`, the quantized activations depend on."""
        return self.act_bits, self.act, self.is_float, self.act_scale

    @property
    def zero(self) -> int:
        """The code of a symmetric grid that stands for 0."""
        if self.has_minimum:
            return 0
        if self.code == "int":
            return 1 << (self.bits - 1)
        return codebook.NF4_ZERO if self.code == "nf4" else 0

    @property
    def k_step(self) -> int:
        return _K_STEP[self.bits]

    def too_long(self, k: int) -> str:
        """Why kernels refuse rows of `k` elements; "" if they do not."""
        if self.act == "token" and not self.is_float and k > TOKEN_K:
            return f"{k} inputs: one int32 holds a dot of int8 codes up to {TOKEN_K}"
        return ""

    def groups(self, k: int) -> int:
        return 1 if self.group == -1 else -(-k // self.group)

    def group_len(self, k: int) -> int:
        return k if self.group == -1 else min(self.group, k)

    def padded_k(self, k: int) -> int:
        """K after each group is padded to whole steps."""
        return sum(round_up(stop - start, self.k_step) for start, stop in self.spans(k))

    def spans(self, k: int) -> tuple[tuple[int, int], ...]:
        """(start, stop) of each group in K."""
        size = self.group_len(k)
        return tuple((start, min(start + size, k)) for start in range(0, k, size))

    def chunks(self, k: int) -> tuple[tuple[int, int], ...]:
        """(start, stop) of each activation chunk: groups cut into pieces of at most ACT_CHUNK[act_bits]."""
        if self.act == "token":
            return self.spans(k)
        size = ACT_CHUNK[self.act_bits]
        return tuple(
            (at, min(at + size, stop)) for start, stop in self.spans(k) for at in range(start, stop, size)
        )

    def block_bytes(self, k: int) -> int:
        return self.padded_k(k) // self.k_step * _STEP_BYTES[self.bits]

    def shapes(self, n: int, k: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each stored tensor of an `[n, k]` weight, by its name on the module."""
        blocks, groups = -(-n // ROWS), self.groups(k)
        scales = (groups, ROWS)
        if self.scale_dtype == "double":
            scales = (double_scales.row_bytes(groups),)
        elif self.scale_dtype == "fp16_min":
            scales = (groups, 2, ROWS)
        elif self.scale_dtype in super_scales.TILE:
            scales = (super_scales.row_bytes(groups, self.scale_dtype),)
        out = {
            "weight": ((blocks, self.block_bytes(k)), torch.uint8),
            "weight_scale": ((blocks, *scales), self.dtype),
        }
        if not self.symmetric:
            out["weight_zero"] = ((blocks, self.groups(k), ROWS), torch.uint8)
        return out

    def bytes(self, n: int, k: int) -> int:
        """Bytes of all stored tensors of an `[n, k]` weight."""
        return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in self.shapes(n, k).values())

    def to_dict(self) -> dict:
        return asdict(self)

    @staticmethod
    @lru_cache(maxsize=4096)
    def parse(text: str) -> Layout:
        return Layout(**json.loads(text))


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
