"""The sink and the handling of streams, with drivers really killed and tasks that really fail."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from postbus import EventBus
from postbus.model import Action

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
ROOT = Path(__file__).resolve().parents[2]
Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start(url: str, tmp_path: Path) -> Iterator[Start]:
    """Give a function that starts a Spark job in a process group of its own."""
    begun: list[subprocess.Popen[bytes]] = []

    def start(role: str, **config: Any) -> subprocess.Popen[bytes]:
        stop = config.pop("stop", None)
        env = os.environ | ({"STOP": stop, "MARKER": str(tmp_path / "marker")} if stop else {})
        given = json.dumps({"role": role, "url": url, "folder": str(tmp_path), **config})
        command = [sys.executable, "-m", "tests.spark.jobs", given]
        with (tmp_path / "told").open("ab") as told:
            begun.append(subprocess.Popen(command, cwd=ROOT, env=env, start_new_session=True, stderr=told))
        return begun[-1]

    yield start
    for each in begun:
        kill(each)


def kill(job: "subprocess.Popen[bytes]") -> None:
    """End a driver, its JVM and all, the hard way."""
    with suppress(ProcessLookupError):
        os.killpg(job.pid, signal.SIGKILL)
    job.wait()


def finish(job: "subprocess.Popen[bytes]", folder: Path) -> None:
    """Wait until a job has done its work."""
    assert job.wait(timeout=300) == 0, (folder / "told").read_text()[-4_000:]


def lines(bus: EventBus) -> Counter[str]:
    """Return how often each line was published."""
    return Counter(event.payload["value"] for event in bus.list(limit=10_000))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_driver_killed_around_the_commit_publishes_each_row_once(
    bus: EventBus, start: Start, tmp_path: Path, eventually: Callable[..., Any], moment: str
):
    """Between write and commit, or between commit and Spark's own note of it (P.2, I2, I3)."""
    (tmp_path / "in").mkdir()
    for name in ("one", "two", "three"):
        (tmp_path / "in" / name).write_text("".join(f"{name}-{number}\n" for number in range(50)))
    job = start("pour", stop=moment)
    eventually(lambda: (tmp_path / "marker").exists() or job.poll() is not None, within=300)
    kill(job)
    assert sum(lines(bus).values()) == len(lines(bus)) == (50 if moment == "before" else 100)
    finish(start("pour"), tmp_path)
    assert sum(lines(bus).values()) == len(lines(bus)) == 150


@pytest.mark.timeout(600)
def test_a_task_that_is_tried_again_publishes_each_row_once(bus: EventBus, start: Start, tmp_path: Path):
    """What its first attempts had laid by is not published, and is gone (P.2, I2, I3)."""
    count = 40_000
    finish(start("save", master="local[2,3]", count=count), tmp_path)
    assert bus.stats().events == count
    seen: set[int] = set()
    after = None
    while page := bus.list(limit=10_000, after=after):
        seen.update(event.payload for event in page)
        after = page.next
        if after is None:
            break
    assert seen == set(range(count))
    names = ("staged", "parts") if bus.store.url.startswith("sqlite") else ("postbus.staged", "postbus.parts")
    with bus.transaction() as tx:
        assert [tx.execute(f"SELECT count(*) FROM {name}") for name in names] == [[(0,)], [(0,)]]  # noqa: S608  ours


@pytest.mark.timeout(600)
@pytest.mark.parametrize("moment", ["diverting", "diverted"])
def test_a_driver_killed_around_the_failures_loses_none(bus: EventBus, start: Start, tmp_path: Path, moment: str):
    """The batch is replayed; each failure is recorded once (P.1, I9)."""
    events = bus.publish_many([{"type": "n", "payload": number} for number in range(60)])
    # What its own worker had in hand when it dies has had its last attempt, and is dead: nothing may be due by then.
    job = start("serve", stop=moment, pause=10.0)
    job.wait(timeout=300)
    assert job.returncode == -signal.SIGKILL
    kill(job)
    finish(start("serve", pause=0.01), tmp_path)
    by_payload = {event.payload: event.id for event in events}
    dead = {each.event.payload for each in bus.dlq.list(subscription="shop")}
    assert dead == set(range(0, 60, 6))
    for payload in range(0, 60, 3):
        event = bus.get(by_payload[payload], subscription="shop", include_logs=True)
        assert event.status == ("FAILED" if payload in dead else "COMPLETED")
        assert [log.action for log in event.logs].count(Action.FAILED) == (2 if payload in dead else 1)
