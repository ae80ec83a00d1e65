"""The stores that the contract holds, and an operator who drives one in few words."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from postbus.model import (
    Action,
    AttemptError,
    Dead,
    DeadLetter,
    Delivery,
    DeliveryState,
    Done,
    DoneWithErrors,
    Event,
    LogEntry,
    Mode,
    Outcome,
    Page,
    Retry,
    Status,
    Subscription,
)
from postbus.pattern import Interest
from postbus.payload import draft
from postbus.retry import RetryPolicy
from postbus.store import Log, log_of, open_store
from postbus.store.contract import Claim, Claimed, DeadFilter, Settled, Settlement
from postbus.testing import FrozenClock
from tests.postgres.server import ServerClock, server

LEASE: Final = timedelta(seconds=60)
OOPS: Final = AttemptError("ValueError", "oops")
RETRY: Final = Retry(timedelta(seconds=10), OOPS)
DEAD: Final = Dead(OOPS)
DONE: Final = Done()
FLAWED: Final = DoneWithErrors((OOPS,))
OUTCOMES: Final[tuple[Outcome, ...]] = (DONE, FLAWED, RETRY, DEAD)
SHARED: Final = {"blocks of 2": 2, "blocks of 1024": 1_024}
LEASED: Final = os.environ.get("POSTBUS_TEST_LEASES", "blocks of 1")
"""How the suite claims: each delivery by itself, several as one block, or only what was made a row before ("rows")."""


@dataclass
class Site:
    """One place where events are kept, and the one clock that decides there. Opens any number of stores on it."""

    url: str
    clock: FrozenClock = field(default_factory=FrozenClock)
    leave: Callable[[], None] = lambda: None
    """Gives the place back."""
    _opened: list[Log] = field(default_factory=list)

    def open(self) -> Log:
        """Open a store, as another process would."""
        store = log_of(open_store(self.url, clock=self.clock))
        self._opened.append(store)
        return store

    def close(self) -> None:
        """Close all that was opened."""
        for store in self._opened:
            store.close()
        self.leave()


def site_of(kind: str, folder: Path) -> Site:
    """Return an empty place for a store of this kind, with a clock that stands still."""
    if kind == "sqlite":
        return Site(f"sqlite:///{folder / 'bus.db'}")
    url = server().create(frozen=True)
    clock = ServerClock(url)

    def leave() -> None:
        clock.close()
        server().drop(url)

    return Site(url, clock, leave)


@dataclass
class Operator:
    """Does what workers and administrators do, on a store."""

    store: Log
    clock: FrozenClock

    def publish(self, kind: str = "order.placed", **fields: Any) -> Event:
        """Publish one event."""
        return self.publish_all({"type": kind, **fields})[0]

    def publish_all(self, *news: dict[str, Any]) -> list[Event]:
        """Publish a batch."""
        events = self.store.publish([draft(new) for new in news])
        if LEASED == "rows":
            queues = [each.name for each in self.store.subscriptions() if each.mode is Mode.QUEUE and not each.paused]
            for name in queues:
                while self.ask(1, name, "passes by", interests=wanting("nobody.publishes.this")).more:
                    pass
        return events

    def ask(self, limit: int = 1, subscription: str = "default", worker: str = "w", **terms: Any) -> Claimed:
        """Claim, and return the whole answer."""
        terms = {"owner": worker, "lease": LEASE, **terms}
        return self.store.claim(Claim(subscription, worker, limit=limit, **terms))

    def claim(self, limit: int = 1, subscription: str = "default", worker: str = "w", **terms: Any) -> list[Delivery]:
        """Claim, and return the deliveries: leased as `LEASED` says."""
        if LEASED not in SHARED or "shared" in terms:
            return list(self.ask(limit, subscription, worker, **terms).deliveries)
        taken: list[Delivery] = []
        while len(taken) < limit:
            size = min(SHARED[LEASED], limit - len(taken))
            part = self.ask(size, subscription, worker, shared=True, **terms).deliveries
            taken += part
            if len(part) < size or part[0].suspect:
                break
        return taken

    def take(self, subscription: str = "default", worker: str = "w", **terms: Any) -> Delivery:
        """Claim one delivery that must be there."""
        (delivery,) = self.claim(1, subscription, worker, **terms)
        return delivery

    def take_all(self, subscription: str = "default", **terms: Any) -> list[Delivery]:
        """Claim until nothing more comes."""
        taken: list[Delivery] = []
        while found := self.claim(100, subscription, **terms):
            taken += found
        return taken

    def settle(self, delivery: Delivery, outcome: Outcome = DONE, **told: Any) -> Settled:
        """Settle one delivery."""
        (result,) = self.store.settle([Settlement(delivery.lease, outcome, delivery.worker_id, **told)])
        return result

    def kill(self, kind: str = "order.placed", subscription: str = "default", **fields: Any) -> Event:
        """Publish an event and make it a dead letter."""
        event = self.publish(kind, **fields)
        while (delivery := self.take(subscription)).id != event.id:
            self.settle(delivery)
        self.settle(delivery, DEAD)
        return event

    def end_leases(self) -> None:
        """Let every lease run out, without anybody looking."""
        self.clock.advance(LEASE)

    def stand(self, event: Event | int, subscription: str = "default") -> DeliveryState:
        """Return how an event stands in a subscription; there must be something to tell."""
        found = {each.subscription: each for each in self.get(event).deliveries}
        return found[subscription]

    def status(self, event: Event | int, subscription: str = "default") -> Status | None:
        """Return an event's status in a subscription."""
        return self.get(event, subscription).status

    def get(self, event: Event | int, subscription: str = "default") -> Event:
        """Read an event anew."""
        return self.store.get(event if isinstance(event, int) else event.id, subscription)

    def logs(self, event: Event | int, subscription: str | None = None) -> list[LogEntry]:
        """Return an event's audit rows."""
        rows = self.store.logs(event if isinstance(event, int) else event.id)
        return [row for row in rows if subscription in (None, row.subscription)]

    def actions(self, event: Event | int, subscription: str | None = None) -> list[str]:
        """Return the actions of an event's audit rows."""
        return [row.action.value for row in self.logs(event, subscription)]

    def dead(self, limit: int = 100, offset: int = 0, after: int | str | None = None, **which: Any) -> Page[DeadLetter]:
        """List dead letters; `after` is `next` of the page before."""
        cursor = None if after is None else str(after)
        return self.store.dead_letters(DeadFilter(**which), limit=limit, offset=offset, after=cursor)

    def list(self, status: Status | None = None, **filters: Any) -> Page[Event]:
        """List events."""
        given = {"subscription": "default", "type": None, "tags": (), "limit": 100, "offset": 0, "after": None}
        return self.store.list(status=status, **{**given, **filters})

    def subscription(self, name: str, patterns: Sequence[str] = ("*",), **parts: Any) -> Subscription:
        """Make a queue subscription."""
        given = {"tags": (), "mode": Mode.QUEUE, "lease": None, "retry": None, "start": "now", **parts}
        return self.store.create_subscription(name, patterns, given.pop("tags"), **given)


def wanting(*patterns: str, tags: Sequence[str] = ()) -> tuple[Interest, ...]:
    """Return interests in these patterns, all with the same tags."""
    return tuple(Interest(pattern, frozenset(tags)) for pattern in patterns)


def ids(deliveries: Sequence[Delivery | Event]) -> list[int]:
    """Return the event ids, in order."""
    return [each.id for each in deliveries]


def one_try() -> RetryPolicy:
    """Return a policy without retries."""
    return RetryPolicy(max_retries=0)


@dataclass
class Replayed:
    """How a delivery must stand, told by its audit rows alone. Status None: it is gone without an end."""

    status: Status | None = Status.PENDING
    attempt: int = 0
    retry_count: int = 0
    expired: int | None = None

    def follow(self, row: LogEntry) -> None:
        """Take the transition a row tells of."""
        match row.action:
            case Action.PICKED:
                self.attempt += 1
                assert self.status is Status.PENDING
                assert row.attempt == self.attempt
            case Action.FAILED:
                # If a retry follows; one that was counted at its expiry is not counted again by the late worker.
                self.retry_count += self.expired != row.epoch and row.status is Status.PENDING
            case Action.EXPIRED:
                self.retry_count += row.status is Status.PENDING
                self.expired = row.epoch
            case Action.RELEASED:
                self.attempt -= 1
            case Action.RETRIED:
                self.attempt = self.retry_count = 0
            case _:
                pass
        self.status = row.status


def replay(rows: Iterator[LogEntry] | Sequence[LogEntry]) -> dict[str, Replayed]:
    """Return how an event stands in each subscription that its audit rows speak of."""
    told: dict[str, Replayed] = {}
    for row in rows:
        told.setdefault(row.subscription, Replayed()).follow(row)
    return told
