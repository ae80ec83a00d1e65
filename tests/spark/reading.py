"""The source's own classes driven as Spark drives them, without Spark."""

import pickle
from collections.abc import Iterator
from typing import Any

from pyspark.sql.streaming.datasource import ReadLimit
from pyspark.sql.types import StructType

from postbus.spark.source import BatchReader, ReadOptions, StreamReader

__all__ = ["Following", "batch_reader", "read_slice", "rows_of", "stream_reader"]

Row = dict[str, Any]


def batch_reader(url: str, schema: StructType | None = None, **options: Any) -> BatchReader:
    """Return a reader of what there is."""
    read = ReadOptions.of({"url": url, **{name: str(value) for name, value in options.items()}})
    return BatchReader(read, schema or read.schema)


def stream_reader(url: str, schema: StructType | None = None, **options: Any) -> StreamReader:
    """Return a reader that goes on."""
    read = ReadOptions.of({"url": url, **{name: str(value) for name, value in options.items()}})
    return StreamReader(read, schema or read.schema)


def read_slice(reader: BatchReader | StreamReader, part: Any) -> Iterator[Row]:
    """Read one slice as a worker would: with what could be sent to it, and nothing else."""
    there, carried = pickle.loads(pickle.dumps((reader, part)))  # noqa: S301  our own
    for batch in there.read(carried):
        yield from batch.to_pylist()


def rows_of(url: str, schema: StructType | None = None, **options: Any) -> list[Row]:
    """Return all rows of a batch read, slice by slice."""
    reader = batch_reader(url, schema, **options)
    return [row for part in reader.partitions() for row in read_slice(reader, part)]


class Following:
    """A stream as Spark runs it: offsets first, then slices, then the commit of the batch before."""

    def __init__(self, url: str, since: dict[str, Any] | None = None, **options: Any) -> None:
        """Begin where the reader says, or go on from an offset."""
        self.reader = stream_reader(url, **options)
        self.batches: list[list[int]] = []
        try:
            self.offset = since or self.reader.initialOffset()
        except BaseException:
            self.close()
            raise

    @property
    def seen(self) -> list[int]:
        """The ids of all batches."""
        return [each for batch in self.batches for each in batch]

    def turn(self, limit: ReadLimit | None = None) -> list[int]:
        """Take the next batch; return its ids."""
        self.reader.commit(self.offset)
        end = self.reader.latestOffset(self.offset, limit or self.reader.getDefaultReadLimit())
        if end == self.offset:
            return []
        slices = self.reader.partitions(self.offset, end)
        self.batches.append([row["id"] for part in slices for row in read_slice(self.reader, part)])
        self.offset = end
        return self.batches[-1]

    def to_the_end(self) -> list[int]:
        """Take batches until there is nothing new; return all ids seen."""
        while self.turn():
            pass
        return self.seen

    def close(self) -> None:
        """Give the connection back."""
        self.reader.stop()
