"""Buses on each kind of store, shut down when the test is over."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from postbus import EventBus
from postbus.observe import set_probe
from postbus.testing import FrozenClock
from tests.postgres.server import ServerClock, server


@pytest.fixture
def url(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """Give the address of a bus that is empty, with its time standing still if the test asks for a clock."""
    if kind == "sqlite":
        yield f"sqlite:///{tmp_path / 'bus.db'}"
    else:
        with server().database(frozen="clock" in request.fixturenames) as url:
            yield url


@pytest.fixture
def make_bus(url: str) -> Iterator[Callable[..., EventBus]]:
    """Give a function that opens a bus on one and the same store, as often as processes would."""
    made: list[EventBus] = []

    def make(**options: Any) -> EventBus:
        bus = EventBus(url, **{"poll_interval": 0.05, **options})
        made.append(bus)
        return bus

    yield make
    for bus in made:
        bus.shutdown(timeout=5)


@pytest.fixture
def bus(make_bus: Callable[..., EventBus]) -> EventBus:
    """Give a bus that looks for work often."""
    return make_bus()


@pytest.fixture
def clock(kind: str, url: str) -> Iterator[FrozenClock]:
    """Give a clock that stands still, and that the store goes by."""
    if kind == "sqlite":
        yield FrozenClock()
    else:
        clock = ServerClock(url)
        yield clock
        clock.close()


@pytest.fixture
def still(make_bus: Callable[..., EventBus], clock: FrozenClock) -> EventBus:
    """Give a bus that goes by the clock that stands still, to be drained by hand."""
    return make_bus(clock=clock)


@pytest.fixture
def brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look behind more often than a follower need."""
    monkeypatch.setattr("postbus.follower.LOOK_BEHIND", 0.05)
    monkeypatch.setattr("postbus.follower.STANDBY", 0.05)
    monkeypatch.setattr("postbus.leftovers.LOOK_AGAIN", 0.05)


@pytest.fixture
def probes() -> Iterator[Callable[[Callable[[str], None]], None]]:
    """Give a way to hold on to the steps of the bus, until the test is over."""
    yield set_probe
    set_probe(None)
