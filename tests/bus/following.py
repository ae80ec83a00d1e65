"""What tests of followers share: options, a way to publish, and looks at how one stands."""

from collections.abc import Callable
from typing import Any

import pytest

from postbus import (
    Context,
    Event,
    EventBus,
    RetryPolicy,
)
from postbus.model import Checkpoint
from postbus.store import log_of

QUICK = RetryPolicy(max_retries=2, base_delay=0.01, max_delay=0.01)
ONCE = RetryPolicy(max_retries=0)
LONG = 10.0

Make = Callable[..., EventBus]
Eventually = Callable[..., Any]


def publish(bus: EventBus, *payloads: Any, kind: str = "a") -> list[Event]:
    """Publish events of these payloads."""
    return bus.publish_many([{"type": kind, "payload": each} for each in payloads])


def publish_keyed(bus: EventBus, *names: str) -> dict[str, Event]:
    """Publish events such as A5, of the key A."""
    return {name: bus.publish("a", name, key=name[0]) for name in names}


def stand(bus: EventBus, name: str = "s") -> Checkpoint:
    """Return how a follower's checkpoint stands."""
    return next(each for each in bus.store.checkpoints() if each.subscription == name)


def collect(bus: EventBus, pattern: str = "*", name: str = "s", **options: Any) -> list[Any]:
    """Follow, and return the list that payloads are put into."""
    seen: list[Any] = []
    bus.follow(name, pattern, **options)(lambda event: seen.append(event.payload))
    return seen


def actions(bus: EventBus, event: Event) -> list[str]:
    """Return what the audit log tells of an event in `s`."""
    return [row.action.value for row in bus.get(event.id, include_logs=True).logs if row.subscription == "s"]


def looks(bus: EventBus, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return the list of what followers found when they looked whether they are paused."""
    look, found = log_of(bus.store).is_paused, list[bool]()

    def looking(lead: Any) -> bool:
        found.append(look(lead))
        return found[-1]

    monkeypatch.setattr(bus.store, "is_paused", looking)
    return found


class Projection:
    """A follower that fails at what it is told to, and parks what follows of the same key."""

    def __init__(self, bus: EventBus, *broken: str, **options: Any) -> None:
        """Follow as `s`."""
        self.broken = set(broken)
        self.done: list[str] = []
        self.again: list[str] = []
        bus.follow("s", on_error="park_key", retry=ONCE, **options)(self.handle)

    def handle(self, event: Event, ctx: Context) -> None:
        """Take an event such as A5."""
        if event.payload in self.broken:
            raise ValueError(event.payload)
        self.done.append(event.payload)
        if ctx.redelivered:
            self.again.append(event.payload)

    def of(self, key: str) -> list[str]:
        """Return what is done of a key."""
        return [each for each in self.done if each[0] == key]


BOTH = [f"{key}{number}" for number in range(1, 9) for key in "AB"]


def keyed(key: str, first: int, last: int) -> list[str]:
    """Return A1, A2 … of a key."""
    return [f"{key}{number}" for number in range(first, last + 1)]
