"""Dead letters: look at them, retry them, purge them. Needs only a store, so an admin tool can use it alone."""

from collections.abc import Callable
from datetime import timedelta
from typing import Final, Literal

from postbus.errors import InvalidRequest, NotFound
from postbus.model import DeadLetter, Page
from postbus.store.contract import DeadFilter, Queue

__all__ = ["MAX_PAGE", "DeadLetters", "check_page"]

Progress = Callable[[int], None]
MAX_PAGE: Final = 100_000
LARGEST: Final = (1 << 63) - 1
"""No event has a higher id."""


def check_page(limit: int, offset: int) -> None:
    """Raise InvalidRequest for a page that cannot be."""
    if not 1 <= limit <= MAX_PAGE or not 0 <= offset < 1 << 62:
        raise InvalidRequest(f"limit must lie between 1 and {MAX_PAGE:,}, offset must be 0 or more")


class DeadLetters:
    """The dead letters of a store."""

    def __init__(self, store: Queue, actor: str = "dlq") -> None:
        """Work on a store; `actor` goes into the audit rows."""
        self._store = store
        self._actor = actor

    def list(
        self,
        offset: int = 0,
        limit: int = 100,
        subscription: str | None = None,
        *,
        type: str | None = None,  # noqa: A002  the public word for it
        after: int | str | None = None,
    ) -> Page[DeadLetter]:
        """Return dead letters, the newest event first; `after` is `next` of the page before."""
        check_page(limit, offset)
        if subscription is not None and all(each.name != subscription for each in self._store.subscriptions()):
            raise NotFound(f"there is no subscription {subscription!r}")
        which = DeadFilter(subscription=subscription, type=type)
        return self._store.dead_letters(which, limit=limit, offset=offset, after=after)

    def get(self, event_id: int, subscription: str | None = None) -> tuple[DeadLetter, ...]:
        """Return an event's dead letters, one for each subscription it died in; raise NotFound if there is none."""
        which = DeadFilter(event_id=event_id, subscription=subscription)
        possible = 0 < event_id <= LARGEST
        if possible and (found := self._store.dead_letters(which, limit=1_000, offset=0, after=None).items):
            return found
        raise NotFound(f"event {event_id} is not a dead letter")

    def retry(self, event_id: int, subscription: str | None = None) -> int:
        """Give a dead letter all its attempts anew, in one subscription or in every one it died in.

        Returns how many were revived; raises NotFound if it is not dead. Its history stays in the audit log.
        """
        which = DeadFilter(event_id=event_id, subscription=subscription)
        if 0 < event_id <= LARGEST and (count := self._store.retry_dead(which, self._actor)):
            return count
        raise NotFound(f"event {event_id} is not a dead letter")

    def retry_all(
        self,
        *,
        subscription: str | None = None,
        type: str | None = None,  # noqa: A002  the public word for it
        progress: Progress | None = None,
    ) -> int:
        """Revive every dead letter that matches; return how many."""
        return self._store.retry_dead(DeadFilter(subscription=subscription, type=type), self._actor, progress)

    def purge(
        self,
        older_than_days: float,
        by: Literal["created_at", "died_at"] = "created_at",
        *,
        subscription: str | None = None,
        type: str | None = None,  # noqa: A002  the public word for it
        progress: Progress | None = None,
    ) -> int:
        """Remove dead letters at least this old, counted from their publishing or their death; return how many.

        The events themselves, and what happened to them, stay in the log.
        """
        return self._store.purge_dead(
            self.older_than(older_than_days, by, subscription=subscription, type=type), self._actor, progress
        )

    def older_than(
        self,
        days: float,
        by: Literal["created_at", "died_at"] = "created_at",
        *,
        subscription: str | None = None,
        type: str | None = None,  # noqa: A002  the public word for it
    ) -> DeadFilter:
        """Return the filter that `purge` uses, to count with before."""
        if days < 0:
            raise InvalidRequest("older_than_days must be 0 or more")
        if by not in ("created_at", "died_at"):
            raise InvalidRequest("purge goes by created_at or died_at")
        try:
            before = self._store.now() - timedelta(days=days)
        except (OverflowError, ValueError):
            raise InvalidRequest(f"older_than_days reaches beyond the calendar: {days!r:.40}") from None
        return DeadFilter(subscription=subscription, type=type, before=before, by=by)
