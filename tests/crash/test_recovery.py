"""What a killed process had in its hands is free at once, long before its lease ends."""

import signal
import time
from typing import Any

from postbus import EventBus
from postbus.store import log_of
from postbus.torture.tables import LEASED
from tests.crash.processes import Child, Trial, until

LONG = {"lease": 3600, "poll_interval": 0.5, "concurrency": 5, "prefetch": 10}
COUNT = 30


def hands_full(trial: Trial, **options: Any) -> Child:
    """Return a worker whose handlers all hang, with its prefetch full."""
    trial.publish(["succeed"] * COUNT)
    worker = trial.start("work", options=LONG | options, gate=str(trial.folder / "never"))
    until(lambda: len(trial.executions()) == 5, "five handlers hang")
    return worker


def completed(trial: Trial) -> int:
    """Return how many events are done."""
    return sum(row.action == "COMPLETED" for row in trial.database().audit)


def leased(trial: Trial) -> int:
    """Return how many leases stand."""
    return len(leases(trial))


def leases(trial: Trial) -> list[tuple[int, int]]:
    """Return the leases that stand: event and epoch."""
    return sorted(
        (event_id, each.epoch) for (event_id, _), each in trial.database().deliveries.items() if each.state == LEASED
    )


def test_start_frees_what_a_killed_worker_held(trial: Trial):
    """A start frees the leases of a dead process of this host at once and counts the attempt (S1.15, I10, I12)."""
    victim = hands_full(trial)
    held = leased(trial)
    victim.kill()
    began = time.monotonic()
    trial.run("drain", options=LONG)
    assert time.monotonic() - began < 30, "it waited for something"
    assert held >= 5
    assert completed(trial) == COUNT
    audit = trial.database().audit
    assert sum(row.action == "EXPIRED" for row in audit) == held
    assert sorted(row.attempt for row in audit if row.action == "COMPLETED")[-held:] == [2] * held
    assert trial.verdicts() == []


def test_a_running_bus_notices_that_its_neighbour_died(trial: Trial):
    """Upkeep frees a dead neighbour's leases within about a poll interval (S1.15, I10)."""
    victim = hands_full(trial)
    neighbour = trial.start("work", options=LONG)
    neighbour.hear()
    until(lambda: completed(trial) == COUNT - leased(trial), "the neighbour has done all it may")
    assert leased(trial) >= 5
    victim.kill()
    began = time.monotonic()
    until(lambda: completed(trial) == COUNT, "the neighbour takes over", seconds=10)
    assert time.monotonic() - began < 5
    assert trial.verdicts() == []


def test_what_a_stopped_worker_could_not_finish_is_free_when_its_process_has_ended(trial: Trial):
    """A handler that hangs past the shutdown's timeout keeps its lease until then, and no longer (S1.14, I10)."""
    victim = hands_full(trial, shutdown_timeout=0.2)
    neighbour = trial.start("work", options=LONG)
    neighbour.hear()
    victim.kill(signal.SIGTERM)
    until(lambda: completed(trial) == COUNT, "the neighbour takes over", seconds=10)
    assert [row.action for row in trial.database().audit].count("EXPIRED") == 5
    assert trial.verdicts() == []


def test_a_live_neighbour_keeps_its_leases(trial: Trial):
    """A start leaves the leases of a living process alone (S1.15, I7)."""
    busy = hands_full(trial)
    held = leases(trial)
    neighbour = trial.start("work", options=LONG)
    neighbour.hear()
    until(lambda: completed(trial) == COUNT - len(held), "the neighbour has done all it may")
    assert leases(trial) == held
    assert not busy.ended()


def test_a_killed_worker_stays_dead_whoever_tidies(trial: Trial):
    """Kill, tidy, ask: it is shown as gone as long as anything names it, and never as alive again (S1.15)."""
    dead, living = trial.start("work"), trial.start("work")
    dead.hear()
    living.hear()
    bus = EventBus(trial.url)
    owners = {each.owner for each in bus.store.handlers()}
    assert len(owners) == 2
    dead.kill()
    (gone,) = {each.owner for each in bus.store.handlers() if each.gone}
    for _ in range(3):
        log_of(bus.store).tidy()
        assert {each.owner for each in bus.store.handlers() if not each.gone} == owners - {gone}
    bus.shutdown()
    assert not living.ended()


def test_the_lock_file_of_a_killed_process_is_swept_away(file_trial: Trial):
    """Housekeeping removes the lock files of the dead and leaves those of the living (S1.15)."""
    dead, living = file_trial.start("work"), file_trial.start("work")
    dead.hear()
    living.hear()
    folder = file_trial.folder / "bus.db-alive"
    assert len(list(folder.iterdir())) == 2
    dead.kill()
    bus = EventBus(file_trial.url)
    log_of(bus.store).tidy()
    bus.shutdown()
    assert len(list(folder.iterdir())) == 1
    assert not living.ended()
