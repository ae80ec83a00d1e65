"""Many processes at one file."""

from collections import Counter

import pytest

from postbus.torture.checker import executions
from postbus.torture.history import read
from tests.crash.processes import Trial


@pytest.mark.parametrize("count", [150, pytest.param(1_500, marks=pytest.mark.slow)])
def test_four_processes_publish_and_claim_on_one_file(trial: Trial, count: int):
    """No "database is locked" ever surfaces, and each event is claimed exactly once (S0.4, S1.17, I7)."""
    crew = [trial.start("contend", name=f"c{number}", count=count) for number in range(4)]
    for each in crew:
        assert each.hear() == {"ready": True}
    for each in crew:
        each.say()
    told = [each.hear() for each in crew]
    assert told == [{"errors": []}] * 4
    assert [each.wait() for each in crew] == [0] * 4

    claims = executions(read([trial.log_file]))
    journal = trial.journal()
    assert len(journal.acknowledged) >= 8 * count
    assert Counter(one.event_id for one in claims).most_common(1)[0][1] == 1, "an event was claimed twice"
    assert len({one.epoch for one in claims}) == len(claims), "an epoch was given out twice"
    assert len(claims) == len(journal.acknowledged), "an event was left over"
    assert len({one.pid for one in claims}) == 4, "not everybody got a turn"


def test_processes_that_open_a_new_file_at_once_all_succeed(trial: Trial):
    """Migrating is done by one of those who come at the same time; the others wait (S1.5, S1.17)."""
    crew = [trial.start("publish", name=f"c{number}", count=3) for number in range(6)]
    assert [each.wait() for each in crew] == [0] * 6, [each.errors() for each in crew]
    assert sorted(trial.database().events.values()) == sorted(trial.journal().acknowledged)
