"""Claims and reports one after the other, while others change what they rest on: each is as if it were the first."""

from datetime import timedelta

import pytest

from postbus.errors import LeaseLost, NotFound
from postbus.model import Delivery
from postbus.retry import RetryPolicy
from postbus.store.contract import Claim, Report, Reported, Settled, Settlement
from tests.contract.stores import DONE, LEASE, Operator, Site, ids

POLICY = RetryPolicy(max_retries=5)


@pytest.fixture
def op(site: Site) -> Operator:
    """Give somebody who has begun: ten events are there, and one of them he has completed."""
    op = Operator(site.open(), site.clock)
    op.publish_all(*[{"type": "a", "payload": number} for number in range(10)])
    op.settle(op.take())
    return op


@pytest.fixture
def other(site: Site) -> Operator:
    """Give somebody in another process."""
    return Operator(site.open(), site.clock)


def success(delivery: Delivery) -> Report:
    """Return the report of a success."""
    return Report(delivery.id, delivery.subscription, delivery.worker_id, POLICY, epoch=delivery.epoch)


def test_what_is_paused_between_two_claims_yields_nothing(op: Operator, other: Operator):
    """Though another process did it, and nobody told."""
    other.store.pause_subscription("default", paused=True)
    assert op.claim() == []
    other.store.pause_subscription("default", paused=False)
    assert ids(op.claim()) == [2]


def test_a_new_type_of_higher_priority_goes_first(op: Operator, other: Operator):
    """Its route is unknown to whoever claims, until he is told by his own statement."""
    assert ids(op.claim()) == [2]
    urgent = other.publish("urgent", priority=5)
    assert ids(op.claim()) == [urgent.id]


def test_known_types_keep_their_order(op: Operator, other: Operator):
    """By priority, then due time: also what comes while lower ones flow."""
    other.publish("urgent", priority=5)
    other.publish("b")
    assert ids(op.claim(3)) == [11, 2, 3]
    urgent = other.publish("urgent", priority=5)
    assert ids(op.claim(2)) == [urgent.id, 4]
    assert ids(op.claim(7)) == [5, 6, 7, 8, 9, 10, 12]


def test_a_suspect_that_waits_comes_before_what_flows(op: Operator, other: Operator):
    """Alone, for whoever holds nothing; and whoever holds something is told that it waits."""
    lost = op.take(worker="lost")
    op.clock.advance(LEASE)
    assert other.store.expire(None, POLICY) == 1
    answer = op.ask(2, alone=False)
    assert (ids(answer.deliveries), answer.suspects) == ([3, 4], True)
    assert [each.id for each in op.claim(2) if each.suspect] == [lost.id]


def test_of_settlements_together_each_is_answered_for_itself(op: Operator):
    """As for reports: a stale epoch changes nothing, the same again is a repeat (I8)."""
    stale, standing, repeated = op.claim(3, worker="w:1")
    op.settle(repeated)
    op.store.reset(stale.id, "default", "by hand", "admin")
    told = [Settlement(each.lease, DONE, "w:1") for each in (stale, standing, repeated)]
    assert op.store.settle(told) == [Settled.LOST, Settled.APPLIED, Settled.REPEATED]
    assert op.store.settle(told) == [Settled.LOST, Settled.REPEATED, Settled.REPEATED]
    assert op.actions(stale.id) == ["PICKED", "RESET"]


def test_a_report_tells_the_policy_of_a_subscription_made_since(op: Operator, other: Operator):
    """Whoever reports remembers an older catalog, and looks again."""
    op.store.report([success(op.take())])
    other.subscription("new", retry=RetryPolicy(max_retries=9))
    other.publish("b")
    (told,) = op.store.report([success(other.take("new"))])
    assert isinstance(told, Reported)
    assert told.max_retries == 9


def test_claims_of_many_workers_get_each_its_own(op: Operator):
    """In their order, for as long as each asked, under its name."""
    claims = [Claim("default", f"w{n}", f"o{n}", limit=n, lease=timedelta(seconds=n)) for n in (1, 3, 2)]
    answers = op.store.claim_all(claims)
    assert [ids(each.deliveries) for each in answers] == [[2], [3, 4, 5], [6, 7]]
    epochs = [delivery.epoch for each in answers for delivery in each.deliveries]
    assert epochs == sorted(set(epochs))
    for claim, answer in zip(claims, answers, strict=True):
        assert {each.worker_id for each in answer.deliveries} == {claim.worker_id}
        assert {each.lease_until for each in answer.deliveries} == {op.clock.now() + claim.lease}
        picked = [op.logs(each.id)[-1] for each in answer.deliveries]
        assert [(row.worker_id, row.epoch) for row in picked] == [
            (claim.worker_id, each.epoch) for each in answer.deliveries
        ]
    assert op.store.owners() == {"o1", "o2", "o3"}


def test_of_reports_together_each_is_answered_for_itself(op: Operator):
    """One that stands, and the stale, the repeated and the unheard-of (I8)."""
    stale, standing, repeated = op.claim(3, worker="w:1")
    op.store.report([success(repeated)])
    op.store.reset(stale.id, "default", "by hand", "admin")
    op.take(worker="next")
    reports = [success(stale), success(standing), success(repeated), success(standing)._replace(event_id=999)]
    lost, done, again, unknown = op.store.report(reports)
    assert isinstance(lost, LeaseLost)
    assert isinstance(unknown, NotFound)
    assert isinstance(done, Reported)
    assert isinstance(again, Reported)
    assert (done.repeated, again.repeated) == (False, True)
    assert op.actions(standing.id) == op.actions(repeated.id) == ["PICKED", "COMPLETED"]
    assert op.actions(stale.id)[:2] == ["PICKED", "RESET"]


def test_a_success_after_the_lease_ran_out_is_accepted_while_nobody_has_it(op: Operator):
    """And the error of the attempt that was given up stays."""
    delivery = op.take(worker="w:1")
    op.clock.advance(LEASE)
    assert op.store.expire(None, POLICY) == 1
    (told,) = op.store.report([success(delivery)])
    assert isinstance(told, Reported)
    assert (told.retry_count, told.entry.attempt) == (1, 1)
    assert [each.type for each in op.stand(delivery.id).errors] == ["LeaseExpired"]
