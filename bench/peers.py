"""What users would pick instead, each in its own words and at its best, but as durable as postbus.

That is: WAL and `synchronous=FULL`, so that what was acknowledged survives a power cut. None of them keeps an audit
row; Huey takes a task off the queue before running it, so a crash loses it, and it writes once where others write
twice. Their payload is the same object, in the form each of them likes best.
"""

import json
import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable
from itertools import count as counting
from typing import Any, Final

from huey import SqliteHuey
from litequeue import LiteQueue
from persistqueue import SQLiteAckQueue

from bench import load

__all__ = [
    "huey_drain",
    "huey_publish",
    "litequeue_drain",
    "litequeue_publish",
    "persistqueue_drain",
    "persistqueue_publish",
]

FULL: Final = 2


def persistqueue_publish(count: int, batch: int) -> dict[str, float]:
    """Put items; persist-queue has no batches, so `batch` changes nothing."""
    del batch
    queue = _persistqueue()
    payloads = [load.order(number) for number in range(count)]
    return {"rate": count / _timed(lambda: _each(queue.put, payloads))}


def persistqueue_drain(count: int) -> dict[str, float]:
    """Get and acknowledge items, one after another; handing the raw item back to `ack` spares it a search."""
    queue = _persistqueue()
    for number in range(count):
        queue.put(load.order(number))

    def drain() -> None:
        for _ in range(count):
            queue.ack(id=queue.get(block=False, raw=True)["pqid"])

    took = _timed(drain)
    _check(queue.acked_count(), count)
    return {"rate": count / took}


def _persistqueue() -> Any:
    """Return a queue as documented: `auto_commit` is the only mode of an ack queue, and it sets WAL itself."""
    queue: Any = SQLiteAckQueue("persistqueue", auto_commit=True, multithreading=True)
    for connection in (queue._getter, queue._putter):  # noqa: SLF001  it has no setting for this
        _make_durable(connection)
    return queue


def litequeue_publish(count: int, batch: int) -> dict[str, float]:
    """Put messages, `batch` in a transaction."""
    queue = _litequeue()
    payloads = [json.dumps(load.order(number)) for number in range(count)]

    def publish() -> None:
        for start in range(0, count, batch):
            with queue.transaction():
                for payload in payloads[start : start + batch]:
                    queue.put(payload)

    return {"rate": count / _timed(publish if batch > 1 else lambda: _each(queue.put, payloads))}


def litequeue_drain(count: int) -> dict[str, float]:
    """Pop messages and mark them done, one after another."""
    queue = _litequeue()
    with queue.transaction():
        for number in range(count):
            queue.put(json.dumps(load.order(number)))

    def drain() -> None:
        for _ in range(count):
            message = queue.pop()
            json.loads(message.data)
            queue.done(message.message_id)

    took = _timed(drain)
    _check(queue.qsize(), 0)
    return {"rate": count / took}


def _litequeue() -> Any:
    queue = LiteQueue("litequeue.db")
    _make_durable(queue.conn)
    return queue


def huey_publish(count: int, batch: int) -> dict[str, float]:
    """Enqueue tasks; Huey has no batches on SQLite, so `batch` changes nothing."""
    del batch
    huey = _huey()
    task = huey.task()(_nothing)
    payloads = [load.order(number) for number in range(count)]
    return {"rate": count / _timed(lambda: _each(task, payloads))}


def huey_drain(count: int, workers: int) -> dict[str, float]:
    """Have Huey's own consumer run a task that does nothing, on `workers` threads."""
    logging.disable(logging.INFO)
    huey = _huey()
    numbers = counting(1)
    finished = threading.Event()

    def handle(payload: dict[str, Any]) -> None:
        del payload
        if next(numbers) == count:
            finished.set()

    task = huey.task()(handle)
    for number in range(count):
        task(load.order(number))
    consumer = huey.create_consumer(workers=workers, periodic=False, initial_delay=0.001, max_delay=0.01)
    began = time.perf_counter()
    consumer.start()
    finished.wait()
    took = time.perf_counter() - began
    consumer.stop(graceful=True)
    _check(huey.storage.queue_size(), 0)
    return {"rate": count / took}


def _huey() -> Any:
    """Return a Huey as durable as it can be set: `fsync` is synchronous=FULL; a task's None is not stored."""
    huey: Any = SqliteHuey("bench", filename="huey.db", fsync=True, journal_mode="wal", cache_mb=64, timeout=30)
    _check(huey.storage.conn.execute("PRAGMA synchronous").fetchone()[0], FULL)
    return huey


def _nothing(payload: dict[str, Any]) -> None:
    del payload


def _make_durable(connection: sqlite3.Connection) -> None:
    connection.execute("PRAGMA synchronous=FULL")
    _check(connection.execute("PRAGMA journal_mode").fetchone()[0], "wal")
    _check(connection.execute("PRAGMA synchronous").fetchone()[0], FULL)


def _each(work: Callable[[Any], object], given: Iterable[Any]) -> None:
    for each in given:
        work(each)


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _check(found: object, expected: object) -> None:
    """Refuse a figure for work that was not done."""
    if found != expected:
        raise RuntimeError(f"expected {expected!r}, found {found!r}")
