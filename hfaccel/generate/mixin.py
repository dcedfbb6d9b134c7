"""What makes `model.generate` use the runner: a class mixin over the model's own class.

`generate` itself stays transformers': it validates, builds processors and criteria, and calls `_sample`,
which is ours. Whatever the loop here does not do goes to transformers' loop over the same modules, and the
reason is kept for `report()`; under HFACCEL_STRICT=1 it is an error instead. Beams run in transformers' loop
over pages.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from contextlib import contextmanager

import torch
from torch import nn
from transformers import GenerationMixin
from transformers.cache_utils import Cache
from transformers.generation import GenerationMode

from hfaccel.attention import backend
from hfaccel.cache.paged import PagedCache
from hfaccel.classes import extend, restore
from hfaccel.compat import base_layer
from hfaccel.errors import PatchError
from hfaccel.generate import loop
from hfaccel.runtime.modules import WHOLE_INPUT_ROPE, rope_types, unpackable
from hfaccel.runtime.runner import Runner, strict
from hfaccel.saving import SavingMixin

ATTRIBUTE = "_hfaccel_runtime"
ORIGINAL = "original(model)"
CACHE_NAMES = ("cache", "past_key_values")
KNOWN = {"attention_mask", "position_ids", "use_cache", "logits_to_keep", "return_dict", *CACHE_NAMES}
BEAMS = {GenerationMode.BEAM_SEARCH, GenerationMode.BEAM_SAMPLE}
POSITION_TABLES = ("wpe", "embed_positions", "position_embeddings", "position_embedding")


class Runtime:
    """The runner of one model, made at first use; copies and pickles carry the settings alone."""

    def __init__(self, kv_bits: int | None, page_tokens: int, attention: str | None):
        self.kv_bits, self.page_tokens = kv_bits, page_tokens
        self.attention = attention  # implementation before install, None if it was left alone
        self.fallbacks: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()  # executor -> generate calls it served
        self.active = 0
        self.owner: int | None = None  # thread that has the model for itself, see `alone`
        self._runner: Runner | None = None
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._free = threading.Condition(self._lock)

    def __reduce__(self):
        return Runtime, (self.kv_bits, self.page_tokens, self.attention)

    def __deepcopy__(self, memo):
        return Runtime(self.kv_bits, self.page_tokens, self.attention)

    def runner(self, model: nn.Module) -> Runner:
        with self._lock:
            if self._runner is None or self._runner.model is not model or self._process != os.getpid():
                self._process = os.getpid()
                self._runner = Runner(model, kv_bits=self.kv_bits, page_tokens=self.page_tokens)
            return self._runner

    @property
    def mine(self) -> bool:
        """Whether this thread has the model for itself."""
        return self.owner == threading.get_ident()

    @contextmanager
    def working(self):
        with self._lock:
            while self.owner not in (None, threading.get_ident()):
                self._free.wait()
            self.active += 1
        try:
            yield
        finally:
            with self._lock:
                self.active -= 1


@contextmanager
def alone(model: nn.Module, what: str):
    """No other thread generates meanwhile: one that starts to waits. Generation by this thread is
    transformers' own.

    Raises: PatchError if a `generate` is under way.
    """
    state = vars(model).get(ATTRIBUTE)
    if state is None:
        yield
        return
    with state._lock:
        if state.active:
            raise PatchError(
                f"{what}: a thread is generating with this model; it would change under its feet"
            )
        state.owner = threading.get_ident()
    try:
        yield
    finally:
        with state._lock:
            state.owner = None
            state._free.notify_all()


def runtime(model: nn.Module) -> Runtime:
    """The runtime that `install` gave the model. Raises: PatchError if it has none."""
    found = vars(model).get(ATTRIBUTE)
    if found is None:
        raise PatchError(f"{type(model).__name__} is not patched")
    return found


def runner_of(model: nn.Module) -> Runner:
    """The runner that the model's `generate` uses."""
    return runtime(model).runner(model)


def busy(model: nn.Module) -> bool:
    """Whether a thread is inside `generate` of this model."""
    return runtime(model).active > 0


class RunnerMixin(SavingMixin):
    """Goes in front of the model's class; see `install`."""

    def _prepare_model_inputs(self, inputs=None, bos_token_id=None, model_kwargs=None):
        found, name, model_kwargs = super()._prepare_model_inputs(inputs, bos_token_id, model_kwargs)
        if name == "input_ids" and unpackable(self) is None:
            _check_inputs(self, found, model_kwargs)
        return found, name, model_kwargs

    def _prepare_cache_for_generation(
        self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
    ):
        given = next((model_kwargs[n] for n in CACHE_NAMES if model_kwargs.get(n) is not None), None)
        if isinstance(given, Cache):
            _check_cache(self, given)
        args = (generation_config, model_kwargs, generation_mode, batch_size, max_cache_length)
        done = super()._prepare_cache_for_generation(*args)
        if given is not None:
            return done
        name = next((n for n in CACHE_NAMES if model_kwargs.get(n) is not None), None)
        if name is None or generation_config.cache_implementation is not None or unpackable(self):
            return done
        state = runtime(self)
        if state.mine:
            return done
        paged = generation_mode in BEAMS or state.kv_bits is not None
        if paged and not rope_types(self.config) & {"longrope"}:
            model_kwargs[name] = PagedCache(state.runner(self).pool, self.config.num_hidden_layers)
        model_kwargs[name]._hfaccel_own = True
        return done

    def _sample(
        self,
        input_ids,
        logits_processor,
        stopping_criteria,
        generation_config,
        synced_gpus=False,
        streamer=None,
        **model_kwargs,
    ):
        state = runtime(self)
        with state.working():
            if vars(self).get(ATTRIBUTE) is not state:
                raise PatchError("the model was unpatched while generate was starting")
            reason = _why_not(self, generation_config, synced_gpus, model_kwargs, input_ids)
            if state.mine or reason is not None:
                args = (
                    input_ids,
                    logits_processor,
                    stopping_criteria,
                    generation_config,
                    synced_gpus,
                    streamer,
                )
                reason = ORIGINAL if state.mine else reason
                sample = super()._sample
                return _hf_loop(self, reason, sample, args, {}, model_kwargs, expected=state.mine)
            runner = state.runner(self)
            state.calls[runner.refresh().name] += 1
            return loop.sample(
                runner,
                input_ids,
                logits_processor=logits_processor,
                stopping_criteria=stopping_criteria,
                generation_config=generation_config,
                streamer=streamer,
                attention_mask=model_kwargs.get("attention_mask"),
                position_ids=model_kwargs.get("position_ids"),
                limit=position_limit(self),
            )

    def _beam_search(self, *args, **kwargs):
        return _hf_loop(self, "beam search", super()._beam_search, args, kwargs, kwargs, expected=True)

    def _assisted_decoding(self, *args, **kwargs):
        reason = "assisted decoding"
        return _hf_loop(self, reason, super()._assisted_decoding, args, kwargs, kwargs, expected=True)


def _hf_loop(model, reason, method, args, kwargs, model_kwargs, expected=False):
    """Transformers' own loop over this model's modules, noted; pages of a cache of ours go back at the end.

    expected: this is how the mode is meant to run, so HFACCEL_STRICT=1 does not refuse it.
    """
    state = runtime(model)
    state.fallbacks[reason] += 1
    if strict() and not expected:
        raise PatchError(f"HFACCEL_STRICT=1: generate would fall back to transformers' loop: {reason}")
    if model_kwargs is not kwargs:
        kwargs = {**kwargs, **model_kwargs}
    cache = next((kwargs[n] for n in CACHE_NAMES if kwargs.get(n) is not None), None)
    with state.working():
        returned = False
        try:
            result = method(*args, **kwargs)
            returned = not isinstance(result, torch.Tensor)
            return result
        finally:
            if not returned and isinstance(cache, PagedCache) and getattr(cache, "_hfaccel_own", False):
                cache.release()


def _why_not(model, config, synced_gpus, model_kwargs, input_ids) -> str | None:
    """Why this call goes to transformers' loop, or None."""
    if reason := unpackable(model):
        return reason
    cache = next((model_kwargs[n] for n in CACHE_NAMES if model_kwargs.get(n) is not None), None)
    if not model_kwargs.get("use_cache", True) or cache is None:
        return "use_cache=False"
    if not getattr(cache, "_hfaccel_own", False):
        if config.cache_implementation is not None:
            return f"cache_implementation={config.cache_implementation!r}"
        return "a cache passed by the caller"
    if config.output_attentions or config.output_hidden_states:
        return "output_attentions or output_hidden_states"
    if unknown := sorted(k for k, v in model_kwargs.items() if k not in KNOWN and v is not None):
        return f"argument {unknown[0]}"
    if config.is_assistant:
        return "the model is an assistant"
    if synced_gpus:
        return "synced_gpus"
    if model.training:
        return "the model is in training mode"
    if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
        return "the model is spread over devices"
    own = type(model).prepare_inputs_for_generation
    if "prepare_inputs_for_generation" in vars(model):
        return "its inputs are prepared by a wrapper"
    longrope = "longrope" in rope_types(model.config)
    if own is not GenerationMixin.prepare_inputs_for_generation and not (
        longrope or own.__module__.endswith((".modeling_phi3", ".modeling_phimoe", ".modeling_bloom"))
    ):
        return f"its inputs are prepared by {own.__qualname__}"
    if longrope and _crosses(model.config, config, input_ids):
        return "generation crosses the border of its longrope tables"
    positions = model_kwargs.get("position_ids")
    if positions is not None and (positions.ndim != 2 or positions.shape[0] not in (1, input_ids.shape[0])):
        return "position_ids of more than two dimensions"
    return None


def _crosses(config, generation_config, input_ids) -> bool:
    border = getattr(config, "original_max_position_embeddings", None)
    border = border or (config.rope_parameters or {}).get("original_max_position_embeddings")
    if border is None:
        return True
    return input_ids.shape[1] <= border < (generation_config.max_length or border + 1)


def position_limit(model: nn.Module) -> int | None:
    """Rows of the model's learned position table, or None if it has none (rotary, alibi)."""
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in POSITION_TABLES and isinstance(module, nn.Embedding):
            return module.num_embeddings - getattr(module, "offset", 0)
    return None


def _check_inputs(model, ids: torch.Tensor, model_kwargs: dict) -> None:
    """Refuse, before anything is computed, prompts that cannot have an answer."""
    if ids.ndim != 2 or not ids.shape[0] or not ids.shape[1]:
        raise PatchError(
            f"generate needs at least one prompt of at least one token, not shape {[*ids.shape]}"
        )
    mask = model_kwargs.get("attention_mask")
    cached = any(model_kwargs.get(n) is not None for n in CACHE_NAMES)
    if mask is not None and mask.ndim == 2:
        if mask.shape[0] != ids.shape[0] or (mask.shape[1] != ids.shape[1] and not cached):
            raise PatchError(
                f"attention_mask is {[*mask.shape]}, input_ids are {[*ids.shape]}: they must agree"
            )
        empty = (mask.sum(-1) == 0).nonzero().flatten().tolist()
        if empty:
            raise PatchError(f"row {empty[0]} has no token: its attention mask is zero throughout")
    real = ids if mask is None or mask.shape != ids.shape else ids[mask.bool()]
    embedding = base_layer(model.get_input_embeddings())
    vocabulary = getattr(embedding, "num_embeddings", None) or embedding.weight.shape[0]
    if int(real.min()) < 0 or int(real.max()) >= vocabulary:
        wrong = real[(real < 0) | (real >= vocabulary)][0]
        raise PatchError(f"token id {int(wrong)} is not in the model's vocabulary of {vocabulary}")
    limit = position_limit(model)
    longest = ids.shape[1] if mask is None or mask.shape != ids.shape else int(mask.sum(-1).max())
    if limit is not None and longest > limit:
        raise PatchError(f"the prompt has {longest} tokens, the model's table of learned positions {limit}")


def _check_cache(model, cache: Cache) -> None:
    """A cache that was filled by a model of another shape is refused by name."""
    if unpackable(model) or not len(cache) or not cache.get_seq_length():
        return
    layers = model.config.num_hidden_layers
    if len(cache) != layers:
        raise PatchError(f"the cache has {len(cache)} layers, the model {layers}: it is of another model")
    keys = cache.layers[0].keys if not isinstance(cache, PagedCache) else None
    if isinstance(cache, PagedCache) and 0 in cache.pool.layers:
        held = tuple(cache.pool.layers[0].k.shape[2:])
    elif isinstance(keys, torch.Tensor) and keys.ndim == 4:
        held = (keys.shape[1], keys.shape[3])
    else:
        return
    probe = _kv_shape(model)
    if probe is not None and held != probe:
        raise PatchError(
            f"the cache holds {held[0]} KV heads of {held[1]}, the model has {probe[0]} of {probe[1]}: "
            "it is of another model"
        )


def _kv_shape(model) -> tuple[int, int] | None:
    """KV heads and head size of layer 0, read off its K projection; None where there is no such module."""
    for name, module in model.named_modules():
        if name.endswith(".k_proj") and hasattr(module, "out_features"):
            size = getattr(model.get_submodule(name.rpartition(".")[0]), "head_dim", None)
            return (module.out_features // size, size) if size else None
    return None


def install(model: nn.Module, *, kv_bits: int | None = None, page_tokens: int = 16) -> None:
    """Let `model.generate` run over pages; the model's config must be its own. Twice changes the settings.

    Raises: PatchError for a model that does not generate, or unknown settings.
    """
    if not isinstance(model, GenerationMixin):
        raise PatchError(f"{type(model).__name__} does not generate")
    Runner(model, kv_bits=kv_bits, page_tokens=page_tokens)  # refuses wrong settings
    before = vars(model).get(ATTRIBUTE)
    attention = before.attention if before is not None else None
    if before is None:
        now = model.config._attn_implementation
        ours = backend.NAMES.get(now)
        if ours is not None and unpackable(model) is None and model._can_set_attn_implementation():
            model.set_attn_implementation(ours)
            attention = now
        extend(model, RunnerMixin)
    setattr(model, ATTRIBUTE, Runtime(kv_bits, page_tokens, attention))


def uninstall(model: nn.Module) -> None:
    """Take `install` back: class and attention implementation; nothing happens if it was not there."""
    state = vars(model).pop(ATTRIBUTE, None)
    if state is None:
        return
    restore(model)
    if state.attention is not None and model.config._attn_implementation in backend.NAMES.values():
        model.set_attn_implementation(state.attention)


def explain(model: nn.Module) -> dict:
    """What serves `generate`: executor and its mode, cache, calls so far and every fallback with its
    reason."""
    state = runtime(model)
    out = {
        "kv_bits": state.kv_bits,
        "page_tokens": state.page_tokens,
        "attention": model.config._attn_implementation,
        "calls": dict(state.calls),
        "fallbacks": dict(state.fallbacks),
    }
    if reason := unpackable(model):
        return {**out, "executor": None, "why": reason}
    runner = state.runner(model)
    try:
        executor = runner.refresh()
    except PatchError as why:
        return {**out, "executor": None, "why": str(why)}
    return {
        **out,
        "executor": executor.name,
        "mode": getattr(executor, "mode", None),
        "why": getattr(executor, "why_rows", "") or None,
        "passed_over": dict(runner.skipped),
        "whole_input_rope": bool(rope_types(model.config) & WHOLE_INPUT_ROPE),
    }
