"""What the native plan's arithmetic costs: each layout beside the same weights with fp32 activations.

`python -m hfaccel.measure.accuracy [RECIPE[:bf16] ...]` patches the model by each recipe (loaded in fp32, or
with `:bf16` in bf16, where pages and logits are bf16 too; `gguf` is the demo model's own file, packed as it
is, or `--model FILE.gguf`) and prints, over the same windows of wikitext2_test:

plan        perplexity of the packed model through the native plan, pages included
fp32        perplexity of the very same weights: dequantized into a plain fp32 model of transformers
difference  of the two in %: what rounding activations, pages and logits changes, and nothing else
RMS         of the difference of logits, relative to the RMS of the fp32 model's, rows shifted to mean zero
largest     such difference, in units of a logit

The two see the same windows, so that a few are enough: the text's own spread cancels.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from hfaccel.demo import demo_gguf
from hfaccel.errors import PatchError
from hfaccel.generate import mixin
from hfaccel.measure import artifacts
from hfaccel.measure.corpus import text
from hfaccel.measure.perplexity import cut_windows, nll_sum
from hfaccel.measure.rows import load_tokenizer
from hfaccel.measure.runner_report import paged_logits

GGUF = "gguf"  # a file as it is, in place of a recipe
LIMIT = 0.5  # % of perplexity
LAYOUTS = (
    "runtime runtime:bf16 kv8:bf16 int8 int8-g64 int8-asym int8-tensor int8+kv8 "
    "int4 int4-sym int4-g40 int4+head4 int4:bf16 int4+kv8:bf16 int3 int2"
).split()
ROWS = 64  # of logits compared at a time


def accuracy(
    model: str, layout: str, windows: torch.Tensor, *, off_grid: bool = True, chunk_tokens: int = 512
) -> dict[str, Any]:
    """One row of the table, as a dict.

    Args:
        layout: a recipe, with ":bf16" for a model loaded in bf16.
        windows: ids [W, T].
    Raises: PatchError if the native plan does not serve the patched model.
    """
    import hfaccel

    recipe, _, dtype = layout.partition(":")
    if dtype not in ("", "bf16"):
        raise PatchError(f"{layout!r}: a recipe, or a recipe and ':bf16'")
    if recipe == GGUF:
        from hfaccel.formats.gguf import GGUFModel

        file = demo_gguf() if model == "demo" else model
        patched = hfaccel.from_pretrained(file)
        loaded = partial(GGUFModel(file).load, packed=False)
    else:
        folder = artifacts.folder(model, off_grid=off_grid)
        loaded = partial(AutoModelForCausalLM.from_pretrained, folder)
        patched = loaded(dtype=torch.bfloat16 if dtype else torch.float32).eval()
        hfaccel.patch(patched, recipe, keep_original=False, progress=False)
    if (executor := mixin.runner_of(patched).refresh()).name != "native":
        raise PatchError(f"{layout}: the {executor.name} executor serves it")
    plain = dequantized(loaded(dtype=torch.float32).eval(), patched)
    found = Difference()
    for ids in windows:
        mine = paged_logits(patched, ids[None], chunk_tokens=chunk_tokens)[0]
        with torch.no_grad():
            found.add(mine, plain(input_ids=ids[None], use_cache=False).logits[0], ids)
    return {"layout": layout, **found.summary(), "windows": len(windows)}


@torch.no_grad()
def dequantized(plain: nn.Module, patched: nn.Module) -> nn.Module:
    """`plain`, an unpatched fp32 twin, with the weights that `patched` stands for in place of its own."""
    from hfaccel.quant.linear import QuantExperts, is_packed

    for name, module in patched.named_modules():
        twin = plain.get_submodule(name)
        if isinstance(module, QuantExperts):
            for key in module.PROJECTIONS:
                weight = module.dequantize(key)
                getattr(twin, key).copy_(weight.mT if twin.is_transposed else weight)
        elif is_packed(module):
            weight = module.dequantize()
            twin.weight.copy_(weight.T if isinstance(twin, Conv1D) else weight)
        for key, parameter in twin.named_parameters(recurse=False):
            if (own := module._parameters.get(key)) is not None and own.is_floating_point():
                parameter.copy_(own)
    return plain


class Difference:
    """Perplexity of both and the distance of their logits, summed over windows."""

    def __init__(self) -> None:
        self.tokens, self.mine, self.theirs = 0, 0.0, 0.0
        self.error, self.power, self.largest = 0.0, 0.0, 0.0

    def add(self, mine: torch.Tensor, theirs: torch.Tensor, ids: torch.Tensor) -> None:
        """Logits [T, V] of ids [T]."""
        self.tokens += len(ids) - 1
        self.mine += nll_sum(mine, ids)
        self.theirs += nll_sum(theirs, ids)
        for a, b in zip(mine.split(ROWS), theirs.split(ROWS), strict=True):
            a, b = (x.float() - x.float().mean(-1, keepdim=True) for x in (a, b))
            gap = a.sub_(b)
            self.error += float(gap.square().sum(dtype=torch.float64))
            self.power += float(b.square().sum(dtype=torch.float64))
            self.largest = max(self.largest, float(gap.abs().max()))

    def summary(self) -> dict[str, float]:
        mine, theirs = math.exp(self.mine / self.tokens), math.exp(self.theirs / self.tokens)
        return {
            "perplexity": mine,
            "perplexity_fp32": theirs,
            "difference_percent": 100 * (mine / theirs - 1),
            "logits_rms": math.sqrt(self.error / self.power),
            "logits_max": self.largest,
        }


def machine() -> str:
    """Processor, instruction set and versions, for the line above a table."""
    from hfaccel.measure.bench import cpu_name
    from hfaccel_kernels import native

    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    return (
        f"{cpu_name()}, {native.isa()}, {torch.get_num_threads()} threads; "
        f"Python {platform.python_version()}, {versions}"
    )


HEADING = (
    "| layout | perplexity, plan | fp32 | difference | logits, relative RMS | largest |\n"
    "|---|---|---|---|---|---|"
)


def table_row(row: dict[str, Any]) -> str:
    """One row as kernels/README.md shows it."""
    return (
        f"| `{row['layout']}` | {row['perplexity']:.4f} | {row['perplexity_fp32']:.4f} "
        f"| {row['difference_percent']:+.3f} % | {row['logits_rms']:.1e} | {row['logits_max']:.2g} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m hfaccel.measure.accuracy", description=__doc__)
    parser.add_argument("layouts", nargs="*", default=LAYOUTS, metavar="RECIPE[:bf16]")
    parser.add_argument(
        "--model", default="demo", help="a folder, a .gguf file or 'demo', whose off-grid twin is taken"
    )
    parser.add_argument("--windows", type=int, default=8, help="of 1,024 tokens")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    tokenizer = load_tokenizer(args.model, off_grid=args.model == "demo")
    ids = cut_windows(tokenizer, text(), windows=args.windows)
    layouts = [GGUF] if args.model.endswith(".gguf") else args.layouts
    rows = (accuracy(args.model, each, ids, off_grid=args.model == "demo") for each in layouts)
    if args.json:
        return print(json.dumps(list(rows), indent=1))
    print(f"{args.model}, {len(ids)} windows of {ids.shape[1]} tokens of wikitext2_test; {machine()}\n")
    print(HEADING, flush=True)
    for row in rows:
        print(table_row(row), flush=True)


if __name__ == "__main__":
    main()
