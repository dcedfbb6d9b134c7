"""Many users at once: requests made from a seed, sent to us, to other engines or to a URL, and what they got.

A round sends the same requests to every contender, one after the other, in alternating order, as
`hfaccel bench` does; a ratio is the median over rounds of the ratios within a round. Times of one request:

    TTFT         sent until its first token came: waiting in line, prompt
    inter-token  between a token and the one before it
    end to end   sent until its last token came

and output tokens a second are all tokens over the time from the first request sent to the last token. Of URLs
`client_cpu_s` is the CPU time that asking and reading took here.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hfaccel.errors import PatchError, UnknownName
from hfaccel.measure import artifacts
from hfaccel.measure.bench import Contender, cpu_name, in_turn, read_bandwidth
from hfaccel.measure.corpus import text
from hfaccel.measure.peers.traffic import Url, drive
from hfaccel.measure.rows import load_tokenizer

PEERS = {  # name on the command line -> (worker module, variants, the default one)
    "vllm": ("vllm", ("bf16", "fp32"), "bf16"),
    "hf": ("hf", ("bf16", "fp32"), "bf16"),
    "llama-server": ("llama_server", ("F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K_M"), "BF16"),
}
PERCENTILES = (50, 90, 99)
WARMUP_USERS, WARMUP_TOKENS = 4, 4


@dataclass(frozen=True)
class Load:
    """What the users do.

    Args:
        users: requests at once: one ends, the next is sent. With `rate` as many as there are at a time.
        requests: in all; None is one a user.
        prompt, new: tokens, (least, most); lengths between are drawn evenly in their logarithm, because most
            requests are short.
        rate: requests a second, at Poisson times, whatever still runs; None is the closed loop.
        shared: tokens at the beginning that all prompts share, beside those of `prompt`.
        adapters, zipf: names; the nth is chosen with weight 1 / n ** zipf.
        seed: of all that is drawn.
    Raises: PatchError.
    """

    users: int = 50
    requests: int | None = None
    prompt: tuple[int, int] = (128, 128)
    new: tuple[int, int] = (64, 64)
    rate: float | None = None
    shared: int = 0
    adapters: tuple[str, ...] = ()
    zipf: float = 1.0
    seed: int = 0

    def __post_init__(self):
        for name in ("users", "requests"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise PatchError(f"{name} is 1 or more, not {value}")
        for name in ("prompt", "new"):
            least, most = getattr(self, name)
            if not 1 <= least <= most:
                raise PatchError(f"{name} is from 1 up, the least first, not {least}:{most}")
        if self.rate is not None and not (math.isfinite(self.rate) and self.rate > 0):
            raise PatchError(f"rate is requests a second, more than 0, not {self.rate}")
        if self.shared < 0 or not math.isfinite(self.zipf):
            raise PatchError(f"shared {self.shared}, zipf {self.zipf}: 0 or more, and a number")

    @property
    def count(self) -> int:
        return self.users if self.requests is None else self.requests

    @property
    def most_tokens(self) -> int:
        """Of a prompt and its answer."""
        return self.shared + self.prompt[1] + self.new[1]

    def jobs(self, tokens: list[int], turn: int = 0) -> list[dict[str, Any]]:
        """The requests of a round, as `drive` takes them: prompts are cut from `tokens`, each at a place of
        its own as long as there are enough; another round begins at other places, so that only the shared
        beginning can be found in a cache."""
        draw = random.Random(f"{self.seed}:{turn}")
        shared = tokens[: self.shared]
        rest = len(tokens) - self.shared
        if rest < self.prompt[1]:
            most = self.shared + self.prompt[1]
            raise PatchError(f"a text of {len(tokens)} tokens is too short for prompts of {most}")
        weights = [1 / (n + 1) ** self.zipf for n in range(len(self.adapters))]
        at, clock, jobs = draw.randrange(rest), 0.0, []
        for _ in range(self.count):
            length = _between(draw, self.prompt)
            part = [tokens[self.shared + (at + i) % rest] for i in range(length)]
            at += length
            job: dict[str, Any] = {"prompt": shared + part, "new_tokens": _between(draw, self.new)}
            if self.adapters:
                job["adapter"] = draw.choices(self.adapters, weights)[0]
            if self.rate is not None:
                clock += draw.expovariate(self.rate)
                job["at"] = clock
            jobs.append(job)
        return jobs


def _between(draw: random.Random, ends: tuple[int, int]) -> int:
    least, most = ends
    if least == most:
        return least
    return min(most, max(least, round(math.exp(draw.uniform(math.log(least), math.log(most))))))


def percentile(values: list[float], share: float) -> float:
    """Of sorted or unsorted values, between two of them by their distance; nan of none."""
    if not values:
        return math.nan
    values = sorted(values)
    at = (len(values) - 1) * share / 100
    low = math.floor(at)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (at - low)


def summary(records: list[dict[str, Any]]) -> dict[str, Any]:
    """What the requests of a round got: percentiles in seconds, rates, and the errors by their text."""
    good = [record for record in records if record["error"] is None]
    errors: dict[str, int] = {}
    for record in records:
        if record["error"] is not None:
            errors[record["error"]] = errors.get(record["error"], 0) + 1
    first = [record["times"][0] - record["at"] for record in good if record["times"]]
    gaps = [b - a for record in good for a, b in itertools.pairwise(record["times"])]
    whole = [record["times"][-1] - record["at"] for record in good if record["times"]]
    ends = [record["times"][-1] for record in good if record["times"]]
    seconds = max(ends) - min(record["at"] for record in records) if ends else math.nan
    tokens = sum(record["tokens"] for record in good)
    made = {
        "requests": len(records),
        "failed": len(records) - len(good),
        "output_tokens": tokens,
        "seconds": seconds,
        "output_tokens_s": tokens / seconds if ends else 0.0,
        "requests_s": len(good) / seconds if ends else 0.0,
        "errors": errors,
    }
    for name, values in (("ttft_s", first), ("inter_token_s", gaps), ("end_to_end_s", whole)):
        made |= {f"{name}_p{share}": percentile(values, share) for share in PERCENTILES}
        made[f"{name}_max"] = max(values, default=math.nan)
    return made


def combined(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """The median over rounds of each figure, failures and errors added up."""
    errors: dict[str, int] = {}
    for each in rounds:
        for error, count in each["errors"].items():
            errors[error] = errors.get(error, 0) + count
    numbers = {key for key, value in rounds[0].items() if isinstance(value, float)}
    made = {key: statistics.median(each[key] for each in rounds) for key in sorted(numbers)}
    totals = {key: sum(each[key] for each in rounds) for key in ("requests", "failed", "output_tokens")}
    return {**made, **totals, "errors": errors}


def parse_peer(name: str) -> tuple[str, str]:
    """ "vllm:fp32" -> ("vllm", "fp32"); without a variant the default one. Raises: UnknownName."""
    name, _, variant = name.partition(":")
    if name not in PEERS:
        raise UnknownName(f"unknown peer {name!r}; known are {', '.join(PEERS)}")
    _, variants, default = PEERS[name]
    if (variant or default) not in variants:
        raise UnknownName(f"{name}: unknown variant {variant!r}; known are {', '.join(variants)}")
    return name, variant or default


def bench_serve(
    model: str,
    recipes: list[str],
    load: Load,
    *,
    against: list[str] | None = None,
    urls: list[str] | None = None,
    url_model: str | None = None,
    headers: dict[str, str] | None = None,
    peer_python: dict[str, str] | None = None,
    llama_server: str | None = None,
    adapter_rank: int = 16,
    adapter_targets: tuple[str, ...] = ("q_proj", "v_proj"),
    options: dict[str, Any] | None = None,
    rounds: int = 3,
    threads: int = 2,
    off_grid: bool = False,
    say: Any = lambda message: None,
) -> dict[str, Any]:
    """Send the load to all contenders: one JSON-ready dict of settings, bandwidth, rows, and ratios to the
    first row.

    Args:
        recipes: ours, each a server of this package in a process of its own; the load's adapters are made for
            them with random weights. against: PEERS. urls: servers that run already.
        llama_server: the program. options: of our `Server`.
    """
    peers = [parse_peer(name) for name in against or []]
    if load.adapters and peers:
        raise PatchError("adapters by name are for our own rows and for URLs: peers serve the base alone")
    folder = artifacts.folder(model, off_grid=off_grid)
    tokens = _tokens(load_tokenizer(str(folder)))
    turns = [load.jobs(tokens, turn) for turn in range(rounds)]
    base = {
        "serve": True,
        "model": model if model == "demo" else str(folder),
        "folder": str(folder),
        "off_grid": off_grid,
        "dtype": "auto",
        "threads": threads,
        "users": load.users,
        "most_tokens": load.most_tokens,
        "shared": load.shared,
        "import_root": str(Path(__file__).parents[2]),
    }
    rows = [Contender(f"hfaccel {recipe}") for recipe in recipes] + [Contender(f"{n} {v}") for n, v in peers]
    ours = {**base, "options": options or {}}
    if load.adapters:
        ours |= {"adapters": list(load.adapters), "rank": adapter_rank, "targets": list(adapter_targets)}
    specs = [("hfaccel", sys.executable, {**ours, "variant": recipe}) for recipe in recipes]
    for name, variant in peers:
        spec = {**base, "variant": variant}
        if name == "llama-server":
            spec |= {"artifact": str(artifacts.gguf_file(model, variant, off_grid=off_grid))}
            spec |= {"program": llama_server or "llama-server"}
        specs.append((PEERS[name][0], (peer_python or {}).get(name), spec))
    there = [(Contender(url), Url(url, url_model, headers)) for url in urls or []]
    warmup = _warmup(tokens, load)
    results: dict[str, list[dict[str, Any]]] = {row.name: [] for row in (*rows, *(row for row, _ in there))}
    bandwidth: list[float] = []
    try:
        for row, (worker, python, spec) in zip(rows, specs, strict=True):
            say(f"loading {row.name}")
            if row.start(worker, python, spec):
                row.info = row.ask().get("info", {})
            if row.process:
                row.ask({"jobs": warmup, "users": WARMUP_USERS})
        for turn, jobs in enumerate(turns):
            say(f"round {turn + 1} of {rounds}")
            bandwidth.append(read_bandwidth(threads))
            for row in in_turn(rows, turn):
                reply = row.ask({"jobs": jobs, "users": load.users})
                if "error" not in reply:
                    results[row.name].append(summary(reply["records"]))
            for row, target in there:
                before = time.process_time()
                records = drive(target, jobs, load.users)
                spent = time.process_time() - before
                results[row.name].append(summary(records) | {"client_cpu_s": spent})
    finally:
        for row in rows:
            row.stop()
    return {
        "model": model,
        "off_grid": off_grid,
        "load": asdict(load),
        "threads": threads,
        "cpu": cpu_name(),
        "read_bandwidth_gb_s": bandwidth,
        "rows": _rows([*rows, *(row for row, _ in there)], results),
    }


def _rows(rows: list[Contender], results: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    first = results[rows[0].name] if rows else []
    out = []
    for row in rows:
        rounds = results[row.name]
        entry: dict[str, Any] = {"name": row.name, "info": row.info, "rounds": rounds}
        if row.error or not rounds:
            out.append({**entry, "error": row.error or "no round"})
            continue
        entry |= combined(rounds)
        if entry["failed"]:
            entry["error"] = "; ".join(f"{count} x {error}" for error, count in entry["errors"].items())
        if len(first) == len(rounds) and all(each["output_tokens_s"] for each in rounds):
            pairs = list(zip(first, rounds, strict=True))
            entry["ratio"] = statistics.median(a["output_tokens_s"] / b["output_tokens_s"] for a, b in pairs)
        out.append(entry)
    return out


def _tokens(tokenizer: Any) -> list[int]:
    """Of the text that is shipped."""
    ids = tokenizer(text("wikitext2_test"), add_special_tokens=False, verbose=False)["input_ids"]
    return list(ids)


def _warmup(tokens: list[int], load: Load) -> list[dict[str, Any]]:
    """Requests that no round sends: what is built at the first ones is built."""
    length = min(load.prompt[1], len(tokens) // WARMUP_USERS)
    parts = [tokens[-(n + 1) * length :][:length] for n in range(WARMUP_USERS)]
    return [{"prompt": part, "new_tokens": WARMUP_TOKENS} for part in parts]
