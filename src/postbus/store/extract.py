"""The tables as Arrow, by ranges of ids: what Spark reads. Nothing here is imported unless somebody extracts."""

# pyright: basic
# Arrow comes without types.
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import orjson
import pyarrow as pa

MOMENT: Final = pa.timestamp("us", tz="UTC")
TAGS: Final = pa.list_(pa.string())
METADATA: Final = pa.map_(pa.string(), pa.string())

RELATIONS: Final[Mapping[str, pa.Schema]] = {
    "events": pa.schema(
        {
            "id": pa.int64(),
            "uid": pa.string(),
            "type": pa.string(),
            "tags": TAGS,
            "key": pa.string(),
            "title": pa.string(),
            "description": pa.string(),
            "payload": pa.string(),
            "metadata": METADATA,
            "created_at": MOMENT,
            "priority": pa.int32(),
            "max_retries": pa.int32(),
        }
    ),
    "audit": pa.schema(
        {
            "id": pa.int64(),
            "event_id": pa.int64(),
            "subscription": pa.string(),
            "action": pa.string(),
            "created_at": MOMENT,
            "status": pa.string(),
            "attempt": pa.int32(),
            "epoch": pa.int64(),
            "worker_id": pa.string(),
            "status_code": pa.int32(),
            "error_type": pa.string(),
            "error_message": pa.string(),
            "execution_time_ms": pa.float64(),
            "type": pa.string(),
            "tags": TAGS,
            "priority": pa.int32(),
            "event_created_at": MOMENT,
            "ready_at": MOMENT,
            "claimed_at": MOMENT,
            "retry_count": pa.int32(),
            "errors": pa.string(),
        }
    ),
    "deliveries": pa.schema(
        {
            "event_id": pa.int64(),
            "subscription": pa.string(),
            "status": pa.string(),
            "type": pa.string(),
            "tags": TAGS,
            "priority": pa.int32(),
            "created_at": MOMENT,
            "due_at": MOMENT,
            "ready_at": MOMENT,
            "updated_at": MOMENT,
            "claimed_at": MOMENT,
            "attempt": pa.int32(),
            "retry_count": pa.int32(),
            "worker_id": pa.string(),
            "errors": pa.string(),
            "died_at": MOMENT,
        }
    ),
}
"""What can be read, column by column: the two streams, and the unfinished deliveries as they stand."""


def _tags(joined: str | None) -> list[str] | None:
    return None if joined is None else joined.split(",") if joined else []


def _metadata(text: str | None) -> list[tuple[str, str]] | None:
    return None if text is None else list(orjson.loads(text).items())


READ_FROM_TEXT: Final[Mapping[str, Callable[[str | None], Any]]] = {"tags": _tags, "metadata": _metadata}
"""The columns that no database gives as they should be."""


def to_batch(relation: str, columns: Sequence[str], arrays: Iterator[Any]) -> pa.RecordBatch:
    """Return the columns as a batch of the relation's own types; `tags` and `metadata` come as text."""
    schema = pa.schema([RELATIONS[relation].field(name) for name in columns])
    made = [_converted(field, array) for field, array in zip(schema, arrays, strict=True)]
    return pa.record_batch(made, schema=schema)


def _converted(field: pa.Field, array: Any) -> Any:
    if read := READ_FROM_TEXT.get(field.name):
        # Each different value is read once: of tags and metadata there are few beside the rows.
        coded = array.dictionary_encode(null_encoding="encode")
        return pa.array([read(each) for each in coded.dictionary.to_pylist()], field.type).take(coded.indices)
    return array if array.type == field.type else array.cast(field.type)
