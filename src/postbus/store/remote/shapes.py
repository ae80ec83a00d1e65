"""What a server and a remote store tell each other: the model's own values as JSON, written and read by pydantic.

Integers beyond 64 bits, floats to their last bit, moments to the microsecond: everything comes back as it was.
"""

from typing import Final

from pydantic import TypeAdapter

from postbus.breaker import BreakerState
from postbus.model import (
    Checkpoint,
    DeadLetter,
    Event,
    HandlerRecord,
    Lease,
    LogEntry,
    Page,
    Span,
    State,
    Stats,
    Subscription,
)
from postbus.payload import MAX_PAYLOAD
from postbus.store.contract import Claimed, Rewound, Settled, Work

MOST_PUBLISHED: Final = 10_000
"""How many events one batch may hold: all or none of them are stored."""
MAX_BATCH: Final = 8 * MAX_PAYLOAD
"""How many bytes of JSON it may have."""
MOST_CLAIMED: Final = 100
MOST_SETTLED: Final = 1_000
MOST_LISTED: Final = 500

CLAIMED: Final = TypeAdapter(Claimed)
SETTLED: Final = TypeAdapter(list[Settled])
LEASES: Final = TypeAdapter(list[Lease])
WORK: Final = TypeAdapter(Work)
EVENT: Final = TypeAdapter(Event)
EVENTS: Final = TypeAdapter(list[Event])
ENTRIES: Final = TypeAdapter(tuple[LogEntry, ...])
EVENT_PAGE: Final = TypeAdapter(Page[Event])
LETTER_PAGE: Final = TypeAdapter(Page[DeadLetter])
SUBSCRIPTION: Final = TypeAdapter(Subscription)
REWOUND: Final = TypeAdapter(Rewound)
STATS: Final = TypeAdapter(Stats)
HANDLERS: Final = TypeAdapter(tuple[HandlerRecord, ...])
CHECKPOINTS: Final = TypeAdapter(tuple[Checkpoint, ...])
SPAN: Final = TypeAdapter(Span)
STANDING: Final = TypeAdapter(list[tuple[int, str | None, State]])
BREAKER: Final = TypeAdapter(BreakerState)
CHANGED: Final = TypeAdapter(tuple[bool, BreakerState])
"""Whether a breaker was changed, and how it stands."""
