"""Which adapters an engine knows by name: loaded, replaced and forgotten while requests run.

What a request was submitted with stays its own: an adapter that was replaced or unloaded can be had until the
last request that has it is over; then its slot and its pages are free at once. An adapter that does not fit
the memory, or would send everybody to another executor, is refused before anything has changed.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from hfaccel.errors import PatchError
from hfaccel.lora.adapters import Adapter, read_adapter
from hfaccel.lora.folder import BadAdapter
from hfaccel.serve.budget import free_bytes, gb
from hfaccel.serve.requests import Refused

if TYPE_CHECKING:
    from hfaccel.serve.engine import Engine

log = logging.getLogger("hfaccel")


class KnownAdapters:
    """The adapters of one engine. Any thread loads, unloads and finds; the rest holds the engine's lock.

    Attributes: by_name: replaced as a whole at every change, so that readers need no lock.
    """

    def __init__(self, engine: Engine):
        self._engine, self._slots = engine, engine.slots
        self.by_name: dict[str, Adapter] = {}
        self._wanted: deque[Adapter] = deque()  # to be read ahead
        self._reading = threading.Lock()
        self._reader: threading.Thread | None = None

    def find(self, name: str | None) -> Adapter | None:
        """Raises: Refused for a name that is not known."""
        known = self.by_name
        if name is not None and name not in known:
            loaded = ", ".join(sorted(known)) or "none"
            raise Refused(f"adapter {name!r} is not loaded; loaded are {loaded}", "adapter")
        return None if name is None else known[name]

    def read(self, folders: Mapping[str, str | Path]) -> list[Adapter]:
        """Folders by name, held against the model. Raises: BadAdapter, Refused."""
        for name in folders:
            if not isinstance(name, str) or not name:
                raise Refused(f"an adapter's name is a text that is not empty, not {name!r}")
        model, most = self._engine.model, self._slots.max_rank
        return [read_adapter(name, path, model, max_rank=most) for name, path in folders.items()]

    def load(self, name: str, path: str | Path) -> Adapter:
        """See `Engine.load_adapter`."""
        (adapter,) = self.read({name: path})
        with self._engine._stepping:
            self.put(adapter)
        return adapter

    def put(self, adapter: Adapter) -> None:
        """Know it by its name from now on. Raises: BadAdapter, Refused; nothing has changed then."""
        engine = self._engine
        if engine._closed:
            raise Refused("the engine is closed")
        engine._check_patched()
        self._make_room(adapter)
        before = self.by_name.get(adapter.name)
        self.by_name = {**self.by_name, adapter.name: adapter}
        if before is not None:
            self._gone(before)

    def _make_room(self, adapter: Adapter) -> None:
        engine, slots = self._engine, self._slots
        more = slots.bytes_for([adapter]) - slots.bytes_for()
        if not more:
            return
        if more > (free := free_bytes(engine.model.device)):
            raise BadAdapter(
                f"adapter {adapter.name!r}: {slots.count} slots of its size take {gb(more)} more, and "
                f"{gb(free)} are free (lora_slots)"
            )
        engine._refresh()
        tables, kind = dict(slots.tables), type(engine.runner.executor)
        slots.make_room(adapter)
        try:
            if type(engine.runner.refresh()) is not kind:
                raise BadAdapter("; ".join(f"{k}: {why}" for k, why in engine.runner.skipped.items()))
        except PatchError as why:
            slots.put_back(tables)
            raise BadAdapter(
                f"adapter {adapter.name!r} cannot be served by the executor that runs, {kind.__name__}: {why}"
            ) from why

    def unload(self, name: str) -> None:
        """See `Engine.unload_adapter`."""
        with self._engine._stepping:
            adapter = self.find(name)
            self.by_name = {key: one for key, one in self.by_name.items() if one is not adapter}
            self._gone(adapter)

    def _gone(self, adapter: Adapter) -> None:
        """Not known any more: its files may change."""
        if self._in_use(adapter):
            self._slots.keep(adapter)
        else:
            self._forget(adapter)

    def left(self, adapter: Adapter) -> None:
        """A request with it is over."""
        if self.by_name.get(adapter.name) is not adapter and not self._in_use(adapter):
            self._forget(adapter)

    def _in_use(self, adapter: Adapter) -> bool:
        engine = self._engine
        every = (*engine.scheduler.running, *engine.scheduler.waiting, *list(engine._submitted))
        return any(request.lora is adapter for request in every)

    def _forget(self, adapter: Adapter) -> None:
        self._slots.drop(adapter)
        if self._engine.tree is not None:
            self._engine.tree.forget((self._engine.scheduler.version, adapter))

    def ahead(self, adapter: Adapter) -> None:
        """A request waits with it: read it on a thread of its own, so that no step waits for the disk."""
        if self._slots.holds(adapter):
            return
        with self._reading:
            self._wanted.append(adapter)
            if self._reader is None:
                self._reader = threading.Thread(target=self._read_ahead, name="hfaccel-adapters", daemon=True)
                self._reader.start()

    def _read_ahead(self) -> None:
        while True:
            with self._reading:
                if not self._wanted:
                    self._reader = None
                    return
                adapter = self._wanted.popleft()
            try:
                self._slots.stage(adapter)
            except Exception as why:  # the step reads it itself, and tells its requests
                log.info("adapter %r was not read ahead: %s", adapter.name, why)
