"""The password of a bus on Spark: in no plan, log, file, pickle, name of a value, or list of processes."""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType
from typer.testing import CliRunner

from postbus import EventBus
from postbus.cli.app import app
from postbus.errors import InvalidRequest
from postbus.retry import RetryPolicy
from postbus.spark import Lake
from postbus.spark.handling import Diversion
from postbus.spark.lake import _Options
from postbus.spark.manifest import Folder
from postbus.spark.source import BatchReader, PostbusSource, ReadOptions
from tests.security.hearing import command_lines, hearing

CANARY: Final = "c4n4ry-s3cr3t"
on_postgres = pytest.mark.parametrize("kind", ["postgres"])


@pytest.fixture
def secret(url: str) -> str:
    """Give the address of the bus, with a password in it (which this server does not ask for)."""
    return url.replace("postgres@", f"postgres:{CANARY}@")


@contextmanager
def writing(spark: SparkSession, folder: Path) -> Iterator[None]:
    """Have Spark write its event log into a folder, as `spark.eventLog.enabled` does, until the end of the block."""
    folder.mkdir()
    java: Any = spark.sparkContext._jsc
    jvm: Any = spark.sparkContext._jvm
    context = java.sc()
    plain = context.conf().clone().set("spark.eventLog.compress", "false")
    listener = jvm.org.apache.spark.scheduler.EventLoggingListener(
        context.applicationId(), context.applicationAttemptId(), jvm.java.net.URI(f"file://{folder}"), plain
    )
    listener.start()
    context.addSparkListener(listener)
    yield
    context.listenerBus().waitUntilEmpty()
    context.removeSparkListener(listener)
    listener.stop()


def files_below(folder: Path) -> str:
    """Return all that lies in a folder."""
    return "".join(f"{file} {file.read_bytes()!r}\n" for file in folder.rglob("*") if file.is_file())


@on_postgres
def test_nothing_that_spark_shows_or_writes_tells_the_password(
    spark: SparkSession,
    bus: EventBus,
    secret: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    """Plans in every mode, event log, lake, checkpoints, commands, errors of workers, and `ps` (I17)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("POSTBUS_URL", secret)
    bus.publish_many([{"type": "a", "payload": number} for number in range(3)])
    # py4j, asked for DEBUG, logs every call that it hands on, arguments and all.
    with hearing(but="py4j") as heard, writing(spark, tmp_path / "event-log"):
        frame = spark.read.format("postbus").option("url", secret).load()
        for mode in ("simple", "extended", "codegen", "cost", "formatted"):
            frame.explain(mode=mode)
        again = frame.selectExpr("type", "payload")
        again.write.format("postbus").option("url", secret).mode("append").save()
        told: list[Any] = [again.count(), spark.sparkContext.getConf().getAll()]
        with pytest.raises(Exception, match="no column 'seq'") as refused:
            spark.read.format("postbus").option("url", secret).schema("seq bigint").load().collect()
        away = secret.replace("host=", "port=1&host=")
        with pytest.raises(Exception, match="cannot be used now") as failed:
            spark.read.format("postbus").option("url", away).load().collect()
        told += [refused.value, failed.value, str(failed.value)]
        done = CliRunner().invoke(app, ["pipeline", "ingest", "--lake", "lake"])
        assert done.exit_code == 0, done.output
        told += [done.output, command_lines(), *capfd.readouterr()]
    log = files_below(tmp_path / "event-log")
    assert "SparkListenerSQLExecutionStart" in log
    assert "BatchScan postbus" in log
    assert "BatchScan postbus" in str(told)
    assert "java" in str(told)
    assert [each for each in told if CANARY in str(each)] == []
    assert CANARY not in log
    assert CANARY not in heard.getvalue()
    assert len(list((tmp_path / "lake").rglob("*.parquet"))) >= 2
    assert CANARY not in files_below(tmp_path)


@on_postgres
def test_no_partition_or_value_tells_the_password(spark: SparkSession, bus: EventBus, secret: str):
    """A partition is a range of ids and nothing else; whatever holds the URL shows it not (I17)."""
    bus.publish_many([{"type": "a"}] * 3)
    options = ReadOptions.of({"url": secret, "minPartitions": "2"})
    reader = BatchReader(options, options.schema)
    parts = reader.partitions()
    assert len(parts) == 2
    assert CANARY.encode() not in pickle.dumps(parts)
    source = PostbusSource({"url": secret})
    values = [
        options,
        reader,
        parts,
        source,
        source.reader(source.schema()),
        source.writer(StructType().add("type", "string"), overwrite=False),
    ]
    values += [Diversion(secret, "c", RetryPolicy()), _Options(secret, 1, "c", None)]
    assert CANARY not in f"{values!r} {[str(each) for each in values]}"


@pytest.mark.parametrize(
    "place", [f"s3://AKIA:{CANARY}@bucket/lake", f"s3a://AKIA:a/{CANARY}@bucket/lake", f"abfss://c:{CANARY}@x/lake"]
)
def test_a_lake_whose_address_holds_a_secret_is_refused(place: str):
    """The address is shown, and kept in the bus: it is refused without being repeated (I17)."""
    for use in (Folder, Lake):
        with pytest.raises(InvalidRequest, match="holds no secret") as refused:
            use(place)
        assert CANARY not in str(refused.value)
