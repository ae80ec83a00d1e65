"""What Spark brings to deliveries: failures of its streams, and events of the log that are to be delivered again."""

import random
from collections.abc import Collection, Sequence
from dataclasses import replace

from postbus.errors import InvalidRequest, UnsafeStore
from postbus.model import Action, Lease, Mode, Retry, Stream, decide
from postbus.retry import RetryPolicy
from postbus.store.contract import Failure, Settlement
from postbus.store.deliveries import Block, Changes, Held, Story, entry_of, first_attempt, fresh_row, hold, pending_row
from postbus.store.followers import erased, span, unquoted
from postbus.store.leases import apply_outcome
from postbus.store.records import json_array
from postbus.store.session import Session
from postbus.store.status import live_ids


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
    stories = [Story._make(row) for row in session.db.rows("stories", (json_array(sorted(told)),))]
    _require_unpruned(session, told.keys() - {each.event_id for each in stories})
    known = {row[0] for row in session.db.rows("diverted_before", (number, json_array(sorted(told))))}
    new = [each._replace(due_at=now) for each in stories if each.event_id not in known]
    if not new:
        return 0
    drawn, changes = session.db.value("draw_numbers", (1,)), Changes()
    block = Block(drawn, number, [each.event_id for each in new], 0, worker_id, now, now)
    for place, story in enumerate(new):
        failure = told[story.event_id]
        worker = failure.outcome.error.worker_id or worker_id
        held = first_attempt(block._replace(worker_id=worker), place, story)
        changes.entries.append(entry_of(session, held, Action.PICKED, worker))
        lease, outcome = Lease(story.event_id, subscription, block.epoch(place)), failure.outcome
        if isinstance(outcome, Retry):
            chance = random.Random()  # noqa: S311  the delay is given
            outcome = decide(policy, outcome.error, 1, story.max_retries, chance, delay=outcome.after)
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


def redeliver(session: Session, subscription: str, ids: Sequence[int], actor: str) -> int:
    """Make events due in a queue that has nothing unfinished of them; return how many. See the contract."""
    if session.catalog.subscription(subscription).mode is not Mode.QUEUE:
        raise InvalidRequest(f"{subscription!r} is no queue: an ordered subscription is rewound instead")
    wanted = sorted(set(ids))
    session.db.run("hold_pruned")
    number = hold(session, "hold_deliveries", subscription, json_array(wanted))
    stories = [Story._make(row) for row in session.db.rows("stories", (json_array(wanted),))]
    if gone := sorted(set(wanted) - {each.event_id for each in stories}):
        raise InvalidRequest(f"{len(gone):,} of these events were pruned, {gone[0]:,} first: publish them anew instead")
    left = live_ids(session, wanted, number) | erased(session, wanted)
    again = [each for each in stories if each.event_id not in left]
    position = session.db.run("cursor", (number,))[0][0]
    if early := [each.event_id for each in again if each.event_id > position]:
        session.db.run("add_skips", (number, json_array(early)))  # not wanted now: but the cursor must not bring it too
    changes = Changes()
    for story in again:
        held = Held(fresh_row(number, story), story.kind)
        changes.replace(held, pending_row(session, held.row, session.now))
        changes.entries.append(entry_of(session, held, Action.REPLAYED, actor))
    changes.write(session)
    return len(again)
