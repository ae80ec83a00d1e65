"""`postbus stats`: the bus in figures."""

from collections.abc import Iterator

import typer
from rich.console import RenderableType
from rich.text import Text

from postbus.cli.console import Output, emit, printable, table
from postbus.cli.options import Format, Url, existing_store
from postbus.model import Stats

__all__ = ["register"]

RATES = ("published", "COMPLETED", "COMPLETED_WITH_ERRORS", "FAILED", "EXPIRED", "RETRIED")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog="Example: postbus stats\n\nExample: postbus stats -o json | jq '.subscriptions[].pending'")(
        stats
    )


def stats(*, url: Url = None, output: Format = Output.TABLE) -> None:
    """Show the bus in figures: how much waits, runs, is done and is dead, and what happened in the last minute."""
    with existing_store(url) as store:
        found, where = store.stats(), store.url
    emit(output, found, lambda: _view(found, where))


def _view(found: Stats, where: str) -> Iterator[RenderableType]:
    size = f"{found.store_bytes / 1e6:,.1f} MB"
    yield Text(printable(f"{where}  {found.events:,} events, the last is {found.head:,}, {size}\n"))
    yield table(
        ("SUBSCRIPTION", "PENDING", "OF THEM LATER", "OLDEST WAITS", "PROCESSING", "COMPLETED", "WITH ERRORS", "DEAD"),
        (
            (each.name, each.pending, each.scheduled, each.oldest_age, each.processing, each.completed,
             each.completed_with_errors, each.dead)
            for each in found.subscriptions
        ),
    )  # fmt: skip
    last = ", ".join(f"{found.rates[name]:,.0f} {name.lower()}" for name in RATES if found.rates.get(name))
    yield Text(f"\nIn the last minute: {last or 'nothing'}".replace("_", " "))
    if found.unhandled:
        yield Text(f"{sum(found.unhandled.values()):,} events nobody handles: see postbus doctor", style="yellow")
