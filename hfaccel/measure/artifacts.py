"""Files that peers read: GGUFs for llama.cpp, folders for the rest; made once, kept in the cache."""

from __future__ import annotations

import os
from pathlib import Path

from hfaccel.demo import cache_dir, demo_folder, demo_gguf
from hfaccel.errors import PatchError
from hfaccel.measure import memory

# Shapes by name, random weights: speed alone.
RANDOM = {"random-1.17b": memory.SHAPE | {"max_position_embeddings": 8192}}
FORMAT = 2  # of cached GGUFs; raise it when types or rounding change


def folder(model: str, *, off_grid: bool = False) -> Path:
    """The folder of a MODEL argument that any loader of transformers' format reads."""
    if model == "demo":
        return demo_folder(off_grid=off_grid)
    if model in RANDOM:
        return _random_folder(model)
    if not Path(model).is_dir():
        raise PatchError(f"{model!r}: peers need a folder, 'demo' or one of {', '.join(RANDOM)}")
    return Path(model)


def _random_folder(name: str) -> Path:
    place = cache_dir() / "bench" / name
    if not (place / "config.json").is_file():
        import torch
        from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = LlamaForCausalLM(LlamaConfig(**RANDOM[name], bos_token_id=1, eos_token_id=2))
        finally:
            torch.set_default_dtype(before)
        partial = place.with_name(f"{name}.{os.getpid()}")
        model.save_pretrained(partial)
        AutoTokenizer.from_pretrained(demo_folder()).save_pretrained(partial)
        os.replace(partial, place)
    return place


def gguf_file(model: str, kind: str, *, off_grid: bool = False) -> Path:
    """A GGUF of a type of `hfaccel export --format gguf:TYPE`: made, or the demo model's own file (Q4_1)."""
    if model == "demo" and kind == "Q4_1" and not off_grid:
        return demo_gguf()
    source = folder(model, off_grid=off_grid)
    target = cache_dir() / "bench" / f"{source.name}-{kind}-f{FORMAT}.gguf"
    if not target.is_file():
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from hfaccel.formats import gguf_out

        target.parent.mkdir(parents=True, exist_ok=True)
        loaded = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
        gguf_out.write(loaded, AutoTokenizer.from_pretrained(source), kind, target)
    return target
