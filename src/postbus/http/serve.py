"""Serving: uvicorn, told to drain before it ends, and to hang up on those who take too long to ask."""

import asyncio
import ipaddress
import resource
import signal
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
from postbus.http.buffers import HANG_UP
from postbus.retry import RetryPolicy
from postbus.store import log_of
from postbus.tokens import Tokens

__all__ = ["is_loopback", "serve"]

HEAD_SECONDS = 15.0
"""How long a request's head may take to come; looked at anew by each connection."""
MOST_UNREAD: Final = 2_097_152
"""How many bytes may come that no route has asked for: a head, or the rest of a body that was refused unread."""
KEEP_ALIVE: Final = 65
GRACE: Final = 30
UNTAKEN_SECONDS = 60.0
"""A client that has taken nothing of its answer for so long is hung up on: what it leaves there fills our memory …"""
HURRY: Final = 1.0
"""… and after so long where the server is about to end."""
LINGER_SECONDS: Final = 5.0
MOST_LINGERING: Final = 16_777_216
"""How long, and for how many bytes, a client may go on sending a body that was refused: hung up on, it would lose the
answer that says so."""
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
    drain: float = 0,
    ready: Callable[[str], None],
    **dashboard: Any,
) -> None:
    """Serve a bus until SIGINT or SIGTERM; raise InvalidRequest where nobody could be let in, or everybody would be.

    After SIGTERM it goes on for `drain` seconds, in which `/readyz` answers 503.
    """
    local = is_loopback(host)
    auth = require_token or not local
    if auth:
        tokens = Tokens(log_of(bus.store, "serving"))
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
        http=Guarded,
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
        _Server(config, app, lambda: ready(where), drain).run(sockets=[listening])


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

    def __init__(
        self, config: uvicorn.Config, app: FastAPI, ready: Callable[[], None] = lambda: None, drain: float = 0
    ) -> None:
        super().__init__(config)
        self._app = app
        self._ready = ready
        self._drain = drain

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin; say so only now that signals are heard, and a request is answered."""
        await super().startup(sockets)
        if self.started:
            self._ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to end: on SIGTERM after a while in which load balancers find out. A second time, at once."""
        gate, loop = self._app.state.desk.gate, asyncio.get_running_loop()
        if sig == signal.SIGTERM and self._drain and not gate.leaving:
            loop.call_soon_threadsafe(gate.leave)
            loop.call_soon_threadsafe(loop.call_later, self._drain, self._end, sig, frame)
        else:
            self._end(sig, frame)

    def _end(self, sig: int, frame: FrameType | None) -> None:
        asyncio.get_running_loop().call_soon_threadsafe(self._app.state.desk.gate.drain)
        super().handle_exit(sig, frame)
        self._captured_signals.clear()  # or uvicorn raises them again at its end: asked to end, it ends well


class _Joined:
    """A transport that sends the head of an answer together with the body, if that comes right behind it."""

    def __init__(self, transport: asyncio.Transport, lingers: Callable[[], bool]) -> None:
        self._transport = transport
        self._lingers = lingers
        self._soon = asyncio.get_running_loop().call_soon
        self._kept = b""
        self._ended = False

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
        if not self._ended and self._lingers():
            self._ended = True
            self._transport.write_eof()
        else:
            self._transport.close()

    def is_closing(self) -> bool:
        return self._ended or self._transport.is_closing()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class Guarded(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """A connection on which a request that has begun must be out soon; between requests, keep-alive decides."""

    transport: asyncio.Transport
    loop: asyncio.AbstractEventLoop
    flow: Any
    app_state: dict[str, Any]
    _patience: asyncio.TimerHandle | None = None
    _unread = 0
    _lingering: asyncio.TimerHandle | None = None
    _untaken: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        self.app_state = {**self.app_state, HANG_UP: transport.abort}
        joined: Any = _Joined(transport, self._linger)
        super().connection_made(joined)
        self._untaken_seconds = UNTAKEN_SECONDS
        self._arm()

    def data_received(self, data: bytes) -> None:
        if self._lingering is not None:
            self._unread += len(data)
            if self._unread > MOST_LINGERING:
                self.transport.abort()
            return
        super().data_received(data)
        cycle: Any = getattr(self, "cycle", None)
        if cycle is not None and not cycle.response_complete:
            self._calm()  # it is being served
            self._unread = 0
            return
        self._unread += len(data)
        if self._unread > MOST_UNREAD:
            self.transport.close()
        elif self._patience is None:
            self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._calm()
        for timer in (self._lingering, self._untaken):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def _linger(self) -> bool:
        """Take in the rest of a body that nobody reads; return False where all has come."""
        cycle: Any = getattr(self, "cycle", None)
        if cycle is None or not cycle.more_body or cycle.disconnected:
            return False
        self._unread = 0
        self._lingering = self.loop.call_later(LINGER_SECONDS, self.transport.abort)
        self.flow.resume_reading()
        return True

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._untaken is not None:
            self._untaken.cancel()

    def _watch(self) -> None:
        """Hang up on a client that takes nothing for a while."""
        left = self.transport.get_write_buffer_size()

        def look() -> None:
            if self.transport.get_write_buffer_size() < left:
                self._watch()
            else:
                self.transport.abort()

        self._untaken = self.loop.call_later(self._untaken_seconds, look)

    def shutdown(self) -> None:
        """End as soon as the answer at hand is out, and wait no longer for a client that does not take it."""
        super().shutdown()  # pyright: ignore[reportUnknownMemberType, reportAttributeAccessIssue]
        self._untaken_seconds = HURRY
        if self._lingering is not None:
            self.transport.abort()
        elif self._untaken is not None and not self._untaken.cancelled():
            self._untaken.cancel()
            self._watch()

    def _arm(self) -> None:
        self._patience = asyncio.get_running_loop().call_later(HEAD_SECONDS, self.transport.close)

    def _calm(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
