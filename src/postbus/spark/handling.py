"""Handling a stream on Spark: the first attempt on the executors, what fails goes on as a delivery of the bus."""

# pyright: basic
# Arrow comes without types.
import asyncio
import logging
import os
import queue
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyspark.sql import types as t
from pyspark.sql.pandas.types import from_arrow_schema

from postbus.bus import EventBus
from postbus.errors import Conflict, Discard, InvalidRequest, RetryLater
from postbus.execution import describe, overdue
from postbus.handlers import DEFAULT_TIMEOUT, Handler, make_handler
from postbus.loop import Loop
from postbus.model import AttemptError, Dead, Delivery, Event, Lease, Mode, Retry, Status
from postbus.observe import probe, tell
from postbus.payload import decode
from postbus.retry import RetryPolicy
from postbus.store import log_of, open_store
from postbus.store.contract import Failure

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

__all__ = ["Handling", "handle"]

COLUMNS: Final = (
    "id", "uid", "type", "payload", "tags", "key", "title", "description", "metadata", "created_at", "priority",
    "max_retries",
)  # fmt: skip
"""What an event has of the stream's columns; the others are the caller's own business."""
NEEDED: Final = ("id", "type", "payload")
FAILURES: Final = pa.schema(
    {
        "id": pa.int64(),
        "dead": pa.bool_(),
        "delay": pa.float64(),
        "type": pa.string(),
        "message": pa.string(),
        "traceback": pa.string(),
        "handler": pa.string(),
        "worker": pa.string(),
        "ms": pa.float64(),
    }
)
NEVER: Final = datetime.fromtimestamp(0, UTC)
CHUNK: Final = 1_000
LOOK_EVERY: Final = 0.2
DRAIN: Final = 60.0


def handle(
    stream: "DataFrame",
    function: Callable[[Event], Any],
    *,
    url: str,
    consumer: str,
    checkpoint: str,
    retry: RetryPolicy | Mapping[str, float] | None = None,
    timeout: float | None = DEFAULT_TIMEOUT,
    trigger: Mapping[str, Any] | None = None,
    name: str | None = None,
    drain: float = DRAIN,
) -> "Handling":
    """Run a function for each event of a stream of `format("postbus")`, on the executors, at least once.

    An event it fails for becomes a delivery of the subscription `consumer` in the bus, before the batch is done: it is
    retried by the policy, in this process, and at last a dead letter, seen and retried by `dlq` as any other. The
    stream goes on meanwhile. `function` is a plain or an async function of (event), and may raise Discard or
    RetryLater; `timeout` is for one call. `trigger` is what `writeStream.trigger` takes, `{"availableNow": True}`; a
    stream that has come to its end waits up to `drain` seconds for its retries. Read the stream with the option
    `consumer`, so that pruning waits for it: where an event is pruned before its failure is recorded, the stream ends
    with UnsafeStore.

    Raises InvalidRequest for a DataFrame that is no such stream, Conflict if `consumer` is a subscription of another
    mode. A function that ends its whole process ends the stream, as any task of Spark's does.
    """
    columns = _columns(stream)
    handler = make_handler("*", function, subscription=consumer, retry=retry, timeout=timeout)
    if handler.wants_context:
        raise InvalidRequest("on Spark a handler takes (event): there is no lease, and so no context, at first")
    bus = EventBus(url)
    try:
        policy = bus.settings.retry.merged(_subscribed(bus, consumer, retry)).merged(retry)
        bus.subscribe("*", function, subscription=consumer, retry=retry, timeout=timeout)
        bus.start()
        each_batch = _each_batch(columns, Attempt(handler, policy), Diversion(url, consumer, policy))
        writing = stream.writeStream.foreachBatch(each_batch).option("checkpointLocation", checkpoint)
        writing = writing.trigger(**trigger) if trigger else writing
        return Handling((writing.queryName(name) if name else writing).start(), bus, drain)
    except BaseException:
        bus.shutdown()
        raise


def _each_batch(columns: list[str], attempt: "Attempt", diversion: "Diversion") -> Callable[["DataFrame", int], None]:
    def each_batch(frame: "DataFrame", number: int) -> None:
        # Kept, so that looking at the failures, some at a time, does not run the function again.
        failed = frame.select(*columns).mapInArrow(attempt.run, from_arrow_schema(FAILURES)).persist()
        try:
            if failed.count():
                diversion.run(failed.toLocalIterator(), number)
        finally:
            failed.unpersist()

    return each_batch


def _columns(stream: "DataFrame") -> list[str]:
    if not stream.isStreaming:
        raise InvalidRequest("handle() takes a stream: spark.readStream.format('postbus')")
    there = stream.schema.fieldNames()
    if missing := [name for name in NEEDED if name not in there]:
        raise InvalidRequest(f"the stream has no column {', '.join(missing)}: hand it on as it was read")
    if not isinstance(stream.schema["payload"].dataType, t.StringType):
        raise InvalidRequest("handle() reads payloads itself: leave payloadFormat=string")
    return [name for name in COLUMNS if name in there]


def _subscribed(bus: EventBus, consumer: str, retry: RetryPolicy | Mapping[str, float] | None) -> RetryPolicy | None:
    """Return the policy of the consumer's subscription, which is made if the stream has not made it yet."""
    if all(each.name != consumer for each in bus.subscriptions.list()):
        with suppress(Conflict):  # made by another at this very moment
            own = bus.settings.retry.merged(retry) if retry is not None else None
            bus.subscriptions.create(consumer, "*", "spark", retry=own)
    found = bus.subscriptions.get(consumer)
    if found.mode is not Mode.SPARK:
        raise Conflict(f"{consumer!r} is a subscription of mode {found.mode}: choose another consumer")
    return found.retry


class Handling:
    """A stream that is being handled: its StreamingQuery, and the worker that runs again what failed in it.

    Whatever a StreamingQuery has can be asked of it. The worker ends with the query, however that ends.
    """

    def __init__(self, query: "StreamingQuery", bus: EventBus, drain: float) -> None:
        """Look after a query that has begun, and a bus that is started."""
        self.query = query
        self.bus = bus
        self._drain = drain
        self._asked = False
        self._ended = threading.Event()
        self._watching = Loop("handling", self._turn)
        self._watching.start()

    def __getattr__(self, name: str) -> Any:
        """Return what the StreamingQuery has under that name."""
        return getattr(self.query, name)

    def stop(self) -> None:
        """Stop the query, let retries that run finish, and leave the others to the next time."""
        self._asked = True
        self.query.stop()
        self._watching.wake()
        self._ended.wait()

    def awaitTermination(self, timeout: float | None = None) -> bool | None:  # noqa: N802  Spark's name
        """Wait until the query has ended, and its worker with it; raise what ended it."""
        try:
            return self.query.awaitTermination() if timeout is None else self.query.awaitTermination(timeout)  # pyright: ignore[reportArgumentType]
        finally:
            if not self.query.isActive:
                self._watching.wake()
                self._ended.wait()

    def _turn(self) -> float:
        try:
            if self.query.isActive:
                return LOOK_EVERY
            over = not self._asked and self.query.exception() is None
        except Exception:  # noqa: BLE001  Spark itself is gone, and whatever it says of that differs
            over = False
        try:
            if over:
                with suppress(TimeoutError):
                    self.bus.wait_idle(self._drain)
        finally:
            self._watching.stop()
            self.bus.shutdown()
            self._ended.set()
        return 0.0


# ── on the executors ─────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Attempt:
    """The first attempt at each event of a partition: yields the failures, and nothing of what worked."""

    handler: Handler
    policy: RetryPolicy

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Go through a partition."""
        worker_id = f"{socket.gethostname()}:{os.getpid()}"
        caller = _Caller(self.handler)
        try:
            for batch in batches:
                found = (self._try(caller, row, worker_id) for row in batch.to_pylist())
                if failed := [each for each in found if each is not None]:
                    yield pa.RecordBatch.from_pylist(failed, FAILURES)
        finally:
            caller.close()

    def _try(self, caller: "_Caller", row: Mapping[str, Any], worker_id: str) -> dict[str, Any] | None:
        began = time.perf_counter()
        error = caller.call(row)
        if error is None:
            return None
        event = _event({**row, "payload": "null"})
        lease = Lease(event.id, self.handler.subscription, 0)
        told = describe(error, Delivery(event, lease, 1, self.policy, worker_id, event.created_at), self.handler.name)
        return {
            "id": event.id,
            "dead": isinstance(error, Discard),
            "delay": error.delay.total_seconds() if isinstance(error, RetryLater) else None,
            "type": told.type,
            "message": told.message,
            "traceback": told.traceback,
            "handler": told.handler,
            "worker": worker_id,
            "ms": (time.perf_counter() - began) * 1000,
        }


class _Caller:
    """Calls a handler's function, and returns what it raised; one that hangs past its time is left behind."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._runner = asyncio.Runner() if handler.is_async else None
        self._asked: queue.SimpleQueue[Event | None] | None = None
        self._told: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def call(self, row: Mapping[str, Any]) -> BaseException | None:
        """Have the row handled."""
        try:
            event = _event(row)
        except (TypeError, ValueError) as error:
            return error
        if self._runner is not None:
            return self._await(self._runner, event)
        return self._call(event) if self._handler.timeout is None else self._call_in_time(event, self._handler.timeout)

    def close(self) -> None:
        """Let go of thread and loop."""
        if self._asked is not None:
            self._asked.put(None)
        if self._runner is not None:
            self._runner.close()

    def _call(self, event: Event) -> BaseException | None:
        try:
            self._handler.function(event)
        except BaseException as error:  # noqa: BLE001  even SystemExit is only a failed attempt: the stream goes on
            return _from_function(error)
        return None

    def _await(self, runner: asyncio.Runner, event: Event) -> BaseException | None:
        async def call() -> None:
            async with asyncio.timeout(self._handler.timeout):
                await self._handler.function(event)

        try:
            runner.run(call())
        except TimeoutError as error:
            return error if error.args else overdue(self._handler)
        except BaseException as error:  # noqa: BLE001  as above
            return error
        return None

    def _call_in_time(self, event: Event, timeout: float) -> BaseException | None:
        """Call in a thread that serves this partition, as long as it comes back in time."""
        if self._asked is None:
            self._asked, self._told = queue.SimpleQueue(), queue.SimpleQueue()
            threading.Thread(target=self._serve, args=(self._asked, self._told), daemon=True).start()
        self._asked.put(event)
        try:
            return self._told.get(timeout=timeout)
        except queue.Empty:
            self._asked.put(None)
            self._asked = None
            return overdue(self._handler)

    def _serve(self, asked: "queue.SimpleQueue[Event | None]", told: "queue.SimpleQueue[BaseException | None]") -> None:
        while (event := asked.get()) is not None:
            told.put(self._call(event))


def _from_function(error: BaseException) -> BaseException:
    """Have a traceback begin in the function, not in the frame that called it."""
    frames = error.__traceback__
    return error.with_traceback(frames.tb_next) if frames is not None and frames.tb_next is not None else error


def _event(row: Mapping[str, Any]) -> Event:
    """Return a row as the event that a worker would see."""
    created_at = row.get("created_at")
    return Event(
        id=row["id"],
        uid=row.get("uid") or "",
        type=row["type"],
        payload=decode(row["payload"]),
        tags=tuple(row.get("tags") or ()),
        key=row.get("key"),
        title=row.get("title"),
        description=row.get("description"),
        metadata=dict(row.get("metadata") or ()),
        created_at=NEVER if created_at is None else created_at.astimezone(UTC),
        priority=row.get("priority") or 0,
        max_retries=row.get("max_retries"),
        status=Status.PROCESSING,
    )


# ── on the driver ────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Diversion:
    """Hands failures over to the bus. Opens it anew: Spark may call this in another process (Connect)."""

    url: str = field(repr=False)
    consumer: str
    policy: RetryPolicy

    def run(self, rows: Iterator[Any], number: int) -> None:
        """Take over what failed in a batch; done again, it changes nothing."""
        chance, failed, taken = random.Random(), 0, 0  # noqa: S311  jitter needs no secrecy
        probe("diverting")
        with closing(log_of(open_store(self.url, auto_migrate=False), "a Spark stream")) as store:
            while chunk := [self._failure(row, chance) for row in islice(rows, CHUNK)]:
                failed += len(chunk)
                taken += store.divert(self.consumer, chunk, self.policy, f"{socket.gethostname()}:{os.getpid()}")
        probe("diverted")
        tell(logging.WARNING, "attempts_failed", subscription=self.consumer, batch=number, failed=failed, taken=taken)

    def _failure(self, row: Any, chance: random.Random) -> Failure:
        error = AttemptError(row.type, row.message, 1, row.worker, traceback=row.traceback, handler=row.handler)
        after = self.policy.delay(2, chance) if row.delay is None else timedelta(seconds=row.delay)
        return Failure(row.id, Dead(error) if row.dead else Retry(after, error), row.ms)
