"""`postbus publish`."""

import json

import pytest

from postbus import Event, EventBus
from postbus.cli import publish as publishing
from postbus.errors import OutcomeUnknown


def test_a_published_event_can_be_listed_and_shown(cli, data):
    """What is published stands in the log as PENDING, untried, and is returned as stored (S0.1, S2.1)."""
    published = data("publish", "order.placed", '{"order_id": 7}', "--tag", "eu")
    assert published["id"] == 1
    [listed] = data("events", "list")
    assert (listed["type"], listed["payload"], listed["tags"]) == ("order.placed", {"order_id": 7}, ["eu"])
    assert (listed["status"], listed["retry_count"]) == ("PENDING", 0)
    assert data("events", "show", "1")["uid"] == published["uid"]
    assert "order.placed" in cli("events", "show", "1").stdout


def test_every_option_reaches_the_event(data):
    """No option of `publish` is lost on the way to the store (S2.1)."""
    data(
        "publish", "a", "[1, null]", "--tag", "x", "--tag", "y", "--key", "k", "--title", "t", "--description", "d",
        "--priority", "-3", "--max-retries", "0", "--uid", "u-1", "--metadata", "by=me", "--metadata", "eq=a=b",
        "--at", "2100-01-31T12:00:00+01:00",
    )  # fmt: skip
    shown = data("events", "show", "1")
    expected = {
        "payload": [1, None], "tags": ["x", "y"], "key": "k", "title": "t", "description": "d", "priority": -3,
        "max_retries": 0, "uid": "u-1", "metadata": {"by": "me", "eq": "a=b"}, "next_retry_at": "2100-01-31T11:00:00Z",
    }  # fmt: skip
    assert {name: shown[name] for name in expected} == expected


def test_a_delay_may_be_given_in_minutes(data):
    """A delayed event is due later, and says when."""
    data("publish", "a", "--delay", "90m")
    [event] = data("events", "list")
    assert event["next_retry_at"] > event["created_at"]


def test_without_a_payload_it_is_null(data):
    """An event may have nothing to say but its type."""
    assert data("publish", "ping")["payload"] is None


@pytest.mark.parametrize(
    "payload", ["{a}", "hello", "NaN", "1e999", '{"a": 1, "a": 2}', "[" * 100 + "]" * 100, '"\\u0000"', '"\\ud800"', ""]
)
def test_what_is_not_json_is_refused_and_not_even_a_file_is_made(payload, cli, folder):
    """A payload that would not come back the same is exit 2, with nothing stored (S1.16)."""
    result = cli("publish", "a", payload, expect=2)
    assert "error:" in result.stderr
    assert not result.stdout
    assert not list(folder.iterdir())


@pytest.mark.parametrize(
    "arguments",
    [["", "1"], ["a", "1", "--tag", "x,y"], ["a", "1", "--metadata", "x"], ["a", "--delay", "soon"],
     ["a", "--at", "2030-01-01T00:00:00"], ["a", "--priority", "11"],
     ["a", "--delay", "1", "--at", "2030-01-01T00:00Z"]],
)  # fmt: skip
def test_a_wrong_option_is_wrong_usage_and_nothing_is_stored(arguments, cli, folder):
    """Whatever is wrong with an event is exit 2, before the store is opened (S1.16)."""
    cli("publish", *arguments, expect=2)
    assert not list(folder.iterdir())


def test_integers_of_any_width_come_back_exactly(data):
    """No number is rounded on its way through the command line."""
    wide = 2**80 + 1
    data("publish", "a", str(wide))
    assert data("events", "show", "1")["payload"] == wide


def test_the_same_uid_is_stored_once(data):
    """Publishing again under the same uid gives the first event back (I3)."""
    first = data("publish", "a", "1", "--uid", "u")
    assert data("publish", "a", "1", "--uid", "u")["id"] == first["id"]
    assert len(data("events", "list")) == 1


def test_the_same_uid_with_another_body_is_refused(data, cli):
    """One uid is one event, so another body under it is exit 2 (I3)."""
    data("publish", "a", "1", "--uid", "u")
    cli("publish", "a", "2", "--uid", "u", expect=2)


def test_each_line_of_stdin_is_a_payload_in_order(cli, data):
    """With a type, lines are payloads; blank ones are skipped."""
    result = cli("publish", "n", "-", "--tag", "x", stdin='1\n\n{"two": 2}\r\n[3]')
    assert "3" in result.stdout
    events = data("events", "list")[::-1]
    assert [each["payload"] for each in events] == [1, {"two": 2}, [3]]
    assert all(each["tags"] == ["x"] for each in events)


def test_without_a_type_each_line_is_an_event(data):
    """Without a type, lines are events, and what a line says wins over the options."""
    lines = [
        {"type": "a", "payload": 1},
        {"type": "b", "tags": ["own"], "metadata": {"k": "v"}, "at": "2100-01-01T00:00:00Z"},
    ]
    summary = data("publish", "-", "--tag", "given", stdin="\n".join(map(json.dumps, lines)))
    assert summary == {"published": 2, "first_id": 1, "last_id": 2}
    second, first = data("events", "list")
    assert (first["type"], first["tags"]) == ("a", ["given"])
    assert (second["tags"], second["metadata"], second["next_retry_at"]) == (
        ["own"],
        {"k": "v"},
        "2100-01-01T00:00:00Z",
    )


def test_with_jsonl_every_published_event_is_printed(cli):
    """A pipeline can go on with the ids."""
    lines = cli("publish", "n", "-", "-o", "jsonl", stdin="1\n2\n").stdout.splitlines()
    assert [json.loads(line)["id"] for line in lines] == [1, 2]


@pytest.mark.parametrize(
    "bad",
    ["{", "[1]", '{"payload": 1}', '{"type": "a", "colour": "red"}', '{"type": "a", "metadata": [1]}',
     '{"type": "a", "at": "noon"}', '{"type": "a", "at": 5}', '{"type": ""}', '{"type": "a", "tags": "x"}',
     '{"type": "a", "delay": "x"}', '{"type": "a", "metadata": {"k": 1}}', "\ud800"],
)  # fmt: skip
def test_a_bad_line_is_named_and_nothing_of_its_batch_is_stored(bad, cli, folder):
    """One bad line stops the batch: exit 2, the line's number, and what was published (I2, S1.16)."""
    text = '{"type": "a"}\n' + bad.encode(errors="surrogatepass").decode(errors="surrogateescape") + "\n"
    result = cli("publish", "-", stdin=text.encode(errors="surrogateescape"), expect=2)
    assert "line 2: " in result.stderr
    assert "Nothing was published." in result.stderr
    assert not list(folder.iterdir())


def test_a_line_too_long_is_refused_without_reading_on(cli):
    """A line that can never be a payload is refused as too large, by its number (S1.16)."""
    assert "line 1: " in cli("publish", "a", "-", stdin='"' + "x" * 3_000_000, expect=2).stderr


def test_lines_that_trickle_in_are_published_as_they_come(command, data):
    """A line is stored when it is read; a bad one later names what was published and what was not (I1, I2)."""
    process = command("publish", "n", "-", "-o", "jsonl")
    process.stdin.write("1\n")
    process.stdin.flush()
    assert json.loads(process.stdout.readline())["id"] == 1
    _, told = process.communicate("2\nbad\n", timeout=30)
    assert process.returncode == 2
    assert "line 3: " in told
    assert "Published: lines 1 to 1 (1 event). Not published: line 2 and all that follow." in told
    assert [each["payload"] for each in data("events", "list")] == [1]


def test_a_uid_for_many_lines_is_refused(cli, folder):
    """One uid cannot name many events (I3)."""
    cli("publish", "a", "-", "--uid", "u", stdin="1\n2\n", expect=2)
    assert not list(folder.iterdir())


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [(OutcomeUnknown("lost"), 1, "after line 1: lost. "), (KeyboardInterrupt(), 130, "interrupted. ")],
)
def test_lines_whose_commit_nobody_answered_for_are_not_called_unpublished(error, code, told, cli, data, monkeypatch):
    """They may be stored, and fed again they would be there twice: the message names them (I1)."""
    monkeypatch.setattr(publishing, "CHUNK", 4)
    publish_many = EventBus.publish_many

    def lose(bus: EventBus, events: list[dict]) -> list[Event]:
        stored = publish_many(bus, events)
        if stored[0].id > 1:
            raise error
        return stored

    monkeypatch.setattr(EventBus, "publish_many", lose)
    stderr = cli("publish", "n", "-", stdin="101\n2\n3\n104\n", expect=code).stderr
    assert told in stderr
    assert (
        "Published: lines 1 to 1 (1 event). Lines 2 to 3 may or may not be stored: look before you feed them again. "
        "Not published: line 4 and all that follow." in stderr
    )
    assert [each["payload"] for each in data("events", "list")] == [3, 2, 101]


def test_lines_that_the_store_refuses_are_not_published(cli, data):
    """A refusal is certain: nothing of its batch is stored, and nothing else is said of it (I2, I3)."""
    data("publish", "n", "1", "--uid", "u")
    lines = '{"type": "n", "payload": 0}\n{"type": "n", "payload": 2, "uid": "u"}\n'
    assert "Nothing was published." in cli("publish", "-", stdin=lines, expect=2).stderr
    assert len(data("events", "list")) == 1


def test_what_was_published_is_told_right_while_it_is_printed(cli, monkeypatch):
    """Ctrl-C in the midst of printing a batch that is stored does not call it unpublished (I1)."""

    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(publishing.typer, "echo", interrupt)
    told = cli("publish", "n", "-", "-o", "jsonl", stdin="1\n2\n", expect=130).stderr
    assert "Published: lines 1 to 2 (2 events). Not published: line 3 and all that follow." in told
