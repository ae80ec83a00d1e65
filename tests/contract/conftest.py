"""One suite, every store: each test here runs once for each kind of store."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from postbus.model import Event, Mode
from postbus.store import Log
from postbus.testing import FrozenClock
from tests.contract.stores import Operator, Site, site_of


@pytest.fixture
def site(kind: str, tmp_path: Path) -> Iterator[Site]:
    """Give a place for a store of each kind, with a clock that stands still."""
    site = site_of(kind, tmp_path)
    yield site
    site.close()


@pytest.fixture
def clock(site: Site) -> FrozenClock:
    """Give the clock that decides."""
    return site.clock


@pytest.fixture
def store(site: Site) -> Log:
    """Give an open store."""
    return site.open()


@pytest.fixture
def op(store: Log, clock: FrozenClock) -> Operator:
    """Give somebody who drives the store."""
    return Operator(store, clock)


@pytest.fixture
def events(op: Operator) -> list[Event]:
    """Give eight events, and a subscription `s` that begins before them."""
    op.subscription("s", mode=Mode.ORDERED, start="beginning")
    return op.publish_all(*[{"type": "a", "key": "AB"[number % 2], "payload": number} for number in range(8)])
