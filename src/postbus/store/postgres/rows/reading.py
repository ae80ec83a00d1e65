"""Reading what is stored: single events, lists, dead letters, figures. Nothing here changes anything."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from heapq import merge
from itertools import islice
from typing import Final

from postbus.clock import from_micros
from postbus.errors import InvalidRequest, NotFound, UnsafeStore
from postbus.fingerprint import cause
from postbus.model import (
    Action,
    AttemptError,
    DeadLetter,
    DeliveryState,
    Event,
    LogEntry,
    Page,
    State,
    Stats,
    Status,
    SubscriptionStats,
)
from postbus.pattern import matches
from postbus.payload import Draft
from postbus.store.contract import PAGE_BYTES, DeadFilter, Fault, Work
from postbus.store.postgres.rows.catalog import Catalog
from postbus.store.postgres.rows.routes import Selection
from postbus.store.postgres.rows.session import Session
from postbus.store.records import (
    decode_errors,
    decoding,
    event_from_row,
    json_array,
    log_from_row,
    moment,
    row_from_draft,
    split_tags,
)
from postbus.store.session import Database, Row

__all__ = ["END_OF_TIME", "Reading", "dead_keys", "rows_of", "tags_filter"]

TOTAL_CAP: Final = 10_000
END_OF_TIME: Final = (1 << 63) - 1
MINUTE: Final = 60_000_000
CHEAP_ROUTES: Final = 64
FIRST_LOOK: Final = 25
LONGEST_LOOK: Final = 400
LOG_BYTES: Final = 500
"""What an audit row takes in memory beside its error."""
Depth = dict[tuple[str, int, int], tuple[int, int | None]]
"""How many deliveries there are by subscription, state and whether they are due, and since when the first one is."""


class Reading:
    """Queries on one reader's connection, as of one moment."""

    def __init__(self, session: Session) -> None:
        """Read inside a transaction that shows one moment; its `now` decides what is due."""
        self._db, self._catalog, self._now = session

    # ── one event ────────────────────────────────────────────────────────────────────────────────────────────────

    def event(self, event_id: int, subscription: str) -> Event:
        """Return an event with how it stands everywhere; raise NotFound."""
        rows = self._db.run("event", (event_id,)) if 0 < event_id <= END_OF_TIME else []
        if not rows:
            raise NotFound(f"there is no event {event_id}")
        return self._standing(rows[0], subscription)

    def known(self, event_id: int, draft: Draft) -> Event:
        """Return the event that a draft's uid stands for already; of one that was pruned, what the draft tells anew."""
        rows = self._db.run("event", (event_id,))
        if not rows:
            created_at = self._db.value("uid_since", (draft.uid,)) or self._now
            rows = [row_from_draft(draft, event_id, created_at)]
        return self._standing(rows[0], "default")

    def _shown(self, row: Row, subscription: str) -> Event:
        """Return an event for a list: one that is damaged says so in its metadata, and spoils no page."""
        try:
            return self._standing(row, subscription)
        except UnsafeStore as error:
            sound = event_from_row((*row[:7], "null", "{}", *row[9:]), verified=False, metadata={"damaged": str(error)})
            mine = [state for state in self._states(row[0]) if state.subscription == subscription]
            return replace(sound, status=mine[0].status, errors=mine[0].errors) if mine else sound

    def _standing(self, row: Row, subscription: str) -> Event:
        states = self._states(row[0])
        mine = next((state for state in states if state.subscription == subscription), None)
        if mine is None:
            return event_from_row(row, status=None, updated_at=from_micros(row[9]), deliveries=states)
        return event_from_row(
            row,
            status=mine.status,
            retry_count=mine.retry_count,
            next_retry_at=mine.next_retry_at,
            updated_at=mine.updated_at,
            errors=mine.errors,
            deliveries=states,
        )

    def _states(self, event_id: int) -> tuple[DeliveryState, ...]:
        last: dict[str, Row] = {}
        for row in self._db.run("ends_of", (event_id,)):
            before = last.get(row[0])  # the row of a purge leaves the count of retries to the one before
            last[row[0]] = row if row[4] is not None or before is None else (*row[:4], before[4], *row[5:])
        ended = {name: _ended(row) for name, row in last.items() if row[1] != Action.DISCARDED}
        live = {row[0]: self._live(row) for row in self._db.run("deliveries_of", (event_id,))}
        return tuple((ended | live)[name] for name in sorted(ended | live))

    def _live(self, row: Row) -> DeliveryState:
        subscription, state, due_at, attempt, retry_count, updated_at, worker_id, errors = row
        with decoding():
            leased = state == State.LEASED
            waits = state == State.PENDING and due_at > self._now
            return DeliveryState(
                subscription=subscription,
                status=State(state).status,
                attempt=attempt,
                retry_count=retry_count,
                next_retry_at=moment(due_at) if waits else None,
                updated_at=from_micros(updated_at),
                worker_id=worker_id,
                lease_until=moment(due_at) if leased else None,
                lease_expired=leased and due_at <= self._now,
                errors=decode_errors(errors),
                parked=state == State.PARKED,
            )

    def logs(self, event_id: int) -> tuple[LogEntry, ...]:
        """Return an event's audit rows, oldest first; the newest of them if they do not fit into a page."""
        found: list[LogEntry] = []
        size = 0
        for row in self._db.iterate("log_back", (event_id,)):
            found.append(log_from_row(row))
            size += LOG_BYTES + len(row[11] or "")
            if size >= PAGE_BYTES:
                break
        return tuple(reversed(found))

    def settled(self, event_id: int, subscriptions: Iterable[str]) -> bool:
        """Return whether nothing is pending or leased in these subscriptions."""
        return not any(self._db.run("unfinished", (event_id, name)) for name in subscriptions)

    # ── lists ────────────────────────────────────────────────────────────────────────────────────────────────────

    def events(
        self,
        subscription: str,
        status: Status | None,
        wanted: Callable[[Row], bool] | None,
        *,
        limit: int,
        offset: int,
        after: int | str | None,
    ) -> Page[Event]:
        """Return a page of events, newest first."""
        below = END_OF_TIME if after is None else _number(str(after))
        found = self._matching(self._ids(subscription, status, below), wanted)
        page = [row[0] for row in islice(found, offset, offset + limit + 1)]
        total, capped = self._total(self._ids(subscription, status, END_OF_TIME), wanted)
        items = self._shown_all(page[:limit], subscription)
        return Page(
            items=items,
            total=total,
            limit=limit,
            offset=offset,
            total_capped=capped,
            next=items[-1].id if len(items) < len(page) else None,
        )

    def _shown_all(self, ids: list[int], subscription: str) -> tuple[Event, ...]:
        """Return events for a list: the first of them, as many as fit into a page."""
        rows, left = rows_of(self._db, ids) if ids else ({}, [])
        shown: list[Event] = []
        size = 0
        for event_id in ids[: len(ids) - len(left)]:
            shown.append(self._shown(rows.pop(event_id), subscription))
            size += sum(_size(each.errors) for each in shown[-1].deliveries)
            if size >= PAGE_BYTES:
                break
        return tuple(shown)

    def newest(
        self,
        subscription: str,
        status: Status | None,
        wanted: Callable[[Row], bool] | None,
        *,
        limit: int,
        after: int | str | None,
        within: timedelta,
    ) -> Page[Event]:
        """Return the newest events that are found in time, and how far it was looked; nothing is counted."""
        below = END_OF_TIME if after is None else _number(str(after))
        ends = time.monotonic() + within.total_seconds()
        looked, found = below, list[Row]()
        for row in self._matching(self._ids(subscription, status, below), None):
            looked = row[0]
            if wanted is None or wanted(row):
                found.append(row)
            if len(found) > limit or time.monotonic() > ends:
                break
        else:
            looked = 0
        ids = [row[0] for row in found[:limit]]
        items = self._shown_all(ids, subscription)
        if len(items) < len(found):
            looked = items[-1].id
        return Page(
            items=items,
            total=len(found),
            limit=limit,
            offset=0,
            total_capped=True,
            next=looked or None,
        )

    def _ids(self, subscription: str, status: Status | None, below: int) -> Iterator[Row]:
        match status:
            case None:
                return self._db.iterate("events_below", (below,))
            case Status.PENDING:
                return self._db.iterate("pending_below", (below, subscription))
            case Status.PROCESSING:
                return self._tried_below(below, subscription, State.LEASED)
            case Status.FAILED:
                return self._tried_below(below, subscription, State.DEAD)
            case Status.COMPLETED | Status.COMPLETED_WITH_ERRORS:
                return self._db.iterate("completed_below", (below, subscription, status))

    def _tried_below(self, below: int, subscription: str, state: State) -> Iterator[Row]:
        """Go through leased or dead ones below an id, straight off an index that has them in order of creation."""
        found = self._db.iterate("tried", (subscription, _created(self._db, below), below, state))
        return (row[:1] for row in found if row[0] < below)

    def _matching(self, ids: Iterator[Row], wanted: Callable[[Row], bool] | None) -> Iterator[Row]:
        """Go through id, uid, type and tags of these events in order, read more and more at a time."""
        size = FIRST_LOOK
        while chunk := [event_id for (event_id,) in islice(ids, size)]:
            found = {row[0]: row for row in self._db.run("identities", (json_array(chunk),))}
            rows = (found[event_id] for event_id in chunk if event_id in found)
            yield from rows if wanted is None else filter(wanted, rows)
            size = min(2 * size, LONGEST_LOOK)

    def _total(self, ids: Iterator[Row], wanted: Callable[[Row], bool] | None) -> tuple[int, bool]:
        counted = ids if wanted is None else self._matching(ids, wanted)
        total = sum(1 for _ in islice(counted, TOTAL_CAP + 1))
        return min(total, TOTAL_CAP), total > TOTAL_CAP

    # ── dead letters ─────────────────────────────────────────────────────────────────────────────────────────────

    def dead_letters(self, which: DeadFilter, limit: int, offset: int, after: int | str | None) -> Page[DeadLetter]:
        """Return a page of dead letters, the newest event first."""
        keys = islice(dead_keys(self._db, self._catalog, which, after), offset, offset + limit + 1)
        page = list(keys)
        total = self._count_dead(which)
        letters: list[DeadLetter] = []
        size = 0
        for key in page[:limit]:
            letter, own = self._dead_letter(*key[:2])
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

    def faults(self, limit: int) -> list[Fault]:
        """Return what the newest dead letters died of, as many as fit into a page."""
        found: list[Fault] = []
        size = 0
        for each in self._catalog.subscriptions():
            for event_id, route, died_at, errors in self._db.iterate("dead_newest", (each.name, limit)):
                size += len(errors or "")
                if size >= PAGE_BYTES:
                    return found
                kind = self._catalog.route(self._db, route).type
                found.append(Fault(event_id, each.name, kind, from_micros(died_at), _last(decode_errors(errors))))
        return found

    def _count_dead(self, which: DeadFilter) -> int:
        if which != DeadFilter(subscription=which.subscription):
            return sum(1 for _ in islice(dead_keys(self._db, self._catalog, which, None), TOTAL_CAP + 1))
        names = _names(self._catalog, which)
        return sum(self._db.value("count_dead", (name, TOTAL_CAP + 1)) for name in names)

    def _dead_letter(self, event_id: int, subscription: str) -> tuple[DeadLetter, int]:
        """Return a dead letter, and about how many bytes it has."""
        (dead,) = self._db.run("dead_one", (event_id, subscription))
        _, _, route, attempts, errors, died_at, last_retry_at, created_at, _ = dead
        rows = self._db.run("event", (event_id,)) or [self._lost(event_id, route, created_at)]
        letter = DeadLetter(
            event=self._shown(rows[0], subscription),
            subscription=subscription,
            attempts=attempts,
            errors=decode_errors(errors),
            died_at=from_micros(died_at),
            last_retry_at=moment(last_retry_at),
        )
        return letter, sum(len((text or "").encode()) for text in (*rows[0][5:9], errors))

    def _lost(self, event_id: int, route_id: int, created_at: int) -> Row:
        """Return what a delivery tells of its event, for a list that must not fail because the event is not there."""
        route = self._catalog.route(self._db, route_id)
        told = '{"damaged":"the event is not in the log"}'
        return (event_id, "", route.type, route.tags, None, None, None, "null", told, created_at, route.priority, None,
                None)  # fmt: skip

    # ── what is left, and figures ────────────────────────────────────────────────────────────────────────────────

    def is_due(self, selection: Selection) -> bool:
        """Return whether a claim would find something, without taking the write lock."""
        groups = [*selection.normal.values(), *selection.solo.values()]
        if sum(map(len, groups)) <= CHEAP_ROUTES:
            return any(self._db.run("is_due", (route, self._now)) for routes in groups for route in routes)
        present = self._db.iterate("routes_with_due", (-END_OF_TIME - 1, self._now))
        return any(route in routes for (route,) in present for routes in groups)

    def next_due(self, selection: Selection) -> int | None:
        """Return when the next of these falls due; None when nothing will, or when finding out is not cheap."""
        routes = [route for group in (*selection.normal.values(), *selection.solo.values()) for route in group]
        if len(routes) > CHEAP_ROUTES:
            return None
        return min((row[0] for route in routes for row in self._db.run("next_due", (route, self._now))), default=None)

    def work(self, subscription: str, selection: Selection) -> Work:
        """Tell what a selection has left to do."""
        routes = {route for group in (*selection.normal.values(), *selection.solo.values()) for route in group}
        tried = {State(state) for state, route in self._db.run("tried_routes", (subscription,)) if route in routes}
        return Work(due=self.is_due(selection), leased=State.LEASED in tried, retrying=State.PENDING in tried)

    def stats(self, dead: set[str]) -> Stats:
        """Return the bus in figures; the handlers of `dead` processes handle nothing."""
        since = self._now - MINUTE
        rates = {action: float(count) for action, count in self._db.run("recent_actions", (since,))}
        depth: Depth = {
            (name, state, now): (count, oldest)
            for name, state, now, count, oldest in self._db.run("depth", (self._now,))
        }
        return Stats(
            events=self._db.value("count_events"),
            head=self._catalog.head,
            subscriptions=self._queues(depth),
            rates=rates | {"published": float(self._db.value("recent_events", (since,)))},
            store_bytes=self._db.value("store_bytes"),
            unhandled=self._unhandled(dead),
            dead={name: count for (name, state, _), (count, _) in depth.items() if state == State.DEAD},
            parked={name: count for (name, state, _), (count, _) in depth.items() if state == State.PARKED},
        )

    def _queues(self, depth: Depth) -> tuple[SubscriptionStats, ...]:
        done = {(name, status): count for name, status, count in self._db.run("count_completed")}
        return tuple(
            self._queue(each.name, depth, done) for each in self._catalog.subscriptions() if each.mode == "queue"
        )

    def _queue(self, name: str, depth: Depth, done: dict[tuple[str, str], int]) -> SubscriptionStats:
        def count(state: State) -> int:
            return sum(depth.get((name, state, now), (0, None))[0] for now in (0, 1))

        scheduled = depth.get((name, State.PENDING, 0), (0, None))[0]
        oldest = depth.get((name, State.PENDING, 1), (0, None))[1]
        waited = None if oldest is None else timedelta(microseconds=max(0, self._now - oldest))
        return SubscriptionStats(
            name=name,
            pending=count(State.PENDING),
            scheduled=scheduled,
            processing=count(State.LEASED),
            dead=count(State.DEAD),
            completed=done.get((name, Status.COMPLETED), 0),
            completed_with_errors=done.get((name, Status.COMPLETED_WITH_ERRORS), 0),
            oldest_age=waited,
        )

    def _unhandled(self, dead: set[str]) -> dict[str, int]:
        rows = [row for row in self._db.run("handlers") if row[6] not in dead]
        handled = [(row[2], row[3], set(split_tags(row[4]))) for row in rows]
        left: dict[str, int] = {}
        for route_id, count in self._db.run("depth_by_route"):
            route = self._catalog.route(self._db, route_id)
            tags = split_tags(route.tags)
            if not any(
                name == route.subscription and matches(pattern, route.type) and (not wants or wants & set(tags))
                for name, pattern, wants in handled
            ):
                where = f"{route.subscription}/{route.type}"
                left[where] = left.get(where, 0) + count
        return left


def rows_of(db: Database, ids: list[int]) -> tuple[dict[int, Row], list[int]]:
    """Return the rows of the first of these events, as many as fit into a page, and the ids that are left."""
    if len(ids) == 1:
        return {row[0]: row for row in db.run("event", ids)}, []
    rows = db.rows("events_by_id", (json_array(ids), PAGE_BYTES))
    full = rows and rows[-1][13] >= PAGE_BYTES
    return {row[0]: row for row in rows}, ids[ids.index(rows[-1][0]) + 1 :] if full else []


def _size(errors: Iterable[AttemptError]) -> int:
    return sum(len(each.message) + len(each.traceback or "") for each in errors)


def dead_keys(db: Database, catalog: Catalog, which: DeadFilter, after: int | str | None) -> Iterator[Row]:
    """Go through (event id, subscription, created_at) of the dead letters that are meant, newest event first."""
    names = _names(catalog, which)
    if which.event_id is not None:
        return (row for name in names for row in _one_dead(db, which.event_id, name))
    cursors = [db.iterate("tried", (name, *_keyset(db, after, name), State.DEAD)) for name in names]
    rows: Iterator[Row] = merge(*cursors, key=lambda row: (-row[2], -row[0], row[1]))
    if which.type is not None or which.before is not None:
        rows = filter(lambda row: _meant(db, catalog, which, row), rows)
    return rows if which.fault is None else _died_of(db, rows, which.fault)


def _died_of(db: Database, rows: Iterator[Row], fault: str) -> Iterator[Row]:
    """Leave out what died of something else; errors are read some at a time, since all together may be large."""
    while chunk := list(islice(rows, LONGEST_LOOK)):
        told = {row[:2]: decode_errors(row[4]) for row in db.many("dead_one", [row[:2] for row in chunk])}
        yield from (row for row in chunk if ": ".join(cause(_last(told[row[:2]]))) == fault)


def _last(errors: Sequence[AttemptError]) -> AttemptError | None:
    return errors[-1] if errors else None


def _names(catalog: Catalog, which: DeadFilter) -> list[str]:
    return [which.subscription] if which.subscription else [each.name for each in catalog.subscriptions()]


def _one_dead(db: Database, event_id: int, name: str) -> list[Row]:
    return [(row[0], row[1], row[7]) for row in db.run("dead_one", (event_id, name))]


def _number(text: str) -> int:
    if not text.isdecimal() or int(text) >= END_OF_TIME:
        raise InvalidRequest(f"after must be `next` of the page before, not {text!r:.40}")
    return int(text)


def _keyset(db: Database, after: int | str | None, name: str) -> tuple[int, int]:
    """Return below which (created_at, event id) a subscription's dead letters follow `after`, an `id:subscription`."""
    if after is None:
        return END_OF_TIME, END_OF_TIME
    number, _, passed = str(after).partition(":")
    event_id = _number(number)
    return _created(db, event_id), event_id + (name > passed)


def _created(db: Database, event_id: int) -> int:
    """Return when an event was created; of one that is not there any more, when the next one was."""
    rows = db.run("when_events", (event_id - 1,))
    return rows[0][1] if rows else END_OF_TIME


def _meant(db: Database, catalog: Catalog, which: DeadFilter, row: Row) -> bool:
    _, _, created_at, route, died_at = row
    if which.before is not None and from_micros(created_at if which.by == "created_at" else died_at) > which.before:
        return False
    return which.type is None or matches(which.type, catalog.route(db, route).type)


def _ended(row: Row) -> DeliveryState:
    subscription, _, status, attempt, retry_count, created_at, worker_id, errors = row
    with decoding():
        return DeliveryState(
            subscription=subscription,
            status=Status(status),
            attempt=attempt or 0,
            retry_count=retry_count or 0,
            next_retry_at=None,
            updated_at=from_micros(created_at),
            worker_id=worker_id,
            lease_until=None,
            lease_expired=False,
            errors=decode_errors(errors),
        )


def tags_filter(event_type: str | None, tags: Sequence[str]) -> Callable[[Row], bool] | None:
    """Return what an event row must satisfy: a type the pattern covers, and any of the tags; None: everything."""
    if event_type is None and not tags:
        return None

    def wanted(row: Row) -> bool:
        return (event_type is None or matches(event_type, row[2])) and (
            not tags or not set(tags).isdisjoint(split_tags(row[3]))
        )

    return wanted
