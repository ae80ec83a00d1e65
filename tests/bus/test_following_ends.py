"""Followers that are cut off, cut short or killed: nothing is skipped, and nothing dies that nobody has tried."""

import asyncio
import os
import subprocess
import sys
import threading
from typing import Any

import pytest

from postbus import AsyncEventBus, Event, EventBus, EventBusShutdownError, UnsafeStore
from postbus.model import Stream
from postbus.store import log_of
from postbus.store.contract import Settled
from tests.bus.following import LONG, ONCE, QUICK, Eventually, Make, collect, publish
from tests.contract.following import on_postgres
from tests.postgres.server import query

pytestmark = pytest.mark.usefixtures("brisk")


# ── cut off ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_leader_that_is_cut_off_by_a_prune_stops_loudly(bus: EventBus, eventually: Eventually):
    """It does not go on behind the gap, as if nothing had been there (I5)."""
    seen = collect(bus, batch_size=1)
    bus.subscriptions.delete("default")
    with bus:
        bus.wait_for("s", publish(bus, 0)[-1].id, timeout=LONG)
        bus.subscriptions.pause("s")
        eventually(lambda: bus.followers["s"]._paused)
        events = publish(bus, *range(1, 9))
        log_of(bus.store).prune(Stream.EVENTS, after=0, through=events[5].id, past=["s"])
        bus.subscriptions.resume("s")
        eventually(lambda: bus.followers["s"].error is not None)
        assert isinstance(bus.followers["s"].error, UnsafeStore)
    assert seen == [0]


def test_a_pause_takes_hold_within_what_was_read(bus: EventBus, eventually: Eventually):
    """What runs goes on; the rest of a long read does not (S4.9)."""
    ran: list[Any] = []
    go_on = threading.Semaphore(0)

    @bus.follow("s", batch_size=100)
    def handle(event: Event) -> None:
        ran.append(event.payload)
        go_on.acquire(timeout=LONG)

    publish(bus, *range(50))
    with bus:
        eventually(lambda: ran == [0])
        bus.subscriptions.pause("s")
        threading.Event().wait(0.6)
        go_on.release(2)
        eventually(lambda: bus.followers["s"]._paused)
        assert len(ran) < 5
        go_on.release(100)
        bus.subscriptions.resume("s")
        eventually(lambda: ran == list(range(50)))


# ── left behind ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_retry_that_came_too_late_frees_nobody(bus: EventBus, eventually: Eventually, monkeypatch: Any):
    """Whoever lost the lease does not know how it ended: what waits behind it goes on waiting (I6, I8)."""
    fails = True

    @bus.follow("s", on_error="park_key", retry=ONCE)
    def handle(event: Event) -> None:
        if event.payload == 0 and fails:
            raise ValueError

    events = [bus.publish("a", number, key="k") for number in range(3)]
    with bus:
        bus.wait_for("s", events[-1].id, timeout=LONG)
        fails = False
        settle = bus.store.settle
        lost: list[Any] = []

        def too_late(settlements: Any) -> Any:
            lost.append(settle(settlements))
            return [Settled.LOST for _ in settlements]

        monkeypatch.setattr(bus.store, "settle", too_late)
        unpark: list[Any] = []
        monkeypatch.setattr(bus.store, "unpark", lambda *told: unpark.extend(told[1]))
        bus.followers["s"]._left._looked = float("inf")  # it looks no more by itself for what may be freed
        bus.dlq.retry(events[0].id, subscription="s")
        eventually(lambda: lost)
        bus.wait_for("s", publish(bus, 3)[-1].id, timeout=LONG)
        assert unpark == []


@pytest.mark.parametrize("rule", ["dead_letter", "stop"])
def test_what_was_parked_comes_under_another_rule(make_bus: Make, eventually: Eventually, rule: Any):
    """In its order: nothing stays behind for ever (I1, I6)."""
    first, second = make_bus(), make_bus()

    @first.follow("s", on_error="park_key", retry=ONCE)
    def fail(event: Event) -> None:
        if event.payload == 0:
            raise ValueError

    events = [first.publish("a", number, key="k") for number in range(3)]
    with first:
        first.wait_for("s", events[-1].id, timeout=LONG)
    seen = collect(second, on_error=rule, retry=ONCE)
    with second:
        eventually(lambda: seen == [1, 2])
        second.publish("a", 3, key="k")
        eventually(lambda: seen == [1, 2, 3])
        second.dlq.retry(events[0].id, subscription="s")
        eventually(lambda: seen == [1, 2, 3, 0])
        second.wait_idle(timeout=LONG)


def test_a_retry_that_is_cancelled_each_time_does_not_go_round_and_round(bus: EventBus, eventually: Eventually):
    """It waits a moment, and what comes next is read meanwhile."""
    ran: list[Any] = []

    @bus.follow("s", retry=ONCE)
    def handle(event: Event) -> None:
        ran.append(event.payload)
        if event.payload == 0:
            raise asyncio.CancelledError if ran.count(0) > 1 else ValueError

    with bus:
        (event,) = publish(bus, 0)
        bus.wait_for("s", event.id, timeout=LONG)
        bus.dlq.retry(event.id, subscription="s")
        eventually(lambda: ran.count(0) > 1)
        bus.wait_for("s", publish(bus, 1)[-1].id, timeout=LONG)
        assert ran.count(0) < 10


# ── ended ────────────────────────────────────────────────────────────────────────────────────────────────────────────

CHILD = """
import os, sys, threading
from postbus import EventBus
bus = EventBus(sys.argv[1])
def handle(events):
    print([each.payload for each in events], flush=True)
    if any(each.payload == int(sys.argv[2]) for each in events):
        os._exit(9)
bus.follow("s", batch=10, retry={"max_retries": int(sys.argv[3]), "base_delay": 0.01, "max_delay": 0.01})(handle)
with bus:
    bus.wait_idle(timeout=30)
"""


def killed(url: str, at: int, retries: int) -> tuple[int, list[str]]:
    """Run a process with a follower that ends at an event without a word; return its code, and what it handled."""
    ran = subprocess.run(
        [sys.executable, "-c", CHILD, url, str(at), str(retries)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ},
    )
    return ran.returncode, ran.stdout.split("\n")


@pytest.mark.parametrize("retries", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_only_what_was_being_tried_dies_of_it(make_bus: Make, url: str, retries: int):
    """Of a list, the one at which processes end is a dead letter; its neighbours, first or last, are handled (I12)."""
    bus = make_bus()
    bus.subscriptions.delete("default")
    publish(bus, *range(5))
    ends = 0
    while killed(url, 3, retries)[0] == 9:
        ends += 1
        assert ends < 9
    assert ends == retries + 2, "the first, which did not say what it was at, and its attempts"
    (letter,) = bus.dlq.list(subscription="s")
    assert (letter.event.payload, letter.errors[-1].type) == (3, "ProcessEnded")


def test_processes_that_end_while_it_is_paused_condemn_nothing(make_bus: Make):
    """Nobody has tried anything (I12)."""
    bus = make_bus()
    seen = collect(bus, retry=QUICK)
    bus.subscriptions.pause("s")
    events = publish(bus, 0, 1)
    for number in range(9):
        assert log_of(bus.store).lead("s", f"gone {number}", "w", -QUICK.delay(2))
    bus.subscriptions.resume("s")
    with bus:
        bus.wait_for("s", events[-1].id, timeout=LONG)
        assert bus.dlq.list(subscription="s").total == 0
    assert seen == [0, 1]


def test_a_closed_loop_is_no_failure_of_the_events(bus: EventBus, url: str, eventually: Eventually):
    """A follower whose program has gone on without it stops: what it cannot call, it has not tried."""
    seen: list[Any] = []

    async def main() -> AsyncEventBus:
        other = AsyncEventBus(url)

        @other.follow("s", retry=ONCE)
        async def handle(event: Event) -> None:
            seen.append(event.payload)

        await other.start()
        await other.publish("a", 0)
        await other.wait_for("s", 1, timeout=LONG)
        return other

    other = asyncio.run(main())
    events = publish(bus, 1, 2, 3)
    follower: Any = other.wrapped.followers["s"]
    eventually(lambda: follower.error is not None)
    assert isinstance(follower.error, EventBusShutdownError)
    assert bus.dlq.list(subscription="s").total == 0
    assert bus.store.position("s") < events[0].id
    other.wrapped.shutdown(timeout=5)


@on_postgres
def test_a_lock_that_was_cut_is_not_claimed(bus: EventBus, url: str, eventually: Eventually):
    """Who comes back finds out whether it still holds it, before it says that whoever leads is gone (S4.7)."""
    collect(bus)
    with bus:
        follower = bus.followers["s"]
        eventually(lambda: follower.leads and follower._held is not None)
        query(
            url, "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ExclusiveLock'"
        )
        before = follower._held
        follower._hold()
        assert follower._held is not before
