"""One connection to the bus's PostgreSQL database, made again when it breaks."""

import math
import os
import re
import select
import socket
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import Any, Final, LiteralString, cast
from urllib.parse import SplitResult, parse_qsl, quote, urlencode, urlsplit

import orjson
import psycopg
from psycopg import conninfo, errors, generators, pq
from psycopg.adapt import Transformer
from psycopg.types.numeric import Int8BinaryDumper

from postbus.errors import (
    EventBusShutdownError,
    InvalidEventError,
    InvalidRequest,
    OutcomeUnknown,
    PostbusError,
    SchemaMismatch,
    StoreUnavailable,
    UnsafeStore,
)
from postbus.store.contract import PAGE_BYTES
from postbus.store.queries import load_queries
from postbus.store.session import Row

SCHEMA: Final = re.compile(r"[a-z_][a-z0-9_]{0,47}")
KEYWORDS: Final = re.compile(
    "all|analyse|analyze|and|any|array|as|asc|asymmetric|authorization|binary|both|case|cast|"
    "check|collate|collation|column|concurrently|constraint|create|cross|current_catalog|"
    "current_date|current_role|current_schema|current_time|current_timestamp|current_user|default|"
    "deferrable|desc|distinct|do|else|end|except|false|fetch|for|foreign|freeze|from|full|"
    "grant|group|having|ilike|in|initially|inner|intersect|into|is|isnull|join|lateral|leading|"
    "left|like|limit|localtime|localtimestamp|natural|not|notnull|null|offset|on|only|or|order|"
    "outer|overlaps|placing|primary|references|returning|right|select|session_user|similar|some|"
    "symmetric|system_user|table|tablesample|then|to|trailing|true|union|unique|user|using|"
    "variadic|verbose|when|where|window|with"
)
"""What no schema can be named without quotes: words reserved, or kept for functions and types (PostgreSQL 14 to 18)."""
DEFAULTS: Final = {
    "application_name": "postbus",
    "connect_timeout": "5",
    "tcp_user_timeout": "15000",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "2",
    "target_session_attrs": "primary",
}
TEXT: Final = {"client_encoding": "UTF8"}
"""Whatever the environment, the URL, the role or the database say."""
PLANNER: Final = {f"enable_{name}": "off" for name in ("seqscan", "bitmapscan", "hashjoin", "mergejoin")} | {
    "plan_cache_mode": "force_generic_plan",
    "jit": "off",
}
"""A claim or a settle is a few exact look-ups. A plan made while the tables were small must not be a scan of them, and
since no plan is better for some parameters than for others, none needs to be made twice."""
OURS: Final = (
    r"-c default_transaction_isolation=read\ committed -c standard_conforming_strings=on -c postbus.options=on"
)
"""What the SQL here is written for. The level is for statements that commit themselves; whatever begins a transaction
says it there. The last one shows that options reach the server."""
PATH: Final = "search_path = pg_catalog, pg_temp"
"""No function or operator of the role's own schemas may stand in for one that is meant here."""
LIMITS: Final = {"statement_timeout": "60s", "lock_timeout": "10s", "idle_in_transaction_session_timeout": "5min"}
POOLER: Final = (
    "{}: a pooler such as PgBouncer stands there, which does not pass startup options on: give the address of the "
    "database itself as direct_url (POSTBUS_DIRECT_URL)"
)
POOLER_SAYS: Final = "unsupported startup parameter"
REFUSED: Final = re.compile(
    r"(database|role|user) \".*\" does not exist|no such (database|user)|authentication failed|no password supplied"
    r"|no pg_hba\.conf entry|is not permitted to log in|permission denied for database"
)
"""What a server whose messages are English says, and PgBouncer, of what stays so until somebody changes it."""
HOST: Final = re.compile(r"(\[[0-9a-fA-F:.%]+\]|[^:/@\[\]]*)(:\d*)?")
NO_URL: Final = (
    "this is no PostgreSQL URL such as postgresql://user@host:5432/database; in a password, write / @ # as %2F %40 %23"
)
SESSION: Final = """SELECT pg_catalog.pg_backend_pid(),
    CASE WHEN pg_catalog.current_setting('postbus.options', true) OPERATOR(pg_catalog.=) 'on'
         THEN pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', false) END"""
"""Not a startup option: SET search_path TO DEFAULT is to give the role's own path."""
SILENCE: Final = 5.0
"""After so many seconds without an answer the server is asked whether it lives …"""
ANSWER: Final = 5.0
"""… and given up if it does not say so within so many seconds: a process that was stopped keeps its connections."""
LONGEST: Final = 90.0
"""Seconds after which an answer is not waited for any longer: the server ends every statement before that."""
SSL_REQUEST: Final = bytes.fromhex("00000008 04d2162f")
"""What a server answers before anything else, with one byte."""
BATCH: Final = "jsonb_array_elements($1::jsonb)"
"""What a statement has in it that takes all rows at once."""
FIRST_FETCH: Final = 100
LONGEST_FETCH: Final = 2_000
PREPARE_AFTER: Final = 2
FORGOTTEN: Final = b"26000"
"""There is no prepared statement of that name."""
_cursors = count(1)
_names = count(1)
Plain = str | int | None
Asked = tuple[str, Sequence[Plain]]
"""A named query, and what it is asked with."""


class Unanswered(psycopg.OperationalError):
    """The connection was lost while something was being committed, which may have happened."""

    def __init__(self, told: str, session: "Session") -> None:
        """Name the session that may still be at it."""
        super().__init__(told)
        self.session = session


class Session(psycopg.Connection[Row]):
    """A connection on which nothing is waited for once the server is silent, and does not say that it lives."""

    pid = 0
    """The process in the server, asked of that itself: a pooler tells another number."""
    opened = 0.0
    longest = LONGEST

    def wait(self, gen: Any, *arguments: Any, **options: Any) -> Any:
        """Wait as psycopg does, which says every tenth of a second that nothing has come."""
        return super().wait(self._watched(gen), *arguments, **options)

    def _watched(self, gen: Any) -> Generator[Any, Any, Any]:
        began = heard = time.monotonic()
        try:
            wanted = next(gen)
            while True:
                ready = yield wanted
                now = time.monotonic()
                if ready:
                    began = heard = now
                elif now - heard > SILENCE:
                    self._require_life(now - began)
                    heard = time.monotonic()
                wanted = gen.send(ready)
        except StopIteration as end:
            return end.value

    def attend(self, look: select.poll) -> None:
        """Wait until a poll of this connection tells something."""
        began = time.monotonic()
        while not look.poll(SILENCE * 1000):
            self._require_life(time.monotonic() - began)

    def _require_life(self, silent: float) -> None:
        """Raise OperationalError, closed, for a server that has been silent and will probably stay so."""
        if silent > self.longest or not self._lives():
            self.close()
            raise psycopg.OperationalError(f"the server has not answered for {silent:.0f} s")

    def _lives(self) -> bool:
        return lives(self.info.hostaddr or self.info.host, self.info.port)


def lives(host: str, port: int) -> bool:
    """Return whether a server says anything, be it that it takes no more connections."""
    by_file = host.startswith(("/", "@"))
    try:
        with socket.socket(socket.AF_UNIX) if by_file else socket.create_connection((host, port), ANSWER) as wire:
            wire.settimeout(ANSWER)
            if by_file:
                wire.connect(f"{host.replace('@', chr(0), 1)}/.s.PGSQL.{port}")
            wire.sendall(SSL_REQUEST)
            return bool(wire.recv(1))
    except OSError:
        return False


@dataclass(frozen=True, slots=True)
class Address:
    """Where the database is, and the schema in it. Shows no secret, whoever prints it."""

    shown: str
    schema: str
    pooled: bool
    """Behind a transaction pooler: nothing may be kept in the session, and nothing prepared."""
    _url: str

    def __repr__(self) -> str:
        """Return the address as it may be shown."""
        return self.shown

    @classmethod
    def of(cls, url: str, *, pooled: bool = False) -> "Address":
        """Read a `postgresql://` URL, in which `?schema=` may name another schema than postbus.

        Raises InvalidRequest without repeating the URL, which may hold a password.
        """
        parts = _parts(url)
        query = parse_qsl(parts.query, keep_blank_values=True)
        schema = next((value for name, value in query if name == "schema"), "postbus")
        if not SCHEMA.fullmatch(schema) or schema.startswith("pg_"):
            raise InvalidRequest("schema= in the URL must be a plain lower-case name, which does not begin with pg_")
        if KEYWORDS.fullmatch(schema):
            raise InvalidRequest(
                f"schema={schema} in the URL is a keyword of SQL: choose another name, as {schema}_bus"
            )
        others = urlencode([pair for pair in query if pair[0] != "schema"], quote_via=quote)
        rest = url.partition("?")[0] + (f"?{others}" if others else "")
        try:
            read = conninfo.conninfo_to_dict(rest)
        except (psycopg.Error, UnicodeError):  # the latter for %99, and it shows what it could not read
            raise InvalidRequest(NO_URL) from None
        return cls(_shown(parts, read, schema), schema, pooled, rest)

    @property
    def libpq(self) -> str:
        """The address as other clients of PostgreSQL take it, with our limits, secrets and all."""
        return conninfo.make_conninfo(**self._wanted)

    @property
    def _wanted(self) -> dict[str, Any]:
        given = conninfo.conninfo_to_dict(self._url)
        return {**DEFAULTS, **{name: value for name, value in given.items() if value is not None}, **TEXT}

    def connect(self) -> Session:
        """Open a connection; raise StoreUnavailable, InvalidRequest, UnsafeStore."""
        wanted = self._wanted
        given = str(wanted.get("options") or "")
        if not self.pooled:
            settings = " ".join(f"-c {name}={value}" for name, value in {**PLANNER, **LIMITS}.items())
            wanted["options"] = f"{settings} {given} {OURS}"  # the last one counts
        try:
            connection = Session.connect(
                **wanted,
                autocommit=True,
                prepare_threshold=None if self.pooled else PREPARE_AFTER,
                cursor_factory=psycopg.RawCursor,
            )
            connection.opened = time.monotonic()
            if "statement_timeout" in given:
                connection.longest = math.inf
            if not self.pooled:
                self._begin_session(connection)
        except psycopg.Error as error:
            raise _refused(self.shown, error) or translate(self.shown, error) from None
        connection.adapters.register_dumper(int, Int8BinaryDumper)
        return connection

    def _begin_session(self, connection: Session) -> None:
        with ExitStack() as failed:
            failed.callback(connection.close)
            connection.pid, path = connection.execute(SESSION).fetchall()[0]
            if path is None:
                raise InvalidRequest(POOLER.format(self.shown))
            failed.pop_all()


def _refused(shown: str, error: psycopg.Error) -> PostbusError | None:
    """Return the error to raise where trying again is of no use: libpq tells no SQLSTATE of a failed connection."""
    told = str(error).partition("\n")[0]
    if POOLER_SAYS in told:
        return InvalidRequest(POOLER.format(shown))
    if REFUSED.search(told) or (error.pgconn is not None and error.pgconn.needs_password):
        return UnsafeStore(f"{shown}: {told}: correct the address, the password, or what the server allows")
    return None


def _parts(url: str) -> SplitResult:
    """Split a URL; raise InvalidRequest, repeating none of it, where a bare /, @ or # in a password would mislead."""
    try:
        parts = urlsplit(url)
    except ValueError:
        raise InvalidRequest(NO_URL) from None
    user, _, hosts = parts.netloc.rpartition("@")
    misled = "@" in user or "@" in parts.path or "#" in url or not url.isprintable()
    if misled or not all(HOST.fullmatch(host) for host in hosts.split(",")):
        raise InvalidRequest(NO_URL)
    return parts


def _shown(parts: SplitResult, read: Mapping[str, Any], schema: str) -> str:
    """Return an address that leads there, without what is secret or of no interest."""
    host, hosts = str(read.get("host") or ""), parts.netloc.rpartition("@")[2]
    extra = {"host": host} if host and not hosts else {}
    extra |= {"schema": schema} if schema != "postbus" else {}
    query = f"?{urlencode(extra, safe='/,')}" if extra else ""
    user, name = str(read.get("user") or ""), str(read.get("dbname") or "")
    return f"postgresql://{f'{quote(user)}@' if user else ''}{hosts}/{quote(name)}{query}"


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

    def __init__(self, address: Address, *, on_rollback: Callable[[], None] = lambda: None) -> None:
        """Connect at the first use, and anew whenever the connection was lost."""
        self._address = address
        self._sql = localized(address.schema)
        self._on_rollback = on_rollback
        self._connection: Session | None = None
        self._prepared: dict[str, bytes] = {}
        """What `run_at_once` has prepared, and under which name."""
        local = "".join(f"; SET LOCAL {name} = '{value}'" for name, value in {**PLANNER, **LIMITS}.items())
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
        self._on_rollback()

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

    @contextmanager
    def settled(self) -> Generator[None]:
        """Have a statement run with our settings: behind a pooler these need a transaction to hold in."""
        if not self._address.pooled:
            self.ready()
            yield
            return
        try:
            self.begin()
            yield
            self._end()
        except BaseException:
            self.rollback()
            raise

    @contextmanager
    def snapshot(self) -> Generator[None]:
        """Read as of one moment until the end of the block."""
        self._begin("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        try:
            yield
        except BaseException:
            self.rollback()
            raise
        self._end()

    def commit(self) -> None:
        """Make the transaction durable; raise if it was lost, or if an error had spoilt it and COMMIT undoes it."""
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
        self._on_rollback()
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
        cursor = self._open().execute(cast("LiteralString", sql), parameters or None)
        return _fetched(cursor)

    rows = run

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
        sent = self._answered(asked)
        if sent.is_forgotten:
            self.forget_prepared()
            sent = self._answered(asked)
        return sent.rows()

    def forget_prepared(self) -> None:
        """Prepare anew what the server no longer has."""
        self._prepared.clear()

    def _answered(self, asked: Sequence[Asked]) -> "Sent":
        connection = self._open()
        sent = self.send(*asked)
        try:
            sent.wait()
        except BaseException:
            connection.close()  # in the midst of something
            raise
        return sent

    def send(self, *asked: Asked) -> "Sent":
        """Send queries as `run_at_once` does; if they are prepared, wait for nothing."""
        connection = self._open()
        names = [self._prepare(connection, name) for name, _ in asked]
        try:
            return Sent(connection, [(name, values) for name, (_, values) in zip(names, asked, strict=True)])
        except BaseException:
            connection.close()
            raise

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
        row = self._open().execute(cast("LiteralString", self._sql[name]), parameters or None).fetchone()
        return None if row is None else row[0]

    def many(self, name: str, parameters: Iterable[Sequence[Any]]) -> list[Row]:
        """Run a named query for all rows of parameters, sent all at once; return all rows it yields."""
        given = list(parameters)
        found: list[Row] = []
        if given and BATCH in self._sql[name]:
            return self.run(name, (orjson.dumps([tuple(row) for row in given]).decode(),))
        if given:
            cursor = self._open().cursor()
            cursor.executemany(cast("LiteralString", self._sql[name]), given, returning=True)
            found += _fetched(cursor)
            while cursor.nextset():
                found += _fetched(cursor)
        return found

    def count(self, name: str, parameters: Sequence[Any] = ()) -> int:
        """Run a named statement and return how many rows it changed."""
        return self._open().execute(cast("LiteralString", self._sql[name]), parameters or None).rowcount

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
    """Prepared statements that were sent in one go, each a transaction of its own, and what has come back of them."""

    def __init__(self, connection: Session, asked: Sequence[tuple[bytes, Sequence[Plain]]]) -> None:
        """Send them."""
        self._connection = connection
        self._left = len(asked)
        self._first: pq.abc.PGresult | None = None
        self._found: pq.abc.PGresult | None = None
        self._look = select.poll()
        server = connection.pgconn
        server.enter_pipeline_mode()
        for name, values in asked:
            server.send_query_prepared(name, [None if each is None else str(each).encode() for each in values])
            server.pipeline_sync()
        self._look.register(server.socket, select.POLLIN | select.POLLOUT)
        while server.flush():  # a large one, of which the server has yet to read
            connection.attend(self._look)
            server.consume_input()
        self._look.modify(server.socket, select.POLLIN)

    def fileno(self) -> int:
        """Return where the answers come in."""
        return self._connection.pgconn.socket

    def wait(self) -> None:
        """Wait until all are answered: perhaps they are, by what was read while much was sent."""
        while not self.is_answered():
            self._connection.attend(self._look)

    def is_answered(self) -> bool:
        """Read what has come, and return whether that is all; raise OperationalError if the first is unanswered."""
        try:
            return self._read()
        except psycopg.OperationalError:
            if self._first is None:
                raise
            self._connection.close()  # lost behind the first, which is done and has been answered
            return True

    def _read(self) -> bool:
        """Take what statements led to once it is committed: rows come before that is tried."""
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

    @property
    def is_forgotten(self) -> bool:
        """Whether the first was refused because the server has it no longer prepared."""
        return self._field(pq.DiagnosticField.SQLSTATE) == FORGOTTEN

    def _field(self, field: pq.DiagnosticField) -> bytes | None:
        first = self._first
        return None if first is None or first.status != pq.ExecStatus.FATAL_ERROR else first.error_field(field)

    def extent(self) -> tuple[int, int]:
        """Return how many rows the first has led to, and the number that the last of them begins with, if any."""
        count = 0 if self._first is None else self._first.ntuples
        last = self._first.get_value(count - 1, 0) if self._first is not None and count else None
        return count, int(last or 0)

    def rows(self) -> list[Row]:
        """Return the rows of the first, or raise what it failed with."""
        assert self._first is not None  # noqa: S101  every statement leads to something
        if self._first.status != pq.ExecStatus.TUPLES_OK:
            raise _failure(self._connection, self._first)
        rows = Transformer(self._connection)
        rows.set_pgresult(self._first)
        return rows.load_rows(0, self._first.ntuples, tuple)


@contextmanager
def translated(shown: str) -> Generator[None]:
    """Turn PostgreSQL's errors into postbus's for the length of a block."""
    try:
        yield
    except psycopg.Error as error:
        told = translate(shown, error)
        if told is error:
            raise
        raise told from error


def translate(shown: str, error: psycopg.Error) -> PostbusError | psycopg.Error:  # noqa: PLR0911  a table
    """Return the error postbus raises for one of PostgreSQL's: what happened where, and what to do."""
    told = str(error).strip().partition("\n")[0]
    match error:
        case errors.InsufficientPrivilege():
            return UnsafeStore(f"{shown}: {told}: see `postbus migrate --roles`")
        case errors.UndefinedTable() | errors.UndefinedFunction() | errors.InvalidSchemaName():
            return SchemaMismatch(f"{shown}: {told}: run `postbus migrate`")
        case errors.DataCorrupted() | errors.IndexCorrupted():
            return UnsafeStore(f"{shown} is damaged ({told}): restore it from a backup")
        case errors.QueryCanceled() | errors.LockNotAvailable():
            return StoreUnavailable(f"{shown}: waited too long ({told}); nothing was stored")
        case errors.ReadOnlySqlTransaction():
            return UnsafeStore(f"{shown} is read-only ({told}): connect to the primary")
        case Unanswered():
            how = "an event with a uid of yours is stored once if you publish it again; look before you repeat others"
            return OutcomeUnknown(f"{shown}: the answer to a commit was lost, which may have happened ({told}): {how}")
        case psycopg.OperationalError() | psycopg.InterfaceError():
            return StoreUnavailable(f"{shown} cannot be used now, or was lost in the midst of it ({told})")
        case psycopg.Error(sqlstate="PB003"):
            return StoreUnavailable(f"{shown}: {told}")
        case psycopg.Error(sqlstate="PB001" | "PB002"):
            return InvalidEventError(told)
        case _:
            return error
