"""The options that commands share, and how they open the bus."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Annotated, Final
from urllib.parse import unquote, urlsplit

import typer

from postbus.cli.console import Output
from postbus.config import Settings
from postbus.errors import NotFound
from postbus.store import Store, open_store

__all__ = [
    "After",
    "DryRun",
    "EventType",
    "Format",
    "Limit",
    "SubscriptionName",
    "Tags",
    "Url",
    "Yes",
    "existing_store",
    "parse_moment",
    "parse_seconds",
]

UNITS: Final = {"": 1, "s": 1, "m": 60, "h": 3_600, "d": 86_400}

Url = Annotated[
    str | None,
    typer.Option(
        help="Where the bus lives: sqlite:///shop.db (relative) or sqlite:////var/lib/shop.db. "
        "Else POSTBUS_URL, else the settings file, else sqlite:///postbus.db.",
        show_default=False,
    ),
]
Format = Annotated[
    Output, typer.Option("--output", "-o", envvar="POSTBUS_OUTPUT", help="How to print data.", show_envvar=False)
]
SubscriptionName = Annotated[
    str | None, typer.Option("--subscription", help="Only this subscription.", show_default=False)
]
EventType = Annotated[
    str | None,
    typer.Option("--type", help="Only events of this type; * stands for any characters.", show_default=False),
]
Tags = Annotated[list[str] | None, typer.Option("--tag", help="A tag; may be given again.", show_default=False)]
Limit = Annotated[int, typer.Option(min=1, max=10_000, help="How many to show at most.")]
After = Annotated[
    int | None, typer.Option(help="Go on after this id, the last one of the page before.", show_default=False)
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask; needed where there is no terminal.")]


@contextmanager
def existing_store(url: str | None) -> Iterator[Store]:
    """Open a store that is there already; raise NotFound, making nothing, if there is none."""
    where = Settings.load(url=url).url
    _require_file(where)
    store = open_store(where, auto_migrate=False)
    try:
        yield store
    finally:
        store.close()


def _require_file(url: str) -> None:
    parts = urlsplit(url)
    path = Path(unquote(parts.path.removeprefix("/")))
    if parts.scheme == "sqlite" and not path.exists():
        raise NotFound(f"there is no file {path}: name the bus with --url or POSTBUS_URL, or make it: postbus migrate")


def parse_seconds(text: str) -> float:
    """Return the seconds meant by 90, 90s, 5m, 2h or 1d."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text)
    if found is None:
        raise typer.BadParameter(f"{text!r} is not a length of time such as 90, 90s, 5m, 2h or 1d")
    return float(found[1]) * UNITS[found[2]]


def parse_moment(text: str) -> datetime:
    """Return the moment meant by RFC 3339 text with its time zone."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise typer.BadParameter(f"{text!r} is not a moment with a time zone such as 2030-01-31T12:00:00Z")
    return moment
