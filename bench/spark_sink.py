"""The Spark sink beside `publish_many`, same rows, PostgreSQL, in one run: `python -m bench.spark_sink [rows]`."""

import sys
import time
from collections.abc import Callable

from pyspark.sql import SparkSession
from pyspark.sql import functions as sf

from postbus import EventBus
from postbus.spark import session
from tests.postgres.server import server, stop_server

TEXT = "x" * 60
CHUNK = 5_000
WARM_UP = 20_000
ROUNDS = 3


def sink(spark: SparkSession, url: str, count: int, *, uids: bool) -> float:
    """Return how long Spark takes to publish."""
    number = sf.col("id")
    payload = sf.to_json(sf.struct(number.alias("order_id"), sf.lit(TEXT).alias("text"), (number * 2).alias("amount")))
    uid = [sf.concat(sf.lit("u-"), number.cast("string")).alias("uid")] if uids else []
    kind = sf.concat(sf.lit("order."), (number % 4).cast("string"))
    frame = spark.range(count).select(kind.alias("type"), payload.alias("payload"), *uid).persist()
    frame.count()
    taken = timed(lambda: frame.write.format("postbus").option("url", url).mode("append").save())
    frame.unpersist()
    return taken


def publish_many(url: str, count: int, *, uids: bool) -> float:
    """Return how long the bus itself takes to publish the same."""
    rows = [
        {
            "type": f"order.{number % 4}",
            "payload": {"order_id": number, "text": TEXT, "amount": number * 2},
            **({"uid": f"u-{number}"} if uids else {}),
        }
        for number in range(count)
    ]
    bus = EventBus(url)
    taken = timed(lambda: [bus.publish_many(rows[start : start + CHUNK]) for start in range(0, count, CHUNK)])
    bus.shutdown()
    return taken


def timed(work: Callable[[], object]) -> float:
    """Return the seconds that something takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def main(count: int) -> None:
    """Measure both by turns, and print rows a second and their ratio."""
    spark = session("local[2]", config={"spark.driver.memory": "1g"})
    try:
        with server().database() as url:
            sink(spark, url, WARM_UP, uids=False)
            publish_many(url, WARM_UP, uids=False)
        for uids in (False, True):
            for _ in range(ROUNDS):
                with server().database() as one, server().database() as two:
                    theirs, ours = sink(spark, one, count, uids=uids), publish_many(two, count, uids=uids)
                told = (
                    f"sink {count / theirs:9,.0f}/s   publish_many {count / ours:9,.0f}/s   ratio {ours / theirs:.2f}"
                )
                print(f"{'uids   ' if uids else 'no uids'}  {told}", flush=True)
    finally:
        spark.stop()
        stop_server()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200_000)
