"""What is left to do, and how much: due deliveries, work for some interests, the bus in figures."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final

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
    found = [db.value("next_lease_end", (number, now)), *_first_due(session, number, selection, now, END_OF_TIME)]
    return min((due for due in found if due is not None), default=None)


def _goes_on(session: Session, number: int) -> bool:
    """Return whether a pass would find events: beyond a queue's cursor, or special ones that it has not looked at."""
    return any(
        session.db.run("any_event", (position,)) or session.db.run("any_special", (max(position, looked),))
        for position, looked in session.db.run("cursor", (number,))
    )


def _has_due_row(session: Session, number: int, selection: Selection) -> bool:
    return any(True for _ in _first_due(session, number, selection, LOWEST, session.now))


def _first_due(session: Session, number: int, selection: Selection, after: int, through: int) -> Iterator[int]:
    """Go through the due times of the first pending rows of each priority and kind that fall due in a range of time.

    Of many kinds only those that are due already are found: the others cannot be had at a bounded cost.
    """
    db = session.db
    for alone in (0, 1):
        for (priority,) in db.run("priorities", (number, alone)):
            asked = (number, alone, priority, through, after, END_OF_TIME, 1)
            if selection.everything:
                yield from (row[0] for row in db.rows("due_any", asked))
            elif len(selection.kinds) <= EXACT_KINDS:
                yield from (row[0] for kind in selection.kinds for row in db.rows("due_kind", (*asked, kind)))
            elif through <= session.now:
                present = db.iterate("kinds_with_due", (number, alone, priority, through, LOWEST))
                yield from (through for (kind,) in present if kind in selection.kinds)


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
        if any(selection.wants(type_, tags) for _, type_, tags, *_ in session.db.rows("stories", (ids,))):
            return True
    return False


# ── figures ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class Backlog:
    """What waits in a subscription, or above its cursor: that is exact up to TOTAL_CAP, beyond it an estimate."""

    kinds: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    """How many events, by type and tags."""
    later: int = 0
    """How many of them are not due yet."""
    oldest: int | None = None
    """Since when the first one is due."""

    @property
    def total(self) -> int:
        """How many there are."""
        return self.kinds.total()

    def add(self, type_: str, tags: str, count: int, later: int, oldest: int | None) -> None:
        """Count some more of a type with these tags."""
        self.kinds[type_, tags] += count
        self.later += later
        if oldest is not None:
            self.oldest = oldest if self.oldest is None else min(oldest, self.oldest)


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
    """Count what waits above a queue's cursor: from so many on, an estimate from positions."""
    found = Backlog()
    looked = wanted = last = 0
    for chunk in _chunks_above(session, subscription):
        for type_, tags, count, later, oldest, all_, through in chunk:
            looked, last = looked + all_, max(last, through)
            if count and session.catalog.wants(subscription, type_, tags):
                wanted += count
                found.add(type_, tags, count, later, oldest)
        if wanted > TOTAL_CAP or looked >= MOST_LOOKED:
            ((position, _),) = session.db.run("cursor", (session.catalog.number(subscription),))
            share = (session.catalog.head - position) / (last - position)
            kinds = Counter({kind: round(count * share) for kind, count in found.kinds.items()})
            return Backlog(kinds, round(found.later * share), found.oldest)
    return found


def stats(session: Session, dead_owners: set[str]) -> Stats:
    """Return the bus in figures, without checkpoints; the handlers of dead processes handle nothing."""
    db, catalog = session.db, session.catalog
    since = session.now - MINUTE
    rates = {action: float(count) for action, count in db.run("recent_actions", (since,))}
    waiting = _waiting(session)
    dead = {catalog.name(number): count for number, count in db.run("dead_depth")}
    return Stats(
        events=_count_events(session),
        head=catalog.head,
        subscriptions=_queues(session, waiting, dead),
        rates=rates | {"published": float(db.value("recent_events", (since,)))},
        store_bytes=db.value("store_bytes"),
        unhandled=_unhandled(session, waiting, dead_owners),
        dead=dead,
        parked={catalog.name(number): count for number, count in db.run("parked_depth")},
    )


def _waiting(session: Session) -> dict[str, Backlog]:
    """Count what waits in each subscription: pending rows, and above a queue's cursor."""
    db, catalog = session.db, session.catalog
    found = {each.name: backlog(session, each.name) for each in catalog.subscriptions()}
    for number, identity, *counted in db.run("depth", (session.now,)):
        kind = catalog.kind(db, identity)
        found.setdefault(catalog.name(number), Backlog()).add(kind.type, kind.tags, *counted)
    return found


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


def _queues(session: Session, waiting: dict[str, Backlog], dead: dict[str, int]) -> tuple[SubscriptionStats, ...]:
    """Return the figures of queue subscriptions, by name."""
    db, catalog, now = session.db, session.catalog, session.now
    ended = {(number, status): count for number, status, count in db.run("count_completed")}
    found: list[SubscriptionStats] = []
    for name in (each.name for each in catalog.subscriptions() if each.mode is Mode.QUEUE):
        number, pending, oldest = catalog.number(name), waiting[name], waiting[name].oldest
        blocks = map(block_from_row, db.iterate("blocks_below", (number, END_OF_TIME)))
        found.append(
            SubscriptionStats(
                name=name,
                pending=pending.total,
                scheduled=pending.later,
                processing=sum(len(block.ids) - block.done.bit_count() for block in blocks),
                dead=dead.get(name, 0),
                completed=ended.get((number, Status.COMPLETED), 0),
                completed_with_errors=ended.get((number, Status.COMPLETED_WITH_ERRORS), 0),
                oldest_age=None if oldest is None else timedelta(microseconds=max(0, now - oldest)),
            )
        )
    return tuple(found)


def _unhandled(session: Session, waiting: dict[str, Backlog], dead_owners: set[str]) -> dict[str, int]:
    """Count by subscription and type what is pending and covered by no handler of a living process."""
    handled: dict[str, list[Interest]] = defaultdict(list)
    for _, _, name, pattern, tags, _, owner, _ in session.db.run("handlers"):
        if owner not in dead_owners:
            handled[name].append(Interest(pattern, frozenset(split_tags(tags))))
    left: dict[str, int] = defaultdict(int)
    for name, pending in waiting.items():
        for (type_, tags), count in pending.kinds.items():
            if not any(each.wants(type_, split_tags(tags)) for each in handled[name]):
                left[f"{name}/{type_}"] += count
    return dict(left)
