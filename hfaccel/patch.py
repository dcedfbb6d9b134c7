"""`patch`, `unpatch`, `original`, `report`: check, order by stage, apply, record; and take it all back."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import nn

from hfaccel import auto, compat
from hfaccel.errors import AlreadyPatched, PatchError
from hfaccel.journal import Journal
from hfaccel.recipe import AUTO, Budget, PatchConfig, check_question, is_question
from hfaccel.report import Report, build_report, model_bytes
from hfaccel.sites import Plan, check_materialized
from hfaccel.state import State, inner_model, require_journal, require_state
from hfaccel.swap import Data, apply, release_memory

log = logging.getLogger("hfaccel")


def patch(
    model: Any,
    config: Any = None,
    *,
    calibration: Any = None,
    tokenizer: Any = None,
    keep_original: bool = True,
    progress: bool = True,
) -> Any:
    """Make `model` smaller and faster in place.

    Args:
        model: a transformers model, a PeftModel around one, or a pipeline. Class name, `generate` signature
            and the dtype of what is not quantized stay.
        config: a recipe string ("int4", "int8+kv8", ...: `hfaccel recipes`), one transform, a list of them, a
            dict as config.json stores it, or None: the choice measured on this device (`auto`). A second time
            the same config does nothing, nor does None where auto may have made the first choice.
            "auto@4.5bpw" and "auto@300MB" search the best bits of every matrix under that budget.
        calibration: for the methods that need data: texts, token ids, a dataset, a DataLoader, or
            `CalibrationData` around them; None means the shipped text where a tokenizer is at hand.
        tokenizer: for calibration given as texts.
        keep_original: allow `unpatch` and `original`. Originals are never kept in RAM: they are read again
            from the checkpoint the model was loaded from where its bits are those in memory, else spilled to
            HFACCEL_SPILL_DIR.
        progress: a bar on a terminal.
    Returns: the same object.
    Raises: PatchError (a ValueError) before anything changes, naming what was wrong and the known choices. A
        failure in the middle, also an interrupt, leaves the model as it was.
    """
    from hfaccel.generate import gate
    from hfaccel.generate.mixin import ATTRIBUTE as RUNTIME

    target = inner_model(model)
    state: State | None = getattr(target, "_hfaccel", None)
    asked = is_question(config)
    measured = config is None or config == AUTO
    check_question(config)
    if state is not None:
        same = measured and state.config in auto.OUTCOMES
        if same or (not asked and PatchConfig.of(config) == state.config):
            return model
        raise AlreadyPatched(
            f"the model is patched with {state.config.describe()!r} already"
            + (f", and auto chooses {auto.CANDIDATE!r} or 'runtime'" if measured else "")
            + (
                "; call hfaccel.unpatch(model) first"
                if state.journal
                else "; load the original model instead"
            )
        )
    check_materialized(target)
    compat.retie_offloaded(target)
    if measured:
        config = auto.choose(target, tokenizer=tokenizer, progress=progress)
    elif asked:
        from hfaccel.quant.search import search

        if isinstance(calibration, Iterator):  # read twice: to measure, and to calibrate
            calibration = list(calibration)
        config = search(
            target, Budget.parse(config), calibration=calibration, tokenizer=tokenizer, progress=progress
        )
    config = PatchConfig.of(config)
    root = model if isinstance(model, nn.Module) else target
    plan = Plan.of(target, config)
    journal = Journal(target, keep_original)
    data = Data.of(plan, calibration, target, tokenizer)
    journal.check_space(plan.replaced())
    state = State(config, skipped=plan.skipped, journal=journal, bytes_before=model_bytes(target))
    with gate.alone(target, "patch(model)"):
        try:
            apply(root, target, plan, data, state, progress)
            target._hfaccel = state
            if RUNTIME in vars(target):
                vars(target)[RUNTIME].decide(target)
        except BaseException:
            vars(target).pop("_hfaccel", None)
            with torch.inference_mode(False):
                journal.rollback(target)
            raise
        finally:
            release_memory()
    journal.done()
    return model


def unpatch(model: Any) -> Any:
    """Give back the original modules, weights (bit for bit), config and class. Returns: the same object.

    Raises: PatchError if the model is not patched, or its originals are not to be had (a copy, a model
        loaded from a patched folder, keep_original=False, a checkpoint that changed since).
    """
    target = inner_model(model)
    state = require_state(target)
    journal = require_journal(state)
    with _alone(target, state, "unpatch(model)"), torch.inference_mode(False):
        _warn_of_merged(target)
        journal.restore(target)
        del target._hfaccel
    release_memory()
    return model


def _warn_of_merged(model: nn.Module) -> None:
    """Say which adapters go with the codes that they were merged into for good."""
    merged = [names for module in model.modules() if (names := getattr(module, "merged_adapters", ()))]
    if merged:
        names = ", ".join(repr(name) for name in dict.fromkeys(chain(*merged)))
        log.warning(
            "unpatch: %s, merged into the codes of %d modules, is not in their originals", names, len(merged)
        )


@contextmanager
def original(model: Any) -> Iterator[Any]:
    """The unpatched model inside the block: its modules over memory-mapped weights, its own `generate`.

    Takes the model's lock, and refuses while another thread generates; one that starts to meanwhile waits.
    """
    target = inner_model(model)
    state = require_state(target)
    journal = require_journal(state)
    if state.lent and state.lock.acquire(blocking=False):  # inside another block of the same thread
        try:
            yield model
        finally:
            state.lock.release()
        return
    with _alone(target, state, "original(model)"):
        give_back = journal.borrow(target)
        state.lent = True
        try:
            yield model
        finally:
            give_back()
            state.lent = False


@contextmanager
def _alone(model: nn.Module, state: State, what: str) -> Iterator[None]:
    """The model for this thread alone.

    Raises: PatchError while it generates, is lent, or has merged adapters.
    """
    from hfaccel.generate import mixin

    if not state.lock.acquire(blocking=False):
        raise PatchError(f"{what}: another thread has the original behaviour of this model")
    try:
        if state.lent:
            raise PatchError(f"{what}: inside original(model); leave that block first")
        if merged := compat.merged_adapters(model):
            raise PatchError(
                f"{what}: an adapter is merged into {merged[0]}; call unmerge_adapter() first, or "
                "merge_and_unload()"
            )
        with mixin.alone(model, what):
            yield
    finally:
        state.lock.release()


def report(model: Any) -> Report:
    """What changed: modules, bytes, backend of each, what was skipped and why, what runs what."""
    target = inner_model(model)
    return build_report(target, require_state(target))
