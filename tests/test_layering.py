"""Who may import whom: kernels stand on torch, numpy and triton alone, and `import hfaccel` stays light."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
KERNELS = ROOT / "kernels" / "hfaccel_kernels"
HFACCEL = ROOT / "hfaccel"
LAZY = ("triton", "peft", "matplotlib", "fastapi", "uvicorn", "prometheus_client", "llguidance")
LAZY += ("pydantic", "rich", "typer", "gguf", "datasets", "pandas")


def imported(file: Path) -> set[str]:
    """Top-level names that a file imports anywhere, also inside functions."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text("utf-8"), str(file))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(node.module.split(".")[0])
    return names


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize(
    "file", sorted(KERNELS.rglob("*.py")), ids=lambda f: f.relative_to(KERNELS).as_posix()
)
def test_kernels_import_torch_numpy_and_triton_only(file):
    foreign = imported(file) - sys.stdlib_module_names - {"torch", "numpy", "triton", "hfaccel_kernels"}
    assert not foreign


def test_kernels_work_where_transformers_does_not_exist():
    """Every module of the package is imported with the upper layers blocked, lazily found ones included."""
    out = run(
        "import sys, pkgutil, importlib\n"
        "for name in ('transformers', 'hfaccel', 'peft', 'accelerate'): sys.modules[name] = None\n"
        "import hfaccel_kernels\n"
        "found = [m.name for m in pkgutil.walk_packages(hfaccel_kernels.__path__, 'hfaccel_kernels.')]\n"
        "for name in found: importlib.import_module(name)\n"
        "print(len(found))"
    )
    assert int(out) == len(list(KERNELS.rglob("*.py"))) - len(list(KERNELS.rglob("__init__.py")))


def test_kernels_folder_is_no_package():
    """It would shadow the PyPI package `kernels`, which transformers imports where it finds one."""
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_files_are_nouns():
    files = [f for top in (HFACCEL, KERNELS) for f in top.rglob("*.py")]
    assert len(files) > 20
    assert not [
        f for f in files if f.stem.lower() in ("util", "utils", "helper", "helpers", "common", "misc")
    ]


def test_every_folder_of_modules_is_a_package():
    """setuptools packs a folder without `__init__.py` too, but `pkgutil` and the test above do not see it."""
    folders = {f.parent for top in (HFACCEL, KERNELS) for f in top.rglob("*.py")}
    assert not [folder for folder in folders if not (folder / "__init__.py").exists()]


@pytest.mark.oldest
def test_importing_hfaccel_loads_nothing_optional():
    out = run(
        "import sys, json\n"
        "from transformers import LlamaForCausalLM\n"
        "before = set(sys.modules)\n"
        "import hfaccel\n"
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    new = {name.split(".")[0] for name in json.loads(out)}
    assert "hfaccel" in new
    assert not new & set(LAZY)
