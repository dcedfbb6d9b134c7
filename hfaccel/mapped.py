"""Memory-mapped tensors: transformers maps safetensors files, and pages once read stay resident until told.

Loading maps a file and reads nothing; packing reads one matrix after the other. What has been read and is not
needed again is dropped here, so that a model that is quantized while it is loaded takes no more than what is
packed, what stays as it is, and the matrix at hand. On Linux alone; elsewhere the system drops such pages as
it needs memory.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

_DONTNEED = 4  # MADV_DONTNEED on Linux


def drop_pages(tensor: Tensor, file: str) -> int:
    """Let go of the resident pages that lie wholly inside a tensor, if they are mapped from `file`.

    They are read again from the file should anyone touch them, so the file must hold the tensor's bits.
    Returns: bytes that may be gone, 0 if the tensor is not mapped from there.
    """
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or not tensor.numel():
        return 0
    page = mmap.PAGESIZE
    start, stop = tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()
    first, last = -(-start // page) * page, stop // page * page  # pages at the ends have neighbours in them
    if first >= last:
        return 0
    for low, high, name in _mappings():
        if low <= first and last <= high:
            if name != os.path.realpath(file):
                return 0
            libc = ctypes.CDLL(None, use_errno=True)
            gone = libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _DONTNEED) == 0
            return last - first if gone else 0
    return 0


def _mappings() -> Iterator[tuple[int, int, str]]:
    """(start, stop, file) of what this process has mapped; nothing where the system does not say."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        where, *_, name = (line.split(maxsplit=5) + [""])[:6]
        low, high = (int(part, 16) for part in where.split("-"))
        yield low, high, name
