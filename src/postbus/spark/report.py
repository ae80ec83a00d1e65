"""What the bus did over a time: the transforms of `facts` run in six queries, as plain values for `rendering`."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from itertools import accumulate, pairwise
from typing import Any, Final, NamedTuple, cast

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as fn

from postbus.clock import from_micros, to_micros
from postbus.errors import InvalidRequest
from postbus.spark import facts

__all__ = [
    "Bucket",
    "Fault",
    "Figures",
    "Percentiles",
    "Report",
    "StaleWorker",
    "Standing",
    "make",
]

MINUTE: Final = timedelta(minutes=1)
HOUR: Final = timedelta(hours=1)
SIZES: Final = (MINUTE, 5 * MINUTE, 15 * MINUTE, HOUR, 6 * HOUR, 24 * HOUR)
MOST_BUCKETS: Final = 100
MOST_FAULTS: Final = 50
DAYS: Final = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
MICROSECOND: Final = timedelta(microseconds=1)
MILLISECOND: Final = timedelta(milliseconds=1)
ALL: Final = "all"
AUDIT: Final = (
    "id", "event_id", "subscription", "action", "created_at", "status", "attempt", "epoch", "worker_id", "error_type",
    "error_message", "execution_time_ms", "type", "tags", "priority", "event_created_at", "ready_at", "claimed_at",
)  # fmt: skip


# ── what a report holds ──────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Half of the values, 95 % and 99 % of them are at most this."""

    p50: float
    p95: float
    p99: float


@dataclass(frozen=True, slots=True)
class Figures:
    """Attempts counted by how they went. `wait_ms` is from ready to claimed, `run_ms` what the handler took."""

    name: str
    attempts: int = 0
    ended: int = 0
    completed: int = 0
    with_errors: int = 0
    failed: int = 0
    retries: int = 0
    expired: int = 0
    dead: int = 0
    wait_ms: Percentiles | None = None
    run_ms: Percentiles | None = None


@dataclass(frozen=True, slots=True)
class Bucket:
    """A stretch of time. `depth` is how many deliveries were unfinished at its end, `deepest` the most in it."""

    start: datetime
    published: int
    depth: int
    deepest: int
    revived: int
    purged: int
    figures: Figures


@dataclass(frozen=True, slots=True)
class Standing:
    """How a subscription stands now. `oldest` is since when the longest waiting delivery could have been claimed."""

    name: str
    pending: int
    processing: int
    dead: int
    oldest: datetime | None


@dataclass(frozen=True, slots=True)
class Fault:
    """A kind of error: messages that differ only in ids, numbers and the like."""

    error_type: str | None
    fingerprint: str | None
    count: int
    first_seen: datetime
    last_seen: datetime
    sample: str | None
    event_ids: tuple[int, ...]
    types: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StaleWorker:
    """A worker that left work without a word. `lost`: it has given no sign of life for as long either."""

    worker: str
    silent: int
    expired: int
    stuck: int
    claimed_at: datetime
    seen_at: datetime
    event_ids: tuple[int, ...]
    lost: bool


@dataclass(frozen=True, slots=True)
class Report:
    """What the bus did from `since` until just before `until`; `standing` and `stale_workers` are as of `now`."""

    since: datetime
    until: datetime
    now: datetime
    bucket_ms: int
    published: int
    total: Figures
    timeline: tuple[Bucket, ...]
    subscriptions: tuple[Figures, ...]
    standing: tuple[Standing, ...]
    types: tuple[Figures, ...]
    tags: tuple[Figures, ...]
    workers: tuple[Figures, ...]
    slowest: tuple[Figures, ...]
    faults: tuple[Fault, ...]
    stale_workers: tuple[StaleWorker, ...]
    hours: Mapping[str, int]
    """Events published by hour of the week, such as `Mon 09`."""


# ── making it ────────────────────────────────────────────────────────────────────────────────────────────────────


def make(
    audit: DataFrame,
    events: DataFrame,
    open: DataFrame,  # noqa: A002  the word for what is not finished
    *,
    now: datetime,
    since: datetime | None = None,
    until: datetime | None = None,
    silent_after: timedelta = 5 * MINUTE,
    stuck_after: timedelta = 5 * MINUTE,
) -> Report:
    """Return what happened in [since, until): by default all there is, until now. Raises InvalidRequest.

    The frames must hold at least what was written from `since` until now; failures of events published before what
    `events` holds are told without their type. `open` is read first: what ends meanwhile shows its end in the log.
    """
    until = until or now
    if since is not None and since >= until:
        raise InvalidRequest(f"a report needs a time to look at, and {since} is not before {until}")
    with ExitStack() as stack:
        live = _kept(stack, open)
        standing = _standing(live, now)
        rows = audit.select(*AUDIT)
        ended = rows.where(fn.col("status") == "FAILED")
        if since is not None:
            rows = rows.where(fn.col("created_at") >= facts.at(since))
            ended = ended.where(fn.col("created_at") < facts.at(since))
        known = _kept(stack, events.select("id", "type", "tags", "priority", "created_at"))
        log = _kept(stack, facts.described(rows, known))
        period = _Period.of(since or min(_beginning(log, known) or until - HOUR, until - MINUTE), until)
        attempts = _kept(stack, facts.attempts(log).where(period.holds("finished_at")))
        figures = _figures(attempts, period.size)
        # A dead letter that was discarded since was unfinished until it died, and not until then.
        counted = _counted(log if since is None else log.unionByName(ended), known, live, period)
        stale = facts.stale_workers(log, live, now=now, silent_after=silent_after, stuck_after=stuck_after)
        faults = facts.fingerprints(attempts).orderBy(fn.desc("count"), fn.desc("last_seen")).limit(MOST_FAULTS)
        types = _worst_first(figures["type"])
        return Report(
            since=period.since,
            until=period.until,
            now=now,
            bucket_ms=period.size // MILLISECOND,
            published=sum(counted["published"].values()),
            total=figures["total"].get(ALL, Figures(ALL)),
            timeline=_timeline(period, figures["bucket"], counted),
            subscriptions=_worst_first(figures["subscription"]),
            standing=standing,
            types=types,
            tags=_worst_first(figures["tag"]),
            workers=_worst_first(figures["worker"]),
            slowest=tuple(sorted((each for each in types if each.run_ms), key=_slowness, reverse=True)),
            faults=tuple(Fault(**row) for row in _collect(faults)),
            stale_workers=tuple(
                StaleWorker(**row, lost=row["seen_at"] <= now - silent_after)
                for row in _collect(stale.orderBy("claimed_at"))
            ),
            hours=_hours(counted["published"]),
        )


class _Period(NamedTuple):
    """The time a report covers, cut into buckets aligned in UTC."""

    since: datetime
    until: datetime
    size: timedelta

    @classmethod
    def of(cls, since: datetime, until: datetime) -> "_Period":
        """Choose the smallest buckets that still make a chart."""
        size = next((size for size in SIZES if (until - since) / size <= MOST_BUCKETS), SIZES[-1])
        return cls(since, until, size)

    def holds(self, column: str) -> Column:
        """Say whether a moment lies within."""
        return (fn.col(column) >= facts.at(self.since)) & (fn.col(column) < facts.at(self.until))

    def buckets(self) -> range:
        """Return where each bucket begins, in microseconds."""
        step = self.size // MICROSECOND
        return range(to_micros(self.since) // step * step, to_micros(self.until), step)


def _kept(stack: ExitStack, frame: DataFrame) -> DataFrame:
    """Keep a frame, once computed, until the report is made."""
    kept = frame.persist()
    stack.callback(kept.unpersist)
    return kept


def _collect(frame: DataFrame) -> list[dict[str, Any]]:
    """Return the rows, moments in UTC: Spark itself would hand them out in whatever zone this process is in."""
    moments = {name for name, kind in frame.dtypes if kind == "timestamp"}
    told = frame.select(*(fn.unix_micros(name).alias(name) if name in moments else name for name in frame.columns))
    return [{name: _plain(row[name], moment=name in moments) for name in told.columns} for row in told.collect()]


def _plain(value: Any, *, moment: bool) -> Any:
    if moment and value is not None:
        return from_micros(value)
    return tuple(cast("list[Any]", value)) if isinstance(value, list) else value


def _floor(micros: Column, size: timedelta) -> Column:
    return micros - fn.pmod(micros, fn.lit(size // MICROSECOND))


def _beginning(log: DataFrame, events: DataFrame) -> datetime | None:
    moments = log.select("created_at").unionByName(events.select("created_at"))
    return _collect(moments.agg(fn.min("created_at").alias("first")))[0]["first"]


def _standing(live: DataFrame, now: datetime) -> tuple[Standing, ...]:
    status, due = fn.col("status"), fn.col("due_at") <= facts.at(now)
    rows = live.groupBy("subscription").agg(
        fn.count_if(status == "PENDING").alias("pending"),
        fn.count_if(status == "PROCESSING").alias("processing"),
        fn.count_if(status == "FAILED").alias("dead"),
        fn.min(fn.when((status == "PENDING") & due, fn.col("ready_at"))).alias("oldest"),
    )
    return tuple(Standing(*row.values()) for row in _collect(rows.orderBy("subscription")))


def _as(kind: str, name: Column) -> Column:
    return fn.struct(fn.lit(kind).alias("kind"), name.cast("string").alias("name"))


def _figures(attempts: DataFrame, size: timedelta) -> dict[str, dict[str, Figures]]:
    """Return figures by kind and name, in one query: an attempt counts once for each thing it belongs to."""
    bucket = _floor(fn.unix_micros("finished_at"), size)
    single = [_as("total", fn.lit(ALL)), _as("bucket", bucket)]
    single += [_as(name, fn.col(name)) for name in ("subscription", "type", "worker")]
    tags = fn.transform(fn.coalesce("tags", fn.array()), lambda tag: _as("tag", tag))
    each = attempts.withColumn("of", fn.explode(fn.concat(fn.array(*single), tags)))
    sketched = (facts.percentiles(name).alias(name) for name in ("wait", "run"))
    told = facts.measures(each, "of").select("of.*", *facts.COUNTS, *sketched)
    found: defaultdict[str, dict[str, Figures]] = defaultdict(dict)
    for row in _collect(told):
        kind, name, wait, run = row.pop("kind"), row.pop("name"), row.pop("wait"), row.pop("run")
        name = "(unknown)" if name is None else name
        waited = wait and Percentiles(*(1_000 * each for each in wait))
        found[kind][name] = Figures(name, **row, wait_ms=waited, run_ms=run and Percentiles(*run))
    return found


def _counted(log: DataFrame, events: DataFrame, live: DataFrame, period: _Period) -> dict[str, Counter[int]]:
    """Return, in one query, what is counted by time: published, RETRIED, PURGED, and how the depth rose and fell."""

    def one(kind: Column, place: Column) -> tuple[Column, ...]:
        return kind.alias("kind"), place.alias("place"), fn.lit(1).cast("long").alias("number")

    when = fn.unix_micros("created_at")
    verbs = log.where(fn.col("action").isin("RETRIED", "PURGED") & period.holds("created_at"))
    published = events.where(period.holds("created_at"))
    rows = (
        published.select(*one(fn.lit("published"), _floor(when, min(period.size, HOUR))))
        .union(verbs.select(*one(fn.col("action"), _floor(when, period.size))))
        .unionByName(_rises(facts.stays(log, live), period).unpivot("place", ["change", "highest"], "kind", "number"))
    )
    found: defaultdict[str, Counter[int]] = defaultdict(Counter)
    for row in _collect(rows.groupBy("kind", "place").agg(fn.sum("number").alias("number"))):
        found[row["kind"]][row["place"]] = row["number"]
    return found


def _rises(stays: DataFrame, period: _Period) -> DataFrame:
    """Return for each bucket by how much the depth had changed at its end, and how far it rose in it at most."""
    first, since = fn.lit(period.buckets()[0]), fn.lit(to_micros(period.since))

    def step(column: str, number: int) -> Column:
        # What was before the period is as if it came at its beginning.
        moment = fn.greatest(fn.unix_micros(column), since)
        step = fn.struct(moment.alias("moment"), fn.lit(number).alias("number"))
        return fn.when(fn.col(column) <= facts.at(period.until), step)

    steps = stays.select(fn.inline(fn.array_compact(fn.array(step("since", 1), step("until", -1)))))
    # What happens at the very moment at which a bucket ends still belongs to it.
    place = fn.greatest(_floor(fn.col("moment") - 1, period.size), first)
    at_once = steps.groupBy("moment").agg(fn.sum("number").alias("number")).withColumn("place", place)
    risen = fn.sum("number").over(Window.partitionBy("place").orderBy("moment"))
    changes = at_once.withColumn("risen", risen).groupBy("place")
    return changes.agg(fn.sum("number").alias("change"), fn.greatest(fn.max("risen"), fn.lit(0)).alias("highest"))


def _timeline(
    period: _Period, figures: Mapping[str, Figures], counted: Mapping[str, Counter[int]]
) -> tuple[Bucket, ...]:
    starts = period.buckets()
    published: Counter[int] = Counter()
    for place, number in counted["published"].items():
        published[place - place % starts.step] += number
    depths = pairwise(accumulate((counted["change"][start] for start in starts), initial=0))
    return tuple(
        Bucket(
            from_micros(start),
            published[start],
            after,
            before + counted["highest"][start],
            counted["RETRIED"][start],
            counted["PURGED"][start],
            replace(figures.get(str(start), Figures("")), name=from_micros(start).isoformat().replace("+00:00", "Z")),
        )
        for start, (before, after) in zip(starts, depths, strict=True)
    )


def _hours(published: Mapping[int, int]) -> dict[str, int]:
    found: Counter[tuple[int, int]] = Counter()
    for place, number in published.items():
        when = from_micros(place)
        found[when.weekday(), when.hour] += number
    return {f"{DAYS[day]} {hour:02d}": found[day, hour] for day, hour in sorted(found)}


def _worst_first(found: Mapping[str, Figures]) -> tuple[Figures, ...]:
    return tuple(sorted(found.values(), key=lambda each: (-each.dead, -each.failed, -each.attempts, each.name)))


def _slowness(each: Figures) -> float:
    return each.run_ms.p95 if each.run_ms else 0
