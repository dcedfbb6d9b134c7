"""Pages in INT8: symmetric codes -127..127 with one fp32 scale per token and KV head, scale = max|x| / 127.

Rounding happens once, when a token is written; reordering, cropping and forking move codes and never round
again. Attention reads the same codes whether a token came by prefill, by a chunk or by decode.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from hfaccel.errors import PatchError, UnknownName
from hfaccel.transform import Stage, Transform, Unit


@dataclass(frozen=True, kw_only=True)
class KVCache(Transform):
    """How `generate` and the server store keys and values. bits: 8, or None for the model's own dtype."""

    name: ClassVar[str] = "kv"
    stage: ClassVar[Stage] = Stage.RUNTIME
    unit: ClassVar[Unit] = Unit.MODEL
    steps: ClassVar[tuple[tuple[str, str], ...]] = (
        ("kv8", "KV pages in INT8, one scale per token and head: about half the bytes of bf16"),
    )

    bits: int | None = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.bits, bool) or self.bits not in (8, None):
            raise PatchError(f"KVCache: bits={self.bits!r}; known are 8 and None (the model's dtype)")
        if self.targets or self.ignore:
            raise PatchError("KVCache applies to the whole model: it takes no targets and no ignore")

    @classmethod
    def parse(cls, rest: str, options: list[str]) -> KVCache:
        if rest != "8" or options:
            given = "-".join([f"kv{rest}", *options])
            raise UnknownName(f"recipe step {given!r}: known is kv8, without options")
        return cls(bits=8)

    def step(self) -> str:
        if self.bits is None:
            raise PatchError("KVCache(bits=None) is what every model has: it is not a recipe step")
        return f"kv{self.bits}"

    def check(self, model: nn.Module) -> None:
        if not getattr(model, "can_generate", lambda: False)():
            raise PatchError(f"kv8: {type(model).__name__} does not generate, it has no KV cache")
