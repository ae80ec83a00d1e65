"""Many worker processes on one queue, killed all the time."""

import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash.processes import Child, Trial, until

WORKERS = 8
OPTIONS = {"lease": 5, "poll_interval": 0.5, "concurrency": 5}


@pytest.fixture
def trial(url: str, tmp_path: Path) -> Iterator[Trial]:
    """Give a trial on a database of its own."""
    trial = Trial(tmp_path, url)
    yield trial
    trial.close()


def done(trial: Trial) -> int:
    """Return how many events have come to an end."""
    sql = "SELECT count(*) FROM event_log WHERE status IN ('COMPLETED', 'COMPLETED_WITH_ERRORS', 'FAILED')"
    return trial.rows(sql)[0][0]


@pytest.mark.timeout(1_800)
@pytest.mark.parametrize(("count", "pause"), [(3_000, 0.5), pytest.param(100_000, 1, marks=pytest.mark.slow)])
def test_each_event_is_completed_once_though_workers_are_killed_all_the_time(
    trial: Trial, count: int, pause: float, capsys: pytest.CaptureFixture[str]
):
    """Eight workers, two killed at a time: one end each, every second execution has its cause (S2.2, S4.10, I9, I11)."""
    chance = random.Random(f"workers {count}")
    trial.publish(["succeed"] * count)
    began = time.monotonic()
    crew = [begin(trial) for _ in range(WORKERS)]
    kills = 0
    while True:
        end = time.monotonic() + pause
        until(lambda end=end: done(trial) == count or time.monotonic() > end, "the next kill", seconds=60)
        if done(trial) == count:
            break
        for place in chance.sample(range(WORKERS), 2):
            crew[place].kill()
            crew[place].close()
            crew[place] = begin(trial)
            kills += 1
        assert time.monotonic() - began < 1_500, f"{done(trial)} of {count} after {kills} kills"
    seconds = time.monotonic() - began
    for each in crew:
        each.kill(15)

    database, executions = trial.database(), trial.executions()
    ends = Counter(row.event_id for row in database.audit if row.action == "COMPLETED")
    with capsys.disabled():
        print(  # noqa: T201  the figures are what a trial is for
            f"\n{count} events, {kills} kills in {seconds:.0f} s: {len(executions)} executions, "
            f"{sum(row.action == 'EXPIRED' for row in database.audit)} expiries, "
            f"{sum(row.status == 'FAILED' for row in database.audit)} dead"
        )
    assert kills >= 2
    assert set(ends.values()) == {1}
    assert len(ends) + sum(row.status == "FAILED" for row in database.audit) == count
    assert trial.verdicts() == []


def begin(trial: Trial) -> Child:
    """Start a worker; it need not be ready to be killed."""
    return trial.start("work", options=OPTIONS)
