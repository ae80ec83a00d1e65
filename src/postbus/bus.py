"""EventBus: publish, subscribe, poll, finalize, start, shutdown."""

import asyncio
import logging
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from datetime import datetime, timedelta
from types import TracebackType
from typing import Any, Final, Self, TypedDict, TypeVar, Unpack
from uuid import uuid4

from postbus import figures
from postbus.breaker import Breaker
from postbus.clock import Clock
from postbus.config import Settings
from postbus.dlq import MAX_PAGE, DeadLetters, check_page
from postbus.errors import (
    Conflict,
    Discard,
    EventBusShutdownError,
    InvalidRequest,
    LeaseLost,
    NotFound,
    StoreUnavailable,
)
from postbus.execution import Execution, describe
from postbus.follow import CheckpointMode, Follow, InstanceMode, OnFailure, make_follow
from postbus.follower import Follower
from postbus.handlers import Handler, Handlers, OnError, Start, check_subscription, make_handler
from postbus.loop import Bell, Loop, Signal
from postbus.model import (
    AttemptError,
    Delivery,
    Done,
    DoneWithErrors,
    Event,
    HandlerRecord,
    Mode,
    NewEvent,
    Outcome,
    Page,
    Stats,
    Status,
)
from postbus.observe import probe, tell
from postbus.pattern import Interest, check_pattern
from postbus.payload import Draft, draft, drafts
from postbus.retry import RetryPolicy
from postbus.store import is_log, is_server, log_of, open_store, shown
from postbus.store.contract import Claim, Queue, Settled, Settlement, Transaction, needs_database
from postbus.subscriptions import Subscriptions, ordered
from postbus.tracing import publishing, spans
from postbus.upkeep import Upkeep, recover
from postbus.worker import Worker

__all__ = ["EventBus", "FollowOptions", "HandlerOptions"]

F = TypeVar("F", bound=Callable[..., Any])
Seconds = float | timedelta
WAIT_FOR: Final = 0.005
OWN_CONNECTION: Final = "publishing on a connection of your own"


class HandlerOptions(TypedDict, total=False):
    """What `subscribe` and `@on` take beside the pattern."""

    subscription: str
    tags: Sequence[str]
    retry: RetryPolicy | Mapping[str, float] | None
    timeout: float | None
    on_error: OnError
    breaker: Breaker | None
    model: Any
    transactional: bool
    start: Start


class FollowOptions(TypedDict, total=False):
    """What `@follow` takes beside the subscriber's id and the pattern."""

    tags: Sequence[str]
    checkpoint: CheckpointMode
    instance: InstanceMode | str
    retry: RetryPolicy | Mapping[str, float] | None
    batch_size: int
    batch: int | None
    on_error: OnFailure
    start: Start
    lease: float
    model: Any


class EventBus:
    """A durable event bus in one database. Safe to use from many threads.

    The store is opened, and migrated, when it is first used: a bus that only has handlers, or whose process was forked
    before `start`, may be used in every child process. Nothing is handled until `start` (or `with bus:`).
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        worker_id: str | None = None,
        lease: float | None = None,
        poll_interval: float | None = None,
        concurrency: int | None = None,
        prefetch: int | None = None,
        shutdown_timeout: float | None = None,
        retry: RetryPolicy | None = None,
        auto_migrate: bool | None = None,
        direct_url: str | None = None,
        listen: bool | None = None,
        token: str | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Stand for the bus at `url`: without one, at `POSTBUS_URL`, else `sqlite:///postbus.db`.

        At `http://host:port` it is that of a `postbus serve`, which may ask for a `token`.
        What is not given comes from `POSTBUS_*` variables, then `postbus.toml`, then the defaults of `Settings`.
        """
        self.settings = Settings.load(
            url=url,
            worker_id=worker_id,
            lease=lease,
            poll_interval=poll_interval,
            concurrency=concurrency,
            prefetch=prefetch,
            shutdown_timeout=shutdown_timeout,
            retry=retry,
            auto_migrate=auto_migrate,
            direct_url=direct_url,
            listen=listen,
            token=token,
        )
        self._url = shown(self.settings.url)
        self._named = self.settings.worker_id
        self._clock = clock
        self._handlers = Handlers()
        self._follows: dict[str, Follow] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._worker: Worker | None = None
        self._upkeep: Loop | None = None
        self._closing = False
        self._closer = 0
        self._finished = False
        self._closed = threading.Event()
        self._begin()

    def _begin(self) -> None:
        """Belong to this process, under its name and with nothing open."""
        self._opened_in = 0
        """The process that has opened the store."""
        self._process = os.getpid()
        self.worker_id = self._named or f"{socket.gethostname()}:{self._process}"
        self.settings = self.settings.model_copy(update={"worker_id": self.worker_id})
        self._owner = uuid4().hex
        self._alive = ExitStack()
        self._known_alive = False
        self._followers: dict[str, Follower] = {}
        self._lock = threading.RLock()

    def __repr__(self) -> str:
        """Name the bus without any secret."""
        return f"EventBus({self._url!r}, worker_id={self.worker_id!r})"

    # ── opening ──────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def store(self) -> Queue:
        """The store, opened and migrated at its first use in this process."""
        if self._opened_in != os.getpid():
            self._open_store()
        return self._store

    @property
    def dlq(self) -> DeadLetters:
        """The dead letters: look at them, retry them, purge them."""
        return DeadLetters(self.store, self.worker_id)

    @property
    def subscriptions(self) -> Subscriptions:
        """The named consumer groups over the log: list, make, pause, rewind, delete."""
        return Subscriptions(self.store, self.worker_id)

    def _open_store(self) -> None:
        """Open the store, and make the subscriptions of what was registered, before anything is done with it."""
        self._open()
        with self._lock:
            if self._opened_in == self._process:
                return
            store = open_store(
                self.settings.url,
                clock=self._clock,
                auto_migrate=self.settings.auto_migrate,
                direct_url=self.settings.direct_url,
                listen=self.settings.listen,
                token=self.settings.token.get_secret_value() if self.settings.token else None,
            )
            try:
                for each in self._handlers.all():
                    self._ensure(store, each)
                self._followers = {name: self._follower(store, follow) for name, follow in self._follows.items()}
            except BaseException:
                store.close()
                raise
            self._store = store
            self._execution = Execution(
                store,
                self._handlers,
                self.settings.retry,
                timedelta(seconds=self.settings.lease),
                random.Random(),  # noqa: S311  jitter needs no secrecy
            )
            self._opened_in = self._process

    def _ensure(self, store: Queue, handler: Handler) -> None:
        wanted, name = handler.interest, handler.subscription
        Subscriptions(store, self.worker_id).ensure(name, wanted.pattern, sorted(wanted.tags), start=handler.start)

    def _follower(self, store: Queue, follow: Follow) -> Follower:
        log = log_of(store, "a follower")
        return Follower(log, follow, worker_id=self.worker_id, poll_interval=self.settings.poll_interval)

    def _open(self) -> None:
        if self._closing:
            raise EventBusShutdownError("the bus is shut down")
        if os.getpid() != self._process:
            if self._worker is not None:
                raise StoreUnavailable(
                    "this bus was started before the fork and runs in the parent process: make an EventBus in the child"
                )
            self._begin()

    # ── publishing ───────────────────────────────────────────────────────────────────────────────────────────────

    def publish(
        self,
        type: str,  # noqa: A002  the public word for it
        payload: Any = None,
        *,
        tags: Sequence[str] = (),
        key: str | None = None,
        title: str | None = None,
        description: str | None = None,
        metadata: Mapping[str, str] | None = None,
        uid: str | None = None,
        delay: Seconds | None = None,
        at: datetime | None = None,
        priority: int = 0,
        max_retries: int | None = None,
        wait: bool = False,
        timeout: float | None = None,
        connection: Any = None,
    ) -> Event:
        """Store an event; it is durable when this returns.

        The same `uid` again stores nothing and returns the first event. With `wait` it returns once every
        subscription handled in this process has settled it (TimeoutError after `timeout` seconds: the event stays
        published). With `connection` (of `bus.transaction()`, or on PostgreSQL a connection or session of your own:
        psycopg, SQLAlchemy, Django) it becomes part of that transaction, and exists only if that commits.
        Raises InvalidPayloadError or InvalidEventError, with nothing stored.
        """
        given: dict[str, Any] = {
            "type": type,
            "payload": payload,
            "tags": None if tags == () else tags,
            "priority": priority or None,
        }
        given |= {"key": key, "title": title, "description": description, "metadata": metadata, "uid": uid}
        given |= {"delay": delay, "at": at, "max_retries": max_retries}
        ready = draft({name: value for name, value in given.items() if value is not None})
        if not wait:
            return self._store_drafts([ready], connection)[0]
        if connection is not None:
            raise InvalidRequest("an event cannot be waited for before its transaction has committed")
        names = self._handled()
        return self._wait_settled(self._store_drafts([ready], None)[0], names, timeout)

    def publish_many(self, events: Iterable[NewEvent | Mapping[str, Any]], *, connection: Any = None) -> list[Event]:
        """Store many events, all or none, in the order given."""
        return self._store_drafts(drafts(events), connection)

    def _store_drafts(self, ready: list[Draft], connection: Any) -> list[Event]:
        self._open()
        probe("publishing")
        if spans() is None:
            return self._keep(ready, connection)
        with publishing(ready) as traced:
            return self._keep(traced, connection)

    def _keep(self, ready: list[Draft], connection: Any) -> list[Event]:
        if connection is None:
            events = self.store.publish(ready)
        elif hasattr(connection, "publish"):  # ours
            events = connection.publish(ready)
        else:
            events = log_of(self.store, OWN_CONNECTION).publish_on(connection, ready)
        if figures.listener is not None:
            figures.listener.published(len(ready))
        return events

    def _wait_settled(self, event: Event, names: tuple[str, ...], timeout: float | None) -> Event:
        followers = self._followers.values()

        def over() -> bool:
            return self.store.settled(event.id, names) and all(each.has_passed(event.id) for each in followers)

        if not self._signal().wait_for(over, timeout):
            raise TimeoutError(f"event {event.id} was not settled within {timeout} s; it stays published")
        return self.get(event.id, subscription=names[0] if names else "default")

    def transaction(self) -> AbstractContextManager[Transaction]:
        """Open a transaction on the bus's own store: your writes and your events commit together, or neither does.

        `with bus.transaction() as tx: tx.execute("INSERT …"); bus.publish("order.placed", …, connection=tx)`.
        On SQLite every other writer waits until it ends: keep it short.
        """
        self._open()
        return log_of(self.store, "a transaction").transaction()

    # ── handlers ─────────────────────────────────────────────────────────────────────────────────────────────────

    def subscribe(self, pattern: str, handler: Callable[..., Any], **options: Unpack[HandlerOptions]) -> str:
        """Have a function handle the events a pattern covers; return an id for `unsubscribe`.

        `handler` is a plain or an async function of (event) or (event, ctx); a `transactional` one is a plain function
        of (event, tx) or (event, ctx, tx), whose writes through `tx` are stored with its outcome. A `subscription`
        that does not exist yet is made for this pattern, and gets what is in the log already: from the `beginning`,
        unless `start` says `now` or after which id. One that exists is widened to the pattern, from where it stands. If
        the bus has not been used yet, this happens at its first use, before anything else.
        """
        self._open()
        if unknown := ", ".join(sorted(options.keys() - HandlerOptions.__annotations__.keys())):
            raise InvalidRequest(f"there is no option {unknown}; there are {', '.join(HandlerOptions.__annotations__)}")
        made = make_handler(pattern, handler, **options)
        if made.transactional and is_server(self.settings.url):
            raise needs_database("a transactional handler")
        with self._lock:  # not while `start` has told of the handlers and has no worker yet
            if made.subscription in self._follows:
                raise ordered(made.subscription)
            if self._opened_in:
                self._ensure(self._store, made)
            self._handlers.add(made)
        if self._worker is not None:
            self.store.register_handlers([self._record(made)])
            self._worker.start()
            self._worker.wake()
        return made.id

    def on(self, pattern: str, **options: Unpack[HandlerOptions]) -> Callable[[F], F]:
        """Have the decorated function handle the events a pattern covers; see `subscribe`."""
        check_pattern(pattern)

        def register(function: F) -> F:
            self.subscribe(pattern, function, **options)
            return function

        return register

    def follow(self, subscriber_id: str, pattern: str = "*", **options: Unpack[FollowOptions]) -> Callable[[F], F]:
        """Have the decorated function see every event a pattern covers, in order, from where it stopped last.

        One process of all that follow under this id reads; the others take over when it ends. The function is a plain
        or an async one of (event) or (event, ctx); of (events) with `batch`; with a parameter `tx`, what it writes
        through it is committed with the checkpoint, and so takes effect exactly once. What it fails at for good is a
        dead letter of the subscription `subscriber_id`. Raises InvalidRequest, or Conflict for an id that is taken.
        """
        check_pattern(pattern)
        check_subscription(subscriber_id)
        if unknown := ", ".join(sorted(options.keys() - FollowOptions.__annotations__.keys())):
            raise InvalidRequest(f"there is no option {unknown}; there are {', '.join(FollowOptions.__annotations__)}")

        def register(function: F) -> F:
            self._open()
            if is_server(self.settings.url):
                raise needs_database("a follower")
            follow = make_follow(subscriber_id, pattern, function, **options)
            with self._lock:
                if follow.name in self._follows:
                    raise Conflict(f"{follow.name!r} is followed in this process already")
                if follow.name in self._handlers.subscriptions():
                    raise Conflict(f"{follow.name!r} is a subscription of mode queue: handlers take from it")
                if self._opened_in:
                    follower = self._followers[follow.name] = self._follower(self._store, follow)
                    if self._worker is not None:
                        self._store.register_handlers([follower.record(self._owner)])
                        follower.start(loop=self._loop)
                self._follows[follow.name] = follow
            return function

        return register

    @property
    def followers(self) -> Mapping[str, Follower]:
        """The followers of this process by their id: whether they lead, and what has stopped one."""
        if not self._opened_in:
            self._open_store()
        return dict(self._followers)

    def wait_for(self, subscriber_id: str, position: int, timeout: float | None = None) -> None:
        """Return once a subscriber has passed a position, an event's id: then what it builds shows that event.

        Raises TimeoutError, NotFound if there is no such subscriber, and InvalidRequest for a queue.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            stands = self._position(subscriber_id)
            if stands >= position:
                return
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"{subscriber_id!r} stands at {stands:,}, not yet at {position:,}")
            time.sleep(WAIT_FOR)

    def _position(self, subscriber_id: str) -> int:
        try:
            return self.store.position(subscriber_id)
        except NotFound:
            if any(each.name == subscriber_id and each.mode is Mode.QUEUE for each in self.subscriptions.list()):
                raise InvalidRequest(
                    f"{subscriber_id!r} is a subscription of mode queue, which has no position: wait_for is for "
                    "followers. To wait for handlers: publish(…, wait=True), or wait_idle()"
                ) from None
            raise

    def unsubscribe(self, identity: str) -> None:
        """Let a handler see no further event; raise NotFound if there is none of that id."""
        if not self._handlers.remove(identity):
            raise NotFound(f"there is no handler {identity!r} in this process")
        if self._opened_in:
            self.store.forget_handlers(self._owner, [identity])

    @property
    def handlers(self) -> tuple[Handler, ...]:
        """The handlers of this process, in order of registration."""
        return self._handlers.all()

    def _record(self, handler: Handler) -> HandlerRecord:
        return HandlerRecord(
            id=handler.id,
            name=handler.name,
            subscription=handler.subscription,
            pattern=handler.interest.pattern,
            tags=tuple(sorted(handler.interest.tags)),
            worker_id=self.worker_id,
            owner=self._owner,
            seen_at=self.store.now(),
        )

    # ── running ──────────────────────────────────────────────────────────────────────────────────────────────────

    def start(self, *, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Begin to handle events, after freeing what crashed processes of this host had in their hands.

        Coroutine handlers run on `loop` if one is given, else on a loop of the bus's own. A second call does nothing.
        """
        with self._lock:
            self._open()
            if self._worker is not None:
                return
            if figures.listener is not None:
                figures.listener.runs(self.store.url)
            self._be_alive()
            if is_log(store := self.store):
                recover(store, self.settings.retry, self._owner)
            self.store.register_handlers(self._records())
            # From here on the bus counts as started: what may fail comes before, so that it can be tried again.
            self._worker = Worker(self.store, self.settings, self._execution, self._owner, loop)
            upkeep = Upkeep(self.store, self.settings.retry, self._owner, self.settings.poll_interval, self._records)
            self._upkeep = Loop("upkeep", upkeep.turn)
            if self._handlers.all():  # else there is nothing to look for
                self._worker.start()
            self._upkeep.start()
            self._loop = loop
            for follower in self._followers.values():
                follower.start(loop=loop)

    def _records(self) -> list[HandlerRecord]:
        followed = [each.record(self._owner) for each in self._followers.values()]
        return [self._record(handler) for handler in self._handlers.all()] + followed

    def _be_alive(self) -> None:
        with self._lock:
            if not self._known_alive:
                if is_log(store := self.store):  # else its leases are the server's to end, by time
                    self._alive.enter_context(store.mark_alive(self._owner))
                self._known_alive = True

    def shutdown(self, timeout: float | None = None) -> bool:
        """Take nothing new, let what runs finish, hand the rest back, close the store; calling it twice is safe.

        Returns whether everything finished within `timeout` seconds (the bus's `shutdown_timeout` unless given).
        In a forked child it does nothing: the bus is its parent's.
        """
        if os.getpid() != self._process:
            return True
        with self._lock:
            first, self._closing = not self._closing, True
            if first:
                self._closer = threading.get_ident()
        if not first:
            # A signal handler may interrupt the very shutdown it asks for: that thread must not wait for itself.
            if self._closer != threading.get_ident():
                self._closed.wait()
            return self._finished
        limit = self.settings.shutdown_timeout if timeout is None else timeout
        done = False
        try:
            if self._upkeep is not None:
                self._upkeep.stop(timeout=5)
            done = self._stop(limit)
            if self._worker is not None:  # nothing was registered before: a mere publisher may not even write there
                self.store.forget_handlers(self._owner)
            if not done:
                tell(logging.WARNING, "shutdown_incomplete", held=self._worker.held if self._worker else 0)
            self._alive.close()  # before the store: it asks for the leases that are left
        finally:
            if self._opened_in:
                self._store.close()
            self._finished = done
            self._closed.set()
        return done

    def _stop(self, limit: float) -> bool:
        """Stop the worker, then the followers, even if one of them raises; return whether all finished in time."""
        if self._worker is None:
            return True
        ended: list[bool] = []

        def stop(one: Worker | Follower) -> None:
            ended.append(one.stop(limit))

        with ExitStack() as stopping:  # which goes from the last to the first
            for one in (*self._followers.values(), self._worker):
                stopping.callback(stop, one)
        return all(ended)

    def __enter__(self) -> Self:
        """Start."""
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Shut down."""
        self.shutdown()

    def run(self) -> None:
        """Start, and block until SIGINT, SIGTERM or `shutdown`; then shut down. A second signal ends the process.

        Raises UnsafeStore where the store can no longer be worked on until somebody changes something.
        """
        stop = Bell()

        def ask(number: int, _: object) -> None:
            signal.signal(number, signal.SIG_DFL)
            stop.ring()

        before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            self.start()
            while not stop.wait(0.2) and not self._closing and not self.worn_out:
                if self._worker is not None and self._worker.error is not None:
                    raise self._worker.error
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            self.shutdown()

    @property
    def is_shut_down(self) -> bool:
        """Whether `shutdown` has been called."""
        return self._closing

    @property
    def worn_out(self) -> bool:
        """Whether so many handlers hang past their timeout that this process should be replaced."""
        return self._worker is not None and self._worker.worn_out

    def wait_idle(self, timeout: float | None = None) -> None:
        """Return when nothing handled in this process is due, running or waiting for a retry.

        Events that their publisher delayed do not count until they are due. Raises TimeoutError.
        """
        names = self._handled()
        worker = self._worker
        if not self._signal().wait_for(
            lambda: (
                not (worker and worker.held)
                and all(map(self._is_idle, names))
                and all(each.is_idle() for each in self._followers.values())
            ),
            timeout,
        ):
            raise TimeoutError(f"there was still work after {timeout} s")

    def _is_idle(self, subscription: str) -> bool:
        work = self.store.work(subscription, self._handlers.interests(subscription))
        return not (work.due or work.leased or work.retrying)

    def _handled(self) -> tuple[str, ...]:
        names = self._handlers.subscriptions()
        if not (names or self._follows):
            raise InvalidRequest("this process handles no subscription: there is nothing to wait for")
        if self._worker is None:
            raise InvalidRequest("the bus is not started: nothing would ever be settled")
        return names

    def _signal(self) -> Signal:
        return self._worker.changed if self._worker is not None else Signal()

    # ── own loops ────────────────────────────────────────────────────────────────────────────────────────────────

    def poll(
        self,
        *,
        subscription: str = "default",
        types: Sequence[str] | None = None,
        tags: Sequence[str] | None = None,
        worker_id: str | None = None,
    ) -> Delivery | None:
        """Lease the next due delivery, or return None at once; `types` are patterns, any of the `tags` will do."""
        found = self.poll_many(1, subscription=subscription, types=types, tags=tags, worker_id=worker_id)
        return found[0] if found else None

    def poll_many(
        self,
        limit: int,
        *,
        subscription: str = "default",
        types: Sequence[str] | None = None,
        tags: Sequence[str] | None = None,
        worker_id: str | None = None,
    ) -> list[Delivery]:
        """Lease up to `limit` due deliveries; a suspect (it may have killed its worker) comes alone."""
        self._open()
        if limit < 1:
            raise InvalidRequest("limit must be 1 or more")
        if isinstance(types, str) or isinstance(tags, str):
            raise InvalidRequest("types and tags must be lists of strings")
        self._be_alive()
        interests = tuple(Interest(check_pattern(each), frozenset(tags or ())) for each in types or ("*",))
        found = self.store.claim(
            Claim(
                subscription=subscription,
                worker_id=worker_id or self.worker_id,
                owner=self._owner,
                interests=interests,
                limit=min(limit, MAX_PAGE),
                lease=timedelta(seconds=self.settings.lease),
                policy=self.settings.retry,
            )
        ).deliveries
        if figures.listener is not None:
            for each in found:
                figures.listener.claimed(each)
        return list(found)

    def finalize(
        self,
        delivery: Delivery,
        success: bool | None = None,  # noqa: FBT001  the contract's second argument
        *,
        errors: Sequence[str | BaseException] = (),
        retry: bool = True,
        status_code: int | None = None,
        execution_time_ms: float | None = None,
    ) -> None:
        """Record how a polled delivery ended.

        Without errors it is COMPLETED, with `errors` alone COMPLETED_WITH_ERRORS. `success=False` retries it by
        policy and, none left, makes it a dead letter; with `retry=False` at once. Repeating it changes nothing.
        Raises LeaseLost, changing nothing, if another claim, a reset or another outcome has come first.
        """
        described = [describe(each, delivery) for each in errors]
        outcome = self._outcome(delivery, described, success=success, retry=retry)
        told = Settlement(delivery.lease, outcome, delivery.worker_id, status_code, execution_time_ms)
        settled = self.store.settle([told])[0]
        if settled is Settled.LOST:
            raise LeaseLost(f"event {delivery.id} in {delivery.subscription!r} is no longer held under this lease")
        if settled is Settled.APPLIED and figures.listener is not None:
            figures.listener.settled(delivery.subscription, outcome)

    def _outcome(
        self, delivery: Delivery, errors: Sequence[AttemptError], *, success: bool | None, retry: bool
    ) -> Outcome:
        if success is None or success:
            if success and errors:
                raise InvalidRequest("success=True and errors contradict each other: leave success out")
            return DoneWithErrors(tuple(errors)) if errors else Done()
        told = errors[0] if errors else describe("reported as failed", delivery)
        if len(errors) > 1:
            told = replace(told, message="; ".join(each.message for each in errors))
        return self._execution.decide(delivery, told, Exception() if retry else Discard(), None)

    def extend(self, delivery: Delivery) -> None:
        """Let the lease of a polled delivery run on from now; raise LeaseLost if it has passed."""
        self._execution.extend(delivery)

    def release(self, delivery: Delivery) -> None:
        """Hand a polled delivery back, due at once and without burning an attempt; raise LeaseLost if it has passed."""
        if not self.store.release([delivery.lease], delivery.worker_id):
            raise LeaseLost(f"event {delivery.id} in {delivery.subscription!r} is no longer held under this lease")

    def reset(self, event_id: int, reason: str, subscription: str = "default") -> None:
        """Put an orphaned or scheduled delivery back, due now; its old lease is void, its attempts are kept."""
        self.store.reset(event_id, subscription, reason, self.worker_id)

    # ── looking ──────────────────────────────────────────────────────────────────────────────────────────────────

    def get(self, event_id: int, include_logs: bool = False, subscription: str = "default") -> Event:  # noqa: FBT001, FBT002
        """Return an event and how it stands; raise NotFound."""
        event = self._told(self.store.get(event_id, subscription), self._retries(subscription))
        return replace(event, logs=self.store.logs(event_id)) if include_logs else event

    def list(
        self,
        *,
        status: Status | str | None = None,
        type: str | None = None,  # noqa: A002  the public word for it
        tags: Sequence[str] = (),
        limit: int = 20,
        offset: int = 0,
        after: int | str | None = None,
        subscription: str = "default",
    ) -> Page[Event]:
        """Return events newest first; `type` may be a pattern, any of the `tags` will do."""
        check_page(limit, offset)
        self.subscriptions.get(subscription)
        try:
            wanted = None if status is None else Status(status)
        except ValueError:
            raise InvalidRequest(f"status is one of {', '.join(Status)}, not {status!r}") from None
        page = self.store.list(
            subscription=subscription, status=wanted, type=type, tags=tags, limit=limit, offset=offset, after=after
        )
        retries = self._retries(subscription)
        return replace(page, items=tuple(self._told(event, retries) for event in page.items))

    def _retries(self, subscription: str) -> int:
        own = next((each.retry for each in self.subscriptions.list() if each.name == subscription), None)
        return (own or self.settings.retry).max_retries

    @staticmethod
    def _told(event: Event, retries: int) -> Event:
        """Return the event with the number of retries it really has."""
        return event if event.max_retries is not None else replace(event, max_retries=retries)

    def stats(self) -> Stats:
        """Return the bus in figures."""
        return self.store.stats()

    def run_due(self) -> int:
        """Claim and run what is due, in this thread, until nothing is; return how many deliveries. For tests.

        Nothing is started: no thread, no waiting. Retries scheduled for later stay for later.
        """
        self._open()
        self._be_alive()
        worker = Worker(self.store, self.settings, self._execution, self._owner)
        try:
            return worker.run_due()
        finally:
            worker.stop(0)
