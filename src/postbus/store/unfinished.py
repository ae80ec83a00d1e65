"""What a subscription has not finished: rows, leases, and what its cursor has still to come to; and its end."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from postbus.model import Action, Mode
from postbus.store.audit import Entry, ranges
from postbus.store.deliveries import Block, Changes, block_from_row
from postbus.store.records import json_array
from postbus.store.session import Session

CHUNK: Final = 1_000
COUNTED: Final = 500_000
"""How many events one statement counts: none may take a minute."""
MOST_COUNTED: Final = 10_000
"""How far is counted inside a write transaction."""
END_OF_LOG: Final = (1 << 63) - 1


class Unfinished(NamedTuple):
    """A delivery that has not ended: `block` if it is leased, `has_row` if something individual is known of it."""

    attempt: int
    has_row: bool
    block: Block | None = None
    place: int = 0

    @property
    def epoch(self) -> int | None:
        """The epoch of its lease."""
        return None if self.block is None else self.block.epoch(self.place)


def find_unfinished(session: Session, ids: Sequence[int]) -> dict[int, dict[int, Unfinished]]:
    """Return which of these events each subscription, by its number, has still to finish: dead and parked ones too."""
    catalog, array, wanted = session.catalog, json_array(ids), frozenset(ids)
    found: dict[int, dict[int, Unfinished]] = defaultdict(dict)
    for number, event_id, type_, tags, *_ in session.db.rows("above_cursors", (array,)):
        if catalog.wants(catalog.name(number), type_, tags):
            found[number][event_id] = Unfinished(0, has_row=False)
    for number, event_id, _, _, attempt, *_ in session.db.rows("rows_of_events", (array,)):
        found[number][event_id] = Unfinished(attempt, has_row=True)
    for first, last in ranges(ids):
        for block in map(block_from_row, session.db.rows("blocks_between", (first, last))):
            for place in block.left():
                if (event_id := block.ids[place]) in wanted:
                    row = found[block.subscription].get(event_id, Unfinished(1, has_row=False))
                    found[block.subscription][event_id] = row._replace(block=block, place=place)
    return found


def leased_after(session: Session, number: int, position: int) -> list[tuple[Block, int]]:
    """Return the places of a subscription's blocks, not settled yet, whose events lie after a position."""
    blocks = map(block_from_row, session.db.rows("blocks_around", (number, position + 1, END_OF_LOG)))
    return [(block, place) for block in blocks for place in block.left() if block.ids[place] > position]


def discard(session: Session, number: int, found: Mapping[int, Unfinished], actor: str) -> int:
    """End deliveries, each recorded as DISCARDED; return how many."""
    changes = Changes()
    for event_id, each in sorted(found.items()):
        if each.block is not None:
            changes.settle(each.block, 1 << each.place)
        if each.has_row:
            changes.drop(number, event_id)
        told = (event_id, number, Action.DISCARDED, session.now, None, each.attempt, each.epoch, actor)
        changes.entries.append(Entry(*told))
    changes.write(session)
    return len(found)


def discard_rows(session: Session, number: int, after: int, actor: str) -> list[int]:
    """End the first deliveries behind a position that have a row and are not leased; return whose they were."""
    rows = session.db.rows("some_deliveries", (number, after, CHUNK))
    discard(session, number, {event_id: Unfinished(attempt, has_row=True) for event_id, attempt in rows}, actor)
    return [row[0] for row in rows]


def discard_all(session: Session, name: str, after: int, actor: str) -> int:
    """End every delivery of a subscription behind a position that has a row or is leased; return how many."""
    number = session.catalog.number(name)
    leased = sorted(block.ids[place] for block, place in leased_after(session, number, after))
    total = 0
    for start in range(0, len(leased), CHUNK):
        found = find_unfinished(session, leased[start : start + CHUNK])
        total += discard(session, number, found[number], actor)
    while ids := discard_rows(session, number, after, actor):
        total, after = total + len(ids), ids[-1]
    return total


def count_ahead(session: Session, name: str, after: int, through: int, most: int | None = None) -> int:
    """Count the events of a range that a subscription would get: at most so many, if that is said."""
    catalog, total = session.catalog, 0
    is_queue, number = catalog.subscription(name).mode is Mode.QUEUE, catalog.number(name)
    size = COUNTED if most is None else most
    while after < through and (end := session.db.value("ahead_events", (after, through, size))):
        if is_queue:
            kinds = session.db.run("kinds_waiting", (number, after, end))
        else:
            kinds = session.db.run("kinds_between", (after, end))
        total += sum(count for type_, tags, count in kinds if catalog.wants(name, type_, tags))
        if most is not None and total >= most:
            return most
        after = end
    return total


def told_count(count: int) -> str:
    """Return how to say a number that was counted no further than `MOST_COUNTED`."""
    return f"{count:,} or more" if count >= MOST_COUNTED else f"{count:,}"
