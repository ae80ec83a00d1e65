"""One connection to the bus's SQLite file, opened safely or not at all."""

import itertools
import os
import random
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NoReturn

import apsw
import orjson

from postbus.errors import StoreUnavailable, UnsafeStore
from postbus.store.catalog import Catalog
from postbus.store.contract import PAGE_BYTES
from postbus.store.owned import owned
from postbus.store.queries import load_queries
from postbus.store.session import Row
from postbus.store.sqlite import forks, wal_index, wal_size

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
OTHER_FILES: Final = (
    "{} or its -wal was removed or replaced while this process had it open (by mv or rm, or because "
    "another SQLite library in this process closed it); nothing was acknowledged: restart all its processes"
)


def require_safe_sqlite(version: int) -> None:
    """Raise UnsafeStore for a SQLite with the WAL-reset bug: it can corrupt the file under our kind of load.

    Fixed in 3.51.3 and in the branches 3.50.7 and 3.44.6. `version` is as SQLite gives it: 3051003.
    """
    if not any(first <= version < end for first, end in WITHOUT_WAL_RESET_BUG):
        raise UnsafeStore(f"SQLite {version} can corrupt a WAL file (fixed in 3.51.3): upgrade the apsw package")


class Database:
    """A connection with the bus's settings. Not for two threads at once; the committer or the pool sees to that."""

    packs = True

    def __init__(self, path: Path, *, readonly: bool = False) -> None:
        """Open the file, making it unless `readonly`; raise UnsafeStore if it cannot be made safe."""
        require_safe_sqlite(apsw.SQLITE_VERSION_NUMBER)
        self._path = path
        self._paths = (path, Path(f"{path}-wal"))
        self.file: wal_index.File | None = None
        self._readonly = readonly
        self.catalog = Catalog()
        self._patience = _Patience()
        self._release: Callable[[], Any] = lambda: None
        self.reopen()

    def reopen(self) -> None:
        """Open the file, at first or after `close`."""
        flags = apsw.SQLITE_OPEN_READONLY if self._readonly else apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE
        path = self._path
        if wal_index.identity(path) in forks.INHERITED:
            raise UnsafeStore(
                f"{path} was open and in use in the parent process when this one was forked: "
                "close the bus before forking, or start the process by spawn or forkserver"
            )
        if wal_index.is_of_another(path):
            raise UnsafeStore(OTHER_FILES.format(path))
        self.catalog.forget()
        self._data_version = -1
        self._pages = 0
        with translated(path):
            self._apsw = apsw.Connection(str(path), flags=flags, statementcachesize=200)
            self.process = os.getpid()
            forks.OPEN.add(self)
            self._apsw.set_busy_handler(self._patience)
            self._configure(path)
            self._apsw.execute("SELECT 1 FROM sqlite_schema").fetchone()  # which opens the WAL
        if (index := wal_index.hold(path)) is not None:
            self._release = weakref.finalize(self, wal_index.release, index)
            self._release.atexit = False
        before, self._files = self.file, self._files_there()
        self.file = self._files[0]
        if before and self.file and before != self.file:
            self._refuse_other_files()

    def _configure(self, path: Path) -> None:
        pragma = self._apsw.pragma
        if not self._readonly:
            if self._into_wal() != "wal":
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
        """Make it a WAL file; while another process is in the way, SQLite refuses that without asking the handler."""
        patience = _Patience()
        for calls in itertools.count():
            try:
                if (mode := self._apsw.pragma("journal_mode")) != "wal":
                    self._apsw.pragma("auto_vacuum", "incremental")
                    mode = self._apsw.pragma("journal_mode", "wal")
            except apsw.BusyError:
                if not patience(calls):
                    raise
            else:
                return mode
        raise AssertionError("unreachable")

    def begin(self) -> None:
        """Open a write transaction at once, waiting for its turn."""
        if self._apsw.in_transaction:  # a call that was interrupted in the midst of its rollback
            self.rollback()
        self._apsw.execute("BEGIN IMMEDIATE")
        self.require_same_files()

    def require_same_files(self) -> None:
        """Raise UnsafeStore if the file or its WAL is another than was opened: what is written to that is lost."""
        if self._files_there() != self._files:
            self._refuse_other_files()

    def _files_there(self) -> list[wal_index.File | None]:
        """Return what tells the file and its WAL from others of their names."""
        return [wal_index.identity(each) for each in self._paths]

    def _refuse_other_files(self) -> NoReturn:
        self._apsw.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)  # what this WAL holds must not go into that file
        self.rollback()
        raise UnsafeStore(OTHER_FILES.format(self._path))

    def _written(self, _: apsw.Connection, __: str, pages: int) -> int:
        """Have a WAL grown to its full size once it is in use; bring a full one into the file, as SQLite itself would.

        Nothing may be raised here: it is committed.
        """
        begins, self._pages = pages >= wal_size.IN_USE > self._pages, pages
        if begins:
            with suppress(Exception):  # no file any more, no thread, no memory: what is committed stays so
                wal_size.begin_to_grow(Path(self._apsw.filename_wal), CHECKPOINT_PAGES)
        if pages >= CHECKPOINT_PAGES:
            with suppress(apsw.Error):  # the next commit tries again
                self._apsw.wal_checkpoint()
        return apsw.SQLITE_OK

    @owned
    def snapshot(self) -> Generator[None]:
        """Read as of one moment until the end of the block."""
        self._apsw.execute("BEGIN")
        try:
            yield
        finally:
            self._apsw.execute("COMMIT")

    def savepoint(self) -> AbstractContextManager[Any]:
        """Undo what the block wrote, and nothing else of the transaction, if it raises."""
        return self._apsw

    def commit(self) -> None:
        """Make the transaction durable, in the file that others open."""
        self._apsw.execute("COMMIT")
        self.require_same_files()

    def rollback(self) -> None:
        """Undo the transaction, if SQLite has not done so already."""
        self.catalog.forget()
        # A ROLLBACK that fails leaves the transaction open; the next `begin` then fails, and nothing is stored.
        with suppress(apsw.Error):
            if self._apsw.in_transaction:
                self._apsw.execute("ROLLBACK")

    def refresh_catalog(self) -> None:
        """Bring what is remembered up to date: only another connection's commit, or a rollback, makes it stale."""
        version = self.value("data_version")
        if version != self._data_version or self.catalog.empty:
            self.catalog.refresh(self)
            self._data_version = version

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
    def durable_later(self) -> Generator[None]:
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
            forks.OPEN.discard(self)


class _Patience:
    """Waits for another process's write lock: short random naps, so that nobody starves, up to a limit."""

    def __init__(self) -> None:
        self._since = 0.0
        self._chance = random.Random()  # noqa: S311  naps need no secrecy

    def __call__(self, calls: int) -> bool:
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
