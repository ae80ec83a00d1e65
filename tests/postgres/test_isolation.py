"""Whatever the database, the role, the URL or the caller's transaction says of isolation: nothing is missed."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any, Literal

import psycopg
import pytest
from psycopg import IsolationLevel, sql
from psycopg.conninfo import conninfo_to_dict

from postbus import EventBus, StoreUnavailable
from postbus.pattern import Interest
from postbus.payload import drafts
from postbus.store import grant_roles, log_of, open_store
from postbus.store.contract import Claim
from postbus.store.postgres import schema as schema_module
from postbus.store.postgres import store as store_module
from postbus.store.postgres.store import PostgresStore
from postbus.store.queries import load_migrations
from postbus.torture.cluster import Cluster
from tests.conftest import Crew
from tests.postgres.server import Server, query

Connect = Callable[..., psycopg.Connection[Any]]
STRICT = pytest.mark.parametrize("level", [IsolationLevel.REPEATABLE_READ, IsolationLevel.SERIALIZABLE])
MAKE = """INSERT INTO postbus.subscriptions (name, mode, patterns, tags, created_at)
          VALUES ('mails', 'queue', '["*"]', '[]', clock_timestamp())"""


@pytest.fixture(params=["direct", "options", "pooled"])
def store(request: pytest.FixtureRequest, url: str) -> Iterator[PostgresStore]:
    """Give a store whose database is REPEATABLE READ unless something says otherwise."""
    name = str(conninfo_to_dict(url)["dbname"])
    strict = sql.SQL("ALTER DATABASE {} SET default_transaction_isolation = 'repeatable read'")
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(strict.format(sql.Identifier(name)))
    said = f"{url}&options=-c%20default_transaction_isolation%3Dserializable" if request.param == "options" else url
    store = PostgresStore(said, direct_url=url if request.param == "pooled" else None, listen=False)
    yield store
    store.close()


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_followers_read_each_statement_anew(store: PostgresStore):
    """The head is looked up before what lies below it is read: with one snapshot, events would be missed (I5)."""
    with store._glance() as db:
        assert db.execute("SHOW transaction_isolation") == [("read committed",)]
    assert store.read_on(0, 10, (Interest("*"),)).events == []


@STRICT
def test_reading_on_within_one_snapshot_is_refused(connect: Connect, level: IsolationLevel):
    """Also past the product."""
    connection = connect(autocommit=False)
    connection.isolation_level = level
    with pytest.raises(psycopg.Error, match="READ COMMITTED only"):
        connection.execute("SELECT * FROM postbus.read_on(0, 10)")


def test_a_standby_is_neither_opened_nor_read(request: pytest.FixtureRequest):
    """It shows no pins: who read there, without the primary, would pass by what is not committed (I5)."""
    cluster = Cluster()
    request.addfinalizer(cluster.remove)
    store = log_of(open_store(cluster.url()))
    request.addfinalizer(store.close)
    assert store.read_on(0, 10, (Interest("*"),)).events == []
    cluster.stop("fast")
    (cluster.data / "standby.signal").touch()
    shutil.chown(cluster.data / "standby.signal", cluster.data.owner())
    cluster.start()
    for use in (lambda: store.read_on(0, 10, (Interest("*"),)), lambda: open_store(cluster.url())):
        with pytest.raises(StoreUnavailable, match="standby"):
            use()
    with pytest.raises(psycopg.Error, match="standby"):
        query(cluster.url(), "SELECT head('events')")


# ── publishing ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_publisher_waits_for_nobody_who_makes_a_subscription(
    store: PostgresStore, url: str, connect: Connect, crew: Crew
):
    """Its event reaches the queue that is committed later, and begins before it (I1)."""
    (first,) = store.publish(drafts([{"type": "a"}]))
    maker = connect(autocommit=False)
    maker.isolation_level = IsolationLevel.READ_COMMITTED
    maker.execute(MAKE)
    maker.execute("SELECT postbus.begin_cursor((SELECT number FROM postbus.subscriptions WHERE name = 'mails'), 'now')")
    crew.start(lambda: store.publish(drafts([{"type": "a"}]))[0].id)
    (event_id,) = crew.join(30)
    assert query(url, "SELECT count(*) FROM subscriptions") == [(1,)]
    maker.commit()
    assert [each.id for each in store.claim(Claim("mails", "w", "o", limit=10)).deliveries] == [event_id]
    assert event_id > first.id


@pytest.mark.parametrize("start", ["now", "beginning"])
def test_a_subscription_waits_for_no_publisher(url: str, connect: Connect, start: Literal["now", "beginning"]):
    """What an open transaction has published comes to it when that commits, though later events came before (C3)."""
    bus = EventBus(url)
    publisher = connect(autocommit=False)
    late = bus.publish("a", connection=publisher)
    seen = bus.publish("a")
    bus.subscriptions.create("mails", "*", start=start)
    after = bus.publish("a")
    known = [each.id for each in bus.poll_many(10, subscription="mails")]
    assert known == ([after.id] if start == "now" else [seen.id, after.id])
    publisher.commit()
    assert [each.id for each in bus.poll_many(10, subscription="mails")] == [late.id]
    bus.shutdown()


@STRICT
@pytest.mark.parametrize("many", [False, True], ids=["one", "many"])
@pytest.mark.parametrize("start", ["now", "beginning"])
def test_a_snapshot_older_than_a_subscription_publishes_to_it(
    url: str, connect: Connect, level: IsolationLevel, start: Literal["now", "beginning"], *, many: bool
):
    """A publisher knows no subscriptions: what it does not see, it cannot miss (I1)."""
    bus = EventBus(url)
    events = [{"type": "a"}] * (3 if many else 1)
    connection = connect(autocommit=False)
    connection.isolation_level = level
    connection.execute("SELECT 1 FROM postbus.meta")
    bus.subscriptions.create("mails", "*", start=start)
    published = bus.publish_many(events, connection=connection)
    connection.commit()
    assert [each.id for each in bus.poll_many(10, subscription="mails")] == [each.id for each in published]
    bus.shutdown()


@STRICT
def test_a_strict_publish_holds_up_nobody_else(url: str, connect: Connect, level: IsolationLevel):
    """What it looked at is free again at once: its transaction may be a long one."""
    bus, other = EventBus(url), EventBus(url)
    connection = connect(autocommit=False)
    connection.isolation_level = level
    bus.publish("a", connection=connection)
    query(url, "SET lock_timeout = '5s'; SELECT bump()")
    other.publish("b")
    connection.commit()
    assert bus.stats().events == 2
    bus.shutdown()
    other.shutdown()


def test_what_was_stored_is_not_stored_again_if_nobody_can_be_told(
    url: str, crew: Crew, monkeypatch: pytest.MonkeyPatch
):
    """The notice comes after the commit, and may need a thread that there is not: that is no failed publish."""

    def no_more(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(store_module, "Notifier", no_more)
    bus = EventBus(url)
    crew.start(lambda: [bus.publish("a").id for _ in range(10)], count=8)
    ids = [each for some in crew.join(30) for each in some]
    assert len(set(ids)) == 80
    assert query(url, "SELECT count(*) FROM events") == [(80,)]
    bus.shutdown()


# ── migrating ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_migration_gives_nobody_more_than_the_roles_have(server: Server, monkeypatch: pytest.MonkeyPatch):
    """New functions are everybody's to call, unless the roles are granted again in the same transaction."""
    more = (2, "0002_more", "CREATE FUNCTION postbus.more() RETURNS integer LANGUAGE sql RETURN 1;")
    with server.database(empty=True) as url:
        with closing(open_store(url)):
            grant_roles(url)
        monkeypatch.setattr(schema_module, "load_migrations", lambda package: [*load_migrations(package), more])
        may_call = "SELECT has_function_privilege(%s, 'postbus.more()', 'EXECUTE')"
        with closing(open_store(url)):
            for role, may in (("reader", False), ("publisher", False), ("worker", True)):
                assert query(url, may_call, f"postbus_{role}") == [(may,)]
