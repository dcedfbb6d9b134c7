"""Memory while patching: peak and what is left, on a random Llama of 1.17 B parameters or the demo model.

`python -m hfaccel.measure.memory [--model demo] [--dtype bf16 fp32] [--recipe int8 int4]` prints a table,
each row measured in a process of its own:

    peak         highest resident memory while patching, over that after the import of transformers'
                 LlamaForCausalLM, as a multiple of the original weights' bytes
    weights      bytes of all parameters and buffers afterwards, beside the arithmetic of codes, scales, zeros
    anonymous    anonymous memory afterwards over that after the import, beside the same arithmetic
    packed       share of the linears' bytes that are packed
    allowed      for recipes that calibrate: original weights, one block's activations (its input, of all
                 calibration tokens) and 300 MB, as a multiple like the peak

Peaks are VmHWM, reset before the patch; originals are spilled to HFACCEL_SPILL_DIR, which should be a disk.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any

SHAPE = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 49_152,
    "tie_word_embeddings": False,
}
DTYPES = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16"}


def measure(
    dtype: str, recipe: str, shape: dict[str, Any] | None = None, *, demo: bool = False
) -> dict[str, Any]:
    """One row, measured in this process, which should have done nothing before."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    resident, anonymous = _status("VmRSS"), _anonymous()

    import hfaccel
    from hfaccel.quant.linear import is_packed
    from hfaccel.report import model_bytes
    from hfaccel.samples import TOKENS

    tokenizer = None
    if demo:
        model, tokenizer = hfaccel.demo_model(off_grid=True)
        model.to(getattr(torch, DTYPES[dtype]))
    else:
        config = LlamaConfig(**(shape or SHAPE))
        model = LlamaForCausalLM._from_config(config, dtype=getattr(torch, DTYPES[dtype]))
    original = model_bytes(model)
    linears = {n: m.weight.nbytes for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    sizes = {name: tuple(model.get_submodule(name).weight.shape) for name in linears}
    _reset_peak()
    hfaccel.patch(model, recipe, tokenizer=tokenizer, progress=False)
    peak = _status("VmHWM")
    packed = {name: model.get_submodule(name) for name in linears if is_packed(model.get_submodule(name))}
    arithmetic = original - sum(linears[name] for name in packed)
    arithmetic += sum(_arithmetic(sizes[name], module.layout) for name, module in packed.items())
    return {
        "dtype": dtype,
        "recipe": recipe,
        "original_bytes": original,
        "peak_rise_bytes": peak - resident,
        "allowed_bytes": original + TOKENS * model.config.hidden_size * model.dtype.itemsize + 300_000_000,
        "weight_bytes": model_bytes(model),
        "arithmetic_bytes": arithmetic,
        "anonymous_rise_bytes": _anonymous() - anonymous,
        "packed_share": sum(linears[name] for name in packed) / sum(linears.values()),
    }


def _arithmetic(size: tuple[int, int], layout: Any) -> int:
    """Bytes of codes, scales and zero points, without any padding."""
    rows, columns = size
    groups = rows * (1 if layout.group == -1 else -(-columns // layout.group))
    scale = {"fp32": 4, "fp16": 2, "double": 1}[layout.scale_dtype]
    return rows * columns * layout.bits // 8 + groups * (scale + (0 if layout.symmetric else 1))


def _status(key: str) -> int:
    with open("/proc/self/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith(f"{key}:"))


def _anonymous() -> int:
    with open("/proc/self/smaps_rollup") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith("Anonymous:"))


def _reset_peak() -> None:
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def rows(dtypes: list[str], recipes: list[str], *, demo: bool = False) -> list[dict[str, Any]]:
    """Every combination, each in a fresh process."""
    out = []
    for dtype in dtypes:
        for recipe in recipes:
            one = ["--one", "--dtype", dtype, "--recipe", recipe, *(["--model", "demo"] if demo else [])]
            command = [sys.executable, "-m", "hfaccel.measure.memory", *one]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            out.append(json.loads(done.stdout.splitlines()[-1]))
    return out


def text(found: list[dict[str, Any]]) -> str:
    """The table."""
    from hfaccel.report import table

    heading = "original|recipe|MB before|peak|allowed|MB weights|arithmetic|MB anonymous|packed"
    lines = [tuple(heading.split("|"))]
    for row in found:
        base = row["arithmetic_bytes"]
        lines.append(
            (
                row["dtype"],
                row["recipe"],
                f"{row['original_bytes'] / 1e6:.0f}",
                f"{row['peak_rise_bytes'] / row['original_bytes']:.2f} x",
                f"{row['allowed_bytes'] / row['original_bytes']:.2f} x",
                f"{row['weight_bytes'] / 1e6:.0f}",
                f"{100 * (row['weight_bytes'] / base - 1):+.1f} %",
                f"{row['anonymous_rise_bytes'] / 1e6:.0f}",
                f"{100 * row['packed_share']:.1f} %",
            )
        )
    return table(lines)


def main() -> None:
    about = __doc__.splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m hfaccel.measure.memory", description=about)
    parser.add_argument("--model", choices=["random-1.17b", "demo"], default="random-1.17b")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["bf16", "fp32"])
    parser.add_argument("--recipe", nargs="+", default=["int8", "int4"])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", action="store_true", help="in this process, one line of JSON")
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(given.dtype[0], given.recipe[0], demo=given.model == "demo")))
        return
    found = rows(given.dtype, given.recipe, demo=given.model == "demo")
    print(json.dumps(found) if given.json else text(found))


if __name__ == "__main__":
    main()
