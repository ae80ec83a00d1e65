"""Followers killed, stopped and cut off: nothing missed, all in order, repeats only from the last checkpoint."""

import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import psycopg
import pytest

from postbus import EventBus, NewEvent
from postbus.torture.checker import sights
from postbus.torture.history import read
from tests.crash.processes import Child, Trial, until
from tests.kinds import mostly_on_sqlite
from tests.postgres.server import Server, query

PROBES = ("read", "handled", "checkpointing")
WAYS: dict[str, dict[str, Any]] = {
    "each": {"follow": {}},
    "batched": {"follow": {"size": 10}},
    "lists": {"follow": {"batch": 7}},
    "tx": {"follow": {}, "transactional": True},
    "tx lists": {"follow": {"batch": 7}, "transactional": True},
}


def prepare(trial: Trial, count: int) -> list[int]:
    """Make the table of effects, and publish; return the ids."""
    bus = EventBus(trial.url)
    with bus.transaction() as tx:
        tx.execute("CREATE TABLE effects (event_id BIGINT)")
    stored = bus.publish_many([NewEvent(type="trial.event", payload={"do": "see"})] * count)
    bus.shutdown()
    return [event.id for event in stored]


def begin(trial: Trial, **config: Any) -> Child:
    """Start a follower and wait until it runs."""
    child = trial.start("follow", **config)
    child.hear()
    return child


def seen(trial: Trial) -> list[tuple[int, int]]:
    """Return (event, process) as handlers wrote it down."""
    return [(each.event_id, each.pid) for each in sights(read([trial.executions_file]), "trial")]


def position(trial: Trial) -> int:
    """Return where the checkpoint stands."""
    rows = trial.rows("SELECT position FROM checkpoints WHERE subscription = 'trial'")
    return rows[0][0] if rows else 0


def effects(trial: Trial) -> list[int]:
    """Return the effects of transactional handlers, each as often as it is there."""
    return [row[0] for row in trial.rows("SELECT event_id FROM effects ORDER BY event_id")]


def finish(trial: Trial, last: int, *crew: Child, seconds: float = 60) -> None:
    """Wait until all is passed, and end the followers."""
    until(lambda: position(trial) >= last, f"the follower comes to {last}", seconds)
    for each in crew:
        assert each.kill(signal.SIGTERM) == 0, each.errors()


def check_order(trial: Trial, ids: Sequence[int]) -> None:
    """Fail unless every event was seen, each process's in order, none left out on its way."""
    places = {event: place for place, event in enumerate(sorted(ids))}
    by_process: dict[int, list[int]] = {}
    for event, process in seen(trial):
        by_process.setdefault(process, []).append(places[event])
    for run in by_process.values():
        assert all(later == earlier + 1 for earlier, later in pairwise(run)), run
    assert {place for run in by_process.values() for place in run} == set(range(len(ids)))


@mostly_on_sqlite  # postbus torture kill-follower has one on PostgreSQL in the quick tests
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("probe", PROBES)
def test_one_killed_at_a_probe_goes_on_from_its_checkpoint(trial: Trial, probe: str, way: str):
    """Reading, having handled, about to save: what comes again is what no checkpoint had passed (S4.3, S4.6, I6)."""
    ids = prepare(trial, 60)
    hit = random.Random(f"{probe} {way}").randint(1, 1 if probe == "read" else 5)
    victim = trial.start("follow", **WAYS[way], probe=[probe, hit])
    assert victim.wait() == -signal.SIGKILL, victim.errors()
    stood = position(trial)
    again = begin(trial, **WAYS[way])
    finish(trial, ids[-1], again)
    check_order(trial, ids)
    first = min((event for event, process in seen(trial) if process == again.pid), default=0)
    assert first == stood + 1
    if WAYS[way].get("transactional"):
        assert effects(trial) == ids


@pytest.mark.slow  # postbus torture kill-follower has a few in the quick tests
@pytest.mark.parametrize("kills", [10, 500])
@pytest.mark.timeout(3600)
def test_random_kills_of_a_pool_leave_each_effect_once_in_order(
    trial: Trial, kills: int, capsys: pytest.CaptureFixture[str]
):
    """Two processes, one active; SIGKILL whenever: effects exactly once, in the log's order (S4.6, S4.7, I6, I8)."""
    chance = random.Random(f"pool {kills}")
    ids = prepare(trial, 1)
    bus = EventBus(trial.url)
    crew = [begin(trial, **WAYS["tx"]) for _ in range(2)]
    for _ in range(kills):
        ids += [event.id for event in bus.publish_many([NewEvent(type="trial.event", payload={"do": "see"})] * 20)]
        mark = min(position(trial) + chance.randint(1, 15), ids[-1])
        until(lambda mark=mark: position(trial) >= mark, "the pool makes progress", 60)
        victim = crew.pop(chance.randrange(2))
        assert victim.kill() == -signal.SIGKILL, victim.errors()
        victim.close()
        crew.append(begin(trial, **WAYS["tx"]))
    bus.shutdown()
    finish(trial, ids[-1], *crew)
    with capsys.disabled():
        print(f"\n{kills} kills: {len(ids)} events, {len(seen(trial))} executions, {len(effects(trial))} effects")  # noqa: T201
    assert effects(trial) == ids


def test_a_standby_takes_over_when_the_active_one_is_killed(trial: Trial, capsys: pytest.CaptureFixture[str]):
    """At once, not after the lease, which is a minute here (S4.7)."""
    ids = prepare(trial, 5)
    way: dict[str, Any] = {"follow": {"lease": 60}}
    active = begin(trial, **way)
    until(lambda: position(trial) == ids[-1], "the first one leads")
    standby = begin(trial, **way)
    bus = EventBus(trial.url)
    assert active.kill() == -signal.SIGKILL
    began = time.monotonic()
    last = bus.publish("trial.event", {"do": "see"}).id
    bus.shutdown()
    until(lambda: position(trial) == last, "the standby goes on", 30)
    with capsys.disabled():
        print(f"\n{trial.url.partition(':')[0]}: taken over after {time.monotonic() - began:.2f} s")  # noqa: T201
    assert seen(trial)[-1] == (last, standby.pid)
    finish(trial, last, standby)


def test_one_stopped_past_its_lease_changes_nothing_when_it_goes_on(trial: Trial):
    """SIGSTOP in the midst of a transaction's handler, SIGCONT after another has done it all (S4.7, I8)."""
    ids = prepare(trial, 40)
    way = {"follow": {"lease": 0.5}, "transactional": False, "pace": 0.05}
    slow = begin(trial, **way)
    until(lambda: position(trial) >= ids[5], "the first one is at it")
    slow.stop()
    stood = position(trial)
    other = begin(trial, **way)
    until(lambda: position(trial) == ids[-1], "the other one does the rest", 60)
    first = next(event for event, process in seen(trial) if process == other.pid)
    assert first == stood + 1
    slow.go_on()
    until(lambda: trial.logged("follower_deposed"), "the first one learns of it")
    bus = EventBus(trial.url)
    last = bus.publish("trial.event", {"do": "see"}).id
    bus.shutdown()
    until(lambda: position(trial) == last, "the new one goes on")
    assert seen(trial)[-1] == (last, other.pid)
    mine = [event for event, process in seen(trial) if process == slow.pid]
    assert len(mine) == len(set(mine)), "the deposed one handled nothing twice"
    assert max(mine) <= stood + 1, "the deposed one finished what it was at, and began nothing"
    finish(trial, last, slow, other)


def test_two_forced_active_at_once_have_each_effect_once(trial: Trial):
    """No lock, no lease, and they depose each other all the time: the epoch alone keeps them apart (S4.7, I8)."""
    ids = prepare(trial, 1)
    bus = EventBus(trial.url)
    way: dict[str, Any] = {"follow": {"instance": "single"}, "transactional": True, "forced": True}
    crew = [begin(trial, **way) for _ in range(2)]
    for _ in range(20):
        ids += [event.id for event in bus.publish_many([NewEvent(type="trial.event", payload={"do": "see"})] * 20)]
    bus.shutdown()
    until(lambda: position(trial) >= ids[-1], "all is done", 60)
    for each in crew:
        each.kill()
    assert effects(trial) == ids


def test_an_event_that_kills_its_reader_is_dead_at_last(trial: Trial):
    """Each crash counts as an attempt; of all beside it, none is lost, and the killer is a dead letter (I9, I12)."""
    bus = EventBus(trial.url)
    wishes = ["see"] * 5 + ["die"] + ["see"] * 5
    ids = [event.id for event in bus.publish_many([NewEvent(type="trial.event", payload={"do": w}) for w in wishes])]
    way: dict[str, Any] = {"follow": {"retry": {"max_retries": 1}, "size": 100}}
    for _ in range(3):
        victim = trial.start("follow", **way)
        assert victim.wait() == -signal.SIGKILL, victim.errors()
    survivor = begin(trial, **way)
    finish(trial, ids[-1], survivor)
    dead = bus.dlq.list()
    assert [(each.event.id, each.subscription) for each in dead] == [(ids[5], "trial")]
    assert dead.items[0].errors[0].type == "ProcessEnded"
    assert {event for event, _ in seen(trial)} == set(ids)
    bus.shutdown()


# ── PostgreSQL alone ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def own(tmp_path: Any) -> Any:
    """Give a server of this test's own, to be restarted, and a trial on it."""
    server = Server()
    trial = Trial(tmp_path, server.create())
    yield server, trial
    trial.close()
    server.remove()


def test_a_restart_of_the_database_is_outlived(own: tuple[Server, Trial]):
    """A crash of the server under a follower that is catching up: what was seen stays passed, or comes again (S4.3)."""
    server, trial = own
    ids = prepare(trial, 300)
    child = begin(trial, **WAYS["tx"], pace=0.002)
    for mark in (50, 150):
        until(lambda mark=mark: position(trial) >= ids[mark], "it makes progress")
        server.stop("immediate")
        server.start()
        until(lambda: _reachable(trial.url), "the server is back")
    finish(trial, ids[-1], child)
    assert effects(trial) == ids


END_READERS = """
    SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
     WHERE query LIKE '%events WHERE id > $1%' AND pid <> pg_backend_pid()
"""
"""Followers listen where they read."""


def test_a_dead_listener_only_delays(own: tuple[Server, Trial]):
    """Whoever listens is cut off: the follower still sees what comes (S4.10)."""
    _, trial = own
    ids = prepare(trial, 3)
    child = begin(trial, **WAYS["each"])
    until(lambda: position(trial) == ids[-1], "it is live")
    bus = EventBus(trial.url)
    for _ in range(5):
        assert query(trial.url, END_READERS) == [(1,)]
        ids.append(bus.publish("trial.event", {"do": "see"}).id)
        until(lambda: position(trial) == ids[-1], "it sees it all the same", 10)
    bus.shutdown()
    finish(trial, ids[-1], child)
    check_order(trial, ids)


@pytest.mark.parametrize("longest", [0.3, pytest.param(5.0, marks=pytest.mark.slow)])
def test_late_commits_are_never_missed(own: tuple[Server, Trial], longest: float):
    """Writers that keep their transactions open, commit out of order or never: the projection is the log (S4.4, I5)."""
    _, trial = own
    prepare(trial, 1)
    child = begin(trial, **WAYS["tx"])
    errors: list[BaseException] = []

    def write(number: int) -> None:
        chance = random.Random(number)
        try:
            for _ in range(12):
                with psycopg.connect(trial.url) as db:
                    db.execute("SELECT postbus.publish('trial.event', '{\"do\": \"see\"}')")
                    time.sleep(chance.uniform(0, longest))
                    if chance.random() < 0.2:
                        db.rollback()
        except BaseException as error:  # noqa: BLE001  told below
            errors.append(error)

    writers: list[threading.Thread] = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    _run_all(writers, lambda: None)
    assert not errors
    ids = [row[0] for row in trial.rows("SELECT id FROM events ORDER BY id")]
    finish(trial, ids[-1], child)
    assert effects(trial) == ids
    assert Counter(event for event, _ in seen(trial)) == Counter(ids)


def _run_all(threads: Sequence[threading.Thread], meanwhile: Callable[[], None]) -> None:
    for each in threads:
        each.start()
    meanwhile()
    for each in threads:
        each.join()


def _reachable(url: str) -> bool:
    try:
        query(url, "SELECT 1")
    except psycopg.OperationalError:
        return False
    return True
