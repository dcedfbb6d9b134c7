"""What recipes do to one model: quality beside bits, every row on the same windows of one text.

The original model is loaded once and is the reference. A recipe's row is a fresh copy, patched and measured
through the runner that serves its `generate`; all of them are alive at once, packed, so that the original's
logits of a window are computed once for all rows. Peers run in processes of their own and hand over logits.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hfaccel.demo import cache_dir
from hfaccel.errors import PatchError, UnknownName
from hfaccel.measure import artifacts, tasks
from hfaccel.measure.bench import CALIBRATED, PEERS, Contender, parse_peer
from hfaccel.measure.corpus import text
from hfaccel.measure.perplexity import Comparison, Reference, cut_windows, evaluating, logits_of
from hfaccel.measure.rows import UNPATCHED, load
from hfaccel.measure.storage import storage
from hfaccel.progress import progress_bar
from hfaccel.recipe import EMPTY
from hfaccel.samples import DEFAULT_TEXT, TOKENS, WINDOW_TOKENS

ORIGINAL = "original"
SCORED = ("hf", "llama.cpp", "torchao", "gptqmodel")  # peers that give logits


class PeerError(Exception):
    """A peer's process ended or refused: an `error` in its row."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to measure.

    Attributes:
        data: a shipped text's name or a file; windows: of 1,024 tokens, 0 for none.
        calibration: a text as `data`, for recipes that need one; None for their default.
        questions: a tasks file; limit: at most so many questions.
        lm_eval: names of lm-evaluation-harness' tasks.
    """

    off_grid: bool = True
    data: str = "wikitext2_test"
    windows: int = 40
    calibration: str | None = None
    questions: str | None = None
    limit: int | None = None
    max_new_tokens: int = 256
    lm_eval: tuple[str, ...] = ()


@dataclass
class Entry:
    """One row: a name, what gives logits, and what was found."""

    name: str
    logits: Callable[[Tensor], Tensor]
    found: dict[str, Any] = field(default_factory=dict)
    model: nn.Module | None = None
    comparison: Comparison = field(default_factory=Comparison)
    seconds: float = 0.0


def evaluate(
    model: str,
    recipes: Sequence[str] = (),
    against: Sequence[str] = (),
    settings: Settings | None = None,
    *,
    peer_python: dict[str, str] | None = None,
    say: Callable[[str], None] = lambda message: None,
) -> dict[str, Any]:
    """Measure the original, every recipe and every peer: a JSON-ready dict with one row each.

    Args:
        model: a folder, a hub id, a .gguf file or "demo". A folder of a patched model is the only row.
        recipes: recipes; "fp32" and "bf16" mean the unpatched model in that dtype.
        against: peers as `hfaccel bench` names them, of those in SCORED.
    Raises: PatchError for what cannot be read or patched, before anything is measured.
    """
    settings = settings or Settings()
    peers = [scored_peer(name) for name in against]
    calibration = None if settings.calibration is None else [text(settings.calibration)]
    questions = tasks.read_tasks(settings.questions, settings.limit) if settings.questions else []
    if settings.lm_eval:
        tasks.require_lm_eval()
    corpus = text(settings.data) if settings.windows else ""
    reference, tokenizer = load(model, off_grid=settings.off_grid)
    windows = cut_windows(tokenizer, corpus, windows=settings.windows) if settings.windows else None
    patched = getattr(reference, "_hfaccel", None)
    name = ORIGINAL if patched is None else patched.config.describe()
    entries = [Entry(name, served(reference), described(reference), reference)]
    for recipe in recipes:
        say(f"{recipe} ...")
        entries.append(_patched(model, recipe, tokenizer, calibration, settings))
    folder = str(artifacts.folder(model, off_grid=settings.off_grid)) if peers else ""
    with tempfile.TemporaryDirectory(prefix="hfaccel-logits-") as place:
        contenders = []
        try:
            for name, variant in peers:
                say(f"{name} {variant} ...")
                contenders.append(Contender(f"{name} {variant}"))
                python = (peer_python or {}).get(name)
                more = {}
                if name in CALIBRATED:
                    more["calibration"] = str(_calibration_file(Path(place), tokenizer, calibration))
                    more["cache"] = str(cache_dir() / "bench")
                _start(contenders[-1], name, variant, model, folder, settings.off_grid, python, more)
                entries.append(_peer(contenders[-1], Path(place), tokenizer))
            if windows is not None:
                _compare(entries, windows)
        finally:
            for contender in contenders:
                contender.stop()
    for entry in entries:
        if entry.model is not None and (questions or settings.lm_eval):
            say(f"{entry.name}: questions")
            _ask(entry, questions, tokenizer, settings)
    return {
        "model": model,
        "off_grid": settings.off_grid and model == "demo",
        "data": settings.data,
        "windows": 0 if windows is None else len(windows),
        "tokens": 0 if windows is None else windows.shape[0] * (windows.shape[1] - 1),
        "rows": [{"recipe": entry.name, **entry.found} for entry in entries],
    }


def served(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Ids [B, T] -> logits [B, T, V]: by the runner that serves `generate`, of an unpatched model its own."""
    from hfaccel.generate import mixin
    from hfaccel.measure.runner_report import paged_logits

    return partial(paged_logits, model) if hasattr(model, mixin.ATTRIBUTE) else partial(logits_of, model)


def described(model: nn.Module) -> dict[str, Any]:
    """Executor, bits and bytes of a model."""
    from hfaccel.generate import mixin
    from hfaccel.report import model_bytes

    packed = hasattr(model, mixin.ATTRIBUTE)
    size = storage(model)
    return {
        "executor": mixin.runner_of(model).refresh().name if packed else type(model).__name__,
        "bits_per_weight": size.bits_per_weight,
        "layer_bits_per_weight": size.layer_bits_per_weight,
        "packed_bytes": size.bytes + size.head_bytes,
        "model_bytes": model_bytes(model),
    }


def _patched(
    model: str, recipe: str, tokenizer: Any, calibration: list[str] | None, settings: Settings
) -> Entry:
    import hfaccel

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}.get(recipe, "auto")
    loaded, _ = load(model, off_grid=settings.off_grid, dtype=dtype, packed=recipe == EMPTY)
    start = time.perf_counter()
    extra = {}
    if recipe not in UNPATCHED:
        hfaccel.patch(loaded, recipe, calibration=calibration, tokenizer=tokenizer, keep_original=False)
        extra = {"patch_s": time.perf_counter() - start, "applied": loaded._hfaccel.config.to_dict()}
    return Entry(recipe, served(loaded), {**described(loaded), **extra}, loaded)


def _compare(entries: list[Entry], windows: Tensor) -> None:
    """Every entry against the first one, window by window."""
    with torch.no_grad(), progress_bar("windows", len(windows) * len(entries)) as advance:
        for ids in windows:
            theirs = None
            for entry in entries:
                if "error" in entry.found:
                    continue
                start = time.perf_counter()
                try:
                    with evaluating(entry.model):
                        mine = entry.logits(ids[None])[0]
                except PeerError as error:
                    entry.found["error"] = str(error)
                    continue
                entry.seconds += time.perf_counter() - start
                theirs = Reference(mine, ids) if theirs is None else theirs
                entry.comparison.add(mine, theirs)
                advance()
    for entry in entries:
        if "error" in entry.found:
            continue
        found = entry.comparison.result(entry.seconds)
        entry.found |= {key: getattr(found, key) for key in ("perplexity", "kl", "top1_agreement", "seconds")}


def _ask(entry: Entry, questions: list, tokenizer: Any, settings: Settings) -> None:
    if questions:
        generate = tasks.generator(entry.model, tokenizer, settings.max_new_tokens)
        with torch.no_grad(), evaluating(entry.model):
            found = tasks.accuracy(questions, entry.logits, generate, tokenizer)
        entry.found |= {key: value for key, value in found.to_dict().items() if value is not None}
    if settings.lm_eval:
        try:
            entry.found["lm_eval"] = tasks.lm_eval(entry.model, tokenizer, settings.lm_eval, settings.limit)
        except PatchError as error:  # a task that it does not know: what was measured stays
            entry.found["error"] = str(error)


# Peers ----------------------------------------------------------------------------------------------------


def scored_peer(name: str) -> tuple[str, str]:
    """Peer and variant. Raises: UnknownName for one that is not known or gives no logits."""
    if name.partition(":")[0] not in SCORED:
        raise UnknownName(f"--against {name!r}: peers that give logits are {', '.join(SCORED)}")
    return parse_peer(name)


def _calibration_file(place: Path, tokenizer: Any, calibration: list[str] | None) -> Path:
    """Rows of token ids as JSON: what a recipe that needs data takes of the same text."""
    file = place / "calibration.json"
    if not file.exists():
        ids = tokenizer("\n\n".join(calibration or [text(DEFAULT_TEXT)])).input_ids[:TOKENS]
        rows = [ids[at : at + WINDOW_TOKENS] for at in range(0, len(ids), WINDOW_TOKENS)]
        file.write_text(json.dumps(rows), "utf-8")
    return file


def _start(
    contender: Contender,
    name: str,
    variant: str,
    model: str,
    folder: str,
    off_grid: bool,
    python: str | None,
    more: dict[str, str],
) -> None:
    spec = {"folder": folder, "variant": variant, "threads": torch.get_num_threads(), "logits": True, **more}
    if name == "llama.cpp":
        spec["artifact"] = str(artifacts.gguf_file(model, variant, off_grid=off_grid))
    if contender.start(PEERS[name][0], python, spec):
        contender.info = contender.ask().get("info", {})


def _peer(contender: Contender, place: Path, tokenizer: Any) -> Entry:
    """A contender as a row; its logits come through a file."""
    file = place / f"{contender.name.replace(' ', '-')}.f32"

    def logits(ids: Tensor) -> Tensor:
        reply = contender.ask({"ids": ids[0].tolist(), "to": str(file)})
        if contender.error:
            raise PeerError(contender.error)
        rows, width = reply["shape"]
        return torch.from_file(str(file), size=rows * width).view(1, rows, width).clone()

    known = {"patch_s", "bits_per_weight", "layer_bits_per_weight", "packed_bytes", "model_bytes"}
    found = {key: value for key, value in contender.info.items() if key in known}
    entry = Entry(contender.name, logits, {"executor": contender.info.get("version", ""), **found})
    if contender.error:
        entry.found["error"] = contender.error
    return entry
