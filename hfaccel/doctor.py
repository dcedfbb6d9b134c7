"""What of this machine hfaccel can use, one row a check; `hfaccel doctor` prints it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from importlib.util import find_spec

from hfaccel.compat import self_test

TESTED = {"torch": "2.11 to 2.13", "transformers": "5.17 to 5.24", "triton": "3.6 to 3.9"}

OPTIONAL = {
    "peft": "LoRA adapters",
    "matplotlib": "charts",
    "fastapi": "hfaccel serve",
    "uvicorn": "hfaccel serve",
    "prometheus_client": "metrics of hfaccel serve",
    "llguidance": "structured output",
}


def examine() -> list[dict[str, str]]:
    """Rows of what, found, state: "ok", "absent" (slower or less, but right) or "wrong" (mend it)."""
    rows = [_row("python", platform.python_version())]
    for package, tested in TESTED.items():
        try:
            rows.append(_row(package, f"{importlib.metadata.version(package)} (tested: {tested})"))
        except importlib.metadata.PackageNotFoundError:
            rows.append(_row(package, "not installed", "wrong" if package != "triton" else "absent"))
    moved = self_test()
    said = ", ".join(moved) or "all where hfaccel looks for it"
    rows.append(_row("private API", said, "wrong" if moved else "ok"))
    rows += [*_kernels(), *_caches(), *_devices()]
    for package, gives in OPTIONAL.items():
        found = find_spec(package) is not None
        rows.append(
            _row(package, gives if found else f"not installed: no {gives}", "ok" if found else "absent")
        )
    return rows


def _row(what: str, found: str, state: str = "ok") -> dict[str, str]:
    return {"what": what, "found": found, "state": state}


def _kernels() -> list[dict[str, str]]:
    from hfaccel_kernels import native

    if not native.available():
        return [_row("C++ kernels", f"{native.reason()}; plain torch serves, slower", "absent")]
    return [_row("C++ kernels", f"{native.isa()}, {os.cpu_count()} cores")]


def _caches() -> list[dict[str, str]]:
    from hfaccel.demo import cache_dir
    from hfaccel.journal import spill_root

    out = []
    for name, place in {"cache": cache_dir(), "spill": spill_root()}.items():
        home = place
        while not os.path.isdir(home):
            home = os.path.dirname(home) or "/"
        writable = os.access(home, os.W_OK)
        free = shutil.disk_usage(home).free / 1e9
        out.append(_row(f"{name} folder", f"{place}, {free:.0f} GB free", "ok" if writable else "wrong"))
    return out


def _devices() -> list[dict[str, str]]:
    import torch

    if not torch.cuda.is_available():
        return [_row("GPU", "none: the CPU runs everything", "absent")]
    return [_row("GPU", torch.cuda.get_device_name(i)) for i in range(torch.cuda.device_count())]
