"""How events stand in subscriptions: decided here, in one order, wherever it is asked for.

By a delivery's row; by an unset bit of a block; above the cursor, if wanted, without a skip and not erased: pending;
else by the last entry of the audit log.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Final

from postbus.clock import from_micros
from postbus.model import DeliveryState, State, Status
from postbus.store.arrays import unpack, unpack_bits
from postbus.store.audit import End, ends_of, ranges
from postbus.store.deliveries import Block, block_from_row
from postbus.store.records import decode_errors, decoding, json_array, moment
from postbus.store.session import Row, Session

FINAL: Final = frozenset({Status.COMPLETED, Status.COMPLETED_WITH_ERRORS, Status.FAILED})
"""What the audit log alone may say of a delivery: one that is pending or leased has a place of its own."""


def states_of(session: Session, event_id: int) -> tuple[DeliveryState, ...]:
    """Return how an event stands in each subscription that has to do with it, by name."""
    return states(session, [event_id])[event_id]


def states(session: Session, ids: Sequence[int]) -> dict[int, tuple[DeliveryState, ...]]:
    """Return how each of these events stands."""
    catalog, live, ends = session.catalog, _live(session, ids), ends_of(session, ids)
    result: dict[int, tuple[DeliveryState, ...]] = {}
    for event_id in ids:
        found = {number: _ended(session, end) for number, end in ends[event_id].items() if end.status in FINAL}
        found |= live[event_id]
        # What a deleted subscription has done is shown until another one takes its name.
        named = {
            state.subscription: state
            for number, state in sorted(found.items())
            if catalog.known_number(state.subscription) in (number, None)
        }
        result[event_id] = tuple(named[name] for name in sorted(named))
    return result


def _live(session: Session, ids: Sequence[int]) -> dict[int, dict[int, DeliveryState]]:
    """Return how each of these events stands where it is not ended, by the numbers of subscriptions."""
    catalog, wanted = session.catalog, json_array(ids)
    found: dict[int, dict[int, DeliveryState]] = {event_id: {} for event_id in ids}
    with decoding():
        for number, event_id, type_, tags, due_at, created_at in session.db.rows("above_cursors", (wanted,)):
            if catalog.wants(catalog.name(number), type_, tags):
                row = (number, event_id, State.PENDING, due_at, 0, 0, created_at, None, None)
                found[event_id][number] = _state(session, row, None)
        leased = _leased(session, ids)
        for (number, event_id), block in leased.items():
            row = (number, event_id, State.LEASED, None, 1, 0, block.claimed_at, block.worker_id, None)
            found[event_id][number] = _state(session, row, block)
        for row in session.db.rows("rows_of_events", (wanted,)):
            found[row[1]][row[0]] = _state(session, row, leased.get((row[0], row[1])))
    return found


def _leased(session: Session, ids: Sequence[int]) -> dict[tuple[int, int], Block]:
    """Return the blocks that hold these events, by subscription and event."""
    wanted = frozenset(ids)
    found: dict[tuple[int, int], Block] = {}
    for first, last in ranges(ids):
        for block in map(block_from_row, session.db.rows("blocks_between", (first, last))):
            for event_id in wanted.intersection(block.ids[place] for place in block.left()):
                found[block.subscription, event_id] = block
    return found


def _state(session: Session, row: Row, block: Block | None) -> DeliveryState:
    number, _, state, due_at, attempt, retry_count, updated_at, worker_id, errors = row
    return DeliveryState(
        subscription=session.catalog.name(number),
        status=State(state).status,
        attempt=attempt,
        retry_count=retry_count,
        next_retry_at=moment(due_at) if state == State.PENDING and due_at > session.now else None,
        updated_at=from_micros(updated_at),
        worker_id=block.worker_id if block else worker_id,
        lease_until=from_micros(block.due_at) if block else None,
        lease_expired=block is not None and block.due_at <= session.now,
        errors=decode_errors(errors),
        parked=state == State.PARKED,
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


def settled(session: Session, event_id: int, subscriptions: Iterable[str]) -> bool:
    """Return whether an event is neither pending nor leased in any of these subscriptions."""
    live = {session.catalog.name(number): state for number, state in _live(session, [event_id])[event_id].items()}
    return not any(
        name in live and live[name].status in (Status.PENDING, Status.PROCESSING) and not live[name].parked
        for name in subscriptions
    )


def live_ids(session: Session, ids: Collection[int], subscription: int | None = None) -> set[int]:
    """Return which of these events a subscription, or any, still has: in a row, leased, or above its cursor."""
    wanted = frozenset(ids)
    found: set[int] = set()
    if not wanted:
        return found
    for number, event_id, events, done, type_, tags in session.db.rows(
        "places", (json_array(ids), min(wanted), max(wanted), subscription)
    ):
        if done is not None:
            left = unpack_bits(done)
            held = unpack(events) if events else (event_id,)
            found.update(wanted.intersection(each for place, each in enumerate(held) if not left >> place & 1))
        elif type_ is None or session.catalog.wants(session.catalog.name(number), type_, tags):
            found.add(event_id)
    return found
