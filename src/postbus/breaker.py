"""The circuit breaker as a value: closed, open, half-open with one probe.

A handler that fails again and again opens its breaker: its events are no longer claimed, so none of their
attempts is burnt on a service that is down. After `reset_after` one event is let through as a probe; its
success closes the breaker, its failure opens it anew. The state lives in the store, so all workers share it;
these functions only say what follows from what.
"""

from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Final

from postbus.errors import InvalidRequest

__all__ = ["Admission", "Breaker", "BreakerState"]

LONGEST_RESET: Final = 365 * 86_400.0


class Admission(StrEnum):
    """What an open, closed or half-open breaker lets through just now."""

    ALL = "all"
    PROBE = "probe"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class BreakerState:
    """How one breaker stands. `opened_at` is None while closed; `probe_until` is set while a probe is out."""

    failures: int = 0
    opened_at: datetime | None = None
    probe_until: datetime | None = None

    @property
    def name(self) -> str:
        """The state in a word: closed, open or half-open."""
        if self.opened_at is None:
            return "closed"
        return "open" if self.probe_until is None else "half-open"


@dataclass(frozen=True, slots=True)
class Breaker:
    """Opens after `failures` failures in a row, and sends a probe every `reset_after` seconds from then on."""

    failures: int = 5
    reset_after: float = 30.0

    def __post_init__(self) -> None:
        """Refuse a breaker that could never close or never open."""
        if self.failures < 1 or not 0 < self.reset_after <= LONGEST_RESET:
            raise InvalidRequest("a breaker needs failures >= 1 and reset_after between 0 s and a year")

    def admit(self, state: BreakerState, now: datetime) -> Admission:
        """Return what may be claimed now; PROBE must be taken with `probing` before it is used."""
        if state.opened_at is None:
            return Admission.ALL
        if state.probe_until is not None:
            return Admission.PROBE if now >= state.probe_until else Admission.NONE
        return Admission.PROBE if now >= state.opened_at + timedelta(seconds=self.reset_after) else Admission.NONE

    def probing(self, state: BreakerState, until: datetime) -> BreakerState:
        """Return the half-open state: one probe is out; if its worker dies, another may go at `until`."""
        return replace(state, probe_until=until)

    def succeeded(self) -> BreakerState:
        """Return the state after a success: closed, with no failures counted."""
        return BreakerState()

    def failed(self, state: BreakerState, now: datetime) -> BreakerState:
        """Return the state after a failure: one more counted, opened (again) when they are enough."""
        failures = state.failures + 1
        if state.opened_at is not None and state.probe_until is None:
            return replace(state, failures=failures)
        opened = state.opened_at is not None or failures >= self.failures
        return BreakerState(failures=failures, opened_at=now if opened else None)
