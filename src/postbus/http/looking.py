"""Looking: events, the stream, figures and health."""

import math
import re
from typing import Annotated, Any, Final, Literal

from fastapi import Query, Request, Response

from postbus.errors import InvalidRequest, PostbusError
from postbus.http import cloudevents, wire
from postbus.http.routing import (
    LARGEST,
    OBJECT,
    PROBLEM,
    Cursor,
    EventId,
    Limit,
    Offset,
    Routes,
    Subscription,
    Tags,
    Types,
    answer,
    authorise,
    desk,
    interests_of,
    links,
    named,
    page_json,
    ref,
    reply,
)
from postbus.http.stream import Pace, stream
from postbus.model import Status, Stream

__all__ = ["routes"]

routes: Final = Routes()
POSITION: Final = re.compile(r"[0-9]{1,19}")
ISOLATED: Final = {"content-security-policy": "sandbox; default-src 'none'"}
"""For bodies whose kind their publisher chose: opened in a browser, a page among them is no page of ours."""


@routes.on(
    "GET",
    "/events/{event_id}",
    "read",
    "Look at an event",
    answers={
        200: answer("The event", ref("WholeEvent"), also={cloudevents.STRUCTURED: ref("CloudEvent")}),
        404: PROBLEM,
    },
)
async def get_event(
    request: Request,
    *,
    event_id: EventId,
    include_logs: Annotated[bool, Query(description="With all that happened to it.")] = False,
    subscription: Subscription = "default",
    ce: Annotated[Literal["binary"] | None, Query(include_in_schema=False)] = None,
) -> Response:
    """Return an event, and how it stands.

    With `Accept: application/cloudevents+json` it is a CloudEvent; with `ce=binary` one in binary mode, whose body may
    be anything.
    """
    at = desk(request)
    policy = await at.policy_of(subscription)
    event = await at.gate.read(at.bus.store.get, event_id, subscription)
    if ce == "binary":
        headers, body = cloudevents.to_binary(event)
        return Response(body, headers=headers | ISOLATED)
    if cloudevents.STRUCTURED in request.headers.get("accept", ""):
        return reply(cloudevents.to_structured(event), kind=cloudevents.STRUCTURED)
    told = wire.whole_json(event, policy)
    if include_logs:
        told["logs"] = [wire.entry_json(each) for each in await at.gate.read(at.bus.store.logs, event_id)]
    return reply(told)


@routes.on(
    "GET",
    "/events",
    "read",
    "List events",
    answers={
        200: answer(
            "Newest first",
            ref("EventPage"),
            also={cloudevents.BATCH: {"type": "array", "items": ref("CloudEvent")}},
        ),
        404: PROBLEM,
    },
)
async def list_events(
    request: Request,
    *,
    status: Annotated[Status | None, Query()] = None,
    tags: Tags = None,
    type: Annotated[str | None, Query(max_length=255, description="`*` is any characters.")] = None,  # noqa: A002
    limit: Limit = 20,
    offset: Offset = 0,
    cursor: Cursor = None,
    subscription: Subscription = "default",
) -> Response:
    """Return events newest first. `Link` has the address of the next page; `total` is exact up to 10,000."""
    at = desk(request)
    policy = await at.policy_of(subscription)
    page = await at.gate.read(
        at.bus.list,
        status=status,
        type=type,
        tags=named(tags),
        limit=limit,
        offset=offset,
        after=cursor,
        subscription=subscription,
    )
    if cloudevents.BATCH in request.headers.get("accept", ""):
        return reply(
            [cloudevents.to_structured(each) for each in page], kind=cloudevents.BATCH, headers=links(request, page)
        )
    told = {"events": [wire.brief_json(each, policy) for each in page], **page_json(page)}
    return reply(told, headers=links(request, page))


@routes.on(
    "GET",
    "/stream",
    "read",
    "Follow the log",
    answers={
        200: answer("Events, in order, without gaps", ref("StreamFrame"), "text/event-stream"),
        409: PROBLEM,
        410: PROBLEM,
    },
)
async def stream_events(
    request: Request,
    *,
    after: Annotated[
        int | None, Query(ge=0, le=LARGEST, description="Begin after this id; else with what comes now.")
    ] = None,
    tags: Tags = None,
    types: Types = None,
    limit: Annotated[int | None, Query(ge=1, le=1_000_000, description="End after so many.")] = None,
    wait: Annotated[
        float | None,
        Query(ge=0, le=86_400, description="End when none came for so many seconds; 0: with what there is."),
    ] = None,
) -> Response:
    """Send every event in the order of the log, as server-sent events, none missed; `id` is the position.

    A client that comes back sends `Last-Event-ID`, as browsers do, and goes on from there. Nothing is remembered here.
    """
    at = desk(request)
    last = request.headers.get("last-event-id")
    if last is not None:
        if POSITION.fullmatch(last) is None or int(last) > LARGEST:
            raise InvalidRequest("Last-Event-ID is the id of an event")
        after = int(last)
    pace = Pace(limit, math.inf if wait is None else wait, at.heartbeat)
    return await stream(request, at.gate, after, interests_of(tags, types), pace)


@routes.on("GET", "/stats", "read", "The bus in figures", answers={200: answer("Depths, ages, rates and lags", OBJECT)})
async def get_stats(request: Request) -> Response:
    """Return how much waits where, since when, and how fast it goes."""
    at = desk(request)
    return reply(wire.stats_json(await at.gate.read(at.bus.stats)))


@routes.on("GET", "/livez", "open", "Whether the server runs", answers={200: answer("It does", OBJECT)})
async def livez(request: Request) -> Response:
    """Answer."""
    del request
    return reply({"status": "ok"})


@routes.on(
    "GET",
    "/readyz",
    "open",
    "Whether the server can serve",
    answers={200: answer("It can", OBJECT), 401: PROBLEM, 403: PROBLEM, 503: answer("It cannot", OBJECT)},
)
async def readyz(
    request: Request,
    *,
    verbose: Annotated[str | None, Query(description="Tell of each check; needs the scope read.")] = None,
) -> Response:
    """Look whether the store answers, is of this version, and the server is not about to end."""
    at = desk(request)
    if verbose is not None:
        await authorise(request, "read")
    checks = {"serving": not at.gate.leaving}
    try:
        await at.gate.read(at.bus.store.span, Stream.EVENTS)
        checks["store"] = True
    except PostbusError:
        checks["store"] = False
    told: dict[str, Any] = {"status": "ok" if all(checks.values()) else "unavailable"}
    if verbose is not None:
        told["checks"] = checks
    return reply(told, 200 if all(checks.values()) else 503)
