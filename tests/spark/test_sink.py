"""The sink: a DataFrame is published whole, or not at all, and once."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql import types as t
from pyspark.sql.pandas.types import to_arrow_schema

from postbus import EventBus
from postbus.errors import InvalidRequest, StoreUnavailable
from postbus.spark import check
from postbus.spark.sink import Brought, StreamWriter, stream_writer, writer
from postbus.store import log_of
from tests.kinds import on_sqlite

TEXT = t.StringType()


def columns(**kinds: t.DataType) -> t.StructType:
    """Return the schema of a table."""
    return t.StructType([t.StructField(name, kind) for name, kind in kinds.items()])


PLAIN = columns(type=TEXT, payload=TEXT, uid=TEXT)


def batch(rows: Sequence[tuple[Any, ...]]) -> pa.RecordBatch:
    """Return rows as Spark would hand them to a writer."""
    names = PLAIN.fieldNames()
    return pa.RecordBatch.from_pylist(
        [dict(zip(names, row, strict=True)) for row in rows], to_arrow_schema(PLAIN, timezone="UTC")
    )


def payloads(bus: EventBus) -> list[Any]:
    """Return the payloads of the log, in its order."""
    return [event.payload for event in reversed(bus.list(limit=10_000).items)]


# ── without Spark ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def lay_by(url: str) -> Callable[..., Brought]:
    """Give a function that does what a task of a stream does."""

    def lay_by(rows: Sequence[tuple[Any, ...]], query: str = "q", number: int = 0) -> Brought:
        made = stream_writer({"url": url}, PLAIN, overwrite=False)
        return made._lay_by(iter([batch(rows)]), query, number)

    return lay_by


@pytest.fixture
def sink(url: str) -> StreamWriter:
    """Give what the driver publishes with."""
    return stream_writer({"url": url}, PLAIN, overwrite=False)


def test_a_writer_publishes_what_its_tasks_laid_by(bus: EventBus, url: str):
    """All parts at once, in the order of the partitions; empty ones do no harm (P.2, I2)."""
    made = writer({"url": url}, PLAIN, overwrite=False)
    tasks = [
        made.write(iter([batch([("a", "1", None), ("a", "2", None)]), batch([("a", '{"x": 3}', "u")])])),
        made.write(iter([])),
        made.write(iter([batch([("b", None, None)])])),
    ]
    assert payloads(bus) == []
    made.commit(list(tasks))
    assert payloads(bus) == [1, 2, {"x": 3}, None]
    made.commit(list(tasks))
    assert len(payloads(bus)) == 4


def test_two_saves_are_two_batches(bus: EventBus, url: str):
    """Without uids the rows are published again, with them they are not (P.2, I3)."""
    for _ in range(2):
        made = writer({"url": url}, PLAIN, overwrite=False)
        made.commit([made.write(iter([batch([("a", '"new"', None), ("a", '"once"', "u")])]))])
    assert Counter(payloads(bus)) == {"new": 2, "once": 1}


def test_a_task_that_ran_twice_counts_once(bus: EventBus, sink: StreamWriter, lay_by: Callable[..., Brought]):
    """Only the attempt that Spark names is published (P.2, I3)."""
    lay_by([("a", "1", None), ("a", "2", None)])
    sink.commit([lay_by([("a", "1", None), ("a", "2", None)])], 0)
    assert payloads(bus) == [1, 2]


def test_a_batch_that_a_restarted_stream_brings_again_is_known(
    bus: EventBus, sink: StreamWriter, lay_by: Callable[..., Brought]
):
    """Whether the driver died before the commit, or after it (P.2, I3)."""
    lay_by([("a", "1", None)])  # and then the driver died
    sink.commit([lay_by([("a", "1", None)])], 0)
    sink.commit([lay_by([("a", "1", None)])], 0)
    sink.commit([lay_by([("a", "2", None)], number=1)], 1)
    assert payloads(bus) == [1, 2]


def test_an_aborted_batch_leaves_nothing(bus: EventBus, sink: StreamWriter, lay_by: Callable[..., Brought]):
    """Tasks that failed told nothing (P.2, I2)."""
    brought = lay_by([("a", "1", None)])
    sink.abort([brought, None], 0)
    assert brought.part is not None
    assert staged(bus) == 0
    assert payloads(bus) == []


def staged(bus: EventBus) -> int:
    """Return how many rows and parts wait to be published."""
    names = ("staged", "parts") if bus.store.url.startswith("sqlite") else ("postbus.staged", "postbus.parts")
    with bus.transaction() as tx:
        return sum(tx.execute(f"SELECT count(*) FROM {name}")[0][0] for name in names)  # noqa: S608  ours


def test_what_is_published_is_laid_by_no_longer(bus: EventBus, sink: StreamWriter, lay_by: Callable[..., Brought]):
    """Nor is what was laid by for the same batch in vain (P.2)."""
    lay_by([("a", "1", None)])
    sink.commit([lay_by([("a", "1", None)])], 0)
    assert staged(bus) == 0


def test_a_row_that_is_no_event_fails_its_task(bus: EventBus, url: str):
    """With its number and the reason; what came before it goes too (P.2, S1.16)."""
    made = writer({"url": url}, PLAIN, overwrite=False)
    good = [("a", str(number), None) for number in range(6_000)]
    with pytest.raises(InvalidRequest, match=r"row 6,002 .*not JSON"):
        made.write(iter([batch(good), batch([("a", "1", None), ("a", "{", None)])]))
    assert staged(bus) == 0


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        ("nothing", "not JSON"),
        ('{"a": 1, "a": 2}', "same key twice"),
        ("[NaN]", "NaN"),
        ('"\\u0000"', "NUL"),
        ('"\\ud800"', "surrogate"),
        ("1e999", "too large"),
        ("[" * 65 + "]" * 65, "64 levels"),
        ("[" * 300 + "]" * 300, "64 levels"),
        ('"' + "x" * 1_048_576 + '"', "larger than"),
        ("", "not JSON"),
    ],
)
@on_sqlite
def test_the_bus_refuses_the_same_payloads_here(url: str, payload: str, reason: str):
    """One validator for every edge (P.2, S1.16)."""
    made = writer({"url": url}, PLAIN, overwrite=False)
    with pytest.raises(InvalidRequest, match=reason):
        made.write(iter([batch([("a", payload, None)])]))


@on_sqlite
def test_payloads_are_kept_as_the_bus_keeps_them(bus: EventBus, url: str):
    """Spaces go, wide integers and escapes stay exact (P.2)."""
    texts = ["123456789012345678901234567890", ' { "a" : [ 1.50 , "\\u00e9" ] } ', '"\\\\u0000"', "-0", "1E2", '"é"']
    made = writer({"url": url}, PLAIN, overwrite=False)
    made.commit([made.write(iter([batch([("a", text, None) for text in texts])]))])
    assert payloads(bus) == [json.loads(text) for text in texts]


@pytest.mark.parametrize(
    ("kinds", "reason"),
    [
        ({"payload": TEXT}, "column type"),
        ({"type": TEXT, "order_id": t.LongType()}, r"no column order_id: there are type.*to_json"),
        ({"type": TEXT, "payload": columns(a=TEXT)}, r"payload is struct.*to_json\(payload\)"),
        ({"type": TEXT, "payload": t.IntegerType()}, "payload is int, STRING of JSON"),
        ({"type": TEXT, "tags": t.ArrayType(t.LongType())}, "tags is array<bigint>, ARRAY<STRING>"),
        ({"type": TEXT, "tags": TEXT}, "tags is string, ARRAY<STRING>"),
        ({"type": TEXT, "metadata": t.MapType(TEXT, t.LongType())}, "metadata is map"),
        ({"type": TEXT, "at": t.TimestampNTZType()}, "at is timestamp_ntz, TIMESTAMP"),
        ({"type": TEXT, "priority": t.DoubleType()}, "priority is double, INT"),
    ],
)
def test_columns_that_no_event_has_are_refused(kinds: dict[str, t.DataType], reason: str):
    """Before anything is written, saying what to do (P.2)."""
    for make in (writer, stream_writer):
        with pytest.raises(InvalidRequest, match=reason):
            make({"url": "sqlite:///nowhere.db"}, columns(**kinds), overwrite=False)


def test_what_cannot_be_written_to_is_refused():
    """No URL, one that is none, a log to be overwritten, a task of no stream (P.2)."""
    with pytest.raises(InvalidRequest, match="where the bus is"):
        writer({}, PLAIN, overwrite=False)
    with pytest.raises(InvalidRequest, match="sqlite:///"):
        writer({"url": "mysql://x"}, PLAIN, overwrite=False)
    with pytest.raises(InvalidRequest, match="append"):
        stream_writer({"url": "sqlite:///x.db"}, PLAIN, overwrite=True)
    with pytest.raises(InvalidRequest, match=r"df\.write"):
        stream_writer({"url": "sqlite:///x.db"}, PLAIN, overwrite=False).write(iter([]))


def test_no_error_tells_the_password(monkeypatch: pytest.MonkeyPatch):
    """Neither a writer's name, nor a bus that cannot be reached (I17)."""
    made = writer({"url": "postgresql://me:hush@127.0.0.1:1/x"}, PLAIN, overwrite=False)
    assert "hush" not in repr(made)
    with pytest.raises(StoreUnavailable) as raised:
        made.write(iter([batch([("a", "1", None)])]))
    assert "hush" not in str(raised.value)
    monkeypatch.setattr("postbus.spark.sink.PAUSES", (0, 0))
    with pytest.raises(StoreUnavailable) as raised:
        made.commit([Brought("q", 0, 1, 1)])
    assert "hush" not in str(raised.value)


def test_a_store_that_is_away_for_a_moment_is_asked_again(
    bus: EventBus, sink: StreamWriter, lay_by: Callable[..., Brought], monkeypatch: pytest.MonkeyPatch
):
    """Also if the answer alone was lost: the batch is there once (P.2, I3)."""
    brought = lay_by([("a", "1", None)])
    kind = type(log_of(bus.store))
    publish, calls = kind.publish_parts, []

    def unlucky(self: Any, *given: Any) -> Any:
        calls.append(given)
        if len(calls) == 1:
            raise StoreUnavailable("busy")
        result = publish(self, *given)
        if len(calls) == 2:
            raise StoreUnavailable("lost")
        return result

    monkeypatch.setattr(kind, "publish_parts", unlucky)
    monkeypatch.setattr("postbus.spark.sink.PAUSES", (0, 0))
    sink.commit([brought], 0)
    assert len(calls) == 3
    assert payloads(bus) == [1]


# ── with Spark ───────────────────────────────────────────────────────────────────────────────────────────────────────


def save(frame: DataFrame, url: str) -> None:
    """Publish a DataFrame."""
    frame.write.format("postbus").option("url", url).mode("append").save()


def test_a_dataframe_is_published(spark: SparkSession, bus: EventBus, url: str):
    """Every column, from every partition (P.2)."""
    at = datetime(2035, 1, 1, tzinfo=UTC)
    nothing = [None] * 10
    rows = [
        ("order.placed", '{"n":1}', ["b", "a"], "k", "t", "d", {"m": "1"}, "u-1", 3, 5, at, None),
        ("order.paid", *nothing, timedelta(days=9999)),
    ]
    ddl = (
        "type STRING, payload STRING, tags ARRAY<STRING>, key STRING, title STRING, description STRING, "
        "metadata MAP<STRING, STRING>, uid STRING, priority INT, max_retries BIGINT, at TIMESTAMP, "
        "delay INTERVAL DAY TO SECOND"
    )
    frame = spark.createDataFrame(rows, ddl)
    save(frame.repartition(3), url)
    placed, paid = sorted(bus.list(), key=lambda each: each.type, reverse=True)
    assert (placed.payload, placed.tags, placed.key, placed.title) == ({"n": 1}, ("b", "a"), "k", "t")
    assert (placed.description, placed.metadata, placed.uid) == ("d", {"m": "1"}, "u-1")
    assert (placed.priority, placed.max_retries, bus.get(placed.id).next_retry_at) == (3, 5, at)
    assert (paid.payload, paid.tags, paid.metadata, paid.priority) == (None, (), {}, 0)
    assert bus.poll() is None
    save(spark.range(500).select(sf.lit("n").alias("type"), sf.col("id").cast("string").alias("payload")), url)
    assert sorted(each.payload for each in bus.list(type="n", limit=1_000)) == list(range(500))
    assert len(bus.poll_many(1_000)) == 500


@on_sqlite
def test_a_variant_is_a_payload(spark: SparkSession, bus: EventBus, url: str):
    """As JSON (P.2)."""
    frame = spark.sql("SELECT 'a' AS type, parse_json('{\"a\": [1, null, \"x\"]}') AS payload")
    save(frame.unionAll(spark.sql("SELECT 'a', NULL")), url)
    assert payloads(bus) == [{"a": [1, None, "x"]}, None]


def test_a_bad_row_fails_the_whole_write(spark: SparkSession, bus: EventBus, url: str):
    """With its reason; nothing of it is published, also not from other partitions (P.2, I2)."""
    frame = spark.range(100).select(
        sf.lit("a").alias("type"),
        sf.when(sf.col("id") == 97, "{broken").otherwise(sf.col("id").cast("string")).alias("payload"),
    )
    with pytest.raises(PySparkException, match=r"row 48 of partition 1 is no event: .*not JSON"):
        save(frame, url)
    assert payloads(bus) == []


def test_a_uid_with_another_body_fails_the_whole_write(spark: SparkSession, bus: EventBus, url: str):
    """And is named (P.2, I3)."""
    bus.publish("a", 0, uid="u-7")
    frame = spark.range(10).selectExpr("'a' AS type", "string(id) AS payload", "concat('u-', id) AS uid")
    with pytest.raises(PySparkException, match="u-7"):
        save(frame, url)
    assert payloads(bus) == [0]
    assert staged(bus) == 0


@on_sqlite
def test_wrong_columns_fail_before_anything_is_written(spark: SparkSession, url: str):
    """Spark tells our reason (P.2)."""
    with pytest.raises(PySparkException, match="no column id"):
        save(spark.range(3).selectExpr("'a' AS type", "id"), url)
    with pytest.raises(PySparkException, match="append"):
        spark.sql("SELECT 'a' AS type").write.format("postbus").option("url", url).mode("overwrite").save()


def test_check_says_what_is_wrong_with_each_row(spark: SparkSession):
    """In a column, by the bus's own validator; the good ones can be written (P.2)."""
    rows = [
        ("a", "1", ["x"]),
        ("a", "{", None),
        (None, "2", None),
        ("a*", "3", None),
        ("b", None, ["x,y"]),
        ("b", None, None),
    ]
    frame = spark.createDataFrame(rows, "type STRING, payload STRING, tags ARRAY<STRING>")
    problems = [row.problem for row in check(frame).collect()]
    assert [problem is None for problem in problems] == [True, False, False, False, False, True]
    for problem, told in zip(problems[1:5], ("not JSON", "type", r"\*", "comma"), strict=True):
        assert told.strip("\\") in problem
    with pytest.raises(InvalidRequest, match="no column id"):
        check(spark.range(1).selectExpr("'a' AS type", "id"))


@pytest.fixture
def drop(tmp_path: Path) -> Callable[[str, int], None]:
    """Give a function that lays lines into a folder that a stream reads."""

    def drop(name: str, count: int) -> None:
        (tmp_path / "in").mkdir(exist_ok=True)
        (tmp_path / "in" / f"{name}.txt").write_text("".join(f"{name}-{number}\n" for number in range(count)))

    return drop


def pour(spark: SparkSession, url: str, folder: Path) -> None:
    """Run a stream from files to the bus until it has caught up."""
    lines = spark.readStream.format("text").option("maxFilesPerTrigger", 1).load(str(folder / "in"))
    events = lines.select(sf.lit("line").alias("type"), sf.to_json(sf.struct("value")).alias("payload"))
    query = (
        events.writeStream.format("postbus")
        .option("url", url)
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


def lines(bus: EventBus) -> Counter[str]:
    """Return how often each line was published."""
    return Counter(event.payload["value"] for event in bus.list(limit=10_000))


def test_a_replayed_batch_is_published_once(
    spark: SparkSession, bus: EventBus, url: str, tmp_path: Path, drop: Callable[[str, int], None]
):
    """A driver that died after the commit, before Spark noted it, brings the batch again (P.2, I3)."""
    drop("one", 20)
    pour(spark, url, tmp_path)
    drop("two", 30)
    pour(spark, url, tmp_path)
    assert sum(lines(bus).values()) == len(lines(bus)) == 50
    for last in (tmp_path / "checkpoint" / "commits").glob("*1*"):
        last.unlink()
    drop("three", 5)
    pour(spark, url, tmp_path)
    assert sum(lines(bus).values()) == len(lines(bus)) == 55
    assert staged(bus) == 0
