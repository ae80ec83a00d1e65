"""Operating: dead letters and subscriptions."""

from typing import Annotated, Any, Final, Literal

from fastapi import Query, Request, Response

from postbus.errors import InvalidRequest
from postbus.http import wire
from postbus.http.reading import read_model
from postbus.http.routing import (
    OBJECT,
    PROBLEM,
    EventId,
    Limit,
    Offset,
    Routes,
    SubscriptionPath,
    answer,
    desk,
    links,
    page_json,
    ref,
    reply,
)
from postbus.retry import RetryPolicy

__all__ = ["routes"]

routes: Final = Routes()


Which = Annotated[str | None, Query(min_length=1, max_length=255, description="Only of this subscription.")]
Kind = Annotated[str | None, Query(max_length=255, description="Only of this type.")]


@routes.on(
    "GET", "/dlq", "read", "List dead letters", answers={200: answer("Newest first", ref("LetterPage")), 404: PROBLEM}
)
async def list_dead(
    request: Request,
    *,
    subscription: Which = None,
    type: Kind = None,  # noqa: A002  the public word for it
    limit: Limit = 100,
    offset: Offset = 0,
    cursor: Annotated[
        str | None, Query(max_length=300, pattern="^[0-9]{1,19}(:.{1,255})?$", description="`next` of a page before.")
    ] = None,
) -> Response:
    """Return dead letters with the error of each attempt."""
    at = desk(request)
    page = await at.gate.read(at.bus.dlq.list, offset, limit, subscription, type=type, after=cursor)
    told = {"letters": [wire.letter_json(each, at.policy) for each in page], **page_json(page)}
    return reply(told, headers=links(request, page))


@routes.on(
    "GET",
    "/dlq/{event_id}",
    "read",
    "Look at a dead letter",
    answers={200: answer("One a subscription", OBJECT), 404: PROBLEM},
)
async def get_dead(request: Request, event_id: EventId, subscription: Which = None) -> Response:
    """Return an event's dead letters: one for each subscription it died in."""
    at = desk(request)
    letters = await at.gate.read(at.bus.dlq.get, event_id, subscription)
    return reply({"letters": [wire.letter_json(each, at.policy) for each in letters]})


COUNTED: Final = answer(
    "How many", {"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"]}
)


@routes.on("POST", "/dlq/retry", "admin", "Retry dead letters", answers={200: COUNTED, 404: PROBLEM})
async def retry_all_dead(request: Request, subscription: Which = None, type: Kind = None) -> Response:  # noqa: A002
    """Give every dead letter that matches all its attempts anew."""
    at = desk(request)
    return reply({"count": await at.gate.read(at.bus.dlq.retry_all, subscription=subscription, type=type)})


@routes.on("POST", "/dlq/purge", "admin", "Purge dead letters", answers={200: COUNTED})
async def purge_dead(
    request: Request,
    *,
    older_than_days: Annotated[float, Query(ge=0, le=36_500)],
    by: Literal["created_at", "died_at"] = "created_at",
    subscription: Which = None,
    type: Kind = None,  # noqa: A002  the public word for it
) -> Response:
    """Remove dead letters at least this old; the events themselves stay in the log."""
    at = desk(request)
    count = await at.gate.read(at.bus.dlq.purge, older_than_days, by, subscription=subscription, type=type)
    return reply({"count": count})


@routes.on("POST", "/dlq/{event_id}/retry", "admin", "Retry a dead letter", answers={200: COUNTED, 404: PROBLEM})
async def retry_dead(request: Request, event_id: EventId, subscription: Which = None) -> Response:
    """Give a dead letter all its attempts anew, in one subscription or in every one it died in."""
    at = desk(request)
    return reply({"count": await at.gate.read(at.bus.dlq.retry, event_id, subscription)})


@routes.on("GET", "/subscriptions", "read", "List subscriptions", answers={200: answer("By name", OBJECT)})
async def list_subscriptions(request: Request) -> Response:
    """Return all subscriptions, and how far those that are read in order have come."""
    at = desk(request)
    found = await at.gate.read(at.bus.subscriptions.list)
    stands = {each.subscription: each for each in await at.gate.read(at.bus.store.checkpoints)}
    return reply({"subscriptions": [wire.subscription_json(each, stands.get(each.name)) for each in found]})


@routes.on(
    "POST",
    "/subscriptions",
    "admin",
    "Make a subscription",
    body=wire.NewSubscription,
    answers={201: answer("Made", ref("Subscription")), 409: PROBLEM, 415: PROBLEM, 408: PROBLEM},
)
async def create_subscription(request: Request) -> Response:
    """Make a subscription that gets what is published after `start`."""
    at, given = desk(request), await read_model(request, wire.NewSubscription)
    made = await at.gate.read(
        at.bus.subscriptions.create,
        given.name,
        given.patterns,
        given.mode,
        tags=given.tags,
        lease=given.lease,
        retry=None if given.retry is None else RetryPolicy(**given.retry.model_dump()),
        start=given.start,
    )
    return reply(wire.subscription_json(made, None), 201)


SUBSCRIPTION: Final[dict[int, Any]] = {200: answer("The subscription", ref("Subscription")), 404: PROBLEM}


@routes.on("GET", "/subscriptions/{name}", "read", "Look at a subscription", answers=SUBSCRIPTION)
async def get_subscription(request: Request, name: SubscriptionPath) -> Response:
    """Return a subscription, and how far it has come."""
    at = desk(request)
    found = await at.gate.read(at.bus.subscriptions.get, name)
    stands = {each.subscription: each for each in await at.gate.read(at.bus.store.checkpoints)}
    return reply(wire.subscription_json(found, stands.get(name)))


@routes.on("POST", "/subscriptions/{name}/pause", "admin", "Pause a subscription", answers=SUBSCRIPTION)
async def pause_subscription(request: Request, name: SubscriptionPath) -> Response:
    """Have nothing more claimed from it; what runs goes on."""
    await desk(request).gate.read(desk(request).bus.subscriptions.pause, name)
    return await get_subscription(request, name)


@routes.on("POST", "/subscriptions/{name}/resume", "admin", "Resume a subscription", answers=SUBSCRIPTION)
async def resume_subscription(request: Request, name: SubscriptionPath) -> Response:
    """Have it claimed from again."""
    await desk(request).gate.read(desk(request).bus.subscriptions.resume, name)
    return await get_subscription(request, name)


@routes.on(
    "POST",
    "/subscriptions/{name}/rewind",
    "admin",
    "Rewind a subscription",
    body=wire.Rewind,
    answers={200: answer("What comes again", OBJECT), 404: PROBLEM, 409: PROBLEM, 415: PROBLEM, 408: PROBLEM},
)
async def rewind_subscription(request: Request, name: SubscriptionPath) -> Response:
    """Have a queue or an ordered subscription go on after another position; `dry_run` changes nothing.

    A queue goes back only.
    """
    at, given = desk(request), await read_model(request, wire.Rewind)
    to: Any = (
        given.to
        if isinstance(given.to, int) or given.to in ("beginning", "now")
        else wire.moment_of(given.to, InvalidRequest)
    )
    done = await at.gate.read(at.bus.subscriptions.rewind, name, to, dry_run=given.dry_run)
    return reply({"dry_run": given.dry_run, **done._asdict()})


@routes.on("DELETE", "/subscriptions/{name}", "admin", "Delete a subscription", answers={200: COUNTED, 404: PROBLEM})
async def delete_subscription(request: Request, name: SubscriptionPath) -> Response:
    """Remove it and its unfinished deliveries, each recorded in the audit log."""
    at = desk(request)
    return reply({"count": await at.gate.read(at.bus.subscriptions.delete, name)})
