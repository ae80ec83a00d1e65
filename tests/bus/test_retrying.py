"""Failed attempts: when the next one comes, when there is none, and what is told of each."""

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from postbus import Context, Discard, Event, EventBus, RetryLater, RetryPolicy, Status
from postbus.testing import FrozenClock, drain
from tests.bus.telling import failures


def test_a_retry_starts_at_the_first_handler_again(still: EventBus, clock: FrozenClock):
    """Failure is per event: the handlers before the failing one run again, those after it wait (S1.7)."""
    ran: list[str] = []
    still.subscribe("*", lambda _: ran.append("first"))

    @still.on("*")
    def second(_: Event, ctx: Context) -> None:
        ran.append("second")
        if ctx.attempt == 1:
            raise ValueError("once")

    still.subscribe("*", lambda _: ran.append("third"))
    still.publish("a")
    drain(still)
    assert ran == ["first", "second"]
    clock.advance(1)
    drain(still)
    assert ran == ["first", "second", "first", "second", "third"]


def test_the_waits_between_attempts_grow_to_their_limit(make_bus: Callable[..., EventBus], clock: FrozenClock):
    """One, two, four, five seconds, to the microsecond, and then it is dead (S1.9, S1.10)."""
    bus = make_bus(clock=clock, retry=RetryPolicy(max_retries=4, base_delay=1, max_delay=5, multiplier=2))

    @bus.on("*")
    def fail(_: Event) -> None:
        raise ValueError("no")

    event = bus.publish("a")
    assert drain(bus) == 1
    for wait in (1, 2, 4, 5):
        due = bus.get(event.id).next_retry_at
        assert due == clock.now() + timedelta(seconds=wait)
        clock.advance(timedelta(seconds=wait) - timedelta(microseconds=1))
        assert drain(bus) == 0
        clock.advance(timedelta(microseconds=1))
        assert drain(bus) == 1
    assert bus.get(event.id).status is Status.FAILED


def test_jitter_spreads_events_that_failed_together(make_bus: Callable[..., EventBus], clock: FrozenClock):
    """Fifty failures at one moment do not come back at one moment (S1.9)."""
    bus = make_bus(clock=clock, retry=RetryPolicy(base_delay=10, max_delay=100, jitter=0.5))

    @bus.on("*")
    def fail(_: Event) -> None:
        raise ValueError("no")

    events = bus.publish_many([{"type": "a"}] * 50)
    drain(bus)
    waits = {(bus.get(event.id).next_retry_at or clock.now()) - clock.now() for event in events}
    assert len(waits) > 25
    assert all(timedelta(seconds=5) <= wait <= timedelta(seconds=15) for wait in waits)


@pytest.mark.parametrize(
    ("retries", "handler_retry", "attempts"),
    [
        ({"bus": 1}, None, 2),
        ({"bus": 1, "subscription": 2}, None, 3),
        ({"bus": 1, "subscription": 2}, {"max_retries": 3}, 4),
        ({"bus": 1, "subscription": 2, "event": 0}, {"max_retries": 3}, 1),
        ({"bus": 1}, RetryPolicy(max_retries=0, base_delay=0), 1),
        ({"bus": 0, "event": 2}, None, 3),
    ],
)
def test_the_nearest_policy_counts(
    make_bus: Callable[..., EventBus],
    clock: FrozenClock,
    retries: dict[str, int],
    handler_retry: Any,
    attempts: int,
):
    """Event before handler before subscription before bus; never more attempts than that (S1.9, I12)."""
    bus = make_bus(clock=clock, retry=RetryPolicy(max_retries=retries["bus"]))
    ran: list[int] = []
    own = retries.get("subscription")
    bus.subscriptions.create("s", retry=None if own is None else RetryPolicy(max_retries=own))

    @bus.on("*", subscription="s", retry=handler_retry)
    def fail(_: Event, ctx: Context) -> None:
        ran.append(ctx.attempt)
        raise ValueError("no")

    event = bus.publish("a", max_retries=retries.get("event"))
    for _ in range(8):
        drain(bus)
        clock.advance(60)
    assert ran == list(range(1, attempts + 1))
    assert bus.get(event.id, subscription="s").status is Status.FAILED


def test_a_dead_letter_has_the_error_of_every_attempt(still: EventBus, clock: FrozenClock):
    """Type, message, traceback, worker, handler and time of each; the event; the time of the last (S1.10, S1.13)."""

    @still.on("order.*", retry={"max_retries": 2})
    def ship(_: Event, ctx: Context) -> None:
        raise [ValueError, KeyError, OSError][ctx.attempt - 1](f"try {ctx.attempt}")

    event = still.publish("order.placed", {"order_id": 7})
    moments = []
    for _ in range(3):
        drain(still)
        moments.append(clock.now())
        clock.advance(10)
    (letter,) = still.dlq.list()
    assert (letter.event.id, letter.event.payload, letter.subscription) == (event.id, {"order_id": 7}, "default")
    assert (letter.attempts, letter.died_at) == (3, moments[-1])
    assert [error.attempt for error in letter.errors] == [1, 2, 3]
    assert [error.type for error in letter.errors] == ["ValueError", "KeyError", "OSError"]
    for error, moment in zip(letter.errors, moments, strict=True):
        assert f"try {error.attempt}" in error.message
        assert (error.worker_id, error.at) == (still.worker_id, moment)
        assert "in ship" in (error.traceback or "")
        assert (error.handler or "").endswith("ship")


def test_each_failed_attempt_is_one_log_entry_the_last_included(
    still: EventBus, clock: FrozenClock, caplog: pytest.LogCaptureFixture
):
    """A constant name, and fields that say what, which, when again or never (S1.11)."""

    @still.on("*", retry={"max_retries": 2})
    def fail(_: Event) -> None:
        raise ValueError("oops")

    event = still.publish("order.placed")
    with caplog.at_level(logging.WARNING, "postbus"):
        for _ in range(4):
            drain(still)
            clock.advance(10)
    told = failures(caplog)
    assert [entry["attempt"] for entry in told] == [1, 2, 3]
    assert [entry["then"] for entry in told] == ["retry", "retry", "dead"]
    assert [entry["retry_in"] for entry in told] == [1, 2, None]
    for entry in told:
        assert (entry["event_id"], entry["event_type"], entry["subscription"]) == (event.id, "order.placed", "default")
        assert (entry["error_type"], entry["error_message"]) == ("ValueError", "oops")
        assert entry["worker_id"] == still.worker_id
        assert entry["handler"].endswith("fail")


def test_success_logs_no_failure(still: EventBus, caplog: pytest.LogCaptureFixture):
    """Only failed attempts are told (S1.11)."""
    still.subscribe("*", lambda _: None)
    still.publish("a")
    with caplog.at_level(logging.DEBUG, "postbus"):
        drain(still)
    assert failures(caplog) == []


def test_discard_is_a_dead_letter_at_once(still: EventBus):
    """With its reason, although retries are left (S1.1)."""

    @still.on("*")
    def handle(_: Event) -> None:
        raise Discard("no such customer")

    event = still.publish("a")
    drain(still)
    (letter,) = still.dlq.list()
    assert (letter.event.id, letter.attempts) == (event.id, 1)
    assert [(error.type, error.message) for error in letter.errors] == [("Discard", "no such customer")]


def test_retry_later_waits_as_long_as_asked_and_counts(still: EventBus, clock: FrozenClock):
    """Its own delay instead of the policy's, until the attempts are used up (S1.9, I12)."""

    @still.on("*", retry={"max_retries": 1})
    def handle(_: Event) -> None:
        raise RetryLater(timedelta(hours=2), "closed for lunch")

    event = still.publish("a")
    drain(still)
    told = still.get(event.id)
    assert (told.next_retry_at, told.last_error) == (clock.now() + timedelta(hours=2), "closed for lunch")
    clock.advance(7_199)
    assert drain(still) == 0
    clock.advance(1)
    assert drain(still) == 1
    assert still.get(event.id).status is Status.FAILED
