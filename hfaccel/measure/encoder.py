"""An encoder's forward, patched against bf16: `python -m hfaccel.measure.encoder [RECIPE]`.

BERT-base's shape with random weights, 8 rows of 128 tokens; both forms in one process, in alternating order,
and the median of the ratios within a round.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from hfaccel.report import table

ROWS, TOKENS, ROUNDS = 8, 128, 5


@torch.no_grad()
def measure(recipe: str = "int8", rounds: int = ROUNDS) -> dict[str, float]:
    """Seconds of a forward and the ratio bf16 / patched: above 1, the patched form is faster."""
    from transformers import BertConfig, BertModel

    import hfaccel

    torch.manual_seed(0)
    plain = BertModel(BertConfig()).to(torch.bfloat16).eval()
    patched = BertModel(BertConfig()).to(torch.bfloat16).eval()
    hfaccel.patch(patched, recipe, keep_original=False, progress=False)
    ids = torch.randint(0, plain.config.vocab_size, (ROWS, TOKENS))
    models = {"bf16": plain, recipe: patched}
    taken: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(rounds + 1):
        for name in list(models) if turn % 2 else list(models)[::-1]:
            start = time.perf_counter()
            models[name](input_ids=ids)
            if turn:  # the first is a warm-up
                taken[name].append(time.perf_counter() - start)
    ratios = [a / b for a, b in zip(taken["bf16"], taken[recipe], strict=True)]
    return {name: statistics.median(t) for name, t in taken.items()} | {"ratio": statistics.median(ratios)}


def main() -> None:
    about = __doc__.splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m hfaccel.measure.encoder", description=about)
    parser.add_argument("recipe", nargs="?", default="int8", help="what bf16 is measured against (int8)")
    recipe = parser.parse_args().recipe
    found = measure(recipe)
    rows = [("BERT-base, 8 x 128 tokens", "ms a forward")]
    rows += [(name, f"{found[name] * 1e3:.1f}") for name in ("bf16", recipe)]
    rows.append(("bf16 / " + recipe, f"{found['ratio']:.2f}"))
    print(table(rows))


if __name__ == "__main__":
    main()
