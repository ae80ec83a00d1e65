"""postbus: a durable event bus and work queue in the database you already have."""

from postbus.aio import AsyncEventBus
from postbus.breaker import Breaker
from postbus.bus import EventBus
from postbus.clock import Clock
from postbus.dlq import DeadLetters
from postbus.errors import (
    Conflict,
    Discard,
    EventBusShutdownError,
    InvalidEventError,
    InvalidPayloadError,
    InvalidRequest,
    LeaseLost,
    MaxRetriesExceeded,
    NotFound,
    OutcomeUnknown,
    PostbusError,
    RetryLater,
    SchemaMismatch,
    StoreUnavailable,
    UnsafeStore,
)
from postbus.execution import Context
from postbus.follow import CheckpointMode, InstanceMode
from postbus.follower import Follower
from postbus.model import AttemptError, DeadLetter, Delivery, Event, LogEntry, NewEvent, Page, Status, Subscription
from postbus.retry import RetryPolicy
from postbus.store import open_store

__all__ = [
    "AsyncEventBus",
    "AttemptError",
    "Breaker",
    "CheckpointMode",
    "Clock",
    "Conflict",
    "Context",
    "DeadLetter",
    "DeadLetters",
    "Delivery",
    "Discard",
    "Event",
    "EventBus",
    "EventBusShutdownError",
    "Follower",
    "InstanceMode",
    "InvalidEventError",
    "InvalidPayloadError",
    "InvalidRequest",
    "LeaseLost",
    "LogEntry",
    "MaxRetriesExceeded",
    "NewEvent",
    "NotFound",
    "OutcomeUnknown",
    "Page",
    "PostbusError",
    "RetryLater",
    "RetryPolicy",
    "SchemaMismatch",
    "Status",
    "StoreUnavailable",
    "Subscription",
    "UnsafeStore",
    "open_store",
]
