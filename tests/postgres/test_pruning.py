"""Pruning and erasing where many write at once, and where the log is long."""

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, LiteralString, cast

import psycopg
import pytest

from postbus.errors import Conflict, InvalidRequest, UnsafeStore
from postbus.model import Pruned, Stream
from postbus.payload import draft
from postbus.store import Log, grant_roles, log_of, open_store
from postbus.store.contract import Settlement
from postbus.testing import FrozenClock
from tests.conftest import Crew
from tests.contract.stores import DONE, Operator, ids
from tests.postgres.server import Server, query
from tests.postgres.server import server as the_server
from tests.postgres.test_plans import LARGE, cost
from tests.postgres.writers import insert

Connect = Callable[..., psycopg.Connection[Any]]
MANY = 20_000
WAITING = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
PRUNING: LiteralString = "UPDATE postbus.meta SET value = '3' WHERE key = 'pruned_through'"


@pytest.fixture
def op(url: str) -> Iterator[Operator]:
    """Give somebody who drives a store, with time as it goes."""
    store = log_of(open_store(url))
    yield Operator(store, FrozenClock())
    store.close()


def work(op: Operator, count: int) -> None:
    """Publish events and finish them."""
    for start in range(0, count, 5_000):
        op.publish_all(*[{"type": f"t{n % 7}", "payload": n} for n in range(start, min(start + 5_000, count))])
    while taken := op.claim(1_000, lease=timedelta(hours=1)):
        op.store.settle([Settlement(each.lease, DONE, "w", execution_time_ms=1.0) for each in taken])


def test_nothing_is_pruned_above_what_an_open_transaction_may_still_bring(op: Operator, connect: Connect):
    """The head is the gap-safe one: an id below it cannot appear after it was passed (I5, P.5)."""
    work(op, 5)
    late = connect(autocommit=False)
    held = insert(late)
    work(op, 1)
    with pytest.raises(InvalidRequest, match="can be read up to 5"):
        op.store.prune(Stream.EVENTS, after=0, through=held + 1)
    assert op.store.prune(Stream.EVENTS, after=0, through=5).removed == 5
    late.commit()
    assert op.store.span(Stream.EVENTS).head == held + 1


def test_a_stalled_transaction_keeps_what_it_brings_and_holds_back_nothing_older(op: Operator, connect: Connect):
    """Beside it, what came before goes; after its commit all else goes, and its events stay to be handled (C3, P.5)."""
    work(op, 20)
    stalled = connect(autocommit=False)
    held = [insert(stalled) for _ in range(3)]
    work(op, 20)
    assert op.store.span(Stream.EVENTS).head == 20
    assert op.store.prune(Stream.EVENTS, after=0, through=20) == Pruned(20, 0, 20, done=True)
    last = query(op.store.url, "SELECT max(id) FROM events")[0][0]
    assert query(op.store.url, "SELECT count(*) FROM events") == [(20,)], "its own are not visible yet"

    stalled.commit()
    assert query(op.store.url, "SELECT missing @> 22::bigint FROM cursors WHERE subscription = 1") == [(True,)]
    assert op.store.prune(Stream.EVENTS, after=20, through=last) == Pruned(20, 3, last, done=True)
    assert query(op.store.url, "SELECT id FROM events ORDER BY id") == [(each,) for each in held]
    taken = op.take_all()
    assert ids(taken) == held, "passed before they were there, and still to come"
    op.store.settle([Settlement(each.lease, DONE, "w", execution_time_ms=1.0) for each in taken])
    assert op.store.prune(Stream.EVENTS, after=0, through=last) == Pruned(3, 0, last, done=True)


def test_pruning_waits_for_whoever_makes_a_subscription_and_sees_it(
    op: Operator, connect: Connect, crew: Crew, eventually: Callable[..., object]
):
    """A stream whose making has not been committed yet is not cut off either (I14, P.5)."""
    work(op, 5)
    made = connect(autocommit=False)
    made.execute("SELECT postbus.hold_pruned()")
    made.execute(
        "INSERT INTO postbus.subscriptions (name, mode, patterns, tags, created_at)"
        " VALUES ('lake', 'spark', '[]', '[]', now())"
    )
    made.execute("INSERT INTO postbus.checkpoints VALUES ('lake', 'events', 2, 'this', 0, now())")

    def cut() -> None:
        with pytest.raises(Conflict, match="'lake'"):
            op.store.prune(Stream.EVENTS, after=0, through=5)

    crew.start(cut)
    eventually(lambda: query(op.store.url, WAITING) == [(1,)])
    made.commit()
    crew.join()
    assert query(op.store.url, "SELECT count(*) FROM events") == [(5,)]


def test_publishers_and_settlers_wait_for_no_pruning(
    op: Operator, connect: Connect, crew: Crew, eventually: Callable[..., object]
):
    """Whoever prunes holds nothing that they need; only whoever makes a subscription waits (P.5, I14)."""
    work(op, 5)
    pruning = connect(autocommit=False)
    pruning.execute(PRUNING)
    pruning.execute("DELETE FROM postbus.events WHERE id < 4")
    work(op, 5)
    crew.start(lambda: op.subscription("late", start="beginning"))
    eventually(lambda: query(op.store.url, WAITING) == [(1,)])
    pruning.commit()
    crew.join()
    assert len(op.take_all("late")) == 7


def test_what_is_delivered_again_is_not_pruned_under_it(
    op: Operator, connect: Connect, crew: Crew, eventually: Callable[..., object]
):
    """No delivery is made of an event that is going (I14, P.5)."""
    work(op, 5)
    pruning = connect(autocommit=False)
    pruning.execute(PRUNING)
    pruning.execute("DELETE FROM postbus.events WHERE id < 4")

    def again() -> None:
        with pytest.raises(InvalidRequest, match="were pruned"):
            op.store.redeliver("default", [3, 4], "ops")

    crew.start(again)
    eventually(lambda: query(op.store.url, WAITING) == [(1,)])
    pruning.commit()
    crew.join()
    assert query(op.store.url, "SELECT count(*) FROM deliveries") == [(0,)]


def test_a_repeat_on_the_callers_connection_of_a_pruned_event_is_a_repeat(op: Operator, connect: Connect):
    """As on every other way to publish (I3, P.5)."""
    news = [draft({"type": "a", "payload": [1, 2], "uid": "u"})]
    (first,) = op.store.publish(news)
    op.settle(op.take())
    op.store.prune(Stream.EVENTS, after=0, through=first.id)
    with connect(autocommit=False) as connection:
        (again,) = op.store.publish_on(connection, news)
    assert (again.id, again.uid, again.payload) == (first.id, "u", [1, 2])
    assert abs(again.created_at - first.created_at) < timedelta(seconds=1)
    assert query(op.store.url, "SELECT count(*) FROM events") == [(0,)]


@pytest.mark.parametrize("role", ["reader", "publisher", "worker"])
def test_only_the_owner_prunes_and_erases(server: Server, url: str, op: Operator, role: str):
    """Nobody else may take from the log (S4.7, I14)."""
    work(op, 3)
    grant_roles(url)
    name = f"pruning_{role}"
    query(url, cast("LiteralString", f"CREATE ROLE {name} LOGIN IN ROLE postbus_{role}"))
    try:
        store = log_of(open_store(url.replace("postgres@", f"{name}@"), auto_migrate=False))
        try:
            with pytest.raises(UnsafeStore):
                store.prune(Stream.EVENTS, after=0, through=3)
            with pytest.raises(UnsafeStore):
                store.erase(ids=[1], actor=name)
        finally:
            store.close()
    finally:
        query(server.url(), cast("LiteralString", f"DROP ROLE {name}"))
    assert query(url, "SELECT count(*) FROM events") == [(3,)]


@pytest.fixture(scope="module", params=["analyzed", "never analyzed"])
def worked(request: pytest.FixtureRequest) -> Iterator[str]:
    """Give the address of a bus with a long log, finished but for its last part."""
    with the_server().database() as url:
        for table in LARGE:
            query(url, cast("LiteralString", f"ALTER TABLE {table} SET (autovacuum_enabled = off)"))
        store = log_of(open_store(url))
        op = Operator(store, FrozenClock())
        work(op, MANY)
        op.publish_all(*[{"type": "t1", "key": "k"}] * 5_000)
        store.close()
        if request.param == "analyzed":
            query(url, "ANALYZE")
        yield url


def steps(stream: Stream) -> Callable[[Log], object]:
    """Return a function that prunes the next few rows."""

    def step(store: Log) -> None:
        pruned = store.span(stream).pruned
        store.prune(stream, after=pruned, through=store.span(stream).head, limit=100)

    return step


@pytest.mark.parametrize("stream", list(Stream))
def test_a_step_of_pruning_reads_only_its_rows(worked: str, stream: Stream):
    """By the primary key, and a look each at the deliveries; no scan, whatever the log's length (P.5, S4.1)."""
    scans, read = cost(worked, steps(stream))
    assert scans == 0
    assert read <= 8 * 700


def test_erasing_reads_the_log_once_by_its_key(worked: str):
    """No index knows keys: the log is read, but never the deliveries and the audit log (P.5)."""
    scans, read = cost(worked, lambda store: store.erase(key="nobody", actor="privacy"))
    assert scans == 0
    assert read <= 8 * 2 * (MANY + 5_000) + 8_000
