"""Adapters in memory: any number known by name, a bounded number of them in slots, the others on disk.

Each module that an adapter names has one table for all slots, which the executors read in place: the plan's
LoRA records, the Triton kernels or hooks of the modules. A slot belongs to one adapter; a module that it does
not name has rank 0 there. Slots in use by requests stay; of the others the one used longest ago makes room.

Files are read before anything changes. `stage` reads one ahead, on another thread than the one that steps;
a slot is then filled by a copy.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import nn

from hfaccel.cache.pool import zeros
from hfaccel.errors import PatchError
from hfaccel.lora.adapters import Adapter, linear_size
from hfaccel.lora.folder import BadAdapter

RANK_STEP = 8  # ranks of tables are multiples of it
Matrices = list[tuple[str, torch.Tensor, torch.Tensor]]  # (module, a [rank, K], b [rank, N])


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
    """Not thread-safe but for `stage`: the engine holds its lock.

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
        self._staged: WeakKeyDictionary[Adapter, Matrices] = WeakKeyDictionary()  # read ahead
        self._kept: WeakKeyDictionary[Adapter, Matrices] = WeakKeyDictionary()  # files may have changed

    def ranks(self, adapters: Iterable[Adapter]) -> dict[str, int]:
        """Of each module the rank that its table needs, for what is there and these."""
        found = {name: table.a.shape[1] for name, table in self.tables.items()}
        for adapter in adapters:
            for name, part in adapter.parts.items():
                rank = -(-part.rank // RANK_STEP) * RANK_STEP
                found[name] = max(rank, found.get(name, 0))
        return found

    def bytes_for(self, adapters: Iterable[Adapter] = ()) -> int:
        """Bytes of all tables once these have room, too."""
        modules = dict(self.model.named_modules(remove_duplicate=False))
        floats = sum(rank * sum(linear_size(modules[name])) for name, rank in self.ranks(adapters).items())
        return self.count * floats * self.model.dtype.itemsize

    def make_room(self, adapter: Adapter) -> None:
        """Tables large enough for an adapter; what is loaded stays.

        Raises: BadAdapter without memory for them; nothing has changed then.
        """
        modules = dict(self.model.named_modules(remove_duplicate=False))
        ranks = self.ranks([adapter])
        grown = {
            name: ranks[name]
            for name in adapter.parts
            if name not in self.tables or self.tables[name].a.shape[1] < ranks[name]
        }
        try:
            new = {name: self._table(*linear_size(modules[name]), rank) for name, rank in grown.items()}
        except (RuntimeError, MemoryError) as why:
            raise BadAdapter(f"adapter {adapter.name!r}: no memory for {self.count} slots: {why}") from why
        for name, table in new.items():
            if (old := self.tables.get(name)) is not None:
                for slot in self._slots.values():  # the others hold nothing, and stay untouched memory
                    table.a[slot, : old.a.shape[1]] = old.a[slot]
                    table.b[slot, : old.b.shape[1]] = old.b[slot]
                table.scale.copy_(old.scale)
                table.rank.copy_(old.rank)
            self.tables[name] = table
            self.version += 1

    def _table(self, n: int, k: int, rank: int) -> Table:
        dtype, device, slots = self.model.dtype, self.model.device, self.count
        return Table(
            zeros((slots, rank, k), dtype, device),
            zeros((slots, rank, n), dtype, device),
            zeros((slots,), torch.float32, device),
            zeros((slots,), torch.int32, device),
        )

    def put_back(self, tables: dict[str, Table]) -> None:
        """Undo a `make_room`: the tables of before it, if no slot was filled since."""
        if tables != self.tables:
            self.tables = tables
            self.version += 1

    def stage(self, adapter: Adapter) -> None:
        """Read an adapter ahead of its `acquire`, if it has no slot and few others wait; from any thread."""
        if adapter not in self._slots and adapter not in self._staged and len(self._staged) < self.count:
            matrices = self._read(adapter)
            if adapter not in self._slots:  # it was not waited for
                self._staged[adapter] = matrices

    def keep(self, adapter: Adapter) -> None:
        """The files may change from now on: whoever still waits with this adapter gets it as it is."""
        if (slot := self._slots.get(adapter)) is None:
            if (matrices := self._staged.pop(adapter, None)) is not None:
                self._kept[adapter] = matrices
        else:
            tables = ((name, part.rank, self.tables[name]) for name, part in adapter.parts.items())
            self._kept[adapter] = [
                (name, table.a[slot, :rank].clone(), table.b[slot, :rank].clone())
                for name, rank, table in tables
            ]

    def _read(self, adapter: Adapter) -> Matrices:
        """What its slot will hold. Raises: BadAdapter."""
        dtype, found = self.model.dtype, []
        for name, a, b in adapter.tensors():
            try:
                pair = a.to(dtype), b.T.to(dtype).contiguous()
            except (RuntimeError, MemoryError) as why:
                raise BadAdapter(f"adapter {adapter.name!r}: no memory to read it: {why}") from why
            if not all(torch.isfinite(x).all() for x in pair):
                raise BadAdapter(
                    f"adapter {adapter.name!r}: {name} has values that are not finite numbers in "
                    f"{str(dtype).removeprefix('torch.')}"
                )
            found.append((name, *pair))
        return found

    def acquire(self, adapter: Adapter) -> bool:
        """Hold an adapter in a slot for one more request, read from disk where it has none.

        Returns: False where every slot is in use by others.
        Raises: BadAdapter where its file cannot be read any more; no other adapter has lost its slot then.
        """
        if adapter not in self._slots:
            if not self._free and all(one in self._users for one in self._slots):
                return False
            matrices = self._kept.get(adapter)
            if matrices is None:
                matrices = self._staged.pop(adapter, None)
                if matrices is not None and matrices[0][1].dtype != self.model.dtype:
                    matrices = None
            if matrices is None:
                matrices = self._read(adapter)
            slot = self._vacate()
            self._fill(adapter, slot, matrices)
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
        """Give its slot and what was read of it back before its turn, if nobody uses it."""
        if adapter not in self._users:
            for read in (self._staged, self._kept):
                read.pop(adapter, None)
            if adapter in self._slots:
                self._free.append(self._slots.pop(adapter))

    def holds(self, adapter: Adapter) -> bool:
        """Whether it has a slot; from any thread."""
        return adapter in self._slots

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

    def _vacate(self) -> int:
        """A free slot, made so by letting go of the least recently used adapter that nobody uses."""
        if self._free:
            return self._free.pop()
        return self._slots.pop(next(one for one in self._slots if one not in self._users))

    @torch.no_grad()
    def _fill(self, adapter: Adapter, slot: int, matrices: Matrices) -> None:
        for table in self.tables.values():
            table.rank[slot] = 0
        for name, a, b in matrices:
            table, part = self.tables[name], adapter.parts[name]
            table.a[slot, : part.rank] = a
            table.b[slot, : part.rank] = b
            table.a[slot, part.rank :] = 0
            table.b[slot, part.rank :] = 0
            table.scale[slot] = part.scale
            table.rank[slot] = part.rank
        self.loads += 1
