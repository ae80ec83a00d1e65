"""Who is alive: known on one host by locked files, elsewhere by the time since a process last reported."""

import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from postbus.cli.top import _Viewer
from postbus.dashboard.views import processes
from postbus.doctor import Patient
from postbus.model import Event, HandlerRecord
from postbus.retry import RetryPolicy
from postbus.store import Log
from postbus.store.base import SqlStore
from postbus.testing import FrozenClock
from tests.contract.following import lead, stand, standby
from tests.contract.stores import Operator

MINUTE = timedelta(minutes=1)


@pytest.fixture
def files(store: Log) -> Path:
    """Give the folder of the locked files, empty; one that nobody locks is that of a dead process."""
    assert isinstance(store, SqlStore)
    folder = store._liveness._folder
    shutil.rmtree(folder, ignore_errors=True)  # of one database there are those that the tests before have left
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def register(store: Log, clock: FrozenClock) -> Callable[..., None]:
    """Register a handler of order.* in the name of a process, seen some time ago."""

    def of(owner: str, ago: timedelta = timedelta()) -> None:
        seen = clock.now() - ago
        store.register_handlers([HandlerRecord(owner, "ship", "default", "order.*", (), "host:1", owner, seen)])

    return of


def gone(store: Log) -> list[bool]:
    """Return whether the one process is gone, by whoever is asked: the store, the dashboard, `top` and `doctor`."""
    (record,), (process,) = store.handlers(), processes(store)
    (worker,) = _Viewer(store, None).look().workers
    (finding,) = Patient(store, "").lost_handlers()
    return [record.gone, process.gone, worker.silent, not finding.ok]


def test_a_dead_process_stays_dead_through_housekeeping(
    op: Operator, store: Log, events: list[Event], files: Path, register: Callable[..., None]
):
    """While a lease or a lead names it, others must be able to tell; its handlers are forgotten (S1.15, S4.7, I10)."""
    for owner in ("holder", "leader", "handler", "nobody"):
        (files / owner).touch()
    op.take(owner="holder")
    lead(store, "leader")
    register("handler")
    store.tidy()
    assert sorted(each.name for each in files.iterdir()) == ["holder", "leader"]
    assert (store.handlers(), stand(store).gone) == ((), True)
    assert store.expire(["holder"], RetryPolicy()) == 1
    assert standby(store, "heir") is not None
    store.tidy()
    assert list(files.iterdir()) == []


def test_everybody_agrees_on_who_is_dead(store: Log, files: Path, register: Callable[..., None]):
    """A handler seen just now is gone if its process is; nobody counts on it (S0.9)."""
    register("p")
    assert gone(store) == [False] * 4
    (files / "p").touch()
    assert gone(store) == [True] * 4


@pytest.mark.parametrize("ago", [4 * MINUTE, -4 * MINUTE, timedelta(days=30), -timedelta(days=30)])
def test_who_is_alive_is_so_whatever_the_clock_says(
    op: Operator, store: Log, register: Callable[..., None], ago: timedelta
):
    """A lock is no matter of time: a clock that was set forward or back makes no handler vanish (S0.9)."""
    op.publish("order.placed")
    with store.mark_alive("p"):
        register("p", ago)
        store.tidy()
        assert gone(store) == [False] * 4
        assert store.stats().unhandled == {}
        store.forget_handlers("p")


@pytest.mark.parametrize(("ago", "lost"), [(3 * MINUTE, False), (4 * MINUTE, True), (-4 * MINUTE, True)])
def test_on_another_host_silence_decides(
    op: Operator, store: Log, register: Callable[..., None], ago: timedelta, *, lost: bool
):
    """Who lives reports every minute; a report from the future was made before the clock was set back (S0.9)."""
    op.publish("order.placed")
    register("p", ago)
    assert gone(store) == [lost] * 4
    assert bool(store.stats().unhandled) is lost


def test_whoever_leaves_a_lease_behind_is_known_to_its_process_s_end(op: Operator, store: Log, files: Path):
    """Only so can others tell when that is; whoever leaves none is forgotten at once (S1.15, I10)."""
    op.publish_all({"type": "a"}, {"type": "a"})
    with store.mark_alive("tidy"):
        op.settle(op.take(owner="tidy"))
    with store.mark_alive("hasty"):
        op.take(owner="hasty")
    assert [each.name for each in files.iterdir()] == ["hasty"]
    assert not store.is_dead("hasty")
