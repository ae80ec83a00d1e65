"""The lake and the archive, with drivers really killed, while others publish and work."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from postbus import EventBus
from postbus.model import Stream
from postbus.spark import Lake
from postbus.spark.lake import ingest
from postbus.spark.replay import union

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]
ROOT = Path(__file__).resolve().parents[2]
KILLS = int(os.environ.get("POSTBUS_TRIAL_KILLS", "10"))
INGEST = ("ingest.reading", "ingest.files_written", "ingest.manifest_written", "ingest.before_commit_log")
ARCHIVE = ("archive.verifying", "archive.verified", "archive.pruned")
Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start(url: str, tmp_path: Path) -> Iterator[Start]:
    """Give a function that starts a process of the trial, in a group of its own."""
    begun: list[subprocess.Popen[bytes]] = []

    def start(role: str, **config: Any) -> "subprocess.Popen[bytes]":
        given = {"role": role, "url": url, "lake": str(tmp_path / "lake"), "stop": str(tmp_path / "stop"), **config}
        made = [sys.executable, "-m", "tests.spark.trial", json.dumps(given)]
        with (tmp_path / "log").open("ab") as log:
            begun.append(subprocess.Popen(made, cwd=ROOT, start_new_session=True, stderr=log, stdout=log))
        return begun[-1]

    yield start
    for each in begun:
        if each.poll() is None:
            os.killpg(each.pid, signal.SIGKILL)
        each.wait()


def test_the_lake_is_the_log_whenever_a_driver_is_killed(
    spark: SparkSession, bus: EventBus, url: str, kind: str, tmp_path: Path, start: Start, capsys: Any
):
    """Four publish, some commit late or never; drivers and Python workers die, the checkpoint too (P.3, I5, I15)."""
    chance = random.Random("lake")
    crew = [start("publish", seed=seed, late=kind == "postgres") for seed in range(4)] + [start("work")]
    time.sleep(5)
    killed = dict.fromkeys(INGEST, 0)
    for number in range(KILLS):
        for probe in INGEST:
            ended = start("fill", rows=chance.randint(1_000, 5_000), probe=probe, hit=chance.randint(1, 3)).wait(600)
            killed[probe] += ended == -signal.SIGKILL
        # This one ends by itself, so it has all to catch up with that the killed ones left: not a little at a time.
        start("fill", rows=20_000, probe=INGEST[0], hit=1, victim="worker").wait(600)
        if number % 2:
            shutil.rmtree(tmp_path / "lake" / chance.choice(("events", "audit")) / "checkpoint", ignore_errors=True)
    (tmp_path / "stop").touch()
    assert [each.wait(300) for each in crew] == [0] * 5, (tmp_path / "log").read_text(errors="replace")[-4_000:]
    lake = Lake(tmp_path / "lake")
    ingest(spark, url, lake)
    counts = check(spark, url, lake)
    segments = {stream.value: len(lake.manifests[stream].entries()) for stream in Stream}
    with capsys.disabled():
        print(f"\n{kind}: killed at {killed}, {KILLS} workers; rows {counts} in {segments} segments, each once")  # noqa: T201
    assert min(killed.values()) >= KILLS // 2, "the trial did not kill where it should"
    assert min(counts.values()) > 0


def check(spark: SparkSession, url: str, lake: Lake) -> dict[str, int]:
    """Hold the lake against the log; return how many rows both have."""
    counts: dict[str, int] = {}
    for stream in Stream:
        live = spark.read.format("postbus").options(url=url, stream=stream.value).load()
        assert lake.tally(lake.read(spark, stream), stream) == lake.tally(live, stream)
        ids = [row.id for row in lake.read(spark, stream).select("id").collect()]
        assert len(set(ids)) == len(ids)
        assert set(ids) == {row.id for row in live.select("id").collect()}
        counts[stream.value] = len(ids)
    return counts


def test_an_archive_killed_anywhere_leaves_every_event_somewhere(
    spark: SparkSession, bus: EventBus, url: str, kind: str, tmp_path: Path, start: Start, capsys: Any
):
    """In the store, or verified in the lake, or both, after every kill (P.5, I5, I14)."""
    chance, lake, published, killed = random.Random("archive"), Lake(tmp_path / "lake"), 0, 0
    for _ in range(KILLS):
        for probe in ARCHIVE:
            bus.publish_many([{"type": "trial"}] * 25_000)
            published += 25_000
            (tmp_path / "stop").touch()
            assert start("work").wait(600) == 0
            ingest(spark, url, lake)
            stream = chance.choice(list(Stream))
            ended = start(
                "tidy", stream=stream, probe=probe, hit=chance.randint(1, 3 if probe == ARCHIVE[2] else 1)
            ).wait(600)
            killed += ended == -signal.SIGKILL
            whole = union(spark, url, bus.store, lake, Stream.EVENTS).select("id")
            assert (whole.count(), whole.distinct().count()) == (published, published)
    with capsys.disabled():
        print(f"\n{kind}: {killed} archives killed of {3 * KILLS}, {published:,} events, each found every time")  # noqa: T201
    assert killed >= 2 * KILLS
