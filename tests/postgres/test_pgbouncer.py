"""Behind PgBouncer in transaction mode: everything but listening goes through the pooler."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from postbus import EventBus, OutcomeUnknown, StoreUnavailable
from postbus.store import grant_roles, open_source
from postbus.store.postgres import address as module
from postbus.store.source import Columns
from postbus.torture.cluster import Bouncer
from postbus.torture.proxy import Cut, Proxy
from tests.postgres.server import Server, query

pytestmark = pytest.mark.skipif(Bouncer.program() is None, reason="pgbouncer is not installed")


@pytest.fixture
def pooled(server: Server, url: str) -> Iterator[str]:
    """Give the address of the database through a pooler of the test's own, which has fewer connections than it."""
    bouncer = Bouncer(server)
    yield bouncer.url(str(conninfo_to_dict(url)["dbname"]))
    bouncer.remove()


def through_pooler(url: str) -> int:
    """Return how many of the server's connections come from the pooler: the others listen, or ask this."""
    asked = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND query NOT ILIKE 'LISTEN%%'"
    return query(url, asked + " AND pid <> pg_backend_pid()")[0][0]


def test_everything_works_through_a_transaction_pooler(url: str, pooled: str, eventually: Callable[..., Any]):
    """Publishing in every way, workers, a transactional handler, waking up, dead letters, figures (S4.10, S4.11)."""
    query(url, "CREATE TABLE public.ledger (event_id bigint PRIMARY KEY)")
    bus = EventBus(pooled, direct_url=url, poll_interval=30, concurrency=8)
    publisher = EventBus(pooled, direct_url=url)
    handled: list[int] = []

    @bus.on("plain")
    def plain(event: Any) -> None:
        handled.append(event.id)

    @bus.on("booked", transactional=True)
    def book(event: Any, tx: Any) -> None:
        tx.execute("INSERT INTO public.ledger VALUES (%s)", [event.id])
        publisher.publish("plain", connection=tx)

    with bus:
        eventually(lambda: query(url, "SELECT 1 FROM pg_stat_activity WHERE query ILIKE 'LISTEN%%'"))
        threads = [threading.Thread(target=publish_some, args=(publisher, n)) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        publisher.publish_many([{"type": "plain", "payload": n} for n in range(500)])
        publisher.publish_many([{"type": "booked", "uid": f"u{n}"} for n in range(150)])
        with psycopg.connect(pooled) as connection:
            publisher.publish("plain", connection=connection)
        with publisher.transaction() as tx:
            publisher.publish("plain", connection=tx)
        eventually(lambda: len(handled) == 60 + 500 + 150 + 2, within=30)
        bus.wait_idle(timeout=30)
        assert bus.stats().rates["COMPLETED"] > 0
        assert through_pooler(url) <= 4
        assert bus.dlq.list().total == 0
    publisher.shutdown()
    assert query(url, "SELECT count(*) FROM public.ledger") == [(150,)]
    assert query(url, "SELECT count(*) FROM deliveries") == [(0,)]
    assert query(url, "SELECT count(*), count(DISTINCT event_id) FROM audit WHERE action = 'COMPLETED'") == [(862, 862)]


def publish_some(bus: EventBus, start: int) -> None:
    """Publish ten events, one by one."""
    for number in range(10):
        bus.publish("plain", [start, number])


def test_an_event_of_another_process_is_noticed_at_once(url: str, pooled: str, eventually: Callable[..., Any]):
    """The bell rung through the pooler is heard past it, long before the next look (S4.10)."""
    bus = EventBus(pooled, direct_url=url, poll_interval=30)
    publisher = EventBus(pooled, direct_url=url)
    heard = threading.Event()
    bus.subscribe("*", lambda _: heard.set())
    with bus:
        eventually(lambda: query(url, "SELECT 1 FROM pg_stat_activity WHERE query ILIKE 'LISTEN%%'"))
        publisher.publish("a")
        assert heard.wait(5)
    publisher.shutdown()


def test_without_a_way_past_the_pooler_it_works_by_looking(pooled: str):
    """With `direct_url` the same as `url` and no listening, nothing needs a session of its own (S4.10)."""
    bus = EventBus(pooled, direct_url=pooled, listen=False, auto_migrate=False, poll_interval=0.1)
    heard = threading.Event()
    bus.subscribe("*", lambda _: heard.set())
    with bus:
        bus.publish("a")
        bus.wait_idle(timeout=10)
    assert heard.is_set()
    grant_roles(pooled)
    with open_source(pooled, "postbus.events", Columns("id", "created_at", "payload", "type")) as source:
        assert (source.count(), [row.type for row in source.rows()]) == (1, ["a"])


@pytest.mark.parametrize("uid", [None, "u"])
@pytest.mark.parametrize("when", [Cut.BEFORE, Cut.AFTER])
def test_what_became_of_a_commit_behind_a_pooler_is_told_only_if_it_shows(
    url: str, pooled: str, when: Cut, uid: str | None
):
    """Nobody can find the session that was to commit: an event that is not there may still come (I1, I3)."""
    proxy = Proxy(int(pooled.rpartition(":")[2].partition("/")[0]))
    bus = EventBus(proxy.url(url), direct_url=url, listen=False)
    try:
        bus.publish("a")
        proxy.cut(when, r"COMMIT\x00")
        if uid is None and when is Cut.BEFORE:
            with pytest.raises(OutcomeUnknown):
                bus.publish("b")
        else:
            event = bus.publish("b", uid=uid)
            assert query(url, "SELECT id FROM events WHERE type = 'b'") == [(event.id,)]
        assert proxy.cuts == 1
    finally:
        bus.shutdown()
        proxy.close()


def test_a_server_that_stands_still_behind_a_pooler_is_not_waited_for(
    server: Server, url: str, pooled: str, monkeypatch: pytest.MonkeyPatch
):
    """The pooler lives, and says so; what it asked for is waited for as long as any statement may take (S4.10)."""
    monkeypatch.setattr(module, "SILENCE", 0.5)
    monkeypatch.setattr(module.Session, "longest", 1.5)
    bus = EventBus(pooled, direct_url=url, listen=False)
    bus.publish("a")
    ended: list[Exception] = []

    def ask(verb: Callable[[], Any]) -> None:
        try:
            verb()
        except StoreUnavailable as error:
            ended.append(error)

    threads = [threading.Thread(target=ask, args=(each,)) for each in (lambda: bus.publish("b", uid="u"), bus.stats)]
    with server.frozen():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert len(ended) == 2
    event = bus.publish("b", uid="u")
    assert query(url, "SELECT id FROM events WHERE type = 'b'") == [(event.id,)]
    bus.shutdown()
