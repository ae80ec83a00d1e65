"""The Spark sink `postbus`: a DataFrame's rows are events, a batch is published whole and once.

Tasks validate their rows and lay them by in the bus, each attempt in a part of its own (`Log.stage`); the driver
publishes the parts of the tasks that succeeded in one transaction, under the batch's name (`Log.publish_parts`). So a
task that runs twice, a driver that dies in between, and a batch that a restarted stream brings again change nothing.

| column | type | |
|---|---|---|
| `type` | STRING | needed |
| `payload` | STRING of JSON, or VARIANT | `to_json(struct(…))` of columns; NULL is null |
| `uid`, `key`, `title`, `description` | STRING | rows without a `uid` get one, and are new each time |
| `tags` | ARRAY&lt;STRING&gt; | |
| `metadata` | MAP&lt;STRING, STRING&gt; | |
| `priority`, `max_retries` | whole numbers | |
| `at`, `delay` | TIMESTAMP; INTERVAL or seconds | one of them, or none |
"""

# pyright: basic
# Arrow comes without types.
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import types as t
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from postbus.errors import InvalidRequest, PostbusError, StoreUnavailable
from postbus.observe import probe
from postbus.payload import Draft, drafts_of_text
from postbus.spark.launch import refuse_remote_file
from postbus.spark.source import on_cluster
from postbus.store import Log, exists, is_file, log_of, open_store, shown

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["check", "stream_writer", "writer"]

SINK: Final = "a Spark sink"
ROWS: Final = 5_000
"""How many rows are validated and laid by at a time."""
PROBLEM: Final = "problem"
PAUSES: Final = (0.5, 2.0, 5.0)
_WHOLE: Final = (t.ByteType, t.ShortType, t.IntegerType, t.LongType)
_NUMBER: Final = (*_WHOLE, t.FloatType, t.DoubleType, t.DecimalType)
_TAGS: Final = t.ArrayType(t.StringType())
_METADATA: Final = t.MapType(t.StringType(), t.StringType())
COLUMNS: Final[Mapping[str, tuple[str, tuple[type[t.DataType], ...]]]] = {
    "type": ("STRING", (t.StringType,)),
    "payload": ("STRING of JSON, or VARIANT", (t.StringType, t.VariantType)),
    "uid": ("STRING", (t.StringType,)),
    "key": ("STRING", (t.StringType,)),
    "title": ("STRING", (t.StringType,)),
    "description": ("STRING", (t.StringType,)),
    "tags": ("ARRAY<STRING>", (t.ArrayType,)),
    "metadata": ("MAP<STRING, STRING>", (t.MapType,)),
    "priority": ("INT", _WHOLE),
    "max_retries": ("INT", _WHOLE),
    "at": ("TIMESTAMP", (t.TimestampType,)),
    "delay": ("INTERVAL DAY TO SECOND, or seconds", (t.DayTimeIntervalType, *_NUMBER)),
}
"""What an event has, and which types a column for it may have."""


def writer(options: Mapping[str, str], schema: t.StructType, overwrite: bool) -> "BatchWriter":  # noqa: FBT001  Spark's flag
    """Return what publishes a DataFrame; raise InvalidRequest for columns or a mode that cannot be."""
    return BatchWriter(_checked_url(options, schema, overwrite=overwrite), schema, uuid4().hex)


def stream_writer(options: Mapping[str, str], schema: t.StructType, overwrite: bool) -> "StreamWriter":  # noqa: FBT001
    """Return what publishes a stream; raise InvalidRequest as above."""
    return StreamWriter(_checked_url(options, schema, overwrite=overwrite), schema)


def check(frame: "DataFrame") -> "DataFrame":
    """Return the rows with a column `problem`: why the sink would refuse them, NULL where it would not.

    `check(df).where("problem IS NULL").drop("problem")` can be written; the others go where the caller wants them.
    What concerns more than one row (a uid that stands for another event) shows only when they are published.
    """
    _check_columns(frame.schema)
    columns = frame.schema
    told = t.StructType([*columns.fields, t.StructField(PROBLEM, t.StringType())])

    def find(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            rows = _rows(batch, columns)
            problems = [None] * len(rows) if _validated(rows) is not None else [_problem(row) for row in rows]
            yield batch.append_column(PROBLEM, pa.array(problems, pa.string()))

    return frame.mapInArrow(find, told)


# ── rows ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _checked_url(options: Mapping[str, str], schema: t.StructType, *, overwrite: bool) -> str:
    url = options.get("url")
    if not url:
        raise InvalidRequest('say where the bus is: .option("url", "postgresql://…")')
    for look in (exists, shown):
        look(url)  # raises for a URL that is none
    if overwrite:
        raise InvalidRequest('a log is only ever added to: write with .mode("append"), or outputMode("append")')
    _check_columns(schema)
    return url


def _check_columns(schema: t.StructType) -> None:
    """Raise InvalidRequest, naming the column that is wrong and how to mend it."""
    names = schema.fieldNames()
    if unknown := [name for name in names if name not in COLUMNS]:
        raise InvalidRequest(
            f"an event has no column {', '.join(unknown)}: there are {', '.join(COLUMNS)}. Put what else a row has "
            "into the payload: to_json(struct(…))"
        )
    if "type" not in names or len(set(names)) < len(names):
        raise InvalidRequest("there must be one column type, and no other twice")
    for field in schema.fields:
        wanted, kinds = COLUMNS[field.name]
        if not isinstance(field.dataType, kinds) or not _holds_text(field.dataType):
            told = field.dataType.simpleString()
            nested = field.name == "payload" and isinstance(field.dataType, t.StructType | t.MapType | t.ArrayType)
            hint = ": write to_json(payload)" if nested else f", {wanted} is wanted"
            raise InvalidRequest(f"column {field.name} is {told:.80}{hint}")


def _holds_text(kind: t.DataType) -> bool:
    match kind:
        case t.ArrayType():
            return isinstance(kind.elementType, t.StringType)
        case t.MapType():
            return isinstance(kind.keyType, t.StringType) and isinstance(kind.valueType, t.StringType)
        case _:
            return True


def _rows(batch: pa.RecordBatch, schema: t.StructType) -> list[dict[str, Any]]:
    """Return the rows as the events' fields by name; a NULL is a field left out."""
    columns = [_values(array, field.dataType) for array, field in zip(batch.columns, schema.fields, strict=True)]
    names = schema.fieldNames()
    return [
        {name: value for name, value in zip(names, values, strict=True) if value is not None}
        for values in zip(*columns, strict=True)
    ]


def _values(array: Any, kind: t.DataType) -> list[Any]:
    values = array.to_pylist()
    match kind:
        case t.VariantType():
            return [each and t.VariantVal(each["value"], each["metadata"]).toJson() for each in values]
        case t.MapType():
            return [None if each is None else dict(each) for each in values]
        case t.DecimalType():
            return [None if each is None else float(each) for each in values]
        case _:
            return values


def _validated(rows: Sequence[Mapping[str, Any]]) -> list[Draft] | None:
    """Return the rows as events, None if one of them is wrong."""
    try:
        return drafts_of_text(rows)
    except PostbusError:
        return None


def _problem(row: Mapping[str, Any]) -> str | None:
    try:
        drafts_of_text([row])
    except PostbusError as error:
        return str(error)
    return None


# ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Brought(WriterCommitMessage):
    """What a task has laid by, for the driver to publish; `part` is None where there was no row."""

    query: str
    batch: int
    part: int | None
    rows: int


class _Writing:
    """What both writers do: lay by on the executors, publish or drop on the driver. Opens nothing until it must."""

    def __init__(self, url: str, schema: t.StructType) -> None:
        """Write rows of this schema to the bus at a URL."""
        self._url = url
        self._schema = schema

    def __repr__(self) -> str:
        """Show no secret."""
        return f"{type(self).__name__}({shown(self._url)!r})"

    def _lay_by(self, batches: Iterator[pa.RecordBatch], query: str, batch: int) -> Brought:
        """Validate what comes, and stage it in a part of its own; on a failure drop the part again, and raise."""
        if is_file(self._url) and on_cluster():
            refuse_remote_file(self._url, "this cluster")
        part, count = None, 0
        with closing(log_of(open_store(self._url, listen=False), SINK)) as store:
            try:
                for ready in self._drafts(batches):
                    part = store.begin_part(query, batch) if part is None else part
                    store.stage(part, count, ready)
                    count += len(ready)
            except BaseException:
                with suppress(PostbusError):  # housekeeping drops it, then
                    store.drop_parts([] if part is None else [part])
                raise
        probe("laid_by")
        return Brought(query, batch, part, count)

    def _drafts(self, batches: Iterator[pa.RecordBatch]) -> Iterator[list[Draft]]:
        count = 0
        for batch in batches:
            for start in range(0, batch.num_rows, ROWS):
                rows = _rows(batch.slice(start, ROWS), self._schema)
                ready = _validated(rows)
                if ready is None:
                    raise InvalidRequest(self._first_problem(rows, count))
                count += len(ready)
                yield ready

    def _first_problem(self, rows: Sequence[Mapping[str, Any]], before: int) -> str:
        context = TaskContext.get()
        where = "" if context is None else f" of partition {context.partitionId()}"
        number, reason = next((n, told) for n, row in enumerate(rows, before + 1) if (told := _problem(row)))
        return (
            f"row {number:,}{where} is no event: {reason}. Nothing is published; postbus.spark.check(df) finds all such"
            " rows"
        )

    def _publish(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Publish what the tasks have laid by; a store that is away for a moment is asked again, which is harmless."""
        brought = [each for each in messages if isinstance(each, Brought) and each.part is not None]
        if not brought:
            return
        probe("sinking")
        parts = {each.part: each.rows for each in brought if each.part is not None}
        with closing(self._open_patiently()) as store:
            for pause in (*PAUSES, None):
                try:
                    store.publish_parts(brought[0].query, brought[0].batch, parts)
                except StoreUnavailable:
                    if pause is None:
                        raise
                    time.sleep(pause)
                else:
                    break
        probe("sunk")

    def _open_patiently(self) -> Log:
        for pause in PAUSES:
            try:
                return log_of(open_store(self._url), SINK)
            except StoreUnavailable:
                time.sleep(pause)
        return log_of(open_store(self._url), SINK)

    def _drop(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        parts = [each.part for each in messages if isinstance(each, Brought) and each.part is not None]
        if parts:
            with suppress(PostbusError), closing(log_of(open_store(self._url, listen=False), SINK)) as store:
                store.drop_parts(parts)


class BatchWriter(_Writing, DataSourceArrowWriter):
    """Publishes a DataFrame: each `save()` is a batch of its own, under a name nobody else has."""

    def __init__(self, url: str, schema: t.StructType, run: str) -> None:
        """Write under the name `run`."""
        super().__init__(url, schema)
        self._run = run

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Brought:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Lay the rows of one task by."""
        return self._lay_by(iterator, self._run, 0)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Publish all of it."""
        self._publish(messages)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Drop what was laid by."""
        self._drop(messages)


class StreamWriter(_Writing, DataSourceStreamArrowWriter):
    """Publishes a stream: a batch is known by its query, which outlives restarts, and its number."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Brought:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Lay the rows of one task by."""
        context = TaskContext.get()
        query = context.getLocalProperty("sql.streaming.queryId") if context else None
        batch = context.getLocalProperty("streaming.sql.batchId") if context else None
        if query is None or batch is None:
            raise InvalidRequest("this is no task of a streaming query: use df.write")
        return self._lay_by(iterator, query, int(batch))

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803  Spark's name
        """Publish the batch, unless it has been published before."""
        del batchId  # the tasks have told, together with the query
        self._publish(messages)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Drop what was laid by."""
        del batchId
        self._drop(messages)
