"""The crash tests can fail: the checker names each planted bug (synchronous=NORMAL is in test_power_loss)."""

import signal
from pathlib import Path

import pytest

import postbus
from postbus.torture.checker import AuditRow, Database, Execution, Journal, StoredDelivery, check
from tests.crash.processes import Trial
from tools.planted_bugs import BUGS, Bug

COUNT = 60


def rules(trial: Trial, **options: object) -> set[str]:
    """Return which rules the checker finds broken."""
    return {verdict.rule for verdict in trial.verdicts(**options)}


def test_acknowledging_before_the_commit_is_noticed(trial: Trial):
    """A publisher answered before its commit, then killed, shows as lost events (I1)."""
    trial.run("publish", count=1)
    victim = trial.start("publish", count=COUNT, plant="ack_before_commit", probe=["publishing", 13])
    assert victim.wait() == -signal.SIGKILL
    trial.run("live", count=COUNT)
    assert "lost" in rules(trial)


def test_settling_before_handling_is_noticed(trial: Trial):
    """A worker that settles first and is killed before it handles shows as an unhandled event (S1.1, I9)."""
    victim = trial.start("live", count=COUNT, plant="settle_before_handle", probe=["settled before", 5])
    assert victim.wait() == -signal.SIGKILL
    trial.run("live", count=COUNT)
    assert rules(trial) == {"unhandled"}


def test_settling_without_the_epoch_check_is_noticed(trial: Trial):
    """A late worker that may settle with any epoch shows as a stale settlement that was accepted (I8)."""
    trial.run("publish", count=1)
    options = {"lease": 0.3}
    late = trial.start("hold", count=1, options=options, plant="no_epoch_check")
    late.hear()
    late.stop()
    other = trial.start("hold", count=1, options={"lease": 60})
    other.hear()
    late.say()
    late.go_on()
    assert late.hear() == {"result": "settled"}, "the bug was not planted"
    assert late.wait() == 0
    assert "stale-accepted" in rules(trial)


def test_without_a_planted_bug_the_same_trials_are_clean(trial: Trial):
    """The same steps without a bug give no verdict, so it is the bug that the tests above see (I1, I8, I9)."""
    victim = trial.start("publish", count=COUNT, probe=["publishing", 13])
    assert victim.wait() == -signal.SIGKILL
    victim = trial.start("live", count=COUNT, probe=["settled", 5])
    assert victim.wait() == -signal.SIGKILL
    trial.run("live", count=COUNT)
    assert trial.verdicts() == []


# ── the checker itself, rule by rule ─────────────────────────────────────────────────────────────────────────────

PICKED = AuditRow(1, "default", "PICKED", "PROCESSING", 1, 10, "w")
DONE = AuditRow(1, "default", "COMPLETED", "COMPLETED", 1, 10, "w")
RAN = Execution(1, "default", 1, 10, 99)
JOURNAL = Journal((("a",),), {"a": 1})


def made(*audit: AuditRow, events: dict[int, str] | None = None, rows: dict | None = None) -> Database:
    """Return a file's content."""
    return Database(
        events={1: "a"} if events is None else events, deliveries=rows or {}, rows=dict(enumerate(audit, 1))
    )


def again(row: AuditRow, **changes: object) -> AuditRow:
    """Return a like row."""
    return row._replace(**changes)


@pytest.mark.parametrize(
    ("rule", "journal", "executions", "database"),
    [
        ("lost", JOURNAL, [], made(events={})),
        ("lost", JOURNAL, [], made(events={2: "a"})),
        ("phantom", Journal(), [], made(PICKED, DONE)),
        ("phantom", JOURNAL, [], made(PICKED, DONE, events={1: "a", 2: "a"})),
        ("torn", Journal((("a", "b"),)), [RAN], made(PICKED, DONE)),
        ("duplicate", JOURNAL, [RAN, RAN], made(PICKED, DONE)),
        ("duplicate", JOURNAL, [RAN], made(PICKED, again(PICKED, attempt=2, epoch=11), again(DONE, epoch=11))),
        ("unclaimed", JOURNAL, [RAN, RAN._replace(epoch=12)], made(PICKED, DONE)),
        (
            "attempts",
            JOURNAL,
            [RAN],
            made(*(again(PICKED, action=action, attempt=number, epoch=number, status="PENDING")
                   for number in range(1, 6) for action in ("PICKED", "EXPIRED"))),
        ),
        ("unhandled", JOURNAL, [], made(PICKED, DONE)),
        ("stuck", JOURNAL, [], made()),
        ("two-ends", JOURNAL, [RAN], made(PICKED, DONE, DONE)),
        ("stale-accepted", JOURNAL, [RAN], made(PICKED, again(DONE, epoch=9))),
        ("stale-accepted", JOURNAL, [RAN], made(PICKED, again(DONE, worker_id="another"))),
        ("epoch-reused", JOURNAL, [RAN], made(PICKED, again(DONE, action="EXPIRED", status="PENDING"), PICKED)),
        ("audit-mismatch", JOURNAL, [RAN], made(PICKED, DONE, rows={(1, "default"): StoredDelivery(0, 0, 0)})),
        ("audit-mismatch", JOURNAL, [], made(rows={(1, "default"): StoredDelivery(1, 1, 10)})),
    ],
)  # fmt: skip
def test_the_checker_names_each_kind_of_wrong(
    rule: str, journal: Journal, executions: list[Execution], database: Database
):
    """Every rule of the checker has a history that breaks it (I1, I2, I3, I7, I8, I9, I11, I12, I13)."""
    assert rule in {verdict.rule for verdict in check(journal, executions, database)}


def test_the_checker_is_content_with_a_good_history():
    """A history in order gives no verdict (I11)."""
    assert check(JOURNAL, [RAN], made(PICKED, DONE)) == []


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_each_planted_bug_still_has_its_place(bug: Bug):
    """Code that moves takes its bug along: one that cannot be planted would be noticed by nobody."""
    assert Path(postbus.__file__).parent.joinpath(bug.file).read_text(encoding="utf-8").count(bug.line) == 1
