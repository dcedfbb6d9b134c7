"""Executor `modules`: the model's own modules on packed rows. Runs everywhere; the oracle of all others.

Three ways, the first that is right for the model:
    packed  ids and positions [1, T], attention over pages, no masks
    rows    the same for one sequence at a time: rope types that look at the whole input (`dynamic`,
    `longrope`
            take max(position_ids), so that a long neighbour would change a short row)
    dense   one sequence at a time, K and V gathered, the model's own masks: families whose attention does not
            go through transformers' interface (BLOOM, Falcon) or says more than its arguments show
"""

from __future__ import annotations

import inspect
import logging
import threading
from contextlib import contextmanager

import torch
from torch import nn

from hfaccel.attention.backend import NAMES, Step, packed
from hfaccel.cache.paged import NotPackable, StepCache
from hfaccel.cache.pool import PagePool
from hfaccel.compat import attention_name, has_default_cache, is_stateful
from hfaccel.errors import PatchError
from hfaccel.lora.slots import AdapterSlots
from hfaccel.runtime import Unsupported
from hfaccel_kernels.lora import lora_add

log = logging.getLogger("hfaccel")

PLAIN_LAYERS = {"full_attention", "sliding_attention"}
WHOLE_INPUT_ROPE = {"dynamic", "longrope"}


class Modules:
    """Runs steps through `model`; holds no weights and no state of its own, so it is never stale.

    Args: lora: the adapters that tokens may have, `tables` by module name, read at each step.
    """

    name = "modules"

    def __init__(self, model: nn.Module, lora: AdapterSlots | None = None):
        config = model.config.get_text_config(decoder=True)
        if reason := unpackable(model):
            raise Unsupported(reason)
        parameters = inspect.signature(model.forward).parameters
        self.model, self.lora = model, lora
        self.layers = config.num_hidden_layers
        self.layer_types = getattr(config, "layer_types", None)
        self.sliding_window = getattr(config, "sliding_window", None)
        self.cache_name = "cache" if "cache" in parameters else "past_key_values"
        self.takes_positions = "position_ids" in parameters
        self.keeps_logits = "logits_to_keep" in parameters
        self.ropes = [m for m in model.modules() if hasattr(m, "rope_type") and hasattr(m, "inv_freq")]
        self.whole_prompts = bool(WHOLE_INPUT_ROPE & rope_types(config))  # a chunk would change the result
        self.why_rows = ""
        if attention_name(config) not in NAMES.values():
            self.mode, self.why_rows = "dense", "its attention does not go through transformers' interface"
        elif not self.takes_positions:
            self.mode, self.why_rows = "dense", "its forward takes no position_ids"
        elif self.whole_prompts:
            self.mode, self.why_rows = "rows", "its rope looks at the whole input"
        else:
            self.mode = "packed"
        self.verified = False

    def step(
        self,
        pool: PagePool,
        ids: torch.Tensor,
        positions: torch.Tensor,
        block_tables: torch.Tensor,
        q_starts: torch.Tensor,
        lengths: torch.Tensor,
        rows: torch.Tensor,
        *,
        hidden: bool = False,
        adapters: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One step; slots of all new tokens exist.

        Args:
            ids, positions: [T] int64.
            block_tables: [B, max_blocks] int32, -1 unused. q_starts: [B + 1] int32. lengths: [B] int32, the
                tokens of each sequence with the new ones.
            rows: [R] int64, which of the T tokens are asked for.
            hidden: the last hidden states instead of logits.
            adapters: [T] int32, the slot of each token's adapter, -1 for none; None where no token has one.
        Returns: [R, vocab] in the model's dtype, or [R, hidden size].
        Raises: PatchError for an adapter that no table has, where that can be seen without waiting.
        """
        self._check(adapters)
        args = (pool, ids, positions, block_tables, q_starts, lengths, rows, hidden, adapters)
        if self.mode != "dense":
            try:
                return self._packed(*args) if self.mode == "packed" else self._each(self._packed, *args)
            except NotPackable as why:
                self.mode, self.why_rows = "dense", str(why)
                log.info("%s runs row by row: %s", type(self.model).__name__, why)
        return self._each(self._dense, *args)

    def _check(self, adapters: torch.Tensor | None) -> None:
        if adapters is None:
            return
        if self.lora is None:
            raise PatchError("a token has an adapter, this executor was made without any")
        slots = min((len(table.rank) for table in self.lora.tables.values()), default=0)
        if adapters.device.type == "cpu" and not -1 <= adapters.min() <= adapters.max() < slots:
            raise PatchError(f"a token's adapter is in slot {int(adapters.max())}, there are {slots} slots")

    def _each(self, run, pool, ids, positions, block_tables, q_starts, lengths, rows, hidden, adapters):
        """One sequence after another; what was asked for comes back in the order it was asked."""
        order = torch.argsort(rows)
        rows = rows[order]
        found = []
        starts = q_starts.tolist()
        for b, (start, stop) in enumerate(zip(starts[:-1], starts[1:], strict=True)):
            if stop > start:
                mine = rows[(rows >= start) & (rows < stop)] - start
                one = torch.tensor([0, stop - start], dtype=torch.int32, device=q_starts.device)
                args = (
                    ids[start:stop],
                    positions[start:stop],
                    block_tables[b : b + 1],
                    one,
                    lengths[b : b + 1],
                )
                out = run(pool, *args, mine, hidden, None if adapters is None else adapters[start:stop])
                if len(mine):  # without a row the forward stops before the head: [0, hidden size]
                    found.append(out)
        return torch.cat(found)[torch.argsort(order)] if found else out

    def _packed(self, pool, ids, positions, block_tables, q_starts, lengths, rows, hidden, adapters):
        for rope in self.ropes if self.mode == "rows" else ():
            _reset_rope(rope)
        step = Step(
            block_tables,
            q_starts,
            lengths,
            _slots(block_tables, q_starts, lengths, pool, ids.shape[0]),
            pool.page_tokens,
        )
        cache = StepCache(pool, self.layers)
        cache.step = step
        with packed(step):
            out = self._forward(ids, positions, cache, rows, hidden, adapters)
        if not self.verified:
            self._verify(step, cache)
            self.verified = True
        return out

    def _verify(self, step: Step, cache: StepCache) -> None:
        """Every layer attended over our pages, and no mask says more than the windows it attended with."""
        if len(step.windows) != cache.writes:
            raise NotPackable(
                f"{cache.writes} layers write to the cache, {len(step.windows)} attend over pages"
            )
        if "custom" in step.masks:
            raise NotPackable("its masks have a pattern of their own")
        windowed = sum(window is not None for window in step.windows)
        if self.layer_types is not None:
            expected = sum(kind == "sliding_attention" for kind in self.layer_types)
        else:
            expected = cache.writes if step.masks and None not in step.masks else 0
        if windowed != expected or not set(step.windows) <= step.masks | {None}:
            raise NotPackable(
                f"{expected} of its layers have windows {step.masks}, {windowed} attention calls say so"
            )

    def _dense(self, pool, ids, positions, block_tables, q_starts, lengths, rows, hidden, adapters):
        for rope in self.ropes:
            _reset_rope(rope)
        cache = StepCache(pool, self.layers)
        slots = _slots(block_tables, q_starts, lengths, pool, ids.shape[0])
        cache.step = Step(block_tables, q_starts, lengths, slots, pool.page_tokens)
        cache.length = int(lengths[0]) - ids.shape[0]
        whole = torch.arange(int(lengths[0]), device=block_tables.device)
        seen = block_tables[0].long()[whole // pool.page_tokens] * pool.page_tokens + whole % pool.page_tokens

        def gather(pages, dtype):
            return tuple(x.transpose(0, 1)[None] for x in pages.read(seen, dtype))

        cache.dense_rows = gather
        return self._forward(ids, positions, cache, rows, hidden, adapters)

    def _forward(self, ids, positions, cache, rows, hidden, adapters=None):
        inputs = {"input_ids": ids[None], self.cache_name: cache, "use_cache": True, "return_dict": True}
        if self.takes_positions:
            inputs["position_ids"] = positions[None]
        with self._adding(adapters, rows):
            if hidden or not len(rows):
                return self.model.base_model(**inputs).last_hidden_state[0, rows]
            if self.keeps_logits:
                return self.model(**inputs, logits_to_keep=rows).logits[0]
            return self.model(**inputs).logits[0, rows]

    @contextmanager
    def _adding(self, adapters: torch.Tensor | None, rows: torch.Tensor):
        """Hooks that add adapters to what their modules say, within the block."""
        if adapters is None:
            yield
            return
        hooks, body = [], self.model.base_model_prefix + "."
        # what stands behind the body, the head, sees the rows asked for alone
        asked = adapters[rows] if self.keeps_logits else adapters
        try:
            for name, table in self.lora.tables.items():
                hook = _adds(name, table, adapters if name.startswith(body) else asked)
                hooks.append(self.model.get_submodule(name).register_forward_hook(hook))
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _adds(name: str, table, slots: torch.Tensor):
    """A hook: the outputs of a linear layer with the adapters of its tokens, `slots` [T]."""
    thread = threading.get_ident()  # who uses the model elsewhere meanwhile has no adapters

    def hook(module, args, out):
        if threading.get_ident() != thread:
            return None
        x, y = args[0].flatten(0, -2), out.reshape(-1, out.shape[-1])
        if len(y) != len(slots):
            raise PatchError(f"{name} sees {len(y)} of {len(slots)} tokens: its adapter cannot be added")
        lora_add(y, x, slots, table.a, table.b, table.scale, table.rank)
        return y.view(out.shape)

    return hook


def unpackable(model: nn.Module) -> str | None:
    """Why the runner cannot serve this model at all, or None."""
    config = model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder:
        return "encoder-decoder model"
    if config is not model.config:
        return "multimodal model"
    if not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", None):
        return "attention is not causal"
    if is_stateful(model):
        return "the model keeps state beyond keys and values"
    kinds = set(getattr(config, "layer_types", None) or ()) - PLAIN_LAYERS
    if kinds:
        return f"layers of type {', '.join(sorted(kinds))}"
    if getattr(config, "kv_sharing_modes", None) or getattr(config, "num_kv_shared_layers", 0):
        return "layers share keys and values"
    if not has_default_cache(model):
        return "the model has a cache of its own"
    return None


def windowed(config) -> bool:
    """Whether a layer of the model attends within a sliding window."""
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return "sliding_attention" in kinds
    return getattr(config, "sliding_window", None) is not None


def rope_types(config) -> set[str]:
    """Every rope type that the configuration names, also where each layer type has its own."""
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    return {p.get("rope_type", p.get("type")) for p in nested} - {None}


def _reset_rope(rope: nn.Module) -> None:
    """Forget what longer inputs left behind, so that a row's frequencies depend on its own length alone."""
    original = getattr(rope, "original_inv_freq", None)
    if original is not None and getattr(rope, "rope_type", None) == "dynamic":
        rope.max_seq_len_cached = rope.original_max_seq_len
        rope.register_buffer("inv_freq", original.to(rope.inv_freq.device), persistent=False)


def _slots(block_tables, q_starts, lengths, pool, tokens: int) -> torch.Tensor | slice:
    """Flat slots of the new tokens: the last n of each sequence, n = q_starts[b+1] - q_starts[b]; on a GPU
    without a look at what the tensors hold."""
    size = pool.page_tokens
    if tokens == len(lengths) == 1 and lengths.device.type == "cpu":
        last = int(lengths[0]) - 1
        slot = int(block_tables[0, last // size]) * size + last % size
        return slice(slot, slot + 1)
    counts = (q_starts[1:] - q_starts[:-1]).long()
    row = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts, output_size=tokens)
    within = torch.arange(tokens, device=counts.device) - q_starts[:-1].long()[row]
    position = (lengths.long() - counts)[row] + within
    return block_tables[row, position // size].long() * size + position % size
