"""Putting orphans back: reset, the end of leases, and processes known to be dead."""

from datetime import timedelta

import pytest

from postbus.errors import Conflict, NotFound
from postbus.model import Outcome, Status
from postbus.retry import RetryPolicy
from postbus.store.contract import Settled
from postbus.testing import FrozenClock
from tests.contract.stores import DEAD, DONE, FLAWED, RETRY, Operator, ids, one_try


def test_a_leased_delivery_is_due_at_once_after_a_reset(op: Operator):
    """Its attempts are kept, its cause is recorded (I11)."""
    event = op.publish()
    op.take(worker="stuck")
    op.store.reset(event.id, "default", "looks stuck", "admin")
    stand = op.stand(event)
    assert (stand.status, stand.attempt, stand.retry_count) == (Status.PENDING, 1, 0)
    row = op.logs(event)[-1]
    assert (row.action, row.worker_id, row.error_message) == ("RESET", "admin", "looks stuck")
    assert op.take(worker="heir").attempt == 2


def test_the_old_lease_is_void_after_a_reset(op: Operator):
    """The worker who was thought stuck can no longer finish it (I8)."""
    event = op.publish()
    stuck = op.take()
    op.store.reset(event.id, "default", "looks stuck", "admin")
    assert op.settle(stuck, DONE) is Settled.LOST
    assert op.status(event) is Status.PENDING


def test_retries_are_counted_alike_before_and_after_the_end(op: Operator):
    """A reset is no failed attempt: zero while pending, zero when completed."""
    event = op.publish()
    op.take()
    op.store.reset(event.id, "default", "looks stuck", "admin")
    op.settle(op.take())
    assert (op.stand(event).attempt, op.stand(event).retry_count) == (2, 0)


@pytest.mark.parametrize("way", ["delayed", "retry"])
def test_a_scheduled_delivery_is_due_at_once_after_a_reset(op: Operator, way: str):
    """Delayed by its publisher or waiting for a retry: it need not wait any longer."""
    event = op.publish(delay=3600 if way == "delayed" else None)
    if way == "retry":
        op.settle(op.take(), RETRY)
    op.store.reset(event.id, "default", "now please", "admin")
    assert ids(op.claim()) == [event.id]


@pytest.mark.parametrize("end", [DONE, FLAWED, DEAD])
def test_what_has_ended_cannot_be_reset(op: Operator, end: Outcome):
    """Completed and dead are conflicts, and nothing changes (I9)."""
    event = op.publish()
    op.settle(op.take(), end)
    before, rows = op.stand(event), op.logs(event)
    with pytest.raises(Conflict):
        op.store.reset(event.id, "default", "again", "admin")
    assert (op.stand(event), op.logs(event)) == (before, rows)


def test_an_unknown_event_cannot_be_reset(op: Operator):
    """It is not found."""
    with pytest.raises(NotFound):
        op.store.reset(404, "default", "again", "admin")


def test_a_reset_concerns_one_subscription(op: Operator):
    """The same event leased elsewhere stays leased."""
    op.subscription("other")
    event = op.publish()
    op.take()
    other = op.take("other")
    op.store.reset(event.id, "default", "stuck", "admin")
    assert op.status(event, "other") is Status.PROCESSING
    assert op.settle(other) is Settled.APPLIED


def test_only_leases_that_ran_out_are_ended(op: Operator, clock: FrozenClock):
    """One of two, and a second look finds nothing (I7)."""
    old, young = op.publish(), op.publish()
    op.take()
    clock.advance(30)
    op.take()
    clock.advance(30)
    assert op.store.expire(None, RetryPolicy()) == 1
    assert op.store.expire(None, RetryPolicy()) == 0
    assert (op.status(old), op.status(young)) == (Status.PENDING, Status.PROCESSING)


def test_no_more_leases_than_the_limit_are_ended_at_once(op: Operator):
    """So that nobody else waits long."""
    op.publish_all(*[{"type": "a"}] * 25)
    op.claim(25, shared=False)
    op.end_leases()
    assert [op.store.expire(None, RetryPolicy(), limit=10) for _ in range(4)] == [10, 10, 5, 0]


def test_the_leases_of_a_dead_process_are_ended_before_their_time(op: Operator):
    """By the owner's nonce, not by the worker's name, and no other's (S1.15)."""
    events = op.publish_all(*[{"type": "a"}] * 4)
    op.claim(2, worker="host:1", owner="dead")
    op.claim(2, worker="host:1", owner="alive")
    assert op.store.owners() == {"dead", "alive"}
    assert op.store.expire(["dead", "never-seen"], RetryPolicy()) == 2
    assert [op.status(event) for event in events] == [Status.PENDING] * 2 + [Status.PROCESSING] * 2
    assert op.store.owners() == {"alive"}
    assert op.stand(events[0]).retry_count == 1


def test_what_a_dead_process_held_on_its_last_attempt_is_dead(op: Operator):
    """A crash uses the attempt up (S0.8, I12)."""
    event = op.publish()
    op.take(owner="dead")
    op.store.expire(["dead"], one_try())
    assert op.status(event) is Status.FAILED


def test_no_owners_means_no_leases(op: Operator):
    """An empty list of dead processes ends nothing, whatever has run out."""
    op.publish()
    op.take()
    op.end_leases()
    assert op.store.expire([], RetryPolicy()) == 0
    assert op.store.owners() == {"w"}


def test_who_says_that_it_is_alive_is_not_dead(op: Operator):
    """Neither while it lives, nor when it took its leave; and nobody is dead who was never heard of (S1.15)."""
    with op.store.mark_alive("me"):
        assert not op.store.is_dead("me")
    assert not op.store.is_dead("me")
    assert not op.store.is_dead("nobody")


def test_an_expired_lease_is_pending_and_due_after_upkeep(op: Operator, clock: FrozenClock):
    """No back-off is added to the time already lost (I10)."""
    event = op.publish()
    op.take()
    op.end_leases()
    op.store.expire(None, RetryPolicy(base_delay=5))
    assert op.stand(event).next_retry_at is None
    assert ids(op.claim()) == [event.id]


def test_a_lease_extended_in_time_is_not_ended(op: Operator, clock: FrozenClock):
    """The heartbeat came a moment before the upkeep (I7)."""
    op.publish()
    delivery = op.take()
    clock.advance(59)
    op.store.extend([delivery.lease], timedelta(seconds=60))
    clock.advance(1)
    assert op.store.expire(None, RetryPolicy()) == 0
