"""Deliveries that have not ended: in blocks, in rows, or both; and what verbs change of them, written once a table.

A lease is a place in a block. Its epoch is the fence: the block's number and the place, where the event's id must
stand and the bit be unset. Only expiry leaves an epoch on a row, so that a worker thought lost may still complete it.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple, assert_never

from postbus.model import Action, AttemptError, Dead, Done, DoneWithErrors, Lease, Outcome, Retry, State, Status
from postbus.store.arrays import pack_bits, unpack, unpack_bits
from postbus.store.audit import PLACE_BITS, Entries, Entry, add_array, add_entries
from postbus.store.catalog import Kind, kind_of
from postbus.store.contract import Settlement
from postbus.store.records import json_array
from postbus.store.session import Row, Session

PLACES: Final = 1 << PLACE_BITS


class Block(NamedTuple):
    """A lease on some events: `done` is the set of places that are settled."""

    number: int
    subscription: int
    ids: Sequence[int]
    done: int
    worker_id: str
    due_at: int
    claimed_at: int

    def epoch(self, place: int) -> int:
        """Return the epoch of the lease at a place."""
        return self.number << PLACE_BITS | place

    def holds(self, event_id: int, place: int) -> bool:
        """Return whether an event is leased at a place."""
        return place < len(self.ids) and self.ids[place] == event_id and not self.done >> place & 1

    def leases(self, subscription: str) -> Iterator[Lease]:
        """Go through the leases that are not settled."""
        return (Lease(self.ids[place], subscription, self.epoch(place)) for place in self.left())

    def left(self) -> Iterator[int]:
        """Go through the places that are not settled."""
        return (place for place in range(len(self.ids)) if not self.done >> place & 1)


def block_from_row(row: Row) -> Block:
    """Return a block from the columns of the queries that read blocks; of one event, its id alone is kept."""
    number, subscription, first_id, ids, done, worker_id, due_at, claimed_at = row
    events = unpack(ids) if ids else (first_id,)
    return Block(number, subscription, events, unpack_bits(done), worker_id, due_at, claimed_at)


class Story(NamedTuple):
    """What a delivery is about, and when it is due of itself."""

    event_id: int
    type: str
    tags: str
    priority: int
    due_at: int
    max_retries: int | None
    created_at: int

    @property
    def kind(self) -> Kind:
        """Its type and tags."""
        return kind_of(self.type, self.tags)


class DeliveryRow(NamedTuple):
    """A row of `deliveries`, in the order in which the statements name its columns."""

    subscription: int
    event_id: int
    state: int
    kind: int
    priority: int
    ready_at: int
    created_at: int
    updated_at: int
    due_at: int | None = None
    max_retries: int | None = None
    attempt: int = 0
    worker_id: str | None = None
    claimed_at: int | None = None
    retry_count: int = 0
    alone: int = 0
    fresh: int = 0
    """Whether it has no history: then it is deleted when it is claimed."""
    epoch: int | None = None
    died_at: int | None = None
    last_retry_at: int | None = None
    errors: str | None = None


def fresh_row(number: int, story: Story) -> DeliveryRow:
    """Return the row of a delivery without a history."""
    return DeliveryRow(
        number, story.event_id, State.PENDING, story.kind.id, story.priority, story.due_at, story.created_at,
        story.created_at, story.due_at, story.max_retries, fresh=1,
    )  # fmt: skip


def pending_row(session: Session, row: DeliveryRow, due_at: int) -> DeliveryRow:
    """Return the row of a delivery that goes on: due at a time, in no block, with its history."""
    return row._replace(
        state=State.PENDING, due_at=due_at, ready_at=due_at, alone=0, fresh=0, epoch=None, updated_at=session.now
    )


def delivery_rows(session: Session, number: int, ids: Iterable[int]) -> Iterator[DeliveryRow]:
    """Go through the rows that a subscription has of some events."""
    return map(DeliveryRow._make, session.db.rows("delivery_rows", (number, json_array(ids))))


class Held(NamedTuple):
    """A delivery with all that is known of it: leased at a place of a block, or in a row alone."""

    row: DeliveryRow
    kind: Kind
    block: Block | None = None
    place: int = 0
    has_row: bool = True
    """Whether its row is stored: a first attempt may have none."""

    @property
    def epoch(self) -> int | None:
        """The epoch of its lease."""
        return self.row.epoch if self.block is None else self.block.epoch(self.place)

    @property
    def is_plain(self) -> bool:
        """Whether it is a first attempt about which nothing is known but its event."""
        return not self.has_row and self.row.priority == 0 and self.row.ready_at == self.row.created_at


def first_attempt(block: Block, place: int, story: Story) -> Held:
    """Return a leased delivery of which nothing is known but its event."""
    event_id, type_, tags, priority, due_at, max_retries, created_at = story
    kind = kind_of(type_, tags)
    row = DeliveryRow(
        block.subscription, event_id, State.LEASED, kind.id, priority, due_at, created_at, created_at, None,
        max_retries, 1, block.worker_id, block.claimed_at,
    )  # fmt: skip
    return Held(row, kind, block, place, has_row=False)


def load_held(session: Session, places: Sequence[tuple[Block, int]]) -> list[Held]:
    """Return the deliveries at places of blocks with all that is known of them."""
    if not places:
        return []
    ids = sorted({block.ids[place] for block, place in places})
    stories = {row[0]: row for row in session.db.rows("stories", (json_array(ids),))}
    rows = {
        (number, row.event_id): row
        for number in sorted({block.subscription for block, _ in places})
        for row in delivery_rows(session, number, ids)
    }
    found: list[Held] = []
    for block, place in places:
        event_id = block.ids[place]
        if (row := rows.get((block.subscription, event_id))) is not None:
            found.append(Held(row, session.catalog.kind(session.db, row.kind), block, place))
        elif event_id in stories:
            found.append(first_attempt(block, place, Story(*stories[event_id])))
    return found


def hold(session: Session, query: str, name: str, what: int | str) -> int:
    """Lock deliveries of a subscription by a query; return its number, or raise NotFound if it is gone by then."""
    catalog, number = session.catalog, session.catalog.number(name)
    session.db.run(query, (number, what))
    catalog.refresh(session.db)
    return number if catalog.number(name) == number else hold(session, query, name, what)


# ── what the audit log tells ─────────────────────────────────────────────────────────────────────────────────────────


def entry_of(
    session: Session, held: Held, action: Action, worker_id: str | None, error: AttemptError | None = None
) -> Entry:
    """Return the entry of a delivery that goes on; PENDING, but for one that is being worked on."""
    status = Status.PROCESSING if action in (Action.PICKED, Action.STARTED) else Status.PENDING
    failed = (error.type, error.message) if error else (None, None)
    told = (session.now, status, held.row.attempt, held.epoch, worker_id, None)
    return Entry(held.row.event_id, held.row.subscription, action, *told, *failed)


def ending(outcome: Outcome) -> tuple[Action, Status, AttemptError | None]:
    """Return the action, the status and the error that an outcome writes into the audit log."""
    match outcome:
        case Done():
            return Action.COMPLETED, Status.COMPLETED, None
        case DoneWithErrors(errors):
            return Action.COMPLETED_WITH_ERRORS, Status.COMPLETED_WITH_ERRORS, errors[0] if errors else None
        case Retry(_, error):
            return Action.FAILED, Status.PENDING, error
        case Dead(error):
            return Action.FAILED, Status.FAILED, error
        case _:
            assert_never(outcome)


def outcome_entry(session: Session, told: Settlement, held: Held) -> Entry:
    """Return the entry of an attempt that has ended."""
    action, status, error = ending(told.outcome)
    entry = entry_of(session, held, action, told.worker_id, error)
    return entry._replace(status=status, status_code=told.status_code, execution_time_ms=told.execution_time_ms)


def end_entry(session: Session, told: Settlement, held: Held, errors: str | None) -> Entry:
    """Return the entry of the last attempt, which tells the whole story of the delivery."""
    row = held.row
    return outcome_entry(session, told, held)._replace(
        type=held.kind.type,
        tags=held.kind.tags,
        priority=row.priority,
        event_created_at=row.created_at,
        ready_at=row.ready_at,
        claimed_at=row.claimed_at,
        retry_count=row.retry_count,
        errors=errors,
    )


# ── what changes ─────────────────────────────────────────────────────────────────────────────────────────────────────


class Changes:
    """What verbs are about to write, so that each table is written once."""

    def __init__(self) -> None:
        self._blocks: dict[int, Block] = {}
        self._bits: dict[int, int] = defaultdict(int)
        """The places to settle, by the number of their block."""
        self._put: list[DeliveryRow] = []
        self._drop: list[tuple[int, int]] = []
        self._kinds: set[Kind] = set()
        self._arrays: dict[tuple[int, str, Kind], list[tuple[int, Held, Settlement]]] = defaultdict(list)
        self.entries: list[Entry] = []

    def settle(self, block: Block, places: int) -> None:
        """Set bits of a block."""
        self._blocks[block.number] = block
        self._bits[block.number] |= places

    def drop(self, number: int, event_id: int) -> None:
        """Delete a row."""
        self._drop.append((number, event_id))

    def end(self, held: Held) -> None:
        """End a delivery: its lease, and its row if it has one."""
        if held.block is not None:
            self.settle(held.block, 1 << held.place)
        if held.has_row:
            self.drop(held.row.subscription, held.row.event_id)

    def replace(self, held: Held, row: DeliveryRow) -> None:
        """End a lease, and put a row in its place."""
        if held.block is not None:
            self.settle(held.block, 1 << held.place)
        self._kinds.add(held.kind)
        self._put.append(row)

    def complete(self, session: Session, told: Settlement, held: Held) -> None:
        """End a delivery that worked. First attempts of one block, type and tags share a row of the audit log."""
        self.end(held)
        timed = told.status_code is None and told.execution_time_ms is not None
        if held.block is not None and held.is_plain and timed and session.db.packs:
            self._arrays[held.block.number, told.worker_id, held.kind].append((held.place, held, told))
        else:
            self.entries.append(end_entry(session, told, held, held.row.errors))

    def write(self, session: Session) -> None:
        """Write everything."""
        db, gone, parts = session.db, list[int](), list[tuple[bytes, int]]()
        for number, bits in self._bits.items():
            size, done = len(self._blocks[number].ids), self._blocks[number].done | bits
            if done == (1 << size) - 1:
                gone.append(number)
            else:
                parts.append((pack_bits(done, size), number))
        if gone:
            db.run("drop_blocks", (json_array(gone),))
        db.many("set_done", parts)
        db.many("drop_delivery", self._drop)
        db.many("put_delivery", self._put)
        self._write_arrays(session)
        add_entries(session, self.entries)
        session.catalog.require_kinds(db, self._kinds)

    def _write_arrays(self, session: Session) -> None:
        for (number, worker_id, kind), ended in self._arrays.items():
            if len(ended) == 1:
                self.entries += (end_entry(session, told, held, None) for _, held, told in ended)
                continue
            ended.sort()
            places, helds, settlements = zip(*ended, strict=True)
            add_array(
                session,
                Entries(
                    subscription=helds[0].row.subscription,
                    action=Action.COMPLETED,
                    created_at=session.now,
                    status=Status.COMPLETED,
                    number=number,
                    worker_id=worker_id,
                    ids=[each.row.event_id for each in helds],
                    places=places,
                    type=kind.type,
                    tags=kind.tags,
                    claimed_at=helds[0].row.claimed_at,
                    created=[each.row.created_at for each in helds],
                    times=[each.execution_time_ms or 0.0 for each in settlements],
                ),
            )
