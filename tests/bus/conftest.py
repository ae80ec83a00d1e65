"""Buses on a real file, shut down when the test is over."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from postbus import EventBus
from postbus.testing import FrozenClock


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Give the address of a bus that does not exist yet."""
    return f"sqlite:///{tmp_path / 'bus.db'}"


@pytest.fixture
def make_bus(url: str) -> Iterator[Callable[..., EventBus]]:
    """Give a function that opens a bus on one and the same file, as often as processes would."""
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
def clock() -> FrozenClock:
    """Give a clock that stands still."""
    return FrozenClock()


@pytest.fixture
def still(make_bus: Callable[..., EventBus], clock: FrozenClock) -> EventBus:
    """Give a bus that goes by the clock that stands still, to be drained by hand."""
    return make_bus(clock=clock)
