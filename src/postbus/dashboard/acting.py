"""What the dashboard's buttons do: nothing without the scope admin, all of it in the audit log with who did it."""

from collections.abc import Sequence
from datetime import datetime
from typing import Final
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import Response

from postbus.dashboard import views
from postbus.dashboard.room import LARGEST_ID, Room, back, form
from postbus.errors import InvalidRequest, NotFound
from postbus.store.contract import DeadFilter
from postbus.subscriptions import Subscriptions

__all__ = ["act_on_dead", "act_on_subscription", "confirm_dead", "kill", "preview_rewind", "reset"]

MOST_ACTED_ON: Final = 100_000


async def reset(room: Room, request: Request) -> Response:
    """Take an event away from a worker that does not come back."""
    given, event_id = await form(request), request.path_params["event_id"]
    name = given.get("subscription", ["default"])[0]
    await room.board.read(room.store.reset, event_id, name, "reset in the dashboard", request.state.visitor.name)
    return back(request, f"events/{event_id}", "reset")


def _chosen(room: Room, letters: Sequence[str], asked: dict[str, str]) -> list[tuple[int, str]]:
    """Return which dead letters are meant: those that were ticked, or all that match."""
    if letters:
        pairs = [each.partition(":") for each in letters]
        if not all(number.isdecimal() and name for number, _, name in pairs):
            raise InvalidRequest("a dead letter is named by its event and subscription: 17:default")
        return [(int(number), name) for number, _, name in pairs]
    return [(each.event_id, each.subscription) for each in views.matching(asked, room.store.faults(MOST_ACTED_ON))]


async def confirm_dead(room: Room, request: Request) -> Response:
    """Say what would be done, with the count."""
    act = request.query_params.get("act", "")
    if act not in ("retry", "discard"):
        raise InvalidRequest("dead letters are retried or discarded")
    letters, asked = request.query_params.getlist("letter"), views.asked_of(request.query_params)
    chosen = await room.board.read(_chosen, room, letters, asked)
    return room.shown(
        request, "confirm_dead.html", request.state.visitor, act=act, letters=letters, asked=asked, count=len(chosen),
        query=urlencode({name: value for name, value in asked.items() if value}), title="Are you sure?",
    )  # fmt: skip


async def act_on_dead(room: Room, request: Request) -> Response:
    """Retry or discard dead letters; those that came since are left alone, unless they match too."""
    given = await form(request)
    asked = views.asked_of({name: values[0] for name, values in given.items()})
    act = given.get("act", [""])[0]
    if act not in ("retry", "discard"):
        raise InvalidRequest("dead letters are retried or discarded")

    def change() -> int:
        verb = room.store.retry_dead if act == "retry" else room.store.purge_dead
        actor = request.state.visitor.name
        chosen = _chosen(room, given.get("letter", []), asked)
        return sum(verb(DeadFilter(event_id=event_id, subscription=name), actor) for event_id, name in chosen)

    count = await room.board.read(change)
    kept = urlencode({name: value for name, value in asked.items() if value and name != "fault"})
    return back(request, f"dead?{kept}" if kept else "dead", "retried" if act == "retry" else "discarded", count)


def _to(text: str) -> int | datetime | str:
    """Read where a subscription is to go on from."""
    text = text.strip()
    if text in ("beginning", "now"):
        return text
    if text.isdecimal() and int(text) <= LARGEST_ID:
        return int(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidRequest("rewind to an id, a time such as 2026-11-16T08:00Z, `beginning` or `now`") from None
    if moment.tzinfo is None:
        raise InvalidRequest("say the time with its zone: 2026-11-16T08:00Z")
    return moment


async def preview_rewind(room: Room, request: Request) -> Response:
    """Say what a rewind would lead to."""
    name, to = request.path_params["name"], request.query_params.get("to", "")
    told = await room.board.read(room.store.rewind, name, _to(to), request.state.visitor.name, dry_run=True)
    return room.shown(
        request,
        "confirm_rewind.html",
        request.state.visitor,
        name=name,
        to=to.strip(),
        told=told,
        title="Are you sure?",
    )


async def act_on_subscription(room: Room, request: Request) -> Response:
    """Pause, resume or rewind."""
    name, act = request.path_params["name"], request.path_params["act"]
    ours = Subscriptions(room.store, request.state.visitor.name)
    match act:
        case "pause":
            await room.board.read(ours.pause, name)
            return back(request, "subscriptions", "paused")
        case "resume":
            await room.board.read(ours.resume, name)
            return back(request, "subscriptions", "resumed")
        case "rewind":
            given = await form(request)
            done = await room.board.read(ours.rewind, name, _to(given.get("to", [""])[0]))
            return back(request, "subscriptions", "rewound", done.again)
        case _:
            raise NotFound("a subscription is paused, resumed or rewound")


async def kill(room: Room, request: Request) -> Response:
    """Kill a worker of the demo."""
    if room.board.kill is None:
        raise NotFound("this is no demo")
    await room.board.read(room.board.kill)
    return back(request, "", "killed")
