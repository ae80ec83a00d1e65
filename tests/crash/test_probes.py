"""A process killed at any named step loses nothing, and repeats nothing without a recorded cause."""

import random
import signal

import pytest

from postbus import EventBus
from tests.crash.processes import Trial

PROBES = {"publishing": 60, "committing": 150, "claimed": 25, "handled": 60, "settling": 25, "settled": 25}
"""Each probe, and how often the child surely comes by it."""
TRIALS = [0, *(pytest.param(number, marks=pytest.mark.slow) for number in range(1, 23))]
COUNT = 80


@pytest.mark.parametrize("number", TRIALS)
@pytest.mark.parametrize("probe", PROBES)
def test_a_process_killed_at_a_probe_loses_nothing(trial: Trial, probe: str, number: int):
    """SIGKILL at any step: nothing is lost or repeated without a cause (S0.6, S1.1, S1.15, I1, I2, I9, I11, I13)."""
    trial.subscriptions = ("default", "second")
    bus = EventBus(trial.url)
    bus.subscriptions.create("second", "trial.*")
    bus.shutdown()
    hit = random.Random(f"{probe} {number}").randint(1, PROBES[probe] // 2)

    victim = trial.start("live", count=COUNT, probe=[probe, hit])
    assert victim.wait() == -signal.SIGKILL, f"{probe} was not met {hit} times: {victim.errors()}"
    trial.run("live", count=COUNT)

    assert len(trial.journal().acknowledged) >= COUNT
    assert trial.verdicts() == [], f"killed at hit {hit} of {probe}"
