"""What Spark brings to deliveries: failures of its streams, and events of the log that are to be delivered again."""

import random
from collections.abc import Collection, Sequence
from dataclasses import replace

from postbus.errors import InvalidRequest, UnsafeStore
from postbus.model import Action, Dead, Lease, Mode, Retry, State, Status, Stream, decide
from postbus.retry import RetryPolicy
from postbus.store.audit import PLACE_BITS, Entry, add_entries
from postbus.store.catalog import kind_of
from postbus.store.contract import Failure, Settlement
from postbus.store.followers import erased, span, unquoted
from postbus.store.leases import Block, Changes, Held, Story, apply_outcome, fresh_row, hold
from postbus.store.records import json_array
from postbus.store.session import Session
from postbus.store.unfinished import find_unfinished


def divert(
    session: Session, subscription: str, failures: Sequence[Failure], policy: RetryPolicy, worker_id: str
) -> int:
    """Make each failure a delivery whose first attempt is over; see the contract.

    It is settled as if it had been leased, in a block that is never written: what a failure leads to is decided once.
    """
    now = session.now
    if session.catalog.subscription(subscription).mode is Mode.QUEUE:
        raise InvalidRequest(f"{subscription!r} is a queue, which gets its events from the log: name a Spark stream")
    session.db.run("hold_pruned")
    number = hold(session, "hold_deliveries", subscription, json_array(sorted({each.event_id for each in failures})))
    blank = erased(session, {each.event_id for each in failures})
    told = {each.event_id: _unquoted(each) if each.event_id in blank else each for each in failures}
    stories = session.db.rows("stories", (json_array(sorted(told)),))
    _require_unpruned(session, told.keys() - {event_id for event_id, *_ in stories})
    known = {row[0] for row in session.db.rows("diverted_before", (number, json_array(sorted(told))))}
    new = [row for row in stories if row[0] not in known]
    if not new:
        return 0
    block = session.db.value("draw_numbers", (1,))
    changes = Changes({block: Block(block, number, [row[0] for row in new], 0, "", worker_id, now, now)})
    for place, (event_id, type_, tags, priority, _, retries, created_at) in enumerate(new):
        failure = told[event_id]
        worker = failure.outcome.error.worker_id or worker_id
        held = Held(
            event_id, number, State.LEASED, kind_of(type_, tags), priority, created_at, now, 1, 0, retries,
            block << PLACE_BITS | place, worker, now, None, None, 0, has_row=False,
        )  # fmt: skip
        outcome = _outcome(failure.outcome, policy, retries)
        lease = Lease(event_id, subscription, held.epoch)
        picked = Entry(event_id, number, Action.PICKED, now, Status.PROCESSING, 1, held.epoch, worker)
        changes.entries.append(picked)
        settlement = Settlement(lease, outcome, worker, execution_time_ms=failure.execution_time_ms)
        apply_outcome(session, changes, settlement, held)
    changes.write(session)
    return len(new)


def _require_unpruned(session: Session, missing: Collection[int]) -> None:
    """Raise UnsafeStore where a failure would be forgotten since its event is gone; one that never was may be."""
    if missing and min(missing) <= (pruned := span(session, Stream.EVENTS).pruned):
        raise UnsafeStore(
            f"event {min(missing):,} has failed, and everything up to {pruned:,} was pruned meanwhile: read the "
            "stream with a consumer, which pruning waits for"
        )


def _unquoted(failure: Failure) -> Failure:
    return failure._replace(outcome=replace(failure.outcome, error=unquoted(failure.outcome.error)))


def _outcome(outcome: Retry | Dead, policy: RetryPolicy, own: int | None) -> Retry | Dead:
    """Return what a first failure leads to."""
    if isinstance(outcome, Dead):
        return outcome
    return decide(policy, outcome.error, 1, own, random.Random(), delay=outcome.after)  # noqa: S311  the delay is given


def redeliver(session: Session, subscription: str, ids: Sequence[int], actor: str) -> int:
    """Make events due in a queue that has nothing unfinished of them; return how many. See the contract."""
    db, catalog, now = session
    if catalog.subscription(subscription).mode is not Mode.QUEUE:
        raise InvalidRequest(f"{subscription!r} is no queue: an ordered subscription is rewound instead")
    wanted = sorted(set(ids))
    db.run("hold_pruned")
    number = hold(session, "hold_deliveries", subscription, json_array(wanted))
    stories = [Story._make(row) for row in db.rows("stories", (json_array(wanted),))]
    if gone := sorted(set(wanted) - {each.event_id for each in stories}):
        raise InvalidRequest(f"{len(gone):,} of these events were pruned, {gone[0]:,} first: publish them anew instead")
    left = find_unfinished(session, wanted)[number].keys() | erased(session, wanted)
    again = [each for each in stories if each.event_id not in left]
    made = [fresh_row(number, each._replace(due_at=now))._replace(fresh=0, updated_at=now) for each in again]
    kinds = {each.event_id: each.kind for each in again}
    position = db.run("cursor", (number,))[0][0]
    if early := [event_id for event_id in kinds if event_id > position]:
        db.run("add_skips", (number, json_array(early)))  # not wanted now: but the cursor must not bring it too
    db.many("put_delivery", made)
    told = (number, Action.REPLAYED, now, Status.PENDING, 0, None, actor)
    add_entries(session, [Entry(event_id, *told) for event_id in kinds])
    catalog.require_kinds(db, kinds.values())
    return len(made)
