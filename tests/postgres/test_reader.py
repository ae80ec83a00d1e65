"""A follower that catches up has the next page looked up meanwhile, and reads what it would have read anyway."""

import select
import time
from collections.abc import Callable, Iterator

import pytest

from postbus.pattern import Interest
from postbus.payload import draft
from postbus.store import Store, following, open_store
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
def store(url: str) -> Iterator[Store]:
    """Give a store with a hundred and five events of three types."""
    store = open_store(url)
    store.publish([draft({"type": f"t{number % 3}", "payload": number}) for number in range(105)])
    yield store
    store.close()


@pytest.fixture
def reader(store: Store) -> Iterator[PostgresReader]:
    """Give a reader."""
    reader = store.reader()
    assert isinstance(reader, PostgresReader)
    yield reader
    reader.close()


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
    assert select.select([reader._coming.sent], [], [], 30)[0]


def test_the_pages_are_those_of_the_log(store: Store, reader: PostgresReader):
    """Each event once, in order, as far as it is wanted; at the end nothing is left under way, nor a connection."""
    wanted, after, seen, ahead = (Interest("t1"),), 0, list[object](), list[bool]()
    while (page := reader.read_on(after, PAGE, wanted)).more:
        assert page == store.read_on(after, PAGE, wanted)
        seen += [each.payload for each in page.events]
        ahead.append(is_coming(reader))
        after = page.reached
    seen += [each.payload for each in page.events]
    assert seen == list(range(1, 105, 3))
    assert ahead == [False] + [True] * 9
    assert (is_coming(reader), reader._db.lost) == (False, True)


def test_what_is_published_meanwhile_is_read_in_its_turn(store: Store, reader: PostgresReader):
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
def test_a_connection_that_is_lost_meanwhile_is_no_matter(reader: PostgresReader, url: str, *, forgetful: bool):
    """It is a read: it is done again, on another; so is what the server no longer knows."""
    read(reader, 0, 2)
    if forgetful:
        reader.close()
        read(reader)
        reader._db.prepare("read_on")
        reader._db.connection.execute("DEALLOCATE ALL")
    else:
        query(url, "SELECT pg_terminate_backend(%s, 5000)", reader._db.connection.info.backend_pid)
    assert read(reader, 20, 3) == list(range(21, 51))
    assert is_coming(reader)


def test_a_page_on_its_way_holds_nothing_back(reader: PostgresReader, url: str, eventually: Callable[..., object]):
    """Neither new events, nor pruning: it is a read like any other, and over in the server when it was sent."""
    read(reader, 0, 2)
    eventually(lambda: query(url, SNAPSHOTS) == [(0,)])
    assert is_coming(reader)


def test_what_is_wanted_is_made_out_once(store: Store):
    """Not for every page; and nothing of a store is kept for the sake of its readers."""
    assert following._wanting((Interest("t1"),)) is following._wanting((Interest("t1"),))
    assert not hasattr(following._PlainReader, "cache_info")
    assert following._PlainReader(store) is not following._PlainReader(store)  # type: ignore[arg-type]
