"""Notices that the file has changed, in this process or another, by SQLite's own change counter.

Linux tells when the WAL is written to, so that there is something to look for. What was written counts a little later:
when it is on the disk. So the first looks come soon, then every millisecond, however much is being written, until a
moment after the last write. A place where nothing is told, or a system without such news, is looked at again and again.
"""

import ctypes
import os
import select
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from postbus.store.sqlite.connection import Database

LOOK_EVERY: Final = 0.004
LOOK_ANYWAY: Final = 0.05
"""How often to look where changes are told: they might not be, on a drive that is not as local as it seems."""
LOOK_SOON: Final = 0.0001
LOOKS: Final = 5
"""How often to look in the time that it has taken so far: what counts is seen that much later, at the most."""
SETTLED: Final = 0.02
"""After so long without a write none is expected to count any more: if one does, it is seen a little later."""
SHORT: Final = 0.001
"""How often to look while something is being written; what is shorter is slept through, for `poll` counts in these."""
IN_MODIFY: Final = 2
A_PAGE: Final = 4_096


class FileWatch:
    """A `Watch` on one file. `PRAGMA data_version` reads shared memory: a look costs microseconds, no disk."""

    def __init__(self, path: Path, on_close: Callable[["FileWatch"], None]) -> None:
        """Look through a connection of its own."""
        self._db = Database(path, readonly=True)
        self._on_close = on_close
        self._woken = self._closed = self._waiting = False
        self._lock = threading.Lock()
        self._seen = self._version()
        self._hear, self._call = os.pipe()
        for end in (self._hear, self._call):
            os.set_blocking(end, False)
        self._written = _told_of_writes(Path(f"{path}-wal"))
        """Where the system tells of them, if it does."""
        self._written_at = 0.0
        self._began: float | None = None
        """Since when something is being written that may count soon."""
        self._hearing, self._look = select.poll(), select.poll()
        for each in (self._hearing, self._look):
            each.register(self._hear, select.POLLIN)
        if self._written is not None:
            self._look.register(self._written, select.POLLIN)

    def wait(self, timeout: float) -> bool:
        """Return True when something may have changed, False after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        with self._lock:
            self._waiting = not self._closed
        if not self._waiting:
            time.sleep(min(timeout, LOOK_ANYWAY))
            return False
        try:
            while not self._changed():
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._doze(left)
            return True
        finally:
            with self._lock:
                self._waiting = False
                if self._closed:
                    self._let_go()

    def _doze(self, left: float) -> None:
        """Sleep until it is time to look: soon while something is being written, else late, or when something is."""
        now = time.monotonic()
        if self._began is not None:
            look, pause = self._hearing, min(max((now - self._began) / LOOKS, LOOK_SOON), SHORT, left)
        else:
            most = LOOK_EVERY if self._written is None else LOOK_ANYWAY
            look, pause = self._look, min(max((now - self._written_at) / LOOKS, SHORT), most, left)
        if pause < SHORT:
            time.sleep(pause)
        if any(end == self._hear for end, _ in look.poll(0 if pause < SHORT else pause * 1000)):
            os.read(self._hear, A_PAGE)

    def wake(self) -> None:
        """Make `wait` return at once."""
        with self._lock:
            if self._waiting and not self._woken:
                with suppress(BlockingIOError):  # full: so it will be heard
                    os.write(self._call, b".")
            self._woken = True

    def close(self) -> None:
        """Close the connection; a `wait` in another thread returns."""
        self._on_close(self)
        self.wake()
        with self._lock:
            if not self._closed:
                self._closed = True
                self._db.close()
                if not self._waiting:
                    self._let_go()

    def _let_go(self) -> None:
        for end in (self._hear, self._call, self._written):
            if end is not None:
                os.close(end)

    def _changed(self) -> bool:
        written = self._was_written()
        seen, self._seen = self._seen, self._version()
        if seen != self._seen:  # that was it, unless something more has come
            self._began = time.monotonic() if written else None
        with self._lock:
            woken, self._woken = self._woken, False
        return woken or seen != self._seen

    def _was_written(self) -> bool:
        """Return whether the file was written to since the last look; note since when it is being written to."""
        now = time.monotonic()
        told = False
        if self._written is not None:
            with suppress(BlockingIOError):
                told = bool(os.read(self._written, A_PAGE))
        if told:
            self._written_at = now
            self._began = self._began or now
        elif now - self._written_at > SETTLED:
            self._began = None
        return told

    def _version(self) -> int:
        with self._lock:
            return -1 if self._closed else self._db.value("data_version")


def _told_of_writes(path: Path) -> int | None:
    """Return where Linux tells that a file is written to; nothing where it does not."""
    if sys.platform != "linux":
        return None
    system = ctypes.CDLL(None)
    file: int = system.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if file < 0:  # there are many already: 128 for all processes of a user, if nothing else is set
        return None
    if system.inotify_add_watch(file, os.fsencode(path), IN_MODIFY) < 0:
        os.close(file)
        return None
    return file
