"""The server and all of its processes stand still: connections stay, nobody answers, and nobody waits for good."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import Any

import pytest

from postbus import EventBus, OutcomeUnknown, StoreUnavailable
from postbus.http import errands
from postbus.http.gate import Gate
from postbus.payload import draft
from postbus.store import open_store
from postbus.store.postgres import connection as module
from tests.http.serving import Served
from tests.postgres.server import Server, query

WITHIN = 12.0
"""Seconds, with the limits of this file; with the product's own it is about 20."""


@pytest.fixture(autouse=True)
def _sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for less long."""
    monkeypatch.setattr(module, "SILENCE", 0.5)
    monkeypatch.setattr(module, "ANSWER", 0.5)
    monkeypatch.setattr(errands, "LATE", 0.5)
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


VERBS: dict[str, Callable[[EventBus], Any]] = {
    "publish": lambda bus: bus.publish("cut", uid="u"),
    "publish_many": lambda bus: bus.publish_many([{"type": "cut"}] * 3),
    "copy": lambda bus: bus.publish_many([{"type": "cut"}] * 300),
    "poll": lambda bus: bus.poll(),
    "stats": lambda bus: bus.stats(),
    "list": lambda bus: bus.list(),
    "create": lambda bus: bus.subscriptions.create("other", ["*"]),
    "open": lambda bus: EventBus(bus.settings.url).stats(),
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
        with closing(open_store(url)) as store:
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
