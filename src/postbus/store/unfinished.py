"""What a subscription has not finished: rows, leases, and what its cursor has still to come to; and its end."""

from collections.abc import Mapping
from typing import Final

from postbus.model import Action, Mode
from postbus.store.audit import Entry
from postbus.store.deliveries import Block, Changes, block_from_row
from postbus.store.session import Session
from postbus.store.status import Unfinished, find_unfinished

CHUNK: Final = 1_000
COUNTED: Final = 500_000
"""How many events one statement counts: none may take a minute."""
MOST_COUNTED: Final = 10_000
"""How far is counted inside a write transaction."""
END_OF_LOG: Final = (1 << 63) - 1


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
