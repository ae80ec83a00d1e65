"""Settling: outcomes, repeats, and the fence that a late worker runs into."""

from datetime import timedelta

import pytest

from postbus.errors import LeaseLost
from postbus.model import AttemptError, Dead, DoneWithErrors, Lease, Outcome, Retry, Status
from postbus.retry import RetryPolicy
from postbus.store.contract import DeadFilter, Settled, Settlement
from postbus.testing import FrozenClock
from tests.contract.stores import DEAD, DONE, FLAWED, LEASE, OUTCOMES, RETRY, Operator, ids, one_try, wanting


def pairs() -> list[tuple[Outcome, Outcome]]:
    """Return every outcome with every other one."""
    return [(one, other) for one in OUTCOMES for other in OUTCOMES if one != other]


def kind(value: object) -> str:
    """Name an outcome in a test id."""
    return type(value).__name__


def test_done_completes_and_leaves_the_queue(op: Operator, clock: FrozenClock):
    """COMPLETED, recorded with worker, code and time, and never claimed again (S0.5, S2.3)."""
    event = op.publish()
    delivery = op.take(worker="host:7")
    assert op.settle(delivery, DONE, status_code=200, execution_time_ms=12.5) is Settled.APPLIED
    assert op.status(event) is Status.COMPLETED
    end = op.logs(event)[-1]
    assert (end.action, end.status, end.attempt, end.epoch) == ("COMPLETED", Status.COMPLETED, 1, delivery.epoch)
    assert (end.worker_id, end.status_code, end.execution_time_ms) == ("host:7", 200, 12.5)
    clock.advance(timedelta(days=1))
    assert op.claim() == []


def test_done_with_errors_completes_and_keeps_them_all(op: Operator):
    """COMPLETED_WITH_ERRORS with every error of the attempt (S2.3, S2.4)."""
    event = op.publish()
    errors = (AttemptError("A", "first", handler="f"), AttemptError("B", "second", handler="g"))
    assert op.settle(op.take(), DoneWithErrors(errors)) is Settled.APPLIED
    assert op.status(event) is Status.COMPLETED_WITH_ERRORS
    assert [(error.type, error.message, error.handler) for error in op.get(event).errors] == [
        ("A", "first", "f"),
        ("B", "second", "g"),
    ]


def test_retry_makes_it_pending_again_after_its_delay(op: Operator, clock: FrozenClock):
    """One failed attempt counted, its error kept, due at the time said (S1.9, S1.10)."""
    event = op.publish()
    error = AttemptError("ValueError", "no luck", traceback="at line 1")
    assert op.settle(op.take(), Retry(timedelta(seconds=7), error)) is Settled.APPLIED
    stand = op.stand(event)
    assert (stand.status, stand.attempt, stand.retry_count) == (Status.PENDING, 1, 1)
    assert stand.next_retry_at == clock.now() + timedelta(seconds=7)
    assert [(each.type, each.message, each.attempt, each.traceback) for each in stand.errors] == [
        ("ValueError", "no luck", 1, "at line 1")
    ]
    assert op.get(event).last_error == "no luck"
    clock.advance(6.999999)
    assert op.claim() == []
    clock.advance(0.000001)
    assert op.take().attempt == 2


def test_dead_makes_a_dead_letter(op: Operator, clock: FrozenClock):
    """FAILED, with the time of death, never claimed again (S0.5, S1.10, S1.13)."""
    event = op.publish()
    op.settle(op.take(), RETRY)
    clock.advance(10)
    assert op.settle(op.take(), Dead(AttemptError("KeyError", "the end"))) is Settled.APPLIED
    (letter,) = op.dead()
    assert op.status(event) is Status.FAILED
    assert (letter.event.id, letter.subscription, letter.attempts) == (event.id, "default", 2)
    assert (letter.died_at, letter.last_retry_at) == (clock.now(), None)
    assert [(error.attempt, error.message) for error in letter.errors] == [(1, "oops"), (2, "the end")]


@pytest.mark.parametrize("outcome", OUTCOMES, ids=kind)
def test_the_same_outcome_again_changes_nothing(op: Operator, clock: FrozenClock, outcome: Outcome):
    """A repeat is told apart, writes no row and moves no time (S2.3, I13)."""
    event = op.publish()
    delivery = op.take()
    op.settle(delivery, outcome)
    before, rows = op.stand(event), op.logs(event)
    clock.advance(5)
    assert op.settle(delivery, outcome) is Settled.REPEATED
    assert (op.stand(event), op.logs(event)) == (before, rows)


@pytest.mark.parametrize(("first", "second"), pairs(), ids=kind)
def test_another_outcome_on_a_settled_epoch_is_lost(op: Operator, first: Outcome, second: Outcome):
    """The first word counts; a contrary one changes nothing (I8, I9)."""
    event = op.publish()
    delivery = op.take()
    op.settle(delivery, first)
    before, rows = op.stand(event), op.logs(event)
    assert op.settle(delivery, second) is Settled.LOST
    assert (op.stand(event), op.logs(event)) == (before, rows)


@pytest.mark.parametrize(("first", "second"), pairs(), ids=kind)
def test_of_two_outcomes_for_one_lease_in_one_call_the_first_counts(op: Operator, first: Outcome, second: Outcome):
    """Settlements are taken in the order given (I9)."""
    alone = op.publish()
    op.settle(op.take(), first)
    event = op.publish()
    lease = op.take().lease
    told = [Settlement(lease, first, "w"), Settlement(lease, second, "w"), Settlement(lease, first, "w")]
    assert op.store.settle(told) == [Settled.APPLIED, Settled.LOST, Settled.REPEATED]
    assert (op.stand(event).status, op.actions(event)) == (op.stand(alone).status, op.actions(alone))


@pytest.mark.parametrize("took", [None, 1.5])
@pytest.mark.parametrize("outcome", OUTCOMES, ids=kind)
def test_a_late_worker_cannot_settle(op: Operator, outcome: Outcome, took: float | None):
    """Once another claim has the delivery, the old epoch changes nothing (I8)."""
    event = op.publish()
    late = op.take(worker="late")
    op.end_leases()
    heir = op.take(worker="heir")
    before, rows = op.stand(event), op.logs(event)
    assert op.settle(late, outcome, execution_time_ms=took) is Settled.LOST
    assert (op.stand(event), op.logs(event)) == (before, rows)
    assert op.settle(heir, DONE, execution_time_ms=took) is Settled.APPLIED


@pytest.mark.parametrize("outcome", OUTCOMES, ids=kind)
def test_a_late_worker_cannot_settle_what_another_has_finished(op: Operator, outcome: Outcome):
    """Neither completed nor dead deliveries can be ended again (I8, I9)."""
    for end in (DONE, FLAWED, DEAD):
        event = op.publish()
        late = op.take(worker="late")
        op.end_leases()
        op.settle(op.take(worker="heir"), end)
        before, rows = op.stand(event), op.logs(event)
        assert op.settle(late, outcome) is Settled.LOST
        assert (op.stand(event), op.logs(event)) == (before, rows)


@pytest.mark.parametrize("ended_by_upkeep", [False, True])
@pytest.mark.parametrize("outcome", [DONE, FLAWED], ids=kind)
def test_completing_late_is_accepted_while_nobody_has_claimed_it_anew(
    op: Operator, outcome: Outcome, *, ended_by_upkeep: bool
):
    """The work was done, and nobody else has begun it (I9)."""
    event = op.publish()
    delivery = op.take()
    op.end_leases()
    if ended_by_upkeep:
        op.store.expire(None, RetryPolicy())
    assert op.settle(delivery, outcome) is Settled.APPLIED
    assert op.status(event) in (Status.COMPLETED, Status.COMPLETED_WITH_ERRORS)
    assert op.claim() == []


def test_failing_late_does_not_count_the_attempt_twice(op: Operator):
    """It was counted when its lease was ended; a retry comes too late, an end tells the worker's own error (I12)."""
    event = op.publish()
    delivery = op.take()
    op.end_leases()
    op.store.expire(None, RetryPolicy())
    before = op.stand(event)
    assert op.settle(delivery, RETRY) is Settled.LOST
    assert op.stand(event) == before
    assert op.settle(delivery, DEAD) is Settled.APPLIED
    stand = op.stand(event)
    assert (stand.attempt, stand.retry_count) == (1, 1)
    assert [(error.attempt, error.message) for error in stand.errors] == [(1, "oops")]


def test_what_died_by_expiry_cannot_be_completed_late(op: Operator):
    """It has its end: a dead letter, and only the dead-letter verbs change that (I9)."""
    event = op.publish()
    delivery = op.take()
    op.end_leases()
    op.store.expire(None, one_try())
    assert op.settle(delivery, DONE) is Settled.LOST
    assert op.status(event) is Status.FAILED


def test_a_settlement_that_loses_does_not_stop_its_neighbours(op: Operator):
    """Each gets its own answer, in order (I8)."""
    events = op.publish_all(*[{"type": "a"}] * 5)
    late = op.claim(5, worker="late")
    op.store.reset(events[2].id, "default", "stuck", "me")
    told = [
        Settlement(delivery.lease, outcome, "late")
        for delivery, outcome in zip(late, [DONE, RETRY, DONE, DEAD, FLAWED], strict=True)
    ]
    applied, lost = Settled.APPLIED, Settled.LOST
    assert op.store.settle(told) == [applied, applied, lost, applied, applied]
    assert [op.status(event) for event in events] == [
        Status.COMPLETED,
        Status.PENDING,
        Status.PENDING,
        Status.FAILED,
        Status.COMPLETED_WITH_ERRORS,
    ]


@pytest.mark.parametrize("order", [1, -1])
def test_of_two_leases_on_one_event_in_one_call_only_the_later_counts(op: Operator, order: int):
    """A worker that was late and the one that took over may report together: each gets its own answer (I8)."""
    op.publish()
    late = op.take(worker="late")
    op.end_leases()
    quick = op.take(worker="quick")
    told = [Settlement(each.lease, DONE, "w", execution_time_ms=1.0) for each in (late, quick)][::order]
    assert op.store.settle(told) == [Settled.LOST, Settled.APPLIED][::order]


def test_a_large_batch_that_simply_worked_is_settled_like_single_ones(op: Operator, clock: FrozenClock):
    """Two hundred of two subscriptions, a stale one and a double among them: each row as if settled alone (I8, I13)."""
    op.subscription("other")
    op.publish_all(*({"type": f"t{n % 3}", "tags": ["x"], "priority": n % 2} for n in range(100)))
    held = op.take_all() + op.take_all("other")
    stale, double = held[7], held[8]
    op.store.reset(stale.id, "default", "stuck", "me")
    heir = op.take(worker="heir")
    clock.advance(1)
    told = [Settlement(each.lease, DONE, "w", execution_time_ms=n / 3) for n, each in enumerate(held)]
    answers = op.store.settle([*told, Settlement(heir.lease, DONE, "heir", execution_time_ms=0.5)])
    assert [n for n, answer in enumerate(answers) if answer is Settled.LOST] == [7]
    assert op.store.settle([told[8], told[9]]) == [Settled.REPEATED] * 2
    for n, delivery in enumerate(held):
        row = op.logs(delivery.id, delivery.subscription)[-1]
        assert (row.action, row.status, row.created_at) == ("COMPLETED", Status.COMPLETED, clock.now())
        if n != 7:
            assert (row.epoch, row.attempt, row.worker_id) == (delivery.epoch, 1, "w")
            assert row.execution_time_ms == pytest.approx(n / 3, abs=0.001)
    assert op.logs(stale.id, "default")[-1].worker_id == "heir"
    assert op.actions(double.id, "default") == ["PICKED", "COMPLETED"]
    assert op.claim(9) == op.claim(9, "other") == []


def test_nothing_to_settle_is_no_error(op: Operator):
    """An empty list gets an empty answer."""
    assert op.store.settle([]) == []


@pytest.mark.parametrize("outcome", OUTCOMES, ids=kind)
@pytest.mark.parametrize("epoch", [-1, 0, 999])
def test_an_epoch_nobody_was_given_settles_nothing(op: Operator, outcome: Outcome, epoch: int):
    """Only who was handed a lease can end it; a delivery never claimed is nobody's (I8)."""
    event = op.publish()
    told = Settlement(Lease(event.id, "default", epoch), outcome, "w")
    assert op.store.settle([told]) == [Settled.LOST]
    assert (op.status(event), op.actions(event)) == (Status.PENDING, [])


@pytest.mark.parametrize("lease", [Lease(404, "default", 1), Lease(1, "nowhere", 1)])
def test_a_lease_on_nothing_is_lost(op: Operator, lease: Lease):
    """Unknown events and subscriptions are told like any other lost lease (I8)."""
    op.publish()
    op.take()
    assert op.store.settle([Settlement(lease, DONE, "w")]) == [Settled.LOST]
    assert op.store.extend([lease], LEASE) == {lease}
    assert op.store.release([lease], "w") == 0


def test_errors_are_one_an_attempt_however_it_ended(op: Operator, clock: FrozenClock):
    """Failed, expired, failed: three errors, in order, until it is done (S1.10)."""
    event = op.publish()
    op.settle(op.take(), RETRY)
    clock.advance(10)
    op.take()
    op.end_leases()
    op.settle(op.take(), Retry(timedelta(0), AttemptError("Last", "third")))
    op.settle(op.take(), DONE)
    assert [error.attempt for error in op.get(event).errors] == [1, 2, 3]
    assert op.get(event).retry_count == 3


def test_an_errors_parts_are_all_kept(op: Operator, clock: FrozenClock):
    """Type, message, traceback, worker, handler and time come back (S1.10)."""
    event = op.publish()
    error = AttemptError("KeyError", "no 'x'", 1, "host:1", clock.now(), "Traceback …", "shop.ship")
    op.settle(op.take(), Dead(error))
    assert op.get(event).errors == (error,)
    assert op.dead().items[0].errors == (error,)


# ── extend, release, started ─────────────────────────────────────────────────────────────────────────────────────────


def test_extending_lets_the_lease_run_from_now(op: Operator, clock: FrozenClock):
    """A heartbeat keeps long work from being claimed by others (S2.5, I7)."""
    event = op.publish()
    delivery = op.take()
    for _ in range(5):
        clock.advance(59)
        assert op.store.extend([delivery.lease], LEASE) == set()
        assert op.claim(worker="other") == []
    assert op.stand(event).lease_until == clock.now() + LEASE
    assert op.settle(delivery) is Settled.APPLIED


def test_extending_writes_no_audit_row(op: Operator):
    """A heartbeat is no transition (I13)."""
    event = op.publish()
    op.store.extend([op.take().lease], LEASE)
    assert op.actions(event) == ["PICKED"]


def test_extending_tells_which_leases_are_lost_and_extends_the_others(op: Operator, clock: FrozenClock):
    """Of three, one was reset and one is done: those come back, the third runs on (I8)."""
    events = op.publish_all(*[{"type": "a"}] * 3)
    held = [delivery.lease for delivery in op.claim(3)]
    op.store.reset(events[0].id, "default", "stuck", "me")
    op.store.settle([Settlement(held[1], DONE, "w")])
    clock.advance(50)
    assert op.store.extend(held, LEASE) == {held[0], held[1]}
    assert op.stand(events[2]).lease_until == clock.now() + LEASE


def test_extending_uses_the_subscriptions_own_lease(op: Operator, clock: FrozenClock):
    """As the claim did (S2.5)."""
    op.subscription("slow", lease=timedelta(minutes=5))
    event = op.publish()
    lease = op.take("slow").lease
    clock.advance(100)
    op.store.extend([lease], LEASE)
    assert op.stand(event, "slow").lease_until == clock.now() + timedelta(minutes=5)


def test_a_deleted_subscriptions_lease_is_lost_and_stops_no_other_heartbeat(op: Operator, clock: FrozenClock):
    """One heartbeat covers all that a worker holds; what is gone must not end the rest (I8, I10)."""
    op.subscription("gone")
    event = op.publish()
    gone, kept = op.take("gone"), op.take()
    op.store.delete_subscription("gone", "me")
    clock.advance(50)
    assert op.store.extend([gone.lease, kept.lease], LEASE) == {gone.lease}
    assert op.stand(event).lease_until == clock.now() + LEASE
    assert op.settle(gone) is Settled.LOST


def test_extending_a_lease_that_another_holds_changes_nothing(op: Operator):
    """The heir's lease stays as it is (I8)."""
    event = op.publish()
    late = op.take(worker="late")
    op.end_leases()
    heir = op.take(worker="heir")
    assert op.store.extend([late.lease], timedelta(days=1)) == {late.lease}
    assert op.stand(event).lease_until == heir.lease_until


def test_releasing_gives_the_attempt_back(op: Operator, clock: FrozenClock):
    """Pending, due at once, as if never claimed, with its cause recorded (S0.7, I11)."""
    event = op.publish()
    delivery = op.take()
    clock.advance(5)
    assert op.store.release([delivery.lease], "w") == 1
    stand = op.stand(event)
    assert (stand.status, stand.attempt, stand.retry_count) == (Status.PENDING, 0, 0)
    assert op.actions(event) == ["PICKED", "RELEASED"]
    assert op.take().attempt == 1


def test_a_release_may_put_the_delivery_off(op: Operator, clock: FrozenClock):
    """Due after the delay and not before; it is still work to do, for nobody's publisher delayed it (S0.7)."""
    event = op.publish()
    delivery = op.take()
    assert op.store.release([delivery.lease], "w", timedelta(seconds=5)) == 1
    assert op.stand(event).attempt == 0
    assert op.claim() == []
    work = op.store.work("default", wanting("*"))
    assert work.due or work.leased or work.retrying
    clock.advance(5)
    assert op.take().attempt == 1


@pytest.mark.parametrize("outcome", OUTCOMES, ids=kind)
def test_a_released_lease_is_void(op: Operator, outcome: Outcome):
    """Who handed it back has no more say, even if nobody has claimed it since (I8)."""
    event = op.publish()
    delivery = op.take()
    op.store.release([delivery.lease], "w")
    assert op.settle(delivery, outcome) is Settled.LOST
    assert op.store.release([delivery.lease], "w") == 0
    assert op.store.extend([delivery.lease], LEASE) == {delivery.lease}
    assert op.status(event) is Status.PENDING


def test_releasing_counts_only_what_was_still_held(op: Operator):
    """Finished ones in the list are passed over (I8)."""
    op.publish_all(*[{"type": "a"}] * 4)
    held = op.claim(4)
    op.settle(held[1])
    assert op.store.release([each.lease for each in held], "w") == 3
    assert op.store.release([], "w") == 0
    assert len(op.claim(9)) == 3


def test_releasing_a_retry_keeps_its_earlier_failures(op: Operator, clock: FrozenClock):
    """Only the attempt handed back is given back (I12)."""
    event = op.publish()
    op.settle(op.take(), RETRY)
    clock.advance(10)
    op.store.release([op.take().lease], "w")
    stand = op.stand(event)
    assert (stand.attempt, stand.retry_count, len(stand.errors)) == (1, 1, 1)
    assert op.take().attempt == 2


def test_started_is_recorded(op: Operator):
    """A STARTED row, nothing else changed (I13)."""
    event = op.publish()
    delivery = op.take(worker="host:1")
    op.store.started(delivery.lease, "host:1")
    assert op.actions(event) == ["PICKED", "STARTED"]
    row = op.logs(event)[-1]
    assert (row.worker_id, row.epoch, row.status) == ("host:1", delivery.epoch, Status.PROCESSING)
    assert op.status(event) is Status.PROCESSING
    assert op.settle(delivery) is Settled.APPLIED


def test_a_passed_epoch_cannot_start(op: Operator):
    """LeaseLost, and no row (I8)."""
    event = op.publish()
    late = op.take()
    op.end_leases()
    op.take(worker="heir")
    rows = op.logs(event)
    with pytest.raises(LeaseLost):
        op.store.started(late.lease, "w")
    assert op.logs(event) == rows


def test_neighbours_of_a_settled_event_stay_as_they_are(op: Operator):
    """Settling one touches neither other events nor other subscriptions."""
    op.subscription("other")
    events = op.publish_all(*[{"type": "a"}] * 3)
    held = op.claim(3)
    op.settle(held[1], DEAD)
    assert [op.status(event) for event in events] == [Status.PROCESSING, Status.FAILED, Status.PROCESSING]
    assert ids(op.claim(9, "other")) == ids(events)


@pytest.mark.parametrize("end", ["failed", "expired", "at once"])
def test_a_retry_count_counts_retries(op: Operator, end: str):
    """How often it was tried again, or is about to be: of a dead letter all of its retries, and not one more."""
    event = op.publish(max_retries=2)
    counts: list[int] = []
    for attempt in range(1 if end == "at once" else 3):
        delivery = op.take()
        counts.append(delivery.event.retry_count)
        if end == "expired":
            op.clock.advance(100)
            op.store.expire(None, RetryPolicy())
        else:
            op.settle(delivery, DEAD if end == "at once" or attempt == 2 else RETRY)
            op.clock.advance(100)
    assert counts == list(range(len(counts)))
    stand = op.stand(event)
    assert (stand.status, stand.attempt, stand.retry_count) == (Status.FAILED, len(counts), len(counts) - 1)
    (letter,) = op.store.dead_letters(DeadFilter(), limit=1, offset=0, after=None)
    assert (letter.attempts, letter.event.retry_count) == (len(counts), len(counts) - 1)
