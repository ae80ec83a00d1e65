"""The lake: events and audit log as Parquet by day and segment, each row once, whenever a driver was killed."""

# pyright: basic
# Arrow comes without types.
import logging
import os
from bisect import bisect
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import reduce
from operator import or_
from typing import Any, Final
from uuid import uuid4

from py4j.protocol import Py4JJavaError
from pyspark.errors import AnalysisException, PySparkException, StreamingQueryException
from pyspark.sql import Column, DataFrame, Observation, SparkSession
from pyspark.sql import functions as F  # noqa: N812  as everybody who writes Spark calls it
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StringType, StructField, StructType, VariantType

from postbus.errors import Conflict, InvalidRequest, UnsafeStore
from postbus.model import Stream
from postbus.observe import probe, tell
from postbus.spark.manifest import DATA, MODULUS, Entry, Folder, Manifest
from postbus.spark.source import open_bus, segment_name
from postbus.store import Log, Queue
from postbus.store.extract import RELATIONS

__all__ = ["Lake", "Progress", "ingest", "is_current"]

DAY_MICROS: Final = 86_400_000_000
SEGMENT_ROWS: Final = 250_000
SEGMENT_TASKS: Final = 4
"""As many files has a segment at most a day: more would be small, fewer leave cores idle."""
COMPACT_BYTES: Final = 256_000_000
GRACE: Final = timedelta(hours=24)
LOOK_SECONDS: Final = 1.0
"""How long each of the streams that run side by side is waited for in turn."""
COLUMNS: Final[dict[Stream, tuple[str, ...]]] = {stream: tuple(RELATIONS[stream].names) for stream in Stream}
VARIANT: Final = "payload_variant"
FORMATS: Final = ("delta", "iceberg")
Check = Callable[[], None]
Watcher = Callable[["Progress"], None]


@dataclass(frozen=True, slots=True)
class Progress:
    """How far an ingest has come in one stream."""

    stream: Stream
    rows: int
    """Written by this run so far."""
    position: int
    head: int

    @property
    def lag(self) -> int:
        """How many ids it is behind."""
        return max(0, self.head - self.position)


def row_hash(columns: Sequence[str]) -> Column:
    """Return a number that tells a row from any other: of every column, NULL told from what it looks like."""
    plain = [F.map_entries(name) if name == "metadata" else F.col(name) for name in columns]
    return F.xxhash64(*plain, *[F.col(name).isNull() for name in columns])


def total(column: Column) -> Column:
    """Return the sum of hashes as text: exact, whatever the number of rows."""
    return F.sum(column.cast("decimal(38,0)")).cast("string")


class Lake:
    """A folder that Spark, DuckDB and pyarrow read through its manifest."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Name the lake's folder; nothing is made until something is written."""
        self.path = os.fspath(path)
        self.manifests = {stream: Manifest(path, stream) for stream in Stream}
        self.url = self.manifests[Stream.EVENTS].folder.url.rpartition("/")[0]

    def schema(self, stream: Stream) -> StructType:
        """Return the columns of the lake's tables."""
        made = from_arrow_schema(RELATIONS[stream])
        assert isinstance(made, StructType)  # noqa: S101  what a schema becomes
        extra = [StructField(VARIANT, VariantType())] if stream is Stream.EVENTS else []
        return StructType([*made.fields, *extra, *(StructField(name, StringType()) for name in ("dt", "seg"))])

    def read(
        self,
        spark: SparkSession,
        stream: Stream | str = "events",
        *,
        since: str | None = None,
        until: str | None = None,
    ) -> DataFrame:
        """Return the lake's rows, each once, as they are now; of some days (`2026-05-01`) only, if said."""
        stream = Stream(stream)
        return self.frame(spark, stream, self.manifests[stream].chosen(since=since, until=until))

    def frame(self, spark: SparkSession, stream: Stream, files: Sequence[str]) -> DataFrame:
        """Return the rows of some of the stream's files."""
        schema, folder = self.schema(stream), self.manifests[stream].folder.url
        if not files:
            return spark.createDataFrame([], schema)
        reader = spark.read.schema(schema).option("basePath", f"{folder}/{DATA}")
        return reader.parquet(*[f"{folder}/{each}" for each in files])

    def files(
        self, stream: Stream | str = "events", *, since: str | None = None, until: str | None = None
    ) -> list[str]:
        """Return the files to read, for DuckDB: `duckdb.read_parquet(lake.files("events"),hive_partitioning=True)`."""
        return self.manifests[Stream(stream)].files(since=since, until=until)

    def dataset(self, stream: Stream | str = "events") -> Any:
        """Return the lake's rows as a pyarrow Dataset."""
        return self.manifests[Stream(stream)].dataset()

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────

    def write(self, frame: DataFrame, stream: Stream, log_id: str, after: int) -> Entry | None:
        """Write the rows behind a position as a segment; return its entry, which is not part of the lake yet."""
        # In UTC: whatever cuts a moment into days by itself goes by the session's time zone.
        days = F.floor(F.unix_micros("created_at") / DAY_MICROS).cast("int")
        day = F.date_from_unix_date(days).cast("string")
        segment = segment_name(after)
        return self._write(frame.withColumn("dt", day), stream, Entry(segment, log_id, after, after, 0, 0, (), 0, ""))

    def _write(self, frame: DataFrame, stream: Stream, entry: Entry) -> Entry | None:
        folder = self.manifests[stream].folder
        # Never the same twice: a writer that lost its hold unawares overwrites nothing that its heir has written.
        label = f"{entry.segment}g{entry.generation}-{uuid4().hex[:12]}"
        told = Observation()
        columns = COLUMNS[stream]
        shaped = frame.select(*columns, "dt", "segment").withColumn("seg", F.lit(label))
        if stream is Stream.EVENTS:
            shaped = shaped.withColumn(VARIANT, F.try_parse_json("payload"))
        seen = shaped.observe(
            told,
            F.count(F.lit(1)).alias("rows"),
            F.max("id").alias("through"),
            total(row_hash(columns)).alias("checksum"),
            F.collect_set("dt").alias("days"),
            F.collect_set("segment").alias("segments"),
        )
        writer = (
            seen.drop("segment")
            .write.mode("overwrite")
            .partitionBy("dt", "seg")
            .option("partitionOverwriteMode", "dynamic")
        )
        writer.option("compression", "zstd").parquet(f"{folder.url}/{DATA}")
        if not told.get["rows"]:
            return None
        if told.get["segments"] != [entry.segment]:
            raise UnsafeStore(f"{self.url}: rows of {told.get['segments']} came as {entry.segment}; nothing changed")
        places = [f"{DATA}/dt={day}/seg={label}" for day in sorted(told.get["days"])]
        files = [f"{place}/{name}" for place in places for name in folder.names(place) if name.endswith(".parquet")]
        return replace(
            entry,
            through=max(entry.through, told.get["through"]),
            rows=told.get["rows"],
            checksum=int(told.get["checksum"]) % MODULUS,
            files=tuple(files),
            bytes=sum(folder.sizes(files)),
            written_at=datetime.now(UTC).isoformat(),
        )

    def tally(self, frame: DataFrame, stream: Stream) -> tuple[int, int]:
        """Return how many rows there are, and the sum of their hashes."""
        row = frame.agg(F.count(F.lit(1)), total(row_hash(COLUMNS[stream]))).collect()[0]
        return row[0], int(row[1] or 0) % MODULUS

    def verify(self, spark: SparkSession, stream: Stream, entry: Entry) -> None:
        """Read a segment's files again, flushed to disk; raise UnsafeStore unless they hold what was written."""
        self.manifests[stream].folder.flush(entry.files)
        found = self.tally(self.frame(spark, stream, entry.files), stream)
        if found != (entry.rows, entry.checksum):
            raise UnsafeStore(
                f"{self.url}: segment {entry.segment} of {stream} holds {found[0]:,} rows that are not the "
                f"{entry.rows:,} written: restore its files from a backup, or ingest the range anew"
            )

    # ── erasing ──────────────────────────────────────────────────────────────────────────────────────────────────

    def require_erasable(self, store: Queue) -> None:
        """Raise where `erase` would do the wrong thing, or half of it. Needs no Spark.

        UnsafeStore: it is another bus's lake, where the same ids mean other events. Conflict: tables of another format
        hold copies, which only a Spark with their jars could rewrite.
        """
        for stream in Stream:
            _end(store, self, stream)
        for name in FORMATS:
            if Folder(f"{self.url}/{name}").is_there:
                raise Conflict(
                    f"{self.url}/{name} has copies that an erase does not reach; nothing was erased. Remove that "
                    f"folder, erase, and let the next ingest --format {name} build it anew"
                )

    def find(self, spark: SparkSession, *, uid: str | None = None, key: str | None = None) -> list[int]:
        """Return the ids of the events that have this uid or this key."""
        wanted = (F.col("uid") == uid) if uid is not None else (F.col("key") == key)
        return [row[0] for row in self.read(spark).filter(wanted).select("id").collect()]

    def erasable(self, spark: SparkSession, ids: Sequence[int]) -> dict[Stream, int]:
        """Return how many rows of each stream `erase` would blank; what is blank already does not count."""
        return {stream: self._meant(spark, self.read(spark, stream), stream, ids).count() for stream in Stream}

    def _meant(self, spark: SparkSession, frame: DataFrame, stream: Stream, ids: Sequence[int]) -> DataFrame:
        """Return the rows of these events that say anything."""
        key, blanks = _blanks(stream)
        says = [~F.col(column).eqNullSafe(value) for column, value in blanks.items() if column != "metadata"]
        if stream is Stream.EVENTS:
            says.append(F.size("metadata") > 0)
        return frame.join(F.broadcast(_named(spark, ids)), F.col(key) == F.col("erased")).filter(reduce(or_, says))

    def erase(self, spark: SparkSession, ids: Sequence[int], *, check: Check | None = None) -> int:
        """Blank what these events say of anybody, as the store does; return how many segments were rewritten.

        Their old files are removed at once: whoever is reading them has to begin anew. So are those that an earlier run
        was killed before removing. `check` raises if the lake is not the caller's to write to any more.
        """
        return sum(
            self._blank(spark, stream, each, ids, check) for stream in Stream for each in self._touched(stream, ids)
        )

    def _touched(self, stream: Stream, ids: Sequence[int]) -> list[Entry]:
        entries = self.manifests[stream].entries()
        if stream is Stream.AUDIT:
            return entries if ids else []
        ordered = sorted(ids)
        return [each for each in entries if bisect(ordered, each.after) < bisect(ordered, each.through)]

    def _blank(
        self, spark: SparkSession, stream: Stream, entry: Entry, ids: Sequence[int], check: Check | None
    ) -> bool:
        frame = self.frame(spark, stream, entry.files)
        if self._meant(spark, frame, stream, ids).isEmpty():
            _require(check)
            self.manifests[stream].sweep(entry)
            return False
        key, blanks = _blanks(stream)
        marked = frame.join(F.broadcast(_named(spark, ids)), F.col(key) == F.col("erased"), "left")
        for column, value in blanks.items():
            marked = marked.withColumn(column, F.when(F.col("erased").isNotNull(), value).otherwise(F.col(column)))
        made = self._write(
            marked.withColumn("segment", F.lit(entry.segment)),
            stream,
            replace(entry, generation=entry.generation + 1, replaced=()),
        )
        if made is None or made.rows != entry.rows:
            raise UnsafeStore(f"{self.url}: rewriting {entry.segment} lost rows; nothing changed")
        self.verify(spark, stream, made)
        rewritten = replace(made, replaced=entry.files + entry.replaced)
        _require(check)
        self.manifests[stream].replace(rewritten)
        self.manifests[stream].sweep(rewritten)
        return True

    # ── tables of other formats ──────────────────────────────────────────────────────────────────────────────────

    def require_format(self, spark: SparkSession, name: str) -> None:
        """Raise InvalidRequest if this Spark cannot write tables of a format: `delta`, `iceberg`."""
        if name not in FORMATS:
            raise InvalidRequest(f"a lake is parquet, and beside it {' or '.join(FORMATS)}, not {name!r:.80}")
        try:
            spark.read.format(name).load(f"{self.url}/{name}").isEmpty()
        except (PySparkException, Py4JJavaError) as error:
            if "DATA_SOURCE_NOT_FOUND" in str(error):
                raise InvalidRequest(
                    f"this Spark ({spark.version}) has no {name}: give it the jars, spark.jars.packages in its settings"
                ) from None

    def mirror(self, spark: SparkSession, name: str) -> None:
        """Append to tables of another format what the lake has and they have not; such an append is all or nothing."""
        for stream in Stream:
            place = f"{self.url}/{name}/{stream}"
            try:
                top = spark.read.format(name).load(place).agg(F.max("id")).collect()[0][0] or 0
            except AnalysisException:
                top = 0
            new = self.read(spark, stream).filter(F.col("id") > top).drop("seg")
            if not new.isEmpty():
                new.write.format(name).mode("append").partitionBy("dt").save(place)

    # ── compaction ───────────────────────────────────────────────────────────────────────────────────────────────

    def compact(
        self,
        spark: SparkSession,
        *,
        size: int = COMPACT_BYTES,
        grace: timedelta = GRACE,
        today: str | None = None,
        check: Check | None = None,
    ) -> dict[Stream, tuple[int, int]]:
        """Join small segments of days that are over; return the segments before and after, by stream.

        A new generation is written and verified, then its entry flips the manifest at once. The old files stay for
        `grace`, for those who are reading them. `check` raises if the lake is not the caller's to write to any more.
        """
        self.sweep(grace)
        before = self.segments()
        for stream in Stream:
            for group in self.joinable(stream, size=size, today=today):
                self._join(spark, stream, group, check)
        after = self.segments()
        return {stream: (before[stream], after[stream]) for stream in Stream}

    def segments(self) -> dict[Stream, int]:
        """Return how many segments each stream has."""
        return {stream: len(manifest.entries()) for stream, manifest in self.manifests.items()}

    def joinable(
        self, stream: Stream, *, size: int = COMPACT_BYTES, today: str | None = None
    ) -> Sequence[Sequence[Entry]]:
        """Return the groups of segments that `compact` would join. Needs no Spark."""
        today = today or datetime.now(UTC).date().isoformat()
        closed = [each for each in self.manifests[stream].entries() if all(day < today for day in each.days)]
        return list(_groups(closed, size))

    def sweep(self, grace: timedelta = GRACE) -> None:
        """Remove what was replaced longer than `grace` ago, and what killed writers left. Needs no Spark."""
        for manifest in self.manifests.values():
            self._sweep(manifest, grace)

    def tidy(self, store: Queue) -> None:
        """Remove what killed writers left, also of rows that only the store holds yet. Needs no Spark."""
        for stream, manifest in self.manifests.items():
            manifest.tidy(store.span(stream))

    def _join(self, spark: SparkSession, stream: Stream, group: Sequence[Entry], check: Check | None) -> None:
        manifest, first = self.manifests[stream], group[0]
        generation = 1 + max(each.generation for each in group)
        wanted = replace(first, generation=generation, through=group[-1].through, replaced=())
        frame = self.frame(spark, stream, [file for each in group for file in each.files])
        frame = frame.withColumn("segment", F.lit(first.segment))
        days = len({day for each in group for day in each.days})
        made = self._write(frame.repartition(days, "dt").sortWithinPartitions("dt", "id"), stream, wanted)
        rows, checksum = sum(each.rows for each in group), sum(each.checksum for each in group) % MODULUS
        if made is None or (made.rows, made.checksum) != (rows, checksum):
            raise UnsafeStore(
                f"{self.url}: joining {first.segment} and {len(group) - 1} more lost rows; nothing changed"
            )
        self.verify(spark, stream, made)
        old = tuple(file for each in group for file in (*each.files, *each.replaced))
        _require(check)
        manifest.replace(replace(made, replaced=old))
        for each in group[1:]:
            manifest.forget(each)

    def _sweep(self, manifest: Manifest, grace: timedelta) -> None:
        """Remove what was replaced long ago, and the entries of those who were killed before they removed them."""
        current = manifest.entries()
        kept = {each.segment for each in current}
        for each in manifest.all():
            if each.segment not in kept:
                manifest.forget(each)
        for each in current:
            if datetime.now(UTC) - datetime.fromisoformat(each.written_at) >= grace:
                manifest.sweep(each)
        manifest.tidy()


def _require(check: Check | None) -> None:
    """Raise if the lake is not ours to write to any more, as far as the caller can tell."""
    if check is not None:
        check()


def _named(spark: SparkSession, ids: Sequence[int]) -> DataFrame:
    return spark.createDataFrame([(each,) for each in ids], "erased BIGINT")


def _blanks(stream: Stream) -> tuple[str, dict[str, Column]]:
    """Return how an event is known in a table, and what erasing leaves of its columns."""
    nothing = F.lit(None)
    if stream is Stream.AUDIT:
        return "event_id", {"error_message": nothing, "errors": nothing}
    empty = F.from_json(F.lit("{}"), "map<string,string>")
    return "id", {"payload": F.lit("null"), "title": nothing, "description": nothing, "metadata": empty}


def _groups(entries: Sequence[Entry], size: int) -> Generator[list[Entry]]:
    """Yield neighbours that together are no larger than `size`, two or more."""
    group: list[Entry] = []
    held = 0
    for each in entries:
        if not (group and each.after == group[-1].through and held + each.bytes <= size):
            if len(group) > 1:
                yield group
            group, held = [], 0
        group.append(each)
        held += each.bytes
    if len(group) > 1:
        yield group


# ── ingest ───────────────────────────────────────────────────────────────────────────────────────────────────────


def ingest(
    spark: SparkSession,
    url: str,
    lake: Lake,
    *,
    direct_url: str | None = None,
    continuous: float | None = None,
    rows: int = SEGMENT_ROWS,
    consumer: str = "lake",
    watch: Watcher | None = None,
) -> dict[Stream, int]:
    """Bring a lake up to the bus's head, or keep it there every `continuous` seconds; return the rows written.

    Killed at any moment, it goes on where the manifest ends. One ingest at a time writes to a lake: Conflict.
    Its progress shows in the bus as the subscriptions `consumer` and `consumer.audit`. Where `url` leads to a pooler,
    it holds the lake past it, by `direct_url`.
    """
    with closing(open_bus(url, direct_url)) as store, store.hold(f"lake {lake.url}") as check:
        options = _Options(url, rows, consumer, watch)
        runs = [_Ingest(spark, store, lake, stream, options=options, check=check) for stream in Stream]
        lake.tidy(store)
        try:
            if continuous is None:
                for run in runs:
                    run.go(availableNow=True)
            else:
                _forever(runs, continuous)
        finally:
            for run in runs:
                run.stop()
        return {run.stream: run.rows for run in runs}


def is_current(store: Queue, lake: Lake, consumer: str) -> bool:
    """Return whether `ingest` would find nothing to write, and its subscriptions where they should be. Needs no Spark.

    Raises UnsafeStore if it is another bus's lake.
    """
    shown = {each.subscription: each.position for each in store.checkpoints()}
    return all(
        shown.get(_subscription(consumer, stream)) == _end(store, lake, stream)[0] == store.span(stream).head
        for stream in Stream
    )


def _subscription(consumer: str, stream: Stream) -> str:
    return consumer if stream is Stream.EVENTS else f"{consumer}.{stream}"


def _end(store: Queue, lake: Lake, stream: Stream) -> tuple[int, str]:
    """Return how far a lake has come in a bus's stream, and the log's id; raise UnsafeStore if it is another's."""
    span, entries = store.span(stream), lake.manifests[stream].entries()
    if entries and entries[-1].log_id != span.log_id:
        raise UnsafeStore(
            f"{lake.url} holds the events of another log than {store.url} (restored, or another bus): choose "
            "another folder"
        )
    return entries[-1].through if entries else span.pruned, span.log_id


def _forever(runs: Sequence["_Ingest"], seconds: float) -> None:
    """Run both streams side by side until one ends, which only an error makes it do."""
    for run in runs:
        run.go(availableNow=True)  # puts right what is left of an earlier run, and catches up
    for run in runs:
        run.start(processingTime=f"{seconds} seconds")
    while not any(run.wait(LOOK_SECONDS) for run in runs):
        pass


@dataclass(frozen=True, slots=True)
class _Options:
    """What an ingest was asked for."""

    url: str = field(repr=False)
    rows: int
    consumer: str
    watch: Watcher | None


class _Astray(Conflict):
    """The stream's own checkpoint and the manifest do not agree: the manifest is right."""


class _Ingest:
    """One stream on its way into the lake."""

    def __init__(
        self, spark: SparkSession, store: Log, lake: Lake, stream: Stream, *, options: "_Options", check: Check
    ) -> None:
        """Register as a consumer of the bus, at where the lake ends; raise UnsafeStore if it is another bus's lake."""
        self.stream = stream
        self.rows = 0
        self._spark, self._store, self._lake, self._options, self._check = spark, store, lake, options, check
        self._manifest = lake.manifests[stream]
        self._checkpoint = f"{self._manifest.folder.url}/checkpoint"
        self._query: Any = None
        self._fresh = True
        self._through, self._log_id = _end(store, lake, stream)
        self._name = _subscription(options.consumer, stream)
        store.consumer(self._name, stream, self._through)
        store.advance(self._name, self._through, self._log_id)

    def go(self, **trigger: Any) -> None:
        """Write what there is, and return."""
        self.start(**trigger)
        try:
            self.wait()
        except _Astray as error:
            tell(logging.WARNING, "lake_checkpoint_dropped", lake=self._lake.url, reason=str(error))
            self._manifest.folder.remove_folder("checkpoint")
            self.start(**trigger)
            self.wait()

    def start(self, **trigger: Any) -> None:
        """Begin to follow the stream."""
        options = {
            "url": self._options.url,
            "stream": self.stream.value,
            "startingOffsets": str(self._through),
            "maxOffsetsPerTrigger": str(self._options.rows),
            "minPartitions": str(SEGMENT_TASKS),
        }
        self._fresh = True
        frame = self._spark.readStream.format("postbus").options(**options).load()
        writer = frame.writeStream.foreachBatch(self._batch).trigger(**trigger)
        self._query = writer.option("checkpointLocation", self._checkpoint).start()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the stream ends, no longer than that if said; return whether it has, or raise what ended it."""
        try:
            return self._query.awaitTermination(seconds) is not False
        except StreamingQueryException as error:
            if "_Astray" in str(error) or self._is_archived(str(error)):
                raise _Astray(f"{self._checkpoint} is not where the manifest is") from None
            raise

    def _is_archived(self, reason: str) -> bool:
        """Return whether Spark failed to bring again a batch that was archived since: it had not noted it as done."""
        return "was pruned" in reason and self._through >= self._store.span(self.stream).pruned

    def stop(self) -> None:
        """End the stream, if it runs."""
        if self._query is not None and self._query.isActive:
            self._query.stop()

    def _batch(self, frame: DataFrame, number: int) -> None:
        """Write one batch: its files first, then its entry, which makes them part of the lake; once only."""
        del number
        if self._fresh and not self._is_next(frame):
            return
        self._fresh = False
        probe("ingest.reading")
        entry = self._lake.write(frame, self.stream, self._log_id, self._through)
        if entry is None:
            return
        self._check()
        probe("ingest.files_written")
        self._manifest.add(entry)
        probe("ingest.manifest_written")
        self._through = entry.through
        self.rows += entry.rows
        self._store.advance(self._name, entry.through, self._log_id)
        if self._options.watch is not None:
            self._options.watch(Progress(self.stream, self.rows, entry.through, self._store.span(self.stream).head))
        probe("ingest.before_commit_log")

    def _is_next(self, frame: DataFrame) -> bool:
        """Return whether Spark's first batch begins where the manifest ends; False: it brings again what is there.

        Raises _Astray if it does neither: Spark's checkpoint was lost, restored, or is of another lake.
        """
        first, last, through = frame.agg(F.min("segment"), F.max("segment"), F.max("id")).collect()[0]
        after = self._through if first is None else int(first[1:])
        if first != last:
            raise _Astray(f"a batch of {first} and {last}")
        if after == self._through:
            return True
        if any((each.after, each.through) == (after, through) for each in self._manifest.all()):
            return False
        raise _Astray(f"batch ({after}, {through}] is not the manifest's, which ends at {self._through}")
