"""What meets in the database at one moment: each statement sees more than the one before it, and nobody is harmed."""

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Final, LiteralString

import psycopg
import pytest

from postbus.errors import InvalidRequest, NotFound
from postbus.model import AttemptError, Dead, Done, DoneWithErrors, Mode, Outcome, Retry, Stream
from postbus.pattern import Interest
from postbus.payload import drafts
from postbus.retry import RetryPolicy
from postbus.store import followers, leases
from postbus.store.contract import Claim, Settled, Settlement
from postbus.store.postgres.store import PostgresStore
from postbus.store.session import Session
from tests.conftest import Crew
from tests.postgres.server import Server, query

Connect = Callable[..., psycopg.Connection[Any]]
Eventually = Callable[..., Any]
ERROR: Final = AttemptError("ValueError", "no")
LATER: Final = Retry(timedelta(seconds=1), ERROR)
WAITING: Final = """SELECT 1 FROM pg_stat_activity
                     WHERE wait_event_type = 'Lock' AND datname = current_database()"""


@pytest.fixture
def store(url: str) -> Iterator[PostgresStore]:
    """Give a store."""
    store = PostgresStore(url, listen=False)
    yield store
    store.close()


@pytest.fixture
def other(url: str) -> Iterator[PostgresStore]:
    """Give the same, as another process has it."""
    store = PostgresStore(url, listen=False)
    yield store
    store.close()


def publish(store: PostgresStore, *kinds: str, **more: Any) -> list[int]:
    """Publish an event of each kind; return their ids."""
    return [each.id for each in store.publish(drafts([{"type": kind, **more} for kind in kinds]))]


def finish(store: PostgresStore) -> None:
    """Finish all that is due."""
    while held := store.claim(Claim("default", "w", "o", limit=100)).deliveries:
        store.settle([Settlement(each.lease, Done(), "w", execution_time_ms=1.0) for each in held])


# ── settling ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "outcome", [Done(), DoneWithErrors((ERROR,)), LATER, Dead(ERROR)], ids=lambda each: type(each).__name__
)
def test_a_settlement_that_waited_for_an_expiry_stands(
    store: PostgresStore, other: PostgresStore, url: str, crew: Crew, eventually: Eventually, outcome: Outcome
):
    """It waits for the block, finds it gone, and the delivery on its row: all but a retry still counts (I8)."""
    publish(store, "a")
    (held,) = store.claim(Claim("default", "w", "o", limit=1)).deliveries
    expired, go = threading.Event(), threading.Event()

    def expire(session: Session) -> int:
        ended = leases.expire(session, ["o"], RetryPolicy(), 10)
        expired.set()
        go.wait()
        return ended

    crew.start(lambda: other._write(expire))
    assert expired.wait(30)
    crew.start(lambda: store.settle([Settlement(held.lease, outcome, "w", execution_time_ms=1.0)]))
    eventually(lambda: query(url, WAITING))
    go.set()
    assert sorted(crew.join(30), key=str) == [1, [Settled.LOST if outcome is LATER else Settled.APPLIED]]
    kinds = query(url, "SELECT type FROM audit WHERE status NOT IN ('PENDING', 'PROCESSING')")
    assert kinds == ([] if outcome is LATER else [("a",)])


def test_whoever_waited_crosswise_tries_again(
    store: PostgresStore, url: str, connect: Connect, crew: Crew, eventually: Eventually
):
    """The server ends one of two that wait for each other, and undoes all of it: that is no outage (I8)."""
    publish(store, "a", "a")
    held = store.claim(Claim("default", "w", "o", limit=2)).deliveries
    lock: LiteralString = "SELECT 1 FROM postbus.blocks WHERE first_id = %s FOR UPDATE"
    rival = connect(autocommit=False)
    rival.execute("SET LOCAL deadlock_timeout = '60s'")  # so that it is the other one who finds out, and is ended
    rival.execute(lock, [held[1].lease.event_id])
    crew.start(lambda: store.settle([Settlement(each.lease, LATER, "w") for each in held]))
    eventually(lambda: query(url, WAITING))
    rival.execute(lock, [held[0].lease.event_id])
    rival.commit()
    assert crew.join(30) == [[Settled.APPLIED, Settled.APPLIED]]


def test_a_heartbeat_waits_for_nobody(store: PostgresStore, url: str, connect: Connect):
    """A block that is being settled is extended the next time; it is not called lost meanwhile (I7)."""
    publish(store, "a", "a")
    first, second = (store.claim(Claim("default", "w", "o")).deliveries[0] for _ in range(2))
    holder = connect(autocommit=False)
    holder.execute("SELECT 1 FROM postbus.blocks WHERE first_id = %s FOR UPDATE", [first.id])
    assert store.extend([first.lease, second.lease], timedelta(hours=1)) == set()
    far: LiteralString = "SELECT first_id FROM blocks WHERE due_at > now() + interval '50 min' ORDER BY 1"
    assert query(url, far) == [(second.id,)]
    holder.rollback()
    assert store.extend([first.lease, second.lease._replace(epoch=7)], timedelta(hours=1)) == {
        second.lease._replace(epoch=7)
    }
    assert query(url, far) == [(first.id,), (second.id,)]


def test_a_kind_is_registered_though_subscriptions_changed_within_its_transaction(
    store: PostgresStore, other: PostgresStore, url: str
):
    """What a transaction has still to write outlives what it remembers: else no claim by type finds the row (I10)."""
    publish(store, "a", "a")
    first, second = store.claim(Claim("default", "w", "o", limit=2, shared=True)).deliveries
    assert query(url, "SELECT type FROM kinds") == []
    with store.transaction() as tx:
        assert tx.settle(Settlement(first.lease, Retry(timedelta(0), ERROR), "w")) is Settled.APPLIED
        other.create_subscription("s", ["b"], [], mode=Mode.QUEUE, lease=None, retry=None, start="now")
        assert tx.settle(Settlement(second.lease, Done(), "w")) is Settled.APPLIED
    assert query(url, "SELECT type FROM kinds") == [("a",)]
    again = store.claim(Claim("default", "w", "o", interests=(Interest("a"),))).deliveries
    assert [(each.id, each.attempt) for each in again] == [(first.id, 2)]


# ── subscriptions ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_nothing_is_delivered_to_a_subscription_that_has_gone(
    store: PostgresStore, url: str, connect: Connect, crew: Crew, eventually: Eventually
):
    """Such a delivery would be nobody's, and keep its event from being pruned."""
    ids = publish(store, "a")
    store.create_subscription("mails", ["b"], [], mode=Mode.QUEUE, lease=None, retry=None, start="now")
    holder = connect(autocommit=False)
    holder.execute("SELECT postbus.hold_alone(2, -1)")
    holder.execute("DELETE FROM postbus.subscriptions WHERE name = 'mails'")
    holder.execute("DELETE FROM postbus.cursors WHERE subscription = 2")
    holder.execute("SELECT postbus.bump()")
    crew.start(lambda: store.redeliver("mails", ids, "me"))
    eventually(lambda: query(url, WAITING))
    holder.commit()
    with pytest.raises(NotFound, match="mails"):
        crew.join(30)
    assert query(url, "SELECT count(*) FROM deliveries") == [(0,)]


def test_who_publishes_waits_for_no_subscription_that_goes(store: PostgresStore, url: str, connect: Connect):
    """Not even while it is locked as whole, at its end."""
    holder = connect(autocommit=False)
    holder.execute("SELECT postbus.hold_alone(1, -1)")
    assert publish(store, *["a"] * 10) == list(range(1, 11))
    holder.rollback()


# ── pruning ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_head_that_is_pruned_while_it_is_looked_at_stays_the_head(store: PostgresStore, other: PostgresStore):
    """Else whoever stands there is told that an old backup was put back (I5)."""
    ids = publish(store, "a", "a")
    finish(store)

    class Meddler:
        """Has all pruned just before the last event is looked for."""

        def __init__(self, db: Any) -> None:
            self._db = db

        def __getattr__(self, name: str) -> Any:
            return getattr(self._db, name)

        def value(self, name: str, parameters: Any = ()) -> Any:
            if name == "last_events":
                assert other.prune(Stream.EVENTS, after=0, through=ids[-1]).done
            return self._db.value(name, parameters)

    with store._look() as session:
        span = followers.span(session._replace(db=Meddler(session.db)), Stream.EVENTS)
    assert (span.pruned, span.head) == (ids[-1], ids[-1])


def test_nobody_rewinds_to_where_a_prune_is_at_work(
    store: PostgresStore, url: str, connect: Connect, crew: Crew, eventually: Eventually
):
    """It would be accepted, and the follower cut off (I14)."""
    store.create_subscription("s", ["*"], [], mode=Mode.ORDERED, lease=None, retry=None, start="now")
    ids = publish(store, *["a"] * 10)
    store.rewind("s", ids[-1], "me")
    holder = connect(autocommit=False)
    holder.execute("UPDATE postbus.meta SET value = %s WHERE key = 'pruned_through'", [str(ids[6])])
    crew.start(lambda: store.rewind("s", ids[3], "me"))
    eventually(lambda: query(url, WAITING))
    holder.commit()
    with pytest.raises(InvalidRequest, match="rewind to a position from"):
        crew.join(30)
    assert store.position("s") == ids[-1]


# ── publishing ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_uid_that_grows_too_old_in_the_midst_of_a_publish_is_remembered_anew(store: PostgresStore, url: str):
    """Else the producer's next try would be stored a second time (I3)."""
    publish(store, "a", uid="u")
    query(url, "UPDATE dedup SET created_at = created_at - interval '8 days'")
    query(
        url,
        """CREATE FUNCTION tidy_now() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$ BEGIN
               DELETE FROM postbus.dedup WHERE created_at < now() - interval '7 days'; RETURN NULL; END $$;
           CREATE TRIGGER tidy_now AFTER INSERT ON dedup FOR EACH STATEMENT EXECUTE FUNCTION tidy_now()""",
    )
    again = publish(store, "a", uid="u")
    assert publish(store, "a", uid="u") == again
    assert query(url, "SELECT uid, event_id FROM dedup") == [("u", again[0])]


# ── opening ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_two_addresses_of_two_databases_are_refused(server: Server, url: str):
    """One would be migrated, and the other used."""
    with server.database(empty=True) as empty:
        with pytest.raises(InvalidRequest, match="direct_url leads to another database"):
            PostgresStore(url, direct_url=empty)
        assert query(empty, "SELECT count(*) FROM pg_namespace WHERE nspname = 'postbus'") == [(0,)]
