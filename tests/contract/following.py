"""What contract tests of followers share."""

from datetime import timedelta
from typing import Any

import pytest

from postbus.model import AttemptError, Checkpoint, Event, State, Status
from postbus.store import Log
from postbus.store.contract import Burial, Lead, Step
from tests.contract.stores import Operator, wanting

HELD = timedelta(seconds=10)
ALL = wanting("*")
on_postgres = pytest.mark.parametrize("kind", ["postgres"])
"""For what one writer at a time rules out."""


def lead(store: Log, who: str = "one", name: str = "s", **how: bool) -> Lead:
    """Take a lead that must be free."""
    found = store.lead(name, who, f"host:{who}", HELD, **how)
    assert found is not None
    return found


def standby(store: Log, who: str = "two", **how: bool) -> Lead | None:
    """Ask for the lead."""
    return store.lead("s", who, f"host:{who}", HELD, **how)


def step(lead: Lead, event: Event | int, **left: Any) -> Step:
    """Return a step to an event."""
    return Step(lead.subscription, lead.epoch, event if isinstance(event, int) else event.id, "host:one", **left)


def burial(event: Event, attempts: int = 1) -> Burial:
    """Return the end of an event that failed so many times, each time differently."""
    errors = [AttemptError("ValueError", f"no {number}", number, "host:one") for number in range(1, attempts + 1)]
    return Burial(event, errors, 1.5)


def stand(store: Log, name: str = "s") -> Checkpoint:
    """Return how a subscription's checkpoint stands."""
    return next(each for each in store.checkpoints() if each.subscription == name)


def rows(op: Operator, event: Event) -> list[tuple[str, Status | None, int | None]]:
    """Return what the audit log tells of an event in `s`."""
    return [(row.action.value, row.status, row.attempt) for row in op.logs(event, "s")]


def left(store: Log) -> list[tuple[int, State]]:
    """Return what is left behind, and how."""
    return [(event_id, state) for event_id, _, state in store.standing("s")]
