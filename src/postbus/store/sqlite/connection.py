"""One connection to the bus's SQLite file, opened safely or not at all."""

import _thread
import ctypes
import itertools
import os
import random
import sys
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

import apsw
import orjson

from postbus.errors import StoreUnavailable, UnsafeStore
from postbus.store.committer import owned
from postbus.store.contract import PAGE_BYTES, WouldWait
from postbus.store.queries import load_queries
from postbus.store.session import Row
from postbus.store.sqlite import wal_index

R = TypeVar("R")
SQL: Final = load_queries("postbus.store.sqlite")
WITHOUT_WAL_RESET_BUG: Final = ((3_051_003, 4_000_000), (3_050_007, 3_051_000), (3_044_006, 3_045_000))
BUSY_SECONDS: Final = 30.0
READER_MS: Final = 1_000
PATIENT_AFTER: Final = 100
SQLITE_ERRORS: Final = (apsw.Error, UnicodeDecodeError)
CACHE_KIB: Final = 65_536
READER_CACHE_KIB: Final = 16_384
CHECKPOINT_PAGES: Final = 4_000
FULL: Final = 2
IN_USE: Final = 256
"""Pages in the WAL from which on it is worth having its room at once."""
ROOM: Final = CHECKPOINT_PAGES * (4_096 + 24)
PIECE: Final = bytes(256 * 1024)
OTHER_FILES: Final = (
    "{} or its -wal was removed or replaced while this process had it open (by mv or rm, or because "
    "another SQLite library in this process closed it); nothing was acknowledged: restart all its processes"
)
SPARE: Final = 64
"""How many times that room the disk must have, for a piece of it to be taken before it is needed."""


def require_safe_sqlite(version: int) -> None:
    """Raise UnsafeStore for a SQLite with the WAL-reset bug: it can corrupt the file under our kind of load.

    Fixed in 3.51.3 and in the branches 3.50.7 and 3.44.6. `version` is as SQLite gives it: 3051003.
    """
    if not any(first <= version < end for first, end in WITHOUT_WAL_RESET_BUG):
        raise UnsafeStore(f"SQLite {version} can corrupt a WAL file (fixed in 3.51.3): upgrade the apsw package")


class Database:
    """A connection with the bus's settings. Not for two threads at once; the committer or the pool sees to that."""

    packs = True

    def __init__(self, path: Path, *, readonly: bool = False, on_rollback: Callable[[], None] = lambda: None) -> None:
        """Open the file, making it unless `readonly`; raise UnsafeStore if it cannot be made safe."""
        require_safe_sqlite(apsw.SQLITE_VERSION_NUMBER)
        self._path = path
        self._names = (str(path), f"{path}-wal")
        self.files: tuple[int, ...] | None = None
        """What tells the file and its WAL from others."""
        self._readonly = readonly
        self._on_rollback = on_rollback
        self._patience = _Patience()
        self._release: Callable[[], Any] = lambda: None
        self.reopen()

    def reopen(self) -> None:
        """Open the file, at first or after `close`."""
        flags = apsw.SQLITE_OPEN_READONLY if self._readonly else apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE
        path = self._path
        if INHERITED and (files := files_at(self._names)) is not None and files[:2] in INHERITED:
            raise UnsafeStore(
                f"{path} was open and in use in the parent process when this one was forked: "
                "close the bus before forking, or start the process by spawn or forkserver"
            )
        if wal_index.is_of_another(path):
            raise UnsafeStore(OTHER_FILES.format(path))
        self._hasty: int | None = None
        self._owed = False
        self._pages = 0
        with translated(path):
            self._apsw = apsw.Connection(str(path), flags=flags, statementcachesize=200)
            self.process = os.getpid()
            OPEN.add(self)
            self._apsw.set_busy_handler(self._patience)
            self._configure(path)
            self._apsw.execute("SELECT 1 FROM sqlite_schema").fetchone()  # which opens the WAL
        if (index := wal_index.hold(path)) is not None:
            self._release = weakref.finalize(self, wal_index.release, index)
            self._release.atexit = False
        before, self.files = self.files, files_at(self._names)
        if before and self.files and before[:2] != self.files[:2]:
            self._refuse_other_files()

    def _configure(self, path: Path) -> None:
        pragma = self._apsw.pragma
        if not self._readonly:
            if _patiently(self._into_wal) != "wal":
                raise UnsafeStore(f"{path}: this place does not allow SQLite's WAL (a network drive?)")
            self._apsw.set_wal_hook(self._written)
            pragma("secure_delete", "fast")  # in pages that are written anyway: what is erased must not lie on there
        pragma("synchronous", "full")
        pragma("fullfsync", 1)
        pragma("checkpoint_fullfsync", 1)
        pragma("cache_size", -READER_CACHE_KIB if self._readonly else -CACHE_KIB)
        pragma("cell_size_check", 1)
        pragma("trusted_schema", 0)
        if pragma("synchronous") != FULL:
            raise UnsafeStore(f"{path}: synchronous=FULL was refused, so a power cut could lose acknowledged events")

    def _into_wal(self) -> str:
        if self._apsw.pragma("journal_mode") == "wal":
            return "wal"
        self._apsw.pragma("auto_vacuum", "incremental")
        return self._apsw.pragma("journal_mode", "wal")

    def begin(self) -> None:
        """Open a write transaction at once, waiting for its turn; raise WouldWait if this thread is in a hurry."""
        if self._apsw.in_transaction:  # a call that was interrupted in the midst of its rollback
            self.rollback()
        try:
            self._apsw.execute("BEGIN IMMEDIATE")
        except apsw.BusyError:
            if self._patience.is_hurried():
                raise WouldWait from None
            raise
        self.require_same_files()
        if self._patience.is_hurried():
            self._patience.hurried = None  # what follows a first write of the block must not be left undone

    def require_same_files(self) -> None:
        """Raise UnsafeStore if the file or its WAL is another than was opened: what is written to that is lost."""
        if files_at(self._names) != self.files:
            self._refuse_other_files()

    def _refuse_other_files(self) -> NoReturn:
        self._apsw.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)  # what this WAL holds must not go into that file
        self.rollback()
        raise UnsafeStore(OTHER_FILES.format(self._path))

    @owned
    def hurried(self) -> Generator[None]:
        """Have this thread raise WouldWait where another process writes, or the WAL is to be brought into the file."""
        if self._owed:
            raise WouldWait
        self._patience.hurried = self._hasty = threading.get_ident()
        try:
            yield
        finally:
            self._patience.hurried = self._hasty = None

    def _written(self, _: apsw.Connection, __: str, pages: int) -> int:
        """Bring a WAL that has grown into the file, as SQLite itself would; one in a hurry leaves that to the next.

        Have its room made, once it is in use. Nothing may be raised here: it is committed.
        """
        begins, self._pages = pages >= IN_USE > self._pages, pages
        if begins:
            self._have_room_made()
        self._owed = pages >= CHECKPOINT_PAGES
        if self._owed and self._hasty != threading.get_ident():
            with suppress(apsw.Error):  # it is committed; the next one tries again
                self._apsw.wal_checkpoint()
            self._owed = False
        return apsw.SQLITE_OK

    def _have_room_made(self) -> None:
        """Begin with that and wait for nothing.

        A `threading.Thread` is waited for until it runs: at a program's end, or where memory is short, it never does.
        """
        with suppress(Exception):  # no file any more, no thread, no memory: what is committed stays so
            wal = Path(self._apsw.filename_wal)
            if sys.platform == "linux" and wal.stat().st_size < ROOM:
                _thread.start_new_thread(make_room, (wal,))

    @owned
    def snapshot(self) -> Generator[None]:
        """Read as of one moment until the end of the block."""
        self._apsw.execute("BEGIN")
        try:
            yield
        finally:
            self._apsw.execute("COMMIT")

    @contextmanager
    def savepoint(self) -> Generator[None]:
        """Undo what the block wrote, and nothing else of the transaction, if it raises."""
        with self._apsw:
            yield

    def commit(self) -> None:
        """Make the transaction durable, in the file that others open."""
        self._apsw.execute("COMMIT")
        self.require_same_files()

    def rollback(self) -> None:
        """Undo the transaction, if SQLite has not done so already."""
        self._on_rollback()
        # A ROLLBACK that fails leaves the transaction open; the next `begin` then fails, and nothing is stored.
        with suppress(apsw.Error):
            if self._apsw.in_transaction:
                self._apsw.execute("ROLLBACK")

    @property
    def lost(self) -> bool:
        """Never: what SQLite fails to commit is not committed."""
        return False

    @property
    def in_transaction(self) -> bool:
        """Whether a transaction is open."""
        return self._apsw.in_transaction

    def run(self, name: str, parameters: Sequence[Any] = ()) -> list[Row]:
        """Run a named query and return its rows."""
        return self._apsw.execute(SQL[name], parameters).fetchall()

    run_plain = run

    def page(self, name: str, parameters: Sequence[Any]) -> list[Row]:
        """Run a named query whose last column is how many bytes a row has; return the first rows, as many as fit."""
        found: list[Row] = []
        size = 0
        for row in self._apsw.execute(SQL[name], parameters):
            found.append(row)
            size += row[-1]
            if size >= PAGE_BYTES:
                break
        return found

    def iterate(self, name: str, parameters: Sequence[Any] = ()) -> Iterator[Row]:
        """Run a named query, stepping only as far as the caller goes."""
        return self._apsw.execute(SQL[name], parameters)

    def go_through(self, sql: str, parameters: Sequence[Any]) -> Iterator[Row]:
        """Run a query made elsewhere in this package, stepping only as far as the caller goes."""
        return self._apsw.execute(sql, parameters)

    def value(self, name: str, parameters: Sequence[Any] = ()) -> Any:
        """Run a named query and return the first column of its first row, or None."""
        row = self._apsw.execute(SQL[name], parameters).fetchone()
        return None if row is None else row[0]

    def many(self, name: str, parameters: Iterable[Sequence[Any]]) -> list[Row]:
        """Run a named query once for each row of parameters and return all rows it yields."""
        return self._apsw.executemany(SQL[name], parameters).fetchall()

    def rows(self, name: str, parameters: Sequence[Any] = ()) -> list[Row]:
        """Run a query that yields one JSON array of rows: fetched singly, each would give up Python's lock."""
        return orjson.loads(self.value(name, parameters))

    def count(self, name: str, parameters: Sequence[Any] = ()) -> int:
        """Run a named statement and return how many rows it changed."""
        self._apsw.execute(SQL[name], parameters)
        return self._apsw.changes()

    def script(self, sql: str) -> None:
        """Run several statements."""
        self._apsw.execute(sql)

    def run_own(self, sql: str, parameters: Any = ()) -> list[Row]:
        """Run a statement of the caller's own and return its rows."""
        return self._apsw.execute(sql, parameters).fetchall()

    def interrupt(self) -> None:
        """Cut off the statement that another thread is running, if any."""
        self._apsw.interrupt()

    def pragma(self, name: str, *argument: int) -> Any:
        """Return a setting or run a check that is spelled as a pragma."""
        return self._apsw.pragma(name, *argument)

    @owned
    def unhurried(self) -> Generator[None]:
        """Let a statement of its own be durable with the next commit, or when the file is next synced, not at once."""
        self.require_same_files()
        try:
            self._apsw.pragma("synchronous", "normal")
            yield
        finally:
            self._apsw.pragma("synchronous", "full")

    @owned
    def overwriting(self) -> Generator[None]:
        """Write zeros over pages, too, that become free meanwhile: nothing that is deleted lies on in them."""
        self._apsw.pragma("secure_delete", 1)
        try:
            yield
        finally:
            self._apsw.pragma("secure_delete", "fast")

    def rewrite(self) -> None:
        """Write the whole file anew, by way of the WAL: free pages and what lies between rows are gone from it."""
        self._apsw.execute("VACUUM")

    def empty_wal(self) -> None:
        """Bring everything into the file itself and cut off the WAL, unless somebody goes on reading for a second."""
        self._apsw.set_busy_timeout(READER_MS)
        try:
            with suppress(apsw.BusyError, apsw.LockedError):
                self._apsw.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
        finally:
            self._apsw.set_busy_handler(self._patience)

    def close(self) -> None:
        """Close the connection; a second call does nothing, nor does one in a process forked since."""
        if self.process == os.getpid():
            self._release()
            self._apsw.close()
            wal_index.forget_removed()
            OPEN.discard(self)


OPEN: Final[weakref.WeakSet[Database]] = weakref.WeakSet()
"""The connections that this process has opened."""
INHERITED: Final[set[tuple[int, ...]]] = set()
"""The files that the parent had open when this process was forked."""


def files_at(names: Iterable[str]) -> tuple[int, ...] | None:
    """Return what tells the file and its WAL from others of their names; None if one of them is gone."""
    try:
        file, wal = map(os.stat, names)
    except FileNotFoundError:
        return None
    return file.st_dev, file.st_ino, wal.st_dev, wal.st_ino


def _leave_to_parent() -> None:
    """Have a forked child neither close the connections of its parent nor open their files.

    SQLite keeps in memory which locks the process holds. The child has a copy of that, and none of the locks: others
    would take it for absent, and remove the WAL while it writes. To close such a connection would undo what the
    parent is in the midst of.
    """
    for each in list(OPEN):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))
        if each.files is not None:
            INHERITED.add(each.files[:2])
    OPEN.clear()
    wal_index.leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)


def make_room(wal: Path) -> None:
    """Let a WAL have the size at once that it grows to before it is written from its start again.

    A commit that makes the file larger waits for the file system's journal, and so for what everybody else has written;
    one that writes into what is there waits for its own pages alone. Zeros are no frames, to SQLite: it reads up to
    the first whose checksum is wrong. Each piece is appended, so it comes behind whatever others write meanwhile, and
    where they write later they write over it. A WAL that is cut off meanwhile is left alone.
    """
    with suppress(OSError):  # it is gone, or the disk is full: then it grows as it is needed
        file = os.open(wal, os.O_WRONLY | os.O_APPEND)
        try:
            size = 0
            while size <= (now := os.fstat(file)).st_size < ROOM and now.st_nlink and _is_spare(file):
                size, began = now.st_size, time.monotonic()
                os.write(file, PIECE)
                os.fdatasync(file)
                time.sleep(time.monotonic() - began)  # others want the disk, too
        finally:
            os.close(file)


def _is_spare(file: int) -> bool:
    disk = os.fstatvfs(file)
    return disk.f_bavail * disk.f_frsize > SPARE * ROOM


def _patiently(call: Callable[[], R]) -> R:
    """Call again while another process is in the way: for what SQLite refuses without asking the busy handler."""
    patience = _Patience()
    for calls in itertools.count():
        try:
            return call()
        except apsw.BusyError:
            if not patience(calls):
                raise
    raise AssertionError("unreachable")


class _Patience:
    """Waits for another process's write lock: short random naps, so that nobody starves, up to a limit."""

    def __init__(self) -> None:
        self.hurried: int | None = None
        """The thread that does not wait at all."""
        self._since = 0.0
        self._chance = random.Random()  # noqa: S311  naps need no secrecy

    def is_hurried(self) -> bool:
        """Return whether that is the one who asks."""
        return self.hurried == threading.get_ident()

    def __call__(self, calls: int) -> bool:
        if self.is_hurried():
            return False
        if calls == 0:
            self._since = time.monotonic()
        elif time.monotonic() - self._since > BUSY_SECONDS:
            return False
        time.sleep(self._chance.uniform(0.0002, 0.002 if calls < PATIENT_AFTER else 0.01))
        return True


@contextmanager
def translated(path: Path) -> Generator[None]:
    """Turn SQLite's errors into postbus's for the length of a block."""
    try:
        yield
    except SQLITE_ERRORS as error:
        raise translate(path, error) from error


def translate(path: Path, error: Exception) -> Exception:  # noqa: PLR0911  a table
    """Return the error postbus raises for one of SQLite's: what happened to which file, and what to do."""
    match error:
        case apsw.CorruptError() | apsw.NotADBError() | apsw.SQLError() | UnicodeDecodeError():
            return UnsafeStore(f"{path} is damaged or no SQLite file ({error}): restore it from a backup")
        case apsw.FullError():
            return StoreUnavailable(f"{path}: the disk is full; nothing was stored")
        case apsw.BusyError() | apsw.LockedError():
            return StoreUnavailable(f"{path} stayed locked for {BUSY_SECONDS:.0f} s; nothing was stored")
        case apsw.CantOpenError() if not path.parent.is_dir():
            return UnsafeStore(f"{path}: there is no folder {path.parent}: make it, or correct the URL")
        case apsw.IOError() | apsw.CantOpenError() | apsw.ReadOnlyError() | apsw.PermissionsError():
            return StoreUnavailable(f"{path} cannot be used ({error}); nothing was stored")
        case apsw.ConnectionClosedError() | apsw.ThreadingViolationError():
            return StoreUnavailable(f"{path} is closed")
        case _:
            return error
