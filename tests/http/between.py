"""What may stand between a client and a server: a proxy that loses answers, and one that answers by itself."""

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx2

__all__ = ["answering", "losing"]


@contextmanager
def _served(handle: Callable[[BaseHTTPRequestHandler], None]) -> Generator[str]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            handle(self)

        def do_GET(self) -> None:
            handle(self)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the name it is called by
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join(10)


def _answer(request: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str]) -> None:
    request.send_response_only(status)
    for name, value in headers.items():
        request.send_header(name, value)
    request.send_header("content-length", str(len(body)))
    request.end_headers()
    request.wfile.write(body)


@contextmanager
def losing(url: str, path: str, times: int) -> Generator[tuple[str, list[str]]]:
    """Lead to a server, but hang up on the first answers for a path, which the server has sent; list what was asked."""
    asked: list[str] = []

    def handle(request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers.get("content-length", 0)))
        kept = {name: request.headers[name] for name in ("content-type", "authorization") if name in request.headers}
        answer = client.request(request.command, url + request.path, content=body, headers=kept)
        asked.append(request.path)
        if request.path == path and asked.count(path) <= times:
            request.close_connection = True
            return
        _answer(request, answer.status_code, answer.content, {"content-type": answer.headers["content-type"]})

    with httpx2.Client(trust_env=False, timeout=30) as client, _served(handle) as place:
        yield place, asked


@contextmanager
def answering(status: int, body: bytes, **headers: str) -> Generator[str]:
    """Answer everything in one and the same way."""
    with _served(lambda request: _answer(request, status, body, headers)) as place:
        yield place
