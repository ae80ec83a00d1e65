"""The HTTP API with whatever a client may send: an answer that its own documents know, never the server's fault."""

import asyncio
import atexit
import json
import logging
import shutil
import tempfile
from functools import cache
from typing import Any, Final, NamedTuple

from fastapi.routing import APIRoute

from postbus import EventBus
from postbus.http.app import PARTS, create_app
from postbus.observe import logger

__all__ = ["SEEDS", "Request", "Wire", "check", "well"]

ROUTES: Final = [
    (method, route.path)
    for part in PARTS
    for route in part.routes
    if isinstance(route, APIRoute)
    for method in sorted(route.methods or ())
]
MEDIA: Final = (
    "application/json",
    "application/cloudevents+json",
    "application/cloudevents-batch+json",
    "text/plain",
    "application/octet-stream",
    "",
)
CLOUD: Final = (("ce-specversion", "1.0"), ("ce-id", "1"), ("ce-source", "/s"), ("ce-type", "t"))
ACCEPTED: Final = ("*/*", "application/cloudevents+json", "application/cloudevents-batch+json")
QUERIES: Final = (
    "",
    "ce=binary",
    "wait=0&limit=5",
    "worker_id=w&types=*&wait=0",
    "tags=a&type=*&status=PENDING",
    "subscription=default&include_logs=true",
    "partial=true",
    "cursor=1&offset=1",
)
BODIES: Final = (
    b'{"payload": {"a": 1}, "metadata": {"ce-source": "/s", "ce-id": "1"}, "tags": "a,b", "key": "k", "uid": "k/0"}',
    b'[{"payload": 1, "uid": "k/\\u0000"}, {"at": "2030-01-01T00:00:00Z"}]',
    b'[{"uid": "k/\\ud800"}]',
    b'{"specversion": "1.0", "id": "1", "source": "\\ud800", "type": "t"}',
    b'{"specversion": "1.0", "id": "1", "source": "/s", "type": "t", "datacontenttype": "a/b\\r\\nc: d"}',
    b'[{"specversion": "1.0", "id": "2", "source": "/s", "type": "t", "data_base64": "aA=="}]',
    b'{"worker_id": "w", "epoch": 1, "errors": [{"message": "m"}], "error_message": "e"}',
    b'{"name": "s", "patterns": ["a.*"], "tags": [], "retry": {"max_retries": 1}}',
    b'{"subscription": "default", "worker_id": "w", "interests": [{"pattern": "*", "tags": []}], "limit": 1}',
    b'{"event_ids": [1], "event_id": 1, "subscription": "default", "actor": "w", "reason": "r", "to": "beginning"}',
    b"",
)
SHORTEST: Final = 0.02
"""How long, in seconds, anybody may wait: a fuzzer learns nothing there."""


class Request(NamedTuple):
    """What a client sends."""

    method: str
    path: str
    query: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""

    @classmethod
    def of(cls, data: bytes) -> "Request":
        """Read one off bytes: six that choose among what there is, a line of free text, and the body."""
        numbers = data[:6].ljust(6, b"\0")
        line, _, body = data[6:].partition(b"\n")
        method, path = ROUTES[numbers[0] % len(ROUTES)]
        words = line.decode("latin-1")
        name = words if words and words.isprintable() and "/" not in words and words.isascii() else ""
        filled = path.replace("{event_id}", str(numbers[1] % 8)).replace("{name}", name or "default")
        kind = MEDIA[numbers[2] % len(MEDIA)]
        headers = [("content-type", kind), ("accept", ACCEPTED[numbers[3] % len(ACCEPTED)])]
        headers += CLOUD if numbers[4] & 1 else ()
        headers += [("idempotency-key", "k")] if numbers[4] & 2 else []
        headers += [(f"ce-{name or 'x'}".lower(), words)] if numbers[4] & 4 and _is_header(words) else []
        query = QUERIES[numbers[5] % len(QUERIES)].encode()
        return cls(method, filled, query + (b"&" + line if numbers[4] & 8 else b""), tuple(headers), body)


def _is_header(text: str) -> bool:
    """Return whether a server would hand this on as a header's value."""
    return not any(each in text for each in "\r\n\0") and text == text.strip()


PUBLISHING: Final = [ROUTES.index(("POST", "/events")), ROUTES.index(("POST", "/events/batch"))]
SEEDS: Final = (
    *(
        bytes([route, 1, kind, kind % 3, route & 3, route % 8]) + b"\n" + body
        for route in range(len(ROUTES))
        for kind, body in enumerate(BODIES)
    ),
    *(
        bytes([route, 1, kind, 0, flags, 0]) + b"\n" + body
        for route in PUBLISHING
        for kind in range(3)
        for flags in range(4)
        for body in BODIES
    ),
)
"""Every route with every body, and where events come in, every kind and all headers too."""


class Wire:
    """An app without a network, on a bus of its own."""

    def __init__(self, url: str) -> None:
        """Begin to serve; nothing is logged meanwhile, for a failure shows in the answer."""
        self._level = logger.level
        logger.setLevel(logging.CRITICAL + 1)
        self._app = create_app(EventBus(url), auth=False)
        self._runner = asyncio.Runner()
        self._life = self._app.router.lifespan_context(self._app)
        self._runner.run(self._life.__aenter__())
        self._hurry()

    def _hurry(self) -> None:
        gate = self._app.state.desk.gate
        claim, rung = gate.claim, gate.rung

        async def claim_soon(wanted: Any, wait: float, gone: Any) -> Any:
            return await claim(wanted, min(wait, SHORTEST), gone)

        async def rung_soon(since: int, timeout: float) -> None:  # noqa: ASYNC109  as the gate has it
            await rung(since, min(timeout, SHORTEST))

        gate.claim, gate.rung = claim_soon, rung_soon

    def close(self) -> None:
        """End it."""
        self._runner.run(self._life.__aexit__(None, None, None))
        self._runner.close()
        logger.setLevel(self._level)

    def ask(self, request: Request) -> tuple[int, dict[str, str], bytes]:
        """Send a request; return the status, the headers and the body of its answer."""
        return self._runner.run(self._ask(request))

    async def _ask(self, request: Request) -> tuple[int, dict[str, str], bytes]:
        sent: list[dict[str, Any]] = []
        parts = iter([{"type": "http.request", "body": request.body, "more_body": False}])

        async def receive() -> dict[str, Any]:
            return next(parts, None) or await asyncio.sleep(2 * SHORTEST, {"type": "http.disconnect"})

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [("host", "localhost"), *request.headers]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": request.method,
            "scheme": "http",
            "path": request.path,
            "raw_path": request.path.encode(),
            "query_string": request.query,
            "headers": [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }
        await self._app(scope, receive, send)
        head = sent[0]
        told = {name.decode("latin-1"): value.decode("latin-1") for name, value in head["headers"]}
        return head["status"], told, b"".join(each.get("body", b"") for each in sent[1:])


@cache
def _lasting() -> Wire:
    """Return an app that lives as long as this process."""
    folder = tempfile.mkdtemp(prefix="postbus-fuzz-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Wire(f"sqlite:///{folder}/bus.db")


def check(data: bytes) -> None:
    """Send one request."""
    well(_lasting(), Request.of(data))


def well(app: Wire, request: Request) -> None:
    """Send a request, and judge the answer: a problem tells what is wrong, and nothing is the server's fault."""
    status, headers, body = app.ask(request)
    assert 200 <= status < 500, f"{status} {body[:200]!r}"
    assert "content-security-policy" in headers
    assert not any(each in "".join(headers.values()) for each in "\r\n\0"), headers
    if status >= 400:
        assert headers["content-type"] == "application/problem+json"
        told = json.loads(body)
        assert told["status"] == status
        assert told["type"].startswith("/problems/")
    elif headers.get("content-type", "").startswith("application/") and "ce=binary" not in request.query.decode(
        "latin-1"
    ):
        json.loads(body)
