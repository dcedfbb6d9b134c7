"""Side by side in one run: our recipes against other tools, each in a process of its own, one at a time.

Every round runs every contender once, in alternating order; a ratio is the median over rounds of the ratios
within a round, so that a machine that speeds up or slows down between rounds does not decide. The read
bandwidth is measured in every round as well; achieved GB/s counts the weight bytes that a token must read.
"""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hfaccel.demo import cache_dir
from hfaccel.errors import UnknownName
from hfaccel.formats.gguf_mix import VARIANTS
from hfaccel.measure import artifacts
from hfaccel.measure.corpus import text
from hfaccel.measure.rows import load_tokenizer
from hfaccel.measure.speed import prompt_ids

PEERS = {  # name on the command line -> (worker module, variants, the default one)
    "hf": ("hf", ("bf16", "fp32"), "bf16"),
    "llama.cpp": ("llama", tuple(VARIANTS), "Q4_0"),
    "openvino": ("openvino", ("int4", "int8", "bf16"), "int4"),
    "vllm": ("vllm", ("bf16", "fp32"), "bf16"),
    "torchao": ("torchao", ("int8", "int4"), "int8"),
    "gptqmodel": ("gptqmodel", ("sym", "asym"), "sym"),
}
CALIBRATED = ("gptqmodel",)  # quantize with data, which `hfaccel eval` gives them; not timed here


@dataclass
class Contender:
    """One row: a name, the process that runs it, and what it measured.

    A process runs only while it has a job: one whose idle threads spin would slow the others down.
    """

    name: str
    process: subprocess.Popen | None = None
    info: dict[str, Any] = field(default_factory=dict)
    samples: list[tuple[float, float]] = field(default_factory=list)  # (seconds to first token, in all)
    error: str | None = None

    def start(self, worker: str, python: str | None, spec: dict[str, Any]) -> bool:
        """Whether the process is there; a python that cannot be run ends the contender, not the bench."""
        try:
            self.process = start(worker, python, spec)
        except OSError as error:
            self.error = str(error)
        return self.process is not None

    def ask(self, job: dict[str, Any] | None = None) -> dict[str, Any]:
        """Send a job (None: only listen) and read the reply; an error ends the contender, not the bench."""
        try:
            if job is not None:
                self._signal(signal.SIGCONT)
                self.process.stdin.write(json.dumps(job) + "\n")
                self.process.stdin.flush()
            reply = json.loads(self.process.stdout.readline() or '{"error": "the process ended"}')
            self._signal(signal.SIGSTOP)
        except BrokenPipeError:
            reply = {"error": "the process ended"}
        except (OSError, ValueError) as error:
            reply = {"error": str(error)}
        if "error" in reply:
            self.error = reply["error"]
            if self.error.startswith("ModuleNotFoundError") and self.name.partition(" ")[0] in PEERS:
                self.error += f"; --peer-python {self.name.partition(' ')[0]}=PATH of a python that has it"
            self.stop()
        return reply

    def stop(self) -> None:
        if self.process is not None:
            with suppress(OSError):  # what was not read any more
                self.process.stdin.close()
            self._signal(signal.SIGTERM)
            self._signal(signal.SIGCONT)
            self.process.wait()
            self.process = None

    def _signal(self, number: int) -> None:
        """To the process and what it started: they are a group."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


def parse_peer(text_: str) -> tuple[str, str]:
    """ "llama.cpp:Q8_0" -> ("llama.cpp", "Q8_0"); without a variant the default one."""
    name, _, variant = text_.partition(":")
    if name not in PEERS:
        raise UnknownName(f"unknown peer {name!r}; known are {', '.join(PEERS)}")
    _, variants, default = PEERS[name]
    variant = variant or default
    if variant not in variants:
        raise UnknownName(f"{name}: unknown variant {variant!r}; known are {', '.join(variants)}")
    return name, variant


def in_turn(rows: list[Contender], turn: int) -> Iterator[Contender]:
    """Those that run, alternately from the first to the last and back."""
    for row in rows if turn % 2 == 0 else rows[::-1]:
        if row.process:
            time.sleep(0.2)  # idle threads of the one before go to sleep
            yield row


def bench(
    model: str,
    recipes: list[str],
    against: list[str],
    *,
    peer_python: dict[str, str] | None = None,
    prompt_tokens: int = 128,
    new_tokens: int = 64,
    batch: int = 1,
    rounds: int = 5,
    threads: int = 2,
    off_grid: bool = False,
    say: Any = lambda message: None,
) -> dict[str, Any]:
    """Run all contenders: one JSON-ready dict of settings, bandwidth, rows and ratios to the first recipe."""
    peers = [parse_peer(name) for name in against]
    if untimed := [name for name, _ in peers if name in CALIBRATED]:
        raise UnknownName(f"{untimed[0]} is measured by `hfaccel eval`, not timed")
    folder = artifacts.folder(model, off_grid=off_grid)
    tokenizer = load_tokenizer(str(folder))
    # Another prompt each round: some tools keep the pages of a prompt that they have seen.
    rows_of_text = prompt_ids(tokenizer, text("wikitext2_test"), prompt_tokens, batch * (rounds + 1))
    prompts = rows_of_text.view(rounds + 1, batch, prompt_tokens).tolist()
    base = {
        "model": model if model == "demo" else str(folder),
        "folder": str(folder),
        "off_grid": off_grid,
        "dtype": "auto",
        "threads": threads,
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "import_root": str(Path(__file__).parents[2]),
    }
    rows = [Contender(f"hfaccel {recipe}") for recipe in recipes] + [Contender(f"{n} {v}") for n, v in peers]
    specs = [("hfaccel", sys.executable, {**base, "variant": recipe}) for recipe in recipes]
    for name, variant in peers:
        python = (peer_python or {}).get(name)
        spec = {**base, "variant": variant}
        if name == "llama.cpp":
            spec["artifact"] = str(artifacts.gguf_file(model, variant, off_grid=off_grid))
        elif name == "openvino":
            spec["artifact"] = str(cache_dir() / "bench" / f"{folder.name}-openvino-{variant}")
        specs.append((PEERS[name][0], python, spec))
    bandwidth: list[float] = []
    try:
        for row, (worker, python, spec) in zip(rows, specs, strict=True):
            say(f"loading {row.name}")
            if not row.start(worker, python, spec):
                continue
            row.info = row.ask().get("info", {})
            if row.process:
                row.ask({"prompt": prompts[rounds], "new_tokens": min(4, new_tokens)})
        for turn in range(rounds):
            say(f"round {turn + 1} of {rounds}")
            bandwidth.append(read_bandwidth(threads))
            for row in in_turn(rows, turn):
                reply = row.ask({"prompt": prompts[turn], "new_tokens": new_tokens})
                if "error" not in reply:
                    row.samples.append((reply["first_s"], reply["total_s"]))
    finally:
        for row in rows:
            row.stop()
    return {
        "model": model,
        "off_grid": off_grid,
        "batch": batch,
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "threads": threads,
        "cpu": cpu_name(),
        "read_bandwidth_gb_s": bandwidth,
        "rows": _summary(rows, batch, new_tokens, statistics.median(bandwidth)),
    }


def start(worker: str, python: str | None, spec: dict[str, Any]) -> subprocess.Popen:
    """A peer's process; `python` is this one unless said otherwise."""
    script = resources.files("hfaccel.measure").joinpath("peers", "worker.py")
    return subprocess.Popen(
        [python or sys.executable, str(script), worker, json.dumps(spec)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        process_group=0,
    )


def _summary(rows: list[Contender], batch: int, new_tokens: int, bandwidth: float) -> list[dict[str, Any]]:
    first = rows[0]
    out = []
    for row in rows:
        entry: dict[str, Any] = {"name": row.name, "info": row.info, "samples": row.samples}
        if row.error or not row.samples:
            out.append({**entry, "error": row.error or "no samples"})
            continue
        rates = decode_rates(row, batch, new_tokens)
        entry |= {
            "ttft_s": statistics.median(s[0] for s in row.samples),
            "decode_tokens_s": statistics.median(rates),
        }
        if bytes_read := row.info.get("bytes_per_token"):
            entry["gb_s"] = bytes_read * entry["decode_tokens_s"] / batch / 1e9
            entry["bandwidth_share"] = entry["gb_s"] / bandwidth
        if len(first.samples) == len(row.samples):
            ours = decode_rates(first, batch, new_tokens)
            entry["decode_ratio"] = statistics.median(a / b for a, b in zip(ours, rates, strict=True))
            pairs = zip(first.samples, row.samples, strict=True)
            entry["ttft_ratio"] = statistics.median(a[0] / b[0] for a, b in pairs)
        out.append(entry)
    return out


def decode_rates(row: Contender, batch: int, new_tokens: int) -> list[float]:
    """Tokens a second after the first token, of all rows together, of each round."""
    return [batch * (new_tokens - 1) / max(total - first, 1e-9) for first, total in row.samples]


def bytes_per_token(model: nn.Module) -> int:
    """Weight bytes that one decoded token must read: everything but an embedding that is only looked up."""
    from hfaccel.report import model_bytes

    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    shared = head is not None and embedding.weight.data_ptr() == head.weight.data_ptr()
    looked_up = 0 if shared else sum(t.numel() * t.element_size() for t in embedding.state_dict().values())
    return model_bytes(model) - looked_up


def read_bandwidth(threads: int, megabytes: int = 512) -> float:
    """GB/s that `threads` threads read from memory: torch's sum of a buffer no cache holds, best of four."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        buffer, best = torch.ones(megabytes << 18), 0.0
        for _ in range(4):
            start = time.perf_counter()
            buffer.sum()
            best = max(best, buffer.nbytes / (time.perf_counter() - start) / 1e9)
    finally:
        torch.set_num_threads(before)
    return best


def cpu_name() -> str:
    """The processor's name, from /proc/cpuinfo where there is one."""
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found[1] if found else "unknown"
