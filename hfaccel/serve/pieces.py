"""The text and the bytes of single tokens, as log-probabilities name them."""

from __future__ import annotations

import re

BROKEN = "\ufffd"
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def _alphabet() -> dict[str, int]:
    """Letters by which byte-level BPE writes bytes: printable ones stand for themselves, the others for
    letters from 256 on, in order."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in kept]
    return {chr(byte): byte for byte in kept} | {chr(256 + n): byte for n, byte in enumerate(rest)}


class Pieces:
    """Of a tokenizer's tokens; what was looked up is kept."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self._letters = _alphabet()
        self._known: dict[int, tuple[str, list[int]]] = {}

    def __getitem__(self, token: int) -> tuple[str, list[int]]:
        """Text and bytes; a token that is no whole character has a text like `bytes:\\xe4`."""
        if token not in self._known:
            self._known[token] = self._look_up(token)
        return self._known[token]

    def _look_up(self, token: int) -> tuple[str, list[int]]:
        text = self.tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        name = self.tokenizer.convert_ids_to_tokens(token)
        if name is None:
            return "", []
        if name.startswith("▁"):  # SentencePiece's space, which decoding takes off at the beginning
            return name.replace("▁", " "), list(name.replace("▁", " ").encode())
        if BROKEN not in text:
            return text, list(text.encode())
        if match := _BYTE.fullmatch(name):
            raw = [int(match[1], 16)]
        elif all(letter in self._letters for letter in name):
            raw = [self._letters[letter] for letter in name]
        else:
            return text, list(text.encode())
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), raw
