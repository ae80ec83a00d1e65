"""A lone claim and a lone report go from the event loop to the server, too, and differ in nothing else."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import orjson
import pytest

from postbus.errors import LeaseLost, StoreUnavailable
from postbus.http.errands import Errands
from postbus.http.gate import Gate
from postbus.model import AttemptError, Delivery
from postbus.payload import draft
from postbus.retry import RetryPolicy
from postbus.store import Store, open_store
from postbus.store.contract import Claim, Report, Reported
from postbus.store.postgres.single import Remembered
from postbus.torture.proxy import Cut, Proxy
from tests.postgres.server import Server, query

ME = "lone:1"
POLICY = RetryPolicy(max_retries=5)
LEASE = timedelta(seconds=2)


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    """Give a store with twenty events."""
    store = open_store(url)
    store._marks._pause = 3_600.0  # type: ignore[attr-defined]  now and then a claim looks from the beginning
    store.publish([draft({"type": "a", "payload": number}) for number in range(1, 21)])
    yield store
    store.close()


@pytest.fixture
def threaded(monkeypatch: pytest.MonkeyPatch, store: Store) -> list[str]:
    """Give what was done in a thread."""
    return noted(monkeypatch, store)


def noted(monkeypatch: pytest.MonkeyPatch, store: Store) -> list[str]:
    """Return a list to which comes what a store does in a thread."""
    done: list[str] = []

    def note(name: str, honest: Any) -> None:
        def noting(items: Any) -> Any:
            done.append(name)
            return honest(items)

        monkeypatch.setattr(store, name, noting)

    for name in ("claim_all", "report"):
        note(name, getattr(store, name))
    return done


async def nobody() -> None:
    """Stay."""
    await asyncio.Event().wait()


async def take(gate: Gate, limit: int = 1) -> list[Delivery]:
    """Claim without waiting for more to come."""
    async with asyncio.timeout(30):
        claimed = await gate.claim(Claim("default", ME, "o", limit=limit, lease=LEASE), 0, nobody)
    return list(claimed.deliveries)


def success(delivery: Delivery) -> Report:
    """Return the report of a success."""
    return Report(delivery.id, "default", ME, POLICY, epoch=delivery.epoch)


async def complete(gate: Gate, delivery: Delivery) -> Reported:
    """Report a success."""
    async with asyncio.timeout(30):
        return await gate.report(success(delivery))


@asynccontextmanager
async def opened(store: Store) -> AsyncGenerator[Gate]:
    """Give a gate by which two events were done: by threads, which then have the couriers ready."""
    gate = Gate(store)
    async with gate.open():
        for _ in range(2):
            await complete(gate, (await take(gate))[0])
        await prepared(gate._claims)
        await prepared(gate._reporting._errands)
        yield gate


async def prepared(errands: Errands[Any, Any]) -> None:
    """Wait until a courier is ready."""
    async with asyncio.timeout(10):
        while not errands._ready:  # noqa: ASYNC110  it is a thread that has it ready
            await asyncio.sleep(0.01)


def test_what_comes_alone_needs_no_thread(store: Store, threaded: list[str]):
    """Each event comes to one, in order, and is recorded as by any claim and report."""

    async def run() -> list[Delivery]:
        async with opened(store) as gate:
            threaded.clear()
            taken: list[Delivery] = []
            for _ in range(10):
                taken += await take(gate)
                told = await complete(gate, taken[-1])
                assert (told.entry.action.value, told.retry_count, told.max_retries) == ("COMPLETED", 0, 5)
                assert not told.repeated
            return taken

    taken = asyncio.run(run())
    assert threaded == []
    assert [(each.id, each.attempt, each.event.payload) for each in taken] == [(n, 1, n) for n in range(3, 13)]
    for each in taken:
        assert [row.action.value for row in store.logs(each.id)] == ["PICKED", "COMPLETED"]


def test_what_is_more_or_not_plain_goes_by_a_thread(store: Store, threaded: list[str]):
    """Several at once; a failure; a lease that was lost, or a success told before; and where there is nothing left."""

    async def run() -> None:
        async with opened(store) as gate:
            first, second = await take(gate, 2)
            told = await gate.report(success(first)._replace(failed=True, errors=failure(store)))
            assert told.entry.action.value == "FAILED"
            await complete(gate, second)
            assert (await complete(gate, second)).repeated
            (lost,) = await take(gate)
            store.reset(lost.id, "default", "by hand", "admin")
            await prepared(gate._reporting._errands)
            with pytest.raises(LeaseLost):
                await complete(gate, lost)
            left = 0
            while await take(gate):
                left += 1
            assert left == 16
            assert await take(gate) == []

    asyncio.run(run())
    assert {"claim_all", "report"} == set(threaded)


def failure(store: Store) -> tuple[AttemptError, ...]:
    """Return one."""
    return (AttemptError("Oops", "no", 1, ME, store.now()),)


def test_what_has_changed_in_the_catalog_is_learnt(
    store: Store, threaded: list[str], url: str, monkeypatch: pytest.MonkeyPatch
):
    """A success is recorded once, and answered by what holds now; the next claim finds what it would have found.

    It is read in threads: the loop waits for nobody.
    """
    refresh, readers = Remembered.refresh, set[str]()

    def noting(self: Remembered, db: Any) -> None:
        readers.add(threading.current_thread().name)
        refresh(self, db)

    monkeypatch.setattr(Remembered, "refresh", noting)
    retry = orjson.dumps(RetryPolicy(max_retries=9).to_dict()).decode()

    async def run() -> None:
        async with opened(store) as gate:
            threaded.clear()
            (delivery,) = await take(gate)
            assert threaded == []
            query(url, "UPDATE subscriptions SET retry = %s WHERE name = 'default'", retry)
            query(url, "UPDATE meta SET value = value::bigint + 1 WHERE key = 'catalog'")
            told = await complete(gate, delivery)
            assert (told.max_retries, told.repeated, threaded) == (9, False, [])
            await prepared(gate._reporting._errands)
            (following,) = await take(gate)
            assert threaded == ["claim_all"]
            await prepared(gate._claims)
            assert (await complete(gate, following)).max_retries == 9
            assert [each.id for each in await take(gate)] == [following.id + 1]
            assert threaded == ["claim_all"]

    asyncio.run(run())
    assert readers == {"postbus-claim", "postbus-report"}


def test_an_event_that_cannot_be_read_is_buried(store: Store, threaded: list[str], url: str):
    """And whoever asked is told that there is more."""

    async def run() -> None:
        async with opened(store) as gate:
            threaded.clear()
            query(url, "UPDATE events SET payload = %s WHERE id = 3", '"\\ud800"')
            assert await take(gate) == []
            assert threaded == []
            assert [each.id for each in await take(gate)] == [4]

    asyncio.run(run())
    assert [row.action.value for row in store.logs(3)] == ["PICKED", "FAILED"]
    assert store.stats().dead == {"default": 1}


@pytest.mark.parametrize("when", Cut)
def test_cut_in_the_midst_is_an_error_and_nothing_is_lost(server: Server, url: str, when: Cut):
    """A claim's lease runs out, and a report can be told again: each event ends completed once (I8 to I10)."""
    proxy = Proxy(server.socket)
    store = open_store(proxy.url(url))
    store.publish([draft({"type": "a", "payload": number}) for number in range(1, 11)])

    async def run() -> None:
        async with opened(store) as gate:
            (delivery,) = await take(gate)
            proxy.cut(when, ME)
            with pytest.raises(StoreUnavailable):
                await complete(gate, delivery)
            await complete(gate, delivery)
            await prepared(gate._claims)
            proxy.cut(when, ME)
            with pytest.raises(StoreUnavailable):
                await take(gate)
            seen = {1, 2, delivery.id}
            async with asyncio.timeout(30):
                while len(seen) < 10:
                    for each in await take(gate):
                        seen.add(each.id)
                        await complete(gate, each)
                    store.expire(None, POLICY)

    try:
        asyncio.run(run())
    finally:
        store.close()
        proxy.close()
    assert proxy.cuts == 2
    ends = query(url, "SELECT event_id, count(*) FROM event_log WHERE action = 'COMPLETED' GROUP BY event_id")
    assert sorted(ends) == [(number, 1) for number in range(1, 11)]
