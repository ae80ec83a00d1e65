"""Subscriptions: made, widened, paused."""

from collections.abc import Sequence
from datetime import timedelta

import orjson

from postbus.errors import Conflict
from postbus.model import Mode, Subscription
from postbus.retry import RetryPolicy
from postbus.store import followers
from postbus.store.session import Session, bump


def create_subscription(
    session: Session,
    name: str,
    patterns: Sequence[str],
    tags: Sequence[str],
    *,
    mode: Mode,
    lease: timedelta | None,
    retry: RetryPolicy | None,
    start: str | int,
) -> Subscription:
    """Make a subscription; a queue's cursor and an ordered one's checkpoint begin at `start`."""
    db, catalog, now = session
    if catalog.known_number(name) is not None:
        raise Conflict(f"there is a subscription {name!r} already")
    db.run("hold_pruned")
    position = followers.start_position(session, mode, start)
    row = (
        name,
        mode,
        orjson.dumps(list(patterns)).decode(),
        orjson.dumps(list(tags)).decode(),
        None if lease is None else lease // timedelta(microseconds=1),
        None if retry is None else orjson.dumps(retry.to_dict()).decode(),
        now,
    )
    number = db.value("add_subscription", row)
    if number is None:
        raise Conflict(f"there is a subscription {name!r} already")
    bump(session)
    catalog.refresh(db)
    if mode is Mode.QUEUE:
        db.run("add_cursor", (number, str(start) if isinstance(start, str) else str(position)))
    if mode is Mode.ORDERED:
        followers.add_checkpoint(session, name, position)
    return catalog.subscription(name)


def widen_subscription(session: Session, name: str, pattern: str, tags: Sequence[str] = ()) -> bool:
    """Let a subscription want a pattern with these tags too; return whether that was news."""
    found = session.catalog.subscription(name)
    covered = pattern in found.patterns or "*" in found.patterns
    patterns = found.patterns if covered else (*found.patterns, pattern)
    wanted = tuple(dict.fromkeys((*found.tags, *tags))) if tags and found.tags else ()
    if patterns == found.patterns and wanted == found.tags:
        return False
    set_interests(session, name, patterns, wanted)
    return True


def set_interests(session: Session, name: str, patterns: Sequence[str], tags: Sequence[str]) -> None:
    """Let a subscription want this and nothing else, from where it stands."""
    session.db.run("set_interests", (orjson.dumps(patterns).decode(), orjson.dumps(tags).decode(), name))
    bump(session)


def pause_subscription(session: Session, name: str, paused: bool) -> None:  # noqa: FBT001  the state itself
    """Stop or resume claiming from a subscription."""
    session.catalog.subscription(name)
    session.db.run("set_paused", (paused, name))
    bump(session)


def all_subscriptions(session: Session) -> tuple[Subscription, ...]:
    """Return all subscriptions by name."""
    return session.catalog.subscriptions()
