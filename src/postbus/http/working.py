"""Working: claim, complete, fail, start, extend, release, reset."""

import functools
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final

from fastapi import Query, Request, Response

from postbus.errors import InvalidRequest, LeaseLost, MaxRetriesExceeded
from postbus.http import wire
from postbus.http.reading import read_model
from postbus.http.routing import (
    LONGEST_WAIT,
    MOST_CLAIMED,
    PROBLEM,
    Desk,
    EventId,
    Routes,
    Subscription,
    Tags,
    Types,
    answer,
    desk,
    interests_of,
    named,
    ref,
    reply,
)
from postbus.model import Action, Delivery, Lease, Status
from postbus.store.contract import Claim, Report

__all__ = ["routes"]

routes: Final = Routes()


@routes.on(
    "GET",
    "/events/subscribe",
    "work",
    "Claim the next event",
    answers={200: answer("Leased to this worker", ref("Claimed")), 204: answer("Nothing is due"), 404: PROBLEM},
)
async def subscribe(
    request: Request,
    *,
    worker_id: Annotated[str, Query(min_length=1, max_length=255, description="Who works: `{hostname}:{pid}`.")],
    tags: Tags = None,
    types: Types = None,
    subscription: Subscription = "default",
    wait: Annotated[float, Query(ge=0, le=LONGEST_WAIT, description="Seconds to wait for one.")] = 0.0,
    limit: Annotated[int | None, Query(ge=1, le=MOST_CLAIMED, description="Up to so many, as `{events: […]}`.")] = None,
    lease: Annotated[float | None, Query(ge=0.1, le=31_536_000, description="Seconds it is this worker's own.")] = None,
) -> Response:
    """Lease the next due event with any of the tags to this worker; with `wait`, as soon as there is one.

    It is this worker's for the lease (300 s unless the subscription or `lease=` says otherwise), and then goes to
    another. `epoch` names this claim: send it along with complete, fail, extend and release, so that a late answer
    cannot touch another's attempt.
    """
    at = desk(request)
    if tags is None and types is None:
        raise InvalidRequest("say tags=a,b (any of them will do) or types=order.* (types=* for any)")
    if tags is not None and not named(tags):
        raise InvalidRequest("tags are named such as a,b")
    claim = Claim(
        subscription=subscription,
        worker_id=worker_id,
        owner="http",
        interests=interests_of(tags, types),
        limit=limit or 1,
        lease=at.lease if lease is None else timedelta(seconds=lease),
        policy=at.policy,
    )
    found = (await at.gate.claim(claim, wait, functools.partial(gone, request))).deliveries
    if not found:
        return Response(status_code=204)
    told = [claimed_json(each) for each in found]
    return reply(told[0] if limit is None else {"events": told})


def claimed_json(delivery: Delivery) -> dict[str, Any]:
    """Return a delivery that was just leased."""
    left = delivery.lease_until - (delivery.event.updated_at or datetime.now(UTC))
    return wire.delivery_json(delivery, left)


async def gone(request: Request) -> None:
    """Return when whoever asked has hung up."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


@routes.on(
    "POST",
    "/events/{event_id}/complete",
    "work",
    "Tell that an attempt worked",
    body=wire.Completed,
    answers={
        200: answer("Recorded, now or before", ref("Entry")),
        404: PROBLEM,
        409: PROBLEM,
        415: PROBLEM,
        408: PROBLEM,
    },
)
async def complete(request: Request, event_id: EventId) -> Response:
    """Record that this worker is done with the event. Again: the same answer, and nothing is written."""
    at, given = desk(request), await read_model(request, wire.Completed)
    reported = await at.gate.report(
        Report(
            event_id,
            given.subscription,
            given.worker_id,
            at.policy,
            epoch=given.epoch,
            errors=tuple(wire.attempt_error(each, given.worker_id) for each in given.errors),
            status_code=given.status_code,
            execution_time_ms=given.execution_time_ms,
        )
    )
    return reply(wire.reported_json(reported))


@routes.on(
    "POST",
    "/events/{event_id}/fail",
    "work",
    "Tell that an attempt failed",
    body=wire.Failed,
    answers={
        200: answer("Recorded, now or before", ref("Failure")),
        400: answer(
            "That was the last attempt: the event is a dead letter", ref("Problem"), "application/problem+json"
        ),
        404: PROBLEM,
        409: PROBLEM,
        415: PROBLEM,
        408: PROBLEM,
    },
)
async def fail(request: Request, event_id: EventId) -> Response:
    """Record that this attempt failed; the event is tried again by policy, or, none left, is a dead letter.

    That last failure is answered with 400 once; asked again, with 200 and the recorded entry.
    """
    at, given = desk(request), await read_model(request, wire.Failed)
    reported = await at.gate.report(
        Report(
            event_id,
            given.subscription,
            given.worker_id,
            at.policy,
            epoch=given.epoch,
            failed=True,
            errors=(wire.attempt_error(given, given.worker_id),),
            max_retries=given.max_retries,
            delay=None if given.delay is None else timedelta(seconds=given.delay),
            final=not given.retry,
            status_code=given.status_code,
            execution_time_ms=given.execution_time_ms,
        )
    )
    if reported.entry.status is Status.FAILED and not reported.repeated and given.retry:
        error = MaxRetriesExceeded(f"event {event_id} has failed for the last time, and is a dead letter now")
        counts = {"retry_count": reported.retry_count, "max_retries": reported.max_retries}
        told = {"error": "Max retries exceeded", **counts, **wire.problem_of(error)}
        return reply(told, 400, "application/problem+json")
    return reply(wire.failure_json(reported))


async def held(at: Desk, event_id: int, given: wire.Holding) -> Lease:
    """Return the lease that is meant: without an epoch, the last that this worker had on the event."""
    if given.epoch is not None:
        return Lease(event_id, given.subscription, given.epoch)
    entries = await at.gate.read(at.bus.store.logs, event_id)
    for entry in reversed(entries):
        picked = entry.action is Action.PICKED and entry.subscription == given.subscription
        if picked and entry.worker_id == given.worker_id and entry.epoch is not None:
            return Lease(event_id, given.subscription, entry.epoch)
    if not entries:
        await at.gate.read(at.bus.store.get, event_id, given.subscription)
    raise lost(event_id, given)


def lost(event_id: int, given: wire.Holding) -> LeaseLost:
    """Return why nothing was done."""
    return LeaseLost(f"{given.worker_id} holds no lease on event {event_id} in {given.subscription!r}")


HELD: Final[dict[int, Any]] = {404: PROBLEM, 409: PROBLEM, 415: PROBLEM, 408: PROBLEM}


@routes.on(
    "POST",
    "/events/{event_id}/start",
    "work",
    "Tell that work has begun",
    body=wire.Extending,
    answers={200: answer("Recorded, and the lease runs anew", ref("Held")), **HELD},
)
async def start(request: Request, event_id: EventId) -> Response:
    """Write a STARTED row into the audit log, and let the lease run anew."""
    at, given = desk(request), await read_model(request, wire.Extending)
    lease = await held(at, event_id, given)
    await at.gate.read(at.bus.store.started, lease, given.worker_id)
    return await run_on(at, lease, given)


@routes.on(
    "POST",
    "/events/{event_id}/extend",
    "work",
    "Keep the lease",
    body=wire.Extending,
    answers={200: answer("The lease runs anew", ref("Held")), **HELD},
)
async def extend(request: Request, event_id: EventId) -> Response:
    """Let the lease run anew, from now on."""
    at, given = desk(request), await read_model(request, wire.Extending)
    return await run_on(at, await held(at, event_id, given), given)


async def run_on(at: Desk, lease: Lease, given: wire.Extending) -> Response:
    """Let a lease run anew; raise LeaseLost."""
    length = at.lease if given.lease is None else timedelta(seconds=given.lease)
    if lease in await at.gate.read(at.bus.store.extend, [lease], length):
        raise lost(lease.event_id, given)
    own = (await at.gate.read(at.bus.subscriptions.get, lease.subscription)).lease
    seconds = (own or length).total_seconds()
    return reply(
        {"event_id": lease.event_id, "worker_id": given.worker_id, "epoch": lease.epoch, "lease_seconds": seconds}
    )


@routes.on(
    "POST",
    "/events/{event_id}/release",
    "work",
    "Give the event back",
    body=wire.Releasing,
    answers={200: answer("It is due again", ref("Held")), **HELD},
)
async def release(request: Request, event_id: EventId) -> Response:
    """Hand the event back, without burning an attempt."""
    at, given = desk(request), await read_model(request, wire.Releasing)
    lease = await held(at, event_id, given)
    if not await at.gate.read(at.bus.store.release, [lease], given.worker_id, timedelta(seconds=given.delay)):
        raise lost(event_id, given)
    return reply({"event_id": event_id, "worker_id": given.worker_id, "epoch": lease.epoch, "lease_seconds": 0.0})


@routes.on(
    "POST",
    "/events/{event_id}/reset",
    "admin",
    "Put an orphan back",
    answers={200: answer("It is due now", ref("Event")), 404: PROBLEM, 409: PROBLEM},
)
async def reset(
    request: Request,
    *,
    event_id: EventId,
    reason: Annotated[str, Query(min_length=1, max_length=1_000)] = "reset by hand",
    subscription: Subscription = "default",
) -> Response:
    """Make a leased or scheduled event due now; whoever holds it has lost it. Attempts are kept."""
    at = desk(request)
    await at.gate.read(at.bus.reset, event_id, reason, subscription)
    event = await at.gate.read(at.bus.store.get, event_id, subscription)
    return reply(wire.event_json(event, await at.policy_of(subscription)))
