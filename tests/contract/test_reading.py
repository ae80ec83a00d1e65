"""Looking: lists, single events, audit rows, figures, and what is left to do."""

from datetime import timedelta

import pytest

from postbus.model import HandlerRecord, Outcome, Status
from postbus.retry import RetryPolicy
from postbus.store.contract import DeadFilter, Settled, Work
from postbus.testing import FrozenClock
from tests.contract.stores import DEAD, DONE, FLAWED, RETRY, Operator, ids, replay, wanting


def one_of_each(op: Operator) -> dict[Status, int]:
    """Publish an event for each status and return their ids."""
    ends: list[tuple[Status, Outcome]] = [
        (Status.COMPLETED, DONE),
        (Status.COMPLETED_WITH_ERRORS, FLAWED),
        (Status.FAILED, DEAD),
    ]
    found: dict[Status, int] = {}
    for status, outcome in ends:
        found[status] = op.publish(f"t.{status.lower()}", tags=[status.value]).id
        op.settle(op.take(), outcome)
    found[Status.PROCESSING] = op.publish("t.processing", tags=["PROCESSING"]).id
    op.take()
    found[Status.PENDING] = op.publish("t.pending", tags=["PENDING"]).id
    return found


def test_a_list_is_of_one_status(op: Operator):
    """Each status lists its own, and only those."""
    found = one_of_each(op)
    for status, event_id in found.items():
        page = op.list(status)
        assert ([event.id for event in page], page.total) == ([event_id], 1)
        assert page.items[0].status is status


def test_a_list_without_a_status_is_the_whole_log_newest_first(op: Operator):
    """Everything, each with how it stands."""
    found = one_of_each(op)
    page = op.list()
    assert {event.id: event.status for event in page} == {event_id: status for status, event_id in found.items()}
    assert ids(page.items) == sorted(found.values(), reverse=True)


def test_a_waiting_retry_and_a_scheduled_event_are_pending(op: Operator):
    """Both are listed, with their time."""
    retried = op.publish()
    op.settle(op.take(), RETRY)
    delayed = op.publish(delay=9)
    page = op.list(Status.PENDING)
    assert ids(page.items) == [delayed.id, retried.id]
    assert all(event.next_retry_at is not None for event in page)


def test_an_expired_lease_is_shown_as_processing(op: Operator):
    """Until somebody ends it, and it says that it has expired."""
    event = op.publish()
    op.take()
    op.end_leases()
    assert ids(op.list(Status.PROCESSING).items) == [event.id]
    assert op.stand(event).lease_expired


def test_a_revived_letter_is_listed_where_it_stands_now(op: Operator):
    """Dead, then pending, then completed: in one list at a time (I9)."""
    event = op.kill()
    op.store.retry_dead(DeadFilter(), "me")
    assert [op.list(status).total for status in (Status.FAILED, Status.PENDING)] == [0, 1]
    op.settle(op.take())
    totals = [op.list(status).total for status in Status]
    assert (sum(totals), op.list(Status.COMPLETED).total) == (1, 1)
    assert op.status(event) is Status.COMPLETED


def test_types_are_patterns_and_any_tag_will_do(op: Operator):
    """Filters combine with each other and with the status."""
    first = op.publish("order.placed", tags=["eu", "big"])
    second = op.publish("order.shipped", tags=["us"])
    third = op.publish("user.made", tags=["eu"])
    assert ids(op.list(type="order.*").items) == [second.id, first.id]
    assert ids(op.list(tags=["big", "us"]).items) == [second.id, first.id]
    assert ids(op.list(type="order.*", tags=["eu"]).items) == [first.id]
    op.settle(op.take())
    assert ids(op.list(Status.PENDING, tags=["eu"]).items) == [third.id]
    assert op.list(type="order.*", tags=["eu"]).total == 1


@pytest.mark.parametrize("status", [None, *Status])
def test_pages_by_offset_and_by_keyset_cover_the_list_once(op: Operator, status: Status | None):
    """Seven events on pages of three, either way, with a total on each page."""
    outcomes: dict[Status, Outcome] = {
        Status.COMPLETED: DONE, Status.COMPLETED_WITH_ERRORS: FLAWED, Status.FAILED: DEAD
    }  # fmt: skip
    events = op.publish_all(*[{"type": "a"}] * 7)
    if status not in (None, Status.PENDING):
        for delivery in op.claim(7):
            if status in outcomes:
                op.settle(delivery, outcomes[status])
    expected = ids(events)[::-1]
    by_offset = [op.list(status, limit=3, offset=offset) for offset in (0, 3, 6)]
    assert [event.id for page in by_offset for event in page] == expected
    by_keyset = [op.list(status, limit=3)]
    while by_keyset[-1].next is not None:
        by_keyset.append(op.list(status, limit=3, after=by_keyset[-1].next))
    assert [event.id for page in by_keyset for event in page] == expected
    assert {page.total for page in by_offset + by_keyset} == {7}
    assert not any(page.total_capped for page in by_offset)


def test_totals_are_exact_to_ten_thousand_and_then_say_that_they_are_capped(op: Operator):
    """At the cap it is still exact; one more, and it is told."""
    op.publish_all(*[{"type": "a"}] * 10_000)
    page = op.list(limit=1)
    assert (page.total, page.total_capped) == (10_000, False)
    op.publish()
    for status in (None, Status.PENDING):
        page = op.list(status, limit=1)
        assert (page.total, page.total_capped, len(page)) == (10_000, True, 1)


def test_a_list_is_as_seen_from_one_subscription(op: Operator):
    """Completed here, pending there."""
    op.subscription("other")
    event = op.publish()
    op.settle(op.take())
    assert op.list(Status.COMPLETED, subscription="other").total == 0
    assert ids(op.list(Status.PENDING, subscription="other").items) == [event.id]
    assert op.list(subscription="other").items[0].status is Status.PENDING


def test_an_event_tells_of_every_subscription(op: Operator):
    """One DeliveryState each, by name."""
    op.subscription("b")
    op.subscription("a")
    event = op.publish()
    op.settle(op.take("a"), DEAD)
    op.settle(op.take("b"), DONE)
    assert [(each.subscription, each.status) for each in op.get(event).deliveries] == [
        ("a", Status.FAILED),
        ("b", Status.COMPLETED),
        ("default", Status.PENDING),
    ]


def test_updated_at_follows_every_change(op: Operator, clock: FrozenClock):
    """Published, claimed, failed, completed: each moves it."""
    event = op.publish()
    moments = [op.get(event).updated_at]
    clock.advance(1)
    delivery = op.take()
    moments.append(op.get(event).updated_at)
    clock.advance(1)
    op.settle(delivery, RETRY)
    moments.append(op.get(event).updated_at)
    clock.advance(10)
    op.settle(op.take())
    moments.append(op.get(event).updated_at)
    start = event.created_at
    assert moments == [start + timedelta(seconds=seconds) for seconds in (0, 1, 2, 12)]


def test_audit_rows_are_oldest_first_and_of_this_event_alone(op: Operator, clock: FrozenClock):
    """Each with its number, time, attempt, epoch and worker (I13)."""
    event, other = op.publish(), op.publish()
    first = op.take(worker="w1")
    op.take(worker="w2")
    clock.advance(1)
    op.settle(first, RETRY)
    rows = op.logs(event)
    assert [row.action for row in rows] == ["PICKED", "FAILED"]
    assert rows[0].id < rows[1].id
    assert {row.event_id for row in rows} == {event.id}
    assert (rows[1].created_at, rows[1].attempt, rows[1].epoch) == (clock.now(), 1, first.epoch)
    assert (rows[1].worker_id, rows[1].error_type, rows[1].error_message) == ("w1", "ValueError", "oops")
    assert op.actions(other) == ["PICKED"]
    assert op.logs(404) == []


def test_every_transition_writes_exactly_one_row(op: Operator, clock: FrozenClock):
    """A long life, row by row, and the rows alone tell how it stands (I11, I13)."""
    event = op.publish()
    told: list[str] = []

    def expect(*actions: str) -> None:
        told.extend(actions)
        assert op.actions(event) == told
        stand, replayed = op.stand(event), replay(op.logs(event))["default"]
        assert (stand.status, stand.attempt, stand.retry_count) == (
            replayed.status,
            replayed.attempt,
            replayed.retry_count,
        )

    delivery = op.take()
    expect("PICKED")
    op.store.started(delivery.lease, "w")
    expect("STARTED")
    op.store.extend([delivery.lease], timedelta(seconds=60))
    expect()
    op.store.release([delivery.lease], "w")
    expect("RELEASED")
    op.settle(op.take(), RETRY)
    expect("PICKED", "FAILED")
    op.store.reset(event.id, "default", "now", "me")
    expect("RESET")
    op.take()
    expect("PICKED")
    op.end_leases()
    op.store.expire(None, RetryPolicy())
    expect("EXPIRED")
    late = op.take()
    op.end_leases()
    op.store.expire(None, RetryPolicy())
    expect("PICKED", "EXPIRED")
    assert op.settle(late, RETRY) is Settled.LOST
    expect()
    clock.advance(10)
    op.settle(op.take(), DEAD)
    expect("PICKED", "FAILED")
    op.store.retry_dead(DeadFilter(), "me")
    expect("RETRIED")
    op.settle(op.take(), FLAWED)
    expect("PICKED", "COMPLETED_WITH_ERRORS")


def test_an_operation_that_fails_leaves_no_row(op: Operator):
    """Lost settlements, refused resets and repeats write nothing (I8, I13)."""
    event = op.publish()
    delivery = op.take()
    op.settle(delivery)
    rows = op.logs(event)
    op.settle(delivery)
    op.settle(delivery, DEAD)
    op.store.release([delivery.lease], "w")
    op.store.extend([delivery.lease], timedelta(seconds=1))
    assert op.logs(event) == rows


# ── what is left ─────────────────────────────────────────────────────────────────────────────────────────────────────


def work(op: Operator, *patterns: str) -> Work:
    """Return what is left of these patterns in the default subscription."""
    return op.store.work("default", wanting(*(patterns or ("*",))))


def test_work_tells_due_leased_and_retrying_apart(op: Operator, clock: FrozenClock):
    """Each stage of an event's life shows in one figure (S0.9)."""
    assert work(op) == Work(due=False, leased=False, retrying=False)
    op.publish()
    assert work(op).due
    delivery = op.take()
    assert work(op) == Work(due=False, leased=True, retrying=False)
    op.settle(delivery, RETRY)
    assert work(op) == Work(due=False, leased=False, retrying=True)
    clock.advance(10)
    assert work(op).due
    op.settle(op.take(), DEAD)
    assert work(op) == Work(due=False, leased=False, retrying=False)


def test_events_delayed_by_their_publisher_are_no_work_until_due(op: Operator, clock: FrozenClock):
    """Idle does not mean waiting for tomorrow."""
    op.publish(delay=60)
    assert work(op) == Work(due=False, leased=False, retrying=False)
    clock.advance(60)
    assert work(op).due


def test_work_is_of_the_interests_asked_about(op: Operator):
    """What others handle does not count."""
    op.publish("order.placed")
    op.take()
    op.publish("user.made")
    assert work(op, "mail.*") == Work(due=False, leased=False, retrying=False)
    assert work(op, "order.*") == Work(due=False, leased=True, retrying=False)
    assert work(op, "user.*").due


def test_work_sees_suspects_and_many_routes(op: Operator):
    """An expired lease is work before and after upkeep, among hundreds of types too (I10)."""
    op.publish_all(*({"type": f"t{n}", "delay": 600} for n in range(100)))
    op.publish("t.now")
    op.take()
    op.end_leases()
    assert work(op).due or work(op).leased
    op.store.expire(None, RetryPolicy())
    assert work(op).due


def test_settled_means_finished_or_dead_everywhere_asked(op: Operator):
    """Completed in one and dead in the other is settled; pending, leased or retrying is not (S1.2)."""
    op.subscription("other")
    event = op.publish()
    both = ("default", "other")
    assert not op.store.settled(event.id, both)
    op.settle(op.take(), DONE)
    assert op.store.settled(event.id, ["default"])
    assert not op.store.settled(event.id, both)
    delivery = op.take("other")
    assert not op.store.settled(event.id, both)
    op.settle(delivery, DEAD)
    assert op.store.settled(event.id, both)


# ── figures ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_stats_count_every_status(op: Operator, clock: FrozenClock):
    """Depth by status, the head of the log, and ages, as of the clock (S0.9)."""
    one_of_each(op)
    op.publish("later", delay=60)
    clock.advance(7)
    stats = op.store.stats()
    (default,) = stats.subscriptions
    assert (default.name, default.scheduled, default.processing, default.dead) == ("default", 1, 1, 1)
    assert (default.completed, default.completed_with_errors) == (1, 1)
    assert default.oldest_age == timedelta(seconds=7)
    assert (stats.events, stats.head) == (6, op.list().items[0].id)
    assert stats.store_bytes > 0


def test_the_oldest_age_is_that_of_what_is_due(op: Operator, clock: FrozenClock):
    """Neither a scheduled event nor a waiting retry has waited at all (S0.9)."""
    op.publish(delay=60)
    op.publish()
    op.settle(op.take(), RETRY)
    assert op.store.stats().subscriptions[0].oldest_age is None
    clock.advance(15)
    assert op.store.stats().subscriptions[0].oldest_age == timedelta(seconds=5)


def test_rates_are_of_the_last_minute(op: Operator, clock: FrozenClock):
    """Published, picked, completed and failed are counted, older ones are not (S0.9)."""
    op.kill()
    clock.advance(61)
    op.publish_all({"type": "a"}, {"type": "b"})
    op.settle(op.take())
    rates = op.store.stats().rates
    assert (rates["published"], rates["PICKED"], rates["COMPLETED"]) == (2, 1, 1)
    assert rates.get("FAILED", 0) == 0


def test_events_nobody_handles_are_told(op: Operator, clock: FrozenClock):
    """By subscription and type; a registered handler takes its own off the list (S0.9, S1.6)."""
    op.publish_all({"type": "order.placed"}, {"type": "order.placed"}, {"type": "mail.sent", "tags": ["eu"]})
    assert op.store.stats().unhandled == {"default/order.placed": 2, "default/mail.sent": 1}
    op.store.register_handlers(
        [
            HandlerRecord("1", "f", "default", "order.*", (), "h:1", "p", clock.now()),
            HandlerRecord("2", "f", "default", "mail.*", ("us",), "h:1", "p", clock.now()),
            HandlerRecord("3", "f", "elsewhere", "*", (), "h:1", "p", clock.now()),
        ]
    )
    assert op.store.stats().unhandled == {"default/mail.sent": 1}


def test_a_sound_store_has_no_findings(op: Operator):
    """Quick or deep, every check is fine and says what it saw (I16)."""
    op.kill()
    for deep in (False, True):
        findings = op.store.inspect(deep=deep)
        assert findings
        assert all(finding.ok and finding.message for finding in findings)
