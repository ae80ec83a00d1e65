"""`postbus stats`: the bus in figures."""

from collections.abc import Iterator
from typing import Final

from rich.console import RenderableType

from postbus.cli.console import Output, emit, line, table
from postbus.cli.options import Format, Url, existing_store
from postbus.model import Stats
from postbus.telling import many

__all__ = ["EXAMPLES", "stats"]

EXAMPLES: Final = "Example: postbus stats\n\nExample: postbus stats -o json | jq '.subscriptions | map(.pending)'"
RATES: Final = ("published", "COMPLETED", "COMPLETED_WITH_ERRORS", "FAILED", "EXPIRED", "RETRIED")


def stats(*, url: Url = None, output: Format = Output.TABLE) -> None:
    """Show the bus in figures: how much waits, runs, is done and is dead, and what happened in the last minute.

    Of those that read by position: how far each has come, how many positions are left (LAG), how long the first of
    these has waited, who reads, and when the position last moved.
    """
    with existing_store(url) as store:
        found, where = store.stats(), store.url
    emit(output, found, lambda: _view(found, where))


def _view(found: Stats, where: str) -> Iterator[RenderableType]:
    yield line(f"{where}: {many(found.events, 'event')}, the last is {found.head}, {found.store_bytes / 1e6:,.1f} MB\n")
    yield table(
        "SUBSCRIPTION  PENDING  SCHEDULED  OLDEST WAITS  PROCESSING  COMPLETED  WITH ERRORS  DEAD",
        (
            (each.name, each.pending, each.scheduled, each.oldest_age, each.processing, each.completed,
             each.completed_with_errors, each.dead)
            for each in found.subscriptions
        ),
    )  # fmt: skip
    if found.checkpoints:
        yield line("")
        yield table(
            "SUBSCRIPTION  STREAM  POSITION  LAG  WAITS  READ BY  MOVED",
            (
                (each.subscription, each.stream, each.position, each.lag, each.waiting, each.worker_id, each.moved_at)
                for each in found.checkpoints
            ),
        )
    last = ", ".join(f"{found.rates[name]:,.0f} {name.lower()}" for name in RATES if found.rates.get(name))
    yield line(f"\nIn the last minute: {last or 'nothing'}".replace("_", " "))
    for holder in found.holders:
        yield line(f"followers {holder.told}", "yellow")
    if found.unhandled:
        yield line(f"{many(sum(found.unhandled.values()), 'event')} nobody handles: see postbus doctor", "yellow")
