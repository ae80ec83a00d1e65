"""Handlers that take too long: cancelled if they can be, left behind and replaced if not."""

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest

from postbus import Event, EventBus, RetryPolicy, Status

ONCE = RetryPolicy(max_retries=0)


@pytest.fixture
def gate() -> Any:
    """Give something to hang on, let go at the end of the test."""
    gate = threading.Event()
    yield gate
    gate.set()


def test_a_plain_handler_past_its_timeout_has_failed(bus: EventBus, gate: threading.Event):
    """The event fails at the timeout, while the thread is still stuck (S1.8)."""

    @bus.on("*", timeout=0.1, retry=ONCE)
    def hang(_: Event) -> None:
        gate.wait(30)

    with bus:
        event = bus.publish("a", wait=True, timeout=10)
    assert event.status is Status.FAILED
    assert event.errors[0].type == "TimeoutError"
    assert "0.1 s" in event.errors[0].message


def test_a_thread_that_hangs_is_replaced(make_bus: Callable[..., EventBus], gate: threading.Event):
    """With one of two stuck, there are still two to run the next events, who wait for each other (S1.8, I10)."""
    bus = make_bus(concurrency=2, retry=ONCE)
    both = threading.Barrier(2)

    @bus.on("*", timeout=1)
    def handle(event: Event) -> None:
        if event.payload == "hang":
            gate.wait(30)
        both.wait(5)

    with bus:
        bus.publish("a", "hang", wait=True, timeout=10)
        events = bus.publish_many([{"type": "a", "payload": "go"}] * 2)
        bus.wait_idle(timeout=10)
        assert {bus.get(event.id).status for event in events} == {Status.COMPLETED}


def test_hung_threads_are_counted_and_too_many_wear_the_worker_out(
    make_bus: Callable[..., EventBus], gate: threading.Event, eventually: Any
):
    """It then claims nothing more, until the threads come back (S1.8)."""
    bus = make_bus(concurrency=2, retry=ONCE)

    @bus.on("*", timeout=0.1)
    def hang(event: Event) -> None:
        if event.payload == "hang":
            gate.wait(30)

    with bus:
        assert not bus.worn_out
        bus.publish("a", "hang", wait=True, timeout=10)
        assert not bus.worn_out
        bus.publish("a", "hang", wait=True, timeout=10)
        eventually(lambda: bus.worn_out)
        waiting = bus.publish("a", "go")
        with pytest.raises(TimeoutError):
            bus.wait_idle(timeout=0.3)
        assert bus.get(waiting.id).deliveries[0].attempt == 0
        gate.set()
        eventually(lambda: not bus.worn_out)
        bus.wait_idle(timeout=10)
        assert bus.get(waiting.id).status is Status.COMPLETED


def test_a_worn_out_bus_ends_its_run(make_bus: Callable[..., EventBus], gate: threading.Event):
    """`run` returns, so that whoever started the process can replace it (S1.8)."""
    bus = make_bus(concurrency=1, retry=ONCE)
    bus.subscribe("*", lambda _: gate.wait(30), timeout=0.1)
    bus.publish("a")
    bus.run()
    assert gate.is_set() is False


def test_what_a_late_handler_does_is_ignored(bus: EventBus, gate: threading.Event, caplog: pytest.LogCaptureFixture):
    """It raises after its timeout: one log entry, no further handler, one end (S1.8, S1.11, I11)."""
    ran: list[str] = []
    threads: list[threading.Thread] = []

    @bus.on("*", timeout=0.1, retry=ONCE)
    def late(_: Event) -> None:
        threads.append(threading.current_thread())
        gate.wait(30)
        raise ValueError("late")

    bus.subscribe("*", lambda _: ran.append("next"))
    with bus, caplog.at_level(logging.WARNING, "postbus"):
        event = bus.publish("a", wait=True, timeout=10)
        gate.set()
        threads[0].join(10)
        assert not threads[0].is_alive()
        told = bus.get(event.id, include_logs=True)
    assert ran == []
    assert [row.action for row in told.logs] == ["PICKED", "FAILED"]
    assert [record.msg for record in caplog.records].count("attempt_failed") == 1


def test_a_record_handler_past_its_timeout_does_not_stop_the_others(bus: EventBus, gate: threading.Event):
    """What was recorded before it stays, what comes after it runs (S1.8, S2.4)."""
    ran: list[str] = []

    @bus.on("*", on_error="record")
    def first(_: Event) -> None:
        raise ValueError("first")

    @bus.on("*", on_error="record", timeout=0.1)
    def hang(_: Event) -> None:
        gate.wait(30)

    bus.subscribe("*", lambda _: ran.append("third"), on_error="record")
    with bus:
        event = bus.publish("a", wait=True, timeout=10)
    assert ran == ["third"]
    assert event.status is Status.COMPLETED_WITH_ERRORS
    assert [error.type for error in event.errors] == ["ValueError", "TimeoutError"]


def test_an_async_handler_past_its_timeout_is_cancelled(bus: EventBus):
    """Really: it is told, and it has failed (S1.8)."""
    cancelled = threading.Event()

    @bus.on("*", timeout=0.1, retry=ONCE)
    async def hang(_: Event) -> None:
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    with bus:
        event = bus.publish("a", wait=True, timeout=10)
        assert cancelled.is_set()
        assert not bus.worn_out
    assert event.status is Status.FAILED
    assert event.errors[0].type == "TimeoutError"


def test_a_timeout_counts_as_an_attempt(bus: EventBus):
    """Two timeouts, then it works (S1.8, S1.9)."""
    attempts: list[int] = []

    @bus.on("*", timeout=0.05, retry={"base_delay": 0.01})
    async def slow(_: Event, ctx: Any) -> None:
        attempts.append(ctx.attempt)
        if ctx.attempt < 3:
            await asyncio.sleep(30)

    with bus:
        event = bus.publish("a", wait=True, timeout=10)
    assert attempts == [1, 2, 3]
    assert (event.status, event.retry_count) == (Status.COMPLETED, 2)


def test_each_handler_has_its_own_time(bus: EventBus):
    """Three that together take longer than any one may are fine (S1.8)."""
    for _ in range(3):

        @bus.on("*", timeout=0.5, retry=ONCE)
        def nap(_: Event) -> None:
            threading.Event().wait(0.25)

    with bus:
        assert bus.publish("a", wait=True, timeout=10).status is Status.COMPLETED


def test_plain_handlers_beside_async_ones_are_left_behind_too(make_bus: Callable[..., EventBus], gate: threading.Event):
    """The events after them run on; as many as run at once, and the worker is worn out (S1.8, I10)."""
    bus = make_bus(concurrency=3, retry=ONCE)

    @bus.on("*", timeout=0.05)
    def maybe_hang(event: Event) -> None:
        if event.payload == "hang":
            gate.wait(30)

    @bus.on("*")
    async def awaited(_: Event) -> None:
        await asyncio.sleep(0)

    hanging = bus.publish_many([{"type": "a", "payload": "hang"}] * 2)
    fine = bus.publish("a", "go")
    with bus:
        bus.wait_idle(timeout=10)
        assert {bus.get(event.id).status for event in hanging} == {Status.FAILED}
        assert bus.get(fine.id).status is Status.COMPLETED
        assert not bus.worn_out
        bus.publish("a", "hang", wait=True, timeout=10)
        assert bus.worn_out


def test_no_timeout_means_none(bus: EventBus):
    """A handler with timeout=None may take as long as it likes (S1.8)."""
    bus.subscribe("*", lambda _: threading.Event().wait(0.3), timeout=None)
    with bus:
        assert bus.publish("a", wait=True, timeout=10).status is Status.COMPLETED
