"""Removing from the log what is done with: row by row, and never what somebody still needs."""

from typing import Final, NamedTuple

from postbus.errors import Conflict, InvalidRequest
from postbus.model import Pruned, Stream
from postbus.store.postgres.rows.positions import NAMES, Positions
from postbus.store.postgres.rows.session import Session

__all__ = ["Pruning"]


class _Statements(NamedTuple):
    """What a stream's statements for pruning are called."""

    chunk: str
    remove: str
    tally: str


STATEMENTS: Final = {
    Stream.EVENTS: _Statements("chunk_events", "prune_events", "prunable_events"),
    Stream.AUDIT: _Statements("chunk_audit", "prune_audit", "prunable_audit"),
}


class Pruning:
    """Prunes one stream on one transaction's connection, while nobody makes a subscription or prunes beside it."""

    def __init__(self, session: Session, stream: Stream) -> None:
        """Work inside a transaction; only `step` writes."""
        self._session = session
        self._db = session.db
        self._stream = stream

    def step(self, after: int, through: int, limit: int, past: frozenset[str]) -> Pruned:
        """Remove what may go of the next `limit` rows. The bound moves with it: the two are never seen apart."""
        self._require_room(after, through)
        self._require_passed(through, past)
        names = STATEMENTS[self._stream]
        last, count = self._db.run(names.chunk, (after, through, limit))[0]
        done = count < limit
        reached = through if done else last
        self._db.run("raise_pruned", (reached, NAMES[self._stream].pruned))
        removed = self._db.count(names.remove, (after, reached)) if count else 0
        return Pruned(removed, count - removed, reached, done)

    def prunable(self, through: int) -> int:
        """Count what may go up to a position, whatever was pruned before."""
        return self._db.value(STATEMENTS[self._stream].tally, (through,))

    def _require_room(self, after: int, through: int) -> None:
        span = Positions(self._session).span(self._stream)
        if through > span.head:
            raise InvalidRequest(
                f"{self._stream} can be read up to {span.head:,}: pruning up to {through:,} is refused"
            )
        if after > span.pruned:
            raise InvalidRequest(f"{self._stream} were pruned up to {span.pruned:,}: begin there, not at {after:,}")

    def _require_passed(self, through: int, past: frozenset[str]) -> None:
        """Raise Conflict for a follower that would be cut off. A position of another log counts: it is no licence."""
        for name, position in self._db.run("behind", (self._stream, through)):
            if name not in past:
                raise Conflict(
                    f"subscription {name!r} has come to {position:,} of {self._stream}: pruning up to {through:,} "
                    "would cut it off. Let it go on, delete it, or prune past it on purpose"
                )
