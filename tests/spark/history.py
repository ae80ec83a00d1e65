"""A bus that has been through a lot, as rows read past the product, and as the frames that the pipeline works on."""

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from postbus import Delivery, EventBus, LeaseLost, RetryPolicy
from postbus.store import as_arrow
from postbus.testing import FrozenClock

__all__ = ["HOSTILE", "START", "Frames", "Rows", "frames", "live", "read"]

START: Final = datetime(2030, 1, 1, 23, 7, tzinfo=UTC)
HOSTILE: Final = """<script>alert(1)</script><img src=x onerror='alert("2")'>\x1b[31m\u202eend"""
WORKERS: Final = ("alpha:1", "alpha:2", "beta:7")
TYPES: Final = ("order.placed", "order.paid", "mail.sent", "<b>bold</b>")
TAGS: Final = ("eu", "us", "<i>vip</i>")

_MOMENT: Final = pa.timestamp("us", tz="UTC")
_TAGS: Final = pa.list_(pa.string())
_NAMES: Final = {
    "audit": "id event_id subscription action created_at status attempt epoch worker_id status_code error_type "
    "error_message execution_time_ms type tags priority event_created_at ready_at claimed_at retry_count errors",
    "events": "id uid type tags key title description payload metadata created_at priority max_retries",
    "open": "event_id subscription status type tags priority created_at due_at ready_at updated_at claimed_at attempt "
    "retry_count worker_id errors died_at",
}
_LONGS: Final = {"id", "event_id", "epoch"}
_INTEGERS: Final = {"attempt", "status_code", "priority", "retry_count", "max_retries"}
_RELATIONS: Final = {"audit": "audit", "events": "events", "open": "deliveries"}


class Rows(NamedTuple):
    """What a store holds; moments are datetimes."""

    audit: list[dict[str, Any]]
    events: list[dict[str, Any]]
    open: list[dict[str, Any]]


class Frames(NamedTuple):
    """The same, on Spark."""

    audit: DataFrame
    events: DataFrame
    open: DataFrame


def read(path: Path) -> Rows:
    """Return what a SQLite file holds; without metadata, which no history here has."""
    return Rows(*(list(_read(path, table)) for table in _NAMES))


def _read(path: Path, table: str) -> Iterator[dict[str, Any]]:
    for batch in as_arrow(f"sqlite:///{path}", _RELATIONS[table], _NAMES[table].split(), 0, (1 << 63) - 1):
        for row in batch.to_pylist():
            yield row | ({"metadata": []} if "metadata" in row else {})


def frames(spark: SparkSession, rows: Rows) -> Frames:
    """Return rows as the frames that lake and source give."""
    return Frames(
        *(
            spark.createDataFrame(pa.Table.from_pylist(part, schema=_schema(table)))
            for table, part in zip(_NAMES, rows, strict=True)
        )
    )


def _schema(table: str) -> pa.Schema:
    return pa.schema([(name, _type(name)) for name in _NAMES[table].split()])


def _type(name: str) -> pa.DataType:
    special = {"tags": _TAGS, "execution_time_ms": pa.float64(), "metadata": pa.map_(pa.string(), pa.string())}
    if name in special:
        return special[name]
    if name.endswith("_at"):
        return _MOMENT
    return pa.int64() if name in _LONGS else pa.int32() if name in _INTEGERS else pa.string()


# ── a life ───────────────────────────────────────────────────────────────────────────────────────────────────────


def live(path: Path, turns: int = 130, seed: int = 4) -> datetime:
    """Have a bus publish, complete, fail, retry, expire, bury, revive, purge and discard; return when it stopped."""
    clock, chance = FrozenClock(START), Random(seed)
    bus = EventBus(f"sqlite:///{path}", clock=clock, lease=60, retry=RetryPolicy(max_retries=2, base_delay=20))
    bus.subscriptions.create("mail", "mail.*")
    bus.subscriptions.create("gone", "order.*")
    late: list[Delivery] = []
    for turn in range(turns):
        for _ in range(chance.randrange(3)):
            bus.publish(
                chance.choice(TYPES), tags=chance.sample(TAGS, chance.randrange(3)), delay=chance.choice([None, 9])
            )
        clock.advance(chance.uniform(1, 60))
        for worker in WORKERS:
            delivery = bus.poll(subscription=chance.choice(["default", "mail", "gone"]), worker_id=worker)
            if delivery is not None:
                clock.advance(chance.uniform(0, 3))
                _end(bus, delivery, chance, late)
        if turn % 25 == 24:
            _look_after(bus, clock, late)
    bus.subscriptions.delete("gone")
    clock.advance(30)
    bus.poll(worker_id="gamma:9")
    clock.advance(400)
    bus.shutdown()
    return clock.now()


def _end(bus: EventBus, delivery: Delivery, chance: Random, late: list[Delivery]) -> None:
    run = chance.lognormvariate(3, 1)
    match chance.randrange(10):
        case 0 | 1:
            error = ValueError(f"order {delivery.id} of {chance.randrange(1_000)}")
            bus.finalize(delivery, success=False, errors=[error], execution_time_ms=run)
        case 2:
            bus.finalize(delivery, success=False, retry=False, errors=[HOSTILE], execution_time_ms=run)
        case 3:
            bus.finalize(delivery, errors=["only noted 17 times"], execution_time_ms=run)
        case 4:
            bus.release(delivery)
        case 5:
            late.append(delivery)  # and nobody reports
        case _:
            bus.finalize(delivery, success=True, execution_time_ms=run)


def _look_after(bus: EventBus, clock: FrozenClock, late: list[Delivery]) -> None:
    """Expire what was left; let one who was thought lost report after all; revive, purge, reset."""
    clock.advance(61)
    bus.store.expire(None, RetryPolicy(max_retries=2))
    for delivery in late[-2:]:
        clock.advance(1)
        _report_late(bus, delivery)
    late.clear()
    dead = list(bus.dlq.list())
    for letter in dead[:2]:
        bus.dlq.retry(letter.event.id, letter.subscription)
    if len(dead) > 4:
        bus.dlq.purge(1 / 24, by="died_at")
    delivery = bus.poll(worker_id="alpha:1")
    if delivery is not None:
        bus.reset(delivery.id, "looked stuck", delivery.subscription)


def _report_late(bus: EventBus, delivery: Delivery) -> None:
    try:
        bus.finalize(delivery, success=True, execution_time_ms=61_000)
    except LeaseLost:
        return
