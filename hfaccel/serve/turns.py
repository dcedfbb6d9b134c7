"""A lock that is handed on in the order of asking.

`threading.RLock` goes back to the thread that let go of it, if that one asks again at once: an engine that
steps without a pause would keep everybody else waiting for as long as there is work.
"""

from __future__ import annotations

import threading
from collections import deque


class Turns:
    """Re-entrant; a context manager."""

    def __init__(self):
        self._state = threading.Lock()
        self._line: deque[tuple[int, threading.Lock]] = deque()
        self._owner: int | None = None
        self._depth = 0

    def __enter__(self) -> Turns:
        me = threading.get_ident()
        if self._owner == me:
            self._depth += 1
            return self
        with self._state:
            if self._owner is None:
                self._owner, self._depth = me, 1
                return self
            place = me, threading.Lock()
            place[1].acquire()
            self._line.append(place)
        try:
            place[1].acquire()
        except BaseException:  # an interrupt while waiting
            with self._state:
                mine = self._owner == me
                if not mine:
                    self._line.remove(place)
            if mine:
                self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if self._depth:
            return
        with self._state:
            self._owner = None
            if self._line:
                self._owner, gate = self._line.popleft()
                self._depth = 1
                gate.release()
