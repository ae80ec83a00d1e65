"""A slower disk: SQLite's own VFS with time added to every fsync.

Group commit is worth as much as an fsync costs. On a machine whose fsync is nearly free this shows what it is worth
on one whose is not.
"""

import time

import apsw

__all__ = ["install"]


def install(seconds: float) -> None:
    """Make every fsync of databases opened from now on in this process take this much longer."""
    _Slow(seconds)


class _Slow(apsw.VFS):
    """The operating system's files, opened as `_SlowFile`."""

    _kept: "list[_Slow]" = []  # noqa: RUF012  SQLite refers to them for as long as the process lives

    def __init__(self, seconds: float) -> None:
        self._real = apsw.vfs_names()[0]
        super().__init__("slowdisk", self._real, makedefault=True)
        self._seconds = seconds
        self._kept.append(self)

    def xOpen(self, name: str | apsw.URIFilename | None, flags: list[int]) -> "apsw.VFSFile":  # noqa: N802  SQLite's name
        return _SlowFile(self._real, name, flags, self._seconds)


class _SlowFile(apsw.VFSFile):
    """A file whose fsync takes longer."""

    def __init__(self, real: str, name: str | apsw.URIFilename | None, flags: list[int], seconds: float) -> None:
        super().__init__(real, name, flags)
        self._seconds = seconds

    def xSync(self, flags: int) -> None:  # noqa: N802  SQLite's name
        time.sleep(self._seconds)
        super().xSync(flags)
