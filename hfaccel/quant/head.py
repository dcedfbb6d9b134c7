"""The output head, often the largest matrix: INT8 per row beside any weight recipe, both ends if tied."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from hfaccel.anatomy import Anatomy
from hfaccel.errors import PatchError, UnknownName
from hfaccel.quant.packing import Round
from hfaccel.quant.rounding import Rounding
from hfaccel.quant.rtn import round_to_nearest
from hfaccel.transform import Transform


@dataclass(frozen=True, kw_only=True)
class Head(Rounding):
    """Precision of the output head and, where tied to it, of the token embedding.

    Attributes:
        bits: 8, 4, or 16, which leaves both as they are.
    Raises: PatchError for other values.
    """

    name: ClassVar[str] = "head"
    steps: ClassVar[tuple[tuple[str, str], ...]] = (
        (
            "head8",
            "head in INT8, one scale a row (the default beside any weight recipe); tied embeddings share it",
        ),
        ("head4", "head in INT4, groups of 64; -gN, -row, -sym"),
        ("head16", "head and embedding untouched"),
    )

    def __post_init__(self) -> None:
        if self.bits == 16:
            Transform.__post_init__(self)
            if self.group is not None or self.symmetric is not None:
                raise PatchError("Head: bits=16 leaves the head alone; group and symmetric say nothing then")
            return
        if self.bits not in (4, 8):
            raise PatchError(f"Head: bits={self.bits!r}; known are 16, 8, 4")
        super().__post_init__()

    @classmethod
    def parse(cls, rest: str, options: list[str]) -> Head:
        if rest not in ("16", "8", "4") or (rest == "16" and options):
            raise UnknownName(
                f"recipe step head{rest}: known are head16, head8, head4 (options -gN, -row, -sym, -asym)"
            )
        if rest == "16":
            return cls(bits=16)
        return cls(**cls.parse_bits(rest, options))

    def step(self) -> str:
        return "head16" if self.bits == 16 else self.step_bits()

    def default_targets(self, anatomy: Anatomy) -> tuple[str, ...]:
        if self.bits == 16 or anatomy.kind != "decoder" or anatomy.head is None:
            return ()
        return (anatomy.head, anatomy.embeddings["tok"]) if anatomy.tied else (anatomy.head,)

    def rounder(self, matrix: Tensor, stats: Any) -> Round:
        return round_to_nearest
