"""AsyncEventBus: the same bus for coroutines. A thin wrapper: every call runs the one implementation in a thread."""

import asyncio
import contextvars
import functools
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Concatenate, Final, Generic, ParamSpec, Self, TypeVar, Unpack

from postbus.bus import EventBus, F, FollowOptions, HandlerOptions
from postbus.dlq import DeadLetters
from postbus.errors import EventBusShutdownError
from postbus.follower import Follower
from postbus.model import Event, NewEvent
from postbus.payload import Draft
from postbus.store.contract import Transaction
from postbus.subscriptions import Subscriptions

__all__ = ["AsyncEventBus"]

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
THREADS: Final = 64


class _Wrapper(Generic[S]):
    """Has the blocking object, and the threads to call it in."""

    def __init__(self, wrapped: S, threads: ThreadPoolExecutor) -> None:
        self.wrapped = wrapped
        self.threads = threads

    async def in_thread(self, call: Callable[[], R]) -> R:
        """Run a blocking call in a thread; raise EventBusShutdownError after `shutdown`."""
        try:
            # In the caller's context: what is published continues the caller's trace.
            inside = contextvars.copy_context().run
            running = asyncio.get_running_loop().run_in_executor(self.threads, inside, call)
        except RuntimeError:
            raise EventBusShutdownError("the bus is shut down") from None
        return await running


def _awaited(
    method: Callable[Concatenate[S, P], R],
) -> Callable[Concatenate[_Wrapper[S], P], Coroutine[Any, Any, R]]:
    """Return the method as a coroutine function that runs it in a thread."""

    @functools.wraps(method)
    async def call(self: _Wrapper[S], *args: P.args, **kwargs: P.kwargs) -> R:
        return await self.in_thread(functools.partial(method, self.wrapped, *args, **kwargs))

    return call


class _AsyncDeadLetters(_Wrapper[DeadLetters]):
    """DeadLetters, awaited."""

    list = _awaited(DeadLetters.list)
    get = _awaited(DeadLetters.get)
    retry = _awaited(DeadLetters.retry)
    retry_all = _awaited(DeadLetters.retry_all)
    purge = _awaited(DeadLetters.purge)


class _AsyncSubscriptions(_Wrapper[Subscriptions]):
    """Subscriptions, awaited."""

    list = _awaited(Subscriptions.list)
    create = _awaited(Subscriptions.create)
    pause = _awaited(Subscriptions.pause)
    resume = _awaited(Subscriptions.resume)
    rewind = _awaited(Subscriptions.rewind)
    delete = _awaited(Subscriptions.delete)


class _Collected:
    """Stands in for a transaction to have events validated in a thread, and stored by whoever awaits."""

    def __init__(self) -> None:
        self.drafts: Sequence[Draft] = ()

    def publish(self, drafts: Sequence[Draft]) -> Sequence[Draft]:
        self.drafts = drafts
        return drafts


class AsyncEventBus(_Wrapper[EventBus]):
    """An EventBus whose methods are awaited; coroutine handlers run on the loop that called `start`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """Open the bus; takes what EventBus takes."""
        super().__init__(EventBus(*args, **options), ThreadPoolExecutor(THREADS, thread_name_prefix="postbus-await"))
        self.dlq = _AsyncDeadLetters(self.wrapped.dlq, self.threads)
        self.subscriptions = _AsyncSubscriptions(self.wrapped.subscriptions, self.threads)

    _publish = _awaited(EventBus.publish)
    _publish_many = _awaited(EventBus.publish_many)
    subscribe = _awaited(EventBus.subscribe)
    unsubscribe = _awaited(EventBus.unsubscribe)
    wait_idle = _awaited(EventBus.wait_idle)
    wait_for = _awaited(EventBus.wait_for)
    poll = _awaited(EventBus.poll)
    poll_many = _awaited(EventBus.poll_many)
    finalize = _awaited(EventBus.finalize)
    extend = _awaited(EventBus.extend)
    release = _awaited(EventBus.release)
    reset = _awaited(EventBus.reset)
    get = _awaited(EventBus.get)
    stats = _awaited(EventBus.stats)
    _shutdown = _awaited(EventBus.shutdown)

    @property
    def worker_id(self) -> str:
        """Who this bus is when it claims."""
        return self.wrapped.worker_id

    def on(self, pattern: str, **options: Unpack[HandlerOptions]) -> Callable[[F], F]:
        """Have the decorated function handle the events a pattern covers; not awaited, since it decorates."""
        return self.wrapped.on(pattern, **options)

    def follow(self, subscriber_id: str, pattern: str = "*", **options: Unpack[FollowOptions]) -> Callable[[F], F]:
        """Have the decorated function see every event a pattern covers, in order; see EventBus.follow."""
        return self.wrapped.follow(subscriber_id, pattern, **options)

    @property
    def followers(self) -> Mapping[str, Follower]:
        """The followers of this process by their id."""
        return self.wrapped.followers

    async def publish(self, *args: Any, connection: Any = None, **fields: Any) -> Event:
        """Store an event; see EventBus.publish. `connection` may also be an awaited psycopg or SQLAlchemy one."""
        if connection is None or not self.wrapped.store.is_async(connection):
            return await self._publish(*args, connection=connection, **fields)
        collected = _Collected()
        await self._publish(*args, connection=collected, **fields)
        return (await self.wrapped.store.publish_on_async(connection, collected.drafts))[0]

    async def publish_many(
        self, events: Iterable[NewEvent | Mapping[str, Any]], *, connection: Any = None
    ) -> list[Event]:
        """Store many events, all or none; see EventBus.publish_many."""
        if connection is None or not self.wrapped.store.is_async(connection):
            return await self._publish_many(events, connection=connection)
        collected = _Collected()
        await self._publish_many(events, connection=collected)
        return await self.wrapped.store.publish_on_async(connection, collected.drafts)

    @asynccontextmanager
    async def transaction(self) -> AsyncGenerator[Transaction]:
        """Open a transaction on the bus's own store; see EventBus.transaction."""
        loop, held = asyncio.get_running_loop(), self.wrapped.transaction()
        # A thread for this transaction alone: the store refuses the one that holds it, and must not mistake another's.
        with ThreadPoolExecutor(1, thread_name_prefix="postbus-transaction") as thread:
            tx = await loop.run_in_executor(thread, held.__enter__)
            try:
                yield tx
            except BaseException as error:
                await loop.run_in_executor(thread, held.__exit__, type(error), error, error.__traceback__)
                raise
            await loop.run_in_executor(thread, held.__exit__, None, None, None)

    async def start(self) -> None:
        """Begin to handle events; coroutine handlers run on the present event loop."""
        await self.in_thread(functools.partial(self.wrapped.start, loop=asyncio.get_running_loop()))

    async def shutdown(self, timeout: float | None = None) -> bool:  # noqa: ASYNC109  the bus's own word for it
        """Shut down; see EventBus.shutdown."""
        try:
            done = await self._shutdown(timeout)
        except EventBusShutdownError:
            return True
        self.threads.shutdown(wait=False)
        return done

    async def __aenter__(self) -> Self:
        """Start."""
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Shut down."""
        await self.shutdown()

    list = _awaited(EventBus.list)  # last: inside the class, the name would hide the type
