"""`postbus events`, `stats` and `subscriptions`, and what all commands have in common."""

import json
import re
import subprocess

import pytest

from postbus import EventBus, RetryPolicy
from postbus.model import Stream
from postbus.store import log_of

from .conftest import PROGRAM, URL


@pytest.mark.parametrize(
    "arguments",
    [["events", "list"], ["events", "show", "1"], ["dlq", "list"], ["dlq", "show", "1"], ["dlq", "retry", "1"],
     ["dlq", "purge", "--older-than-days", "0"], ["subscriptions", "list"], ["stats"], ["doctor"]],
)  # fmt: skip
def test_a_database_that_is_not_there_is_said_and_not_made(arguments, cli, folder):
    """Looking never makes an empty bus: exit 1, and a sentence that says how to go on."""
    result = cli(*arguments, expect=1)
    assert "there is no bus at sqlite:///shop.db" in result.stderr
    assert not result.stdout
    assert not list(folder.iterdir())


def test_an_unknown_event_is_exit_1(cli):
    """What is not there is said in a sentence."""
    cli("publish", "a")
    assert "there is no event 99" in cli("events", "show", "99", expect=1).stderr


def test_an_event_that_was_archived_is_looked_for_in_the_lake(cli):
    """It was there once: what was pruned, and the command that finds it, are named (P.5)."""
    bus = EventBus(URL)
    bus.subscribe("a", str)
    bus.publish_many([{"type": "a"}] * 3)
    bus.run_due()
    log_of(bus.store).prune(Stream.EVENTS, after=0, through=2)
    bus.shutdown()
    told = cli("events", "show", "2", expect=1).stderr
    assert "event 2 is not in the log any more: what was done was archived (pruned through 2)" in told
    assert "postbus pipeline replay --lake DIR --from 2 --to 2" in told
    cli("events", "show", "3")
    assert "there is no event 4" in cli("events", "show", "4", expect=1).stderr
    assert "there is no event 0" in cli("events", "show", "0", expect=1).stderr


@pytest.mark.parametrize("line", ["events list", "events list --status pending", "events show 1"])
def test_how_events_stand_in_a_subscription_that_is_not_there_is_not_told(line, cli):
    """A slip in a name is exit 1; `default`, where none is named, may have been deleted."""
    cli("publish", "a")
    told = cli(*line.split(), "--subscription", "defualt", expect=1).stderr
    assert "there is no subscription 'defualt'; there are: default" in told
    cli("subscriptions", "delete", "default", "--yes")
    cli(*line.split())


def test_lists_are_filtered_and_paged(cli, data):
    """Type patterns, tags and status narrow the list, and the next page is named on stderr."""
    for number in range(5):
        cli("publish", f"order.{number}", "--tag", "even" if number % 2 == 0 else "odd")
    cli("publish", "other")
    assert len(data("events", "list", "--type", "order.*")) == 5
    assert [each["type"] for each in data("events", "list", "--tag", "odd")] == ["order.3", "order.1"]
    assert data("events", "list", "--status", "completed") == []
    page = cli("events", "list", "--limit", "2")
    assert "2 of 6 events; the next ones: --after 5" in page.stderr
    assert [each["id"] for each in data("events", "list", "--limit", "2", "--after", "5")] == [4, 3]


def test_moments_in_json_are_utc_with_a_z(data):
    """Time on the wire is RFC 3339 in UTC."""
    data("publish", "a")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z", data("events", "show", "1")["created_at"])


def test_one_json_line_an_item(cli):
    """`-o jsonl` is for pipes: a line an item, nothing else on stdout."""
    for kind in "ab":
        cli("publish", kind)
    lines = cli("events", "list", "-o", "jsonl").stdout.splitlines()
    assert [json.loads(line)["type"] for line in lines] == ["b", "a"]


def test_text_from_events_cannot_drive_the_terminal(cli):
    """Control characters in what producers wrote are shown, not obeyed."""
    cli("publish", "a", '"\\u001b[31mred"', "--title", "[bold]x[/bold]", "--description", "a\x1b]0;title\x07b")
    shown = cli("events", "show", "1").stdout
    assert "\x1b" not in shown
    assert "\x07" not in shown
    assert "[bold]x[/bold]" in shown
    assert "[bold]x[/bold]" in cli("events", "list").stdout


def test_show_tells_all_that_happened(cli, data):
    """Each step of an event stands in the audit trail, with worker and error (I13, S1.10)."""
    bus = EventBus(URL, retry=RetryPolicy(max_retries=0))

    @bus.on("a")
    def fail(event: object) -> None:
        raise ValueError("the reason")

    bus.publish("a")
    bus.run_due()
    bus.shutdown()
    event = data("events", "show", "1")
    assert [each["action"] for each in event["logs"]] == ["PICKED", "FAILED"]
    assert event["status"] == "FAILED"
    assert event["last_error"] == "the reason"
    shown = cli("events", "show", "1").stdout
    assert "ValueError: the reason" in shown
    assert "PICKED" in shown


def test_stats_count_what_waits_and_what_is_done(cli, data):
    """Depth, outcomes and rates can be read off a bus (S0.9)."""
    bus = EventBus(URL)
    bus.subscribe("a", str)
    bus.publish_many([{"type": "a"}, {"type": "a"}, {"type": "b"}, {"type": "b", "delay": 3600}])
    bus.run_due()
    bus.shutdown()
    found = data("stats")
    [default] = found["subscriptions"]
    counts = {name: default[name] for name in ("pending", "scheduled", "processing", "completed", "dead")}
    assert counts == {"pending": 2, "scheduled": 1, "processing": 0, "completed": 2, "dead": 0}
    assert found["events"] == found["head"] == 4
    assert found["rates"]["published"] == 4
    assert found["unhandled"] == {"default/b": 2}
    assert "2 events nobody handles" in cli("stats").stdout


def test_stats_count_dead_letters(data, three_dead):
    """Failures can be read off a bus (S0.9)."""
    assert data("stats")["subscriptions"][0]["dead"] == 3


def test_subscriptions_show_what_they_want_and_who_handles_it(cli, data):
    """Consumer groups are listed with their patterns, handlers and depth (S1.6, S0.9)."""
    bus = EventBus(URL)
    bus.subscriptions.create("mail", ["user.*", "order.*"], lease=5, retry=RetryPolicy(max_retries=9))
    bus.subscriptions.pause("mail")
    bus.subscribe("user.*", print, subscription="mail")
    bus.start()
    bus.publish("user.new")
    by_name = {each["name"]: each for each in data("subscriptions", "list")}
    bus.shutdown()
    assert by_name["default"]["patterns"] == ["*"]
    mail = by_name["mail"]
    assert (mail["patterns"], mail["lease"], mail["retry"]["max_retries"]) == (["user.*", "order.*"], 5.0, 9)
    assert (mail["handlers"], mail["pending"]) == (["user.*"], 1)
    assert "user.* order.*" in cli("subscriptions", "list").stdout


def test_the_url_flag_wins_over_the_environment_and_that_over_the_file(folder, monkeypatch, cli):
    """Settings come from flags, then the environment, then the file."""
    (folder / "postbus.toml").write_text('url = "sqlite:///from-file.db"\n')
    cli("publish", "a")
    assert (folder / "shop.db").exists()
    cli("publish", "a", "--url", "sqlite:///from-flag.db")
    assert (folder / "from-flag.db").exists()
    monkeypatch.delenv("POSTBUS_URL")
    cli("publish", "a")
    assert (folder / "from-file.db").exists()


def test_a_wrong_setting_is_wrong_usage(monkeypatch, cli):
    """A setting out of range is exit 2 and is named."""
    monkeypatch.setenv("POSTBUS_CONCURRENCY", "0")
    assert "concurrency" in cli("publish", "a", expect=2).stderr


def test_an_unknown_scheme_is_wrong_usage(cli):
    """A URL nobody can open is exit 2."""
    cli("publish", "a", "--url", "mysql://root:hunter2@db/x", expect=2)


def test_no_secret_of_a_url_is_shown(cli):
    """A password in a URL stays out of every message (I17)."""
    for arguments in (["publish", "a"], ["stats"], ["doctor"], ["migrate"]):
        result = cli(*arguments, "--url", "mysql://root:hunter2@db/x", expect=2)
        assert "hunter2" not in result.output


def test_the_real_program_prints_data_on_stdout_and_the_rest_on_stderr():
    """Off a terminal there is no colour and no line is cut; messages go to stderr."""
    long = "x" * 300
    subprocess.run([PROGRAM, "publish", "a", "--title", long], check=True, capture_output=True, timeout=30)
    listed = subprocess.run([PROGRAM, "events", "list"], check=True, capture_output=True, text=True, timeout=30)
    assert long in listed.stdout
    assert "\x1b" not in listed.stdout
    assert not listed.stderr


def test_version_and_bare_command():
    """`--version` names the program; without a command it explains itself."""
    told = subprocess.run([PROGRAM, "--version"], check=True, capture_output=True, text=True, timeout=30)
    assert re.fullmatch(r"postbus \d+\.\d+.*\n", told.stdout)
    bare = subprocess.run([PROGRAM], check=False, capture_output=True, text=True, timeout=30)
    assert "doctor" in bare.stdout + bare.stderr
