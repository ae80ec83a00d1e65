"""The source as a stream: offsets that nothing appears below, restarts that go on exactly, and loss that is loud."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

from postbus import EventBus
from postbus.errors import Conflict, UnsafeStore
from postbus.model import Mode, Stream
from postbus.spark.source import Slice, segment_name
from postbus.store import Log, log_of, open_store
from postbus.testing import FrozenClock
from tests.conftest import Crew
from tests.contract.stores import Operator, ids
from tests.kinds import on_sqlite
from tests.postgres.server import query
from tests.postgres.writers import Writers, insert
from tests.spark.reading import Following

on_postgres = pytest.mark.parametrize("kind", ["postgres"])
SECONDS = [4, pytest.param(30, marks=pytest.mark.slow)]


@pytest.fixture
def store(url: str) -> Iterator[Log]:
    """Give an open store whose events nobody has to work on."""
    store = log_of(open_store(url))
    store.delete_subscription("default", "ops")
    yield store
    store.close()


@pytest.fixture
def op(store: Log) -> Operator:
    """Give somebody who drives the store."""
    return Operator(store, FrozenClock())


Follow = Callable[..., Following]


def publish(op: Operator, count: int) -> list[int]:
    """Publish so many events; return their ids."""
    return ids(op.publish_all(*[{"type": "a"}] * count))


# ── where it begins, and how far it goes ─────────────────────────────────────────────────────────────────────────


def test_a_stream_takes_everything_once_in_order(op: Operator, follow: Follow):
    """Batch by batch, and nothing when there is nothing new (P.1, I15)."""
    first = publish(op, 5)
    stream = follow(minPartitions=3)
    assert stream.turn() == first
    assert stream.turn() == []
    second = publish(op, 4)
    assert stream.to_the_end() == first + second


@pytest.mark.parametrize("options", [{}, {"startingOffsets": "2"}, {"startingOffsets": "latest", "consumer": "c"}])
def test_the_beginning_is_the_same_however_often_it_is_asked_for(op: Operator, follow: Follow, options: dict[str, str]):
    """Spark asks twice, and again after a crash in the first batch, when the head has moved on (P.1, I5)."""
    publish(op, 3)
    stream = follow(**options)
    begin = stream.reader.initialOffset()
    later = publish(op, 3)
    assert stream.reader.initialOffset() == begin
    again = follow(**options)
    assert again.reader.initialOffset() == begin
    assert again.to_the_end()[-3:] == later


def test_a_consumer_goes_on_where_it_was_when_spark_has_forgotten(op: Operator, store: Log, follow: Follow):
    """With a new checkpoint folder, whatever start it names by then; it is a subscription with its lag (P.1, I6)."""
    events = publish(op, 6)
    stream = follow(consumer="lake", startingOffsets=events[0], maxOffsetsPerTrigger=2)
    stream.turn()
    stream.turn()
    assert [(each.name, each.mode) for each in store.subscriptions()] == [("lake", Mode.SPARK)]
    (checkpoint,) = store.checkpoints()
    assert checkpoint.position == events[2], "told at the start of the batch after it"
    assert store.stats().checkpoints == (checkpoint,)
    assert follow(consumer="lake", startingOffsets="latest").to_the_end() == events[3:]


def test_a_start_that_is_refused_leaves_no_consumer_behind(op: Operator, store: Log, follow: Follow):
    """Else its wrong position would be remembered, and a later, right one ignored (P.1, I5)."""
    events = publish(op, 3)
    with pytest.raises(UnsafeStore, match="beyond the head"):
        follow(consumer="lake", startingOffsets=events[-1] + 1)
    assert store.checkpoints() == ()
    assert follow(consumer="lake", startingOffsets=events[0]).to_the_end() == events[1:]


def test_a_consumer_of_another_stream_is_refused(op: Operator, follow: Follow):
    """Positions of events say nothing of the audit log (P.1)."""
    publish(op, 1)
    follow(consumer="lake")
    with pytest.raises(Conflict, match="reads events"):
        follow(consumer="lake", stream="audit")


def test_a_limit_counts_rows_not_ids(op: Operator, store: Log, follow: Follow):
    """A batch is as large as was asked for, whatever ids were never used; all there is, if Spark says so (P.1)."""
    events = publish(op, 4)
    store.restore_mark("ops")
    events += publish(op, 5)
    stream = follow(maxOffsetsPerTrigger=3)
    stream.to_the_end()
    assert stream.batches == [events[:3], events[3:6], events[6:]]
    assert follow(maxOffsetsPerTrigger=3).turn(ReadAllAvailable()) == events
    assert follow().turn(ReadMaxRows(2)) == events[:2]


def test_available_now_stops_at_what_was_there_when_it_began(op: Operator, follow: Follow):
    """However much comes meanwhile (P.1)."""
    events = publish(op, 5)
    stream = follow(maxOffsetsPerTrigger=2)
    stream.reader.prepareForTriggerAvailableNow()
    publish(op, 5)
    assert stream.to_the_end() == events
    assert stream.reader.reportLatestOffset()["position"] == events[-1] + 5


@on_postgres
@pytest.mark.parametrize("stream", ["events", "audit"])
def test_the_head_waits_for_an_open_publish(url: str, op: Operator, follow: Follow, stream: str):
    """An id that may still appear is never passed, with a limit or without; the other stream goes on (S3.13, I5)."""
    table = "INSERT INTO postbus.event_log (first_id, subscription, action, created_at) VALUES (1, 1, 'PICKED', now())"
    with psycopg.connect(url) as slow:
        seen = follow(stream=stream)
        insert(slow) if stream == "events" else slow.execute(table)
        later = publish(op, 3)
        query(url, "INSERT INTO event_log (first_id, subscription, action, created_at) VALUES (1, 1, 'PICKED', now())")
        assert seen.turn() == seen.turn(ReadMaxRows(1)) == []
        assert len(follow(stream="audit" if stream == "events" else "events").turn()) == (
            1 if stream == "events" else 3
        )
        slow.commit()
    assert seen.turn() == ([later[0] - 1, *later] if stream == "events" else [1 << 10, 2 << 10])


@on_postgres
@pytest.mark.parametrize("seconds", SECONDS)
@pytest.mark.parametrize("options", [{}, {"maxOffsetsPerTrigger": 500, "minPartitions": 2, "consumer": "c"}])
def test_late_commits_are_never_missed(
    url: str, store: Log, follow: Follow, crew: Crew, seconds: float, options: dict[str, Any]
):
    """Writers delay, roll back, copy and prepare: every id that commits is read once, in order (S3.13, I5, I15)."""
    writers, stream = Writers(url), follow(**options)
    for number in range(6):
        crew.start(lambda number=number: writers(number))
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        stream.turn()
    writers.stop()
    crew.join(30)
    stream.to_the_end()
    stored = [each for (each,) in query(url, "SELECT id FROM events ORDER BY id")]
    assert stream.seen == stored
    assert len(stored) > 50 * seconds
    assert len(stream.batches) > seconds


# ── loss is loud ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_restored_store_stops_a_stream(op: Operator, store: Log, follow: Follow):
    """Its offset is of another log: going on would skip or repeat what nobody can know (I5)."""
    publish(op, 3)
    stream = follow(failOnDataLoss="false")
    stream.turn()
    store.restore_mark("ops")
    publish(op, 3)
    with pytest.raises(UnsafeStore, match="checkpoint is of another log"):
        stream.turn()
    with pytest.raises(UnsafeStore, match="checkpoint is of another log"):
        stream.reader.partitions(stream.offset, stream.offset)


def test_an_offset_beyond_the_head_stops_a_stream(op: Operator, follow: Follow):
    """As when an older backup came back unmarked: at the start of a batch, or at the end of one done again (I5)."""
    events = publish(op, 3)
    stream = follow()
    stream.turn()
    beyond = stream.offset | {"position": events[-1] + 10}
    with pytest.raises(UnsafeStore, match="beyond the head"):
        follow(beyond).turn()
    with pytest.raises(UnsafeStore, match="beyond the head"):
        stream.reader.partitions(stream.offset | {"position": events[0]}, beyond)
    lenient = follow(beyond, failOnDataLoss="false")
    lenient.turn()
    assert lenient.offset["position"] == events[-1]
    (left,) = lenient.reader.partitions(beyond | {"position": events[0]}, beyond)
    assert left == Slice(events[0], events[-1], segment_name(events[0]))


def test_a_pruned_range_stops_a_stream(op: Operator, store: Log, follow: Follow):
    """Or, if data loss is accepted, it goes on with what is left, as does a batch that is done again (I5, I14)."""
    events = publish(op, 6)
    strict, lenient = follow(maxOffsetsPerTrigger=2), follow(maxOffsetsPerTrigger=2, failOnDataLoss="false")
    begin = strict.offset
    assert strict.turn() == lenient.turn() == events[:2]
    store.prune(Stream.EVENTS, after=0, through=events[3])
    with pytest.raises(UnsafeStore, match=f"everything up to {events[3]} was pruned"):
        strict.turn()
    with pytest.raises(UnsafeStore, match=f"everything up to {events[3]} was pruned"):
        strict.reader.partitions(begin, strict.offset)
    assert lenient.reader.partitions(begin, lenient.offset) == []
    assert lenient.turn() == events[4:]
    assert follow().turn() == events[4:]


def test_pruning_waits_for_a_consumer(op: Operator, store: Log, follow: Follow):
    """What a Spark stream has not come to stays; what it has, can go (I14)."""
    events = publish(op, 6)
    stream = follow(consumer="lake", maxOffsetsPerTrigger=3)
    stream.turn()
    with pytest.raises(Conflict, match="'lake' has come to"):
        store.prune(Stream.EVENTS, after=0, through=events[2])
    stream.turn()
    store.prune(Stream.EVENTS, after=0, through=events[2])
    assert stream.seen == events


# ── on Spark ─────────────────────────────────────────────────────────────────────────────────────────────────────


class Kept:
    """A sink that keeps what each batch brought."""

    def __init__(self) -> None:
        """Have nothing yet."""
        self.batches: list[list[int]] = []

    def __call__(self, frame: DataFrame, _number: int) -> None:
        """Take a batch."""
        self.batches.append([row.id for row in frame.select("id").orderBy("id").collect()])

    @property
    def ids(self) -> list[int]:
        """All ids."""
        return [each for batch in self.batches for each in batch]


def run(frame: DataFrame, folder: Path, sink: Callable[[DataFrame, int], None]) -> dict[str, Any]:
    """Run a stream over what is there, to its end; return what it told of its last batch."""
    query = (
        frame.writeStream.option("checkpointLocation", str(folder))
        .foreachBatch(sink)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    progress = query.lastProgress
    assert progress is not None
    return json.loads(progress.json)


def test_a_stream_restarted_goes_on_exactly(spark: SparkSession, url: str, bus: EventBus, tmp_path: Path):
    """From its checkpoint folder, with the batch that failed, whole; seen as a consumer, with its lag (P.1, I15)."""
    events = [event.id for event in bus.publish_many([{"type": "a"}] * 5)]
    frame = (
        spark.readStream.format("postbus")
        .schema("id bigint, segment string")
        .options(url=url, consumer="lake", maxOffsetsPerTrigger=3)
        .load()
    )
    kept = Kept()

    def failing(batch: DataFrame, number: int) -> None:
        if number == 1:
            raise RuntimeError("lost on the way")
        kept(batch, number)

    with pytest.raises(StreamingQueryException, match="lost on the way"):
        run(frame, tmp_path / "here", failing)
    assert kept.batches == [events[:3]]
    events += [event.id for event in bus.publish_many([{"type": "a"}] * 2)]
    progress = run(frame, tmp_path / "here", kept)
    assert kept.batches == [events[:3], events[3:5], events[5:]]
    assert progress["sources"][0]["latestOffset"]["position"] == events[-1]
    (checkpoint,) = bus.stats().checkpoints
    assert (checkpoint.subscription, checkpoint.position) == ("lake", events[4])


@on_sqlite
def test_a_stream_stops_when_its_log_was_replaced(spark: SparkSession, url: str, bus: EventBus, tmp_path: Path):
    """The query fails with our words, and goes no further (I5)."""
    bus.publish_many([{"type": "a"}] * 3)
    frame = spark.readStream.format("postbus").option("url", url).load()
    kept = Kept()
    run(frame, tmp_path / "here", kept)
    store = log_of(open_store(url))
    store.restore_mark("ops")
    store.close()
    bus.publish("a")
    with pytest.raises(StreamingQueryException, match="checkpoint is of another log"):
        run(frame, tmp_path / "here", kept)
    assert len(kept.ids) == 3
