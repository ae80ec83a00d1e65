"""Followers whose handlers fail: retried in place, then dead, and the stream goes on, or stops."""

import asyncio
import logging
import time
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest

from postbus import (
    CheckpointMode,
    Context,
    Discard,
    Event,
    EventBus,
    LeaseLost,
    MaxRetriesExceeded,
    RetryLater,
    RetryPolicy,
    Status,
    StoreUnavailable,
)
from postbus.store import log_of
from tests.bus.following import (
    LONG,
    ONCE,
    QUICK,
    Eventually,
    Make,
    actions,
    collect,
    publish,
    stand,
)
from tests.bus.telling import failures
from tests.kinds import on_sqlite

pytestmark = pytest.mark.usefixtures("brisk")


# ── failure ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_after_its_attempts_an_event_is_a_dead_letter_and_the_next_comes(bus: EventBus):
    """With the error of each attempt; nothing behind it ran before that (S4.5, I6, I12)."""
    ran: list[Any] = []

    @bus.follow("s", retry=QUICK)
    def handle(event: Event, ctx: Context) -> None:
        ran.append(event.payload)
        if event.payload == 1:
            raise [ValueError, KeyError, OSError][ctx.attempt - 1](f"try {ctx.attempt}")

    events = publish(bus, 0, 1, 2)
    with bus:
        bus.wait_for("s", events[-1].id, timeout=LONG)
        (letter,) = bus.dlq.list(subscription="s")
        assert ran == [0, 1, 1, 1, 2]
        assert (letter.event.id, letter.subscription, letter.attempts) == (events[1].id, "s", 3)
        assert [error.type for error in letter.errors] == ["ValueError", "KeyError", "OSError"]
        assert [error.attempt for error in letter.errors] == [1, 2, 3]
        assert {error.worker_id for error in letter.errors} == {bus.worker_id}
        assert all("in handle" in (error.traceback or "") for error in letter.errors)
        assert actions(bus, events[1]) == ["FAILED"] * 3
        assert bus.get(events[1].id, subscription="s").status is Status.FAILED


def test_the_waits_between_attempts_grow(bus: EventBus):
    """By the policy's factor (S4.5)."""
    moments: list[float] = []

    @bus.follow("s", retry={"max_retries": 3, "base_delay": 0.02, "max_delay": 0.06})
    def fail(_: Event) -> None:
        moments.append(time.monotonic())
        raise ValueError

    with bus:
        bus.wait_for("s", publish(bus, 1)[-1].id, timeout=LONG)
    waits = [after - before for before, after in pairwise(moments)]
    assert len(waits) == 3
    assert all(wait >= least for wait, least in zip(waits, (0.02, 0.04, 0.06), strict=True))


def test_an_events_own_retries_go_before_the_policys(bus: EventBus):
    """Never more attempts than that (I12)."""
    ran: list[int] = []

    @bus.follow("s", retry=QUICK)
    def fail(event: Event) -> None:
        ran.append(event.id)
        raise ValueError

    one, two = bus.publish("a", max_retries=0), bus.publish("a", max_retries=3)
    with bus:
        bus.wait_for("s", two.id, timeout=LONG)
    assert ran == [one.id] + [two.id] * 4


def test_each_failed_attempt_is_one_log_entry(bus: EventBus, caplog: pytest.LogCaptureFixture):
    """With what follows: a retry, or what `on_error` says (S1.11)."""

    @bus.follow("s", retry=QUICK)
    def fail(_: Event) -> None:
        raise ValueError("oops")

    with caplog.at_level(logging.WARNING, "postbus"), bus:
        (event,) = publish(bus, 1)
        bus.wait_for("s", event.id, timeout=LONG)
    told = failures(caplog)
    assert [(entry["attempt"], entry["then"]) for entry in told] == [(1, "retry"), (2, "retry"), (3, "dead_letter")]
    assert {(entry["event_id"], entry["subscription"], entry["error_message"]) for entry in told} == {
        (event.id, "s", "oops")
    }


def test_a_failed_retry_of_a_dead_letter_is_logged_too(
    bus: EventBus, caplog: pytest.LogCaptureFixture, eventually: Eventually
):
    """Each failed attempt, redelivered ones included (S1.11)."""

    @bus.follow("s", retry=ONCE)
    def fail(_: Event) -> None:
        raise ValueError("oops")

    with caplog.at_level(logging.WARNING, "postbus"), bus:
        (event,) = publish(bus, 1)
        bus.wait_for("s", event.id, timeout=LONG)
        bus.dlq.retry(event.id, "s")
        eventually(lambda: actions(bus, event) == ["FAILED", "RETRIED", "PICKED", "FAILED"])
    assert len(failures(caplog)) == 2


def test_a_dead_letter_tells_when_each_attempt_failed_and_how_long_the_last_took(bus: EventBus):
    """The pause between them is nobody's run time (S4.5)."""

    @bus.follow("s", retry=RetryPolicy(max_retries=1, base_delay=0.5))
    def fail(_: Event) -> None:
        raise ValueError("oops")

    (event,) = publish(bus, 1)
    with bus:
        bus.wait_for("s", event.id, timeout=LONG)
        (letter,) = bus.dlq.list(subscription="s")
        end = bus.get(event.id, include_logs=True).logs[-1]
    first, last = (each.at for each in letter.errors)
    assert first is not None
    assert last is not None
    assert (last - first).total_seconds() >= 0.5
    assert end.execution_time_ms is not None
    assert end.execution_time_ms < 500


def test_discard_is_a_dead_letter_at_once(bus: EventBus):
    """With its reason, although retries are left (S4.5)."""

    @bus.follow("s")
    def handle(event: Event) -> None:
        if event.payload == 1:
            raise Discard("no such customer")

    with bus:
        bus.wait_for("s", publish(bus, 1, 2)[-1].id, timeout=LONG)
        (letter,) = bus.dlq.list(subscription="s")
    assert [(error.type, error.message) for error in letter.errors] == [("Discard", "no such customer")]


def test_retry_later_waits_as_long_as_asked_and_counts(bus: EventBus):
    """Its own delay instead of the policy's, until the attempts are used up (S4.5, I12)."""
    moments: list[float] = []

    @bus.follow("s", retry={"max_retries": 1, "base_delay": 60, "max_delay": 60})
    def handle(_: Event) -> None:
        moments.append(time.monotonic())
        raise RetryLater(0.1, "closed for lunch")

    with bus:
        bus.wait_for("s", publish(bus, 1)[-1].id, timeout=LONG)
        (letter,) = bus.dlq.list(subscription="s")
    assert len(moments) == letter.attempts == 2
    assert moments[1] - moments[0] >= 0.1


def test_retry_later_may_mean_at_once(bus: EventBus):
    """No delay is a delay that was chosen (S4.5)."""

    @bus.follow("s", retry={"max_retries": 1, "base_delay": 60, "max_delay": 60})
    def handle(_: Event, ctx: Context) -> None:
        if ctx.attempt == 1:
            raise RetryLater(0)

    with bus:
        bus.wait_for("s", publish(bus, 1)[-1].id, timeout=3)


@pytest.mark.parametrize("error", [SystemExit("no"), KeyboardInterrupt(), GeneratorExit()], ids=repr)
def test_no_error_ends_the_follower(bus: EventBus, error: BaseException):
    """Even SystemExit is only a failed attempt (I10)."""
    seen: list[Any] = []

    @bus.follow("s", retry=ONCE)
    def handle(event: Event) -> None:
        if event.payload == 1:
            raise error
        seen.append(event.payload)

    with bus:
        bus.wait_for("s", publish(bus, 1, 2)[-1].id, timeout=LONG)
        assert bus.dlq.list(subscription="s").total == 1
    assert seen == [2]


@pytest.mark.parametrize("error", [LeaseLost("of a delivery of its own"), StoreUnavailable("of another bus")], ids=repr)
def test_an_error_that_only_looks_like_the_buses_own_is_a_failed_attempt(bus: EventBus, error: Exception):
    """A handler may use postbus elsewhere: what fails there does not come again for ever (S4.5, I12)."""
    ran: list[Any] = []

    @bus.follow("s", retry=QUICK)
    def handle(event: Event) -> None:
        ran.append(event.payload)
        if event.payload == 1:
            raise error

    with bus:
        bus.wait_for("s", publish(bus, 1, 2)[-1].id, timeout=3)
        assert bus.dlq.list(subscription="s").total == 1
    assert ran == [1, 1, 1, 2]


def test_a_cancelled_retry_of_a_dead_letter_is_given_back(bus: EventBus, eventually: Eventually):
    """At once, and no attempt is burnt, as with any other delivery (S0.7, I11)."""
    errors = iter([ValueError(), asyncio.CancelledError()])

    @bus.follow("s", retry=ONCE, lease=0.5)
    def handle(_: Event) -> None:
        for error in errors:
            raise error

    with bus:
        (event,) = publish(bus, 1)
        bus.wait_for("s", event.id, timeout=LONG)
        bus.dlq.retry(event.id, "s")
        eventually(lambda: actions(bus, event)[-1] in ("COMPLETED", "EXPIRED") or len(actions(bus, event)) > 5)
        assert actions(bus, event)[:4] == ["FAILED", "RETRIED", "PICKED", "RELEASED"]
        eventually(lambda: bus.get(event.id, subscription="s").status is Status.COMPLETED)


def test_cancellation_is_not_a_failure(bus: EventBus):
    """The event comes again, and no attempt is burnt (S0.7)."""
    errors = iter([asyncio.CancelledError()])
    attempts: list[int] = []

    @bus.follow("s", retry=ONCE)
    def handle(_: Event, ctx: Context) -> None:
        attempts.append(ctx.attempt)
        for error in errors:
            raise error

    with bus:
        bus.wait_for("s", publish(bus, 1)[-1].id, timeout=LONG)
        assert bus.dlq.list(subscription="s").total == 0
    assert attempts == [1, 1]


def test_it_can_stop_at_what_it_fails_at(make_bus: Make, eventually: Eventually):
    """Nothing is passed, nothing is dead, and it says why; healed, it goes on from there (S4.5, I6)."""
    bus = make_bus()
    ran: list[Any] = []

    @bus.follow("s", on_error="stop", retry=QUICK)
    def handle(event: Event) -> None:
        ran.append(event.payload)
        if event.payload == 1:
            raise ValueError("broken")

    events = publish(bus, 0, 1, 2)
    with bus:
        error = eventually(lambda: bus.followers["s"].error)
        assert isinstance(error, MaxRetriesExceeded)
        assert f"before event {events[1].id} (a) after 3 attempts: ValueError: broken" in str(error)
        eventually(lambda: stand(bus).worker_id is None)
        assert bus.followers["s"].leads is False
        assert stand(bus).position == events[0].id
        assert stand(bus).stopped == f"stopped before event {events[1].id} (a) after 3 attempts: ValueError: broken"
        assert stand(bus).stopped_before == events[1].id
        assert bus.dlq.list(subscription="s").total == 0
        assert ran == [0, 1, 1, 1]
    healed = make_bus()
    seen = collect(healed, on_error="stop")
    with healed:
        healed.wait_for("s", events[-1].id, timeout=LONG)
        assert stand(healed).stopped is None
    assert seen == [1, 2]


def test_an_error_that_no_store_could_keep_is_told_all_the_same(bus: EventBus, eventually: Eventually):
    """What a handler raises may hold anything: why it stopped is stored for whoever looks (S4.5)."""

    @bus.follow("s", on_error="stop", retry=ONCE)
    def fail(_: Event) -> None:
        raise ValueError("\0\ud800" + "x" * 100_000)

    with bus:
        publish(bus, 1)
        told = eventually(lambda: stand(bus).stopped)
    assert told.startswith("stopped before event 1 (a) after 1 attempt: ValueError: \N{SYMBOL FOR NULL}\\ud800x")
    assert len(told) < 3_000


def test_nobody_is_told_that_a_stopped_follower_has_passed(bus: EventBus, eventually: Eventually):
    """A publish that waits for it does not claim that the event was handled (S1.2, I6)."""

    @bus.follow("s", on_error="stop", retry=ONCE)
    def fail(_: Event) -> None:
        raise ValueError("broken")

    with bus:
        publish(bus, 1)
        eventually(lambda: bus.followers["s"].error)
        with pytest.raises((TimeoutError, MaxRetriesExceeded)):
            bus.publish("a", wait=True, timeout=0.3)


@on_sqlite
def test_an_unreadable_event_is_a_dead_letter_and_its_neighbours_are_seen(bus: EventBus):
    """It is never handed to the handler (I16)."""
    events = publish(bus, *range(5))
    with bus.transaction() as tx:
        tx.execute("UPDATE events SET payload = '99' WHERE id = ?", (events[2].id,))
    seen = collect(bus, retry=QUICK)
    with bus:
        bus.wait_for("s", events[-1].id, timeout=LONG)
        (letter,) = bus.dlq.list(subscription="s")
    assert seen == [0, 1, 3, 4]
    assert (letter.event.id, letter.errors[0].type) == (events[2].id, "UnsafeStore")


def test_an_event_that_ends_every_process_dies_alone(bus: EventBus, eventually: Eventually):
    """As many readers as it has attempts ended without a word before it: it is not tried again (S0.8, I12)."""
    events = publish(bus, 0, 1, 2)
    seen = collect(bus, retry=QUICK, checkpoint=CheckpointMode.batched(10, 60), lease=0.3)
    for number in range(QUICK.attempts):
        gone = log_of(bus.store).lead("s", f"gone {number}", "w", timedelta(0))
        assert gone is not None
        log_of(bus.store).announce(gone, events[0].id)
    with bus:
        bus.wait_for("s", events[0].id, timeout=LONG)
        (letter,) = bus.dlq.list(subscription="s")
        eventually(lambda: seen == [1, 2])
    assert (letter.event.id, letter.errors[-1].type) == (events[0].id, "ProcessEnded")
