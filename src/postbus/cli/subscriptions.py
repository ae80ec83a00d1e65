"""`postbus subscriptions`: the named consumer groups over the log: look, pause, rewind, delete."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from datetime import datetime
from typing import Annotated, Any, Final, Literal

import typer
from rich.console import RenderableType

from postbus.cli.console import Output, confirm, emit, line, say, stderr, table
from postbus.cli.dlq import ACTOR, Parked, parked
from postbus.cli.options import MOST_NAMED, DryRun, Format, Url, Yes, existing_store, find, parse_moment
from postbus.doctor import left_behind
from postbus.errors import InvalidRequest, NotFound
from postbus.model import Checkpoint, Mode, State, Stream, Subscription
from postbus.store import Queue
from postbus.store.contract import Rewound
from postbus.telling import many

__all__ = ["group"]

LEFT: Final = {State.PENDING: "pending", State.LEASED: "processing", State.DEAD: "dead", State.PARKED: "parked"}
QUEUES: Final = "NAME  MODE  WANTS  TAGS  PAUSED  LEASE  RETRIES  HANDLERS  PENDING  PROCESSING  DEAD"
EFFECTS_STAY: Final = {
    Mode.QUEUE: "what its handlers did stays done, and they run again: also for events that were completed",
    Mode.ORDERED: "what it has built stays; to build it anew: pause, rewind, empty what it built, resume",
}
READERS: Final = "NAME  MODE  WANTS  TAGS  PAUSED  POSITION  LAG  WAITS  READ BY  LEASE LEFT  DEAD  PARKED"

group = typer.Typer(name="subscriptions", no_args_is_help=True, epilog="Example: postbus subscriptions list")
Name = Annotated[str, typer.Argument(metavar="NAME", help="The subscription's name.", show_default=False)]
To = Annotated[
    str,
    typer.Option(
        "--to",
        metavar="WHERE",
        help="After an id, from a moment on, or from the `beginning`, or from `now` on.",
        show_default=False,
    ),
]


@group.callback()
def subscriptions() -> None:
    """Look at the named consumer groups over the log, pause, rewind and delete them."""


@group.command("list", epilog="Example: postbus subscriptions list -o json")
def list_subscriptions(*, url: Url = None, output: Format = Output.TABLE) -> None:
    """List subscriptions: what each wants, who is at it, how much is left.

    Of those that read by position, LAG is how many positions they are behind the last event, WAITS how long the first
    of these has waited. READ BY is the process that reads, alone, while its lease is kept up; dead and parked events
    are those it has left behind. Below stand what has stopped one for good, and what parked events wait for.
    """
    with existing_store(url) as store:
        rows, now = _rows(store, store.subscriptions()), store.now()
    emit(output, rows, lambda: _tables(rows, now))


def _rows(store: Queue, wanted: Iterable[Subscription]) -> list[dict[str, Any]]:
    """Return all that is told of subscriptions."""
    found, handlers = store.stats(), store.handlers()
    depth = {each.name: (each.pending, each.processing, each.dead, 0) for each in found.subscriptions}
    stands = {each.subscription: each for each in found.checkpoints}
    rows: list[dict[str, Any]] = []
    for each in wanted:
        mine = sorted({handler.pattern for handler in handlers if handler.subscription == each.name})
        standing = store.standing(each.name) if each.mode is not Mode.QUEUE else ()
        left = left_behind(standing)
        counts = depth.get(each.name) or (left[state] for state in LEFT)
        unfinished = dict(zip(LEFT.values(), counts, strict=True)) | {"parked_behind": parked(standing)}
        rows.append(asdict(each) | {"handlers": mine} | unfinished | {"checkpoint": stands.get(each.name)})
    return rows


def _tables(rows: list[dict[str, Any]], now: datetime) -> Iterator[RenderableType]:
    queues = [row for row in rows if row["mode"] is Mode.QUEUE]
    readers = [row for row in rows if row["mode"] is not Mode.QUEUE]
    if queues:
        yield table(QUEUES, map(_queue, queues))
    if queues and readers:
        yield line("")
    if readers:
        yield table(READERS, (_reader(row, now) for row in readers))
        yield from (each for row in readers for each in _troubles(row))


def _queue(row: dict[str, Any]) -> tuple[object, ...]:
    retries = str(row["retry"]["max_retries"]) if row["retry"] else "the bus's"
    depth = (row["pending"], row["processing"], row["dead"])
    lease = row["lease"] or "the bus's"
    return (*_wants(row), lease, retries, " ".join(row["handlers"]), *depth)


def _reader(row: dict[str, Any], now: datetime) -> tuple[object, ...]:
    stand: Checkpoint | None = row["checkpoint"]
    if stand is None:
        return (*_wants(row), *(None,) * 5, row["dead"], row["parked"])
    left = None if stand.held_until is None else stand.held_until - now
    reader = f"{stand.worker_id} (gone)" if stand.gone else stand.worker_id
    return (*_wants(row), stand.position, stand.lag, stand.waiting, reader, left, row["dead"], row["parked"])


def _troubles(row: dict[str, Any]) -> Iterator[RenderableType]:
    """Tell why one that reads by position has stopped, and what its parked events wait for."""
    stand: Checkpoint | None = row["checkpoint"]
    behind: list[Parked] = row["parked_behind"]
    if stand is not None and stand.stopped is not None:
        first, *_ = stand.stopped.splitlines()
        yield line(f"{row['name']}: {first}", "red")
    yield from (line(f"{row['name']}: {each.told}") for each in behind[:MOST_NAMED])
    if len(behind) > MOST_NAMED:
        yield line(f"{row['name']}: … and events of {many(len(behind) - MOST_NAMED, 'more key')}")


def _wants(row: dict[str, Any]) -> tuple[object, ...]:
    return row["name"], row["mode"], " ".join(row["patterns"]), " ".join(row["tags"]), row["paused"]


@group.command(epilog="Example: postbus subscriptions pause sales")
def pause(name: Name, *, url: Url = None, output: Format = Output.TABLE) -> None:
    """Have nothing more taken from a subscription until it is resumed.

    What is being handled is finished. Events wait meanwhile, none is lost. A Spark stream reads on all the same: stop
    its query instead.
    """
    _set_paused(name, paused=True, url=url, output=output)


@group.command(epilog="Example: postbus subscriptions resume sales")
def resume(name: Name, *, url: Url = None, output: Format = Output.TABLE) -> None:
    """Have a paused subscription go on where it stands."""
    _set_paused(name, paused=False, url=url, output=output)


def _set_paused(name: str, *, paused: bool, url: str | None, output: Output) -> None:
    with existing_store(url) as store:
        before = find(store, name)
        if paused and before.mode is Mode.SPARK:
            raise InvalidRequest(f"{name!r} is read by a Spark stream, which reads on all the same: stop its query")
        store.pause_subscription(name, paused)
    emit(output, {"name": name, "paused": paused, "changed": before.paused is not paused}, lambda: ())
    if output is Output.TABLE:
        was = "was already" if before.paused is paused else "is now"
        again = f"; to go on: postbus subscriptions resume {name}" if paused else ""
        say(f"{name} {was} {'paused' if paused else 'running'}{again}")


@group.command(
    epilog="Example: postbus subscriptions rewind sales --to beginning --dry-run"
    "\n\nExample: postbus subscriptions rewind sales --to 2030-01-31T12:00:00Z --yes"
    "\n\nExample: postbus subscriptions rewind sales --to 10412"
)
def rewind(
    name: Name, *, to: To, dry_run: DryRun = False, yes: Yes = False, url: Url = None, output: Format = Output.TABLE
) -> None:
    """Have a queue or a follower go on after another position.

    After an id, the next event is the first above it; with `now` it is the next one published. A moment is one such as
    2030-01-31T12:00:00Z.

    A queue goes back only. Every event it wants after the new position is handled again, completed and dead ones too;
    what is leased is lost to its worker.

    An ordered subscription also goes forwards, and passes events over. Its follower begins there at once. What the
    follower has built is not undone: to build it anew, pause it, rewind it, empty what it built, and resume it.

    Unfinished and dead deliveries after the new position are discarded, since their events come again.
    """
    target = _target(to)
    with existing_store(url) as store:
        before = _rewindable(store, name, target)
        idle = before.mode is Mode.ORDERED and _reader_of(store, name) is None
        pruned = store.span(Stream.EVENTS).pruned
        with stderr().status("counting …"):
            found = store.rewind(name, target, ACTOR, dry_run=True)
        if found.again and output is Output.TABLE:
            say(EFFECTS_STAY[before.mode], style="dim")
        if pruned and found.position == pruned and output is Output.TABLE:
            say(f"everything up to {pruned:,} was archived and does not come again: it is in the lake", style="yellow")
        if not dry_run:
            confirm(f"Rewind {name} from {found.before:,} to {found.position:,}: {_told(found)}?", yes=yes)
            with stderr().status("rewinding …"):
                found = store.rewind(name, target, ACTOR)
        paused = find(store, name).paused
    told = {"name": name, "from": found.before, "position": found.position, "again": found.again}
    told |= {"passed_over": found.skipped, "discarded": found.discarded, "dry_run": dry_run}
    emit(output, told, lambda: ())
    if output is Output.TABLE:
        say(
            f"{name} {'would go' if dry_run else 'goes'} on after {found.position:,} instead of {found.before:,}: "
            f"{_told(found)}"
        )
        if not dry_run and paused:
            say(f"it is paused; to go on: postbus subscriptions resume {name}", style="dim")
        elif not dry_run and idle:
            say("nobody reads it now: it goes on when its program is started", style="dim")


def _target(text: str) -> int | datetime | Literal["beginning", "now"]:
    """Return where to; an id may carry the commas that tables show it with."""
    if text in ("beginning", "now"):
        return text
    if re.fullmatch(r"-?\d{1,3}(,\d{3})+|-?\d+", text):
        return int(text.replace(",", ""))
    try:
        return parse_moment(text)
    except typer.BadParameter:
        raise InvalidRequest(
            f"--to is an id, a moment with its time zone such as 2030-01-31T12:00:00Z, 'beginning' or 'now', "
            f"not {text!r:.80}"
        ) from None


def _rewindable(store: Queue, name: str, target: int | datetime | str) -> Subscription:
    """Return a subscription that may be rewound; raise InvalidRequest if it cannot go where it is to."""
    found = find(store, name)
    if found.mode is Mode.SPARK:
        raise InvalidRequest(
            f"{name!r} is read by a Spark stream, which goes on from its own checkpoint folder: start a new query "
            f"with startingOffsets and another consumer, then: postbus subscriptions delete {name}"
        )
    span = store.span(Stream.EVENTS)
    if isinstance(target, int) and not span.pruned <= target <= span.head:
        raise InvalidRequest(
            f"there is no position {target:,} to go on after: {span.pruned:,} is the first, {span.head:,} the last"
        )
    if found.mode is Mode.ORDERED and all(each.subscription != name for each in store.checkpoints()):
        raise NotFound(f"{name!r} has no checkpoint: postbus subscriptions delete {name}, and start its program anew")
    return found


def _reader_of(store: Queue, name: str) -> str | None:
    """Return who reads an ordered subscription now."""
    return next((each.reader for each in store.checkpoints() if each.subscription == name), None)


def _told(found: Rewound) -> str:
    """Return what a rewind leads to."""
    parts = [f"{many(found.again, 'event')} handled again"]
    if found.position > found.before:
        parts = [f"{many(found.skipped, 'event')} between them passed over, never handled"]
    if found.discarded:
        parts.append(f"{many(found.discarded, 'unfinished or dead event')} discarded")
    return ", ".join(parts)


@group.command(
    epilog="Example: postbus subscriptions delete sales --dry-run\n\nExample: postbus subscriptions delete sales --yes"
)
def delete(
    name: Name, *, dry_run: DryRun = False, yes: Yes = False, url: Url = None, output: Format = Output.TABLE
) -> None:
    """Remove a subscription: its position, and what it has not finished.

    The events and the audit log stay. Each unfinished delivery is recorded as DISCARDED. A program that still follows
    or handles it stops doing so; one that starts later makes it anew.
    """
    with existing_store(url) as store, stderr().status("counting …") as shown:
        [row] = _rows(store, [find(store, name)])
        shown.stop()
        if not dry_run:
            confirm(f"Delete {_summary(row)}{_at_it(row)}?", yes=yes)
            shown.start()
            store.delete_subscription(name, ACTOR)
    emit(output, row | {"dry_run": dry_run}, lambda: ())
    if output is Output.TABLE:
        say(f"would delete {_summary(row)}{_at_it(row)}" if dry_run else f"deleted {_summary(row)}")


def _summary(row: dict[str, Any]) -> str:
    """Return what goes with a subscription."""
    stand: Checkpoint | None = row["checkpoint"]
    place = "" if stand is None else f" at {stand.position:,}"
    total = sum(row[word] for word in LEFT.values())
    parts = ", ".join(f"{row[word]:,} {word}" for word in LEFT.values() if row[word])
    return f"{row['name']} ({row['mode']}{place}) with {many(total, 'unfinished event')}{f': {parts}' if parts else ''}"


def _at_it(row: dict[str, Any]) -> str:
    """Return who would find it gone."""
    stand: Checkpoint | None = row["checkpoint"]
    if stand is not None and stand.reader is not None:
        return f"; {stand.reader} reads it now"
    return f"; programs handle it now: {' '.join(row['handlers'])}" if row["handlers"] and stand is None else ""
