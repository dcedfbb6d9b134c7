"""What `generate` refuses before anything is computed: inputs without an answer, contradictory arguments.

Transformers' own refusals come first where they are clear; what it would compute wrongly, ignore in silence
or stumble over deep inside a model is refused here, for every way of generating.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import StoppingCriteriaList
from transformers.cache_utils import Cache
from transformers.generation import GenerationMode, MaxLengthCriteria

from hfaccel.cache.paged import PagedCache
from hfaccel.compat import base_layer
from hfaccel.errors import PatchError

CACHE_NAMES = ("cache", "past_key_values")
BEAMS = {GenerationMode.BEAM_SEARCH, GenerationMode.BEAM_SAMPLE}
POSITION_TABLES = ("wpe", "embed_positions", "position_embeddings", "position_embedding")


def given_cache(model_kwargs: dict) -> Cache | None:
    """The cache among the arguments of a call, under the name that this transformers gives it."""
    return next((model_kwargs[name] for name in CACHE_NAMES if model_kwargs.get(name) is not None), None)


def position_limit(model: nn.Module) -> int | None:
    """Rows of the model's learned position table, or None if it has none (rotary, alibi)."""
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in POSITION_TABLES and isinstance(module, nn.Embedding):
            return module.num_embeddings - getattr(module, "offset", 0)
    return None


def has_holes(mask: torch.Tensor | None) -> bool:
    """Whether a row of a mask [B, L] has a zero between two ones: more than padding at its ends."""
    if mask is None:
        return False
    mask = mask.bool()
    starts = mask[:, :1].long().sum(-1) + (mask[:, 1:] & ~mask[:, :-1]).sum(-1)
    return bool((starts > 1).any())


def left_padding(mask: torch.Tensor | None) -> list[int] | None:
    """Zeros in front of each row of a mask [B, L] that has no other zeros; None where it has."""
    if mask is None:
        return None
    mask = mask.bool()
    if (mask[:, :-1] & ~mask[:, 1:]).any():
        return None
    return (~mask).sum(-1).tolist()


def check_mode(mode: GenerationMode, config, drafts: bool, assistant: bool) -> None:
    """Refuse arguments that contradict each other, of which transformers would ignore one.

    Args:
        drafts: an assistant or prompt lookup was asked for; assistant: an assistant.
    """
    chunk = config.prefill_chunk_size
    if chunk is not None and (isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1):
        raise PatchError(f"prefill_chunk_size must be a number of tokens, 1 or more, not {chunk!r}")
    if chunk is not None and config.use_cache is False:
        raise PatchError("prefill_chunk_size needs a cache: leave use_cache=False out")
    if assistant and config.prompt_lookup_num_tokens is not None:
        raise PatchError("assistant_model and prompt_lookup_num_tokens are two ways to draft: give one")
    if drafts and mode in BEAMS:
        raise PatchError("assistant_model and prompt_lookup_num_tokens do not go with num_beams > 1")
    if drafts and config.use_cache is False:
        raise PatchError("assistant_model and prompt_lookup_num_tokens need a cache, not use_cache=False")


def check_inputs(model: nn.Module, found, name: str, model_kwargs: dict) -> None:
    """Refuse prompts that cannot have an answer.

    Args:
        found, name: the main input and its name, input_ids [B, L] or inputs_embeds [B, L, width].
        model_kwargs: the other arguments; with inputs_embeds its input_ids are [B, L] or [B, 0].
    """
    embedding = base_layer(model.get_input_embeddings())
    ids = found
    if name == "inputs_embeds":
        width = getattr(embedding, "embedding_dim", None) or embedding.weight.shape[-1]
        _check_embeds(found, width)
        ids = model_kwargs.get("input_ids")
        if ids is not None and (ids.shape[0] != found.shape[0] or ids.shape[1] not in (0, found.shape[1])):
            raise PatchError(
                f"input_ids are {[*ids.shape]}, inputs_embeds {[*found.shape]}: they must agree, or give one"
            )
    if name == "input_ids" or (ids is not None and ids.numel()):
        _check_ids(ids)
    batch, length = found.shape[:2]
    limit = position_limit(model)
    cache = given_cache(model_kwargs)
    past = int(cache.get_seq_length()) if isinstance(cache, Cache) else 0
    mask = model_kwargs.get("attention_mask")
    real = None
    if mask is not None:
        _check_mask(mask, batch, length, past)
        real = mask.bool()
    positions = model_kwargs.get("position_ids")
    if positions is not None:
        _check_positions(positions, batch, length, past, limit)
    whole = real is not None and real.shape[1] == length
    if ids is not None and ids.numel():
        vocabulary = getattr(embedding, "num_embeddings", None) or embedding.weight.shape[0]
        seen = ids[real] if whole else ids
        if int(seen.min()) < 0 or int(seen.max()) >= vocabulary:
            wrong = seen[(seen < 0) | (seen >= vocabulary)][0]
            raise PatchError(f"token id {int(wrong)} is not in the model's vocabulary of {vocabulary}")
    if past >= length and (mask is None or whole):
        raise PatchError(
            f"the cache holds {past} tokens, the input {length}: give the whole text, of which the cache is "
            "the beginning, or the new tokens with an attention_mask over all"
        )
    longest = int(real.sum(-1).max()) if real is not None else length
    if limit is not None and longest > limit:
        raise PatchError(f"the prompt has {longest} tokens, the model's table of learned positions {limit}")


def _tensor(name: str, value, dims: int, shape: str) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise PatchError(f"{name} must be a tensor {shape}, not a {type(value).__name__}")
    if value.ndim != dims:
        raise PatchError(f"{name} must be {shape}, not of shape {[*value.shape]}")
    return value


def _check_ids(ids) -> None:
    if not isinstance(ids, torch.Tensor) or ids.ndim == 2:
        ids = _tensor("input_ids", ids, 2, "[batch, tokens]")
    if ids.ndim != 2 or not ids.shape[0] or not ids.shape[1]:
        raise PatchError(
            f"generate needs at least one prompt of at least one token, [batch, tokens], not shape "
            f"{[*ids.shape]}"
        )
    if ids.dtype not in (torch.int32, torch.int64):
        raise PatchError(f"input_ids must be int64 or int32 token ids, not {ids.dtype}")


def _check_embeds(embeds, width: int) -> None:
    embeds = _tensor("inputs_embeds", embeds, 3, "[batch, tokens, width]")
    if not embeds.shape[0] or not embeds.shape[1]:
        raise PatchError(f"generate needs at least one prompt of at least one token, not {[*embeds.shape]}")
    if not embeds.is_floating_point() or embeds.shape[2] != width:
        raise PatchError(
            f"inputs_embeds must be floating point of width {width}, not {embeds.dtype} of {embeds.shape[2]}"
        )
    if not embeds.isfinite().all():
        raise PatchError("inputs_embeds hold values that are not finite")


def _check_mask(mask, batch: int, length: int, past: int) -> None:
    mask = _tensor("attention_mask", mask, 2, "[batch, tokens]")
    # With a cache and the new tokens alone the mask speaks of the cached ones too.
    if mask.shape[0] != batch or mask.shape[1] not in {length, past + length}:
        raise PatchError(
            f"attention_mask is {[*mask.shape]}, the input is {[batch, length]}: they must agree"
        )
    if not ((mask == 0) | (mask == 1)).all():
        raise PatchError("attention_mask must hold 0 and 1 alone: 1 marks the tokens, 0 the padding")
    empty = (mask.sum(-1) == 0).nonzero().flatten().tolist()
    if empty:
        raise PatchError(f"row {empty[0]} has no token: its attention mask is zero throughout")


def _check_positions(positions, batch: int, length: int, past: int, limit: int | None) -> None:
    positions = _tensor("position_ids", positions, 2, "[batch or 1, tokens]")
    if positions.dtype not in (torch.int32, torch.int64):
        raise PatchError(f"position_ids must be integers, not {positions.dtype}")
    if positions.shape[0] not in (1, batch) or positions.shape[1] not in {
        length, past + length, length - past
    }:  # fmt: skip
        raise PatchError(
            f"position_ids are {[*positions.shape]}, the input is {[batch, length]}: they must agree"
        )
    if limit is None or not positions.numel():
        return
    lowest, highest = int(positions.min()), int(positions.max())
    if lowest < 0:
        raise PatchError(f"position_ids hold {lowest}: the model's table of positions starts at 0")
    if highest >= limit:
        raise PatchError(f"position {highest} lies beyond the model's table of {limit} learned positions")


def check_cache(model: nn.Module, cache, config, rows: int) -> None:
    """Refuse a passed cache that another model or another batch filled.

    Args:
        cache: what was passed, or None. rows: of the call, with beams and returned sequences.
    """
    if not isinstance(cache, Cache):
        return  # none, or no cache at all, which transformers refuses
    if config.use_cache is False:
        raise PatchError("use_cache=False and a cache were given: leave one out")
    if not len(cache) or not int(cache.get_seq_length()):
        return
    layers = model.config.num_hidden_layers
    if len(cache) != layers:
        raise PatchError(f"the cache has {len(cache)} layers, the model {layers}: it is of another model")
    held, filled = _held(cache)
    wanted = _kv_shape(model)
    if held is not None and wanted is not None and held != wanted:
        raise PatchError(
            f"the cache holds {held[0]} KV heads of {held[1]}, the model has {wanted[0]} of {wanted[1]}: "
            "it is of another model"
        )
    if filled is not None and filled != rows:
        raise PatchError(
            f"the cache holds {filled} rows, the call has {rows} (beams and returned sequences counted)"
        )


def _held(cache: Cache) -> tuple[tuple[int, int] | None, int | None]:
    """(KV heads, head size) of layer 0 and the rows of a filled cache; None where it does not say."""
    if isinstance(cache, PagedCache):
        pages = cache.pool.layers.get(0)
        return (None if pages is None else tuple(pages.k.shape[2:])), len(cache.sequences)
    keys = getattr(cache.layers[0], "keys", None)
    if isinstance(keys, torch.Tensor) and keys.ndim == 4:
        return (keys.shape[1], keys.shape[3]), keys.shape[0]
    return None, None


def _kv_shape(model: nn.Module) -> tuple[int, int] | None:
    """KV heads and head size of layer 0, read off its K projection; None where there is no such module."""
    for name, module in model.named_modules():
        if name.endswith(".k_proj") and hasattr(module, "out_features"):
            size = getattr(model.get_submodule(name.rpartition(".")[0]), "head_dim", None)
            return (module.out_features // size, size) if size else None
    return None


def check_room(
    input_ids: torch.Tensor, model_kwargs: dict, max_length: int, limit: int | None, certain: bool
) -> None:
    """Refuse a call that must run past the table of learned positions.

    Args:
        max_length: of input_ids, [B, L], with what is generated.
        certain: nothing but the length ends the call; else it may, and is watched step by step.
    """
    if limit is None or not certain:
        return
    first, slots = next_position(input_ids, model_kwargs)
    new = max_length - input_ids.shape[1]
    if first + new - 1 > limit:  # the last token is not fed
        raise PatchError(
            f"{new} new tokens behind position {first - 1} lie beyond the model's table of {limit} learned "
            "positions: shorten the prompt or max_new_tokens"
        )


def next_position(input_ids: torch.Tensor, model_kwargs: dict) -> tuple[int, int]:
    """The largest position that a first generated token will have, and the slots before it."""
    mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    embeds = model_kwargs.get("inputs_embeds")
    slots = input_ids.shape[1] if embeds is None else embeds.shape[1]
    if positions is not None:
        if mask is not None and mask.shape[-1] == positions.shape[-1]:
            positions = positions.masked_fill(mask == 0, 0)
        return int(positions.max()) + 1, slots
    return (slots if mask is None else int(mask.sum(-1).max())), slots


class WithinTable(StoppingCriteriaList):
    """Criteria that raise once a token is to be fed beyond the table of learned positions.

    Args:
        spare: how many tokens may be fed behind input_ids of `length` tokens.
    """

    def __init__(self, criteria, length: int, spare: int, limit: int):
        super().__init__(criteria)
        self.last, self.limit = length + spare, limit

    def __call__(self, input_ids: torch.Tensor, scores, **kwargs) -> torch.Tensor:
        done = super().__call__(input_ids, scores, **kwargs)
        if input_ids.shape[1] > self.last and not done.all():
            raise PatchError(
                f"position {self.limit} lies beyond the model's table of {self.limit} learned positions: "
                "shorten the prompt or max_new_tokens"
            )
        return done


def within_table(criteria, input_ids: torch.Tensor, model_kwargs: dict, limit: int) -> WithinTable:
    """`criteria` for a loop of transformers', which does not look at the table itself."""
    first, _ = next_position(input_ids, model_kwargs)
    return WithinTable(criteria, input_ids.shape[1], limit - first, limit)


def ends_by_length(criteria) -> bool:
    """Whether nothing but the length can end a call."""
    return all(type(one) is MaxLengthCriteria for one in criteria)


def last_length(criteria, otherwise: int) -> int:
    """The length at which criteria end a call for certain: the smallest that one of them names."""
    return min((one.max_length for one in criteria if type(one) is MaxLengthCriteria), default=otherwise)
