"""Where the bus lives: one contract, and a store for each kind of database."""

import errno
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from pathlib import Path
from typing import Any, Final, TypeGuard
from urllib.parse import unquote

from postbus.clock import Clock, SystemClock
from postbus.errors import InvalidRequest
from postbus.store.base import SqlStore
from postbus.store.contract import Log, Queue, needs_database
from postbus.store.queries import load_migrations
from postbus.store.source import Columns, Source
from postbus.store.sqlite import source as sqlite_source
from postbus.store.sqlite.store import SqliteStore

__all__ = [
    "Log",
    "Queue",
    "as_arrow",
    "exists",
    "grant_roles",
    "is_file",
    "is_log",
    "is_server",
    "log_of",
    "migration_script",
    "open_source",
    "open_store",
    "roles_script",
    "shown",
]

POSTGRES: Final = frozenset({"postgresql", "postgres"})
SERVERS: Final = frozenset({"http", "https"})
NOT_IN_PATH: Final = re.compile(r"[?#\x00-\x1f\x7f]|%(?![0-9A-Fa-f]{2})|%[01][0-9A-Fa-f]|%7[Ff]")
"""In the path of a SQLite URL: what begins options, control characters, bare or escaped, and % without two digits."""


def open_store(
    url: str,
    *,
    clock: Clock | None = None,
    auto_migrate: bool = True,
    direct_url: str | None = None,
    listen: bool = True,
    token: str | None = None,
) -> Queue:
    """Open the store a URL names: `sqlite:///relative.db`, `sqlite:////absolute.db`, `postgresql://user@host/database`.

    Or `http://host:port`: the store of a postbus server there, asked with `token`. `direct_url` and `listen` concern
    PostgreSQL alone, `clock` SQLite alone: a server decides by its own.
    Raises InvalidRequest for any other URL, SchemaMismatch when it must be migrated and `auto_migrate` is off.
    """
    if _is_postgres(url):
        return _postgres().PostgresStore(url, auto_migrate=auto_migrate, direct_url=direct_url, listen=listen)
    if is_server(url):
        from postbus.store.remote.store import RemoteStore  # noqa: PLC0415  only where a server is asked

        return RemoteStore(url, token)
    return SqliteStore(_path(url), clock or SystemClock(), auto_migrate=auto_migrate)


def is_log(store: Queue) -> TypeGuard[Log]:
    """Return whether a store is a database, with no server in between."""
    return isinstance(store, SqlStore)


def log_of(store: Queue, what: str = "this") -> Log:
    """Return a store as the database that `what` needs; raise InvalidRequest where a server stands between."""
    if isinstance(store, SqlStore):
        return store
    raise needs_database(what)


def open_source(url: str, table: str, columns: Columns) -> AbstractContextManager[Source]:
    """Open a table that is at a URL already, to be read as of one moment; raise NotFound, InvalidRequest."""
    if _is_postgres(url):
        return _postgres("source").open_source(url, table, columns)
    return sqlite_source.open_source(_path(url), table, columns)


def as_arrow(url: str, relation: str, columns: Sequence[str], after: int, through: int) -> Iterator[Any]:
    """Go through a range of ids of `events`, `audit` or `deliveries` as Arrow batches.

    Their columns stand in `RELATIONS` of `postbus.store.extract`.
    """
    if _is_postgres(url):
        return _postgres("extract").extract(_postgres("address").Address.of(url), relation, columns, after, through)
    return import_module("postbus.store.sqlite.extract").extract(_path(url), relation, columns, after, through)


def is_file(url: str) -> bool:
    """Return whether a URL names a file, which only processes on its own host can open."""
    return not (_is_postgres(url) or is_server(url))


def is_server(url: str) -> bool:
    """Return whether a URL names a postbus server, not a database."""
    return url.partition("://")[0] in SERVERS


def exists(url: str) -> bool:
    """Return whether there is something at a URL to open, making nothing; a server is always there to be asked."""
    return _is_postgres(url) or is_server(url) or _path(url).exists()


def shown(url: str) -> str:
    """Return a URL as it may be shown: without any secret."""
    if is_server(url):
        return import_module("postbus.store.remote.link").checked(url)
    return _postgres("address").Address.of(url).shown if _is_postgres(url) else f"sqlite:///{_path(url)}"


def migration_script(url: str) -> str:
    """Return the SQL that makes the schema at a URL from nothing, without opening anything."""
    if _is_postgres(url):
        return _postgres("schema").migration_script(url)
    _path(url)
    return "\n".join(
        f"-- {name}\n{sql.rstrip()}\nPRAGMA user_version = {number};\n"
        for number, name, sql in load_migrations("postbus.store.sqlite")
    )


def roles_script(url: str) -> str:
    """Return the SQL for least-privilege roles, without opening anything; raise InvalidRequest where there are none."""
    return _roles_of(url).roles_script(url)


def grant_roles(url: str) -> None:
    """Make the least-privilege roles at a URL and grant them what they need; raise InvalidRequest as above."""
    _roles_of(url).grant_roles(url)


def _roles_of(url: str) -> Any:
    if _is_postgres(url):
        return _postgres("schema")
    _path(url)
    raise InvalidRequest(
        f"{shown(url)} has no roles: who may read the file may read the bus, who may write it may write"
    )


def _postgres(module: str = "store") -> Any:
    """Return a module of the PostgreSQL store: psycopg is wanted only where it is used."""
    try:
        return import_module(f"postbus.store.postgres.{module}")
    except ImportError as error:
        raise InvalidRequest(f"PostgreSQL needs its driver: pip install 'postbus[postgres]' ({error})") from None


def _is_postgres(url: str) -> bool:
    return url.partition("://")[0] in POSTGRES


def _path(url: str) -> Path:
    if not url.startswith("sqlite:"):
        if is_server(url):
            raise InvalidRequest("this needs the database itself: give its sqlite:/// or postgresql:// URL")
        scheme = url.partition(":")[0] if ":" in url else ""
        raise InvalidRequest(f"postbus knows sqlite:///, postgresql:// and http:// URLs, not {scheme[:20] or 'this'!r}")
    text = url.removeprefix("sqlite:///")
    if text in (url, ""):
        raise InvalidRequest("a SQLite URL has three slashes and a file: sqlite:///shop.db")
    if found := NOT_IN_PATH.search(text):
        raise InvalidRequest(
            f"a SQLite URL names a file and takes no options: {found[0]!r} after {text[: found.start()]!r} is not "
            "allowed; in the name of a file write % as %25, ? as %3F and # as %23"
        )
    try:
        path = unquote(text, errors="strict")
        path.encode()
    except UnicodeError:
        raise InvalidRequest("the file name in a SQLite URL is not UTF-8 after its %-escapes are decoded") from None
    try:
        os.stat(path)  # noqa: PTH116  what it says of a loop is the same in every Python
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise InvalidRequest(f"{path} is a loop of symbolic links: name a file") from None
    if path == ":memory:":
        raise InvalidRequest("an in-memory database would lose every event: name a file")
    return Path(path)
