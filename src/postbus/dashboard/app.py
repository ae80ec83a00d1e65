"""The dashboard's own ASGI application: its addresses, and who may go there."""

from collections.abc import Callable, Coroutine
from datetime import datetime, timedelta
from functools import wraps
from pathlib import Path
from typing import Any, Final, cast
from urllib.parse import quote, urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from postbus.dashboard import acting, pages, views
from postbus.dashboard.pulse import Background, Pulse
from postbus.dashboard.room import Board, Room, base_of, form
from postbus.dashboard.sessions import COOKIE, LASTS, Sessions
from postbus.doctor import Patient
from postbus.errors import PostbusError, http_status
from postbus.store import log_of
from postbus.telling import age

__all__ = ["create_dashboard"]

FINDINGS_FRESH: Final = 10.0
HERE: Final = Path(__file__).parent
Page = Callable[[Room, Request], Coroutine[Any, Any, Response]]


def create_dashboard(board: Board) -> Starlette:
    """Return the dashboard, to be mounted wherever it is wanted."""
    templates = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=select_autoescape(default=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    cast("dict[str, Any]", templates.filters).update(  # pyright: ignore[reportUnknownMemberType]
        {"age": _age, "moment": moment_text, "q": _quoted}
    )
    store = log_of(board.bus.store, "the dashboard")
    findings = Background(lambda: list(Patient(store, "").watched()), FINDINGS_FRESH)
    room = Room(board, Pulse(store), findings, Sessions(board.tokens), templates)

    def route(path: str, page: Page, method: str = "GET", *, needs: str = "read") -> Route:
        return Route(path, _guarded(room, page, needs), methods=[method])

    return Starlette(
        routes=[
            Mount("/static", StaticFiles(directory=HERE / "static")),
            Route("/sign-in", _plain(room, sign_in), methods=["GET", "POST"]),
            Route("/sign-out", _plain(room, sign_out), methods=["POST"]),
            route("/", pages.overview),
            route("/events", pages.events),
            route("/events/{event_id}", pages.event),
            route("/events/{event_id}/reset", acting.reset, "POST", needs="admin"),
            route("/dead", pages.dead),
            route("/dead/confirm", acting.confirm_dead, needs="admin"),
            route("/dead/act", acting.act_on_dead, "POST", needs="admin"),
            route("/subscriptions", pages.subscriptions),
            route("/subscriptions/{name}/rewind", acting.preview_rewind, needs="admin"),
            route("/subscriptions/{name}/{act:str}", acting.act_on_subscription, "POST", needs="admin"),
            route("/workers", pages.workers),
            route("/pipeline", pages.pipeline),
            route("/pipeline/report", pages.report),
            route("/system", pages.system),
            route("/live", pages.live),
            route("/demo/kill", acting.kill, "POST", needs="admin"),
        ],
        exception_handlers={404: _plain(room, nowhere)},
    )


def _age(time: timedelta | None) -> str:
    return views.NONE if time is None else age(time)


def _quoted(text: object) -> str:
    return quote(str(text), safe="")


def moment_text(moment: datetime | None) -> str:
    return views.NONE if moment is None else f"{moment:%Y-%m-%d %H:%M:%S}.{moment.microsecond // 1000:03} UTC"


# ── who may ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _plain(room: Room, page: Callable[..., Coroutine[Any, Any, Response]]) -> Callable[..., Any]:
    @wraps(page)
    async def served(request: Request, *rest: Any) -> Response:
        del rest
        try:
            return await page(room, request)
        except PostbusError as error:
            return _failed(room, request, http_status(error), str(error))

    return served


def _guarded(room: Room, page: Page, needs: str) -> Callable[..., Any]:
    async def guarded(room: Room, request: Request) -> Response:
        visitor = await room.board.read(room.sessions.visitor, request.cookies.get(COOKIE))
        if visitor is None:
            return _to_sign_in(request)
        request.state.visitor = visitor
        if needs == "admin" and not visitor.may_act:
            return _failed(room, request, 403, "Your token may look, and not act: this needs one with the scope admin.")
        if request.method == "POST" and not is_own(request):
            return _failed(room, request, 403, "This did not come from a page of this dashboard.")
        return await page(room, request)

    return _plain(room, guarded)


def is_own(request: Request) -> bool:
    """Return whether a browser says that a form was sent from our own page."""
    origin = request.headers.get("origin", "")
    same = bool(origin) and origin.partition("://")[2] == request.headers.get("host", "")
    return same or request.headers.get("sec-fetch-site") == "same-origin"


def _to_sign_in(request: Request) -> Response:
    base = base_of(request)
    if "hx-request" in request.headers or request.url.path.endswith("/live"):
        return Response(status_code=401, headers={"hx-redirect": f"{base}/sign-in"})
    back = request.url.path.removeprefix(base) + (f"?{request.url.query}" if request.url.query else "")
    return RedirectResponse(f"{base}/sign-in?{urlencode({'next': back})}", 303)


def _failed(room: Room, request: Request, status: int, why: str) -> Response:
    visitor = getattr(request.state, "visitor", None)  # none where it could not even be found out who asks
    return room.shown(request, "problem.html", visitor, status, why=why, title="Not done")


async def sign_in(room: Room, request: Request) -> Response:
    """Take a token, give a cookie."""
    base = base_of(request)
    if room.sessions.open:
        return RedirectResponse(f"{base}/", 303)
    back = request.query_params.get("next", "/")
    wrong = False
    if request.method == "POST":
        given = await form(request)
        cookie = (
            await room.board.read(room.sessions.begin, given.get("token", [""])[0].strip()) if is_own(request) else None
        )
        if cookie is not None:
            safe = back if back.startswith("/") and not back.startswith(("//", "/\\")) else "/"
            answer = RedirectResponse(f"{base}{safe}", 303)
            https = request.url.scheme == "https"
            answer.set_cookie(
                COOKIE, cookie, max_age=LASTS, path=base or "/", httponly=True, samesite="strict", secure=https
            )
            return answer
        wrong = True
    return room.shown(request, "sign_in.html", None, 401 if wrong else 200, wrong=wrong, title="Sign in")


async def sign_out(room: Room, request: Request) -> Response:
    """Forget the cookie."""
    del room
    base = base_of(request)
    answer = RedirectResponse(f"{base}/sign-in", 303)
    answer.delete_cookie(COOKIE, path=base or "/", httponly=True, samesite="strict")
    return answer


async def nowhere(room: Room, request: Request) -> Response:
    """Say that there is no such page."""
    return room.shown(request, "problem.html", None, 404, why="There is no such page.", title="Not found")
