"""Replay: lake and live table as one range, brought back into a bus, a subscription, files or a function."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from postbus import EventBus
from postbus.errors import InvalidRequest
from postbus.model import Action, Stream
from postbus.spark import Lake
from postbus.spark import replay as replaying
from postbus.spark.archive import archive, bounds
from postbus.spark.lake import ingest
from postbus.spark.replay import (
    Wanted,
    history,
    preview,
    replay_events,
    replay_into_bus,
    replay_into_subscription,
)
from postbus.store import log_of
from tests.kinds import mostly_on_sqlite, on_sqlite


def shop(bus: EventBus) -> list[int]:
    """Publish a day of a shop."""
    news = [
        {
            "type": ("order.placed", "order.paid", "stock.low")[number % 3],
            "payload": {"number": number, "big": 2**70, "text": "Ünïcode"},
            "tags": ["eu"] if number % 2 else [],
            "key": f"k{number}",
            "metadata": {"trace": str(number)},
            "priority": number % 2,
        }
        for number in range(12)
    ]
    return [event.id for event in bus.publish_many(news)]


def archived(spark: SparkSession, bus: EventBus, url: str, lake: Lake) -> list[int]:
    """Publish two days: the first is only in the lake, the second is live and not ingested."""
    first = shop(bus)
    while found := bus.poll_many(100):
        for delivery in found:
            bus.finalize(delivery, success=True)
    ingest(spark, url, lake, rows=5)
    for bound in bounds(log_of(bus.store), lake, older_than=timedelta(0)):
        archive(spark, url, log_of(bus.store), lake, bound)
    return [*first, *shop(bus)]


@mostly_on_sqlite
def test_a_range_over_lake_and_live_table(spark: SparkSession, bus: EventBus, url: str, tmp_path: Path):
    """Each event once, by ids, moments, types and tags, as it was published (P.6)."""
    lake = Lake(tmp_path / "lake")
    events = archived(spark, bus, url, lake)

    def found(**wanted: Any) -> list[Any]:
        return list(replay_events(history(spark, url, bus.store, lake, Wanted(**wanted))))

    everything = found()
    assert [event.id for event in everything] == events
    live = {event.id: event for event in bus.list(limit=100)}
    for event in everything[12:]:
        same = live[event.id]
        assert (event.uid, event.payload, event.tags, event.key, event.metadata, event.created_at, event.priority) == (
            same.uid,
            same.payload,
            same.tags,
            same.key,
            same.metadata,
            same.created_at,
            same.priority,
        )
    assert [event.payload["number"] for event in everything] == [*range(12)] * 2
    assert [event.id for event in found(first=events[5], last=events[13])] == events[5:14]
    middle = everything[12].created_at
    assert [event.id for event in found(first=middle)] == events[12:]
    assert {event.type for event in found(types=("order.*",))} == {"order.placed", "order.paid"}
    assert {event.payload["number"] % 2 for event in found(types=("order.*", "stock.low"), tags=("eu",))} == {1}
    assert found(types=("nothing",)) == []
    told = preview(history(spark, url, bus.store, lake, Wanted(types=("stock.*",))))
    assert [(row["type"], row["events"], row["first_id"], row["last_id"]) for row in told] == [
        ("stock.low", 8, events[2], events[23])
    ]
    with pytest.raises(InvalidRequest, match="name the lake"):
        history(spark, url, bus.store, None, Wanted())
    assert history(spark, url, bus.store, None, Wanted(first=events[12])).count() == 12


@pytest.mark.slow
@mostly_on_sqlite
def test_a_day_replayed_into_an_empty_bus_makes_the_same_lake(
    spark: SparkSession, bus: EventBus, url: str, tmp_path: Path
):
    """But for ids and the moments of publishing (P.6, I15)."""
    lake, again = Lake(tmp_path / "lake"), Lake(tmp_path / "again")
    archived(spark, bus, url, lake)
    ingest(spark, url, lake)
    other_url = f"sqlite:///{tmp_path / 'other.db'}"
    other = EventBus(other_url)
    frame = history(spark, url, bus.store, lake, Wanted())
    assert replay_into_bus(frame, other.store, "first", keep_uids=True) == 24
    assert replay_into_bus(frame, other.store, "again", keep_uids=True) == 24, "uids that are known store nothing"
    ingest(spark, other_url, again)
    other.shutdown()
    columns = ["uid", "type", "tags", "key", "title", "description", "payload", "metadata", "priority", "max_retries"]
    one, two = (each.read(spark).orderBy("id").select(*columns).collect() for each in (lake, again))
    assert one == two
    assert len(one) == 24


@on_sqlite
def test_a_replay_into_the_same_bus_tells_what_it_is(spark: SparkSession, bus: EventBus, url: str):
    """New events with new uids, in order; the same replay run again copies nothing, another one does (P.6, I3)."""
    events = shop(bus)
    frame = history(spark, url, bus.store, None, Wanted(last=events[-1]))
    seen: list[int] = []
    assert replay_into_bus(frame, bus.store, "first", watch=seen.append) == 12
    replay_into_bus(frame, bus.store, "first")
    assert bus.list().total == 24
    assert seen == [12]
    assert len(replaying._short("u" * 255)) == 64 != len(replaying._short("u" * 100))
    old, new = bus.get(events[3]), bus.get(events[-1] + 4)
    assert (new.payload, new.type, new.tags, new.key) == (old.payload, old.type, old.tags, old.key)
    assert new.metadata == {**old.metadata, "replay_of": old.uid, "replay_created_at": old.created_at.isoformat()}
    assert new.uid != old.uid
    replay_into_bus(frame, bus.store, "second")
    assert bus.list().total == 36


def test_a_replay_into_a_subscription_is_for_it_alone(spark: SparkSession, bus: EventBus, url: str):
    """It gets events again that it had finished, not those it is at; each is recorded as REPLAYED (P.6, I11)."""
    events = shop(bus)
    bus.subscriptions.create("other")
    taken = bus.poll_many(100)
    for delivery in taken[:-2]:
        bus.finalize(delivery, success=True)
    bus.finalize(taken[-2], success=False, retry=False, errors=["broken"])
    frame = history(spark, url, bus.store, None, Wanted(types=("order.*", "stock.low")))
    assert replay_into_subscription(frame, log_of(bus.store), "default", "test") == 10
    assert bus.poll(subscription="other") is None
    again = bus.poll_many(100)
    assert {each.id for each in again} == {each.id for each in taken[:-2]}
    assert [entry.action for entry in bus.store.logs(again[0].id)][-2:] == [Action.REPLAYED, Action.PICKED]
    with pytest.raises(InvalidRequest, match="were pruned"):
        log_of(bus.store).redeliver("default", [events[0], 10_000], "test")


@on_sqlite
def test_a_replay_keeps_to_its_rate(spark: SparkSession, bus: EventBus, url: str, monkeypatch: pytest.MonkeyPatch):
    """It sleeps as long as the rate asks for (P.6)."""
    shop(bus)
    slept: list[float] = []
    monkeypatch.setattr("postbus.spark.replay.sleep", slept.append)
    monkeypatch.setattr("postbus.spark.replay.BATCH", 4)
    replay_into_bus(history(spark, url, bus.store, None, Wanted()), bus.store, "slow", rate=1.0)
    assert [round(each) for each in slept] == [4, 8, 12]


@on_sqlite
def test_spans_of_both_streams_are_one_table(spark: SparkSession, bus: EventBus, url: str, tmp_path: Path):
    """A lake of another log is refused (P.6)."""
    lake = Lake(tmp_path / "lake")
    shop(bus)
    ingest(spark, url, lake)
    log_of(bus.store).restore_mark("test")
    with pytest.raises(InvalidRequest, match="another log"):
        history(spark, url, bus.store, lake, Wanted())
    assert bus.store.span(Stream.EVENTS).head == 12
