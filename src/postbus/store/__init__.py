"""Where the bus lives: one contract, and a store for each kind of database."""

from pathlib import Path
from urllib.parse import unquote, urlsplit

from postbus.clock import Clock, SystemClock
from postbus.errors import InvalidRequest
from postbus.store.contract import Store
from postbus.store.queries import load_migrations
from postbus.store.sqlite.store import SqliteStore

__all__ = ["Store", "exists", "migration_script", "open_store"]


def open_store(url: str, *, clock: Clock | None = None, auto_migrate: bool = True) -> Store:
    """Open the store a URL names: `sqlite:///relative.db` or `sqlite:////absolute.db`.

    Raises InvalidRequest for any other URL, SchemaMismatch when it must be migrated and `auto_migrate` is off.
    """
    return SqliteStore(_path(url), clock or SystemClock(), auto_migrate=auto_migrate)


def exists(url: str) -> bool:
    """Return whether there is something at a URL to open, making nothing."""
    return _path(url).exists()


def migration_script(url: str) -> str:
    """Return the SQL that makes the schema at a URL from nothing, without opening anything."""
    _path(url)
    return "\n".join(
        f"-- {name}\n{sql.rstrip()}\nPRAGMA user_version = {number};\n"
        for number, name, sql in load_migrations("postbus.store.sqlite")
    )


def _path(url: str) -> Path:
    parts = urlsplit(url)
    if parts.scheme != "sqlite":
        raise InvalidRequest(f"postbus knows sqlite:/// URLs, not {parts.scheme or url[:20]!r}")
    path = unquote(parts.path.removeprefix("/"))
    if parts.netloc or not path:
        raise InvalidRequest("a SQLite URL has three slashes and a file: sqlite:///shop.db")
    if path == ":memory:":
        raise InvalidRequest("an in-memory database would lose every event: name a file")
    return Path(path)
