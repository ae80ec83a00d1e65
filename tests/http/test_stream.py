"""The log as server-sent events: in order, none missed, from anywhere on."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest

from postbus.model import Stream
from postbus.store import log_of
from tests.conftest import Crew
from tests.http.serving import Served, serving

POSTGRES = pytest.mark.parametrize("kind", ["postgres"])


@pytest.fixture
def served(kind: str, tmp_path: Path) -> Iterator[Served]:
    """Give a server with an empty store."""
    with serving(kind, tmp_path) as served:
        yield served


@contextmanager
def opened(served: Served, headers: dict[str, str] | None = None, **query: Any) -> Iterator[Iterator[dict[str, str]]]:
    """Follow the stream from when it has begun: each thing that comes as its fields, a comment as `{"": text}`."""
    with served.http.stream("GET", "/stream", params=query, headers=headers) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["cache-control"] == "no-store"
        lines = answer.iter_lines()
        assert next(lines) == "retry: 1000"
        yield frames(lines)


def frames(lines: Iterator[str]) -> Iterator[dict[str, str]]:
    """Return the frames of a stream of lines."""
    fields: dict[str, str] = {}
    for line in lines:
        if line.startswith(":"):
            yield {"": line[1:].strip()}
        elif line:
            name, _, value = line.partition(":")
            fields[name] = value.removeprefix(" ")
        elif fields:
            yield fields
            fields = {}


def events_of(served: Served, headers: dict[str, str] | None = None, **query: Any) -> list[dict[str, Any]]:
    """Return a stream that ends, as events; the position of each is its id."""
    with opened(served, headers, **query) as stream:
        found = [each for each in stream if "data" in each]
    told = [json.loads(each["data"]) for each in found]
    assert [int(each["id"]) for each in found] == [each["id"] for each in told]
    return told


def publish(served: Served, count: int, **fields: Any) -> list[int]:
    """Publish some events; return their ids."""
    items = [{"payload": number, **fields} for number in range(count)]
    return [each["id"] for each in served.http.post("/events/batch", json=items).json()["events"]]


def test_all_events_come_in_the_order_of_the_log(served: Served):
    """From the beginning, more than a page of them, each with what it is."""
    ids = publish(served, 450, type="a.b", tags="x,y")
    found = events_of(served, after=0, limit=450)
    assert [each["id"] for each in found] == ids
    assert [each["payload"] for each in found] == list(range(450))
    assert {name: found[0][name] for name in ("type", "tags", "title", "key")} == {
        "type": "a.b",
        "tags": "x,y",
        "title": None,
        "key": None,
    }
    assert {"uid", "created_at", "metadata"} <= found[0].keys()
    assert "status" not in found[0]


def test_what_is_published_now_comes_now(served: Served):
    """Without a position the stream begins with what comes; it is there at once, not at the next heartbeat."""
    publish(served, 3)
    with opened(served, limit=2) as stream:
        first = served.publish(payload="now")["id"]
        assert int(next(stream)["id"]) == first
        second = served.publish(payload="again")["id"]
        assert int(next(stream)["id"]) == second
        assert next(stream, None) is None


@pytest.mark.parametrize("how", ["after", "last-event-id"])
def test_a_client_that_comes_back_goes_on_where_it_was(served: Served, how: str):
    """After the position it has seen, whether a browser or a program says so."""
    ids = publish(served, 10)
    if how == "after":
        found = events_of(served, after=ids[3], limit=6)
    else:
        found = events_of(served, {"last-event-id": str(ids[3])}, limit=6)
    assert [each["id"] for each in found] == ids[4:]


def test_a_browser_that_comes_back_is_not_sent_to_the_beginning(served: Served):
    """Its Last-Event-ID is newer than the ?after= it began with."""
    ids = publish(served, 5)
    found = events_of(served, {"last-event-id": str(ids[2])}, after=0, limit=2)
    assert [each["id"] for each in found] == ids[3:]


def test_a_stream_cut_anywhere_misses_and_repeats_nothing(served: Served):
    """Reading a few, hanging up and coming back gives the log, each event once (I5)."""
    ids = publish(served, 40)
    seen: list[int] = []
    for size in (1, 7, 13, 19):
        seen += [each["id"] for each in events_of(served, after=seen[-1] if seen else 0, limit=size)]
    assert seen == ids


def test_filters_choose_what_comes(served: Served):
    """By any of the tags, and by patterns of the type."""
    for number in range(30):
        served.publish(type=f"kind.{number % 3}", tags=f"t{number % 2}", payload=number)

    def payloads(limit: int, **query: Any) -> list[int]:
        return [each["payload"] for each in events_of(served, None, after=0, limit=limit, **query)]

    assert payloads(10, types="kind.1") == list(range(1, 30, 3))
    assert payloads(15, tags="t1") == list(range(1, 30, 2))
    assert payloads(20, types="kind.0,kind.2") == [number for number in range(30) if number % 3 != 1]
    assert payloads(5, types="kind.1", tags="t1") == list(range(1, 30, 6))
    assert payloads(30, tags="t0,t1") == list(range(30))


def test_a_quiet_stream_says_that_it_is_there(served: Served):
    """A heartbeat comes again and again, so that proxies and clients know."""
    served.app.state.desk.heartbeat = 0.1
    with opened(served) as stream:
        assert [next(stream) for _ in range(3)] == [{"": "still here"}] * 3


def test_every_block_of_a_stream_has_data(served: Served):
    """Retry time and heartbeats are no blocks of their own, which some clients would take for events without data."""
    served.app.state.desk.heartbeat = 0.05
    with served.http.stream("GET", "/stream", params={"limit": 2}) as answer:
        lines = answer.iter_lines()
        begun = [next(lines) for _ in range(4)]
        for number in range(2):
            served.publish(payload=number)
        blocks = "\n".join([*begun, *lines]).split("\n\n")
    assert begun == ["retry: 1000", *[": still here"] * 3]
    assert [block.count("\ndata: ") for block in blocks if block.strip()] == [1, 1]


def test_a_stream_ends_after_its_wait(served: Served):
    """With `wait` it ends when nothing came for so long: what there is, and no more."""
    ids = publish(served, 3)
    assert [each["id"] for each in events_of(served, after=0, wait=0)] == ids
    assert events_of(served, wait=0.1) == []


def test_beyond_the_end_of_the_log_is_a_conflict(served: Served):
    """Such a position is of another log: 409, not silence."""
    (last,) = publish(served, 1)
    for headers, query in (({}, {"after": last + 1}), ({"last-event-id": str(last + 1)}, {})):
        answer = served.http.get("/stream", params=query, headers=headers)
        assert (answer.status_code, answer.json()["type"]) == (409, "/problems/conflict")


def test_what_is_archived_is_gone(served: Served):
    """A position before what was pruned is 410; from there on everything comes (I5)."""
    ids = publish(served, 10)
    for event_id in ids:
        served.take()
        assert served.act("complete", event_id).status_code == 200
    log_of(served.bus.store).prune(Stream.EVENTS, after=0, through=ids[4])
    for query in ({"after": 0}, {"after": ids[3]}):
        answer = served.http.get("/stream", params=query)
        assert (answer.status_code, answer.json()["type"]) == (410, "/problems/gone")
    assert [each["id"] for each in events_of(served, after=ids[4], limit=5)] == ids[5:]


def test_many_publishers_are_read_in_order(served: Served, crew: Crew):
    """Eight publish at once while three streams read: each has every event, once, in order (I5)."""
    total = 8 * 40
    begun = threading.Barrier(11)

    def read() -> list[int]:
        with opened(served, after=0, limit=total) as stream:
            begun.wait(30)
            return [int(each["id"]) for each in stream if "data" in each]

    def write() -> list[int]:
        begun.wait(30)
        return [served.publish(payload=number)["id"] for number in range(40)]

    crew.start(read, 3)
    crew.start(write, 8)
    results = crew.join(120)
    streams = [each for each in results if len(each) == total]
    written = sorted(event_id for each in results if len(each) == 40 for event_id in each)
    assert len(streams) == 3
    assert all(each == written for each in streams)


@POSTGRES
def test_a_late_commit_is_not_passed_by(served: Served, crew: Crew, eventually: Callable[..., Any]):
    """While a transaction with a lower id is open, nothing behind it is shown; then all comes in order (I5)."""
    with psycopg.connect(served.bus.store.url) as late:
        first = served.publish(payload="first")["id"]
        with late.transaction():
            held = served.bus.publish("late", "held", connection=late).id
            behind = [served.publish(payload=number)["id"] for number in range(3)]
            assert held < behind[0]
            seen: list[int] = []

            def read() -> None:
                with opened(served, after=0, limit=5) as stream:
                    seen.extend(int(each["id"]) for each in stream if "data" in each)

            with opened(served, after=0, wait=0) as stream:
                assert [int(each["id"]) for each in stream if "data" in each] == [first]
            crew.start(read)
        crew.join(30)
    assert seen == [first, held, *behind]


def publish_late(served: Served, number: int) -> list[int]:
    """Publish in transactions that stay open for a while, every fifth rolled back; return what was committed."""
    kept: list[int] = []
    pause = threading.Event()
    with psycopg.connect(served.bus.store.url, autocommit=True) as connection:
        for turn in range(15):
            with connection.transaction(force_rollback=turn % 5 == 4):
                made = [served.bus.publish("late", turn, connection=connection).id for _ in range(2)]
                pause.wait(0.003 * (number + turn % 3))
            kept += made if turn % 5 != 4 else []
    return kept


def follow_until(served: Served, done: threading.Event) -> list[int]:
    """Come back to the stream again and again, once more after `done`; return what came."""
    seen: list[int] = []
    while True:
        over = done.is_set()
        seen += [each["id"] for each in events_of(served, after=seen[-1] if seen else 0, wait=0.05)]
        if over:
            return seen


@POSTGRES
def test_late_commits_of_many_are_read_in_order(served: Served, crew: Crew):
    """Publishers that hold their transactions open for a while, some rolled back: each event once, in order (I5)."""
    done = threading.Event()
    crew.start(lambda: follow_until(served, done), 2)
    writers = Crew()
    for number in range(6):
        writers.start(partial(publish_late, served, number))
    kept = sorted(event_id for each in writers.join(60) for event_id in each)
    done.set()
    assert len(kept) == 6 * 12 * 2
    assert crew.join(60) == [kept] * 2


def test_a_reader_that_hangs_up_leaves_nothing_running(served: Served, eventually: Callable[..., Any]):
    """Its stream ends with it, and others go on."""
    for _ in range(20):
        with opened(served):
            pass
    served.publish(payload=1)
    assert eventually(lambda: served.at_work == 0, within=30)
    assert served.total() == 1


def test_a_server_that_ends_ends_its_streams(served: Served, crew: Crew):
    """Draining, it lets streams go instead of waiting for them."""
    with opened(served) as stream:
        crew.start(lambda: list(stream))
        served.drain()
        (rest,) = crew.join(30)
    assert rest == []
