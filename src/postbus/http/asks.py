"""What a remote store asks for: the bodies of its requests."""

from datetime import UTC, datetime, timedelta
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, AwareDatetime, BeforeValidator, Field

from postbus.breaker import BreakerState
from postbus.errors import InvalidRequest
from postbus.http.wire import LARGEST, Body, Code, Millis, Name, Policy, WorkerId
from postbus.model import AttemptError, Dead, Done, DoneWithErrors, HandlerRecord, Lease, Outcome, Retry, Status
from postbus.pattern import Interest, check_pattern
from postbus.payload import MAX_TAG
from postbus.store.contract import DeadFilter, Settlement
from postbus.store.remote.shapes import MOST_CLAIMED, MOST_LISTED, MOST_SETTLED

__all__ = [
    "ASKS",
    "BreakerChange",
    "BreakerName",
    "ClaimMany",
    "DeadChange",
    "DeadList",
    "EventList",
    "EventLogs",
    "EventSettled",
    "EventStand",
    "Expire",
    "ExtendMany",
    "HandlersForgotten",
    "HandlersSeen",
    "KnownUids",
    "LeaseStarted",
    "ReleaseMany",
    "Reset",
    "SettleMany",
    "SubscriptionDelete",
    "SubscriptionName",
    "SubscriptionPause",
    "SubscriptionRewind",
    "SubscriptionWiden",
    "WorkLeft",
]

CENTURY: Final = 3_153_600_000
MOST_INTERESTS: Final = 1_000


def _in_utc(moment: datetime) -> datetime:
    try:
        return moment.astimezone(UTC)
    except OverflowError:
        raise ValueError("it lies beyond the calendar in UTC") from None


def _text(value: object) -> object:
    if not isinstance(value, str):
        raise ValueError("a moment is RFC 3339 text")  # noqa: TRY004  what pydantic makes a 422 of
    return value


Moment = Annotated[AwareDatetime, Field(strict=False), BeforeValidator(_text), AfterValidator(_in_utc)]
EventId = Annotated[int, Field(ge=-LARGEST, le=LARGEST)]
LeaseLength = Annotated[float, Field(ge=0.001, le=31_536_000, description="Seconds.")]
Delay = Annotated[float, Field(ge=0, le=CENTURY, description="Seconds.")]
Text = Annotated[str, Field(max_length=1_000)]
Cursor = Annotated[str | None, Field(max_length=300, description="`next` of a page before.")]
Tags = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=MAX_TAG)]],
    Field(default_factory=list, max_length=MOST_INTERESTS),
]


class Wanted(Body):
    """Events of a type the pattern covers, with any of the tags (none: all)."""

    pattern: Name = "*"
    tags: Tags


Interests = Annotated[list[Wanted], Field(max_length=MOST_INTERESTS)]


def interests_of(wanted: list[Wanted]) -> tuple[Interest, ...]:
    """Return what is wanted; raise InvalidRequest for a pattern that cannot be."""
    return tuple(Interest(check_pattern(each.pattern), frozenset(each.tags)) for each in wanted)


class ClaimMany(Body):
    """Who asks for events, for which of them, and on which terms."""

    subscription: Name = "default"
    worker_id: WorkerId
    interests: Annotated[Interests, Field(default_factory=lambda: [Wanted(tags=[])])]
    blocked: Annotated[
        Interests, Field(default_factory=list, description="Not these, although an interest covers them.")
    ]
    limit: Annotated[int, Field(ge=1, le=MOST_CLAIMED)] = 1
    lease: Annotated[LeaseLength | None, Field(description="Seconds; a subscription's own goes before it.")] = None
    retry: Annotated[Policy | None, Field(description="Where neither event nor subscription has one.")] = None
    alone: Annotated[bool, Field(description="Whether this worker holds nothing else: it may get a suspect.")] = True
    free: Annotated[int | None, Field(ge=0, description="How many last attempts at most; none given: any.")] = None
    wait: Annotated[float, Field(ge=0, le=60, description="Seconds to wait for one.")] = 0.0


class LeaseKey(Body):
    """One claim of one event."""

    event_id: EventId
    subscription: Name = "default"
    epoch: Annotated[int, Field(ge=-LARGEST, le=LARGEST)]

    @property
    def key(self) -> Lease:
        """The lease itself."""
        return Lease(self.event_id, self.subscription, self.epoch)


class MetError(Body):
    """An error that was met."""

    type: Annotated[str, Field(max_length=255)]
    message: Annotated[str, Field(max_length=65_536)]
    attempt: Annotated[int, Field(ge=0, le=LARGEST)] = 0
    worker_id: Annotated[str | None, Field(max_length=255)] = None
    at: Moment | None = None
    traceback: Annotated[str | None, Field(max_length=65_536)] = None
    handler: Annotated[str | None, Field(max_length=1_000)] = None


class Settling(LeaseKey):
    """How an attempt ended."""

    worker_id: WorkerId
    outcome: Annotated[
        Literal["done", "done_with_errors", "retry", "dead"],
        Field(description="`retry` and `dead` bring one error, `done_with_errors` all that were met."),
    ]
    errors: Annotated[list[MetError], Field(default_factory=list, max_length=1_000)]
    after: Annotated[Delay | None, Field(description="Of `retry`: seconds until it is due again.")] = None
    status_code: Code = None
    execution_time_ms: Millis = None

    @property
    def settlement(self) -> Settlement:
        """The same for the store; raises InvalidRequest for an outcome that does not hang together."""
        return Settlement(self.key, self._ended(), self.worker_id, self.status_code, self.execution_time_ms)

    def _ended(self) -> Outcome:
        errors = tuple(AttemptError(**dict(each)) for each in self.errors)
        if (self.after is not None) != (self.outcome == "retry"):
            raise InvalidRequest("`after` goes with the outcome retry, and with no other")
        match self.outcome, errors:
            case "done", ():
                return Done()
            case "done_with_errors", _:
                return DoneWithErrors(errors)
            case "retry", (error,):
                return Retry(timedelta(seconds=self.after or 0.0), error)
            case "dead", (error,):
                return Dead(error)
            case _:
                raise InvalidRequest("`done` brings no errors, `retry` and `dead` bring one")


class SettleMany(Body):
    """How attempts ended, each with its outcome."""

    settlements: Annotated[list[Settling], Field(max_length=MOST_SETTLED)]


class ExtendMany(Body):
    """Which leases are to run anew, and for how long."""

    leases: Annotated[list[LeaseKey], Field(max_length=MOST_SETTLED)]
    lease: LeaseLength


class ReleaseMany(Body):
    """Which leases are given back."""

    leases: Annotated[list[LeaseKey], Field(max_length=MOST_SETTLED)]
    worker_id: WorkerId
    delay: Delay = 0.0


class LeaseStarted(Body):
    """On which lease work has begun."""

    lease: LeaseKey
    worker_id: WorkerId


class Reset(Body):
    """Which event is put back, and why."""

    event_id: EventId
    subscription: Name
    reason: Text
    actor: WorkerId


class Expire(Body):
    """By which policy leases that have run out are ended."""

    retry: Policy
    limit: Annotated[int, Field(ge=1, le=10_000)] = 10_000


class KnownUids(Body):
    """Which uids are meant."""

    uids: Annotated[list[Name], Field(max_length=MOST_SETTLED)]


class WorkLeft(Body):
    """Of which subscription and interests to tell what is left."""

    subscription: Name
    interests: Interests


class EventSettled(Body):
    """Of which event to tell whether it has ended in these subscriptions."""

    event_id: EventId
    subscriptions: Annotated[list[Name], Field(max_length=MOST_INTERESTS)]


class EventStand(Body):
    """Which event, as seen from which subscription."""

    event_id: EventId
    subscription: Name


class EventLogs(Body):
    """Of which event to tell what happened."""

    event_id: EventId


class Paged(Body):
    """Which part of a list."""

    limit: Annotated[int, Field(ge=1, le=MOST_LISTED)] = 100
    offset: Annotated[int, Field(ge=0, le=1_000_000_000)] = 0
    after: Cursor = None


class EventList(Paged):
    """Which events."""

    subscription: Name
    status: Annotated[Status | None, Field(strict=False)] = None
    type: Annotated[str | None, Field(max_length=255)] = None
    tags: Tags


class DeadOnes(Body):
    """Which dead letters; what is left out stands for any."""

    event_id: EventId | None = None
    subscription: Name | None = None
    type: Annotated[str | None, Field(max_length=255)] = None
    before: Moment | None = None
    by: Literal["created_at", "died_at"] = "created_at"
    fault: Annotated[str | None, Field(max_length=4_096)] = None

    @property
    def filter(self) -> DeadFilter:
        """The same for the store."""
        return DeadFilter(self.event_id, self.subscription, self.type, self.before, self.by, self.fault)


class DeadList(DeadOnes, Paged):
    """Which dead letters, and which part of them."""


class DeadChange(DeadOnes):
    """Which dead letters are changed, and by whom."""

    actor: WorkerId


class SubscriptionName(Body):
    """Which subscription."""

    name: Name


class SubscriptionWiden(SubscriptionName):
    """What a subscription is to want too."""

    pattern: Name
    tags: Tags


class SubscriptionPause(SubscriptionName):
    """Whether a subscription is to stand still."""

    paused: bool


class SubscriptionDelete(SubscriptionName):
    """Which subscription goes, and by whom."""

    actor: WorkerId


class SubscriptionRewind(SubscriptionName):
    """Where an ordered subscription is to go on."""

    to: Annotated[int, Field(ge=0, le=LARGEST)] | Annotated[str, Field(max_length=64)]
    actor: WorkerId
    dry_run: bool = False


class Seen(Body):
    """A handler of a process."""

    id: Name
    name: Annotated[str, Field(max_length=1_000)]
    subscription: Name
    pattern: Name
    tags: Tags
    worker_id: WorkerId
    owner: Name

    def record(self, seen_at: datetime) -> HandlerRecord:
        """Return the same for the store, seen at a moment."""
        known = self.id, self.name, self.subscription, self.pattern, tuple(self.tags), self.worker_id, self.owner
        return HandlerRecord(*known, seen_at)


class HandlersSeen(Body):
    """What a process handles."""

    handlers: Annotated[list[Seen], Field(max_length=MOST_SETTLED)]


class HandlersForgotten(Body):
    """What a process handles no more: these, or all."""

    owner: Name
    ids: Annotated[list[Name], Field(max_length=MOST_SETTLED)] | None = None


class BreakerName(Body):
    """Which breaker."""

    name: Annotated[str, Field(min_length=1, max_length=1_000)]


class Stand(Body):
    """How a breaker stands."""

    failures: Annotated[int, Field(ge=0, le=2_147_483_647)] = 0
    opened_at: Moment | None = None
    probe_until: Moment | None = None

    @property
    def state(self) -> BreakerState:
        """The same for the store."""
        return BreakerState(self.failures, self.opened_at, self.probe_until)


class BreakerChange(BreakerName):
    """How a breaker was found, and how it is to stand."""

    found: Stand
    wanted: Stand


ASKS: Final[tuple[type[Body], ...]] = (
    ClaimMany,
    SettleMany,
    ExtendMany,
    ReleaseMany,
    LeaseStarted,
    Reset,
    Expire,
    KnownUids,
    WorkLeft,
    EventSettled,
    EventStand,
    EventLogs,
    EventList,
    DeadList,
    DeadChange,
    SubscriptionName,
    SubscriptionWiden,
    SubscriptionPause,
    SubscriptionDelete,
    SubscriptionRewind,
    HandlersSeen,
    HandlersForgotten,
    BreakerName,
    BreakerChange,
)
