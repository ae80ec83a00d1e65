"""One connection to the bus's PostgreSQL database, made again when it breaks."""

import os
import re
import select
import socket
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import lru_cache
from itertools import count
from typing import Any, Final, LiteralString, TypeVar, cast

import orjson
import psycopg
from psycopg import errors, generators, pq
from psycopg.adapt import Transformer

from postbus.errors import EventBusShutdownError
from postbus.observe import probe
from postbus.store.committer import owned
from postbus.store.contract import PAGE_BYTES
from postbus.store.postgres.address import PATH, SETTINGS, Address, Session, Unanswered
from postbus.store.postgres.catalog import Catalog
from postbus.store.queries import load_queries
from postbus.store.session import Row

R = TypeVar("R")
BATCH: Final = "jsonb_array_elements($1::jsonb)"
"""What a statement has in it that takes all rows at once."""
FIRST_FETCH: Final = 100
LONGEST_FETCH: Final = 2_000
DEADLOCKS: Final = 3
_cursors = count(1)
_names = count(1)
Plain = str | int | None
Asked = tuple[str, Sequence[Plain]]
"""A named query, and what it is asked with."""


@lru_cache
def localized(schema: str) -> dict[str, str]:
    """Return the named statements for a schema."""
    return {name: put_schema(sql, schema) for name, sql in load_queries("postbus.store.postgres").items()}


def put_schema(sql: str, schema: str) -> str:
    """Put a schema's name in the place of `postbus` in our own SQL."""
    return sql if schema == "postbus" else re.sub(r"\bpostbus(?=\.)|(?<=['\"])postbus(?=['\"])", schema, sql)


class Database:
    """A connection with the bus's settings. Not for two threads at once; the committer or the pool sees to that."""

    packs = False

    def __init__(self, address: Address) -> None:
        """Connect at the first use, and anew whenever the connection was lost."""
        self.catalog = Catalog()
        """What it has seen of subscriptions."""
        self._address = address
        self._sql = localized(address.schema)
        self._connection: Session | None = None
        self._prepared: dict[str, bytes] = {}
        """What `run_at_once` has prepared, and under which name."""
        local = "".join(f"; SET LOCAL {name} = '{value}'" for name, value in SETTINGS.items())
        local += f"; SET LOCAL standard_conforming_strings = on; SET LOCAL {PATH}"
        self._settings = local if address.pooled else ""
        self._lent = False
        """Whether names are looked up as the role has it, for a statement of the caller's own."""
        self._retired = False

    @property
    def pooled(self) -> bool:
        """Whether a transaction pooler stands before the database."""
        return self._address.pooled

    @property
    def connection(self) -> Session:
        """The open connection; one that was lost while idle is replaced."""
        connection = self._connection
        if connection is not None and not _is_lost(connection):
            return connection
        if connection is not None:
            self._give_up()
        if self._retired:
            raise EventBusShutdownError("the store is closed")
        self._connection = self._address.connect()
        self._prepared.clear()
        return self._connection

    def _give_up(self) -> None:
        """Close a connection that was lost; what was seen of the server may have gone with it, if that has crashed."""
        self.close()
        self.catalog.forget()

    def ready(self) -> "Database":
        """Connect, or connect anew if the connection was lost, before a statement outside any transaction.

        A call that was interrupted may have left the connection in a transaction, or waiting for an answer.
        """
        if self._connection is not None and not self.idle:
            self.rollback()
        self.connection  # noqa: B018  the property does it
        return self

    def begin(self) -> None:
        """Open a write transaction."""
        self._begin("BEGIN ISOLATION LEVEL READ COMMITTED")

    def _begin(self, statement: str) -> None:
        self.ready()
        sql = cast("LiteralString", statement + self._settings)
        self._lent = False
        try:
            self.connection.execute(sql)
        except (psycopg.OperationalError, psycopg.InterfaceError):
            # Nothing has been asked of it yet: one that broke unnoticed may be replaced without a word.
            self._give_up()
            self.connection.execute(sql)

    def transaction(self) -> AbstractContextManager[None]:
        """Commit at the end of the block, or roll back if it raises."""
        return self._within(self.begin, self.commit)

    def alone(self) -> AbstractContextManager[None]:
        """Have a statement commit itself; behind a pooler, settings need a transaction to hold in."""
        if self._address.pooled:
            return self.transaction()
        self.ready()
        probe("committing")
        return self.committing()

    def settled(self) -> AbstractContextManager[None]:
        """Have a statement run with our settings: behind a pooler these need a transaction to hold in."""
        if self._address.pooled:
            return self._within(self.begin, self._end)
        self.ready()
        return nullcontext()

    def snapshot(self) -> AbstractContextManager[None]:
        """Read as of one moment until the end of the block."""
        return self._within(lambda: self._begin("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"), self._end)

    @owned
    def _within(self, begin: Callable[[], None], end: Callable[[], None]) -> Generator[None]:
        try:
            begin()
            yield
            end()
        except BaseException:
            self.rollback()
            raise

    def learn(self, subscriptions: Iterable[str]) -> None:
        """Have the numbers of subscriptions in the catalog, if there are such; outside any transaction."""
        if any(self.catalog.known_number(name) is None for name in subscriptions):
            with self.settled():
                self.catalog.refresh(self)

    def commit(self) -> None:
        """Make the transaction durable; raise if it was lost, or if an error had spoilt it and COMMIT undoes it.

        The kinds of events that it has made rows of come last: whoever adds the same one waits for its end.
        """
        self.catalog.write_kinds(self)
        with self.committing():
            self._end()

    @contextmanager
    def committing(self) -> Generator[None]:
        """Raise Unanswered where the connection is lost in the midst of what commits."""
        session = self._connected()
        try:
            yield
        except (psycopg.OperationalError, psycopg.InterfaceError) as error:
            if session.closed or error.diag.severity_nonlocalized in {"FATAL", "PANIC"}:
                session.close()
                raise Unanswered(str(error), session) from error
            raise

    def _end(self) -> None:
        # Nothing is gained by preparing it, and who watches or cuts the wire knows it by its name.
        if self._connected().execute("COMMIT", prepare=False).statusmessage != "COMMIT":
            raise psycopg.OperationalError("the transaction was rolled back")

    def rollback(self) -> None:
        """Undo the transaction, if one is open."""
        self.catalog.forget()
        if self._connection is not None and not self._connection.closed:
            with suppress(psycopg.Error):
                if not self.idle:
                    self._connection.execute("ROLLBACK")
                return
            self.close()

    @property
    def in_transaction(self) -> bool:
        """Whether a transaction is open, and none of its statements has spoilt it."""
        return self._status() == pq.TransactionStatus.INTRANS

    @property
    def lost(self) -> bool:
        """Whether the connection broke, so that the answer to what was asked last may be missing."""
        return self._connection is None or bool(self._connection.closed)

    @property
    def idle(self) -> bool:
        """Whether nothing is open, so that somebody else may use the connection."""
        return self._status() == pq.TransactionStatus.IDLE

    def _status(self) -> pq.TransactionStatus:
        return pq.TransactionStatus.UNKNOWN if self._connection is None else self._connection.info.transaction_status

    def interrupt(self) -> None:
        """Cut off the statement that another thread is running, if any; the connection too, if the server is away."""
        connection = self._connection
        if connection is None:
            return
        try:
            connection.cancel_safe(timeout=5)
        except psycopg.Error:
            with suppress(psycopg.Error, OSError), socket.socket(fileno=os.dup(connection.fileno())) as wire:
                wire.shutdown(socket.SHUT_RDWR)

    def run(self, name: str, parameters: Sequence[Any] = ()) -> list[Row]:
        """Run a named query and return its rows."""
        return self.execute(self._sql[name], parameters)

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> list[Row]:
        """Run a statement with `$1` for its parameters and return its rows."""
        return _fetched(self._executed(sql, parameters))

    rows = run

    def _executed(self, sql: str, parameters: Sequence[Any]) -> psycopg.Cursor[Row]:
        return self._open().execute(cast("LiteralString", sql), parameters or None)

    def run_plain(self, name: str, parameters: Sequence[Plain]) -> list[Row]:
        """Run a named query that takes texts and numbers, and return its rows, the fastest way."""
        straight = self.idle and not self._address.pooled
        return self.run_at_once((name, parameters)) if straight else self.run(name, parameters)

    def page(self, name: str, parameters: Sequence[Plain]) -> list[Row]:
        """Run a named query whose last column is how many bytes a row has; return the first rows, as many as fit."""
        return self.run_plain(name, (*parameters, PAGE_BYTES))

    def run_at_once(self, *asked: Asked) -> list[Row]:
        """Run named queries, each a transaction of its own, sent in one go; return the rows of the first.

        Past psycopg's cursors, which take a good part of the time of a short statement. What comes behind the first
        is run whatever becomes of that, and its own failure is nobody's. Not behind a pooler: they stay prepared.
        Nor within a transaction: after a rollback, or DROP, psycopg may have the server forget every prepared
        statement, ours too, and what would be repeated here could not be repeated there.
        """
        try:
            return self._answered(asked)
        except errors.InvalidSqlStatementName:  # the server has them no longer
            self._prepared.clear()
            return self._answered(asked)

    def _answered(self, asked: Sequence[Asked]) -> list[Row]:
        sent = self.send(*asked)
        sent.wait()
        return sent.rows()

    def send(self, *asked: Asked) -> "Sent":
        """Send queries as `run_at_once` does; if they are prepared, wait for nothing."""
        connection = self._open()
        return Sent(connection, [(self._prepare(connection, name), values) for name, values in asked])

    def _prepare(self, connection: Session, name: str) -> bytes:
        """Return the name under which the server has a query prepared."""
        if name not in self._prepared:
            self._prepared[name] = own = f"postbus_{name}_{next(_names)}".encode()
            connection.pgconn.send_prepare(own, self._sql[name].encode())
            told = connection.wait(generators.execute(connection.pgconn))[-1]
            if told.status != pq.ExecStatus.COMMAND_OK:
                del self._prepared[name]
                raise _failure(connection, told)
        return self._prepared[name]

    def run_own(self, sql: str, parameters: Any = ()) -> list[Row]:
        """Run a statement of the caller's own, with psycopg's `%s` and the role's search_path, and return its rows."""
        connection = self._connected()
        if not self._lent and self.in_transaction:
            connection.execute("SET LOCAL search_path TO DEFAULT")
            self._lent = True
        cursor = psycopg.Cursor(connection).execute(cast("LiteralString", sql), parameters or None)
        return _fetched(cursor)

    def iterate(self, name: str, parameters: Sequence[Any] = ()) -> Iterator[Row]:
        """Run a named query inside a transaction, fetching more and more at a time as the caller goes on."""
        cursor = f"postbus_{next(_cursors)}"
        self.execute(f"DECLARE {cursor} NO SCROLL CURSOR FOR {self._sql[name]}", parameters)
        size = FIRST_FETCH
        while rows := self.execute(f"FETCH {size} FROM {cursor}"):
            yield from rows
            size = min(2 * size, LONGEST_FETCH)

    def value(self, name: str, parameters: Sequence[Any] = ()) -> Any:
        """Run a named query and return the first column of its first row, or None."""
        rows = self.run(name, parameters)
        return rows[0][0] if rows else None

    def many(self, name: str, parameters: Iterable[Sequence[Any]]) -> list[Row]:
        """Run a named query for all rows of parameters, sent all at once; return all rows it yields."""
        given = list(parameters)
        if not given:
            return []
        if BATCH in self._sql[name]:
            return self.run(name, (orjson.dumps([tuple(row) for row in given]).decode(),))
        cursor = self._open().cursor()
        cursor.executemany(cast("LiteralString", self._sql[name]), given, returning=True)
        found = _fetched(cursor)
        while cursor.nextset():
            found += _fetched(cursor)
        return found

    def count(self, name: str, parameters: Sequence[Any] = ()) -> int:
        """Run a named statement and return how many rows it changed."""
        return self._executed(self._sql[name], parameters).rowcount

    def _open(self) -> Session:
        """Return the connection for a statement of ours."""
        connection = self._connected()
        if self._lent:
            self._lent = False
            if self.in_transaction:
                connection.execute(f"SET LOCAL {PATH}")
        return connection

    def _connected(self) -> Session:
        """Return the connection as it is: inside a transaction, one that was lost must not be replaced."""
        if self._connection is None:
            raise psycopg.OperationalError("the connection was lost")
        return self._connection

    def retire(self) -> None:
        """Close the connection for good: whoever uses it next is told so, and opens none that nobody would close."""
        self._retired = True
        self.close()

    def close(self) -> None:
        """Close the connection; the next use opens another."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(psycopg.Error):
                connection.close()


def _fetched(cursor: psycopg.Cursor[Row]) -> list[Row]:
    """Return the rows of a result that can have any: asked for its description, psycopg would tell of each column."""
    result = cursor.pgresult
    return cursor.fetchall() if result is not None and result.nfields else []


def _is_lost(connection: psycopg.Connection[Row]) -> bool:
    """Return whether an idle connection was closed from the other side: something to read then is its end."""
    if connection.closed:
        return True
    try:
        look = select.poll()
        look.register(connection.fileno(), select.POLLIN)
        while connection.pgconn.status == pq.ConnStatus.OK and look.poll(0):
            connection.pgconn.consume_input()  # perhaps a farewell first, and the end behind it
    except (psycopg.Error, OSError, ValueError):
        return True
    return connection.pgconn.status != pq.ConnStatus.OK


def _failure(connection: psycopg.Connection[Row], result: pq.abc.PGresult) -> psycopg.Error:
    """Return the error that a result tells of."""
    if connection.pgconn.status != pq.ConnStatus.OK:
        return psycopg.OperationalError(result.get_error_message(connection.info.encoding))
    return errors.error_from_result(result, connection.info.encoding)


class Sent:
    """Prepared statements that were sent in one go, each a transaction of its own, and what has come back of them.

    What breaks off in the midst of them closes the connection.
    """

    def __init__(self, connection: Session, asked: Sequence[tuple[bytes, Sequence[Plain]]]) -> None:
        """Send them."""
        self._connection = connection
        self._left = len(asked)
        self._first: pq.abc.PGresult | None = None
        self._found: pq.abc.PGresult | None = None
        self._look = select.poll()
        try:
            self._send(connection.pgconn, asked)
        except BaseException:
            connection.close()
            raise

    def _send(self, server: pq.abc.PGconn, asked: Sequence[tuple[bytes, Sequence[Plain]]]) -> None:
        server.enter_pipeline_mode()
        for name, values in asked:
            server.send_query_prepared(name, [None if each is None else str(each).encode() for each in values])
            server.pipeline_sync()
        self._look.register(server.socket, select.POLLIN | select.POLLOUT)
        while server.flush():  # a large one, of which the server has yet to read
            self._connection.attend(self._look)
            server.consume_input()
        self._look.modify(server.socket, select.POLLIN)

    def wait(self) -> None:
        """Wait until all are answered: perhaps they are, by what was read while much was sent."""
        try:
            while not self._read():
                self._connection.attend(self._look)
        except BaseException as error:
            self._connection.close()
            # Lost behind the first, that is done, and has been answered.
            if self._first is None or not isinstance(error, psycopg.OperationalError):
                raise

    def _read(self) -> bool:
        """Take what statements led to once it is committed: rows come before that is tried; return whether all did."""
        server = self._connection.pgconn
        server.consume_input()
        while not server.is_busy():
            result = server.get_result()
            if result is None:
                if server.status != pq.ConnStatus.OK:
                    raise psycopg.OperationalError("the connection was lost")
            elif result.status == pq.ExecStatus.PIPELINE_SYNC:
                self._first, self._found = self._found if self._first is None else self._first, None
                self._left -= 1
                if not self._left:
                    server.exit_pipeline_mode()
                    return True
            elif self._found is None or self._found.status != pq.ExecStatus.FATAL_ERROR:
                self._found = result
        return False

    def rows(self) -> list[Row]:
        """Return the rows of the first, or raise what it failed with."""
        assert self._first is not None  # noqa: S101  every statement leads to something
        if self._first.status != pq.ExecStatus.TUPLES_OK:
            raise _failure(self._connection, self._first)
        rows = Transformer(self._connection)
        rows.set_pgresult(self._first)
        return rows.load_rows(0, self._first.ntuples, tuple)


def undeadlocked(transaction: Callable[[], R]) -> R:
    """Run a transaction, again where it and another waited for each other: the server has undone it then."""
    for _ in range(DEADLOCKS):
        with suppress(errors.DeadlockDetected):
            return transaction()
    return transaction()
