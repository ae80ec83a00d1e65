"""Notices that the file has changed, in this process or another, by SQLite's own change counter."""

import threading
import time
from collections.abc import Callable
from typing import Final

from postbus.store.sqlite.connection import Database

__all__ = ["FileWatch"]

LOOK_EVERY: Final = 0.004


class FileWatch:
    """A `Watch` on one file. `PRAGMA data_version` reads shared memory: a look costs microseconds, no disk."""

    def __init__(self, open_reader: Callable[[], Database], on_close: Callable[["FileWatch"], None]) -> None:
        """Look through a connection of its own."""
        self._db = open_reader()
        self._on_close = on_close
        self._woken = threading.Event()
        self._lock = threading.Lock()
        self._closed = False
        self._seen = self._version()

    def wait(self, timeout: float) -> bool:
        """Return True when something may have changed, False after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while not self._changed():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self._woken.wait(min(LOOK_EVERY, left))
        return True

    def wake(self) -> None:
        """Make `wait` return at once."""
        self._woken.set()

    def close(self) -> None:
        """Close the connection; a `wait` in another thread returns."""
        self._on_close(self)
        with self._lock:
            if not self._closed:
                self._closed = True
                self._db.close()
        self._woken.set()

    def _changed(self) -> bool:
        seen, self._seen = self._seen, self._version()
        woken = self._woken.is_set()
        self._woken.clear()
        return woken or seen != self._seen

    def _version(self) -> int:
        with self._lock:
            return -1 if self._closed else self._db.value("data_version")
