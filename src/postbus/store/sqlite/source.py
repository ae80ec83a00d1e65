"""An existing table in a SQLite file: read by the SQLite that postbus itself uses, and by no other beside it."""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import apsw

from postbus.errors import InvalidRequest, NotFound
from postbus.store.source import Columns, SourceRow, split_name
from postbus.store.sqlite.connection import SQLITE_ERRORS, require_safe_sqlite, translate


@contextmanager
def open_source(path: Path, table: str, columns: Columns) -> Generator["SqliteSource"]:
    """Read a table of a file until the end of the block; raise NotFound, InvalidRequest, StoreUnavailable."""
    require_safe_sqlite(apsw.SQLITE_VERSION_NUMBER)
    if not path.exists():
        raise NotFound(f"there is no file {path}")
    connection = None
    try:
        connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
        connection.execute("BEGIN")
        yield SqliteSource(connection, table, columns)
    except apsw.SQLError as error:
        raise InvalidRequest(f"{path}: {error}") from None
    except SQLITE_ERRORS as error:
        raise translate(path, error) from error
    finally:
        if connection is not None:
            connection.close()


class SqliteSource:
    """A `Source` in a read transaction."""

    def __init__(self, connection: apsw.Connection, table: str, columns: Columns) -> None:
        """Look at a table, a view, or `schema.table` of the connection."""
        self._connection = connection
        self._table = ".".join(map(_quoted, split_name(table)))
        self._columns = columns

    def count(self) -> int:
        """Return how many rows there are."""
        return self._run(f"SELECT count(*) FROM {self._table}").fetchall()[0][0]  # noqa: S608  quoted above

    def rows(self) -> Iterator[SourceRow]:
        """Go through the rows by time, then id."""
        # Named by their table: SQLite would take a column that is not there, in quotes, for text.
        names = [f"source.{_quoted(name)}" if name is not None else "NULL" for name in self._columns]
        order = f"{names[1]} IS NULL, {names[1]}, {names[0]}"
        rows = self._run(f"SELECT {', '.join(names)} FROM {self._table} AS source ORDER BY {order}")  # noqa: S608  quoted above
        return map(SourceRow._make, rows)

    def _run(self, sql: str) -> Any:
        return self._connection.execute(sql)


def _quoted(name: str) -> str:
    if "\0" in name:
        raise InvalidRequest("a name cannot contain NUL")
    return '"' + name.replace('"', '""') + '"'
