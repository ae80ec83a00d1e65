"""A crowd of HTTP clients on one server: publishers, and workers that wait for events."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Self

__all__ = ["Crowd", "Link"]

NEVER_ANSWERED = (OSError, asyncio.IncompleteReadError, asyncio.TimeoutError, ValueError)


@dataclass
class Crowd:
    """What clients have seen. A server that dies under them is asked again, by whoever had no answer."""

    port: int
    wait: float = 5.0
    acknowledged: dict[str, int] = field(default_factory=dict)
    """By uid: the id that a 201 gave."""
    claims: list[tuple[int, int]] = field(default_factory=list)
    """Event and epoch of every claim that was answered."""
    completed: set[int] = field(default_factory=set)
    lost: int = 0
    """Completions that came too late."""
    slowest: float = 0.0
    """How much longer than it might a request took."""
    stopping: bool = False

    async def ask(self, link: "Link", method: str, path: str, body: Any = None, allowed: float = 0.0) -> Any:
        """Return the status and value of an answer."""
        began = time.perf_counter()
        status, told = await link.ask(method, path, body)
        self.slowest = max(self.slowest, time.perf_counter() - began - allowed)
        return status, told

    async def publish(self, name: int) -> None:
        """Publish until it is enough, each event again until it is acknowledged."""
        number = 0
        async with Link(self.port) as link:
            while not self.stopping:
                uid, number = f"{name}-{number}", number + 1
                body = {"tags": "load", "uid": uid, "payload": {"number": number}}
                status, told = await self._insist(lambda body=body: self.ask(link, "POST", "/events", body))
                assert status == 201, told
                self.acknowledged[uid] = told["id"]

    async def work(self, name: int) -> None:
        """Wait for events and complete them, until it is enough and there is no more."""
        me = f"crowd:{name}"
        path = f"/events/subscribe?tags=load&worker_id={me}&wait={self.wait}"
        async with Link(self.port) as link:
            while True:
                stopping = self.stopping
                status, told = await self._insist(lambda: self.ask(link, "GET", path, allowed=self.wait))
                if status == 204 and stopping:
                    return
                if status == 204:
                    continue
                assert status == 200, told
                self.claims.append((told["id"], told["epoch"]))
                done = {"worker_id": me, "epoch": told["epoch"], "status_code": 200}
                way = f"/events/{told['id']}/complete"
                status, told = await self._insist(lambda way=way, done=done: self.ask(link, "POST", way, done))
                if status == 200:
                    self.completed.add(told["event_id"])
                else:
                    assert status == 409, told
                    self.lost += 1

    @staticmethod
    async def _insist(ask: Callable[[], Awaitable[Any]]) -> Any:
        while True:
            try:
                status, told = await ask()
                if status != 503:
                    return status, told
            except NEVER_ANSWERED:
                pass
            await asyncio.sleep(0.05)


class Link:
    """A connection that is made anew when it breaks."""

    def __init__(self, port: int) -> None:
        """Connect when first asked."""
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def __aenter__(self) -> Self:
        """Begin."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Hang up."""
        self._hang_up()

    async def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Return the status and the value of an answer; raise where none came."""
        sent = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        try:
            if self._streams is None:
                self._streams = await asyncio.open_connection("127.0.0.1", self._port)
            reader, writer = self._streams
            writer.write(f"{head}content-length: {len(sent)}\r\n\r\n".encode() + sent)
            told = (await reader.readuntil(b"\r\n\r\n")).lower()
            start = told.find(b"content-length: ")
            length = int(told[start + 16 : told.find(b"\r", start)]) if start >= 0 else 0
            answer = await reader.readexactly(length)
        except BaseException:
            self._hang_up()
            raise
        if b"connection: close" in told:
            self._hang_up()
        return int(told[9:12]), json.loads(answer) if answer else None

    def _hang_up(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None
