"""The lease verbs where PostgreSQL has a better way than statement after statement."""

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Final

from postbus.errors import UnsafeStore
from postbus.model import Lease
from postbus.store.contract import Settlement
from postbus.store.postgres.connection import array, run_steps, texts
from postbus.store.postgres.finishing import finish
from postbus.store.postgres.rows.leases import Candidate, Leases, Share
from postbus.store.postgres.rows.session import Session
from postbus.store.records import Held

__all__ = ["Marks", "PostgresLeases"]

FULL_LOOK_EVERY: Final = (10.0, 60.0)
FULL_LOOK_SHARE: Final = 0.002
"""How much of the time may go into looks from the beginning: less than would show among a hundred claims."""
BEGINNING: Final = 0
AT_ONCE: Final = 1_000
"""How many are leased by one statement: the epochs of one draw are 1,024."""


class Marks:
    """How far this process has taken each route: the due time of the last it took.

    While anybody keeps an old snapshot open, vacuum may remove nothing, and a look from the beginning of a route wades
    through everything finished since. So a look begins at the mark. What may lie before it (published by a transaction
    that was slow to commit, or left by a claim that failed) is found by a look from the beginning, taken whenever the
    look from the mark did not yield enough, and every few seconds: the longer the last one took, the less often.
    """

    def __init__(self) -> None:
        """Begin at the beginning."""
        self._marks: dict[int, int] = {}
        self.latest = 0
        """The route of the last that was taken."""
        self._full_look = time.monotonic()
        self._pause = FULL_LOOK_EVERY[0]

    def clear(self) -> None:
        """Begin at the beginning again."""
        self._marks.clear()
        self._full_look = time.monotonic()

    def of(self, routes: Sequence[int]) -> list[int]:
        """Return where to begin to look on each route."""
        if time.monotonic() - self._full_look > self._pause:
            self.clear()
        return [self._marks.get(route, BEGINNING) for route in routes]

    def looked(self, seconds: float) -> None:
        """Note how long a look from the beginning took."""
        least, most = FULL_LOOK_EVERY
        self._pause = min(max(least, seconds / FULL_LOOK_SHARE), most)

    def move(self, taken: Sequence[tuple[int, int]]) -> None:
        """Note the routes and due times of what was taken, in its order."""
        self._marks.update(taken)
        self.latest = taken[-1][0] if taken else self.latest


class PostgresLeases(Leases):
    """Leases, with fewer round trips: rows are found and locked at once, taken at once, finished at once."""

    def __init__(self, session: Session, marks: Marks) -> None:
        """Work inside a write transaction."""
        super().__init__(session)
        self._marks = marks

    def _merged(self, routes: list[int], limit: int) -> list[Candidate]:
        marks = self._marks.of(routes)
        rows = self._look(routes, marks, limit)
        if len(rows) < limit and any(marks):
            rows = self._look(routes, [BEGINNING] * len(routes), limit)
        return rows

    def _look(self, routes: list[int], marks: list[int], limit: int) -> list[Candidate]:
        began = time.monotonic()
        if len(routes) == 1:
            rows = self._db.run("due_on", (routes[0], self._now, marks[0], limit))
        else:
            rows = self._db.run("due", (array(routes), self._now, array(marks), limit))
        if not any(marks):
            self._marks.looked(time.monotonic() - began)
        return rows

    def _lease_all(self, shares: list[Share]) -> Sequence[int]:
        epochs: list[int] = []
        slots = [(row, *share) for share in shares for row in share.rows]
        for start in range(0, len(slots), AT_ONCE):
            rows, claims, ends, _ = zip(*slots[start : start + AT_ONCE], strict=True)
            places = "{" + ",".join(f'"{row[5]}"' for row in rows) + "}"
            workers, owners = texts(each.worker_id for each in claims), texts(each.owner for each in claims)
            given = (places, claims[0].subscription, array(ends), self._now, workers, owners)
            first, count = self._db.run("take", given)[0]
            if count != len(rows):
                raise UnsafeStore(f"{len(rows)} deliveries were locked, and {count} of them could be leased")
            self._marks.move([(row[6], row[0]) for row in rows])
            epochs += range(first, first + count)
        return epochs

    def held(self, leases: Sequence[Lease]) -> dict[Lease, Held]:
        """Return what the fence lets through, locked in the order of ids."""
        held = map(Held._make, self._db.run("held_all", self._arrays(leases)))
        return {Lease(row.event_id, row.subscription, row.epoch): row for row in held}

    def extend(self, leases: Sequence[Lease], lease: timedelta) -> set[Lease]:
        """Let leases run on, all of them in one statement; return those that are lost.

        A row that another transaction changed meanwhile is passed over, and may be held all the same: look twice.
        """
        lost = self._extend(list(leases), lease)
        return self._extend(list(lost), lease) if lost else lost

    def _extend(self, leases: list[Lease], lease: timedelta) -> set[Lease]:
        leases.sort()  # so that two never wait crosswise
        ends = array(self._now + self._lease_of(each.subscription, lease) for each in leases)
        rows = self._db.run("extend", (*self._arrays(leases), ends, self._now))
        return set(leases) - {Lease(*row) for row in rows}

    @staticmethod
    def _arrays(leases: Sequence[Lease]) -> tuple[str, str, str]:
        return (
            array(each.event_id for each in leases),
            texts(each.subscription for each in leases),
            array(each.epoch for each in leases),
        )

    def _finish_all(self, done: list[Settlement]) -> set[Lease]:
        return set(run_steps(self._db, finish(done, self._now)).rows) if done else set()
