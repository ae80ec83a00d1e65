"""The server and all of its processes stand still: connections stay, nobody answers, and nobody waits for good."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from postbus import EventBus, OutcomeUnknown, StoreUnavailable
from postbus.http.gate import Gate
from postbus.payload import draft
from postbus.store import as_arrow, log_of, open_store
from postbus.store.postgres import address as module
from postbus.store.postgres import extract
from postbus.store.postgres.address import Address
from tests.conftest import Crew
from tests.http.serving import Served
from tests.postgres.server import Server, query

WITHIN = 12.0
"""Seconds, with the limits of this file; with the product's own it is about 20."""


WAITING = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
"""Who waits for a lock in this database."""


@pytest.fixture(autouse=True)
def _sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for less long."""
    monkeypatch.setattr(module, "SILENCE", 0.5)
    monkeypatch.setattr(module, "ANSWER", 0.5)
    monkeypatch.setitem(module.DEFAULTS, "connect_timeout", "2")


@pytest.fixture
def bus(url: str) -> Iterator[EventBus]:
    """Give a bus, all of whose connections are open."""
    bus = EventBus(url)
    bus.publish("a")
    delivery = bus.poll()
    assert delivery is not None
    bus.finalize(delivery, success=True)
    bus.stats()
    yield bus
    bus.shutdown()


def read(url: str) -> int:
    """Return how many events there are, by Arrow."""
    return sum(batch.num_rows for batch in as_arrow(url, "events", ("id", "payload"), 0, 1_000))


VERBS: dict[str, Callable[[EventBus], Any]] = {
    "publish": lambda bus: bus.publish("cut", uid="u"),
    "publish_many": lambda bus: bus.publish_many([{"type": "cut"}] * 3),
    "copy": lambda bus: bus.publish_many([{"type": "cut"}] * 300),
    "poll": lambda bus: bus.poll(),
    "stats": lambda bus: bus.stats(),
    "list": lambda bus: bus.list(),
    "create": lambda bus: bus.subscriptions.create("other", ["*"]),
    "open": lambda bus: EventBus(bus.settings.url).stats(),
    "arrow": lambda bus: read(bus.settings.url),
}


@pytest.mark.parametrize("verb", VERBS)
def test_a_server_that_stands_still_is_not_waited_for(server: Server, bus: EventBus, verb: str):
    """Whatever is asked for ends as a store that is away, and works when the server goes on (S4.10, I16)."""
    with server.frozen():
        began = time.monotonic()
        with pytest.raises(StoreUnavailable):
            VERBS[verb](bus)
        assert time.monotonic() - began < WITHIN
    with suppress(OutcomeUnknown):  # whoever was cut off in the server ends now
        bus.publish("b")
    assert bus.get(1).id == 1


def test_a_publish_that_the_server_got_and_did_not_answer_may_have_happened(server: Server, url: str, bus: EventBus):
    """It says so, and is stored once when it is repeated with its uid (I1, I3)."""
    with server.frozen(), pytest.raises(OutcomeUnknown):
        bus.publish("cut", uid="u")
    event = bus.publish("cut", uid="u")
    assert query(url, "SELECT id FROM events WHERE type = 'cut'") == [(event.id,)]


def test_a_publish_of_the_event_loop_is_not_waited_for(server: Server, url: str):
    """Its thread finds that nobody answers (S4.10)."""

    async def run() -> None:
        with closing(log_of(open_store(url))) as store:
            gate = Gate(store)
            async with gate.open(), asyncio.timeout(60):
                await gate.publish([draft({"type": "a"})])
                with server.frozen(), pytest.raises(OutcomeUnknown):
                    await gate.publish([draft({"type": "cut", "uid": "u"})])
                (event,) = await gate.publish([draft({"type": "cut", "uid": "u"})])
                assert query(url, "SELECT id FROM events WHERE type = 'cut'") == [(event.id,)]

    asyncio.run(run())


@pytest.mark.parametrize("before", [True, False], ids=["asked before", "asked for the first time"])
def test_readiness_is_told_within_its_bound(server: Server, bus: EventBus, *, before: bool):
    """A server in front of a database that stands still is not ready, and says so; later it is (S3.8)."""
    served = Served(bus)
    try:
        if before:
            assert served.http.get("/readyz").status_code == 200
        with server.frozen():
            began = time.monotonic()
            assert served.http.get("/readyz").status_code == 503
            assert time.monotonic() - began < WITHIN
        assert served.http.get("/readyz").status_code == 200
    finally:
        served.stop()


def test_workers_and_followers_go_on_when_the_server_does(
    server: Server, bus: EventBus, eventually: Callable[..., Any]
):
    """Claiming, settling, listening and reading break off and begin anew by themselves (S4.10)."""
    seen: list[int] = []
    followed: list[int] = []
    bus.subscribe("*", lambda event: seen.append(event.id))
    bus.follow("copy")(lambda event: followed.append(event.id))
    with bus:
        eventually(lambda: len(followed) == 1)
        with server.frozen():
            time.sleep(3)  # for longer than anybody waits
        event = bus.publish("b", uid="u")
        eventually(lambda: event.id in seen and event.id in followed, within=30)


def test_a_read_by_arrow_that_is_cut_off_between_batches_is_not_waited_for(
    server: Server, url: str, bus: EventBus, eventually: Callable[..., Any]
):
    """Its reader ends as for a store that is away; what it left behind ends when the server goes on (S4.10, I16)."""
    bus.publish_many([{"type": "large", "payload": "x" * 900_000}] * 60)  # more than any buffer on its way holds
    batches = as_arrow(url, "events", ("id", "payload"), 0, 1_000)
    assert next(batches).num_rows
    with server.frozen():
        began = time.monotonic()
        with pytest.raises(StoreUnavailable, match="has not answered"):
            list(batches)
        assert time.monotonic() - began < WITHIN
    eventually(lambda: not readers())
    assert read(url) == 61


@pytest.mark.usefixtures("bus")
@pytest.mark.parametrize("pooled", [False, True], ids=["direct", "behind a pooler"])
def test_a_read_by_arrow_that_is_cut_off_before_its_first_row_is_not_waited_for(
    server: Server,
    url: str,
    crew: Crew,
    eventually: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    *,
    pooled: bool,
):
    """It waits at the server for a lock, and then for the server; a pooler says that it lives itself (S4.10, I16)."""
    if pooled:
        monkeypatch.setattr(module, "lives", lambda *_: True)
        monkeypatch.setattr(module, "LONGEST", 1.0)
        monkeypatch.setattr(module.Session, "longest", 1.0)
    with psycopg.connect(url) as holder:
        holder.execute("LOCK TABLE postbus.events IN ACCESS EXCLUSIVE MODE")
        crew.start(lambda: read(url))
        eventually(lambda: query(url, WAITING))
        with server.frozen():
            began = time.monotonic()
            with pytest.raises(StoreUnavailable, match="has not answered"):
                crew.join()
            assert time.monotonic() - began < WITHIN
        holder.rollback()
    eventually(lambda: not readers())
    assert read(url) == 1


def test_a_read_by_arrow_that_is_cut_off_as_it_connects_is_not_waited_for(
    server: Server, url: str, monkeypatch: pytest.MonkeyPatch, eventually: Callable[..., Any]
):
    """The server was there a moment ago (S4.10, I16)."""
    reached = extract.Server.reached
    with ExitStack() as frozen:

        def reach(address: Address) -> extract.Server:
            found = reached(address)
            frozen.enter_context(server.frozen())
            return found

        monkeypatch.setattr(extract.Server, "reached", reach)
        began = time.monotonic()
        with pytest.raises(StoreUnavailable):
            read(url)
        assert time.monotonic() - began < WITHIN
    eventually(lambda: not readers())


def test_a_read_by_arrow_that_takes_long_is_waited_for(
    url: str, bus: EventBus, crew: Crew, monkeypatch: pytest.MonkeyPatch
):
    """The server is at it, and says that it lives; so is a reader that takes its time between batches (S4.10)."""
    monkeypatch.setattr(module, "LONGEST", 1.0)
    bus.publish_many([{"type": "large", "payload": "x" * 900_000}] * 60)
    with psycopg.connect(url) as holder:
        holder.execute("LOCK TABLE postbus.events IN ACCESS EXCLUSIVE MODE")
        crew.start(lambda: read(url))
        holder.execute("SELECT pg_sleep(3)")
        holder.rollback()
        assert crew.join() == [61]
    batches = as_arrow(url, "events", ("id", "payload"), 0, 1_000)
    rows = next(batches).num_rows
    with psycopg.connect(url) as connection:
        connection.execute("SELECT pg_sleep(2)")
    assert rows + sum(batch.num_rows for batch in batches) == 61


def test_a_read_by_arrow_that_is_left_early_keeps_no_connection(url: str, bus: EventBus):
    """It is closed when its reader is (I16)."""
    bus.publish_many([{"type": "large", "payload": "x" * 900_000}] * 60)
    batches = as_arrow(url, "events", ("id", "payload"), 0, 1_000)
    next(batches)
    del batches
    assert not readers()


def test_what_arrow_connects_with_has_the_limits_of_the_store(url: str):
    """A host that is gone without a word is noticed by the wire itself; what the URL says goes first (S4.10)."""
    given = conninfo_to_dict(Address.of(f"{url}&connect_timeout=3").libpq)
    assert given == {**given, **module.DEFAULTS, "connect_timeout": "3"}


def readers() -> list[str]:
    """Return the threads of this process that read by Arrow."""
    return [each.name for each in threading.enumerate() if each.name == "postbus-arrow"]


def test_a_statement_that_takes_long_is_waited_for(bus: EventBus):
    """The server is at it, and says that it lives (S4.10)."""
    with bus.transaction() as tx:
        assert tx.execute("SELECT 'done' FROM pg_sleep(2.5)") == [("done",)]


def test_a_statement_that_the_server_should_have_ended_is_not_waited_for(
    bus: EventBus, monkeypatch: pytest.MonkeyPatch
):
    """Another process of the server answers, and the one that was asked never does (S4.10)."""
    monkeypatch.setattr(module.Session, "longest", 1.0)
    with pytest.raises(StoreUnavailable, match="has not answered"), bus.transaction() as tx:
        tx.execute("SELECT pg_sleep(30)")
