"""How many tokens of prompts a step takes beside requests that decode, so that no stream stalls.

A step of decodes alone takes `alone` seconds, one with p tokens of prompts beside them about
alone + p * each. Both are measured as the engine runs, and p is held to where a step takes at most `stretch`
times as long: a long prompt that comes in is felt as a steady slowdown instead of a gap. Where more than one
prompt can be computed, prompts may have their share of a step by heads instead, or a crowd would wait for
the few who were first. Steps without a decode take as many tokens as they may.
"""

from __future__ import annotations

LEAST = 8  # tokens of prompts beside decodes: fewer would keep prompts waiting for nothing
FIRST = 16  # before anything was measured
# Weights of the newest measurement: a slower step is believed sooner than a faster one.
EVEN, SLOWER, FASTER = 0.3, 0.5, 0.1


class Pace:
    """Args: stretch: of a step by prompts beside its decodes; None lets them be as long as they are."""

    def __init__(self, stretch: float | None):
        self.stretch = stretch
        self._alone: float | None = None  # seconds
        self._each: float | None = None

    def tokens(self, budget: int, decodes: int = 1, prompts: int = 1) -> int:
        """Tokens of prompts that may stand beside so many decodes, `budget` at most, where so many prompts
        could be computed."""
        if self.stretch is None:
            return budget
        others = max(0, prompts - 1)
        return max(self._steady(budget), budget * others // (others + decodes))

    def _steady(self, budget: int) -> int:
        if self._alone is None or self._each is None:
            return min(budget, FIRST)
        if self._each <= 0:
            return budget
        return min(budget, max(LEAST, int((self.stretch - 1) * self._alone / self._each)))

    def took(self, seconds: float, decodes: int, prompts: int) -> None:
        """A step with so many decodes and tokens of prompts took so long."""
        if decodes and not prompts:
            self._alone = _moved(self._alone, seconds, EVEN)
        elif decodes and self._alone is not None:
            each = max(0.0, seconds - self._alone) / prompts
            slower = self._each is not None and each > self._each
            self._each = _moved(self._each, each, SLOWER if slower else FASTER)


def _moved(old: float | None, new: float, weight: float) -> float:
    return new if old is None else old + weight * (new - old)
