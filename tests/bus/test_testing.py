"""postbus.testing: a temporary bus, a clock that stands still, and draining by hand."""

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from postbus import Breaker, Context, Event, EventBusShutdownError, RetryPolicy, Status
from postbus.testing import FrozenClock, drain, temporary_bus


def test_a_temporary_bus_goes_away_with_its_block():
    """A real file inside, nothing left outside, and it is shut down (S1.14)."""
    with temporary_bus() as bus:
        path = Path(bus.store.url.removeprefix("sqlite:///"))
        bus.publish("a")
        assert path.exists()
    assert not path.parent.exists()
    with pytest.raises(EventBusShutdownError):
        bus.publish("a")


def test_a_temporary_bus_takes_the_options_of_a_bus():
    """Clock and policy, for instance (S2.2)."""
    clock = FrozenClock()
    with temporary_bus(clock=clock, retry=RetryPolicy(max_retries=0)) as bus:
        assert bus.publish("a").created_at == clock.now()
        assert bus.settings.retry.max_retries == 0


def test_a_frozen_clock_moves_when_told_to():
    """By seconds or by a timedelta, in UTC (S2.2)."""
    clock = FrozenClock(datetime(2026, 5, 1, tzinfo=UTC))
    clock.advance(1.5)
    clock.advance(timedelta(days=1))
    assert clock.now() == datetime(2026, 5, 2, 0, 0, 1, 500_000, tzinfo=UTC)
    assert clock.now() == clock.now()


def test_draining_runs_what_is_due_and_says_how_many():
    """In this thread, without starting anything."""
    ran: list[Any] = []
    with temporary_bus() as bus:
        bus.subscribe("*", lambda event: ran.append(event.payload))
        bus.publish_many({"type": "a", "payload": n} for n in range(5))
        assert drain(bus) == 5
        assert drain(bus) == 0
    assert ran == [0, 1, 2, 3, 4]


def test_draining_runs_what_handlers_publish():
    """To the end of the chain, over subscriptions in whatever order they were made."""
    ran: list[str] = []
    with temporary_bus() as bus:
        bus.subscriptions.create("z", "second")

        @bus.on("first")
        def first(event: Event) -> None:
            ran.append(f"first {event.payload}")
            if event.payload < 2:
                bus.publish("second", event.payload + 1)

        @bus.on("second", subscription="z")
        def second(event: Event) -> None:
            ran.append(f"second {event.payload}")
            bus.publish("first", event.payload)

        bus.publish("first", 0)
        assert drain(bus) == 5
    assert ran == ["first 0", "second 1", "first 1", "second 2", "first 2"]


def test_retries_wait_for_the_clock():
    """Advance it and drain again (S1.9, S2.2)."""
    clock = FrozenClock()
    attempts: list[int] = []
    with temporary_bus(clock=clock) as bus:

        @bus.on("*")
        def handle(_: Event, ctx: Context) -> None:
            attempts.append(ctx.attempt)
            if ctx.attempt < 3:
                raise ValueError("not yet")

        event = bus.publish("a")
        for wait in (1, 2):
            assert drain(bus) == 1
            assert drain(bus) == 0
            clock.advance(wait)
        assert drain(bus) == 1
        assert bus.get(event.id).status is Status.COMPLETED
    assert attempts == [1, 2, 3]


def test_draining_runs_async_handlers_too():
    """On a loop of its own."""
    ran: list[int] = []
    with temporary_bus() as bus:

        @bus.on("*")
        async def handle(event: Event) -> None:
            await asyncio.sleep(0)
            ran.append(event.id)

        event = bus.publish("a")
        drain(bus)
    assert ran == [event.id]


def test_draining_ends_although_a_breaker_is_open():
    """What it blocks stays for later (S1.20)."""
    clock = FrozenClock()
    calls: list[int] = []
    with temporary_bus(clock=clock, retry=RetryPolicy(base_delay=0, max_delay=0)) as bus:

        @bus.on("*", breaker=Breaker(failures=2, reset_after=30))
        def handle(event: Event) -> None:
            calls.append(event.id)
            raise ValueError("down")

        bus.publish_many([{"type": "a"}] * 5)
        drain(bus)
        assert len(calls) == 2
        assert drain(bus) == 0


def test_draining_does_not_need_a_start():
    """And a bus with no handlers has nothing to drain."""
    with temporary_bus() as bus:
        event = bus.publish("a")
        assert drain(bus) == 0
        assert bus.get(event.id).status is Status.PENDING
