import os
import re
import subprocess
import sys
import time

import pytest
import torch

from hfaccel_kernels import native

needs_compiler = pytest.mark.skipif(native.compiler() is None, reason="no C++ compiler")

TINY = """
extern "C" __attribute__((visibility("default"))) int answer() { return 42; }
"""


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A build of one small source in a cache of its own; returns the source folder."""
    csrc = tmp_path / "csrc"
    csrc.mkdir()
    (csrc / "answer.cpp").write_text(TINY)
    monkeypatch.setattr(native, "CSRC", csrc)
    monkeypatch.setenv("HFACCEL_CACHE", str(tmp_path / "cache"))
    return csrc


def python(code: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=200,
    )


@needs_compiler
def test_a_build_is_kept_and_found_again(tiny):
    path = native.build("scalar")
    assert native.ctypes.CDLL(str(path)).answer() == 42
    folder = path.parent
    assert folder.stat().st_mode & 0o777 == 0o700
    before = path.stat()
    assert native.build("scalar") == path and path.stat().st_mtime_ns == before.st_mtime_ns
    assert [name for name in os.listdir(folder) if name.startswith("build-")] == []


@needs_compiler
@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty"])
def test_a_damaged_build_is_made_again(tiny, damage):
    path = native.build("scalar")
    data = bytearray(path.read_bytes())
    if damage == "flipped":
        data[len(data) // 2] ^= 1
    path.write_bytes(data[: {"truncated": len(data) // 2, "flipped": len(data), "empty": 0}[damage]])
    assert native.build("scalar") == path
    assert native.ctypes.CDLL(str(path)).answer() == 42


@needs_compiler
def test_sources_flags_and_isa_are_part_of_the_name(tiny):
    first = native.build("scalar")
    (tiny / "note.h").write_text("// a header counts too\n")
    second = native.build("scalar")
    assert first != second
    if "avx2" in native.supported_isas():
        assert native.build("avx2") not in (first, second)


@needs_compiler
def test_a_broken_source_says_what_the_compiler_said(tiny):
    (tiny / "broken.cpp").write_text("int f() { return nothing_by_this_name; }\n")
    with pytest.raises(native.NativeError, match="nothing_by_this_name"):
        native.build("scalar")
    assert not list((tiny.parent / "cache" / "kernels").glob("*.so"))


@needs_compiler
def test_an_openmp_pragma_is_refused(tiny):
    # It would be ignored in silence: the build has no -fopenmp.
    (tiny / "pragma.cpp").write_text(
        "void f(int* x) {\n#pragma omp parallel for\nfor (int i = 0; i < 9; ++i) x[i] = i;\n}\n"
    )
    with pytest.raises(native.NativeError, match="pragma"):
        native.build("scalar")


def test_a_cache_that_others_can_write_is_refused(tiny, monkeypatch):
    folder = native.cache_folder()
    folder.chmod(0o770)
    with pytest.raises(native.NativeError, match="writable by others"):
        native.build("scalar")
    folder.chmod(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    with pytest.raises(native.NativeError, match="belongs to another user"):
        native.build("scalar")


def test_a_link_or_a_file_in_place_of_the_cache_is_refused(tiny, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "kernels").symlink_to(tmp_path / "elsewhere")
    monkeypatch.setenv("HFACCEL_CACHE", str(tmp_path / "linked"))
    with pytest.raises(native.NativeError, match="not a folder"):
        native.cache_folder()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HFACCEL_CACHE", str(tmp_path / "file"))
    with pytest.raises(native.NativeError, match="HFACCEL_CACHE"):
        native.cache_folder()


@needs_compiler
def test_processes_that_build_at_once_do_not_collide(tiny):
    code = (
        "from pathlib import Path; import ctypes; from hfaccel_kernels import native; "
        f"native.CSRC = Path({str(tiny)!r}); assert ctypes.CDLL(str(native.build('scalar'))).answer() == 42"
    )
    running = [subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE) for _ in range(3)]
    for process in running:
        _, error = process.communicate(timeout=200)
        assert process.returncode == 0, error.decode()
    assert len(list((tiny.parent / "cache" / "kernels").glob("*.so"))) == 1


@needs_compiler
def test_a_child_forked_during_a_build_waits_for_it_and_no_longer(tiny, tmp_path):
    wrapper = tmp_path / "slow-c++"
    wrapper.write_text(
        f'#!/bin/sh\ntouch {tmp_path}/begun; sleep 0.5; exec {" ".join(native.compiler()[0])} "$@"\n'
    )
    wrapper.chmod(0o755)
    code = (
        "import os, sys, threading, time, pathlib; from hfaccel_kernels import native\n"
        f"native.CSRC = pathlib.Path({str(tiny)!r})\n"
        f"native.compiler = lambda: (({str(wrapper)!r},), 'slow')\n"
        "thread = threading.Thread(target=native.build, args=('scalar',)); thread.start()\n"
        f"while not os.path.exists({str(tmp_path / 'begun')!r}): time.sleep(0.02)\n"
        "if os.fork() == 0:\n    native.build('scalar'); os._exit(7)\n"
        "thread.join(); sys.exit(os.waitstatus_to_exitcode(os.wait()[1]) != 7)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@needs_compiler
def test_a_cache_that_cannot_be_written_is_said(tiny):
    (native.cache_folder() / "scalar.lock").mkdir()  # not even root opens this one for writing
    with pytest.raises(native.NativeError, match="kernels: .*scalar.lock.*; set HFACCEL_CACHE"):
        native.build("scalar")


@needs_compiler
def test_a_library_that_cannot_be_loaded_is_said(tiny, monkeypatch, caplog):
    def refuse(path):
        raise OSError(f"{path}: failed to map segment from shared object")

    monkeypatch.setattr(native, "_loaded", {})
    monkeypatch.setattr(native, "_failed", {})
    monkeypatch.setattr(native.ctypes, "CDLL", refuse)
    assert not native.available("scalar")
    assert "failed to map segment from shared object; set HFACCEL_CACHE" in native.reason("scalar")
    assert len(caplog.records) == 1


def test_without_a_compiler_torch_serves_and_says_so_once(tmp_path):
    code = (
        "import logging, torch; logging.basicConfig(); from packed import random_packed\n"
        "from hfaccel_kernels import native, dispatch; from hfaccel_kernels.layouts import Layout\n"
        "from hfaccel_kernels.qlinear import qlinear\n"
        "l = Layout(4, 64); p = random_packed(l, 20, 64)\n"
        "for _ in range(3): assert qlinear(torch.randn(2, 64), *p, None, l, 20, 64).shape == (2, 20)\n"
        "assert not native.available() and 'no C++ compiler' in native.reason()\n"
        "print(dispatch.explain('qlinear', 'cpu'))\n"
    )
    path = os.pathsep.join(p for p in sys.path if p)
    done = python(code, PATH=str(tmp_path), CXX="", HFACCEL_CACHE=str(tmp_path / "cache"), PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("reference; ") and "no C++ compiler" in done.stdout
    assert done.stderr.count("C++ kernels are not available") == 1


@needs_compiler
def test_cxx_is_asked_first(tmp_path, monkeypatch):
    command, version = native.compiler()
    wrapper = tmp_path / "my-c++"
    wrapper.write_text(f'#!/bin/sh\nexec {" ".join(command)} "$@"\n')
    wrapper.chmod(0o755)
    native.compiler.cache_clear()
    monkeypatch.setenv("CXX", f"{wrapper} -DMINE")
    try:
        assert native.compiler() == ((str(wrapper), "-DMINE"), version)
    finally:
        native.compiler.cache_clear()


@needs_compiler
@pytest.mark.parametrize("named", ["/nonexistent/c++ -O2", "false"])
def test_a_cxx_that_does_not_run_is_said(monkeypatch, caplog, named):
    monkeypatch.setenv("CXX", "")
    native.compiler.cache_clear()
    try:
        wanted = native.compiler()
        native.compiler.cache_clear()
        monkeypatch.setenv("CXX", named)
        assert native.compiler() == native.compiler() == wanted
        assert [record.getMessage().partition(" is")[0] for record in caplog.records] == [f"CXX={named}"]
    finally:
        native.compiler.cache_clear()


def test_an_isa_that_is_unknown_or_not_this_cpus_is_an_error(monkeypatch):
    monkeypatch.setenv("HFACCEL_ISA", "sse9")
    with pytest.raises(ValueError, match="'sse9': known are auto, avx512"):
        native.isa()
    foreign = next(name for name in native.ISAS if name not in native.supported_isas())
    monkeypatch.setenv("HFACCEL_ISA", foreign)
    with pytest.raises(ValueError, match=f"HFACCEL_ISA={foreign}: this CPU cannot run it"):
        native.isa()
    with pytest.raises(native.NativeError, match=f"this CPU cannot run {foreign}"):
        native.library(foreign)
    assert not native.available(foreign) and foreign in native.reason(foreign)
    monkeypatch.setenv("HFACCEL_ISA", "scalar")
    assert native.isa() == "scalar"


kernels = pytest.mark.skipif(not native.available(), reason=f"no C++ kernels: {native.reason()}")


def tasks() -> int:
    return len(os.listdir("/proc/self/task"))


@kernels
@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="no /proc")
def test_the_library_brings_no_openmp_runtime():
    """In a process of its own: other packages may have loaded theirs here."""
    code = (
        "import os; from hfaccel_kernels import native; native.library();"
        "print({l.split()[-1] for l in open('/proc/self/maps') if 'omp' in os.path.basename(l.split()[-1])})"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.count(".so") == 1 and "torch" in said, said


@kernels
def test_one_pool():
    lib = native.library()
    torch.set_num_threads(2)
    a = torch.randn(600, 600)
    (a @ a).exp().sum()
    before = tasks()
    for _ in range(5):
        assert lib.hfa_count_threads(2) == 2
        a.exp()
    assert tasks() == before, "the region started threads that torch's pool does not know"
    assert lib.hfa_count_threads(1) == 1


@kernels
def test_threads_sleep_when_there_is_nothing_to_do():
    native.library().hfa_count_threads(2)
    before = time.process_time()
    time.sleep(0.6)
    assert time.process_time() - before < 0.3  # a spinning thread would have used 0.6 s


@kernels
def test_a_forked_child_runs_on_one_thread():
    lib = native.library()
    lib.hfa_count_threads(2)
    child = os.fork()
    if child == 0:
        os._exit(lib.hfa_count_threads(2))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert lib.hfa_count_threads(2) == 2


@kernels
def test_a_child_that_loads_the_library_itself_runs_on_one_thread():
    """Its parent's pool has run, and the child has none of its threads."""
    code = (
        "import os, torch; from hfaccel_kernels import native; torch.set_num_threads(2)\n"
        "torch.randn(1 << 20).exp()\n"
        "if os.fork() == 0:\n    os._exit(native.library().hfa_count_threads(2))\n"
        "assert os.waitstatus_to_exitcode(os.wait()[1]) == 1\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_readme_names_every_source():
    text = (native.CSRC.parents[1] / "README.md").read_text()
    named = set(re.findall(r"`(\w+\.(?:h|cpp))`", text))
    assert named == {path.name for path in native.CSRC.iterdir()}
