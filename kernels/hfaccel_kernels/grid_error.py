"""How far groups of weights lie from grids, weighted: what a search for grids asks of every candidate.

    error = s^2 sum_j h_j (q_j - x_j)^2,    x_j = w_j / s + z,    q_j = clamp(round(x_j), low, high)

in fp32, w / s as w * (1 / s). The C++ adds a group's elements in their order, whatever the number of rows and
threads and whichever the instruction set; the reference's sums are torch's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import dispatch, native


def grid_error(w: Tensor, h: Tensor, scale: Tensor, zero: Tensor, low: int, high: int) -> Tensor:
    """The error of one grid for each group and row.

    Args:
        w: fp32 [G, S, N], finite: S elements of N rows in each of G groups.
        h: fp32 [G, S], the weight of each element.
        scale, zero: fp32 [G, N]; a scale of 0 counts as 1.
        low, high: the lowest and highest code, of at most 8 bits.
    Returns: fp32 [G, N].
    Raises: ValueError if shapes, dtypes or devices do not fit.
    """
    groups, size, n = w.shape
    wanted = {"h": (h, (groups, size)), "scale": (scale, (groups, n)), "zero": (zero, (groups, n))}
    for name, (tensor, shape) in wanted.items():
        if tensor.shape != shape or tensor.dtype is not torch.float32 or tensor.device != w.device:
            raise ValueError(
                f"grid_error: {name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}, wanted fp32 "
                f"{shape} on {w.device}"
            )
    if w.dtype is not torch.float32:
        raise ValueError(f"grid_error: w is {w.dtype}, wanted fp32")
    return dispatch.choose("grid_error", w.device.type, w.dtype).function(w, h, scale, zero, low, high)


@dispatch.register("grid_error", "reference", priority=0, refusal=lambda call: "")
def grid_error_reference(w: Tensor, h: Tensor, scale: Tensor, zero: Tensor, low: int, high: int) -> Tensor:
    """The specification."""
    step = torch.where(scale == 0, 1.0, scale)
    x = w * step.reciprocal()[:, None] + zero[:, None]
    off = torch.round(x).clamp_(low, high).sub_(x).square_()
    return torch.bmm(h[:, None], off)[:, 0] * step.square()


def _refuses(call: dispatch.Call) -> str:
    if call.device != "cpu":
        return "CPU only"
    return "" if native.available() else f"no C++ kernels: {native.reason()}"


@dispatch.register("grid_error", "native", priority=20, refusal=_refuses)
def grid_error_native(w: Tensor, h: Tensor, scale: Tensor, zero: Tensor, low: int, high: int) -> Tensor:
    groups, size, n = w.shape
    w, h, scale, zero = (tensor.contiguous() for tensor in (w, h, scale, zero))
    error = torch.empty_like(scale)
    native.library().hfa_grid_error(
        *(tensor.data_ptr() for tensor in (w, h, scale, zero, error)),
        *(groups, size, n, low, high, torch.get_num_threads()),
    )
    return error
