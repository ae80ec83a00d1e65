"""The streams by position: how far they go, and how far each follower of them has come."""

from collections.abc import Callable
from datetime import timedelta
from typing import Final, NamedTuple

from postbus.clock import from_micros
from postbus.errors import Conflict, InvalidRequest
from postbus.model import Action, Checkpoint, Mode, Span, Status, Stream
from postbus.store.contract import Activity
from postbus.store.postgres.rows.session import Session, bump
from postbus.store.session import Row

__all__ = ["Positions"]

DISORDER: Final = 10_000
"""Ids are drawn a moment before the time is noted: how far apart rows may be whose times are the wrong way round."""


class _Names(NamedTuple):
    """What a stream's statements are called, and the entry of `meta` that tells how far it was pruned."""

    pruned: str
    head: str
    last: str
    ahead: str
    when: str
    since: str
    activity: str


NAMES: Final = {
    Stream.EVENTS: _Names(
        "pruned_through", "head_events", "last_events", "ahead_events", "when_events", "since_events", "activity_events"
    ),
    Stream.AUDIT: _Names(
        "audit_pruned_through", "head_audit", "last_audit", "ahead_audit", "when_audit", "since_audit", "activity_audit"
    ),
}


class Positions:
    """Looks at positions on one connection, each statement at what is committed by then."""

    def __init__(self, session: Session) -> None:
        """Work on a connection; only `consumer` writes."""
        self._session = session
        self._db, self._catalog, self._now = session

    def span(self, stream: Stream) -> Span:
        """Return what can be read. A position is the id of a row that was seen, never merely of one that was drawn."""
        head = self._db.value(NAMES[stream].head)
        last = self._db.value(NAMES[stream].last, (head,)) or 0
        pruned = int(self._db.value("meta", (NAMES[stream].pruned,)))  # last: what was seen may be pruned meanwhile
        return Span(self._log_id(), pruned, max(pruned, last))

    def ahead(self, stream: Stream, after: int, count: int) -> int:
        """Return the id of the `count`-th row after a position, or of the last there is."""
        head = self._db.value(NAMES[stream].head)
        return self._db.value(NAMES[stream].ahead, (after, head, count)) or after

    def activity(self, stream: Stream, after: int, through: int, every: timedelta) -> list[Activity]:
        """Count what happened, by kind, in slots of time."""
        slot = every // timedelta(microseconds=1)
        rows = self._db.run(NAMES[stream].activity, (after, through, slot))
        return [
            Activity(from_micros(number * slot), action and Action(action), status and Status(status), count)
            for number, action, status, count in rows
        ]

    def before(self, stream: Stream, moment: int) -> int:
        """Return a position behind which all rows of a moment and later lie: found by halving, times rise with ids."""
        span = self.span(stream)
        low, high = span.pruned, span.head
        while low < high:
            middle = (low + high) // 2
            rows = self._db.run(NAMES[stream].when, (middle,))  # none: pruned meanwhile
            if rows and rows[0][1] < moment:
                low = rows[0][0]
            else:
                high = middle
        strays = self._db.value(NAMES[stream].since, (max(span.pruned, low - DISORDER), low, moment))
        return low if strays is None else strays - 1

    def checkpoints(self, is_dead: Callable[[str], bool] = lambda _: False) -> tuple[Checkpoint, ...]:
        """Return all checkpoints by name; `is_dead` tells of a process whether it is known to have died."""
        rows = self._db.run("checkpoints")
        heads = {stream: self.span(Stream(stream)).head for stream in {row[1] for row in rows}}
        return tuple(self._checkpoint(row, heads[row[1]], is_dead) for row in rows)

    def _checkpoint(self, row: Row, head: int, is_dead: Callable[[str], bool]) -> Checkpoint:
        subscription, stream, position, log_id, moved_at, epoch, worker_id, held_until, *rest = row
        holder, unlocked, stopped, stopped_before = rest
        held = held_until is not None and held_until > self._now
        since = self._db.run(NAMES[Stream(stream)].when, (position,)) if position < head else []
        return Checkpoint(
            subscription,
            Stream(stream),
            position,
            log_id,
            from_micros(moved_at),
            epoch=epoch,
            worker_id=worker_id if held else None,
            held_until=from_micros(held_until) if held else None,
            stopped=stopped,
            stopped_before=stopped_before,
            gone=held and (bool(unlocked) or is_dead(holder)),
            lag=max(0, head - position),
            waiting=timedelta(microseconds=max(0, self._now - since[0][1])) if since else None,
        )

    def checkpoint(self, name: str, stream: Stream) -> Checkpoint | None:
        """Return a Spark stream's checkpoint if it has one; raise Conflict if the name stands for something else."""
        subscription = next((each for each in self._catalog.subscriptions() if each.name == name), None)
        if subscription is not None and subscription.mode is not Mode.SPARK:
            raise Conflict(f"{name!r} is a subscription of mode {subscription.mode}: choose another consumer")
        found = next((each for each in self.checkpoints() if each.subscription == name), None)
        if found is not None and found.stream is not stream:
            raise Conflict(f"consumer {name!r} reads {found.stream}: choose another consumer for {stream}")
        if found is not None and found.log_id != self._log_id():
            raise Conflict(
                f"consumer {name!r} stands at {found.position:,} of another log: the store was restored or replaced. "
                "Delete the subscription and start anew"
            )
        return found

    def consumer(self, name: str, stream: Stream, start: int) -> Checkpoint:
        """Return a Spark stream's checkpoint, made with its subscription unless there is one."""
        found = self.checkpoint(name, stream)
        if found is not None:
            return found
        if all(each.name != name for each in self._catalog.subscriptions()):
            self._db.run("add_subscription", (name, Mode.SPARK, '["*"]', "[]", None, None, self._now))
            bump(self._session)
        log_id = self._log_id()
        self._db.run("add_checkpoint", (name, stream, start, log_id, self._now))
        return Checkpoint(name, stream, start, log_id, from_micros(self._now))

    def begin(self, name: str, start: str | int) -> None:
        """Make an ordered subscription's checkpoint where it is to begin; raise InvalidRequest if nothing is there."""
        span = self.span(Stream.EVENTS)
        position = {"now": span.head, "beginning": span.pruned}.get(str(start), start)
        if not isinstance(position, int) or not span.pruned <= position <= span.head:
            raise InvalidRequest(f"start at 'now', 'beginning' or an id from {span.pruned:,} to {span.head:,}")
        self._db.run("add_checkpoint", (name, Stream.EVENTS, position, span.log_id, self._now))

    def check_start(self, start: str | int) -> None:
        """Raise InvalidRequest for a place where no queue subscription can begin."""
        head = self.span(Stream.EVENTS).head
        if start not in ("now", "beginning") and not (isinstance(start, int) and 0 <= start <= head):
            raise InvalidRequest(f"start at 'now', 'beginning' or an id from 0 to {head:,}")

    def _log_id(self) -> str:
        return self._db.value("meta", ("log_id",))
