"""The shapes on the wire: what is read from bodies, and how events, leases, audit rows and problems are written."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from postbus.errors import InvalidEventError, InvalidRequest, PostbusError, http_status
from postbus.model import (
    AttemptError,
    Checkpoint,
    DeadLetter,
    Delivery,
    DeliveryState,
    Event,
    LogEntry,
    Stats,
    Subscription,
)
from postbus.payload import FIELDS
from postbus.retry import RetryPolicy
from postbus.store.contract import Reported

__all__ = [
    "Completed",
    "Failed",
    "Holding",
    "NewSubscription",
    "Problem",
    "Publish",
    "as_json",
    "delivery_json",
    "entry_json",
    "event_json",
    "failure_json",
    "letter_json",
    "moment_json",
    "problem",
    "subscription_json",
]

LARGEST: Final = (1 << 63) - 1
_MOMENT: Final = re.compile(
    r"(\d{4}-\d\d-\d\d)[Tt]((?:[01]\d|2[0-3]):[0-5]\d):([0-5]\d|60)(\.\d+)?([Zz]|[+-](?:[01]\d|2[0-3]):[0-5]\d)",
    re.ASCII,
)
Text = Annotated[str, StringConstraints(max_length=65_536)]
WorkerId = Annotated[str, Field(min_length=1, max_length=255, description="Who works: `{hostname}:{pid}`.")]
Name = Annotated[str, Field(min_length=1, max_length=255)]
Epoch = Annotated[int | None, Field(ge=1, le=LARGEST, description="Of the claim. Left out: this worker's last one.")]
Seconds = Annotated[float, Field(ge=0, le=31_536_000)]
Code = Annotated[int | None, Field(ge=-2_147_483_648, le=2_147_483_647)]
Millis = Annotated[float | None, Field(ge=0, le=1e15, allow_inf_nan=False)]


class Body(BaseModel):
    """What a request may bring: these fields, and no others."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Publish(Body):
    """An event to publish. Each field is optional, but not all of them."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "minProperties": 1,
            "examples": [
                {
                    "title": "Send Email Notification",
                    "description": "Send welcome email to new user",
                    "tags": "email,priority-high,notification",
                    "payload": {"user_id": 12345, "email": "user@example.com", "template": "welcome"},
                }
            ],
        },
    )

    type: Annotated[str | None, Field(description="What happened, such as `order.placed`.")] = "event"
    payload: Any = None
    title: str | None = None
    description: str | None = None
    tags: Annotated[str | list[str] | None, Field(description="A list, or text such as `a,b`.")] = None
    key: Annotated[str | None, Field(description="What it is about; followers can keep the order of a key.")] = None
    uid: Annotated[str | None, Field(description="The same again stores nothing, and returns the first event.")] = None
    metadata: dict[str, str] | None = None
    delay: Annotated[float | None, Field(ge=0, le=3_153_600_000, description="Seconds until it is due.")] = None
    at: Annotated[str | None, Field(description="When it is due: RFC 3339 with a time zone.")] = None
    priority: Annotated[int | None, Field(ge=-10, le=10)] = None
    max_retries: Annotated[int | None, Field(ge=0, le=1_000_000)] = None


class Holding(Body):
    """Which lease is meant."""

    worker_id: WorkerId
    epoch: Epoch = None
    subscription: Name = "default"


class Extending(Holding):
    """Which lease is to run on, and for how long."""

    lease: Annotated[float | None, Field(ge=0.1, le=31_536_000, description="Seconds from now.")] = None


class Releasing(Holding):
    """Which lease is given back."""

    delay: Annotated[Seconds, Field(description="Seconds until it is due again.")] = 0.0


class Problems(Body):
    """An error that was met."""

    type: Annotated[str, Field(max_length=255)] = "Error"
    message: Text
    traceback: Annotated[str | None, Field(max_length=1_000_000)] = None
    handler: Annotated[str | None, Field(max_length=1_000)] = None


class Completed(Holding):
    """An attempt that worked; with `errors`, one that met some and is finished all the same."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        json_schema_extra={
            "examples": [{"worker_id": "worker-02:8742", "execution_time_ms": 1250, "status_code": 200}]
        },
    )

    execution_time_ms: Millis = None
    status_code: Code = None
    errors: Annotated[list[Problems], Field(max_length=100)] = []


class Failed(Holding):
    """An attempt that failed."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        json_schema_extra={
            "examples": [
                {
                    "worker_id": "worker-02:8742",
                    "execution_time_ms": 5000,
                    "status_code": 500,
                    "error_message": "Connection timeout: mail server unreachable. Will retry.",
                }
            ]
        },
    )

    execution_time_ms: Millis = None
    status_code: Code = None
    error_message: Text = "reported as failed"
    error_type: Annotated[str, Field(max_length=255)] = "Failed"
    traceback: Annotated[str | None, Field(max_length=1_000_000)] = None
    handler: Annotated[str | None, Field(max_length=1_000)] = None
    delay: Annotated[Seconds | None, Field(description="Seconds until the next attempt; else as the policy says.")] = (
        None
    )
    max_retries: Annotated[int | None, Field(ge=0, le=1_000_000, description="Unless the event has its own.")] = None
    retry: Annotated[bool, Field(description="False: a dead letter at once.")] = True


class Policy(Body):
    """How failures are followed by further attempts; seconds."""

    max_retries: Annotated[int, Field(ge=0, le=1_000_000)] = 3
    base_delay: Seconds = 1.0
    max_delay: Seconds = 30.0
    multiplier: Annotated[float, Field(ge=1, le=1e6)] = 2.0
    jitter: Annotated[float, Field(ge=0, le=1)] = 0.0


class NewSubscription(Body):
    """A named consumer group over the log."""

    model_config = ConfigDict(
        extra="forbid", strict=True, json_schema_extra={"examples": [{"name": "billing", "patterns": ["order.*"]}]}
    )

    name: Annotated[str, Field(min_length=1, max_length=100, pattern="^[^/]+$")]
    patterns: Annotated[list[Name], Field(min_length=1, max_length=100)] = ["*"]
    tags: Annotated[list[Annotated[str, Field(min_length=1, max_length=128)]], Field(max_length=32)] = []
    mode: Literal["queue", "ordered"] = "queue"
    lease: Annotated[float | None, Field(ge=0.1, le=31_536_000)] = None
    retry: Policy | None = None
    start: Annotated[
        Literal["now", "beginning"] | Annotated[int, Field(ge=0, le=LARGEST)],
        Field(description="`now`, `beginning`, or an id."),
    ] = "now"


class Rewind(Body):
    """Where an ordered subscription is to go on."""

    to: Annotated[
        Annotated[int, Field(ge=0, le=LARGEST)]
        | Literal["beginning", "now"]
        | Annotated[str, Field(max_length=64, json_schema_extra={"format": "date-time"})],
        Field(description="After an id, from a moment (RFC 3339), `beginning` or `now`."),
    ]
    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class Problem:
    """A kind of error, with a page of its own at `/problems/{name}`."""

    name: str
    title: str
    help: str


PROBLEMS: Final = {
    each.name: each
    for each in (
        Problem(
            "invalid-request", "The request is wrong", "Change what `detail` and `errors` name, and send it again."
        ),
        Problem("not-json", "The body is not JSON", "Send JSON as RFC 8259 has it: no NaN, no key twice, UTF-8."),
        Problem("invalid-payload", "The payload cannot be kept", "Payloads must come back exactly as they went in."),
        Problem("invalid-event", "The event is wrong", "A field of the event other than its payload is wrong."),
        Problem("too-large", "The body is too large", "Store what is large elsewhere, and publish a reference to it."),
        Problem("too-slow", "The body came too slowly", "Send the body within the time the server allows."),
        Problem("unsupported-media-type", "This kind of body is not understood", "Send application/json."),
        Problem("not-found", "There is no such thing", "It was never there, or it has been archived or deleted."),
        Problem("gone", "It has been archived", "What lies so far back is in the lake, no longer in the store."),
        Problem("method-not-allowed", "This path takes another method", "See `Allow`, and /docs."),
        Problem("conflict", "The present state forbids it", "Nothing changed. Look at the present state, then decide."),
        Problem("lease-lost", "The lease has passed", "Another claim or a reset came first; drop this attempt's work."),
        Problem("max-retries-exceeded", "Max retries exceeded", "The event is now a dead letter: see /dlq."),
        Problem("unauthorized", "A token is needed", "Send `Authorization: Bearer …`, made by `postbus token create`."),
        Problem("forbidden", "This token does not allow it", "Use a token with the scope that `detail` names."),
        Problem("unavailable", "The store cannot do it now", "Nothing was acknowledged. Try again after a moment."),
        Problem(
            "outcome-unknown",
            "The answer of the store was lost",
            "It may have been done. Try again; an event that has a `uid` or an `Idempotency-Key` is stored once.",
        ),
        Problem(
            "internal", "The server is at fault", "It has been written to the server's log. It is a bug: report it."
        ),
    )
}
_BY_ERROR: Final = {
    "InvalidRequest": "invalid-request",
    "InvalidPayloadError": "invalid-payload",
    "InvalidEventError": "invalid-event",
    "NotFound": "not-found",
    "Conflict": "conflict",
    "LeaseLost": "lease-lost",
    "MaxRetriesExceeded": "max-retries-exceeded",
    "EventBusShutdownError": "unavailable",
    "StoreUnavailable": "unavailable",
    "OutcomeUnknown": "outcome-unknown",
    "SchemaMismatch": "unavailable",
    "UnsafeStore": "unavailable",
}


def problem(name: str, status: int, detail: str, **more: Any) -> dict[str, Any]:
    """Return a body for `application/problem+json`."""
    return {
        "type": f"/problems/{name}",
        "title": PROBLEMS[name].title,
        "status": status,
        "detail": detail.encode(errors="backslashreplace").decode(),  # it may repeat half a character
        **more,
    }


def problem_of(error: PostbusError) -> dict[str, Any]:
    """Return the problem that tells of an error; where the store itself is at fault, nothing of its inside."""
    name = next(_BY_ERROR[kind.__name__] for kind in type(error).__mro__ if kind.__name__ in _BY_ERROR)
    status = http_status(error)
    detail = PROBLEMS[name].help if name in {"unavailable", "outcome-unknown"} else str(error)
    return problem(name, status, detail)


def as_json(value: Any) -> bytes:
    """Return JSON; integers beyond 64 bits, which payloads may hold, too."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def moment_json(moment: datetime | None) -> str | None:
    """Return a moment as RFC 3339 in UTC."""
    return None if moment is None else moment.astimezone(UTC).isoformat().replace("+00:00", "Z")


def event_json(event: Event, policy: RetryPolicy) -> dict[str, Any]:
    """Return an event as S3 shows it, with what is added to that; `policy` is that of the subscription asked about."""
    return {
        "id": event.id,
        "title": event.title,
        "description": event.description,
        "tags": ",".join(event.tags),
        "status": event.status,
        "payload": event.payload,
        "retry_count": event.retry_count,
        "max_retries": policy.max_retries if event.max_retries is None else event.max_retries,
        "next_retry_at": moment_json(event.next_retry_at),
        "created_at": moment_json(event.created_at),
        "updated_at": moment_json(event.updated_at or event.created_at),
        "uid": event.uid,
        "type": event.type,
        "key": event.key,
        "priority": event.priority,
        "metadata": dict(event.metadata),
    }


def brief_json(event: Event, policy: RetryPolicy) -> dict[str, Any]:
    """Return an event as lists show it."""
    told = event_json(event, policy)
    told["last_error"] = event.last_error
    return told


def whole_json(event: Event, policy: RetryPolicy) -> dict[str, Any]:
    """Return an event with how it stands everywhere."""
    told = event_json(event, policy)
    told["errors"] = [error_json(each) for each in event.errors]
    told["deliveries"] = [state_json(each) for each in event.deliveries]
    return told


def error_json(error: AttemptError) -> dict[str, Any]:
    """Return why an attempt failed."""
    return {
        "type": error.type,
        "message": error.message,
        "attempt": error.attempt,
        "worker_id": error.worker_id,
        "at": moment_json(error.at),
        "traceback": error.traceback,
        "handler": error.handler,
    }


def state_json(state: DeliveryState) -> dict[str, Any]:
    """Return how an event stands in one subscription."""
    return {
        "subscription": state.subscription,
        "status": state.status,
        "attempt": state.attempt,
        "retry_count": state.retry_count,
        "next_retry_at": moment_json(state.next_retry_at),
        "updated_at": moment_json(state.updated_at),
        "worker_id": state.worker_id,
        "lease_until": moment_json(state.lease_until),
        "lease_expired": state.lease_expired,
    }


def delivery_json(delivery: Delivery, lease: timedelta) -> dict[str, Any]:
    """Return an event that was just leased, and what its worker needs to know of the lease."""
    event = delivery.event
    return {
        "id": event.id,
        "title": event.title,
        "description": event.description,
        "tags": ",".join(event.tags),
        "status": "PROCESSING",
        "payload": event.payload,
        "retry_count": event.retry_count,
        "max_retries": delivery.max_retries,
        "created_at": moment_json(event.created_at),
        "uid": event.uid,
        "type": event.type,
        "key": event.key,
        "priority": event.priority,
        "metadata": dict(event.metadata),
        "subscription": delivery.subscription,
        "epoch": delivery.epoch,
        "attempt": delivery.attempt,
        "lease_seconds": round(lease.total_seconds(), 3),
        "lease_until": moment_json(delivery.lease_until),
        "suspect": delivery.suspect,
    }


def entry_json(entry: LogEntry) -> dict[str, Any]:
    """Return an audit row, less what it does not have."""
    told: dict[str, Any] = {
        "id": entry.id,
        "event_id": entry.event_id,
        "worker_id": entry.worker_id,
        "action": entry.action,
        "status_code": entry.status_code,
        "error_message": entry.error_message,
        "execution_time_ms": _plain(entry.execution_time_ms),
        "created_at": moment_json(entry.created_at),
        "subscription": entry.subscription,
        "attempt": entry.attempt,
        "epoch": entry.epoch,
        "error_type": entry.error_type,
    }
    return {name: value for name, value in told.items() if value is not None}


def _plain(number: float | None) -> float | None:
    """Return a number as people write it: 1250, not 1250.0."""
    return int(number) if number is not None and number.is_integer() else number


def reported_json(reported: Reported) -> dict[str, Any]:
    """Return what a report has recorded."""
    told = entry_json(reported.entry)
    told.pop("id")
    for name in ("status_code", "execution_time_ms"):
        told.setdefault(name, None)
    return told


def failure_json(reported: Reported) -> dict[str, Any]:
    """Return what a failure has recorded, and what follows."""
    told = reported_json(reported)
    told["retry_scheduled"] = reported.entry.status == "PENDING"
    told["next_retry_at"] = moment_json(reported.next_retry_at)
    return told


def letter_json(letter: DeadLetter, policy: RetryPolicy) -> dict[str, Any]:
    """Return a dead letter with the error of each attempt."""
    return {
        "event": event_json(letter.event, policy),
        "subscription": letter.subscription,
        "attempts": letter.attempts,
        "errors": [error_json(each) for each in letter.errors],
        "died_at": moment_json(letter.died_at),
        "last_retry_at": moment_json(letter.last_retry_at),
    }


def stats_json(stats: Stats) -> dict[str, Any]:
    """Return the bus in figures."""
    return {
        "events": stats.events,
        "head": stats.head,
        "store_bytes": stats.store_bytes,
        "rates": dict(stats.rates),
        "unhandled": dict(stats.unhandled),
        "subscriptions": [
            {
                "name": each.name,
                "pending": each.pending,
                "scheduled": each.scheduled,
                "processing": each.processing,
                "dead": each.dead,
                "completed": each.completed,
                "completed_with_errors": each.completed_with_errors,
                "oldest_age": None if each.oldest_age is None else each.oldest_age.total_seconds(),
            }
            for each in stats.subscriptions
        ],
        "followers": [
            {
                "name": each.subscription,
                "stream": each.stream,
                "position": each.position,
                "lag": each.lag,
                "lag_seconds": None if each.waiting is None else each.waiting.total_seconds(),
                "worker_id": each.worker_id,
                "dead": stats.dead.get(each.subscription, 0),
                "parked": stats.parked.get(each.subscription, 0),
            }
            for each in stats.checkpoints
        ],
        "holders": [each.told for each in stats.holders],
    }


def subscription_json(subscription: Subscription, checkpoint: Checkpoint | None) -> dict[str, Any]:
    """Return a subscription, and of one that is read in order, how far it has come."""
    told: dict[str, Any] = {
        "name": subscription.name,
        "mode": subscription.mode,
        "patterns": list(subscription.patterns),
        "tags": list(subscription.tags),
        "paused": subscription.paused,
        "lease": None if subscription.lease is None else subscription.lease.total_seconds(),
        "retry": None if subscription.retry is None else subscription.retry.to_dict(),
        "created_at": moment_json(subscription.created_at),
        "position": None,
        "lag": None,
        "lag_seconds": None,
        "worker_id": None,
    }
    if checkpoint is not None:
        told |= {
            "position": checkpoint.position,
            "lag": checkpoint.lag,
            "lag_seconds": None if checkpoint.waiting is None else checkpoint.waiting.total_seconds(),
            "worker_id": checkpoint.worker_id,
        }
    return told


def attempt_error(given: Problems | Failed, worker_id: str) -> AttemptError:
    """Return what a worker told of an error."""
    kind, message = (
        (given.error_type, given.error_message) if isinstance(given, Failed) else (given.type, given.message)
    )
    return AttemptError(kind, message, worker_id=worker_id, traceback=given.traceback, handler=given.handler)


def fields_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an event to publish, as the one validator takes them."""
    if not given:
        raise InvalidEventError("payload is missing: the event is empty; send a payload, or at least a type")
    # Null is as good as none, but only for what an event has: a name that it has not is refused, whatever its value.
    fields = {
        name: value for name, value in given.items() if value is not None or name == "payload" or name not in FIELDS
    }
    fields.setdefault("type", "event")
    if isinstance(fields.get("delay"), bool):
        raise InvalidEventError("delay is a number of seconds")
    if isinstance(tags := fields.get("tags"), str):
        fields["tags"] = [tag.strip() for tag in tags.split(",") if tag.strip()]
    return fields


def moment_of(text: object, wrong: type[InvalidRequest] = InvalidEventError) -> datetime:
    """Return the moment meant by RFC 3339 text, exactly as that has it; raise `wrong` for any other text."""
    parts = _MOMENT.fullmatch(text) if isinstance(text, str) else None
    try:
        if parts is not None:
            day, minute, second, fraction, zone = parts.groups(default="")
            leap = second == "60"
            found = datetime.fromisoformat(f"{day}T{minute}:{59 if leap else second}{fraction}{zone.upper()}")
            return found + timedelta(seconds=leap)
    except (ValueError, OverflowError):  # the 30th of February, or beyond the calendar
        pass
    raise wrong("a moment is RFC 3339 with a time zone, such as 2030-01-31T12:00:00Z")
