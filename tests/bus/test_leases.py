"""Leases of a running worker: kept alive by heartbeats, few at a time, lost without harm."""

import threading
from asyncio import CancelledError
from collections.abc import Callable
from typing import Any

import pytest

from postbus import Event, EventBus, RetryPolicy, Status, StoreUnavailable


def test_a_handler_longer_than_its_lease_runs_once(make_bus: Callable[..., EventBus]):
    """Heartbeats keep it from the other bus, which would take it at once (S2.5, I7, I11)."""
    one, two = make_bus(lease=1), make_bus(lease=1)
    runs: list[int] = []

    def slow(event: Event) -> None:
        runs.append(event.id)
        threading.Event().wait(2.5)

    for bus in (one, two):
        bus.subscribe("*", slow)
    with one, two:
        event = one.publish("a", wait=True, timeout=10)
        assert [row.action for row in one.get(event.id, include_logs=True).logs] == ["PICKED", "COMPLETED"]
    assert runs == [event.id]


def test_an_async_handler_longer_than_its_lease_runs_once(make_bus: Callable[..., EventBus]):
    """The same for coroutines, even for one that blocks its loop (S2.5, I7)."""
    one, two = make_bus(lease=1), make_bus(lease=1)
    runs: list[int] = []

    async def slow(event: Event) -> None:
        runs.append(event.id)
        threading.Event().wait(2.2)

    for bus in (one, two):
        bus.subscribe("*", slow)
    with one, two:
        event = one.publish("a", wait=True, timeout=10)
    assert runs == [event.id]


@pytest.mark.parametrize("way", ["works", "fails", "is cancelled"])
def test_a_heartbeat_beside_a_settlement_calls_no_lease_lost(
    bus: EventBus, probes: Callable[..., None], caplog: pytest.LogCaptureFixture, way: str
):
    """Between the commit and the worker's noting it, the lease is gone and was not lost (S2.5, I8)."""
    ran: list[int] = []

    def handle(event: Event) -> None:
        ran.append(event.id)
        if way == "fails":
            raise ValueError
        if way == "is cancelled" and len(ran) == 1:
            raise CancelledError

    def beat(name: str) -> None:
        if name == "settled" and bus._worker is not None:
            bus._worker._heartbeat_turn()

    bus.subscribe("*", handle, retry=RetryPolicy(max_retries=1, base_delay=0))
    probes(beat)
    with bus:
        bus.publish("a")
        bus.wait_idle(timeout=10)
    assert len(ran) == (1 if way == "works" else 2)
    assert "lease_lost" not in [record.msg for record in caplog.records]


def test_a_subscriptions_shorter_lease_is_kept_alive_too(make_bus: Callable[..., EventBus]):
    """The bus would beat every twenty seconds; this lease lasts one (S2.5, I7)."""
    one, two = make_bus(lease=60), make_bus(lease=60)
    one.subscriptions.create("fast", lease=1)
    runs: list[int] = []

    def slow(event: Event) -> None:
        runs.append(event.id)
        threading.Event().wait(2.5)

    for bus in (one, two):
        bus.subscribe("*", slow, subscription="fast")
    with one, two:
        event = one.publish("a", wait=True, timeout=10)
    assert runs == [event.id]


def test_heartbeats_cover_what_waits_in_line(make_bus: Callable[..., EventBus], eventually: Any):
    """Prefetched deliveries outlast their lease while one thread works through them, none of them twice (S2.5, I7)."""
    one, two = make_bus(lease=2, concurrency=1, prefetch=5), make_bus(lease=2)
    runs: list[tuple[str, int]] = []
    one.subscribe("*", lambda event: (runs.append(("one", event.id)), threading.Event().wait(0.6)))
    events = one.publish_many([{"type": "a"}] * 5)
    with one:
        eventually(lambda: runs)
        two.subscribe("*", lambda event: runs.append(("two", event.id)))
        with two:
            one.wait_idle(timeout=20)
    assert sorted(event_id for _, event_id in runs) == [event.id for event in events]


@pytest.mark.parametrize("prefetch", [1, 3, 8])
def test_a_worker_holds_no_more_than_its_prefetch(make_bus: Callable[..., EventBus], eventually: Any, prefetch: int):
    """Of thirty due events the rest stays for others (S0.4)."""
    bus = make_bus(concurrency=1, prefetch=prefetch)
    started, gate = threading.Event(), threading.Event()
    most = 0

    @bus.on("*")
    def handle(event: Event) -> None:
        nonlocal most
        most = max(most, bus.list(status="PROCESSING").total)
        if not started.is_set():
            started.set()
            gate.wait(10)

    bus.publish_many([{"type": "a"}] * 30)
    with bus:
        assert started.wait(10)
        eventually(lambda: bus.list(status="PROCESSING").total == prefetch)
        gate.set()
        bus.wait_idle(timeout=20)
    assert most <= prefetch


def test_without_a_prefetch_a_slow_worker_does_not_hoard(make_bus: Callable[..., EventBus]):
    """At most twice what it can run, until it knows how fast its handlers are (S0.4)."""
    bus = make_bus(concurrency=2)
    started, gate = threading.Barrier(3), threading.Event()

    @bus.on("*")
    def handle(event: Event) -> None:
        if event.payload < 2:
            started.wait(10)
        gate.wait(10)

    bus.publish_many({"type": "a", "payload": n} for n in range(50))
    with bus:
        started.wait(10)
        assert bus.list(status="PROCESSING").total <= 4
        gate.set()
        bus.wait_idle(timeout=20)


def test_the_leases_of_a_worker_that_stopped_beating_are_taken_over(make_bus: Callable[..., EventBus], eventually: Any):
    """Its late end is refused, the heir's counts, and the cause is recorded (S0.6, I8, I10, I11)."""
    one, two = make_bus(lease=0.3, worker_id="stalled"), make_bus(lease=0.3, worker_id="heir")
    started, gate = threading.Event(), threading.Event()

    @one.on("*")
    def stall(_: Event) -> None:
        started.set()
        gate.wait(10)

    one.start()
    assert one._worker is not None
    event = one.publish("a")
    assert started.wait(10)
    one._worker._beating.stop()
    two.subscribe("*", lambda _: None)
    with two:
        eventually(lambda: two.get(event.id).status is Status.COMPLETED)
        gate.set()
        assert one.shutdown(timeout=5)
        told = two.get(event.id, include_logs=True)
    assert [(row.action, row.worker_id) for row in told.logs] == [
        ("PICKED", "stalled"),
        ("EXPIRED", "stalled"),
        ("PICKED", "heir"),
        ("COMPLETED", "heir"),
    ]


def test_a_suspect_runs_alone(make_bus: Callable[..., EventBus], eventually: Any):
    """What may have killed its worker has nothing beside it, and its neighbours come after (S0.8, I12)."""
    bus = make_bus(concurrency=5)
    events = bus.publish_many([{"type": "a"}] * 6)
    leased = bus.poll_many(3)
    assert bus.store.expire([bus._owner], RetryPolicy()) == 3
    lock = threading.Lock()
    running: set[int] = set()
    beside: dict[int, int] = {}

    @bus.on("*")
    def handle(event: Event) -> None:
        with lock:
            running.add(event.id)
        threading.Event().wait(0.03)
        with lock:
            beside[event.id] = len(running) - 1
            running.discard(event.id)

    with bus:
        bus.wait_idle(timeout=20)
        assert all(bus.get(event.id).status is Status.COMPLETED for event in events)
    assert {beside[delivery.id] for delivery in leased} == {0}


def test_a_store_that_is_away_for_a_while_loses_nothing(
    bus: EventBus, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """Settling fails twice and is tried again; the handler has run once (S1.1, S1.17)."""
    runs: list[int] = []
    bus.subscribe("*", lambda event: runs.append(event.id))
    settle, failures = bus.store.settle, iter([1, 1])

    def flaky(settlements: Any) -> Any:
        if next(failures, None):
            raise StoreUnavailable("away")
        return settle(settlements)

    monkeypatch.setattr(bus.store, "settle", flaky)
    with bus:
        event = bus.publish("a", wait=True, timeout=10)
    assert event.status is Status.COMPLETED
    assert runs == [event.id]
