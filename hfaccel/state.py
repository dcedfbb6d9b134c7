"""What a patched model carries: its config, records and journal; and how it is found in what a user gives."""

from __future__ import annotations

import copy
import threading
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from hfaccel.errors import PatchError
from hfaccel.journal import Journal
from hfaccel.recipe import PatchConfig
from hfaccel.transform import Record


@dataclass
class State:
    """What a patched model carries as `model._hfaccel`.

    `journal` is None on a deep or pickled copy and on a model loaded from a patched folder: their originals
    are not theirs to give back. `bytes_before` is None there.
    """

    config: PatchConfig
    records: list[Record] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)  # module -> why it was left alone
    journal: Journal | None = None
    lock: threading.RLock = field(default_factory=threading.RLock)
    origin: str = "patch"  # or "loaded", "copy"
    bytes_before: int | None = None
    lent: bool = False  # inside `original`

    def __deepcopy__(self, memo: dict) -> State:
        return _restore_state(
            self.config.to_dict(), copy.deepcopy(self.records), dict(self.skipped), self.bytes_before
        )

    def __reduce__(self):
        return _restore_state, (self.config.to_dict(), self.records, self.skipped, self.bytes_before)


def _restore_state(
    config: dict, records: list[Record], skipped: dict[str, str], bytes_before: int | None
) -> State:
    return State(PatchConfig.from_dict(config), records, skipped, origin="copy", bytes_before=bytes_before)


def inner_model(model: Any) -> nn.Module:
    """The transformers model inside a PeftModel or a pipeline."""
    for _ in range(4):
        if hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
            model = model.get_base_model()
        elif not isinstance(model, nn.Module) and isinstance(getattr(model, "model", None), nn.Module):
            model = model.model
        elif hasattr(model, "_orig_mod"):  # torch.compile's wrapper
            model = model._orig_mod
        else:
            break
    if not isinstance(model, nn.Module) or not hasattr(model, "config"):
        raise PatchError(
            f"{type(model).__name__} has no config: not a transformers model, a PeftModel or a pipeline"
        )
    return model


def require_state(model: nn.Module) -> State:
    state = getattr(model, "_hfaccel", None)
    if state is None:
        raise PatchError(f"this {type(model).__name__} is not patched; call hfaccel.patch(model) first")
    return state


def require_journal(state: State) -> Journal:
    if state.journal is None:
        cause = {"loaded": "it was loaded from a patched folder", "copy": "it is a copy of a patched model"}
        raise PatchError(f"this model has no originals: {cause.get(state.origin, state.origin)}")
    return state.journal
