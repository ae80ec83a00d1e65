"""The audit log: what happened to which event, when, by whom. A row of it is one entry, or an array of entries."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from postbus.clock import from_micros
from postbus.model import Action, LogEntry, Status
from postbus.store.arrays import pack, pack_floats, unpack, unpack_floats
from postbus.store.contract import PAGE_BYTES
from postbus.store.records import decoding, json_array
from postbus.store.session import Row, Session

PLACE_BITS: Final = 10
"""An epoch is the number of a block and, in its lowest bits, a place in it; an entry's id ends in its place, too."""
SPAN: Final = 16_384
"""How far apart the first and the last event of a block, and so of an array of entries, are at most."""
ENTRY_BYTES: Final = 500
"""What an entry takes in memory beside its error."""


class Entry(NamedTuple):
    """One entry as it is written; of one that ends a delivery, the whole story."""

    event_id: int
    subscription: int
    action: Action
    created_at: int
    status: Status | None = None
    attempt: int | None = None
    epoch: int | None = None
    worker_id: str | None = None
    status_code: int | None = None
    error_type: str | None = None
    error_message: str | None = None
    execution_time_ms: float | None = None
    type: str | None = None
    tags: str | None = None
    priority: int | None = None
    event_created_at: int | None = None
    ready_at: int | None = None
    claimed_at: int | None = None
    retry_count: int | None = None
    errors: str | None = None


class Entries(NamedTuple):
    """Entries of one action on first attempts of one block; of one type and tags, and with their times, if ended."""

    subscription: int
    action: Action
    created_at: int
    status: Status
    number: int
    worker_id: str
    ids: Sequence[int]
    places: Sequence[int]
    type: str | None = None
    tags: str | None = None
    claimed_at: int | None = None
    created: Sequence[int] = ()
    times: Sequence[float] = ()


def add_entries(session: Session, entries: Sequence[Entry]) -> None:
    """Write entries, one row each."""
    if entries:
        session.db.many("log", entries)


def add_array(session: Session, entries: Entries) -> None:
    """Write many entries as one row; their ids rise."""
    ended = bool(entries.created)
    session.db.run(
        "log_array",
        (
            min(entries.ids),
            max(entries.ids),
            len(entries.ids),
            entries.subscription,
            entries.action,
            entries.created_at,
            entries.status,
            entries.number << PLACE_BITS,
            entries.worker_id,
            entries.type,
            entries.tags,
            entries.claimed_at,
            0 if ended else None,
            0 if ended else None,
            pack(entries.ids),
            pack(entries.places),
            pack(entries.created) if ended else None,
            pack_floats(entries.times) if ended else None,
        ),
    )


def entries_of(session: Session, event_id: int) -> list[LogEntry]:
    """Return the entries of an event, oldest first; the newest of them if they do not fit into a page."""
    found = [
        _entry_in_array(session, row, event_id)
        for row in session.db.run("arrays_of", (event_id, event_id - SPAN))
        if event_id in unpack(row[7])  # else it reaches from before the event to beyond it
    ]
    size = ENTRY_BYTES * len(found)
    for row in session.db.iterate("log_back", (event_id,)):
        found.append(_entry(session, row))
        size += ENTRY_BYTES + len(row[11] or "")
        if size >= PAGE_BYTES:
            break
    return sorted(found, key=lambda entry: entry.id)


def _entry(session: Session, row: Row) -> LogEntry:
    identity, event_id, number, action, created_at, status, *rest = row
    with decoding():
        told = None if status is None else Status(status)
        name = session.catalog.name(number)
        return LogEntry(identity, event_id, name, Action(action), from_micros(created_at), told, *rest)


def _entry_in_array(session: Session, row: Row, event_id: int) -> LogEntry:
    identity, number, action, created_at, status, epoch, worker_id, ids, places, times = row
    with decoding():
        place = unpack(ids).index(event_id)
        return LogEntry(
            identity + place,
            event_id,
            session.catalog.name(number),
            Action(action),
            from_micros(created_at),
            Status(status),
            1,
            epoch + unpack(places)[place],
            worker_id,
            execution_time_ms=unpack_floats(times)[place] if times else None,
        )


class End(NamedTuple):
    """How a delivery last stood by the audit log."""

    subscription: int
    action: Action
    status: Status | None
    attempt: int
    retry_count: int | None
    created_at: int
    worker_id: str | None
    errors: str | None


def ends_of(session: Session, ids: Sequence[int]) -> dict[int, dict[int, End]]:
    """Return for each event the last entry in each subscription, by its number, that says how its delivery stands."""
    found: dict[int, list[tuple[int, End]]] = {event_id: [] for event_id in ids}
    with decoding():
        for some in clusters(ids):
            for identity, number, action, created_at, status, worker_id, events in session.db.run(
                "arrays_between", (some[0], some[-1], None, None)
            ):
                end = End(number, Action(action), Status(status), 1, 0, created_at, worker_id, None)
                for event_id in found.keys() & unpack(events):
                    found[event_id].append((identity, end))
        for identity, event_id, number, action, status, *rest in session.db.rows("ends_of", (json_array(ids),)):
            state = None if status is None else Status(status)
            found[event_id].append((identity, End(number, Action(action), state, *rest)))
    return {event_id: _last(sorted(each, key=lambda pair: pair[0])) for event_id, each in found.items()}


def _last(ends: Iterable[tuple[int, End]]) -> dict[int, End]:
    """Return the last of each subscription; the entry of a purge leaves the count of retries to the one before."""
    last: dict[int, End] = {}
    for _, end in ends:
        before = last.get(end.subscription)
        if end.retry_count is None and before is not None:
            end = end._replace(retry_count=before.retry_count)  # noqa: PLW2901  the same entry, told whole
        last[end.subscription] = end
    return last


def clusters(ids: Iterable[int]) -> Iterator[Sequence[int]]:
    """Cut ids, sorted, wherever more than SPAN lie between two: blocks and arrays of each part are few."""
    part: list[int] = []
    for event_id in sorted(ids):
        if part and event_id - part[-1] > SPAN:
            yield part
            part = []
        part.append(event_id)
    if part:
        yield part


def entry_columns(row: Row) -> Sequence[Sequence[Any]]:
    """Turn a row of `audit_rows` into its entries, column by column: as many values in each as it has entries."""
    *columns, entries, ids, places, created, times = row
    if ids is None:
        return [(value,) for value in columns]
    identity, epoch = columns[0], columns[7]
    moments = unpack(created) if created else [None] * entries
    found: list[Sequence[Any]] = [[value] * entries for value in columns]
    found[0], found[1] = range(identity, identity + entries), unpack(ids)
    found[6], found[7] = [1] * entries, [epoch + place for place in unpack(places)]
    found[12] = unpack_floats(times) if times else [None] * entries
    found[16] = found[17] = moments
    return found
