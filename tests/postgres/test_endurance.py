"""Long trials: a snapshot held open during a whole drain, and steady load by the hour. They print their figures.

`POSTBUS_TRIAL_EVENTS` and `POSTBUS_TRIAL_SECONDS` make them smaller; below five minutes they only judge whether every
event was handled once. Run as a module, this file plays the worker or the publisher of a trial.
"""

import json
import os
import statistics
import struct
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count as counting
from pathlib import Path
from typing import Any, Final, NamedTuple

import psycopg
import pytest

from postbus import Event, EventBus
from tests.crash.processes import ROOT
from tests.postgres.server import query

EVENTS: Final = os.environ.get("POSTBUS_TRIAL_EVENTS")
SECONDS: Final = os.environ.get("POSTBUS_TRIAL_SECONDS")
LONG: Final = 300
"""Seconds from which on a trial judges: autovacuum comes once a minute, and some of its rounds belong to the trial."""
BATCH: Final = 50
FILLING: Final = 5_000
SAMPLE_EVERY: Final = 2.0
CALLS: Final = ("claim", "settle", "owners", "expire")
"""The store's calls that are timed in the worker: its own work, and what upkeep does every second."""
SIZES: Final = """
    SELECT pg_total_relation_size('postbus.deliveries'), pg_indexes_size('postbus.deliveries'),
           pg_stat_get_dead_tuples('postbus.deliveries'::regclass)
"""
ENDS: Final = """
    SELECT count(*), count(DISTINCT event_id), (SELECT count(*) FROM deliveries)
    FROM event_log WHERE action = 'COMPLETED'
"""
MB: Final = 1_000_000


class Timing(NamedTuple):
    """When something began, and how long it took; in seconds."""

    moment: float
    took: float


class Record:
    """Timings in a file: to note one more does not cost its writer memory."""

    PAIR: Final = struct.Struct("dd")

    def __init__(self, path: Path) -> None:
        """Begin an empty file."""
        self._file = path.open("wb")

    def add(self, moment: float, took: float) -> None:
        """Note one; any thread may."""
        self._file.write(self.PAIR.pack(moment, took))

    def close(self) -> None:
        """Have all of it in the file."""
        self._file.close()

    @staticmethod
    def read(path: Path) -> list[Timing]:
        """Return what was noted, in order of the moments."""
        values = array("d", path.read_bytes())
        return sorted(map(Timing, values[0::2], values[1::2]))


# ── the children ─────────────────────────────────────────────────────────────────────────────────────────────────


def work(url: str, folder: str, events: int, seconds: float) -> None:
    """Handle so many events, in no less than these seconds, and end; write down how long each waited."""
    bus = EventBus(url)
    records = {name: Record(Path(folder) / name) for name in ("handled", *CALLS)}
    for name in CALLS:
        setattr(bus.store, name, timed(getattr(bus.store, name), records[name]))
    nap = seconds * bus.settings.concurrency / events
    numbers, done = counting(1), threading.Event()

    def handle(event: Event) -> None:
        now = time.time()
        records["handled"].add(now, now - event.created_at.timestamp())
        if nap:
            time.sleep(nap)
        if next(numbers) == events:
            done.set()

    bus.subscribe("*", handle)
    bus.start()
    done.wait()
    assert bus.shutdown()
    for record in records.values():
        record.close()


def timed(call: Callable[..., Any], record: Record) -> Callable[..., Any]:
    """Return the call, noting how long each took; claims that got nothing do not count."""

    def timing(*given: Any) -> Any:
        moment, began = time.time(), time.perf_counter()
        result = call(*given)
        if getattr(result, "deliveries", True):
            record.add(moment, time.perf_counter() - began)
        return result

    return timing


def publish(url: str, folder: str, events: int, seconds: float) -> None:
    """Publish so many events, evenly over these seconds; write down how long each batch took."""
    bus = EventBus(url)
    record = Record(Path(folder) / "published")
    began = time.monotonic()
    for first in range(0, events, BATCH):
        time.sleep(max(0.0, began + seconds * first / events - time.monotonic()))
        moment, before = time.time(), time.perf_counter()
        bus.publish_many(batch(first, min(BATCH, events - first)))
        record.add(moment, time.perf_counter() - before)
    record.close()
    bus.shutdown()


def batch(first: int, count: int) -> list[dict[str, Any]]:
    """Return events with a small business payload each."""
    items = [{"sku": "A-1001", "quantity": 2}, {"sku": "B-2002", "quantity": 1}]
    return [
        {"type": "order.placed", "payload": {"order": number, "customer": f"customer-{number % 997}", "items": items}}
        for number in range(first, first + count)
    ]


# ── the trial ────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Field:
    """Where a trial takes place."""

    url: str
    folder: Path
    children: list[subprocess.Popen[bytes]]

    def start(self, role: Callable[..., None], events: int, seconds: float) -> subprocess.Popen[bytes]:
        """Start a child."""
        config = {"url": self.url, "folder": str(self.folder), "events": events, "seconds": seconds}
        command = [sys.executable, "-m", "tests.postgres.test_endurance", role.__name__, json.dumps(config)]
        path = os.pathsep.join((str(ROOT), str(ROOT / "src")))
        child = subprocess.Popen(command, cwd=self.folder, env={**os.environ, "PYTHONPATH": path})
        self.children.append(child)
        return child

    def read(self, name: str) -> list[Timing]:
        """Return what a child wrote down."""
        return Record.read(self.folder / name)

    def check(self, events: int) -> None:
        """Fail unless every event was handled once and has come to one good end."""
        assert len(self.read("handled")) == events
        assert query(self.url, ENDS) == [(events, events, 0)]


@pytest.fixture
def field(url: str, tmp_path: Path) -> Iterator[Field]:
    """Give a database and a folder, and end the children."""
    field = Field(url, tmp_path, [])
    yield field
    for child in field.children:
        child.kill()
        child.wait()


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Give a function that prints a line of figures."""

    def show(line: str) -> None:
        with capsys.disabled():
            print(line, flush=True)  # noqa: T201  the figures are what a long trial is for

    return show


def parts(timings: Sequence[Timing], span: tuple[float, float], count: int) -> list[list[float]]:
    """Return how long things took in each of `count` equal parts of a span of time."""
    start, end = span
    found: list[list[float]] = [[] for _ in range(count)]
    for moment, took in timings:
        if start <= moment <= end:
            found[min(count - 1, int((moment - start) / (end - start) * count))].append(took)
    return found


def quantile(values: Sequence[float], share: float) -> float:
    """Return what this share of the values does not exceed; nothing is quick."""
    return sorted(values)[int(len(values) * share)] if values else 0.0


def told(values: Sequence[float]) -> str:
    """Return the figures of some times, in ms."""
    p50, p99, most = (1000 * each for each in (quantile(values, 0.5), quantile(values, 0.99), max(values, default=0)))
    return f"p50 {p50:.1f} p99 {p99:.1f} max {most:.0f} ms ({len(values)})"


@pytest.mark.slow
@pytest.mark.timeout(7_200)
def test_claims_stay_quick_however_old_a_snapshot_somebody_holds(
    field: Field, connect: Callable[..., psycopg.Connection[Any]], show: Callable[[str], None]
):
    """Ten minutes, a million events, and vacuum may remove nothing: the last claims take 3 times the first at most."""
    events, seconds = int(EVENTS or 1_000_000), float(SECONDS or 600)
    bus = EventBus(field.url)
    for first in range(0, events, FILLING):
        bus.publish_many(batch(first, min(FILLING, events - first)))
    bus.shutdown()
    holder = connect(autocommit=False)
    holder.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    assert holder.execute("SELECT count(*) FROM postbus.deliveries").fetchall() == [(events,)]
    began = time.monotonic()
    assert field.start(work, events, seconds).wait(6_000) == 0
    held = time.monotonic() - began
    assert holder.execute("SELECT count(*) FROM postbus.deliveries").fetchall() == [(events,)], "still held"
    holder.rollback()

    handled = field.read("handled")
    span = handled[0].moment, handled[-1].moment
    claims = parts(field.read("claim"), span, 10)
    show(f"\n{events} events drained in {held:.0f} s under one snapshot; by tenths of that time:")
    for name in CALLS:
        for number, each in enumerate(parts(field.read(name), span, 10), 1):
            show(f"  {name:7} {number:2}: {told(each)}")
    ratio = quantile(claims[-1], 0.99) / (quantile(claims[0], 0.99) or 1)
    show(f"  claim p99, last tenth over first: {ratio:.2f}")
    field.check(events)
    assert held >= seconds
    assert seconds < LONG or ratio <= 3


class Sample(NamedTuple):
    """How large things were at a moment, in bytes; how many dead rows are known of; how busy the machine was."""

    moment: float
    rss: int
    size: int
    indexes: int
    dead: int
    load: float


def resident(pid: int) -> int:
    """Return how much memory a process has."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


def samples(
    publisher: subprocess.Popen[bytes], worker: subprocess.Popen[bytes], connection: psycopg.Connection[Any]
) -> list[Sample]:
    """Look every now and then, for as long as the publisher publishes."""
    found: list[Sample] = []
    while publisher.poll() is None:
        row = connection.execute(SIZES).fetchone()
        assert row is not None
        found.append(Sample(time.time(), resident(worker.pid), *row, load=os.getloadavg()[0]))
        with suppress(subprocess.TimeoutExpired):
            publisher.wait(SAMPLE_EVERY)
    assert publisher.returncode == 0
    return found


@pytest.mark.slow
@pytest.mark.timeout(7_200)
def test_an_hour_of_steady_load_leaves_memory_table_and_delay_as_they_were(
    field: Field, connect: Callable[..., psycopg.Connection[Any]], show: Callable[[str], None]
):
    """Of an hour or five million events, the last quarter is like the second: memory, `deliveries`, p99 of delays."""
    events, seconds = int(EVENTS or 5_000_000), float(SECONDS or 3_600)
    worker = field.start(work, events, 0)
    publisher = field.start(publish, events, seconds)
    seen = samples(publisher, worker, connect())
    assert worker.wait(600) == 0

    published, handled = field.read("published"), field.read("handled")
    span = published[0].moment, published[-1].moment
    delays, batches, claims = (parts(each, span, 4) for each in (handled, published, field.read("claim")))
    memory = parts([Timing(each.moment, each.rss) for each in seen], span, 4)
    sizes = parts([Timing(each.moment, each.size) for each in seen], span, 4)
    indexes = parts([Timing(each.moment, each.indexes) for each in seen], span, 4)
    dead = parts([Timing(each.moment, each.dead) for each in seen], span, 4)
    load = parts([Timing(each.moment, each.load) for each in seen], span, 4)
    (field.folder / "samples").write_text(json.dumps(seen))
    show(f"\n{events} events in {span[1] - span[0]:.0f} s, {events / (span[1] - span[0]):.0f}/s; by quarters:")
    for number in range(4):
        for name, values in (("delay", delays), ("claim", claims), ("batch", batches)):
            show(f"  {number + 1}: {name} {told(values[number])}")
        for name, values in (("memory", memory), ("deliveries", sizes), ("its indexes", indexes)):
            show(f"     {name} {statistics.median(values[number]) / MB:.1f} MB, at most {max(values[number]) / MB:.1f}")
        show(f"     dead rows {statistics.median(dead[number]):.0f}, at most {max(dead[number]):.0f}")
        show(f"     load of the machine {statistics.median(load[number]):.1f}, at most {max(load[number]):.1f}")
    growth = [statistics.median(each[3]) / statistics.median(each[1]) for each in (memory, sizes)]
    drift = quantile(delays[3], 0.99) / quantile(delays[1], 0.99)
    show(
        f"  last quarter over second: memory {growth[0]:.3f}, deliveries {growth[1]:.3f}, p99 of the delay {drift:.3f}"
    )
    field.check(events)
    assert seconds < LONG or (growth[0] <= 1.1 and growth[1] <= 1.1)
    assert seconds < LONG or drift <= 2, "beyond what others' load on the machine explains"


if __name__ == "__main__":
    {each.__name__: each for each in (work, publish)}[sys.argv[1]](**json.loads(sys.argv[2]))
