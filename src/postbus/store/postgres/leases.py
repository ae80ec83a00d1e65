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
        if len(routes) == 1:
            return self._db.run("due_on", (routes[0], self._now, limit))
        return self._db.run("due", (json_array(routes), self._now, limit))

    def _take(self, rows: list[Candidate], claim: Claim, end: int, *, suspect: bool) -> list[Taken]:
        if not rows:
            return []
        places = "{" + ",".join(f'"{row[5]}"' for row in rows) + "}"
        first = self._db.value("take", (places, claim.subscription, end, self._now, claim.worker_id, claim.owner))
        return [
            Taken(event_id, attempt + 1, retry_count, epoch, end, suspect)
            for epoch, (_, event_id, _, attempt, retry_count, _) in enumerate(rows, first)
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
