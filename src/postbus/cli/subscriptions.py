"""`postbus subscriptions`: the named consumer groups over the log."""

from dataclasses import asdict
from typing import Any

import typer

from postbus.cli.console import Output, emit, table
from postbus.cli.options import Format, Url, existing_store
from postbus.model import HandlerRecord, Subscription, SubscriptionStats

__all__ = ["group"]

group = typer.Typer(name="subscriptions", no_args_is_help=True, epilog="Example: postbus subscriptions list")


@group.callback()
def subscriptions() -> None:
    """Look at the named consumer groups over the log."""


@group.command("list", epilog="Example: postbus subscriptions list -o json")
def list_subscriptions(*, url: Url = None, output: Format = Output.TABLE) -> None:
    """List subscriptions: what each wants, who handles it, and how much is left."""
    with existing_store(url) as store:
        handlers, depth = store.handlers(), {each.name: each for each in store.stats().subscriptions}
        rows = [_row(each, depth.get(each.name), handlers) for each in store.subscriptions()]
    columns = "NAME  MODE  WANTS  TAGS  PAUSED  LEASE  RETRIES  HANDLERS  PENDING  PROCESSING  DEAD"
    emit(output, rows, lambda: [table(columns, map(_cells, rows))])


def _row(each: Subscription, depth: SubscriptionStats | None, handlers: tuple[HandlerRecord, ...]) -> dict[str, Any]:
    mine = sorted({handler.pattern for handler in handlers if handler.subscription == each.name})
    left = {name: getattr(depth, name, None) for name in ("pending", "processing", "dead")}
    return asdict(each) | {"handlers": mine} | left


def _cells(row: dict[str, Any]) -> tuple[object, ...]:
    retries = str(row["retry"]["max_retries"]) if row["retry"] else "the bus's"
    wants = (" ".join(row[part]) for part in ("patterns", "tags"))
    depth = (row["pending"], row["processing"], row["dead"])
    lease = row["lease"] or "the bus's"
    return (row["name"], row["mode"], *wants, row["paused"], lease, retries, " ".join(row["handlers"]), *depth)
