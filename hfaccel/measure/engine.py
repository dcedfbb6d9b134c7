"""The engine's promises, each as ratios of one run: `python -m hfaccel.measure.engine [PART ...]`.

    prefix   time to first token of a second request behind the same system prompt, over the first's
    long     worst gap between tokens of running streams over their median while a long prompt comes in,
             with prompts cut into chunks and not
    lora     throughput of many adapters in a batch over the base's, beside the bytes that they add

What is compared alternates within each round; a ratio is the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hfaccel.measure.adapters import LINEARS, random_adapters
from hfaccel.measure.bench import bytes_per_token, cpu_name, read_bandwidth
from hfaccel.measure.corpus import text
from hfaccel.measure.rows import load as load_model
from hfaccel.measure.serve_load import percentile
from hfaccel.report import table
from hfaccel.serve.server import Server

QV = ("q_proj", "v_proj")
RANK = 16


class Stream:
    """One request and when each of its tokens came."""

    def __init__(self, server: Server, prompt: list[int], new_tokens: int, **options: Any):
        self.times: list[float] = []
        self.sent = time.perf_counter()
        self.opened = server.open(prompt, self._came, max_new_tokens=new_tokens, ignore_eos=True, **options)

    def _came(self, part: Any) -> None:
        if part.token is not None:
            self.times.append(time.perf_counter())

    def wait(self) -> Stream:
        """Raises: what ended it, if that is an error."""
        self.opened.request.done.wait()
        self.opened.answer()
        return self

    @property
    def ttft_s(self) -> float:
        return self.times[0] - self.sent

    @property
    def cached_tokens(self) -> int:
        return self.opened.request.cached_tokens or 0


def prefix(
    model: Any, tokens: list[int], *, shared: int = 1000, own: int = 20, rounds: int = 5, **_: Any
) -> dict[str, Any]:
    """Two requests one after the other behind `shared` same tokens; new ones each round."""
    ratios, firsts, seconds, cached = [], [], [], []
    with Server(model) as server:
        Stream(server, tokens[-8:], 2).wait()
        for turn in range(rounds):
            at = turn * (shared + 2 * own)
            system = tokens[at : at + shared]
            ends = [tokens[at + shared + n * own :][:own] for n in range(2)]
            first, second = (Stream(server, system + end, 2).wait() for end in ends)
            firsts.append(first.ttft_s)
            seconds.append(second.ttft_s)
            cached.append(second.cached_tokens)
            ratios.append(second.ttft_s / first.ttft_s)
    return {
        "shared_tokens": shared,
        "cached_tokens": statistics.median(cached),
        "first_ttft_s": statistics.median(firsts),
        "second_ttft_s": statistics.median(seconds),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
    }


def long(
    model: Any,
    tokens: list[int],
    *,
    prompt: int = 4000,
    streams: int = 8,
    new: int = 240,
    rounds: int = 3,
    budgets: tuple[int, ...] = (512,),
    **_: Any,
) -> dict[str, Any]:
    """`streams` requests decode; after a third of their tokens a prompt of `prompt` comes in.

    Gaps are those between a stream's tokens from then on until the long prompt's first token; the median is
    of all gaps of the streams before it came, so that the long prompt does not raise what it is held against.
    """
    out = []
    for chunked, budget in [(True, budget) for budget in budgets] + [(False, max(budgets))]:
        ratios, worst, medians, ttft = [], [], [], []
        with Server(model, chunked=chunked, token_budget=budget, prefix_cache=False) as server:
            Stream(server, tokens[-8:], 2).wait()
            for turn in range(rounds):
                begin = turn * 64
                running = [Stream(server, tokens[begin + n * 40 :][:32], new) for n in range(streams)]
                while any(len(stream.times) < new // 3 for stream in running):
                    time.sleep(0.002)
                came = time.perf_counter()
                one = Stream(server, tokens[begin : begin + prompt], 1).wait()
                for stream in running:
                    stream.wait()
                before, during = _gaps(running, came, one.times[0])
                medians.append(statistics.median(before))
                worst.append(max(during))
                ratios.append(worst[-1] / medians[-1])
                ttft.append(one.ttft_s)
        out.append(
            {
                "chunked": chunked,
                "token_budget": budget,
                "median_gap_s": statistics.median(medians),
                "worst_gap_s": statistics.median(worst),
                "ratio": statistics.median(ratios),
                "long_ttft_s": statistics.median(ttft),
                "ratios": ratios,
            }
        )
    return {"prompt_tokens": prompt, "streams": streams, "rows": out}


def _gaps(streams: list[Stream], came: float, first: float) -> tuple[list[float], list[float]]:
    """Gaps between tokens that ended before the long prompt came, and those that ended between then and the
    first token of a stream after the long prompt's own."""
    before, during = [], []
    for stream in streams:
        started = [t for t in stream.times if t >= max(other.times[0] for other in streams)]
        for a, b in zip(started, started[1:], strict=False):
            if b <= came:
                before.append(b - a)
            elif a <= first:
                during.append(b - a)
    return before, during


def lora(
    model: Any,
    tokens: list[int],
    *,
    requests: int = 32,
    loaded: int = 64,
    prompt: int = 128,
    new: int = 64,
    rounds: int = 3,
    **_: Any,
) -> dict[str, Any]:
    """`requests` at once over the base, over as many different ones of `loaded` adapters, and over one; their
    matrices on queries and values, and on all linears of the layers."""
    out = []
    for targets in (QV, LINEARS):
        with tempfile.TemporaryDirectory() as folder:
            names = [f"a{n}" for n in range(loaded)]
            made = random_adapters(model, folder, names, rank=RANK, targets=targets)
            out.append(_lora(model, tokens, made, targets, requests, prompt, new, rounds))
    return {"rank": RANK, "adapters_loaded": loaded, "requests": requests, "rows": out}


def _lora(model, tokens, made, targets, requests, prompt, new, rounds) -> dict[str, Any]:
    names = list(made)
    mixes: dict[str, Callable[[int], str | None]] = {
        "base": lambda n: None,
        "distinct": lambda n: names[n],
        "equal": lambda n: names[0],
    }
    rates: dict[str, list[float]] = {mix: [] for mix in mixes}
    decodes: dict[str, list[float]] = {mix: [] for mix in mixes}
    with Server(model, adapters=made, lora_slots=requests, prefix_cache=False) as server:
        for turn in range(rounds + 1):  # the first one warms up
            for mix in list(mixes) if turn % 2 else list(mixes)[::-1]:
                start = time.perf_counter()
                streams = [
                    Stream(server, tokens[n * prompt :][:prompt], new, adapter=mixes[mix](n))
                    for n in range(requests)
                ]
                for stream in streams:
                    stream.wait()
                if turn:
                    rates[mix].append(requests * new / (time.perf_counter() - start))
                    gaps = [b - a for s in streams for a, b in zip(s.times, s.times[1:], strict=False)]
                    decodes[mix].append(percentile(gaps, 50))
        adapters = server.engine.adapters
        values = sum(part.rank * (part.k + part.n) for part in adapters[names[0]].parts.values())
    width = model.dtype.itemsize
    ratio = {
        mix: statistics.median(a / b for a, b in zip(rates[mix], rates["base"], strict=True)) for mix in mixes
    }
    step = {mix: statistics.median(decodes[mix]) for mix in mixes}
    base_bytes = bytes_per_token(model)
    added = requests * values * width  # of a step of distinct adapters: each one's matrices once
    return {
        "targets": list(targets),
        "tokens_s": {mix: statistics.median(rates[mix]) for mix in mixes},
        "over_base": ratio,
        "distinct_over_equal": statistics.median(
            a / b for a, b in zip(rates["distinct"], rates["equal"], strict=True)
        ),
        "step_s": step,
        "adapter_bytes": values * width,
        "step_bytes": {"base": base_bytes, "adapters": added},
        "explained_step_ratio": (base_bytes + added) / base_bytes,
        "step_ratio": statistics.median(
            a / b for a, b in zip(decodes["distinct"], decodes["base"], strict=True)
        ),
    }


PARTS = {"prefix": prefix, "long": long, "lora": lora}


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measure(
    parts: list[str], model: str = "demo", recipe: str = "bf16", *, count: int = 2, **sizes: Any
) -> dict[str, Any]:
    """Each part's figures, with the read bandwidth before it.

    Args:
        recipe: "bf16" and "fp32" are `runtime` in that dtype. count: threads. sizes: arguments of the parts.
    """
    import hfaccel

    kind = {"bf16": torch.bfloat16, "fp32": torch.float32}.get(recipe)
    out: dict[str, Any] = {"model": model, "recipe": recipe, "threads": count, "cpu": cpu_name()}
    with threads(count):
        loaded, tokenizer = load_model(model, dtype=kind or "auto")
        hfaccel.patch(
            loaded, "runtime" if kind else recipe, tokenizer=tokenizer, keep_original=False, progress=False
        )
        tokens = tokenizer(text("wikitext2_test"), add_special_tokens=False, verbose=False)["input_ids"]
        for part in parts:
            bandwidth = read_bandwidth(count)
            out[part] = {"read_bandwidth_gb_s": bandwidth, **PARTS[part](loaded, tokens, **sizes)}
    return out


def show(result: dict[str, Any]) -> str:
    """The figures as lines and tables."""
    lines = [f"{result['model']}, {result['recipe']}, {result['threads']} threads, {result['cpu']}"]
    for part in PARTS:
        if part in result:
            made = result[part]
            lines += [
                "",
                f"{part}, {made['read_bandwidth_gb_s']:.1f} GB/s read in this run",
                _SHOW[part](made),
            ]
    return "\n".join(lines)


def _show_prefix(made: dict[str, Any]) -> str:
    return (
        f"  {made['shared_tokens']} shared tokens, {made['cached_tokens']:.0f} found again: "
        f"first token after {made['first_ttft_s'] * 1e3:.0f} ms, of the second request after "
        f"{made['second_ttft_s'] * 1e3:.0f} ms, ratio {made['ratio']:.3f}"
    )


def _show_long(made: dict[str, Any]) -> str:
    rows = [("chunks", "tokens a step", "median gap ms", "worst ms", "ratio", "long TTFT ms")]
    rows += [
        (
            "on" if row["chunked"] else "off",
            str(row["token_budget"]),
            f"{row['median_gap_s'] * 1e3:.1f}",
            f"{row['worst_gap_s'] * 1e3:.1f}",
            f"{row['ratio']:.2f}",
            f"{row['long_ttft_s'] * 1e3:.0f}",
        )
        for row in made["rows"]
    ]
    head = f"  {made['prompt_tokens']} tokens beside {made['streams']} streams"
    return f"{head}\n{table(rows)}"


def _show_lora(made: dict[str, Any]) -> str:
    rows = [
        ("targets", "base tok/s", "distinct / base", "equal / base", "distinct / equal", "MB an adapter")
        + ("step ratio", "by bytes")
    ]
    rows += [
        (
            "all linears" if len(row["targets"]) > 2 else ",".join(row["targets"]),
            f"{row['tokens_s']['base']:.0f}",
            f"{row['over_base']['distinct']:.3f}",
            f"{row['over_base']['equal']:.3f}",
            f"{row['distinct_over_equal']:.3f}",
            f"{row['adapter_bytes'] / 1e6:.2f}",
            f"{row['step_ratio']:.2f}",
            f"{row['explained_step_ratio']:.2f}",
        )
        for row in made["rows"]
    ]
    head = f"  {made['requests']} requests, {made['adapters_loaded']} adapters of rank {made['rank']} known"
    return f"{head}\n{table(rows)}"


_SHOW = {"prefix": _show_prefix, "long": _show_long, "lora": _show_lora}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="all without one")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--recipe", default="bf16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    sizes = {} if given.rounds is None else {"rounds": given.rounds}
    result = measure(given.parts or list(PARTS), given.model, given.recipe, count=given.threads, **sizes)
    print(json.dumps(result, indent=1) if given.json else show(result))


if __name__ == "__main__":
    main()
