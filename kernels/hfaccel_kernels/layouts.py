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

Below 8 bits a code is unsigned, 0 .. 2^bits - 1. Asymmetric: w = scale * (code - zero), `zero` a uint8.
Symmetric: the same with the constant zero 2^(bits-1); at 8 bits the stored code is already signed, w = scale
* code (asymmetric 8 bits stores code - 128 and zero stays 0..255, so that w = scale * (stored + 128 - zero)).
A short group is padded to whole steps and a ragged last block to 16 rows; padding codes decode to zero when
symmetric and are never read back by `unpack`.

    weight        uint8 [NB, block_bytes]   NB = ceil(N / 16)
    weight_scale  fp32 or fp16 [NB, G, 16]  G = ceil(K / group), 1 for group -1; padding rows 0
    weight_zero   uint8 [NB, G, 16] or None

The arithmetic of a product belongs to the layout as well: activations are quantized per token in chunks
(`chunks`), symmetric, one fp32 scale a chunk: `act_bits` 8 in chunks of 32 with scale max|x| / 127, or 16 in
chunks of 64 with scale max|x| / 16256 and the code split into two int8 planes, code = 128 * high + low, -64
<= low <= 63. Each chunk's int32 dot is exact and is added in fp32 in chunk order. Blocking over tokens, rows
or threads cannot change a bit of it. 16 bits cost nothing where reading the weights is the limit and twice
the products where it is not: they are for the few inputs with outliers (queries, keys, values and the head;
see kernels/README.md for the figures).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

ROWS = 16
ACT_CHUNK = {8: 32, 16: 64}  # K-elements that share one activation scale, by act_bits
ACT_TOP = {8: 127, 16: 127 * 128}  # largest activation code
PEAK_FLOOR = 2.0**-100  # smaller chunks are zeros: the reciprocal must stay finite
_K_STEP = {8: 4, 4: 8, 3: 32, 2: 16}
_STEP_BYTES = {8: 64, 4: 64, 3: 192, 2: 64}


@dataclass(frozen=True)
class Layout:
    """Grid of a packed weight and precision of what it is multiplied with.

    Attributes:
        bits: 8, 4, 3 or 2.
        group: input elements a scale, -1 for one group per output row.
        symmetric: no zero points.
        scale_dtype: "fp32" or "fp16".
        act_bits: 8 or 16, of the activations on CPUs.
    """

    bits: int
    group: int = -1
    symmetric: bool = True
    scale_dtype: str = "fp32"
    act_bits: int = 8

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
        if self.scale_dtype not in ("fp32", "fp16"):
            raise ValueError(f"scale_dtype={self.scale_dtype!r}: known are fp32, fp16")
        if self.act_bits not in ACT_CHUNK:
            raise ValueError(f"act_bits={self.act_bits!r}: known are {sorted(ACT_CHUNK)}")

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.scale_dtype == "fp32" else torch.float16

    @property
    def zero(self) -> int:
        """The constant zero point of a symmetric grid, in unsigned codes."""
        return 1 << (self.bits - 1)

    @property
    def k_step(self) -> int:
        return _K_STEP[self.bits]

    def groups(self, k: int) -> int:
        return 1 if self.group == -1 else -(-k // self.group)

    def group_len(self, k: int) -> int:
        return k if self.group == -1 else min(self.group, k)

    def padded_k(self, k: int) -> int:
        """K after each group is padded to whole steps."""
        return sum(_round_up(stop - start, self.k_step) for start, stop in self.spans(k))

    def spans(self, k: int) -> tuple[tuple[int, int], ...]:
        """(start, stop) of each group in K."""
        size = self.group_len(k)
        return tuple((start, min(start + size, k)) for start in range(0, k, size))

    def chunks(self, k: int) -> tuple[tuple[int, int], ...]:
        """(start, stop) of each activation chunk: groups cut into pieces of at most ACT_CHUNK[act_bits]."""
        size = ACT_CHUNK[self.act_bits]
        return tuple(
            (at, min(at + size, stop)) for start, stop in self.spans(k) for at in range(start, stop, size)
        )

    def block_bytes(self, k: int) -> int:
        return self.padded_k(k) // self.k_step * _STEP_BYTES[self.bits]

    def shapes(self, n: int, k: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each stored tensor of an `[n, k]` weight, by its name on the module."""
        blocks = -(-n // ROWS)
        out = {
            "weight": ((blocks, self.block_bytes(k)), torch.uint8),
            "weight_scale": ((blocks, self.groups(k), ROWS), self.dtype),
        }
        if not self.symmetric:
            out["weight_zero"] = ((blocks, self.groups(k), ROWS), torch.uint8)
        return out

    def bytes(self, n: int, k: int) -> int:
        """Bytes of all stored tensors of an `[n, k]` weight."""
        return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in self.shapes(n, k).values())

    def to_dict(self) -> dict:
        return {
            "bits": self.bits,
            "group": self.group,
            "symmetric": self.symmetric,
            "scale_dtype": self.scale_dtype,
            "act_bits": self.act_bits,
        }


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@lru_cache(maxsize=256)
def _padding_index(layout: Layout, k: int) -> torch.Tensor | None:
    """Where each K-element lies in the padded K axis; None when nothing is padded."""
    if layout.padded_k(k) == k:
        return None
    index, at = [], 0
    for start, stop in layout.spans(k):
        index.extend(range(at, at + stop - start))
        at += _round_up(stop - start, layout.k_step)
    return torch.tensor(index)


def pack_codes(codes: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Pack codes of one weight.

    Args:
        codes: [N, K] uint8, 0 .. 2^bits - 1 (symmetric codes c are passed as c + 2^(bits-1)).
    Returns: uint8 [NB, block_bytes], on the device of `codes`.
    """
    n, k = codes.shape
    blocks, k_pad = -(-n // ROWS), layout.padded_k(k)
    index = _padding_index(layout, k)
    if index is not None or n % ROWS:
        full = codes.new_full((blocks * ROWS, k_pad), layout.zero)
        full[:n, index.to(codes.device) if index is not None else slice(None)] = codes
        codes = full
    # A quad is one int32 word, so that four codes are shifted at once: [blocks, steps, quad, row]
    steps = k_pad // layout.k_step
    quads = _words(codes).view(blocks, ROWS, steps, layout.k_step // 4).permute(0, 2, 3, 1)
    if layout.bits == 8:
        out = quads ^ _each(128)
    elif layout.bits == 4:
        out = quads[:, :, 0] | quads[:, :, 1] << 4
    elif layout.bits == 2:
        out = _planes2(quads)
    else:
        quads = quads.contiguous()
        low, high = quads & _each(3), quads >> 2 & _each(1)
        line = high[:, :, 0].clone()
        for j in range(1, 8):
            line |= high[:, :, j] << j
        out = torch.stack([_planes2(low[:, :, :4]), _planes2(low[:, :, 4:]), line], 2)
    return out.reshape(blocks, -1).contiguous().view(torch.uint8)


def _words(codes: torch.Tensor) -> torch.Tensor:
    """Bytes as int32, four to one; neither shifts below nor masks carry anything from byte to byte."""
    return codes.contiguous().view(torch.int32)


def _each(byte: int) -> int:
    """The int32 that has this byte four times."""
    return byte * 0x01010101 - (1 << 32 if byte > 127 else 0)


def _planes2(quads: torch.Tensor) -> torch.Tensor:
    return quads[:, :, 0] | quads[:, :, 1] << 2 | quads[:, :, 2] << 4 | quads[:, :, 3] << 6


def unpack_codes(weight: torch.Tensor, layout: Layout, n: int, k: int) -> torch.Tensor:
    """The inverse of `pack_codes`: uint8 [n, k] unsigned codes (8 bits: signed code + 128)."""
    blocks, k_pad = weight.shape[0], layout.padded_k(k)
    steps = k_pad // layout.k_step
    lines = _words(weight).view(blocks, steps, -1, ROWS)
    if layout.bits == 8:
        quads = lines ^ _each(128)
    elif layout.bits == 4:
        quads = torch.cat([lines & _each(15), lines >> 4 & _each(15)], 2)
    elif layout.bits == 2:
        quads = torch.cat([lines >> 2 * j & _each(3) for j in range(4)], 2)
    else:
        high = lines[:, :, 2]
        quads = torch.stack(
            [(lines[:, :, j // 4] >> 2 * (j % 4) & _each(3)) | (high >> j & _each(1)) << 2 for j in range(8)],
            2,
        )
    codes = quads.permute(0, 3, 1, 2).reshape(-1).view(torch.uint8).view(blocks * ROWS, k_pad)
    index = _padding_index(layout, k)
    return codes[:n] if index is None else codes[:n, index.to(codes.device)]


def pack_rows(per_row: torch.Tensor) -> torch.Tensor:
    """Scales or zeros [N, G] -> [NB, G, 16]; padding rows 0."""
    n, g = per_row.shape
    blocks = -(-n // ROWS)
    if n % ROWS:
        per_row = torch.cat([per_row, per_row.new_zeros(blocks * ROWS - n, g)])
    return per_row.view(blocks, ROWS, g).transpose(1, 2).contiguous()


def unpack_rows(packed: torch.Tensor, n: int) -> torch.Tensor:
    """The inverse of `pack_rows`: [NB, G, 16] -> [n, G]."""
    return packed.transpose(1, 2).reshape(-1, packed.shape[1])[:n]


def dequantize(
    weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, layout: Layout, n: int, k: int
) -> torch.Tensor:
    """The weight itself, fp32 [n, k]: scale * (code - zero)."""
    codes = unpack_codes(weight, layout, n, k)
    return dequantize_codes(
        codes, unpack_rows(scale, n), None if zero is None else unpack_rows(zero, n), layout
    )


def dequantize_codes(
    codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, layout: Layout
) -> torch.Tensor:
    """scale * (code - zero) for unsigned codes [n, k], scales and zeros [n, G]; fp32 [n, k]."""
    k = codes.shape[1]
    group = layout.group_len(k)
    out = codes.to(torch.float32)
    if layout.groups(k) * group == k:
        grouped = out.view(codes.shape[0], -1, group)
        grouped -= layout.zero if zero is None else zero.float()[:, :, None]
        grouped *= scale.float()[:, :, None]
        return out
    for g, (start, stop) in enumerate(layout.spans(k)):  # the last group is short
        z = layout.zero if zero is None else zero[:, g : g + 1].float()
        out[:, start:stop] = (out[:, start:stop] - z) * scale[:, g : g + 1].float()
    return out


def gather_rows(
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    layout: Layout,
    k: int,
    rows: torch.Tensor,
) -> torch.Tensor:
    """Embedding look-up in a packed weight: fp32 [*rows.shape, k], the rows of `dequantize` bit for bit."""
    flat = rows.reshape(-1)
    if not flat.numel():
        return torch.empty(*rows.shape, k, device=weight.device)
    block, lane = flat // ROWS, flat % ROWS
    lines = weight[block].view(flat.numel(), -1, ROWS, 4)
    mine = lines.gather(2, lane.view(-1, 1, 1, 1).expand(-1, lines.shape[1], 1, 4))
    # A block whose 16 rows are all this row decodes with the same code as any other; keep one row of it.
    codes = unpack_codes(
        mine.expand(-1, -1, ROWS, 4).reshape(flat.numel(), -1), layout, flat.numel() * ROWS, k
    )
    codes = codes.view(flat.numel(), ROWS, k)[:, 0]

    def pick(t):
        return t[block, :, lane]

    out = dequantize_codes(codes, pick(scale), None if zero is None else pick(zero), layout)
    return out.view(*rows.shape, k)


def quantize_activations(x: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
    """Per-token, per-chunk symmetric integers.

    Args:
        x: [M, K], any float dtype; computed in fp32.
    Returns: codes [M, K] int8 (act_bits 8) or int16 (16), and scales fp32 [M, chunks]; with top = 127 or
        16256: scale = max|x| / top, code = round half to even of x * (1 / max|x| * top), each operation in
        fp32; codes are 0 where max|x| <= PEAK_FLOOR. A NaN or infinity makes the scale one, and with it
        every output of the token.
    """
    x = x.float()
    spans, top = layout.chunks(x.shape[1]), ACT_TOP[layout.act_bits]
    codes = torch.empty(x.shape, dtype=torch.int8 if layout.act_bits == 8 else torch.int16, device=x.device)
    scales = torch.empty(x.shape[0], len(spans), device=x.device)
    for c, (start, stop) in enumerate(spans):
        part = x[:, start:stop]
        peak = part.abs().amax(1)
        inverse = torch.where(peak > PEAK_FLOOR, peak.reciprocal() * top, torch.zeros_like(peak))
        scales[:, c] = peak / top
        codes[:, start:stop] = torch.round(part * inverse[:, None]).clamp_(-top, top).to(codes.dtype)
    return codes, scales
