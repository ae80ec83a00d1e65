"""Time as an argument: who decides by time is handed a clock."""

from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Final, Protocol

__all__ = ["Clock", "SystemClock", "from_micros", "to_micros"]

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)


class Clock(Protocol):
    """Tells the time that decisions are made by."""

    def now(self) -> datetime:
        """Return the present moment, aware and in UTC."""
        ...


class SystemClock:
    """The machine's own clock."""

    def now(self) -> datetime:
        """Return the present moment in UTC."""
        return datetime.now(UTC)


def to_micros(moment: datetime) -> int:
    """Return the whole microseconds since 1970: how stores without a time type keep a moment."""
    return (moment - _EPOCH) // _MICROSECOND


@lru_cache(maxsize=4_096)
def from_micros(micros: int) -> datetime:
    """Return the moment that `to_micros` turned into this number. Batches share moments, so some are remembered."""
    return _EPOCH + timedelta(microseconds=micros)
