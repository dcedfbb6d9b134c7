"""Text out of tokens as they come, and where stop strings end it.

What was given out is final: bytes of a character that is not whole yet are kept back, and so is a beginning
of a stop string, which is at most its length less one. A stop string ends the text where it is first
complete, whatever tokens it is spread over; of several that are complete at once, the one that began first.
"""

from __future__ import annotations

from collections.abc import Sequence

BROKEN = "\ufffd"  # what bytes that are no whole character decode to
CHARACTER_TOKENS = 4  # of one character at most: UTF-8 has 4 bytes
CONTEXT_TOKENS = 8  # decoded again with the next one: what a token's text is depends on those before it


class Text:
    """The text of one answer.

    Args:
        tokenizer: of transformers. stops: strings, none of them empty.
        keep_special: special tokens are part of the text. keep_stop: so is the stop string that ended it.
    Attributes: stopped: a stop string is complete; nothing follows. stop: which one, or None.
    """

    def __init__(
        self, tokenizer, stops: Sequence[str] = (), *, keep_special: bool = False, keep_stop: bool = False
    ):
        self.tokenizer, self.stops, self.keep_special = tokenizer, tuple(stops), keep_special
        self.keep_stop = keep_stop
        self.stopped, self.stop = False, None
        self._ids: list[int] = []  # the last tokens
        self._known = ""  # the part of their text that was taken up
        self._broken = 0  # tokens since that text was whole
        self._held = ""  # may be the beginning of a stop string

    def put(self, token: int, *, search: bool = True) -> str:
        """Take a token: the text that is certain now; search: stop strings count in it."""
        if self.stopped:
            return ""
        self._ids.append(token)
        text = self._decode(self._ids)
        new = text[len(self._known) :]
        if text.endswith(BROKEN) and self._broken < CHARACTER_TOKENS - 1:
            self._broken += 1
            new = new.rstrip(BROKEN)
            self._known += new
        else:
            self._broken = 0
            self._ids = self._ids[-CONTEXT_TOKENS:]
            self._known = self._decode(self._ids)
        if not search:
            new, self._held = self._held + new, ""
            return new
        return self._certain(new)

    def end(self) -> str:
        """What was kept back and is text after all: once, at the end of an answer."""
        if self.stopped:
            return ""
        rest = self._certain(self._decode(self._ids)[len(self._known) :])
        if not self.stopped:
            rest, self._held = rest + self._held, ""
        self.stopped = True
        return rest

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(
            ids, skip_special_tokens=not self.keep_special, clean_up_tokenization_spaces=False
        )

    def _certain(self, new: str) -> str:
        text = self._held + new
        found = [(at + len(stop), at) for stop in self.stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            end, at = min(found)
            self.stop = text[at:end]
            return text[: end if self.keep_stop else at]
        held = max((_beginning(text, stop) for stop in self.stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _beginning(text: str, stop: str) -> int:
    """Length of the longest end of `text` with which `stop` begins, and which is not all of it."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
