"""Events of the log are delivered to a queue again, and none of them twice."""

from datetime import timedelta

import pytest

from postbus.errors import InvalidRequest
from postbus.model import Mode, Status, Stream
from tests.contract.stores import DEAD, RETRY, Operator, ids


def test_what_is_finished_comes_again_as_if_it_were_new(op: Operator):
    """Due now, with all its attempts, recorded as REPLAYED (I11)."""
    events = op.publish_all({"type": "a", "priority": 2}, {"type": "a"})
    for delivery in op.take_all():
        op.settle(delivery)
    assert op.store.redeliver("default", ids(events), "ops") == 2
    assert op.status(events[0]) is Status.PENDING
    assert [(each.id, each.attempt) for each in op.take_all()] == [(each.id, 1) for each in events]
    assert op.actions(events[0]) == ["PICKED", "COMPLETED", "REPLAYED", "PICKED"]
    assert op.logs(events[0])[2].worker_id == "ops"


def test_what_is_on_its_way_or_dead_is_left_as_it_is(op: Operator):
    """Waiting, scheduled, leased, retried or dead: it comes once (I9)."""
    op.publish_all(*[{"type": "a"}] * 3)
    dead, retried, leased = op.claim(3)
    op.settle(dead, DEAD)
    op.settle(retried, RETRY)
    op.publish("a", delay=60)
    op.publish("a")
    assert op.store.redeliver("default", [1, 2, 3, 4, 5], "ops") == 0
    assert [op.status(event) for event in (1, 2, 3, 4, 5)] == [
        Status.FAILED, Status.PENDING, Status.PROCESSING, Status.PENDING, Status.PENDING,
    ]  # fmt: skip
    assert op.settle(leased).value == "applied"
    op.clock.advance(timedelta(minutes=2))
    assert sorted(ids(op.take_all())) == [2, 4, 5]


def test_what_the_queue_does_not_want_can_be_delivered_to_it(op: Operator):
    """Once, though its cursor has still to come to it, and though it wants it by then (I9)."""
    op.subscription("s", ["a"])
    event = op.publish("b")
    assert op.store.redeliver("s", [event.id], "ops") == 1
    op.store.widen_subscription("s", "b")
    assert ids(op.take_all("s")) == [event.id]


def test_several_of_the_same_are_one(op: Operator):
    """An id that is named twice is delivered once."""
    event = op.publish("a")
    op.settle(op.take())
    assert op.store.redeliver("default", [event.id, event.id], "ops") == 1
    assert len(op.take_all()) == 1


def test_an_erased_event_is_not_delivered_again(op: Operator):
    """Nothing of it is (P.5)."""
    event = op.publish("a")
    op.settle(op.take())
    op.store.erase(ids=[event.id], actor="privacy")
    assert op.store.redeliver("default", [event.id], "ops") == 0
    assert op.take_all() == []


def test_pruned_events_and_other_subscriptions_are_refused(op: Operator):
    """Then none is delivered (P.3)."""
    events = op.publish_all(*[{"type": "a"}] * 2)
    for delivery in op.take_all():
        op.settle(delivery)
    op.store.prune(Stream.EVENTS, after=0, through=events[0].id)
    with pytest.raises(InvalidRequest, match="1 of these events were pruned"):
        op.store.redeliver("default", ids(events), "ops")
    op.subscription("s", mode=Mode.ORDERED)
    with pytest.raises(InvalidRequest, match="no queue"):
        op.store.redeliver("s", [events[1].id], "ops")
    assert op.take_all() == []
