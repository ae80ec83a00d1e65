"""Ids are drawn in one order and committed in another: whoever follows the log by its pins misses nothing."""

import time
from collections.abc import Callable, Iterator
from typing import Any, LiteralString, cast

import psycopg
import pytest

from postbus.store import Log, contract, log_of, open_store
from postbus.store.contract import Finding
from tests.conftest import Crew
from tests.postgres.server import query
from tests.postgres.writers import Reader, StoreReader, Writers, insert

Connect = Callable[..., psycopg.Connection[Any]]
WAYS = 8
"""How many ways of writing there are, each of which must have had its turn."""
SECONDS = [4, pytest.param(30, marks=pytest.mark.slow)]


@pytest.fixture
def store(url: str) -> Iterator[Log]:
    """Give an open store."""
    store = log_of(open_store(url))
    yield store
    store.close()


@pytest.fixture
def followers(store: Log) -> Iterator[contract.Reader]:
    """Give what a follower reads by."""
    reader = store.reader()
    yield reader
    reader.drop()
    reader.close()


def follow(url: str, reader: Reader, seconds: float, store: Log | None, enough: Callable[[Writers], bool]) -> None:
    """Follow the log for so long, and until it is enough, while eight write to it, then to its end."""
    crew, writers = Crew(), Writers(url, store)
    for number in range(8):
        crew.start(lambda number=number: writers(number))
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end or not enough(writers):
            reader.turn()
    finally:
        writers.stop()
        crew.join(60)
    reader.turn()


@pytest.mark.parametrize("seconds", SECONDS)
@pytest.mark.parametrize("held", [False, True], ids=["alone", "beside a long write"])
@pytest.mark.parametrize("by", ["the function", "a follower"])
def test_a_reader_by_pins_misses_nothing(
    url: str,
    connect: Connect,
    store: Log,
    followers: contract.Reader,
    seconds: float,
    held: bool,  # noqa: FBT001
    by: str,
    capsys: pytest.CaptureFixture[str],
):
    """Late commits, rollbacks, savepoints, COPY, prepared transactions: missed 0, in order (S3.13, I5)."""
    if held:
        other = connect(autocommit=False)
        other.execute("CREATE TABLE public.elsewhere (x integer)")
    reader = Reader(connect()) if by == "the function" else StoreReader(connect(), followers)
    follow(url, reader, seconds, store, lambda writers: len(reader.seen) > 100 * seconds and len(writers.done) == WAYS)
    stored = [each for (each,) in query(url, "SELECT id FROM events ORDER BY id")]
    with capsys.disabled():
        print(f"\n{len(reader.seen)} of {len(stored)} seen in {seconds} s")  # noqa: T201  the figures of the trial
    assert reader.seen == stored


def test_without_the_pins_the_same_reader_misses_many(url: str, connect: Connect):
    """With the trigger dropped the same trial goes red, so it can see a loss when there is one (S3.13, I5)."""
    query(url, "DROP TRIGGER pin ON events")
    reader = Reader(connect())

    def missed(_: Writers | None = None) -> bool:
        """Return whether the reader has passed over many that are there by now."""
        stored = {each for (each,) in query(url, "SELECT id FROM events")}
        return len({each for each in stored - set(reader.seen) if each < reader.seen[-1]}) > 50

    follow(url, reader, 0.5, None, missed)
    assert missed()


def test_a_trigger_that_a_replica_skips_would_not_do(url: str, connect: Connect):
    """A write in replica mode is pinned as well: the trigger is enabled always (S3.13, I5)."""
    writer, reader = connect(autocommit=False), Reader(connect())
    writer.execute("SET session_replication_role = replica")
    first = insert(writer)
    insert(connect())
    assert reader.turn() < first
    writer.commit()
    reader.turn()
    assert reader.seen == [first, first + 1]


def test_the_head_stands_still_for_an_open_publish_and_goes_on_after_it(url: str, connect: Connect):
    """What commits beside an open transaction waits for it; what commits before it began does not (I5)."""
    slow, quick, reader = connect(autocommit=False), connect(), Reader(connect())
    before = insert(quick)
    held = insert(slow)
    after = insert(quick)
    assert (reader.turn(), reader.seen) == (before, [before])
    slow.rollback()
    assert (reader.turn(), reader.seen) == (after, [before, after])
    assert held == after - 1


@pytest.mark.parametrize("page", [1, 20])
def test_what_follows_without_a_gap_waits_for_nobody(url: str, connect: Connect, followers: contract.Reader, page: int):
    """Who has pinned, but drawn no id below it, can bring nothing in between; who has drawn one is waited for (I5)."""
    slow, quick, reader = connect(autocommit=False), connect(), StoreReader(connect(), followers, page)
    first = insert(quick)
    slow.execute("SELECT postbus.pin('events')")
    assert [insert(quick), insert(quick)] == [first + 1, first + 2]
    assert (reader.turn(), reader.seen) == (first, [first, first + 1, first + 2])
    held = insert(slow)
    after = insert(quick)
    reader.turn()
    assert reader.seen == [first, first + 1, first + 2]
    slow.commit()
    gone = insert(slow)
    slow.rollback()
    last = insert(quick)
    reader.turn()
    assert reader.seen[3:] == [held, after, last]
    assert gone == last - 1


def test_a_savepoint_taken_back_gives_its_pin_back_and_takes_a_new_one(url: str, connect: Connect):
    """Lock and memory of it go together, so that the next insert of the transaction pins again (I5)."""
    writer, quick, reader = connect(autocommit=False), connect(), Reader(connect())
    writer.execute("SAVEPOINT s")
    insert(writer)
    writer.execute("ROLLBACK TO SAVEPOINT s")
    free = insert(quick)
    assert reader.turn() == free
    insert(writer)
    insert(quick)
    assert reader.turn() == free
    writer.commit()
    reader.turn()
    assert reader.seen == [free, free + 1, free + 2]


def test_a_prepared_transaction_holds_readers_until_it_ends(url: str, connect: Connect):
    """Its session is gone, its pin is not (I5)."""
    writer, quick, reader = connect(autocommit=False), connect(), Reader(connect())
    transaction = writer.xid(1, "held", "test")
    writer.tpc_begin(transaction)
    held = insert(writer)
    writer.tpc_prepare()
    writer.close()
    insert(quick)
    assert (reader.turn(), reader.seen) == (held - 1, [])
    quick.execute("COMMIT PREPARED '1_aGVsZA==_dGVzdA=='")
    reader.turn()
    assert reader.seen == [held, held + 1]


def test_thousands_of_publishes_in_one_transaction_need_one_pin(url: str, connect: Connect):
    """The lock table has room for a few thousand locks of all sessions together (S3.13)."""
    writer = connect(autocommit=False)
    for _ in range(5_000):
        insert(writer)
    assert query(url, "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 1") == [(1,)]
    writer.commit()


def test_an_unrelated_write_held_open_delays_no_reader(url: str, connect: Connect):
    """Neither in this database nor by a snapshot: an event committed now is read now (S3.13, I5)."""
    other, reader = connect(autocommit=False), Reader(connect())
    other.execute("CREATE TABLE public.elsewhere (x integer)")
    other.execute("INSERT INTO public.elsewhere VALUES (1)")
    for _ in range(10):
        event_id = insert(connect())
        assert reader.turn() == event_id
        assert reader.seen[-1] == event_id


def test_the_pins_of_the_audit_log_are_its_own(url: str, connect: Connect):
    """An open publish holds back followers of events, not those of the audit log (I5)."""
    writer = connect(autocommit=False)
    insert(writer)
    query(url, "INSERT INTO event_log (first_id, subscription, action, created_at) VALUES (1, 1, 'PICKED', now())")
    assert query(url, "SELECT head('events'), head('event_log')") == [(0, 1 << 10 | 1_023)]


def wrong(store: Log, word: str) -> list[Finding]:
    """Return what `doctor` finds wrong that mentions a word."""
    return [each for each in store.inspect(deep=False) if not each.ok and word in each.message]


def test_doctor_names_who_holds_followers_back(store: Log, connect: Connect, eventually: Callable[..., Any]):
    """By pid, application and age, with the command that would end it (S3.13)."""
    holder = connect(autocommit=False, application_name="forgotten-shell")
    insert(holder)
    (finding,) = eventually(lambda: wrong(store, str(holder.info.backend_pid)))
    assert "forgotten-shell" in finding.message
    assert finding.remedy is not None
    assert f"pg_terminate_backend({holder.info.backend_pid})" in finding.remedy
    holder.rollback()
    assert wrong(store, str(holder.info.backend_pid)) == []


def test_doctor_says_nothing_of_a_transaction_that_does_not_publish(url: str, store: Log, connect: Connect):
    """A long write elsewhere holds nobody back, so nobody is asked to end it (S3.13)."""
    other = connect(autocommit=False)
    other.execute("CREATE TABLE public.elsewhere (x integer)")
    assert query(url, "SELECT count(*) FROM pins('events')") == [(0,)]
    assert [each for each in store.inspect(deep=True) if not each.ok] == []


def test_doctor_names_a_prepared_transaction_that_holds_followers_back(
    url: str, store: Log, connect: Connect, eventually: Callable[..., Any]
):
    """It has no pid: the finding says how to end it all the same (S3.13)."""
    holder = connect(autocommit=False)
    holder.tpc_begin(holder.xid(1, "held", "test"))
    insert(holder)
    holder.tpc_prepare()
    holder.close()
    try:
        (finding,) = eventually(lambda: wrong(store, "prepared"))
    finally:
        query(url, "ROLLBACK PREPARED '1_aGVsZA==_dGVzdA=='")
    assert finding.remedy is not None
    assert "ROLLBACK PREPARED" in finding.remedy


def test_each_transaction_of_a_session_takes_a_pin_of_its_own(url: str, connect: Connect):
    """What was remembered for one transaction is forgotten with it (I5)."""
    writer, quick, reader = connect(autocommit=False), connect(), Reader(connect())
    first = insert(writer)
    writer.commit()
    insert(writer)
    insert(quick)
    assert (reader.turn(), reader.seen) == (first, [first])
    writer.commit()
    reader.turn()
    assert reader.seen == [first, first + 1, first + 2]


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_reader_stopped_at_the_pins_misses_nothing(
    url: str, connect: Connect, crew: Crew, eventually: Callable[..., Any], moment: str
):
    """The sequence is looked at first, then the pins: what is drawn in between is not for this turn (S3.13, I5)."""
    stop_at_the_pins(url, moment)
    gate, slow, quick, reader = connect(), connect(autocommit=False), connect(), Reader(connect())
    gate.execute("SELECT pg_advisory_lock(77)")
    crew.start(reader.turn)
    eventually(lambda: query(url, "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"))
    first, second = insert(slow), insert(quick)
    gate.execute("SELECT pg_advisory_unlock(77)")
    crew.join()
    slow.commit()
    reader.turn()
    assert reader.seen == [first, second]


def stop_at_the_pins(url: str, moment: str) -> None:
    """Have whoever asks for the pins wait, before or after looking at them, for a lock that the test holds."""
    query(url, "ALTER FUNCTION postbus.pins(text) RENAME TO quick_pins")
    ((result,),) = query(url, "SELECT pg_get_function_result('postbus.quick_pins(text)'::regprocedure)")
    steps = [
        "PERFORM pg_advisory_xact_lock_shared(77);",
        "RETURN QUERY SELECT p.* FROM postbus.quick_pins(stream) AS p;",
    ]
    body = " ".join(steps if moment == "before" else reversed(steps))
    statement = f"CREATE FUNCTION postbus.pins(stream text) RETURNS {result} LANGUAGE plpgsql AS 'BEGIN {body} END'"
    query(url, cast("LiteralString", statement))
