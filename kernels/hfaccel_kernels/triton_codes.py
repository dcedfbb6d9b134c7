"""Packed words on GPUs: which codes lie in them, what those stand for, and their scales (`layouts`)."""

from __future__ import annotations

import triton
import triton.language as tl

from .codebook import NF4_LEVELS

CODES = {"int": 0, "nf4": 1, "e4m3": 2, "e5m2": 3}


def _word(levels: tuple[int, ...]) -> int:
    return int.from_bytes(bytes(level & 255 for level in levels), "little", signed=True)


_NF4_0 = tl.constexpr(_word(NF4_LEVELS[0:4]))
_NF4_1 = tl.constexpr(_word(NF4_LEVELS[4:8]))
_NF4_2 = tl.constexpr(_word(NF4_LEVELS[8:12]))
_NF4_3 = tl.constexpr(_word(NF4_LEVELS[12:16]))


@triton.jit
def k_of(place, K_STEP: tl.constexpr, GROUP: tl.constexpr, GROUP_STEPS: tl.constexpr, GAPS: tl.constexpr, k):
    """Places on the padded K axis -> (elements of x, whether they exist)."""
    if GAPS:
        group = place // (GROUP_STEPS * K_STEP)
        inside = place - group * (GROUP_STEPS * K_STEP)
        at = group * GROUP + inside
        return at, (inside < GROUP) & (at < k)
    else:
        return place, place < k


@triton.jit
def words(base, first, last, COUNT: tl.constexpr, BITS: tl.constexpr, FLIP: tl.constexpr):
    """Words of COUNT steps from step `first` on, 0 from `last` on: [..., COUNT * 16], of 3 bits three of
    them.

    base: pointers [..., 1] or a pointer, at step 0.
    """
    i = tl.arange(0, COUNT * 16)
    good = first * 16 + i < last * 16
    if BITS == 3:
        at = (first * 48) + (i // 16) * 48 + i % 16
        w0 = tl.load(base + at, mask=good, other=0)
        w1 = tl.load(base + at + 16, mask=good, other=0)
        w2 = tl.load(base + at + 32, mask=good, other=0)
        return w0, w1, w2
    else:
        w0 = tl.load(base + first * 16 + i, mask=good, other=0)
        if FLIP:
            w0 = w0 ^ -2139062144  # 0x80 in each byte: signed to unsigned codes
        return w0, w0, w0


@triton.jit
def bits_of(w0, w1, w2, BITS: tl.constexpr, TOP: tl.constexpr):
    """Words [..., 1] -> their codes [..., codes a step], in bits TOP - BITS .. TOP - 1 of a clean int32."""
    CODES: tl.constexpr = 32 // BITS if BITS != 3 else 32
    e = tl.arange(0, CODES)
    i = e % 4
    q = e // 4
    LOW: tl.constexpr = TOP - BITS
    if BITS == 3:
        to = 8 * i + 2 * (q % 4) - LOW
        word = tl.where(q < 4, w0, w1)
        low = ((word >> tl.maximum(to, 0)) << tl.maximum(-to, 0)) & (3 << LOW)
        to = 8 * i + q - (LOW + 2)
        return low | (((w2 >> tl.maximum(to, 0)) << tl.maximum(-to, 0)) & (4 << LOW))
    else:
        to = 8 * i + (BITS % 8) * q - LOW
        return ((w0 >> tl.maximum(to, 0)) << tl.maximum(-to, 0)) & (((1 << BITS) - 1) << LOW)


@triton.jit
def value_of(code, CODE: tl.constexpr):
    """fp32 values of codes in a clean int32: NF4 levels as integers, or float8."""
    if CODE == 1:
        low = tl.where(code < 4, _NF4_0, _NF4_1)
        high = tl.where(code < 12, _NF4_2, _NF4_3)
        return ((tl.where(code < 8, low, high) << (24 - 8 * (code & 3))) >> 24).to(tl.float32)
    elif CODE == 2:  # as fp16, 2^-8 times the value: subnormals too
        half = ((code & 0x80) << 8) | ((code & 0x7F) << 7)
        return half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    else:
        return (code << 8).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def scale_of(scale, heads, block, group, lane, live, groups, DOUBLE: tl.constexpr):
    """fp32 scales of (block, group, lane), which broadcast; 0 where not live. DOUBLE: double_scales.py, with
    `heads` the same bytes as fp32."""
    if DOUBLE:
        tile = block.to(tl.int64) * ((groups + 15) // 16 * 8 + groups * 16) + group // 16 * 264
        step = tl.load(heads + tile // 4, mask=live, other=0.0)
        least = tl.load(heads + tile // 4 + 1, mask=live, other=0.0)
        code = tl.load(scale + tile + 8 + group % 16 * 16 + lane, mask=live, other=0)
        return code.to(tl.float32) * step + least
    else:
        at = block.to(tl.int64) * groups * 16 + group * 16 + lane
        return tl.load(scale + at, mask=live, other=0.0).to(tl.float32)
