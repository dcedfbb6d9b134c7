"""A GGUF file as it is: memory that loading takes, time to the first token, and decoding beside int4.

`python -m hfaccel.measure.gguf [FILE]` measures a cold start in a process of its own, then decodes in this
one; FILE is the demo model's own by default, and is dropped from the page cache first.

    packed    bytes of all tensors as they are loaded, beside those of the file
    rise      resident memory after loading over that after the import of the model's class, and its peak
    allowed   the packed bytes and 100 MB
    seconds   from the start of the process: imports, then the model loaded, then the first token of a prompt
              of 32 (the choice of an executor is made there)
    decode    tokens a second times the bytes that one token reads: of the file as it is over that of `int4`
              made of the same file, the median of rounds in which both take turns; 0.9 is asked of it
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ALLOWED_BYTES = 100_000_000
PROMPT_TOKENS = 32
DECODE_TOKENS = (128, 64)  # of the prompt, and new ones


def measure(path: str) -> dict[str, Any]:
    """The row, measured in this process, which should have done nothing before."""
    import time

    import psutil

    started = psutil.Process().create_time()

    def since() -> float:
        return time.time() - started

    import torch
    from transformers import LlamaForCausalLM  # noqa: F401 what stays behind after its import is no cost of loading

    from hfaccel.measure.memory import _reset_peak, _status

    resident = _status("VmRSS")
    import hfaccel
    from hfaccel.report import model_bytes

    imported = since()
    _reset_peak()
    model = hfaccel.from_pretrained(path)
    loaded, rise, peak = since(), _status("VmRSS") - resident, _status("VmHWM") - resident
    prompt = torch.arange(100, 100 + PROMPT_TOKENS)[None] % model.config.vocab_size
    model.generate(prompt, max_new_tokens=1, do_sample=False)
    return {
        "file_bytes": os.path.getsize(path),
        "packed_bytes": model_bytes(model),
        "rise_bytes": rise,
        "peak_rise_bytes": peak,
        "allowed_bytes": model_bytes(model) + ALLOWED_BYTES,
        "imported_s": imported,
        "loaded_s": loaded,
        "first_token_s": since(),
        "threads": torch.get_num_threads(),
    }


def decode(path: str | Path, rounds: int, recipe: str = "int4") -> dict[str, Any]:
    """Decoding the file as it is and patched with a recipe: tokens a second, MB a token, and their ratio."""
    import torch

    import hfaccel
    from hfaccel.measure.bench import bytes_per_token
    from hfaccel.measure.speed import generate_once, prompt_ids

    models = {
        "file": hfaccel.from_pretrained(path, dtype=torch.float32),
        recipe: hfaccel.from_pretrained(path, recipe, dtype=torch.float32),
    }
    size, new = DECODE_TOKENS
    ids = prompt_ids(None, "", size, vocab=models["file"].config.vocab_size)
    rates: dict[str, list[float]] = {name: [] for name in models}
    for model in models.values():
        generate_once(model, ids, 4)
    for turn in range(rounds):
        for name in list(models)[:: 1 if turn % 2 == 0 else -1]:
            first, total = generate_once(models[name], ids, new)
            rates[name].append((new - 1) / (total - first))
    read = {name: bytes_per_token(model) for name, model in models.items()}
    ratios = [a * read["file"] / (b * read[recipe]) for a, b in zip(*rates.values(), strict=True)]
    return {
        "recipe": recipe,
        "tokens_s": {name: statistics.median(found) for name, found in rates.items()},
        "bytes_per_token": read,
        "ratio": statistics.median(ratios),
        "ratios": ratios,
    }


def forget(path: str | Path) -> None:
    """Drop a file from the page cache."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m hfaccel.measure.gguf", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("file", nargs="?", default="demo", help="a .gguf file; 'demo': the demo model's own")
    parser.add_argument("--rounds", type=int, default=5, help="of decoding; 0: none")
    parser.add_argument("--json", action="store_true", help="the row as JSON")
    parser.add_argument("--row", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.row:
        print(json.dumps(measure(args.file)))
        return
    from hfaccel.demo import demo_gguf

    path = str(demo_gguf()) if args.file == "demo" else args.file
    forget(path)
    command = [sys.executable, "-m", "hfaccel.measure.gguf", path, "--row"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(done.returncode)
    row = json.loads(done.stdout.splitlines()[-1])
    if args.rounds:
        row["decode"] = decode(path, args.rounds)
    if args.json:
        print(json.dumps(row))
        return
    mb = {key: value / 1e6 for key, value in row.items() if key.endswith("_bytes")}
    print(f"packed   {mb['packed_bytes']:.1f} MB of a file of {mb['file_bytes']:.1f} MB")
    print(f"rise     {mb['rise_bytes']:.1f} MB, peak {mb['peak_rise_bytes']:.1f} MB")
    print(f"allowed  {mb['allowed_bytes']:.1f} MB")
    print(
        f"seconds  {row['imported_s']:.1f} imported, {row['loaded_s']:.1f} loaded, "
        f"{row['first_token_s']:.1f} first token ({row['threads']} threads)"
    )
    if found := row.get("decode"):
        each = [
            f"{name} {rate:.1f} tokens/s of {found['bytes_per_token'][name] / 1e6:.1f} MB"
            for name, rate in found["tokens_s"].items()
        ]
        spread = f"{min(found['ratios']):.3f} to {max(found['ratios']):.3f}"
        print(f"decode   {', '.join(each)}: {found['ratio']:.3f} x by bytes ({spread})")


if __name__ == "__main__":
    main()
