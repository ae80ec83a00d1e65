"""What the dashboard's buttons do: nothing without the scope admin, all of it in the audit log with who did it."""

from collections.abc import Sequence
from datetime import datetime
from typing import Final
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import Response

from postbus.dashboard import views
from postbus.dashboard.room import Room, back, event_of, form, number_of
from postbus.errors import InvalidRequest, NotFound
from postbus.store.contract import DeadFilter
from postbus.subscriptions import Subscriptions

__all__ = ["act_on_dead", "act_on_subscription", "confirm_dead", "kill", "preview_rewind", "reset"]

MOST_ACTED_ON: Final = 100_000


async def reset(room: Room, request: Request) -> Response:
    """Take an event away from a worker that does not come back."""
    given, event_id = await form(request), event_of(request)
    name = given.get("subscription", ["default"])[0]
    await room.board.read(room.store.reset, event_id, name, "reset in the dashboard", request.state.visitor.name)
    return back(request, f"events/{event_id}", "reset")


def _meant(room: Room, letters: Sequence[str], asked: dict[str, str]) -> list[DeadFilter]:
    """Return which dead letters are meant: those that were ticked, or all that match."""
    if letters:
        pairs = [(number_of(number), name) for number, _, name in (each.partition(":") for each in letters)]
        if not all(number is not None and name for number, name in pairs):
            raise InvalidRequest("a dead letter is named by its event and subscription: 17:default")
        return [DeadFilter(event_id=number, subscription=name) for number, name in pairs]
    if not asked["fault"]:
        return [DeadFilter(subscription=asked["subscription"] or None, type=asked["type"] or None)]
    found = views.matching(asked, room.store.faults(MOST_ACTED_ON))
    return [DeadFilter(event_id=each.event_id, subscription=each.subscription) for each in found]


def _count(room: Room, letters: Sequence[str], asked: dict[str, str]) -> tuple[int, bool]:
    """Return how many are meant, and whether there are more than were counted."""
    meant = _meant(room, letters, asked)
    if len(meant) != 1:
        return len(meant), False
    page = room.store.dead_letters(meant[0], limit=1, offset=0, after=None)
    return page.total, page.total_capped


async def confirm_dead(room: Room, request: Request) -> Response:
    """Say what would be done, with the count."""
    act = request.query_params.get("act", "")
    if act not in ("retry", "discard"):
        raise InvalidRequest("dead letters are retried or discarded")
    letters, asked = request.query_params.getlist("letter"), views.asked_of(request.query_params)
    if "selected" in request.query_params and not letters:
        raise InvalidRequest("Nothing is selected.")
    count, more = await room.board.read(_count, room, letters, asked)
    return room.shown(
        request,
        "confirm_dead.html",
        request.state.visitor,
        act=act,
        letters=letters,
        asked=asked,
        count=count,
        more=more,
        query=urlencode({name: value for name, value in asked.items() if value}),
        title="Are you sure?",
    )


async def act_on_dead(room: Room, request: Request) -> Response:
    """Retry or discard dead letters; those that came since are left alone, unless they match too."""
    given = await form(request)
    asked = views.asked_of({name: values[0] for name, values in given.items()})
    act = given.get("act", [""])[0]
    if act not in ("retry", "discard"):
        raise InvalidRequest("dead letters are retried or discarded")

    letters = given.get("letter", [])
    if not letters and "all" not in given:
        raise InvalidRequest("Nothing is selected.")

    def change() -> int:
        verb = room.store.retry_dead if act == "retry" else room.store.purge_dead
        return sum(verb(each, request.state.visitor.name) for each in _meant(room, letters, asked))

    count = await room.board.read(change)
    kept = urlencode({name: value for name, value in asked.items() if value and name != "fault"})
    return back(request, f"dead?{kept}" if kept else "dead", "retried" if act == "retry" else "discarded", count)


def _to(text: str) -> int | datetime | str:
    """Read where a subscription is to go on from."""
    text = text.strip()
    if text in ("beginning", "now"):
        return text
    if (number := number_of(text)) is not None:
        return number
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
