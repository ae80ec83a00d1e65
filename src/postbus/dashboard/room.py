"""What the dashboard works with: what it shows, how a page is made of it, and what its forms say."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol
from urllib.parse import parse_qsl, urlencode

from jinja2 import Environment
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from postbus.bus import EventBus
from postbus.dashboard.pulse import Background, Pulse
from postbus.dashboard.sessions import Sessions, Visitor
from postbus.errors import InvalidRequest, NotFound
from postbus.model import Stream
from postbus.store import Log, log_of
from postbus.store.contract import Finding
from postbus.tokens import Tokens

__all__ = ["Board", "Coverage", "Room", "back", "base_of", "event_of", "form", "number_of"]

PAGES: Final = (
    ("", "Overview"),
    ("events", "Events"),
    ("dead", "Dead letters"),
    ("subscriptions", "Subscriptions"),
    ("workers", "Workers"),
    ("pipeline", "Pipeline"),
    ("system", "System"),
)
LARGEST_FORM: Final = 65_536
FORM_SECONDS = 30.0
LARGEST_ID: Final = (1 << 63) - 1
LONGEST_NUMBER: Final = 20


class Coverage(NamedTuple):
    """What a lake holds of a stream."""

    stream: Stream
    after: int
    through: int
    rows: int
    segments: int
    bytes: int
    written_at: str


class Reader(Protocol):
    """Runs what blocks in a thread."""

    def __call__(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Awaitable[Any]:
        """Return what the function returns."""
        ...


@dataclass(frozen=True, slots=True)
class Board:
    """What a dashboard shows, and how."""

    bus: EventBus
    read: Reader
    rung: Callable[[int, float], Awaitable[None]]
    """Waits until something may have changed since a count of rings, or so many seconds."""
    rings: Callable[[], int]
    draining: Callable[[], bool]
    tokens: Tokens | None = None
    mask: bool = False
    """Show of payloads only their shape."""
    lake: Callable[[], Sequence[Coverage]] | None = None
    """Tells what a lake holds, if there is one."""
    report: Path | None = None
    """The last report, if it was made."""
    kill: Callable[[], None] | None = None
    """In a demo: kills a worker."""


@dataclass(frozen=True)
class Room:
    """What the pages work with."""

    board: Board
    pulse: Pulse
    findings: Background[list[Finding]]
    sessions: Sessions
    templates: Environment = field(repr=False)

    @property
    def store(self) -> Log:
        """The bus's."""
        return log_of(self.board.bus.store, "the dashboard")

    def shown(
        self, request: Request, template: str, visitor: Visitor | None, /, status: int = 200, **told: Any
    ) -> Response:
        """Return a page."""
        base = base_of(request)
        did = {name: request.query_params.get(name) for name in ("did", "count")}
        html = self.templates.get_template(template).render(
            base=base,
            pages=PAGES,
            visitor=visitor,
            may_act=visitor is not None and visitor.may_act,
            signs_in=not self.sessions.open,
            demo=self.board.kill is not None,
            did=DEEDS.get(did["did"] or "", "").format(_count(did["count"])),
            version=version("postbus"),
            where=self.store.url,
            here=request.scope["path"].removeprefix(base).strip("/").split("/")[0],
            address=f"{request.url.path}?{request.url.query}" if request.url.query else request.url.path,
            **told,
        )
        return HTMLResponse(html, status, {"cache-control": "no-store"})


DEEDS: Final = {
    "retried": "{} will be tried again.",
    "discarded": "{} discarded. The events and their history stay in the log.",
    "reset": "The event is pending again.",
    "paused": "Paused: nothing more is claimed from it; what runs goes on.",
    "resumed": "Resumed.",
    "rewound": "Rewound: {} handled again.",
    "skipped": "Gone forwards: {} passed over.",
    "killed": "A worker was killed. Watch its work come back.",
}


def _count(text: str | None) -> str:
    number = number_of(text or "")
    return "It" if number is None else f"{number:,}"


def number_of(text: str) -> int | None:
    """Return the id that a text stands for; None if it is none."""
    short = text.isascii() and text.isdecimal() and len(text) < LONGEST_NUMBER
    return int(text) if short and int(text) <= LARGEST_ID else None


def event_of(request: Request) -> int:
    """Return the event that an address names; raise NotFound if that is no id."""
    named = request.path_params["event_id"]
    if (found := number_of(named)) is None:
        raise NotFound(f"there is no event {named[:LONGEST_NUMBER]}")
    return found


def base_of(request: Request) -> str:
    """Return where the dashboard is mounted."""
    return request.scope.get("root_path", "")


async def form(request: Request) -> dict[str, list[str]]:
    """Return what a form says; raise InvalidRequest if that is too much, or comes too slowly."""
    body = b""
    try:
        async with asyncio.timeout(FORM_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > LARGEST_FORM:
                    raise InvalidRequest("the form is too large")
    except TimeoutError:
        raise InvalidRequest(f"the form took more than {FORM_SECONDS:g} s to come") from None
    found: dict[str, list[str]] = {}
    for name, value in parse_qsl(body.decode("utf-8", "replace"), keep_blank_values=True):
        found.setdefault(name, []).append(value)
    return found


def back(request: Request, path: str, did: str, count: int | None = None) -> Response:
    """Lead back to a page, which says what was done."""
    told = {"did": did} | ({} if count is None else {"count": str(count)})
    return RedirectResponse(f"{base_of(request)}/{path}{'&' if '?' in path else '?'}{urlencode(told)}", 303)
