"""The bus in figures for pages that must not wait: counted in the background, shown with their age.

Counting five million rows takes a while, so no page does it. What happened when is gathered from the audit log as it
grows, each row once, so that it is the database that tells, and a server that was restarted tells the same.
"""

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, Generic, TypeVar

from postbus.errors import PostbusError
from postbus.model import Action, Stats, Status, Stream
from postbus.observe import tell
from postbus.store.contract import Activity, Log

__all__ = ["Background", "Flow", "Look", "Pulse", "Seen"]

T = TypeVar("T")

SLOT: Final = timedelta(seconds=10)
SLOTS: Final = 360
FEWEST: Final = 60
"""A log that has just begun is shown from its beginning, but not less than so many slots."""
MOST: Final = 200_000
"""How many rows of a log are counted at a time; what is older than these is left out, and the page says so."""
FRESH: Final = 2.0
SHARE: Final = 20
"""Counting takes at most one part in so many of the time."""
PATIENCE: Final = 0.15

KINDS: Final = ("published", "completed", "retried", "dead")


@dataclass(frozen=True, slots=True)
class Flow:
    """What happened, a second, in slots of time up to the last that is over."""

    times: tuple[int, ...]
    """When each slot begins, in seconds since 1970."""
    rates: dict[str, tuple[float, ...]]
    """By kind, one number a slot."""
    cut: datetime | None
    """What happened before was not counted."""


@dataclass(frozen=True, slots=True)
class Look:
    """What is known of the bus."""

    stats: Stats
    flow: Flow


@dataclass(frozen=True, slots=True)
class Seen(Generic[T]):
    """What was found out, when, and how many seconds that took."""

    value: T
    at: datetime
    took: float


class Background(Generic[T]):
    """Finds something out in a thread of its own, again when it is asked for and has become old."""

    def __init__(self, find: Callable[[], T], fresh: float = FRESH) -> None:
        """Know nothing yet."""
        self._find = find
        self._fresh = fresh
        self._lock = threading.Lock()
        self._known: Seen[T] | None = None
        self._due = 0.0
        self._found = threading.Event()
        self._busy = False
        self.trouble: str | None = None
        """Why the last look failed."""

    def look(self, patience: float = PATIENCE) -> Seen[T] | None:
        """Return what is known, and have it looked up anew if it is old; None if nothing is known so soon."""
        with self._lock:
            stale = time.monotonic() >= self._due and not self._busy
            self._busy = self._busy or stale
        if stale:
            self._found.clear()
            threading.Thread(target=self._refresh, name="postbus-pulse", daemon=True).start()
        if stale or self._known is None:
            self._found.wait(patience)
        return self._known

    def _refresh(self) -> None:
        began = time.monotonic()
        try:
            found = self._find()
            self._known = Seen(found, datetime.now(UTC), time.monotonic() - began)
            self.trouble = None
        except PostbusError as error:
            tell(logging.WARNING, "dashboard_unavailable", reason=str(error))
            self.trouble = str(error)
        finally:
            took = time.monotonic() - began
            self._due = time.monotonic() + max(self._fresh, SHARE * took)
            self._busy = False
            self._found.set()


class Pulse(Background[Look]):
    """Knows the figures of a store, a few seconds old."""

    def __init__(self, store: Log) -> None:
        """Know nothing yet."""
        trend = _Trend(store)
        super().__init__(lambda: Look(store.stats(), trend.refresh()))


class _Trend:
    """Counts what happens, each row once."""

    def __init__(self, store: Log) -> None:
        self._store = store
        self._slots: defaultdict[datetime, dict[str, int]] = defaultdict(lambda: dict.fromkeys(KINDS, 0))
        self._seen: dict[Stream, int] = {}
        self._cut: datetime | None = None

    def refresh(self) -> Flow:
        """Take in what is new, and return the last hour."""
        for stream in Stream:
            self._take_in(stream)
        end = _floor(self._store.now())
        start = end - SLOTS * SLOT
        for old in [each for each in self._slots if each < start]:
            del self._slots[old]
        start = max(start, min([*self._slots, end - FEWEST * SLOT]))
        times = [start + number * SLOT for number in range((end - start) // SLOT)]
        none = dict.fromkeys(KINDS, 0)
        rates = {
            kind: tuple(self._slots.get(each, none)[kind] / SLOT.total_seconds() for each in times) for kind in KINDS
        }
        cut = self._cut if self._cut is not None and self._cut > start else None
        return Flow(tuple(int(each.timestamp()) for each in times), rates, cut)

    def _take_in(self, stream: Stream) -> None:
        head = self._store.span(stream).head
        after = self._seen.get(stream)
        if after is None or after > head:
            after = self._store.before(stream, self._store.now() - SLOTS * SLOT)
        rows = self._store.activity(stream, max(after, head - MOST), head, SLOT)
        if head - after > MOST:
            self._cut = min((each.start for each in rows), default=None)
        for each in rows:
            if (kind := _kind(each)) is not None:
                self._slots[each.start][kind] += each.times
        self._seen[stream] = head


def _floor(moment: datetime) -> datetime:
    return moment - timedelta(microseconds=int(moment.timestamp() * 1e6) % (SLOT // timedelta(microseconds=1)))


def _kind(activity: Activity) -> str | None:
    match activity.action, activity.status:
        case None, _:
            return "published"
        case ((Action.COMPLETED | Action.COMPLETED_WITH_ERRORS), _):
            return "completed"
        case Action.FAILED, Status.FAILED:
            return "dead"
        case Action.FAILED, _:
            return "retried"
        case _:
            return None
