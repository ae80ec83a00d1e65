"""An existing table in a PostgreSQL database."""

import math
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any, Final

import psycopg
from psycopg import sql

from postbus.errors import InvalidRequest
from postbus.store.postgres.address import Address, translate
from postbus.store.source import Columns, SourceRow, split_name

FETCH: Final = 1_000
UNHURRIED: Final = (
    "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; SET LOCAL statement_timeout = 0;"
    " SET LOCAL idle_in_transaction_session_timeout = 0; SET LOCAL timezone = 'UTC'"
)
"""A long look at a table of the caller's, not to be cut off."""


@contextmanager
def open_source(url: str, table: str, columns: Columns) -> Generator["PostgresSource"]:
    """Read a table until the end of the block; raise InvalidRequest, StoreUnavailable."""
    address = Address.of(url, pooled=True)  # one transaction, which a pooler may carry
    connection = address.connect()
    connection.longest = math.inf
    try:
        connection.execute(UNHURRIED)
        yield PostgresSource(connection, table, columns)
    except psycopg.ProgrammingError as error:
        told = str(error).partition("\n")[0]
        raise InvalidRequest(f"{address.shown}: {told}") from None
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{address.shown}: {table} holds text that is not UTF-8 ({error})") from None
    except psycopg.Error as error:
        raise translate(address.shown, error) from error
    finally:
        connection.close()


class PostgresSource:
    """A `Source` in a read transaction."""

    def __init__(self, connection: psycopg.Connection[Any], table: str, columns: Columns) -> None:
        """Look at a table or a view, `schema.table` if it is not on the search path."""
        self._connection = connection
        self._table = sql.Identifier(*split_name(table))
        self._columns = columns

    def count(self) -> int:
        """Return how many rows there are."""
        asked = sql.SQL("SELECT count(*) FROM {}").format(self._table)
        return psycopg.Cursor(self._connection).execute(asked).fetchall()[0][0]

    def rows(self) -> Iterator[SourceRow]:
        """Go through the rows by time, then id, fetched some at a time."""
        asked = sql.SQL("SELECT {} FROM {} AS source ORDER BY {} NULLS LAST, {}").format(
            sql.SQL(", ").join(self._selected()),
            self._table,
            _column(self._columns.created_at),
            _column(self._columns.id),
        )
        with psycopg.ServerCursor(self._connection, "postbus_import") as cursor:
            cursor.itersize = FETCH
            cursor.execute(asked)
            yield from map(SourceRow._make, cursor)

    def _selected(self) -> Iterator[sql.Composable]:
        """Yield each column as text: moments as JSON writes them, tags as a JSON list or string."""
        text = "{}::text"
        shapes = SourceRow(text, "to_json({}) #>> '{{}}'", text, text, text, "to_json({})::text")
        for name, shape in zip(self._columns, shapes, strict=True):
            yield sql.SQL("NULL") if name is None else sql.SQL(shape).format(_column(name))


def _column(name: str) -> sql.Composable:
    return sql.Identifier("source", name)
