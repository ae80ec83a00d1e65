"""The bus at the other end of HTTP: an EventBus whose store is a server."""

from typing import Any

from postbus.aio import AsyncEventBus
from postbus.bus import EventBus
from postbus.config import Settings
from postbus.errors import InvalidRequest
from postbus.store import is_server, shown

__all__ = ["AsyncClient", "Client"]


class Client(EventBus):
    """An EventBus on a server: publish, handle, poll and operate from elsewhere.

    What needs the database itself (followers, transactions, Spark, pruning) raises InvalidRequest.
    """

    def __init__(self, url: str | None = None, *, token: str | None = None, **options: Any) -> None:
        """Open the bus of the server at `url`; takes what EventBus takes. Raises InvalidRequest for another URL."""
        super().__init__(_server(url), token=token, **options)


class AsyncClient(AsyncEventBus):
    """The same for coroutines: an AsyncEventBus on a server."""

    def __init__(self, url: str | None = None, *, token: str | None = None, **options: Any) -> None:
        """Open the bus of the server at `url`; takes what EventBus takes. Raises InvalidRequest for another URL."""
        super().__init__(_server(url), token=token, **options)


def _server(url: str | None) -> str:
    found = Settings.load(url=url).url
    if not is_server(found):
        raise InvalidRequest(f"a client goes to a server at http:// or https://, not to {shown(found)}")
    return found
