"""`postbus.spark.facts`: what the audit log tells, against the log itself."""

from collections.abc import Iterator
from datetime import timedelta
from math import ceil
from pathlib import Path
from random import Random
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as fn

from postbus.fingerprint import fingerprint
from postbus.model import Dead, Delivery, Event, Retry, Stream
from postbus.retry import RetryPolicy
from postbus.spark import facts
from postbus.store.contract import DeadFilter, Settled, Settlement
from tests.contract.stores import DEAD, DONE, FLAWED, RETRY, Operator, Site, site_of
from tests.spark.history import Frames, Rows, frames, live, read

SEEN = (
    "id", "event_id", "subscription", "type", "tags", "priority", "outcome", "attempts", "worker", "wait_seconds",
    "run_ms", "total_seconds", "error_type", "error_message",
)  # fmt: skip


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """Give what a bus holds that has been through a lot."""
    path: Path = tmp_path_factory.mktemp("facts") / "bus.db"
    live(path)
    return read(path)


@pytest.fixture(scope="module")
def held(spark: SparkSession, rows: Rows) -> Frames:
    """Give the same on Spark."""
    return frames(spark, rows)


def expected(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return the fact that an ending row of the audit log tells."""
    waited = (row["claimed_at"] - row["ready_at"]).total_seconds()
    return (
        row["id"],
        row["event_id"],
        row["subscription"],
        row["type"],
        row["tags"],
        row["priority"],
        row["status"],
        row["attempt"],
        row["worker_id"],
        waited if waited >= 0 else None,
        row["execution_time_ms"],
        (row["created_at"] - row["event_created_at"]).total_seconds(),
        row["error_type"],
        row["error_message"],
    )


def test_a_fact_is_one_row_an_ended_delivery_and_the_latest_is_current(rows: Rows, held: Frames):
    """Every end is in the history, with who, how long and how it went; only the last one stands (P.4, I9)."""
    ends = [row for row in rows.audit if (row["action"], row["status"]) in {
        ("COMPLETED", "COMPLETED"), ("COMPLETED_WITH_ERRORS", "COMPLETED_WITH_ERRORS"), ("FAILED", "FAILED"),
    }]  # fmt: skip
    latest = {(row["event_id"], row["subscription"]): row["id"] for row in ends}
    assert len(latest) < len(ends), "some dead letters were retried and ended again"
    assert any(row["ready_at"] > row["claimed_at"] for row in ends), "some reported late"
    told = facts.facts(held.audit)
    standing = facts.current(told).select("id", fn.lit(col=True).alias("stands"))
    found = told.join(standing, "id", "left").orderBy("id").collect()
    assert [tuple(row[name] for name in SEEN) for row in found] == [expected(row) for row in ends]
    assert sorted(row["id"] for row in found if row["stands"]) == sorted(latest.values())


@pytest.fixture
def site(kind: str, tmp_path: Path) -> Iterator[Site]:
    """Give a place for a store, with a clock that stands still."""
    site = site_of(kind, tmp_path)
    yield site
    site.close()


class Shop:
    """Works in blocks, fails, retries, dies and loses workers, and writes down each end as a fact should tell it."""

    def __init__(self, op: Operator) -> None:
        """Begin with an empty log."""
        self.ends: list[tuple[Any, ...]] = []
        self._op = op
        self._chance = Random(7)
        self._events: dict[int, Event] = {}
        self._ready: dict[tuple[int, str], Any] = {}
        """When an attempt after the first fell due."""
        self._unfinished: set[tuple[int, str]] = set()
        """Dead letters, and what no worker ever reported."""

    def turn(self, number: int) -> None:
        """Publish, and have each subscription work off some of what is due, each time in one block."""
        op, chance = self._op, self._chance
        kinds = ("order.placed", "order.paid", "mail.sent")
        news = [{"type": chance.choice(kinds), "tags": list("ab"[: chance.randrange(3)])} for _ in range(20)]
        published = op.publish_all(*({**new, "priority": chance.choice([0, 0, 3])} for new in news))
        self._events |= {event.id: event for event in published}
        for name in ("default", "mail"):
            op.clock.advance(1.25)
            taken = op.claim(chance.randint(5, 30), name, f"{name}:{number % 3}", shared=True)
            op.clock.advance(0.5)
            self._settle(name, taken, op.clock.now() - timedelta(seconds=0.5))

    def end(self) -> None:
        """Bring all that is left to an end, that of lost workers and dead letters included."""
        op = self._op
        op.end_leases()
        assert op.store.expire(None, RetryPolicy()) > 0
        assert op.store.retry_dead(DeadFilter(), "ops") > 0
        self._ready |= dict.fromkeys(self._unfinished, op.clock.now())
        op.clock.advance(60)
        for name in ("default", "mail"):
            while taken := op.claim(100, name, "late", shared=True):
                op.clock.advance(0.25)
                self._settle(name, taken, op.clock.now() - timedelta(seconds=0.25), last=True)

    def _settle(self, name: str, taken: list[Delivery], claimed: Any, *, last: bool = False) -> None:
        reported = [each for each in taken if last or self._chance.random() < 0.9]
        self._unfinished |= {(each.id, name) for each in taken if each not in reported}
        outcomes = [DONE] if last else [DONE, DONE, DONE, FLAWED, RETRY, DEAD]
        told = [
            Settlement(
                each.lease, self._chance.choice(outcomes), each.worker_id, None, self._chance.randrange(4_000) / 8
            )
            for each in reported
        ]
        assert set(self._op.store.settle(told)) <= {Settled.APPLIED}
        for delivery, settlement in zip(reported, told, strict=True):
            key = delivery.id, name
            if isinstance(settlement.outcome, Retry):
                self._ready[key] = self._op.clock.now() + settlement.outcome.after
                continue
            self.ends.append(self._fact(name, delivery, settlement, claimed))
            if isinstance(settlement.outcome, Dead):
                self._unfinished.add(key)

    def _fact(self, name: str, delivery: Delivery, told: Settlement, claimed: Any) -> tuple[Any, ...]:
        event, finished = self._events[delivery.id], self._op.clock.now()
        ready = self._ready.get((event.id, name), event.created_at)
        outcomes = {DONE: ("COMPLETED", None), FLAWED: ("COMPLETED_WITH_ERRORS", "oops"), DEAD: ("FAILED", "oops")}
        outcome, message = outcomes[told.outcome]
        error = None if message is None else "ValueError"
        return (
            event.id, name, event.type, tuple(sorted(event.tags)), event.priority, outcome, delivery.attempt,
            delivery.worker_id, (claimed - ready).total_seconds(), told.execution_time_ms,
            (finished - event.created_at).total_seconds(), error, message,
        )  # fmt: skip


def test_facts_are_told_though_the_events_were_pruned(spark: SparkSession, site: Site):
    """All that a fact says stands in the audit log, blocks told of together included: it needs no event (P.4, P.5)."""
    op = Operator(site.open(), site.clock)
    op.subscription("mail", ["mail.*"])
    shop = Shop(op)
    for number in range(12):
        shop.turn(number)
    shop.end()
    unfinished = op.publish("order.placed")
    assert {end[5] for end in shop.ends} == {"COMPLETED", "COMPLETED_WITH_ERRORS", "FAILED"}
    assert len({end[:2] for end in shop.ends}) < len(shop.ends), "some dead letters were retried and ended again"
    assert op.store.prune(Stream.EVENTS, after=0, through=unfinished.id).removed == 12 * 20
    assert [event.id for event in op.list(limit=1_000)] == [unfinished.id]

    audit = spark.read.format("postbus").option("url", site.url).option("stream", "audit").load()
    found = [
        tuple(tuple(sorted(row[name])) if name == "tags" else row[name] for name in SEEN[1:])
        for row in facts.facts(audit).collect()
    ]
    assert sorted(found, key=str) == sorted(shop.ends, key=str)


def test_messages_of_the_same_error_have_the_same_fingerprint(spark: SparkSession):
    """Ids, numbers, uuids, hex, quoted text, paths, addresses and times are folded; words are not (P.4)."""
    cases = {
        "order 17 not found": "order <n> not found",
        "order 4,512.50 not found": "order <n> not found",
        "balance -12 is below 0": "balance <n> is below <n>",
        "user_42 has no role": "user_<n> has no role",
        "no 3f2b8c1e-9d4a-4f6b-8a7c-0123456789ab here": "no <uuid> here",
        "object at 0x7f3a2c1d": "object at <hex>",
        "commit deadbeef42 is gone": "commit <hex> is gone",
        "a decade of deceased beads": "a decade of deceased beads",
        "KeyError: 'colour'": "KeyError: <text>",
        'no column "a b" in `t`': "no column <text> in <text>",
        "can't open what isn't there": "can't open what isn't there",
        "cannot read /srv/app/7/orders.json": "cannot read <path>",
        "cannot read ~/notes/today.txt, and/or more": "cannot read <path>, and/or more",
        r"cannot read C:\Users\me\x.txt": "cannot read <path>",
        "GET https://api.example/v1/7?q=1 failed": "GET <url> failed",
        "no mailbox ann.b+c@example.org": "no mailbox <email>",
        "10.0.0.17:5432 refused": "<n> refused",
        "late since 2026-11-16T02:10:03.5Z by 3 s": "late since <time> by <n> s",
        "worker alpha:1 was lost": "worker <worker> was lost",
        "  two\n\tlines ": "two lines",
        "'" * 5_000: "<text>" * 500,
        "/a" * 5_000: "<path>",
        "": "",
    }
    table = spark.createDataFrame([(message, "alpha:1") for message in cases], "message STRING, worker STRING")
    folded = table.select("message", facts.fingerprint(fn.col("message"), fn.col("worker")).alias("folded"))
    assert {row["message"]: row["folded"] for row in folded.collect()} == cases
    assert {message: fingerprint(message, "alpha:1") for message in cases} == cases


def test_windows_merge_into_what_the_whole_would_have_been(spark: SparkSession):
    """Counts add up, and percentiles of merged sketches stay within one per cent of the rank (P.4)."""
    count = 30_000
    skewed = fn.pmod(fn.xxhash64("id"), fn.lit(1_000_003)).cast("double")
    attempts = spark.range(count).select(
        (fn.lit(1_900_000_000) + fn.col("id")).cast("timestamp").alias("finished_at"),
        fn.when(fn.col("id") % 3 == 0, "mail").otherwise("default").alias("subscription"),
        fn.lit("order").alias("type"),
        fn.when(fn.col("id") % 10 == 0, "RETRY").otherwise("COMPLETED").alias("outcome"),
        fn.lit(None).cast("string").alias("error_type"),
        skewed.alias("wait_seconds"),
        fn.lit(None).cast("double").alias("run_ms"),
    )
    parts = facts.windows(attempts, timedelta(minutes=5))
    whole = facts.merged(parts).select(
        *facts.COUNTS, *(facts.percentiles(name).alias(name) for name in ("wait", "run"))
    )
    answer = whole.crossJoin(parts.agg(fn.count("*").alias("parts"))).collect()[0]
    assert answer["parts"] > 200
    assert [answer[name] for name in facts.COUNTS] == [count, 27_000, 27_000, 0, 3_000, 3_000, 0, 0]
    values = sorted(row[0] for row in attempts.select("wait_seconds").collect())
    for rank, value in zip((0.5, 0.95, 0.99), answer["wait"], strict=True):
        assert values[ceil((rank - 0.01) * count)] <= value <= values[min(count - 1, ceil((rank + 0.01) * count))]
    assert answer["run"] is None
