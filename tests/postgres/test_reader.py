"""On one connection a follower reads, has the next page looked up while it catches up, and hears that there is more."""

import os
import select
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest

from postbus.errors import EventBusShutdownError
from postbus.pattern import Interest
from postbus.payload import draft
from postbus.store import Log, base, followers, log_of, open_store
from postbus.store.contract import Reader
from postbus.store.postgres import reader as module
from postbus.store.postgres.reader import PostgresReader
from tests.postgres.server import query

ALL = (Interest("*"),)
PAGE = 10
SNAPSHOTS = "SELECT count(*) FROM pg_stat_activity WHERE backend_xmin IS NOT NULL AND pid <> pg_backend_pid()"


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have whoever goes on at once be taken for that, on a busy machine too."""
    monkeypatch.setattr(module, "BRISK", 60.0)
    monkeypatch.setattr(module, "STALE", 60.0)


@pytest.fixture
def store(url: str) -> Iterator[Log]:
    """Give a store with a hundred and five events of three types."""
    store = log_of(open_store(url))
    store.publish([draft({"type": f"t{number % 3}", "payload": number}) for number in range(105)])
    yield store
    store.close()


@pytest.fixture
def reader(store: Log) -> Iterator[PostgresReader]:
    """Give a reader."""
    reader = store.reader()
    assert isinstance(reader, PostgresReader)
    yield reader
    reader.drop()
    reader.close()


@pytest.fixture
def other(url: str) -> Iterator[Log]:
    """Give the store as another process has it."""
    other = log_of(open_store(url))
    yield other
    other.close()


def read(reader: Reader, after: int = 0, pages: int = 1) -> list[int]:
    """Read some pages on, and return the ids."""
    ids: list[int] = []
    for _ in range(pages):
        ahead = reader.read_on(after, PAGE, ALL)
        ids += [each.id for each in ahead.events]
        after = ahead.reached
    return ids


def is_coming(reader: PostgresReader) -> bool:
    """Return whether a page is on its way."""
    return reader._coming is not None


def await_coming(reader: PostgresReader) -> None:
    """Wait until the server has looked it up."""
    assert reader._coming
    assert select.select([reader._wire], [], [], 30)[0]


def test_the_pages_are_those_of_the_log(store: Log, reader: PostgresReader):
    """Each event once, in order, as far as it is wanted; at the end nothing is left under way."""
    wanted, after, seen, ahead = (Interest("t1"),), 0, list[object](), list[bool]()
    while (page := reader.read_on(after, PAGE, wanted)).more:
        assert page == store.read_on(after, PAGE, wanted)
        seen += [each.payload for each in page.events]
        ahead.append(is_coming(reader))
        after = page.reached
    seen += [each.payload for each in page.events]
    assert seen == list(range(1, 105, 3))
    assert ahead == [False] + [True] * 9
    assert not is_coming(reader)


def test_what_is_published_meanwhile_is_read_in_its_turn(store: Log, reader: PostgresReader):
    """A page that was looked up at the end of the log is not taken for its end."""
    assert read(reader, 80, 2) == list(range(81, 101))
    await_coming(reader)
    store.publish([draft({"type": "t1"}) for _ in range(20)])
    assert read(reader, 100) == [101, 102, 103, 104, 105]
    assert read(reader, 105, 2) == list(range(106, 126))


def test_a_page_that_is_not_asked_for_is_dropped(reader: PostgresReader):
    """Rewound, or with larger pages from now on: what comes is what was asked for."""
    read(reader, 0, 2)
    assert is_coming(reader)
    assert read(reader, 50) == list(range(51, 61))
    assert len(reader.read_on(60, 2 * PAGE, ALL).events) == 2 * PAGE
    assert read(reader, 80, 2) == list(range(81, 101))


def test_a_page_that_waited_long_is_looked_up_again(reader: PostgresReader, url: str, monkeypatch: pytest.MonkeyPatch):
    """Somebody may have erased what is in it."""
    read(reader, 0, 2)
    await_coming(reader)
    query(url, "UPDATE events SET payload = 'null' WHERE id = 21")
    (old, *_) = reader.read_on(20, PAGE, ALL).events
    assert (old.payload, is_coming(reader)) == (20, True)
    query(url, "UPDATE events SET payload = 'null' WHERE id = 31")
    monkeypatch.setattr(module, "STALE", 0.0)
    (fresh, *_) = reader.read_on(30, PAGE, ALL).events
    assert fresh.payload is None


def test_who_takes_his_time_has_nothing_looked_up(reader: PostgresReader, monkeypatch: pytest.MonkeyPatch):
    """The server would have to keep it, and its snapshot, for as long as that takes."""
    monkeypatch.setattr(module, "BRISK", 0.05)
    after = 0
    for _ in range(3):
        after = read(reader, after)[-1]
        assert not is_coming(reader)
        time.sleep(module.BRISK * 1.5)


@pytest.mark.parametrize("forgetful", [False, True])
def test_a_connection_that_is_lost_meanwhile_is_no_matter(
    reader: PostgresReader, other: Log, url: str, *, forgetful: bool
):
    """It is a read: it is done again, on another that listens too; so is what the server no longer knows."""
    read(reader, 0, 2)
    if forgetful:
        reader.drop()
        read(reader)
        reader._db.run_at_once(("read_on", (0, 1, 1)))
        reader._db.connection.execute("DEALLOCATE ALL")
    else:
        query(url, "SELECT pg_terminate_backend(%s, 5000)", reader._db.connection.info.backend_pid)
    assert read(reader, 20, 3) == list(range(21, 51))
    assert is_coming(reader)
    assert read(reader, 50, 6) == list(range(51, 106))
    publish(other)
    assert waited(reader, LONG) == (True, False)


def test_a_page_on_its_way_holds_nothing_back(reader: PostgresReader, url: str, eventually: Callable[..., object]):
    """Neither new events, nor pruning: it is a read like any other, and over in the server when it was sent."""
    read(reader, 0, 2)
    eventually(lambda: query(url, SNAPSHOTS) == [(0,)])
    assert is_coming(reader)


def test_what_is_wanted_is_made_out_once(store: Log):
    """Not for every page; and nothing of a store is kept for the sake of its readers."""
    assert followers._wanting((Interest("t1"),)) is followers._wanting((Interest("t1"),))
    assert not hasattr(base._PlainReader, "cache_info")
    assert base._PlainReader(store) is not base._PlainReader(store)  # type: ignore[arg-type]


# ── waiting ──────────────────────────────────────────────────────────────────────────────────────────────────────────

LONG, SHORT = 30.0, 0.3


def waited(reader: Reader, seconds: float) -> tuple[bool, bool]:
    """Wait so long; return what that returned, and whether it took all that time."""
    began = time.monotonic()
    return reader.wait(seconds), time.monotonic() - began >= seconds


def publish(store: Log) -> int:
    """Publish an event, and return its id."""
    return store.publish([draft({"type": "t1"})])[0].id


def test_it_is_heard_where_it_is_read(url: str, reader: PostgresReader, other: Log):
    """One connection, no thread: nobody else has to be woken."""
    read(reader, 105)
    assert waited(reader, SHORT) == (False, True)
    mine = publish(other)
    assert waited(reader, LONG) == (True, False)
    assert read(reader, 105) == [mine]
    assert waited(reader, SHORT) == (False, True)
    assert "postbus-listen" not in [each.name for each in threading.enumerate()]


def test_what_is_told_while_it_reads_is_not_forgotten(reader: PostgresReader, other: Log):
    """The notice comes in with an answer, behind which nobody looks at the wire for it."""
    read(reader, 105)
    publish(other)
    assert select.select([reader._wire], [], [], LONG)[0]
    read(reader, 0)
    assert not select.select([reader._wire], [], [], 0)[0]
    assert waited(reader, LONG) == (True, False)
    assert waited(reader, SHORT) == (False, True)


def test_whoever_is_of_this_process_rings(store: Log, reader: PostgresReader):
    """Whether it is read already or not; once for many."""
    for _ in range(2):
        for _ in range(3):
            store._ring()  # type: ignore[attr-defined]
        assert waited(reader, LONG) == (True, False)
        assert waited(reader, SHORT) == (False, True)
        threading.Timer(0.1, reader.wake).start()
        assert waited(reader, LONG) == (True, False)
        read(reader, 105)


def test_it_can_be_rung_more_often_than_anybody_waits(reader: PostgresReader):
    """Nobody has to wait because the pipe is full."""
    for _ in range(100_000):
        reader.wake()
    assert waited(reader, LONG) == (True, False)


def test_a_connection_that_is_lost_ends_the_wait(url: str, reader: PostgresReader, other: Log):
    """What was told meanwhile is found by looking; from then on it is heard again."""
    read(reader, 105)
    query(url, "SELECT pg_terminate_backend(%s, 5000)", reader._db.connection.info.backend_pid)
    assert waited(reader, LONG) == (True, False)
    reader.wait(SHORT)  # for its last words, and for its end
    assert waited(reader, SHORT) == (False, True)
    assert read(reader, 105) == []
    mine = publish(other)
    assert waited(reader, LONG) == (True, False)
    assert read(reader, 105) == [mine]


def test_who_rests_has_nothing_under_way(reader: PostgresReader, url: str, other: Log):
    """A paused one is told when to go on; what was looked up for it would hold a snapshot for as long as it rests."""
    read(reader, 0, 2)
    assert is_coming(reader)
    reader.wait(0)
    assert is_coming(reader)
    assert waited(reader, SHORT) == (False, True)
    assert not is_coming(reader)
    publish(other)
    assert waited(reader, LONG) == (True, False)
    assert read(reader, 20, 2) == list(range(21, 41))


def test_who_does_something_else_has_no_connection(url: str, reader: PostgresReader, other: Log):
    """One who only stands by hears nothing of others: he looks by himself."""
    read(reader, 0, 2)
    reader.drop()
    assert (is_coming(reader), reader._db.lost) == (False, True)
    publish(other)
    assert waited(reader, SHORT) == (False, True)
    assert read(reader, 20, 2) == list(range(21, 41))


def test_without_listening_nothing_is_heard(url: str, other: Log):
    """`listen=False`: others' events are found by looking alone."""
    store = log_of(open_store(url, listen=False))
    reader = store.reader()
    assert len(read(reader, 100)) == 0
    publish(other)
    assert waited(reader, SHORT) == (False, True)
    reader.drop()
    store.close()


def test_a_store_that_is_closed_is_not_read(store: Log, reader: PostgresReader):
    """Whoever waits is sent to look, and is told."""
    threading.Timer(0.1, store.close).start()
    assert waited(reader, LONG) == (True, False)
    with pytest.raises(EventBusShutdownError):
        reader.read_on(0, PAGE, ALL)


def test_a_server_that_refuses_to_tell_is_asked_again(
    reader: PostgresReader, other: Log, monkeypatch: pytest.MonkeyPatch
):
    """It does not read on for good by a connection that does not listen."""
    with monkeypatch.context() as context:
        context.setattr(reader, "_address", replace(reader._address, schema="no such name"))
        with pytest.raises(psycopg.errors.SyntaxError):
            read(reader, 105)
    assert read(reader, 105) == []
    publish(other)
    assert waited(reader, LONG) == (True, False)


def test_somebody_takes_the_notices_of_one_who_is_busy(
    url: str, reader: PostgresReader, other: Log, eventually: Callable[..., object]
):
    """Kept, they would keep those of everybody else, in all databases of the server; and he looks once he has time."""
    read(reader, 105)
    pid = reader._db.connection.info.backend_pid
    stuck = "SELECT 1 FROM pg_stat_activity WHERE pid = %s AND wait_event = 'ClientWrite'"
    with psycopg.connect(url, autocommit=True) as teller:

        def tell() -> bool:
            for _ in range(100):
                teller.execute("NOTIFY postbus")
            return bool(query(url, stuck, pid))

        eventually(tell)
        reader.attend()
        eventually(lambda: reader.attend() or not query(url, stuck, pid))
    assert waited(reader, LONG) == (True, False)
    publish(other)
    assert waited(reader, LONG) == (True, False)


def test_who_is_in_use_is_not_attended_to(reader: PostgresReader, other: Log):
    """Neither while he waits, nor while he reads: two would take each other's answers."""
    read(reader, 105)
    publish(other)
    assert select.select([reader._wire], [], [], LONG)[0]
    with reader._using:
        reader.attend()
        assert select.select([reader._wire], [], [], 0)[0]
    reader.attend()
    assert not select.select([reader._wire], [], [], 0)[0]
    assert waited(reader, LONG) == (True, False)


def test_a_reading_that_breaks_off_leaves_nothing_half_read(reader: PostgresReader, monkeypatch: pytest.MonkeyPatch):
    """What the next one reads is what it asked for."""
    read(reader, 0, 2)
    with monkeypatch.context() as context:
        context.setattr(module.Sent, "wait", unable)
        with pytest.raises(MemoryError):
            read(reader, 20)
    assert reader._db.lost
    assert read(reader, 20, 2) == list(range(21, 41))


def unable(_: object) -> None:
    """Break off."""
    raise MemoryError


def test_what_it_rings_with_goes_when_it_is_closed(url: str, store: Log):
    """Nor does a connection stay behind, or a file."""
    readers = [store.reader() for _ in range(20)]
    ends = [end for each in readers if isinstance(each, PostgresReader) for end in each._bell]
    assert all(map(is_pipe, ends))
    assert len(ends) == 40
    read(readers[0], 0, 2)
    for each in readers:
        each.close()
        each.wake()
    assert not any(map(is_pipe, ends))
    assert waited(readers[0], 0.0)[0] is False
    with pytest.raises(EventBusShutdownError):
        read(readers[0])


def test_who_is_forgotten_leaves_nothing_open(store: Log):
    """Closed or not."""
    reader = store.reader()
    assert isinstance(reader, PostgresReader)
    ends = reader._bell
    store._unwatch(reader)  # type: ignore[attr-defined]
    del reader
    assert not any(map(is_pipe, ends))


def test_a_reading_that_outlasts_its_end_hangs_up(url: str, store: Log, reader: PostgresReader):
    """Closed by another thread in the midst of a statement that is slow."""
    read(reader, 105)
    with psycopg.connect(url) as db:
        db.execute("LOCK TABLE postbus.events IN ACCESS EXCLUSIVE MODE")
        with ThreadPoolExecutor() as pool:
            reading = pool.submit(read, reader, 100)
            while not reader._using.locked():
                time.sleep(0.01)
            reader.close()
            assert not reader._db.lost
            db.rollback()
            assert reading.result() == [101, 102, 103, 104, 105]
    assert reader._db.lost


ENDS = """
import atexit, os, sys, time

kept = []

def publish_last():
    files = [open(os.path.join(sys.argv[2], f"{number}.txt"), "w") for number in range(20)]
    kept.append(bus.publish("last").id)
    time.sleep(0.5)
    for file in files:
        file.close()
    print(kept, [os.path.getsize(file.name) for file in files if os.path.getsize(file.name)])

atexit.register(publish_last)
from postbus import EventBus
bus = EventBus(sys.argv[1])
bus.follow("s", "*")(lambda event: None)
bus.start()
bus.publish("first")
"""


def test_at_the_end_of_a_process_it_can_still_be_rung(url: str, tmp_path: Path):
    """Without a shutdown, by what the program does last of all; and no file of others' is taken for the bell."""
    command = [sys.executable, "-c", ENDS, url, str(tmp_path)]
    told = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert (told.stdout.strip(), told.stderr) == ("[2] []", "")


def is_pipe(number: int) -> bool:
    """Return whether a number is that of a pipe of this process."""
    try:
        return stat.S_ISFIFO(os.fstat(number).st_mode)
    except OSError:
        return False
