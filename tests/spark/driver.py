"""A driver in a process of its own: reads a bus as table and as stream on the master it is told, and tells what it saw.

python -m tests.spark.driver MASTER URL FOLDER
"""

import json
import sys
from typing import Any

from pyspark.sql import SparkSession

from postbus.spark import session

COLUMNS = ("id", "uid", "type", "payload", "segment", "unix_micros(created_at) AS moment")
CONFIG = {
    "spark.scheduler.minRegisteredResourcesRatio": "1.0",
    "spark.scheduler.maxRegisteredResourcesWaitingTime": "120s",
    "spark.executor.memory": "1g",
    "spark.sql.shuffle.partitions": "2",
    "spark.ui.enabled": "false",
}


def read(spark: SparkSession, url: str) -> list[list[Any]]:
    """Return the rows of a batch of several tasks."""
    frame = spark.read.format("postbus").options(url=url, minPartitions=4).load()
    return [list(row) for row in frame.selectExpr(*COLUMNS).orderBy("id").collect()]


def follow(spark: SparkSession, url: str, folder: str) -> list[int]:
    """Return the ids of a stream of several batches."""
    frame = spark.readStream.format("postbus").options(url=url, maxOffsetsPerTrigger=30, consumer="driver").load()
    writer = frame.select("id").writeStream.format("parquet").option("path", f"{folder}/ids")
    query = writer.option("checkpointLocation", f"{folder}/here").trigger(availableNow=True).start()
    query.awaitTermination()
    return [row.id for row in spark.read.parquet(f"{folder}/ids").orderBy("id").collect()]


def context(spark: SparkSession) -> Any:
    """Return the JVM's own context, which comes without types."""
    java: Any = spark.sparkContext._jsc
    return java.sc()


def main() -> None:
    """Print what was seen, or why not."""
    master, url, folder = sys.argv[1:]
    spark = session(master or None, config=CONFIG if master else None)
    try:
        told: dict[str, Any] = {"batch": read(spark, url), "stream": follow(spark, url, folder)}
    except Exception as error:  # noqa: BLE001  told to the test
        told = {"error": str(error)}
    if master:
        told["executors"] = len(context(spark).statusTracker().getExecutorInfos()) - 1
    print(json.dumps(told))  # noqa: T201  that is how it tells
    spark.stop()


if __name__ == "__main__":
    main()
