"""AsyncEventBus: the same bus for coroutines. A thin wrapper: every call runs the one implementation in a thread."""

import asyncio
import contextvars
import functools
import os
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, suppress
from enum import StrEnum
from types import TracebackType
from typing import Any, Concatenate, Final, Generic, ParamSpec, Self, TypeVar, Unpack

from postbus.bus import OWN_CONNECTION, EventBus, F, FollowOptions, HandlerOptions
from postbus.dlq import DeadLetters
from postbus.errors import EventBusShutdownError
from postbus.follower import Follower
from postbus.model import Delivery, Event, NewEvent
from postbus.payload import Draft
from postbus.store import log_of
from postbus.store.contract import Transaction
from postbus.subscriptions import Subscriptions

__all__ = ["AsyncEventBus"]

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
THREADS: Final = 64
UNDOING: Final = 5.0


class _Lane(StrEnum):
    """Which threads a call runs in: none may wait for a thread that another holds while waiting for it."""

    SHORT = "await"
    WAITING = "wait"
    """For calls that last until handlers have run, which make short calls of their own."""
    RESERVED = "reserved"
    """For what ends the waiting of others: the shutdown, and the writes of a transaction that is open."""


class _Threads:
    """The threads of one bus, and what they have yet to undo."""

    def __init__(self) -> None:
        self._process = os.getpid()
        # Bounded: every waiter looks at each settled event, so 1,000 of them at once take ten times as long (measured).
        self._lanes = {lane: ThreadPoolExecutor(THREADS, thread_name_prefix=f"postbus-{lane}") for lane in _Lane}
        self.undoing: set[Future[None]] = set()

    def submit(self, lane: _Lane, call: Callable[[], R]) -> Future[R]:
        """Begin a call; raise EventBusShutdownError after `shutdown`. A forked child has threads of its own."""
        if os.getpid() != self._process:
            self.__init__()
        try:
            # In the caller's context: what is published continues the caller's trace.
            return self._lanes[lane].submit(contextvars.copy_context().run, call)
        except RuntimeError:
            raise EventBusShutdownError("the bus is shut down") from None

    def undo(self, running: Future[R], undo: Callable[[R], None]) -> None:
        """Have a call undone once it has returned; after `shutdown`, leave it."""
        with suppress(EventBusShutdownError):
            # Behind the call, in its own lane: so whatever it waits for has a thread already.
            undoing = self.submit(_Lane.SHORT, lambda: undo(running.result()))
            self.undoing.add(undoing)
            undoing.add_done_callback(self.undoing.discard)

    def shutdown(self) -> None:
        """Take no further calls."""
        for lane in self._lanes.values():
            lane.shutdown(wait=False)


class _Wrapper(Generic[S]):
    """Has the blocking object, or what opens it, and the threads to call it in."""

    def __init__(self, wrapped: Callable[[], S], threads: _Threads) -> None:
        self._wrapped = wrapped
        self.threads = threads

    @property
    def wrapped(self) -> S:
        return self._wrapped()

    async def in_thread(
        self, call: Callable[[], R], lane: _Lane = _Lane.SHORT, undo: Callable[[R], None] | None = None
    ) -> R:
        """Run a blocking call in a thread, to be undone if it is cancelled; raise EventBusShutdownError if too late."""
        running = self.threads.submit(lane, call)
        try:
            return await asyncio.wrap_future(running)
        except asyncio.CancelledError:
            if undo is not None:
                self.threads.undo(running, undo)
            raise


def _awaited(
    method: Callable[Concatenate[S, P], R], lane: _Lane = _Lane.SHORT, undo: Callable[[S, R], None] | None = None
) -> Callable[Concatenate[_Wrapper[S], P], Coroutine[Any, Any, R]]:
    """Return the method as a coroutine function that runs it in a thread."""

    @functools.wraps(method)
    async def call(self: _Wrapper[S], *args: P.args, **kwargs: P.kwargs) -> R:
        undone = None if undo is None else functools.partial(undo, self.wrapped)
        return await self.in_thread(lambda: method(self.wrapped, *args, **kwargs), lane, undone)

    return call


def _hand_back(bus: EventBus, found: Delivery | None) -> None:
    _hand_back_all(bus, [found] if found else [])


def _hand_back_all(bus: EventBus, found: Sequence[Delivery]) -> None:
    if found:
        bus.store.release([each.lease for each in found], found[0].worker_id)


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


async def _entered(
    thread: ThreadPoolExecutor, held: ExitStack, opened: AbstractContextManager[Transaction]
) -> Transaction:
    try:
        return await asyncio.wrap_future(thread.submit(held.enter_context, opened))
    except asyncio.CancelledError as error:
        # Not awaited: it comes after the entering, which may have long to wait for the transaction of another.
        thread.submit(held.__exit__, type(error), error, error.__traceback__)
        raise


async def _left(thread: ThreadPoolExecutor, held: ExitStack, *error: Any) -> None:
    # Shielded: a cancelled commit or rollback that never began would leave the store locked.
    await asyncio.shield(asyncio.wrap_future(thread.submit(held.__exit__, *error)))


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
        """Stand for a bus; takes what EventBus takes."""
        bus = EventBus(*args, **options)
        super().__init__(lambda: bus, _Threads())
        self.dlq = _AsyncDeadLetters(lambda: bus.dlq, self.threads)
        self.subscriptions = _AsyncSubscriptions(lambda: bus.subscriptions, self.threads)

    _publish = _awaited(EventBus.publish)
    _publish_and_wait = _awaited(EventBus.publish, _Lane.WAITING)
    _publish_within = _awaited(EventBus.publish, _Lane.RESERVED)
    _publish_many = _awaited(EventBus.publish_many)
    _publish_many_within = _awaited(EventBus.publish_many, _Lane.RESERVED)
    subscribe = _awaited(EventBus.subscribe)
    unsubscribe = _awaited(EventBus.unsubscribe)
    wait_idle = _awaited(EventBus.wait_idle, _Lane.WAITING)
    wait_for = _awaited(EventBus.wait_for, _Lane.WAITING)
    poll = _awaited(EventBus.poll, undo=_hand_back)
    poll_many = _awaited(EventBus.poll_many, undo=_hand_back_all)
    finalize = _awaited(EventBus.finalize)
    extend = _awaited(EventBus.extend)
    release = _awaited(EventBus.release)
    reset = _awaited(EventBus.reset)
    get = _awaited(EventBus.get)
    stats = _awaited(EventBus.stats)

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
        if connection is None:
            return await (self._publish_and_wait if fields.get("wait") else self._publish)(*args, **fields)
        log = log_of(self.wrapped.store, OWN_CONNECTION)
        if not log.is_async(connection):
            return await self._publish_within(*args, connection=connection, **fields)
        collected = _Collected()
        await self._publish_within(*args, connection=collected, **fields)
        return (await log.publish_on_async(connection, collected.drafts))[0]

    async def publish_many(
        self, events: Iterable[NewEvent | Mapping[str, Any]], *, connection: Any = None
    ) -> list[Event]:
        """Store many events, all or none; see EventBus.publish_many."""
        if connection is None:
            return await self._publish_many(events)
        log = log_of(self.wrapped.store, OWN_CONNECTION)
        if not log.is_async(connection):
            return await self._publish_many_within(events, connection=connection)
        collected = _Collected()
        await self._publish_many_within(events, connection=collected)
        return await log.publish_on_async(connection, collected.drafts)

    @asynccontextmanager
    async def transaction(self) -> AsyncGenerator[Transaction]:
        """Open a transaction on the bus's own store; see EventBus.transaction."""
        opened, held = self.wrapped.transaction(), ExitStack()
        # A thread for this transaction alone: the store refuses the one that holds it, and must not mistake another's.
        thread = ThreadPoolExecutor(1, thread_name_prefix="postbus-transaction")
        try:
            tx = await _entered(thread, held, opened)
            try:
                yield tx
            except BaseException as error:
                await _left(thread, held, type(error), error, error.__traceback__)
                raise
            await _left(thread, held, None, None, None)
        finally:
            thread.shutdown(wait=False)

    async def start(self) -> None:
        """Begin to handle events; coroutine handlers run on the present event loop."""
        await self.in_thread(functools.partial(self.wrapped.start, loop=asyncio.get_running_loop()))

    async def shutdown(self, timeout: float | None = None) -> bool:  # noqa: ASYNC109  the bus's own word for it
        """Shut down; see EventBus.shutdown."""
        try:
            done = await self.in_thread(functools.partial(self._shutdown, timeout), _Lane.RESERVED)
        except EventBusShutdownError:
            return True
        self.threads.shutdown()
        return done

    def _shutdown(self, timeout: float | None) -> bool:
        wait(self.threads.undoing, UNDOING)
        return self.wrapped.shutdown(timeout)

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
