"""The options that commands share, and how they open the bus."""

import re
from collections.abc import Generator
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Annotated, Final

import typer

from postbus.cli.console import Output
from postbus.config import Settings
from postbus.errors import NotFound
from postbus.model import Subscription
from postbus.store import Log, Queue, exists, log_of, open_store, shown

__all__ = ["After", "DryRun", "EventId", "EventType", "Format", "Limit", "SubscriptionName", "Tags", "Url", "Yes"]

MOST_NAMED: Final = 20
UNITS: Final = {"": 1, "s": 1, "m": 60, "h": 3_600, "d": 86_400}

Url = Annotated[
    str | None,
    typer.Option(
        help="The bus: sqlite:///shop.db, postgresql://user@host/db, http://host:port. "
        "Else POSTBUS_URL, postbus.toml, sqlite:///postbus.db."
    ),
]
Format = Annotated[Output, typer.Option("--output", "-o", envvar="POSTBUS_OUTPUT", help="How to print data.")]
EventId = Annotated[int, typer.Argument(metavar="ID", help="The event's id.")]
SubscriptionName = Annotated[str | None, typer.Option("--subscription", help="Only this subscription.")]
EventType = Annotated[str | None, typer.Option("--type", help="Only events of this type; * is any characters.")]
Tags = Annotated[list[str] | None, typer.Option("--tag", help="A tag; may be given again.")]
Limit = Annotated[int, typer.Option(metavar="N", min=1, max=10_000, help="How many to show at most.")]
After = Annotated[int | None, typer.Option(help="Go on after this id, the last of the page before.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask; needed where there is no terminal.")]


@contextmanager
def existing_store(url: str | None, *, listen: bool = False) -> Generator[Queue]:
    """Open a store that is there already; raise NotFound, making nothing, if there is none.

    Only what watches it need `listen`: for others that would be one more connection.
    """
    settings = Settings.load(url=url)
    if not exists(settings.url):
        where = shown(settings.url)
        raise NotFound(f"there is no bus at {where}: name it with --url or POSTBUS_URL, or make it: postbus migrate")
    token = settings.token.get_secret_value() if settings.token else None
    store = open_store(settings.url, auto_migrate=False, direct_url=settings.direct_url, listen=listen, token=token)
    try:
        yield store
    finally:
        store.close()


@contextmanager
def existing_log(url: str | None, what: str, *, listen: bool = False) -> Generator[Log]:
    """Open a database that is there already; raise InvalidRequest, saying that `what` needs one, for a server's URL."""
    with existing_store(url, listen=listen) as store:
        yield log_of(store, what)


def find(store: Queue, name: str) -> Subscription:
    """Return a subscription by its name; raise NotFound, naming those that there are."""
    found = store.subscriptions()
    for each in found:
        if each.name == name:
            return each
    named = ", ".join(each.name for each in found[:MOST_NAMED]) + (" …" if len(found) > MOST_NAMED else "")
    raise NotFound(f"there is no subscription {name!r}; there are: {named or 'none'}")


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


def moment_before(text: str, now: datetime) -> datetime:
    """Return the moment meant by RFC 3339 text, or by a length of time before now."""
    return parse_moment(text) if "-" in text else now - timedelta(seconds=parse_seconds(text))
