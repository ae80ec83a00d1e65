"""The archive: what is verified in the lake and passed by everybody goes, and nothing else does."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from postbus import EventBus
from postbus.errors import UnsafeStore
from postbus.model import Done, Pruned, Stream
from postbus.spark import Lake
from postbus.spark.archive import Bound, archive, bounds
from postbus.spark.lake import ingest
from postbus.spark.replay import union
from postbus.store import log_of
from postbus.store.contract import Settlement
from tests.kinds import mostly_on_sqlite, on_sqlite

NOW = timedelta(0)
NEVER = timedelta(days=36_500)


def drain(bus: EventBus) -> None:
    """Complete everything that is due."""
    while found := bus.poll_many(100):
        for delivery in found:
            bus.finalize(delivery, success=True)


def run(spark: SparkSession, bus: EventBus, url: str, lake: Lake, **terms: Any) -> dict[Stream, int]:
    """Archive all that may go; return how many rows went."""
    found = bounds(log_of(bus.store), lake, **{"older_than": NOW, **terms})
    return {each.stream: archive(spark, url, log_of(bus.store), lake, each) for each in found}


def ids(frame: Any) -> list[int]:
    """Return the ids of a table, in order."""
    return sorted(row[0] for row in frame.select("id").collect())


@mostly_on_sqlite
def test_what_is_archived_leaves_the_tables(spark: SparkSession, bus: EventBus, url: str, tmp_path: Path):
    """Dead and unfinished ones stay, and hold nothing back; lake and table are the whole (P.5, S3.14, I14)."""
    lake = Lake(tmp_path / "lake")
    bus.subscriptions.create("idle", "rare")
    bus.subscriptions.pause("idle")
    events = [event.id for event in bus.publish_many([{"type": "a"}] * 20 + [{"type": "rare"}] + [{"type": "a"}] * 9)]
    dead = bus.poll()
    assert dead is not None
    bus.finalize(dead, success=False, retry=False, errors=["broken"])
    drain(bus)
    audit = bus.store.span(Stream.AUDIT).head
    entries = sorted(entry.id for event_id in events for entry in bus.store.logs(event_id))
    ingest(spark, url, lake, rows=20)
    gone = run(spark, bus, url, lake)
    kept = {dead.id, events[20]}
    assert gone[Stream.EVENTS] == 28
    assert {event.id for event in bus.list(limit=100)} == kept
    assert [entry.event_id for entry in bus.store.logs(dead.id)] == [dead.id] * 2
    assert (bus.store.span(Stream.EVENTS).pruned, bus.store.span(Stream.AUDIT).pruned) == (events[-1], audit)
    assert ids(union(spark, url, bus.store, lake, Stream.EVENTS)) == events
    assert ids(union(spark, url, bus.store, lake, Stream.AUDIT)) == entries
    bus.dlq.retry(dead.id)
    drain(bus)
    ingest(spark, url, lake)
    assert run(spark, bus, url, lake)[Stream.EVENTS] == 1
    assert {event.id for event in bus.list(limit=100)} == {events[20]}
    assert bus.publish("a").id > events[-1]


@on_sqlite
def test_nobody_is_cut_off(spark: SparkSession, bus: EventBus, url: str, tmp_path: Path):
    """A stream that is behind, what is young, what the lake lacks: each sets the bound, and is named (P.5, I14)."""
    lake, store = Lake(tmp_path / "lake"), log_of(bus.store)
    events = [event.id for event in bus.publish_many([{"type": "a"}] * 20)]
    drain(bus)
    assert [each.through for each in bounds(store, lake, older_than=NOW)] == [0, 0]
    ingest(spark, url, lake, rows=10)
    assert [each.why for each in bounds(store, lake, older_than=NOW)] == [None, None], "nothing follows"
    bus.publish("a")
    (bound, _) = bounds(store, lake, older_than=NOW)
    assert (bound.through, bound.why) == (events[-1], "not in the lake yet")
    for seconds, words in ((5_401, "5,401 seconds"), (3_600, "1 hour"), (129_600, "36 hours"), (2_592_000, "30 days")):
        (young, _) = bounds(store, lake, older_than=timedelta(seconds=seconds))
        assert (young.through, young.why) == (0, f"younger than {words}")
    log_id = store.span(Stream.EVENTS).log_id
    store.consumer("slow", Stream.EVENTS, 0)
    store.advance("slow", events[11], log_id)
    (bound, _) = bounds(store, lake, older_than=NOW)
    assert (bound.through, bound.past) == (events[9], ())
    assert bound.why == "not passed by 'slow' yet"
    assert run(spark, bus, url, lake)[Stream.EVENTS] == 10
    (bound, _) = bounds(store, lake, older_than=NOW, max_hold=-NEVER)
    assert (bound.through, [each.subscription for each in bound.past]) == (events[-1], ["slow"])


@on_sqlite
def test_what_the_lake_does_not_hold_exactly_stays(spark: SparkSession, bus: EventBus, url: str, tmp_path: Path):
    """A file that was lost or changed, a row that differs: nothing is pruned (P.5, I14, I16)."""
    lake = Lake(tmp_path / "lake")
    bus.publish_many([{"type": "a"}] * 10)
    drain(bus)
    ingest(spark, url, lake, rows=5)
    with bus.transaction() as tx:
        tx.execute("UPDATE events SET title = 'changed' WHERE id = 3")
    with pytest.raises(UnsafeStore, match="not the same: nothing is pruned"):
        run(spark, bus, url, lake)
    assert bus.list().total == 10
    with bus.transaction() as tx:
        tx.execute("UPDATE events SET title = NULL WHERE id = 3")
    Path(lake.files()[0]).unlink()
    with pytest.raises(Exception, match="parquet"):
        run(spark, bus, url, lake)
    assert bus.list().total == 10


class EndError(Exception):
    """Stands for the end of the process."""


@on_sqlite
@pytest.mark.slow  # postbus torture archive-crash has one in the quick tests
@pytest.mark.parametrize("steps", range(4))
def test_an_archive_that_ends_anywhere_is_gone_on_with(
    spark: SparkSession, bus: EventBus, url: str, tmp_path: Path, steps: int, monkeypatch: pytest.MonkeyPatch
):
    """At every moment each event is in the store or verified in the lake; the next run finishes (P.5, I5, I14)."""
    monkeypatch.setattr("postbus.spark.archive.STEP", 4)
    lake = Lake(tmp_path / "lake")
    events = [event.id for event in bus.publish_many([{"type": "a"}] * 20)]
    drain(bus)
    ingest(spark, url, lake, rows=7)
    seen: list[Pruned] = []

    def ends(step: Pruned) -> None:
        seen.append(step)
        if len(seen) >= steps:
            raise EndError

    def attempt(bound: Bound, watch: Callable[[Pruned], None] | None) -> None:
        archive(spark, url, log_of(bus.store), lake, bound, watch=watch)

    (bound, _) = bounds(log_of(bus.store), lake, older_than=NOW)
    if steps:
        with pytest.raises(EndError):
            attempt(bound, ends)
    assert ids(union(spark, url, bus.store, lake, Stream.EVENTS)) == events
    bus.publish("a")
    ingest(spark, url, lake)
    (bound, _) = bounds(log_of(bus.store), lake, older_than=NOW)
    attempt(bound, None)
    assert ids(union(spark, url, bus.store, lake, Stream.EVENTS)) == [*events, events[-1] + 1]
    assert [event.id for event in bus.list()] == [events[-1] + 1], "it is not finished"


@on_sqlite
def test_a_stream_that_begins_in_a_pruned_range_stops_loudly(
    spark: SparkSession, bus: EventBus, url: str, tmp_path: Path
):
    """It would miss events; told to go on regardless, it reads what is left (P.1, I5)."""
    lake = Lake(tmp_path / "lake")
    bus.publish_many([{"type": "a"}] * 6)
    drain(bus)
    ingest(spark, url, lake)
    run(spark, bus, url, lake)
    bus.publish_many([{"type": "a"}] * 2)
    reader = spark.read.format("postbus").option("url", url)
    with pytest.raises(Exception, match="was pruned"):
        reader.option("startingOffsets", "2").load().count()
    assert reader.option("startingOffsets", "2").option("failOnDataLoss", "false").load().count() == 2
    assert spark.read.format("postbus").option("url", url).load().count() == 2


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_the_store_stays_small(spark: SparkSession, bus: EventBus, url: str, tmp_path: Path, capsys: Any):
    """Ten cycles of publish, work and archive: the size on disk after the tenth is about that of the first (P.5)."""
    lake = Lake(tmp_path / "lake")
    sizes: list[int] = []
    for _ in range(10):
        for _ in range(40):
            bus.publish_many([{"type": "a", "payload": {"text": "x" * 100}}] * 5_000)
        drain_fast(bus)
        ingest(spark, url, lake)
        run(spark, bus, url, lake)
        log_of(bus.store).tidy()
        sizes.append(bus.store.stats().store_bytes)
    with capsys.disabled():
        print(f"\n{url.partition(':')[0]}: bytes after each of ten cycles of 200,000: {sizes}")  # noqa: T201
    assert sizes[-1] <= 1.2 * sizes[0]


def drain_fast(bus: EventBus) -> None:
    """Complete everything, many at a time."""
    while found := bus.poll_many(1_000):
        bus.store.settle([Settlement(each.lease, Done(), each.worker_id) for each in found])
