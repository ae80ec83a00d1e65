"""AsyncEventBus: the same bus, awaited, its handlers on the caller's loop."""

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from postbus import (
    AsyncEventBus,
    DeadLetters,
    Event,
    EventBus,
    EventBusShutdownError,
    InvalidPayloadError,
    LeaseLost,
    Status,
)
from tests.kinds import on_sqlite

ANYHOW = {"worker_id", "settings", "store", "worn_out", "run_due"}
"""What is no call of a user's, or serves tests of plain code."""


@pytest.fixture
def run(url: str) -> Callable[[Callable[[AsyncEventBus], Awaitable[Any]]], Any]:
    """Give a function that runs a coroutine with an open bus, within a deadline."""

    def run(use: Callable[[AsyncEventBus], Awaitable[Any]]) -> Any:
        async def main() -> Any:
            bus = AsyncEventBus(url, poll_interval=0.05)
            try:
                return await asyncio.wait_for(use(bus), 20)
            finally:
                await bus.shutdown(timeout=5)

        return asyncio.run(main())

    return run


def test_it_has_the_methods_of_the_bus():
    """Every public call of EventBus but `run`, and of `dlq` and `subscriptions`, is a coroutine function here."""
    public = {
        name
        for name, value in vars(EventBus).items()
        if inspect.isfunction(value) and not name.startswith("_") and name not in ANYHOW | {"run"}
    }
    assert public - set(dir(AsyncEventBus)) == set()
    awaited = {name for name in public if inspect.iscoroutinefunction(getattr(AsyncEventBus, name))}
    assert public - awaited == {"follow", "on", "transaction"}


def test_handlers_run_on_the_callers_loop(run: Any):
    """Coroutines see the loop, the task context and the locks of whoever started the bus (S0.7)."""

    async def use(bus: AsyncEventBus) -> tuple[bool, bool]:
        loops: list[asyncio.AbstractEventLoop] = []
        threads: list[int] = []

        @bus.on("async")
        async def awaited(_: Event) -> None:
            loops.append(asyncio.get_running_loop())
            threads.append(threading.get_ident())

        @bus.on("plain")
        def plain(_: Event) -> None:
            threads.append(threading.get_ident())

        async with bus:
            await bus.publish("async", wait=True, timeout=10)
            await bus.publish("plain", wait=True, timeout=10)
        here = threading.get_ident()
        return loops == [asyncio.get_running_loop()], threads[0] == here != threads[1]

    assert run(use) == (True, True)


def test_publish_poll_finalize_and_look(run: Any):
    """Own loops work with await as they do without (S0.2, S0.5)."""

    async def use(bus: AsyncEventBus) -> None:
        event = await bus.publish("a", {"n": 1}, tags=["x"])
        await bus.publish_many([{"type": "b"}, {"type": "c"}])
        delivery = await bus.poll()
        assert delivery is not None
        assert delivery.id == event.id
        await bus.extend(delivery)
        await bus.finalize(delivery)
        with pytest.raises(LeaseLost):
            await bus.finalize(delivery, success=False)
        assert (await bus.get(event.id)).status is Status.COMPLETED
        assert (await bus.list(status="PENDING")).total == 2
        (other,) = await bus.poll_many(1)
        await bus.release(other)
        await bus.reset(other.id, "why not")
        assert (await bus.stats()).events == 3

    run(use)


def test_dead_letters_and_subscriptions_are_awaited_too(run: Any):
    """`bus.dlq` and `bus.subscriptions` (S1.12)."""

    async def use(bus: AsyncEventBus) -> None:
        await bus.subscriptions.create("s", "order.*")
        event = await bus.publish("order.placed")
        delivery = await bus.poll(subscription="s")
        assert delivery is not None
        await bus.finalize(delivery, success=False, retry=False)
        assert (await bus.dlq.list()).total == 1
        assert await bus.dlq.retry(event.id) == 1
        await bus.subscriptions.pause("s")
        await bus.subscriptions.resume("s")
        assert await bus.subscriptions.delete("s") == 1
        assert [each.name for each in await bus.subscriptions.list()] == ["default"]

    run(use)
    assert {"list", "get", "retry", "retry_all", "purge"} <= set(vars(DeadLetters))


def test_subscribe_and_unsubscribe(run: Any):
    """With plain and async handlers (S1.3)."""

    async def use(bus: AsyncEventBus) -> list[str]:
        ran: list[str] = []

        async def handle(event: Event) -> None:
            ran.append(event.type)

        identity = await bus.subscribe("*", handle)
        async with bus:
            await bus.publish("a")
            await bus.wait_idle(timeout=10)
            await bus.unsubscribe(identity)
            await bus.publish("b")
        return ran

    assert run(use) == ["a"]


def test_a_bad_payload_is_refused(run: Any):
    """As everywhere, with nothing stored (S1.16)."""

    async def use(bus: AsyncEventBus) -> int:
        with pytest.raises(InvalidPayloadError):
            await bus.publish("a", {1, 2})
        return (await bus.list()).total

    assert run(use) == 0


def test_a_transaction_commits_or_rolls_back(run: Any):
    """Own rows and events together (I2)."""

    async def use(bus: AsyncEventBus) -> tuple[int, list[Any]]:
        async with bus.transaction() as tx:
            tx.execute("CREATE TABLE orders (id INTEGER)")
            await bus.publish("kept", connection=tx)

        async def fail() -> None:
            async with bus.transaction() as tx:
                tx.execute("INSERT INTO orders VALUES (1)")
                await bus.publish("lost", connection=tx)
                raise ValueError("no")

        with pytest.raises(ValueError, match="no"):
            await fail()
        async with bus.transaction() as tx:
            rows = tx.execute("SELECT id FROM orders")
        return (await bus.list()).total, rows

    assert run(use) == (1, [])


@on_sqlite
def test_other_tasks_wait_for_an_open_transaction(run: Any):
    """A publish of another task meanwhile comes after it, and is not taken for the transaction's own (I2)."""

    async def use(bus: AsyncEventBus) -> list[str]:
        async with bus.transaction() as tx:
            others = [asyncio.create_task(bus.publish("other")) for _ in range(5)]
            await asyncio.sleep(0.1)
            assert not any(task.done() for task in others)
            await bus.publish("mine", connection=tx)
        await asyncio.gather(*others)
        return [event.type for event in await bus.list()][::-1]

    assert run(use) == ["mine", *["other"] * 5]


def test_a_hundred_tasks_may_publish_at_once(run: Any):
    """They share commits, and each gets its own event (I3)."""

    async def use(bus: AsyncEventBus) -> int:
        events = await asyncio.gather(*(bus.publish("a", n) for n in range(100)))
        assert sorted(event.payload for event in events) == list(range(100))
        return len({event.id for event in events})

    assert run(use) == 100


def test_shutting_down_twice_is_safe_and_then_all_is_refused(run: Any):
    """EventBusShutdownError, as from the plain bus (S1.14)."""

    async def use(bus: AsyncEventBus) -> None:
        await bus.start()
        assert await bus.shutdown() is True
        assert await bus.shutdown() is True
        for call in (lambda: bus.publish("a"), lambda: bus.subscribe("a", print), bus.poll, bus.start):
            with pytest.raises(EventBusShutdownError):
                await call()
        with pytest.raises(EventBusShutdownError):
            async with bus.transaction():
                pass

    run(use)


def test_shutdown_drains_what_runs_on_the_loop(run: Any, url: str):
    """The loop stays free for the handlers while the bus waits for them (S1.14)."""

    async def use(bus: AsyncEventBus) -> int:
        started = asyncio.Event()

        @bus.on("*")
        async def handle(_: Event) -> None:
            started.set()
            await asyncio.sleep(0.2)

        await bus.start()
        event = await bus.publish("a")
        await asyncio.wait_for(started.wait(), 10)
        assert await bus.shutdown() is True
        return event.id

    event_id = run(use)
    after = EventBus(url)
    assert after.get(event_id).status is Status.COMPLETED
    after.shutdown()
