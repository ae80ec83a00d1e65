"""Where a PostgreSQL database is, a session with it that waits for no silent server, and what its errors mean."""

import math
import re
import select
import socket
import time
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import SplitResult, parse_qsl, quote, urlencode, urlsplit

import psycopg
from psycopg import conninfo, errors
from psycopg.types.numeric import Int8BinaryDumper

from postbus.errors import (
    InvalidEventError,
    InvalidRequest,
    OutcomeUnknown,
    PostbusError,
    SchemaMismatch,
    StoreUnavailable,
    UnsafeStore,
)
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
SETTINGS: Final = PLANNER | LIMITS
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
HOST: Final = re.compile(r"(\[[0-9a-fA-F:.%]+\]|[^:/@\[\]]*)(:\d*)?")
NO_URL: Final = (
    "this is no PostgreSQL URL such as postgresql://user@host:5432/database; in a password, write / @ # as %2F %40 %23"
)
PREPARE_AFTER: Final = 2


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
        """Open a session; raise StoreUnavailable, InvalidRequest, UnsafeStore."""
        wanted = self._wanted
        given = str(wanted.get("options") or "")
        if not self.pooled:
            settings = " ".join(f"-c {name}={value}" for name, value in SETTINGS.items())
            wanted["options"] = f"{settings} {given} {OURS}"  # the last one counts
        try:
            session = Session.connect(
                **wanted,
                autocommit=True,
                prepare_threshold=None if self.pooled else PREPARE_AFTER,
                cursor_factory=psycopg.RawCursor,
            )
            session.opened = time.monotonic()
            if "statement_timeout" in given:
                session.longest = math.inf
            if not self.pooled:
                self._begin(session)
        except psycopg.Error as error:
            raise _refused(self.shown, error) or translate(self.shown, error) from None
        session.adapters.register_dumper(int, Int8BinaryDumper)
        return session

    def _begin(self, session: Session) -> None:
        with ExitStack() as failed:
            failed.callback(session.close)
            session.pid, path = session.execute(SESSION).fetchall()[0]
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
