"""Workers killed at random in the midst of transactional handlers: each event's effect is there exactly once."""

import random
import signal
from collections import Counter

import pytest

from postbus import EventBus, NewEvent
from postbus.torture.history import OK, History
from tests.crash.child import wish
from tests.crash.processes import Child, Trial, until

CREW = ("w1", "w2")
FED = 30
PROBES = {"handled": 40, "settling": 30, "settled": 30}
"""Each probe on the way of a transactional handler, and how often the child surely comes by it."""


def prepare(trial: Trial) -> EventBus:
    """Open the bus and make the table in which handlers count themselves."""
    bus = EventBus(trial.url)
    with bus.transaction() as tx:
        tx.execute("CREATE TABLE effects (event_id BIGINT)")
    return bus


def feed(trial: Trial, bus: EventBus, first: int, count: int) -> None:
    """Publish events to handle, and write them down."""
    news = [
        NewEvent(type="trial.event", payload={"do": wish(number)}, uid=f"p-{number}")
        for number in range(first, first + count)
    ]
    stored = bus.publish_many(news)
    told = {"uids": [event.uid for event in stored], "ids": [event.id for event in stored]}
    History(trial.folder / "journal-p", "test").note("publish", OK, **told)


def begin(trial: Trial, name: str) -> Child:
    """Start a worker and wait until it works."""
    child = trial.start("work", name=name, transactional=True, options={"concurrency": 3, "prefetch": 6})
    child.hear()
    return child


def check_effects(trial: Trial) -> Counter[int]:
    """Fail unless the completed events, and only they, have had their effect and their follower, once each."""
    effects = Counter(row[0] for row in trial.rows("SELECT event_id FROM effects"))
    completed = [row.event_id for row in trial.database().audit if row.action == "COMPLETED"]
    assert effects == Counter(completed)
    first = {row[0] for row in trial.rows("SELECT id FROM events WHERE type = 'trial.event'")}
    followers = trial.rows("SELECT uid FROM events WHERE type = 'trial.after'")
    assert Counter(int(row[0].split("-")[1]) for row in followers) == Counter(first & set(completed))
    return effects


@pytest.mark.slow  # postbus torture kill-worker has a few in the quick tests
@pytest.mark.parametrize("kills", [20, 500])
def test_random_kills_leave_each_effect_once(trial: Trial, kills: int, capsys: pytest.CaptureFixture[str]):
    """SIGKILL whenever: an event is completed and has its effect, or neither (S1.1, S4.6, I2, I8, I9, I11, I13)."""
    bus = prepare(trial)
    chance = random.Random(f"transactional kills {kills}")
    crew = {name: begin(trial, name) for name in CREW}
    for number in range(kills):
        feed(trial, bus, FED * number, FED)
        name = chance.choice(CREW)
        enough = written(trial) + chance.randint(1, 80 * FED)
        until(lambda enough=enough: written(trial) >= enough, "the workers make progress", seconds=60)
        assert crew[name].kill() == -signal.SIGKILL, crew[name].errors()
        crew[name].close()
        crew[name] = begin(trial, name)
    bus.shutdown()
    for name in CREW:
        assert crew[name].kill(signal.SIGTERM) == 0, crew[name].errors()
    trial.run("drain", name="w1", transactional=True)

    effects, executions, verdicts = check_effects(trial), trial.executions(), trial.verdicts()
    with capsys.disabled():
        print(  # noqa: T201  the figures are what a long trial is for
            f"\n{kills} kills: {len(trial.database().events)} events, {len(executions)} executions, "
            f"{len(effects)} effects, {sum(row.action == 'EXPIRED' for row in trial.database().audit)} expiries, "
            f"{sum(row.status == 'FAILED' for row in trial.database().audit)} dead, {len(verdicts)} verdicts"
        )
    assert verdicts == []


@pytest.mark.parametrize("number", [0, *(pytest.param(each, marks=pytest.mark.slow) for each in range(1, 22))])
@pytest.mark.parametrize("probe", PROBES)
def test_a_worker_killed_at_a_probe_leaves_each_effect_once(trial: Trial, probe: str, number: int):
    """Before the settlement, before the commit or right after it: completed with its effect, or neither (S4.6, I9)."""
    bus = prepare(trial)
    feed(trial, bus, 0, 60)
    bus.shutdown()
    hit = random.Random(f"transactional {probe} {number}").randint(1, PROBES[probe])
    victim = trial.start("drain", transactional=True, probe=[probe, hit])
    assert victim.wait() == -signal.SIGKILL, victim.errors()
    trial.run("drain", transactional=True)
    check_effects(trial)
    assert trial.verdicts() == [], f"killed at hit {hit} of {probe}"


def written(trial: Trial) -> int:
    """Return how many bytes the workers have written down: about 130 an execution."""
    return trial.executions_file.stat().st_size if trial.executions_file.exists() else 0
