"""Who is alive on this host: each process holds a lock on a file named by its nonce. Lockable means dead.

Not by pid: containers reuse pid 1, and hosts reuse any. The lock goes with the process, whatever ends it.
"""

import fcntl
import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["Liveness"]


class Liveness:
    """The lock files beside one database file."""

    def __init__(self, database: Path) -> None:
        """Keep the lock files in a folder named after the database."""
        self._folder = database.with_name(database.name + "-alive")

    @contextmanager
    def holding(self, owner: str) -> Generator[None]:
        """Be known as alive until the end of the block, or of the process."""
        self._folder.mkdir(exist_ok=True)
        path = self._folder / owner
        # Locked under another name first: from its first moment on, the file named by the nonce is a locked one.
        unlocked = path.with_suffix(".new")
        lock = os.open(unlocked, os.O_CREAT | os.O_RDWR, 0o644)
        closing = _closed_in_children(lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            unlocked.rename(path)
            yield
        finally:
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

    def sweep(self, holding: set[str]) -> None:
        """Remove the files of dead processes; those still `holding` leases are needed to free them."""
        if self._folder.is_dir():
            for path in self._folder.iterdir():
                if path.name not in holding and not path.suffix and self.is_dead(path.name):
                    path.unlink(missing_ok=True)


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
