"""Starting, being idle, and shutting down without losing anything."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from postbus import Event, EventBus, EventBusShutdownError, InvalidRequest, Status
from postbus.testing import FrozenClock
from tests.conftest import Crew

CRASH = """
import os, sys
from postbus import EventBus
bus = EventBus(sys.argv[1])
deliveries = bus.poll_many(int(sys.argv[2]))
print(len(deliveries), flush=True)
os._exit(9)
"""


def crash_holding(url: str, count: int) -> None:
    """Have a process lease events and die without a word."""
    result = subprocess.run([sys.executable, "-c", CRASH, url, str(count)], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout.strip()) == (9, str(count)), result.stderr


# ── start ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_starting_takes_back_what_a_crashed_process_held(bus: EventBus, url: str):
    """At once, long before the lease ends: pending, one retry counted, dispatched (S1.15, S0.6, I11)."""
    events = bus.publish_many([{"type": "a"}] * 3)
    crash_holding(url, 3)
    assert bus.list(status="PROCESSING").total == 3
    bus.subscribe("*", lambda _: None)
    with bus:
        bus.wait_idle(timeout=10)
        for event in events:
            told = bus.get(event.id, include_logs=True)
            assert (told.status, told.retry_count) == (Status.COMPLETED, 1)
            assert [row.action for row in told.logs] == ["PICKED", "EXPIRED", "PICKED", "COMPLETED"]


def test_a_running_bus_takes_back_what_another_process_held(bus: EventBus, url: str):
    """Nobody has to be restarted for it (S1.15, I10)."""
    gate = threading.Event()
    bus.subscribe("never", lambda _: None)
    with bus:
        event = bus.publish("a")
        crash_holding(url, 1)
        bus.subscribe("a", lambda _: gate.set())
        assert gate.wait(10)
        bus.wait_idle(timeout=10)
        assert bus.get(event.id).retry_count == 1


def test_a_crash_on_the_last_attempt_is_a_dead_letter(bus: EventBus, url: str):
    """With its diagnosis, and never run again (S0.8, S1.15, I12)."""
    ran: list[Event] = []
    event = bus.publish("a", max_retries=0)
    crash_holding(url, 1)
    bus.subscribe("*", ran.append)
    with bus:
        bus.wait_idle(timeout=10)
    assert ran == []
    reopened = EventBus(url)
    (letter,) = reopened.dlq.list()
    assert (letter.event.id, letter.attempts, letter.errors[0].type) == (event.id, 1, "LeaseExpired")
    reopened.shutdown()


def test_a_living_process_keeps_its_leases(make_bus: Callable[..., EventBus], eventually: Any):
    """Another bus that starts takes nothing from one that lives (S1.15, I7)."""
    one, two = make_bus(), make_bus()
    one.publish("a")
    delivery = one.poll()
    ran: list[Event] = []
    two.subscribe("*", ran.append)
    with two:
        two.publish("b")
        eventually(lambda: ran)
        assert delivery is not None
        one.finalize(delivery)
    assert [event.type for event in ran] == ["b"]


def test_starting_twice_does_nothing_more(bus: EventBus):
    """One worker, one run of each event."""
    ran: list[int] = []
    bus.subscribe("*", lambda event: ran.append(event.id))
    bus.start()
    bus.start()
    event = bus.publish("a", wait=True, timeout=10)
    assert ran == [event.id]


def test_a_bus_has_a_name_of_its_own(make_bus: Callable[..., EventBus]):
    """Host and process unless told; it is what the audit rows say."""
    assert make_bus().worker_id.endswith(f":{os.getpid()}")
    named = make_bus(worker_id="me")
    named.publish("a")
    delivery = named.poll()
    assert delivery is not None
    assert delivery.worker_id == "me"
    assert "me" in repr(named)


def test_many_threads_may_poll_a_fresh_bus_at_once(make_bus: Callable[..., EventBus]):
    """The first poll makes the process known; two first polls must not wait for each other (I7)."""
    for _ in range(5):
        bus, bar, crew = make_bus(), threading.Barrier(8), Crew()

        def poll(bus: EventBus = bus, bar: threading.Barrier = bar) -> None:
            bar.wait()
            bus.poll()

        crew.start(poll, 8)
        crew.join(10)


# ── idle ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_wait_idle_returns_when_all_is_done(bus: EventBus):
    """What handlers publish included (S1.2)."""
    ran: list[str] = []

    @bus.on("first")
    def first(_: Event) -> None:
        ran.append("first")
        bus.publish("second")

    bus.subscribe("second", lambda _: ran.append("second"))
    with bus:
        bus.publish_many([{"type": "first"}] * 5)
        bus.wait_idle(timeout=10)
    assert sorted(ran) == ["first"] * 5 + ["second"] * 5


def test_wait_idle_waits_for_retries(bus: EventBus):
    """A retry that is due later is work (S1.9)."""
    attempts: list[int] = []

    @bus.on("*", retry={"base_delay": 0.15})
    def handle(_: Event, ctx: Any) -> None:
        attempts.append(ctx.attempt)
        if ctx.attempt == 1:
            raise ValueError("once")

    with bus:
        bus.publish("a")
        bus.wait_idle(timeout=10)
    assert attempts == [1, 2]


def test_wait_idle_does_not_wait_for_what_is_delayed(bus: EventBus):
    """An event for tomorrow is no work today."""
    bus.subscribe("*", lambda _: None)
    with bus:
        bus.publish("a", delay=3600)
        bus.wait_idle(timeout=5)


def test_wait_idle_concerns_what_is_handled_here(bus: EventBus):
    """Events nobody handles do not count."""
    bus.subscribe("order.*", lambda _: None)
    with bus:
        bus.publish("mail.send")
        bus.wait_idle(timeout=5)


def test_wait_idle_gives_up_after_its_timeout(bus: EventBus):
    """TimeoutError, and the work goes on."""
    gate = threading.Event()
    bus.subscribe("*", lambda _: gate.wait(10))
    with bus:
        event = bus.publish("a")
        with pytest.raises(TimeoutError):
            bus.wait_idle(timeout=0.1)
        gate.set()
        bus.wait_idle(timeout=10)
        assert bus.get(event.id).status is Status.COMPLETED


@pytest.mark.parametrize("handled", [False, True])
def test_wait_idle_with_nothing_to_wait_for_raises_at_once(bus: EventBus, *, handled: bool):
    """Without handlers, or not started: nothing would ever be settled."""
    if handled:
        bus.subscribe("*", lambda _: None)
    else:
        bus.start()
    with pytest.raises(InvalidRequest):
        bus.wait_idle(timeout=5)


# ── shutdown ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_after_shutdown_nothing_new_is_taken(bus: EventBus):
    """publish, publish_many, subscribe, poll, transaction and start all say so (S1.14)."""
    assert bus.shutdown() is True
    uses: list[Callable[[], Any]] = [
        lambda: bus.publish("a"),
        lambda: bus.publish_many([{"type": "a"}]),
        lambda: bus.subscribe("a", print),
        bus.poll,
        bus.transaction,
        bus.start,
    ]
    for use in uses:
        with pytest.raises(EventBusShutdownError):
            use()


def test_publishing_while_it_shuts_down_is_refused(bus: EventBus, eventually: Any):
    """From the first moment on, also inside a handler that still runs; its event is finished (S1.14)."""
    started, gate = threading.Event(), threading.Event()
    refused: list[BaseException] = []

    @bus.on("*")
    def handle(_: Event) -> None:
        started.set()
        gate.wait(10)
        with pytest.raises(EventBusShutdownError) as caught:
            bus.publish("b")
        refused.append(caught.value)

    bus.start()
    bus.publish("a")
    assert started.wait(10)
    crew = Crew()
    crew.start(bus.shutdown)
    eventually(lambda: bus._closing)
    gate.set()
    assert crew.join() == [True]
    assert len(refused) == 1


def test_running_work_is_finished_before_the_store_closes(bus: EventBus, url: str, eventually: Any):
    """Plain and async handlers drain, and their ends are recorded (S1.14, I9)."""
    started = threading.Barrier(3)
    gate = threading.Event()

    @bus.on("plain")
    def plain(_: Event) -> None:
        started.wait(10)
        gate.wait(10)

    @bus.on("async")
    async def awaited(_: Event) -> None:
        await asyncio.to_thread(started.wait, 10)
        await asyncio.to_thread(gate.wait, 10)

    bus.start()
    events = bus.publish_many([{"type": "plain"}, {"type": "async"}])
    started.wait(10)
    crew = Crew()
    crew.start(bus.shutdown)
    eventually(lambda: bus._closing)
    gate.set()
    assert crew.join() == [True]
    after = EventBus(url)
    assert [after.get(event.id).status for event in events] == [Status.COMPLETED] * 2
    after.shutdown()


def test_what_was_claimed_and_not_begun_is_given_back_at_once(make_bus: Callable[..., EventBus], eventually: Any):
    """Pending with no attempt, before the running one has ended (S1.14, I11)."""
    bus, other = make_bus(concurrency=1, prefetch=5), make_bus()
    started, gate = threading.Event(), threading.Event()

    @bus.on("*")
    def slow(_: Event) -> None:
        started.set()
        gate.wait(10)

    events = bus.publish_many([{"type": "a"}] * 5)
    bus.start()
    assert started.wait(10)
    eventually(lambda: other.list(status="PROCESSING").total == 5)
    crew = Crew()
    crew.start(bus.shutdown)
    eventually(lambda: other.list(status="PENDING").total == 4)
    assert not gate.is_set()
    stands = [other.get(event.id).deliveries[0] for event in events]
    assert sorted(stand.attempt for stand in stands) == [0, 0, 0, 0, 1]
    gate.set()
    assert crew.join() == [True]
    assert [other.poll() is not None for _ in range(5)] == [True] * 4 + [False]


def test_shutting_down_twice_is_safe(bus: EventBus, crew: Crew):
    """One after the other, and both at once (S1.14)."""
    bus.subscribe("*", lambda _: None)
    bus.start()
    crew.start(bus.shutdown, 4)
    assert crew.join() == [True] * 4
    assert bus.shutdown() is True


def test_each_who_shuts_down_is_told_how_it_ended(make_bus: Callable[..., EventBus], crew: Crew):
    """The thread that did it as much as another, which may bear the number of one that has ended (S1.14)."""
    bus = make_bus()
    bus.subscribe("*", lambda _: None)
    bus.start()
    assert [bus.shutdown(), bus.shutdown()] == [True, True]

    late = make_bus(concurrency=1)
    started, gate = threading.Event(), threading.Event()

    @late.on("*")
    def slow(_: Event) -> None:
        started.set()
        gate.wait(10)

    late.publish("a")
    late.start()
    assert started.wait(10)
    crew.start(lambda: late.shutdown(timeout=0.2), 3)
    assert crew.join() == [False] * 3
    assert late.shutdown() is False
    gate.set()


def test_shutdown_gives_up_after_its_timeout(make_bus: Callable[..., EventBus]):
    """It returns False in time; the event's lease ends by itself, so it is not lost (S1.14, I10)."""
    bus, other = make_bus(), make_bus()
    started, gate = threading.Event(), threading.Event()

    @bus.on("*", timeout=None)
    def stuck(_: Event) -> None:
        started.set()
        gate.wait(30)

    bus.start()
    event = bus.publish("a")
    assert started.wait(10)
    began = time.monotonic()
    assert bus.shutdown(timeout=0.2) is False
    assert time.monotonic() - began < 5
    assert other.get(event.id).status is Status.PROCESSING
    gate.set()


def test_async_handlers_still_running_at_the_timeout_are_cancelled_and_given_back(
    make_bus: Callable[..., EventBus],
):
    """No attempt is burnt by the shutdown (S0.7, S1.14)."""
    bus, other = make_bus(), make_bus()
    started, cancelled = threading.Event(), threading.Event()

    @bus.on("*")
    async def slow(_: Event) -> None:
        started.set()
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    bus.start()
    event = bus.publish("a")
    assert started.wait(10)
    bus.shutdown(timeout=0.1)
    assert cancelled.is_set()
    stand = other.get(event.id).deliveries[0]
    assert (stand.status, stand.attempt) == (Status.PENDING, 0)


def test_shutdown_before_start_only_closes(make_bus: Callable[..., EventBus], url: str):
    """A bus used for publishing alone is closed like any other (S1.14)."""
    bus = make_bus()
    event = bus.publish("a")
    assert bus.shutdown() is True
    after = EventBus(url)
    assert after.get(event.id).status is Status.PENDING
    after.shutdown()


def test_the_context_manager_starts_and_shuts_down(bus: EventBus):
    """Also when its block raises (S1.14)."""

    def fail() -> None:
        with bus:
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fail()
    with pytest.raises(EventBusShutdownError):
        bus.publish("a")


def test_run_blocks_until_a_signal_and_drains(bus: EventBus):
    """SIGTERM ends it, after what runs, and the old signal handlers are back (S1.14)."""
    ended: list[int] = []
    before = signal.getsignal(signal.SIGTERM)

    @bus.on("*")
    def handle(event: Event) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(0.2)
        ended.append(event.id)

    event = bus.publish("a")
    bus.run()
    assert ended == [event.id]
    assert signal.getsignal(signal.SIGTERM) is before
    with pytest.raises(EventBusShutdownError):
        bus.publish("b")


def test_the_clock_is_handed_through_to_the_store(make_bus: Callable[..., EventBus], clock: FrozenClock):
    """Every time on an event is the injected one's (S2.2)."""
    bus = make_bus(clock=clock)
    event = bus.publish("a")
    clock.advance(60)
    delivery = bus.poll()
    assert delivery is not None
    assert event.created_at == clock.now().replace(minute=0)
    assert bus.get(event.id).updated_at == clock.now()
