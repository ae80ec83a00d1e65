"""`postbus bench`: it measures, ends, and leaves nothing but its events."""

import pytest

from postbus import EventBus
from postbus.model import Status

from .conftest import URL

QUICK = ("bench", "--seconds", "0.2", "--events", "150", "--rate", "100")


def test_a_bench_of_its_own_leaves_nothing(folder, data):
    """Without --url it measures a file that is gone afterwards, whatever the settings name."""
    found = data(*QUICK)
    assert [each["measure"].partition(",")[0] for each in found["figures"]] == [
        "publish",
        "publish",
        "handle",
        "delay at 100 a second",
    ]
    assert all(each["events"] > 0 < each["per_second"] for each in found["figures"])
    assert found["figures"][3]["p99_ms"] >= found["figures"][3]["p50_ms"] > 0
    assert not list(folder.iterdir())


def test_on_a_bus_only_the_events_stay(cli, data):
    """Subscription and deliveries are gone, in `default` too; what else waits is as it was (I14)."""
    cli("publish", "order.placed")
    found = data(*QUICK, "--url", URL, "--yes")
    after = data("stats")
    assert found["events_left"] == after["events"] - 1 > 0
    assert found["deliveries_an_event"] == 2
    assert [(each["name"], each["pending"], each["processing"]) for each in after["subscriptions"]] == [
        ("default", 1, 0)
    ]
    assert data("events", "show", "1")["status"] == Status.PENDING
    assert data("events", "list", "--status", "PENDING") == data("events", "list", "--type", "order.*")


@pytest.mark.parametrize("reason", ["work", "handler", "follower"])
def test_a_bus_with_other_work_is_refused(reason, cli, data):
    """Where events wait, or others would get the bench's, nothing is published without --yes."""
    bus = EventBus(URL)
    match reason:
        case "work":
            bus.publish("order.placed")
        case "handler":
            bus.subscribe("*", print)
            bus.start()
        case _:
            bus.follow("sales")(print)
            assert bus.followers  # the first use makes the subscription
    before = data("stats")["events"]
    told = cli(*QUICK, "--url", URL, expect=1).stderr
    bus.shutdown()
    assert "--yes" in told
    assert {"work": "1 event in default", "handler": "would get", "follower": "sales would read"}[reason] in told
    assert data("stats")["events"] == before


def test_one_that_was_killed_is_told_of(cli):
    """A subscription left behind is named with the command that takes it away."""
    bus = EventBus(URL)
    bus.subscriptions.create("postbus.bench", "postbus.bench.*")
    bus.shutdown()
    assert "postbus subscriptions delete postbus.bench" in cli(*QUICK, "--url", URL, expect=1).stderr


def test_a_paused_subscription_would_keep_the_events(cli):
    """Where deliveries could not be taken back, none is made, even with --yes."""
    cli("migrate")
    cli("subscriptions", "pause", "default")
    assert "paused" in cli(*QUICK, "--url", URL, "--yes", expect=1).stderr


def test_at_a_terminal_it_shows_bars_and_ends_by_itself(terminal):
    """Progress is for people; the table comes at the end."""
    code, shown = terminal(*QUICK).end()
    assert code == 0
    assert "delay at 100 a second" in shown
    assert "\x1b[" in shown
