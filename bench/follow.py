"""Followers: postbus through its public names, and `eventsourcing`, the peer that reads a log in order.

What `eventsourcing` does here is the least that it can be asked to: its recorders are called directly, nothing is made
of what they return, and no mapper, aggregate or projection stands in between. Its databases commit as durably as
postbus publishes: synchronously on PostgreSQL, WAL and `synchronous=FULL` on SQLite.

One thing must be known to read the tracked figures: postbus saves the checkpoint of a plain handler without waiting for
the disk, since after a crash of the machine it could only be repeated events, which such a handler risks anyway. One
with `tx` does wait. So each is measured beside an `eventsourcing` that waits (as it does by itself) and one that does
not.
"""

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import orjson
from eventsourcing.persistence import InfrastructureFactory, StoredEvent, Tracking
from eventsourcing.utils import Environment
from psycopg.conninfo import conninfo_to_dict

from bench import child, load, pace, postgres
from bench.measure import Call
from postbus import CheckpointMode, EventBus

__all__ = [
    "catch_up",
    "fill",
    "grow",
    "live",
    "peer_fill",
    "peer_live",
    "peer_publish",
    "peer_read",
    "peer_tracked",
    "publish",
    "tracked",
]

URL: Final = os.environ.get(postgres.URL, "sqlite:///postbus.db")
IS_POSTGRES: Final = not URL.startswith("sqlite:")
NAME: Final = "bench"
BATCH: Final = 500
CHUNK: Final = 5_000
PEER_CHUNK: Final = 500
"""At 5,000 events in one insert, the peer's pipeline and the server wait for each other for ever."""
WARM_UP: Final = 20
PER_SECOND: Final = 20
FULL, NORMAL = 2, 1


# ── postbus ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def fill(count: int) -> dict[str, float]:
    """Publish events that only the follower will see."""
    bus = _bus()
    for batch in load.batches(count, CHUNK):
        bus.publish_many(batch)
    bus.shutdown()
    return {}


def catch_up(count: int) -> dict[str, float]:
    """Follow a log from its beginning, lists of events to a handler that does nothing, until it is all checkpointed."""
    _prepare("fill", count)
    bus = EventBus(URL)
    tally = _Tally(count)

    @bus.follow(NAME, batch=BATCH)
    def handle(events: list[Any]) -> None:
        tally.add(events)

    return {"rate": _follow(bus, tally)}


def tracked(count: int, tx: bool) -> dict[str, float]:  # noqa: FBT001  it arrives as JSON
    """Follow a log, an event and a checkpoint at a time; `tx` commits the checkpoint with the handler's own writes."""
    _prepare("fill", count)
    bus = EventBus(URL)
    tally = _Tally(count)
    if tx:

        @bus.follow(NAME)
        def handle_in(event: Any, tx: Any) -> None:
            del tx
            tally.add([event])
    else:

        @bus.follow(NAME, checkpoint=CheckpointMode.synchronous())
        def handle(event: Any) -> None:
            tally.add([event])

    return {"rate": _follow(bus, tally)}


def grow(count: int) -> dict[str, float]:
    """Catch up; return this process's memory after a tenth of the events, the most from then on, and at the end."""
    _prepare("fill", count)
    bus = EventBus(URL)
    tally = _Tally(count)
    seen: list[float] = []

    @bus.follow(NAME, batch=BATCH)
    def handle(events: list[Any]) -> None:
        if (tally.count + len(events)) * 10 // count > len(seen):
            seen.append(_resident())
        tally.add(events)

    rate = _follow(bus, tally)
    return {"MB after a tenth": seen[0], "MB at most": max(seen), "MB at the end": seen[-1], "events/s": rate}


def live(count: int) -> dict[str, float]:
    """Return quantiles of the time from the call of `publish`, in another process, to the handler's first line."""
    bus = _bus()
    lapse = _Lapse(count)

    @bus.follow(NAME)
    def handle(event: Any) -> None:
        lapse.note(event.payload)

    bus.start()
    return lapse.quantiles("publish")


def publish(count: int) -> dict[str, float]:
    """Publish as another process, at the pace of `live`."""
    bus = EventBus(URL)
    for payload in _paced(count):
        bus.publish(load.TYPE, payload())
    bus.shutdown()
    return {}


def _bus() -> EventBus:
    """Return a bus without a queue: events are for followers alone, as the peer's are."""
    bus = EventBus(URL)
    if any(each.name == "default" for each in bus.subscriptions.list()):
        bus.subscriptions.delete("default")
    return bus


def _follow(bus: EventBus, tally: "_Tally") -> float:
    """Return the events a second from the first call of the handler to the saved checkpoint behind the last event.

    Starting the bus and coming to lead is left out, as connecting is for the peer, and so is what the first call took.
    """
    _check([each.position for each in bus.store.checkpoints() if each.subscription == NAME], [0])
    bus.start()
    tally.finished.wait()
    bus.wait_for(NAME, tally.last)
    took = time.perf_counter() - tally.began
    bus.shutdown()
    _check(tally.count, tally.expected)
    return (tally.count - tally.first) / took


# ── eventsourcing ────────────────────────────────────────────────────────────────────────────────────────────────────


def peer_fill(count: int) -> dict[str, float]:
    """Insert the same payloads, each as the first event of its own aggregate."""
    recorder = _recorder()
    for batch in load.batches(count, PEER_CHUNK):
        recorder.insert_events([_stored(each["payload"]) for each in batch])
    return {}


def peer_read(count: int) -> dict[str, float]:
    """Read the notification log in pages, and keep no position."""
    _prepare("peer_fill", count)
    recorder = _recorder()
    recorder.select_notifications(None, 1)
    began, seen, start = time.perf_counter(), 0, 1
    while page := recorder.select_notifications(start, BATCH):
        seen += len(page)
        start = page[-1].id + 1
    took = time.perf_counter() - began
    _check(seen, count)
    return {"rate": count / took}


def peer_tracked(count: int, durable: bool) -> dict[str, float]:  # noqa: FBT001  it arrives as JSON
    """Read the notification log in pages, and record a tracking for each event, in a transaction of its own."""
    _prepare("peer_fill", count)
    recorder = _recorder(durable=durable)
    _check(recorder.max_tracking_id(NAME), None)
    began, start = time.perf_counter(), 1
    while page := recorder.select_notifications(start, BATCH):
        for each in page:
            recorder.insert_tracking(Tracking(NAME, each.id))
        start = page[-1].id + 1
    took = time.perf_counter() - began
    _check((recorder.max_tracking_id(NAME), _synchronous(recorder)), (count, durable))
    return {"rate": count / took}


def peer_live(count: int, functions: bool = False, every: float = 0.0) -> dict[str, float]:  # noqa: FBT001, FBT002
    """Return quantiles of the time from the call that inserts, in another process, to having the event.

    On PostgreSQL it comes by `subscribe`; there is none on SQLite, so the file is asked there, `every` so many seconds.
    """
    recorder = _recorder(functions=functions)
    lapse = _Lapse(count)

    with recorder.subscribe(gt=0) if IS_POSTGRES else nullcontext(_polled(recorder, every)) as notifications:

        def follow() -> None:
            for notification in notifications:
                lapse.note(orjson.loads(notification.state))

        threading.Thread(target=follow, daemon=True).start()
        return lapse.quantiles("peer_publish", functions=functions)


def peer_publish(count: int, functions: bool) -> dict[str, float]:  # noqa: FBT001  it arrives as JSON
    """Insert as another process, at the pace of `live`."""
    recorder = _recorder(functions=functions)
    for payload in _paced(count):
        recorder.insert_events([_stored(payload())])
    return {}


def _recorder(*, durable: bool = True, functions: bool = False) -> Any:
    """Return a recorder of events and of positions; `functions` has PostgreSQL insert by one of its own.

    Its settings know nothing of durability: where it is to be less, libpq and SQLite are told so beside it.
    """
    if not durable and IS_POSTGRES:
        os.environ["PGOPTIONS"] = "-c synchronous_commit=off"
    factory: InfrastructureFactory[Any] = InfrastructureFactory.construct(Environment(NAME, _settings(functions)))
    recorder: Any = factory.process_recorder()
    if not durable and not IS_POSTGRES:
        with recorder.datastore.get_connection(commit=True) as connection:
            connection.cursor().execute(f"PRAGMA synchronous={NORMAL}")
    _check(_synchronous(recorder), durable)
    return recorder


def _settings(functions: bool) -> dict[str, str]:  # noqa: FBT001  one flag, named where it is given
    if not IS_POSTGRES:
        return {"PERSISTENCE_MODULE": "eventsourcing.sqlite", "SQLITE_DBNAME": "eventsourcing.db"}
    given = conninfo_to_dict(URL)
    return {
        "PERSISTENCE_MODULE": "eventsourcing.postgres",
        "POSTGRES_DBNAME": str(given["dbname"]),
        "POSTGRES_HOST": str(given["host"]),
        "POSTGRES_PORT": str(given["port"]),
        "POSTGRES_USER": str(given["user"]),
        "POSTGRES_PASSWORD": "",
        "POSTGRES_ENABLE_DB_FUNCTIONS": "yes" if functions else "no",
    }


def _synchronous(recorder: Any) -> bool:
    """Return whether a commit waits for the disk."""
    if IS_POSTGRES:
        with recorder.datastore.cursor() as cursor:
            return cursor.execute("SHOW synchronous_commit").fetchone()["synchronous_commit"] == "on"
    with recorder.datastore.transaction(commit=False) as cursor:
        found = [cursor.execute(f"PRAGMA {name}") or cursor.fetchone()[0] for name in ("journal_mode", "synchronous")]
    _check(found[0], "wal")
    return found[1] == FULL


def _stored(payload: dict[str, Any]) -> StoredEvent:
    return StoredEvent(uuid4(), 1, load.TYPE, orjson.dumps(payload))


def _polled(recorder: Any, every: float) -> Iterator[Any]:
    last = 0
    while True:
        for notification in recorder.select_notifications(last, BATCH, inclusive_of_start=False):
            last = notification.id
            yield notification
        time.sleep(every)


# ── ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────


class _Tally:
    """Counts what was handled."""

    def __init__(self, expected: int) -> None:
        self.expected = expected
        self.count = self.first = self.last = 0
        self.began = 0.0
        self.finished = threading.Event()

    def add(self, events: list[Any]) -> None:
        if not self.first:
            self.first, self.began = len(events), time.perf_counter()
        self.count += len(events)
        self.last = events[-1].id
        if self.count >= self.expected:
            self.finished.set()


class _Lapse:
    """Gathers how old events are when they arrive."""

    def __init__(self, count: int) -> None:
        self._count = count + WARM_UP
        self._took: list[float] = []
        self.finished = threading.Event()

    def note(self, payload: dict[str, Any]) -> None:
        self._took.append((time.monotonic_ns() - payload["at"]) / 1e9)
        if len(self._took) == self._count:
            self.finished.set()

    def quantiles(self, publisher: str, **arguments: Any) -> dict[str, float]:
        """Have another process publish, and return how late the events were once all have come."""
        call = Call(f"bench.follow:{publisher}", {"count": self._count, **arguments})
        with child.start(call, Path()) as process:
            process.communicate()
            _check(process.returncode, 0)
        if not self.finished.wait(60):
            raise RuntimeError(f"{len(self._took)} of {self._count} events arrived")
        return pace.quantiles(self._took[WARM_UP:])


def _paced(count: int) -> Iterator[Callable[[], dict[str, Any]]]:
    """Yield makers of payloads that tell when they were made, 20 a second at random distances."""
    chance = random.Random(count)
    for number in range(count):
        time.sleep(chance.uniform(0.5, 1.5) / PER_SECOND)
        yield lambda number=number: {"at": time.monotonic_ns(), **load.order(number)}


def _prepare(filler: str, count: int) -> None:
    """Fill the log in a process of its own, whose memory is gone with it, and let the database come to rest."""
    child.run(Call(f"bench.follow:{filler}", {"count": count}), Path())
    if IS_POSTGRES:
        postgres.calm()


def _resident() -> float:
    """Return the memory that this process has, in MB."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def _check(found: object, expected: object) -> None:
    """Refuse a figure for work that was not done."""
    if found != expected:
        raise RuntimeError(f"expected {expected!r}, found {found!r}")
