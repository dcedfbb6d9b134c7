"""`patch`, `unpatch`, `original`, `report`: check, order by stage, apply, record; and take it all back."""

from __future__ import annotations

import copy
import ctypes
import logging
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch import nn

from hfaccel import auto, checkpoint, compat
from hfaccel.anatomy import Anatomy
from hfaccel.calibrate import BlockLoop
from hfaccel.errors import AlreadyPatched, PatchError
from hfaccel.journal import Journal
from hfaccel.observers import Stats, Want
from hfaccel.progress import progress_bar
from hfaccel.quant.linear import is_packed, show_as_int8
from hfaccel.quant.packing import packed_like
from hfaccel.quant.rounding import Rounding
from hfaccel.recipe import AUTO, Budget, PatchConfig, check_question, is_question
from hfaccel.report import Report, build_report, model_bytes
from hfaccel.samples import CalibrationData, calibration_data, read_samples
from hfaccel.sites import Plan, check_materialized
from hfaccel.transform import Record, Site, Transform, Unit

log = logging.getLogger("hfaccel")


@dataclass
class State:
    """What a patched model carries as `model._hfaccel`.

    `journal` is None on a deep or pickled copy and on a model loaded from a patched folder: their originals
    are not theirs to give back. `bytes_before` is None there.
    """

    config: PatchConfig
    records: list[Record] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)  # module -> why it was left alone
    journal: Journal | None = None
    lock: threading.RLock = field(default_factory=threading.RLock)
    origin: str = "patch"  # or "loaded", "copy"
    bytes_before: int | None = None
    lent: bool = False  # inside `original`

    def __deepcopy__(self, memo: dict) -> State:
        return _restore_state(
            self.config.to_dict(), copy.deepcopy(self.records), dict(self.skipped), self.bytes_before
        )

    def __reduce__(self):
        return _restore_state, (self.config.to_dict(), self.records, self.skipped, self.bytes_before)


def _restore_state(
    config: dict, records: list[Record], skipped: dict[str, str], bytes_before: int | None
) -> State:
    return State(PatchConfig.from_dict(config), records, skipped, origin="copy", bytes_before=bytes_before)


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
            _apply(root, target, plan, data, state, progress)
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


# What patch works on --------------------------------------------------------------------------------------


def inner_model(model: Any) -> nn.Module:
    """The transformers model inside a PeftModel or a pipeline."""
    for _ in range(4):
        if hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
            model = model.get_base_model()
        elif not isinstance(model, nn.Module) and isinstance(getattr(model, "model", None), nn.Module):
            model = model.model
        elif hasattr(model, "_orig_mod"):  # torch.compile's wrapper
            model = model._orig_mod
        else:
            break
    if not isinstance(model, nn.Module) or not hasattr(model, "config"):
        raise PatchError(
            f"{type(model).__name__} has no config: not a transformers model, a PeftModel or a pipeline"
        )
    return model


def require_state(model: nn.Module) -> State:
    state = getattr(model, "_hfaccel", None)
    if state is None:
        raise PatchError(f"this {type(model).__name__} is not patched; call hfaccel.patch(model) first")
    return state


def require_journal(state: State) -> Journal:
    if state.journal is None:
        cause = {"loaded": "it was loaded from a patched folder", "copy": "it is a copy of a patched model"}
        raise PatchError(f"this model has no originals: {cause.get(state.origin, state.origin)}")
    return state.journal


# Applying -------------------------------------------------------------------------------------------------


@dataclass
class Data:
    """What the transforms want observed, and the samples to observe it on."""

    wants: list[tuple[Site, Want | None]]
    settings: CalibrationData
    samples: list[torch.Tensor]

    @classmethod
    def of(cls, plan: Plan, calibration: Any, model: nn.Module, tokenizer: Any) -> Data | None:
        """None if no transform wants any. Raises: PatchError for data that cannot be used, or none."""
        wants = [(t, site, t.observer(site)) for t, sites in plan.work for site in sites]
        asking = next((t for t, _, want in wants if want is not None), None)
        if asking is None:
            return None
        settings, tokenizer = calibration_data(calibration, model, tokenizer, asking.step())
        samples = read_samples(settings, model, tokenizer)
        return cls([(site, want) for _, site, want in wants], settings, samples)

    def loop(self, model: nn.Module, anatomy: Anatomy) -> BlockLoop:
        settings = self.settings
        limits = {"capture_tokens": settings.capture_tokens, "spill": settings.spill}
        return BlockLoop(model, anatomy, self.samples, self.wants, **limits)


@torch.inference_mode(False)  # what is made here may be trained with later
@torch.no_grad()
def _apply(
    root: nn.Module, model: nn.Module, plan: Plan, data: Data | None, state: State, progress: bool
) -> None:
    journal = state.journal
    compat.private_config(root, journal.on_undo)
    slots = Counter(p for _, p in model.named_parameters(remove_duplicate=False))
    places = _places(root)
    # Of each transform: weight -> its packed module, one tensor for all of its sites.
    shared: list[dict[Any, nn.Module]] = [{} for _ in plan.work]
    total = sum(len(sites) for transform, sites in plan.work if transform.unit is Unit.LINEAR)
    loop = None if data is None else data.loop(model, plan.anatomy)
    total += 0 if loop is None else loop.passes * len(loop.samples)
    with progress_bar("patching", total, progress) as advance, ExitStack() as stack:
        steps = iter([(None, {})])
        if loop is not None:
            loop.advance = advance
            steps = stack.enter_context(closing(iter(loop)))
        for block, stats in steps:
            for (transform, sites), twins in zip(plan.work, shared, strict=True):
                now = [site for site in sites if loop is None or site.block == block]
                folds = transform.smooth(model, plan.anatomy, now, stats, journal)
                for site in now:
                    site = replace(site, fold=folds.get(site.name))
                    _apply_site(transform, site, stats.get(site.name), state, slots, places, twins)
                    advance()
            if loop is not None:
                release_memory()
    for transform, sites in plan.work if data is not None else ():
        transform.refine(model, plan.anatomy, sites, data.samples, journal, progress)
    if plan.anatomy.tied:
        compat.tell_tying(model)
    settle(model, [transform for transform, _ in plan.work], state, journal.on_undo)


def settle(model: nn.Module, transforms: list[Transform], state: State, on_undo: checkpoint.OnUndo) -> None:
    """What follows the change of modules, in `patch` and in loading: marks, refusals, the runtime.

    The config must be the model's own. `on_undo` takes functions of the model that take a step back.
    """
    for transform in transforms:
        transform.finish(model)
    checkpoint.mark(model, state, on_undo)
    ends = (getattr(model, f"get_{end}_embeddings", lambda: None)() for end in ("input", "output"))
    if any(end is not None and is_packed(compat.base_layer(end)) for end in ends):
        on_undo(lambda model: vars(model).pop("resize_token_embeddings", None))
        model.resize_token_embeddings = refuse_resize  # a plain function: deepcopy and pickle take it along
    install_runtime(model, transforms, on_undo)


def install_runtime(model: nn.Module, transforms: list[Transform], on_undo: checkpoint.OnUndo) -> None:
    """Let `generate` run over the paged cache and the fastest executor; models that do not generate stay."""
    from hfaccel.generate import mixin

    if not hasattr(model, "generate") or not model.can_generate():
        return
    bits = next((t.bits for t in transforms if t.name == "kv"), None)
    on_undo(mixin.uninstall)
    mixin.install(model, kv_bits=bits)


def refuse_resize(*args: Any, **kwargs: Any) -> None:
    raise PatchError(
        "resize_token_embeddings: the embedding or the head is quantized; "
        "call hfaccel.unpatch(model), resize, and patch again"
    )


def _places(root: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """By identity of a module, every (parent, attribute) where it hangs; wrappers around the model too."""
    out: dict[int, list[tuple[nn.Module, str]]] = {}
    for parent in root.modules():
        for key, child in parent._modules.items():
            if child is not None:
                out.setdefault(id(child), []).append((parent, key))
    return out


def _apply_site(
    transform: Transform,
    site: Site,
    stats: tuple[Stats, ...] | None,
    state: State,
    slots: Counter,
    places: dict[int, list[tuple[nn.Module, str]]],
    shared: dict[Any, nn.Module],
) -> None:
    # Of an offloaded module this is the placeholder, as good as a name.
    weight = site.module._parameters.get("weight")
    with compat.materialized(site.module):
        twin = None if weight is None else shared.get(weight)
        if twin is not None and isinstance(transform, Rounding):
            new = packed_like(site.module, twin.layout, dict(twin.packed))
        else:
            new = transform.apply(site, stats)
        if new is None:
            return
        if site.as_int8:
            show_as_int8(new)
        if weight is not None and isinstance(transform, Rounding):
            shared[weight] = new
        note = f" ({site.fold.note})" if site.fold is not None and site.fold.note else ""
        record = Record(
            site.name,
            type(site.module).__name__,
            transform.step(),
            0 if twin is not None else tensor_bytes(site.module),
            0 if twin is not None else tensor_bytes(new),
            detail=getattr(new, "extra_repr", str)() + note,
        )
    compat.move_inputs_as(site.module, new)
    state.records.append(record)
    for parent, attribute in places[id(site.module)]:
        state.journal.swap(parent, attribute, new)
    kept = {id(parameter) for parameter in new.parameters(recurse=False)}
    for key, parameter in site.module._parameters.items():
        if parameter is None or id(parameter) in kept:
            continue
        slots[parameter] -= len(site.aliases)
        if slots[parameter] <= 0 and not parameter.is_meta:
            # Under the name by which the checkpoint would know it.
            state.journal.save(f"{site.name}.{key}", parameter, new)
            state.journal.release(parameter)


def tensor_bytes(module: nn.Module) -> int:
    """Bytes of a module's own parameters and buffers."""
    own = [*module._parameters.values(), *module._buffers.values()]
    return sum(t.numel() * t.element_size() for t in own if t is not None)


def release_memory() -> None:
    """Give freed pages back to the system, so that memory falls to what is in use."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # glibc alone
        libc.malloc_trim(0)
