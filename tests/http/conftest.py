"""Servers and remote buses for the tests of the client side; `serving.py` has what they are made of."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from postbus.http import Client
from tests.http.serving import Served, serving


@pytest.fixture
def server(kind: str, tmp_path: Path) -> Iterator[Served]:
    """Give a server in this process on each kind of store; whoever comes may use it."""
    with serving(kind, tmp_path) as served:
        yield served


@pytest.fixture
def connect(server: Served) -> Iterator[Callable[..., Client]]:
    """Give a function that opens a bus on the server, as often as processes elsewhere would."""
    made: list[Client] = []

    def connect(url: str | None = None, **options: Any) -> Client:
        made.append(Client(url or server.url, **{"poll_interval": 0.1, **options}))
        return made[-1]

    yield connect
    for bus in made:
        bus.shutdown(timeout=5)


@pytest.fixture
def remote(connect: Callable[..., Client]) -> Client:
    """Give a bus behind the server."""
    return connect()
