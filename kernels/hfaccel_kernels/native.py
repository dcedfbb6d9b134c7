"""Build and load the C++ kernels.

`csrc/*.cpp` is compiled as it is, once per instruction set and only for the one in use, by the system
compiler into a shared library with a plain C ABI (`csrc/hfa.h`), and loaded with ctypes. No torch headers:
one library serves every torch. The first use takes seconds; later ones find it in `$HFACCEL_CACHE/kernels`
(or `$XDG_CACHE_HOME/hfaccel`, `~/.cache/hfaccel`), under a name that hashes sources, flags and compiler. The
last bytes of the file are a checksum of the rest, so a damaged one is seen and rebuilt.

The library links to no OpenMP runtime: it is handed the entry points of the one torch runs on
(csrc/parallel.h), so there is one thread pool and `torch.set_num_threads` rules it.

`HFACCEL_ISA=auto|avx512|avx2|neon|scalar` forces the instruction set.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from .layouts import ACT_CHUNK, Layout

log = logging.getLogger("hfaccel")

CSRC = Path(__file__).with_name("csrc")
ABI = 3  # HFA_ABI of csrc/hfa.h


class Isa(NamedTuple):
    machine: tuple[str, ...]  # platform.machine() values; () = any
    needs: frozenset[str]  # flags of /proc/cpuinfo
    flags: tuple[str, ...]


# In order of preference. No -march=native: the flags are part of the cache key and of what the tests force.
ISAS = {
    "avx512": Isa(
        ("x86_64", "AMD64"),
        frozenset("avx512f avx512bw avx512vl avx512dq avx512_vnni avx2 fma f16c".split()),
        (*"-mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mavx2 -mfma -mf16c".split(),),
    ),
    "avx2": Isa(("x86_64", "AMD64"), frozenset("avx2 fma f16c".split()), ("-mavx2", "-mfma", "-mf16c")),
    "neon": Isa(("aarch64", "arm64"), frozenset({"asimddp"}), ("-march=armv8.2-a+dotprod+fp16",)),
    "scalar": Isa((), frozenset(), ()),
}
# Contraction off: a*b+c rounds once only where a kernel says fma, or instruction sets would differ in bits.
_FLAGS = (
    *"-std=c++17 -O3 -fPIC -fno-math-errno -fno-trapping-math -ffp-contract=off -fvisibility=hidden".split(),
    *"-Wall -Werror=unknown-pragmas -Wno-psabi".split(),
)


class NativeError(RuntimeError):
    """The C++ kernels cannot be had; the message says why."""


def requested_isa() -> str:
    """`HFACCEL_ISA`, checked: "auto" or a name in `ISAS` that this CPU can run."""
    name = os.environ.get("HFACCEL_ISA", "auto") or "auto"
    if name == "auto":
        return name
    if name not in ISAS:
        raise ValueError(f"HFACCEL_ISA={name!r}: known are auto, {', '.join(ISAS)}")
    if name not in supported_isas():
        missing = sorted(ISAS[name].needs - _cpu_flags()) or [platform.machine()]
        raise ValueError(
            f"HFACCEL_ISA={name}: this CPU cannot run it (missing {', '.join(missing)}); it runs "
            f"{', '.join(supported_isas())}"
        )
    return name


def isa() -> str:
    """The instruction set in use."""
    name = requested_isa()
    return supported_isas()[0] if name == "auto" else name


@cache
def supported_isas() -> tuple[str, ...]:
    """Names in `ISAS` that this CPU runs, best first."""
    return tuple(
        name
        for name, known in ISAS.items()
        if (not known.machine or platform.machine() in known.machine) and known.needs <= _cpu_flags()
    )


@cache
def _cpu_flags() -> frozenset[str]:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return frozenset(line.partition(":")[2].split())
    return frozenset()


@cache
def compiler() -> tuple[tuple[str, ...], str] | None:
    """The command of the first of $CXX, g++, c++, clang++ that runs, and its version line.

    A $CXX that does not run is passed over, and that is said, once.
    """
    named = os.environ.get("CXX", "")
    for candidate in (named, "g++", "c++", "clang++"):
        command = tuple(shlex.split(candidate))
        if not command:
            continue
        if shutil.which(command[0]) is not None:
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                said = subprocess.run(
                    (*command, "--version"), capture_output=True, text=True, timeout=20, check=True
                )
                return command, said.stdout.partition("\n")[0]
        if candidate == named:
            log.warning("CXX=%s is no compiler that runs; g++, c++ and clang++ are tried", named)
    return None


def cache_folder() -> Path:
    """The build cache, made with mode 0700. It holds code that we load.

    Raises: NativeError if it is not ours alone to write.
    """
    root = os.environ.get("HFACCEL_CACHE") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "hfaccel"
    )
    folder = Path(root).absolute() / "kernels"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = folder.lstat()
    except OSError as error:
        raise NativeError(f"build cache {folder}: {error.strerror}; set HFACCEL_CACHE") from error
    if not stat.S_ISDIR(info.st_mode):
        raise NativeError(f"build cache {folder} is not a folder; set HFACCEL_CACHE")
    if info.st_uid != os.geteuid():
        raise NativeError(
            f"build cache {folder} belongs to another user (uid {info.st_uid}); set HFACCEL_CACHE"
        )
    if info.st_mode & 0o022:
        raise NativeError(
            f"build cache {folder} is writable by others (mode {info.st_mode & 0o777:o}); chmod go-w it"
        )
    return folder


def sources() -> list[Path]:
    return sorted(CSRC.glob("*.cpp"))


def _key(command: tuple[str, ...], version: str, flags: tuple[str, ...]) -> str:
    digest = hashlib.sha256(repr((command, version, flags)).encode())
    for path in sorted((*CSRC.glob("*.cpp"), *CSRC.glob("*.h"))):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:24]


def _sealed(path: Path) -> bool:
    """Whether the file is there and its last 32 bytes are the SHA-256 of the others."""
    try:
        data = path.read_bytes()
    except OSError:
        return False
    return len(data) > 32 and hashlib.sha256(data[:-32]).digest() == data[-32:]


def _compile(command: tuple[str, ...], flags: tuple[str, ...], target: Path) -> None:
    """Compile `csrc` and put the library at `target` in one step, sealed."""

    def run(*arguments: str) -> None:
        done = subprocess.run((*command, *arguments), capture_output=True, text=True)
        if done.returncode:
            raise NativeError(f"{' '.join((*command, *arguments))} failed:\n{done.stderr.strip()}")

    with tempfile.TemporaryDirectory(prefix="build-", dir=target.parent) as scratch:
        # What takes longest comes first, so that the cores end together.
        ordered = sorted(sources(), key=lambda source: not source.stem.startswith(("attend_", "tiles_")))
        objects = [(source, os.path.join(scratch, source.stem + ".o")) for source in ordered]
        with ThreadPoolExecutor(min(len(objects), os.cpu_count() or 1)) as pool:
            list(pool.map(lambda pair: run(*flags, "-c", str(pair[0]), "-o", pair[1]), objects))
        built = os.path.join(scratch, "library.so")
        run("-shared", *(name for _, name in objects), "-o", built)
        with open(built, "rb+") as file:
            digest = hashlib.sha256(file.read()).digest()
            file.write(digest)  # beyond what the ELF headers describe: loaders do not look at it
        os.chmod(built, 0o700)
        os.replace(built, target)


def build(name: str | None = None) -> Path:
    """The library of instruction set `name` (default: the one in use), built unless an intact one is cached.

    Raises: NativeError if there is no compiler, the compiler fails, or the cache is not ours, cannot be
        written or is full.
    """
    name = name or isa()
    found = compiler()
    if found is None:
        raise NativeError("no C++ compiler: $CXX, g++, c++ and clang++ were tried")
    flags = (*_FLAGS, f"-DHFA_ISA_{name.upper()}", *ISAS[name].flags)
    target = cache_folder() / f"{name}-{_key(*found, flags)}.so"
    if _sealed(target):
        return target
    try:
        with open(target.with_name(f"{name}.lock"), "w") as lock:
            # Not flock: a child forked meanwhile would hold that lock with us, and then wait for itself.
            with contextlib.suppress(OSError):  # a file system without locks: both build, the last replaces
                fcntl.lockf(lock, fcntl.LOCK_EX)
            if not _sealed(target):
                log.info("building the %s kernels with %s (once)", name, " ".join(found[0]))
                _compile(found[0], flags, target)
    except OSError as error:
        raise NativeError(f"building in {target.parent}: {error}; set HFACCEL_CACHE") from error
    return target


_lock = threading.Lock()
_loaded: dict[str | None, ctypes.CDLL] = {}
_failed: dict[str, str] = {}
_forked = False


def _after_fork() -> None:
    global _lock, _forked
    _lock = threading.Lock()  # another thread may have been building
    _forked = True


os.register_at_fork(after_in_child=_after_fork)


def library(name: str | None = None) -> ctypes.CDLL:
    """The loaded library of instruction set `name` (default: the one in use).

    Raises: NativeError if it cannot be had; asking again says the same without trying again.
    """
    found = _loaded.get(name or os.environ.get("HFACCEL_ISA"))  # this line is on the way of every call
    if found is not None:
        return found
    name = name or isa()
    with _lock:
        if name not in _loaded:
            if name in _failed:
                raise NativeError(_failed[name])
            try:
                if name not in supported_isas():
                    raise NativeError(f"this CPU cannot run {name}; it runs {', '.join(supported_isas())}")
                _loaded[name] = _load(build(name))
            except NativeError as error:
                _failed[name] = str(error)
                log.warning("C++ kernels are not available, slower torch operations serve: %s", error)
                raise
        found = _loaded[name]
        if name == supported_isas()[0]:
            _loaded[None] = _loaded[""] = _loaded["auto"] = found  # what HFACCEL_ISA may say for it
        return found


def available(name: str | None = None) -> bool:
    """Whether `library` gives one. Builds it if need be."""
    try:
        library(name)
    except NativeError:
        return False
    return True


def reason(name: str | None = None) -> str:
    """Why `available` is False; empty if it is not."""
    available(name)
    return _failed.get(name or isa(), "")


class Weight(ctypes.Structure):
    """`HfaWeight` of csrc/hfa.h."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("zero", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("n", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("ld", ctypes.c_int64),
        ("kind", ctypes.c_int32),
        ("bits", ctypes.c_int32),
        ("group", ctypes.c_int32),
        ("chunk", ctypes.c_int32),
        ("act_bits", ctypes.c_int32),
        ("scale_dtype", ctypes.c_int32),
        ("bias_dtype", ctypes.c_int32),
        ("code", ctypes.c_int32),
        ("act_scale", ctypes.c_float),
    ]


DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # HfaDtype
SCALES = {"fp32": 0, "fp16": 2, "double": 3, "fp16_min": 4, "super": 5, "super_min": 6}  # HfaDtype
CODES = {"int": 0, "nf4": 1, "e4m3": 2, "e5m2": 3}  # HfaCode
PACKED = 0  # HfaKind
PLAIN = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}


@cache
def packed(layout: Layout) -> dict[str, int | float]:
    """The fields of `Weight` that a packed layout decides."""
    return {
        "kind": PACKED,
        "bits": layout.bits,
        "group": min(layout.group, 2**31 - 1),
        "chunk": 0 if layout.act == "token" else ACT_CHUNK[layout.act_bits],
        "act_bits": layout.act_bits,
        "scale_dtype": SCALES[layout.scale_dtype],
        "code": CODES[layout.code],
        "act_scale": layout.act_scale,
    }


def _load(path: Path) -> ctypes.CDLL:
    try:
        lib = ctypes.CDLL(str(path))
    except OSError as error:  # mounted noexec, say
        raise NativeError(f"{error}; set HFACCEL_CACHE") from error
    if lib.hfa_abi() != ABI or lib.hfa_sizeof_weight() != ctypes.sizeof(Weight):
        raise NativeError(f"{path} speaks ABI {lib.hfa_abi()}, wanted {ABI}")
    if not _forked:  # a child lacks the pool's threads; as where it inherits the library, it runs on one
        _use_torchs_pool(lib)
    i32, i64, ptr = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p
    lib.hfa_linear.argtypes = [ptr, ptr, i32, i64, i64, ptr, i32, i64, i32]
    lib.hfa_acts_key.argtypes, lib.hfa_acts_key.restype = [ptr], i64
    lib.hfa_acts_bytes.argtypes, lib.hfa_acts_bytes.restype = [ptr, i64], i64
    return lib


def _use_torchs_pool(lib: ctypes.CDLL) -> None:
    """Hand over the entry points of csrc/parallel.h."""
    # dlsym over torch's own dependencies: the runtime that torch runs on, whatever it is called.
    runtime = ctypes.CDLL(torch._C.__file__)
    try:
        entries = [
            ctypes.cast(getattr(runtime, symbol), ctypes.c_void_p)
            for symbol in ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads", "omp_in_parallel")
        ]
    except AttributeError:
        log.warning("torch runs without OpenMP: C++ kernels use one thread")
    else:
        lib.hfa_set_openmp(*entries)
