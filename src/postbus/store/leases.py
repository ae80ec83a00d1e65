"""The verbs that change a delivery that is leased: settle, report, extend, release, started, reset, expire."""

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Final, NamedTuple, TypeVar, assert_never

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
from postbus.store.audit import PLACE_BITS, add_entries, entries_of
from postbus.store.contract import Report, Reported, Settled, Settlement
from postbus.store.deliveries import (
    PLACES,
    Block,
    Changes,
    Held,
    Story,
    block_from_row,
    delivery_rows,
    end_entry,
    ending,
    entry_of,
    fresh_row,
    hold,
    load_held,
    outcome_entry,
    pending_row,
)
from postbus.store.records import decode_errors, encode_errors, json_array
from postbus.store.session import Row, Session

T = TypeVar("T")
R = TypeVar("R")
MOST_SETTLED: Final = 4_000
END_OF_TIME: Final = (1 << 63) - 1
MICROSECOND: Final = timedelta(microseconds=1)


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


# ── the fence ────────────────────────────────────────────────────────────────────────────────────────────────────────


def find_held(session: Session, leases: Sequence[Lease]) -> dict[Lease, Held]:
    """Return the deliveries that the fence lets through: blocks are looked at first, then rows."""
    lock(session, leases)
    blocks, places = _blocks(session, leases), list[tuple[Block, int]]()
    leased: dict[tuple[int, int], Lease] = {}
    others: dict[int, dict[int, Lease]] = defaultdict(dict)
    for lease in leases:
        if (block := _fenced(session, blocks, lease)) is not None:
            places.append((block, lease.epoch & PLACES - 1))
            leased[block.subscription, lease.event_id] = lease
        elif (number := session.catalog.known_number(lease.subscription)) is not None:
            others[number][lease.event_id] = lease
    found = {leased[each.row.subscription, each.row.event_id]: each for each in load_held(session, places)}
    for number, asked in others.items():
        for row in delivery_rows(session, number, sorted(asked)):
            if row.state == State.PENDING and row.epoch == asked[row.event_id].epoch:  # expiry has left this very epoch
                found[asked[row.event_id]] = Held(row, session.catalog.kind(session.db, row.kind))
    return found


def lock(session: Session, leases: Iterable[Lease]) -> None:
    """Lock leases for a verb that decides what becomes of them, all at once: two verbs must not wait crosswise."""
    number = session.catalog.known_number
    known = [(number(each.subscription), each.event_id, each.epoch) for each in leases]
    session.db.run("lock_leases", (orjson.dumps([each for each in known if each[0] is not None]).decode(),))


def _blocks(session: Session, leases: Iterable[Lease]) -> dict[int, Block]:
    numbers = sorted({each.epoch >> PLACE_BITS for each in leases})
    rows = session.db.rows("blocks_by_number", (json_array(numbers),))
    return {block.number: block for block in map(block_from_row, rows)}


def _fenced(session: Session, blocks: Mapping[int, Block], lease: Lease) -> Block | None:
    """Return the block in which a lease still stands."""
    block = blocks.get(lease.epoch >> PLACE_BITS)
    if block is None or block.subscription != session.catalog.known_number(lease.subscription):
        return None
    return block if block.holds(lease.event_id, lease.epoch & PLACES - 1) else None


# ── settle ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def settle(session: Session, settlements: Sequence[Settlement]) -> list[Settled]:
    """Record outcomes; see the contract."""

    def settle_one(changes: Changes, told: Settlement, _: Lease | None, held: Held | None) -> Settled:
        if held is not None and not (held.block is None and isinstance(told.outcome, Retry)):
            apply_outcome(session, changes, told, held)
            return Settled.APPLIED
        ended = ending(told.outcome)[:2]
        recorded = any((each.action, each.status) == ended for each in _recorded(session, told.lease))
        return Settled.REPEATED if recorded else Settled.LOST

    return _answers(session, [(each, each.lease) for each in settlements], settle_one)


def _answers(
    session: Session,
    told: Sequence[tuple[T, Lease | None]],
    answer: Callable[[Changes, T, Lease | None, Held | None], R],
) -> list[R]:
    """Return the answers to what is told of leases. Of several on one delivery each sees what the one before it did."""
    parts: list[dict[object, tuple[T, Lease | None]]] = [{}]
    for place, (each, lease) in enumerate(told):
        key = place if lease is None else lease[:2]
        if key in parts[-1] or len(parts[-1]) == MOST_SETTLED:
            parts.append({})
        parts[-1][key] = each, lease
    if len(parts) > 1:
        lock(session, [lease for _, lease in told if lease is not None])
    answers: list[R] = []
    for part in parts:
        held, changes = find_held(session, [lease for _, lease in part.values() if lease is not None]), Changes()
        answers += [answer(changes, each, lease, lease and held.get(lease)) for each, lease in part.values()]
        changes.write(session)
    return answers


def apply_outcome(session: Session, changes: Changes, told: Settlement, held: Held) -> None:
    """Collect what an outcome changes."""
    now, row = session.now, held.row
    match told.outcome:
        case Done():
            changes.complete(session, told, held)
        case DoneWithErrors(errors):
            changes.end(held)
            changes.entries.append(end_entry(session, told, held, with_errors(session, held, *errors)))
        case Retry(after, error):
            again = pending_row(session, row, now + after // MICROSECOND)
            errors = with_errors(session, held, error)
            changes.replace(held, again._replace(retry_count=row.retry_count + 1, errors=errors))
            changes.entries.append(outcome_entry(session, told, held))
        case Dead(error):
            errors = with_errors(session, held, error)
            dead = row._replace(state=State.DEAD, due_at=None, alone=0, fresh=0, epoch=None, updated_at=now)
            changes.replace(held, dead._replace(died_at=now, errors=errors))
            changes.entries.append(end_entry(session, told, held, errors))
        case _:
            assert_never(told.outcome)


def with_errors(session: Session, held: Held, *errors: AttemptError) -> str:
    """Return the delivery's errors with this attempt's among them: the latest word on each attempt."""
    attempt, now = held.row.attempt, from_micros(session.now)
    earlier = [each for each in decode_errors(held.row.errors) if each.attempt != attempt]
    return encode_errors([*earlier, *(replace(error, attempt=attempt, at=error.at or now) for error in errors)])


def _recorded(session: Session, lease: Lease) -> list[LogEntry]:
    """Return the entries of an epoch on an event."""
    if session.catalog.known_number(lease.subscription) is None:
        return []
    entries = entries_of(session, lease.event_id)
    return [each for each in entries if (each.subscription, each.epoch) == (lease.subscription, lease.epoch)]


# ── report ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def report(session: Session, reports: Sequence[Report]) -> list[Reported | LeaseLost | NotFound]:
    """Record outcomes of workers that know neither their epoch nor the policy; see the contract."""

    def report_one(
        changes: Changes, told: Report, lease: Lease | None, held: Held | None
    ) -> Reported | LeaseLost | NotFound:
        if lease is None or held is None or (held.block is None and told.failed and not told.final):
            return _recall(session, told, lease)
        policy = _policy(session, told, held.row.max_retries)
        outcome: Outcome = DoneWithErrors(told.errors) if told.errors else Done()
        if told.failed:
            (error,), chance = told.errors, random.Random()  # noqa: S311  jitter needs no secrecy
            outcome = decide(policy, error, held.row.attempt, None, chance, final=told.final, delay=told.delay)
        settlement = Settlement(lease, outcome, told.worker_id, told.status_code, told.execution_time_ms)
        apply_outcome(session, changes, settlement, held)
        entry, now = outcome_entry(session, settlement, held), from_micros(session.now)
        kept = LogEntry(0, entry.event_id, told.subscription, entry.action, now, *entry[4:12])
        due = now + outcome.after if isinstance(outcome, Retry) else None
        return Reported(kept, held.row.retry_count + isinstance(outcome, Retry), policy.max_retries, due)

    return _answers(session, [(each, _meant(session, each)) for each in reports], report_one)


def _meant(session: Session, report: Report) -> Lease | None:
    """Return the lease that a report is about: without an epoch, the last one that this worker had on the event."""
    epoch = report.epoch
    if epoch is None:
        wanted = report.subscription, Action.PICKED, report.worker_id
        for each in entries_of(session, report.event_id):
            if (each.subscription, each.action, each.worker_id) == wanted:
                epoch = each.epoch
    return None if epoch is None else Lease(report.event_id, report.subscription, epoch)


def _policy(session: Session, report: Report, own: int | None) -> RetryPolicy:
    policy = session.catalog.subscription(report.subscription).retry or report.policy
    most = report.max_retries if own is None else own
    return policy if most is None else replace(policy, max_retries=most)


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
    row = next(delivery_rows(session, number, [report.event_id]), None)
    due = None
    if row is not None and row.due_at is not None and recorded[-1].status is Status.PENDING:
        due = from_micros(row.due_at)
    tries = (recorded[-1].attempt or 1) - 1 if row is None else row.retry_count
    most = _policy(session, report, None if row is None else row.max_retries).max_retries
    return Reported(recorded[-1], tries, most, due, repeated=True)


# ── extend, release, started ─────────────────────────────────────────────────────────────────────────────────────────


def extend(session: Session, leases: Sequence[Lease], lease: timedelta) -> set[Lease]:
    """Let the blocks of leases run on; return the leases that are lost."""
    blocks = _blocks(session, leases)
    lost: set[Lease] = set()
    until: dict[int, int] = {}
    for each in leases:
        if (block := _fenced(session, blocks, each)) is None:
            lost.add(each)
        else:
            own = session.catalog.subscription(each.subscription).lease
            until[block.number] = session.now + (own or lease) // MICROSECOND
    session.db.many("extend", [(due, number) for number, due in until.items()])
    return lost


def release(session: Session, leases: Sequence[Lease], worker_id: str, delay: timedelta) -> int:
    """Hand deliveries back, the attempt given back; return how many were still held."""
    changes = Changes()
    leased = [each for each in find_held(session, leases).values() if each.block is not None]
    for each in leased:
        row = pending_row(session, each.row, session.now + delay // MICROSECOND)
        row = row._replace(attempt=each.row.attempt - 1, alone=each.row.alone)
        if each.is_plain and not delay:
            row = row._replace(fresh=1, ready_at=each.row.ready_at, worker_id=None, claimed_at=None)
        changes.replace(each, row)
        changes.entries.append(entry_of(session, each, Action.RELEASED, worker_id))
    changes.write(session)
    return len(leased)


def started(session: Session, lease: Lease, worker_id: str) -> None:
    """Record that work has begun; raise LeaseLost."""
    held = find_held(session, [lease]).get(lease)
    if held is None:
        raise LeaseLost(f"the lease on event {lease.event_id} in {lease.subscription!r} has passed to another")
    add_entries(session, [entry_of(session, held, Action.STARTED, worker_id)])


# ── expiry ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def expire(session: Session, owners: Sequence[str] | None, policy: RetryPolicy, limit: int) -> int:
    """End leases that ran out, or those of dead processes; return how many deliveries that were."""
    if owners is None:
        rows = session.db.rows("overdue_blocks", (session.now, limit))
    else:
        rows = session.db.rows("blocks_of", (orjson.dumps(owners).decode(), limit))
    changes, places = Changes(), list[tuple[Block, int]]()
    for block in map(block_from_row, rows):
        # All of it: a place whose event is damaged beyond reading must not keep its block for ever.
        changes.settle(block, (1 << len(block.ids)) - 1)
        places += [(block, place) for place in block.left()]
        limit -= len(block.ids)
        if limit <= 0:
            break
    chance = random.Random()  # noqa: S311  jitter needs no secrecy
    for each in load_held(session, places):
        _expire_one(session, changes, each, policy, chance)
    changes.write(session)
    return len(places)


def _expire_one(session: Session, changes: Changes, held: Held, policy: RetryPolicy, chance: random.Random) -> None:
    """End an attempt that nobody will report on: pending again, to be run alone, or dead after the last one."""
    row, name = held.row, session.catalog.name(held.row.subscription)
    message = f"worker {row.worker_id} was lost, or its lease ran out, before it reported an outcome"
    error = AttemptError("LeaseExpired", message, row.attempt, row.worker_id, from_micros(session.now))
    own = session.catalog.subscription(name).retry or policy
    outcome = decide(own, error, row.attempt, row.max_retries, chance, delay=timedelta(0))
    if isinstance(outcome, Dead):
        lease = Lease(row.event_id, name, held.epoch or 0)
        apply_outcome(session, changes, Settlement(lease, outcome, row.worker_id or ""), held)
        return
    again = pending_row(session, row, session.now)._replace(retry_count=row.retry_count + 1, alone=1)
    # The epoch stays: until another worker claims it, the one thought lost may still complete it.
    changes.replace(held, again._replace(epoch=held.epoch, errors=with_errors(session, held, error)))
    changes.entries.append(entry_of(session, held, Action.EXPIRED, row.worker_id, error))


# ── reset ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def reset(session: Session, event_id: int, subscription: str, reason: str, actor: str) -> None:
    """Make a leased or scheduled delivery due now."""
    if not 0 < event_id <= END_OF_TIME:
        raise NotFound(f"there is no event {event_id}")
    if session.catalog.known_number(subscription) is None:
        _require_event(session, event_id)
        raise Conflict(f"event {event_id} has nothing unfinished in {subscription!r}")
    number = hold(session, "hold_deliveries", subscription, json_array([event_id]))
    if (found := find_lease(session, number, event_id)) is not None:
        (held,) = load_held(session, [found])
    elif (row := next(delivery_rows(session, number, [event_id]), None)) is not None:
        held = Held(row, session.catalog.kind(session.db, row.kind))
    else:
        held = _take_out(session, subscription, event_id)
    if held.row.state not in (State.PENDING, State.LEASED):
        raise Conflict(f"event {event_id} is a dead letter in {subscription!r}: retry it with dlq.retry")
    changes = Changes()
    _reset_one(session, changes, held, actor, reason)
    changes.write(session)


def reset_blocks(session: Session, before: int, limit: int, actor: str) -> int:
    """Make deliveries due that were leased in blocks below a number; return how many there were."""
    blocks = [block_from_row(row) for row in session.db.rows("blocks_before", (before, limit))]
    held, changes = load_held(session, [(block, place) for block in blocks for place in block.left()]), Changes()
    for each in held:
        _reset_one(session, changes, each, actor, "the store was restored from a backup")
    changes.write(session)
    return len(held)


def _reset_one(session: Session, changes: Changes, held: Held, actor: str, reason: str) -> None:
    changes.replace(held, pending_row(session, held.row, session.now)._replace(alone=held.row.alone))
    changes.entries.append(entry_of(session, held, Action.RESET, actor, AttemptError("Reset", reason)))


def find_lease(session: Session, number: int, event_id: int) -> tuple[Block, int] | None:
    """Return where an event is leased in a subscription."""
    for block in map(block_from_row, session.db.rows("blocks_around", (number, event_id, event_id))):
        for place in block.left():
            if block.ids[place] == event_id:
                return block, place
    return None


def _take_out(session: Session, subscription: str, event_id: int) -> Held:
    """Take an event that is still above the cursor out of its turn; its row is not written yet."""
    number = session.catalog.number(subscription)
    story = _require_event(session, event_id)
    wanted = session.catalog.wants(subscription, story.type, story.tags)
    if not wanted or not session.db.run("is_above", (number, event_id)):
        raise Conflict(f"event {event_id} has nothing unfinished in {subscription!r}")
    session.db.run("add_skips", (number, json_array([event_id])))
    return Held(fresh_row(number, story), story.kind)


def _require_event(session: Session, event_id: int) -> Story:
    for row in session.db.rows("stories", (json_array([event_id]),)):
        return Story._make(row)
    raise NotFound(f"there is no event {event_id}")
