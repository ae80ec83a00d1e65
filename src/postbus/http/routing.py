"""The routes: each with its scope, asked of the store through the gate, answered in the shapes of the wire."""

import logging
from collections.abc import Callable, Coroutine, Mapping
from datetime import timedelta
from typing import Annotated, Any, Final
from urllib.parse import urlencode

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from pydantic import BaseModel

from postbus.bus import EventBus
from postbus.errors import PostbusError
from postbus.http import wire
from postbus.http.gate import Gate
from postbus.http.reading import Refused
from postbus.model import Page
from postbus.observe import tell
from postbus.pattern import Interest, check_pattern
from postbus.payload import MAX_PAYLOAD
from postbus.retry import RetryPolicy
from postbus.tokens import Scope, Tokens

__all__ = [
    "GUARDED",
    "LARGEST",
    "LEASE",
    "LONGEST_WAIT",
    "MAX_BATCH",
    "MOST_CLAIMED",
    "MOST_EVENTS",
    "OBJECT",
    "POLICY",
    "PROBLEM",
    "RETRY_AFTER",
    "Cursor",
    "Desk",
    "Endpoint",
    "EventId",
    "Limit",
    "Offset",
    "Routes",
    "Subscription",
    "SubscriptionPath",
    "Tags",
    "Types",
    "answer",
    "authorise",
    "desk",
    "failed",
    "interests_of",
    "json_body",
    "links",
    "named",
    "needing",
    "page_json",
    "problem_reply",
    "ref",
    "refused",
    "reply",
]

POLICY: Final = RetryPolicy(max_retries=3, base_delay=300, max_delay=300, multiplier=1)
LEASE: Final = 300.0
LONGEST_WAIT: Final = 60.0
MOST_EVENTS: Final = 500
MOST_CLAIMED: Final = 100
MAX_BATCH: Final = 8 * MAX_PAYLOAD
LARGEST: Final = wire.LARGEST
RETRY_AFTER: Final = {"retry-after": "1"}

EventId = Annotated[int, Path(ge=1, le=LARGEST, description="The event's id.")]
Subscription = Annotated[str, Query(min_length=1, max_length=255, description="Of which subscription to tell.")]
Limit = Annotated[int, Query(ge=1, le=MOST_EVENTS)]
Offset = Annotated[int, Query(ge=0, le=1_000_000_000)]
Cursor = Annotated[str | None, Query(max_length=100, pattern="^[0-9]{1,19}$", description="`next` of a page before.")]
SubscriptionPath = Annotated[str, Path(min_length=1, max_length=255)]
Tags = Annotated[str | None, Query(max_length=4_096, description="Any of these will do: `a,b`.")]
Types = Annotated[str | None, Query(max_length=4_096, description="Patterns such as `order.*,invoice.paid`.")]


class Desk:
    """What the routes work with."""

    def __init__(self, bus: EventBus, gate: Gate, tokens: Tokens | None, policy: RetryPolicy, lease: timedelta) -> None:
        """Serve a bus; without `tokens`, whoever comes."""
        self.bus = bus
        self.gate = gate
        self.tokens = tokens
        self.policy = policy
        self.lease = lease
        self.body_seconds = 30.0
        """How long a body may take to come."""
        self.heartbeat = 15.0
        """After how many quiet seconds a stream says that it is still there."""

    async def policy_of(self, subscription: str) -> RetryPolicy:
        """Return how failures are followed by further attempts in a subscription; raise NotFound."""
        found = await self.gate.read(self.bus.subscriptions.get, subscription)
        return found.retry or self.policy


def desk(request: Request) -> Desk:
    """Return what this request's app works with."""
    return request.app.state.desk


Endpoint = Callable[..., Coroutine[Any, Any, Response]]


class Routes(APIRouter):
    """Some routes, each with its scope."""

    def __init__(self) -> None:
        """Begin with none."""
        super().__init__()
        self.scopes: dict[tuple[str, str], Scope] = {}
        """By method and path: the scope that a token needs."""

    def on(
        self,
        method: str,
        path: str,
        scope: Scope,
        summary: str,
        *,
        body: type[BaseModel] | dict[str, Any] | None = None,
        answers: dict[int, Any],
    ) -> Callable[[Endpoint], Endpoint]:
        """Serve a function at a path, to those who have the scope."""
        self.scopes[method, path] = scope
        extra: dict[str, Any] = {"x-scope": scope, "security": [] if scope == "open" else [{"token": []}]}
        if body is not None:
            extra["requestBody"] = body if isinstance(body, dict) else json_body(body)
        told: dict[int | str, Any] = {400: PROBLEM, 413: PROBLEM, 422: PROBLEM}
        told |= (GUARDED if scope != "open" else {}) | answers

        def register(function: Endpoint) -> Endpoint:
            self.add_api_route(
                path,
                function,
                methods=[method],
                # First of all: who may not ask learns nothing of what is wrong with the question.
                dependencies=[Depends(needing(scope))],
                operation_id=function.__name__,
                summary=summary,
                openapi_extra=extra,
                response_class=Response,
                status_code=min(answers),
                responses=told,
            )
            return function

        return register


def json_body(model: type[BaseModel]) -> dict[str, Any]:
    """Return how OpenAPI tells of a body."""
    return {
        "required": True,
        "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}},
    }


def answer(
    description: str,
    schema: dict[str, Any] | None = None,
    kind: str = "application/json",
    also: dict[str, dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Return how OpenAPI tells of an answer; `also` has the schemas of other kinds that it may be asked for in."""
    told: dict[str, Any] = {"description": description}
    if schema is not None:
        told["content"] = {each: {"schema": found} for each, found in {kind: schema, **(also or {})}.items()}
    return told


PROBLEM: Final = answer("A problem", {"$ref": "#/components/schemas/Problem"}, "application/problem+json")
GUARDED: Final[dict[int | str, Any]] = {401: PROBLEM, 403: PROBLEM, 503: PROBLEM}
OBJECT: Final = {"type": "object"}


def ref(name: str) -> dict[str, str]:
    """Return a reference to a schema."""
    return {"$ref": f"#/components/schemas/{name}"}


def needing(scope: Scope) -> Callable[[Request], Coroutine[Any, Any, None]]:
    """Return what refuses requests that lack a scope. No `partial`: FastAPI would let the query say the scope."""

    async def authorised(request: Request) -> None:
        await authorise(request, scope)

    return authorised


async def authorise(request: Request, scope: Scope) -> None:
    """Refuse a request whose token does not allow it."""
    at = desk(request)
    if at.tokens is None or scope == "open":
        return
    if at.tokens.stale:
        await at.gate.read(at.tokens.refresh)
    kind, _, secret = request.headers.get("authorization", "").partition(" ")
    scopes = at.tokens.scopes(secret.strip()) if kind.lower() == "bearer" else None
    if scopes is None:
        raise Refused(
            "unauthorized",
            401,
            wire.PROBLEMS["unauthorized"].help,
            headers={"www-authenticate": 'Bearer realm="postbus"'},
        )
    if not at.tokens.allows(scopes, scope):
        raise Refused("forbidden", 403, f"this needs a token with the scope {scope}")


def reply(
    value: Any, status: int = 200, kind: str = "application/json", headers: dict[str, str] | None = None
) -> Response:
    """Return an answer."""
    return Response(wire.as_json(value), status, headers, kind)


def problem_reply(body: dict[str, Any], headers: Mapping[str, str] | None = None) -> Response:
    """Return an answer that tells of a problem."""
    return Response(wire.as_json(body), body["status"], headers, "application/problem+json")


def refused(error: Refused) -> Response:
    """Return the answer to a request that is not taken."""
    return problem_reply(error.body, error.headers)


def failed(error: PostbusError) -> Response:
    """Return the answer to a request that the bus could not, or would not, fulfil."""
    body = wire.problem_of(error)
    unavailable = body["status"] == 503  # noqa: PLR2004
    if unavailable:
        tell(logging.WARNING, "http_unavailable", reason=str(error))
    return problem_reply(body, RETRY_AFTER if unavailable else None)


def page_json(page: Page[Any]) -> dict[str, Any]:
    """Return what is told of a page beside its items."""
    told: dict[str, Any] = {"total": page.total, "limit": page.limit, "offset": page.offset}
    if page.total_capped:
        told["total_capped"] = True
    told["next"] = None if page.next is None else str(page.next)
    return told


def links(request: Request, page: Page[Any]) -> dict[str, str]:
    """Return the header that leads to the next page."""
    if page.next is None:
        return {}
    kept = {name: value for name, value in request.query_params.items() if name not in ("offset", "cursor")}
    return {"link": f'<{request.url.path}?{urlencode(kept | {"cursor": str(page.next)})}>; rel="next"'}


def interests_of(tags: str | None, types: str | None) -> tuple[Interest, ...]:
    """Return what is wanted by tags and types as they stand in a query."""
    wanted = frozenset(named(tags))
    return tuple(Interest(check_pattern(each), wanted) for each in named(types) or ("*",))


def named(text: str | None) -> list[str]:
    """Return the names in `a,b`."""
    return [each.strip() for each in (text or "").split(",") if each.strip()]
