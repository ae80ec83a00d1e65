"""`postbus dlq`."""

import os
import pty

import pytest

from postbus import EventBus
from postbus.store import lookups

from .conftest import URL

pytestmark = pytest.mark.usefixtures("three_dead")


def test_dead_letters_are_listed_newest_first_with_their_reason(cli, data):
    """The list says what died, why and when (S1.10, S1.12, S1.13)."""
    letters = data("dlq", "list")
    assert [each["event"]["id"] for each in letters] == [3, 2, 1]
    assert all(each["errors"][0]["message"] == "no such card" and each["died_at"].endswith("Z") for each in letters)
    assert "Discard: no such card" in cli("dlq", "list").stdout


def test_dead_letters_are_filtered_and_paged(cli, data):
    """A pattern narrows the list; the next page is named on stderr and follows without a hole (S1.12)."""
    assert [each["event"]["id"] for each in data("dlq", "list", "--type", "payment.*")] == [2, 1]
    told = cli("dlq", "list", "--limit", "2").stderr
    after = told.split("--after ")[1].strip()
    assert [each["event"]["id"] for each in data("dlq", "list", "--limit", "2", "--after", after)] == [1]


def test_keys_are_listed_where_there_are_any(cli):
    """A column that would be empty is not shown (S1.12)."""
    assert cli("dlq", "list").stdout.split()[:3] == ["ID", "TYPE", "SUBSCRIPTION"]
    bus = EventBus(URL)
    bus.publish("payment.due", key="ann")
    delivery = bus.poll()
    assert delivery is not None
    bus.finalize(delivery, success=False, retry=False)
    bus.shutdown()
    heads, first, second, *_ = cli("dlq", "list").stdout.splitlines()
    assert heads.split()[:3] == ["ID", "KEY", "TYPE"]
    assert (first.split()[:3], second.split()[:3]) == (["4", "ann", "payment.due"], ["3", "-", "order.placed"])


def test_show_gives_the_error_of_each_attempt(cli, data):
    """A dead letter carries its event and the error of each attempt (S1.10)."""
    shown = cli("dlq", "show", "2")
    assert "payment.late" in shown.stdout
    assert "Discard: no such card" in shown.stdout
    assert "postbus dlq retry 2" in shown.stderr
    assert data("dlq", "show", "2")[0]["attempts"] == 1


def test_a_retried_dead_letter_is_pending_with_all_its_attempts(data):
    """Retrying starts from scratch, and the history stays (S1.12)."""
    assert data("dlq", "retry", "2")["retried"] == 1
    event = data("events", "show", "2")
    assert (event["status"], event["retry_count"], event["last_error"]) == ("PENDING", 0, None)
    assert [each["action"] for each in event["logs"]] == ["PICKED", "FAILED", "RETRIED"]
    assert len(data("dlq", "list")) == 2


def test_retrying_what_is_not_dead_is_exit_1_and_changes_nothing(cli, data):
    """All ids named must be dead, or none of them is retried (S1.12)."""
    cli("dlq", "retry", "2", "99", expect=1)
    assert len(data("dlq", "list")) == 3


@pytest.mark.parametrize("verb", [["retry", "--all"], ["purge", "--older-than-days", "0"]])
def test_many_need_yes_where_there_is_no_terminal(verb, cli, data):
    """Without a terminal to ask at, `--yes` must be given: exit 2 and nothing changed."""
    assert "3 dead letters? There is no terminal to ask at: add --yes" in cli("dlq", *verb, expect=2).stderr
    assert len(data("dlq", "list")) == 3


@pytest.mark.parametrize("verb", [["retry", "--all"], ["purge", "--older-than-days", "0"], ["retry", "1", "2", "3"]])
def test_a_dry_run_counts_and_changes_nothing(verb, cli, data):
    """`--dry-run` says how many, and asks nothing."""
    assert "3 dead letters would be" in cli("dlq", *verb, "--dry-run").stderr
    assert len(data("dlq", "list")) == 3


def test_all_that_the_filters_let_through_are_retried(data):
    """`--all` retries what matches and leaves the rest dead (S1.12)."""
    assert data("dlq", "retry", "--all", "--type", "payment.*", "--yes")["retried"] == 2
    assert [each["event"]["type"] for each in data("dlq", "list")] == ["order.placed"]


@pytest.mark.parametrize("by", ["created_at", "died_at"])
def test_a_purge_goes_by_age(by, data):
    """Only those old enough are purged, and their events stay in the log (S1.12, S1.13)."""
    assert data("dlq", "purge", "--older-than-days", "1", "--by", by, "--yes")["purged"] == 0
    assert data("dlq", "purge", "--older-than-days", "0", "--by", by, "--yes")["purged"] == 3
    assert data("dlq", "list") == []
    assert [each["action"] for each in data("events", "show", "1")["logs"]][-1] == "PURGED"


def test_a_purge_takes_the_named_ones(cli, data):
    """All of them or none: one that is no dead letter stops it (S1.12)."""
    first, *rest = [each["event"]["id"] for each in data("dlq", "list")]
    assert data("dlq", "purge", str(first), "--dry-run") == {"purged": 0, "matching": 1, "dry_run": True}
    cli("dlq", "purge", str(first), "999999", "--yes", expect=1)
    cli("dlq", "purge", str(first), "--older-than-days", "1", "--yes", expect=2)
    cli("dlq", "purge", "--yes", expect=2)
    assert data("dlq", "purge", str(first), "--yes")["purged"] == 1
    assert [each["event"]["id"] for each in data("dlq", "list")] == rest


@pytest.mark.parametrize("arguments", [[], ["1", "--all"], ["1", "--type", "x"]])
def test_retry_must_be_told_which(arguments, cli):
    """Ids or `--all`, not both and not neither: exit 2."""
    cli("dlq", "retry", *arguments, expect=2)


@pytest.mark.parametrize(("answer", "left"), [("n", 3), ("y", 0)])
def test_on_a_terminal_it_asks_with_the_count(answer, left, command, data):
    """A person is asked, told how many, and obeyed."""
    keyboard, terminal = pty.openpty()
    process = command("dlq", "purge", "--older-than-days", "0", stdin=terminal)
    os.write(keyboard, f"{answer}\n".encode())
    _, told = process.communicate(timeout=30)
    os.close(terminal)
    os.close(keyboard)
    assert "Purge 3 dead letters?" in told
    assert process.returncode == (0 if answer == "y" else 1)
    assert len(data("dlq", "list")) == left


@pytest.mark.parametrize(("verb", "done"), [("retry --all", "retried"), ("purge --older-than-days 0", "purged")])
def test_more_than_are_counted_are_told_as_more(verb, done, cli, data, monkeypatch):
    """A count ends at its cap: what is told of it is no exact figure (S1.12)."""
    monkeypatch.setattr(lookups, "TOTAL_CAP", 2)
    assert f"2 or more dead letters would be {done}" in cli("dlq", *verb.split(), "--dry-run").stderr
    assert data("dlq", *verb.split(), "--dry-run") == {
        done: 0, "matching": 2, "matching_capped": True, "dry_run": True,
    }  # fmt: skip
    assert data("dlq", *verb.split(), "--yes") == {done: 3, "matching": 3, "dry_run": False}


@pytest.mark.parametrize("how", ["--dry-run", "--yes"])
@pytest.mark.parametrize("verb", ["retry --all", "purge --older-than-days 0"])
def test_a_subscription_that_is_not_there_is_not_taken_for_an_empty_one(verb, how, cli):
    """A slip in a name is exit 1, with the names that there are (S1.12)."""
    told = cli("dlq", *verb.split(), how, "--subscription", "defualt", expect=1).stderr
    assert "there is no subscription 'defualt'; there are: default" in told
