"""The named consumer groups over the log: list, make, pause, delete."""

import logging
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Final, Literal

from postbus.errors import Conflict, InvalidRequest, NotFound
from postbus.handlers import Start, check_start, check_subscription
from postbus.model import Mode, Stream, Subscription
from postbus.observe import tell
from postbus.pattern import check_pattern
from postbus.retry import RetryPolicy
from postbus.store.contract import Queue, Rewound

__all__ = ["Subscriptions", "ordered"]

SHORTEST_LEASE: Final = timedelta(seconds=0.1)
LONGEST_LEASE: Final = timedelta(days=365)


def ordered(name: str) -> Conflict:
    """Return the error of handlers that would take from a subscription of mode ordered."""
    return Conflict(f"{name!r} is a subscription of mode ordered: follow it by @bus.follow, or take another")


class Subscriptions:
    """The named consumer groups over the log."""

    def __init__(self, store: Queue, actor: str) -> None:
        """Work on a store; `actor` goes into the audit rows."""
        self._store = store
        self._actor = actor

    def list(self) -> tuple[Subscription, ...]:
        """Return all subscriptions by name."""
        return self._store.subscriptions()

    def get(self, name: str) -> Subscription:
        """Return one subscription; raise NotFound."""
        for each in self.list():
            if each.name == name:
                return each
        raise NotFound(f"there is no subscription {name!r}")

    def create(
        self,
        name: str,
        patterns: Sequence[str] | str = "*",
        mode: Literal["queue", "ordered", "spark"] = "queue",
        *,
        tags: Sequence[str] = (),
        lease: float | timedelta | None = None,
        retry: RetryPolicy | None = None,
        start: Start = "now",
    ) -> Subscription:
        """Make a subscription that gets what comes after `start`; raise Conflict if the name is taken."""
        wanted = [patterns] if isinstance(patterns, str) else list(patterns)
        if not wanted:
            raise InvalidRequest("a subscription needs a pattern")
        if isinstance(tags, str):
            raise InvalidRequest("tags must be a list of strings")
        length = timedelta(seconds=lease) if isinstance(lease, int | float) else lease
        if length is not None and not SHORTEST_LEASE <= length <= LONGEST_LEASE:
            raise InvalidRequest("lease must lie between a tenth of a second and a year")
        return self._store.create_subscription(
            check_subscription(name),
            [check_pattern(each) for each in wanted],
            list(tags),
            mode=Mode(mode),
            lease=length,
            retry=retry,
            start=check_start(start),
        )

    def ensure(self, name: str, pattern: str, tags: Sequence[str] = (), *, start: Start = "beginning") -> None:
        """Make sure a queue subscription exists and wants this pattern with these tags (none: with any).

        One that does not exist yet begins at `start`.
        """
        if all(each.name != name for each in self.list()):
            self._create_for_handler(name, pattern, tags, start)
        if self.get(name).mode is Mode.ORDERED:
            raise ordered(name)
        if self._store.widen_subscription(name, pattern, tags):
            tell(logging.INFO, "subscription_widened", subscription=name, pattern=pattern, tags=list(tags))

    def _create_for_handler(self, name: str, pattern: str, tags: Sequence[str], start: Start) -> None:
        log = self._store.span(Stream.EVENTS)
        try:
            self.create(name, pattern, tags=tags, start=start)
        except Conflict:
            tell(logging.DEBUG, "subscription_made_elsewhere", subscription=name)
            return
        waiting = next((each.pending for each in self._store.stats().subscriptions if each.name == name), 0)
        position = {"beginning": log.pruned, "now": log.head}.get(str(start), start)
        tell(logging.INFO, "subscription_created", subscription=name, position=position, waiting=waiting)

    def pause(self, name: str) -> None:
        """Have nothing more claimed from it; what runs goes on."""
        self._store.pause_subscription(name, paused=True)

    def resume(self, name: str) -> None:
        """Have it claimed from again."""
        self._store.pause_subscription(name, paused=False)

    def rewind(self, name: str, to: int | datetime | Literal["beginning", "now"], *, dry_run: bool = False) -> Rewound:
        """Have an ordered subscription or a queue go on after an id, from a moment, the `beginning`, or from `now` on.

        A queue goes back only. Its events after that position are handed out again, completed and dead ones too, and
        leases on them are lost. Returns how many events come again, and how many unfinished or dead deliveries are
        discarded because their events come again; with `dry_run` nothing is changed.
        """
        return self._store.rewind(name, to, self._actor, dry_run=dry_run)

    def delete(self, name: str) -> int:
        """Remove it and its unfinished deliveries, each recorded in the audit log; return how many there were."""
        return self._store.delete_subscription(name, self._actor)
