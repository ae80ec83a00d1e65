"""Claim deliveries: due rows first, then a pass over the log, all in one write transaction."""

import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from heapq import merge
from itertools import islice, takewhile
from typing import Final, NamedTuple

from postbus.model import Action, Mode, Status
from postbus.store.arrays import pack, pack_bits
from postbus.store.audit import PLACE_BITS, SPAN, Entries, Entry, add_array, add_entries
from postbus.store.catalog import Selection
from postbus.store.contract import Claim
from postbus.store.deliveries import PLACES, Story, fresh_row
from postbus.store.leases import Taken, Won
from postbus.store.records import json_array
from postbus.store.session import Row, Session

LOWEST: Final = -(1 << 63)
EXACT_KINDS: Final = 64
ROTATING_KINDS: Final = 32
SPECIALS: Final = 1_000
PASS_CHUNK: Final = 1_024
MOST_PASSED: Final = 4_096
"""How many events one claim passes at most: other writers wait for it."""
LONGEST_PASS: Final = 0.2
MICROSECOND: Final = timedelta(microseconds=1)


class Candidate(NamedTuple):
    """A delivery that a claim may take; `attempt` is how many attempts it had. Sorts as it is due."""

    due_at: int
    event_id: int
    attempt: int
    retry_count: int
    max_retries: int | None
    fresh: bool
    has_row: bool = True


class Room:
    """How many deliveries a claim may still take, and how many of them in their last attempt."""

    def __init__(self, session: Session, asked: Claim) -> None:
        policy = session.catalog.subscription(asked.subscription).retry or asked.policy
        self._attempts = policy.attempts
        self.left = asked.limit
        self._free = asked.limit if asked.free is None else asked.free

    def is_last(self, each: Candidate) -> bool:
        """Return whether the attempt that is about to begin may not be repeated."""
        allowed = self._attempts if each.max_retries is None else each.max_retries + 1
        return each.attempt + 1 >= allowed

    def takes(self, each: Candidate) -> bool:
        """Take a delivery if there is room for it."""
        last = self.is_last(each)
        if not self.left or (last and not self._free):
            return False
        self.left -= 1
        self._free -= last
        return True


def claim(session: Session, asked: Claim) -> Won:
    """Lease what a claim may have, in the order of the contract."""
    catalog, now = session.catalog, session.now
    subscription, number = catalog.subscription(asked.subscription), catalog.number(asked.subscription)
    nothing = Won([], suspects=False, policy=subscription.retry, now=now)
    if subscription.paused:
        return nothing._replace(more=False)
    is_queue = subscription.mode is Mode.QUEUE
    more = is_queue and _find_specials(session, asked.subscription, number)
    selection = catalog.select(asked.interests, asked.blocked)
    suspects = list(_due(session, number, selection, 1, alone=1))
    room = Room(session, asked)
    if suspects and asked.alone:
        return nothing._replace(taken=_take(session, asked, room, suspects, suspect=True))
    due = list(_due(session, number, selection, asked.limit, lowest=0))
    found = [each for each in due if room.takes(each)]
    left = len(found) < len(due)
    if is_queue and room.left and not selection.nothing:
        passed, ended = _pass(session, asked.subscription, selection, room)
        found += passed
        more = more or not ended
    if room.left and not more and not left:
        found += filter(room.takes, _due(session, number, selection, room.left, highest=-1))
    # Where only last attempts are left, and none of them may be taken now, it makes no sense to ask again at once.
    more = not (asked.free == 0 and not found) and (more or left or not room.left)
    return nothing._replace(taken=_take(session, asked, room, found), suspects=bool(suspects), more=more)


# ── due rows ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _due(
    session: Session,
    number: int,
    selection: Selection,
    limit: int,
    *,
    alone: int = 0,
    lowest: int = LOWEST,
    highest: int = -LOWEST - 1,
) -> Iterator[Candidate]:
    """Go through due rows within some priorities: by priority, due time and id, at most `limit`."""
    if limit <= 0:
        return
    for (priority,) in session.db.run("priorities", (number, alone)):
        if not lowest <= priority <= highest:
            continue
        where = (number, alone, priority, session.now)
        for candidate in islice(_due_of(session, selection, where, limit), limit):
            yield candidate
            limit -= 1
        if limit == 0:
            return


def _due_of(session: Session, selection: Selection, where: Row, limit: int) -> Iterator[Candidate]:
    """Go through the due rows of one priority."""
    if selection.everything:
        yield from _range(session, "due_any", where, (), limit)
    elif len(selection.kinds) <= EXACT_KINDS:
        yield from _merged(session, where, list(selection.kinds), limit)
    else:
        turn = _turn(session, selection, where)
        while limit > 0 and (chosen := list(islice(turn, ROTATING_KINDS))):
            selection.turn = chosen[-1]
            for candidate in islice(_merged(session, where, chosen, limit), limit):
                yield candidate
                limit -= 1


def _merged(session: Session, where: Row, kinds: list[int], limit: int) -> Iterator[Candidate]:
    step = -(-2 * limit // len(kinds)) if len(kinds) > 1 else limit
    return merge(*(_range(session, "due_kind", where, (kind,), step) for kind in kinds))


def _range(session: Session, query: str, where: Row, kind: Row, step: int) -> Iterator[Candidate]:
    """Go through one range of an index in order, fetched `step` rows at a time, as far as the caller goes."""
    due_at = event_id = LOWEST
    while True:
        rows = session.db.rows(query, (*where, due_at, event_id, step, *kind))
        yield from (Candidate._make((*row, True)) for row in rows)
        if len(rows) < step:
            return
        due_at, event_id, *_ = rows[-1]


def _turn(session: Session, selection: Selection, where: Row) -> Iterator[int]:
    """Go once round the kinds that hold something due, from where the last claim stopped: each gets its turn."""
    start = selection.turn
    yield from _present(session, selection, where, start)
    if start > LOWEST:
        yield from takewhile(lambda kind: kind <= start, _present(session, selection, where, LOWEST))


def _present(session: Session, selection: Selection, where: Row, after: int) -> Iterator[int]:
    return (row[0] for row in session.db.iterate("kinds_with_due", (*where, after)) if row[0] in selection.kinds)


# ── the log ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _find_specials(session: Session, name: str, number: int) -> bool:
    """Make rows of special events that were not looked at yet, wherever the cursor is; return whether more may come.

    So priority overtakes a backlog. A skip tells the pass that they were dealt with.
    """
    position, looked = session.db.run("cursor", (number,))[0]
    after = max(position, looked)
    if not session.db.run("any_special", (after,)):
        return False
    events = session.db.rows("specials", (number, after, SPECIALS))
    stories = [Story._make(event[:7]) for event in events if not event[7]]
    _put(session, number, [each for each in stories if session.catalog.wants(name, each.type, each.tags)])
    session.db.run("add_skips", (number, json_array(each[0] for each in events)))
    session.db.run("move_cursor", (position, events[-1][0], number))
    return len(events) == SPECIALS


def _pass(session: Session, name: str, selection: Selection, room: Room) -> tuple[list[Candidate], bool]:
    """Move a queue's cursor over the log until there is no room for the next event that these interests cover.

    Returns the events, and whether the log has ended. What others handle becomes a pending row, what the subscription
    does not want is dropped. Nothing is passed behind the last event that fits.
    """
    db, catalog = session.db, session.catalog
    number = catalog.number(name)
    position, looked = db.run("cursor", (number,))[0]
    found: list[Candidate] = []
    others: list[Story] = []
    passed, ends = 0, time.monotonic() + LONGEST_PASS
    last, size = position, room.left
    full = ended = False
    while last < catalog.head and not full and passed < MOST_PASSED and time.monotonic() < ends:
        size = min(PASS_CHUNK, max(room.left, 2 * size))
        if not (events := db.rows("next_events", (last, size))):
            ended = True  # what was pruned, or left out by a restore
            break
        skips = {row[0] for row in db.run("take_skips", (number, events[-1][0]))}
        for *columns, special, erased in events:
            story = Story._make(columns)
            wanted = story.event_id not in skips and not erased and catalog.wants(name, story.type, story.tags)
            mine = wanted and not special and selection.wants(story.type, story.tags)
            each = Candidate(story.due_at, story.event_id, 0, 0, story.max_retries, fresh=True, has_row=False)
            if full := mine and not room.takes(each):
                break
            last = story.event_id
            passed += 1
            if mine:
                found.append(each)
            elif wanted:
                others.append(story)
        if behind := [each for each in skips if each > last]:
            db.run("add_skips", (number, json_array(behind)))
    _put(session, number, others)
    if last > position:
        db.run("move_cursor", (last, max(last, looked), number))
    return found, ended or last >= catalog.head


def _put(session: Session, number: int, stories: Sequence[Story]) -> None:
    """Make pending rows."""
    if stories:
        session.catalog.require_kinds(session.db, {each.kind for each in stories})
        session.db.many("put_delivery", [fresh_row(number, each) for each in stories])


# ── blocks ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _take(
    session: Session, asked: Claim, room: Room, found: Sequence[Candidate], *, suspect: bool = False
) -> list[Taken]:
    """Lease what was found: in one block as far as the claim shares one, else each in a block of its own."""
    if not found:
        return []
    number = session.catalog.number(asked.subscription)
    now, own = session.now, session.catalog.subscription(asked.subscription).lease
    until = now + (own or asked.lease) // MICROSECOND
    epochs: dict[int, int] = {}
    blocks = list(_blocks(room, found, shared=asked.shared and not suspect))
    first = session.db.value("draw_numbers", (len(blocks),)) - len(blocks) + 1
    written: list[Row] = []
    for block, ids in enumerate(blocks, first):
        epochs |= {event_id: block << PLACE_BITS | place for place, event_id in enumerate(ids)}
        packed = pack(ids) if len(ids) > 1 else b""
        written.append(
            (block, number, ids[0], ids[-1], until, now, asked.owner, asked.worker_id, packed, pack_bits(0, len(ids)))
        )
    session.db.many("add_block", written)
    if fresh := [each.event_id for each in found if each.has_row and each.fresh]:
        session.db.run("take_fresh", (number, json_array(fresh)))
    if known := [each.event_id for each in found if each.has_row and not each.fresh]:
        session.db.run("hold_rows", (number, json_array(known), asked.worker_id, now))
    _log_picked(session, asked, found, epochs)
    return [
        Taken(each.event_id, each.attempt + 1, each.retry_count, epochs[each.event_id], until, suspect)
        for each in found
    ]


def _blocks(room: Room, found: Sequence[Candidate], *, shared: bool) -> Iterator[Sequence[int]]:
    """Share out what was found to blocks.

    An attempt that may not be repeated, and one that is run alone, have blocks of their own: a delivery must not die
    unrun because its neighbour killed the worker.
    """
    together: list[int] = []
    for each in found:
        if shared and not room.is_last(each):
            together.append(each.event_id)
        else:
            yield (each.event_id,)
    together.sort()
    start = 0
    for place, event_id in enumerate(together):
        if place - start == PLACES or event_id - together[start] >= SPAN:
            yield together[start:place]
            start = place
    if together:
        yield together[start:]


def _log_picked(session: Session, asked: Claim, found: Sequence[Candidate], epochs: dict[int, int]) -> None:
    """Record who claimed: first attempts in one block by one row."""
    number, now = session.catalog.number(asked.subscription), session.now
    first: dict[int, list[int]] = {}
    entries: list[Entry] = []
    for each in found:
        epoch = epochs[each.event_id]
        if asked.shared and each.attempt == 0:
            first.setdefault(epoch >> PLACE_BITS, []).append(epoch & PLACES - 1 | each.event_id << PLACE_BITS)
        else:
            entries.append(
                Entry(each.event_id, number, Action.PICKED, now, Status.PROCESSING, each.attempt + 1, epoch,
                      asked.worker_id)
            )  # fmt: skip
    add_entries(session, entries)
    for block, places in first.items():
        places.sort()
        add_array(
            session,
            Entries(
                subscription=number,
                action=Action.PICKED,
                created_at=now,
                status=Status.PROCESSING,
                number=block,
                worker_id=asked.worker_id,
                ids=[each >> PLACE_BITS for each in places],
                places=[each & PLACES - 1 for each in places],
            ),
        )
