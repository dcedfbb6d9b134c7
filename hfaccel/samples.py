"""Calibration data in any form, read into samples: rows of real tokens, each run as a sequence of its own.

Accepted are a text, token ids, and any iterable of these: lists, a `datasets.Dataset` (a column `input_ids`,
else `text`, else `messages`, else its only column of strings), a DataLoader. Ids are a tensor or list [T],
a batch [B, T], a mapping with `input_ids` and `attention_mask`, as tokenizers and collators give them, or a
tuple of ids and whatever lies beside them, of which a mask is used.

Padding is taken off here, so that nothing later can count it: what a mask hides, and without a mask the runs
of the pad token at both ends of a row. Long rows are cut into windows. Samples are sorted by length and
content, so results do not depend on batching or order, to the last bit.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from hfaccel.errors import PatchError

log = logging.getLogger("hfaccel")

WINDOW_TOKENS = 1024
TOKENS = 64 * WINDOW_TOKENS
MIN_TOKENS = 32  # fewer say nothing about any channel
DEFAULT_TEXT = "wikitext2_valid"


@dataclass(frozen=True, kw_only=True)
class CalibrationData:
    """Data with settings other than the defaults, for `patch(model, recipe, calibration=...)`.

    Attributes:
        data: in any form this module reads.
        tokens: at most so many are used, the first ones; the log says when there are more.
        window_tokens: longer rows are cut; never beyond what the model's positions allow.
        capture_tokens: statistics of one block come from at most so many tokens, other samples' in each
            block (see `calibrate.py`); None for all of them.
        spill: keep activations in a file under HFACCEL_SPILL_DIR; None to do so where they would fill half
            of the free memory.
    Raises: PatchError for values out of range.
    """

    data: Any
    tokens: int = TOKENS
    window_tokens: int = WINDOW_TOKENS
    capture_tokens: int | None = 16 * WINDOW_TOKENS
    spill: bool | None = None

    def __post_init__(self) -> None:
        for name in ("tokens", "window_tokens", "capture_tokens"):
            value = getattr(self, name)
            if not (value is None and name == "capture_tokens") and (type(value) is not int or value < 1):
                raise PatchError(f"CalibrationData: {name}={value!r}; a positive number")
        if self.spill not in (None, True, False):
            raise PatchError(f"CalibrationData: spill={self.spill!r}; True, False or None")


def calibration_data(data: Any, model: nn.Module, tokenizer: Any, why: str) -> tuple[CalibrationData, Any]:
    """What `patch` was given, as CalibrationData and a tokenizer; without data the shipped text.

    Args:
        why: the step that needs data, for messages.
    Raises: PatchError if there is neither data nor a tokenizer for the shipped text.
    """
    if isinstance(data, CalibrationData):
        return data, tokenizer
    if data is not None:
        return CalibrationData(data=data), tokenizer
    if tokenizer is None and Path(str(getattr(model, "name_or_path", "") or "")).is_dir():
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(model.name_or_path)
        except (OSError, ValueError) as error:
            log.info("no tokenizer beside the checkpoint: %s", error)
    if tokenizer is None:
        raise PatchError(
            f"{why} needs data: patch(model, {why!r}, calibration=texts, tokenizer=tokenizer); "
            "calibration may be texts, a dataset, a DataLoader or token ids"
        )
    from hfaccel.measure.corpus import text

    log.warning("%s: no calibration given, the shipped %s is used", why, DEFAULT_TEXT)
    return CalibrationData(data=text(DEFAULT_TEXT)), tokenizer


def read_samples(settings: CalibrationData, model: nn.Module, tokenizer: Any = None) -> list[Tensor]:
    """Rows of real token ids, each int64 [T], sorted by length and content.

    Raises: PatchError for data of an unknown form, ids outside of the vocabulary, texts without a tokenizer,
        and fewer than MIN_TOKENS tokens.
    """
    config = model.config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None) or settings.window_tokens
    window = min(settings.window_tokens, limit)
    reader = _Reader(tokenizer, window, _pad_id(config, tokenizer))
    rows: list[Tensor] = []
    total = 0
    for row in reader.rows(settings.data):
        if total >= settings.tokens:
            log.warning(
                "calibration: the first %d tokens are used, there are more (CalibrationData(tokens=...))",
                total,
            )
            break
        rows.append(row[: settings.tokens - total])
        total += rows[-1].numel()
    if total < MIN_TOKENS:
        raise PatchError(
            f"calibration has {total} tokens in {len(rows)} samples; at least {MIN_TOKENS} are needed, and "
            f"tens of thousands are wanted (default {TOKENS:,})"
        )
    vocabulary = model.get_input_embeddings().weight.shape[0]
    for index, row in enumerate(rows):
        low, high = row.aminmax()
        if low < 0 or high >= vocabulary:
            bad = int(low if low < 0 else high)
            raise PatchError(f"calibration sample {index}: token id {bad} is not in 0 .. {vocabulary - 1}")
    return sorted(rows, key=lambda row: (row.numel(), row.tolist()))


def _pad_id(config: Any, tokenizer: Any) -> int | None:
    """The token that is padding and nothing else, if there is one."""
    source = config if tokenizer is None else tokenizer
    pad = getattr(source, "pad_token_id", None)
    others = [getattr(source, f"{name}_token_id", None) for name in ("bos", "eos", "unk")]
    flat = {i for value in others for i in (value if isinstance(value, list) else [value])}
    return None if pad in flat else pad


class _Reader:
    def __init__(self, tokenizer: Any, window: int, pad: int | None) -> None:
        self.tokenizer, self.window, self.pad = tokenizer, window, pad

    def rows(self, data: Any) -> Iterator[Tensor]:
        """Rows of at most `window` tokens, none empty."""
        for row, start in self._whole(data):
            step = self.window - start.numel()
            for piece in row.split(step):
                yield torch.cat([start, piece])

    def _whole(self, data: Any) -> Iterator[tuple[Tensor, Tensor]]:
        """(tokens, what every window of them begins with) of each row that is not empty."""
        none = torch.empty(0, dtype=torch.int64)
        if isinstance(data, str):
            if data.strip():
                yield self._tokens(data)
        elif isinstance(data, Mapping) or hasattr(data, "input_ids"):
            yield from self._mapping(data)
        elif isinstance(data, Tensor) or _is_ids(data):
            yield from ((row, none) for row in self._unpadded(_tensor(data), None))
        elif isinstance(data, tuple) and data and all(isinstance(part, Tensor) for part in data):
            ids, *beside = data
            masks = (t for t in beside if t.shape == ids.shape and set(t.unique().tolist()) <= {0, 1})
            yield from ((row, none) for row in self._unpadded(_tensor(ids), next(masks, None)))
        elif isinstance(data, Iterable) and not isinstance(data, bytes):
            batches = isinstance(data, DataLoader)  # which makes lists of what a dataset gives as tuples
            for part in data:
                yield from self._whole(tuple(part) if batches and isinstance(part, list) else part)
        else:
            raise PatchError(
                f"calibration: {type(data).__name__} is neither text, token ids nor an iterable of them"
            )

    def _mapping(self, data: Any) -> Iterator[tuple[Tensor, Tensor]]:
        none = torch.empty(0, dtype=torch.int64)
        values = data if isinstance(data, Mapping) else vars(data)
        if values.get("input_ids") is not None:
            ids, mask = values["input_ids"], values.get("attention_mask")
            if not isinstance(ids, Tensor) and ids and isinstance(ids[0], list | Tensor):  # not padded
                masks = [None] * len(ids) if mask is None else mask
                for row, row_mask in zip(ids, masks, strict=True):
                    yield from self._mapping({"input_ids": row, "attention_mask": row_mask})
                return
            mask = None if mask is None else torch.as_tensor(mask)
            yield from ((row, none) for row in self._unpadded(_tensor(ids), mask))
            return
        if "messages" in values and hasattr(self.tokenizer, "apply_chat_template"):
            yield self._tokens(self.tokenizer.apply_chat_template(values["messages"], tokenize=False), False)
            return
        columns = [key for key, value in values.items() if isinstance(value, str)]
        key = "text" if "text" in values else columns[0] if len(columns) == 1 else None
        if key is None:
            raise PatchError(
                "calibration: a row has no input_ids, text or messages and not one column of strings; its "
                f"columns are {', '.join(map(str, values))}"
            )
        yield from self._whole(values[key])

    def _tokens(self, text: str, special: bool = True) -> tuple[Tensor, Tensor]:
        if self.tokenizer is None:
            raise PatchError("calibration texts need tokenizer=")
        ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        start = []
        if special:  # the token that every sequence of this model begins with, so that each window has it
            first = self.tokenizer("", verbose=False)["input_ids"][:1]
            known = (self.tokenizer.bos_token_id, getattr(self.tokenizer, "cls_token_id", None))
            start = [token for token in first if token in known]
        return torch.tensor(ids, dtype=torch.int64), torch.tensor(start, dtype=torch.int64)

    def _unpadded(self, ids: Tensor, mask: Tensor | None) -> Iterator[Tensor]:
        ids = ids.cpu()
        if ids.dim() == 1:
            ids, mask = ids[None], None if mask is None else mask.reshape(1, -1)
        if ids.dim() != 2 or (mask is not None and mask.shape != ids.shape):
            shapes = [list(ids.shape)] + ([] if mask is None else [list(mask.shape)])
            raise PatchError(f"calibration: ids and mask of shapes {shapes}; [T] or [B, T] is wanted, alike")
        for index, row in enumerate(ids):
            if mask is not None:
                row = row[mask[index].cpu().bool()]
            elif self.pad is not None and (real := (row != self.pad).nonzero()).numel():
                row = row[int(real[0]) : int(real[-1]) + 1]
            elif self.pad is not None:
                continue
            if row.numel():
                yield row


def _is_ids(data: Any) -> bool:
    return isinstance(data, list | tuple) and bool(data) and all(type(item) is int for item in data)


def _tensor(ids: Any) -> Tensor:
    out = torch.as_tensor(ids)
    if out.is_floating_point() or out.dtype is torch.bool:
        raise PatchError(f"calibration: token ids are integers, not {out.dtype}")
    return out.to(torch.int64)
