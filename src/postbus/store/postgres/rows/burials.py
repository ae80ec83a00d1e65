"""What becomes of dead letters and of whole subscriptions: revived, purged, discarded; inside a transaction."""

from collections.abc import Sequence
from typing import Final

from postbus.store.postgres.rows.session import Session
from postbus.store.session import Row

__all__ = ["Burials"]

CHUNK: Final = 1_000
_NOTHING: Final = (None, None, None, None)


class Burials:
    """Changes dead letters on one transaction's connection, at one moment, in somebody's name."""

    def __init__(self, session: Session, actor: str) -> None:
        """Work inside a write transaction; `actor` goes into the audit rows."""
        self._db, self._catalog, self._now = session
        self._actor = actor

    def revive(self, keys: Sequence[Row]) -> int:
        """Make dead letters pending again, as if never tried; return how many were still dead."""
        rows = self._still_dead(keys)
        now = self._now
        for row in rows:
            event_id, name, route, *_ = row
            route = self._catalog.variant(self._db, route, solo=False)
            epoch = self._db.value("draw_epochs", (1,))
            self._db.run("revive", (route, now, now, now, epoch, now, event_id, name))
        self._log(rows, "RETRIED", "PENDING")
        return len(rows)

    def purge(self, keys: Sequence[Row]) -> int:
        """Remove dead letters; return how many were still dead."""
        rows = self._still_dead(keys)
        self._db.many("drop_delivery", [row[:2] for row in rows])
        self._log(rows, "PURGED", "FAILED")
        return len(rows)

    def discard_all(self, subscription: str, after: int = 0) -> int:
        """Remove every delivery of a subscription, of the events behind a position; return how many there were."""
        total = 0
        while ids := self.discard_some(subscription, after):
            total, after = total + len(ids), ids[-1]
        return total

    def discard_some(self, subscription: str, after: int) -> list[int]:
        """Remove the first deliveries of a subscription behind a position; return whose they were, in order."""
        rows = self._db.run("some_deliveries", (subscription, after, CHUNK))
        self.discard([(event_id, subscription, attempt, epoch) for event_id, attempt, epoch, _ in rows])
        return [row[0] for row in rows]

    def discard(self, rows: Sequence[Row]) -> set[int]:
        """Remove deliveries (event id, subscription, attempt, epoch), whatever their state; return whose they were."""
        self._db.many("drop_delivery", [row[:2] for row in rows])
        self._db.many(
            "log",
            [
                (event_id, subscription, "DISCARDED", self._now, None, attempt, epoch, self._actor, *_NOTHING)
                for event_id, subscription, attempt, epoch in rows
            ],
        )
        return {row[0] for row in rows}

    def _still_dead(self, keys: Sequence[Row]) -> list[Row]:
        return self._db.many("dead_held", sorted(key[:2] for key in keys))

    def _log(self, rows: Sequence[Row], action: str, status: str) -> None:
        self._db.many(
            "log",
            [(row[0], row[1], action, self._now, status, row[3], row[8], self._actor, *_NOTHING) for row in rows],
        )
