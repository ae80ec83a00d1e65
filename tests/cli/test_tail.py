"""`postbus tail`: the log as it comes, at a terminal and in a pipe."""

import json
import signal
import subprocess

import pytest

from postbus import Discard, EventBus
from postbus.cli.tail import _Events
from postbus.model import Stream
from postbus.pattern import Interest
from postbus.store import log_of, open_store
from tests.postgres.server import server

from .conftest import PROGRAM, URL


@pytest.fixture
def orders(cli):
    """Leave orders 1, 3 and 5 and users 2, 4 and 6 in the log, the orders in the EU."""
    bus = EventBus(URL)
    for number in (1, 3, 5):
        bus.publish("order.placed", {"n": number}, tags=["eu"])
        bus.publish("user.new", {"n": number + 1}, key="ann")
    bus.shutdown()


def ids(text: str) -> list[int]:
    """Return the ids of JSON lines."""
    return [json.loads(each)["id"] for each in text.splitlines()]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), [1, 2, 3, 4, 5, 6]),
        (("-n", "2"), [5, 6]),
        (("-n", "0"), []),
        (("--after", "4"), [5, 6]),
        (("--since", "10m"), [1, 2, 3, 4, 5, 6]),
        (("--since", "2030-01-31T12:00:00Z"), []),
        (("--type", "user.*"), [2, 4, 6]),
        (("--type", "user.*", "-n", "2"), [4, 6]),
        (("--tag", "eu", "--after", "1"), [3, 5]),
        (("--subscription", "mail"), [2, 4, 6]),
        (("--subscription", "mail", "--tag", "eu"), []),
    ],
)
def test_what_is_asked_for_is_shown_in_order(options, expected, orders, cli):
    """Filters and the place to begin choose events; each is shown once, by rising id (I5)."""
    bus = EventBus(URL)
    bus.subscriptions.create("mail", "user.*")
    bus.shutdown()
    assert ids(cli("tail", *options).stdout) == expected


def test_what_a_filter_leaves_of_a_subscription_is_found_far_back(orders, cli):
    """However many others the subscription has wanted since: a list that is empty would be a lie (I5)."""
    bus = EventBus(URL)
    bus.subscriptions.create("all", "*")
    bus.publish_many([{"type": "ping"}] * 30)
    bus.shutdown()
    assert ids(cli("tail", "--subscription", "all", "--type", "user.*").stdout) == [2, 4, 6]
    assert ids(cli("tail", "--subscription", "all", "--tag", "eu", "-n", "2").stdout) == [3, 5]


def test_an_event_is_told_as_it_was_published(orders, cli):
    """A line holds the facts of the event, and nothing of how it stands somewhere."""
    told = json.loads(cli("tail", "-n", "1").stdout)
    assert (told["type"], told["payload"], told["key"]) == ("user.new", {"n": 6}, "ann")
    assert not {"status", "deliveries", "retry_count"} & told.keys()


def test_what_follows_is_shown_as_it_comes_each_once(orders, command, cli):
    """With -f, events of other processes follow those that were there; Ctrl-C is a good end (I5)."""
    process = command("tail", "-f", "-n", "1")
    lines = [process.stdout.readline()]
    for _ in range(3):
        cli("publish", "order.placed")
        lines.append(process.stdout.readline())
    process.send_signal(signal.SIGINT)
    rest, told = process.communicate(timeout=30)
    assert ids("".join(lines)) == [6, 7, 8, 9]
    assert (process.returncode, rest, told) == (0, "", "")


def test_an_event_that_commits_late_is_not_passed_over(cli):
    """On PostgreSQL an open transaction holds ids back; whoever begins meanwhile sees them once it commits (I5)."""
    with server().database() as url:
        bus = EventBus(url)
        source = _Events(log_of(bus.store), (Interest(),), Interest())
        with bus.transaction() as late:
            bus.publish("late", connection=late)
            other = EventBus(url)
            other.publish("early")
            other.shutdown()
            assert not cli("tail", "--url", url).stdout
            position = source.back(1)
        assert [event.type for event, _ in source.read(position).found] == ["late", "early"]
        bus.shutdown()
        assert len(cli("tail", "--url", url).stdout.splitlines()) == 2


@pytest.mark.parametrize("output", ["jsonl", "table"])
def test_a_reader_that_has_gone_is_a_good_end(output, cli, data):
    """`postbus tail | head -1` ends with 0 and without a word."""
    cli("publish", "order.placed", "-", stdin="\n".join(json.dumps("x" * 200) for _ in range(2_000)))
    process = subprocess.Popen(
        [PROGRAM, "tail", "--after", "0", "-o", output], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout
    assert process.stderr
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(30) == 0
    assert not process.stderr.read()
    process.stderr.close()


def test_at_a_terminal_lines_are_aligned_coloured_and_ended_by_ctrl_c(orders, terminal, cli):
    """Somebody who looks gets columns in colour, new events among them, and Ctrl-C is exit 0."""
    screen = terminal("tail", "-f")
    shown = screen.until('{"n": 6}')
    assert "\x1b[" in shown
    assert len({each.index("Z") for each in shown.splitlines() if "order.placed" in each}) == 1
    cli("publish", "late.one", '{"n": 7}')
    assert "late.one" in screen.until('{"n": 7}')
    screen.press("\x03")
    code, rest = screen.end()
    assert code == 0
    assert "Traceback" not in rest
    assert "Aborted" not in rest


def test_an_event_cannot_move_the_cursor(cli):
    """Lines show what an event holds; it is not obeyed, and a line stays one."""
    cli("publish", "a", "--title", "one\ntwo\x1b[2J")
    assert cli("tail", "-o", "table").stdout.splitlines()[0].endswith("one\\ntwo\\x1b[2J")


def test_what_is_done_with_events_is_shown_too(three_dead, cli):
    """With --audit every action is a line, in the order they were recorded (I13)."""
    told = [json.loads(each) for each in cli("tail", "--audit", "--type", "payment.*").stdout.splitlines()]
    assert [(each["event_id"], each["action"]) for each in told if each["event_id"] == 1] == [
        (1, "PICKED"),
        (1, "FAILED"),
    ]
    assert {each["event_id"] for each in told} == {1, 2}
    assert "Discard: no such card" in cli("tail", "--audit", "-o", "table").stdout
    assert not cli("tail", "--audit", "--after", str(max(each["id"] for each in told) + 2_048)).stdout


def test_actions_are_followed(cli, command):
    """`tail -f --audit` shows a worker's actions as they happen (I13)."""
    cli("publish", "order.placed")
    process = command("tail", "-f", "--audit", "--subscription", "default")
    bus = EventBus(URL)

    @bus.on("*")
    def refuse(event: object) -> None:
        raise Discard("no")

    bus.run_due()
    bus.shutdown()
    assert [json.loads(process.stdout.readline())["action"] for _ in range(2)] == ["PICKED", "FAILED"]


def test_what_was_archived_is_said_and_passed(cli, orders):
    """Who begins before what is still there is told so, and gets what there is."""
    bus = EventBus(URL)
    bus.subscribe("*", lambda _: None)
    bus.run_due()
    bus.shutdown()
    store = log_of(open_store(URL))
    store.prune(Stream.EVENTS, after=0, through=4)
    store.close()
    shown = cli("tail", "--after", "0")
    assert ids(shown.stdout) == [5, 6]
    assert "up to 4 was archived" in shown.stderr


@pytest.mark.parametrize("options", [("--after", "99"), ("--after", "1", "-n", "1"), ("--since", "soon")])
def test_a_place_that_is_none_is_wrong_usage(options, orders, cli):
    """A position beyond the log, two places, or words are exit 2."""
    cli("tail", *options, expect=2)


def test_a_subscription_that_is_not_there_is_named(orders, cli):
    """A slip in a name does not wait for ever."""
    assert "there is no subscription 'mial'" in cli("tail", "-f", "--subscription", "mial", expect=1).stderr


def test_nothing_that_a_terminal_obeys_comes_through_a_pipe(cli):
    """Control characters, C1 and turned writing in any field are escaped in JSON and replaced in text."""
    odd = "a\x9b31m\x7f\u202ee\u2066f\u200fg\u061c\u2028"
    bus = EventBus(URL)
    bus.publish("odd", {odd: odd}, title=odd, description=odd, metadata={"k": odd}, key="k", tags=["t"])
    bus.finalize(bus.poll_many(1)[0], success=False, errors=[Discard(odd)], retry=False)
    bus.shutdown()
    asked = [("tail",), ("events", "show", "1"), ("events", "list"), ("dlq", "show", "1"), ("dlq", "list")]
    for command in asked:
        for output in ("table", "jsonl"):
            shown = cli(*command, "--output", output).stdout
            assert "odd" in shown
            assert not set(odd) & set(shown) - set("a31mefg"), (command, output)
    told = json.loads(cli("tail").stdout)
    assert (told["title"], told["payload"]) == (odd, {odd: odd})
