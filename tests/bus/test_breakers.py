"""Circuit breakers at work: opened by failures, shared through the store, tried again with one probe."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from postbus import Breaker, Event, EventBus, RetryPolicy, Status
from postbus.testing import FrozenClock, drain

NO_WAIT = RetryPolicy(max_retries=10, base_delay=0, max_delay=0)


class Service:
    """A service that is up or down, and counts who calls it."""

    def __init__(self) -> None:
        """Begin in good health."""
        self.down = False
        self.calls = 0

    def call(self, _: Event) -> None:
        """Work, or not."""
        self.calls += 1
        if self.down:
            raise ConnectionError("the service is down")


@pytest.fixture
def service() -> Service:
    """Give a service that is down."""
    service = Service()
    service.down = True
    return service


@pytest.fixture
def pair(make_bus: Callable[..., EventBus], clock: FrozenClock, service: Service) -> tuple[EventBus, EventBus]:
    """Give two buses on one file and one clock, each with the same handler and a breaker of three failures."""
    buses = make_bus(clock=clock, retry=NO_WAIT), make_bus(clock=clock, retry=NO_WAIT)
    for bus in buses:
        bus.subscribe("mail.*", service.call, breaker=Breaker(failures=3, reset_after=30))
    return buses


def test_an_open_breaker_burns_nothing(pair: tuple[EventBus, EventBus], service: Service):
    """After three failures no more events are claimed, here or in the other process: attempts stay (S1.20)."""
    one, two = pair
    events = one.publish_many([{"type": "mail.send"}] * 5)
    drain(one)
    assert service.calls == 3
    drain(two)
    drain(one)
    assert service.calls == 3
    stands = [one.get(event.id).deliveries[0] for event in events]
    assert sum(stand.attempt for stand in stands) == 3
    assert {stand.status for stand in stands} == {Status.PENDING}


def test_other_handlers_are_not_held_up_by_an_open_breaker(pair: tuple[EventBus, EventBus]):
    """Only the events of the failing handler wait (S1.20)."""
    one, _ = pair
    ran: list[str] = []
    one.subscribe("order.*", lambda event: ran.append(event.type))
    one.publish_many([{"type": "mail.send"}] * 3)
    drain(one)
    one.publish("order.placed")
    drain(one)
    assert ran == ["order.placed"]


def test_half_open_lets_exactly_one_probe_through(
    pair: tuple[EventBus, EventBus], clock: FrozenClock, service: Service
):
    """After the reset one event is tried, over both processes; its failure opens the breaker anew (S1.20)."""
    one, two = pair
    one.publish_many([{"type": "mail.send"}] * 5)
    drain(one)
    clock.advance(29)
    assert drain(one) + drain(two) == 0
    clock.advance(1)
    assert drain(two) + drain(one) == 1
    assert service.calls == 4
    clock.advance(29)
    assert drain(one) + drain(two) == 0


def test_a_probe_that_succeeds_closes_the_breaker_for_all(
    pair: tuple[EventBus, EventBus], clock: FrozenClock, service: Service
):
    """Then everything that waited is handled, by either process (S1.20, S1.1)."""
    one, two = pair
    events = one.publish_many([{"type": "mail.send"}] * 6)
    drain(one)
    service.down = False
    clock.advance(30)
    drain(two)
    drain(one)
    assert {one.get(event.id).status for event in events} == {Status.COMPLETED}
    (name,) = {handler.breaker_name for handler in one._handlers.all()}
    assert one.store.breaker(name).name == "closed"


def test_of_two_workers_at_the_same_moment_one_gets_the_probe(
    pair: tuple[EventBus, EventBus], clock: FrozenClock, service: Service
):
    """While the probe is out, nobody else gets a second one, though their clocks show the same time (S1.20)."""
    one, two = pair
    one.publish_many([{"type": "mail.send"}] * 5)
    drain(one)
    clock.advance(30)
    inside: list[int] = []

    def meanwhile(_: Event) -> None:
        service.calls += 1
        inside.append(drain(two))
        raise ConnectionError("still down")

    service.call = meanwhile
    handler = one._handlers.all()[0]
    object.__setattr__(handler, "function", meanwhile)
    drain(one)
    assert inside == [0]
    assert service.calls == 4


def test_failures_that_are_not_in_a_row_do_not_open_it(
    pair: tuple[EventBus, EventBus], clock: FrozenClock, service: Service
):
    """A success in between starts the count anew (S1.20)."""
    one, _ = pair
    for _ in range(3):
        service.down = True
        one.publish("mail.send", max_retries=0)
        one.publish("mail.send", max_retries=0)
        drain(one)
        service.down = False
        one.publish("mail.send")
        drain(one)
    assert service.calls == 9


def test_no_breaker_unless_asked_for(still: EventBus, service: Service):
    """A handler may fail as often as its events allow (S1.20)."""
    still.subscribe("*", service.call, retry={"max_retries": 0})
    still.publish_many([{"type": "a"}] * 20)
    drain(still)
    assert service.calls == 20


def test_an_open_breaker_stops_a_running_worker_and_a_probe_starts_it_again(
    make_bus: Callable[..., EventBus], service: Service, eventually: Any
):
    """In real time, with threads: opened, nothing burnt, then all of it done (S1.20, S1.1)."""
    bus = make_bus(concurrency=1, retry=RetryPolicy(max_retries=10, base_delay=0.001, max_delay=0.001))
    opened = threading.Event()

    def call(event: Event) -> None:
        if service.calls >= 2:
            opened.set()
        service.call(event)

    bus.subscribe("*", call, breaker=Breaker(failures=3, reset_after=0.4))
    events = bus.publish_many([{"type": "a"}] * 20)
    with bus:
        assert opened.wait(10)
        (name,) = {handler.breaker_name for handler in bus._handlers.all()}
        eventually(lambda: bus.store.breaker(name).name == "open")
        service.down = False
        bus.wait_idle(timeout=15)
        told = [bus.get(event.id) for event in events]
    assert {event.status for event in told} == {Status.COMPLETED}
    assert sum(event.retry_count for event in told) <= 5


def test_events_already_claimed_are_handed_back_when_the_breaker_opens(
    make_bus: Callable[..., EventBus], service: Service, eventually: Any
):
    """Prefetched ones give their attempt back: at most those that failed have one (S1.20, I11)."""
    bus = make_bus(concurrency=1, prefetch=10, retry=RetryPolicy(max_retries=10, base_delay=30, max_delay=30))
    bus.subscribe("*", service.call, breaker=Breaker(failures=2, reset_after=60))
    events = bus.publish_many([{"type": "a"}] * 10)
    with bus:
        eventually(lambda: service.calls == 2)
        eventually(lambda: bus.list(status="PROCESSING").total == 0)
        attempts = [bus.get(event.id).deliveries[0].attempt for event in events]
    assert sum(attempts) == 2
