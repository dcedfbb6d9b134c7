"""What makes `model.generate` use the runner: a class mixin over the model's own class.

`generate` itself stays transformers': it validates, builds processors and criteria, and calls `_sample`,
which is ours. Whatever the loop here does not do goes to transformers' loop over the same modules, and the
reason is kept for `report()`; under HFACCEL_STRICT=1 it is an error instead. Beams run in transformers' loop
over pages.
"""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from functools import wraps

import torch
from torch import nn
from transformers import GenerationMixin

from hfaccel import compat
from hfaccel.attention import backend
from hfaccel.cache.paged import PagedCache
from hfaccel.classes import extend, restore
from hfaccel.errors import PatchError
from hfaccel.generate import checks, gate, loop
from hfaccel.generate.checks import BEAMS, CACHE_NAMES, given_cache, position_limit
from hfaccel.generate.gate import Gate, alone
from hfaccel.runtime.choice import Choice, choose
from hfaccel.runtime.modules import WHOLE_INPUT_ROPE, rope_types, unpackable, windowed
from hfaccel.runtime.runner import Runner, strict
from hfaccel.saving import SavingMixin

__all__ = ["ATTRIBUTE", "alone", "explain", "install", "runner_of", "runtime", "uninstall"]

ATTRIBUTE = gate.RUNTIME
ORIGINAL = "original(model)"
FORKED = "a forked child: its threads stayed in the parent"
KNOWN = {"attention_mask", "position_ids", "use_cache", "logits_to_keep", "return_dict", *CACHE_NAMES}


class Runtime:
    """The runner of one model, made at first use; copies and pickles carry the settings alone."""

    def __init__(self, kv_bits: int | None, page_tokens: int, attention: str | None):
        self.kv_bits, self.page_tokens = kv_bits, page_tokens
        self.attention = attention  # implementation before install, None if it was left alone
        self.fallbacks: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()  # executor -> generate calls it served
        self.choice: Choice | None = None  # what was measured, or recorded
        self._runner: Runner | None = None
        self._forked = False  # the runner was made in a forked child

    def __reduce__(self):
        return Runtime, (self.kv_bits, self.page_tokens, self.attention)

    def __deepcopy__(self, memo):
        return Runtime(self.kv_bits, self.page_tokens, self.attention)

    def decide(self, model: nn.Module) -> dict[str, str] | None:
        """Measure which executor serves the model best, unless that is known; those that are no choice."""
        if self.choice is None and unpackable(model) is None:
            self.choice = choose(model, kv_bits=self.kv_bits)
        return self.choice.barred() if self.choice else None

    def runner(self, model: nn.Module) -> Runner:
        """The runner; a forked child makes one of its own, which runs modules."""
        at = vars(model)[gate.ATTRIBUTE]
        with at.lock:
            if self._runner is None or self._runner.model is not model or self._forked != at.forked:
                barred = {"native": FORKED} if at.forked else self.decide(model)
                self._forked = at.forked
                self._runner = Runner(
                    model, kv_bits=self.kv_bits, page_tokens=self.page_tokens, barred=barred
                )
            return self._runner


def runtime(model: nn.Module) -> Runtime:
    """The runtime that `install` gave the model. Raises: PatchError if it has none."""
    found = vars(model).get(ATTRIBUTE)
    if found is None:
        raise PatchError(f"{type(model).__name__} is not patched; call hfaccel.patch(model) first")
    return found


def runner_of(model: nn.Module) -> Runner:
    """The runner that the model's `generate` uses."""
    return runtime(model).runner(model)


class RunnerMixin(SavingMixin):
    """Goes in front of the model's class; see `install`."""

    @wraps(GenerationMixin.generate)
    def generate(self, *args, **kwargs):
        at = vars(self).get(gate.ATTRIBUTE)
        if at is not None:
            with at.working():
                if isinstance(self, RunnerMixin) and ATTRIBUTE in vars(self):
                    return super().generate(*args, **kwargs)
        # Taken back while this thread came in or waited: what the model is now.
        plain = getattr(type(self), "_hfaccel_class", type(self))
        return plain.generate(self, *args, **kwargs)

    def _validate_generation_mode(self, generation_mode, generation_config, generation_mode_kwargs):
        super()._validate_generation_mode(generation_mode, generation_config, generation_mode_kwargs)
        assistant = generation_mode_kwargs.get("assistant_model") is not None
        drafts = assistant or generation_config.prompt_lookup_num_tokens is not None
        checks.check_mode(generation_mode, generation_config, drafts, assistant)

    def _prepare_model_inputs(self, inputs=None, bos_token_id=None, model_kwargs=None):
        found, name, model_kwargs = super()._prepare_model_inputs(inputs, bos_token_id, model_kwargs)
        if unpackable(self) is None:
            checks.check_inputs(self, found, name, model_kwargs)
        return found, name, model_kwargs

    def _prepare_cache_for_generation(
        self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
    ):
        given = given_cache(model_kwargs)
        served = unpackable(self) is None
        if served:
            copies = max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
            checks.check_cache(self, given, generation_config, batch_size * copies)
        args = (generation_config, model_kwargs, generation_mode, batch_size, max_cache_length)
        done = super()._prepare_cache_for_generation(*args)
        if served and generation_config.prefill_chunk_size and "inputs_embeds" in model_kwargs:
            raise PatchError("prefill_chunk_size does not go with inputs_embeds")
        name = next((n for n in CACHE_NAMES if model_kwargs.get(n) is not None), None)
        if given is not None or name is None or generation_config.cache_implementation is not None:
            return done
        if not served or vars(self)[gate.ATTRIBUTE].mine:
            return done
        state = runtime(self)
        paged = generation_mode in BEAMS or state.kv_bits is not None
        if paged and not rope_types(self.config) & {"longrope"}:
            pads = None
            if compat.attention_name(self.config) in backend.NAMES.values():
                pads = checks.left_padding(model_kwargs.get("attention_mask"))
            pool = state.runner(self).pages()
            model_kwargs[name] = PagedCache(pool, self.config.num_hidden_layers, pads=pads)
        model_kwargs[name]._hfaccel_own = True
        return done

    def _sample(self, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        state = runtime(self)
        owned = vars(self)[gate.ATTRIBUTE].mine
        synced, streamer = kwargs.pop("synced_gpus", False), kwargs.pop("streamer", None)
        reason = ORIGINAL if owned else _why_not(self, generation_config, synced, kwargs, input_ids)
        if reason is not None:
            args = (input_ids, logits_processor, stopping_criteria, generation_config)
            kwargs |= {"synced_gpus": synced, "streamer": streamer}
            return _hf_loop(self, reason, super()._sample, *args, expected=owned, **kwargs)
        limit = position_limit(self)
        certain = checks.ends_by_length(stopping_criteria)
        last = checks.last_length(stopping_criteria, generation_config.max_length)
        checks.check_room(input_ids, kwargs, last, limit, certain)
        runner = state.runner(self)
        state.calls[runner.refresh().name] += 1
        return loop.sample(
            runner,
            input_ids,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            generation_config=generation_config,
            streamer=streamer,
            attention_mask=kwargs.get("attention_mask"),
            position_ids=kwargs.get("position_ids"),
            limit=limit,
        )

    def _beam_search(self, *args, **kwargs):
        return _hf_loop(self, "beam search", super()._beam_search, *args, expected=True, **kwargs)

    def _assisted_decoding(self, input_ids, **kwargs):
        if kwargs.get("assistant_model") is not None and not input_ids.shape[1]:
            raise PatchError("assistant_model needs input_ids: it cannot read inputs_embeds")
        return _hf_loop(
            self, "assisted decoding", super()._assisted_decoding, input_ids, expected=True, **kwargs
        )


def _hf_loop(
    model,
    reason,
    method,
    input_ids,
    logits_processor,
    stopping_criteria,
    generation_config,
    *,
    expected,
    **kwargs,
):
    """Transformers' own loop over this model's modules, noted; pages of a cache of ours go back at the end.

    expected: this is how the mode is meant to run, so HFACCEL_STRICT=1 does not refuse it.
    """
    runtime(model).fallbacks[reason] += 1
    if strict() and not expected:
        raise PatchError(f"HFACCEL_STRICT=1: generate would fall back to transformers' loop: {reason}")
    limit = position_limit(model) if unpackable(model) is None else None
    if limit is not None:
        # Drafts run ahead as far as the length allows; anything else may end before.
        certain = reason == "assisted decoding" or checks.ends_by_length(stopping_criteria)
        last = checks.last_length(stopping_criteria, generation_config.max_length)
        checks.check_room(input_ids, kwargs, last, limit, certain)
        stopping_criteria = checks.within_table(stopping_criteria, input_ids, kwargs, limit)
    cache = given_cache(kwargs)
    own = isinstance(cache, PagedCache) and getattr(cache, "_hfaccel_own", False)
    returned = False
    try:
        with backend.marked() if own and cache.pads_are_mask else nullcontext():
            result = method(
                input_ids,
                logits_processor=logits_processor,
                stopping_criteria=stopping_criteria,
                generation_config=generation_config,
                **kwargs,
            )
        returned = not isinstance(result, torch.Tensor)
        return result
    finally:
        if own:
            cache.pads_are_mask = False  # whoever gets it may mask what he likes
            if not returned:
                cache.release()


def _why_not(model, config, synced_gpus, model_kwargs, input_ids) -> str | None:
    """Why this call goes to transformers' loop, or None."""
    if reason := unpackable(model):
        return reason
    cache = given_cache(model_kwargs)
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
    if "prepare_inputs_for_generation" in vars(model):
        return "its inputs are prepared by a wrapper"
    own = type(model).prepare_inputs_for_generation
    longrope = "longrope" in rope_types(model.config)
    if own is not GenerationMixin.prepare_inputs_for_generation and not (
        longrope or own.__module__.endswith((".modeling_phi3", ".modeling_phimoe", ".modeling_bloom"))
    ):
        return f"its inputs are prepared by {own.__qualname__}"
    if longrope and _crosses(model.config, config, input_ids):
        return "generation crosses the border of its longrope tables"
    if windowed(model.config) and checks.has_holes(model_kwargs.get("attention_mask")):
        return "a mask with holes, which count in sliding windows"
    positions = model_kwargs.get("position_ids")
    if positions is not None and int(positions.min()) < 0:
        return "negative position_ids"
    return None


def _crosses(config, generation_config, input_ids) -> bool:
    border = getattr(config, "original_max_position_embeddings", None)
    border = border or (config.rope_parameters or {}).get("original_max_position_embeddings")
    if border is None:
        return True
    return input_ids.shape[1] <= border < (generation_config.max_length or border + 1)


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
        now = compat.attention_name(model.config)
        ours = backend.NAMES.get(now)
        if ours is not None and unpackable(model) is None and compat.can_choose_attention(model):
            model.set_attn_implementation(ours)
            attention = now
    vars(model).setdefault(gate.ATTRIBUTE, Gate())
    setattr(model, ATTRIBUTE, Runtime(kv_bits, page_tokens, attention))
    extend(model, RunnerMixin)


def uninstall(model: nn.Module) -> None:
    """Take `install` back: class and attention implementation; nothing happens if it was not there."""
    state = vars(model).pop(ATTRIBUTE, None)
    if state is None:
        return
    restore(model)
    vars(model).pop(gate.ATTRIBUTE, None)
    if state.attention is not None and compat.attention_name(model.config) in backend.NAMES.values():
        model.set_attn_implementation(state.attention)


def explain(model: nn.Module) -> dict:
    """What serves `generate`: executor and its mode, cache, calls so far and every fallback with its
    reason."""
    state = runtime(model)
    out = {
        "kv_bits": state.kv_bits,
        "page_tokens": state.page_tokens,
        "attention": compat.attention_name(model.config),
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
        "measured": str(state.choice or "") or None,
        "whole_input_rope": bool(rope_types(model.config) & WHOLE_INPUT_ROPE),
    }
