"""The archive: what lies verified in the lake, and is passed by everybody, leaves the operational tables."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812  as everybody who writes Spark calls it

from postbus.errors import UnsafeStore
from postbus.model import Checkpoint, Pruned, Stream
from postbus.observe import probe
from postbus.spark.lake import Lake
from postbus.store import Log

__all__ = ["Bound", "archive", "bounds"]

MAX_HOLD: Final = timedelta(days=7)
STEP: Final = 10_000


@dataclass(frozen=True, slots=True)
class Bound:
    """How far a stream can be pruned."""

    stream: Stream
    pruned: int
    through: int
    """What may go: rows up to here; no further than `pruned` if nothing may."""
    why: str | None
    """What decides that; None if nothing follows."""
    past: tuple[Checkpoint, ...] = ()
    """Subscriptions that have stood still for longer than they may hold others up: they are cut off."""

    @property
    def rows(self) -> int:
        """How many ids lie between."""
        return max(0, self.through - self.pruned)


def bounds(store: Log, lake: Lake, *, older_than: timedelta, max_hold: timedelta = MAX_HOLD) -> list[Bound]:
    """Return how far each stream can be pruned: the least of retention, the lake, and whoever follows it."""
    now, checkpoints = store.now(), store.checkpoints()
    return [_bound(store, lake, stream, checkpoints, now, older_than, max_hold) for stream in Stream]


def _bound(  # noqa: PLR0917  the parts of one decision
    store: Log,
    lake: Lake,
    stream: Stream,
    checkpoints: tuple[Checkpoint, ...],
    now: datetime,
    older_than: timedelta,
    max_hold: timedelta,
) -> Bound:
    span, entries = store.span(stream), lake.manifests[stream].entries()
    if entries and entries[-1].log_id != span.log_id:
        raise UnsafeStore(f"{lake.url} holds the events of another log than {store.url}: nothing is pruned")
    if entries and entries[0].after > span.pruned:
        raise UnsafeStore(
            f"{lake.url} begins behind {entries[0].after:,}, and {stream} are there from {span.pruned + 1:,} on: "
            "nothing is pruned that no lake holds"
        )
    mine = [each for each in checkpoints if each.stream is stream]
    past = tuple(each for each in mine if _stands_still(each, now, max_hold))
    limits = [
        (store.before(stream, now - older_than), f"younger than {_words(older_than)}"),
        (entries[-1].through if entries else span.pruned, "not in the lake yet"),
        *((each.position, f"not passed by {each.subscription!r} yet") for each in mine if each not in past),
    ]
    least, why = min(limits)
    # Whole segments only: what is verified is what goes.
    whole = max((each.through for each in entries if each.through <= least), default=span.pruned)
    through = max(span.pruned, whole)
    cut_off = tuple(each for each in past if each.position < through)
    return Bound(stream, span.pruned, through, why if through < span.head else None, cut_off)


def _stands_still(checkpoint: Checkpoint, now: datetime, max_hold: timedelta) -> bool:
    """Return whether it has not moved for too long although there was something to do: one that was idle has not."""
    waiting = checkpoint.waiting
    return waiting is not None and waiting > max_hold and now - checkpoint.moved_at > max_hold


def _words(length: timedelta) -> str:
    """Return a length of time in the largest unit that it is whole in."""
    seconds = length // timedelta(seconds=1)
    sizes = ((86_400, "day"), (3_600, "hour"), (60, "minute"), (1, "second"))
    size, unit = next((size, unit) for size, unit in sizes if seconds % size == 0)
    return f"{seconds // size:,} {unit}{'' if seconds == size else 's'}"


def archive(
    spark: SparkSession,
    url: str,
    store: Log,
    lake: Lake,
    bound: Bound,
    *,
    watch: Callable[[Pruned], None] | None = None,
) -> int:
    """Verify that the lake holds what is to go, then prune it; return how many rows went.

    Killed at any moment, every row is in the store, or verified in the lake, or both; the next run goes on.
    Raises UnsafeStore, and prunes nothing, where lake and store differ.
    """
    with store.hold(f"lake {lake.url}") as check:
        if bound.rows:
            probe("archive.verifying")
            _verify(spark, url, lake, bound)
        check()
        probe("archive.verified")
        reached, removed, done = 0, 0, not bound.through
        while not done:
            step = store.prune(
                bound.stream,
                after=reached,
                through=bound.through,
                limit=STEP,
                past=[each.subscription for each in bound.past],
            )
            reached, done, removed = step.reached, step.done, removed + step.removed
            probe("archive.pruned")
            if watch is not None:
                watch(step)
        return removed


def _verify(spark: SparkSession, url: str, lake: Lake, bound: Bound) -> None:
    """Read the range from the lake's files, flushed to disk, and from the store: the same rows, or UnsafeStore."""
    stream, manifest = bound.stream, lake.manifests[bound.stream]
    entries = [each for each in manifest.entries() if bound.pruned < each.through <= bound.through]
    for each in entries:
        manifest.folder.flush(each.files)
    wanted = F.col("id") > bound.pruned
    archived = lake.tally(
        lake.frame(spark, stream, [file for each in entries for file in each.files]).filter(wanted), stream
    )
    options = {
        "url": url,
        "stream": stream.value,
        "startingOffsets": str(bound.pruned),
        "endingOffsets": str(bound.through),
    }
    live = lake.tally(spark.read.format("postbus").options(**options).load(), stream)
    if archived != live:
        raise UnsafeStore(
            f"{lake.url} holds {archived[0]:,} rows of {stream} up to {bound.through:,}, the store {live[0]:,}, and "
            "they are not the same: nothing is pruned. Restore the lake's files, erase with --lake what was erased "
            "without it, or ingest into another folder"
        )
