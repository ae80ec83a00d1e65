"""The same results on a cluster as on one host: processes of their own for master, workers, executors and driver."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyspark
import pytest

from postbus import EventBus
from tests.kinds import on_sqlite
from tests.spark.reading import rows_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
on_postgres = pytest.mark.parametrize("kind", ["postgres"])
ROOT = Path(__file__).parents[2]
SPARK_CLASS = Path(pyspark.__file__).parent / "bin" / "spark-class"
HERE = {"SPARK_LOCAL_IP": "127.0.0.1", "SPARK_NO_DAEMONIZE": "1"}


@contextmanager
def daemon(log: Path, name: str, *arguments: str) -> Generator[None]:
    """Run one of Spark's own programs until the end of the block, its log in a file."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            [SPARK_CLASS, name, *arguments], env={**os.environ, **HERE}, stdout=file, stderr=subprocess.STDOUT
        )
        try:
            yield
        finally:
            process.terminate()
            process.wait(60)


@pytest.fixture
def standalone(tmp_path: Path, eventually: Callable[..., Any]) -> Iterator[str]:
    """Give the address of a master with two workers."""
    said = tmp_path / "master.log"
    with daemon(
        said, "org.apache.spark.deploy.master.Master", "--host", "127.0.0.1", "--port", "0", "--webui-port", "0"
    ):
        found = eventually(lambda: re.search(r"Starting Spark master at (spark://\S+)", said.read_text()), 120)
        worker = [
            "org.apache.spark.deploy.worker.Worker",
            "--host",
            "127.0.0.1",
            "-c",
            "1",
            "-m",
            "1g",
            "--webui-port",
            "0",
        ]
        with (
            daemon(tmp_path / "one.log", *worker, "-d", str(tmp_path / "one"), found[1]),
            daemon(tmp_path / "two.log", *worker, "-d", str(tmp_path / "two"), found[1]),
        ):
            eventually(lambda: said.read_text().count("Registering worker") == 2, 120)
            yield found[1]


@pytest.fixture
def master(request: pytest.FixtureRequest) -> str:
    """Give the master a test names, started if it must be."""
    return request.getfixturevalue("standalone") if request.param == "standalone" else request.param


def drive(master: str, url: str, folder: Path) -> dict[str, Any]:
    """Run a driver; return what it tells."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.spark.driver", master, url, str(folder / "out")],
        env={**os.environ, **HERE},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


MASTERS = pytest.mark.parametrize("master", ["local-cluster[2,1,1024]", "standalone"], indirect=True)


@on_postgres
@MASTERS
def test_a_cluster_reads_what_one_host_reads(master: str, url: str, bus: EventBus, tmp_path: Path):
    """As a table and as a stream, by two executors, each row once (P.1, P.7, I15)."""
    bus.publish_many([{"type": "a", "payload": {"n": number, "ü": "☃"}} for number in range(100)])
    told = drive(master, url, tmp_path)
    assert told.get("error") is None
    assert told["executors"] == 2
    expected = [[row[name] for name in ("id", "uid", "type", "payload", "segment")] for row in rows_of(url)]
    assert [row[:5] for row in told["batch"]] == expected
    assert [row[5] for row in told["batch"]] == [round(row["created_at"].timestamp() * 1e6) for row in rows_of(url)]
    assert told["stream"] == [row[0] for row in expected]
    (checkpoint,) = bus.stats().checkpoints
    assert checkpoint.subscription == "driver"


@on_sqlite
@MASTERS
def test_a_cluster_refuses_a_file(master: str, url: str, bus: EventBus, tmp_path: Path):
    """With our words: executors elsewhere would find no file, or another (P.7)."""
    bus.publish_many([{"type": "a"}] * 3)
    assert "is a file of one host" in drive(master, url, tmp_path)["error"]
