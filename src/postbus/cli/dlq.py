"""`postbus dlq`: look at dead letters, retry them, purge them."""

from enum import StrEnum
from itertools import chain
from typing import Annotated

import typer

from postbus.cli.console import Output, confirm, emit, many, progress, say, table, tell_rest
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
)
from postbus.dlq import DeadLetters
from postbus.errors import InvalidRequest
from postbus.model import DeadLetter
from postbus.store import Store
from postbus.store.contract import DeadFilter

__all__ = ["group", "reason"]

ACTOR = "cli"
group = typer.Typer(
    name="dlq",
    help="Look at dead letters, retry them, purge them.",
    no_args_is_help=True,
    epilog="Example: postbus dlq list",
)


class By(StrEnum):
    """Which age a purge goes by."""

    CREATED_AT = "created_at"
    DIED_AT = "died_at"


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
    rows = ((str(d.event.id), d.event.type, d.subscription, d.attempts, d.died_at, reason(d)) for d in page)
    emit(output, page.items, lambda: [table("ID  TYPE  SUBSCRIPTION  ATTEMPTS  DIED  REASON", rows)] * bool(page.items))
    tell_rest(page, "dead letters")


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
    event_ids: Annotated[list[int] | None, typer.Argument(metavar="[ID]...", help="The events' ids.")] = None,
    *,
    everything: Annotated[bool, typer.Option("--all", help="All dead letters that the filters let through.")] = False,
    subscription: SubscriptionName = None,
    event_type: EventType = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    url: Url = None,
    output: Format = Output.TABLE,
) -> None:
    """Give dead letters all their attempts anew. What happened before stays in the audit log."""
    if bool(event_ids) == everything:
        raise InvalidRequest("name the ids to retry, or --all")
    if event_ids and event_type:
        raise InvalidRequest("--type goes with --all")
    with existing_store(url) as store:
        if event_ids:
            count = _retry_each(store, set(event_ids), subscription, dry_run=dry_run)
        else:
            which = DeadFilter(subscription=subscription, type=event_type)
            count = _all(store, which, "retry", dry_run=dry_run, yes=yes)
    _tell(output, "retried", count, dry_run=dry_run)


def _retry_each(store: Store, event_ids: set[int], subscription: str | None, *, dry_run: bool) -> int:
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
    event_ids: Annotated[list[int] | None, typer.Argument(metavar="[ID]...", help="The events' ids.")] = None,
    *,
    older_than_days: Annotated[
        float | None, typer.Option(min=0, help="How old they must be; 0 means all of them.")
    ] = None,
    by: Annotated[By, typer.Option(help="Count the age from the publishing or from the death.")] = By.CREATED_AT,
    subscription: SubscriptionName = None,
    event_type: EventType = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    url: Url = None,
    output: Format = Output.TABLE,
) -> None:
    """Remove dead letters for good. The events, and what happened to them, stay in the log."""
    if bool(event_ids) == (older_than_days is not None):
        raise InvalidRequest("name the ids to purge, or say --older-than-days")
    if event_ids and event_type:
        raise InvalidRequest("--type goes with --older-than-days")
    with existing_store(url) as store:
        if event_ids:
            count = _purge_each(store, set(event_ids), subscription, dry_run=dry_run, yes=yes)
        else:
            days = older_than_days or 0
            which = DeadLetters(store).older_than(days, by.value, subscription=subscription, type=event_type)
            count = _all(store, which, "purge", dry_run=dry_run, yes=yes)
    _tell(output, "purged", count, dry_run=dry_run)


def _purge_each(store: Store, event_ids: set[int], subscription: str | None, *, dry_run: bool, yes: bool) -> int:
    """Purge the named ones; if one of them is not dead, none of them is purged."""
    dead = DeadLetters(store, ACTOR)
    found = sum(len(dead.get(event_id, subscription)) for event_id in event_ids)
    if not dry_run:
        confirm(f"Purge {many(found, 'dead letter')}?", yes=yes)
        for event_id in event_ids:
            store.purge_dead(DeadFilter(event_id=event_id, subscription=subscription), ACTOR)
    return found


def _all(store: Store, which: DeadFilter, verb: str, *, dry_run: bool, yes: bool) -> int:
    """Retry or purge what the filter lets through, once that is agreed to; return how many there are."""
    page = store.dead_letters(which, limit=1, offset=0, after=None)
    if dry_run or not page.total:
        return page.total
    more = ", or more" if page.total_capped else ""
    confirm(f"{verb.capitalize()} {many(page.total, 'dead letter')}{more}?", yes=yes)
    change = store.retry_dead if verb == "retry" else store.purge_dead
    with progress(f"{verb} dead letters", None if page.total_capped else page.total) as done:
        return change(which, ACTOR, done)


def _tell(output: Output, done: str, count: int, *, dry_run: bool) -> None:
    emit(output, {done: 0 if dry_run else count, "matching": count, "dry_run": dry_run}, lambda: ())
    if output is Output.TABLE:
        say(f"{many(count, 'dead letter')} {'would be ' if dry_run else ''}{done}")
