"""The ASGI application: routes, their errors as problems, what every answer carries, and OpenAPI."""

import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import timedelta
from importlib.metadata import version
from typing import Any, Final
from urllib.parse import unquote_to_bytes

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from postbus.bus import EventBus
from postbus.dashboard import Board, create_dashboard
from postbus.errors import PostbusError
from postbus.http import looking, operating, pages, publishing, quick, remote, wire, working
from postbus.http.gate import Gate
from postbus.http.metrics import Metrics
from postbus.http.reading import Refused
from postbus.http.routing import LEASE, POLICY, Desk, failed, problem_reply, refused
from postbus.http.schemas import components
from postbus.observe import tell
from postbus.retry import RetryPolicy
from postbus.store import log_of
from postbus.tokens import Tokens

__all__ = ["create_app"]

PARTS: Final = (publishing.routes, working.routes, looking.routes, operating.routes, remote.routes, pages.routes)
ROUTES: Final = [each for part in PARTS for each in part.routes if isinstance(each, APIRoute)]
CARRIED: Final = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"same-origin"),  # without any, a browser hides where a form of ours comes from
    (b"content-security-policy", b"default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'"),
)
LONGEST_QUERY: Final = 16_384
LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "[::1]", "::1"})


def create_app(
    bus: EventBus,
    *,
    auth: bool = True,
    policy: RetryPolicy = POLICY,
    lease: float = LEASE,
    local: bool = False,
    **dashboard: Any,
) -> FastAPI:
    """Return the HTTP API of a bus, to be served, or mounted in an application of your own.

    With `auth` (the default) every request needs a token; `local` refuses requests that were not addressed to this
    host, which keeps web pages from reaching a server that asks for none. The app starts the bus, and shuts it down.
    What is said beside that (`mask`, …) is for the dashboard: see `Board`.
    Raises InvalidRequest for a bus that is behind a server itself.
    """
    log = log_of(bus.store, "serving")
    tokens = Tokens(log) if auth else None
    gate = Gate(log)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        bus.start()
        async with gate.open():
            yield
        bus.shutdown()

    app = App(
        title="postbus",
        version=version("postbus"),
        summary="A durable event bus and work queue.",
        lifespan=_of(lifespan),
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )
    app.state.desk = Desk(bus, gate, tokens, policy, timedelta(seconds=lease))
    app.state.metrics = Metrics(bus)
    for part in PARTS:
        app.include_router(part)
    board = Board(bus, gate.read, gate.rung, lambda: gate.rings, lambda: gate.draining, tokens, **dashboard)
    app.add_route("/dashboard", _to_dashboard, include_in_schema=False)
    app.mount("/dashboard", create_dashboard(board), "dashboard")
    app.openapi = _openapi(app)
    app.add_exception_handler(Refused, _refused)
    app.add_exception_handler(PostbusError, _failed)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_middleware(Frame, metrics=app.state.metrics, local=local)
    app.short_way = Frame(quick.serve, app.state.metrics, local=local)
    return app


class App(FastAPI):
    """FastAPI, but for the requests that come most."""

    short_way: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] == "http" and not scope.get("root_path") and quick.find(scope):
            scope["app"] = self
            await self.short_way(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)


def _of(lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]]) -> Any:
    return lifespan


async def _to_dashboard(request: Request) -> Response:
    """Lead whoever left out the slash, as people do, to the dashboard, wherever this app is mounted."""
    return RedirectResponse(f"{request.scope.get('root_path', '')}/dashboard/")


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)  # noqa: S101  registered for it alone
    return refused(error)


async def _failed(_: Request, error: Exception) -> Response:
    assert isinstance(error, PostbusError)  # noqa: S101  registered for it alone
    return failed(error)


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)  # noqa: S101  registered for it alone
    if _is_named(request.scope["path"]) and request.method not in _methods(request.scope["path"]):
        # GET /events/batch: no wrong id, but a path that takes POST.
        return await _http(request, HTTPException(405))
    wrong = [{"field": ".".join(map(str, each["loc"][1:])), "message": each["msg"]} for each in error.errors()]
    told = "; ".join(f"{each['field']}: {each['message']}" for each in wrong[:5])
    return problem_reply(wire.problem("invalid-request", 422, told, errors=wrong))


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101  registered for it alone
    if error.status_code == 405 and (methods := _methods(request.scope["path"])):  # noqa: PLR2004
        error.headers = {"allow": ", ".join(methods)}
    name = {404: "not-found", 405: "method-not-allowed"}.get(error.status_code, "invalid-request")
    return problem_reply(wire.problem(name, error.status_code, wire.PROBLEMS[name].help), error.headers)


def _methods(path: str) -> list[str]:
    """Return what a path takes; Starlette would tell only of the first route it found there."""
    named = _is_named(path)
    there = [each for each in ROUTES if (each.path == path if named else each.path_regex.match(path))]
    return sorted({method for each in there for method in each.methods or ()})


def _is_named(path: str) -> bool:
    """Return whether a route has just this path, not only a pattern that it happens to fit."""
    return any(each.path == path for each in ROUTES)


class Frame:
    """What holds for every request: where it may come from, what its answer carries, and that no error leaks."""

    def __init__(self, app: ASGIApp, metrics: Metrics, *, local: bool) -> None:
        """Stand around an app."""
        self._app = app
        self._metrics = metrics
        self._local = local

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answered = False

        async def carrying(message: Message) -> None:
            nonlocal answered
            if message["type"] == "http.response.start":
                answered = True
                said = {name for name, _ in message["headers"]}
                message["headers"] = [*message["headers"], *(each for each in CARRIED if each[0] not in said)]
                self._metrics.count(scope, message["status"])
            await send(message)

        try:
            if (why := self._why_not(scope)) is not None:
                await problem_reply(why)(scope, receive, carrying)
            else:
                await self._app(scope, receive, carrying)
        except ClientDisconnect:  # in the midst of its body: nobody is there to be told
            pass
        except Exception as error:  # noqa: BLE001  told in the log; whoever asked learns only that it is our fault
            tell(logging.ERROR, "http_failed", error=error, path=scope["path"])
            if not answered:
                body = wire.problem("internal", 500, wire.PROBLEMS["internal"].help)
                await problem_reply(body)(scope, receive, carrying)

    def _why_not(self, scope: Scope) -> dict[str, Any] | None:
        """Return why a request is not even looked at."""
        if (wrong := _address_wrong(scope)) is not None:
            return wire.problem("invalid-request", 400, wrong)
        headers = {name: value.decode("latin-1") for name, value in scope["headers"] if name in (b"host", b"origin")}
        host, origin = headers.get(b"host", ""), headers.get(b"origin")
        if origin is not None and origin.partition("://")[2] != host:
            return wire.problem("forbidden", 403, "requests of another site's pages are not taken")
        if self._local and host.rpartition(":")[0] not in LOOPBACK and host not in LOOPBACK:
            return wire.problem("forbidden", 403, "without tokens, only requests addressed to this host are taken")
        return None


def _address_wrong(scope: Scope) -> str | None:
    """Return what is wrong with a request's path and query; bytes that are no UTF-8 would be read as other text."""
    if len(scope["query_string"]) > LONGEST_QUERY:
        return f"a query has at most {LONGEST_QUERY:,} bytes"
    for part in (scope.get("raw_path") or b"", scope["query_string"]):
        if b"%" not in part and part.isascii():
            continue
        try:
            text = unquote_to_bytes(part).decode() if part.isascii() else None
        except UnicodeDecodeError:
            text = None
        if text is None:
            return "an address is percent-encoded UTF-8"
        if "\0" in text:
            return "an address has no NUL in it"
    return None


def _openapi(app: FastAPI) -> Callable[[], dict[str, Any]]:
    made = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = made()
            parts = schema.setdefault("components", {})
            parts["schemas"] = parts.get("schemas", {}) | components()
            for unused in ("HTTPValidationError", "ValidationError"):
                parts["schemas"].pop(unused, None)
            parts["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
            app.openapi_schema = schema
        return app.openapi_schema

    return openapi
