"""The verbs that change a delivery that is leased: settle, report, extend, release, started, reset, expire.

A lease is a place in a block. Its epoch is the fence: the block's number and the place, where the event's id must
stand and the bit be unset. Only expiry leaves an epoch on a row, so that a worker thought lost may still complete it.
"""

import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Final, NamedTuple, assert_never

import orjson

from postbus.clock import from_micros
from postbus.errors import Conflict, LeaseLost, NotFound
from postbus.model import (
    Action,
    AttemptError,
    Dead,
    Done,
    DoneWithErrors,
    Lease,
    LogEntry,
    Outcome,
    Retry,
    State,
    Status,
    decide,
)
from postbus.retry import RetryPolicy
from postbus.store.arrays import pack_bits, unpack, unpack_bits
from postbus.store.audit import PLACE_BITS, Entries, Entry, add_array, add_entries, entries_of
from postbus.store.catalog import Kind, kind_of
from postbus.store.contract import Report, Reported, Settled, Settlement
from postbus.store.records import decode_errors, encode_errors, json_array
from postbus.store.session import Row, Session

CHUNK: Final = 1_000
MOST_SETTLED: Final = 4_000
PLACES: Final = 1 << PLACE_BITS
END_OF_TIME: Final = (1 << 63) - 1
MICROSECOND: Final = timedelta(microseconds=1)


class Block(NamedTuple):
    """A lease on some events: `done` is the set of places that are settled."""

    number: int
    subscription: int
    ids: Sequence[int]
    done: int
    owner: str
    worker_id: str
    due_at: int
    claimed_at: int

    def holds(self, event_id: int, place: int) -> bool:
        """Return whether an event is leased at a place."""
        return place < len(self.ids) and self.ids[place] == event_id and not self.done >> place & 1

    def leases(self, subscription: str) -> Iterator[Lease]:
        """Go through the leases that are not settled."""
        return (Lease(self.ids[place], subscription, self.number << PLACE_BITS | place) for place in self.left())

    def left(self) -> Iterator[int]:
        """Go through the places that are not settled."""
        return (place for place in range(len(self.ids)) if not self.done >> place & 1)


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


class Held(NamedTuple):
    """A delivery in progress (LEASED), or expired and not claimed again (PENDING), with all that is known of it."""

    event_id: int
    subscription: int
    state: State
    kind: Kind
    priority: int
    created_at: int
    ready_at: int
    attempt: int
    retry_count: int
    max_retries: int | None
    epoch: int
    worker_id: str | None
    claimed_at: int | None
    last_retry_at: int | None
    errors: str | None
    alone: int
    has_row: bool

    @property
    def is_plain(self) -> bool:
        """Whether it is a first attempt about which nothing is known but its event."""
        return not self.has_row and self.priority == 0 and self.ready_at == self.created_at


class Delivery(NamedTuple):
    """A row of `deliveries`, in the order of its columns."""

    subscription: int
    event_id: int
    state: int
    kind: int
    priority: int
    due_at: int | None
    ready_at: int
    alone: int
    attempt: int
    retry_count: int
    max_retries: int | None
    epoch: int | None
    worker_id: str | None
    claimed_at: int | None
    created_at: int
    updated_at: int
    died_at: int | None
    last_retry_at: int | None
    errors: str | None
    fresh: int
    """Whether it has no history: then it is deleted when it is claimed."""


class Taken(NamedTuple):
    """What a claim took."""

    event_id: int
    attempt: int
    retry_count: int
    epoch: int
    until: int
    suspect: bool

    def lease(self, subscription: str) -> Lease:
        """Return the lease that was given."""
        return Lease(self.event_id, subscription, self.epoch)


class Won(NamedTuple):
    """What a claim got, before the events are read."""

    taken: list[Taken]
    suspects: bool
    """A delivery waits that must be run alone, by a worker that holds nothing else."""
    policy: RetryPolicy | None
    """The subscription's own."""
    now: int
    more: bool = True
    next_due: datetime | None = None
    """When more falls due, if that was looked for."""
    rows: Mapping[int, Row] = {}
    """Those of the events, where they came along."""


@dataclass(slots=True)
class Changes:
    """What some verbs are about to write, so that each table is written once."""

    blocks: Mapping[int, Block]
    bits: dict[int, int] = field(default_factory=dict[int, int])
    """The places to settle, by the number of their block."""
    put: list[Delivery] = field(default_factory=list[Delivery])
    drop: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    kinds: set[Kind] = field(default_factory=set[Kind])
    entries: list[Entry] = field(default_factory=list[Entry])
    arrays: dict[tuple[int, str, Kind], list[tuple[int, Held, float]]] = field(
        default_factory=dict[tuple[int, str, Kind], list[tuple[int, Held, float]]]
    )

    def end(self, held: Held) -> None:
        """End a delivery: its lease, and its row if it has one."""
        self._set_bit(held)
        if held.has_row:
            self.drop.append((held.subscription, held.event_id))

    def replace(self, held: Held, row: Delivery) -> None:
        """End a lease, and put a row in its place."""
        self._set_bit(held)
        self.kinds.add(held.kind)
        self.put.append(row)

    def _set_bit(self, held: Held) -> None:
        if held.state is State.LEASED:
            number = held.epoch >> PLACE_BITS
            self.bits[number] = self.bits.get(number, 0) | 1 << (held.epoch & PLACES - 1)

    def write(self, session: Session) -> None:
        """Write everything."""
        db = session.db
        gone = [number for number, bits in self.bits.items() if _is_all(self.blocks[number], bits)]
        if gone:
            db.run("drop_blocks", (json_array(gone),))
        parts = [
            (pack_bits(self.blocks[number].done | bits, len(self.blocks[number].ids)), number)
            for number, bits in self.bits.items()
            if number not in gone
        ]
        if parts:
            db.many("set_done", parts)
        if self.drop:
            db.many("drop_delivery", self.drop)
        if self.put:
            db.many("put_delivery", self.put)
        self._write_arrays(session)
        add_entries(session, self.entries)
        session.catalog.require_kinds(db, self.kinds)

    def _write_arrays(self, session: Session) -> None:
        for (number, worker_id, kind), ended in self.arrays.items():
            if len(ended) == 1 or not session.db.packs:
                for _, held, time in ended:
                    told = Settlement(_lease(session, held), Done(), worker_id, None, time)
                    self.entries.append(_end_entry(session, told, held, None))
                continue
            ended.sort()
            places, helds, times = zip(*ended, strict=True)
            add_array(
                session,
                Entries(
                    subscription=helds[0].subscription,
                    action=Action.COMPLETED,
                    created_at=session.now,
                    status=Status.COMPLETED,
                    number=number,
                    worker_id=worker_id,
                    ids=[each.event_id for each in helds],
                    places=places,
                    type=kind.type,
                    tags=kind.tags,
                    claimed_at=helds[0].claimed_at,
                    created=[each.created_at for each in helds],
                    times=times,
                ),
            )


def _is_all(block: Block, bits: int) -> bool:
    return block.done | bits == (1 << len(block.ids)) - 1


def _lease(session: Session, held: Held) -> Lease:
    return Lease(held.event_id, session.catalog.name(held.subscription), held.epoch)


def hold(session: Session, query: str, name: str, what: int | str) -> int:
    """Lock deliveries of a subscription by a query; return its number, or raise NotFound if it is gone by then."""
    catalog, number = session.catalog, session.catalog.number(name)
    session.db.run(query, (number, what))
    catalog.refresh(session.db)
    return number if catalog.number(name) == number else hold(session, query, name, what)


# ── what is leased ───────────────────────────────────────────────────────────────────────────────────────────────────


def block_from_row(row: Row) -> Block:
    """Return a block from the columns of the queries that read blocks; of one event, its id alone is kept."""
    number, subscription, first_id, ids, done, owner, worker_id, due_at, claimed_at = row
    events = unpack(ids) if ids else (first_id,)
    return Block(number, subscription, events, unpack_bits(done), owner, worker_id, due_at, claimed_at)


def _blocks(session: Session, leases: Iterable[Lease]) -> dict[int, Block]:
    numbers = sorted({each.epoch >> PLACE_BITS for each in leases})
    rows = session.db.rows("blocks_by_number", (json_array(numbers),))
    return {block.number: block for block in map(block_from_row, rows)}


def find_held(session: Session, leases: Sequence[Lease]) -> tuple[dict[Lease, Held], dict[int, Block]]:
    """Return the deliveries that the fence lets through, and the blocks: blocks are looked at first, then rows."""
    lock(session, leases)
    blocks = _blocks(session, leases)
    bits: dict[tuple[int, int], Lease] = {}
    others: dict[tuple[int, int], Lease] = {}
    for lease in leases:
        number = session.catalog.known_number(lease.subscription)
        block = blocks.get(lease.epoch >> PLACE_BITS)
        if number is None:
            continue
        if block is not None and block.subscription == number and block.holds(lease.event_id, lease.epoch & PLACES - 1):
            bits[number, lease.event_id] = lease
        else:
            others[number, lease.event_id] = lease
    found = load_held(
        session, [(blocks[lease.epoch >> PLACE_BITS], lease.epoch & PLACES - 1) for lease in bits.values()]
    )
    result = {bits[each.subscription, each.event_id]: each for each in found}
    if others:
        for each in _expired(session, others):
            result[others[each.subscription, each.event_id]] = each
    return result, blocks


def load_held(session: Session, places: Sequence[tuple[Block, int]]) -> list[Held]:
    """Return the deliveries at places of blocks with all that is known of them."""
    if not places:
        return []
    ids = sorted({block.ids[place] for block, place in places})
    stories = {row[0]: row[1:] for row in session.db.rows("stories", (json_array(ids),))}
    rows = {
        (number, row[0]): row
        for number in sorted({block.subscription for block, _ in places})
        for row in session.db.rows("delivery_rows", (number, State.LEASED, json_array(ids)))
    }
    found: list[Held] = []
    for block, place in places:
        event_id = block.ids[place]
        epoch = block.number << PLACE_BITS | place
        row = rows.get((block.subscription, event_id))
        if row is not None:
            found.append(_held_row(session, block.subscription, row, epoch))
        elif event_id in stories:
            type_, tags, priority, ready_at, max_retries, created_at = stories[event_id]
            found.append(
                Held(
                    event_id, block.subscription, State.LEASED, kind_of(type_, tags), priority, created_at, ready_at, 1,
                    0, max_retries, epoch, block.worker_id, block.claimed_at, None, None, 0, has_row=False,
                )
            )  # fmt: skip
    return found


def _held_row(session: Session, subscription: int, row: Row, epoch: int) -> Held:
    event_id, state, kind, priority, ready_at, attempt, retries, most, _, worker_id, claimed_at, created_at, *rest = row
    last_retry_at, errors, alone = rest
    return Held(
        event_id, subscription, State(state), session.catalog.kind(session.db, kind), priority, created_at, ready_at,
        attempt, retries, most, epoch, worker_id, claimed_at, last_retry_at, errors, alone, has_row=True,
    )  # fmt: skip


def _expired(session: Session, leases: Mapping[tuple[int, int], Lease]) -> Iterator[Held]:
    """Go through the pending rows on which expiry has left these very epochs."""
    by_number: dict[int, list[int]] = defaultdict(list)
    for number, event_id in leases:
        by_number[number].append(event_id)
    for number, ids in by_number.items():
        for row in session.db.rows("delivery_rows", (number, State.PENDING, json_array(sorted(ids)))):
            lease = leases[number, row[0]]
            if row[8] == lease.epoch:
                yield _held_row(session, number, row, lease.epoch)


def lock(session: Session, leases: Iterable[Lease]) -> None:
    """Lock leases for a verb that decides what becomes of them, all at once: two verbs must not wait crosswise."""
    number = session.catalog.known_number
    known = [(number(each.subscription), each.event_id, each.epoch) for each in leases]
    session.db.run("lock_leases", (orjson.dumps([each for each in known if each[0] is not None]).decode(),))


# ── settle ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def settle(session: Session, settlements: Sequence[Settlement]) -> list[Settled]:
    """Record outcomes; see the contract."""
    if len({(each.lease.event_id, each.lease.subscription) for each in settlements}) < len(settlements):
        lock(session, [each.lease for each in settlements])
        return [result for each in settlements for result in settle(session, [each])]
    results: list[Settled] = []
    for start in range(0, len(settlements), MOST_SETTLED):
        chunk = settlements[start : start + MOST_SETTLED]
        held, blocks = find_held(session, [each.lease for each in chunk])
        changes = Changes(blocks)
        results += [_settle_one(session, changes, each, held.get(each.lease)) for each in chunk]
        changes.write(session)
    return results


def _settle_one(session: Session, changes: Changes, told: Settlement, held: Held | None) -> Settled:
    if held is None or (held.state is State.PENDING and isinstance(told.outcome, Retry)):
        return _repeated(session, told)
    apply_outcome(session, changes, told, held)
    return Settled.APPLIED


def apply_outcome(session: Session, changes: Changes, told: Settlement, held: Held) -> None:
    """Collect what an outcome changes."""
    now = session.now
    match told.outcome:
        case Done():
            changes.end(held)
            if held.is_plain and told.status_code is None and told.execution_time_ms is not None:
                key = (held.epoch >> PLACE_BITS, told.worker_id, held.kind)
                place = held.epoch & PLACES - 1
                changes.arrays.setdefault(key, []).append((place, held, told.execution_time_ms))
            else:
                changes.entries.append(_end_entry(session, told, held, held.errors))
        case DoneWithErrors(errors):
            changes.end(held)
            changes.entries.append(_end_entry(session, told, held, with_errors(session, held, *errors)))
        case Retry(after, error):
            due = now + after // MICROSECOND
            row = row_of(session, held, due, retry_count=retries(held, told.outcome))
            changes.replace(held, row._replace(errors=with_errors(session, held, error)))
            entry = _entry(session, held, Action.FAILED, told.worker_id, error)
            timed = entry._replace(status_code=told.status_code, execution_time_ms=told.execution_time_ms)
            changes.entries.append(timed)
        case Dead(error):
            errors = with_errors(session, held, error)
            row = row_of(session, held, None)._replace(state=State.DEAD, died_at=now, errors=errors)
            changes.replace(held, row)
            changes.entries.append(_end_entry(session, told, held, errors))
        case _:
            assert_never(told.outcome)


def row_of(session: Session, held: Held, due_at: int | None, retry_count: int | None = None) -> Delivery:
    """Return the row that takes a lease's place: pending and due at a time, if there is one."""
    return Delivery(
        subscription=held.subscription,
        event_id=held.event_id,
        state=State.PENDING,
        kind=held.kind.id,
        priority=held.priority,
        due_at=due_at,
        ready_at=held.ready_at if due_at is None else due_at,
        alone=0,
        attempt=held.attempt,
        retry_count=held.retry_count if retry_count is None else retry_count,
        max_retries=held.max_retries,
        epoch=None,
        worker_id=held.worker_id,
        claimed_at=held.claimed_at,
        created_at=held.created_at,
        updated_at=session.now,
        died_at=None,
        last_retry_at=held.last_retry_at,
        errors=held.errors,
        fresh=0,
    )


def retries(held: Held, outcome: Outcome) -> int:
    """Return how often an event was, or is about to be, tried again once an attempt has ended so: not after the last.

    An attempt that had expired was counted then.
    """
    return held.retry_count + (isinstance(outcome, Retry) and held.state is State.LEASED)


def ending(told: Settlement) -> tuple[Action, Status, AttemptError | None]:
    """Return the action, the status and the error that a settlement writes into the audit log."""
    match told.outcome:
        case Done():
            return Action.COMPLETED, Status.COMPLETED, None
        case DoneWithErrors(errors):
            return Action.COMPLETED_WITH_ERRORS, Status.COMPLETED_WITH_ERRORS, errors[0] if errors else None
        case Retry(_, error):
            return Action.FAILED, Status.PENDING, error
        case Dead(error):
            return Action.FAILED, Status.FAILED, error
        case _:
            assert_never(told.outcome)


def with_errors(session: Session, held: Held, *errors: AttemptError) -> str:
    """Return the delivery's errors with this attempt's among them: the latest word on each attempt."""
    earlier = [each for each in decode_errors(held.errors) if each.attempt != held.attempt]
    now = from_micros(session.now)
    return encode_errors([*earlier, *(replace(error, attempt=held.attempt, at=error.at or now) for error in errors)])


def _end_entry(session: Session, told: Settlement, held: Held, errors: str | None) -> Entry:
    action, status, error = ending(told)
    return Entry(
        held.event_id,
        held.subscription,
        action,
        session.now,
        status,
        held.attempt,
        held.epoch,
        told.worker_id,
        told.status_code,
        error.type if error else None,
        error.message if error else None,
        told.execution_time_ms,
        held.kind.type,
        held.kind.tags,
        held.priority,
        held.created_at,
        held.ready_at,
        held.claimed_at,
        held.retry_count,
        errors,
    )


def _entry(session: Session, held: Held, action: Action, worker_id: str | None, error: AttemptError | None) -> Entry:
    """Return the entry of a delivery that goes on; PENDING, but for one that is being worked on."""
    status = Status.PROCESSING if action is Action.STARTED else Status.PENDING
    told = (held.attempt, held.epoch, worker_id, None)
    failed = (error.type, error.message) if error else (None, None)
    return Entry(held.event_id, held.subscription, action, session.now, status, *told, *failed)


def _repeated(session: Session, told: Settlement) -> Settled:
    """Return whether this very epoch has recorded the same outcome before."""
    action, status, _ = ending(told)
    recorded = any((each.action, each.status) == (action, status) for each in _recorded(session, told.lease))
    return Settled.REPEATED if recorded else Settled.LOST


def _recorded(session: Session, lease: Lease) -> list[LogEntry]:
    """Return the entries of an epoch on an event."""
    number = session.catalog.known_number(lease.subscription)
    if number is None:
        return []
    return [
        each
        for each in entries_of(session, lease.event_id)
        if each.epoch == lease.epoch and each.subscription == lease.subscription
    ]


# ── report ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def report(session: Session, reports: Sequence[Report]) -> list[Reported | LeaseLost | NotFound]:
    """Record outcomes of workers that know neither their epoch nor the policy; see the contract."""
    answers: list[Reported | LeaseLost | NotFound] = []
    waiting = list(reports)
    while waiting:
        # Of several on one delivery each must see what the one before it did.
        seen: set[tuple[int, str]] = set()
        some: list[Report] = []
        for each in waiting[:CHUNK]:
            if (each.event_id, each.subscription) in seen:
                break
            seen.add((each.event_id, each.subscription))
            some.append(each)
        answers += _report_apart(session, some)
        waiting = waiting[len(some) :]
    return answers


def _report_apart(session: Session, reports: Sequence[Report]) -> list[Reported | LeaseLost | NotFound]:
    """Do so for reports of which no two are on one delivery."""
    meant = [_meant(session, each) for each in reports]
    held, blocks = find_held(session, [each for each in meant if each is not None])
    changes = Changes(blocks)
    answers: list[Reported | LeaseLost | NotFound] = []
    for each, lease in zip(reports, meant, strict=True):
        found = None if lease is None else held.get(lease)
        if found is None or lease is None or (found.state is State.PENDING and each.failed and not each.final):
            answers.append(_recall(session, each, lease))
            continue
        policy = _policy(session, each, found.max_retries)
        outcome = _decide(each, found, policy)
        told = Settlement(lease, outcome, each.worker_id, each.status_code, each.execution_time_ms)
        apply_outcome(session, changes, told, found)
        answers.append(_reported(session, told, found, policy))
    changes.write(session)
    return answers


def _meant(session: Session, report: Report) -> Lease | None:
    """Return the lease that a report is about: without an epoch, the last one that this worker had on the event."""
    epoch = report.epoch
    if epoch is None:
        picked = [
            each.epoch
            for each in entries_of(session, report.event_id)
            if each.subscription == report.subscription
            and each.action is Action.PICKED
            and each.worker_id == report.worker_id
        ]
        epoch = picked[-1] if picked else None
    return None if epoch is None else Lease(report.event_id, report.subscription, epoch)


def _policy(session: Session, report: Report, own: int | None) -> RetryPolicy:
    policy = session.catalog.subscription(report.subscription).retry or report.policy
    most = report.max_retries if own is None else own
    return policy if most is None else replace(policy, max_retries=most)


def _decide(report: Report, held: Held, policy: RetryPolicy) -> Outcome:
    if not report.failed:
        return DoneWithErrors(report.errors) if report.errors else Done()
    (error,) = report.errors
    chance = random.Random()  # noqa: S311  jitter needs no secrecy
    return decide(policy, error, held.attempt, None, chance, final=report.final, delay=report.delay)


def _reported(session: Session, told: Settlement, held: Held, policy: RetryPolicy) -> Reported:
    action, status, error = ending(told)
    now = from_micros(session.now)
    entry = LogEntry(
        0,
        told.lease.event_id,
        told.lease.subscription,
        action,
        now,
        status,
        held.attempt,
        told.lease.epoch,
        told.worker_id,
        told.status_code,
        error.type if error else None,
        error.message if error else None,
        told.execution_time_ms,
    )
    due = now + told.outcome.after if isinstance(told.outcome, Retry) else None
    return Reported(entry, retries(held, told.outcome), policy.max_retries, due)


def _recall(session: Session, report: Report, lease: Lease | None) -> Reported | LeaseLost | NotFound:
    """Return what the very same report had recorded before, or why it comes too late."""
    entries = entries_of(session, report.event_id)
    if not any(each.subscription == report.subscription for each in entries) and not session.db.run(
        "event", (report.event_id,)
    ):
        return NotFound(f"there is no event {report.event_id}")
    same = {Action.FAILED} if report.failed else {Action.COMPLETED, Action.COMPLETED_WITH_ERRORS}
    recorded = [each for each in _recorded(session, lease) if each.action in same] if lease is not None else []
    if not recorded:
        return LeaseLost(
            f"{report.worker_id} holds no lease on event {report.event_id} in {report.subscription!r}: "
            "another claim, a reset or another outcome came first, or it never had one"
        )
    number = session.catalog.number(report.subscription)
    row = next(iter(session.db.run("delivery", (number, report.event_id))), None)
    delivery = None if row is None else Delivery._make(row)
    due = None
    if delivery is not None and delivery.due_at is not None and recorded[-1].status is Status.PENDING:
        due = from_micros(delivery.due_at)
    tries = (recorded[-1].attempt or 1) - 1 if delivery is None else delivery.retry_count
    most = _policy(session, report, None if delivery is None else delivery.max_retries).max_retries
    return Reported(recorded[-1], tries, most, due, repeated=True)


# ── extend, release, started, reset ──────────────────────────────────────────────────────────────────────────────────


def extend(session: Session, leases: Sequence[Lease], lease: timedelta) -> set[Lease]:
    """Let the blocks of leases run on; return the leases that are lost."""
    blocks = _blocks(session, leases)
    lost: set[Lease] = set()
    until: dict[int, int] = {}
    for each in leases:
        block = blocks.get(each.epoch >> PLACE_BITS)
        if (
            block is None
            or block.subscription != session.catalog.known_number(each.subscription)
            or not block.holds(each.event_id, each.epoch & PLACES - 1)
        ):
            lost.add(each)
        elif block.number not in until:
            own = session.catalog.subscription(each.subscription).lease
            until[block.number] = session.now + (own or lease) // MICROSECOND
    session.db.many("extend", [(due, number) for number, due in until.items()])
    return lost


def release(session: Session, leases: Sequence[Lease], worker_id: str, delay: timedelta) -> int:
    """Hand deliveries back, the attempt given back; return how many were still held."""
    held, blocks = find_held(session, leases)
    changes = Changes(blocks)
    count = 0
    for each in held.values():
        if each.state is not State.LEASED:
            continue
        count += 1
        row = row_of(session, each, session.now + delay // MICROSECOND)
        row = row._replace(attempt=each.attempt - 1, alone=each.alone)
        if each.is_plain and not delay:
            row = row._replace(fresh=1, ready_at=each.ready_at, worker_id=None, claimed_at=None)
        changes.replace(each, row)
        changes.entries.append(_entry(session, each, Action.RELEASED, worker_id, None))
    changes.write(session)
    return count


def started(session: Session, lease: Lease, worker_id: str) -> None:
    """Record that work has begun; raise LeaseLost."""
    held = find_held(session, [lease])[0].get(lease)
    if held is None:
        raise LeaseLost(f"the lease on event {lease.event_id} in {lease.subscription!r} has passed to another")
    add_entries(session, [_entry(session, held, Action.STARTED, worker_id, None)])


def find_lease(session: Session, number: int, event_id: int) -> tuple[Block, int] | None:
    """Return where an event is leased in a subscription."""
    for row in session.db.rows("blocks_around", (number, event_id, event_id)):
        block = block_from_row(row)
        for place in block.left():
            if block.ids[place] == event_id:
                return block, place
    return None


# ── expiry ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def expire(session: Session, owners: Sequence[str] | None, policy: RetryPolicy, limit: int) -> int:
    """End leases that ran out, or those of dead processes; return how many deliveries that were."""
    if owners is None:
        rows = session.db.rows("overdue_blocks", (session.now, limit))
    else:
        rows = session.db.rows("blocks_of", (orjson.dumps(owners).decode(), limit))
    blocks: list[Block] = []
    for block in map(block_from_row, rows):
        blocks.append(block)
        limit -= len(block.ids)
        if limit <= 0:
            break
    return _expire_blocks(session, blocks, policy)


def _expire_blocks(session: Session, blocks: Sequence[Block], policy: RetryPolicy) -> int:
    """End attempts nobody will report on: pending again, to be run alone, or dead after the last one."""
    changes = Changes({each.number: each for each in blocks})
    places = [(block, place) for block in blocks for place in block.left()]
    held, chance = load_held(session, places), random.Random()  # noqa: S311  jitter needs no secrecy
    for each in held:
        error, lease = _silence(session, each), _lease(session, each)
        own = session.catalog.subscription(lease.subscription).retry or policy
        outcome = decide(own, error, each.attempt, each.max_retries, chance, delay=timedelta(0))
        if isinstance(outcome, Dead):
            apply_outcome(session, changes, Settlement(lease, outcome, each.worker_id or ""), each)
            continue
        row = row_of(session, each, session.now, retry_count=each.retry_count + 1)
        # The epoch stays: until somebody claims it anew, the worker thought lost may still complete it.
        changes.replace(each, row._replace(alone=1, epoch=each.epoch, errors=with_errors(session, each, error)))
        changes.entries.append(_entry(session, each, Action.EXPIRED, each.worker_id, error))
    for block in blocks:  # a place whose event is damaged beyond reading must not keep its block for ever
        changes.bits[block.number] = (1 << len(block.ids)) - 1
    changes.write(session)
    return len(places)


def allowed_attempts(session: Session, name: str, max_retries: int | None, policy: RetryPolicy) -> int:
    """Return how many attempts an event has in a subscription."""
    if max_retries is not None:
        return max_retries + 1
    return (session.catalog.subscription(name).retry or policy).attempts


def _silence(session: Session, held: Held) -> AttemptError:
    message = f"worker {held.worker_id} was lost, or its lease ran out, before it reported an outcome"
    return AttemptError("LeaseExpired", message, held.attempt, held.worker_id, from_micros(session.now))


def reset(session: Session, event_id: int, subscription: str, reason: str, actor: str) -> None:
    """Make a leased or scheduled delivery due now."""
    if not 0 < event_id <= END_OF_TIME:
        raise NotFound(f"there is no event {event_id}")
    number, now = session.catalog.known_number(subscription), session.now
    if number is None:
        _require_event(session, event_id)
        raise Conflict(f"event {event_id} has nothing unfinished in {subscription!r}")
    error = AttemptError("Reset", reason)
    number = hold(session, "hold_deliveries", subscription, json_array([event_id]))
    if (found := find_lease(session, number, event_id)) is not None:
        block, place = found
        (held,) = load_held(session, [(block, place)])
        changes = Changes({block.number: block})
        changes.replace(held, row_of(session, held, now)._replace(alone=held.alone))
        changes.entries.append(_entry(session, held, Action.RESET, actor, error))
        changes.write(session)
        return
    rows = session.db.run("delivery", (number, event_id))
    row = Delivery._make(rows[0]) if rows else _take_out(session, subscription, event_id)
    if row.state not in (State.PENDING, State.LEASED):
        raise Conflict(f"event {event_id} is a dead letter in {subscription!r}: retry it with dlq.retry")
    changed = row._replace(due_at=now, ready_at=now, epoch=None, updated_at=now, fresh=0)
    session.db.many("put_delivery", [changed])
    told = (
        event_id,
        number,
        Action.RESET,
        now,
        Status.PENDING,
        row.attempt,
        row.epoch,
        actor,
        None,
        error.type,
        reason,
    )
    add_entries(session, [Entry(*told)])


def _take_out(session: Session, subscription: str, event_id: int) -> Delivery:
    """Take an event that is still above the cursor out of its turn; return its row, which is not written yet."""
    number = session.catalog.number(subscription)
    story = _require_event(session, event_id)
    if not is_above(session, subscription, event_id, story.type, story.tags):
        raise Conflict(f"event {event_id} has nothing unfinished in {subscription!r}")
    session.catalog.require_kinds(session.db, [story.kind])
    session.db.run("add_skips", (number, json_array([event_id])))
    return fresh_row(number, story)


def _require_event(session: Session, event_id: int) -> Story:
    for row in session.db.rows("stories", (json_array([event_id]),)):
        return Story._make(row)
    raise NotFound(f"there is no event {event_id}")


def is_above(session: Session, subscription: str, event_id: int, type_: str, tags: str) -> bool:
    """Return whether a queue's cursor has still to come to an event that it wants."""
    number = session.catalog.number(subscription)
    return bool(session.db.run("is_above", (number, event_id))) and session.catalog.wants(subscription, type_, tags)


def fresh_row(number: int, story: Story) -> Delivery:
    """Return the row of a delivery without a history."""
    return Delivery(
        number, story.event_id, State.PENDING, story.kind.id, story.priority, story.due_at, story.due_at, 0, 0, 0,
        story.max_retries, None, None, None, story.created_at, story.created_at, None, None, None, 1,
    )  # fmt: skip


def reset_blocks(session: Session, before: int, limit: int, actor: str) -> int:
    """Make deliveries due that were leased in blocks below a number; return how many there were."""
    blocks = [block_from_row(row) for row in session.db.rows("blocks_before", (before, limit))]
    changes = Changes({each.number: each for each in blocks})
    held = load_held(session, [(block, place) for block in blocks for place in block.left()])
    error = AttemptError("Reset", "the store was restored from a backup")
    for each in held:
        changes.replace(each, row_of(session, each, session.now)._replace(alone=each.alone))
        changes.entries.append(_entry(session, each, Action.RESET, actor, error))
    changes.write(session)
    return len(held)
