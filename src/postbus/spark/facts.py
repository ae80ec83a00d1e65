"""What the audit log tells, as tables: pure transforms from DataFrame to DataFrame, nothing is read or written here.

```
audit ──facts──────▶ one row an ended delivery        stateless: batch, stream and pipeline alike
  │                     └─current──▶ its latest end
  └─described──▶ log ──attempts──▶ one row an attempt ──measures──▶ figures by any columns ──merged──▶ by fewer
    (+ events)    │                   │                 (windows: by time, subscription, type)
                  │                   └─fingerprints──▶ errors that are one and the same
                  ├─stays (+ open)──▶ since when until when each delivery was unfinished
                  └─stale_workers (+ open)
```

An *end* is a row of the audit log whose action is also how the delivery stands after it: COMPLETED,
COMPLETED_WITH_ERRORS, or FAILED for good. It tells the whole story of its delivery, so facts need no join. A dead
letter that was retried has several ends: all are facts, the latest is `current`.
"""

from datetime import datetime, timedelta
from typing import Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as fn

from postbus.clock import to_micros
from postbus.fingerprint import FOLDS, LONGEST_MESSAGE

__all__ = [
    "COUNTS",
    "at",
    "attempts",
    "current",
    "described",
    "facts",
    "fingerprint",
    "fingerprints",
    "measures",
    "merged",
    "percentiles",
    "stale_workers",
    "stays",
    "windows",
]

COUNTS: Final = ("attempts", "ended", "completed", "with_errors", "failed", "retries", "expired", "dead")
COMPLETED: Final = ("COMPLETED", "COMPLETED_WITH_ERRORS")
RANKS: Final = (0.5, 0.95, 0.99)
SKETCH: Final = 800
"""The size of a KLL sketch: exact up to about as many values, then within 0.4 % of the rank, whatever is merged."""
SAMPLES: Final = 5
LAST: Final = (1 << 63) - 1


def at(moment: datetime) -> Column:
    """Return a moment as a column, whatever the time zones of session and process are."""
    return fn.timestamp_micros(fn.lit(to_micros(moment)))


# ── one row an ended delivery ────────────────────────────────────────────────────────────────────────────────────


def facts(audit: DataFrame) -> DataFrame:
    """Return one row an ended delivery: who, what, when, how long, how it went."""
    return _told(audit.where(_is_end()))


def current(ends: DataFrame) -> DataFrame:
    """Return of each delivery only the end that stands: the latest one."""
    latest = Window.partitionBy("event_id", "subscription").orderBy(fn.desc("id"))
    return ends.withColumn("_place", fn.row_number().over(latest)).where("_place = 1").drop("_place")


def _is_end() -> Column:
    return fn.col("action") == fn.col("status")


def _told(rows: DataFrame) -> DataFrame:
    """Return what audit rows that end an attempt tell, under the names of the facts."""
    retried = fn.when(fn.col("action") == "FAILED", "RETRY").otherwise(fn.col("action"))
    # A late report after an expiry: `ready_at` has moved on to the next attempt, and tells nothing of this one.
    waited = fn.when(fn.col("ready_at") <= fn.col("claimed_at"), _seconds("ready_at", "claimed_at"))
    return rows.select(
        "id",
        "event_id",
        "subscription",
        "type",
        "tags",
        "priority",
        fn.when(_is_end(), fn.col("status")).otherwise(retried).alias("outcome"),
        fn.col("attempt").alias("attempts"),
        fn.col("worker_id").alias("worker"),
        fn.col("event_created_at").alias("created_at"),
        "ready_at",
        "claimed_at",
        fn.col("created_at").alias("finished_at"),
        waited.alias("wait_seconds"),
        fn.col("execution_time_ms").alias("run_ms"),
        fn.when(_is_end(), _seconds("event_created_at", "created_at")).alias("total_seconds"),
        "error_type",
        "error_message",
        fingerprint(fn.col("error_message"), fn.col("worker_id")).alias("fingerprint"),
    )


def _seconds(start: str, end: str) -> Column:
    return (fn.unix_micros(fn.col(end)) - fn.unix_micros(fn.col(start))) / 1e6


# ── one row an attempt, and figures over them ────────────────────────────────────────────────────────────────────


def described(audit: DataFrame, events: DataFrame) -> DataFrame:
    """Return the audit log with type, tags and publishing time also where a row itself does not tell them.

    Rows that end a delivery tell; those of failed attempts on the way look their event up. NULL where it is not among
    `events`.
    """
    looked_up = {"type": "type", "tags": "tags", "priority": "priority", "event_created_at": "created_at"}
    known = events.select(fn.col("id").alias("event_id"), *(fn.col(a).alias(f"_{b}") for b, a in looked_up.items()))
    mute = fn.col("type").isNull() & fn.col("action").isin("FAILED", "EXPIRED", "DISCARDED")
    found = audit.where(mute).drop(*looked_up).join(known, "event_id", "left")
    return audit.where(~mute).unionByName(found.withColumnsRenamed({f"_{name}": name for name in looked_up}))


def attempts(log: DataFrame) -> DataFrame:
    """Return one row an attempt, of a log that is `described`: facts' columns, and two outcomes more.

    RETRY: it failed and was to be tried again. EXPIRED: nobody reported, and it was to be tried again. The latest word
    on an attempt holds: a worker thought lost may still have completed it.
    """
    said = log.where(fn.col("action").isin(*COMPLETED, "FAILED", "EXPIRED"))
    latest = Window.partitionBy("event_id", fn.coalesce("epoch", -fn.col("id"))).orderBy(fn.desc("id"))
    return _told(said.withColumn("_place", fn.row_number().over(latest)).where("_place = 1"))


def measures(of_attempts: DataFrame, *by: str) -> DataFrame:
    """Return COUNTS, and the KLL sketches `wait` (seconds) and `run` (milliseconds), for each value of columns `by`.

    `failed` counts failed attempts: those tried again (`retries`) and those that made a dead letter (`dead`); `expired`
    counts those of them whose worker never reported.
    """
    outcome = fn.col("outcome")
    worked = outcome.isin(*COMPLETED)
    counted = {
        "ended": worked | (outcome == "FAILED"),
        "completed": worked,
        "with_errors": outcome == "COMPLETED_WITH_ERRORS",
        "failed": ~worked,
        "retries": outcome.isin("RETRY", "EXPIRED"),
        "expired": ~worked & fn.col("error_type").eqNullSafe("LeaseExpired"),
        "dead": outcome == "FAILED",
    }
    return of_attempts.groupBy(*by).agg(
        fn.count("*").alias("attempts"),
        *(fn.count_if(condition).alias(name) for name, condition in counted.items()),
        fn.kll_sketch_agg_double("wait_seconds", SKETCH).alias("wait"),
        fn.kll_sketch_agg_double("run_ms", SKETCH).alias("run"),
    )


def windows(of_attempts: DataFrame, size: timedelta) -> DataFrame:
    """Return `measures` for each (bucket, subscription, type); buckets are aligned in UTC."""
    bucket = fn.window("finished_at", f"{size // timedelta(seconds=1)} seconds").getField("start")
    return measures(of_attempts.withColumn("bucket", bucket), "bucket", "subscription", "type")


def merged(measured: DataFrame, *by: str) -> DataFrame:
    """Return measures of parts as measures of the whole: counts add up, sketches merge."""
    return measured.groupBy(*by).agg(
        *(fn.sum(name).alias(name) for name in COUNTS),
        fn.kll_merge_agg_double("wait", SKETCH).alias("wait"),
        fn.kll_merge_agg_double("run", SKETCH).alias("run"),
    )


def percentiles(sketch: str) -> Column:
    """Return the 50th, 95th and 99th percentile in a sketch as an array; NULL if it is empty."""
    ranks = fn.array(*map(fn.lit, RANKS))
    return fn.when(fn.kll_sketch_get_n_double(sketch) > 0, fn.kll_sketch_get_quantile_double(sketch, ranks))


# ── errors ───────────────────────────────────────────────────────────────────────────────────────────────────────


def fingerprint(message: Column, worker: Column | None = None) -> Column:
    """Return what messages of the same error have in common: ids, numbers, quoted text, paths and the like folded."""
    text = fn.left(message, fn.lit(LONGEST_MESSAGE))
    if worker is not None:
        text = fn.when(fn.length(worker) > 0, fn.replace(text, worker, fn.lit("<worker>"))).otherwise(text)
    for pattern, folded in FOLDS:
        text = fn.regexp_replace(text, pattern, folded)
    return fn.trim(text)


def fingerprints(of_attempts: DataFrame) -> DataFrame:
    """Return one row a kind of error: how often, first and last seen, the latest message and events that met it."""
    return (
        of_attempts.where(fn.col("error_type").isNotNull() | fn.col("error_message").isNotNull())
        .groupBy("error_type", "fingerprint")
        .agg(
            fn.count("*").alias("count"),
            fn.min("finished_at").alias("first_seen"),
            fn.max("finished_at").alias("last_seen"),
            fn.max_by(fn.left("error_message", fn.lit(LONGEST_MESSAGE)), "id").alias("sample"),
            _samples(fn.col("event_id")).alias("event_ids"),
            fn.array_sort(fn.collect_set("type")).alias("types"),
        )
    )


def _samples(event_id: Column) -> Column:
    """Return a few events, the latest first; one that is met again and again only once."""
    return fn.slice(fn.array_distinct(fn.max_by(event_id, event_id, 4 * SAMPLES)), 1, SAMPLES)


# ── what is unfinished, and who left it so ───────────────────────────────────────────────────────────────────────


def stays(log: DataFrame, unfinished: DataFrame) -> DataFrame:
    """Return one row a stay in a queue: (subscription, since, until); until is NULL for what is still there.

    A delivery stays from its publishing, or its revival, until its end. `log` is `described`; `unfinished` are the live
    deliveries, looked up before the log was: one that also has its end in the log has ended since.
    """
    happened = log.where(_is_end() | fn.col("action").isin("RETRIED", "DISCARDED"))
    still = unfinished.where(fn.col("status") != "FAILED").select(
        "event_id",
        "subscription",
        fn.lit(LAST).alias("id"),
        fn.lit("OPEN").alias("action"),
        fn.lit(None).cast("timestamp").alias("created_at"),
        fn.col("created_at").alias("event_created_at"),
    )
    rows = happened.select(*still.columns).unionByName(still)
    order = Window.partitionBy("event_id", "subscription").orderBy("id")
    before, since = fn.lag("action").over(order), fn.lag("created_at").over(order)
    told = rows.select("*", before.alias("_before"), fn.coalesce(since, "event_created_at").alias("since"))
    ended_before = fn.col("_before").isin(*COMPLETED, "FAILED")
    nothing = (fn.col("action") == "RETRIED") | (fn.col("action").isin("OPEN", "DISCARDED") & ended_before)
    stayed = told.where(fn.col("since").isNotNull() & ~fn.coalesce(nothing, fn.lit(col=False)))
    return stayed.select("subscription", "since", fn.col("created_at").alias("until"))


def stale_workers(
    log: DataFrame, unfinished: DataFrame, *, now: datetime, silent_after: timedelta, stuck_after: timedelta
) -> DataFrame:
    """Return the workers that left work without a word: a row each, with what they hold or have held.

    `silent`: claims never reported on, that have expired, or were made more than `silent_after` ago. `stuck`:
    deliveries PROCESSING for longer than `stuck_after`. `seen_at` is the last sign of life: a row, or a lease extended.
    """
    action, lost = fn.col("action"), fn.col("error_type").eqNullSafe("LeaseExpired")
    reported = (action.isin(*COMPLETED, "RELEASED", "DISCARDED") | (action == "FAILED")) & ~lost
    word = reported | action.isin("PICKED", "STARTED")
    claims = log.groupBy("event_id", "epoch").agg(
        fn.max(fn.when(action == "PICKED", fn.col("worker_id"))).alias("worker"),
        fn.max(fn.when(action == "PICKED", fn.col("created_at"))).alias("claimed_at"),
        fn.max(fn.when(word, fn.col("created_at"))).alias("seen_at"),
        fn.bool_or(reported).alias("reported"),
        fn.bool_or(lost | (action == "RESET")).alias("expired"),
    )
    silent = ~fn.col("reported") & (fn.col("expired") | (fn.col("seen_at") <= at(now - silent_after)))
    held = unfinished.where("status = 'PROCESSING'").select(
        fn.col("worker_id").alias("worker"),
        "event_id",
        "claimed_at",
        fn.col("updated_at").alias("seen_at"),
        fn.lit(col=False).alias("silent"),
        fn.lit(col=False).alias("expired"),
        (fn.col("claimed_at") <= at(now - stuck_after)).alias("stuck"),
    )
    told = claims.withColumns({"silent": silent, "stuck": fn.lit(col=False)}).select(*held.columns).unionByName(held)
    left = fn.col("silent") | fn.col("stuck")
    by_worker = (
        told.where(fn.col("worker").isNotNull())
        .groupBy("worker")
        .agg(
            fn.count_if("silent").alias("silent"),
            fn.count_if(fn.col("silent") & fn.col("expired")).alias("expired"),
            fn.count_if("stuck").alias("stuck"),
            fn.min(fn.when(left, fn.col("claimed_at"))).alias("claimed_at"),
            fn.max("seen_at").alias("seen_at"),
            _samples(fn.when(left, fn.col("event_id"))).alias("event_ids"),
        )
    )
    return by_worker.where("silent > 0 OR stuck > 0")
