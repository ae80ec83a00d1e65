"""The index of a WAL, `-shm`, which SQLite maps into memory: nobody may cut it off while this process uses it.

SQLite cuts the index off when it takes itself for the first to open it, because it finds no lock there. But a process
does not see its own POSIX locks. So a second SQLite library in the process, or our own when it opens another file by
the same name (`mv backup.db bus.db`), would cut off what open connections have mapped, and their next look at it ends
the process with SIGBUS. A lock of an open file description is seen by the process itself, too.
"""

import fcntl
import os
import struct
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Final

File = tuple[int, int]
"""The device and the number of a file."""
FIRST_BYTE: Final = 128
"""Where SQLite locks the index as long as it is used: UNIX_SHM_DMS."""


class _Held:
    """An index that connections of this process use."""

    def __init__(self, database: File) -> None:
        self.database = database
        """The file that it belongs to."""
        self.users = 0
        self.ends: list[int] = []
        """Where it is locked."""


_held: Final[dict[File, _Held]] = {}
_guard = threading.RLock()  # the garbage collector may release an index within any of these functions


def identity(path: Path) -> File | None:
    """Return what tells a file from others of its name; None if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def is_of_another(database: Path) -> bool:
    """Return whether the index at that name is used in this process for another file, which was there before."""
    with _guard:
        held = _held.get(identity(_index(database)) or (0, 0))
        return held is not None and held.users > 0 and held.database != identity(database)


def hold(database: Path) -> File | None:
    """Keep the index from being cut off; return what to `release` before the connection is closed."""
    path, file = _index(database), identity(database)
    with _guard:
        index = identity(path)
        if index is None or file is None:
            return None
        held = _held.setdefault(index, _Held(file))
        held.users += 1
        if held.users == 1:
            held.database = file
            with suppress(OSError):  # without a descriptor left, or such locks in the file system, it stays as it is
                if not held.ends:
                    held.ends.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
                _lock(held, shared=True)
    return index


def release(index: File) -> None:
    """Let go of an index before the connection is closed: the last one would not remove it while it is locked."""
    with _guard:
        if (held := _held.get(index)) is not None:
            held.users -= 1
            if not held.users:
                with suppress(OSError):
                    _lock(held, shared=False)


def forget_removed() -> None:
    """Close the descriptors of indexes that are gone.

    To close one drops all locks that this process has on the file, those of other connections too, if only of a
    program's own through apsw. So it is kept until the file is removed, as SQLite does behind the last of all.
    """
    with _guard:
        for index, held in list(_held.items()):
            if not held.users and not any(os.fstat(end).st_nlink for end in held.ends):
                _close(_held.pop(index))


def leave_to_parent() -> None:
    """Close what a forked child has inherited: it would go on holding the lock of its parent."""
    global _guard  # noqa: PLW0603  another thread may have held it
    _guard = threading.RLock()
    for held in list(_held.values()):
        _close(held)
    _held.clear()


def _lock(held: _Held, *, shared: bool) -> None:
    if sys.platform == "linux":
        kind = fcntl.F_RDLCK if shared else fcntl.F_UNLCK
        for end in held.ends:
            fcntl.fcntl(end, fcntl.F_OFD_SETLK, struct.pack("hhqqi", kind, os.SEEK_SET, FIRST_BYTE, 1, 0))


def _close(held: _Held) -> None:
    for end in held.ends:
        with suppress(OSError):
            os.close(end)


def _index(database: Path) -> Path:
    return Path(f"{database}-shm")
