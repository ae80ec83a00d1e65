"""The pipeline: the source beside Spark's own JDBC, the sink beside `publish_many`, the lake as it grows."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import psycopg
from psycopg.conninfo import conninfo_to_dict
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812  as everybody who writes Spark calls it
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from bench import load
from postbus import EventBus
from postbus.spark import Lake, session
from postbus.spark.lake import ingest

__all__ = ["grow", "jar", "read", "sink"]

URL: Final = os.environ.get("BENCH_URL", "")
JAR: Final = Path("/usr/share/java/postgresql.jar")
COLUMNS: Final = (
    "id, uid, type, tags, key, title, description, payload::text, metadata::text, created_at, priority, max_retries"
)
SCHEMA: Final = (
    "id BIGINT, uid STRING, type STRING, tags STRING, key STRING, title STRING, description STRING, payload STRING, "
    "metadata STRING, created_at TIMESTAMP, priority INT, max_retries INT"
)
PARTS: Final = 2
CHUNK: Final = 5_000


def jar() -> Path | None:
    """Return PostgreSQL's JDBC driver, if Debian's package of it is installed."""
    return JAR if JAR.exists() else None


def _fill(count: int) -> EventBus:
    """Publish events that nobody works on."""
    bus = EventBus(URL)
    if any(each.name == "default" for each in bus.subscriptions.list()):
        bus.subscriptions.delete("default")
    for _ in range(count // CHUNK):
        bus.publish_many(load.events(CHUNK))
    return bus


def _address() -> dict[str, str]:
    """Return where this sample's database listens on loopback: JDBC knows no sockets."""
    given = conninfo_to_dict(URL)
    return {"host": "127.0.0.1", "port": str(given["port"]), "database": str(given["dbname"]), "user": "postgres"}


class _Tuples(DataSource):
    """The same read, a Python tuple a row: what the source would be without Arrow."""

    @classmethod
    def name(cls) -> str:
        """Return its name."""
        return "tuples"

    def schema(self) -> str:
        """Return its columns."""
        return SCHEMA

    def reader(self, schema: Any) -> DataSourceReader:
        """Return its reader."""
        del schema
        return _TupleReader(self.options["url"], int(self.options["through"]))


class _TupleReader(DataSourceReader):
    def __init__(self, url: str, through: int) -> None:
        self._url, self._through = url, through

    def partitions(self) -> list[InputPartition]:
        """Cut the range as the others do."""
        step = self._through // PARTS
        return [InputPartition((step * n, step * (n + 1) if n + 1 < PARTS else self._through)) for n in range(PARTS)]

    def read(self, partition: InputPartition) -> Iterator[tuple[Any, ...]]:
        """Read a part, fetched on the fly."""
        with psycopg.connect(self._url) as db, db.cursor("bench") as cursor:
            cursor.itersize = 10_000
            cursor.execute(f"SELECT {COLUMNS} FROM postbus.events WHERE id > %s AND id <= %s", partition.value)  # noqa: S608  # pyright: ignore[reportArgumentType, reportCallIssue]
            yield from cursor


def read(count: int, rounds: int) -> dict[str, float]:
    """Read the log to nowhere, in turn by each way, in one session; return rows a second by way."""
    _fill(count).shutdown()
    address = _address()
    there = "postgresql://{user}@{host}:{port}/{database}".format(**address)
    with psycopg.connect(URL) as db:
        row = db.execute("SELECT max(id) FROM postbus.events").fetchone()
        through = row[0] if row else 0
    found = jar()
    spark = session(f"local[{PARTS}]", config={} if found is None else {"spark.jars": str(found)})
    spark.dataSource.register(_Tuples)

    def ours() -> Any:
        return spark.read.format("postbus").options(url=there, minPartitions=PARTS, maxRecordsPerPartition=count).load()

    def tuples() -> Any:
        return spark.read.format("tuples").options(url=there, through=through).load()

    def jdbc() -> Any:
        bounds = {"partitionColumn": "id", "lowerBound": 0, "upperBound": through, "numPartitions": PARTS}
        where = {"url": "jdbc:postgresql://{host}:{port}/{database}".format(**address), "user": address["user"]}
        query = {"dbtable": f"(SELECT {COLUMNS} FROM postbus.events) AS e", "fetchsize": 10_000}  # noqa: S608  ours
        driver = {"driver": "org.postgresql.Driver"}
        return spark.read.format("jdbc").options(**bounds, **where, **query, **driver).load()

    ways: dict[str, Callable[[], Any]] = {"postbus": ours, "tuples": tuples} | ({"JDBC": jdbc} if found else {})
    took: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            began = time.perf_counter()
            way().write.format("noop").mode("overwrite").save()
            if number:
                took[name].append(time.perf_counter() - began)
    spark.stop()
    return {name: count / sorted(times)[len(times) // 2] for name, times in took.items()}


def grow(sizes: list[int]) -> dict[str, float]:
    """Bring a log into a lake at several sizes, each from the last on; return rows a second of each step."""
    spark, rates, have = session(f"local[{PARTS}]"), dict[str, float](), 0
    for number, size in enumerate([CHUNK, *sizes]):  # the first only warms up
        bus = _fill(size - have)
        began = time.perf_counter()
        ingest(spark, URL, Lake("lake"))
        if number:
            rates[f"{size:,}"] = (size - have) / (time.perf_counter() - began)
        have = size
        bus.shutdown()
    spark.stop()
    return rates


def sink(count: int) -> dict[str, float]:
    """Publish the same events by `publish_many` and from a DataFrame; return rows a second of both."""
    bus = EventBus(URL)
    bus.publish_many(load.events(CHUNK))
    began = time.perf_counter()
    for _ in range(count // CHUNK):
        bus.publish_many(load.events(CHUNK))
    rates = {"publish_many": count / (time.perf_counter() - began)}
    spark = session(f"local[{PARTS}]")
    for size in (CHUNK, count):
        frame = _orders(spark, size)
        began = time.perf_counter()
        frame.write.format("postbus").option("url", URL).mode("append").save()
        rates["sink"] = size / (time.perf_counter() - began)
    spark.stop()
    bus.shutdown()
    return rates


def _orders(spark: SparkSession, count: int) -> Any:
    body = F.to_json(F.struct(F.col("id").alias("order"), F.lit("x" * 80).alias("note")))
    return spark.range(0, count, 1, PARTS).select(F.lit(load.TYPE).alias("type"), body.alias("payload"))


if __name__ == "__main__":
    sys.exit("run it by python -m bench --only spark-source …")
