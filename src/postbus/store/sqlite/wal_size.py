"""A WAL in use gets at once the size that it grows to before it is written from its start again.

A commit that makes the file larger waits for the file system's journal, and so for what everybody else has written;
one that writes into what is there waits for its own pages alone. Beside a busy disk, at 20 events a second, p99 from a
publish to a follower's handler was 32 to 48 ms while the WAL grew, and 8 to 13 ms otherwise.
"""

import _thread
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

FRAME: Final = 4_096 + 24
"""A page and its header."""
IN_USE: Final = 256
"""Pages in the WAL from which on it is worth having its size at once."""
PIECE: Final = bytes(256 * 1024)
SPARE: Final = 64
"""How many times that size the disk must have free, for a piece of it to be taken before it is needed."""


def begin_to_grow(wal: Path, pages: int) -> None:
    """Have a WAL of fewer pages grown, and wait for nothing.

    A `threading.Thread` is waited for until it runs: at a program's end, or where memory is short, it never does.
    """
    size = pages * FRAME
    if sys.platform == "linux" and wal.stat().st_size < size:
        _thread.start_new_thread(grow, (wal, size))


def grow(wal: Path, size: int) -> None:
    """Append zeros to a WAL up to a size.

    To SQLite zeros are no frames: it reads up to the first whose checksum is wrong. Each piece is appended, so it comes
    behind whatever others write meanwhile, and where they write later they write over it. A WAL that is cut off
    meanwhile is left alone.
    """
    with suppress(OSError):  # it is gone, or the disk is full: then it grows as it is needed
        file = os.open(wal, os.O_WRONLY | os.O_APPEND)
        try:
            before = 0
            while before <= (now := os.fstat(file)).st_size < size and now.st_nlink and _is_spare(file, size):
                before, began = now.st_size, time.monotonic()
                os.write(file, PIECE)
                os.fdatasync(file)
                time.sleep(time.monotonic() - began)  # others want the disk, too
        finally:
            os.close(file)


def _is_spare(file: int, size: int) -> bool:
    disk = os.fstatvfs(file)
    return disk.f_bavail * disk.f_frsize > SPARE * size
