"""`patch`, `unpatch`, `original`, `report`: check everything, order by stage, apply, record - and take it back."""

from __future__ import annotations

import copy
import ctypes
import gc
import logging
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from hfaccel import checkpoint, compat
from hfaccel.anatomy import Anatomy, anatomy, builtin_ignore
from hfaccel.errors import AlreadyPatched, PatchError
from hfaccel.journal import Journal
from hfaccel.match import select
from hfaccel.quant.head import Head
from hfaccel.quant.linear import QuantEmbedding, packed_like
from hfaccel.progress import progress_bar
from hfaccel.quant.rounding import Rounding, is_matrix
from hfaccel.recipe import PatchConfig
from hfaccel.report import Report, build_report
from hfaccel.transform import Record, Site, Transform, Unit

log = logging.getLogger("hfaccel")


@dataclass
class State:
    """What a patched model carries as `model._hfaccel`.

    `journal` is None on a deep or pickled copy and on a model loaded from a patched folder: their originals are not
    theirs to give back.
    """

    config: PatchConfig
    records: list[Record] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)  # module -> why it was left alone
    journal: Journal | None = None
    lock: threading.RLock = field(default_factory=threading.RLock)
    origin: str = "patch"  # or "loaded", "copy"
    weights_version: int = 0

    def __deepcopy__(self, memo: dict) -> State:
        return State(
            self.config,
            copy.deepcopy(self.records),
            dict(self.skipped),
            origin="copy",
            weights_version=self.weights_version,
        )

    def __reduce__(self):
        return _restore_state, (self.config.to_dict(), self.records, self.skipped, self.weights_version)


def _restore_state(config: dict, records: list[Record], skipped: dict[str, str], version: int) -> State:
    return State(PatchConfig.from_dict(config), records, skipped, origin="copy", weights_version=version)


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
        model: a transformers model, a PeftModel around one, or a pipeline. Class name, `generate` signature and the
            dtype of what is not quantized stay.
        config: a recipe string ("int4", "int8+kv8", ...: `hfaccel recipes`), one transform, a list of them, a dict as
            config.json stores it, or None: the choice measured on this device (`auto`).
        calibration: texts, token tensors or a DataLoader, for the methods that need data.
        tokenizer: for calibration given as texts.
        keep_original: allow `unpatch` and `original`. Originals are read again from the checkpoint the model was
            loaded from where its bits are those in memory, else spilled to HFACCEL_SPILL_DIR; never kept in RAM.
        progress: a bar on a terminal.
    Returns: the same object.
    Raises: PatchError (a ValueError) before anything changes, naming what was wrong and the known choices. A failure
        in the middle, also an interrupt, leaves the model as it was.
    """
    target = inner_model(model)
    state: State | None = getattr(target, "_hfaccel", None)
    if state is not None:
        if config is None or PatchConfig.of(config) == state.config:
            return model
        raise AlreadyPatched(
            f"the model is patched with {state.config.describe()!r} already; call hfaccel.unpatch(model) first"
        )
    if config is None:
        from hfaccel.auto import choose

        check_materialized(target)
        config = choose(target, tokenizer=tokenizer, progress=progress)
    config = PatchConfig.of(config)
    plan = Plan.of(target, config)
    state = State(config, journal=Journal(target, keep_original))
    try:
        _apply(target, plan, state, progress)
    except BaseException:
        state.journal.rollback()
        raise
    finally:
        release_memory()
    target._hfaccel = state
    return model


def unpatch(model: Any) -> Any:
    """Give back the original modules, weights (bit for bit), config and class. Returns: the same object.

    Raises: PatchError if the model is not patched, or its originals are not to be had (a copy, a model loaded from a
        patched folder, keep_original=False, a checkpoint that changed since).
    """
    target = inner_model(model)
    state = require_state(target)
    journal = require_journal(state)
    with state.lock:
        journal.restore()
        del target._hfaccel
    release_memory()
    return model


@contextmanager
def original(model: Any) -> Iterator[Any]:
    """The unpatched behaviour inside the block: original modules over memory-mapped weights.

    Takes the model's lock, and refuses while another thread generates.
    """
    target = inner_model(model)
    state = require_state(target)
    journal = require_journal(state)
    if not state.lock.acquire(blocking=False):
        raise PatchError("another thread is generating with this model; original(model) would change it under its feet")
    try:
        give_back = journal.borrow()
        try:
            yield model
        finally:
            give_back()
    finally:
        state.lock.release()


def report(model: Any) -> Report:
    """What changed: modules, bytes, backend of each, what was skipped and why, what runs what."""
    target = inner_model(model)
    return build_report(target, require_state(target))


# What patch works on -------------------------------------------------------------------------------------------


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
            f"{type(model).__name__} is not a transformers model, a PeftModel or a pipeline (it has no config)"
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


def check_materialized(model: nn.Module) -> None:
    """Refuse parameters without data, except those an offload hook holds elsewhere."""
    for name, module in model.named_modules():
        if compat.is_offloaded(module):
            continue
        for key, tensor in module._parameters.items():
            if tensor is not None and tensor.is_meta:
                raise PatchError(
                    f"{name + '.' if name else ''}{key} is on the meta device and has no data; load the weights first"
                )


@dataclass
class Plan:
    """Every site of every transform, found and checked before anything changes."""

    anatomy: Anatomy
    work: list[tuple[Transform, list[Site]]]
    finishers: list[Transform]

    @classmethod
    def of(cls, model: nn.Module, config: PatchConfig) -> Plan:
        check_materialized(model)
        parts = anatomy(model)
        transforms = list(config.transforms)
        weighted = [t for t in transforms if t.rounds and not isinstance(t, Head)]
        if any(t.targets is None for t in weighted) and not any(isinstance(t, Head) for t in transforms):
            named = {name for t in weighted if t.targets is not None for name in _names(model, t, parts)}
            if parts.head not in named:
                transforms.append(Head())
        transforms.sort(key=lambda t: t.stage)
        modules = _aliases(model)
        work, owner = [], {}
        for transform in transforms:
            transform.check(model)
            sites = _sites(model, transform, parts, modules)
            for site in sites if transform.rounds else ():
                if id(site.module) in owner:
                    raise PatchError(
                        f"{site.name}: rounded by both {owner[id(site.module)].step()!r} and {transform.step()!r}; "
                        f"narrow their targets so that each weight is rounded once"
                    )
                owner[id(site.module)] = transform
            work.append((transform, sites))
        return cls(parts, work, transforms)


def _aliases(model: nn.Module) -> dict[int, list[str]]:
    """Every dotted name of every module, by identity, without the wrappers an adapter put around it."""
    out: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        out.setdefault(id(module), []).append(name)
    return out


def _names(model: nn.Module, transform: Transform, parts: Anatomy) -> list[str]:
    """Names of a LINEAR transform's sites, in the model's order."""
    default = transform.default_targets(parts)
    if transform.targets is None:
        return select(list(default), None, transform.ignore, ())
    candidates = [name for name in parts.matrices if is_matrix(compat.base_layer(matrix_owner(model, name)))]
    ignored = builtin_ignore(parts) if transform.rounds else [n for n in candidates if n not in set(default)]
    return select(candidates, transform.targets, transform.ignore, ignored)


def matrix_owner(model: nn.Module, name: str) -> nn.Module:
    """The module a matrix's name leads to: itself, or the fused experts that hold it as a 3-D parameter."""
    try:
        return model.get_submodule(name)
    except AttributeError:
        return model.get_submodule(name.rpartition(".")[0])


def _sites(model: nn.Module, transform: Transform, parts: Anatomy, modules: dict[int, list[str]]) -> list[Site]:
    if transform.unit is Unit.MODEL:
        return [Site(model, "", aliases=("",))]
    if transform.unit is Unit.BLOCK:
        return [Site(b.module, b.name, block=i, aliases=(b.name,)) for i, b in enumerate(parts.blocks)]
    feeders = {reader: group.feeder for group in parts.groups for reader in group.readers}
    positions = {block.name: i for i, block in enumerate(parts.blocks)}
    out, seen = [], set()
    for name in _names(model, transform, parts):
        module = compat.base_layer(matrix_owner(model, name))
        if id(module) in seen:
            continue
        seen.add(id(module))
        block, role = parts.locate(name)
        aliases = tuple(modules[id(module)])
        at = None if block is None else positions[block.name]
        out.append(Site(module, aliases[0], role, at, feeders.get(name), aliases))
    return out


# Applying ------------------------------------------------------------------------------------------------------


def _apply(model: nn.Module, plan: Plan, state: State, progress: bool) -> None:
    journal = state.journal
    compat.private_config(model, journal.on_undo)
    slots = Counter(p for _, p in model.named_parameters(remove_duplicate=False))
    total = sum(len(sites) for transform, sites in plan.work if transform.unit is Unit.LINEAR)
    with progress_bar("patching", total, progress) as advance:
        for transform, sites in plan.work:
            shared: dict[Any, nn.Module] = {}  # one packed tensor for every site of this transform over one weight
            for site in sites:
                _apply_site(model, transform, site, state, slots, shared)
                advance()
    untie_config(model, plan.anatomy, journal)
    for transform in plan.finishers:
        transform.finish(model)
    checkpoint.mark(model, state, journal.on_undo)
    if any(isinstance(module, QuantEmbedding) for module in model.modules()):
        model.resize_token_embeddings = refuse_resize  # a plain function: deepcopy and pickle take it along
        journal.on_undo(lambda: vars(model).pop("resize_token_embeddings", None))
    install_runtime(model, plan.finishers, journal.on_undo)


def install_runtime(model: nn.Module, transforms: list[Transform], on_undo: Any) -> None:
    """Let `generate` run over the paged cache and the fastest executor; models that do not generate stay."""
    from hfaccel.generate import mixin

    if not hasattr(model, "generate") or not model.can_generate():
        return
    bits = next((t.bits for t in transforms if t.name == "kv"), None)
    mixin.install(model, kv_bits=bits)
    on_undo(lambda: mixin.uninstall(model))


def refuse_resize(*args: Any, **kwargs: Any) -> None:
    raise PatchError(
        "resize_token_embeddings: the embedding is quantized; call hfaccel.unpatch(model), resize, and patch again"
    )


def _apply_site(
    model: nn.Module, transform: Transform, site: Site, state: State, slots: Counter, shared: dict[Any, nn.Module]
) -> None:
    with compat.materialized(site.module):
        weight = site.module._parameters.get("weight")
        twin = None if weight is None else shared.get(weight)
        if twin is not None and isinstance(transform, Rounding):
            new = packed_like(site.module, twin.layout, dict(twin.packed))
        else:
            new = transform.apply(site, None)
        if new is None:
            return
        if weight is not None and isinstance(transform, Rounding):
            shared[weight] = new
        state.records.append(
            Record(
                site.name,
                type(site.module).__name__,
                transform.step(),
                tensor_bytes(site.module),
                0 if twin is not None else tensor_bytes(new),
                detail=getattr(new, "extra_repr", str)(),
            )
        )
    # Freed names are journaled under the name the checkpoint would know them by.
    gone: dict[nn.Parameter, str] = {}
    for alias in site.aliases:
        parent, _, attribute = alias.rpartition(".")
        state.journal.swap(model.get_submodule(parent), attribute, new)
        for key, parameter in site.module._parameters.items():
            if parameter is not None and not any(parameter is kept for kept in new.parameters(recurse=False)):
                slots[parameter] -= 1
                gone.setdefault(parameter, f"{site.name}.{key}")
    for parameter, name in gone.items():
        if slots[parameter] <= 0 and not parameter.is_meta:
            state.journal.save(name, parameter)
            state.journal.release(parameter)


def untie_config(model: nn.Module, parts: Anatomy, journal: Journal) -> None:
    """config.tie_word_embeddings says whether head and embedding are still one tensor."""
    if not (parts.tied and parts.head):
        return
    head = compat.base_layer(model.get_submodule(parts.head))
    embedding = compat.base_layer(model.get_submodule(parts.embeddings["tok"]))
    if head.weight is not embedding.weight:
        model.config.tie_word_embeddings = False  # the config is private by now: nothing to undo


def tensor_bytes(module: nn.Module) -> int:
    """Bytes of a module's own parameters and buffers."""
    own = [*module._parameters.values(), *module._buffers.values()]
    return sum(t.numel() * t.element_size() for t in own if t is not None)


def release_memory() -> None:
    """Give freed pages back to the system, so that memory falls to what is in use."""
    gc.collect()
    if hasattr(ctypes.CDLL(None), "malloc_trim"):  # glibc alone
        ctypes.CDLL(None).malloc_trim(0)
