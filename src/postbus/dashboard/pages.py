"""The pages: each shows a part of the bus, and changes nothing."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import FileResponse, RedirectResponse, Response, StreamingResponse

from postbus.dashboard import views
from postbus.dashboard.room import Room, base_of, event_of, number_of
from postbus.doctor import leased
from postbus.errors import InvalidRequest, NotFound
from postbus.model import Event, Mode, Status, Stream, Subscription

__all__ = ["dead", "event", "events", "live", "overview", "pipeline", "report", "subscriptions", "system", "workers"]

PER_PAGE: Final = 50
WITHIN: Final = timedelta(seconds=0.2)
"""How long a page looks for events that match; what it has seen by then is shown, and how far it got."""
MOST_FAULTS: Final = 1_000
MOST_RUNNING: Final = 100
MOST_LOGS: Final = 500
TICK: Final = 1.0
QUIET: Final = 5.0
REPORT_CSP: Final = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; frame-ancestors 'none'; sandbox"


# ── overview ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def overview(room: Room, request: Request) -> Response:
    """Show the whole bus at a glance."""
    look = await room.board.read(room.pulse.look)
    crew = await room.board.read(views.processes, room.store)
    names = await room.board.read(room.store.subscriptions)
    told = [] if look is None else list(views.concerns(look.value.stats, crew, names))
    if room.pulse.trouble is not None:
        told.insert(0, views.Concern(f"the store does not answer: {room.pulse.trouble}", "system"))
    return room.shown(
        request,
        "overview.html",
        request.state.visitor,
        look=look and look.value,
        concerns=told,
        crew=crew,
        paused={each.name for each in names if each.paused},
        old=None if look is None else datetime.now(UTC) - look.at,
        title="Overview",
    )


# ── events ───────────────────────────────────────────────────────────────────────────────────────────────────────────


async def events(room: Room, request: Request) -> Response:
    """List events, newest first."""
    asked = {
        name: request.query_params.get(name, "").strip() for name in ("status", "type", "tag", "subscription", "number")
    }
    if (number := number_of(asked["number"])) is not None:
        return RedirectResponse(f"{base_of(request)}/events/{number}", 303)
    after = request.query_params.get("after")
    if after is not None and number_of(after) is None:
        raise InvalidRequest("`after` is the id of an event")
    if asked["status"] and asked["status"] not in tuple(Status):
        raise InvalidRequest(f"there is no status {asked['status']}")
    names = [each.name for each in await room.board.read(room.store.subscriptions)]
    if asked["subscription"] and asked["subscription"] not in names:
        raise NotFound(f"there is no subscription {asked['subscription']!r}")
    shown = asked["subscription"] or min(names, key=lambda each: each != "default", default="default")
    page = await room.board.read(
        room.store.list,
        status=Status(asked["status"]) if asked["status"] else None,
        type=asked["type"] or None,
        tags=[asked["tag"]] if asked["tag"] else [],
        subscription=shown,
        limit=PER_PAGE,
        offset=0,
        after=after,
        within=WITHIN,
    )
    kept = {name: value for name, value in asked.items() if value}
    return room.shown(
        request,
        "events.html",
        request.state.visitor,
        page=page,
        asked=asked,
        after=after,
        names=names,
        chosen=shown,
        statuses=list(Status),
        older=None if page.next is None else urlencode(kept | {"after": str(page.next)}),
        newest=urlencode(kept),
        title="Events",
    )


async def event(room: Room, request: Request) -> Response:
    """Show all there is to know of an event."""
    event_id = event_of(request)

    def gather() -> dict[str, Any]:
        found = room.store.get(event_id, request.query_params.get("subscription") or "default")
        whole = room.store.logs(event_id)
        logs = whole[-MOST_LOGS:]
        crew = views.processes(room.store)
        names = {each.name: each for each in room.store.subscriptions()}
        now = room.store.now()
        return {
            "event": found,
            "logs": logs,
            "left_out": len(whole) - len(logs),
            "lanes": views.lanes(found, logs, now),
            "deliveries": [
                (each, views.why_waiting(found, each, now, names.get(each.subscription), crew))
                for each in found.deliveries
            ],
            "payload": views.pretty(found.payload, mask=room.board.mask),
            "metadata": views.pretty(dict(found.metadata), mask=room.board.mask),
            "mask": room.board.mask,
            "gone": {each.worker_id for each in crew if each.gone},
        }

    return room.shown(
        request, "event.html", request.state.visitor, **await room.board.read(gather), title=f"Event {event_id}"
    )


# ── dead letters ─────────────────────────────────────────────────────────────────────────────────────────────────────


async def dead(room: Room, request: Request) -> Response:
    """Show dead letters by what they died of."""
    asked = views.asked_of(request.query_params)
    faults = await room.board.read(room.store.faults, MOST_FAULTS)
    found = sorted(views.matching(asked, faults), key=lambda each: each.died_at, reverse=True)
    groups = await room.board.read(views.grouped, views.matching(asked | {"fault": ""}, faults))
    return room.shown(
        request,
        "dead.html",
        request.state.visitor,
        asked=asked,
        query=urlencode({name: value for name, value in asked.items() if value}),
        groups=groups,
        found=found,
        shown=found[:PER_PAGE],
        capped=len(faults) >= MOST_FAULTS,
        most=MOST_FAULTS,
        types=sorted({each.type for each in faults}),
        names=sorted({each.subscription for each in faults}),
        title="Dead letters",
    )


# ── subscriptions ────────────────────────────────────────────────────────────────────────────────────────────────────


async def subscriptions(room: Room, request: Request) -> Response:
    """Show who reads the log, and how far they have come."""
    names = await room.board.read(room.store.subscriptions)
    stands = {each.subscription: each for each in await room.board.read(room.store.checkpoints)}
    spans = {
        stream: await room.board.read(room.store.span, stream) for stream in {each.stream for each in stands.values()}
    }
    look = await room.board.read(room.pulse.look)
    depth = {} if look is None else {each.name: each for each in look.value.stats.subscriptions}
    return room.shown(
        request,
        "subscriptions.html",
        request.state.visitor,
        names=names,
        stands=stands,
        spans=spans,
        depth=depth,
        look=look and look.value,
        now=await room.board.read(room.store.now),
        title="Subscriptions",
    )


# ── workers, pipeline, system ────────────────────────────────────────────────────────────────────────────────────────


def _running(room: Room, names: Sequence[Subscription]) -> list[Event]:
    """Return what is leased, as far as it is shown."""
    found: dict[int, Event] = {}
    for each in names:
        if each.mode is Mode.QUEUE:
            found |= {event.id: event for event in leased(room.store, each.name, MOST_RUNNING, WITHIN)}
    return list(found.values())


async def workers(room: Room, request: Request) -> Response:
    """Show who handles what."""

    def gather() -> dict[str, Any]:
        running = _running(room, room.store.subscriptions())
        crew = views.processes(room.store, running)
        known = {each.worker_id for each in crew}
        states = [(event, state) for event in running for state in event.deliveries if state.worker_id not in known]
        others = [(event, state) for event, state in states if state.status is Status.PROCESSING]
        return {"crew": crew, "others": others, "most": MOST_RUNNING}

    return room.shown(request, "workers.html", request.state.visitor, **await room.board.read(gather), title="Workers")


async def pipeline(room: Room, request: Request) -> Response:
    """Show what Spark reads and what lies in the lake."""
    names = {each.name for each in await room.board.read(room.store.subscriptions) if each.mode is Mode.SPARK}
    stands = [each for each in await room.board.read(room.store.checkpoints) if each.subscription in names]
    spans = {stream.value: await room.board.read(room.store.span, stream) for stream in Stream}
    lake = await room.board.read(room.board.lake) if room.board.lake is not None else None
    there = room.board.report is not None and room.board.report.is_file()
    return room.shown(
        request, "pipeline.html", request.state.visitor, stands=stands, spans=spans, lake=lake, report=there,
        title="Pipeline",
    )  # fmt: skip


async def report(room: Room, request: Request) -> Response:
    """Show the last report."""
    del request
    if room.board.report is None or not room.board.report.is_file():
        raise NotFound("no report has been made yet: postbus pipeline report --output html")
    return FileResponse(room.board.report, media_type="text/html", headers={"content-security-policy": REPORT_CSP})


async def system(room: Room, request: Request) -> Response:
    """Show what doctor finds."""
    look = await room.board.read(room.pulse.look)
    found = await room.board.read(room.findings.look)
    return room.shown(
        request,
        "system.html",
        request.state.visitor,
        findings=None if found is None else sorted(found.value, key=lambda each: each.ok),
        trouble=room.findings.trouble,
        old=None if found is None else datetime.now(UTC) - found.at,
        look=look and look.value,
        took=look and look.took,
        title="System",
    )


async def live(room: Room, request: Request) -> Response:
    """Say whenever there may be something new to see, at most once a second."""

    async def ticks() -> AsyncGenerator[bytes]:
        yield b"retry: 2000\n"
        while not room.board.draining():
            rings = room.board.rings()
            yield b"event: changed\ndata: 1\n\n"
            await asyncio.sleep(TICK)
            if room.board.rings() == rings:
                await room.board.rung(rings, QUIET)
            if await request.is_disconnected():
                return

    return StreamingResponse(ticks(), media_type="text/event-stream", headers={"cache-control": "no-store"})
