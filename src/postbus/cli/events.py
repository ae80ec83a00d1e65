"""`postbus events`: look at the log."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from postbus.cli.console import Output, emit, printable, table, tell_rest, to_json
from postbus.cli.options import After, EventType, Format, Limit, Tags, Url, existing_store
from postbus.model import AttemptError, DeliveryState, Event, LogEntry, Status

__all__ = ["errors_view", "event_view", "group"]

group = typer.Typer(
    name="events", help="Look at events.", no_args_is_help=True, epilog="Example: postbus events list --status PENDING"
)
Standing = Annotated[str, typer.Option("--subscription", help="How events stand in this subscription.")]
SHORT = 60


@group.command(
    "list",
    epilog="Example: postbus events list --status FAILED --type 'order.*' --limit 50"
    "\n\nExample: postbus events list -o jsonl | jq .payload",
)
def list_events(
    *,
    status: Annotated[
        Status | None, typer.Option(case_sensitive=False, help="Only events that stand so.", show_default=False)
    ] = None,
    event_type: EventType = None,
    tag: Tags = None,
    limit: Limit = 20,
    after: After = None,
    subscription: Standing = "default",
    url: Url = None,
    output: Format = Output.TABLE,
) -> None:
    """List events, newest first."""
    with existing_store(url) as store:
        page = store.list(
            subscription=subscription,
            status=status,
            type=event_type,
            tags=tag or (),
            limit=limit,
            offset=0,
            after=after,
        )
    emit(output, page.items, lambda: [_listing(page.items)] if page.items else [])
    tell_rest(page, "events")


def _listing(events: Iterable[Event]) -> RenderableType:
    columns = ("ID", "TYPE", "STATUS", "RETRIES", "CREATED", "TAGS", "TITLE", "LAST ERROR")
    return table(
        columns,
        (
            (str(e.id), e.type, e.status, e.retry_count, e.created_at, ",".join(e.tags), e.title, _short(e.last_error))
            for e in events
        ),
    )


def _short(text: str | None) -> str | None:
    line = text.partition("\n")[0] if text else ""
    return line if len(line) <= SHORT else line[: SHORT - 1] + "…"


@group.command(epilog="Example: postbus events show 7\n\nExample: postbus events show 7 -o json | jq .logs")
def show(
    event_id: Annotated[int, typer.Argument(metavar="ID", help="The event's id.")],
    *,
    subscription: Standing = "default",
    url: Url = None,
    output: Format = Output.TABLE,
) -> None:
    """Show one event: its payload, how it stands in each subscription, and all that happened to it."""
    with existing_store(url) as store:
        event = replace(store.get(event_id, subscription), logs=store.logs(event_id))
    emit(output, event, lambda: event_view(event))


def event_view(event: Event) -> Iterator[RenderableType]:
    """Show an event with all that is known of it."""
    yield Text(printable(f"event {event.id}  {event.type}"), style="bold")
    for name, value in (
        ("uid", event.uid),
        ("created", event.created_at.isoformat().replace("+00:00", "Z")),
        ("title", event.title),
        ("description", event.description),
        ("key", event.key),
        ("tags", ", ".join(event.tags)),
        ("metadata", ", ".join(f"{name}={value}" for name, value in event.metadata.items())),
        ("priority", event.priority),
        ("max retries", event.max_retries),
    ):
        if value not in (None, "", 0) or (name == "max retries" and value == 0):
            yield Text(printable(f"  {name:<12} {value}"))
    yield _section("Payload", Text(printable(to_json(event.payload, indent=2))))
    if event.deliveries:
        yield _section("Subscriptions", _deliveries(event.deliveries))
    for state in event.deliveries:
        if state.errors:
            yield _section(f"Errors in {state.subscription}", errors_view(state.errors))
    if event.logs:
        yield _section("What happened", _logs(event.logs))


def _section(title: str, body: RenderableType) -> RenderableType:
    return Group(Text(f"\n{title}", style="bold"), Padding(body, (0, 0, 0, 2)))


def _deliveries(states: Iterable[DeliveryState]) -> RenderableType:
    return table(
        ("SUBSCRIPTION", "STATUS", "ATTEMPT", "NEXT RETRY", "LEASED UNTIL", "WORKER"),
        (
            (s.subscription, s.status, s.attempt, s.next_retry_at, f"{s.lease_until} (expired)", s.worker_id)
            if s.lease_expired
            else (s.subscription, s.status, s.attempt, s.next_retry_at, s.lease_until, s.worker_id)
            for s in states
        ),
    )


def errors_view(errors: Iterable[AttemptError]) -> RenderableType:
    """Show the error of each attempt, its traceback below it."""
    parts: list[RenderableType] = []
    for error in errors:
        head = f"attempt {error.attempt}, {error.at:%Y-%m-%d %H:%M:%SZ}, {error.worker_id}: " if error.at else ""
        parts.append(Text(printable(f"{head}{error.type}: {error.message}"), style="red"))
        if error.traceback:
            parts.append(Padding(Text(printable(error.traceback.rstrip()), style="dim"), (0, 0, 0, 2)))
    return Group(*parts)


def _logs(logs: Iterable[LogEntry]) -> RenderableType:
    return table(
        ("TIME", "ACTION", "SUBSCRIPTION", "ATTEMPT", "WORKER", "MS", "ERROR"),
        (
            (each.created_at, each.action, each.subscription, each.attempt, each.worker_id,
             None if each.execution_time_ms is None else f"{each.execution_time_ms:.1f}", _short(each.error_message))
            for each in logs
        ),
    )  # fmt: skip
