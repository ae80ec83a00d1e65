"""The lease verbs where PostgreSQL has a better way than statement after statement."""

from postbus.model import Lease
from postbus.store.contract import Claim, Settlement
from postbus.store.leases import Candidate, Leases, Taken
from postbus.store.postgres.connection import array
from postbus.store.records import json_array

__all__ = ["PostgresLeases"]


class PostgresLeases(Leases):
    """Leases, with fewer round trips: rows are found and locked at once, taken at once, finished at once."""

    def _merged(self, routes: list[int], limit: int) -> list[Candidate]:
        return self._db.run("due", (json_array(routes), self._now, limit))

    def _take(self, rows: list[Candidate], claim: Claim, end: int, *, suspect: bool) -> list[Taken]:
        if not rows:
            return []
        first = self._draw(len(rows))
        ids = json_array(row[1] for row in rows)
        self._db.run("take", (ids, claim.subscription, end, first, self._now, claim.worker_id, claim.owner))
        return [
            Taken(event_id, attempt + 1, retry_count, epoch, end, suspect)
            for epoch, (_, event_id, _, attempt, retry_count) in enumerate(rows, first)
        ]

    def _finish_all(self, batch: list[Settlement], subscription: str, worker_id: str) -> list[Lease]:
        """Finish what simply worked, in one statement; in order of ids, so that two batches never wait crosswise."""
        batch = sorted(batch, key=lambda each: each.lease.event_id)
        finished = self._db.run(
            "finish_all",
            (
                array(each.lease.event_id for each in batch),
                array(each.lease.epoch for each in batch),
                array(each.execution_time_ms or 0.0 for each in batch),
                subscription,
                worker_id,
                self._now,
            ),
        )
        done = {event_id for (event_id,) in finished}
        return [each.lease for each in batch if each.lease.event_id in done]
