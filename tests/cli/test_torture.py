"""`postbus torture`, as somebody runs it who wants to know."""

import json
from pathlib import Path

import pytest

from postbus.torture import trial
from postbus.torture.checker import RULES, Verdict
from postbus.torture.history import Entry
from postbus.torture.nemesis import FAULTS
from postbus.torture.timeline import page


def test_the_faults_are_named_with_what_must_hold(cli):
    """Each with its stores; no two alike."""
    told = json.loads(cli("torture", "--list", "-o", "json").stdout)
    assert [each["fault"] for each in told] == list(FAULTS)
    assert all(each["what"] and each["holds"] and each["stores"] for each in told)


def test_a_fault_that_is_not_there_is_refused(cli):
    """It says where the names stand."""
    result = cli("torture", "flood", expect=2)
    assert "there is no fault 'flood': postbus torture --list names them" in result.stderr


def test_a_clean_run_leaves_a_table_and_a_timeline(cli, tmp_path: Path):
    """Exit code 0, figures as JSON, a page that asks nothing of another host, and no database left behind."""
    report = tmp_path / "proof"
    result = cli("torture", "bit-flip", "poison-payload", "--store", "sqlite", "--report", str(report), "-o", "json")
    assert "2 trials" in result.stderr
    assert "every promise was kept" in result.stderr
    told = json.loads(result.stdout)
    assert [(each["fault"], each["strikes"], each["verdicts"]) for each in told] == [
        ("bit-flip", 1, []),
        ("poison-payload", 1, []),
    ]
    assert json.loads((report / "results.json").read_text()) == told
    html = (report / "poison-payload-sqlite-1.html").read_text()
    assert "every promise was kept" in html
    assert "publisher-1" in html
    assert "http" not in html.replace("http-", "")
    assert sorted(path.name for path in report.iterdir()) == [
        "bit-flip-sqlite-1.html",
        "poison-payload-sqlite-1.html",
        "results.json",
    ]


def test_a_broken_promise_is_told_with_the_way_to_see_it_again(cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Exit code 3, the verdict in the table and on the page, the history kept, the command that replays it."""
    monkeypatch.setattr(trial, "check", lambda *_: [Verdict("lost", "event 7 <b>was</b> acknowledged")])
    asked = ("torture", "poison-payload", "--store", "sqlite", "--seed", "x", "--report", str(tmp_path / "proof"))
    result = cli(*asked, expect=3)
    assert "again: postbus torture poison-payload --store sqlite --seed x --trials 1" in result.stderr
    row = result.stdout.splitlines()[1].split()
    assert row[:3] == ["poison-payload", "sqlite", "1"]
    assert row[6] == "1"
    html = (tmp_path / "proof" / "poison-payload-sqlite-x.html").read_text()
    assert "event 7 &lt;b&gt;was&lt;/b&gt; acknowledged" in html
    assert RULES["lost"] in html
    assert (tmp_path / "proof" / "poison-payload-sqlite-x" / "history").is_dir()


def test_a_broken_soak_is_told_with_the_way_to_see_it_again(cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It is no fault of the list, and has its own option."""
    found = trial.Result("soak", "sqlite", "x", 3, seconds=60.0, verdicts=(Verdict("grown", "tables"),))
    monkeypatch.setattr(trial, "soak", lambda *_: (found, []))
    asked = ("torture", "--soak", "60", "--store", "sqlite", "--seed", "x", "--report", str(tmp_path / "proof"))
    assert "again: postbus torture --soak 60 --store sqlite --seed x\n" in cli(*asked, expect=3).stderr


def test_one_seed_draws_one_schedule(tmp_path: Path):
    """Who is struck and in which way follows from the seed alone."""

    def schedule(seed: str, name: str) -> list[str]:
        _, history = trial.run(FAULTS["kill-worker"], "sqlite", seed, tmp_path / name, strikes=3)
        return [entry.told["what"] for entry in history if entry.op == "strike"]

    first = schedule("a", "one")
    assert len(first) == 3
    assert schedule("a", "two") == first
    assert any(schedule(seed, seed) != first for seed in "bcd")


def test_a_timeline_without_a_history_is_a_page_too():
    """Faults that need no crew have no calls to draw."""
    told = page(trial.Result("bit-flip", "sqlite", "1", 3), [], "Flip", "all is well")
    assert "<svg" not in told
    assert "every promise was kept" in told
    assert page(trial.Result("a", "b", "c", 1), [Entry(0.0, "x", 1, "publish", "ok", {})], "", "").count("<rect") == 1
