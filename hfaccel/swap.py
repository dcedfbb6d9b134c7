"""Changing a model as a plan says: calibrate, swap modules, record; then marks, refusals, the runtime."""

from __future__ import annotations

import ctypes
from collections import Counter
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from hfaccel import checkpoint, compat
from hfaccel.anatomy import Anatomy
from hfaccel.calibrate import BlockLoop
from hfaccel.errors import PatchError
from hfaccel.observers import Stats, Want
from hfaccel.progress import progress_bar
from hfaccel.quant.linear import is_packed, show_as_int8
from hfaccel.quant.packing import packed_like
from hfaccel.quant.rounding import Rounding
from hfaccel.samples import CalibrationData, calibration_data, read_samples
from hfaccel.sites import Plan
from hfaccel.state import State
from hfaccel.transform import Record, Site, Transform, Unit


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
def apply(
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
