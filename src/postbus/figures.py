"""The figures of a process: the one table of metrics, and the cells in which their numbers stand.

Nothing is counted until somebody listens: then the bus notes what it does, at the price of a lookup and a lock. What is
known of the store itself is read from `Stats`. How figures are shown is no concern of this module.
"""

import mmap
import os
import platform
import struct
import sys
import tempfile
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import IO, Final, Literal, NamedTuple, Self, TypeAlias

import orjson

from postbus.breaker import BreakerState
from postbus.model import Dead, Delivery, Done, DoneWithErrors, Outcome, Retry, Stats

__all__ = [
    "BUCKETS",
    "METRICS",
    "OUTCOMES",
    "Counted",
    "Figures",
    "Metric",
    "Region",
    "Samples",
    "decoded",
    "encoded",
    "lasting",
    "listen",
    "merged",
    "of_stats",
]

Place = Literal["server", "worker", "both"]
Key = tuple[str, tuple[str, ...]]
"""A metric's name, and the values of its labels."""
Samples = Mapping[Key, Sequence[float]]
"""Of a counter or gauge its value; of a histogram how many fell into each bucket, and last their sum."""

Cell: TypeAlias = "memoryview[float]"

BUCKETS: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 3600.0,
)  # fmt: skip
"""Seconds; what took longer than the last falls into one bucket more."""
MOMENT: Final = 1.0
"""For how many seconds a count is waited for; what takes longer is told the next time."""
OUTCOMES: Final[Mapping[type[Outcome], str]] = {
    Done: "completed",
    DoneWithErrors: "completed_with_errors",
    Retry: "retried",
    Dead: "dead",
}


class Metric(NamedTuple):
    """Something that is told in figures. Labels are names that the code or an operator gave, never ids."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    where: Place = "both"

    @property
    def size(self) -> int:
        """How many numbers a cell of it has."""
        return len(BUCKETS) + 2 if self.kind == "histogram" else 1


PUBLISHED: Final = Metric("postbus_events_published_total", "counter", "Events published by this process.")
SETTLED: Final = Metric(
    "postbus_deliveries_settled_total",
    "counter",
    "Attempts that ended in this process: completed, completed_with_errors, retried, dead.",
    ("subscription", "outcome"),
)
WAIT: Final = Metric(
    "postbus_wait_seconds", "histogram", "From publishing to the claim of the first attempt.", ("subscription",)
)
HANDLER: Final = Metric("postbus_handler_seconds", "histogram", "How long handlers ran.", ("subscription", "handler"))
BREAKER: Final = Metric(
    "postbus_breaker_state", "gauge", "How a breaker stands: 0 closed, 1 half-open, 2 open.", ("breaker",)
)
DEPTH: Final = Metric(
    "postbus_deliveries",
    "gauge",
    "Deliveries: pending, of these scheduled for later, processing, dead; of a follower or Spark stream dead, parked.",
    ("subscription", "state"),
)
OLDEST: Final = Metric(
    "postbus_oldest_seconds", "gauge", "How long the oldest due delivery has waited.", ("subscription",)
)
UNHANDLED: Final = Metric(
    "postbus_unhandled_deliveries", "gauge", "Pending deliveries that no running worker handles.", ("subscription",)
)
LAG_EVENTS: Final = Metric(
    "postbus_lag_events", "gauge", "How many positions a follower or Spark stream is behind.", ("subscription",)
)
LAG_SECONDS: Final = Metric(
    "postbus_lag_seconds",
    "gauge",
    "How long the next event of a follower or Spark stream has waited.",
    ("subscription",),
)
STOPPED: Final = Metric(
    "postbus_follower_stopped", "gauge", "1 if a follower has stopped for good at an event.", ("subscription",)
)
RECENT: Final = Metric(
    "postbus_last_minute",
    "gauge",
    "What happened on the whole bus within the last minute, by audit action.",
    ("action",),
)
EVENTS: Final = Metric("postbus_events", "gauge", "Events in the log.")
HEAD: Final = Metric("postbus_head", "gauge", "The last position of the log.")
STORE_BYTES: Final = Metric("postbus_store_bytes", "gauge", "What the store takes.")
UP: Final = Metric("postbus_up", "gauge", "1 if the store answers; without it the figures of the store are left out.")
BUILD: Final = Metric("postbus_build_info", "gauge", "What runs here.", ("version", "python", "store"))
REQUESTS: Final = Metric(
    "postbus_http_requests_total", "counter", "Requests answered.", ("method", "path", "status"), "server"
)
PROCESSES: Final = Metric("postbus_worker_processes", "gauge", "Worker processes that run.", (), "worker")
WANTED: Final = Metric("postbus_worker_processes_wanted", "gauge", "Worker processes to keep running.", (), "worker")
RESTARTS: Final = Metric(
    "postbus_worker_restarts_total", "counter", "Worker processes that ended and were to be replaced.", (), "worker"
)
METRICS: Final = (
    PUBLISHED, SETTLED, WAIT, HANDLER, BREAKER, DEPTH, OLDEST, UNHANDLED, LAG_EVENTS, LAG_SECONDS, STOPPED, RECENT,
    EVENTS, HEAD, STORE_BYTES, UP, BUILD, REQUESTS, PROCESSES, WANTED, RESTARTS,
)  # fmt: skip
_GAUGES: Final = frozenset(each.name for each in METRICS if each.kind == "gauge")


def _private(_: Key, size: int) -> Cell:
    return memoryview(bytearray(8 * size)).cast("d")


class Figures:
    """Numbers that grow as things happen. Safe to use from many threads."""

    def __init__(self, cell: Callable[[Key, int], Cell] = _private) -> None:
        """Keep numbers in cells that `cell` makes, one for each metric and set of labels."""
        self._make = cell
        self._cells: dict[Key, Cell] = {}
        self._lock = threading.Lock()

    def _cell(self, metric: Metric, labels: tuple[str, ...]) -> Cell:
        key = metric.name, labels
        found = self._cells.get(key)
        if found is None:
            found = self._cells[key] = self._make(key, metric.size)
        return found

    def count(self, metric: Metric, labels: tuple[str, ...] = (), amount: int = 1) -> None:
        """Let a counter grow."""
        with self._lock:
            self._cell(metric, labels)[0] += amount

    def set(self, metric: Metric, labels: tuple[str, ...], value: float) -> None:
        """Say how a gauge stands."""
        with self._lock:
            self._cell(metric, labels)[0] = value

    def observe(self, metric: Metric, labels: tuple[str, ...], seconds: float) -> None:
        """Add to a histogram."""
        with self._lock:
            cell = self._cell(metric, labels)
            cell[bisect_left(BUCKETS, seconds)] += 1
            cell[-1] += seconds

    def samples(self) -> Samples:
        """Return how everything stands."""
        with self._lock:
            return {key: tuple(cell) for key, cell in self._cells.items()}

    # ── what the bus tells ───────────────────────────────────────────────────────────────────────────────────────

    def runs(self, url: str) -> None:
        """Note what runs here, and on which kind of store."""
        self.set(BUILD, (version("postbus"), platform.python_version(), url.partition(":")[0]), 1)

    def published(self, count: int) -> None:
        """Note that events were published; one whose uid was known before counts as well."""
        self.count(PUBLISHED, (), count)

    def claimed(self, delivery: Delivery) -> None:
        """Note how long a delivery waited: of the first attempt only, for when a retry was due is not told."""
        event = delivery.event
        if delivery.attempt == 1 and event.updated_at is not None:
            waited = (event.updated_at - event.created_at).total_seconds()
            self.observe(WAIT, (delivery.subscription,), max(0.0, waited))

    def handled(self, subscription: str, handler: str, seconds: float) -> None:
        """Note how long a handler ran."""
        self.observe(HANDLER, (subscription, handler), seconds)

    def broken(self, breaker: str, state: BreakerState) -> None:
        """Note how a breaker stands."""
        self.set(BREAKER, (breaker,), ("closed", "half-open", "open").index(state.name))

    def settled(self, subscription: str, outcome: Outcome | type[Outcome], count: int = 1) -> None:
        """Note how an attempt ended, once that is recorded."""
        kind = outcome if isinstance(outcome, type) else type(outcome)
        self.count(SETTLED, (subscription, OUTCOMES[kind]), count)


listener: Figures | None = None
"""Who is told, if anybody. One process, one listener; look here before saying anything."""


def listen(figures: Figures | None = None) -> Figures:
    """Have this process count from now on; return where. Who comes second shares with the first."""
    global listener  # noqa: PLW0603  one process, one listener
    if listener is None:
        listener = figures or Figures()
    return listener


# ── of many processes ────────────────────────────────────────────────────────────────────────────────────────────────


class Region:
    """Memory in which one process counts and another looks: however the first ends, nothing it counted is lost.

    It begins with its length in use; then come cells: how long the key and the numbers are, the key as JSON, the
    numbers. The length moves last, so that whoever looks sees whole cells only.
    """

    SIZE: Final = 1 << 20
    _HEAD: Final = struct.Struct("=II")
    _USED: Final = struct.Struct("=Q")

    def __init__(self, file: int) -> None:
        """Share the memory of an open file."""
        self._memory = mmap.mmap(file, self.SIZE)
        self._used = max(self._USED.unpack_from(self._memory)[0], self._USED.size)

    @classmethod
    def make(cls) -> tuple[Self, IO[bytes]]:
        """Return an empty one, and the file whose number leads another process to it; close it when that has it."""
        linux = sys.platform == "linux"  # there it needs no folder that can be written to
        file = os.fdopen(os.memfd_create("postbus"), "r+b") if linux else tempfile.TemporaryFile()  # noqa: SIM115
        file.truncate(cls.SIZE)
        return cls(file.fileno()), file

    def cell(self, key: Key, size: int) -> Cell:
        """Return a cell of its own for a key; when all is in use, one that nobody else sees."""
        told = orjson.dumps(key)
        told = told.ljust(-(-len(told) // 8) * 8)
        start = self._used + self._HEAD.size + len(told)
        end = start + 8 * size
        if end > self.SIZE:
            return _private(key, size)
        self._HEAD.pack_into(self._memory, self._used, len(told), size)
        self._memory[self._used + self._HEAD.size : start] = told
        self._used = end
        self._USED.pack_into(self._memory, 0, end)
        return memoryview(self._memory)[start:end].cast("d")

    def samples(self) -> Samples:
        """Return how everything stands, as whoever counts here has left it."""
        return dict(self._read())

    def _read(self) -> Iterator[tuple[Key, Sequence[float]]]:
        at, used = self._USED.size, self._USED.unpack_from(self._memory)[0]
        while at < used:
            length, size = self._HEAD.unpack_from(self._memory, at)
            start = at + self._HEAD.size + length
            name, labels = orjson.loads(self._memory[at + self._HEAD.size : start])
            at = start + 8 * size
            yield (name, tuple(labels)), struct.unpack_from(f"={size}d", self._memory, start)


def merged(parts: Iterable[Samples]) -> Samples:
    """Return the figures of several processes as those of one: gauges are what the highest says, the rest adds up."""
    total: dict[Key, Sequence[float]] = {}
    for part in parts:
        for key, values in part.items():
            before = total.get(key, (0.0,) * len(values))
            join = max if key[0] in _GAUGES else sum
            total[key] = tuple(map(join, zip(before, values, strict=True)))
    return total


def lasting(samples: Samples) -> Samples:
    """Return what stays true of a process that has ended: all but its gauges."""
    return {key: values for key, values in samples.items() if key[0] not in _GAUGES}


def encoded(samples: Samples) -> bytes:
    """Return a line that `decoded` reads in another process."""
    return orjson.dumps([[*key, values] for key, values in samples.items()]) + b"\n"


def decoded(line: bytes) -> Samples:
    """Return the samples of a line; raise ValueError if it has none."""
    told = orjson.loads(line)
    if told is None:
        raise ValueError("there is nothing to tell")
    return {(name, tuple(labels)): values for name, labels, values in told}


# ── of the store ─────────────────────────────────────────────────────────────────────────────────────────────────────


def of_stats(stats: Stats) -> Samples:
    """Return the bus as its store tells of it; the same on every process that asks."""
    told: dict[Key, float] = {
        (EVENTS.name, ()): stats.events,
        (HEAD.name, ()): stats.head,
        (STORE_BYTES.name, ()): stats.store_bytes,
    }
    for each in stats.subscriptions:
        for state in ("pending", "scheduled", "processing", "dead"):
            told[DEPTH.name, (each.name, state)] = getattr(each, state)
        told[OLDEST.name, (each.name,)] = each.oldest_age.total_seconds() if each.oldest_age else 0.0
        told[UNHANDLED.name, (each.name,)] = 0.0
    for where, count in stats.unhandled.items():
        key = UNHANDLED.name, (where.partition("/")[0],)
        told[key] = told.get(key, 0.0) + count
    for each in stats.checkpoints:
        told[DEPTH.name, (each.subscription, "dead")] = stats.dead.get(each.subscription, 0)
        told[DEPTH.name, (each.subscription, "parked")] = stats.parked.get(each.subscription, 0)
        told[LAG_EVENTS.name, (each.subscription,)] = each.lag
        told[LAG_SECONDS.name, (each.subscription,)] = each.waiting.total_seconds() if each.waiting else 0.0
        told[STOPPED.name, (each.subscription,)] = each.stopped is not None
    told |= {(RECENT.name, (action.lower(),)): count for action, count in stats.rates.items()}
    return {key: (float(value),) for key, value in told.items()}


class Counted:
    """Figures that may take long to count: whoever asks gets the last count while the next is being made."""

    def __init__(self, count: Callable[[], Samples], probe: Callable[[], object]) -> None:
        """Count in a thread of its own; `probe` asks the least, and raises if there is nobody to answer."""
        self._count = count
        self._probe = probe
        self._known: Samples = {}
        self._failed: Exception | None = None
        self._thread: threading.Thread | None = None

    def samples(self) -> Samples:
        """Return the figures as far as they are known, within a moment; raise what is wrong. One thread at a time."""
        self._probe()
        if self._thread is None or not self._thread.is_alive():
            self._failed = None
            self._thread = threading.Thread(target=self._refresh, name="postbus-counting", daemon=True)
            self._thread.start()
        self._thread.join(MOMENT)
        if self._failed is not None:
            raise self._failed
        return self._known

    def _refresh(self) -> None:
        try:
            self._known = self._count()
        except Exception as error:  # noqa: BLE001  raised where somebody asks
            self._failed = error
