"""One table row a recipe, each measured in a process of its own: bytes, memory, speed, quality.

`python -m hfaccel.measure.rows SPEC` is that process: it prints one JSON line.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hfaccel.demo import demo_folder
from hfaccel.errors import PatchError
from hfaccel.recipe import EMPTY
from hfaccel.source import changes_no_weights, gguf_path

UNPATCHED = ("fp32", "bf16")  # rows of the model as it is
TOKENIZER_FILES = ("*token*", "vocab*", "merges*", "tekken.json", "*.model", "*.spm", "*.bpe")


class NoTokenizer(PatchError):
    """A folder that holds a model alone."""


@dataclass(frozen=True)
class Spec:
    """What to measure.

    Attributes:
        model: "demo", a folder, a hub id or a .gguf file.
        recipe: a recipe, or "fp32" / "bf16" for the unpatched model in that dtype.
        windows: perplexity windows of 1,024 tokens; 0 skips quality.
    """

    model: str
    recipe: str
    off_grid: bool = True
    prompt_tokens: int = 128
    new_tokens: int = 64
    repeats: int = 3
    windows: int = 4
    text: str = "Gravity is"


def load(model: str, *, off_grid: bool = False, **how: Any) -> tuple[Any, Any]:
    """Model (see `load_model`) and tokenizer of a MODEL argument. Raises: NoTokenizer."""
    return load_model(model, off_grid=off_grid, **how), load_tokenizer(model, off_grid=off_grid)


def load_model(
    model: str,
    *,
    off_grid: bool = False,
    dtype: Any = "auto",
    packed: bool = False,
    recipe: str | None = None,
) -> Any:
    """The model of a MODEL argument, which need not have a tokenizer.

    Args:
        packed: weights of a .gguf file as they are there; else dequantized, for a recipe or as a reference.
        recipe: that it is to be patched with. One that changes no weights (`kv8`) leaves those of other
            programs' files packed: the model comes patched with it, and patching it once more does nothing.
    """
    import hfaccel

    if model == "demo":
        loaded, _ = hfaccel.demo_model(off_grid=off_grid)
        return loaded if dtype == "auto" else loaded.to(dtype)
    if recipe is not None and changes_no_weights(recipe):
        return hfaccel.from_pretrained(model, recipe=recipe, dtype=dtype)
    if not packed and (gguf := gguf_path(model)) is not None:
        from hfaccel.formats.gguf import GGUFModel

        return GGUFModel(gguf).load(packed=False, dtype=dtype)
    return hfaccel.from_pretrained(model, dtype=dtype)


def load_tokenizer(model: str, *, off_grid: bool = False) -> Any:
    """The tokenizer of a MODEL argument. Raises: NoTokenizer for a folder with no file of one."""
    from transformers import AutoTokenizer

    if model == "demo":
        return AutoTokenizer.from_pretrained(demo_folder(off_grid=off_grid))
    if (gguf := gguf_path(model)) is not None:
        from hfaccel.formats.gguf_tokenizer import tokenizer_of

        return tokenizer_of(gguf)
    if Path(model).is_dir() and not any(
        path.match(kind) for path in Path(model).iterdir() for kind in TOKENIZER_FILES
    ):
        raise NoTokenizer(f"{model} has no tokenizer: tokenizer.save_pretrained({json.dumps(model)})")
    return AutoTokenizer.from_pretrained(model)


def tokenizer_beside(model: str) -> Any:
    """The tokenizer of a MODEL argument, or None: most recipes need none."""
    try:
        return load_tokenizer(model)
    except NoTokenizer:
        return None


def measure(spec: Spec) -> dict[str, Any]:
    """Measure one row in this process."""
    import psutil
    import torch

    import hfaccel
    from hfaccel.measure.corpus import text
    from hfaccel.measure.perplexity import kl
    from hfaccel.measure.speed import prompt_ids, speed
    from hfaccel.report import model_bytes

    process = psutil.Process()
    dtype = torch.bfloat16 if spec.recipe == "bf16" else torch.float32 if spec.recipe == "fp32" else "auto"
    packed = spec.recipe == EMPTY
    model, tokenizer = load(spec.model, off_grid=spec.off_grid, dtype=dtype, packed=packed)
    if spec.recipe not in UNPATCHED:
        hfaccel.patch(model, spec.recipe, tokenizer=tokenizer, progress=False)
    corpus = text("wikitext2_test")
    rate = speed(model, prompt_ids(tokenizer, corpus, spec.prompt_tokens), spec.new_tokens, spec.repeats)
    out: dict[str, Any] = {
        "recipe": spec.recipe,
        "weight_bytes": model_bytes(model),
        "ttft_s": rate.ttft_s,
        "decode_tokens_s": rate.decode_tokens_s,
        "samples": rate.samples,
        "threads": rate.threads,
        "peak_rss_bytes": _peak_rss(),
        "rss_bytes": process.memory_info().rss,
        "text": _continue(model, tokenizer, spec.text),
        "runs": hfaccel.report(model).runs if spec.recipe not in UNPATCHED else {},
    }
    if spec.windows:
        reference, _ = load(spec.model, off_grid=spec.off_grid, dtype=torch.float32)
        quality = kl(model, reference, tokenizer, corpus, windows=spec.windows, progress=False)
        out |= {
            "perplexity": quality.perplexity,
            "reference_perplexity": quality.reference_perplexity,
            "kl": quality.kl,
            "top1_agreement": quality.top1_agreement,
            "windows": quality.windows,
        }
    return out


def _peak_rss() -> int:
    """Bytes. Of this program alone where Linux says so: `ru_maxrss` begins with what its parent held."""
    try:
        with open("/proc/self/status") as file:
            return next(1024 * int(line.split()[1]) for line in file if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _continue(model: Any, tokenizer: Any, start: str) -> str:
    inputs = tokenizer(start, return_tensors="pt")
    out = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    return tokenizer.decode(out[0], skip_special_tokens=True)


def measure_apart(spec: Spec) -> dict[str, Any]:
    """Measure one row in a fresh process. Raises: PatchError with the process's last line if it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "hfaccel.measure.rows", json.dumps(asdict(spec))],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        last = last.partition(": ")[2] if last.startswith("hfaccel.errors.") else last
        raise PatchError(f"measuring {spec.recipe!r} on {spec.model!r} failed: {last}")
    return json.loads(done.stdout.strip().splitlines()[-1])


if __name__ == "__main__":
    print(json.dumps(measure(Spec(**json.loads(sys.argv[1])))))
