"""Values for unit tests, made without a store."""

from datetime import UTC, datetime
from typing import Any

from postbus.model import Delivery, Event, Lease
from postbus.retry import RetryPolicy

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def event(kind: str = "order.placed", **fields: Any) -> Event:
    """Return an event as a store would."""
    given = {"id": 1, "uid": "u", "payload": None, "tags": (), "key": None, "title": None, "description": None,
             "metadata": {}, "created_at": NOON}  # fmt: skip
    return Event(type=kind, **{**given, **fields})


def delivery(attempt: int = 1, *, retry: RetryPolicy | None = None, **fields: Any) -> Delivery:
    """Return a leased delivery; `retry` is the subscription's or the bus's policy."""
    return Delivery(
        event=event(**fields),
        lease=Lease(1, "default", 1),
        attempt=attempt,
        retry=retry or RetryPolicy(),
        worker_id="host:1",
        lease_until=NOON,
    )
