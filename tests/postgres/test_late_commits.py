"""How long commit to claim takes beside a transaction that has published and stays open, and rollbacks all the time.

`POSTBUS_TRIAL_SECONDS` makes it shorter. Run as a module, this file plays a publisher or the worker of the trial.
"""

import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import psycopg
import pytest

from postbus import EventBus
from tests.crash.processes import ROOT, until
from tests.postgres.server import query

SECONDS: Final = float(os.environ.get("POSTBUS_TRIAL_SECONDS", "60"))
RATE: Final = 2_000
BATCH: Final = 20
ROLLBACKS: Final = 50
LATE: Final = 100
PAIR: Final = struct.Struct("qd")
COMMIT_TO_CLAIM: Final = 0.050
LATE_TO_CLAIM: Final = 2.0
SLACK: Final = 10
"""How much longer than on a quiet machine it may take for the trial to pass."""
ENDED: Final = "SELECT sum(coalesce(entries, 1)) FROM event_log WHERE action = 'COMPLETED'"
LEFT: Final = "SELECT isempty(missing), (SELECT count(*) FROM gaps) FROM cursors WHERE subscription = 1"


def note(path: Path, moments: dict[int, float]) -> None:
    """Write down when something happened to events, by their ids."""
    path.write_bytes(b"".join(PAIR.pack(*each) for each in moments.items()))


def noted(path: Path) -> dict[int, float]:
    """Return what was written down."""
    return dict(PAIR.iter_unpack(path.read_bytes()))


def evenly(seconds: float, rate: float) -> Iterator[int]:
    """Count, so many times a second."""
    began = time.monotonic()
    for number in range(int(seconds * rate)):
        time.sleep(max(0.0, began + number / rate - time.monotonic()))
        yield number


# ── the children ─────────────────────────────────────────────────────────────────────────────────────────────────


def publish(url: str, folder: str, seconds: float) -> None:
    """Publish evenly; write down when each event was known to be committed."""
    bus, committed = EventBus(url), dict[int, float]()
    for number in evenly(seconds, RATE / BATCH):
        events = bus.publish_many([{"type": "order.placed", "payload": {"order": number}}] * BATCH)
        committed |= dict.fromkeys((event.id for event in events), time.monotonic())
    bus.shutdown()
    note(Path(folder) / "committed", committed)


def roll_back(url: str, folder: str, seconds: float) -> None:
    """Publish, and undo it, again and again."""
    del folder
    bus = EventBus(url)
    with psycopg.connect(url) as connection:
        for _ in evenly(seconds, ROLLBACKS):
            bus.publish("order.undone", connection=connection)
            connection.rollback()
    bus.shutdown()


def work(url: str, folder: str, seconds: float) -> None:
    """Handle until told to stop; write down when each event was claimed, and fail if one was claimed twice."""
    del seconds
    bus, claimed = EventBus(url), dict[int, float]()
    claim = bus.store.claim

    def timed(*given: Any) -> Any:
        result = claim(*given)
        now = time.monotonic()
        for each in result.deliveries:
            assert each.id not in claimed
            claimed[each.id] = now
        return result

    setattr(bus.store, "claim", timed)  # noqa: B010  a method of one instance
    bus.subscribe("*", lambda _: None)
    with bus:
        sys.stdin.readline()
    note(Path(folder) / "claimed", claimed)


# ── the trial ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def start(url: str, tmp_path: Path) -> Iterator[Callable[[Callable[..., None]], subprocess.Popen[bytes]]]:
    """Give a function that starts a child, and end those that are left."""
    children: list[subprocess.Popen[bytes]] = []

    def start(role: Callable[..., None]) -> subprocess.Popen[bytes]:
        config = json.dumps({"url": url, "folder": str(tmp_path), "seconds": SECONDS})
        children.append(
            subprocess.Popen(
                [sys.executable, "-m", "tests.postgres.test_late_commits", role.__name__, config],
                cwd=tmp_path,
                env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "src")))},
                stdin=subprocess.PIPE,
            )
        )
        return children[-1]

    yield start
    for child in children:
        child.kill()
        child.communicate()


def told(values: list[float]) -> str:
    """Return the figures of some times, in ms."""
    p50, p99, most = (1_000 * sorted(values)[int(share * (len(values) - 1))] for share in (0.5, 0.99, 1))
    return f"p50 {p50:.1f}, p99 {p99:.1f}, max {most:.0f} ms ({len(values)})"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_transaction_that_stays_open_delays_no_claim(
    url: str,
    tmp_path: Path,
    connect: Callable[..., psycopg.Connection[Any]],
    start: Callable[[Callable[..., None]], subprocess.Popen[bytes]],
    capsys: pytest.CaptureFixture[str],
):
    """For a minute, beside 50 rollbacks/s: commit to claim stays short, and its own events come soon (C3, I10)."""
    bus = EventBus(url)
    stalled = connect(autocommit=False)
    late = [event.id for event in bus.publish_many([{"type": "order.late"}] * LATE, connection=stalled)]
    worker = start(work)
    publishers = start(publish), start(roll_back)
    assert [each.wait(SECONDS + 60) for each in publishers] == [0, 0]
    stalled.commit()
    committed_late = time.monotonic()
    published = noted(tmp_path / "committed")
    until(lambda: query(url, ENDED) == [(len(published) + LATE,)], "all is handled", seconds=60)
    worker.communicate(b"stop\n", timeout=60)
    assert worker.returncode == 0, "an event was claimed twice"

    claimed = noted(tmp_path / "claimed")
    assert claimed.keys() == published.keys() | set(late)
    waits = [max(0.0, claimed[event] - moment) for event, moment in published.items()]
    own = [claimed[event] - committed_late for event in late]
    with capsys.disabled():
        print(  # noqa: T201  the figures are what a long trial is for
            f"\nbeside a transaction open for {SECONDS:.0f} s: commit to claim {told(waits)}; "
            f"its own events: {told(own)}; load {os.getloadavg()[0]:.1f}"
        )
    assert sorted(waits)[int(0.99 * len(waits))] < SLACK * COMMIT_TO_CLAIM
    assert max(own) < SLACK * LATE_TO_CLAIM
    assert min(own) > -1, "it was claimed before its commit"
    until(lambda: not bus.poll() and query(url, LEFT) == [(True, 0)], "ids that were rolled back are given up")
    bus.shutdown()


if __name__ == "__main__":
    {each.__name__: each for each in (publish, roll_back, work)}[sys.argv[1]](**json.loads(sys.argv[2]))
