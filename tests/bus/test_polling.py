"""Own loops: poll, finalize, extend, release, reset, get and list, as the table in API says."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from postbus import (
    Conflict,
    Delivery,
    EventBus,
    InvalidRequest,
    LeaseLost,
    NotFound,
    RetryPolicy,
    Status,
)
from postbus.testing import FrozenClock


def polled(bus: EventBus, **options: Any) -> Delivery:
    """Return the next delivery, which must be there."""
    delivery = bus.poll(**options)
    assert delivery is not None
    return delivery


# ── poll ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_poll_takes_the_next_event_or_returns_none_at_once(still: EventBus, clock: FrozenClock):
    """PROCESSING, attempt one, started now; and nothing there is None (S0.2)."""
    assert still.poll() is None
    event = still.publish("a", {"n": 1})
    delivery = polled(still)
    assert (delivery.id, delivery.event.payload, delivery.attempt) == (event.id, {"n": 1}, 1)
    assert delivery.lease_until == clock.now() + timedelta(seconds=60)
    assert still.get(event.id).status is Status.PROCESSING
    assert still.poll() is None


def test_poll_takes_what_was_abandoned_for_a_minute(still: EventBus, clock: FrozenClock):
    """After the default lease, as one more attempt (S0.3, S0.6, S2.5)."""
    still.publish("a")
    polled(still)
    clock.advance(59.999)
    assert still.poll() is None
    clock.advance(0.001)
    assert polled(still).attempt == 2


def test_the_lease_can_be_configured(make_bus: Callable[..., EventBus], clock: FrozenClock):
    """For the bus as a whole (S2.5)."""
    bus = make_bus(clock=clock, lease=5)
    bus.publish("a")
    assert polled(bus).lease_until == clock.now() + timedelta(seconds=5)


def test_poll_chooses_by_type_tag_and_subscription(still: EventBus):
    """Types are patterns, any of the tags will do (S0.2)."""
    still.subscriptions.create("other", "z.*")
    order = still.publish("order.placed", tags=["eu"])
    mail = still.publish("mail.sent", tags=["us", "big"])
    still.publish("z.last")
    assert polled(still, types=["mail.*", "x"]).id == mail.id
    assert still.poll(types=["mail.*"]) is None
    assert polled(still, tags=["eu", "uk"]).id == order.id
    assert polled(still, subscription="other").event.type == "z.last"
    with pytest.raises(NotFound):
        still.poll(subscription="nowhere")


def test_poll_many_takes_up_to_its_limit_in_order(still: EventBus):
    """Highest priority first."""
    events = still.publish_many({"type": "a", "priority": n % 2} for n in range(6))
    expected = [event.id for event in sorted(events, key=lambda event: (-event.priority, event.id))]
    first = still.poll_many(4)
    assert [delivery.id for delivery in first + still.poll_many(99)] == expected


@pytest.mark.parametrize("wrong", [{"limit": 0}, {"types": "a"}, {"tags": "a"}, {"types": [""]}])
def test_a_wrong_poll_is_refused(bus: EventBus, wrong: dict[str, Any]):
    """InvalidRequest, not an empty answer."""
    with pytest.raises(InvalidRequest):
        bus.poll_many(**{"limit": 1, **wrong})


def test_the_worker_may_be_named(still: EventBus):
    """For loops that serve several (S0.2)."""
    still.publish("a")
    delivery = polled(still, worker_id="other:9")
    assert delivery.worker_id == "other:9"
    still.finalize(delivery)
    assert {row.worker_id for row in still.get(delivery.id, include_logs=True).logs} == {"other:9"}


# ── finalize ─────────────────────────────────────────────────────────────────────────────────────────────────────────

WAYS: dict[str, tuple[dict[str, Any], Status]] = {
    "nothing said": ({}, Status.COMPLETED),
    "success": ({"success": True}, Status.COMPLETED),
    "errors alone": ({"errors": ["one", ValueError("two")]}, Status.COMPLETED_WITH_ERRORS),
    "failure": ({"success": False}, Status.PENDING),
    "failure with errors": ({"success": False, "errors": ["one", "two"]}, Status.PENDING),
    "failure for good": ({"success": False, "retry": False}, Status.FAILED),
    "failure for good with errors": ({"success": False, "retry": False, "errors": ["x"]}, Status.FAILED),
}


@pytest.mark.parametrize(("told", "status"), WAYS.values(), ids=WAYS)
def test_finalize_ends_a_delivery_as_told(still: EventBus, told: dict[str, Any], status: Status):
    """The whole table: completed, with errors, retried, or failed for good (S0.5, S2.3)."""
    event = still.publish("a")
    still.finalize(polled(still), **told)
    assert still.get(event.id).status is status
    assert still.dlq.list().total == (status is Status.FAILED)


@pytest.mark.parametrize("told", [told for told, _ in WAYS.values()], ids=WAYS)
def test_finalizing_twice_changes_nothing(still: EventBus, clock: FrozenClock, told: dict[str, Any]):
    """A repeat is quiet and writes no row (S2.3)."""
    event = still.publish("a")
    delivery = polled(still)
    still.finalize(delivery, **told)
    before = still.get(event.id, include_logs=True)
    clock.advance(0.5)
    still.finalize(delivery, **told)
    assert still.get(event.id, include_logs=True) == before


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({}, {"success": False}),
        ({}, {"errors": ["x"]}),
        ({"errors": ["x"]}, {}),
        ({"success": False}, {}),
        ({"success": False}, {"success": False, "retry": False}),
        ({"success": False, "retry": False}, {"success": False}),
        ({"success": False, "retry": False}, {"success": True}),
    ],
)
def test_another_outcome_afterwards_is_lease_lost(still: EventBus, first: dict[str, Any], second: dict[str, Any]):
    """The first word counts, the second changes nothing (I8, I9)."""
    event = still.publish("a")
    delivery = polled(still)
    still.finalize(delivery, **first)
    before = still.get(event.id, include_logs=True)
    with pytest.raises(LeaseLost):
        still.finalize(delivery, **second)
    assert still.get(event.id, include_logs=True) == before


def test_success_and_errors_contradict_each_other(still: EventBus):
    """Refused, and the delivery is still held."""
    still.publish("a")
    delivery = polled(still)
    with pytest.raises(InvalidRequest):
        still.finalize(delivery, success=True, errors=["x"])
    still.finalize(delivery)


def test_failures_are_retried_by_policy_and_end_as_a_dead_letter(make_bus: Callable[..., EventBus], clock: FrozenClock):
    """Three attempts for two retries, with growing waits; then FAILED with every error (S1.9, S1.10, I12)."""
    bus = make_bus(clock=clock, retry=RetryPolicy(max_retries=2, base_delay=1))
    event = bus.publish("a")
    for wait in (1, 2):
        bus.finalize(polled(bus), success=False, errors=[f"waits {wait}"])
        assert bus.get(event.id).next_retry_at == clock.now() + timedelta(seconds=wait)
        clock.advance(wait)
    bus.finalize(polled(bus), success=False, errors=["last"])
    (letter,) = bus.dlq.list()
    assert [error.message for error in letter.errors] == ["waits 1", "waits 2", "last"]
    assert (letter.attempts, bus.poll()) == (3, None)


def test_the_subscriptions_policy_counts_for_own_loops(still: EventBus):
    """Without a handler's, the subscription's goes before the bus's (S1.9)."""
    still.subscriptions.create("once", retry=RetryPolicy(max_retries=0))
    event = still.publish("a")
    still.finalize(polled(still, subscription="once"), success=False)
    assert still.get(event.id, subscription="once").status is Status.FAILED


def test_errors_may_be_text_or_exceptions(still: EventBus):
    """Both are kept with type and message; several are one attempt (S2.3, S2.4)."""
    event = still.publish("a")
    still.finalize(polled(still), errors=["plain text", KeyError("x")])
    assert [(error.type, error.message) for error in still.get(event.id).errors] == [
        ("Error", "plain text"),
        ("KeyError", "'x'"),
    ]


def test_code_and_time_are_recorded(still: EventBus):
    """In the row that ends it (S0.9)."""
    event = still.publish("a")
    still.finalize(polled(still), status_code=201, execution_time_ms=12.5)
    end = still.get(event.id, include_logs=True).logs[-1]
    assert (end.action, end.status_code, end.execution_time_ms) == ("COMPLETED", 201, 12.5)


def test_a_late_finalize_is_lease_lost_once_another_has_it(still: EventBus, clock: FrozenClock):
    """Accepted while nobody has it, refused from then on (I8)."""
    still.publish("a")
    first = polled(still)
    clock.advance(60)
    still.finalize(first)
    still.publish("a")
    late = polled(still)
    clock.advance(60)
    heir = polled(still)
    with pytest.raises(LeaseLost, match=str(late.id)):
        still.finalize(late)
    still.finalize(heir)


# ── extend, release, reset ───────────────────────────────────────────────────────────────────────────────────────────


def test_extend_is_a_heartbeat(still: EventBus, clock: FrozenClock):
    """A minute from now; LeaseLost once it has passed to another (S2.5, I8)."""
    still.publish("a")
    delivery = polled(still)
    clock.advance(59)
    still.extend(delivery)
    clock.advance(59)
    assert still.poll() is None
    clock.advance(1)
    polled(still)
    with pytest.raises(LeaseLost):
        still.extend(delivery)


def test_release_hands_back_without_burning_an_attempt(still: EventBus):
    """And the released lease is void (S0.7, I8)."""
    still.publish("a")
    delivery = polled(still)
    still.release(delivery)
    assert polled(still).attempt == 1
    for use in (still.release, still.extend, still.finalize):
        with pytest.raises(LeaseLost):
            use(delivery)


def test_reset_puts_an_orphan_back(still: EventBus):
    """Due now, attempts kept, reason and actor in the log (I11)."""
    event = still.publish("a")
    orphan = polled(still)
    still.reset(event.id, "worker is gone")
    assert polled(still).attempt == 2
    row = next(row for row in still.get(event.id, include_logs=True).logs if row.action == "RESET")
    assert (row.error_message, row.worker_id) == ("worker is gone", still.worker_id)
    with pytest.raises(LeaseLost):
        still.finalize(orphan)


def test_reset_of_what_has_ended_is_a_conflict(still: EventBus):
    """Completed and dead ones; unknown ones are not found (I9)."""
    for success in (True, False):
        event = still.publish("a")
        still.finalize(polled(still), success, retry=False)
        with pytest.raises(Conflict):
            still.reset(event.id, "again")
    with pytest.raises(NotFound):
        still.reset(404, "again")


# ── get, list, stats ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_get_tells_how_an_event_stands(still: EventBus, clock: FrozenClock):
    """Status, retries of how many, next time, last error, deliveries and, if asked, the rows (S0.9)."""
    event = still.publish("a")
    still.finalize(polled(still), success=False, errors=["oops"])
    told = still.get(event.id)
    assert (told.status, told.retry_count, told.max_retries) == (Status.PENDING, 1, 3)
    assert (told.next_retry_at, told.updated_at) == (clock.now() + timedelta(seconds=1), clock.now())
    assert (told.last_error, told.logs) == ("oops", ())
    assert [each.subscription for each in told.deliveries] == ["default"]
    assert [row.action for row in still.get(event.id, include_logs=True).logs] == ["PICKED", "FAILED"]
    with pytest.raises(NotFound):
        still.get(404)


def test_list_takes_statuses_as_words(still: EventBus):
    """The enum or its name; another word is refused."""
    event = still.publish("order.placed", tags=["eu"])
    assert still.list(status="PENDING").items[0].id == event.id
    assert still.list(status=Status.PENDING, type="order.*", tags=["eu"]).total == 1
    with pytest.raises(InvalidRequest, match="PENDING"):
        still.list(status="LOST")
    with pytest.raises(InvalidRequest):
        still.list(limit=0)
    with pytest.raises(InvalidRequest):
        still.list(offset=-1)


def test_list_is_twenty_at_a_time_and_tells_the_next(still: EventBus):
    """Newest first, by keyset to the end."""
    events = still.publish_many([{"type": "a"}] * 45)
    page = still.list()
    seen = [event.id for event in page]
    while page.next is not None:
        page = still.list(after=page.next)
        seen += [event.id for event in page]
    assert seen == [event.id for event in events][::-1]
    assert (page.limit, page.total) == (20, 45)


def test_stats_show_depth_attempts_and_failures(still: EventBus, clock: FrozenClock):
    """What a monitor needs, from one call (S0.9)."""
    still.publish_many([{"type": "a"}] * 5)
    still.finalize(polled(still))
    still.finalize(polled(still), success=False, retry=False)
    polled(still)
    clock.advance(3)
    stats = still.stats()
    (default,) = stats.subscriptions
    assert (default.pending, default.processing, default.dead, default.completed) == (2, 1, 1, 1)
    assert default.oldest_age == timedelta(seconds=3)
    assert (stats.rates["published"], stats.rates["PICKED"], stats.rates["FAILED"]) == (5, 3, 1)
    latency = still.get(1, include_logs=True).logs
    assert latency[-1].created_at >= latency[0].created_at
