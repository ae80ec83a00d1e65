"""Spark jobs that are killed, or whose tasks fail, each in a process: `python -m tests.spark.jobs '{"role": …}'`."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.types import StructType

from postbus import Event, RetryPolicy
from postbus.observe import set_probe
from postbus.spark import handle, session
from postbus.spark.sink import StreamWriter
from postbus.spark.source import PostbusSource

Config = dict[str, Any]
FAILS_AFTER = 12_000
"""How many rows a task lays by before it fails: more than are laid by at once."""


class StoppingWriter(StreamWriter):
    """Comes to a stop before or after the commit, and says so, for its driver to be killed there."""

    moment: str
    marker: str

    def commit(self, messages: list[Any], batchId: int) -> None:  # noqa: N803  Spark's name
        """Publish the first batch; stop at the second."""
        if self.moment == "after" or batchId == 0:
            super().commit(messages, batchId)
        if batchId == 1:
            Path(self.marker).touch()
            time.sleep(60)
            os._exit(1)


class StoppingSource(PostbusSource):
    """The source and sink, with a sink that stops."""

    def streamWriter(self, schema: StructType, overwrite: bool) -> StoppingWriter:  # noqa: FBT001, N802, ARG002  Spark's
        """Return the writer that stops."""
        made = StoppingWriter(self.options["url"], schema)
        made.moment, made.marker = os.environ["STOP"], os.environ["MARKER"]
        return made


def pour(spark: SparkSession, config: Config) -> None:
    """Publish the lines of files as a stream, a file a batch."""
    if "STOP" in os.environ:
        spark.dataSource.register(StoppingSource)
    folder = Path(config["folder"])
    lines = spark.readStream.format("text").option("maxFilesPerTrigger", 1).load(str(folder / "in")).repartition(2)
    events = lines.select(sf.lit("line").alias("type"), sf.to_json(sf.struct("value")).alias("payload"))
    writing = events.writeStream.format("postbus").option("url", config["url"])
    checkpoint = str(folder / "checkpoint")
    writing.option("checkpointLocation", checkpoint).trigger(availableNow=True).start().awaitTermination()


def falter(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Hand rows on; the first two attempts of the second partition break off on the way."""
    context = TaskContext.get()
    assert context is not None
    fails = context.partitionId() == 1 and context.attemptNumber() < 2
    count = 0
    for batch in batches:
        for start in range(0, batch.num_rows, 1_000):
            if fails and count >= FAILS_AFTER:
                raise RuntimeError("this attempt was meant to fail")
            yield batch.slice(start, 1_000)
            count += 1_000


def save(spark: SparkSession, config: Config) -> None:
    """Publish numbers from two partitions, one of which fails at first."""
    numbers = spark.range(config["count"]).repartition(2).mapInArrow(falter, "id BIGINT")
    events = numbers.select(sf.lit("n").alias("type"), sf.col("id").cast("string").alias("payload"))
    events.write.format("postbus").option("url", config["url"]).mode("append").save()


def fail_there(driver: int) -> Callable[[Event], None]:
    """Return a function that fails for every third event on the executors, and for every sixth in the driver too."""

    def function(event: Event) -> None:
        if event.payload % 6 == 0 or (event.payload % 3 == 0 and os.getpid() != driver):
            raise ValueError("oops")

    return function


def serve(spark: SparkSession, config: Config) -> None:
    """Handle the bus's events until they are all handled; die at a probe if asked to."""

    def die(name: str) -> None:
        if name == os.environ.get("STOP"):
            os.kill(os.getpid(), signal.SIGKILL)

    set_probe(die)
    stream = spark.readStream.format("postbus").option("url", config["url"]).option("consumer", "shop").load()
    handle(
        stream,
        fail_there(os.getpid()),
        url=config["url"],
        consumer="shop",
        checkpoint=f"{config['folder']}/checkpoint",
        retry=RetryPolicy(max_retries=1, base_delay=config["pause"]),
        trigger={"availableNow": True},
    ).awaitTermination()


ROLES: dict[str, Callable[[SparkSession, Config], None]] = {"pour": pour, "save": save, "serve": serve}


if __name__ == "__main__":
    asked: Config = json.loads(sys.argv[1])
    ROLES[asked["role"]](session(asked.get("master", "local[2]"), config={"spark.driver.memory": "1g"}), asked)
