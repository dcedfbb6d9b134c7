"""How many adapters a server keeps in memory, said where the model is patched: `int4+lora64`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from hfaccel.errors import PatchError, UnknownName
from hfaccel.transform import Stage, Transform, Unit


@dataclass(frozen=True, kw_only=True)
class LoRASlots(Transform):
    """What `Server` and `hfaccel serve` take where they are not told otherwise; the model stays as it is.

    Attributes: slots: adapters in memory at once, of any number known. max_rank: of their matrices.
    """

    name: ClassVar[str] = "lora"
    stage: ClassVar[Stage] = Stage.ADAPTER
    unit: ClassVar[Unit] = Unit.MODEL
    steps: ClassVar[tuple[tuple[str, str], ...]] = (
        (
            "lora32",
            "adapters that a server keeps in memory at once, any number; -rN: their largest rank, else 64",
        ),
    )

    slots: int = 32
    max_rank: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("slots", "max_rank"):
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise PatchError(f"LoRASlots: {key}={value!r}; a whole number, 1 or more")
        if self.targets or self.ignore:
            raise PatchError("LoRASlots is for the whole model: it takes no targets and no ignore")

    @classmethod
    def parse(cls, rest: str, options: list[str]) -> LoRASlots:
        given = "-".join([rest, *options])
        if not (found := re.fullmatch(r"([1-9][0-9]*)(?:-r([1-9][0-9]*))?", given)):
            raise UnknownName(f"recipe step 'lora{given}': known is loraN with -rN, as in lora32-r64")
        slots, rank = found.groups()
        return cls(slots=int(slots), **({} if rank is None else {"max_rank": int(rank)}))

    def step(self) -> str:
        rank = "" if self.max_rank == LoRASlots.max_rank else f"-r{self.max_rank}"
        return f"{self.name}{self.slots}{rank}"

    def check(self, model: nn.Module) -> None:
        if not getattr(model, "can_generate", lambda: False)():
            raise PatchError(f"{self.step()}: {type(model).__name__} does not generate, no server takes it")


def reserved(model: nn.Module) -> LoRASlots:
    """What a patched model's config says, or the defaults."""
    state = getattr(model, "_hfaccel", None)
    found = () if state is None else state.config.transforms
    return next((each for each in found if isinstance(each, LoRASlots)), LoRASlots())
