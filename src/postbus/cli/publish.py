"""`postbus publish`: one event from the arguments, or many from standard input."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, BinaryIO, Final, cast

import typer

from postbus.bus import EventBus
from postbus.cli.console import Output, emit, progress, say, table, to_json
from postbus.cli.options import Format, Tags, Url, parse_moment, parse_seconds
from postbus.errors import (
    InvalidEventError,
    InvalidPayloadError,
    InvalidRequest,
    OutcomeUnknown,
    PostbusError,
    StoreUnavailable,
)
from postbus.model import Event, Json
from postbus.payload import MAX_PAYLOAD, draft, parse
from postbus.telling import many

__all__ = ["EXAMPLES", "publish"]

EXAMPLES: Final = """\
Example: postbus publish order.placed '{"order_id": 7}' --tag eu --delay 5m

Example: postbus publish order.placed - < orders.ndjson   (each line is a payload)

Example: postbus publish - < events.ndjson   (each line is an event: type, payload, tags, …)"""
CHUNK: Final = 262_144
Fields = dict[str, Any]
Time = typer.Option(parser=parse_seconds, metavar="TIME", help="Due after 90, 90s, 5m, 2h or 1d.")
Moment = typer.Option(parser=parse_moment, metavar="MOMENT", help="Due at, such as 2030-01-31T12:00:00Z.")


def publish(
    event_type: Annotated[str, typer.Argument(metavar="TYPE", help="The type; - alone: each line is an event.")],
    payload: Annotated[
        str | None, typer.Argument(metavar="JSON", help="The payload, else null; -: each line is a payload.")
    ] = None,
    *,
    tag: Tags = None,
    key: Annotated[str | None, typer.Option(help="What the event is about.")] = None,
    title: Annotated[str | None, typer.Option(help="A title for people.")] = None,
    description: Annotated[str | None, typer.Option(help="More words for people.")] = None,
    delay: Annotated[float | None, Time] = None,
    at: Annotated[datetime | None, Moment] = None,
    priority: Annotated[int | None, typer.Option(min=-10, max=10, help="The higher, the sooner; else 0.")] = None,
    max_retries: Annotated[int | None, typer.Option(min=0, help="Retries, whatever the policy says.")] = None,
    uid: Annotated[str | None, typer.Option(help="Your own key: published again, it is stored once.")] = None,
    metadata: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="May be given again.")] = None,
    url: Url = None,
    output: Format = Output.TABLE,
) -> None:
    """Publish an event, or one for each line of stdin (NDJSON). It is stored for good when this returns.

    Options hold for every line, unless the line is an event that says otherwise.
    Lines are published in batches, each whole or not at all.
    A bad line ends the run, and the message says which lines were published; after a lost connection or Ctrl-C also of
    which lines that is not known.
    With -o jsonl every published event is printed.
    """
    pairs = dict(map(_pair, metadata)) if metadata else None
    fields: Fields = {"tags": tag, "key": key, "title": title, "description": description, "delay": delay, "at": at}
    fields |= {"priority": priority, "max_retries": max_retries, "uid": uid, "metadata": pairs}
    given = {name: value for name, value in fields.items() if value is not None}
    if "-" in (event_type, payload):
        _publish_lines(_maker(event_type, payload, given), url, output)
    else:
        _publish_one({"type": event_type, "payload": _argument(payload), **given}, url, output)


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise typer.BadParameter(f"--metadata takes KEY=VALUE, not {text!r}")
    return name, value


def _argument(text: str | None) -> Json:
    try:
        return None if text is None else parse(text)
    except InvalidPayloadError as error:
        raise InvalidPayloadError(f"{error}. In a shell, quote it: '{{\"order_id\": 7}}'") from None


def _publish_one(fields: Fields, url: str | None, output: Output) -> None:
    draft(fields)  # before the store is opened: a bad event must not even make a file
    bus = EventBus(url)
    try:
        event = bus.publish(**fields)
    finally:
        bus.shutdown()
    row = (str(event.id), event.type, event.uid, event.created_at)
    emit(output, event, lambda: [table("ID  TYPE  UID  CREATED", [row])])


# ── many ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _maker(event_type: str, payload: str | None, given: Fields) -> Callable[[Json], Fields]:
    """Return what turns the value of a line into the fields of an event."""
    if "uid" in given:
        raise typer.BadParameter("--uid names one event and cannot hold for many: give each line its own")
    if event_type != "-":
        return lambda value: {"type": event_type, "payload": value, **given}
    if payload is not None:
        raise typer.BadParameter("with - for TYPE every line is a whole event: leave the payload out")
    return lambda value: {**given, **_event(value)}


def _event(value: Json) -> Fields:
    if not isinstance(value, dict):
        raise InvalidEventError('an event is an object such as {"type": "order.placed", "payload": {"order_id": 7}}')
    fields = cast("Fields", value)
    try:
        return fields if fields.get("at") is None else {**fields, "at": parse_moment(str(fields["at"]))}
    except typer.BadParameter as error:
        raise InvalidEventError(f"at: {error}") from None


@dataclass
class _Tally:
    """What has been published so far: lines, events and their ids."""

    lines: int = 0
    underway: int = 0
    """How many lines more are just being stored: until that is told, nobody knows whether they are."""
    published: int = 0
    first_id: int | None = None
    last_id: int | None = None

    def count(self, events: list[Event]) -> None:
        """Take note of a batch that is stored."""
        self.lines, self.underway = self.lines + self.underway, 0
        self.published += len(events)
        self.first_id = self.first_id or events[0].id
        self.last_id = events[-1].id

    def __str__(self) -> str:
        """Say which lines are stored, which are not, and of which that is not known."""
        if not self.published and not self.underway:
            return "Nothing was published."
        done = f"Published: lines 1 to {self.lines:,} ({many(self.published, 'event')}). " if self.published else ""
        last = self.lines + self.underway
        doubt = f"Lines {self.lines + 1:,} to {last:,} may or may not be stored: look before you feed them again. "
        return f"{done}{doubt if self.underway else ''}Not published: line {last + 1:,} and all that follow."


def _publish_lines(make: Callable[[Json], Fields], url: str | None, output: Output) -> None:
    tally, bus = _Tally(), None
    if sys.stdin.isatty():
        say("reading lines of JSON from the terminal; Ctrl-D ends", style="dim")
    try:
        with progress("publishing", None) as show:
            for lines in _batches(sys.stdin.buffer):
                if events := _checked(lines, make, tally):
                    bus = bus or EventBus(url)
                    tally.underway = len(lines)
                    _publish_batch(bus, events, tally, output)
                else:
                    tally.lines += len(lines)
                show(tally.published)
    except KeyboardInterrupt:
        say(f"interrupted. {tally}")
        raise
    finally:
        if bus is not None:
            bus.shutdown()
    if output is not Output.JSONL:
        done = {"published": tally.published, "first_id": tally.first_id, "last_id": tally.last_id}
        emit(output, done, lambda: [table("PUBLISHED  FIRST ID  LAST ID", [tuple(done.values())])])


def _batches(source: BinaryIO) -> Iterator[list[bytes]]:
    """Yield the whole lines of each read: many when they come fast, each one at once when they trickle."""
    read = cast("Callable[[int], bytes]", getattr(source, "read1", source.read))
    rest = b""
    while data := read(CHUNK):
        *lines, rest = (rest + data).split(b"\n")
        if len(rest) > MAX_PAYLOAD:  # refused as too large, without waiting for its end
            lines, rest = [*lines, rest], b""
        if lines:
            yield lines
    if rest:
        yield [rest]


def _checked(lines: list[bytes], make: Callable[[Json], Fields], tally: _Tally) -> list[Fields]:
    """Return the events of a batch; raise with the number of the first bad line."""
    events: list[Fields] = []
    for number, text in enumerate(lines, tally.lines + 1):
        if text.strip():
            try:
                events.append(make(parse(text)))
                draft(events[-1])
            except PostbusError as error:
                raise type(error)(f"line {number:,}: {error}. {tally}") from None
    return events


def _publish_batch(bus: EventBus, events: list[Fields], tally: _Tally, output: Output) -> None:
    try:
        stored = bus.publish_many(events)
    except PostbusError as error:
        if isinstance(error, InvalidRequest | StoreUnavailable) and not isinstance(error, OutcomeUnknown):
            tally.underway = 0
        raise type(error)(f"after line {tally.lines:,}: {error}. {tally}") from None
    tally.count(stored)
    for event in stored if output is Output.JSONL else ():
        typer.echo(to_json(event))
