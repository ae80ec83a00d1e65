"""What is left to do, and how much: due deliveries, work for some interests, the bus in figures."""

from collections import defaultdict
from collections.abc import Iterator
from datetime import timedelta
from typing import Final, NamedTuple

from postbus.model import Mode, Stats, Status, SubscriptionStats
from postbus.pattern import Interest
from postbus.store.catalog import Selection
from postbus.store.contract import Work
from postbus.store.deliveries import block_from_row
from postbus.store.records import json_array, split_tags
from postbus.store.session import Row, Session

TOTAL_CAP: Final = 10_000
MOST_LOOKED: Final = 40_000
"""How many events are looked at to count some; the rest is estimated."""
JUMP: Final = 1_000_000_000
"""Restoring a backup lets ids go on at a multiple of this."""
LOWEST: Final = -(1 << 63)
END_OF_TIME: Final = (1 << 63) - 1
MINUTE: Final = 60_000_000
EXACT_KINDS: Final = 64
"""Up to so many kinds are asked about one by one."""
FIRST_CHUNK: Final = 64
CHUNK: Final = 4_096


# ── what is left to do ───────────────────────────────────────────────────────────────────────────────────────────────


def work(session: Session, subscription: str, interests: tuple[Interest, ...]) -> Work:
    """Tell what some interests have left to do."""
    number, selection = session.catalog.known_number(subscription), session.catalog.select(interests)
    if number is None:
        return Work(due=False, leased=False, retrying=False)
    retried = session.db.iterate("retried_kinds", (number,))
    return Work(
        due=_has_due_row(session, number, selection) or _has_due_above(session, subscription, selection),
        leased=_has_leased(session, number, selection),
        retrying=any(selection.everything or kind in selection.kinds for (kind,) in retried),
    )


def is_due(session: Session, subscription: str, selection: Selection) -> bool:
    """Return whether a claim would find something, or change something, without taking the write lock."""
    number = session.catalog.number(subscription)
    return (
        bool(session.db.run("any_overdue", (session.now,)))
        or (not selection.nothing and _goes_on(session, number))
        or _has_due_row(session, number, selection)
    )


def next_due(session: Session, subscription: str, selection: Selection) -> int | None:
    """Return when the next of these falls due, or a lease ends; None when nothing will, or to find out is not cheap."""
    number, db, now = session.catalog.number(subscription), session.db, session.now
    if selection.nothing:
        return None
    if _goes_on(session, number):
        return now
    found = [db.value("next_lease_end", (number, now))]
    for alone in (0, 1):
        for (priority,) in db.run("priorities", (number, alone)):
            where = (number, alone, priority, now)
            if selection.everything:
                found.append(db.value("next_due_any", where))
            elif len(selection.kinds) <= EXACT_KINDS:
                found += (db.value("next_due_kind", (*where, kind)) for kind in selection.kinds)
    return min((due for due in found if due is not None), default=None)


def _goes_on(session: Session, number: int) -> bool:
    """Return whether a pass would find events: beyond a queue's cursor, or special ones that it has not looked at."""
    return any(
        session.db.run("any_event", (position,)) or session.db.run("any_special", (max(position, looked),))
        for position, looked in session.db.run("cursor", (number,))
    )


def _has_due_row(session: Session, number: int, selection: Selection) -> bool:
    db = session.db
    for alone in (0, 1):
        for (priority,) in db.run("priorities", (number, alone)):
            where = (number, alone, priority, session.now)
            first = (*where, LOWEST, LOWEST, 1)
            if selection.everything:
                found = bool(db.rows("due_any", first))
            elif len(selection.kinds) <= EXACT_KINDS:
                found = any(db.rows("due_kind", (*first, kind)) for kind in selection.kinds)
            else:
                found = any(kind in selection.kinds for (kind,) in db.iterate("kinds_with_due", (*where, LOWEST)))
            if found:
                return True
    return False


def _has_due_above(session: Session, subscription: str, selection: Selection) -> bool:
    """Return whether something that is due, wanted and covered waits above a queue's cursor."""
    wants = session.catalog.wants
    return any(
        count > later and wants(subscription, type_, tags) and selection.wants(type_, tags)
        for chunk in _chunks_above(session, subscription)
        for type_, tags, count, later, *_ in chunk
    )


def _has_leased(session: Session, number: int, selection: Selection) -> bool:
    for row in session.db.iterate("blocks_below", (number, END_OF_TIME)):
        if selection.everything:
            return True
        block = block_from_row(row)
        ids = json_array(block.ids[place] for place in block.left())
        if any(selection.wants(type_, tags) for type_, tags in session.db.run("kinds_of", (ids,))):
            return True
    return False


# ── figures ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Backlog(NamedTuple):
    """What waits above a queue's cursor: exact up to TOTAL_CAP, beyond it an estimate from positions."""

    kinds: dict[tuple[str, str], int]
    """How many events, by type and tags."""
    later: int
    """How many of them are not due yet."""
    oldest: int | None
    """Since when the first one is due."""

    @property
    def total(self) -> int:
        """How many there are."""
        return sum(self.kinds.values())


def _chunks_above(session: Session, subscription: str) -> Iterator[list[Row]]:
    """Go through what lies above a queue's cursor, oldest first.

    A chunk has for each type and tags how many there are, how many of them are not due, since when the first is due,
    and, of the ones that were dealt with as well, how many and the last id.
    """
    number, size = session.catalog.number(subscription), FIRST_CHUNK
    for position, _ in session.db.run("cursor", (number,)):
        last = position
        while chunk := session.db.run("backlog", (number, last, size, session.now)):
            yield chunk
            if sum(row[5] for row in chunk) < size:
                return
            last, size = max(row[6] for row in chunk), min(4 * size, CHUNK)


def backlog(session: Session, subscription: str) -> Backlog:
    """Count what waits above a queue's cursor."""
    kinds: dict[tuple[str, str], int] = defaultdict(int)
    later = looked = wanted = last = 0
    oldest: int | None = None
    for chunk in _chunks_above(session, subscription):
        for type_, tags, count, not_due, since, all_, through in chunk:
            looked, last = looked + all_, max(last, through)
            if count and session.catalog.wants(subscription, type_, tags):
                kinds[type_, tags] += count
                wanted, later = wanted + count, later + not_due
                oldest = since if oldest is None or (since is not None and since < oldest) else oldest
        if wanted > TOTAL_CAP or looked >= MOST_LOOKED:
            ((position, _),) = session.db.run("cursor", (session.catalog.number(subscription),))
            share = (session.catalog.head - position) / (last - position)
            return Backlog({kind: round(count * share) for kind, count in kinds.items()}, round(later * share), oldest)
    return Backlog(kinds, later, oldest)


def stats(session: Session, dead_owners: set[str]) -> Stats:
    """Return the bus in figures, without checkpoints; the handlers of dead processes handle nothing."""
    db, catalog = session.db, session.catalog
    since = session.now - MINUTE
    rates = {action: float(count) for action, count in db.run("recent_actions", (since,))}
    queues = [each.name for each in catalog.subscriptions() if each.mode is Mode.QUEUE]
    backlogs = {name: backlog(session, name) for name in queues}
    dead = {catalog.name(number): count for number, count in db.run("dead_depth")}
    return Stats(
        events=_count_events(session),
        head=catalog.head,
        subscriptions=_queues(session, backlogs, dead),
        rates=rates | {"published": float(db.value("recent_events", (since,)))},
        store_bytes=db.value("store_bytes"),
        unhandled=_unhandled(session, backlogs, dead_owners),
        dead=dead,
        parked={catalog.name(number): count for number, count in db.run("parked_depth")},
    )


def _count_events(session: Session) -> int:
    """Count the events of the log: beyond a bound as many as there are ids, but for the gaps that restoring leaves."""
    db, head = session.db, session.catalog.head
    ((last, count),) = db.run("first_events", (MOST_LOOKED,))
    if count < MOST_LOOKED:
        return count
    gaps, before = 0, last
    for jump in range(last - last % JUMP + JUMP, head + 1, JUMP):
        before = max(before, db.value("last_events", (jump,)))
        gaps += jump - before
        before = jump
    return count + head - last - gaps


def _queues(session: Session, backlogs: dict[str, Backlog], dead: dict[str, int]) -> tuple[SubscriptionStats, ...]:
    """Return the figures of queue subscriptions, by name."""
    db, catalog, now = session.db, session.catalog, session.now
    depth = {number: row for number, *row in db.run("depth", (now,))}
    ended = {(number, status): count for number, status, count in db.run("count_completed")}
    found: list[SubscriptionStats] = []
    for name, above in backlogs.items():
        number = catalog.number(name)
        pending, later, oldest = depth.get(number, (0, 0, None))
        blocks = map(block_from_row, db.iterate("blocks_below", (number, END_OF_TIME)))
        since = min((each for each in (oldest, above.oldest) if each is not None), default=None)
        found.append(
            SubscriptionStats(
                name=name,
                pending=pending + above.total,
                scheduled=later + above.later,
                processing=sum(len(block.ids) - block.done.bit_count() for block in blocks),
                dead=dead.get(name, 0),
                completed=ended.get((number, Status.COMPLETED), 0),
                completed_with_errors=ended.get((number, Status.COMPLETED_WITH_ERRORS), 0),
                oldest_age=None if since is None else timedelta(microseconds=max(0, now - since)),
            )
        )
    return tuple(found)


def _unhandled(session: Session, backlogs: dict[str, Backlog], dead_owners: set[str]) -> dict[str, int]:
    """Count by subscription and type what is pending and covered by no handler of a living process."""
    db, catalog = session.db, session.catalog
    pending: dict[tuple[str, str, str], int] = defaultdict(int)
    for number, identity, count in db.run("depth_by_kind"):
        kind = catalog.kind(db, identity)
        pending[catalog.name(number), kind.type, kind.tags] += count
    for name, above in backlogs.items():
        for (type_, tags), count in above.kinds.items():
            pending[name, type_, tags] += count
    handled: dict[str, list[Interest]] = defaultdict(list)
    for _, _, name, pattern, tags, _, owner, _ in db.run("handlers"):
        if owner not in dead_owners:
            handled[name].append(Interest(pattern, frozenset(split_tags(tags))))
    left: dict[str, int] = defaultdict(int)
    for (name, type_, tags), count in pending.items():
        if not any(each.wants(type_, split_tags(tags)) for each in handled[name]):
            left[f"{name}/{type_}"] += count
    return dict(left)
