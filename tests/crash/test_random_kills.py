"""Four processes killed again and again at random moments, and started again."""

import random
import signal

import pytest

from tests.crash.processes import Child, Trial, until

CREW = {"p1": "publish", "p2": "publish", "w1": "work", "w2": "work"}
MANY = 1_000_000


def begin(trial: Trial, name: str) -> Child:
    """Start one of the crew and wait until it does its work."""
    child = trial.start(CREW[name], name=name, count=MANY, pace=0.002, options={"lease": 60, "prefetch": 20})
    child.hear()
    return child


@pytest.mark.slow  # postbus torture kill-worker and kill-publisher have a few in the quick tests
@pytest.mark.parametrize("kills", [10, 200])
def test_random_kills_lose_nothing(trial: Trial, kills: int, capsys: pytest.CaptureFixture[str]):
    """Publishers and workers killed at random: lost 0, repeated without a cause 0 (S0.6, S1.1, S1.15, I1, I9, I11)."""
    seed = f"random kills {kills}"
    chance = random.Random(seed)
    crew = {name: begin(trial, name) for name in CREW}
    for _ in range(kills):
        name = chance.choice(sorted(crew))
        enough = written(trial, name) + chance.randint(1, 3_000)
        until(lambda name=name, enough=enough: written(trial, name) >= enough, f"{name} makes progress ({seed})")
        assert crew[name].kill() == -signal.SIGKILL, crew[name].errors()
        crew[name].close()
        crew[name] = begin(trial, name)
    for name in sorted(crew):
        crew[name].kill(signal.SIGTERM)
    trial.run("drain")

    database, executions = trial.database(), trial.executions()
    verdicts = trial.verdicts()
    with capsys.disabled():
        print(  # noqa: T201  the figures are what a long trial is for
            f"\n{kills} kills: {len(trial.journal().acknowledged)} acknowledged, {len(database.events)} stored, "
            f"{len(executions)} executions, {len(executions) - len(database.events)} of them repeated, "
            f"{sum(row.action == 'EXPIRED' for row in database.audit)} expiries, "
            f"{sum(row.status == 'FAILED' for row in database.audit)} dead, {len(verdicts)} verdicts"
        )
    assert verdicts == [], seed


def written(trial: Trial, name: str) -> int:
    """Return how many bytes this publisher, or all workers, have written down: about 130 a step."""
    file = trial.folder / f"journal-{name}" if CREW[name] == "publish" else trial.executions_file
    return file.stat().st_size if file.exists() else 0
