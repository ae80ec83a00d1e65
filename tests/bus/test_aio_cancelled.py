"""AsyncEventBus under pressure: what a cancelled call leaves behind, and calls that wait for each other."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from postbus import AsyncEventBus, Event, EventBus, Status
from postbus.aio import THREADS
from tests.conftest import LONGEST, Crew
from tests.kinds import on_sqlite


@pytest.fixture
def run(url: str, crew: Crew) -> Callable[[Callable[[AsyncEventBus], Awaitable[Any]]], Any]:
    """Give a function that runs a coroutine with an open bus; a loop that is blocked fails the test, too."""

    def run(use: Callable[[AsyncEventBus], Awaitable[Any]]) -> Any:
        async def main() -> Any:
            bus = AsyncEventBus(url, poll_interval=0.05, concurrency=2 * THREADS)
            try:
                return await asyncio.wait_for(use(bus), LONGEST)
            finally:
                await bus.shutdown(timeout=5)

        crew.start(lambda: asyncio.run(main()))
        return crew.join(within=3 * LONGEST)[0]

    return run


async def cancel(task: asyncio.Task[Any]) -> None:
    """Cancel a task, and see it end."""
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    assert task.cancelled()


@asynccontextmanager
async def cancelled_claim(
    bus: AsyncEventBus, monkeypatch: pytest.MonkeyPatch, poll: Callable[[], Any]
) -> AsyncGenerator[None]:
    """Cancel a poll that has claimed already but not returned; let it return at the end."""
    claimed, go_on = threading.Event(), threading.Event()
    claim = bus.wrapped.store.claim

    def slow(*args: Any) -> Any:
        found = claim(*args)
        claimed.set()
        go_on.wait(LONGEST)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(bus.wrapped.store, "claim", slow)
        task = asyncio.create_task(poll())
        assert await asyncio.to_thread(claimed.wait, LONGEST)
        await cancel(task)
    yield
    go_on.set()


@on_sqlite
def test_cancelling_who_waits_for_a_transaction_blocks_nobody(run: Any):
    """It gives up at once, while the other goes on, and what it would have held is free afterwards (I2)."""

    async def use(bus: AsyncEventBus) -> None:
        async def wait_in_vain() -> None:
            async with bus.transaction():
                pytest.fail("the transaction of another was still open")

        async with bus.transaction() as tx:
            waiting = asyncio.create_task(wait_in_vain())
            await asyncio.sleep(0.1)
            await cancel(waiting)
            await bus.publish("mine", connection=tx)
        await bus.publish("other")
        assert [event.type for event in await bus.list()] == ["other", "mine"]

    run(use)


@on_sqlite
def test_a_transaction_cancelled_as_it_ends_holds_nothing(run: Any):
    """Whatever the moment, it commits or rolls back (I2)."""

    async def use(bus: AsyncEventBus) -> None:
        async def cancel_itself() -> None:
            async with bus.transaction():
                task = asyncio.current_task()
                assert task is not None
                task.cancel()

        for _ in range(20):
            with suppress(asyncio.CancelledError):
                await asyncio.create_task(cancel_itself())
        await bus.publish("a")

    run(use)


def test_a_transaction_commits_while_an_error_is_handled(run: Any):
    """An error that was raised before it is not its own (I2)."""

    async def use(bus: AsyncEventBus) -> int:
        try:
            int("no number")
        except ValueError:
            async with bus.transaction() as tx:
                await bus.publish("a", connection=tx)
        return (await bus.list()).total

    assert run(use) == 1


def test_handlers_may_publish_however_many_wait_for_them(run: Any):
    """A call that waits holds no thread that a short one needs (S0.7)."""

    async def use(bus: AsyncEventBus) -> set[Status | None]:
        @bus.on("a")
        async def handle(_: Event) -> None:
            await bus.publish("b")

        async with bus:
            events = await asyncio.gather(*(bus.publish("a", wait=True) for _ in range(THREADS)))
        return {event.status for event in events}

    assert run(use) == {Status.COMPLETED}


def test_shutdown_need_not_wait_for_those_who_wait(run: Any):
    """However many wait for what never comes, and however few threads are left (S1.14)."""

    async def use(bus: AsyncEventBus) -> None:
        @bus.follow("f")
        async def follow(_: Event) -> None: ...

        await bus.start()
        waiting = [asyncio.create_task(bus.wait_for("f", 1)) for _ in range(2 * THREADS)]
        await asyncio.sleep(0)
        assert await bus.shutdown() is True
        await asyncio.wait(waiting)

    run(use)


@on_sqlite
def test_a_transaction_goes_on_however_many_wait_for_it(run: Any):
    """What is published within it needs no thread of those who wait for its end (I2)."""

    async def use(bus: AsyncEventBus) -> int:
        async with bus.transaction() as tx:
            others = [asyncio.create_task(bus.publish("other")) for _ in range(THREADS)]
            await asyncio.sleep(0)
            await bus.publish("mine", connection=tx)
            await bus.publish_many([{"type": "mine"}], connection=tx)
        await asyncio.gather(*others)
        return (await bus.list()).total

    assert run(use) == THREADS + 2


@pytest.mark.parametrize("limit", [None, 2])
def test_a_cancelled_poll_hands_back_what_it_claimed(
    run: Any, monkeypatch: pytest.MonkeyPatch, limit: int | None, eventually: Callable[..., Any]
):
    """Due at once, and no attempt is burnt (S3.9)."""

    async def use(bus: AsyncEventBus) -> list[int]:
        await bus.publish_many([{"type": "a"}] * (limit or 1))
        async with cancelled_claim(bus, monkeypatch, lambda: bus.poll_many(limit) if limit else bus.poll()):
            pass
        await asyncio.to_thread(eventually, lambda: all(event.status is Status.PENDING for event in bus.wrapped.list()))
        return [event.retry_count for event in await bus.list()]

    assert run(use) == [0] * (limit or 1)


def test_shutdown_hands_back_what_a_cancelled_poll_claims(run: Any, monkeypatch: pytest.MonkeyPatch, bus: EventBus):
    """As when Ctrl-C cancels the tasks, and the bus is shut down at once (S1.14)."""

    async def use(bus: AsyncEventBus) -> int:
        event = await bus.publish("a")
        async with cancelled_claim(bus, monkeypatch, bus.poll):
            closing = asyncio.create_task(bus.shutdown())
            await asyncio.sleep(0.1)
        assert await closing is True
        return event.id

    event = bus.get(run(use))
    assert (event.status, event.retry_count) == (Status.PENDING, 0)
