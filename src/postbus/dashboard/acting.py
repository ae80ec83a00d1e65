"""What the dashboard's buttons do: nothing without the scope admin, all of it in the audit log with who did it."""

from collections.abc import Sequence
from datetime import datetime
from functools import partial
from typing import Final
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import Response

from postbus.dashboard import views
from postbus.dashboard.room import Room, back, event_of, form, number_of
from postbus.errors import InvalidRequest, NotFound, PostbusError
from postbus.store.contract import DeadFilter
from postbus.subscriptions import Subscriptions

__all__ = ["act_on_dead", "act_on_subscription", "confirm_dead", "kill", "preview_rewind", "reset"]

DONE: Final = {"retry": "retried", "discard": "discarded"}


async def reset(room: Room, request: Request) -> Response:
    """Take an event away from a worker that does not come back."""
    given, event_id = await form(request), event_of(request)
    name = given.get("subscription", ["default"])[0]
    await room.board.read(room.store.reset, event_id, name, "reset in the dashboard", request.state.visitor.name)
    return back(request, f"events/{event_id}", "reset")


def _meant(letters: Sequence[str], asked: dict[str, str], before: datetime | None) -> list[DeadFilter]:
    """Return which dead letters are meant: those that were ticked, or all that match and had died by then."""
    if letters:
        pairs = [(number_of(number), name) for number, _, name in (each.partition(":") for each in letters)]
        if not all(number is not None and name for number, name in pairs):
            raise InvalidRequest("a dead letter is named by its event and subscription: 17:default")
        return [DeadFilter(event_id=number, subscription=name) for number, name in pairs]
    subscription, kind, fault = (asked[name] or None for name in ("subscription", "type", "fault"))
    return [DeadFilter(subscription=subscription, type=kind, before=before, by="died_at", fault=fault)]


def _count(room: Room, meant: Sequence[DeadFilter]) -> tuple[int, bool]:
    """Return how many are meant, and whether there are more than were counted."""
    if len(meant) != 1:
        return len(meant), False
    page = room.store.dead_letters(meant[0], limit=1, offset=0, after=None)
    return page.total, page.total_capped


def _change(room: Room, act: str, meant: Sequence[DeadFilter], who: str) -> int:
    """Retry or discard them; return how many. An error on the way says how many were changed before it."""
    verb = room.store.retry_dead if act == "retry" else room.store.purge_dead
    done: dict[DeadFilter, int] = {}
    try:
        for each in meant:
            verb(each, who, partial(done.__setitem__, each))
    except PostbusError as error:
        if not any(done.values()):
            raise
        raise type(error)(f"{sum(done.values()):,} were {DONE[act]}, then it ended: {error}") from error
    return sum(done.values())


async def confirm_dead(room: Room, request: Request) -> Response:
    """Say what would be done, with the count."""
    act = request.query_params.get("act", "")
    if act not in DONE:
        raise InvalidRequest("dead letters are retried or discarded")
    letters, asked = request.query_params.getlist("letter"), views.asked_of(request.query_params)
    if "selected" in request.query_params and not letters:
        raise InvalidRequest("Nothing is selected.")
    before = await room.board.read(room.store.now)
    count, more = await room.board.read(_count, room, _meant(letters, asked, before))
    return room.shown(
        request,
        "confirm_dead.html",
        request.state.visitor,
        act=act,
        letters=letters,
        asked=asked,
        count=count,
        more=more,
        before=before.isoformat(),
        query=urlencode({name: value for name, value in asked.items() if value}),
        title="Are you sure?",
    )


async def act_on_dead(room: Room, request: Request) -> Response:
    """Retry or discard dead letters; those that died since they were counted are left alone."""
    given = await form(request)
    asked = views.asked_of({name: values[0] for name, values in given.items()})
    act = given.get("act", [""])[0]
    if act not in DONE:
        raise InvalidRequest("dead letters are retried or discarded")
    letters = given.get("letter", [])
    if not letters and "all" not in given:
        raise InvalidRequest("Nothing is selected.")
    before = None if letters else _moment(given.get("before", [""])[0])
    count = await room.board.read(_change, room, act, _meant(letters, asked, before), request.state.visitor.name)
    kept = urlencode({name: value for name, value in asked.items() if value and name != "fault"})
    return back(request, f"dead?{kept}" if kept else "dead", DONE[act], count)


def _moment(text: str) -> datetime:
    """Read a time."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidRequest(f"{text!r:.40} is no time, which would be 2026-11-16T08:00Z") from None
    if moment.tzinfo is None:
        raise InvalidRequest("say the time with its zone: 2026-11-16T08:00Z")
    return moment


def _to(text: str) -> int | datetime | str:
    """Read where a subscription is to go on from."""
    text = text.strip()
    if text in ("beginning", "now"):
        return text
    if (number := number_of(text)) is not None:
        return number
    return _moment(text)


async def preview_rewind(room: Room, request: Request) -> Response:
    """Say what a rewind would lead to."""
    name, to = request.path_params["name"], request.query_params.get("to", "")
    told = await room.board.read(room.store.rewind, name, _to(to), request.state.visitor.name, dry_run=True)
    return room.shown(
        request,
        "confirm_rewind.html",
        request.state.visitor,
        name=name,
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
            deed = "skipped" if done.skipped else "rewound"
            return back(request, "subscriptions", deed, done.skipped or done.again)
        case _:
            raise NotFound("a subscription is paused, resumed or rewound")


async def kill(room: Room, request: Request) -> Response:
    """Kill a worker of the demo."""
    if room.board.kill is None:
        raise NotFound("this is no demo")
    await room.board.read(room.board.kill)
    return back(request, "", "killed")
