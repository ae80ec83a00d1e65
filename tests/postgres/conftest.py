"""What tests of PostgreSQL alone share: the server, and databases and connections of a test's own."""

from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from tests.postgres.server import Server
from tests.postgres.server import server as the_server


@pytest.fixture
def server() -> Server:
    """Give the server."""
    return the_server()


@pytest.fixture
def url(server: Server) -> Iterator[str]:
    """Give the address of a migrated database."""
    with server.database() as url:
        yield url


@pytest.fixture
def connect(url: str) -> Iterator[Callable[..., psycopg.Connection[Any]]]:
    """Give a function that connects to the database past the product; all is closed at the end."""
    opened: list[psycopg.Connection[Any]] = []

    def connect(**options: Any) -> psycopg.Connection[Any]:
        opened.append(psycopg.connect(url, **{"autocommit": True, **options}))
        return opened[-1]

    yield connect
    for connection in opened:
        connection.close()
