"""Every error postbus raises on purpose.

    PostbusError
    ├── InvalidRequest            the caller must change something; nothing was stored
    │   ├── InvalidPayloadError   the payload is not JSON that survives a round trip
    │   └── InvalidEventError     type, tags, uid or another field of the event is wrong
    ├── NotFound                  no such event, dead letter or subscription
    ├── Conflict                  the thing is in a state that forbids this
    │   ├── LeaseLost             another claim, or a reset, has taken the delivery over
    │   └── MaxRetriesExceeded    the last allowed attempt has failed
    ├── EventBusShutdownError     the bus is closing or closed
    ├── StoreUnavailable          locked, full or unreachable; nothing happened, safe to retry
    │   └── OutcomeUnknown        the answer was lost: it may have happened; retry with the same uid
    ├── SchemaMismatch            an operator must migrate, or upgrade postbus
    └── UnsafeStore               acknowledging would be a lie: corrupt file, unsafe settings

`Discard` and `RetryLater` stand apart: handlers raise them to choose their outcome.
"""

from datetime import timedelta
from typing import Final

__all__ = [
    "CODES",
    "Conflict",
    "Discard",
    "EventBusShutdownError",
    "InvalidEventError",
    "InvalidPayloadError",
    "InvalidRequest",
    "LeaseLost",
    "MaxRetriesExceeded",
    "NotFound",
    "OutcomeUnknown",
    "PostbusError",
    "RetryLater",
    "SchemaMismatch",
    "StoreUnavailable",
    "UnsafeStore",
    "exit_code",
    "http_status",
]


LONGEST_DELAY: Final = timedelta(days=36_500)


class PostbusError(Exception):
    """The root: catch it to catch everything postbus raises on purpose."""


class InvalidRequest(PostbusError, ValueError):
    """An argument is wrong; the message says which and why. Nothing was stored."""


class InvalidPayloadError(InvalidRequest):
    """The payload cannot be stored and returned exactly as given."""


class InvalidEventError(InvalidRequest):
    """A field of the event other than its payload is wrong."""


class NotFound(PostbusError, LookupError):
    """No event, dead letter or subscription goes by that name."""


class Conflict(PostbusError):
    """The present state forbids this; nothing changed."""


class LeaseLost(Conflict):
    """The lease's epoch has passed: another claim holds the delivery, or its end is recorded. Nothing changed."""


class MaxRetriesExceeded(Conflict):
    """The failure just reported was the last one allowed; the delivery is now a dead letter."""


class EventBusShutdownError(PostbusError):
    """The bus is shutting down or closed: it takes no more events and no more handlers."""


class StoreUnavailable(PostbusError):
    """The store could not do it now (locked, full, unreachable). Nothing was stored; retrying is safe."""


class OutcomeUnknown(StoreUnavailable):
    """The answer to a commit was lost and could not be looked up: it may have happened.

    Publish again with the same `uid`: if the event was stored, that returns it.
    """


class SchemaMismatch(PostbusError):
    """The store's schema is older or newer than this postbus understands."""


class UnsafeStore(PostbusError):
    """The store cannot keep its promises (corruption, unsafe settings), so it is refused."""


class Discard(Exception):
    """Raised by a handler: make this a dead letter at once, with this reason."""


class RetryLater(Exception):
    """Raised by a handler: try again after `delay`. It counts as an attempt."""

    def __init__(self, delay: float | timedelta, reason: str = "the handler asked for a later retry") -> None:
        """Ask for the next attempt `delay` (seconds or timedelta) from now."""
        super().__init__(delay, reason)
        wanted = delay if isinstance(delay, timedelta) else timedelta(seconds=min(delay, LONGEST_DELAY.total_seconds()))
        self.delay = min(max(wanted, timedelta(0)), LONGEST_DELAY)
        self.reason = reason

    def __str__(self) -> str:
        """Return the reason: what is recorded of this attempt."""
        return self.reason


CODES: Final[dict[type[PostbusError], tuple[int, int]]] = {
    InvalidRequest: (422, 2),
    InvalidPayloadError: (422, 2),
    InvalidEventError: (422, 2),
    NotFound: (404, 1),
    Conflict: (409, 1),
    LeaseLost: (409, 1),
    MaxRetriesExceeded: (400, 1),
    EventBusShutdownError: (503, 1),
    StoreUnavailable: (503, 1),
    OutcomeUnknown: (503, 1),
    SchemaMismatch: (503, 1),
    UnsafeStore: (503, 1),
    PostbusError: (500, 1),
}
"""The one table from error to (HTTP status, exit code)."""


def _codes(error: PostbusError) -> tuple[int, int]:
    return next(CODES[kind] for kind in type(error).__mro__ if kind in CODES)


def http_status(error: PostbusError) -> int:
    """Return the HTTP status that tells of this error."""
    return _codes(error)[0]


def exit_code(error: PostbusError) -> int:
    """Return the exit code of a command that ended with this error."""
    return _codes(error)[1]
