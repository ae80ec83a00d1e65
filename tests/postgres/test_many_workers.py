"""Many worker processes on one queue, killed all the time."""

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash.processes import Nursery, Trial, until

WORKERS = 8
OPTIONS = {"lease": 5, "poll_interval": 0.5, "concurrency": 5}


@pytest.fixture
def trial(url: str, tmp_path: Path) -> Iterator[Trial]:
    """Give a trial on a database of its own."""
    trial = Trial(tmp_path, url)
    yield trial
    trial.close()


@pytest.fixture
def nursery(trial: Trial) -> Iterator[Nursery]:
    """Give a nursery of workers."""
    nursery = Nursery(trial)
    yield nursery
    nursery.close()


def done(trial: Trial) -> int:
    """Return how many events have come to an end."""
    sql = "SELECT count(*) FROM event_log WHERE status IN ('COMPLETED', 'COMPLETED_WITH_ERRORS', 'FAILED')"
    return trial.rows(sql)[0][0]


@pytest.mark.timeout(1_800)
@pytest.mark.slow  # postbus torture kill-worker has one in the quick tests
@pytest.mark.parametrize(("count", "rounds", "pause"), [(2_000, 4, 0.1), (100_000, 10_000, 1)])
def test_each_event_is_completed_once_though_workers_are_killed_all_the_time(
    trial: Trial, nursery: Nursery, count: int, rounds: int, pause: float, capsys: pytest.CaptureFixture[str]
):
    """Eight workers, two killed at a time: one end each, every second execution has a cause (S2.2, S4.10, I9, I11)."""
    trial.publish(["pause"] * count)
    for _ in range(WORKERS):
        nursery.begin(options=OPTIONS)
    until(trial.executions, "they are at work")
    began, kills = time.monotonic(), 0
    while (before := done(trial)) < count:
        moment = time.monotonic() + pause
        until(lambda: done(trial) > before and time.monotonic() > moment, "the crew goes on", seconds=60)  # noqa: B023
        for _ in range(2 if kills < 2 * rounds else 0):
            nursery.kill()
            nursery.begin(options=OPTIONS)
            kills += 1
    seconds = time.monotonic() - began
    nursery.close()

    database, executions = trial.database(), trial.executions()
    completed = Counter(row.event_id for row in database.audit if row.action == "COMPLETED")
    dead = sum(row.status == "FAILED" for row in database.audit)
    expired = sum(row.action == "EXPIRED" for row in database.audit)
    with capsys.disabled():
        print(  # noqa: T201  the figures are what a trial is for
            f"\n{count} events, {kills} kills in {seconds:.0f} s: {len(executions)} executions, {expired} expiries, "
            f"{dead} dead"
        )
    assert expired, "the kills met nobody at work"
    assert set(completed.values()) == {1}
    assert len(completed) + dead == count
    assert trial.verdicts() == []
