"""What a remote store asks of a server: many leases at once, being woken, and the model's values whole."""

import functools
from datetime import timedelta
from typing import Annotated, Any, Final, Literal

from fastapi import Query, Request, Response
from pydantic import TypeAdapter

from postbus.breaker import BreakerState
from postbus.errors import InvalidRequest
from postbus.http import asks, wire
from postbus.http.publishing import drafted, given_fields
from postbus.http.reading import read_json, read_model
from postbus.http.routing import LONGEST_WAIT, OBJECT, PROBLEM, Routes, answer, desk, ref, reply
from postbus.http.working import gone
from postbus.model import Stream
from postbus.retry import RetryPolicy
from postbus.store.contract import Claim
from postbus.store.remote import shapes

__all__ = ["SHAPES", "routes"]

routes: Final = Routes()

SHAPES: Final[dict[str, TypeAdapter[Any]]] = {
    "StoredEvent": shapes.EVENT,
    "StoredEvents": shapes.EVENTS,
    "StoredEventPage": shapes.EVENT_PAGE,
    "StoredLetterPage": shapes.LETTER_PAGE,
    "StoredLog": shapes.ENTRIES,
    "StoredClaims": shapes.CLAIMED,
    "StoredSettled": shapes.SETTLED,
    "StoredLeases": shapes.LEASES,
    "StoredWork": shapes.WORK,
    "StoredStats": shapes.STATS,
    "StoredHandlers": shapes.HANDLERS,
    "StoredCheckpoints": shapes.CHECKPOINTS,
    "StoredSpan": shapes.SPAN,
    "StoredStanding": shapes.STANDING,
    "StoredRewound": shapes.REWOUND,
    "StoredBreaker": shapes.BREAKER,
    "StoredBreakerChange": shapes.CHANGED,
}
"""What is answered here, by the names that OpenAPI knows it under."""
BODY: Final[dict[int, Any]] = {408: PROBLEM, 415: PROBLEM}
FOUND: Final[dict[int, Any]] = {404: PROBLEM, **BODY}


def stored(name: str, description: str) -> dict[str, Any]:
    """Return how OpenAPI tells of one of the model's values."""
    return answer(description, ref(name))


def whole(shape: TypeAdapter[Any], value: Any) -> Response:
    """Answer with one of the model's values."""
    return Response(shape.dump_json(value), media_type="application/json")


def number(name: str, description: str) -> dict[str, Any]:
    """Return how OpenAPI tells of a number."""
    schema = {"type": "object", "properties": {name: {"type": "integer"}}, "required": [name]}
    return answer(description, schema)


COUNT: Final = number("count", "How many")
NAMES: Final = answer("Their names", {"type": "array", "items": {"type": "string"}})


def policy_of(given: wire.Policy) -> RetryPolicy:
    """Return a policy; raise InvalidRequest for one that could not be carried out."""
    return RetryPolicy(**given.model_dump())


# ── publishing ───────────────────────────────────────────────────────────────────────────────────────────────────────

BATCH: Final[dict[str, Any]] = {
    "required": True,
    "content": {
        "application/json": {
            "schema": {
                "type": "object",
                "properties": {"events": {"type": "array", "items": ref("Publish"), "maxItems": shapes.MOST_PUBLISHED}},
                "required": ["events"],
            }
        }
    },
}


@routes.on(
    "POST",
    "/store/publish",
    "publish",
    "Publish for a remote store",
    body=BATCH,
    answers={200: stored("StoredEvents", "All are stored, durably"), **BODY},
)
async def store_publish(request: Request) -> Response:
    """Store up to 10,000 events in the order given: all of them, or none; those whose uid is known, not again."""
    at = desk(request)
    items = batch_of(await read_json(request, limit=shapes.MAX_BATCH, seconds=at.body_seconds))
    ready = await at.gate.read(lambda: drafted([given_fields(each) for each in items]))
    return whole(shapes.EVENTS, await at.gate.publish(ready) if ready else [])


def batch_of(value: Any) -> list[Any]:
    """Return the events of a batch; refuse what is none."""
    match value:
        case {"events": [*items], **rest} if not rest and len(items) <= shapes.MOST_PUBLISHED:
            return items
        case _:
            raise InvalidRequest(f"a batch is an object with a list `events` of up to {shapes.MOST_PUBLISHED:,}")


@routes.on("POST", "/store/known", "publish", "Which uids are known", body=asks.KnownUids, answers={200: NAMES, **BODY})
async def store_known(request: Request) -> Response:
    """Return which of these uids stand for an event already."""
    at, given = desk(request), await read_model(request, asks.KnownUids)
    return reply(sorted(await at.gate.read(at.bus.store.known, given.uids)))


# ── working ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@routes.on(
    "POST",
    "/events/claim",
    "work",
    "Claim many events",
    body=asks.ClaimMany,
    answers={200: stored("StoredClaims", "What is leased to this worker"), **FOUND},
)
async def claim_many(request: Request) -> Response:
    """Lease what is due to a worker, with all that one needs to know to go on by itself.

    `suspects` says that something waits for a worker who holds nothing else, `more` whether more may be due now,
    `next_due` when something falls due. The leases are nobody's but this worker's, whatever becomes of this server.
    """
    at, given = desk(request), await read_model(request, asks.ClaimMany)
    claim = Claim(
        subscription=given.subscription,
        worker_id=given.worker_id,
        owner="http",
        interests=asks.interests_of(given.interests),
        blocked=asks.interests_of(given.blocked),
        limit=given.limit,
        lease=at.lease if given.lease is None else timedelta(seconds=given.lease),
        policy=at.policy if given.retry is None else policy_of(given.retry),
        alone=given.alone,
        free=given.free,
    )
    return whole(shapes.CLAIMED, await at.gate.claim(claim, given.wait, functools.partial(gone, request)))


@routes.on(
    "POST",
    "/events/settle",
    "work",
    "Tell how many attempts ended",
    body=asks.SettleMany,
    answers={200: stored("StoredSettled", "One answer for each, in order"), **BODY},
)
async def settle_many(request: Request) -> Response:
    """Record how attempts ended: each is applied, repeated (it was recorded before), or lost (its lease has passed)."""
    at, given = desk(request), await read_model(request, asks.SettleMany)
    told = [each.settlement for each in given.settlements]
    return whole(shapes.SETTLED, await at.gate.read(at.bus.store.settle, told))


@routes.on(
    "POST",
    "/events/extend",
    "work",
    "Keep many leases",
    body=asks.ExtendMany,
    answers={200: stored("StoredLeases", "Those that are lost"), **BODY},
)
async def extend_many(request: Request) -> Response:
    """Let leases run anew, from now on; return the ones that have passed."""
    at, given = desk(request), await read_model(request, asks.ExtendMany)
    leases = [each.key for each in given.leases]
    lost = await at.gate.read(at.bus.store.extend, leases, timedelta(seconds=given.lease))
    return whole(shapes.LEASES, sorted(lost))


@routes.on(
    "POST",
    "/events/release",
    "work",
    "Give many events back",
    body=asks.ReleaseMany,
    answers={200: COUNT, **BODY},
)
async def release_many(request: Request) -> Response:
    """Hand events back, without burning an attempt; return how many were still held."""
    at, given = desk(request), await read_model(request, asks.ReleaseMany)
    leases, delay = [each.key for each in given.leases], timedelta(seconds=given.delay)
    return reply({"count": await at.gate.read(at.bus.store.release, leases, given.worker_id, delay)})


@routes.on(
    "POST",
    "/store/started",
    "work",
    "Record that work has begun",
    body=asks.LeaseStarted,
    answers={200: COUNT, 409: PROBLEM, **BODY},
)
async def store_started(request: Request) -> Response:
    """Write a STARTED row into the audit log, and change nothing else."""
    at, given = desk(request), await read_model(request, asks.LeaseStarted)
    await at.gate.read(at.bus.store.started, given.lease.key, given.worker_id)
    return reply({"count": 1})


@routes.on(
    "GET", "/wake", "work", "Be woken", answers={200: number("rings", "How often something may have changed by now")}
)
async def wake(
    request: Request,
    *,
    since: Annotated[
        int, Query(ge=-1, le=wire.LARGEST, description="`rings` of the last answer; -1: answer now.")
    ] = -1,
    wait: Annotated[float, Query(ge=0, le=LONGEST_WAIT, description="Seconds to wait at most.")] = 30.0,
) -> Response:
    """Answer as soon as something may have changed: then look for work. A hint, never a promise."""
    gate = desk(request).gate
    if gate.rings == since and not gate.draining:  # a server that was started anew counts anew
        await gate.rung(since, wait)
    return reply({"rings": gate.rings})


@routes.on(
    "POST",
    "/store/work",
    "work",
    "What is left to do",
    body=asks.WorkLeft,
    answers={200: stored("StoredWork", "Whether anything is due, leased or waiting for a retry"), **FOUND},
)
async def store_work(request: Request) -> Response:
    """Tell what some interests have left to do in a subscription."""
    at, given = desk(request), await read_model(request, asks.WorkLeft)
    wanted = asks.interests_of(given.interests)
    return whole(shapes.WORK, await at.gate.read(at.bus.store.work, given.subscription, wanted))


@routes.on(
    "POST",
    "/store/settled",
    "work",
    "Whether an event has ended",
    body=asks.EventSettled,
    answers={200: answer("`settled`", OBJECT), **BODY},
)
async def store_settled(request: Request) -> Response:
    """Tell whether an event is finished or dead in all of these subscriptions."""
    at, given = desk(request), await read_model(request, asks.EventSettled)
    return reply({"settled": await at.gate.read(at.bus.store.settled, given.event_id, given.subscriptions)})


@routes.on(
    "POST",
    "/store/subscriptions/widen",
    "work",
    "Let a subscription want more",
    body=asks.SubscriptionWiden,
    answers={200: COUNT, **FOUND},
)
async def store_widen(request: Request) -> Response:
    """Let a subscription want a handler's pattern and tags too; `count` is 1 if that was news."""
    at, given = desk(request), await read_model(request, asks.SubscriptionWiden)
    (wanted,) = asks.interests_of([asks.Wanted(pattern=given.pattern, tags=given.tags)])
    widen = at.bus.store.widen_subscription
    return reply({"count": int(await at.gate.read(widen, given.name, wanted.pattern, given.tags))})


@routes.on(
    "POST",
    "/store/handlers",
    "work",
    "Register handlers",
    body=asks.HandlersSeen,
    answers={200: COUNT, **BODY},
)
async def store_register(request: Request) -> Response:
    """Store, or see again, what a process handles: `postbus doctor` tells of events that nobody handles."""
    at, given = desk(request), await read_model(request, asks.HandlersSeen)
    now = await at.gate.read(at.bus.store.now)
    records = [each.record(now) for each in given.handlers]
    if records:
        await at.gate.read(at.bus.store.register_handlers, records)
    return reply({"count": len(records)})


@routes.on(
    "POST",
    "/store/handlers/forget",
    "work",
    "Forget handlers",
    body=asks.HandlersForgotten,
    answers={200: answer("Done", OBJECT), **BODY},
)
async def store_forget(request: Request) -> Response:
    """Remove a process's handlers, or the named ones of them."""
    at, given = desk(request), await read_model(request, asks.HandlersForgotten)
    await at.gate.read(at.bus.store.forget_handlers, given.owner, given.ids)
    return reply({})


@routes.on(
    "POST",
    "/store/breaker",
    "work",
    "How a breaker stands",
    body=asks.BreakerName,
    answers={200: stored("StoredBreaker", "Closed, if it was never heard of"), **BODY},
)
async def store_breaker(request: Request) -> Response:
    """Return how a breaker stands."""
    at, given = desk(request), await read_model(request, asks.BreakerName)
    return whole(shapes.BREAKER, await at.gate.read(at.bus.store.breaker, given.name))


@routes.on(
    "POST",
    "/store/breaker/change",
    "work",
    "Change a breaker",
    body=asks.BreakerChange,
    answers={200: stored("StoredBreakerChange", "Whether it was changed, and how it stands"), **BODY},
)
async def store_breaker_change(request: Request) -> Response:
    """Change a breaker if it stands as it was found; else change nothing, and tell how it stands."""
    at, given = desk(request), await read_model(request, asks.BreakerChange)
    found, wanted = given.found.state, given.wanted.state
    changed = False

    def change(state: BreakerState) -> BreakerState | None:
        nonlocal changed
        changed = state == found
        return wanted if changed else None

    state = await at.gate.read(at.bus.store.change_breaker, given.name, change)
    return whole(shapes.CHANGED, (changed, state))


# ── looking ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@routes.on(
    "POST",
    "/store/event",
    "read",
    "An event, whole",
    body=asks.EventStand,
    answers={200: stored("StoredEvent", "The event, as the model has it"), **FOUND},
)
async def store_event(request: Request) -> Response:
    """Return an event, and how it stands everywhere."""
    at, given = desk(request), await read_model(request, asks.EventStand)
    return whole(shapes.EVENT, await at.gate.read(at.bus.store.get, given.event_id, given.subscription))


@routes.on(
    "POST",
    "/store/logs",
    "read",
    "An event's audit rows",
    body=asks.EventLogs,
    answers={200: stored("StoredLog", "Oldest first"), **BODY},
)
async def store_logs(request: Request) -> Response:
    """Return all that happened to an event."""
    at, given = desk(request), await read_model(request, asks.EventLogs)
    return whole(shapes.ENTRIES, await at.gate.read(at.bus.store.logs, given.event_id))


@routes.on(
    "POST",
    "/store/events",
    "read",
    "A page of events, whole",
    body=asks.EventList,
    answers={200: stored("StoredEventPage", "Newest first"), **FOUND},
)
async def store_events(request: Request) -> Response:
    """Return events newest first."""
    at, given = desk(request), await read_model(request, asks.EventList)
    return whole(shapes.EVENT_PAGE, await at.gate.read(at.bus.store.list, **dict(given)))


@routes.on(
    "POST",
    "/store/dead",
    "read",
    "A page of dead letters, whole",
    body=asks.DeadList,
    answers={200: stored("StoredLetterPage", "The newest event first"), **FOUND},
)
async def store_dead(request: Request) -> Response:
    """Return dead letters with the error of each attempt."""
    at, given = desk(request), await read_model(request, asks.DeadList)
    page = await at.gate.read(
        at.bus.store.dead_letters, given.filter, limit=given.limit, offset=given.offset, after=given.after
    )
    return whole(shapes.LETTER_PAGE, page)


@routes.on("GET", "/store/stats", "read", "All figures", answers={200: stored("StoredStats", "The bus in figures")})
async def store_stats(request: Request) -> Response:
    """Return the bus in figures."""
    at = desk(request)
    return whole(shapes.STATS, await at.gate.read(at.bus.store.stats))


@routes.on("GET", "/store/span", "read", "What can be read", answers={200: stored("StoredSpan", "From where to where")})
async def store_span(request: Request, stream: Annotated[Literal["events", "audit"], Query()] = "events") -> Response:
    """Return what of the events, or of the audit log, can be read now."""
    at = desk(request)
    return whole(shapes.SPAN, await at.gate.read(at.bus.store.span, Stream(stream)))


@routes.on(
    "GET", "/store/handlers", "read", "All handlers", answers={200: stored("StoredHandlers", "Of all processes")}
)
async def store_handlers(request: Request) -> Response:
    """Return what all processes have registered."""
    at = desk(request)
    return whole(shapes.HANDLERS, await at.gate.read(at.bus.store.handlers))


@routes.on(
    "GET", "/store/checkpoints", "read", "All checkpoints", answers={200: stored("StoredCheckpoints", "By name")}
)
async def store_checkpoints(request: Request) -> Response:
    """Return how far ordered subscriptions and Spark streams have come."""
    at = desk(request)
    return whole(shapes.CHECKPOINTS, await at.gate.read(at.bus.store.checkpoints))


@routes.on("GET", "/store/owners", "read", "Who holds leases", answers={200: NAMES})
async def store_owners(request: Request) -> Response:
    """Return the nonces of the processes that hold leases; `http` stands for all who claimed through a server."""
    at = desk(request)
    return reply(sorted(await at.gate.read(at.bus.store.owners)))


@routes.on(
    "POST",
    "/store/position",
    "read",
    "How far a subscription has come",
    body=asks.SubscriptionName,
    answers={200: number("position", "All events up to this one are done, dead or parked"), **FOUND},
)
async def store_position(request: Request) -> Response:
    """Return how far an ordered subscription or a Spark stream has come."""
    at, given = desk(request), await read_model(request, asks.SubscriptionName)
    return reply({"position": await at.gate.read(at.bus.store.position, given.name)})


@routes.on(
    "POST",
    "/store/standing",
    "read",
    "What a subscription has left behind",
    body=asks.SubscriptionName,
    answers={200: stored("StoredStanding", "Event, key and state, by id"), **FOUND},
)
async def store_standing(request: Request) -> Response:
    """Return what an ordered subscription has left behind and not done yet."""
    at, given = desk(request), await read_model(request, asks.SubscriptionName)
    return whole(shapes.STANDING, [tuple(each) for each in await at.gate.read(at.bus.store.standing, given.name)])


# ── operating ────────────────────────────────────────────────────────────────────────────────────────────────────────


@routes.on(
    "POST",
    "/store/reset",
    "admin",
    "Put an orphan back, by name",
    body=asks.Reset,
    answers={200: COUNT, 409: PROBLEM, **FOUND},
)
async def store_reset(request: Request) -> Response:
    """Make a leased or scheduled event due now; whoever holds it has lost it."""
    at, given = desk(request), await read_model(request, asks.Reset)
    await at.gate.read(at.bus.store.reset, given.event_id, given.subscription, given.reason, given.actor)
    return reply({"count": 1})


@routes.on("POST", "/store/expire", "admin", "End expired leases", body=asks.Expire, answers={200: COUNT, **BODY})
async def store_expire(request: Request) -> Response:
    """End leases that have run out, as this server does by itself; return how many."""
    at, given = desk(request), await read_model(request, asks.Expire)
    return reply({"count": await at.gate.read(at.bus.store.expire, None, policy_of(given.retry), given.limit)})


@routes.on(
    "POST",
    "/store/dead/retry",
    "admin",
    "Retry dead letters, by name",
    body=asks.DeadChange,
    answers={200: COUNT, **FOUND},
)
async def store_retry_dead(request: Request) -> Response:
    """Give every dead letter that is meant all its attempts anew."""
    at, given = desk(request), await read_model(request, asks.DeadChange)
    return reply({"count": await at.gate.read(at.bus.store.retry_dead, given.filter, given.actor)})


@routes.on(
    "POST",
    "/store/dead/purge",
    "admin",
    "Purge dead letters, by name",
    body=asks.DeadChange,
    answers={200: COUNT, **FOUND},
)
async def store_purge_dead(request: Request) -> Response:
    """Remove every dead letter that is meant; the events themselves stay in the log."""
    at, given = desk(request), await read_model(request, asks.DeadChange)
    return reply({"count": await at.gate.read(at.bus.store.purge_dead, given.filter, given.actor)})


@routes.on(
    "POST",
    "/store/subscriptions/pause",
    "admin",
    "Pause or resume",
    body=asks.SubscriptionPause,
    answers={200: COUNT, **FOUND},
)
async def store_pause(request: Request) -> Response:
    """Stop, or let go on, what is claimed from a subscription."""
    at, given = desk(request), await read_model(request, asks.SubscriptionPause)
    await at.gate.read(at.bus.store.pause_subscription, given.name, given.paused)
    return reply({"count": 1})


@routes.on(
    "POST",
    "/store/subscriptions/delete",
    "admin",
    "Delete a subscription, by name",
    body=asks.SubscriptionDelete,
    answers={200: COUNT, **FOUND},
)
async def store_delete(request: Request) -> Response:
    """Remove a subscription and its unfinished deliveries; return how many."""
    at, given = desk(request), await read_model(request, asks.SubscriptionDelete)
    return reply({"count": await at.gate.read(at.bus.store.delete_subscription, given.name, given.actor)})


@routes.on(
    "POST",
    "/store/subscriptions/rewind",
    "admin",
    "Rewind a subscription, by name",
    body=asks.SubscriptionRewind,
    answers={200: stored("StoredRewound", "What comes again"), 409: PROBLEM, **FOUND},
)
async def store_rewind(request: Request) -> Response:
    """Have a queue or an ordered subscription go on after another position; `dry_run` changes nothing."""
    at, given = desk(request), await read_model(request, asks.SubscriptionRewind)
    to: Any = given.to if isinstance(given.to, int) or given.to in ("beginning", "now") else wire.moment_of(given.to)
    done = await at.gate.read(at.bus.store.rewind, given.name, to, given.actor, dry_run=given.dry_run)
    return whole(shapes.REWOUND, done)
