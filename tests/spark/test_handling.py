"""Handling on Spark: the first attempt on the executors, retries and dead letters in the bus."""

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

from postbus import Discard, Event, EventBus, RetryPolicy
from postbus.errors import Conflict, InvalidRequest, RetryLater
from postbus.handlers import make_handler
from postbus.spark import handle
from postbus.spark.handling import Attempt, Handling
from postbus.store.extract import RELATIONS
from tests.kinds import on_sqlite

QUICK = RetryPolicy(max_retries=2, base_delay=0.01)


# ── the attempt, without Spark ───────────────────────────────────────────────────────────────────────────────────────


def attempt(function: Callable[..., Any], *payloads: str, **options: Any) -> list[dict[str, Any]]:
    """Return the failures of a partition that holds these payloads."""
    rows = [{"id": number, "type": "a", "payload": payload} for number, payload in enumerate(payloads, 1)]
    batch = pa.RecordBatch.from_pylist(rows, pa.schema([RELATIONS["events"].field(name) for name in rows[0]]))
    handler = make_handler("*", function, subscription="s", **options)
    return [row for failed in Attempt(handler, QUICK).run(iter([batch])) for row in failed.to_pylist()]


def test_what_works_is_not_spoken_of():
    """Only failures go to the driver (P.1)."""
    seen: list[Any] = []
    assert attempt(lambda event: seen.append(event.payload), "1", " 123456789012345678901234567890", "null") == []
    assert seen == [1, 123456789012345678901234567890, None]


def fussy(event: Event) -> None:
    """Do as the payload says."""
    match event.payload:
        case "fail":
            raise ValueError("oops")
        case "discard":
            raise Discard("no use")
        case "later":
            raise RetryLater(7, "not now")
        case "exit":
            raise SystemExit(3)
        case _:
            pass


@pytest.mark.parametrize("timeout", [None, 30])
def test_a_failure_tells_its_error(timeout: float | None):
    """Type, message, the traceback from the function on, who, how long; the neighbours are not harmed (P.1)."""
    failed = attempt(fussy, '"fail"', '"good"', '"discard"', '"later"', '"exit"', timeout=timeout)
    told = [(row["id"], row["type"], row["message"], row["dead"], row["delay"]) for row in failed]
    assert told == [
        (1, "ValueError", "oops", False, None),
        (3, "Discard", "no use", True, None),
        (4, "RetryLater", "not now", False, 7.0),
        (5, "SystemExit", "3", False, None),
    ]
    assert "raise ValueError" in failed[0]["traceback"]
    assert "spark/handling.py" not in failed[0]["traceback"]
    assert failed[0]["worker"].endswith(f":{os.getpid()}")
    assert failed[0]["ms"] >= 0


def test_a_payload_that_cannot_be_read_is_a_failure():
    """Of that event alone (P.1)."""
    assert [row["id"] for row in attempt(fussy, "{", "1")] == [1]


def test_a_function_that_hangs_is_left_behind():
    """The partition goes on (P.1, S1.8)."""
    stuck, seen = threading.Event(), []

    def hang(event: Event) -> None:
        if event.payload == "hang":
            stuck.wait()
        seen.append(event.payload)

    failed = attempt(hang, '"a"', '"hang"', '"b"', timeout=0.1)
    assert [(row["id"], row["type"]) for row in failed] == [(2, "TimeoutError")]
    assert "did not return within 0.1 s" in failed[0]["message"]
    assert seen == ["a", "b"]
    stuck.set()


def test_an_async_function_is_awaited():
    """In time, or not (P.1)."""

    async def slow(event: Event) -> None:
        await asyncio.sleep(event.payload)
        if event.payload:
            raise ValueError("late")

    failed = attempt(slow, "0", "0.001", "60", timeout=0.2)
    assert [(row["id"], row["type"]) for row in failed] == [(2, "ValueError"), (3, "TimeoutError")]


# ── on Spark ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def read(spark: SparkSession, url: str, **options: str) -> DataFrame:
    """Read the bus as a stream."""
    return spark.readStream.format("postbus").options(url=url, **options).load()


Run = Callable[..., Handling]


@pytest.fixture
def run(spark: SparkSession, url: str, tmp_path: Path) -> Iterator[Run]:
    """Give a function that handles the bus's stream as the consumer `shop`, until it has caught up or is stopped."""
    begun: list[Handling] = []

    def run(function: Callable[[Event], Any], **options: Any) -> Handling:
        given = {"retry": QUICK, "trigger": {"availableNow": True}, "consumer": "shop", "url": url, **options}
        stream = read(spark, url, consumer="shop")
        begun.append(handle(stream, function, checkpoint=str(tmp_path / "checkpoint"), **given))
        return begun[-1]

    yield run
    for handling in begun:
        handling.stop()


def picky(driver: int, journal: Path) -> Callable[[Event], None]:
    """Return a function that writes down what it is called for, and fails as the payload says."""

    def handle_one(event: Event) -> None:
        where = "driver" if os.getpid() == driver else "executor"
        with journal.open("a") as file:
            file.write(f"{event.id} {where}\n")
        if event.payload["do"] == "fail" or (event.payload["do"] == "fail there" and where == "executor"):
            raise ValueError(f"cannot do {event.payload['do']}")

    return handle_one


def calls(journal: Path) -> dict[int, list[str]]:
    """Return where each event was tried, in order."""
    found: dict[int, list[str]] = {}
    for line in journal.read_text().splitlines():
        event_id, where = line.split()
        found.setdefault(int(event_id), []).append(where)
    return found


def nothing(event: Event) -> None:
    """Handle anything."""


def with_context(event: Event, ctx: Any) -> None:
    """Handle anything, on a worker."""


def publish(bus: EventBus, *wishes: str) -> list[int]:
    """Publish an event for each wish."""
    return [event.id for event in bus.publish_many([{"type": "w", "payload": {"do": wish}} for wish in wishes])]


def test_failures_are_retried_and_at_last_dead_letters(bus: EventBus, run: Run, tmp_path: Path):
    """The stream goes on; the dead letter tells of each attempt, is retried like any other, and completes (P.1)."""
    journal = tmp_path / "calls"
    good, once, bad, last = publish(bus, "well", "fail there", "fail", "well")
    run(picky(os.getpid(), journal)).awaitTermination()
    assert calls(journal) == {
        good: ["executor"],
        once: ["executor", "driver"],
        bad: ["executor", "driver", "driver"],
        last: ["executor"],
    }
    assert bus.get(once, subscription="shop").status == "COMPLETED"
    (dead,) = bus.dlq.list(subscription="shop")
    assert (dead.event.id, dead.attempts, len(dead.errors)) == (bad, 3, 3)
    assert {error.message for error in dead.errors} == {"cannot do fail"}
    assert dead.errors[0].worker_id != dead.errors[1].worker_id == dead.errors[2].worker_id
    (stand,) = [each for each in bus.store.checkpoints() if each.subscription == "shop"]
    assert stand.stream == "events"

    assert bus.dlq.retry(bad, "shop") == 1
    more = publish(bus, "well")
    run(nothing).awaitTermination()
    assert bus.get(bad, subscription="shop").status == "COMPLETED"
    assert bus.dlq.list(subscription="shop").total == 0
    assert bus.get(more[0]).status == "PENDING"  # in the default subscription, nobody's business here


@on_sqlite
def test_a_replayed_batch_changes_nothing_that_was_recorded(bus: EventBus, run: Run, tmp_path: Path):
    """The driver died before Spark noted the batch: the function runs again, what the bus has stays (P.1, I9)."""
    journal = tmp_path / "calls"
    good, once, bad = publish(bus, "well", "fail there", "fail")
    run(picky(os.getpid(), journal)).awaitTermination()
    before = {each: [row.action for row in bus.store.logs(each)] for each in (good, once, bad)}
    for commit in (tmp_path / "checkpoint" / "commits").iterdir():
        commit.unlink()
    run(picky(os.getpid(), journal)).awaitTermination()
    assert calls(journal)[good] == ["executor", "executor"]
    assert {each: [row.action for row in bus.store.logs(each)] for each in (good, once, bad)} == before


@pytest.mark.parametrize("kind", ["postgres"])
def test_retries_go_on_while_nothing_new_comes(bus: EventBus, run: Run, tmp_path: Path, eventually: Callable[..., Any]):
    """A worker in the driver runs them, and ends with the query (P.1, I10)."""
    journal = tmp_path / "calls"
    handling = run(picky(os.getpid(), journal), trigger={"processingTime": "100 milliseconds"})
    (once,) = publish(bus, "fail there")
    eventually(lambda: bus.get(once, subscription="shop").status == "COMPLETED", within=60)
    (again,) = publish(bus, "fail")
    eventually(lambda: bus.dlq.list(subscription="shop").total, within=60)
    assert handling.isActive
    handling.stop()
    assert not handling.isActive
    assert handling.bus.is_shut_down
    assert bus.dlq.get(again, "shop")[0].attempts == 3


@on_sqlite
def test_the_function_decides_on_the_event_that_a_worker_would_see(bus: EventBus, run: Run, tmp_path: Path):
    """Field by field; one that it discards, or that has no retries of its own, is a dead letter at once (P.1)."""
    seen = tmp_path / "seen"
    fields: dict[str, Any] = {"tags": ["b", "a"], "key": "k", "title": "t", "description": "d", "metadata": {"m": "1"}}
    event = bus.publish("w", {"wide": 2**70, "text": "é\n"}, **fields, uid="u", priority=-2, max_retries=4)
    discarded, own = bus.publish("w", "discard"), bus.publish("w", "fail", max_retries=0)

    def function(event: Event) -> None:
        fussy(event)
        seen.write_text(repr(shape(event)))

    run(function).awaitTermination()
    assert seen.read_text() == repr(shape(event))
    dead = {each.event.id: (each.attempts, each.errors[0].message) for each in bus.dlq.list(subscription="shop")}
    assert dead == {discarded.id: (1, "no use"), own.id: (1, "oops")}


def shape(event: Event) -> tuple[Any, ...]:
    """Return what an event is, less how it stands."""
    who = (event.id, event.uid, event.type, event.payload, event.tags, event.key, event.title, event.description)
    return (*who, event.metadata, event.created_at, event.priority, event.max_retries)


@on_sqlite
def test_what_cannot_be_handled_is_refused(spark: SparkSession, bus: EventBus, url: str, run: Run):
    """A table, payloads that are no text, a function that wants a context, a name that is taken (P.1)."""
    options: Any = {"url": url, "consumer": "shop", "checkpoint": "unused"}
    bus.publish("a")
    with pytest.raises(InvalidRequest, match="readStream"):
        handle(spark.read.format("postbus").option("url", url).load(), fussy, **options)
    with pytest.raises(InvalidRequest, match="payloadFormat"):
        handle(read(spark, url, payloadFormat="variant"), fussy, **options)
    with pytest.raises(InvalidRequest, match="no column payload"):
        handle(read(spark, url).drop("payload"), fussy, **options)
    with pytest.raises(InvalidRequest, match=r"\(event\)"):
        run(with_context)
    with pytest.raises(Conflict, match="queue"):
        run(fussy, consumer="default")
    assert [each.name for each in bus.subscriptions.list()] == ["default"]
