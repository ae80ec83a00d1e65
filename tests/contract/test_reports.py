"""Reports of workers that leave to the store what follows: S3's complete and fail, and claims of many at once."""

from datetime import timedelta

import pytest

from postbus.errors import LeaseLost, NotFound
from postbus.model import Action, AttemptError, Status, Token
from postbus.pattern import Interest
from postbus.payload import draft
from postbus.retry import RetryPolicy
from postbus.store.contract import Claim, Log, Report, Reported

POLICY = RetryPolicy(max_retries=1, base_delay=300, max_delay=300)
BOOM = (AttemptError("Boom", "it broke"),)


def _publish(store: Log, count: int = 1, **fields: object) -> list[int]:
    return [event.id for event in store.publish([draft({"type": "a", **fields}) for _ in range(count)])]


def _claim(store: Log, worker: str = "w:1") -> int:
    (delivery,) = store.claim(Claim("default", worker, "o", limit=1)).deliveries
    return delivery.epoch


def _one(store: Log, report: Report) -> Reported | LeaseLost | NotFound:
    (answer,) = store.report([report])
    return answer


def _done(store: Log, report: Report) -> Reported:
    answer = _one(store, report)
    assert isinstance(answer, Reported), answer
    return answer


def _actions(store: Log, event_id: int) -> list[str]:
    return [str(each.action) for each in store.logs(event_id)]


def test_a_worker_that_gives_no_epoch_means_the_lease_it_holds(store: Log):
    """And a repeat is answered with what was recorded, and writes nothing (S3.3, S3.9)."""
    (event_id,) = _publish(store)
    _claim(store)
    report = Report(event_id, "default", "w:1", POLICY, status_code=200, execution_time_ms=12.5)
    first, again = _done(store, report), _done(store, report)
    assert (first.entry.action, first.repeated, again.repeated) == (Action.COMPLETED, False, True)
    assert (again.entry.created_at, again.entry.status_code, again.entry.execution_time_ms) == (
        first.entry.created_at,
        200,
        12.5,
    )
    assert _actions(store, event_id) == ["PICKED", "COMPLETED"]


def test_the_entry_told_is_the_entry_kept(store: Log):
    """Field by field, but for its number."""
    (event_id,) = _publish(store)
    _claim(store)
    told = _done(store, Report(event_id, "default", "w:1", POLICY, failed=True, errors=BOOM, status_code=503)).entry
    kept = store.logs(event_id)[-1]
    names = set(type(kept).__slots__) - {"id"}
    assert {name: getattr(told, name) for name in names} == {name: getattr(kept, name) for name in names}


def test_failures_are_retried_by_the_policy_and_the_last_is_final(store: Log):
    """The delay is the policy's; the attempt after the last retry makes a dead letter (S3.4)."""
    (event_id,) = _publish(store)
    _claim(store)
    report = Report(event_id, "default", "w:1", POLICY, failed=True, errors=BOOM)
    first = _done(store, report)
    assert (first.entry.status, first.retry_count, first.max_retries) == (Status.PENDING, 1, 1)
    assert first.next_retry_at == first.entry.created_at + timedelta(minutes=5)
    assert _done(store, report) == first._replace(entry=_done(store, report).entry, repeated=True)
    store.reset(event_id, "default", "now", "test")
    _claim(store)
    last = _done(store, report)
    assert (last.entry.status, last.entry.attempt, last.next_retry_at) == (Status.FAILED, 2, None)
    assert store.get(event_id, "default").status is Status.FAILED
    assert _done(store, report).repeated


def test_the_same_worker_failing_twice_writes_two_rows(store: Log):
    """Each claim has an epoch, so that a second failure is not taken for a repeat of the first (S3.9)."""
    (event_id,) = _publish(store, max_retries=5)
    for _ in range(2):
        _claim(store)
        assert not _done(store, Report(event_id, "default", "w:1", POLICY, failed=True, errors=BOOM)).repeated
        store.reset(event_id, "default", "now", "test")
    assert _actions(store, event_id).count("FAILED") == 2


@pytest.mark.parametrize("epoch", [None, 1 << 60])
def test_a_stranger_changes_nothing(store: Log, epoch: int | None):
    """Nor does whoever brings an epoch that has passed (I8)."""
    (event_id,) = _publish(store)
    _claim(store)
    assert isinstance(_one(store, Report(event_id, "default", "w:2", POLICY, epoch=epoch)), LeaseLost)
    assert _actions(store, event_id) == ["PICKED"]
    assert isinstance(_one(store, Report(event_id + 1, "default", "w:2", POLICY)), NotFound)


def test_another_outcome_than_the_recorded_one_is_refused(store: Log):
    """It is not a repeat."""
    (event_id,) = _publish(store)
    _claim(store)
    _done(store, Report(event_id, "default", "w:1", POLICY))
    assert isinstance(_one(store, Report(event_id, "default", "w:1", POLICY, failed=True, errors=BOOM)), LeaseLost)


def test_a_deposed_worker_that_claimed_again_means_its_newest_lease(store: Log):
    """Its old epoch is refused, its name stands for the new one."""
    (event_id,) = _publish(store)
    old = _claim(store)
    store.reset(event_id, "default", "slow", "test")
    _claim(store)
    assert isinstance(_one(store, Report(event_id, "default", "w:1", POLICY, epoch=old)), LeaseLost)
    assert _done(store, Report(event_id, "default", "w:1", POLICY)).entry.action is Action.COMPLETED


def test_what_the_worker_asks_for_goes_before_the_policy(store: Log):
    """Its own delay, its own number of retries unless the event has one, and no retry at all."""
    slow, own, final, event = _publish(store, 3) + _publish(store, max_retries=0)
    for _ in range(4):
        _claim(store)
    answers = store.report(
        [
            Report(slow, "default", "w:1", POLICY, failed=True, errors=BOOM, delay=timedelta(hours=1)),
            Report(own, "default", "w:1", POLICY, failed=True, errors=BOOM, max_retries=0),
            Report(final, "default", "w:1", POLICY, failed=True, errors=BOOM, final=True),
            Report(event, "default", "w:1", POLICY, failed=True, errors=BOOM, max_retries=9),
        ]
    )
    told = [each for each in answers if isinstance(each, Reported)]
    assert [each.entry.status for each in told] == [Status.PENDING, Status.FAILED, Status.FAILED, Status.FAILED]
    assert told[0].next_retry_at == told[0].entry.created_at + timedelta(hours=1)


def test_reports_on_one_delivery_see_each_other(store: Log):
    """The second of two in one go is a repeat, a contrary third is refused, and neighbours are not harmed."""
    first, second = _publish(store, 2)
    _claim(store)
    _claim(store)
    right = Report(first, "default", "w:1", POLICY)
    answers = store.report([right, right, right._replace(failed=True, errors=BOOM), right._replace(event_id=second)])
    assert [getattr(each, "repeated", None) for each in answers] == [False, True, None, False]
    assert _actions(store, first) == ["PICKED", "COMPLETED"]


def test_errors_met_on_the_way_are_kept(store: Log):
    """A report that worked with errors is COMPLETED_WITH_ERRORS."""
    (event_id,) = _publish(store)
    _claim(store)
    told = _done(store, Report(event_id, "default", "w:1", POLICY, errors=BOOM))
    assert told.entry.status is Status.COMPLETED_WITH_ERRORS
    assert store.get(event_id, "default").last_error == "it broke"


def test_several_claims_are_served_in_their_order(store: Log):
    """Each worker gets its own, none gets another's, and those after the last get nothing."""
    ids = _publish(store, 3, tags=["x"]) + _publish(store, 1, tags=["y"])
    x, y = (Interest(tags=frozenset({tag})) for tag in "xy")
    wanted = [("w:1", x), ("w:2", y), ("w:3", x), ("w:4", x), ("w:5", x), ("w:6", y)]
    claimed = store.claim_all([Claim("default", name, "o", interests=(each,)) for name, each in wanted])
    got = [[delivery.id for delivery in each.deliveries] for each in claimed]
    assert got == [[ids[0]], [ids[3]], [ids[1]], [ids[2]], [], []]
    assert [store.logs(each)[-1].worker_id for each in ids] == ["w:1", "w:3", "w:4", "w:2"]
    epochs = [delivery.epoch for each in claimed for delivery in each.deliveries]
    assert len(set(epochs)) == len(epochs)


def test_tokens_are_kept_and_revoked(store: Log):
    """Revoking twice changes nothing; one that is not there is told."""
    now = store.now()
    token = Token("abc", "ci", "digest", ("publish", "read"), now, now + timedelta(days=1))
    store.add_token(token)
    assert store.tokens() == (token,)
    assert token.is_good(now)
    assert not token.is_good(now + timedelta(days=1))
    store.revoke_token("abc")
    (kept,) = store.tokens()
    store.revoke_token("abc")
    assert store.tokens() == (kept,)
    assert not kept.is_good(now)
    with pytest.raises(NotFound):
        store.revoke_token("xyz")
