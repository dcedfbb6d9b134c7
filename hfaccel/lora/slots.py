"""Adapters in memory: any number known by name, a bounded number of them in slots, the others on disk.

Each module that an adapter names has one table for all slots, which the executors read in place: the plan's
LoRA records, the Triton kernels or hooks of the modules. A slot belongs to one adapter; a module that it does
not name has rank 0 there. Slots in use by requests stay; of the others the one used longest ago makes room.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import nn

from hfaccel.errors import PatchError
from hfaccel.lora.adapters import Adapter, linear_size

RANK_STEP = 8  # ranks of tables are multiples of it


@dataclass(eq=False)
class Table:
    """Of one module: y += scale[s] * (x a[s]^T) b[s] for a token whose adapter is in slot s.

    Attributes:
        a: [S, R, K]. b: [S, R, N]; both in the model's dtype, zero from the slot's rank on.
        scale: [S] fp32. rank: [S] int32, 0 where the slot's adapter does not name the module.
    """

    a: torch.Tensor
    b: torch.Tensor
    scale: torch.Tensor
    rank: torch.Tensor

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.a, self.b))


class AdapterSlots:
    """Not thread-safe: the engine holds its lock.

    Args: slots: adapters in memory at once. max_rank: the largest rank that `read_adapter` lets in.
    Attributes:
        tables: by module name. version: goes up when tables are made anew or added; what points at them is
            then stale. loads: adapters brought into a slot, ever.
    """

    def __init__(self, model: nn.Module, *, slots: int = 32, max_rank: int = 64):
        for name, value in (("slots", slots), ("max_rank", max_rank)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise PatchError(f"lora {name} is a whole number, 1 or more, not {value!r}")
        self.model, self.count, self.max_rank = model, slots, max_rank
        self.tables: dict[str, Table] = {}
        self.version = self.loads = 0
        self._slots: OrderedDict[Adapter, int] = OrderedDict()  # the least recently used first
        self._users: dict[Adapter, int] = {}
        self._free = list(reversed(range(slots)))

    def make_room(self, adapter: Adapter) -> None:
        """Tables large enough for an adapter; what is loaded stays."""
        modules = dict(self.model.named_modules(remove_duplicate=False))
        for name, part in adapter.parts.items():
            table = self.tables.get(name)
            rank = -(-part.rank // RANK_STEP) * RANK_STEP
            if table is not None and table.a.shape[1] >= rank:
                continue
            n, k = linear_size(modules[name])
            new = self._table(n, k, rank)
            if table is not None:
                new.a[:, : table.a.shape[1]] = table.a
                new.b[:, : table.b.shape[1]] = table.b
                new.scale.copy_(table.scale)
                new.rank.copy_(table.rank)
            self.tables[name] = new
            self.version += 1

    def _table(self, n: int, k: int, rank: int) -> Table:
        dtype, device, slots = self.model.dtype, self.model.device, self.count
        return Table(
            torch.zeros(slots, rank, k, dtype=dtype, device=device),
            torch.zeros(slots, rank, n, dtype=dtype, device=device),
            torch.zeros(slots, dtype=torch.float32, device=device),
            torch.zeros(slots, dtype=torch.int32, device=device),
        )

    def acquire(self, adapter: Adapter) -> bool:
        """Hold an adapter in a slot for one more request, read from disk where it has none.

        Returns: False where every slot is in use by others.
        Raises: BadAdapter where its file cannot be read any more.
        """
        if adapter not in self._slots:
            slot = self._vacate()
            if slot is None:
                return False
            try:
                self._load(adapter, slot)
            except BaseException:
                self._clear(slot)
                self._free.append(slot)
                raise
            self._slots[adapter] = slot
        self._slots.move_to_end(adapter)
        self._users[adapter] = self._users.get(adapter, 0) + 1
        return True

    def release(self, adapter: Adapter) -> None:
        """A request less; the adapter stays until its slot is wanted."""
        self._users[adapter] -= 1
        if not self._users[adapter]:
            del self._users[adapter]

    def slot(self, adapter: Adapter | None) -> int:
        """Where an adapter that is held lies; -1 for none."""
        return -1 if adapter is None else self._slots[adapter]

    def drop(self, adapter: Adapter) -> None:
        """Give a slot back before its turn, if nobody uses it."""
        if adapter in self._slots and adapter not in self._users:
            self._free.append(self._slots.pop(adapter))

    def forget(self) -> None:
        """Nothing is loaded and no table stands: the model was moved or re-typed. No adapter may be held."""
        known = list(self.tables)
        ranks = {name: table.a.shape[1] for name, table in self.tables.items()}
        sizes = {name: (table.b.shape[2], table.a.shape[2]) for name, table in self.tables.items()}
        self._slots.clear()
        self._free = list(reversed(range(self.count)))
        self.tables = {name: self._table(*sizes[name], ranks[name]) for name in known}
        self.version += 1

    def stats(self) -> dict[str, int]:
        return {
            "slots": self.count,
            "loaded": len(self._slots),
            "in_use": len(self._users),
            "loads": self.loads,
            "bytes": sum(table.bytes for table in self.tables.values()),
        }

    def _vacate(self) -> int | None:
        """A free slot, made so by letting go of the least recently used adapter."""
        if self._free:
            return self._free.pop()
        for adapter in self._slots:
            if adapter not in self._users:
                return self._slots.pop(adapter)
        return None

    def _clear(self, slot: int) -> None:
        for table in self.tables.values():
            table.rank[slot] = 0

    @torch.no_grad()
    def _load(self, adapter: Adapter, slot: int) -> None:
        self._clear(slot)
        for name, a, b in adapter.tensors():
            table, part = self.tables[name], adapter.parts[name]
            table.a[slot, : part.rank] = a.to(table.a)
            table.b[slot, : part.rank] = b.T.to(table.b)
            table.a[slot, part.rank :] = 0
            table.b[slot, part.rank :] = 0
            table.scale[slot] = part.scale
            table.rank[slot] = part.rank
        self.loads += 1
