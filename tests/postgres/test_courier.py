"""A lone event goes from the event loop to the server past the threads: stored once, or its caller is told why not."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import psycopg
import pytest

from postbus.http.gate import Gate
from postbus.payload import draft
from postbus.store import Store, open_store
from postbus.torture.proxy import Cut, Proxy
from tests.postgres.server import Server, query

STORED = "SELECT payload::text FROM events ORDER BY id"


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    """Give a store."""
    store = open_store(url)
    yield store
    store.close()


@pytest.fixture
def threaded(monkeypatch: pytest.MonkeyPatch, store: Store) -> list[Any]:
    """Give the payloads of what was published in a thread."""
    payloads: list[Any] = []
    publish = store.publish

    def noting(drafts: Any) -> Any:
        payloads.extend(each.payload[:10] for each in drafts)
        return publish(drafts)

    monkeypatch.setattr(store, "publish", noting)
    return payloads


@asynccontextmanager
async def opened(store: Store, first: Any = 0) -> AsyncGenerator[Gate]:
    """Give a gate through which something was published already: by a thread, which then has the courier ready."""
    gate = Gate(store)
    async with gate.open():
        await publish(gate, first)
        await prepared(gate)
        yield gate


async def prepared(gate: Gate) -> None:
    """Wait until the courier is ready."""
    async with asyncio.timeout(10):
        while not gate._publishing._errands._ready:  # noqa: ASYNC110  it is a thread that has it ready
            await asyncio.sleep(0.01)


async def publish(gate: Gate, payload: Any, **given: Any) -> int:
    """Publish one event and return its id."""
    async with asyncio.timeout(30):
        (event,) = await gate.publish([draft({"type": "a", "payload": payload, **given})])
    assert event.payload == payload
    return event.id


def connection_of(gate: Gate) -> psycopg.Connection[Any]:
    """Return the courier's connection."""
    return gate._publishing._errands._courier._db.connection  # type: ignore[union-attr]


def test_only_what_is_alone_and_short_and_plain_goes_past_the_threads(store: Store, threaded: list[Any], url: str):
    """The first, too, goes by the thread: it connects there. Deliveries are made for each."""

    async def run() -> None:
        async with opened(store) as gate:
            assert await publish(gate, 1) == 2
            await publish(gate, 2, uid="mine")
            await publish(gate, "x" * 5_000)
            await publish(gate, 3)
            await asyncio.gather(*[publish(gate, 4) for _ in range(3)])

    asyncio.run(run())
    assert threaded[:3] == ["0", "2", '"xxxxxxxxx']
    assert "1" not in threaded
    assert query(url, "SELECT count(*), (SELECT count(*) FROM deliveries) FROM events") == [(8, 8)]


def test_an_answer_that_takes_its_time_keeps_nobody_else_waiting(store: Store, url: str):
    """Whoever comes meanwhile is answered together, later; what was asked comes to its end before the gate closes."""

    async def run() -> None:
        async with opened(store) as gate:
            with psycopg.connect(url, autocommit=True) as holder:
                holder.execute("BEGIN; LOCK TABLE postbus.events IN EXCLUSIVE MODE")
                waiting = [asyncio.create_task(publish(gate, number)) for number in range(1, 4)]
                await asyncio.sleep(0.3)
                assert not any(each.done() for each in waiting)
                holder.execute("ROLLBACK")
            await asyncio.gather(*waiting)
            leaving = asyncio.create_task(publish(gate, 4))
            await asyncio.sleep(0)
        await leaving

    asyncio.run(run())
    assert query(url, STORED) == [(str(number),) for number in range(5)]


def test_whoever_leaves_meanwhile_leaves_nothing_behind(store: Store, threaded: list[Any], url: str):
    """What was sent is stored all the same, and the next one is answered with its own event."""

    async def run() -> None:
        async with opened(store) as gate:
            leaving = asyncio.create_task(publish(gate, 1))
            for _ in range(3):
                await asyncio.sleep(0)
            leaving.cancel()
            assert await publish(gate, 2) == 3
            assert await publish(gate, 3) == 4

    asyncio.run(run())
    assert threaded == ["0"]
    assert query(url, STORED) == [("0",), ("1",), ("2",), ("3",)]


def test_a_connection_lost_while_nobody_publishes_is_replaced(store: Store, threaded: list[Any], url: str):
    """By the thread, which publishes the next event itself: no caller notices."""

    async def run() -> None:
        async with opened(store) as gate:
            query(url, "SELECT pg_terminate_backend(%s, 5000)", connection_of(gate).info.backend_pid)
            await publish(gate, 1)
            await prepared(gate)
            await publish(gate, 2)

    asyncio.run(run())
    assert threaded == ["0", "1"]
    assert query(url, STORED) == [("0",), ("1",), ("2",)]


def test_what_the_server_refuses_is_asked_the_ordinary_way(store: Store, threaded: list[Any], url: str):
    """Nothing was stored then: a statement it has forgotten is prepared anew, and an error is told as any."""
    refuse = "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RAISE EXCEPTION ''no''; END'"
    late = (
        "CREATE CONSTRAINT TRIGGER late AFTER INSERT ON events DEFERRABLE INITIALLY DEFERRED"
        " FOR EACH ROW EXECUTE FUNCTION refuse()"
    )

    async def run() -> None:
        async with opened(store) as gate:
            connection_of(gate).execute("DEALLOCATE ALL")
            await publish(gate, 1)
            await prepared(gate)
            await publish(gate, 2)
            query(url, refuse)
            query(url, late)
            with pytest.raises(psycopg.errors.RaiseException, match="no"):
                await publish(gate, 3)
            query(url, "DROP TRIGGER late ON events")
            await prepared(gate)
            await publish(gate, 4)

    asyncio.run(run())
    assert threaded == ["0", "1", "3"]
    assert query(url, STORED) == [("0",), ("1",), ("2",), ("4",)]


@pytest.mark.parametrize("when", Cut)
def test_a_publish_cut_in_the_midst_is_stored_once_and_acknowledged(server: Server, url: str, when: Cut):
    """A thread looks what became of it, and publishes again what was not stored (I1). The next one is published."""
    proxy = Proxy(server.socket)
    store = open_store(proxy.url(url))

    async def run() -> None:
        async with opened(store) as gate:
            proxy.cut(when, "cut here")
            cut = await publish(gate, "cut here")
            assert query(url, "SELECT payload::text FROM events WHERE id = %s", cut) == [('"cut here"',)]
            await publish(gate, 2)

    try:
        asyncio.run(run())
    finally:
        store.close()
        proxy.close()
    assert proxy.cuts == 1
    stored = Counter(each for (each,) in query(url, STORED))
    assert stored['"cut here"'] == 1
    assert stored["2"] == 1


@pytest.mark.parametrize("listens", [True, False])
def test_it_is_told_to_those_who_wait(url: str, *, listens: bool):
    """Followers and workers look at once rather than when they look anyway; also elsewhere, but for who won't hear."""
    store, other = open_store(url, listen=listens), open_store(url)
    watches = [store.watch(), other.watch()]

    async def run() -> None:
        async with opened(store) as gate:
            for each in watches:
                while await asyncio.to_thread(each.wait, 0.5):
                    pass
            await publish(gate, 1)
            assert [await asyncio.to_thread(each.wait, 2) for each in watches] == [True, listens]

    asyncio.run(run())
    for each in (*watches, store, other):
        each.close()
