"""A worker that is killed or suspended while it claims or settles a block of several, and the others that go on."""

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from threading import Thread
from typing import Any, Final, Self

import pytest

from postbus import EventBus, RetryPolicy
from postbus.torture.stage import Member
from tests.crash.child import handler
from tests.crash.processes import Nursery, Trial, is_writing, until
from tests.kinds import on_sqlite

BLOCK: Final = 8
LEASE: Final = 0.3
SOON: Final = 1.0
"""Seconds within which another process claims, whatever became of the first."""
POINTS: Final = (
    ("claim", "committing"),
    ("claim", "claimed"),
    ("settle", "settling"),
    ("settle", "committing"),
    ("settle", "settled"),
)
ROUNDS: Final = (1, pytest.param(20, marks=pytest.mark.slow))
TABLES: Final = ("deliveries", "blocks", "event_log")


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """Give a nursery for the workers of all trials."""
    nursery = Nursery(Trial(tmp_path_factory.mktemp("nursery"), "given by each trial"))
    yield nursery
    nursery.close()


class Round:
    """A worker that halts with a block of eight in its hands, another event behind them, and a worker beside it."""

    def __init__(
        self, trial: Trial, nursery: Nursery, number: int, verb: str, probe: str, way: int, then: int = signal.SIGCONT
    ) -> None:
        """Begin, and go on to where it has halted; one that holds the file then gets another signal."""
        self.trial, self._verb, self._probe, self._way, self._then = trial, verb, probe, way, then
        self._ran, self._lost = len(trial.executions()), len(trial.logged("lease_lost"))
        self.other = EventBus(trial.url, retry=RetryPolicy(base_delay=0.02), poll_interval=0.1)
        self.other.subscribe("trial.*", handler(trial.config("work")))
        self.other.stats()
        self.ids = trial.publish(["succeed", *["wait"] * (BLOCK - 1), "succeed"], name=f"r{number}")
        options = {"lease": LEASE if way == signal.SIGSTOP else 60, "prefetch": BLOCK, "concurrency": 1}
        self.victim = Member({}, nursery.begin(trial, options=options, halt=[verb, probe, way, BLOCK]))
        halted = self.victim.rests if way == signal.SIGSTOP else lambda: not self.victim.runs()
        until(halted, f"it halts at {probe} of {verb}")

    @property
    def holds_the_file(self) -> bool:
        """Whether it stands within a transaction of the one writer there is."""
        is_inside = self._way == signal.SIGSTOP and self._probe == "committing"
        return is_inside and self.trial.url.startswith("sqlite:")

    def executions(self) -> Counter[int]:
        """Return how often each event of this round was executed."""
        return Counter(each.event_id for each in self.trial.executions()[self._ran :])

    def ends(self) -> Counter[int]:
        """Return how often each event was completed."""
        return Counter(row.event_id for row in self.trial.database().audit if row.action == "COMPLETED")

    def is_done(self) -> bool:
        """Return whether all of this round are completed."""
        return self.ends().keys() >= set(self.ids)

    def go_on(self) -> float:
        """Have the other worker go on until all is done; return how long its first claim took."""
        began = time.monotonic()
        starting = Thread(target=self.other.start)
        starting.start()
        if self.holds_the_file:
            time.sleep(LEASE)
            assert is_writing(self.trial.url)
            assert self.ids[-1] not in self.executions()
            began = time.monotonic()
            self.send(self._then)
        until(lambda: self.ids[-1] in self.executions(), "the other one claims")
        took = time.monotonic() - began
        starting.join()
        until(self.is_done, "all is done")
        return took

    def send(self, number: int) -> None:
        """Send the halted one a signal."""
        os.kill(self.victim.pid, number)

    def lost(self) -> set[int]:
        """Return of which events the log says that a lease was lost."""
        return {each["event_id"] for each in self.trial.logged("lease_lost")[self._lost :]}

    def stale(self) -> set[int]:
        """Return which events others have had since it was suspended."""
        if self.holds_the_file or self._probe == "settled" or (self._verb, self._probe) == POINTS[0]:
            return set()
        return set(self.ids[self._verb == "settle" : BLOCK])

    def end(self) -> None:
        """Ask both workers to end."""
        if self.victim.runs():
            self.send(signal.SIGTERM)
            until(lambda: not self.victim.runs(), "it ends")
        assert self.other.shutdown()

    def __enter__(self) -> Self:
        """Be the round of a `with` block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Leave none of the two behind."""
        if self.victim.runs():
            self.send(signal.SIGKILL)
        self.other.shutdown()


def everything(trial: Trial) -> list[Any]:
    """Return all that a settlement could change."""
    return [trial.rows(f"SELECT * FROM {table}") for table in TABLES]  # noqa: S608  names from above


def require_kept(trial: Trial) -> None:
    """Raise AssertionError unless each event has come to its one end, and none to a bad one."""
    database = trial.database()
    assert [row for row in database.audit if row.status == "FAILED"] == [], "one died of its neighbour"
    assert database.deliveries == {}
    assert trial.verdicts() == []


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize(("verb", "probe"), POINTS)
def test_a_worker_killed_with_a_block_in_its_hands(
    trial: Trial, nursery: Nursery, verb: str, probe: str, rounds: int, capsys: pytest.CaptureFixture[str]
):
    """What it finished stays finished, the rest runs again, none dies, others claim within 1 s (I8, I9, I10, I12)."""
    took: list[float] = []
    again = 2 if verb == "settle" and probe != "settled" else 1
    for number in range(rounds):
        with Round(trial, nursery, number, verb, probe, signal.SIGKILL) as played:
            took.append(played.go_on())
            played.end()
            runs = played.executions()
            assert [runs[each] for each in played.ids] == [1, *[again] * (BLOCK - 1), 1]
            assert all(played.ends()[each] == 1 for each in played.ids)
    require_kept(trial)
    show(capsys, "killed", trial, verb, probe, took)


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize(("verb", "probe"), POINTS)
def test_a_worker_suspended_with_a_block_in_its_hands(
    trial: Trial, nursery: Nursery, verb: str, probe: str, rounds: int, capsys: pytest.CaptureFixture[str]
):
    """Others claim within 1 s and take over; when it goes on, nothing of theirs changes: its leases are lost (I8, I10).

    Where it holds SQLite's one write transaction, within 1 s of its going on.
    """
    took: list[float] = []
    for number in range(rounds):
        with Round(trial, nursery, number, verb, probe, signal.SIGSTOP) as played:
            took.append(played.go_on())
            if not played.holds_the_file:
                before = everything(trial)
                played.send(signal.SIGCONT)
                until(lambda played=played: played.lost() >= played.stale(), "it is told of its leases")
                assert played.lost() == played.stale()
                assert everything(trial) == before
            played.end()
            assert played.executions()[played.ids[0]] == 1 or verb == "claim", "what it had finished ran again"
            assert all(played.ends()[each] == 1 for each in played.ids)
    require_kept(trial)
    show(capsys, "suspended", trial, verb, probe, took)


@on_sqlite
@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize(("verb", "probe"), [POINTS[0], POINTS[3]])
def test_a_suspended_worker_killed_with_the_file_locked(
    trial: Trial, nursery: Nursery, verb: str, probe: str, rounds: int, capsys: pytest.CaptureFixture[str]
):
    """SQLite's lock goes with its process: others claim within 1 s of its end, and undo what it was about (I2, I10)."""
    took: list[float] = []
    for number in range(rounds):
        with Round(trial, nursery, number, verb, probe, signal.SIGSTOP, then=signal.SIGKILL) as played:
            took.append(played.go_on())
            played.end()
            again = 2 if verb == "settle" else 1
            assert [played.executions()[each] for each in played.ids] == [1, *[again] * (BLOCK - 1), 1]
    require_kept(trial)
    show(capsys, "suspended, then killed", trial, verb, probe, took)


def show(capsys: pytest.CaptureFixture[str], way: str, trial: Trial, verb: str, probe: str, took: list[float]) -> None:
    """Print how long others waited at most, and raise AssertionError if that was too long."""
    if len(took) > 1:
        store, most = trial.url.partition(":")[0], max(took)
        with capsys.disabled():
            print(f"\n{store}, {way} at {probe} of {verb}: others claimed within {most:.3f} s")  # noqa: T201  a figure
    assert max(took) < SOON
