"""Who is alive on this host: each process holds a lock on a file named by its nonce. Lockable means dead.

Not by pid: containers reuse pid 1, and hosts reuse any. The lock goes with the process, whatever ends it.
"""

import fcntl
import os
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Final

from postbus.errors import PostbusError

NEW: Final = ".new"
YOUNG_SECONDS: Final = 60


class Liveness:
    """The lock files of one bus on this host."""

    def __init__(self, folder: Path) -> None:
        """Keep the lock files in a folder, made when needed."""
        self._folder = folder

    def holding(self, owner: str, named: Callable[[], set[str]]) -> AbstractContextManager[None]:
        """Be known as alive until the end of the block; whoever is `named` in the store then, until its process ends.

        A process that leaves a lease behind so counts as dead as soon as it has ended, and the lease is free.
        """
        return _Holding(self._folder / owner, named)

    def is_alive(self, owner: str) -> bool | None:
        """Return whether a process lives; None where there is no file of it, so that it cannot be told."""
        try:
            lock = os.open(self._folder / owner, os.O_RDWR)
        except OSError:
            return None
        try:
            # Shared, so that of two who ask at the same moment neither takes the other for the process.
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(lock)
        return False

    def sweep(self, named: Callable[[], set[str]]) -> None:
        """Remove the files of dead processes, except of those `named` in the store: without one, they seem alive."""
        if not self._folder.is_dir():
            return
        dead = [each for each in self._folder.iterdir() if self.is_alive(each.name) is False and not self._is_new(each)]
        kept = named() if dead else set[str]()
        for path in dead:
            if path.name not in kept:
                path.unlink(missing_ok=True)

    @staticmethod
    def _is_new(path: Path) -> bool:
        """Return whether a file may be about to be locked and named by its process."""
        try:
            return path.suffix == NEW and time.time() - path.stat().st_mtime < YOUNG_SECONDS
        except FileNotFoundError:
            return True


class _Holding(AbstractContextManager[None]):
    """A locked file. No generator: one that nobody leaves would remove the file when it is collected."""

    def __init__(self, path: Path, named: Callable[[], set[str]]) -> None:
        self._path = path
        self._named = named
        self._process = os.getpid()

    def __enter__(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # Locked under another name first: from its first moment on, the file named by the nonce is a locked one.
        unlocked = self._path.with_suffix(NEW)
        lock = os.open(unlocked, os.O_CREAT | os.O_RDWR, 0o644)
        self._lock = _OpenLock(lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            unlocked.rename(self._path)
        except OSError:
            self._lock.close()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A forked child leaves this block too, and its parent is alive.
        if os.getpid() == self._process and not self._is_named():
            self._path.unlink(missing_ok=True)
            self._lock.close()

    def _is_named(self) -> bool:
        try:
            return self._path.name in self._named()
        except PostbusError:  # then it may be
            return True


@contextmanager
def lock(path: Path) -> Generator[bool]:
    """Lock a file until the end of the block, or of the process; False: another process, or thread, has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
    open_lock = _OpenLock(descriptor)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        open_lock.close()


class _OpenLock:
    """A file descriptor with a lock. Forked children close their copy, or it would outlive its process in them."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        _OPEN.add(self)

    def close(self) -> None:
        if self in _OPEN:  # not so in a child, nor a second time
            _OPEN.remove(self)
            os.close(self._descriptor)


_OPEN: Final[set[_OpenLock]] = set()


def _close_in_child() -> None:
    for each in tuple(_OPEN):
        each.close()


os.register_at_fork(after_in_child=_close_in_child)
