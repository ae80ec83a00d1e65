"""What the bus speaks of: events, deliveries, leases, outcomes. Frozen values, no I/O."""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import IntEnum, StrEnum
from typing import Any, Generic, NamedTuple, TypeVar

from postbus.retry import RetryPolicy

__all__ = [
    "Action",
    "AttemptError",
    "Checkpoint",
    "Dead",
    "DeadLetter",
    "Delivery",
    "DeliveryState",
    "Done",
    "DoneWithErrors",
    "Erased",
    "Event",
    "HandlerRecord",
    "Json",
    "Lease",
    "LogEntry",
    "Mode",
    "NewEvent",
    "Outcome",
    "Page",
    "Pruned",
    "Retry",
    "Span",
    "State",
    "Stats",
    "Status",
    "Stream",
    "Subscription",
    "SubscriptionStats",
    "Token",
]

Json = Any
"""JSON as Python sees it: dict, list, str, int, float, bool, None."""

T = TypeVar("T")


class Status(StrEnum):
    """How an event stands in a subscription, as shown to the outside."""

    PENDING = "PENDING"
    PROCESSING = "PROCESSING"
    COMPLETED = "COMPLETED"
    COMPLETED_WITH_ERRORS = "COMPLETED_WITH_ERRORS"
    FAILED = "FAILED"


class State(IntEnum):
    """How a delivery is stored. Finished ones are not: they leave the table."""

    PENDING = 0
    LEASED = 1
    DEAD = 2
    PARKED = 3

    @property
    def status(self) -> Status:
        """The status shown for a delivery in this state."""
        return (Status.PENDING, Status.PROCESSING, Status.FAILED, Status.PENDING)[self]


class Action(StrEnum):
    """What an audit row tells of."""

    PICKED = "PICKED"
    STARTED = "STARTED"
    COMPLETED = "COMPLETED"
    COMPLETED_WITH_ERRORS = "COMPLETED_WITH_ERRORS"
    FAILED = "FAILED"
    EXPIRED = "EXPIRED"
    RELEASED = "RELEASED"
    RESET = "RESET"
    RETRIED = "RETRIED"
    DISCARDED = "DISCARDED"
    PURGED = "PURGED"
    PARKED = "PARKED"
    REPLAYED = "REPLAYED"
    ERASED = "ERASED"


class Mode(StrEnum):
    """How a subscription reads the log: competing workers, one ordered follower, or a Spark stream."""

    QUEUE = "queue"
    ORDERED = "ordered"
    SPARK = "spark"


class Stream(StrEnum):
    """What is appended to, and can be followed by position: the events, or what happened to them."""

    EVENTS = "events"
    AUDIT = "audit"


@dataclass(frozen=True, slots=True)
class AttemptError:
    """Why one attempt failed."""

    type: str
    message: str
    attempt: int = 0
    worker_id: str | None = None
    at: datetime | None = None
    traceback: str | None = None
    handler: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NewEvent:
    """An event to publish. `delay` is in seconds (or a timedelta); `at` is a moment; give one of them or none."""

    type: str
    payload: Json = None
    tags: Sequence[str] = ()
    key: str | None = None
    title: str | None = None
    description: str | None = None
    metadata: Mapping[str, str] | None = None
    uid: str | None = None
    delay: float | timedelta | None = None
    at: datetime | None = None
    priority: int = 0
    max_retries: int | None = None


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One row of the audit log. `status` is how the delivery stood after it."""

    id: int
    event_id: int
    subscription: str
    action: Action
    created_at: datetime
    status: Status | None = None
    attempt: int | None = None
    epoch: int | None = None
    worker_id: str | None = None
    status_code: int | None = None
    error_type: str | None = None
    error_message: str | None = None
    execution_time_ms: float | None = None


@dataclass(frozen=True, slots=True)
class DeliveryState:
    """How an event stands in one subscription."""

    subscription: str
    status: Status
    attempt: int
    retry_count: int
    next_retry_at: datetime | None
    updated_at: datetime
    worker_id: str | None
    lease_until: datetime | None
    lease_expired: bool
    errors: tuple[AttemptError, ...] = ()
    parked: bool = False
    """Whether it waits behind a dead letter of its key, in an ordered subscription."""


@dataclass(frozen=True, slots=True)
class Event:
    """An immutable fact in the log, with how it stands in one subscription.

    `id` is its place in the one sequence; `uid` the producer's key for it. `status` and what follows tell of the
    subscription asked about (`default` unless said); `status` is None where that subscription never wanted it.
    `retry_count` is how often it was tried again, or is about to be: at most `max_retries`, of a dead letter as well.
    `deliveries` and `logs` are filled by `get`.
    """

    id: int
    uid: str
    type: str
    payload: Json
    tags: tuple[str, ...]
    key: str | None
    title: str | None
    description: str | None
    metadata: Mapping[str, str]
    created_at: datetime
    priority: int = 0
    max_retries: int | None = None
    status: Status | None = Status.PENDING
    retry_count: int = 0
    next_retry_at: datetime | None = None
    updated_at: datetime | None = None
    errors: tuple[AttemptError, ...] = ()
    deliveries: tuple[DeliveryState, ...] = ()
    logs: tuple[LogEntry, ...] = ()

    @property
    def last_error(self) -> str | None:
        """The message of the latest failed attempt."""
        return self.errors[-1].message if self.errors else None


class Lease(NamedTuple):
    """The right to work on one delivery: valid while nobody drew a newer epoch for it."""

    event_id: int
    subscription: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Delivery:
    """One event on its way to one subscription, leased to a worker."""

    event: Event
    lease: Lease
    attempt: int
    retry: RetryPolicy
    """The subscription's policy, or the bus's; the event's own `max_retries` and a handler's policy go before it."""
    worker_id: str
    lease_until: datetime
    suspect: bool = False
    """Its last attempt ended by expiry: it may have killed its worker, so it is to be run alone."""

    @property
    def max_retries(self) -> int:
        """How many retries follow the first attempt, as far as event and subscription say."""
        return self.retry.max_retries if self.event.max_retries is None else self.event.max_retries

    @property
    def is_last(self) -> bool:
        """Whether this attempt may not be repeated, as far as event and subscription say."""
        return self.attempt > self.max_retries

    @property
    def subscription(self) -> str:
        """The subscription it is on its way to."""
        return self.lease.subscription

    @property
    def epoch(self) -> int:
        """The fencing number of this claim."""
        return self.lease.epoch

    @property
    def id(self) -> int:
        """The event's id."""
        return self.lease.event_id


@dataclass(frozen=True, slots=True)
class Done:
    """It worked."""


@dataclass(frozen=True, slots=True)
class DoneWithErrors:
    """It is finished, and these errors were met and recorded on the way."""

    errors: tuple[AttemptError, ...]


@dataclass(frozen=True, slots=True)
class Retry:
    """It failed, and is due again `after` this long."""

    after: timedelta
    error: AttemptError


@dataclass(frozen=True, slots=True)
class Dead:
    """It failed for good: a dead letter."""

    error: AttemptError


Outcome = Done | DoneWithErrors | Retry | Dead


def decide(
    policy: RetryPolicy,
    error: AttemptError,
    attempt: int,
    own: int | None,
    chance: random.Random,
    *,
    final: bool = False,
    delay: timedelta | None = None,
) -> Retry | Dead:
    """Return what a failed attempt leads to, wherever that is found out.

    It is the last one if that was said (`final`), or if the event's `own` retries, or else the policy's, are used up.
    """
    if final or attempt > (policy.max_retries if own is None else own):
        return Dead(error)
    return Retry(policy.delay(attempt + 1, chance) if delay is None else delay, error)


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A delivery that used up its attempts, or was discarded by its handler, with the error of each attempt."""

    event: Event
    subscription: str
    attempts: int
    errors: tuple[AttemptError, ...]
    died_at: datetime
    last_retry_at: datetime | None


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """A part of a list. `total` is exact up to 10,000; past that it stays there and `total_capped` is True."""

    items: tuple[T, ...]
    total: int
    limit: int
    offset: int
    total_capped: bool = False
    next: int | str | None = None
    """Hand this to `after=` for the following page; None: there is none."""

    def __iter__(self) -> Iterator[T]:
        """Go through the items of this page."""
        return iter(self.items)

    def __len__(self) -> int:
        """Count the items of this page."""
        return len(self.items)


@dataclass(frozen=True, slots=True)
class Subscription:
    """A named consumer group over the log. `lease` and `retry` are None where the bus's own hold."""

    name: str
    mode: Mode
    patterns: tuple[str, ...]
    tags: tuple[str, ...]
    paused: bool
    lease: timedelta | None
    retry: RetryPolicy | None
    created_at: datetime


@dataclass(frozen=True, slots=True)
class Span:
    """What of a stream can be read now: the rows with `pruned < id <= head`, and none below `head` is still to come."""

    log_id: str
    pruned: int
    """All up to here may be gone from the store; what is unfinished stays."""
    head: int
    """The last row that is there, or `pruned`."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """How far an ordered subscription or a Spark stream has come."""

    subscription: str
    stream: Stream
    position: int
    log_id: str
    moved_at: datetime
    epoch: int = 0
    """Fences whoever moves it."""
    worker_id: str | None = None
    """Who reads an ordered subscription now."""
    held_until: datetime | None = None
    stopped: str | None = None
    """Why the last reader stopped for good, if it did and nobody has got further since."""
    stopped_before: int | None = None
    """At which event that was, if it was at one."""
    gone: bool = field(default=False, compare=False)
    """Whether `worker_id` is known to have ended without a word, although its lease still runs."""
    lag: int = field(default=0, compare=False)
    """How many positions it is behind the head."""
    waiting: timedelta | None = field(default=None, compare=False)
    """How long the first event has waited that it has not done yet."""

    @property
    def reader(self) -> str | None:
        """Who reads an ordered subscription now, as far as is known: nobody if that process is gone."""
        return None if self.gone else self.worker_id


@dataclass(frozen=True, slots=True)
class Pruned:
    """One step of pruning: of the rows after the last step's end and up to `reached`, how many went and stayed."""

    removed: int
    kept: int
    """Rows of events that are unfinished or dead somewhere."""
    reached: int
    """Hand this to `after=` for the following step."""
    done: bool
    """There is nothing more to prune up to the bound."""


@dataclass(frozen=True, slots=True)
class Erased:
    """Whose content is gone from the store: every event that was meant, and how many of them had any left."""

    ids: tuple[int, ...]
    changed: int


@dataclass(frozen=True, slots=True)
class Erasable:
    """What an erase would blank in the store: of every event that is meant, and of the audit rows that may quote it."""

    ids: tuple[int, ...]
    events: int
    audit: int


@dataclass(frozen=True, slots=True)
class HandlerRecord:
    """A handler some process has registered, as stored for `doctor` and people."""

    id: str
    name: str
    subscription: str
    pattern: str
    tags: tuple[str, ...]
    worker_id: str
    owner: str
    seen_at: datetime
    gone: bool = False
    """Whether its process is known to be dead or, where that cannot be told, has not reported for minutes."""


@dataclass(frozen=True, slots=True)
class SubscriptionStats:
    """One queue subscription in figures. `oldest_age` is how long the oldest due delivery has waited."""

    name: str
    pending: int
    scheduled: int
    processing: int
    dead: int
    completed: int
    completed_with_errors: int
    oldest_age: timedelta | None


@dataclass(frozen=True, slots=True)
class Token:
    """Who may use the HTTP API, and for what. The secret itself is nowhere kept, only its SHA-256."""

    id: str
    name: str
    digest: str = field(repr=False)
    scopes: tuple[str, ...]
    created_at: datetime
    expires_at: datetime | None = None
    revoked_at: datetime | None = None

    def is_good(self, now: datetime) -> bool:
        """Return whether it may still be used."""
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)


@dataclass(frozen=True, slots=True)
class Holder:
    """An open transaction that has published: followers wait at `floor` until it ends."""

    floor: int
    pid: int | None
    """None: a prepared transaction, known by its `gid`."""
    gid: str | None
    application: str
    state: str
    seconds: float
    query: str

    @property
    def told(self) -> str:
        """Who it is, in a sentence."""
        who = f"pid {self.pid} ({self.application or 'no name'})" if self.gid is None else f"prepared {self.gid!r}"
        doing = f", last: {self.query}" if self.query else ""
        return f"held at {self.floor:,} by {who}, {self.state} for {self.seconds:,.0f} s{doing}"

    @property
    def remedy(self) -> str:
        """The statement that would end it."""
        if self.gid is None:
            return f"SELECT pg_terminate_backend({self.pid});"
        return f"ROLLBACK PREPARED '{self.gid}';"


@dataclass(frozen=True, slots=True)
class Stats:
    """The bus in figures. `rates` counts what happened in the last minute by audit action, `published` included."""

    events: int
    head: int
    subscriptions: tuple[SubscriptionStats, ...]
    rates: Mapping[str, float]
    store_bytes: int
    unhandled: Mapping[str, int]
    """Pending deliveries that no registered handler's pattern covers, counted by `subscription/type`."""
    holders: tuple[Holder, ...] = ()
    """PostgreSQL: transactions that have published and not ended; followers wait for them, workers do not."""
    checkpoints: tuple[Checkpoint, ...] = ()
    dead: Mapping[str, int] = field(default_factory=dict[str, int])
    """Dead letters by subscription, whatever its mode; one that has none is left out."""
    parked: Mapping[str, int] = field(default_factory=dict[str, int])
    """Events that wait behind a dead letter of their key, by subscription; one that has none is left out."""
