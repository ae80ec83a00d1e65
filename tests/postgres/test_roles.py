"""Least privilege: what each role can do through the product, and what it cannot do past it."""

from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from psycopg import errors, sql
from psycopg.conninfo import conninfo_to_dict

from postbus import Discard, EventBus
from postbus.breaker import Breaker
from postbus.errors import InvalidRequest, UnsafeStore
from postbus.store import grant_roles, log_of, open_store, roles_script
from postbus.torture.proxy import Cut, Proxy
from tests.postgres.server import Server, query

Login = Callable[[str], str]


@pytest.fixture
def login(server: Server, url: str) -> Iterator[Login]:
    """Grant the roles in the test's database, and give a function that makes a login in one of them: its address."""
    grant_roles(url)
    made: list[str] = []

    def login(role: str) -> str:
        database = conninfo_to_dict(url)["dbname"]
        name = f"{database}_{role}"
        run(server.url(), "CREATE ROLE {} LOGIN IN ROLE {}", name, f"postbus_{role}")
        made.append(name)
        return url.replace("postgres@", f"{name}@")

    yield login
    for name in made:
        run(server.url(), "DROP ROLE {}", name)


def run(url: str, statement: str, *names: str) -> None:
    """Run a statement with names in it."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(sql.SQL(statement).format(*map(sql.Identifier, names)))  # pyright: ignore[reportArgumentType]


def refused(url: str, *statements: Any) -> None:
    """Fail unless each statement is refused for want of a privilege."""
    for statement in statements:
        with pytest.raises(errors.InsufficientPrivilege):
            query(url, statement)


WRITES = (
    "UPDATE events SET payload = '1'",
    "DELETE FROM events",
    "TRUNCATE events",
    "UPDATE event_log SET worker_id = 'x'",
    "DELETE FROM event_log",
    "UPDATE meta SET value = 'x'",
    "INSERT INTO meta VALUES ('a', 'b')",
    "DELETE FROM subscriptions",
    "DROP TABLE breakers",
    "ALTER TABLE events DISABLE TRIGGER pin",
    "CREATE TABLE mine (a int)",
    "SELECT setval('events_id_seq', 1)",
)
"""What no role may do: change or remove what was written, or the schema."""


def test_a_publisher_publishes_in_every_way(login: Login, url: str):
    """One, many, in its own transaction, by SQL, with a uid twice; and shuts down (S4.11, I17)."""
    mine = login("publisher")
    bus = EventBus(mine, auto_migrate=False)
    first = bus.publish("a", 1, uid="x")
    assert bus.publish("a", 1, uid="x").id == first.id
    assert len(bus.publish_many([{"type": "b", "payload": n} for n in range(300)])) == 300
    assert len(bus.publish_many([{"type": "b", "payload": n, "uid": f"u{n}"} for n in range(300)])) == 300
    with bus.transaction() as tx:
        bus.publish("c", connection=tx)
    with psycopg.connect(mine) as connection:
        bus.publish("d", connection=connection)
        connection.execute("SELECT postbus.publish('e', '{}')")
    assert bus.get(first.id).status == "PENDING"
    bus.shutdown()
    assert query(url, "SELECT count(*) FROM events") == [(604,)]


@pytest.mark.parametrize("when", Cut)
def test_a_publisher_may_look_what_became_of_a_commit(login: Login, server: Server, url: str, when: Cut):
    """It ends its own session that was lost, and looks for its event (I1, S4.4)."""
    user = login("publisher").partition("//")[2].partition("@")[0]
    proxy = Proxy(server.socket)
    bus = EventBus(proxy.url(url).replace("//postgres@", f"//{user}@"), auto_migrate=False)
    try:
        bus.publish("a")
        proxy.cut(when, "cut here")
        event = bus.publish("a", "cut here")
        assert proxy.cuts == 1
        assert query(url, "SELECT id FROM events WHERE id > 1") == [(event.id,)]
    finally:
        bus.shutdown()
        proxy.close()


def test_a_publisher_can_do_nothing_else(login: Login):
    """It touches no delivery, no audit row, and takes no work (I17)."""
    mine = login("publisher")
    bus = EventBus(mine, auto_migrate=False)
    bus.publish("a")
    with pytest.raises(UnsafeStore, match="postbus migrate --roles"):
        bus.poll()
    bus.shutdown()
    refused(
        mine,
        *WRITES,
        "DELETE FROM deliveries",
        "UPDATE deliveries SET due_at = now()",
        "INSERT INTO event_log (first_id, subscription, action, created_at) VALUES (1, 1, 'X', now())",
        "UPDATE subscriptions SET paused = true",
        "DELETE FROM handlers",
        "SELECT nextval('numbers')",
        "SELECT * FROM breakers",
    )


def test_a_worker_does_all_its_work(login: Login, eventually: Callable[..., Any]):
    """Handlers, their retries, transactions, breakers and subscriptions, dead letters, upkeep (S4.11, I17)."""
    bus = EventBus(login("worker"), auto_migrate=False, poll_interval=0.05)
    handled: list[str] = []

    @bus.on("good", breaker=Breaker(failures=3, reset_after=1))
    def good(event: Any) -> None:
        handled.append(event.type)
        bus.publish("next", event.id)

    @bus.on("next", subscription="second", transactional=True)
    def follow(event: Any, tx: Any) -> None:
        handled.append(event.type)
        bus.publish("last", connection=tx)

    @bus.on("bad")
    def bad(event: Any) -> None:
        raise Discard("no")

    bus.publish("bad", uid="once")
    with bus:
        bus.publish_many([{"type": "good", "payload": n} for n in range(200)])
        bus.wait_idle(timeout=30)
        assert sorted(handled) == ["good"] * 200 + ["next"] * 200
        assert bus.dlq.retry(1) == 1
        bus.wait_idle(timeout=30)
        assert bus.dlq.purge(0) == 1
        bus.subscriptions.pause("second")
        bus.subscriptions.resume("second")
        log_of(bus.store).tidy()
        log_of(bus.store).inspect(deep=True)
        assert {each.name for each in bus.stats().subscriptions} == {"default", "second"}


def test_a_worker_adds_to_the_log_and_changes_none_of_it(login: Login):
    """No event and no audit row is changed or removed, no schema altered, the log's name stays (S4.11, I17)."""
    mine = login("worker")
    bus = EventBus(mine, auto_migrate=False)
    bus.publish("a")
    delivery = bus.poll()
    assert delivery is not None
    bus.finalize(delivery)
    bus.shutdown()
    refused(mine, *WRITES)


def test_a_reader_looks_and_changes_nothing(login: Login, url: str):
    """Lists, figures, dead letters and the doctor's look; not one write (I17)."""
    owner = EventBus(url)
    owner.publish("a")
    owner.shutdown()
    mine = login("reader")
    bus = EventBus(mine, auto_migrate=False)
    assert (bus.list().total, bus.get(1, include_logs=True).type, bus.stats().head) == (1, "a", 1)
    assert bus.dlq.list().total == 0
    assert all(each.ok for each in log_of(bus.store).inspect(deep=True))
    assert query(mine, "SELECT postbus.head('events'), (SELECT count(*) FROM postbus.pins('events'))") == [(1, 0)]
    with pytest.raises(UnsafeStore, match="postbus migrate --roles"):
        bus.publish("b")
    with pytest.raises(UnsafeStore):
        bus.poll()
    bus.shutdown()
    refused(
        mine,
        *WRITES,
        "SELECT postbus.publish('a')",
        "SELECT postbus.pin('events')",
        "SELECT bump()",
        "DELETE FROM deliveries",
    )


def test_whoever_has_no_role_gets_nothing(login: Login, server: Server, url: str):
    """PUBLIC has lost what functions give it by default (I17)."""
    mine = login("reader")
    run(server.url(), "REVOKE postbus_reader FROM {}", str(conninfo_to_dict(mine)["user"]))
    with pytest.raises(UnsafeStore, match="permission denied for schema"):
        EventBus(mine, auto_migrate=False).stats()
    refused(mine, "SELECT postbus.publish('a')", "SELECT count(*) FROM postbus.events")


def test_granting_again_mends_what_was_granted_besides(login: Login, url: str):
    """It can be run after every upgrade, and takes back what is not in it (S4.11)."""
    mine = login("publisher")
    query(url, "GRANT DELETE ON deliveries TO postbus_publisher")
    grant_roles(url)
    refused(mine, "DELETE FROM deliveries")
    bus = EventBus(mine, auto_migrate=False)
    bus.publish("a")
    bus.shutdown()


def test_roles_of_another_schema_have_its_name(server: Server):
    """Whoever may publish in one bus of a server may not in another by that alone (I17)."""
    with server.database(empty=True) as url:
        address = f"{url}&schema=office"
        open_store(address).close()
        grant_roles(address)
        assert query(url, "SELECT count(*) FROM pg_roles WHERE rolname LIKE 'office\\_%'") == [(3,)]
        query(url, "SET ROLE office_publisher; SELECT office.publish('a')")
        with pytest.raises(errors.InsufficientPrivilege):
            query(url, "SET ROLE office_publisher; DELETE FROM office.events")
    for role in ("office_worker", "office_publisher", "office_reader"):
        run(server.url(), "DROP ROLE {}", role)


def test_an_owner_need_not_be_a_superuser(server: Server):
    """Whoever owns the database and may make roles migrates, grants, publishes, works and marks (S4.11, I17)."""
    run(server.url(), "CREATE ROLE {} LOGIN CREATEROLE", "shop_owner")
    run(server.url(), "CREATE DATABASE {} OWNER {}", "owned", "shop_owner")
    address = f"{server.url('owned').replace('postgres@', 'shop_owner@')}&schema=owned"
    try:
        bus = EventBus(address)
        assert bus.publish("first").id == 1
        grant_roles(address)
        grant_roles(address)
        bus.publish_many([{"type": "a", "uid": f"u{n}"} for n in range(200)])
        delivery = bus.poll()
        assert delivery is not None
        bus.finalize(delivery)
        bus.poll()
        assert len(log_of(bus.store).restore_mark("admin")) == 32
        bus.subscriptions.delete("default")
        bus.shutdown()
    finally:
        run(server.url(), "DROP DATABASE {}", "owned")
        for role in ("owned_worker", "owned_publisher", "owned_reader", "shop_owner"):
            run(server.url(), "DROP ROLE IF EXISTS {}", role)


def test_the_script_is_what_is_run(server: Server):
    """What `--sql --roles` prints does the same by hand."""
    with server.database() as url:
        query(url, roles_script(url))  # pyright: ignore[reportArgumentType]
        asked = (
            "SELECT has_table_privilege('postbus_worker', 'postbus.deliveries', 'DELETE'),"
            " has_table_privilege('postbus_worker', 'postbus.events', 'DELETE')"
        )
        assert query(url, asked) == [(True, False)]


def test_a_file_has_no_roles():
    """It says what stands in their place."""
    with pytest.raises(InvalidRequest, match="has no roles"):
        roles_script("sqlite:///shop.db")
