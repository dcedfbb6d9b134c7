"""Rounding to GGUF's block types: which scales, and then which codes, stand for a block best.

For every block of weights x with weights v of their errors

    minimize    sum_j v_j (x_j - y_j)^2,    y_j what the type's codes and scales stand for (`gguf_encode`)

With calibration v_j = h_j, the mean square of input j: the diagonal of the layer's own error. Without it
large weights count more than small ones, as they do where nothing is known of the inputs but that they are
alike: v_j = rms(x) + |x_j|.

Groups (a block, or a part of a superblock) are searched for alone: some twenty scales around the one that
just covers the group, codes of each, and the scale (and minimum) that least squares gives these codes. A
superblock's scales are integers times a common factor. Their search goes on from there by turns, each of
which can only lower the error: integers next to the chosen ones with all their codes rounded anew, then the
common factors by least squares over the superblock.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor

from hfaccel.errors import PatchError
from hfaccel.formats import gguf_encode

_CHUNK_ELEMENTS = 1 << 17  # searched at a time, so that a handful of buffers stays in cache
_TURNS = 2  # of integers and common factors, in a superblock
_TINY = torch.finfo(torch.float32).tiny


def quantize(weight: Tensor, kind: str, importance: Tensor | None = None) -> Tensor:
    """Rows of a matrix in blocks of `kind`.

    Args:
        weight: [N, K], any float dtype; K a multiple of the block's elements.
        kind: a name of `gguf_encode.BLOCKS`.
        importance: [K], mean x^2 of each input over calibration; None if nothing is known.
    Returns: uint8 [N, K / elements * bytes].
    Raises: PatchError for unknown kinds, other widths, and weights that no scale of the type covers.
    """
    if kind not in gguf_encode.BLOCKS:
        raise PatchError(f"GGUF type {kind!r}: known are {', '.join(gguf_encode.BLOCKS)}")
    size, _ = gguf_encode.BLOCKS[kind]
    n, k = weight.shape
    if k % size:
        raise PatchError(f"rows of {k}: {kind} has blocks of {size}")
    if not weight.isfinite().all():
        raise PatchError("weights are not finite")
    if kind in _PLAIN:
        return _PLAIN[kind](weight).contiguous().view(torch.uint8).view(n, -1)
    h = None
    if importance is not None:
        if importance.shape != (k,):
            raise PatchError(f"importance of shape {list(importance.shape)} for rows of {k}")
        h = importance.float()
        if not (h.isfinite() & (h >= 0)).all():
            raise PatchError("importance has NaN, infinite or negative values")
        # What no input ever reaches still has to round to something near itself, should one come.
        h = (h + 1e-4 * h.mean() + _TINY).view(-1, size)
        h = h / h.mean()
    rows = max(1, _CHUNK_ELEMENTS // k)
    out = []
    for part in weight.split(rows):
        x = part.float().reshape(-1, size).t().contiguous()  # [size, M]: sums run over whole vectors
        v = None if h is None else h.repeat(part.shape[0], 1).t().contiguous()
        out.append(_BLOCK[kind](x, v).view(part.shape[0], -1))
    return torch.cat(out)


def half(weight: Tensor) -> Tensor:
    """In fp16, where it has to fit.

    Raises: PatchError if a finite value becomes infinite.
    """
    out = weight.to(torch.float16)
    if not out.isfinite().all():
        raise PatchError(f"fp16 ends at 65504, the largest weight is {float(weight.abs().max()):.6g}")
    return out


_PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "F32": lambda weight: weight.float(),
    "F16": half,
    "BF16": lambda weight: weight.to(torch.bfloat16),
}


# Blocks of 32 -----------------------------------------------------------------------------------------------


def _q8_0(x: Tensor, v: Tensor | None) -> Tensor:
    d = _held(x.abs().amax(0) / 127)
    return gguf_encode.q8_0(_codes(x, d, -127, 127).t().to(torch.int8).contiguous(), d)


def _symmetric(bits: int, encode: Callable) -> Callable:
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1

    def block(x: Tensor, v: Tensor | None) -> Tensor:
        v = _default_weights(x) if v is None else v
        plain = _held(_extreme(x) / low)
        best = _Kept(d=plain)
        best.offer(_error(x, v, _codes(x, plain, low, high).mul_(plain)), d=plain)
        d = _held(_search_symmetric(x, v, low, high))
        best.offer(_error(x, v, _codes(x, d, low, high).mul_(d)), d=d)
        d = best["d"]
        codes = _codes(x, d, low, high).sub_(low)
        return encode(codes.t().to(torch.uint8).contiguous(), d)

    return block


def _affine(bits: int, encode: Callable) -> Callable:
    top = (1 << bits) - 1

    def block(x: Tensor, v: Tensor | None) -> Tensor:
        v = _default_weights(x) if v is None else v
        low, high = x.amin(0), x.amax(0)
        m, d = _held(low), _held((high - low) / top)
        best = _Kept(d=d, m=m)
        best.offer(_error(x, v, _codes(x - m, d, 0, top).mul_(d).add_(m)), d=d, m=m)
        d, m = (_held(t) for t in _search_affine(x, v, low, high, top, negative=False))
        best.offer(_error(x, v, _codes(x - m, d, 0, top).mul_(d).add_(m)), d=d, m=m)
        d, m = best["d"], best["m"]
        return encode(_codes(x - m, d, 0, top).t().to(torch.uint8).contiguous(), d, m)

    return block


# Superblocks of 256 -----------------------------------------------------------------------------------------


def _k_affine(bits: int, encode: Callable) -> Callable:
    top, most = (1 << bits) - 1, 63

    def block(x: Tensor, v: Tensor | None) -> Tensor:
        v = _default_weights(x, 8) if v is None else v
        x, v = x.view(8, 32, -1), v.view(8, 32, -1)
        low, high = x.amin(1).clamp_max_(0), x.amax(1)
        scale, minus = _search_affine(x, v, low, high, top, negative=True)
        minus = -minus
        d, dmin = _held(scale.amax(0) / most), _held(minus.amax(0) / most)
        integers = [_integers(scale, d, most), _integers(minus, dmin, most)]
        best = _Kept(d=d, dmin=dmin, s=integers[0], m=integers[1])
        for turn in range(_TURNS + 1):
            s, m = _best_integers(x, v, best, top, most)
            error = _k_error(x, v, d, dmin, s, m, top)
            best.offer(error.sum(0), d=d, dmin=dmin, s=s, m=m)
            d, dmin, s, m = (best[name] for name in ("d", "dmin", "s", "m"))
            if turn < _TURNS:
                d, dmin = _common(x, v, d, dmin, s, m, top)
                best.offer(_k_error(x, v, d, dmin, s, m, top).sum(0), d=d, dmin=dmin, s=s, m=m)
                d, dmin = best["d"], best["dmin"]
        codes = _codes(x + (dmin * m)[:, None], (d * s)[:, None], 0, top)
        codes = codes.view(256, -1).t().to(torch.uint8).contiguous()
        return encode(codes, *(t.t().to(torch.uint8).contiguous() for t in (s, m)), d, dmin)

    return block


def _k_error(x: Tensor, v: Tensor, d: Tensor, dmin: Tensor, s: Tensor, m: Tensor, top: int) -> Tensor:
    """[8, M]: the error of each group, x and v [8, 32, M]."""
    scale, offset = (d * s)[:, None], (dmin * m)[:, None]
    y = _codes(x + offset, scale, 0, top).mul_(scale).sub_(offset)
    return _error(x, v, y, 1)


def _best_integers(x: Tensor, v: Tensor, at: _Kept, top: int, most: int) -> tuple[Tensor, Tensor]:
    """Each group's scale and minimum [8, M] among the integers next to its own."""
    d, dmin, s, m = (at[name] for name in ("d", "dmin", "s", "m"))
    found = _Kept(s=s, m=m)
    for ds, dm in product((0, -1, 1), repeat=2):
        one, two = (s + ds).clamp(0, most), (m + dm).clamp(0, most)
        found.offer(_k_error(x, v, d, dmin, one, two, top), s=one, m=two)
    return found["s"], found["m"]


def _common(
    x: Tensor, v: Tensor, d: Tensor, dmin: Tensor, s: Tensor, m: Tensor, top: int
) -> tuple[Tensor, Tensor]:
    """d and dmin [M] by least squares over a superblock, its codes and integers as they are."""
    a = _codes(x + (dmin * m)[:, None], (d * s)[:, None], 0, top).mul_(s[:, None])
    b = -m[:, None].expand_as(a)
    va, vb = v * a, v * b
    aa, ab, bb = ((p * q).sum((0, 1)) for p, q in ((va, a), (va, b), (vb, b)))
    ax, bx = (va * x).sum((0, 1)), (vb * x).sum((0, 1))
    det = aa * bb - ab * ab
    both = det > 1e-6 * aa * bb
    det = torch.where(both, det, 1.0)
    new_d = torch.where(both, (ax * bb - bx * ab) / det, d)
    new_min = torch.where(both, (bx * aa - ax * ab) / det, dmin)
    alone = ~both & (aa > 0) & (bb == 0)  # no minimum anywhere
    new_d = torch.where(alone, ax / torch.where(alone, aa, 1.0), new_d)
    return _held(new_d.clamp_min_(0)), _held(new_min.clamp_min_(0))


def _q6_k(x: Tensor, v: Tensor | None) -> Tensor:
    low, high, most = -32, 31, 127
    v = _default_weights(x, 16) if v is None else v
    x, v = x.view(16, 16, -1), v.view(16, 16, -1)
    scale = _search_symmetric(x, v, low, high)
    extreme = _extreme(scale)  # the largest scale, with its sign, takes the code -128
    d = _held(extreme / -128)
    s = _integers(scale, d, most, -128)
    best = _Kept(d=d, s=s)

    def error(d: Tensor, s: Tensor) -> Tensor:
        step = (d * s)[:, None]
        return _error(x, v, _codes(x, step, low, high).mul_(step), 1)

    for turn in range(_TURNS + 1):
        near = _Kept(s=s)
        for ds in (0, -1, 1):
            near.offer(error(d, one := (s + ds).clamp(-128, most)), s=one)
        s = near["s"]
        best.offer(error(d, s).sum(0), d=d, s=s)
        d, s = best["d"], best["s"]
        if turn < _TURNS:
            a = _codes(x, (d * s)[:, None], low, high).mul_(s[:, None])
            va = v * a
            aa = (va * a).sum((0, 1))
            new = _held(torch.where(aa > 0, (va * x).sum((0, 1)) / torch.where(aa > 0, aa, 1.0), d))
            best.offer(error(new, s).sum(0), d=new, s=s)
            d, s = best["d"], best["s"]
    codes = _codes(x, (d * s)[:, None], low, high).sub_(low).view(256, -1)
    return gguf_encode.q6_k(codes.t().to(torch.uint8).contiguous(), s.t().to(torch.int8).contiguous(), d)


# Groups -----------------------------------------------------------------------------------------------------


def _search_symmetric(x: Tensor, v: Tensor, low: int, high: int) -> Tensor:
    """The scale of least error of each group, [..., M], fp32, either sign; x and v [..., S, M].

    Given the codes q, the best scale is sum(v x q) / sum(v q^2) and lowers the error from that of all zeros
    by sum(v x q)^2 / sum(v q^2).
    """
    edge = _extreme(x, -2)
    inverse = low / torch.where(edge == 0, 1.0, edge)
    vx = v * x
    best = _Kept(d=edge / low)
    for step in range(-9, 10):
        q = _clamped(x * (inverse * (1 + 0.1 * step / -low)).unsqueeze(-2), low, high)
        dot, norm = (vx * q).sum(-2), (v * q).mul_(q).sum(-2)
        norm = torch.where(norm > 0, norm, 1.0)
        best.offer(-dot.square() / norm, d=dot / norm)
    return torch.where(edge == 0, 0.0, best["d"])


def _search_affine(
    x: Tensor, v: Tensor, low: Tensor, high: Tensor, top: int, *, negative: bool
) -> tuple[Tensor, Tensor]:
    """Scale and minimum of least error of each group, [..., M]; x and v [..., S, M].

    Args:
        low, high: the extremes that the first grid covers.
        negative: the minimum is 0 or below.
    """
    wide = high - low
    inverse = top / torch.where(wide > 0, wide, 1.0)
    vx, sv, base = v * x, v.sum(-2), x - low.unsqueeze(-2)
    svx = vx.sum(-2)
    best = _Kept(d=wide / top, m=low)
    for step in range(-10, 11):
        q = _clamped(base * (inverse * (1 + 0.1 * step / top)).unsqueeze(-2), 0, top)
        vq = v * q
        svq, svqq, svxq = vq.sum(-2), vq.mul_(q).sum(-2), (vx * q).sum(-2)
        det = sv * svqq - svq * svq
        flat = det <= 1e-7 * sv * svqq  # one code for all
        det = torch.where(flat, 1.0, det)
        d = torch.where(flat, wide / top, (sv * svxq - svx * svq) / det)
        m = torch.where(flat, low, (svqq * svx - svq * svxq) / det)
        if negative:
            alone = svxq / torch.where(svqq > 0, svqq, 1.0)
            d, m = torch.where(m > 0, alone, d), m.clamp_max(0)
        # the error less that of all zeros, of these codes on this grid
        error = d * d * svqq + 2 * d * m * svq + m * m * sv - 2 * d * svxq - 2 * m * svx
        best.offer(torch.where(d >= 0, error, torch.inf), d=d, m=m)
    return best["d"], best["m"]


class _Kept:
    """Of several offers the one of least error, for each of the errors' places on its own."""

    def __init__(self, **first: Tensor) -> None:
        self.error: Tensor | None = None
        self.values = first

    def __getitem__(self, name: str) -> Tensor:
        return self.values[name]

    def offer(self, error: Tensor, **values: Tensor) -> None:
        if self.error is None:
            self.error, self.values = error, values
            return
        better = error < self.error
        self.error = torch.where(better, error, self.error)
        self.values = {name: torch.where(better, new, self.values[name]) for name, new in values.items()}


def _default_weights(x: Tensor, groups: int = 1) -> Tensor:
    """What errors weigh where nothing is known of the inputs, [size, M]."""
    size = x.abs()
    parts = size.view(groups, -1, x.shape[-1])
    rms = parts.square().mean(1, keepdim=True).sqrt_()
    return (parts + rms).add_(_TINY).view_as(x)


def _extreme(x: Tensor, dim: int = 0) -> Tensor:
    """The value of largest magnitude, with its sign."""
    low, high = x.amin(dim), x.amax(dim)
    return torch.where(-low > high, low, high)


def _held(scale: Tensor) -> Tensor:
    """The nearest value of fp16, in fp32."""
    held = scale.to(torch.float16).float()
    if not held.isfinite().all():
        raise PatchError(f"a block needs the scale {float(scale.abs().max()):.6g}, fp16 ends at 65504")
    return held


def _integers(scale: Tensor, d: Tensor, high: int, low: int = 0) -> Tensor:
    return torch.round(scale / torch.where(d == 0, 1.0, d)).clamp_(low, high)


def _codes(x: Tensor, scale: Tensor, low: int, high: int) -> Tensor:
    """The nearest codes, as floats; those next to 0 where the scale is 0."""
    return _clamped(x * torch.where(scale == 0, 0.0, scale.reciprocal()), low, high)


def _clamped(x: Tensor, low: int, high: int) -> Tensor:
    return x.round_().clamp_(low, high)


def _error(x: Tensor, v: Tensor, y: Tensor, dim: int = 0) -> Tensor:
    return y.sub_(x).square_().mul_(v).sum(dim)


_BLOCK: dict[str, Callable[[Tensor, Tensor | None], Tensor]] = {
    "Q8_0": _q8_0,
    "Q4_0": _symmetric(4, gguf_encode.q4_0),
    "Q4_1": _affine(4, gguf_encode.q4_1),
    "Q5_0": _symmetric(5, gguf_encode.q5_0),
    "Q5_1": _affine(5, gguf_encode.q5_1),
    "Q4_K": _k_affine(4, gguf_encode.q4_k),
    "Q5_K": _k_affine(5, gguf_encode.q5_k),
    "Q6_K": _q6_k,
}
