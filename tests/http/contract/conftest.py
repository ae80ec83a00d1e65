"""The contract again, over HTTP: what `tests/contract` says of a store, a remote one is held to as well."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from postbus import EventBus
from postbus.store import open_store
from postbus.testing import FrozenClock
from tests.contract.stores import Operator, Site, site_of
from tests.http.serving import Served
from tests.kinds import MOSTLY_SQLITE


class RemoteSite(Site):
    """A place behind a server, whose clock stands still; every store opened on it is a remote one."""

    def open(self) -> Any:
        """Open a store, as another process elsewhere would; it is a queue, and no log."""
        store: Any = open_store(self.url)
        self._opened.append(store)
        return store


@pytest.fixture(params=MOSTLY_SQLITE)
def kind(request: pytest.FixtureRequest) -> str:
    """Say which kind of store is behind the server; `tests/contract` holds PostgreSQL to the same, without one."""
    return request.param


@pytest.fixture
def site(kind: str, tmp_path: Path) -> Iterator[Site]:
    """Give a place behind a server for a store of each kind; its own upkeep looks once, and then not for hours."""
    place = site_of(kind, tmp_path)
    served = Served(EventBus(place.url, clock=place.clock, poll_interval=36_000))
    site = RemoteSite(served.url, place.clock)
    yield site
    site.close()
    served.stop()
    place.close()


@pytest.fixture
def clock(site: Site) -> FrozenClock:
    """Give the clock that decides."""
    return site.clock


@pytest.fixture
def store(site: Site) -> Any:
    """Give an open store."""
    return site.open()


@pytest.fixture
def op(store: Any, clock: FrozenClock) -> Operator:
    """Give somebody who drives the store."""
    return Operator(store, clock)
