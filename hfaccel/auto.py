"""`auto`, what `patch(model)` means: the fastest near-lossless choice, measured on this device.

Candidates are `int8` and the runtime alone; nothing below 8 bits. `int8` is taken if

    mean KL(original || int8) <= 0.005 nats and its perplexity is at most 0.5 % higher,
    and it is not slower than the runtime alone at M = 1 (decode) and at M = 128 (prefill).

The text is windows of 1,024 tokens from all over a shipped excerpt if a tokenizer is at hand (given, or
beside the checkpoint), else what the model itself samples. Windows are measured until both means are `CLEAR`
standard errors away from their limits, or to the last one: a model near a limit is measured longer than one
far from it. The choice is an ordinary recipe, stored, and printed with what was measured:
`patch(model, that)` repeats it without measuring.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hfaccel.recipe import PatchConfig

if TYPE_CHECKING:
    from hfaccel.measure.perplexity import KLResult

log = logging.getLogger("hfaccel")

KL_LIMIT = 0.005
PERPLEXITY_LIMIT = 1.005
WINDOWS, WINDOW_TOKENS = 8, 1024
CLEAR = 3  # standard errors
CANDIDATE = "int8"
OUTCOMES = PatchConfig(), PatchConfig.from_recipe(CANDIDATE)  # the runtime alone, and what is measured


def choose(model: nn.Module, *, tokenizer: Any = None, progress: bool = True) -> PatchConfig:
    """The recipe for this model on this device; the model is left as it was."""
    runtime, candidate = OUTCOMES
    windows, calls = texts(model, tokenizer), _workloads(model)
    try:
        with _patched(model, candidate, progress):
            fast = {name: _seconds(call) for name, call in calls.items()}
            quality = _quality(model, windows)
    except ValueError as error:
        return _settle(runtime, f"{CANDIDATE} cannot be applied: {error}")
    if lossy := _lossy(quality):
        return _settle(runtime, f"{CANDIDATE}: {lossy}")
    with _patched(model, runtime, progress):
        slow = {name: _seconds(call) for name, call in calls.items()}
    if slower := [f"{n}: {fast[n] / slow[n]:.2f} x the time" for n in fast if fast[n] > slow[n]]:
        return _settle(runtime, f"{CANDIDATE} takes longer, {'; '.join(slower)}")
    gains = ", ".join(f"{name} {slow[name] / fast[name]:.2f} x" for name in fast)
    return _settle(candidate, f"{_near(quality)}{gains} as fast as the runtime alone")


def _settle(config: PatchConfig, why: str) -> PatchConfig:
    log.warning("auto: %s (%s)", config.to_recipe(), why)
    return config


@contextmanager
def _patched(model: nn.Module, config: PatchConfig, progress: bool) -> Iterator[None]:
    from hfaccel.patch import patch, unpatch

    patch(model, config, progress=progress)
    try:
        yield
    finally:
        unpatch(model)


def _quality(model: nn.Module, texts: list[torch.Tensor]) -> KLResult | None:
    """The patched model against its original, window by window [1, T] until the answer is clear."""
    from hfaccel.measure.perplexity import kl, window_logits
    from hfaccel.patch import original

    found: list[KLResult] = []
    for ids in texts:
        cut = {"windows": 1, "window_tokens": ids.numel()}
        with original(model):
            theirs = list(window_logits(model, None, ids.flatten(), **cut))
        found.append(kl(model, theirs, None, ids.flatten(), **cut, progress=False))
        rises = [math.log(one.perplexity / one.reference_perplexity) for one in found]
        if _clear([one.kl for one in found], KL_LIMIT) and _clear(rises, math.log(PERPLEXITY_LIMIT)):
            break
    return _joined(found) if found else None


def _clear(values: list[float], limit: float) -> bool:
    """Whether a mean is so far from its limit that more windows would not change the side."""
    if len(values) < 3:
        return False
    mean = statistics.fmean(values)  # a NaN goes through, and is never clear
    error = math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))
    return abs(mean - limit) > CLEAR * error


def _joined(found: list[KLResult]) -> KLResult:
    """Windows of one length as one measurement."""
    return replace(
        found[0],
        kl=statistics.fmean(one.kl for one in found),
        top1_agreement=statistics.fmean(one.top1_agreement for one in found),
        perplexity=statistics.geometric_mean([one.perplexity for one in found]),
        reference_perplexity=statistics.geometric_mean([one.reference_perplexity for one in found]),
        tokens=sum(one.tokens for one in found),
        windows=len(found),
    )


def _lossy(quality: KLResult | None) -> str:
    """What the candidate misses of near-lossless; "" if nothing. A NaN misses all of it."""
    if quality is None:
        return ""
    if not quality.kl <= KL_LIMIT:
        return f"KL {quality.kl:.4f} is above {KL_LIMIT}, over {quality.tokens:,} tokens"
    ratio = quality.perplexity / quality.reference_perplexity
    if ratio <= PERPLEXITY_LIMIT:
        return ""
    return (
        f"perplexity rises by {100 * (ratio - 1):.2f} %, more than {100 * (PERPLEXITY_LIMIT - 1):.1f} %, "
        f"over {quality.tokens:,} tokens"
    )


def _near(quality: KLResult | None) -> str:
    """What was measured beside the limits, for the message."""
    if quality is None:
        return ""
    rise = 100 * (quality.perplexity / quality.reference_perplexity - 1)
    return (
        f"KL {quality.kl:.4f} of at most {KL_LIMIT}, perplexity {rise:+.2f} % of at most "
        f"{100 * (PERPLEXITY_LIMIT - 1):+.1f} %, over {quality.tokens:,} tokens; "
    )


def _workloads(model: nn.Module) -> dict[str, Callable[[], Any]]:
    """Name -> one call: decode and prefill through `generate`; where there is none, a forward of 8 x 128."""
    vocab = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocab, (1, 128), generator=generator).to(_device(model))
    if not model.can_generate() or getattr(model.config, "is_encoder_decoder", False):
        batch = ids.expand(8, -1)
        extra = {"decoder_input_ids": batch} if getattr(model.config, "is_encoder_decoder", False) else {}
        return {"forward of 8 x 128": lambda: model(input_ids=batch, **extra)}

    def generate(prompt: torch.Tensor, tokens: int) -> None:
        pad = model.generation_config.pad_token_id
        model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            pad_token_id=0 if pad is None else pad,
        )

    return {"decode": lambda: generate(ids[:, :8], 12), "prefill of 128": lambda: generate(ids, 1)}


@torch.no_grad()
def _seconds(call: Callable[[], Any]) -> float:
    """Best of three after a warm-up: the machine may be shared, and the best is what the code can do."""
    call()
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


def texts(model: nn.Module, tokenizer: Any, window_tokens: int = WINDOW_TOKENS) -> list[torch.Tensor]:
    """Windows of ids [1, T], T at most `window_tokens`; none for models that predict no next token."""
    if not model.can_generate() or getattr(model.config, "is_encoder_decoder", False):
        return []
    if tokenizer is None and Path(str(getattr(model, "name_or_path", ""))).is_dir():
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(model.name_or_path)
        except (OSError, ValueError) as error:
            log.info("auto: no tokenizer beside the checkpoint (%s)", error)
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or window_tokens
    tokens = min(window_tokens, limit)
    if tokenizer is None:
        return list(_sampled(model, tokens).split(1))
    return [ids.to(_device(model)) for ids in _excerpts(tokenizer, tokens)]


def _excerpts(tokenizer: Any, tokens: int) -> list[torch.Tensor]:
    """Windows spread over the shipped text, in an order in which the first few are spread as well."""
    from hfaccel.measure.corpus import text
    from hfaccel.measure.perplexity import cut_windows

    whole = text("wikitext2_valid")
    stride = len(whole) // WINDOWS
    starts = [whole.index("\n", i * stride) for i in sorted(range(WINDOWS), key=lambda i: f"{i:03b}"[::-1])]
    return [
        cut_windows(tokenizer, whole[start : start + 16 * tokens], windows=1, window_tokens=tokens)
        for start in starts
    ]


@torch.no_grad()
def _sampled(model: nn.Module, tokens: int) -> torch.Tensor:
    """What the model itself says: rows drawn at temperature 1, from a generator of their own."""
    generator = torch.Generator().manual_seed(0)
    vocab = model.config.get_text_config().vocab_size
    ids = torch.randint(0, vocab, (WINDOWS, 1), generator=generator).to(_device(model))
    while ids.shape[1] < min(tokens, 64):
        chances = model(input_ids=ids, use_cache=False).logits[:, -1].float().softmax(-1).cpu()
        ids = torch.cat([ids, torch.multinomial(chances, 1, generator=generator).to(ids.device)], 1)
    return ids


def _device(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))
