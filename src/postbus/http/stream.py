"""The log as server-sent events: in order, without gaps, from any position on."""

import time
from collections.abc import AsyncGenerator
from typing import Final, NamedTuple

from fastapi import Request
from fastapi.responses import StreamingResponse

from postbus.errors import Conflict
from postbus.http.buffers import HANG_UP
from postbus.http.gate import Gate
from postbus.http.reading import Refused
from postbus.http.wire import as_json, event_json
from postbus.model import Event, Stream
from postbus.pattern import Interest
from postbus.retry import RetryPolicy

__all__ = ["Pace", "stream"]

PAGE: Final = 200
PIECE: Final = 65_536
"""How many bytes are sent at a time: the server's buffer of a connection holds no more than two of these."""
_NO_POLICY: Final = RetryPolicy()


class Pace(NamedTuple):
    """How long a stream goes on."""

    limit: int | None
    """It ends after so many events."""
    wait: float
    """It ends when none came for so many seconds."""
    heartbeat: float
    """It says that it is still there after so many."""


async def stream(
    request: Request,
    gate: Gate,
    after: int | None,
    interests: tuple[Interest, ...],
    pace: Pace,
) -> StreamingResponse:
    """Answer with the events after a position; None: with what comes from now on."""
    span = await gate.read(gate.store.span, Stream.EVENTS)
    position = span.head if after is None else after
    if position < span.pruned:
        raise Refused("gone", 410, f"events up to {span.pruned:,} have been archived: read them from the lake")
    if position > span.head:
        raise Conflict(f"the log ends at {span.head:,}, before {position:,}: is this the log that was read before?")
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    return StreamingResponse(
        _events(request, gate, position, interests, pace), media_type="text/event-stream", headers=headers
    )


async def _events(
    request: Request, gate: Gate, position: int, interests: tuple[Interest, ...], pace: Pace
) -> AsyncGenerator[bytes]:
    """Yield what there is, then what comes. Whoever reads slowly is read for slowly: a page at a time."""
    left, size = pace.limit, PAGE
    hang_up = request.scope.get("state", {}).get(HANG_UP)
    spoken = heard = time.monotonic()
    yield b"retry: 1000\n"  # a line of the first event's block: one without data would be taken for an event
    while not gate.draining:
        rings = gate.rings
        ahead = await gate.read(gate.store.read_on, position, size, interests)
        wanted = ahead.events[:left]
        now = time.monotonic()
        position, more = ahead.reached, ahead.more
        heard = now if ahead.events else heard
        size = min(PAGE, 2 * ahead.looked) if more else PAGE
        left = None if left is None else left - len(wanted)
        if wanted or now - spoken >= pace.heartbeat:
            told = b"".join(_framed(each, ahead.damaged.get(each.id)) for each in wanted) or b": still here\n"
            del ahead, wanted
            with gate.streams.held(len(told), hang_up) as page:
                for start in range(0, len(told), PIECE):
                    yield told[start : start + PIECE]
                    page.taken_at = time.monotonic()
            del told
            spoken = now
        if left == 0:
            return
        if not more:
            if now - heard >= pace.wait:
                return
            await gate.rung(rings, min(spoken + pace.heartbeat, heard + pace.wait) - now)
        if await request.is_disconnected():
            return


def _framed(event: Event, damage: str | None) -> bytes:
    if damage is not None:
        return b"id: %d\nevent: damaged\ndata: %s\n\n" % (event.id, as_json({"id": event.id, "error": damage}))
    told = event_json(event, _NO_POLICY)
    for name in ("status", "retry_count", "max_retries", "next_retry_at", "updated_at"):
        del told[name]  # a stream tells of the event, not of what became of it
    return b"id: %d\ndata: %s\n\n" % (event.id, as_json(told))
