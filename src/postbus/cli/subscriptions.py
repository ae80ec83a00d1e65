"""`postbus subscriptions`: the named consumer groups over the log."""

from collections import Counter
from dataclasses import asdict
from typing import Any

import typer
from rich.console import RenderableType

from postbus.cli.console import Output, age, emit, table
from postbus.cli.options import Format, Url, existing_store
from postbus.model import HandlerRecord, Subscription, SubscriptionStats

__all__ = ["group"]

group = typer.Typer(
    name="subscriptions",
    help="Look at the named consumer groups over the log.",
    no_args_is_help=True,
    epilog="Example: postbus subscriptions list",
)


@group.callback()
def subscriptions() -> None:
    """Look at the named consumer groups over the log."""


@group.command("list", epilog="Example: postbus subscriptions list -o json")
def list_subscriptions(*, url: Url = None, output: Format = Output.TABLE) -> None:
    """List subscriptions: what each wants, who handles it, and how much is left."""
    with existing_store(url) as store:
        found, handlers = store.subscriptions(), store.handlers()
        depth = {each.name: each for each in store.stats().subscriptions}
    rows = [_row(each, depth.get(each.name), handlers) for each in found]
    emit(output, rows, lambda: [_listing(rows)])


def _row(each: Subscription, depth: SubscriptionStats | None, handlers: tuple[HandlerRecord, ...]) -> dict[str, Any]:
    mine = Counter(handler.pattern for handler in handlers if handler.subscription == each.name)
    left = {"pending": depth.pending, "processing": depth.processing, "dead": depth.dead} if depth else {}
    retry = None if each.retry is None else each.retry.to_dict()
    return asdict(each) | {"retry": retry, "handlers": dict(mine)} | left


def _listing(rows: list[dict[str, Any]]) -> RenderableType:
    columns = ("NAME", "MODE", "WANTS", "TAGS", "PAUSED", "LEASE", "RETRIES", "HANDLERS", "PENDING", "LEASED", "DEAD")
    return table(
        columns,
        (
            (row["name"], row["mode"], " ".join(row["patterns"]), " ".join(row["tags"]), row["paused"],
             age(row["lease"]) if row["lease"] else "the bus's", _retries(row), sum(row["handlers"].values()),
             row.get("pending"), row.get("processing"), row.get("dead"))
            for row in rows
        ),
    )  # fmt: skip


def _retries(row: dict[str, Any]) -> str:
    return str(int(row["retry"]["max_retries"])) if row["retry"] else "the bus's"
