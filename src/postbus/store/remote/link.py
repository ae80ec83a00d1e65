"""The way to a server: a pool of connections, timeouts, repeats where they do no harm, and its problems as errors."""

import json
import os
import time
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from functools import cache
from importlib import import_module
from typing import Any, Final
from urllib.parse import urlsplit

from postbus.errors import (
    Conflict,
    EventBusShutdownError,
    InvalidEventError,
    InvalidPayloadError,
    InvalidRequest,
    LeaseLost,
    MaxRetriesExceeded,
    NotFound,
    OutcomeUnknown,
    PostbusError,
    StoreUnavailable,
)
from postbus.tracing import spans

CONNECT_SECONDS: Final = 5.0
ANSWER_SECONDS: Final = 30.0
IDLE_SECONDS: Final = 30.0
"""Connections unused for so long are closed here, before the server closes them under a request."""
CONNECTIONS: Final = 100
PAUSES: Final = (0.05, 0.2, 0.8)
"""How long to wait before each repeat, in seconds."""
TOLD: Final = timedelta(seconds=2)
"""For so long a server may tell one and the same time: in whole seconds, and looked up once in a second."""
PROMPT: Final = timedelta(seconds=1)
"""An answer that took longer does not tell what time it was when it was given."""
BY_PROBLEM: Final[Mapping[str, type[PostbusError]]] = {
    "invalid-request": InvalidRequest,
    "not-json": InvalidRequest,
    "too-large": InvalidRequest,
    "unsupported-media-type": InvalidRequest,
    "method-not-allowed": InvalidRequest,
    "unauthorized": InvalidRequest,
    "forbidden": InvalidRequest,
    "invalid-payload": InvalidPayloadError,
    "invalid-event": InvalidEventError,
    "not-found": NotFound,
    "gone": NotFound,
    "conflict": Conflict,
    "lease-lost": LeaseLost,
    "max-retries-exceeded": MaxRetriesExceeded,
    "too-slow": StoreUnavailable,
    "unavailable": StoreUnavailable,
    "outcome-unknown": OutcomeUnknown,
    "internal": PostbusError,
}
REFUSED: Final = frozenset({401, 403})
OUR_FAULT: Final = 500
"""From this status on it was not the request that was wrong."""


class Link:
    """Asks a server. Safe to use from many threads; connects when it is first asked."""

    def __init__(self, url: str, token: str | None) -> None:
        """Lead to the server at a URL; raise InvalidRequest for one that cannot be, or without an HTTP client."""
        self.url = checked(url)
        self._http = _http()
        self._never_left = (self._http.ConnectError, self._http.ConnectTimeout, self._http.PoolTimeout)
        self._client = self._http.Client(
            base_url=self.url,
            verify=_certificates(),
            headers={} if token is None else {"authorization": f"Bearer {_sendable(token)}"},
            timeout=self._http.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS),
            limits=self._http.Limits(
                max_connections=CONNECTIONS, max_keepalive_connections=CONNECTIONS, keepalive_expiry=IDLE_SECONDS
            ),
        )
        self._pid = os.getpid()
        self._closed = False
        self._offset = timedelta(0)

    def now(self) -> datetime:
        """Return the server's time, as far as its answers have told it; till then, this host's."""
        return datetime.now(UTC) + self._offset

    def get(self, path: str, parameters: Mapping[str, Any] | None = None, *, seconds: float = ANSWER_SECONDS) -> bytes:
        """Look at something; see `post`."""
        return self._ask("GET", path, again=True, seconds=seconds, params=parameters)

    def post(self, path: str, body: bytes, *, again: bool, seconds: float = ANSWER_SECONDS) -> bytes:
        """Send JSON and return the answer, which must come within so many seconds.

        A request that never left is repeated; one whose answer was lost only if it may happen `again`. Raises the
        error that the server tells of, StoreUnavailable where it is not reached, and OutcomeUnknown where it may have
        done what it gave no answer to.
        """
        return self._ask("POST", path, again=again, seconds=seconds, content=body)

    def close(self) -> None:
        """Close all connections."""
        self._closed = True
        if os.getpid() == self._pid:
            self._client.close()

    def _ask(self, method: str, path: str, *, again: bool, seconds: float, **parts: Any) -> bytes:
        timeout = self._http.Timeout(max(seconds, ANSWER_SECONDS), connect=CONNECT_SECONDS)
        headers = {"content-type": "application/json"} if "content" in parts else {}
        why, arrived = "", False
        for pause in (*PAUSES, None):
            self._usable()
            began = datetime.now(UTC)
            try:
                answer = self._client.request(method, path, timeout=timeout, headers=headers | _traced(), **parts)
            except self._http.TransportError as error:
                why = str(error) or type(error).__name__
                arrived |= method == "POST" and not isinstance(error, self._never_left)
                if arrived and not again:
                    break
            except RuntimeError:
                self._usable()  # closed meanwhile, by another thread
                raise
            else:
                self._set_clock(began, answer.headers.get("date"))
                return self._told(answer, arrived=arrived)
            if pause is not None:
                time.sleep(pause)
        if arrived:
            raise OutcomeUnknown(f"{self.url} gave no answer, and may have done what it was asked for: {why}")
        raise StoreUnavailable(f"{self.url} does not answer: {why}")

    def _usable(self) -> None:
        if self._closed:
            raise EventBusShutdownError("the store is closed")
        if os.getpid() != self._pid:
            raise StoreUnavailable("the store was opened before a fork: open it anew in the child process")

    def _told(self, answer: Any, *, arrived: bool) -> bytes:
        if answer.is_success:
            return answer.content
        error = self._error(answer.status_code, answer.content)
        if arrived and isinstance(error, StoreUnavailable):  # this time; the time before is not known
            raise OutcomeUnknown(str(error))
        raise error

    def _set_clock(self, began: datetime, told: str | None) -> None:
        """Go by this host's clock, which is finer, unless what the server tells cannot be the same time."""
        ended = datetime.now(UTC)
        if told is None or ended - began > PROMPT:
            return
        try:
            moment = parsedate_to_datetime(told)
            same = moment <= ended and began <= moment + TOLD
        except (ValueError, TypeError):
            return
        self._offset = timedelta(0) if same else moment + TOLD / 2 - ended

    def _error(self, status: int, content: bytes) -> PostbusError:
        """Return the error that an answer tells of; whatever is no problem of ours comes from something in between."""
        try:
            problem = json.loads(content)
            kind, detail = BY_PROBLEM[problem["type"].rpartition("/")[2]], str(problem["detail"])
        except (ValueError, LookupError, TypeError, AttributeError):
            if status >= OUR_FAULT:
                return OutcomeUnknown(f"{self.url} answered with {status}, which tells nothing of what was done")
            return InvalidRequest(f"{self.url} answered with {status}: is a postbus server there?")
        if status in REFUSED:
            return kind(f"{self.url} refuses this: {detail} (the token is taken from token= or POSTBUS_TOKEN)")
        return kind(detail)


def _traced() -> dict[str, str]:
    """Return the headers by which a server's spans belong to the trace at hand."""
    made = spans()
    return {} if made is None else made.outgoing()


def checked(url: str) -> str:
    """Return the address of a server, less a slash at its end; raise InvalidRequest where it is none."""
    try:
        parts = urlsplit(url)
        good = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        parts, good = urlsplit(""), False
    if not good:
        raise InvalidRequest("a server's URL is such as http://127.0.0.1:8080 or https://bus.example.com")
    if parts.username is not None or parts.password is not None:
        raise InvalidRequest("a server's URL holds no secret: give the token by POSTBUS_TOKEN or token=")
    if parts.query or parts.fragment:
        raise InvalidRequest("a server's URL has neither ? nor # in it")
    return url.rstrip("/")


def _sendable(token: str) -> str:
    """Return a token that a header can carry; raise InvalidRequest without repeating it, as HTTP clients would."""
    if not token.isascii() or not token.isprintable():
        raise InvalidRequest("the token has a character that no token has: was it read with the end of its line?")
    return token


@cache
def _certificates() -> Any:
    """Return what this host trusts, read once: for each bus anew it takes longer than many requests."""
    return _http().create_ssl_context()


def _http() -> Any:
    """Return httpx2, or httpx, which has the same names; neither is needed before a server is asked."""
    for name in ("httpx2", "httpx"):
        try:
            return import_module(name)
        except ImportError:
            continue
    raise InvalidRequest("a bus behind HTTP needs a client: pip install 'postbus[client]'")
