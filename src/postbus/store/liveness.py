"""Who is alive on this host: each process holds a lock on a file named by its nonce. Lockable means dead.

Not by pid: containers reuse pid 1, and hosts reuse any. The lock goes with the process, whatever ends it.
"""

import fcntl
import os
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

__all__ = ["Liveness", "lock"]

NEW: Final = ".new"
YOUNG_SECONDS: Final = 60


class Liveness:
    """The lock files of one bus on this host."""

    def __init__(self, folder: Path) -> None:
        """Keep the lock files in a folder, made when needed."""
        self._folder = folder

    @contextmanager
    def holding(self, owner: str) -> Generator[None]:
        """Be known as alive until the end of the block, or of the process."""
        process = os.getpid()
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / owner
        # Locked under another name first: from its first moment on, the file named by the nonce is a locked one.
        unlocked = path.with_suffix(NEW)
        lock = os.open(unlocked, os.O_CREAT | os.O_RDWR, 0o644)
        closing = _closed_in_children(lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            unlocked.rename(path)
            yield
        finally:
            if os.getpid() == process:  # a forked child leaves this block too, and its parent is alive
                with suppress(FileNotFoundError):
                    path.unlink()
            closing()

    def is_dead(self, owner: str) -> bool:
        """Return whether a process is surely dead; without its file nothing is known, so False."""
        try:
            lock = os.open(self._folder / owner, os.O_RDWR)
        except OSError:
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        finally:
            os.close(lock)
        return True

    def sweep(self, holding: Callable[[], set[str]]) -> None:
        """Remove the files of dead processes, unless they still hold leases: those are needed to free them."""
        if not self._folder.is_dir():
            return
        dead = [path for path in self._folder.iterdir() if self.is_dead(path.name) and not self._is_new(path)]
        holders = holding() if dead else set[str]()
        for path in dead:
            if path.name not in holders:
                path.unlink(missing_ok=True)

    @staticmethod
    def _is_new(path: Path) -> bool:
        """Return whether a file may be about to be locked and named by its process."""
        try:
            return path.suffix == NEW and time.time() - path.stat().st_mtime < YOUNG_SECONDS
        except FileNotFoundError:
            return True


@contextmanager
def lock(path: Path) -> Generator[bool]:
    """Lock a file until the end of the block, or of the process; False: another process, or thread, has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
    closing = _closed_in_children(descriptor)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        closing()


def _closed_in_children(lock: int) -> "_Closer":
    """Return what closes the lock; forked children close their copy, or it would outlive its process in them."""
    closer = _Closer(lock)
    os.register_at_fork(after_in_child=closer)
    return closer


class _Closer:
    """Closes a file descriptor once."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor

    def __call__(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)
