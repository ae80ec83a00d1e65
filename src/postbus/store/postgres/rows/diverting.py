"""Diverting: what failed in a Spark stream goes on as an ordinary delivery; inside a transaction."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final

from postbus.clock import to_micros
from postbus.errors import UnsafeStore
from postbus.model import Dead, Lease, Outcome, Retry, Stream
from postbus.retry import RetryPolicy
from postbus.store.contract import Failure, Settlement
from postbus.store.postgres.rows.erasing import erased, unquoted
from postbus.store.postgres.rows.leases import Leases
from postbus.store.postgres.rows.positions import Positions
from postbus.store.postgres.rows.session import Session
from postbus.store.records import split_tags
from postbus.store.session import Row

__all__ = ["Diverting"]

_NOTHING: Final = (None, None, None, None)


class Diverting:
    """Takes failures over on one transaction's connection, at one moment."""

    def __init__(self, session: Session, leases: Callable[[Session], Leases]) -> None:
        """Work inside a write transaction; `leases` gives what settles there."""
        self._session = session
        self._leases = leases
        self._db, self._catalog, self._now = session

    def divert(self, subscription: str, failures: Sequence[Failure], policy: RetryPolicy, worker_id: str) -> int:
        """Make each failure a delivery whose first attempt is over; see the contract.

        It comes as a delivery that is leased, under an epoch of its own, and is settled at once: what a failure leads
        to is said in one place.
        """
        blank = erased(self._db, {each.event_id for each in failures})
        told = {each.event_id: _unquoted(each) if each.event_id in blank else each for each in failures}
        events = self._db.many("ways_of", [(each,) for each in sorted(told)])
        self._require_unpruned(told.keys() - {event_id for event_id, *_ in events})
        who = {event_id: each.outcome.error.worker_id or worker_id for event_id, each in told.items()}
        taken = self._take_over(subscription, events, who) if events else {}
        allowed = {event_id: policy.max_retries if retries is None else retries for event_id, *_, retries, _ in events}
        self._leases(self._session).settle(
            [
                Settlement(
                    Lease(event_id, subscription, epoch),
                    _outcome(told[event_id].outcome, allowed[event_id]),
                    who[event_id],
                    execution_time_ms=told[event_id].execution_time_ms,
                )
                for event_id, epoch in taken.items()
            ]
        )
        return len(taken)

    def _require_unpruned(self, missing: Collection[int]) -> None:
        """Raise UnsafeStore where a failure would be forgotten since its event is gone; one that never was may be."""
        if missing and min(missing) <= (pruned := Positions(self._session).span(Stream.EVENTS).pruned):
            raise UnsafeStore(
                f"event {min(missing):,} has failed, and everything up to {pruned:,} was pruned meanwhile: read the "
                "stream with a consumer, which pruning waits for"
            )

    def _take_over(self, subscription: str, events: Sequence[Row], who: Mapping[int, str]) -> dict[int, int]:
        """Make the deliveries that are not there yet, each leased to whoever tried it; return their epochs by event."""
        since = to_micros(self._catalog.subscription(subscription).created_at)
        first = self._db.value("draw_epochs", (len(events),)) - len(events) + 1
        routes: dict[Row, int] = {}
        rows: list[Row] = []
        for epoch, (event_id, kind, tags, priority, retries, created_at) in enumerate(events, first):
            way = (priority, kind, split_tags(tags))
            if way not in routes:
                routes[way] = self._catalog.file_anew(self._db, subscription, *way)
            rows.append(
                (event_id, subscription, routes[way], self._now, created_at, epoch, retries, who[event_id], since),
            )
        taken: dict[int, int] = dict(self._db.many("divert", rows))
        self._db.many(
            "log",
            [
                (event_id, subscription, "PICKED", self._now, "PROCESSING", 1, epoch, who[event_id], *_NOTHING)
                for event_id, epoch in taken.items()
            ],
        )
        return taken


def _unquoted(failure: Failure) -> Failure:
    return failure._replace(outcome=replace(failure.outcome, error=unquoted(failure.outcome.error)))


def _outcome(outcome: Retry | Dead, retries: int) -> Outcome:
    """Return what a first failure leads to where so many retries may follow."""
    return Dead(outcome.error) if isinstance(outcome, Retry) and not retries else outcome
