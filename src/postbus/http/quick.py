"""The short way for the requests that come most, past the framework's routing to the very same functions.

Whatever is not plainly one of them, or not plainly right, goes the long way, where it is told what is wrong.
"""

import re
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qsl

from fastapi import Request
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from postbus.errors import PostbusError
from postbus.http import publishing, working
from postbus.http.reading import Refused
from postbus.http.routing import LONGEST_WAIT, MOST_CLAIMED, Endpoint, authorise, failed, refused
from postbus.tokens import Scope as TokenScope

__all__ = ["find", "serve"]

CALL: Final = "postbus.call"
LONGEST_NAME: Final = 255
LONGEST_LIST: Final = 4_096
_ENDED: Final = re.compile(r"/events/([1-9][0-9]{0,17})/(complete|fail)", re.ASCII)
_NUMBER: Final = re.compile(r"[0-9]{1,7}(?:\.[0-9]{1,6})?", re.ASCII)
_TEXTS: Final = {"worker_id": LONGEST_NAME, "subscription": LONGEST_NAME, "tags": LONGEST_LIST, "types": LONGEST_LIST}
_BOUNDS: Final = {"wait": (0.0, LONGEST_WAIT), "limit": (1, MOST_CLAIMED), "lease": (0.1, 9_999_999.0)}


class _Headers(Headers):
    """Headers that are looked up, where Starlette's are gone through for each name that is asked for."""

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope=scope)
        given = reversed(scope["headers"])  # of several with one name the first counts, as there
        self._known = {name.decode("latin-1"): value.decode("latin-1") for name, value in given}

    def __getitem__(self, key: str) -> str:
        return self._known[key.lower()]

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and key.lower() in self._known


class _Request(Request):
    """A request with such headers."""

    @property
    def headers(self) -> Headers:
        if not hasattr(self, "_headers"):
            self._headers = _Headers(self.scope)
        return self._headers


class Route(NamedTuple):
    """Where a request belongs, as the framework would tell."""

    path: str


class Call(NamedTuple):
    """A request that is served the short way."""

    endpoint: Endpoint
    scope: TokenScope
    route: Route
    given: dict[str, Any]


_PUBLISH: Final = Call(publishing.publish, "publish", Route("/events"), {})
_SUBSCRIBE: Final = Call(working.subscribe, "work", Route("/events/subscribe"), {})
_ENDS: Final = {
    "complete": Call(working.complete, "work", Route("/events/{event_id}/complete"), {}),
    "fail": Call(working.fail, "work", Route("/events/{event_id}/fail"), {}),
}


def find(scope: Scope) -> bool:
    """Return whether a request can be served the short way, and note in it how."""
    call = None
    method, path = scope["method"], scope["path"]
    if method == "POST":
        if path == "/events":
            call = _PUBLISH
        elif (ended := _ENDED.fullmatch(path)) is not None:
            call = _ENDS[ended[2]]._replace(given={"event_id": int(ended[1])})
    elif method == "GET" and path == "/events/subscribe" and (given := _asked(scope["query_string"])) is not None:
        call = _SUBSCRIBE._replace(given=given)
    if call is None:
        return False
    scope[CALL], scope["route"] = call, call.route
    return True


def _asked(query: bytes) -> dict[str, Any] | None:
    """Return what `subscribe` is asked, if that is plainly right."""
    pairs = parse_qsl(query.decode("latin-1"), keep_blank_values=True)
    given: dict[str, Any] = {}
    for name, value in pairs:
        if name in _TEXTS:
            good = 1 <= len(value) <= _TEXTS[name]
            given[name] = value
        elif name in _BOUNDS and _NUMBER.fullmatch(value):
            least, most = _BOUNDS[name]
            given[name] = number = float(value) if name != "limit" else int(value) if value.isdigit() else 0
            good = least <= number <= most
        else:
            good = False
        if not good:
            return None
    return given if len(given) == len(pairs) and "worker_id" in given else None


async def serve(scope: Scope, receive: Receive, send: Send) -> None:
    """Serve a request that was found."""
    call: Call = scope[CALL]
    request = _Request(scope, receive)
    try:
        await authorise(request, call.scope)
        response = await call.endpoint(request, **call.given)
    except Refused as error:
        response = refused(error)
    except PostbusError as error:
        response = failed(error)
    await response(scope, receive, send)
