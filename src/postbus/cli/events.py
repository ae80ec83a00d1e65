"""`postbus events`: look at the log."""

from collections.abc import Iterator
from dataclasses import replace
from textwrap import indent
from typing import Annotated

import typer
from rich.console import RenderableType

from postbus.cli.console import Output, emit, line, table, tell_rest, to_json
from postbus.cli.options import After, EventId, EventType, Format, Limit, Tags, Url, existing_store, find
from postbus.errors import NotFound
from postbus.model import AttemptError, Event, Status, Stream
from postbus.store import Queue

__all__ = ["event_view", "first_line", "group"]

group = typer.Typer(
    name="events", help="Look at events.", no_args_is_help=True, epilog="Example: postbus events list --status PENDING"
)
Standing = Annotated[str, typer.Option("--subscription", help="How events stand in this subscription.")]


@group.command(
    "list",
    epilog="Example: postbus events list --status FAILED --type 'order.*' --limit 50"
    "\n\nExample: postbus events list -o jsonl | jq .payload",
)
def list_events(
    *,
    status: Annotated[Status | None, typer.Option(case_sensitive=False, help="Only events that stand so.")] = None,
    event_type: EventType = None,
    tags: Tags = None,
    limit: Limit = 20,
    after: After = None,
    subscription: Standing = "default",
    url: Url = None,
    output: Format = Output.TABLE,
) -> None:
    """List events, newest first."""
    with existing_store(url) as store:
        _require_known(store, subscription)
        page = store.list(
            subscription=subscription, status=status, type=event_type, tags=tags or (), limit=limit, offset=0,
            after=after,
        )  # fmt: skip
    rows = (
        (str(e.id), e.type, e.status, e.retry_count, e.created_at, ",".join(e.tags), e.title, first_line(e.last_error))
        for e in page
    )
    columns = "ID  TYPE  STATUS  FAILURES  CREATED  TAGS  TITLE  LAST ERROR"
    emit(output, page.items, lambda: [table(columns, rows)] if page.items else [])
    tell_rest(page, "events")


def _require_known(store: Queue, subscription: str) -> None:
    """Raise NotFound for a name that is none; `default` may be gone, and is asked for by nobody."""
    if subscription != "default":
        find(store, subscription)


def first_line(text: str | None) -> str:
    """Return what fits into a table."""
    whole = (text or "").partition("\n")[0]
    return whole if len(whole) <= 80 else whole[:79] + "…"  # noqa: PLR2004  a line's length


@group.command(epilog="Example: postbus events show 7\n\nExample: postbus events show 7 -o json | jq .logs")
def show(
    event_id: EventId, *, subscription: Standing = "default", url: Url = None, output: Format = Output.TABLE
) -> None:
    """Show one event: its payload, how it stands in each subscription, and all that happened to it."""
    with existing_store(url) as store:
        _require_known(store, subscription)
        try:
            event = replace(store.get(event_id, subscription), logs=store.logs(event_id))
        except NotFound:
            pruned = store.span(Stream.EVENTS).pruned
            if not 0 < event_id <= pruned:
                raise
            raise NotFound(
                f"event {event_id} is not in the log any more: what was done was archived (pruned through {pruned:,}). "
                f"Look in the lake: postbus pipeline replay --lake DIR --from {event_id} --to {event_id} --dry-run"
            ) from None
    emit(output, event, lambda: event_view(event))


def event_view(event: Event) -> Iterator[RenderableType]:
    """Show an event with all that is known of it."""
    yield line(f"event {event.id}  {event.type}", "bold")
    parts = {
        "uid": event.uid,
        "created": event.created_at.isoformat().replace("+00:00", "Z"),
        "title": event.title,
        "description": event.description,
        "key": event.key,
        "tags": ", ".join(event.tags) or None,
        "metadata": ", ".join(f"{name}={value}" for name, value in event.metadata.items()) or None,
        "priority": event.priority or None,
        "max retries": event.max_retries,
        "payload": indent(to_json(event.payload, indent=2), " " * 13).lstrip(),
    }
    yield line("\n".join(f"{name:<12} {value}" for name, value in parts.items() if value is not None))
    if event.deliveries:
        yield table(
            "\nSUBSCRIPTION  \nSTATUS  \nATTEMPT  \nNEXT RETRY  \nLEASED UNTIL  \nEXPIRED  \nWORKER",
            (
                (
                    s.subscription,
                    "PARKED" if s.parked else s.status,
                    s.attempt,
                    s.next_retry_at,
                    s.lease_until,
                    s.lease_expired,
                    s.worker_id,
                )
                for s in event.deliveries
            ),
        )
    yield from (each for state in event.deliveries for error in state.errors for each in _error_view(error))
    if event.logs:
        yield table(
            "\nTIME  \nACTION  \nSUBSCRIPTION  \nATTEMPT  \nWORKER  \nMS  \nERROR",
            (
                (log.created_at, log.action, log.subscription, log.attempt, log.worker_id,
                 "" if log.execution_time_ms is None else f"{log.execution_time_ms:.1f}", first_line(log.error_message))
                for log in event.logs
            ),
        )  # fmt: skip


def _error_view(error: AttemptError) -> Iterator[RenderableType]:
    when = f" at {error.at:%Y-%m-%d %H:%M:%SZ}" if error.at else ""
    by = f" by {error.worker_id}" if error.worker_id else ""
    yield line(f"\nattempt {error.attempt}{when}{by}: {error.type}: {error.message}", "red")
    if error.traceback:
        yield line(indent(error.traceback.rstrip(), "  "), "dim")
