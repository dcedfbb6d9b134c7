"""A tokenizer as metadata of a GGUF file: `tokenizer.*`.

A file holds the vocabulary and names the rest: `tokenizer.ggml.model` is the algorithm, `tokenizer.ggml.pre`
the pattern that cuts text before it. Two algorithms have a name that fits tokenizers of transformers:

    gpt2     byte-level BPE: tokens, merges, and a pattern known by name (`PATTERNS`)
    llama    BPE over characters with bytes as a fallback, as SentencePiece has it: tokens and scores, of
             which the highest merges first. Scores are the ranks of the merges, negative

A tokenizer whose pattern has no name here is refused: a file that names another would be read without an
error and give other tokens.
"""

from __future__ import annotations

import json
import re
from typing import Any

from hfaccel.errors import UnsupportedModel

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
# Of transformers, of GGUF.
SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "sep": "seperator", "pad": "padding", "mask": "mask"}
# Of GGUF: what llama.cpp takes where a file of the model "llama" does not say.
USUAL_IDS = {"bos": 1, "eos": 2, "unknown": 0}

_BYTE = re.compile("<0x[0-9A-F]{2}>")
_CASES = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_END = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
BYTES = ("bytes", False)  # byte level behind a pattern of its own
_GPT2 = ("bytes", True)  # with GPT-2's pattern
# What pre-tokenizers do, in order -> the name in files.
PATTERNS: dict[tuple, str] = {
    (_GPT2,): "gpt-2",
    (("digits", True), _GPT2): "smollm",
    (("split", _CASES + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _END), BYTES): "llama-bpe",
    (("split", _CASES + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _END), BYTES): "qwen2",
    (
        (
            "split",
            rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
            + _END.replace(r"[\r\n]*", r"[\r\n/]*", 1),
        ),
        BYTES,
    ): "tekken",
    (("punctuation", "Contiguous"), _GPT2, ("digits", False), ("split", "[0-9][0-9][0-9]")): "falcon",
}
# Names whose tokenizers take a word which is a token whole (`ignore_merges`), and begin texts with a start
# token unless a file says otherwise; "dbrx" cuts as "llama-bpe" and does neither.
WHOLE_WORDS = ("llama-bpe", "tekken")


def metadata_of(tokenizer: Any, rows: int) -> dict[str, Any]:
    """`tokenizer.*` of a tokenizer of transformers; lists are arrays, of text, int32 or fp32.

    Args:
        rows: of the embedding: tokens that the tokenizer has not are unused ones.
    Raises: UnsupportedModel for a tokenizer that files have no name for, or with more tokens than rows.
    """
    described = _described(tokenizer)
    model = described["model"]
    if model.get("type") != "BPE":
        raise UnsupportedModel(f"a tokenizer of type {model.get('type')!r}; GGUF is written of BPE")
    vocabulary = {**model["vocab"], **{t["content"]: t["id"] for t in described["added_tokens"]}}
    if (highest := max(vocabulary.values())) >= rows:
        raise UnsupportedModel(f"the tokenizer has a token {highest}, the embedding has {rows} rows")
    tokens: list[str | None] = [None] * rows
    for text, place in vocabulary.items():
        tokens[place] = text
    kinds = [UNUSED if text is None else NORMAL for text in tokens]
    for token in described["added_tokens"]:
        kinds[token["id"]] = CONTROL if token["special"] else USER_DEFINED
    ranks = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    fallback = bool(model.get("byte_fallback"))
    _check_normalizer(described, fallback)
    out: dict[str, Any] = {"tokenizer.ggml.model": "llama" if fallback else "gpt2"}
    if fallback:
        out["tokenizer.ggml.pre"] = "default"
        scores = _scores(tokens, kinds, model, ranks)
    else:
        out["tokenizer.ggml.pre"] = _pattern(described)
    taken = {text for text in tokens if text is not None}
    out["tokenizer.ggml.tokens"] = [
        _unused(place, taken) if text is None else text for place, text in enumerate(tokens)
    ]
    if fallback:
        out["tokenizer.ggml.scores"] = scores
    out["tokenizer.ggml.token_type"] = kinds
    if not fallback:
        out["tokenizer.ggml.merges"] = ranks
    out |= _special(tokenizer)
    out["tokenizer.ggml.add_space_prefix"] = _prefixes_space(described)
    return out | _templates(tokenizer)


def _described(tokenizer: Any) -> dict[str, Any]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not hasattr(backend, "to_str"):
        raise UnsupportedModel(f"{type(tokenizer).__name__} has no description (tokenizer.json) to write")
    return json.loads(backend.to_str())


def _parts(described: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """The normalizers or pre-tokenizers, in order."""
    part = described.get(name) or {}
    return part.get("normalizers", part.get("pretokenizers", [part] if part else []))


def _check_normalizer(described: dict[str, Any], fallback: bool) -> None:
    """Readers change a text in no way before they cut it, but for spaces of SentencePiece's. NFC is left out,
    as converters do: text is composed as a rule. Raises: UnsupportedModel for other normalizers."""
    for part in _parts(described, "normalizer"):
        kind = part.get("type")
        spaces = (kind, part.get("prepend")) == ("Prepend", "▁") or (
            (kind, part.get("pattern"), part.get("content")) == ("Replace", {"String": " "}, "▁")
        )
        if not (spaces if fallback else kind == "NFC"):
            raise UnsupportedModel(f"the tokenizer changes texts by {kind}: no place in a GGUF")


def _unused(place: int, taken: set[str]) -> str:
    text = f"[PAD{place}]"
    while text in taken:
        text = f"[{text}]"
    return text


def _scores(tokens: list[str | None], kinds: list[int], model: dict, ranks: list[str]) -> list[float]:
    """Of each token, made or added, minus the rank of the first merge that makes it; marks bytes and the
    unknown one."""
    rank: dict[str, int] = {}
    for place, pair in enumerate(ranks):
        rank.setdefault(pair.replace(" ", ""), place)
    unknown = model.get("unk_token")
    out = []
    for place, text in enumerate(tokens):
        if text is not None and kinds[place] in (NORMAL, CONTROL) and text == unknown:
            kinds[place] = UNKNOWN
        elif text is not None and kinds[place] == NORMAL and _BYTE.fullmatch(text):
            kinds[place] = BYTE
        made = kinds[place] in (NORMAL, USER_DEFINED)  # readers merge what makes a token, added or not
        out.append(-float(rank.get(text, len(ranks) + place)) if made else 0.0)
    return out


def _pattern(described: dict[str, Any]) -> str:
    found = tuple(_step(step) for step in _parts(described, "pre_tokenizer"))
    if (name := PATTERNS.get(found)) is None:
        raise UnsupportedModel(
            f"the tokenizer cuts text by {found}, for which no name in GGUF files is known; known are "
            f"{', '.join(sorted(PATTERNS.values()))}"
        )
    whole = bool(described["model"].get("ignore_merges"))
    if name == "llama-bpe" and not whole:
        return "dbrx"
    if whole != (name in WHOLE_WORDS):
        raise UnsupportedModel(f"ignore_merges={whole}: files that name {name!r} are read the other way")
    return name


def _step(step: dict[str, Any]) -> tuple:
    kind = step.get("type")
    if kind == "ByteLevel" and not step.get("add_prefix_space"):
        return "bytes", bool(step.get("use_regex", True))
    if kind == "Digits":
        return "digits", bool(step.get("individual_digits"))
    if kind == "Punctuation":
        return "punctuation", step.get("behavior")
    plain = not step.get("invert") and step.get("behavior") == "Isolated"
    if kind == "Split" and plain and "Regex" in step["pattern"]:
        return "split", step["pattern"]["Regex"]
    return kind, json.dumps(step, sort_keys=True)


def _prefixes_space(described: dict[str, Any]) -> bool:
    """Whether a text that begins a sequence is given a space."""
    parts = _parts(described, "normalizer") + _parts(described, "pre_tokenizer")
    return any(
        (part.get("type") == "Prepend" and part.get("prepend") == "▁")
        or (part.get("type") == "Metaspace" and part.get("prepend_scheme") != "never")
        for part in parts
    )


def _special(tokenizer: Any) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for ours, theirs in SPECIAL.items():
        if (place := getattr(tokenizer, f"{ours}_token_id", None)) is not None:
            out[f"tokenizer.ggml.{theirs}_token_id"] = place
    ids = tokenizer("a", verbose=False)["input_ids"]
    out["tokenizer.ggml.add_bos_token"] = bool(ids) and ids[0] == tokenizer.bos_token_id
    out["tokenizer.ggml.add_eos_token"] = bool(ids) and ids[-1] == tokenizer.eos_token_id
    return out


def _templates(tokenizer: Any) -> dict[str, Any]:
    found = getattr(tokenizer, "chat_template", None)
    if isinstance(found, dict):
        names = sorted(name for name in found if name != "default")
        out: dict[str, Any] = {f"tokenizer.chat_template.{name}": found[name] for name in names}
        if names:
            out["tokenizer.chat_templates"] = names
        found = found.get("default")
    else:
        out = {}
    return out | ({"tokenizer.chat_template": found} if found else {})
