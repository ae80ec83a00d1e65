"""Publishing: one, many, and CloudEvents in all their modes."""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Final

from fastapi import Query, Request, Response

from postbus.errors import InvalidEventError, InvalidPayloadError, InvalidRequest, PostbusError
from postbus.http import cloudevents, wire
from postbus.http.reading import ENVELOPE, Refused, aside, media_type, parsed, read_body, read_json, require_json
from postbus.http.routing import MAX_BATCH, MOST_EVENTS, OBJECT, PROBLEM, Desk, Routes, answer, desk, ref, reply
from postbus.model import Event
from postbus.payload import MAX_PAYLOAD, Draft, drafts
from postbus.tracing import publishing, spans

__all__ = ["routes"]

routes: Final = Routes()


LONGEST_KEY: Final = 200
PUBLISHING: Final[dict[str, Any]] = {
    "required": True,
    "content": {
        "application/json": {"schema": ref("Publish")},
        cloudevents.STRUCTURED: {"schema": ref("CloudEvent")},
    },
}


@routes.on(
    "POST",
    "/events",
    "publish",
    "Publish an event",
    body=PUBLISHING,
    answers={201: answer("Stored, durably", ref("Event")), 415: PROBLEM, 408: PROBLEM},
)
async def publish(request: Request) -> Response:
    """Store an event; it is durable when this answers.

    The same `uid`, or the same `Idempotency-Key`, within seven days stores nothing and returns the first event; with
    another body it is refused. A CloudEvent may be sent instead: structured, in binary mode (`ce-…` headers), or many
    of them as `application/cloudevents-batch+json`. A `traceparent` is kept in the event's metadata.
    """
    at = desk(request)
    kind = media_type(request)
    if kind == cloudevents.BATCH:
        return await publish_cloudevents(request)
    limit, fields_of = MAX_PAYLOAD + ENVELOPE, plain_fields
    if kind == cloudevents.STRUCTURED:
        fields_of = partial(structured_fields, request.headers["content-type"])
    elif cloudevents.is_binary(request.headers):
        limit, fields_of = MAX_PAYLOAD, partial(cloudevents.from_binary, request.headers)
    else:
        require_json(request)
    body = await read_body(request, limit, at.body_seconds)
    (event,) = await kept(request, await aside(len(body), lambda: drafted([with_headers(request, fields_of(body))])))
    told = wire.event_json(event, at.policy)
    return reply(told, 201, headers={"location": f"/events/{event.id}"})


def plain_fields(body: bytes) -> dict[str, Any]:
    """Return the fields of an event that comes as such."""
    return given_fields(parsed(body, len(body)))


def structured_fields(kind: str, body: bytes) -> dict[str, Any]:
    """Return the fields of an event that comes as a CloudEvent in structured mode."""
    text = cloudevents.in_utf8(body, kind)
    return cloudevents.from_structured(parsed(text, len(text)))


async def kept(request: Request, ready: list[Draft]) -> list[Event]:
    """Store events, all or none: as part of the trace that the request is part of."""
    at = desk(request)
    if spans() is None:
        return await at.gate.publish(ready)
    with publishing(ready, request.headers) as traced:
        return await at.gate.publish(traced)


def drafted(fields: Sequence[dict[str, Any]]) -> list[Draft]:
    """Validate events to publish, all or none; one that is only too large is refused as that (S3.11)."""
    try:
        return drafts(fields)
    except InvalidPayloadError as error:
        if any(too_large(each.get("payload")) for each in fields):
            raise Refused("too-large", 413, str(error)) from None
        raise


def too_large(payload: Any) -> bool:
    """Return whether a payload takes more than is kept."""
    try:
        return len(wire.as_json(payload)) > MAX_PAYLOAD
    except (ValueError, RecursionError):  # there is worse to be said of it
        return False


def given_fields(value: Any) -> dict[str, Any]:
    """Return the fields of an event to publish; refuse what is none."""
    if not isinstance(value, dict):
        raise InvalidEventError("an event is a JSON object")
    fields = wire.fields_of(value)  # pyright: ignore[reportUnknownArgumentType]
    if "at" in fields:
        fields["at"] = wire.moment_of(fields["at"])
    return fields


def with_headers(request: Request, fields: dict[str, Any], place: int | None = None) -> dict[str, Any]:
    """Return an event's fields with what the request's headers say of it."""
    traced = {name: request.headers[name] for name in ("traceparent", "tracestate") if name in request.headers}
    metadata = fields.get("metadata")
    if traced and (metadata is None or isinstance(metadata, dict)):
        fields["metadata"] = traced | (metadata or {})
    key = idempotency_key(request)
    if key is not None and "uid" not in fields:
        fields["uid"] = key if place is None else f"{key}/{place}"
    return fields


def idempotency_key(request: Request) -> str | None:
    """Return the key a request brings, quoted or bare."""
    given = request.headers.get("idempotency-key")
    if given is None:
        return None
    bare = given.strip()
    quoted = bare.startswith('"') and bare.endswith('"') and len(bare) > 1
    key = bare[1:-1] if quoted else bare
    if not key or len(key) > LONGEST_KEY or not key.isprintable():
        raise InvalidRequest("Idempotency-Key is 1 to 200 printable characters")
    return key


BATCH_BODY: Final[dict[str, Any]] = {
    "required": True,
    "content": {
        "application/json": {
            "schema": {"type": "array", "items": ref("Publish"), "minItems": 1, "maxItems": MOST_EVENTS}
        },
        cloudevents.BATCH: {"schema": {"type": "array", "items": ref("CloudEvent"), "maxItems": MOST_EVENTS}},
    },
}


@routes.on(
    "POST",
    "/events/batch",
    "publish",
    "Publish many events, all or none",
    body=BATCH_BODY,
    answers={
        201: answer("All are stored, durably", ref("Events")),
        207: answer("With partial=true: what became of each", OBJECT),
        415: PROBLEM,
        408: PROBLEM,
    },
)
async def publish_batch(
    request: Request,
    *,
    partly: Annotated[
        bool, Query(alias="partial", description="Store those that are right, and tell of each what became of it.")
    ] = False,
) -> Response:
    """Store up to 500 events in the order given: all of them, or none.

    With an `Idempotency-Key`, the same batch again stores nothing; another batch under that key is refused.
    """
    if media_type(request) == cloudevents.BATCH:
        return await publish_cloudevents(request)
    at = desk(request)
    items = batch_of(await read_json(request, limit=MAX_BATCH, seconds=at.body_seconds))
    if partly:
        ready = await at.gate.read(lambda: [one_of(request, item, place) for place, item in enumerate(items)])
        # Asked all at once, in their order: so they are stored in few transactions, not in one each.
        results = await asyncio.gather(*(outcome_of(request, each) for each in ready))
        return reply({"results": results}, 207)
    fields = [with_headers(request, given_fields(item), place) for place, item in enumerate(items)]
    ready = await at.gate.read(drafted, fields)
    await refuse_other_batch(at, request, ready)
    return stored(at, await kept(request, ready))


def stored(at: Desk, events: Sequence[Event]) -> Response:
    """Return events that were just stored."""
    return reply({"events": [wire.event_json(event, at.policy) for event in events]}, 201)


def batch_of(value: Any) -> list[Any]:
    """Return the items of a batch; refuse what is none."""
    if not isinstance(value, list) or not 1 <= len(value) <= MOST_EVENTS:  # pyright: ignore[reportUnknownArgumentType]
        raise InvalidRequest(f"a batch is a JSON array of 1 to {MOST_EVENTS} events")
    return value  # pyright: ignore[reportUnknownVariableType]


async def refuse_other_batch(at: Desk, request: Request, ready: Sequence[Draft]) -> None:
    """Refuse a batch of another length than the one that was stored under its idempotency key."""
    key = idempotency_key(request)
    if key is None:
        return
    own = [each.uid for each in ready if each.uid.startswith(f"{key}/")]
    past = f"{key}/{len(ready)}"
    known = await at.gate.read(at.bus.store.known, [*own, past])
    if past in known or 0 < len(known) < len(own):
        raise InvalidEventError(f"Idempotency-Key {key!r} stands for another batch")


def one_of(request: Request, item: Any, place: int) -> Draft | dict[str, Any]:
    """Validate one of a batch; return the problem with it instead, if there is one."""
    try:
        return drafted([with_headers(request, given_fields(item), place)])[0]
    except InvalidRequest as error:
        return wire.problem_of(error)
    except Refused as refused:
        return refused.body


async def outcome_of(request: Request, ready: Draft | dict[str, Any]) -> dict[str, Any]:
    """Store one of a batch, and return what became of it: what the others met with is not its own."""
    try:
        if isinstance(ready, Draft):
            (event,) = await kept(request, [ready])
            return {"status": 201, "event": wire.event_json(event, desk(request).policy)}
    except PostbusError as error:
        ready = wire.problem_of(error)
    return {"status": ready["status"], "problem": ready}


async def publish_cloudevents(request: Request) -> Response:
    """Store a batch of CloudEvents, all or none."""
    at = desk(request)
    body = await read_body(request, MAX_BATCH, at.body_seconds)
    text = await at.gate.read(cloudevents.in_utf8, body, request.headers["content-type"])
    value = await at.gate.read(parsed, text, len(text))
    if not isinstance(value, list) or len(value) > MOST_EVENTS:  # pyright: ignore[reportUnknownArgumentType]
        raise InvalidRequest(f"a batch of CloudEvents is a JSON array of up to {MOST_EVENTS}")
    items: list[Any] = value  # pyright: ignore[reportUnknownVariableType]
    fields = [with_headers(request, cloudevents.from_structured(item)) for item in items]
    events = await kept(request, await at.gate.read(drafted, fields)) if fields else []
    return stored(at, events)
