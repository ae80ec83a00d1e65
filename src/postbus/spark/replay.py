"""Replay: the lake and the live table as one range, back into a bus, a subscription, files, or a function."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from time import monotonic, sleep
from typing import Any, Final

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812  as everybody who writes Spark calls it

from postbus.clock import from_micros
from postbus.errors import InvalidRequest
from postbus.model import Event, Span, Stream
from postbus.pattern import Interest, check_pattern
from postbus.payload import Draft, decode, draft
from postbus.spark.lake import COLUMNS, Lake
from postbus.store import Log, Queue

__all__ = [
    "Wanted",
    "history",
    "preview",
    "reach",
    "replay_events",
    "replay_into_bus",
    "replay_into_subscription",
    "union",
]

BATCH: Final = 1_000
LONG_UID: Final = 128


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which events: by ids or by moments, the first inclusive and the last too; by types and tags. None is no bound."""

    first: int | datetime | None = None
    last: int | datetime | None = None
    types: tuple[str, ...] = ("*",)
    tags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raise InvalidRequest for a pattern that is none."""
        for each in self.types:
            check_pattern(each)

    @property
    def first_id(self) -> int:
        """The first id that may be meant."""
        return self.first if isinstance(self.first, int) else 1


def history(spark: SparkSession, url: str, store: Queue, lake: Lake | None, wanted: Wanted) -> DataFrame:
    """Return events of a range, whether the live table has them still, or the lake alone: each once.

    Raises InvalidRequest where part of the range was pruned, and no lake given that holds it.
    """
    live = union(spark, url, store, lake, Stream.EVENTS, first=wanted.first_id)
    return live.filter(_condition(live, wanted))


def union(
    spark: SparkSession, url: str, store: Queue, lake: Lake | None, stream: Stream, *, first: int = 1
) -> DataFrame:
    """Return a stream from an id on as one table: what the lake holds from there, the rest from the live one."""
    span, archived = reach(store, lake, stream, first=first)
    columns = COLUMNS[stream]
    begin = str(max(archived, span.pruned))
    options = {"url": url, "stream": stream.value, "startingOffsets": begin, "endingOffsets": str(span.head)}
    live = spark.read.format("postbus").options(**options).load().select(*columns)
    if lake is not None and archived:
        # An ingest beside this may have brought more into the lake since: that is read live.
        seen = lake.read(spark, stream).filter(F.col("id") <= archived)
        live = seen.select(*columns).unionByName(live)
    return live


def reach(store: Queue, lake: Lake | None, stream: Stream, *, first: int = 1) -> tuple[Span, int]:
    """Return what of a stream is live, and how far the lake goes. Needs no Spark.

    Raises InvalidRequest where they are of different logs, or leave a hole from an id on.
    """
    span = store.span(stream)
    entries = lake.manifests[stream].entries() if lake is not None else []
    if entries and entries[-1].log_id != span.log_id:
        raise InvalidRequest("this lake holds the events of another log than this bus")
    return span, _archived(first, [(each.after, each.through) for each in entries], span.pruned)


def _archived(first: int, segments: list[tuple[int, int]], pruned: int) -> int:
    """Return how far the lake goes; raise InvalidRequest where lake and live table leave a hole."""
    if not segments:
        if first <= pruned:
            raise InvalidRequest(f"events up to {pruned:,} were pruned: name the lake that holds them")
        return 0
    if segments[-1][1] < pruned:
        raise InvalidRequest(
            f"events up to {pruned:,} were pruned, and this lake ends at {segments[-1][1]:,}: they are in another"
        )
    if 1 < first <= min(segments[0][0], pruned):
        raise InvalidRequest(f"this lake begins behind {segments[0][0]:,}: earlier events are in another one")
    return segments[-1][1]


def _condition(frame: DataFrame, wanted: Wanted) -> Any:
    """Return the filter; types and tags are decided by the bus's own rule, each different pair once."""
    found = F.lit(True)  # noqa: FBT003  a literal
    for bound, compare in ((wanted.first, "__ge__"), (wanted.last, "__le__")):
        if bound is not None:
            column = F.col("id") if isinstance(bound, int) else F.col("created_at")
            found &= getattr(column, compare)(F.lit(bound))
    if wanted.types != ("*",) or wanted.tags:
        interests = [Interest(each, frozenset(wanted.tags)) for each in wanted.types]
        way = F.concat_ws("\n", F.col("type"), F.concat_ws(",", F.col("tags")))
        pairs = [
            (row[0], row[1], row[2]) for row in frame.filter(found).select(way, "type", "tags").distinct().collect()
        ]
        kept = [one for one, kind, tags in pairs if any(each.wants(kind, tuple(tags)) for each in interests)]
        found &= way.isin(kept)
    return found


def preview(frame: DataFrame) -> list[dict[str, Any]]:
    """Return what would be replayed: for each type how many, the first and last id, and when they were published."""
    told = frame.groupBy("type").agg(
        F.count(F.lit(1)).alias("events"),
        F.min("id").alias("first_id"),
        F.max("id").alias("last_id"),
        F.unix_micros(F.min("created_at")).alias("first_at"),
        F.unix_micros(F.max("created_at")).alias("last_at"),
    )
    found = [row.asDict() for row in told.orderBy("type").collect()]
    return [{**row, "first_at": from_micros(row["first_at"]), "last_at": from_micros(row["last_at"])} for row in found]


def replay_events(frame: DataFrame) -> Iterator[Event]:
    """Go through the events in their order, as they were published: for a handler of your own."""
    for row in _rows(frame):
        yield Event(
            id=row.id,
            uid=row.uid,
            type=row.type,
            payload=decode(row.payload),
            tags=tuple(row.tags),
            key=row.key,
            title=row.title,
            description=row.description,
            metadata=row.metadata,
            created_at=from_micros(row.created_at),
            priority=row.priority,
            max_retries=row.max_retries,
            status=None,
        )


def _rows(frame: DataFrame) -> Iterator[Row]:
    """Go through the rows in order, moments as microseconds: Python's would depend on this machine's time zone."""
    exact = frame.withColumn("created_at", F.unix_micros("created_at")).orderBy("id")
    return iter(exact.toLocalIterator(prefetchPartitions=True))


def replay_into_bus(
    frame: DataFrame,
    store: Queue,
    name: str,
    *,
    keep_uids: bool = False,
    rate: float | None = None,
    watch: Callable[[int], None] | None = None,
) -> int:
    """Publish the events again, in their order, at most `rate` a second; return how many.

    A replay has a name, and each event a uid made of it and its first one: run again under the same name within seven
    days, it goes on without copies. With `keep_uids`, for a bus that is empty, they keep their own. Metadata tells
    where each came from: `replay_of` (uid) and `replay_created_at`.
    """
    rows = _rows(frame)
    began, count = monotonic(), 0
    while batch := [_draft(row, name, keep_uids=keep_uids) for row in islice(rows, BATCH)]:
        count += len(store.publish(batch))
        if watch is not None:
            watch(count)
        if rate is not None:
            sleep(max(0.0, began + count / rate - monotonic()))
    return count


def _draft(row: Row, name: str, *, keep_uids: bool) -> Draft:
    came = {} if keep_uids else {"replay_of": row.uid, "replay_created_at": from_micros(row.created_at).isoformat()}
    return draft(
        {
            "type": row.type,
            "payload": decode(row.payload),
            "tags": row.tags,
            "key": row.key,
            "title": row.title,
            "description": row.description,
            "metadata": row.metadata | came,
            "priority": row.priority,
            "max_retries": row.max_retries,
            "uid": row.uid if keep_uids else f"replay:{name}:{_short(row.uid)}",
        }
    )


def _short(uid: str) -> str:
    """Return a uid, or what stands for it where it would be too long to have anything before it."""
    return uid if len(uid) <= LONG_UID else hashlib.sha256(uid.encode()).hexdigest()


def replay_into_subscription(
    frame: DataFrame, store: Log, subscription: str, actor: str, watch: Callable[[int], None] | None = None
) -> int:
    """Have a queue subscription get events of its own bus again, those that it is not at work on; return how many.

    Raises InvalidRequest, before any is delivered, if some were pruned: those can only be published anew.
    """
    ids = [row[0] for row in frame.select("id").orderBy("id").collect()]
    count = 0
    for start in range(0, len(ids), BATCH):
        count += store.redeliver(subscription, ids[start : start + BATCH], actor)
        if watch is not None:
            watch(start + BATCH)
    return count
