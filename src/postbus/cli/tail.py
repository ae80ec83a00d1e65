"""`postbus tail`: the log, or what is done with its events, as it comes."""

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Annotated, Any, Final, NamedTuple, Protocol

import typer
from rich.text import Text

from postbus.cli.console import Output, ending_well, line, say, stdout, to_json
from postbus.cli.options import EventType, SubscriptionName, Tags, Url, existing_log, find, moment_before
from postbus.config import Settings
from postbus.errors import InvalidRequest, StoreUnavailable
from postbus.model import Action, Event, Stream
from postbus.pattern import Interest
from postbus.store import Log, as_arrow

__all__ = ["EXAMPLES", "tail"]

EXAMPLES: Final = """\
Example: postbus tail -f --type 'order.*'

Example: postbus tail --since 10m | jq .payload

Example: postbus tail -f --audit --subscription default"""
LATEST: Final = 20
PAGE: Final = 500
POLL: Final = 1.0
"""How long, in seconds, nothing may wake it before it looks all the same."""
LOOK_BACK: Final = 10_000
WIDEST: Final = 40
FACTS: Final = ("id", "uid", "type", "payload", "tags", "key", "title", "description", "metadata", "created_at",
                "priority", "max_retries")  # fmt: skip
"""What an event is; how it stands anywhere is not told by the log."""
HAPPENED: Final = ("id", "event_id", "type", "tags", "subscription", "action", "status", "attempt", "worker_id",
                   "error_type", "error_message", "execution_time_ms", "created_at")  # fmt: skip
COLOURS: Final = {Action.COMPLETED: "green", Action.FAILED: "red", Action.EXPIRED: "red", Action.PICKED: "blue"}
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C, showing what comes.")]
After = Annotated[int | None, typer.Option(metavar="ID", min=0, help="Begin after this id.")]
Since = Annotated[str | None, typer.Option(metavar="TIME", help="Begin so long ago, 10m, or at 2030-01-31T12:00:00Z.")]
Number = Annotated[int | None, typer.Option("-n", metavar="N", min=0, max=10_000, help="Begin with the last N, or 20.")]
Audit = Annotated[bool, typer.Option("--audit", help="Show what is done instead: PICKED, COMPLETED, FAILED.")]
Shape = Annotated[
    Output | None,
    typer.Option("--output", "-o", envvar="POSTBUS_OUTPUT", help="Lines on a terminal, else JSON, one object a line."),
]


def tail(
    *,
    follow: Follow = False,
    event_type: EventType = None,
    tags: Tags = None,
    subscription: SubscriptionName = None,
    after: After = None,
    since: Since = None,
    number: Number = None,
    audit: Audit = False,
    url: Url = None,
    output: Shape = None,
) -> None:
    """Show the events of the log in their order, and with --follow those that come.

    It reads as a follower does: whatever is committed late is shown too, none is passed over, and nobody is kept from
    anything. With a subscription, only what it wants; with --audit, only what was done in it. The audit log is read as
    Arrow, which the extra `spark` brings.
    """
    if sum(each is not None for each in (after, since, number)) > 1:
        raise InvalidRequest("say only one of --after, --since and -n")
    with ending_well(), existing_log(url, "reading by position", listen=follow) as store:
        filters = Interest(event_type or "*", frozenset(tags or ()))
        wanted = _wanted(store, subscription)
        source = _Audit(store, url, subscription, filters) if audit else _Events(store, wanted or (filters,), filters)
        show = _shower(output)
        if after is None and since is None:
            position = _show_latest(source, LATEST if number is None else number, show)
        else:
            position = _show_rest(source, _place(store, source.stream, after, since), show)
        if follow:
            _follow(store, source, position, show)


def _wanted(store: Log, name: str | None) -> tuple[Interest, ...]:
    """Return what a subscription wants, if one is named; raise NotFound if there is none of that name."""
    if name is None:
        return ()
    found = find(store, name)
    return tuple(Interest(each, frozenset(found.tags)) for each in found.patterns)


def _place(store: Log, stream: Stream, after: int | None, since: str | None) -> int:
    """Return the position that was asked for; raise InvalidRequest for one that the log has not come to."""
    span = store.span(stream)
    wanted = store.before(stream, moment_before(since, store.now())) if since is not None else after or 0
    if wanted > span.head:
        raise InvalidRequest(f"there is nothing after {wanted:,} yet: the last is {span.head:,}")
    if wanted < span.pruned:
        say(f"what came up to {span.pruned:,} was archived: it is in the lake", style="yellow")
    return max(wanted, span.pruned)


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────


class _Row(NamedTuple):
    """Something that happened: for machines, and as cells with their colours."""

    told: dict[str, Any]
    cells: tuple[tuple[object, str], ...]


class _Page(NamedTuple):
    """What was found, as far as it is wanted, up to the position reached; each is made a row where it is shown."""

    found: Sequence[Any]
    reached: int
    more: bool


class _Source(Protocol):
    """A stream to be read by position."""

    @property
    def stream(self) -> Stream: ...

    def read(self, after: int) -> _Page: ...

    def row(self, found: Any) -> _Row: ...

    def place(self, found: Any) -> int:
        """Return the position of what was found."""
        ...

    def back(self, count: int) -> int:
        """Return a position from which on there are so many, or as many as are found soon."""
        ...


@dataclass(frozen=True)
class _Events:
    """The events, as a follower reads them."""

    store: Log
    interests: tuple[Interest, ...]
    filters: Interest
    stream: Stream = Stream.EVENTS

    def read(self, after: int) -> _Page:
        ahead = self.store.read_on(after, PAGE, self.interests)
        found = [(each, ahead.damaged.get(each.id)) for each in ahead.events]
        wanted = [each for each in found if each[1] is not None or self.filters.wants(each[0].type, each[0].tags)]
        return _Page(wanted, ahead.reached, ahead.more)

    def row(self, found: Any) -> _Row:
        return _event_row(*found)

    def place(self, found: Any) -> int:
        return found[0].id

    def back(self, count: int) -> int:
        head = self.store.span(self.stream).head  # what stands beyond it now may not be all that will
        # The newest that a subscription wants may all be filtered out: what is let through may lie further back.
        found = [self._oldest(each, count) for each in {*self.interests, self.filters}] if count else []
        return min([head, *(each - 1 for each in found if each is not None)])

    def _oldest(self, interest: Interest, count: int) -> int | None:
        """Return the id of the oldest of the newest events."""
        kind = None if interest.pattern == "*" else interest.pattern
        oldest = after = None
        while count > 0:
            page = self.store.list(
                subscription="default", status=None, type=kind, tags=sorted(interest.tags), limit=count, offset=0,
                after=after,
            )  # fmt: skip
            oldest = page.items[-1].id if page.items else oldest
            after, count = page.next, count - len(page)
            if after is None:
                break
        return oldest


_Kind = tuple[str | None, Sequence[str]]


@dataclass(frozen=True)
class _Audit:
    """What was done. `ahead` never goes beyond what is certain, and the rows up to there are read."""

    store: Log
    url: str | None = field(repr=False)
    subscription: str | None
    filters: Interest
    kinds: dict[int, _Kind] = field(default_factory=dict[int, _Kind])
    """Type and tags of events, where rows leave them out: those that a claim writes."""
    stream: Stream = Stream.AUDIT

    def read(self, after: int) -> _Page:
        through = self.store.ahead(self.stream, after, PAGE)
        found = self._rows(after, through) if through > after else []
        return _Page([each for each in found if self._wants(each)], through, more=len(found) == PAGE)

    def row(self, found: Any) -> _Row:
        return _audit_row(self._whole(found))

    def place(self, found: Any) -> int:
        return found["id"]

    def _rows(self, after: int, through: int) -> list[dict[str, Any]]:
        try:
            batches = as_arrow(Settings.load(url=self.url).url, "audit", HAPPENED, after, through)
            return [row for each in batches for row in each.to_pylist()]
        except ImportError as error:
            raise InvalidRequest(f"reading the audit log needs Arrow: pip install 'postbus[spark]' ({error})") from None

    def _whole(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return a row with what its event is, as far as that is still in the log."""
        if row["type"] is not None:
            return row
        if row["event_id"] not in self.kinds:
            if len(self.kinds) > LOOK_BACK:
                self.kinds.clear()
            self.kinds[row["event_id"]] = self._kind(row["event_id"])
        kind, tags = self.kinds[row["event_id"]]
        return row | {"type": kind, "tags": list(tags)}

    def _kind(self, event_id: int) -> _Kind:
        found = self.store.read_on(event_id - 1, 1, (Interest(),)).events
        return (found[0].type, found[0].tags) if found and found[0].id == event_id else (None, ())

    def _wants(self, row: dict[str, Any]) -> bool:
        if self.subscription not in (None, row["subscription"]):
            return False
        if self.filters == Interest():
            return True
        whole = self._whole(row)
        return self.filters.wants(whole["type"] or "", whole["tags"])

    def back(self, count: int) -> int:
        span = self.store.span(self.stream)
        return max(span.pruned, span.head - (LOOK_BACK if count else 0))


def _event_row(event: Event, damage: str | None) -> _Row:
    told = {name: getattr(event, name) for name in FACTS} | ({} if damage is None else {"damaged": damage})
    said = event.title or ("" if event.payload is None else to_json(event.payload))
    last = (said, "") if damage is None else (damage, "red")
    return _Row(told, ((event.id, "dim"), _time(event.created_at), (event.type, "cyan"),
                       (",".join(event.tags), "yellow"), (event.key or "", "magenta"), last))  # fmt: skip


def _audit_row(row: dict[str, Any]) -> _Row:
    action, took = row["action"], row["execution_time_ms"]
    error = f"{row['error_type']}: {row['error_message']}" if row["error_message"] else ""
    attempt = "" if row["attempt"] is None else f"attempt {row['attempt']}"
    return _Row(row, ((row["event_id"], "dim"), _time(row["created_at"]), (action, COLOURS.get(action, "yellow")),
                      (row["type"] or "", "cyan"), (row["subscription"], ""), (attempt, ""),
                      ("" if took is None else f"{took:.1f} ms", ""), (row["worker_id"] or "", "dim"),
                      (error, "red")))  # fmt: skip


def _time(moment: datetime) -> tuple[str, str]:
    return f"{moment.astimezone(UTC):%m-%d %H:%M:%S.%f}"[:-3] + "Z", "dim"


# ── showing ──────────────────────────────────────────────────────────────────────────────────────────────────────

Show = Callable[[Iterable[_Row]], None]


def _show_latest(source: _Source, count: int, show: Show) -> int:
    """Show the last ones and what has come since, and return the position after them.

    Where they begin is looked for first: all of them may not fit into memory.
    """
    kept, position, more = deque[int](maxlen=count), source.back(count), True
    while more:
        found, position, more = source.read(position)
        kept.extend(map(source.place, found))
    return _show_rest(source, kept[0] - 1, show) if kept else position


def _show_rest(source: _Source, position: int, show: Show) -> int:
    """Show all that there is after a position; return the one that it has come to."""
    more = True
    while more:
        found, position, more = source.read(position)
        show(map(source.row, found))
    return position


def _follow(store: Log, source: _Source, position: int, show: Show) -> None:
    """Show what comes, for ever; a store that is away is waited for."""
    away = False
    with closing(store.watch()) as watch:
        while True:
            try:
                found, reached, more = source.read(position)
                show([source.row(each) for each in found])  # all or none: what is tried again is not shown twice
                position, away = reached, False
                if not more:
                    watch.wait(POLL)
            except StoreUnavailable as error:
                if not away:
                    say(f"{error}; it is tried again", style="yellow")
                away = True
                time.sleep(POLL)


def _shower(output: Output | None) -> Show:
    """Return what prints rows: lines where somebody looks, else one JSON object a line."""
    if output is Output.TABLE or (output is None and sys.stdout.isatty()):
        return _Lines().show
    return _show_json


def _show_json(rows: Iterable[_Row]) -> None:
    for each in rows:
        typer.echo(to_json(each.told))


class _Lines:
    """Lines whose columns stand below one another, as wide as what was shown so far needs them."""

    def __init__(self) -> None:
        self._widths: dict[int, int] = {}
        self._console = stdout() if sys.stdout.isatty() else None

    def show(self, rows: Iterable[_Row]) -> None:
        """Print these, the columns measured before the first of them."""
        lines = [[line(value, style) for value, style in each.cells] for each in rows]
        for cells in lines:
            for place, cell in enumerate(cells):
                self._widths[place] = max(self._widths.get(place, 0), min(cell.cell_len, WIDEST))
        for cells in lines:
            self._print(self._joined(cells))

    def _joined(self, cells: Sequence[Text]) -> Text:
        joined = Text()
        for place, cell in enumerate(cells):
            if width := self._widths[place]:
                joined += cell + " " * (width - cell.cell_len + 2)
        joined.rstrip()
        return joined

    def _print(self, text: Text) -> None:
        """Print a line, cut to the screen where there is one; a line break within it would be another line."""
        if self._console is None:
            typer.echo(text.plain.replace("\n", "\\n"))
        else:
            self._console.print(Text("\\n").join(text.split("\n")), no_wrap=True, overflow="ellipsis")
