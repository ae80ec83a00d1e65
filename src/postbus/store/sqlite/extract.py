"""The tables of the SQLite file as Arrow, read by the one SQLite library that may open it."""

# pyright: basic
# Arrow comes without types.
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from postbus.errors import UnsafeStore
from postbus.model import State, Status
from postbus.store.audit import entry_columns
from postbus.store.catalog import Catalog, kind_of
from postbus.store.contract import PAGE_BYTES
from postbus.store.deliveries import block_from_row
from postbus.store.extract import RELATIONS, to_batch
from postbus.store.records import checksum, decoding, json_array
from postbus.store.session import Row
from postbus.store.sqlite.connection import Database, translated

CHUNK: Final = 10_000
SIGNED: Final = ("uid", "type", "tags", "payload", "checksum")
"""What an event's checksum is made of, and the checksum."""


def extract(path: Path, relation: str, columns: Sequence[str], after: int, through: int) -> Iterator[pa.RecordBatch]:
    """Go through the rows of a range of ids in order; raise UnsafeStore at one that was damaged on disk.

    Unfinished deliveries come subscription by subscription, each in order, as they stand at one moment.
    """
    with translated(path), decoding():
        db = Database(path, readonly=True)
        try:
            with db.snapshot():
                if relation == "events":
                    yield from _events(db, columns, after, through)
                    return
                catalog = Catalog()
                catalog.refresh(db)
                read = _entries if relation == "audit" else _standing
                yield from read(db, catalog, columns, after, through)
        finally:
            db.close()


def _batch(relation: str, columns: Sequence[str], values: Sequence[Sequence[Any]]) -> pa.RecordBatch:
    arrays = (_array(relation, name, each) for name, each in zip(columns, values, strict=True))
    return to_batch(relation, columns, arrays)


def _events(db: Database, columns: Sequence[str], after: int, through: int) -> Iterator[pa.RecordBatch]:
    verified = "payload" in columns
    asked = [*columns, *(SIGNED if verified else ())]
    sql = f"SELECT {', '.join(asked)} FROM events WHERE id > ? AND id <= ? ORDER BY id"  # noqa: S608  ours
    rows = db.go_through(sql, (after, through))
    while chunk := _some(rows):
        if verified:
            _verify(chunk)
        yield _batch("events", columns, list(zip(*chunk, strict=True))[: len(columns)])


def _entries(
    db: Database, catalog: Catalog, columns: Sequence[str], after: int, through: int
) -> Iterator[pa.RecordBatch]:
    """Go through the entries of a range; either end of it may lie within a row. By column: most rows are arrays."""
    places = [RELATIONS["audit"].get_field_index(name) for name in columns]
    found: list[list[Any]] = [[] for _ in places]
    size = 0
    for row in db.iterate("audit_rows", (after, through)):
        part = slice(max(0, after + 1 - row[0]), through + 1 - row[0])
        entries = entry_columns((*row[:2], catalog.name(row[2]), *row[3:]))
        for values, place in zip(found, places, strict=True):
            values.extend(entries[place][part])
        size += len(row[11] or "") + len(row[20] or "")
        if len(found[0]) >= CHUNK or size >= PAGE_BYTES:
            yield _batch("audit", columns, found)
            found, size = [[] for _ in places], 0
    if found[0]:
        yield _batch("audit", columns, found)


def _standing(
    db: Database, catalog: Catalog, columns: Sequence[str], after: int, through: int
) -> Iterator[pa.RecordBatch]:
    places = [RELATIONS["deliveries"].get_field_index(name) for name in columns]
    rows = _deliveries(db, catalog, after, through)
    while chunk := _some(rows):
        yield _batch("deliveries", columns, [[row[place] for row in chunk] for place in places])


def _deliveries(db: Database, catalog: Catalog, after: int, through: int) -> Iterator[Row]:
    """Go through what each subscription has not finished, in the columns of the relation."""
    for subscription in catalog.subscriptions():
        name = subscription.name
        number = catalog.number(name)
        leased = {
            block.ids[place]: block
            for block in map(block_from_row, db.rows("blocks_around", (number, after + 1, through)))
            for place in block.left()
            if after < block.ids[place] <= through
        }
        for event_id, state, type_, tags, priority, created_at, due_at, *rest in db.iterate(
            "standing_rows", (number, after, through)
        ):
            block = leased.pop(event_id, None)
            due = due_at if block is None else block.due_at
            yield event_id, name, State(state).status, type_, tags, priority, created_at, due, *rest
        for event_id, type_, tags, priority, ready_at, _, created_at in db.rows("stories", (json_array(leased),)):
            block, told = leased[event_id], kind_of(type_, tags)
            yield (
                event_id, name, Status.PROCESSING, told.type, told.tags, priority, created_at, block.due_at, ready_at,
                block.claimed_at, block.claimed_at, 1, 0, block.worker_id, None, None,
            )  # fmt: skip
        for event_id, type_, tags, priority, created_at, due_at in db.iterate(
            "standing_above", (number, after, through)
        ):
            if catalog.wants(name, type_, tags):
                yield (
                    event_id, name, Status.PENDING, type_, kind_of(type_, tags).tags, priority, created_at, due_at,
                    due_at, created_at, None, 0, 0, None, None, None,
                )  # fmt: skip


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


def _array(relation: str, name: str, values: Sequence[Any]) -> Any:
    kind = RELATIONS[relation].field(name).type
    if name in ("tags", "metadata"):
        return pa.array(values, pa.string())
    return pa.array(values, pa.int64()).cast(kind) if pa.types.is_timestamp(kind) else pa.array(values, kind)


def _verify(rows: list[Row]) -> None:
    for row in rows:
        uid, kind, tags, payload, expected = row[-5:]
        if checksum(uid, kind, tags, payload) != expected:
            raise UnsafeStore(f"the event with uid {uid!r:.80} was damaged on disk: restore it from a backup")
