"""A head that goes back for a while is no loss, and a failure whose event was pruned is never forgotten."""

import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Final

import psycopg
import pytest
from pyspark.sql.streaming.datasource import ReadMaxRows

from postbus.errors import UnsafeStore
from postbus.model import AttemptError, Mode, Retry, Stream
from postbus.payload import draft
from postbus.retry import RetryPolicy
from postbus.spark import source
from postbus.store import Log, log_of, open_store
from postbus.store.audit import PLACE_BITS
from postbus.store.contract import DeadFilter, Failure
from tests.conftest import Crew
from tests.spark.reading import Following, batch_reader, read_slice, rows_of

on_postgres = pytest.mark.parametrize("kind", ["postgres"])
on_both_streams = pytest.mark.parametrize("stream", ["events", "audit"])
strict_or_not = pytest.mark.parametrize("fail", ["true", "false"])

TABLES: Final = {"events": "events", "audit": "event_log"}
PIN: Final = "SELECT pg_advisory_xact_lock_shared(postbus.namespace(%s) << 48 | %s::bigint)"
APPEND: Final = """
    INSERT INTO postbus.event_log (first_id, subscription, action, created_at)
    SELECT n, 1, 'PICKED', now() FROM generate_series(1, %s) AS n RETURNING id
"""


@pytest.fixture
def store(url: str) -> Iterator[Log]:
    """Give an open store."""
    store = log_of(open_store(url))
    yield store
    store.close()


@pytest.fixture
def append(url: str, store: Log) -> Callable[[str, int], list[int]]:
    """Give a function that appends so many rows to a stream, and returns their ids."""

    def append(stream: str, count: int) -> list[int]:
        if stream == "events":
            return [event.id for event in store.publish([draft({"type": "a"})] * count)]
        with psycopg.connect(url) as connection:
            return [each for (each,) in connection.execute(APPEND, (count,))]

    return append


Append = Callable[[str, int], list[int]]
Hold = Callable[[str, int], AbstractContextManager[None]]


@pytest.fixture
def hold(url: str, store: Log) -> Hold:
    """Give a block during which a stream's head is back at an id.

    The pin is that of a publisher that was stopped between its look at the sequence and its lock.
    """

    @contextmanager
    def hold(stream: str, floor: int) -> Generator[None]:
        with psycopg.connect(url) as late:
            late.execute(PIN, (TABLES[stream], floor if stream == "events" else floor >> PLACE_BITS))
            assert store.span(Stream(stream)).head == floor
            yield

    return hold


Follow = Callable[..., Following]


# ── a head that goes back ────────────────────────────────────────────────────────────────────────────────────────────


@on_postgres
@on_both_streams
@strict_or_not
def test_a_head_that_went_back_neither_stops_a_stream_nor_repeats_rows(
    append: Append, hold: Hold, follow: Follow, stream: str, fail: str
):
    """It stands where it was, with a limit or without, and goes on with what is new (P.1, I5, I15)."""
    rows = append(stream, 20)
    seen = follow(stream=stream, failOnDataLoss=fail)
    assert seen.turn() == rows
    stood = seen.offset
    with hold(stream, rows[9]):
        assert seen.turn() == seen.turn(ReadMaxRows(3)) == []
        seen.reader.prepareForTriggerAvailableNow()
        assert seen.reader.latestOffset(stood, seen.reader.getDefaultReadLimit()) == stood
    later = append(stream, 2)
    assert follow(stood, stream=stream, failOnDataLoss=fail).to_the_end() == later


@on_postgres
@on_both_streams
@strict_or_not
@pytest.mark.parametrize("slices", [1, 40])
def test_a_batch_planned_before_the_head_went_back_is_read_whole(
    append: Append, hold: Hold, follow: Follow, stream: str, fail: str, slices: int
):
    """Its slices are the same, however many, and none is left out for lying beyond the head (P.1, I15)."""
    rows = append(stream, 60)
    reader = (seen := follow(stream=stream, failOnDataLoss=fail, minPartitions=slices)).reader
    end = reader.latestOffset(seen.offset, reader.getDefaultReadLimit())
    planned = reader.partitions(seen.offset, end)
    with hold(stream, rows[9]):
        assert reader.partitions(seen.offset, end) == planned
        assert [row["id"] for part in planned for row in read_slice(reader, part)] == rows
        assert reader.partitions(end, end) == []


@on_postgres
@strict_or_not
def test_a_consumer_goes_on_although_the_head_went_back(append: Append, hold: Hold, follow: Follow, fail: str):
    """Its checkpoint is the id of a row that was seen, wherever the head is now (P.1, I6)."""
    rows = append("events", 20)
    seen = follow(consumer="lake", failOnDataLoss=fail)
    seen.turn()
    seen.turn()
    with hold("events", rows[9]):
        again = follow(consumer="lake", failOnDataLoss=fail)
        assert again.offset == seen.offset
        assert again.turn() == []


@on_postgres
@on_both_streams
def test_a_range_is_read_once_the_head_has_come_to_its_end(
    url: str, append: Append, hold: Hold, crew: Crew, stream: str, monkeypatch: pytest.MonkeyPatch
):
    """Below it a row may be on its way: it is waited for, and what does not come in time is told (I5)."""
    rows = append(stream, 20)
    with hold(stream, rows[9]):
        assert rows_of(url, startingOffsets=rows[-1], stream=stream) == []
        assert [row["id"] for row in rows_of(url, stream=stream)] == rows[:10]
        with monkeypatch.context() as patch:
            patch.setattr(source, "PATIENCE", 0.1)
            with pytest.raises(UnsafeStore, match="beyond the head"):
                batch_reader(url, endingOffsets=rows[-1], stream=stream).partitions()
        crew.start(lambda: [row["id"] for row in rows_of(url, endingOffsets=rows[-1], stream=stream)])
        threading.Event().wait(0.2)
    assert crew.join(30) == [rows]


@on_postgres
@pytest.mark.parametrize("beyond", [1, 10**30])
def test_a_position_without_a_row_is_still_a_loss(url: str, append: Append, hold: Hold, follow: Follow, beyond: int):
    """Whether the head went back or not: an older backup came back unmarked (I5)."""
    rows = append("events", 20)
    offset = follow().offset | {"position": rows[-1] + beyond}
    with hold("events", rows[9]):
        with pytest.raises(UnsafeStore, match="beyond the head"):
            follow(offset).turn()
        with pytest.raises(UnsafeStore, match="beyond the head"):
            batch_reader(url, endingOffsets=rows[-1] + beyond).partitions()
        lenient = follow(offset, failOnDataLoss="false")
        lenient.turn()
        assert lenient.offset["position"] == rows[9]


# ── failures of what was pruned ──────────────────────────────────────────────────────────────────────────────────────


def failures(*event_ids: int) -> list[Failure]:
    """Return failures of events that are to be retried at once."""
    return [Failure(each, Retry(timedelta(0), AttemptError("ValueError", "oops", 1, "w"))) for each in event_ids]


def divert(store: Log, *event_ids: int) -> int:
    """Have the subscription `search` take failures over; none has a retry, so that each is a dead letter."""
    return store.divert("search", failures(*event_ids), RetryPolicy(max_retries=0), "w")


def dead(store: Log) -> list[int]:
    """Return the events that are dead letters of `search`."""
    page = store.dead_letters(DeadFilter(subscription="search"), limit=10, offset=0, after=None)
    return sorted(each.event.id for each in page)


def test_a_failure_of_a_pruned_event_is_not_forgotten(store: Log, append: Append):
    """It raises, and takes nothing over; what is left, and what never was, is as ever (I6, I14)."""
    store.delete_subscription("default", "ops")
    store.create_subscription("search", ["*"], [], mode=Mode.SPARK, lease=None, retry=None, start="now")
    first, second, third = append("events", 3)
    store.prune(Stream.EVENTS, after=0, through=second)
    with pytest.raises(UnsafeStore, match=f"event {first} has failed, and everything up to {second} was pruned"):
        divert(store, first, second, third)
    assert dead(store) == []
    assert divert(store, third, third + 7) == 1
    assert dead(store) == [third]


def test_a_failure_of_an_event_that_pruning_spared_is_taken_over(store: Log, append: Append):
    """Its delivery elsewhere has kept it, below the bound (I14)."""
    store.create_subscription("search", ["*"], [], mode=Mode.SPARK, lease=None, retry=None, start="now")
    first, second = append("events", 2)
    store.prune(Stream.EVENTS, after=0, through=second)
    assert divert(store, first, second) == 2
    assert dead(store) == [first, second]
