"""`postbus dlq`: look at dead letters, retry them, purge them."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from itertools import chain
from typing import Annotated, Any

import typer
from rich.console import RenderableType

from postbus.cli.console import Output, confirm, emit, line, progress, say, table, tell_rest
from postbus.cli.events import event_view, first_line
from postbus.cli.options import (
    DryRun,
    EventId,
    EventType,
    Format,
    Limit,
    SubscriptionName,
    Url,
    Yes,
    existing_store,
    find,
)
from postbus.dlq import DeadLetters
from postbus.errors import InvalidRequest
from postbus.model import DeadLetter, Mode, State
from postbus.store import Queue
from postbus.store.contract import DeadFilter
from postbus.telling import many

__all__ = ["ACTOR", "Parked", "group", "parked", "reason"]

ACTOR = "cli"
group = typer.Typer(
    name="dlq",
    help="Look at dead letters, retry them, purge them.",
    no_args_is_help=True,
    epilog="Example: postbus dlq list",
)


IDS = Annotated[list[int] | None, typer.Argument(metavar="ID", help="The events' ids.")]


class By(StrEnum):
    """Which age a purge goes by."""

    CREATED_AT = "created_at"
    DIED_AT = "died_at"


@dataclass(frozen=True, slots=True)
class Parked:
    """How many events of a key wait for one of them. `behind` is None where that is gone, and nobody has read since."""

    behind: int | None
    key: str | None
    count: int

    @property
    def told(self) -> str:
        """All of it, in a line."""
        what = "parked, free to go on once it is read" if self.behind is None else f"parked behind {self.behind}"
        return f"{what} (key {self.key}): {self.count:,}"


def parked(standing: Sequence[tuple[int, str | None, State]]) -> list[Parked]:
    """Return what is parked of that which an ordered subscription has left behind, key by key."""
    first: dict[str | None, int | None] = {}
    counts = Counter[str | None]()
    for event_id, key, state in standing:
        first.setdefault(key, None if state is State.PARKED else event_id)
        counts[key] += state is State.PARKED
    return [Parked(first[key], key, count) for key, count in counts.items() if count]


@group.command("list", epilog="Example: postbus dlq list --type 'payment.*' --limit 50")
def list_dead(
    *,
    subscription: SubscriptionName = None,
    event_type: EventType = None,
    limit: Limit = 100,
    after: Annotated[str | None, typer.Option(help="Go on where the page before ended; it names this.")] = None,
    url: Url = None,
    output: Format = Output.TABLE,
) -> None:
    """List dead letters, the newest event first."""
    with existing_store(url) as store:
        page = DeadLetters(store).list(limit=limit, subscription=subscription, type=event_type, after=after)
        behind = _parked_behind(store, {each.subscription for each in page})
    told = [_told(each, behind.get((each.subscription, each.event.id))) for each in page]
    emit(output, told, lambda: _listed(page.items, behind))
    tell_rest(page, "dead letters")


def _parked_behind(store: Queue, names: set[str]) -> dict[tuple[str, int | None], Parked]:
    """Return what is parked in these subscriptions, by subscription and the event it is parked behind."""
    ordered = [each.name for each in store.subscriptions() if each.mode is Mode.ORDERED and each.name in names]
    return {(name, each.behind): each for name in ordered for each in parked(store.standing(name))}


def _told(letter: DeadLetter, behind: Parked | None) -> dict[str, Any]:
    parts = {field.name: getattr(letter, field.name) for field in fields(letter)}
    return parts | {"parked": 0 if behind is None else behind.count}


def _listed(letters: Sequence[DeadLetter], behind: Mapping[tuple[str, int | None], Parked]) -> Iterator[RenderableType]:
    """Show dead letters, with their keys if any has one, and what is parked behind them."""
    if not letters:
        return
    rows = [(str(d.event.id), d.event.type, d.subscription, d.attempts, d.died_at, reason(d)) for d in letters]
    if any(each.event.key is not None for each in letters):
        keyed = [(row[0], each.event.key, *row[1:]) for row, each in zip(rows, letters, strict=True)]
        yield table("ID  KEY  TYPE  SUBSCRIPTION  ATTEMPTS  DIED  REASON", keyed)
    else:
        yield table("ID  TYPE  SUBSCRIPTION  ATTEMPTS  DIED  REASON", rows)
    for each in letters:
        if (found := behind.get((each.subscription, each.event.id))) is not None:
            yield line(f"{each.subscription}: {found.told}")


def reason(letter: DeadLetter) -> str:
    """Return why it died, in a line."""
    return first_line(f"{letter.errors[-1].type}: {letter.errors[-1].message}") if letter.errors else ""


@group.command(epilog="Example: postbus dlq show 7")
def show(
    event_id: EventId, *, subscription: SubscriptionName = None, url: Url = None, output: Format = Output.TABLE
) -> None:
    """Show a dead letter: the event, and the error of each attempt."""
    with existing_store(url) as store:
        letters = DeadLetters(store).get(event_id, subscription)
    emit(output, letters, lambda: chain.from_iterable(event_view(each.event) for each in letters[:1]))
    if output is Output.TABLE:
        say(f"\nOnce the cause is mended: postbus dlq retry {event_id}", style="dim")


@group.command(
    epilog="Example: postbus dlq retry 7 12\n\nExample: postbus dlq retry --all --type 'payment.*' --dry-run"
)
def retry(
    event_ids: IDS = None,
    *,
    everything: Annotated[bool, typer.Option("--all", help="All dead letters that the filters let through.")] = False,
    subscription: SubscriptionName = None,
    event_type: EventType = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    url: Url = None,
    output: Format = Output.TABLE,
) -> None:
    """Give dead letters all their attempts anew.

    What happened before stays in the audit log.
    """
    if bool(event_ids) == everything:
        raise InvalidRequest("name the ids to retry, or --all")
    if event_ids and event_type:
        raise InvalidRequest("--type goes with --all")
    with existing_store(url) as store:
        if event_ids:
            count, capped = _retry_each(store, set(event_ids), subscription, dry_run=dry_run), False
        else:
            which = DeadFilter(subscription=subscription, type=event_type)
            count, capped = _all(store, which, "retry", dry_run=dry_run, yes=yes)
    _tell(output, "retried", count, capped=capped, dry_run=dry_run)


def _retry_each(store: Queue, event_ids: set[int], subscription: str | None, *, dry_run: bool) -> int:
    """Retry the named ones; if one of them is not dead, none of them is retried."""
    dead = DeadLetters(store, ACTOR)
    found = sum(len(dead.get(event_id, subscription)) for event_id in event_ids)
    return found if dry_run else sum(dead.retry(event_id, subscription) for event_id in event_ids)


@group.command(
    epilog="Example: postbus dlq purge 7 12 --yes"
    "\n\nExample: postbus dlq purge --older-than-days 30 --dry-run"
    "\n\nExample: postbus dlq purge --older-than-days 30 --by died_at --yes"
)
def purge(
    event_ids: IDS = None,
    *,
    older_than_days: Annotated[
        float | None, typer.Option(metavar="DAYS", min=0, help="How old they must be; 0 means all of them.")
    ] = None,
    by: Annotated[By, typer.Option(help="Count the age from the publishing or from the death.")] = By.CREATED_AT,
    subscription: SubscriptionName = None,
    event_type: EventType = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    url: Url = None,
    output: Format = Output.TABLE,
) -> None:
    """Remove dead letters for good.

    The events, and what happened to them, stay in the log.
    """
    if bool(event_ids) == (older_than_days is not None):
        raise InvalidRequest("name the ids to purge, or say --older-than-days")
    if event_ids and event_type:
        raise InvalidRequest("--type goes with --older-than-days")
    with existing_store(url) as store:
        if event_ids:
            count, capped = _purge_each(store, set(event_ids), subscription, dry_run=dry_run, yes=yes), False
        else:
            days = older_than_days or 0
            which = DeadLetters(store).older_than(days, by.value, subscription=subscription, type=event_type)
            count, capped = _all(store, which, "purge", dry_run=dry_run, yes=yes)
    _tell(output, "purged", count, capped=capped, dry_run=dry_run)


def _purge_each(store: Queue, event_ids: set[int], subscription: str | None, *, dry_run: bool, yes: bool) -> int:
    """Purge the named ones; if one of them is not dead, none of them is purged."""
    dead = DeadLetters(store, ACTOR)
    found = sum(len(dead.get(event_id, subscription)) for event_id in event_ids)
    if not dry_run:
        confirm(f"Purge {many(found, 'dead letter')}?", yes=yes)
        for event_id in event_ids:
            store.purge_dead(DeadFilter(event_id=event_id, subscription=subscription), ACTOR)
    return found


def _all(store: Queue, which: DeadFilter, verb: str, *, dry_run: bool, yes: bool) -> tuple[int, bool]:
    """Retry or purge what the filter lets through, once that is agreed to; return how many, and whether it is more."""
    if which.subscription is not None:
        find(store, which.subscription)  # or a slip in its name looks like nothing to do
    page = store.dead_letters(which, limit=1, offset=0, after=None)
    if dry_run or not page.total:
        return page.total, page.total_capped
    more = ", or more" if page.total_capped else ""
    confirm(f"{verb.capitalize()} {many(page.total, 'dead letter')}{more}?", yes=yes)
    change = store.retry_dead if verb == "retry" else store.purge_dead
    with progress(f"{verb} dead letters", None if page.total_capped else page.total) as done:
        return change(which, ACTOR, done), False


def _tell(output: Output, done: str, count: int, *, capped: bool, dry_run: bool) -> None:
    told = {done: 0 if dry_run else count, "matching": count, "dry_run": dry_run}
    emit(output, told | ({"matching_capped": True} if capped else {}), lambda: ())
    if output is Output.TABLE:
        found = f"{count:,} or more dead letters" if capped else many(count, "dead letter")
        say(f"{found} {'would be ' if dry_run else ''}{done}")
