"""How fast `model.generate` is: time to first token and decode rate, through the public call alone."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from hfaccel.errors import PatchError


@dataclass(frozen=True)
class Speed:
    """One model's `generate` at one shape. Medians; `samples` holds (first_s, total_s) of every timed run."""

    prompt_tokens: int
    new_tokens: int
    batch: int
    threads: int
    ttft_s: float
    decode_tokens_s: float  # of all rows together, first tokens not counted
    samples: list[tuple[float, float]]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class _FirstToken:
    """A streamer that notes when the first new token came."""

    def __init__(self) -> None:
        self.calls, self.first = 0, 0.0

    def put(self, value: Any) -> None:
        self.calls += 1
        if self.calls == 2:  # the first call is the prompt
            self.first = time.perf_counter()

    def end(self) -> None:
        pass


def prompt_ids(
    tokenizer: Any, text: str, tokens: int, batch: int = 1, vocab: int | None = None
) -> torch.Tensor:
    """[batch, tokens] int64 cut from a text, each row at another place; random ids without a tokenizer."""
    if tokenizer is None:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(10, vocab, (batch, tokens), generator=generator)
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    if len(ids) < batch * tokens:
        raise PatchError(f"a text of {len(ids)} tokens is too short for {batch} prompts of {tokens}")
    return torch.tensor(ids[: batch * tokens]).view(batch, tokens)


@contextmanager
def endless(model: Any) -> Iterator[None]:
    """No end token inside the block: a run is as long as asked without a processor that forbids one."""
    config = model.generation_config
    ends, pad = config.eos_token_id, config.pad_token_id
    config.eos_token_id, config.pad_token_id = None, 0 if pad is None else pad
    try:
        yield
    finally:
        config.eos_token_id, config.pad_token_id = ends, pad


def generate_once(model: Any, ids: torch.Tensor, new_tokens: int) -> tuple[float, float]:
    """(seconds to the first token, seconds in all) of one greedy `generate` of exactly `new_tokens`."""
    options = {"do_sample": False, "attention_mask": torch.ones_like(ids)}
    with endless(model):
        start = time.perf_counter()
        if ids.shape[0] == 1:
            streamer = _FirstToken()
            model.generate(ids, max_new_tokens=new_tokens, streamer=streamer, **options)
            return streamer.first - start, time.perf_counter() - start
        model.generate(ids, max_new_tokens=1, **options)  # transformers streams one row only
        first = time.perf_counter() - start
        start = time.perf_counter()
        model.generate(ids, max_new_tokens=new_tokens, **options)
        return first, time.perf_counter() - start


def speed(model: Any, ids: torch.Tensor, new_tokens: int = 64, repeats: int = 3, warmup: int = 1) -> Speed:
    """Time `generate` on ids [batch, prompt tokens]; the median of `repeats` runs after `warmup`."""
    if new_tokens < 2 or repeats < 1:
        raise PatchError(f"new_tokens={new_tokens}, repeats={repeats}: at least 2 and 1")
    for _ in range(warmup):
        generate_once(model, ids, min(new_tokens, 4))
    samples = [generate_once(model, ids, new_tokens) for _ in range(repeats)]
    return summarize(ids, new_tokens, samples)


def summarize(ids: torch.Tensor, new_tokens: int, samples: list[tuple[float, float]]) -> Speed:
    """Medians of timed runs."""
    batch, prompt = ids.shape
    rates = [batch * (new_tokens - 1) / (total - first) for first, total in samples]
    return Speed(
        prompt,
        new_tokens,
        batch,
        torch.get_num_threads(),
        statistics.median(first for first, _ in samples),
        statistics.median(rates),
        samples,
    )
