"""A worker suspended past its lease comes back too late: whatever it reports changes nothing."""

import signal
from typing import Any

import pytest

from postbus import EventBus
from tests.crash.processes import Trial, until

OUTCOMES = ({"success": True}, {"success": False}, {"success": False, "retry": False}, {"errors": ["late"]})
SHORT = {"lease": 0.5, "poll_interval": 0.1}


def publish_one(trial: Trial) -> None:
    """Store the event that both workers are after."""
    bus = EventBus(trial.url)
    bus.publish("trial.event", {"do": "succeed"}, uid="p-0")
    bus.shutdown()


def everything(trial: Trial) -> list[Any]:
    """Return all that a settlement could change."""
    tables = ("deliveries", "blocks", "cursors", "event_log", "events", "dedup", "meta")
    return [trial.rows(f"SELECT * FROM {table}") for table in tables]  # noqa: S608  names from the line above


def expired(trial: Trial) -> bool:
    """Return whether the one lease has run out, by the clock that the bus goes by."""
    return bool(trial.rows(f"SELECT 1 FROM blocks WHERE due_at <= {trial.now}"))  # noqa: S608  SQL of our own


@pytest.mark.parametrize(
    ("outcome", "finished"),
    [
        *((each, True) for each in OUTCOMES),
        (OUTCOMES[0], False),
        *(pytest.param(each, False, marks=pytest.mark.slow) for each in OUTCOMES[1:]),
    ],
)
def test_late_poller_cannot_settle(trial: Trial, outcome: dict[str, Any], finished: bool):  # noqa: FBT001
    """A poller stopped past its lease gets LeaseLost from `finalize`, and nothing changes (S0.6, I7, I8)."""
    publish_one(trial)
    late = trial.start("hold", count=1, options=SHORT, outcome=outcome)
    ((event_id, first),) = late.hear()["held"]
    late.stop()
    until(lambda: expired(trial), "the lease runs out")
    other = trial.start("hold", count=1, options={"lease": 60})
    ((again, second),) = other.hear()["held"]
    assert again == event_id
    assert second > first
    if finished:
        other.say()
        assert other.hear() == {"result": "settled"}
        assert other.wait() == 0
    before = everything(trial)

    late.say()
    late.go_on()
    assert late.hear() == {"result": "LeaseLost"}
    assert late.wait() == 0, late.errors()
    assert everything(trial) == before

    if not finished:
        other.say()
        assert other.hear() == {"result": "settled"}
        assert other.wait() == 0
    assert [(row.action, row.epoch) for row in trial.database().audit] == [
        ("PICKED", first),
        ("EXPIRED", first),
        ("PICKED", second),
        ("COMPLETED", second),
    ]


def test_late_worker_cannot_settle(trial: Trial):
    """A Worker stopped past its lease logs `lease_lost` when its handler ends, and nothing changes (S0.6, I8, I11)."""
    publish_one(trial)
    gate = trial.folder / "gate"
    late = trial.start("work", options=SHORT, gate=str(gate))
    until(trial.executions, "the late worker begins")
    late.hear()  # from then on, it can be asked to end
    late.stop()
    other = trial.start("work", options={"poll_interval": 0.1}, log=str(trial.folder / "other-log"))
    until(lambda: any(row.action == "COMPLETED" for row in trial.database().audit), "another worker finishes")
    other.hear()
    assert other.kill(signal.SIGTERM) == 0, other.errors()
    before = everything(trial)

    gate.touch()
    late.go_on()
    until(lambda: trial.logged("lease_lost"), "the late worker notices")
    assert late.kill(signal.SIGTERM) == 0, late.errors()

    assert everything(trial) == before
    assert [one.attempt for one in trial.executions()] == [1, 2]
    assert [row.action for row in trial.database().audit] == ["PICKED", "EXPIRED", "PICKED", "COMPLETED"]


def test_one_poll_takes_over_what_a_stopped_process_held(trial: Trial):
    """A lease that has run out makes its delivery claimable by the very next poll (S0.2, S0.3, S0.6)."""
    publish_one(trial)
    late = trial.start("hold", count=1, options=SHORT)
    late.hear()
    late.stop()
    until(lambda: expired(trial), "the lease runs out")
    bus = EventBus(trial.url)
    taken = bus.poll()
    bus.shutdown()
    assert taken is not None
    assert taken.attempt == 2


def test_late_worker_may_finish_what_nobody_took_over(trial: Trial):
    """A lease that ran out but was claimed by nobody is still good (I8, I10)."""
    publish_one(trial)
    late = trial.start("hold", count=1, options=SHORT)
    late.hear()
    late.stop()
    until(lambda: expired(trial), "the lease runs out")
    late.say()
    late.go_on()
    assert late.hear() == {"result": "settled"}
    assert [row.action for row in trial.database().audit] == ["PICKED", "COMPLETED"]
