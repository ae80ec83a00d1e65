"""The Spark data source `postbus`: events and audit log as tables and streams, by ranges of ids."""

# pyright: basic
# Arrow comes without types.
import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime, timedelta
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    InputPartition,
)
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StringType, StructField, StructType, VariantType, VariantVal

from postbus.errors import InvalidRequest, NotFound, UnsafeStore
from postbus.model import Span, Stream
from postbus.pattern import Interest, check_pattern
from postbus.spark.launch import refuse_remote_file
from postbus.store import Log, as_arrow, exists, is_file, log_of, open_store, shown
from postbus.store.extract import RELATIONS

__all__ = ["PostbusSource", "ReadOptions", "on_cluster", "open_bus", "segment_name"]

LARGE_SLICE: Final = 250_000
"""A task costs 0.2 s before its first row, and a slice of this many takes a second: smaller ones only cost."""
MANY_SLICES: Final = 32
LARGEST_ID: Final = (1 << 63) - 1
PATIENCE: Final = 10.0
STREAMS: Final = tuple(each.value for each in Stream)
POSITIONED: Final = frozenset(
    {
        "startingOffsets",
        "startingTimestamp",
        "endingOffsets",
        "endingTimestamp",
        "maxOffsetsPerTrigger",
        "consumer",
    }
)
"""The options that make no sense without positions."""


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """What to read. Every field is an option of the same name, written as Kafka's source writes them."""

    url: str = field(repr=False)
    stream: str = "events"
    types: tuple[str, ...] = ("*",)
    tags: tuple[str, ...] = ()
    startingOffsets: str = "earliest"  # noqa: N815  Spark's users know this name
    startingTimestamp: datetime | None = None  # noqa: N815
    endingOffsets: str = "latest"  # noqa: N815
    endingTimestamp: datetime | None = None  # noqa: N815
    maxOffsetsPerTrigger: int | None = None  # noqa: N815
    minPartitions: int = 1  # noqa: N815
    maxRecordsPerPartition: int = LARGE_SLICE  # noqa: N815
    failOnDataLoss: bool = True  # noqa: N815
    payloadFormat: str = "string"  # noqa: N815
    consumer: str | None = None

    @classmethod
    def of(cls, options: Mapping[str, str]) -> "ReadOptions":
        """Read Spark's options, whose names are case-insensitive; raise InvalidRequest for what makes no sense."""
        names = {each.name.lower(): each.name for each in fields(cls)}
        given: dict[str, Any] = {}
        for name, text in options.items():
            if name.lower() not in names:
                near = get_close_matches(name.lower(), names, 1)
                hint = f", perhaps {names[near[0]]}" if near else f": there are {', '.join(names.values())}"
                raise InvalidRequest(f"the postbus source has no option {name!r}{hint}")
            given[names[name.lower()]] = _READERS.get(names[name.lower()], str)(text)
        if not given.get("url"):
            raise InvalidRequest('say where the bus is: .option("url", "postgresql://…")')
        made = cls(**given)
        made._check(given.keys())
        return made

    def _check(self, given: Collection[str]) -> None:
        if self.stream not in RELATIONS:
            raise InvalidRequest(f"stream is {', '.join(RELATIONS)}, not {self.stream!r:.80}")
        if self.payloadFormat not in ("string", "variant"):
            raise InvalidRequest(f"payloadFormat is string or variant, not {self.payloadFormat!r:.80}")
        if self.stream not in STREAMS and (idle := sorted(POSITIONED.intersection(given))):
            raise InvalidRequest(f"{self.stream} are read as they stand: {', '.join(idle)} is for {', '.join(STREAMS)}")
        for each in self.types:
            check_pattern(each)

    @property
    def schema(self) -> StructType:
        """All the columns there are, in order; every one may be NULL, as Spark's Arrow path wants it."""
        made = from_arrow_schema(RELATIONS[self.stream])
        assert isinstance(made, StructType)  # noqa: S101  what a schema becomes
        columns = [
            StructField(each.name, VariantType()) if self._is_variant(each.name) else each for each in made.fields
        ]
        return StructType([*columns, *([StructField("segment", StringType())] if self.stream in STREAMS else [])])

    def _is_variant(self, column: str) -> bool:
        return self.stream == "events" and column == "payload" and self.payloadFormat == "variant"

    def pruned(self, schema: StructType) -> StructType:
        """Return the columns a user's own schema asks for; raise InvalidRequest for one that is not there."""
        columns = {each.name: each for each in self.schema.fields}
        if not schema.fields:
            raise InvalidRequest(f"name at least one column of {self.stream}: there are {', '.join(columns)}")
        for each in schema.fields:
            if each.name not in columns:
                raise InvalidRequest(f"{self.stream} has no column {each.name!r}: there are {', '.join(columns)}")
            if columns[each.name].dataType.simpleString() != each.dataType.simpleString():
                raise InvalidRequest(f"column {each.name} is {columns[each.name].dataType.simpleString()}")
        return StructType([columns[each.name] for each in schema.fields])

    @property
    def interests(self) -> tuple[Interest, ...] | None:
        """Which events are wanted; None: all."""
        if self.types == ("*",) and not self.tags:
            return None
        return tuple(Interest(each, frozenset(self.tags)) for each in self.types)


def _moment(text: str) -> datetime:
    """Read milliseconds since 1970, as Kafka's source does, or a date and time, in UTC unless it says otherwise."""
    try:
        if text.lstrip("-").isdecimal():
            return datetime.fromtimestamp(int(text) / 1000, UTC)
        read = datetime.fromisoformat(text)
    except (ValueError, OverflowError, OSError):
        raise InvalidRequest(f"{text!r:.80} is no moment: write 2026-05-01T12:00:00Z, or milliseconds") from None
    return read if read.tzinfo else read.replace(tzinfo=UTC)


def _whole(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 1 << 31:
        raise InvalidRequest(f"{text!r:.80} is no number of rows or partitions")
    return int(text)


def _flag(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise InvalidRequest(f"failOnDataLoss is true or false, not {text!r:.80}")
    return text.lower() == "true"


def _several(text: str) -> tuple[str, ...]:
    found = tuple(each.strip() for each in text.split(",") if each.strip())
    if not found:
        raise InvalidRequest("types and tags are names with commas between them; leave them out to have all")
    return found


_READERS: Final[Mapping[str, Any]] = {
    "types": _several,
    "tags": _several,
    "startingTimestamp": _moment,
    "endingTimestamp": _moment,
    "maxOffsetsPerTrigger": _whole,
    "minPartitions": _whole,
    "maxRecordsPerPartition": _whole,
    "failOnDataLoss": _flag,
}


@dataclass
class Slice(InputPartition):
    """A range of ids that one task reads: everything its worker needs to know."""

    after: int
    through: int
    segment: str


class PostbusSource(DataSource):
    """`spark.read.format("postbus")` and `readStream`, `df.write` and `writeStream`."""

    @classmethod
    def name(cls) -> str:
        """Return what `format()` is given."""
        return "postbus"

    def schema(self) -> StructType:
        """Return the columns of the stream that is asked for."""
        return ReadOptions.of(self.options).schema

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return a reader of what there is now."""
        return BatchReader(ReadOptions.of(self.options), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802  Spark's name
        """Return a reader that goes on."""
        return StreamReader(ReadOptions.of(self.options), schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:  # noqa: FBT001  Spark's signature
        """Return what publishes a DataFrame."""
        from postbus.spark import sink  # noqa: PLC0415  readers need not load it

        return sink.writer(self.options, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: FBT001, N802
        """Return what publishes a stream, each batch once."""
        from postbus.spark import sink  # noqa: PLC0415

        return sink.stream_writer(self.options, schema, overwrite)


class _Reading:
    """What both readers do: check positions, cut a range into slices, read a slice. Opens nothing until it must."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        """Read the columns of `schema`, which may be some of all."""
        self._options = options
        self._schema = options.pruned(schema)
        self._opened: tuple[int, Log] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave the connection behind when this goes to another process."""
        return self.__dict__ | {"_opened": None}

    @property
    def _store(self) -> Log:
        if self._opened is None or self._opened[0] != os.getpid():
            self._opened = os.getpid(), open_bus(self._options.url)
        return self._opened[1]

    @property
    def _stream(self) -> Stream:
        return Stream(self._options.stream)

    def _resolve(self, offset: str, moment: datetime | None, span: Span) -> int:
        """Return the position that `earliest`, `latest`, an id or a moment stands for."""
        if moment is not None:
            return self._store.before(self._stream, moment)
        match offset.strip().lower():
            case "earliest":
                return span.pruned
            case "latest":
                return span.head
            case text if text.isdecimal():
                return int(text)
            case _:
                raise InvalidRequest(f"an offset is earliest, latest or an id, not {offset!r:.80}")

    def _checked(self, after: int, span: Span) -> int:
        """Return a position to go on from; raise UnsafeStore where rows behind it are gone or never were."""
        if after >= span.pruned:
            return self._reached("position", after, span)
        if self._options.failOnDataLoss:
            raise UnsafeStore(
                f"{self._where}: everything up to {span.pruned:,} was pruned, and {after:,} was asked for: read that "
                "from the lake, or what is left with failOnDataLoss=false"
            )
        return span.pruned

    def _reached(self, name: str, position: int, span: Span) -> int:
        """Return a position that the stream has come to; raise UnsafeStore for another, or return the head instead."""
        if position <= span.head or self._has_rows(position - 1, position):
            return position
        if self._options.failOnDataLoss:
            raise UnsafeStore(
                f"{self._where}: {name} {position:,} lies beyond the head at {span.head:,}: was the store restored "
                "from a backup? Start anew, or read what there is with failOnDataLoss=false"
            )
        return span.head

    def _awaited(self, end: int, span: Span) -> int:
        """Return the head, once it has come to the end of a range that has a row: below it one may be on its way."""
        deadline = time.monotonic() + PATIENCE
        head = span.head
        while end > head and self._has_rows(end - 1, end) and time.monotonic() < deadline:
            time.sleep(0.02)
            head = self._store.span(self._stream).head
        return head

    def _has_rows(self, after: int, through: int) -> bool:
        """Return whether a range has rows, also beyond the head, which goes back a while when a publisher is late."""
        if through > LARGEST_ID:
            return False
        return bool(self._store.activity(self._stream, after, through, timedelta(days=1)))

    @property
    def _where(self) -> str:
        return f"{shown(self._options.url)}, {self._options.stream}"

    def _slices(self, after: int, through: int) -> list[Slice]:
        width = through - after
        if width <= 0:
            return []
        options = self._options
        count = min(width, max(options.minPartitions, -(-width // options.maxRecordsPerPartition)))
        bounds = [after + width * number // count for number in range(count + 1)]
        name = segment_name(after)
        made = [Slice(low, high, name) for low, high in pairwise(bounds)]
        return made if count <= MANY_SLICES else self._filled(made)

    def _filled(self, slices: list[Slice]) -> list[Slice]:
        """Leave out slices without a row: after a restore ids go on a billion further, thousands of slices away."""
        found, first = [], 0
        for each in slices:
            if each.after >= first:
                first = self._store.ahead(self._stream, each.after, 1)
            if each.after < first <= each.through or (first == each.after and self._has_rows(first, each.through)):
                found.append(each)
        return found

    def _read(self, part: Slice) -> Iterator[pa.RecordBatch]:
        """Go through a slice as Arrow of exactly the types that Spark wants."""
        if is_file(self._options.url) and on_cluster():
            refuse_remote_file(self._options.url, "this cluster")
        target = to_arrow_schema(self._schema, timezone="UTC")
        names = [name for name in self._schema.fieldNames() if name != "segment"]
        interests = self._options.interests
        asked = names if interests is None else list(dict.fromkeys((*names, "type", "tags")))
        key = "event_id" if self._options.stream == "deliveries" else "id"
        for batch in as_arrow(self._options.url, self._options.stream, asked or [key], part.after, part.through):
            kept = batch if interests is None else batch.filter(_wanted(batch, interests))
            if kept.num_rows:
                yield self._shaped(kept, part.segment, target)
        self._still_there(part)

    def _shaped(self, batch: pa.RecordBatch, segment: str, target: pa.Schema) -> pa.RecordBatch:
        arrays = []
        for column, wanted in zip(self._schema.fields, target, strict=True):
            if column.name == "segment":
                arrays.append(pa.repeat(pa.scalar(segment), batch.num_rows))
            elif isinstance(column.dataType, VariantType):
                arrays.append(_variants(batch.column(column.name), wanted.type))
            else:
                arrays.append(batch.column(column.name).cast(wanted.type))
        return pa.record_batch(arrays, schema=target)

    def _still_there(self, part: Slice) -> None:
        """Raise UnsafeStore if a prune may have taken rows away while they were read."""
        if self._options.stream in STREAMS and self._options.failOnDataLoss:
            with closing(open_bus(self._options.url)) as store:
                pruned = store.span(self._stream).pruned
            if part.after < pruned:
                raise UnsafeStore(f"{shown(self._options.url)}: pruned up to {pruned:,} while it was being read")

    def stop(self) -> None:
        """Close what was opened."""
        if self._opened is not None:
            self._opened[1].close()
            self._opened = None


class BatchReader(_Reading, DataSourceReader):
    """Reads what there is when it is asked: one `load()` is one range."""

    def partitions(self) -> list[InputPartition]:
        """Cut the range into slices, one a task."""
        options = self._options
        if options.stream not in STREAMS:
            return [Slice(0, LARGEST_ID, "")]
        if options.consumer or options.maxOffsetsPerTrigger:
            raise InvalidRequest("consumer and maxOffsetsPerTrigger are for readStream")
        try:
            span = self._store.span(self._stream)
            start = self._checked(self._resolve(options.startingOffsets, options.startingTimestamp, span), span)
            end = self._resolve(options.endingOffsets, options.endingTimestamp, span)
            head = self._awaited(end, span)
            if end > head and options.failOnDataLoss:
                raise UnsafeStore(f"{self._where}: endingOffsets {end:,} lies beyond the head at {head:,}")
            return [*self._slices(start, min(end, head))] or [Slice(start, start, "")]
        finally:
            self.stop()

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Read one slice."""
        assert isinstance(partition, Slice)  # noqa: S101  what `partitions` made
        return self._read(partition)


class StreamReader(_Reading, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Follows a stream by gap-safe positions. An offset is a log and the id of a row that was seen in it."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        """Check what can be checked without looking."""
        super().__init__(options, schema)
        if options.stream not in STREAMS:
            raise InvalidRequest(f"{options.stream} is no stream: read it with spark.read")
        if options.endingOffsets != "latest" or options.endingTimestamp is not None:
            raise InvalidRequest("endingOffsets and endingTimestamp are for spark.read")
        moving = options.startingOffsets.strip().lower() == "latest" or options.startingTimestamp is not None
        if moving and not options.consumer:
            raise InvalidRequest(
                "startingOffsets=latest and startingTimestamp need a consumer: Spark asks again after a crash, and "
                'only the bus can remember where a stream began: .option("consumer", "a name")'
            )
        self._start: dict[str, Any] | None = None
        self._cap: int | None = None

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802  Spark's name, as all below
        """Return where to begin: asked twice, and again after a crash in the first batch, it says the same."""
        if self._start is None:
            span = self._store.span(self._stream)
            self._start = _offset(span.log_id, self._checked(self._begin(span), span))
        return self._start

    def _begin(self, span: Span) -> int:
        """Return where the consumer stands; a new one begins where the options say, once that is known to be sound."""
        options = self._options
        if options.consumer in {each.subscription for each in self._store.checkpoints()}:
            position = span.pruned
        else:
            position = self._checked(self._resolve(options.startingOffsets, options.startingTimestamp, span), span)
        return self._store.consumer(options.consumer, self._stream, position).position if options.consumer else position

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Return how much a batch takes."""
        most = self._options.maxOffsetsPerTrigger
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Stop at what is there now."""
        self._cap = self._store.span(self._stream).head

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Return how far the next batch goes: never past a position that something may still appear below."""
        span = self._known(start)
        after = self._checked(start["position"], span)
        end = span.head
        if isinstance(limit, ReadMaxRows):
            end = self._store.ahead(self._stream, after, limit.max_rows)
        end = end if self._cap is None else min(end, self._cap)
        return _offset(span.log_id, max(after, end))

    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802
        """Return the head, so that a query's progress shows how far behind it is."""
        span = self._store.span(self._stream)
        return _offset(span.log_id, span.head)

    def _known(self, offset: dict[str, Any]) -> Span:
        span = self._store.span(self._stream)
        if offset["log_id"] != span.log_id:
            raise UnsafeStore(
                f"{shown(self._options.url)}: this stream's checkpoint is of another log (the store was restored or "
                "replaced): start with a new checkpoint folder and a new consumer"
            )
        return span

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Cut a batch into slices."""
        span = self._known(start)
        return self._slices(self._checked(start["position"], span), self._checked(end["position"], span))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Read one slice."""
        assert isinstance(partition, Slice)  # noqa: S101  what `partitions` made
        return self._read(partition)

    def commit(self, end: dict[str, Any]) -> None:
        """Let everybody see how far this consumer has come. Nothing is pruned here."""
        if self._options.consumer:
            self._store.advance(self._options.consumer, end["position"], end["log_id"])


def open_bus(url: str, direct_url: str | None = None) -> Log:
    """Open a store that must be there already; raise NotFound."""
    if not exists(url):
        raise NotFound(f"there is no bus at {shown(url)}")
    return log_of(open_store(url, auto_migrate=False, direct_url=direct_url, listen=False), "Spark")


def segment_name(position: int) -> str:
    """Return the name of the segment that begins behind a position: text to Spark, in order, never a number."""
    return f"s{position:019d}"


def _offset(log_id: str, position: int) -> dict[str, Any]:
    return {"log_id": log_id, "position": position}


def _wanted(batch: pa.RecordBatch, interests: tuple[Interest, ...]) -> Any:
    """Return which rows are wanted, each different type and tag set looked at once, by the bus's own rule."""
    tags = pc.call_function("binary_join", [pc.fill_null(batch.column("tags"), []), ","])
    kinds = pc.fill_null(batch.column("type"), "")
    pairs = pc.call_function("binary_join_element_wise", [kinds, tags, "\n"]).dictionary_encode()
    verdicts = []
    for pair in pairs.dictionary.to_pylist():
        kind, _, tags = pair.rpartition("\n")
        split = tuple(tags.split(",")) if tags else ()
        verdicts.append(any(each.wants(kind, split) for each in interests))
    return pa.array(verdicts, pa.bool_()).take(pairs.indices)


def _variants(texts: Any, kind: pa.DataType) -> Any:
    values = [None if text is None else VariantVal.parseJson(text) for text in texts.to_pylist()]
    parts = [pa.array([each and getattr(each, name) for each in values], pa.binary()) for name in ("value", "metadata")]
    made = pa.StructArray.from_arrays(parts, fields=[pa.field("value", pa.binary()), pa.field("metadata", pa.binary())])
    return made.cast(kind)


def on_cluster() -> bool:
    """Return whether this process works for an executor of a cluster, whatever manages it."""
    with suppress(OSError, ValueError, IndexError):
        pid = os.getppid()
        while pid > 1:
            if b"ExecutorBackend" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return True
            pid = int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
    return "SPARK_EXECUTOR_DIRS" in os.environ
