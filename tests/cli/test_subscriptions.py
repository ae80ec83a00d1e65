"""`postbus subscriptions`, and what `stats` and `doctor` say of those that read by position."""

import os
import pty
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest

from postbus import EventBus
from postbus.model import Stream
from postbus.store import log_of
from tests.kinds import on_sqlite
from tests.postgres.server import server

KEYS = ("ann", "bob", "ann", "ann", "bob", "bob")


@pytest.fixture
def shop(kind: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Give the address, which the environment names too, of a bus that `sales` has followed to its end at 7.

    Of the six orders, 1 to 6, the second is dead and 5 and 6, which have its key, are parked behind it.
    """
    if kind == "sqlite":
        url = "sqlite:///shop.db"
        follow_all(url)
        yield url
        return
    with server().database() as url:
        monkeypatch.setenv("POSTBUS_URL", url)
        follow_all(url)
        yield url


def follow_all(url: str) -> None:
    """Publish six orders and a refund, and follow them to the end."""
    bus = EventBus(url)
    bus.subscriptions.delete("default")
    bus.publish_many([{"type": "order.placed", "key": key} for key in KEYS] + [{"type": "refund"}])
    bus.shutdown()
    with following(url, poison=2) as (bus, _):
        bus.wait_for("sales", 7, timeout=30)


@contextmanager
def following(url: str, poison: int | None = None) -> Generator[tuple[EventBus, list[int]]]:
    """Follow orders as `sales` in this process; give the bus and the ids as they are handled."""
    bus, seen = EventBus(url, worker_id="shop-1"), list[int]()

    @bus.follow("sales", "order.*", on_error="park_key", retry={"max_retries": 0})
    def note(event: Any) -> None:
        if event.id == poison:
            raise ValueError("no such order")
        seen.append(event.id)

    with bus:
        yield bus, seen


def by_name(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return rows of `subscriptions list` by name."""
    return {row["name"]: row for row in rows}


def sales(data: Callable[..., Any]) -> dict[str, Any]:
    """Return how `sales` stands."""
    return by_name(data("subscriptions", "list"))["sales"]


def wrong(findings: list[dict[str, Any]], check: str) -> list[dict[str, Any]]:
    """Return what is wrong by one check."""
    return [each for each in findings if each["check"] == check and not each["ok"]]


def test_a_follower_is_listed_with_its_position_and_what_it_left_behind(shop, cli, data):
    """Position, lag, dead and parked show, as data and in a table (S4.2, S4.5)."""
    row = sales(data)
    assert (row["mode"], row["patterns"], row["paused"]) == ("ordered", ["order.*"], False)
    assert (row["pending"], row["processing"], row["dead"], row["parked"]) == (0, 0, 1, 2)
    assert row["parked_behind"] == [{"behind": 2, "key": "bob", "count": 2}]
    stand = row["checkpoint"]
    assert (stand["position"], stand["lag"], stand["waiting"], stand["worker_id"]) == (7, 0, None, None)
    shown = cli("subscriptions", "list").stdout.splitlines()
    assert shown[0].split() == ["NAME", "MODE", "WANTS", "TAGS", "PAUSED", "POSITION", "LAG", "WAITS", "READ", "BY",
                                "LEASE", "LEFT", "DEAD", "PARKED"]  # fmt: skip
    assert shown[1].split() == ["sales", "ordered", "order.*", "-", "no", "7", "0", "-", "-", "-", "1", "2"]
    assert shown[2] == "sales: parked behind 2 (key bob): 2"


def test_parked_events_are_told_with_what_they_wait_for(shop, cli, data):
    """Beside the dead letter itself; once that is retried, or purged, where the follower is listed (S4.5)."""
    [letter] = data("dlq", "list")
    assert (letter["event"]["id"], letter["event"]["key"], letter["parked"]) == (2, "bob", 2)
    assert "sales: parked behind 2 (key bob): 2" in cli("dlq", "list").stdout
    assert [each["parked"] for each in data("events", "show", "5", "--subscription", "sales")["deliveries"]] == [True]
    cli("dlq", "purge", "2", "--yes")
    assert sales(data)["parked_behind"] == [{"behind": None, "key": "bob", "count": 2}]
    assert "parked, free to go on once it is read (key bob): 2" in cli("subscriptions", "list").stdout


def test_of_very_many_keys_only_some_are_told(shop, cli, data, monkeypatch):
    """The list stays readable; its data has all of them (S4.5)."""
    with following(shop, poison=8) as (bus, _):
        bus.publish_many([{"type": "order.placed", "key": "eve"}] * 3)
        bus.wait_for("sales", 10, timeout=30)
    monkeypatch.setattr("postbus.cli.subscriptions.MOST_NAMED", 1)
    assert [each["key"] for each in sales(data)["parked_behind"]] == ["bob", "eve"]
    assert cli("subscriptions", "list").stdout.splitlines()[-1] == "sales: … and events of 1 more key"


def test_a_follower_that_stopped_for_good_is_told_with_the_reason(shop, cli, data, eventually):
    """In the list and as a finding, until it is passed over or handled (S4.5, S0.9)."""
    bus = EventBus(shop)

    @bus.follow("mail", "order.*", on_error="stop", retry={"max_retries": 0})
    def refuse(event: Any) -> None:
        raise ValueError("no such order\nin this shop")

    with bus:
        eventually(lambda: bus.followers["mail"].error)
    why = "stopped before event 1 (order.placed) after 1 attempt: ValueError: no such order"
    stand = by_name(data("subscriptions", "list"))["mail"]["checkpoint"]
    assert (stand["stopped"], stand["stopped_before"], stand["position"]) == (f"{why}\nin this shop", 1, 0)
    assert f"mail: {why}" in cli("subscriptions", "list").stdout.splitlines()
    [stopped] = wrong(data("doctor", expect=3), "followers")
    assert stopped["message"] == f"mail: {why}"
    assert "put the cause right, and start the program again" in stopped["remedy"]
    assert "postbus subscriptions rewind mail --to 1;" in stopped["remedy"]
    cli("subscriptions", "rewind", "mail", "--to", "1", "--yes")
    assert not wrong(data("doctor", expect=3), "followers")
    assert "stopped" not in cli("subscriptions", "list").stdout


KILLED = """
import os
from postbus import EventBus
bus = EventBus(worker_id="shop-9")
bus.follow("sales", "order.*", lease=600)(lambda event: os._exit(1))
bus.publish("order.placed")
with bus:
    bus.wait_idle()
"""


def test_a_reader_that_was_killed_is_told_to_be_gone(shop, cli, data):
    """At once, although its lease still runs, and nobody is said to read (S4.7, S0.9)."""
    subprocess.run([sys.executable, "-c", KILLED], check=False, timeout=60)
    stand = sales(data)["checkpoint"]
    assert (stand["worker_id"], stand["gone"]) == ("shop-9", True)
    assert "shop-9 (gone)" in cli("subscriptions", "list").stdout
    [behind] = [each for each in data("doctor", expect=3) if "behind, for" in each["message"]]
    assert behind["message"].endswith("nobody reads it")
    assert "reads it now" not in cli("subscriptions", "delete", "sales", "--dry-run").stderr
    assert "nobody reads it now" in cli("subscriptions", "rewind", "sales", "--to", "7", "--yes").stderr


def test_who_reads_is_listed_until_it_ends(shop, cli, data, eventually):
    """The process that reads shows with the end of its lease; once it has ended, what is left shows as lag (S4.7)."""
    with following(shop) as (bus, _):
        eventually(lambda: bus.followers["sales"].leads)
        stand = sales(data)["checkpoint"]
        assert stand["worker_id"] == "shop-1"
        assert stand["held_until"].endswith("Z")
        assert "shop-1" in cli("subscriptions", "list").stdout
    cli("publish", "refund")
    stand = sales(data)["checkpoint"]
    assert (stand["worker_id"], stand["held_until"], stand["lag"]) == (None, None, 1)
    assert stand["waiting"] >= 0


def test_a_spark_stream_is_listed_beside_queues(shop, cli, data):
    """All that read by position share a table, queues have their own."""
    bus = EventBus(shop)
    bus.subscriptions.create("mail", "user.*")
    log_of(bus.store).consumer("lake", Stream.AUDIT, 0)
    bus.shutdown()
    rows = by_name(data("subscriptions", "list"))
    assert rows["mail"]["checkpoint"] is None
    assert rows["lake"]["checkpoint"]["stream"] == "audit"
    queues, _, readers = cli("subscriptions", "list").stdout.partition("\n\n")
    assert "mail" in queues
    assert "lake" in readers
    assert "sales" in readers


def test_a_paused_follower_waits_until_it_is_resumed(shop, cli, data, eventually):
    """Paused, it reads nothing; resumed, it goes on where it stood (S4.3)."""
    assert data("subscriptions", "pause", "sales") == {"name": "sales", "paused": True, "changed": True}
    assert data("subscriptions", "pause", "sales")["changed"] is False
    cli("publish", "order.placed")
    with following(shop) as (bus, seen):
        eventually(lambda: bus.followers["sales"].leads)
        assert sales(data)["checkpoint"]["position"] == 7
        assert seen == []
        assert "sales is now running" in cli("subscriptions", "resume", "sales").stderr
        bus.wait_for("sales", 8, timeout=30)
        assert seen == [8]


def test_a_dry_run_tells_what_is_handled_again_and_discarded(shop, cli, data):
    """`--dry-run` counts and changes nothing."""
    told = data("subscriptions", "rewind", "sales", "--to", "beginning", "--dry-run")
    assert told == {
        "name": "sales", "from": 7, "position": 0, "again": 6, "passed_over": 0, "discarded": 3, "dry_run": True,
    }  # fmt: skip
    shown = cli("subscriptions", "rewind", "sales", "--to", "beginning", "--dry-run")
    assert "sales would go on after 0 instead of 7: 6 events handled again, 3 unfinished or dead" in shown.stderr
    assert not shown.stdout
    row = sales(data)
    assert (row["checkpoint"]["position"], row["dead"], row["parked"]) == (7, 1, 2)


@pytest.mark.parametrize("verb", [["rewind", "sales", "--to", "2"], ["delete", "sales"]])
def test_what_is_lost_is_shown_before_it_is_agreed_to(verb, shop, cli, data):
    """Without a terminal `--yes` must be given: exit 2, with the figures, and nothing changed."""
    told = cli("subscriptions", *verb, expect=2).stderr
    assert "There is no terminal to ask at: add --yes" in told
    assert "4 events handled again, 2 unfinished or dead" in told or "3 unfinished events: 1 dead, 2 parked" in told
    row = sales(data)
    assert (row["checkpoint"]["position"], row["dead"], row["parked"]) == (7, 1, 2)


def test_a_rewind_has_events_handled_again(shop, cli, data):
    """It goes on after the id; what lay dead or parked after it is discarded in the command's name (I6, I11)."""
    told = data("subscriptions", "rewind", "sales", "--to", "1", "--yes")
    assert (told["position"], told["again"], told["discarded"], told["dry_run"]) == (1, 5, 3, False)
    last = data("events", "show", "2")["logs"][-1]
    assert (last["action"], last["subscription"], last["worker_id"]) == ("DISCARDED", "sales", "cli")
    with following(shop) as (bus, seen):
        bus.wait_for("sales", 7, timeout=30)
    assert seen == [2, 3, 4, 5, 6]
    assert sales(data)["dead"] == 0


def test_whoever_reads_begins_at_the_new_position(shop, cli, eventually):
    """A running follower is rewound under its feet, and handles all of it again (I8)."""
    with following(shop) as (bus, seen):
        eventually(lambda: bus.followers["sales"].leads)
        assert "nobody reads it" not in cli("subscriptions", "rewind", "sales", "--to", "beginning", "--yes").stderr
        eventually(lambda: seen[-1:] == [6])
    assert seen[-6:] == [1, 2, 3, 4, 5, 6]


def test_a_rewind_goes_to_a_moment_and_to_now(shop, cli, data):
    """A moment is found in the log; `now` tells how much is passed over (S4.3)."""
    bus = EventBus(shop)
    created = bus.get(1).created_at
    bus.publish_many([{"type": "order.placed"}] * 3)
    bus.shutdown()
    earlier = (created - timedelta(hours=1)).isoformat()
    assert data("subscriptions", "rewind", "sales", "--to", earlier, "--yes")["position"] == 0
    assert (
        "9 events between them passed over, never handled"
        in cli("subscriptions", "rewind", "sales", "--to", "now", "--dry-run").stderr
    )
    told = data("subscriptions", "rewind", "sales", "--to", "now", "--yes")
    assert (told["from"], told["position"], told["again"], told["passed_over"]) == (0, 10, 0, 9)
    later = (created + timedelta(days=1)).isoformat()
    assert data("subscriptions", "rewind", "sales", "--to", later, "--dry-run")["position"] == 10


@pytest.mark.parametrize(
    ("to", "told"),
    [("8", "there is no position 8 to go on after: 0 is the first, 7 the last"),
     ("1,204", "there is no position 1,204"), ("-1", "there is no position -1"), ("9" * 30, "there is no position"),
     ("yesterday", "--to is an id, a moment with its time zone such as"), ("2030-01-31", "with its time zone"),
     ("", "--to is an id")],
)  # fmt: skip
def test_a_position_that_is_not_there_is_wrong_usage(to, told, shop, cli, data):
    """What is out of range or cannot be read is exit 2 with what would do, and nothing changes."""
    for how in ("--dry-run", "--yes"):
        assert told in cli("subscriptions", "rewind", "sales", "--to", to, how, expect=2).stderr
    assert sales(data)["checkpoint"]["position"] == 7


def test_a_queue_goes_back_after_a_preview(shop, cli, data):
    """Completed and dead events are handled again; forwards it does not go (N.29)."""
    bus = EventBus(shop)
    bus.subscriptions.create("mail", "*", start="beginning")
    for _ in range(7):
        delivery = bus.poll(subscription="mail", worker_id="w")
        assert delivery is not None
        bus.finalize(delivery, success=delivery.id != 4, retry=False)
    shown = cli("subscriptions", "rewind", "mail", "--to", "2", "--dry-run").stderr
    assert (
        "mail would go on after 2 instead of 7: 5 events handled again, 1 unfinished or dead event discarded" in shown
    )
    assert "they run again: also for events that were completed" in shown
    assert bus.poll(subscription="mail", worker_id="w") is None
    told = data("subscriptions", "rewind", "mail", "--to", "2", "--yes")
    assert (told["from"], told["position"], told["again"], told["discarded"]) == (7, 2, 5, 1)
    bus.shutdown()
    row = by_name(data("subscriptions", "list"))["mail"]
    assert (row["pending"], row["dead"]) == (5, 0)
    refused = cli("subscriptions", "rewind", "mail", "--to", "now", "--yes", expect=2).stderr
    assert "rewind to a position from 0 to 2, not 7" in refused


def test_a_spark_stream_is_neither_rewound_nor_paused(shop, cli, data):
    """It is told what to do instead, and keeps what it has."""
    bus = EventBus(shop)
    log_of(bus.store).consumer("lake", Stream.EVENTS, 3)
    bus.shutdown()
    assert "Spark stream" in cli("subscriptions", "rewind", "lake", "--to", "0", "--yes", expect=2).stderr
    assert "Spark stream" in cli("subscriptions", "pause", "lake", expect=2).stderr
    assert by_name(data("subscriptions", "list"))["lake"]["checkpoint"]["position"] == 3


@pytest.mark.parametrize("verb", [["pause"], ["resume"], ["rewind", "--to", "now", "--yes"], ["delete", "--yes"]])
def test_an_unknown_name_is_said_with_those_there_are(verb, shop, cli):
    """A name that is not there is exit 1."""
    told = cli("subscriptions", verb[0], "slaes", *verb[1:], expect=1).stderr
    assert "there is no subscription 'slaes'; there are: sales" in told


def test_a_deleted_follower_leaves_the_log_as_it_was(shop, cli, data):
    """Its position and what it left behind go, each recorded; the events stay (I13)."""
    assert (
        "would delete sales (ordered at 7) with 3 unfinished events"
        in cli("subscriptions", "delete", "sales", "--dry-run").stderr
    )
    told = data("subscriptions", "delete", "sales", "--yes")
    assert (told["name"], told["dead"], told["parked"], told["dry_run"]) == ("sales", 1, 2, False)
    assert data("subscriptions", "list") == []
    assert data("stats")["events"] == 7
    assert data("events", "show", "5")["logs"][-1]["action"] == "DISCARDED"


def test_a_queue_is_deleted_with_its_depth(shop, cli, data):
    """What a queue has not finished is counted by state."""
    bus = EventBus(shop)
    bus.subscriptions.create("mail", "order.*", start="beginning")
    assert bus.poll(subscription="mail") is not None
    bus.shutdown()
    told = cli("subscriptions", "delete", "mail", "--dry-run").stderr
    assert "would delete mail (queue) with 6 unfinished events: 5 pending, 1 processing" in told
    cli("subscriptions", "delete", "mail", "--yes")
    assert [row["name"] for row in data("subscriptions", "list")] == ["sales"]


def test_who_would_find_it_gone_is_named(shop, cli, eventually):
    """Whoever reads a subscription that is to be deleted shows in the question."""
    with following(shop) as (bus, _):
        eventually(lambda: bus.followers["sales"].leads)
        assert "; shop-1 reads it now?" in cli("subscriptions", "delete", "sales", expect=2).stderr


@on_sqlite
@pytest.mark.parametrize(("answer", "left"), [("n", 7), ("y", 0)])
def test_on_a_terminal_it_asks_with_the_figures(answer, left, shop, command, data):
    """A person is asked, told what follows, and obeyed."""
    keyboard, terminal = pty.openpty()
    process = command("subscriptions", "rewind", "sales", "--to", "beginning", stdin=terminal)
    os.write(keyboard, f"{answer}\n".encode())
    _, told = process.communicate(timeout=60)
    os.close(terminal)
    os.close(keyboard)
    assert "Rewind sales from 7 to 0: 6 events handled again, 3 unfinished or dead events discarded?" in told
    assert process.returncode == (0 if answer == "y" else 1)
    assert sales(data)["checkpoint"]["position"] == left


def test_stats_show_how_far_each_has_come(shop, cli, data):
    """Positions and lag can be read off a bus (S0.9)."""
    cli("publish", "refund")
    [stand] = data("stats")["checkpoints"]
    assert (stand["subscription"], stand["position"], stand["lag"]) == ("sales", 7, 1)
    assert "sales         events         7    1" in cli("stats").stdout


def test_a_follower_that_is_behind_for_a_moment_is_well(shop, cli, data):
    """A restart takes its time: how far it is behind is told, and is no finding (S0.9)."""
    cli("publish", "order.placed")
    found = data("doctor", expect=3)
    assert not wrong(found, "followers")
    [behind] = [each["message"] for each in found if "behind, for" in each["message"]]
    assert behind.startswith("sales is 1 position behind, for ")
    assert behind.endswith(", and nobody reads it")


def test_a_follower_that_stands_still_although_it_is_read_is_found(shop, cli, data, monkeypatch):
    """Its handler hangs, say: told with the process that reads (S0.9)."""
    monkeypatch.setattr("postbus.doctor.STILL", timedelta(0))
    entered, go_on = threading.Event(), threading.Event()
    bus = EventBus(shop, worker_id="shop-2")

    @bus.follow("sales", "order.*")
    def hang(event: Any) -> None:
        entered.set()
        go_on.wait(60)

    with bus:
        bus.publish("order.placed")
        assert entered.wait(60)
        [stuck] = wrong(data("doctor", expect=3), "followers")
        go_on.set()
    assert stuck["message"].startswith("sales is 1 position behind, for ")
    assert "shop-2 reads it; it has not moved for " in stuck["message"]
    assert "the handler hangs" in stuck["remedy"]


def test_a_follower_that_is_left_alone_is_found(shop, cli, data, monkeypatch):
    """Something to read and nobody who does is a finding after a while; so are its dead letters (S0.9)."""
    monkeypatch.setattr("postbus.doctor.STILL", timedelta(0))
    assert not wrong(data("doctor", expect=3), "followers")
    cli("publish", "order.placed")
    found = data("doctor", expect=3)
    [alone] = wrong(found, "followers")
    assert alone["message"].startswith("sales is 1 position behind, for ")
    assert "nobody reads it; it has not moved for " in alone["message"]
    assert alone["remedy"].endswith("postbus subscriptions delete sales")
    [dead] = wrong(found, "dead letters")
    assert dead["message"] == "1 in subscription sales, 2 events parked behind"
    with following(shop) as (bus, _):
        bus.wait_for("sales", 8, timeout=30)
        assert not wrong(data("doctor", expect=3), "followers")


def test_a_follower_paused_while_events_wait_is_found(shop, cli, data):
    """A paused follower is told of once, with the command that resumes it."""
    cli("subscriptions", "pause", "sales")
    cli("publish", "order.placed")
    found = data("doctor", expect=3)
    assert not wrong(found, "followers")
    [paused] = wrong(found, "paused")
    assert paused["message"] == "subscription sales is paused, 1 position waiting"
    assert paused["remedy"] == "postbus subscriptions resume sales"


def test_a_checkpoint_of_another_log_is_found_and_rewound(shop, cli, data):
    """After a restore the old position means nothing: doctor says so, and a rewind mends it (I4)."""
    cli("restore-mark", "--yes")
    [lost] = wrong(data("doctor", expect=3), "followers")
    assert lost["message"] == "sales stands at 7 of another log: the store was restored or replaced"
    assert "postbus subscriptions rewind sales --to ID" in lost["remedy"]
    cli("subscriptions", "rewind", "sales", "--to", "7", "--yes")
    assert not wrong(data("doctor", expect=3), "followers")


def test_a_checkpoint_beyond_the_last_event_is_found(kind, shop, data):
    """A position that no event has is that of a log which is gone (I4)."""
    bus = EventBus(shop)
    with bus.transaction() as tx:
        where = "postbus.checkpoints" if kind == "postgres" else "checkpoints"
        tx.execute(f"UPDATE {where} SET position = 1204")  # noqa: S608  one of two names
    bus.shutdown()
    [lost] = wrong(data("doctor", expect=3), "followers")
    assert lost["message"].startswith("sales stands at 1,204, beyond the last event at 7")


def test_a_retried_dead_letter_nobody_reads_names_the_follower(shop, cli, data, eventually):
    """It waits for the program that follows, not for a worker's handler (S4.5)."""
    cli("dlq", "retry", "2")
    [finding] = wrong(data("doctor", expect=3), "handlers")
    assert finding["message"] == '1 event nobody handles: order.placed in subscription "sales"'
    assert "start the program" in finding["remedy"]
    with following(shop) as (_, seen):
        eventually(lambda: seen == [2, 5, 6])
