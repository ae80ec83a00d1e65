"""The tables of the SQLite file as Arrow, read by the one SQLite library that may open it."""

# pyright: basic
# Arrow comes without types.
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from postbus.errors import UnsafeStore
from postbus.store.contract import PAGE_BYTES
from postbus.store.extract import RELATIONS, to_batch
from postbus.store.records import checksum
from postbus.store.session import Row
from postbus.store.sqlite.connection import Database, translated

__all__ = ["extract"]

CHUNK: Final = 10_000
SIGNED: Final = ("uid", "type", "tags", "payload", "checksum")
"""What an event's checksum is made of, and the checksum."""
FROM: Final = {
    "events": ("events", "id"),
    "audit": ("event_log", "id"),
    "deliveries": (
        (
            "(SELECT d.*, CASE d.state WHEN 1 THEN 'PROCESSING' WHEN 2 THEN 'FAILED' ELSE 'PENDING' END AS status, "
            "r.type, r.tags, r.priority FROM deliveries AS d LEFT JOIN routes AS r ON r.id = d.route)"
        ),
        "event_id",
    ),
}


def extract(path: Path, relation: str, columns: Sequence[str], after: int, through: int) -> Iterator[pa.RecordBatch]:
    """Go through the rows of a range of ids in order; raise UnsafeStore at one that was damaged on disk."""
    verified = relation == "events" and "payload" in columns
    asked = [*columns, *(SIGNED if verified else ())]
    table, key = FROM[relation]
    sql = f"SELECT {', '.join(asked)} FROM {table} WHERE {key} > ? AND {key} <= ? ORDER BY {key}"  # noqa: S608  ours
    with translated(path):
        db = Database(path, readonly=True)
        try:
            rows = db.go_through(sql, (after, through))
            while chunk := _some(rows):
                if verified:
                    _verify(chunk)
                arrays = zip(columns, zip(*chunk, strict=True), strict=False)
                yield to_batch(relation, columns, (_array(relation, name, values) for name, values in arrays))
        finally:
            db.close()


def _some(rows: Iterator[Row]) -> list[Row]:
    """Return the next rows: so many, and of large ones as many as fit into a page."""
    found: list[Row] = []
    size = 0
    for row in islice(rows, CHUNK):
        found.append(row)
        size += sum(len(value) for value in row if type(value) is str)
        if size >= PAGE_BYTES:
            break
    return found


def _array(relation: str, name: str, values: tuple[Any, ...]) -> Any:
    kind = RELATIONS[relation].field(name).type
    if name in ("tags", "metadata"):
        return pa.array(values, pa.string())
    return pa.array(values, pa.int64()).cast(kind) if pa.types.is_timestamp(kind) else pa.array(values, kind)


def _verify(rows: list[Row]) -> None:
    for row in rows:
        uid, kind, tags, payload, expected = row[-5:]
        if checksum(uid, kind, tags, payload) != expected:
            raise UnsafeStore(f"the event with uid {uid!r:.80} was damaged on disk: restore it from a backup")
