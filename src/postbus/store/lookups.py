"""Read single events, lists of them, and dead letters. Nothing here changes anything."""

import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from heapq import heappop, heappush, merge
from itertools import islice
from math import inf
from typing import Final

import orjson

from postbus.clock import from_micros
from postbus.errors import InvalidRequest, NotFound, UnsafeStore
from postbus.fingerprint import cause
from postbus.model import (
    AttemptError,
    DeadLetter,
    DeliveryState,
    Event,
    LogEntry,
    Mode,
    Page,
    Status,
)
from postbus.pattern import matches
from postbus.payload import Draft
from postbus.store.arrays import unpack
from postbus.store.audit import SPAN, entries_of
from postbus.store.contract import PAGE_BYTES, DeadFilter, Fault
from postbus.store.deliveries import block_from_row
from postbus.store.depth import END_OF_TIME, TOTAL_CAP, backlog
from postbus.store.records import (
    decode_errors,
    decoding,
    event_from_row,
    json_array,
    moment,
    row_from_draft,
    split_tags,
)
from postbus.store.session import Database, Row, Session
from postbus.store.status import live_ids, states

FIRST_LOOK: Final = 25
LONGEST_LOOK: Final = 400
FIRST_CHUNK: Final = 64
CHUNK: Final = 4_096
FIRST_WINDOW: Final = 1_024
LARGE_WINDOW: Final = 8_192
LARGEST_WINDOW: Final = 131_072
FEW_ROWS: Final = 10_000
"""So many pending rows are sorted by id at once; where there are more, they are dense enough to go through them all."""
SHOWN_TOGETHER: Final = 20
"""Of so many events the deliveries are read at once: their errors are in memory together."""

Meant = Callable[[str, str], bool]
"""Whether an event of a type with these tags, joined by commas, is asked for."""
Found = Iterator[tuple[int, bool]]
"""Ids, newest first, each with whether it is one of those sought: the others tell how far the search has come."""


# ── one event ────────────────────────────────────────────────────────────────────────────────────────────────────────


def get(session: Session, event_id: int, subscription: str) -> Event:
    """Return an event with its deliveries in all subscriptions; raise NotFound."""
    rows = session.db.run("event", (event_id,)) if 0 < event_id <= END_OF_TIME else []
    if not rows:
        raise NotFound(f"there is no event {event_id}")
    return _event(rows[0], subscription, states(session, [event_id])[event_id])


def known(session: Session, event_id: int, draft: Draft) -> Event:
    """Return the event that a draft's uid stands for already; of one that was pruned, what the draft tells anew."""
    rows = session.db.run("event", (event_id,))
    if not rows:
        created_at = session.db.value("uid_since", (draft.uid,)) or session.now
        rows = [row_from_draft(draft, event_id, created_at)]
    return _event(rows[0], "default", states(session, [event_id])[event_id])


def logs(session: Session, event_id: int) -> tuple[LogEntry, ...]:
    """Return an event's audit entries, oldest first; the newest of them if they do not fit into a page."""
    return tuple(entries_of(session, event_id)) if 0 < event_id <= END_OF_TIME else ()


def _event(row: Row, subscription: str, deliveries: tuple[DeliveryState, ...]) -> Event:
    mine = next((state for state in deliveries if state.subscription == subscription), None)
    with decoding():
        if mine is None:
            return event_from_row(row, updated_at=from_micros(row[9]), deliveries=deliveries)
        stands = mine.status, mine.retry_count, mine.next_retry_at, mine.updated_at
        return event_from_row(row, *stands, errors=mine.errors, deliveries=deliveries)


def _shown(row: Row, subscription: str, deliveries: tuple[DeliveryState, ...]) -> Event:
    """Return an event for a list: one that is damaged says so in its metadata, and spoils no page."""
    try:
        return _event(row, subscription, deliveries)
    except UnsafeStore as error:
        told = orjson.dumps({"damaged": str(error)}).decode()
        return _event((*row[:7], "null", told, *row[9:12], None), subscription, deliveries)


def rows_of(db: Database, ids: Sequence[int]) -> tuple[dict[int, Row], list[int]]:
    """Return the rows of the first of these events, as many as fit into a page, and the ids that are left."""
    if len(ids) == 1:
        return {row[0]: row for row in db.run("event", ids)}, []
    rows = db.rows("events_by_id", (json_array(ids), PAGE_BYTES))
    full = rows and rows[-1][13] >= PAGE_BYTES
    return {row[0]: row for row in rows}, list(ids[ids.index(rows[-1][0]) + 1 :]) if full else []


# ── lists ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def list_events(
    session: Session,
    *,
    subscription: str,
    status: Status | None,
    type: str | None,  # noqa: A002  the public word for it
    tags: Sequence[str],
    limit: int,
    offset: int,
    after: int | str | None,
    within: timedelta | None = None,
) -> Page[Event]:
    """Return a page of events, newest first; see the contract."""
    meant = _meant(type, tags)
    ids = _ids(session, subscription, status, END_OF_TIME if after is None else _number(str(after)))
    ends = inf if within is None else time.monotonic() + within.total_seconds()
    found: list[int] = []
    looked = 0
    for event_id, hit in _matching(session, ids, meant):
        if hit:
            found.append(event_id)
        if len(found) > offset + limit or time.monotonic() > ends:
            looked = event_id
            break
    items = _shown_all(session, found[offset : offset + limit], subscription)
    if len(items) < len(found) - offset:
        looked = items[-1].id
    total = len(found) if within is not None else _total(session, subscription, status, meant)
    return Page(
        items=items,
        total=min(total, TOTAL_CAP),
        limit=limit,
        offset=offset,
        total_capped=within is not None or total > TOTAL_CAP,
        next=looked or None,
    )


def _shown_all(session: Session, ids: Sequence[int], subscription: str) -> tuple[Event, ...]:
    """Return events for a list: the first of them, as many as fit into a page."""
    rows, left = rows_of(session.db, ids) if ids else ({}, [])
    shown: list[Event] = []
    size = 0
    fitting = ids[: len(ids) - len(left)]
    for start in range(0, len(fitting), SHOWN_TOGETHER):
        some = fitting[start : start + SHOWN_TOGETHER]
        found = states(session, some)
        for event_id in some:
            shown.append(_shown(rows.pop(event_id), subscription, found[event_id]))
            size += sum(_size(each.errors) for each in shown[-1].deliveries)
            if size >= PAGE_BYTES:
                return tuple(shown)
    return tuple(shown)


def _matching(session: Session, ids: Found, meant: Meant | None) -> Found:
    """Go through ids, of which only those of events that are in the log and meant count; ever more at a time."""
    size = FIRST_LOOK
    while chunk := list(islice(ids, size)):
        rows = session.db.rows("stories", (json_array(event_id for event_id, hit in chunk if hit),))
        found = {event_id for event_id, type_, tags, *_ in rows if meant is None or meant(type_, tags)}
        yield from ((event_id, event_id in found) for event_id, _ in chunk)
        size = min(2 * size, LONGEST_LOOK)


def _total(session: Session, subscription: str, status: Status | None, meant: Meant | None) -> int:
    """Count what a list holds, up to one more than the cap."""
    most = TOTAL_CAP + 1
    number = session.catalog.known_number(subscription)
    if meant is None and status is None:
        return session.db.run("first_events", (most,))[0][1]
    if meant is None and number is not None and status is Status.FAILED:
        return session.db.value("count_dead", (number, most))
    if meant is None and number is not None and status is Status.PENDING:
        rows = session.db.value("count_waiting", (number, most))
        return rows + backlog(session, subscription).total if rows < most else most
    found = _ids(session, subscription, status, END_OF_TIME)
    found = found if meant is None else _matching(session, found, meant)
    return sum(1 for _ in islice((each for each in found if each[1]), most))


def _ids(session: Session, subscription: str, status: Status | None, below: int) -> Found:
    """Go through the ids below one, newest first, that have a status in a subscription."""
    number = session.catalog.known_number(subscription)
    if status is None:
        return ((row[0], True) for row in session.db.iterate("events_below", (below,)))
    if number is None:
        return iter(())
    match status:
        case Status.PENDING:
            waiting = ((each, True) for each in _waiting(session, subscription, number, below))
            return merge(_above(session, subscription, number, below), waiting, reverse=True)
        case Status.PROCESSING:
            return ((each, True) for each in _processing(session, number, below))
        case Status.FAILED:
            # Straight off an index that has them in order of creation.
            keys = session.db.iterate("dead_below", (number, _created(session.db, below), below))
            return ((row[0], True) for row in keys if row[0] < below)
        case Status.COMPLETED | Status.COMPLETED_WITH_ERRORS:
            return _completed(session, number, status, below)


def _above(session: Session, subscription: str, number: int, below: int) -> Found:
    """Go through what waits above a queue's cursor."""
    size = FIRST_CHUNK
    while rows := session.db.rows("above_below", (number, below, size)):
        found = False
        for event_id, type_, tags in rows:
            if session.catalog.wants(subscription, type_, tags):
                found = True
                yield event_id, True
        below = rows[-1][0]
        if not found:
            yield below, False
        if len(rows) < size:
            return
        size = min(4 * size, CHUNK)


def _waiting(session: Session, subscription: str, number: int, below: int) -> Iterator[int]:
    """Go through pending and parked rows; only ordered subscriptions have parked ones."""
    if session.catalog.subscription(subscription).mode is Mode.QUEUE:
        rows = session.db.rows("some_pending", (number, below, FEW_ROWS + 1))
        if len(rows) <= FEW_ROWS:
            return iter(sorted((row[0] for row in rows), reverse=True))
    return (row[0] for row in session.db.iterate("waiting_below", (number, below)))


def _processing(session: Session, number: int, below: int) -> Iterator[int]:
    """Go through what is leased; blocks overlap, but none reaches further than SPAN."""
    ids: list[int] = []
    for row in session.db.iterate("blocks_below", (number, below)):
        block = block_from_row(row)
        while ids and -ids[0] >= block.ids[0] + SPAN:
            yield -heappop(ids)
        for place in block.left():
            if block.ids[place] < below:
                heappush(ids, -block.ids[place])
    while ids:
        yield -heappop(ids)


def _completed(session: Session, number: int, status: Status, below: int) -> Found:
    """Go through what was completed, a window of the audit log at a time: the emptier they are, the larger."""
    size = FIRST_WINDOW
    while (top := session.db.value("completed_top", (number, status, below))) is not None:
        low = max(0, top - size + 1)
        found = _completed_between(session, number, status, low, below)
        ended = sorted(found - live_ids(session, found, number), reverse=True)
        if ended and low <= int(session.db.value("meta", ("pruned_through",))):
            there = {row[0] for row in session.db.rows("stories", (json_array(ended),))}
            ended = [event_id for event_id in ended if event_id in there]
        yield from ((event_id, True) for event_id in ended)
        if not ended:
            yield low, False
        below = low
        size = min(4 * size, LARGEST_WINDOW if len(found) < size // 4 else LARGE_WINDOW)


def _completed_between(session: Session, number: int, status: Status, low: int, below: int) -> set[int]:
    """Return which events of low <= id < below ended last of all with a status: one by one, or completed in arrays."""
    db = session.db
    single: dict[int, int] = dict(db.rows("completed_between", (number, status, low, below)))
    if status is Status.COMPLETED_WITH_ERRORS:
        return single.keys() - _completed_later(session, number, single)
    arrays: dict[int, int] = {}
    for entry, *_, packed in db.run("arrays_between", (low, below - 1, number, Status.COMPLETED)):
        for event_id in unpack(packed):
            if low <= event_id < below:
                arrays[event_id] = max(entry, arrays.get(event_id, 0))
    later = dict(db.rows("later_ends", (number, json_array(arrays), min(arrays.values())))) if arrays else {}
    return single.keys() | {event_id for event_id, entry in arrays.items() if later.get(event_id, 0) < entry}


def _completed_later(session: Session, number: int, single: Mapping[int, int]) -> set[int]:
    """Return which of these events, by their entry, were completed after it in an array: by a rewind.

    They are few among many that are in arrays. Only the arrays that were written after an entry, and reach across its
    event, are unpacked.
    """
    ids, around = sorted(single), set[int]()
    if not ids:
        return around
    for entry, first, last in session.db.rows("array_spans", (number, ids[0], ids[-1])):
        within = ids[bisect_left(ids, first) : bisect_right(ids, last)]
        around.update(event_id for event_id in within if single[event_id] < entry)
    if not around:
        return around
    arrays = session.db.run("arrays_between", (min(around), max(around), number, Status.COMPLETED))
    found = [(entry, around.intersection(unpack(packed))) for entry, *_, packed in arrays]
    return {event_id for entry, some in found for event_id in some if single[event_id] < entry}


def _meant(event_type: str | None, tags: Sequence[str]) -> Meant | None:
    """Return what an event must satisfy: a type that the pattern covers, and any of the tags; None: everything."""
    if event_type is None and not tags:
        return None
    return lambda type_, joined: (
        (event_type is None or matches(event_type, type_))
        and (not tags or not set(tags).isdisjoint(split_tags(joined)))
    )


def _size(errors: Iterable[AttemptError]) -> int:
    return sum(len(each.message) + len(each.traceback or "") for each in errors)


def _number(text: str) -> int:
    if not text.isdecimal() or int(text) >= END_OF_TIME:
        raise InvalidRequest(f"after must be `next` of the page before, not {text!r:.40}")
    return int(text)


def _created(db: Database, event_id: int) -> int:
    """Return when an event was created; of one that is not there any more, when the next one was."""
    rows = db.run("when_events", (event_id - 1,))
    return rows[0][1] if rows else END_OF_TIME


# ── dead letters ─────────────────────────────────────────────────────────────────────────────────────────────────────


def dead_letters(
    session: Session, which: DeadFilter, *, limit: int, offset: int, after: int | str | None
) -> Page[DeadLetter]:
    """Return a page of dead letters, the newest event first."""
    page = list(islice(dead_keys(session, which, after), offset, offset + limit + 1))
    total = _count_dead(session, which)
    letters: list[DeadLetter] = []
    size = 0
    for letter, own in _letters(session, page[:limit]):
        letters.append(letter)
        size += own
        if size >= PAGE_BYTES and which.event_id is None:
            break
    return Page(
        items=tuple(letters),
        total=min(total, TOTAL_CAP),
        limit=limit,
        offset=offset,
        total_capped=total > TOTAL_CAP,
        next=f"{letters[-1].event.id}:{letters[-1].subscription}" if len(letters) < len(page) else None,
    )


def dead_keys(session: Session, which: DeadFilter, after: int | str | None) -> Iterator[Row]:
    """Go through the dead letters that are meant, newest event first.

    Yields the event's id, the subscription's number, when the event was created, its kind, and when it died.
    """
    name = session.catalog.name
    parts = [_dead_of(session, which, number, after) for number in _numbers(session, which)]
    rows: Iterator[Row] = merge(*parts, key=lambda row: (-row[2], -row[0], name(row[1])))
    if which.type is not None or which.before is not None:
        rows = (row for row in rows if _is_meant(session, which, row))
    if which.fault is None:
        return rows
    return (row for row, error in _with_error(session, rows) if ": ".join(cause(_last(error))) == which.fault)


def _dead_of(session: Session, which: DeadFilter, number: int, after: int | str | None) -> Iterator[Row]:
    if which.event_id is not None:
        return (row[:5] for row in session.db.run("dead_one", (number, which.event_id)))
    return session.db.iterate("dead_below", (number, *_keyset(session, after, number)))


def _with_error(session: Session, rows: Iterator[Row]) -> Iterator[tuple[Row, str | None]]:
    """Go through dead letters with the last error of each: read some at a time, since all together may be large."""
    while chunk := list(islice(rows, LONGEST_LOOK)):
        found = session.db.many("last_error", [(number, event_id) for event_id, number, *_ in chunk])
        errors = {(event_id, number): error for number, event_id, error in found}
        yield from ((row, errors.get((row[0], row[1]))) for row in chunk)


def faults(session: Session, limit: int) -> list[Fault]:
    """Return what the newest dead letters died of, as many as fit into a page."""
    found: list[Fault] = []
    size = 0
    for each in session.catalog.subscriptions():
        keys = _dead_of(session, DeadFilter(), session.catalog.number(each.name), None)
        for (event_id, _, _, kind, died_at), error in _with_error(session, islice(keys, limit)):
            size += len(error or "")
            if size >= PAGE_BYTES:
                return found
            type_ = session.catalog.kind(session.db, kind).type
            found.append(Fault(event_id, each.name, type_, from_micros(died_at), _last(error)))
    return found


def _count_dead(session: Session, which: DeadFilter) -> int:
    if which != DeadFilter(subscription=which.subscription):
        return sum(1 for _ in islice(dead_keys(session, which, None), TOTAL_CAP + 1))
    return sum(session.db.value("count_dead", (number, TOTAL_CAP + 1)) for number in _numbers(session, which))


def _letters(session: Session, keys: Sequence[Row]) -> Iterator[tuple[DeadLetter, int]]:
    """Go through dead letters; what else is known of their events is read for some of them at a time."""
    for start in range(0, len(keys), SHOWN_TOGETHER):
        some = keys[start : start + SHOWN_TOGETHER]
        ids = list(dict.fromkeys(row[0] for row in some))
        events, deliveries = rows_of(session.db, ids)[0], states(session, ids)
        for event_id, number, *_ in some:
            event = events.get(event_id) or next(iter(session.db.run("event", (event_id,))), None)
            yield _dead_letter(session, number, event_id, event, deliveries[event_id])


def _dead_letter(
    session: Session, number: int, event_id: int, event: Row | None, deliveries: tuple[DeliveryState, ...]
) -> tuple[DeadLetter, int]:
    """Return a dead letter, and about how many bytes it has."""
    ((_, _, created_at, kind, died_at, priority, attempts, errors, last_retry_at),) = session.db.run(
        "dead_one", (number, event_id)
    )
    name = session.catalog.name(number)
    if event is None:  # a list must not fail because an event is not there
        lost, told = session.catalog.kind(session.db, kind), '{"damaged":"the event is not in the log"}'
        event = (event_id, "", lost.type, lost.tags, None, None, None, "null", told, created_at, priority, None, None)
    letter = DeadLetter(
        event=_shown(event, name, deliveries),
        subscription=name,
        attempts=attempts,
        errors=decode_errors(errors),
        died_at=from_micros(died_at),
        last_retry_at=moment(last_retry_at),
    )
    return letter, sum(len((text or "").encode()) for text in (*event[5:9], errors))


def _numbers(session: Session, which: DeadFilter) -> list[int]:
    """Return the subscriptions that are meant and there, by name."""
    names = [which.subscription] if which.subscription else [each.name for each in session.catalog.subscriptions()]
    return [number for name in names if (number := session.catalog.known_number(name)) is not None]


def _keyset(session: Session, after: int | str | None, subscription: int) -> tuple[int, int]:
    """Return below which (created_at, event id) a subscription's dead letters follow `after`, an `id:subscription`."""
    if after is None:
        return END_OF_TIME, END_OF_TIME
    number, _, passed = str(after).partition(":")
    event_id = _number(number)
    return _created(session.db, event_id), event_id + (session.catalog.name(subscription) > passed)


def _is_meant(session: Session, which: DeadFilter, row: Row) -> bool:
    _, _, created_at, kind, died_at = row
    if which.before is not None and from_micros(created_at if which.by == "created_at" else died_at) > which.before:
        return False
    return which.type is None or matches(which.type, session.catalog.kind(session.db, kind).type)


def _last(errors: str | None) -> AttemptError | None:
    decoded = decode_errors(errors)
    return decoded[-1] if decoded else None
