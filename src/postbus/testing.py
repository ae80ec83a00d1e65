"""For your own tests: a bus on a temporary file, a clock that stands still, and a way to run everything that is due."""

import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from postbus.bus import EventBus

__all__ = ["FrozenClock", "drain", "temporary_bus"]


class FrozenClock:
    """A clock that moves only when told to."""

    def __init__(self, start: datetime = datetime(2030, 1, 1, tzinfo=UTC)) -> None:
        """Stand still at `start`."""
        self._now = start

    def now(self) -> datetime:
        """Return the moment it stands at."""
        return self._now

    def advance(self, seconds: float | timedelta) -> None:
        """Move on."""
        self._now += seconds if isinstance(seconds, timedelta) else timedelta(seconds=seconds)


@contextmanager
def temporary_bus(**options: Any) -> Generator[EventBus]:
    """Give a bus on a real SQLite file that goes away with the block; `options` are EventBus's."""
    with tempfile.TemporaryDirectory(prefix="postbus-") as folder:
        bus = EventBus(f"sqlite:///{Path(folder) / 'test.db'}", **options)
        try:
            yield bus
        finally:
            bus.shutdown()


def drain(bus: EventBus) -> int:
    """Run every delivery that is due, and what its handlers publish, in this thread; return how many ran.

    The bus need not be started. Retries wait for their time: advance a FrozenClock and drain again.
    """
    return bus.run_due()
