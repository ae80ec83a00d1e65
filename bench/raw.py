"""The limit: apsw alone, writing the very rows that postbus writes, into the same schema with the same durability.

The rows are not imitated. postbus publishes into a file of its own; what it stored there is read back, and inserting
exactly that into a second, empty store is timed. Whatever the schema becomes, this stays the same work.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import apsw

from bench import load
from postbus import EventBus
from postbus.store import open_store

__all__ = ["insert_batches", "insert_large", "insert_singly"]

Row = tuple[Any, ...]
KEYS: Final = {"events": "id", "deliveries": "event_id"}
WARM_UP: Final = 20


def insert_batches(batches: int, size: int) -> dict[str, float]:
    """Insert batches, a transaction each, with executemany."""
    stored = _Stored([load.events(size) for _ in range(batches + 1)])
    return {"rate": batches * size / _timed(stored, 1)}


def insert_singly(count: int) -> dict[str, float]:
    """Insert events one at a time, a commit each."""
    stored = _Stored([[event] for event in load.events(count + WARM_UP)])
    return {"rate": count / _timed(stored, WARM_UP)}


def insert_large(count: int, kind: str) -> dict[str, float]:
    """Insert payloads of 100 kB one at a time, a commit each; `kind` names the maker in `load`."""
    make: Callable[[], Any] = getattr(load, kind)
    stored = _Stored([[{"type": load.TYPE, "payload": make()}] for _ in range(count + WARM_UP)])
    return {"seconds": _timed(stored, WARM_UP) / count}


class _Stored:
    """What postbus stores for some batches: for each, the rows of each table."""

    def __init__(self, batches: Sequence[Sequence[dict[str, Any]]]) -> None:
        bus = EventBus("sqlite:///model.db")
        ends = [bus.publish_many(batch)[-1].id for batch in batches]
        bus.shutdown()
        source = apsw.Connection("model.db", flags=apsw.SQLITE_OPEN_READONLY)
        self.columns = {table: _meaningful(source, table) for table in KEYS}
        self.batches = [self._rows(source, begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
        source.close()

    def _rows(self, source: apsw.Connection, begin: int, end: int) -> list[list[Row]]:
        return [
            source.execute(
                f"SELECT {', '.join(self.columns[table])} FROM {table} WHERE {key} > ? AND {key} <= ?",  # noqa: S608  names of our own tables
                (begin, end),
            ).fetchall()
            for table, key in KEYS.items()
        ]

    def statements(self) -> list[str]:
        return [
            f"INSERT INTO {table} ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})"  # noqa: S608  likewise
            for table, names in self.columns.items()
        ]


def _meaningful(source: apsw.Connection, table: str) -> list[str]:
    """Return the columns that do not just hold their default: the limit must not write more than it has to."""
    columns = source.execute("SELECT name, coalesce(dflt_value, 'NULL') FROM pragma_table_info(?)", (table,)).fetchall()
    return [
        str(name)
        for name, default in columns
        if source.execute(f"SELECT 1 FROM {table} WHERE {name} IS NOT {default} LIMIT 1").fetchall()  # noqa: S608  likewise
    ]


def _timed(stored: _Stored, warm_up: int) -> float:
    """Return the seconds that all batches but the first few take."""
    open_store("sqlite:///raw.db").close()
    db = _connect(Path("raw.db"))
    statements = stored.statements()
    for batch in stored.batches[:warm_up]:
        _insert(db, statements, batch)
    began = time.perf_counter()
    for batch in stored.batches[warm_up:]:
        _insert(db, statements, batch)
    took = time.perf_counter() - began
    db.close()
    return took


def _insert(db: apsw.Connection, statements: Sequence[str], batch: Sequence[Sequence[Row]]) -> None:
    db.execute("BEGIN IMMEDIATE")
    for statement, rows in zip(statements, batch, strict=True):
        if len(rows) == 1:
            db.execute(statement, rows[0])
        else:
            db.executemany(statement, rows)
    db.execute("COMMIT")


def _connect(path: Path) -> apsw.Connection:
    """Open with the settings of the store, as far as they decide about durability and caching."""
    db = apsw.Connection(str(path))
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "wal_autocheckpoint=4000", "cache_size=-65536"):
        db.execute(f"PRAGMA {pragma}")
    return db
