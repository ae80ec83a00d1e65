"""One event that kills its worker, among a thousand that do not."""

import signal

import pytest

from postbus import EventBus
from tests.crash.processes import Trial, until
from tests.kinds import mostly_on_sqlite

POISON = 400


def test_of_a_thousand_events_beside_a_killer_exactly_one_dies(trial: Trial):
    """A worker-killing event dies after exactly its 4 attempts, its 999 neighbours complete (S0.8, S1.10, I9, I12)."""
    trial.publish("die" if number == POISON else "pause" for number in range(1_000))
    deaths = 0
    while True:
        worker = trial.start("drain", options={"concurrency": 10, "prefetch": 100, "retry": "default"})
        code = worker.wait()
        if code == 0:
            break
        assert code == -signal.SIGKILL, worker.errors()
        deaths += 1
        assert deaths <= 4, "the poison event was given more than its attempts"

    bus = EventBus(trial.url)
    dead = bus.dlq.list()
    stats = bus.stats().subscriptions[0]
    bus.shutdown()
    assert (stats.completed, stats.dead, deaths) == (999, 1, 4)
    assert dead.items[0].event.uid == f"p-{POISON}"
    assert [error.attempt for error in dead.items[0].errors] == [1, 2, 3, 4]
    assert {error.type for error in dead.items[0].errors} == {"LeaseExpired"}
    assert trial.verdicts() == []
    ran = [one.event_id for one in trial.executions()]
    alone = [event_id for event_id in set(ran) if ran.count(event_id) > 2]
    assert alone == [POISON + 1], "a neighbour was run more often than the one crash beside it explains"


@mostly_on_sqlite
def test_killers_in_a_row_die_one_by_one(trial: Trial):
    """Several worker-killing events do not drag each other, or anything else, along (S0.8, I12)."""
    trial.publish("die" if number in (3, 4) else "succeed" for number in range(40))
    codes = []
    while not codes or (codes[-1] and len(codes) < 20):
        codes.append(trial.start("drain", options={"concurrency": 2, "prefetch": 10}).wait())
    bus = EventBus(trial.url)
    stats = bus.stats().subscriptions[0]
    errors = [len(each.errors) for each in bus.dlq.list()]
    bus.shutdown()
    assert codes[-1] == 0
    assert (stats.completed, stats.dead, errors) == (38, 2, [4, 4])
    assert trial.verdicts() == []


@mostly_on_sqlite
@pytest.mark.parametrize(
    "prefetch",
    [pytest.param(5, marks=pytest.mark.slow), 50],
)
def test_a_killed_worker_ends_only_the_last_attempts_that_it_had_begun(trial: Trial, prefetch: int):
    """What may not be tried again and was claimed without having been begun is not lost with the process."""
    trial.publish(["succeed"] * 100, max_retries=0)
    worker = trial.start("work", gate=str(trial.folder / "never"), options={"concurrency": 5, "prefetch": prefetch})
    until(lambda: len(trial.executions()) == 5, "five handlers hang")
    worker.kill()
    begun = {each.event_id for each in trial.executions()}
    trial.run("drain")

    bus = EventBus(trial.url)
    dead = {letter.event.id for letter in bus.dlq.list(limit=100)}
    stats = bus.stats().subscriptions[0]
    bus.shutdown()
    assert dead == begun
    assert (stats.completed, stats.dead) == (95, 5)
    assert trial.verdicts(allowed=1) == []
