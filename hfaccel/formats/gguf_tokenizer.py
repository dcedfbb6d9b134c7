"""The tokenizer that a GGUF file describes, as transformers' fast one, with its chat templates.

`gguf_vocab` says which algorithms and patterns files name, and writes them; this reads. SentencePiece's
merges are not in a file: they are every pair of tokens that makes a token, the best score first.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from reprlib import repr as shown  # long text and lists cut short
from typing import Any

from hfaccel.errors import UnsupportedModel
from hfaccel.formats.gguf_file import GGUFError, GGUFFile
from hfaccel.formats.gguf_vocab import (
    BYTE,
    BYTES,
    CONTROL,
    PATTERNS,
    SPECIAL,
    UNKNOWN,
    USER_DEFINED,
    USUAL_IDS,
    WHOLE_WORDS,
)

log = logging.getLogger("hfaccel")

# Names of files that mean what another name does.
_SAME = {
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "smaug-bpe": "dbrx",
    "deepseek-r1-qwen": "qwen2",
    "megrez": "qwen2",
    "starcoder": "smollm",
    "refact": "smollm",
    "command-r": "smollm",
    "codeshell": "smollm",
    "phi-2": "gpt-2",
    "olmo": "gpt-2",
    "mpt": "gpt-2",
    "jina-es": "gpt-2",
    "jina-de": "gpt-2",
    "jais": "gpt-2",
}
# What llama.cpp cuts by where a file names nothing; no tokenizer is written so.
_DEFAULT = (
    ("split", r"[\p{P}\$\+<=>\^~\|]+"),
    ("split", r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"),
    ("split", r"\p{N}+"),
    ("split", "[0-9][0-9][0-9]"),
    BYTES,
)
_STEPS = {name: steps for steps, name in PATTERNS.items()} | {"default": _DEFAULT}
_STEPS["dbrx"] = _STEPS["llama-bpe"]
_LONGEST = 1 << 10  # characters of a token of SentencePiece's, whose cuts are all tried


def tokenizer_of(path: str | Path) -> Any:
    """The tokenizer of a file. Raises: GGUFError naming a damaged key; UnsupportedModel for an algorithm or
    pattern that is not known."""
    file = GGUFFile(path)
    try:
        return read_tokenizer(file.metadata)
    except GGUFError as error:
        raise GGUFError(f"{path}: {error}") from None
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{path}: {error}") from None


def read_tokenizer(metadata: Mapping[str, Any]) -> Any:
    """The tokenizer of `tokenizer.*`. Raises: as `tokenizer_of`."""
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    algorithm = _get(metadata, "ggml.model", str)
    if algorithm not in ("gpt2", "llama"):
        raise UnsupportedModel(f"tokenizer.ggml.model is {shown(algorithm)}; known are gpt2, llama")
    tokens = _get(metadata, "ggml.tokens", list, of=str)
    if not tokens:
        raise GGUFError("tokenizer.ggml.tokens is empty")
    kinds = _get(metadata, "ggml.token_type", list, of=int, default=[1] * len(tokens))
    if len(kinds) != len(tokens):
        raise GGUFError(f"tokenizer.ggml.token_type has {len(kinds)} values for {len(tokens)} tokens")
    if len(vocabulary := {text: place for place, text in enumerate(tokens)}) != len(tokens):
        twice = next(text for place, text in enumerate(tokens) if vocabulary[text] != place)
        raise GGUFError(f"tokenizer.ggml.tokens has {twice[:100]!r} twice")
    special = _special(metadata, tokens)
    make = _byte_level if algorithm == "gpt2" else _sentence_piece
    backend = make(metadata, vocabulary, tokens, kinds)
    for wanted, is_special in ((CONTROL, True), (USER_DEFINED, False)):
        added = [
            AddedToken(text, special=is_special, normalized=False)
            for text, kind in zip(tokens, kinds, strict=True)
            if kind == wanted or (is_special and kind == UNKNOWN)
        ]
        (backend.add_special_tokens if is_special else backend.add_tokens)(added)
    _ends(backend, metadata, special, tokens)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=_context(metadata),
        clean_up_tokenization_spaces=False,
        chat_template=_templates(metadata),
        **{f"{name}_token": tokens[place] for name, place in special.items()},
    )


def _get(
    metadata: Mapping[str, Any], key: str, kind: type, *, of: type | None = None, default: Any = None
) -> Any:
    key = f"tokenizer.{key}"
    value = metadata.get(key, default)
    if value is None:
        raise GGUFError(f"{key} is missing")
    if type(value) is not kind or (of is not None and any(type(each) is not of for each in value)):
        named = kind.__name__ if of is None else f"{kind.__name__} of {of.__name__}"
        raise GGUFError(f"{key} is no {named}")
    return value


def _special(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, int]:
    out = {}
    usual = USUAL_IDS if metadata["tokenizer.ggml.model"] == "llama" else {}
    for ours, theirs in SPECIAL.items():
        place = metadata.get(f"tokenizer.ggml.{theirs}_token_id", usual.get(theirs))
        if place is None:
            continue
        if type(place) is not int or not 0 <= place < len(tokens):
            raise GGUFError(
                f"tokenizer.ggml.{theirs}_token_id is {shown(place)}, there are {len(tokens)} tokens"
            )
        out[ours] = place
    return out


def _byte_level(
    metadata: Mapping[str, Any], vocabulary: dict[str, int], tokens: list[str], kinds: list[int]
) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    merges = []
    for text in _get(metadata, "ggml.merges", list, of=str):
        left, _, right = text.partition(" ")
        if any(part not in vocabulary for part in (left, right, left + right)):
            raise GGUFError(f"tokenizer.ggml.merges: {text[:100]!r} is not made of tokens, or makes none")
        merges.append((left, right))
    if "tokenizer.ggml.pre" not in metadata:
        log.warning(
            "tokenizer.ggml.pre is missing: texts are cut by llama.cpp's default pattern, no model's own"
        )
    whole = _pattern_name(metadata) in WHOLE_WORDS
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=whole))
    steps = _pattern(_pattern_name(metadata))
    made = [_step(step, pre_tokenizers) for step in steps]
    backend.pre_tokenizer = made[0] if len(made) == 1 else pre_tokenizers.Sequence(made)
    backend.decoder = decoders.ByteLevel()
    return backend


def _pattern_name(metadata: Mapping[str, Any]) -> str:
    name = _get(metadata, "ggml.pre", str, default="default")  # as llama.cpp takes it
    return _SAME.get(name, name)


def _pattern(name: str) -> tuple:
    if (steps := _STEPS.get(name)) is None:
        names = ", ".join(sorted({*_STEPS, *_SAME}))
        raise UnsupportedModel(f"tokenizer.ggml.pre is {shown(name)}; known are {names}")
    return steps


def _step(step: tuple, pre_tokenizers: Any) -> Any:
    from tokenizers import Regex

    kind, value = step
    if kind == "bytes":
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=value)
    if kind == "digits":
        return pre_tokenizers.Digits(individual_digits=value)
    if kind == "punctuation":
        return pre_tokenizers.Punctuation(value.lower())
    return pre_tokenizers.Split(Regex(value), "isolated")


def _sentence_piece(
    metadata: Mapping[str, Any], vocabulary: dict[str, int], tokens: list[str], kinds: list[int]
) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = _get(metadata, "ggml.scores", list, of=float)
    if len(scores) != len(tokens) or not all(map(math.isfinite, scores)):
        raise GGUFError(f"tokenizer.ggml.scores: {len(scores)} for {len(tokens)} tokens, or not finite")
    pieces = {
        text: place
        for text, place in vocabulary.items()
        if kinds[place] not in (CONTROL, UNKNOWN, BYTE) and len(text) > 1
    }
    if (longest := max(pieces, key=len, default="")) and len(longest) > _LONGEST:
        raise GGUFError(f"tokenizer.ggml.tokens has one of {len(longest)} characters, {_LONGEST} at most")
    found = [
        (-scores[place], place, cut, text)
        for text, place in pieces.items()
        for cut in range(1, len(text))
        if text[:cut] in vocabulary and text[cut:] in vocabulary
    ]
    merges = [(text[:cut], text[cut:]) for _, _, cut, text in sorted(found)]
    unknown = next((text for text, kind in zip(tokens, kinds, strict=True) if kind == UNKNOWN), None)
    backend = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefix = _get(metadata, "ggml.add_space_prefix", bool, default=True)
    spaces = [normalizers.Replace(" ", "▁")]
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), *spaces] if prefix else spaces)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend


def _ends(backend: Any, metadata: Mapping[str, Any], special: dict[str, int], tokens: list[str]) -> None:
    """The start and end tokens that every text gets."""
    from tokenizers import processors

    usual = metadata["tokenizer.ggml.model"] == "llama" or _pattern_name(metadata) in WHOLE_WORDS
    start = _get(metadata, "ggml.add_bos_token", bool, default=usual)
    end = _get(metadata, "ggml.add_eos_token", bool, default=False)
    first = ["bos"] if start and "bos" in special else []
    last = ["eos"] if end and "eos" in special else []
    if not first and not last:
        return

    def one(text: str, i: int) -> list[str]:
        return [f"{piece}:{i}" for piece in (*first, text, *last)]

    named = [
        {"id": name, "ids": [special[name]], "tokens": [tokens[special[name]]]} for name in (*first, *last)
    ]

    backend.post_processor = processors.Sequence(
        [
            *([backend.post_processor] if backend.post_processor is not None else []),
            processors.TemplateProcessing(
                single=one("$A", 0),
                pair=one("$A", 0) + one("$B", 1),
                special_tokens=named,  # by names of ours: a token's text may be anything
            ),
        ]
    )


def _context(metadata: Mapping[str, Any]) -> int:
    value = metadata.get(f"{metadata.get('general.architecture')}.context_length")
    return value if type(value) is int and value > 0 else 1 << 30


def _templates(metadata: Mapping[str, Any]) -> Any:
    found = metadata.get("tokenizer.chat_template")
    if found is not None and not isinstance(found, str):
        raise GGUFError("tokenizer.chat_template is no text")
    names = metadata.get("tokenizer.chat_templates")
    if not isinstance(names, list):
        return found
    more = {name: metadata.get(f"tokenizer.chat_template.{name}") for name in names}
    more = {name: text for name, text in more.items() if isinstance(name, str) and isinstance(text, str)}
    return more | ({"default": found} if found else {})
