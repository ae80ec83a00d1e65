"""Where deliveries are, and how they stand: decided here, in one order, wherever it is asked for.

By a delivery's row; by an unset bit of a block; above the cursor, if wanted, without a skip and not erased: pending;
else by the last entry of the audit log.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Final, NamedTuple

from postbus.clock import from_micros
from postbus.model import DeliveryState, State, Status
from postbus.store.audit import End, clusters, ends_of
from postbus.store.deliveries import Block, block_from_row
from postbus.store.records import decode_errors, decoding, json_array, moment
from postbus.store.session import Session

FINAL: Final = frozenset({Status.COMPLETED, Status.COMPLETED_WITH_ERRORS, Status.FAILED})
"""What the audit log alone may say of a delivery: one that is pending or leased has a place of its own."""


class Unfinished(NamedTuple):
    """A delivery that has not ended: `has_row` if something individual is known of it, `block` if it is leased."""

    attempt: int
    has_row: bool
    state: int = State.PENDING
    due_at: int | None = None
    retry_count: int = 0
    updated_at: int = 0
    worker_id: str | None = None
    errors: str | None = None
    block: Block | None = None
    place: int = 0

    @property
    def epoch(self) -> int | None:
        """The epoch of its lease."""
        return None if self.block is None else self.block.epoch(self.place)


def find_unfinished(
    session: Session, ids: Collection[int], subscription: int | None = None, *, errors: bool = False
) -> dict[int, dict[int, Unfinished]]:
    """Return which of these events each subscription, by its number, has still to finish: dead and parked ones too.

    One statement looks at all places of an event: its snapshot sees it in just one, also while others move it on.
    `subscription`: look at this one only. `errors`: read them, too, which may be large.
    """
    found: dict[int, dict[int, Unfinished]] = defaultdict(dict)
    blocks: list[tuple[Block, Unfinished]] = []
    for some in clusters(ids):
        for number, event_id, type_, tags, block, packed, done, *stands in session.db.rows(
            "places", (json_array(some), some[0], some[-1], subscription, errors)
        ):
            each = Unfinished._make((*stands, None, 0))
            if block is not None:
                row = (block, number, event_id, packed, done, each.worker_id, each.due_at, each.updated_at)
                blocks.append((block_from_row(row), each))
            elif type_ is None or session.catalog.wants(session.catalog.name(number), type_, tags):
                found[number][event_id] = each
    wanted = frozenset(ids)
    for block, each in blocks:
        for place in block.left():
            if (event_id := block.ids[place]) in wanted:
                row = found[block.subscription].get(event_id, each)
                found[block.subscription][event_id] = row._replace(block=block, place=place)
    return found


def live_ids(session: Session, ids: Collection[int], subscription: int | None = None) -> set[int]:
    """Return which of these events a subscription, or any, still has: in a row, leased, or above its cursor."""
    return set[int]().union(*find_unfinished(session, ids, subscription).values())


def states(session: Session, ids: Sequence[int]) -> dict[int, tuple[DeliveryState, ...]]:
    """Return how each of these events stands in each subscription that has to do with it, by name."""
    catalog, unfinished, ends = session.catalog, find_unfinished(session, ids, errors=True), ends_of(session, ids)
    result: dict[int, tuple[DeliveryState, ...]] = {}
    for event_id in ids:
        found = {number: _ended(session, end) for number, end in ends[event_id].items() if end.status in FINAL}
        for number, some in unfinished.items():
            if event_id in some:
                found[number] = _unfinished(session, number, some[event_id])
        # What a deleted subscription has done is shown until another one takes its name.
        named = {
            state.subscription: state
            for number, state in sorted(found.items())
            if catalog.known_number(state.subscription) in (number, None)
        }
        result[event_id] = tuple(named[name] for name in sorted(named))
    return result


def settled(session: Session, event_id: int, subscriptions: Iterable[str]) -> bool:
    """Return whether an event is neither pending nor leased in any of these subscriptions."""
    unfinished = find_unfinished(session, [event_id])
    numbers = {session.catalog.known_number(name) for name in subscriptions}
    return not any(
        number in numbers and found[event_id].state in (State.PENDING, State.LEASED)
        for number, found in unfinished.items()
    )


def _unfinished(session: Session, number: int, each: Unfinished) -> DeliveryState:
    block = each.block
    later = each.state == State.PENDING and each.due_at is not None and each.due_at > session.now
    with decoding():
        return DeliveryState(
            subscription=session.catalog.name(number),
            status=State(each.state).status,
            attempt=each.attempt,
            retry_count=each.retry_count,
            next_retry_at=moment(each.due_at) if later else None,
            updated_at=from_micros(each.updated_at),
            worker_id=block.worker_id if block else each.worker_id,
            lease_until=from_micros(block.due_at) if block else None,
            lease_expired=block is not None and block.due_at <= session.now,
            errors=decode_errors(each.errors),
            parked=each.state == State.PARKED,
        )


def _ended(session: Session, end: End) -> DeliveryState:
    return DeliveryState(
        subscription=session.catalog.name(end.subscription),
        status=end.status or Status.COMPLETED,
        attempt=end.attempt or 0,
        retry_count=end.retry_count or 0,
        next_retry_at=None,
        updated_at=from_micros(end.created_at),
        worker_id=end.worker_id,
        lease_until=None,
        lease_expired=False,
        errors=decode_errors(end.errors),
    )
