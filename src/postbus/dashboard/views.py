"""What pages show of the bus, worked out: what needs attention, why an event waits, its history as a picture."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple, cast
from urllib.parse import urlencode

import orjson

from postbus.fingerprint import cause
from postbus.model import (
    Action,
    DeliveryState,
    Event,
    HandlerRecord,
    LogEntry,
    Stats,
    Status,
    Subscription,
)
from postbus.pattern import Interest
from postbus.store.contract import Fault, Log
from postbus.telling import age, many

__all__ = [
    "NONE",
    "Bar",
    "Concern",
    "Group",
    "Lane",
    "Process",
    "asked_of",
    "concerns",
    "grouped",
    "lanes",
    "masked",
    "matching",
    "pretty",
    "processes",
    "to",
    "why_waiting",
]

OLD: Final = timedelta(minutes=5)
MASK: Final = "•••"
NONE: Final = "\u2013"
ENDS: Final = {
    Action.COMPLETED: "done",
    Action.COMPLETED_WITH_ERRORS: "partly",
    Action.FAILED: "failed",
    Action.EXPIRED: "failed",
    Action.RELEASED: "note",
}


class Concern(NamedTuple):
    """Something to look at, and the page that shows it."""

    text: str
    link: str
    grave: bool = True


def concerns(stats: Stats, crew: Sequence["Process"], subscriptions: Sequence[Subscription]) -> Iterator[Concern]:
    """Tell what needs attention, the worst first."""
    for each in stats.checkpoints:
        if each.stopped is not None:
            yield Concern(f"{each.subscription} has stopped: {each.stopped.splitlines()[0]}", "subscriptions")
    yield from _left(stats)
    for each in stats.subscriptions:
        if each.oldest_age is not None and each.oldest_age > OLD:
            link = to("events", status="PENDING", subscription=each.name)
            yield Concern(f"the oldest in {each.name} waits for {age(each.oldest_age)}", link)
    for where, count in stats.unhandled.items():
        name, _, kind = where.partition("/")
        link = to("events", status="PENDING", subscription=name, type=kind)
        yield Concern(f"nobody handles {kind} in {name}: {many(count, 'event')} waiting", link)
    for each in crew:
        if each.gone:
            yield Concern(f"worker {each.worker_id} is gone, heard of {age(each.silent)} ago", "workers")
    yield from _slow(stats, subscriptions)


def _left(stats: Stats) -> Iterator[Concern]:
    """Tell of dead letters, and of what waits behind them, in queues, followers and Spark streams alike."""
    for name, count in stats.dead.items():
        yield Concern(f"{many(count, 'dead letter')} in {name}", to("dead", subscription=name))
    for name, count in stats.parked.items():
        link = to("events", status="PENDING", subscription=name)
        yield Concern(f"{many(count, 'event')} parked behind a dead letter in {name}", link)


def _slow(stats: Stats, subscriptions: Sequence[Subscription]) -> Iterator[Concern]:
    for each in stats.checkpoints:
        if each.waiting is not None and each.waiting > OLD:
            yield Concern(f"{each.subscription} is {many(each.lag, 'position')} behind", "subscriptions", grave=False)
    for each in subscriptions:
        if each.paused:
            yield Concern(f"{each.name} is paused", "subscriptions", grave=False)
    for each in stats.holders:
        yield Concern(f"followers are {each.told}", "system", grave=False)


def to(page: str, **query: str) -> str:
    """Return where a page is, below the dashboard's own address."""
    return f"{page}?{urlencode(query)}"


# ── workers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Process:
    """A process that handles, as far as is known."""

    worker_id: str
    handlers: tuple[HandlerRecord, ...]
    silent: timedelta
    gone: bool
    running: tuple[Event, ...] = ()
    """What it has leased, as far as was looked."""


def processes(store: Log, running: Iterable[Event] = ()) -> tuple[Process, ...]:
    """Return the processes that have registered handlers, by name."""
    now = store.now()
    held: dict[str, list[Event]] = {}
    for event in running:
        for state in event.deliveries:
            if state.status is Status.PROCESSING and state.worker_id is not None:
                held.setdefault(state.worker_id, []).append(event)
    found: dict[tuple[str, str], list[HandlerRecord]] = {}
    for each in store.handlers():
        found.setdefault((each.worker_id, each.owner), []).append(each)
    return tuple(
        Process(
            worker_id,
            tuple(handlers),
            now - max(each.seen_at for each in handlers),
            all(each.gone for each in handlers),
            tuple(held.get(worker_id, ())),
        )
        for (worker_id, _), handlers in sorted(found.items())
    )


# ── why an event waits ───────────────────────────────────────────────────────────────────────────────────────────────


def why_waiting(  # noqa: PLR0911  a table
    event: Event, state: DeliveryState, now: datetime, subscription: Subscription | None, crew: Sequence[Process]
) -> str | None:
    """Say in a sentence what a delivery waits for; None if it has ended."""
    match state.status:
        case Status.PROCESSING if state.lease_expired:
            return f"{state.worker_id} has not been heard of in time: whoever claims next takes it over"
        case Status.PROCESSING:
            left = "" if state.lease_until is None else f"; its lease runs for {age(state.lease_until - now)} more"
            return f"{state.worker_id} is working on it{left}"
        case Status.PENDING if state.parked:
            return (
                f"an earlier event of its key ({event.key}) is a dead letter: it comes after that was retried or purged"
            )
        case Status.PENDING if state.next_retry_at is not None:
            what = f"attempt {state.attempt + 1}" if state.attempt else "its time"
            return f"{what} comes in {age(state.next_retry_at - now)}"
        case Status.PENDING if subscription is not None and subscription.paused:
            return f"{state.subscription} is paused"
        case Status.PENDING:
            return _who_could(event, state, crew)
        case _:
            return None


def _who_could(event: Event, state: DeliveryState, crew: Sequence[Process]) -> str:
    able = [
        each.worker_id
        for each in crew
        if not each.gone and any(_wants(handler, event, state.subscription) for handler in each.handlers)
    ]
    if not able:
        return f"no worker that is alive handles {event.type} in {state.subscription}"
    return f"it is due: {able[0]} {'and others ' if len(able) > 1 else ''}could take it any moment"


def _wants(handler: HandlerRecord, event: Event, subscription: str) -> bool:
    interest = Interest(handler.pattern, frozenset(handler.tags))
    return handler.subscription == subscription and interest.wants(event.type, event.tags)


# ── an event's history as a picture ──────────────────────────────────────────────────────────────────────────────────


class Bar(NamedTuple):
    """An attempt, or a moment, from left to right in a hundredth of the width."""

    left: float
    width: float
    kind: str
    told: str


class Lane(NamedTuple):
    """What happened in one subscription."""

    subscription: str
    bars: tuple[Bar, ...]


def lanes(event: Event, logs: Sequence[LogEntry], now: datetime) -> tuple[Lane, ...]:
    """Return one lane a subscription: waiting is left blank, an attempt is a bar, its end gives the colour."""
    names = list(dict.fromkeys(each.subscription for each in logs))
    last = max((each.created_at for each in logs), default=now)
    end = now if any(each.status in (Status.PENDING, Status.PROCESSING) for each in event.deliveries) else last
    whole = max((end - event.created_at).total_seconds(), 0.001)

    def place(moment: datetime) -> float:
        return round(100 * min(1.0, max(0.0, (moment - event.created_at).total_seconds() / whole)), 2)

    return tuple(
        Lane(name, tuple(_bars([each for each in logs if each.subscription == name], place, end))) for name in names
    )


def _bars(logs: Sequence[LogEntry], place: Any, end: datetime) -> Iterator[Bar]:
    picked: LogEntry | None = None
    for each in logs:
        if each.action is Action.PICKED:
            picked = each
        elif picked is not None and each.epoch == picked.epoch and each.action in ENDS:
            yield _bar(place(picked.created_at), place(each.created_at), ENDS[each.action], _told(each))
            picked = None
        elif each.action is not Action.STARTED:
            yield _bar(place(each.created_at), place(each.created_at), ENDS.get(each.action, "note"), _told(each))
    if picked is not None:
        yield _bar(place(picked.created_at), place(end), "running", _told(picked))


def _bar(left: float, right: float, kind: str, told: str) -> Bar:
    return Bar(min(left, 99.2), max(right - left, 0.8), kind, told)


def _told(entry: LogEntry) -> str:
    parts = [entry.action.value, f"attempt {entry.attempt}" if entry.attempt else "", entry.worker_id or ""]
    took = "" if entry.execution_time_ms is None else f"{entry.execution_time_ms:,.1f} ms"
    return " · ".join(each for each in (*parts, took, entry.error_message or "") if each)


# ── dead letters that died of the same ───────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Group:
    """Dead letters that died of the same error."""

    kind: str
    fingerprint: str
    faults: tuple[Fault, ...]

    @property
    def types(self) -> str:
        """The types of their events."""
        return ", ".join(sorted({each.type for each in self.faults}))

    @property
    def last(self) -> datetime:
        """When the latest died."""
        return max(each.died_at for each in self.faults)


def grouped(faults: Iterable[Fault]) -> list[Group]:
    """Return them by what they died of, the most first."""
    found: dict[tuple[str, str], list[Fault]] = {}
    for each in faults:
        found.setdefault(cause(each.error), []).append(each)
    groups = [Group(kind, told, tuple(members)) for (kind, told), members in found.items()]
    return sorted(groups, key=lambda each: (-len(each.faults), each.kind, each.fingerprint))


def matching(asked: dict[str, str], faults: Iterable[Fault]) -> list[Fault]:
    """Return those that are asked for; what is not said does not matter."""
    return [
        each
        for each in faults
        if (not asked["subscription"] or each.subscription == asked["subscription"])
        and (not asked["type"] or each.type == asked["type"])
        and (not asked["fault"] or ": ".join(cause(each.error)) == asked["fault"])
    ]


def asked_of(params: Mapping[str, str]) -> dict[str, str]:
    """Return which dead letters are asked for."""
    return {name: params.get(name, "") for name in ("subscription", "type", "fault")}


# ── text ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def pretty(value: Any, *, mask: bool) -> str:
    """Return a payload as indented JSON, integers beyond 64 bits exact."""
    shown = masked(value) if mask else value
    try:
        return orjson.dumps(shown, option=orjson.OPT_INDENT_2).decode()
    except TypeError:
        return json.dumps(shown, indent=2, ensure_ascii=False)


def masked(value: Any) -> Any:
    """Return the shape of a payload, without what it says."""
    if isinstance(value, Mapping):
        told = cast("Mapping[str, Any]", value)
        return {name: masked(each) for name, each in told.items()}
    if isinstance(value, list):
        return [masked(each) for each in cast("list[Any]", value)]
    return None if value is None else MASK
