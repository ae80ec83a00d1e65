"""Settling inside a caller's transaction: its writes and the delivery's end are stored together, or not at all."""

import threading
from typing import Any

import pytest

from postbus.errors import InvalidRequest
from postbus.model import Delivery, Outcome, Status
from postbus.payload import draft
from postbus.store.contract import Settled, Settlement
from tests.conftest import Crew
from tests.contract.stores import DEAD, DONE, FLAWED, OUTCOMES, RETRY, Operator, Site

ENDLESS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT count(*) FROM n"


class Changed(Exception):  # noqa: N818  what a caller might raise
    """The caller thought better of it."""


@pytest.fixture(autouse=True)
def _effects(op: Operator) -> None:
    """Have a table of one's own."""
    with op.store.transaction() as tx:
        tx.execute("CREATE TABLE effects (id INTEGER)")


def effects(op: Operator) -> int:
    """Count what was done."""
    with op.store.transaction() as tx:
        return tx.execute("SELECT count(*) FROM effects")[0][0]


def act(op: Operator, delivery: Delivery, outcome: Outcome = DONE, *, then: type[Exception] | None = None) -> Settled:
    """Do something, publish something, and settle, in one transaction."""
    with op.store.transaction() as tx:
        tx.execute("INSERT INTO effects VALUES (7)")
        tx.publish([draft({"type": "after"})])
        settled = tx.settle(Settlement(delivery.lease, outcome, delivery.worker_id, execution_time_ms=1.5))
        if then is not None:
            raise then
    return settled


def is_busy(tx: Any) -> bool:
    """Return whether another thread is in the midst of a statement."""
    if free := tx._busy.acquire(blocking=False):
        tx._busy.release()
    return not free


def test_effect_event_and_end_commit_together(op: Operator):
    """All three are there, the end with its audit row, and it is never claimed again (S4.6, I9, I13)."""
    event = op.publish()
    delivery = op.take(worker="host:7")
    assert act(op, delivery) is Settled.APPLIED
    assert effects(op) == 1
    assert op.status(event) is Status.COMPLETED
    end = op.logs(event)[-1]
    assert (end.action, end.epoch, end.worker_id, end.execution_time_ms) == (
        "COMPLETED", delivery.epoch, "host:7", 1.5,
    )  # fmt: skip
    assert [each.event.type for each in op.take_all()] == ["after"]


def test_nothing_is_settled_before_the_commit(site: Site, op: Operator):
    """Another store sees it leased until then (I2, I13)."""
    other = Operator(site.open(), site.clock)
    event = op.publish()
    delivery = op.take()
    with op.store.transaction() as tx:
        assert tx.settle(Settlement(delivery.lease, DONE, "w")) is Settled.APPLIED
        assert other.status(event) is Status.PROCESSING
        assert other.actions(event) == ["PICKED"]
    assert other.status(event) is Status.COMPLETED


@pytest.mark.parametrize("outcome", OUTCOMES, ids=lambda outcome: type(outcome).__name__)
def test_a_rolled_back_settlement_has_not_happened(op: Operator, outcome: Outcome):
    """The lease still stands and settles anew, whatever the outcome taken back (I8, I9, I13)."""
    event = op.publish()
    delivery = op.take()
    before, rows = op.stand(event), op.logs(event)
    with pytest.raises(Changed):
        act(op, delivery, outcome, then=Changed)
    assert (op.stand(event), op.logs(event)) == (before, rows)
    assert effects(op) == 0
    assert op.list().total == 1
    assert op.settle(delivery, outcome) is Settled.APPLIED


@pytest.mark.parametrize("outcome", OUTCOMES, ids=lambda outcome: type(outcome).__name__)
def test_it_ends_a_delivery_as_any_settlement_does(op: Operator, outcome: Outcome):
    """Done, done with errors, retry and dead: the same state, the same rows (S0.5, S1.10, S2.3)."""
    usual = op.publish()
    op.settle(op.take(), outcome, execution_time_ms=1.5)
    event = op.publish()
    assert act(op, op.take(), outcome) is Settled.APPLIED
    one, other = op.stand(event), op.stand(usual)
    assert (one.status, one.retry_count, one.next_retry_at) == (other.status, other.retry_count, other.next_retry_at)
    assert [(row.action, row.status) for row in op.logs(event)] == [(row.action, row.status) for row in op.logs(usual)]
    assert len(op.dead().items) == 2 * (outcome is DEAD)


@pytest.mark.parametrize("outcome", OUTCOMES, ids=lambda outcome: type(outcome).__name__)
def test_a_late_worker_is_told_inside_its_transaction(op: Operator, outcome: Outcome):
    """LOST, and nothing of the delivery changes; to roll back is then the caller's part (I8)."""
    event = op.publish()
    late = op.take(worker="late")
    op.end_leases()
    heir = op.take(worker="heir")
    before, rows = op.stand(event), op.logs(event)
    assert act(op, late, outcome) is Settled.LOST
    assert (op.stand(event), op.logs(event)) == (before, rows)
    assert op.settle(heir) is Settled.APPLIED


def test_the_same_outcome_twice_is_told_apart(op: Operator):
    """Also within one transaction; another outcome is lost (I9, I13)."""
    event = op.publish()
    delivery = op.take()
    with op.store.transaction() as tx:
        told = [Settlement(delivery.lease, outcome, "w") for outcome in (FLAWED, FLAWED, RETRY)]
        assert [tx.settle(each) for each in told] == [Settled.APPLIED, Settled.REPEATED, Settled.LOST]
    assert op.actions(event) == ["PICKED", "COMPLETED_WITH_ERRORS"]


def test_a_transaction_that_has_ended_settles_nothing(op: Operator):
    """Its connection belongs to others by then (I8)."""
    event = op.publish()
    delivery = op.take()
    with op.store.transaction() as tx:
        pass
    with pytest.raises(InvalidRequest, match="ended"):
        tx.settle(Settlement(delivery.lease, DONE, "w"))
    assert op.status(event) is Status.PROCESSING


def test_another_thread_can_roll_a_hanging_transaction_back(op: Operator, crew: Crew, eventually: Any):
    """The statement is cut off, nothing stays, others go on at once, and the transaction takes no more (I2, I10)."""
    held = op.store.transaction()
    entered, going = threading.Event(), threading.Event()
    kept: list[Any] = []

    def hang() -> None:
        kept.append(held.__enter__())
        kept[0].execute("INSERT INTO effects VALUES (7)")
        kept[0].publish([draft({"type": "never"})])
        entered.set()
        going.wait(5)
        kept[0].execute(ENDLESS)

    crew.start(hang)
    assert entered.wait(5)
    going.set()
    eventually(lambda: is_busy(kept[0]))
    assert held.__exit__(Changed, Changed(), None) is False
    with pytest.raises(Exception, match=r"(?i)interrupt|cancel"):
        crew.join()
    op.publish("next")
    assert effects(op) == 0
    assert op.list().total == 1
    with pytest.raises(InvalidRequest, match="ended"):
        kept[0].execute("INSERT INTO effects VALUES (8)")
