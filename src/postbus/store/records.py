"""Rows to values and back: the one place that knows the order of columns."""

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import fields
from datetime import datetime, timedelta
from typing import Any, Final
from zlib import crc32

import orjson

from postbus.clock import from_micros, to_micros
from postbus.errors import PostbusError, UnsafeStore
from postbus.model import AttemptError, Delivery, DeliveryState, Event, Status
from postbus.payload import Draft, decode
from postbus.store.session import Row

UNREADABLE: Final = (UnsafeStore, KeyError, OverflowError, TypeError, ValueError)
"""What reading a row may raise when the row is damaged."""


class _UnfrozenEvent:
    """An event being filled in: the same slots, without the guard that makes setting a frozen one six times slower."""

    __slots__ = tuple(field.name for field in fields(Event))


class _UnfrozenDelivery:
    """A delivery being filled in."""

    __slots__ = tuple(field.name for field in fields(Delivery))


def quick_delivery(*values: Any) -> Delivery:
    """Return `Delivery(*values)`, made at the speed that a batch of thousands asks for."""
    made: Any = _UnfrozenDelivery()
    made.event, made.lease, made.attempt, made.retry, made.worker_id, made.lease_until, made.suspect = values
    made.__class__ = Delivery
    return made


def quick_event(*values: Any) -> Event:
    """Return `Event(*values)` for all fields but `logs`, made at the speed that a batch of thousands asks for."""
    event: Any = _UnfrozenEvent()
    (
        event.id, event.uid, event.type, event.payload, event.tags, event.key, event.title, event.description,
        event.metadata, event.created_at, event.priority, event.max_retries, event.status, event.retry_count,
        event.next_retry_at, event.updated_at, event.errors, event.deliveries,
    ) = values  # fmt: skip
    event.logs = ()
    event.__class__ = Event
    return event


@contextmanager
def decoding() -> Generator[None]:
    """Report a row that makes no sense as what it is: damage."""
    try:
        yield
    except PostbusError:
        raise
    except UNREADABLE as error:
        raise UnsafeStore(f"the store holds a row that makes no sense ({error!r}): restore it from a backup") from error


def checksum(uid: str, kind: str, tags: str, payload: str) -> int:
    """Return what tells that an event's row was damaged on disk: SQLite itself keeps no checksum of content."""
    return crc32(f"{uid}\n{kind}\n{tags}\n{payload}".encode())


def _verify(row: Row) -> None:
    if row[12] is not None and checksum(row[1], row[2], row[3], row[7]) != row[12]:
        raise UnsafeStore(f"event {row[0]} was damaged on disk: restore it from a backup")


def moment(micros: int | None) -> datetime | None:
    """Return the moment a nullable column holds."""
    return None if micros is None else from_micros(micros)


def split_tags(joined: str) -> tuple[str, ...]:
    """Return the tags of a comma-joined column."""
    return tuple(joined.split(",")) if joined else ()


def event_from_row(
    row: Row,
    status: Status | None = None,
    retry_count: int = 0,
    next_retry_at: datetime | None = None,
    updated_at: datetime | None = None,
    *,
    errors: tuple[AttemptError, ...] = (),
    deliveries: tuple[DeliveryState, ...] = (),
) -> Event:
    """Return an event from the columns of the `event` query, and how it stands; raise one of UNREADABLE."""
    identity, uid, kind, tags, key, title, description, payload, metadata, created_at, priority, max_retries, *_ = row
    _verify(row)
    return quick_event(
        identity,
        uid,
        kind,
        decode(payload),
        tuple(tags.split(",")) if tags else (),
        key,
        title,
        description,
        orjson.loads(metadata) if metadata != "{}" else {},
        from_micros(created_at),
        priority,
        max_retries,
        status,
        retry_count,
        next_retry_at,
        updated_at,
        errors,
        deliveries,
    )


def followed_events(
    rows: Iterable[Row], wants: Callable[[str, str], bool] | None
) -> tuple[list[Event], dict[int, str]]:
    """Return events of the log as a follower sees them, as far as it wants them, and why some cannot be read.

    A damaged one is among them whatever it claims to be. No subscription has a say in how they stand. A follower that
    catches up does little else than this: so it is one loop, without a call that can be spared.
    """
    events, damaged = list[Event](), dict[int, str]()
    before, created = -1, from_micros(0)
    for row in rows:
        identity, uid, kind, tags, key, title, description, payload, metadata, moment, priority, retries, crc = row[:13]
        try:
            if crc is not None and crc32(f"{uid}\n{kind}\n{tags}\n{payload}".encode()) != crc:
                _verify(row)
            if wants is not None and not wants(kind, tags):
                continue
            event: Any = _UnfrozenEvent()
            if moment != before:
                created, before = from_micros(moment), moment
            event.payload = orjson.loads(payload) if payload[0] != " " else decode(payload)
            event.metadata = orjson.loads(metadata) if metadata != "{}" else {}
        except UNREADABLE as error:
            damaged[identity] = str(error)
            event = _UnfrozenEvent()
            event.payload, event.metadata = None, {}
        event.id = identity
        event.uid = uid
        event.type = kind
        event.tags = tuple(tags.split(",")) if tags else ()
        event.key = key
        event.title = title
        event.description = description
        event.created_at = created
        event.priority = priority
        event.max_retries = retries
        event.status = event.next_retry_at = event.updated_at = None
        event.retry_count = 0
        event.errors = event.deliveries = event.logs = ()
        event.__class__ = Event
        events.append(event)
    return events, damaged


def due_micros(draft: Draft, now: int) -> int:
    """Return when an event published now is due."""
    if draft.at is not None:
        return max(now, to_micros(draft.at))
    return now if draft.delay is None else now + round(draft.delay / timedelta(microseconds=1))


def event_from_draft(draft: Draft, identity: int, created_at: datetime, due: datetime | None) -> Event:
    """Return the event just stored."""
    return quick_event(
        identity,
        draft.uid,
        draft.type,
        draft.value,
        draft.tags,
        draft.key,
        draft.title,
        draft.description,
        orjson.loads(draft.metadata) if draft.metadata != "{}" else {},
        created_at,
        draft.priority,
        draft.max_retries,
        Status.PENDING,
        0,
        due,
        created_at,
        (),
        (),
    )


def row_from_draft(draft: Draft, identity: int, created_at: int) -> Row:
    """Return the row of an event, in the columns of the `event` query."""
    tags = ",".join(draft.tags)
    return (
        identity,
        draft.uid,
        draft.type,
        tags,
        draft.key,
        draft.title,
        draft.description,
        draft.payload,
        draft.metadata,
        created_at,
        draft.priority,
        draft.max_retries,
        checksum(draft.uid, draft.type, tags, draft.payload),
    )


def encode_errors(errors: Iterable[AttemptError]) -> str:
    """Return the text that `decode_errors` reads."""
    return orjson.dumps(
        [
            {
                "type": error.type,
                "message": error.message,
                "attempt": error.attempt,
                "worker_id": error.worker_id,
                "at": None if error.at is None else to_micros(error.at),
                "traceback": error.traceback,
                "handler": error.handler,
            }
            for error in errors
        ]
    ).decode()


def decode_errors(text: str | None) -> tuple[AttemptError, ...]:
    """Return the errors of a delivery, one an attempt, oldest first."""
    if text is None:
        return ()
    with decoding():
        entries: list[dict[str, Any]] = orjson.loads(text)
        for entry in entries:
            entry["at"] = moment(entry["at"])
        return tuple(AttemptError(**entry) for entry in entries)


def json_array(values: Iterable[int]) -> str:
    """Return numbers as a JSON array: one parameter, and so one step into SQLite, for a whole batch."""
    return f"[{','.join(map(str, values))}]"
