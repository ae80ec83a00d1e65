"""Serving: uvicorn, told to drain before it ends, and to hang up on those who take too long to ask."""

import asyncio
import ipaddress
import resource
import socket
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from postbus.bus import EventBus
from postbus.errors import InvalidRequest
from postbus.http.app import create_app
from postbus.retry import RetryPolicy
from postbus.tokens import Tokens

__all__ = ["is_loopback", "serve"]

HEAD_SECONDS = 15.0
"""How long a request's head may take to come; looked at anew by each connection."""
MOST_UNREAD: Final = 2_097_152
"""How many bytes may come that no route has asked for: a head, or the rest of a body that was refused unread."""
KEEP_ALIVE: Final = 65
GRACE: Final = 30
SPARE_FILES: Final = 64


def is_loopback(host: str) -> bool:
    """Return whether only this host can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def serve(
    bus: EventBus,
    host: str,
    port: int,
    *,
    require_token: bool,
    policy: RetryPolicy,
    lease: float,
    ready: Callable[[str], None],
    **dashboard: Any,
) -> None:
    """Serve a bus until SIGINT or SIGTERM; raise InvalidRequest where nobody could be let in, or everybody would be."""
    local = is_loopback(host)
    auth = require_token or not local
    if auth:
        tokens = Tokens(bus.store)
        tokens.refresh()
        if not tokens.any_good():
            raise InvalidRequest(
                f"nobody could use a server at {host}, for there is no token: make one with "
                "`postbus token create NAME --scope publish`, or serve on 127.0.0.1"
            )
    app = create_app(bus, auth=auth, policy=policy, lease=lease, local=not auth, **dashboard)
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    config = uvicorn.Config(
        app,
        http=_guarded(),
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=GRACE,
        limit_concurrency=max(files - SPARE_FILES, SPARE_FILES),
        proxy_headers=False,
    )
    with _bound(host, port) as listening:
        shown = f"[{host}]" if ":" in host else host
        where = f"http://{shown}:{listening.getsockname()[1]}"
        _Server(config, app, lambda: ready(where)).run(sockets=[listening])


def _bound(host: str, port: int) -> socket.socket:
    """Return a socket that listens; raise InvalidRequest where that cannot be."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except (OSError, OverflowError) as error:
        listening.close()
        raise InvalidRequest(f"cannot serve at {host}:{port}: {error}") from None
    return listening


class _Server(uvicorn.Server):
    """Lets nobody wait any longer once it has been asked to end."""

    def __init__(self, config: uvicorn.Config, app: FastAPI, ready: Callable[[], None] = lambda: None) -> None:
        super().__init__(config)
        self._app = app
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin; say so only now that signals are heard, and a request is answered."""
        await super().startup(sockets)
        if self.started:
            self._ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to end; a second time, at once."""
        asyncio.get_running_loop().call_soon_threadsafe(self._app.state.desk.gate.drain)
        super().handle_exit(sig, frame)
        self._captured_signals.clear()  # or uvicorn raises them again at its end: asked to end, it ends well


class _Joined:
    """A transport that sends the head of an answer together with the body, if that comes right behind it."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._soon = asyncio.get_running_loop().call_soon
        self._kept = b""

    def write(self, data: bytes) -> None:
        if self._kept:
            kept, self._kept = self._kept, b""
            self._transport.write(kept + data)
        else:
            self._kept = data
            self._soon(self._send)

    def _send(self) -> None:
        kept, self._kept = self._kept, b""
        if kept and not self._transport.is_closing():
            self._transport.write(kept)

    def close(self) -> None:
        self._send()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def _guarded() -> type[asyncio.Protocol]:
    """Return uvicorn's own protocol, but one that hangs up on whoever does not get his request out in time."""

    class Guarded(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        """A connection on which a request that has begun must be out soon; between requests, keep-alive decides."""

        transport: asyncio.Transport
        _patience: asyncio.TimerHandle | None = None
        _unread = 0

        def connection_made(self, transport: Any) -> None:
            joined: Any = _Joined(transport)
            super().connection_made(joined)
            self._arm()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            cycle: Any = getattr(self, "cycle", None)
            if cycle is not None and not cycle.response_complete:
                self._calm()  # it is being served
                self._unread = 0
                return
            self._unread += len(data)
            if self._unread > MOST_UNREAD:
                self.transport.abort()
            elif self._patience is None:
                self._arm()

        def connection_lost(self, exc: Exception | None) -> None:
            self._calm()
            super().connection_lost(exc)

        def _arm(self) -> None:
            self._patience = asyncio.get_running_loop().call_later(HEAD_SECONDS, self.transport.close)

        def _calm(self) -> None:
            if self._patience is not None:
                self._patience.cancel()
                self._patience = None

    return Guarded
