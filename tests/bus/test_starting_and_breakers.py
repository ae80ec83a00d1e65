"""A start that failed, a stop that failed, a fork, handlers that yield, and breakers with nothing to try."""

import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from postbus import Breaker, Event, EventBus, InvalidRequest, RetryPolicy, StoreUnavailable
from postbus.breaker import BreakerState
from postbus.claiming import Claiming
from postbus.store.liveness import Liveness
from postbus.testing import FrozenClock, drain

ONCE = RetryPolicy(max_retries=0)


def fail(_: Event) -> None:
    """Be of no use."""
    raise ConnectionError("the service is down")


def unavailable(*_: Any) -> None:
    """Be a store that is away."""
    raise StoreUnavailable("the store is away")


def breaker_of(bus: EventBus) -> BreakerState:
    """Return how the breaker of the bus's only handler stands."""
    return bus.store.breaker(bus.handlers[0].breaker_name)


def in_a_fork(work: Callable[[], Any]) -> int:
    """Return how a forked child ended that does this work and no more: 0 if nothing was raised."""
    child = os.fork()
    if not child:
        signal.alarm(30)
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


# ── breakers ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def opened(make_bus: Callable[..., EventBus], clock: FrozenClock) -> EventBus:
    """Give a bus whose only handler has an open breaker that may be tried again."""
    bus = make_bus(clock=clock, retry=ONCE)
    bus.subscribe("*", fail, breaker=Breaker(failures=1, reset_after=30))
    bus.publish("a")
    drain(bus)
    clock.advance(30)
    return bus


@pytest.mark.parametrize("paused", [False, True])
def test_an_open_breaker_with_nothing_to_try_is_left_alone(
    opened: EventBus, monkeypatch: pytest.MonkeyPatch, *, paused: bool
):
    """A write would wake the very worker that made it, and so on for ever (S1.20)."""
    if paused:
        opened.subscriptions.pause("default")
        opened.publish("a")
    monkeypatch.setattr(opened.store, "change_breaker", unavailable)
    assert drain(opened) == 0


def test_who_loses_the_probe_to_another_hands_its_event_back(opened: EventBus, monkeypatch: pytest.MonkeyPatch):
    """Due at once, with no attempt burnt: the other came between its look and its claim (S1.20, I11)."""
    event = opened.publish("a")
    honest = Claiming._may_probe

    def late(self: Claiming, *asked: Any) -> bool:
        assert honest(self, *asked)
        return honest(self, *asked)

    monkeypatch.setattr(Claiming, "_may_probe", late)
    assert drain(opened) == 0
    (stand,) = opened.get(event.id).deliveries
    assert (stand.status, stand.attempt) == ("PENDING", 0)


def test_a_probe_is_handed_back_when_the_breaker_cannot_be_moved(opened: EventBus, monkeypatch: pytest.MonkeyPatch):
    """The store's fault is not the event's: it is due again, with no attempt burnt (S1.20, I11)."""
    event = opened.publish("a")
    monkeypatch.setattr(opened.store, "change_breaker", unavailable)
    with pytest.raises(StoreUnavailable):
        drain(opened)
    (stand,) = opened.get(event.id).deliveries
    assert (stand.status, stand.attempt) == ("PENDING", 0)


def test_only_a_breaker_that_closes_wakes_the_workers(opened: EventBus, monkeypatch: pytest.MonkeyPatch):
    """Opening, probing and counting make nothing claimable that was not so before (S1.20)."""
    woken: list[str] = []
    monkeypatch.setattr(opened.store, "_wake", lambda: woken.append(breaker_of(opened).name))
    handler, now = opened.handlers[0], opened.store.now()
    assert handler.breaker is not None
    for state in (
        handler.breaker.probing(breaker_of(opened), now),
        handler.breaker.failed(breaker_of(opened), now),
        BreakerState(),
        BreakerState(failures=1),
        BreakerState(),
    ):
        opened.store.change_breaker(handler.breaker_name, lambda _, state=state: state)
    assert woken == ["closed"]


# ── starting and stopping ────────────────────────────────────────────────────────────────────────────────────────────


def test_a_start_that_failed_can_be_repeated(bus: EventBus, monkeypatch: pytest.MonkeyPatch):
    """The second one starts in earnest (S1.1)."""
    handled = threading.Event()
    bus.subscribe("a", lambda _: handled.set())
    with monkeypatch.context() as away:
        away.setattr(bus.store, "register_handlers", unavailable)
        with pytest.raises(StoreUnavailable):
            bus.start()
    bus.start()
    bus.publish("a")
    assert handled.wait(10)


def test_followers_stop_though_the_worker_or_one_of_them_cannot(bus: EventBus, monkeypatch: pytest.MonkeyPatch):
    """Each is stopped before the store closes under it, and what went wrong is raised (S1.14)."""
    for name in ("one", "two"):
        bus.follow(name)(lambda _: None)
    bus.start()
    assert bus._worker is not None
    stopped: list[object] = []
    for each in (bus._worker, *bus.followers.values()):

        def stop(limit: float, each: Any = each, honest: Callable[[float], bool] = each.stop) -> bool:
            honest(limit)
            stopped.append(each)
            raise StoreUnavailable("the store is away")

        monkeypatch.setattr(each, "stop", stop)
    with pytest.raises(StoreUnavailable):
        bus.shutdown()
    assert stopped[0] is bus._worker
    assert set(stopped[1:]) == set(bus.followers.values())


def test_a_forked_child_cannot_shut_its_parents_bus_down(bus: EventBus):
    """There it does nothing and raises nothing; the parent works on (S1.14)."""
    handled = threading.Event()
    bus.subscribe("a", lambda _: handled.set())
    bus.start()
    files = [path.name for path in bus.store._liveness._folder.iterdir()]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownVariableType]
    assert in_a_fork(bus.shutdown) == 0
    assert [path.name for path in bus.store._liveness._folder.iterdir()] == files  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownVariableType]
    bus.publish("a")
    assert handled.wait(10)


def test_a_forked_child_does_not_end_its_parents_life(tmp_path: Path):
    """The file that says who is alive stays while the process does that made it (S1.15)."""
    holding = Liveness(tmp_path).holding("me", set)
    with holding:
        assert in_a_fork(lambda: holding.__exit__(None, None, None)) == 0
        assert (tmp_path / "me").exists()
    assert not (tmp_path / "me").exists()


# ── handlers that yield ──────────────────────────────────────────────────────────────────────────────────────────────


def generator(_: Event) -> Iterator[None]:
    """Yield."""
    yield


async def async_generator(_: Event) -> AsyncIterator[None]:
    """Yield, too."""
    yield


class Yielding:
    """An object that yields when it is called."""

    def __call__(self, _: Event) -> Iterator[None]:
        """Yield."""
        yield


@pytest.mark.parametrize("function", [generator, async_generator, Yielding()])
def test_a_handler_that_yields_is_refused(bus: EventBus, function: Callable[..., Any]):
    """Calling it would run nothing of it, and the event would count as done (S1.1)."""
    with pytest.raises(InvalidRequest, match="must not yield"):
        bus.subscribe("a", function)
    with pytest.raises(InvalidRequest, match="must not yield"):
        bus.follow("reader", "a")(function)
