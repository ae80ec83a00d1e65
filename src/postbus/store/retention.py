"""What leaves the store: dead letters that are revived or purged, pruned events, erased content, subscriptions."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Final, NamedTuple

from postbus.errors import Conflict, InvalidRequest
from postbus.model import Action, Erasable, Mode, Pruned, Status, Stream
from postbus.store.arrays import unpack
from postbus.store.audit import Entry, add_entries
from postbus.store.deliveries import hold
from postbus.store.followers import STATEMENTS, erased, span
from postbus.store.records import checksum, json_array
from postbus.store.session import Row, Session, bump
from postbus.store.status import find_unfinished, live_ids
from postbus.store.unfinished import (
    END_OF_LOG,
    MOST_COUNTED,
    count_ahead,
    discard,
    discard_all,
    discard_rows,
    told_count,
)

BLANK: Final = "null"
LOOK: Final = 10_000
FIRST: Final = -1
"""A position that all events lie behind."""


# ── dead letters ─────────────────────────────────────────────────────────────────────────────────────────────────────


def revive(session: Session, keys: Sequence[Row], actor: str) -> int:
    """Make dead letters pending again, as if never tried; return how many were still dead."""
    dead = _still_dead(session, keys)
    session.db.many("revive", [(session.now, number, event_id) for number, event_id, _ in dead])
    _tell(session, dead, Action.RETRIED, Status.PENDING, actor)
    return len(dead)


def purge(session: Session, keys: Sequence[Row], actor: str) -> int:
    """Remove dead letters; return how many were still dead."""
    dead = _still_dead(session, keys)
    session.db.many("drop_delivery", [row[:2] for row in dead])
    _tell(session, dead, Action.PURGED, Status.FAILED, actor)
    return len(dead)


def _still_dead(session: Session, keys: Sequence[Row]) -> Sequence[Row]:
    """Return number, event and attempts of the dead ones among (event, number)."""
    by_number: dict[int, list[int]] = {}
    for event_id, number, *_ in keys:
        by_number.setdefault(number, []).append(event_id)
    return [
        (number, *row)
        for number, ids in sorted(by_number.items())
        for row in session.db.rows("dead_among", (number, json_array(sorted(ids))))
    ]


def _tell(session: Session, dead: Sequence[Row], action: Action, status: Status, actor: str) -> None:
    add_entries(
        session,
        [
            Entry(event_id, number, action, session.now, status, attempt, worker_id=actor)
            for number, event_id, attempt in dead
        ],
    )


# ── subscriptions ────────────────────────────────────────────────────────────────────────────────────────────────────


def discard_some(session: Session, name: str, actor: str) -> int:
    """End a part of what a subscription has not finished and nobody works on; 0 once little of it is left."""
    number = session.catalog.number(name)
    if not session.db.value("many_unleased", (number,)):
        return 0
    return len(discard_rows(session, number, FIRST, actor))


def delete_subscription(session: Session, name: str, actor: str) -> int:
    """Remove a subscription and its unfinished deliveries; return how many those were.

    One entry tells of all that its cursor had still to come to, and what it counts stops at 10,000.
    """
    db, number = session.db, hold(session, "hold_alone", name, FIRST)
    is_queue = session.catalog.subscription(name).mode is Mode.QUEUE
    count = discard_all(session, name, FIRST, actor)
    if is_queue:
        position, head = db.run("cursor", (number,))[0][0], span(session, Stream.EVENTS).head
        waiting = count_ahead(session, name, position, head, MOST_COUNTED)
        if waiting:
            message = f"deleted at {position:,} of {head:,}: {told_count(waiting)} events were still to come"
            told = Entry(head, number, Action.DISCARDED, session.now, worker_id=actor, error_message=message)
            add_entries(session, [told])
        count += waiting
    db.run("former", (number,))
    db.run("drop_subscription", (number,))
    db.run("drop_cursor", (number,))
    db.run("drop_skips_after", (number, FIRST))
    db.run("drop_deliveries_after", (number, FIRST))
    db.run("drop_checkpoint", (name,))
    bump(session)
    return count


# ── prune ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def prune(
    session: Session, stream: Stream, after: int, through: int, *, limit: int, past: frozenset[str] = frozenset()
) -> Pruned:
    """Remove what may go of the next `limit` events or entries. The bound moves with it: they are never seen apart.

    A row of the audit log goes whole or not at all; at least one is looked at.
    """
    _require_room(session, stream, after, through)
    _require_passed(session, stream, through, past)
    part = _next_part(session, stream, after, through, limit)
    session.db.run("raise_pruned", (part.reached, STATEMENTS[stream].pruned))
    removed, kept = part.gone, json_array(sorted(part.kept))
    if stream is Stream.AUDIT:
        session.db.run("prune_audit", (after, part.reached, kept))
    elif part.looked:
        removed = session.db.count("prune_events", (after, part.reached, kept))
    return Pruned(removed, part.looked - removed, part.reached, part.done)


def prunable(session: Session, stream: Stream, through: int) -> int:
    """Count what may go up to a position, whatever was pruned before."""
    total = after = 0
    done = False
    while not done:
        part = _next_part(session, stream, after, through, LOOK)
        total, after, done = total + part.gone, part.reached, part.done
    return total


def _require_room(session: Session, stream: Stream, after: int, through: int) -> None:
    whole = span(session, stream)
    if through > whole.head:
        raise InvalidRequest(f"{stream} can be read up to {whole.head:,}: pruning up to {through:,} is refused")
    if after > whole.pruned:
        raise InvalidRequest(f"{stream} were pruned up to {whole.pruned:,}: begin there, not at {after:,}")


def _require_passed(session: Session, stream: Stream, through: int, past: frozenset[str]) -> None:
    """Raise Conflict for a follower that would be cut off. A position of another log counts: it is no licence."""
    for name, stands in session.db.run("behind", (stream, through)):
        if name not in past:
            raise Conflict(
                f"subscription {name!r} has come to {stands:,} of {stream}: pruning up to {through:,} "
                "would cut it off. Let it go on, delete it, or prune past it on purpose"
            )


class Part(NamedTuple):
    """What a range begins with."""

    reached: int
    """All up to here was looked at."""
    done: bool
    """That is all of the range."""
    looked: int
    """How many events, or entries within the range."""
    gone: int
    """How many of them may go."""
    kept: set[int]
    """The rows that stay."""


def _next_part(session: Session, stream: Stream, after: int, through: int, limit: int) -> Part:
    if stream is Stream.AUDIT:
        return _next_rows(session, after, through, limit)
    ids = [row[0] for row in session.db.rows("next_ids", (after, through, limit))]
    kept, done = live_ids(session, ids), len(ids) < limit
    return Part(through if done else ids[-1], done, len(ids), len(ids) - len(kept), kept)


def _next_rows(session: Session, after: int, through: int, limit: int) -> Part:
    """Look at the next rows of the audit log: those stay that tell of a live event, or go on beyond the position."""
    rows = session.db.rows("next_rows", (after, through, limit))
    ends: dict[int, int] = {}
    total = 0
    for row, _, entries, _ in rows:
        if ends and total + entries > limit:
            break
        ends[row], total = row + entries - 1, total + entries
    about = {row: unpack(ids) if ids else (event_id,) for row, event_id, _, ids in rows if row in ends}
    live = live_ids(session, sorted({event_id for ids in about.values() for event_id in ids}))
    kept = {row for row, end in ends.items() if end > through or not live.isdisjoint(about[row])}
    looked = sum(min(end, through) - row + 1 for row, end in ends.items())
    gone = sum(end - row + 1 for row, end in ends.items() if row not in kept)
    done = len(ends) == len(rows)
    return Part(through if done else max(ends.values()), done, looked, gone, kept)


# ── erase ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def bearing(read: Callable[[], AbstractContextManager[Session]], uid: str | None, key: str | None) -> Iterator[int]:
    """Yield the ids of the events that bear a uid or a key. No index knows: the log is read, a part at a time."""
    last: int | None = 0 if uid is not None or key is not None else None
    while last is not None:
        with read() as session:
            end = session.db.value("ahead_events", (last, END_OF_LOG, LOOK))
            found = [] if end is None else session.db.run("bearing", (last, end, uid, key))
        yield from (row[0] for row in found)
        last = end


def erasable(session: Session, ids: Sequence[int]) -> Erasable:
    """Count what there is to blank of these events."""
    array = json_array(ids)
    events, entries = (session.db.value(name, (array,)) for name in ("erasable_events", "erasable_log"))
    return Erasable(tuple(ids), events, entries)


def erase(session: Session, ids: Sequence[int], actor: str) -> int:
    """Leave nothing of these but what the contract says; return how many had more, or no record of being erased."""
    db, now = session.db, session.now
    db.run("hold_deliveries", (None, json_array(ids)))
    changed = set(ids) - erased(session, ids)
    for number, found in sorted(find_unfinished(session, ids).items()):
        discard(session, number, found, actor)
        changed |= found.keys()
    rows = db.run("identities", (json_array(ids),))
    blank = [(checksum(uid, kind, tags, BLANK), now, identity) for identity, uid, kind, tags in rows]
    changed |= {row[0] for row in db.many("blank_event", blank)}
    changed |= {row[0] for row in db.many("blank_log", [(identity,) for identity in ids])}
    db.many("blank_stopped", [(identity,) for identity in ids])
    add_entries(session, [Entry(identity, 0, Action.ERASED, now, worker_id=actor) for identity in sorted(changed)])
    return len(changed)
