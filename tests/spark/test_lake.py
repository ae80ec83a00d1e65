"""The lake: what it holds is the log, each row once; how it is read, compacted, and what it refuses."""

import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import duckdb
import pytest
from pyspark.sql import SparkSession

from postbus import EventBus, RetryPolicy
from postbus.errors import Conflict, InvalidRequest, UnsafeStore
from postbus.model import Stream
from postbus.spark import Lake
from postbus.spark.lake import Progress, ingest
from postbus.spark.manifest import Manifest
from postbus.store import log_of
from tests.kinds import mostly_on_sqlite, on_sqlite

TOMORROW = "2999-01-01"
NO_GRACE = timedelta(0)


def publish(bus: EventBus, count: int, **fields: Any) -> list[int]:
    """Publish events that differ in everything that can differ."""
    news = [
        {
            "type": f"order.{number % 3}",
            "payload": {"number": number, "text": 'Ünïcode "quoted"\n', "big": 2**70, "none": None},
            "tags": ["eu", "new"][: number % 3],
            "key": f"k{number % 5}" if number % 2 else None,
            "title": "" if number % 4 else None,
            "metadata": {"trace": str(number)} if number % 2 else {},
            "priority": number % 3 - 1,
            **fields,
        }
        for number in range(count)
    ]
    return [event.id for event in bus.publish_many(news)]


def work(bus: EventBus, count: int) -> None:
    """Complete some, so that there is an audit log."""
    for delivery in bus.poll_many(count):
        bus.finalize(delivery, success=True)


def check(spark: SparkSession, url: str, lake: Lake) -> None:
    """Hold the lake against the log: every row of both, every column, once."""
    for stream in Stream:
        live = spark.read.format("postbus").options(url=url, stream=stream.value).load()
        columns = [name for name in live.columns if name != "segment"]
        assert lake.tally(lake.read(spark, stream), stream) == lake.tally(live, stream)
        expected = sorted(live.select(*columns).collect())
        assert sorted(lake.read(spark, stream).select(*columns).collect()) == expected
        entries = lake.manifests[stream].entries()
        assert sum(each.rows for each in entries) == len(expected)


@mostly_on_sqlite
def test_the_lake_is_the_log(spark: SparkSession, bus: EventBus, url: str, tmp_path: Path):
    """Ingested in segments, then again with what is new, then with nothing new (P.3, I15)."""
    lake, seen = Lake(tmp_path / "lake"), list[Progress]()
    events = publish(bus, 50)
    work(bus, 20)
    assert ingest(spark, url, lake, rows=20, watch=seen.append) == {Stream.EVENTS: 50, Stream.AUDIT: 40}
    assert [(each.after, each.through) for each in lake.manifests[Stream.EVENTS].entries()] == [
        (0, events[19]),
        (events[19], events[39]),
        (events[39], events[49]),
    ]
    assert [(each.rows, each.lag) for each in seen if each.stream is Stream.EVENTS] == [(20, 30), (40, 10), (50, 0)]
    check(spark, url, lake)
    publish(bus, 5)
    work(bus, 3)
    assert ingest(spark, url, lake) == {Stream.EVENTS: 5, Stream.AUDIT: 6}
    assert ingest(spark, url, lake) == {Stream.EVENTS: 0, Stream.AUDIT: 0}
    check(spark, url, lake)
    heads = {stream: bus.store.span(stream).head for stream in Stream}
    assert {each.subscription: each.position for each in bus.store.checkpoints()} == {
        "lake": heads[Stream.EVENTS],
        "lake.audit": heads[Stream.AUDIT],
    }


@on_sqlite
def test_a_lake_is_read_in_one_call(spark: SparkSession, bus: EventBus, url: str, tmp_path: Path):
    """By Spark, with the payload as VARIANT too, by DuckDB and by pyarrow; never a file that no entry names (P.3)."""
    lake = Lake(tmp_path / "lake")
    events = publish(bus, 10)
    ingest(spark, url, lake, rows=4)
    (one, *_) = Path(lake.files()[0]).parent.glob("*.parquet")
    shutil.copy(one, one.with_name("part-orphan.parquet"))
    assert lake.read(spark).count() == lake.dataset().count_rows() == 10
    numbers = lake.read(spark).selectExpr("variant_get(payload_variant, '$.number', 'int') AS n").collect()
    assert sorted(row.n for row in numbers) == list(range(10))
    read = duckdb.read_parquet(lake.files("events"), hive_partitioning=True)
    assert read.aggregate("count(*), count(DISTINCT id), max(id)").fetchall() == [(10, 10, events[-1])]
    payloads = dict(read.project("id, payload").fetchall())
    assert '"big":1180591620717411303424' in payloads[events[0]]
    assert lake.files(since=TOMORROW) == []
    assert len(lake.files(until=TOMORROW)) == len(lake.files())


@on_sqlite
@pytest.mark.slow  # postbus torture spark-checkpoint has one in the quick tests
@pytest.mark.parametrize("lost", ["gone", "old"])
def test_spark_s_own_checkpoint_may_be_lost(spark: SparkSession, bus: EventBus, url: str, tmp_path: Path, lost: str):
    """Deleted, or put back from a backup: the manifest says where to go on, and each row is there once (P.3, I15)."""
    lake, own = Lake(tmp_path / "lake"), tmp_path / "lake" / "events" / "checkpoint"
    publish(bus, 10)
    ingest(spark, url, lake, rows=4)
    shutil.copytree(own, tmp_path / "old")
    publish(bus, 10)
    ingest(spark, url, lake, rows=5)
    publish(bus, 3)
    shutil.rmtree(own)
    if lost == "old":
        shutil.copytree(tmp_path / "old", own)
    ingest(spark, url, lake, rows=7)
    check(spark, url, lake)


@on_sqlite
@pytest.mark.slow  # postbus torture spark-driver has one in the quick tests
@pytest.mark.parametrize("step", ["written", "added", "advanced"])
def test_an_ingest_that_ends_anywhere_is_gone_on_with(
    spark: SparkSession, bus: EventBus, url: str, tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch
):
    """Files without an entry are written anew; an entry without Spark's word is not repeated (P.3, I15)."""
    lake = Lake(tmp_path / "lake")
    publish(bus, 20)
    work(bus, 5)
    calls: list[int] = []

    def after(real: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **named: Any) -> Any:
            result = real(*arguments, **named)
            calls.append(1)
            if len(calls) == 2:
                raise OSError("killed here")
            return result

        return wrapped

    places = {"written": (Lake, "write"), "added": (Manifest, "add"), "advanced": (type(bus.store), "advance")}
    owner, name = places[step]
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, after(getattr(owner, name)))
        with pytest.raises(Exception, match="killed here"):
            ingest(spark, url, lake, rows=8)
    publish(bus, 4)
    ingest(spark, url, lake, rows=6)
    check(spark, url, lake)


@on_sqlite
def test_one_ingest_at_a_time(spark: SparkSession, bus: EventBus, url: str, tmp_path: Path):
    """Another on the same lake is refused at once; nothing is written (P.3)."""
    lake = Lake(tmp_path / "lake")
    publish(bus, 3)
    with log_of(bus.store).hold(f"lake {lake.url}"), pytest.raises(Conflict, match="holds 'lake "):
        ingest(spark, url, lake)
    assert lake.files() == []


@on_sqlite
def test_a_lake_of_another_log_is_refused(spark: SparkSession, bus: EventBus, url: str, tmp_path: Path):
    """Two logs in one lake would be neither (P.3, I15)."""
    lake = Lake(tmp_path / "lake")
    publish(bus, 3)
    ingest(spark, url, lake)
    other = EventBus(f"sqlite:///{tmp_path / 'other.db'}")
    publish(other, 3)
    other.shutdown()
    with pytest.raises(UnsafeStore, match="another log"):
        ingest(spark, f"sqlite:///{tmp_path / 'other.db'}", lake)
    assert lake.read(spark).count() == 3


@pytest.mark.slow  # the pipeline's commands and its page go the same way in the quick tests
@on_sqlite
def test_compaction_joins_segments_and_loses_nothing(spark: SparkSession, bus: EventBus, url: str, tmp_path: Path):
    """Days that are over become one segment; readers of the old files have them until they are swept (P.3, I15)."""
    lake = Lake(tmp_path / "lake")
    publish(bus, 30)
    work(bus, 4)
    ingest(spark, url, lake, rows=10)
    before = lake.files()
    assert lake.compact(spark)[Stream.EVENTS] == (3, 3), "today is not over"
    assert lake.compact(spark, today=TOMORROW)[Stream.EVENTS] == (3, 1)
    check(spark, url, lake)
    assert all(Path(file).exists() for file in before)
    publish(bus, 5)
    ingest(spark, url, lake)
    lake.compact(spark, today=TOMORROW, grace=NO_GRACE)
    check(spark, url, lake)
    assert not any(Path(file).exists() for file in before)
    assert [entry.generation for entry in lake.manifests[Stream.EVENTS].entries()] == [2]


@pytest.mark.slow
@on_sqlite
@pytest.mark.parametrize("step", ["replace", "forget"])
def test_a_compaction_that_ends_anywhere_leaves_a_lake(
    spark: SparkSession, bus: EventBus, url: str, tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch
):
    """Before the flip the old segments count, after it the new one; the next compaction finishes it (P.3, I15)."""
    lake = Lake(tmp_path / "lake")
    publish(bus, 12)
    ingest(spark, url, lake, rows=4)

    def ends(*_: Any) -> None:
        raise OSError("killed here")

    with monkeypatch.context() as patch:
        patch.setattr(Manifest, step, ends)
        with pytest.raises(OSError, match="killed here"):
            lake.compact(spark, today=TOMORROW)
    check(spark, url, lake)
    assert lake.compact(spark, today=TOMORROW)[Stream.EVENTS][1] == 1
    assert len(list(lake.manifests[Stream.EVENTS].all())) == 1
    check(spark, url, lake)


@on_sqlite
def test_what_was_damaged_is_not_taken_for_the_lake(spark: SparkSession, bus: EventBus, url: str, tmp_path: Path):
    """Rows that are not those written, a file that is gone, an entry that is gone: each is told (P.5, I16)."""
    lake = Lake(tmp_path / "lake")
    publish(bus, 12)
    ingest(spark, url, lake, rows=4)
    manifest = lake.manifests[Stream.EVENTS]
    one, two, three = manifest.entries()
    folder = tmp_path / "lake" / "events"
    for entry in (one, two, three):
        lake.verify(spark, Stream.EVENTS, entry)
    shutil.copy(folder / one.files[0], folder / two.files[0])
    (folder / two.files[0]).with_name(f".{Path(two.files[0]).name}.crc").unlink(missing_ok=True)
    with pytest.raises(UnsafeStore, match="not the 4 written"):
        lake.verify(spark, Stream.EVENTS, two)
    (folder / "manifest" / f"{two.segment}.json").unlink()
    with pytest.raises(UnsafeStore, match="lacks the rows from"):
        manifest.entries()
    (folder / "manifest" / f"{three.segment}.json").write_text("{}", encoding="utf-8")
    with pytest.raises(UnsafeStore, match="makes no sense"):
        manifest.entries()


@mostly_on_sqlite
def test_what_is_erased_is_gone_from_store_and_lake(spark: SparkSession, bus: EventBus, url: str, tmp_path: Path):
    """Its content, in files too, and what errors quoted of it; the others are untouched (P.3, P.5)."""
    lake = Lake(tmp_path / "lake")
    publish(bus, 9, key="kept")
    secret = publish(bus, 2, key="customer-8", payload={"name": "canary-8812"}, title="canary-8812")

    @bus.on("order.*", retry=RetryPolicy(max_retries=0))
    def fail(event: Any) -> None:
        if event.id in secret:
            raise ValueError(f"no such customer: {event.payload['name']}")

    bus.start()
    bus.wait_idle(30)
    bus.shutdown()
    ingest(spark, url, lake, rows=5)
    assert lake.find(spark, key="customer-8") == secret
    other = EventBus(url)
    (titled,) = publish(other, 1, key="titled", payload=None, title="canary-9", metadata={"m": "canary-9"})
    ingest(spark, url, lake)
    log_of(other.store).erase(key="titled", actor="test")
    assert lake.erase(spark, [titled]) == 1, "a payload that says nothing does not hide the rest"
    done = log_of(other.store).erase(key="customer-8", actor="test")
    assert lake.erase(spark, done.ids) > 0
    ingest(spark, url, lake)
    check(spark, url, lake)
    assert lake.read(spark).filter("payload = 'null'").count() == 3
    assert not [file for file in (tmp_path / "lake").rglob("*.parquet") if b"canary" in file.read_bytes()]
    assert "canary" not in str([lake.read(spark, stream).drop("payload_variant").collect() for stream in Stream])
    assert lake.erase(spark, done.ids) == 0
    other.shutdown()


@on_sqlite
def test_a_table_of_a_format_that_spark_has_not_is_refused(spark: SparkSession, bus: EventBus, tmp_path: Path):
    """Clearly, before anything is written (P.3)."""
    lake = Lake(tmp_path / "lake")
    with pytest.raises(InvalidRequest, match="has no delta"):
        lake.require_format(spark, "delta")
    with pytest.raises(InvalidRequest, match="delta or iceberg"):
        lake.require_format(spark, "hudi")


@pytest.mark.slow  # the pipeline's commands and its page go the same way in the quick tests
@on_sqlite
def test_another_format_gets_what_it_lacks(spark: SparkSession, bus: EventBus, url: str, tmp_path: Path):
    """Each row once, whatever it had (P.3): shown with one that every Spark has."""
    lake = Lake(tmp_path / "lake")
    publish(bus, 7)
    ingest(spark, url, lake)
    lake.mirror(spark, "parquet")
    publish(bus, 4)
    ingest(spark, url, lake)
    lake.mirror(spark, "parquet")
    lake.mirror(spark, "parquet")
    mirrored = spark.read.parquet(f"{lake.url}/parquet/events")
    assert (mirrored.count(), mirrored.select("id").distinct().count()) == (11, 11)
