"""The follower: reads an ordered subscription in its order, one process at a time, and remembers how far it has come.

Reading by position is the only truth: catching up and following live are one loop, and being woken only means to look
now. Whoever reads holds an epoch; every move of the checkpoint is fenced by it, so that one who was deposed changes
nothing.
"""

import asyncio
import logging
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from contextvars import copy_context
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final, Self
from uuid import uuid4

from postbus import figures
from postbus.errors import (
    Conflict,
    EventBusShutdownError,
    InvalidRequest,
    LeaseLost,
    MaxRetriesExceeded,
    NotFound,
    PostbusError,
    StoreUnavailable,
    UnsafeStore,
)
from postbus.execution import CANCELLED, UNWATCHED, Context, after, describe, end_child, handler_log, tell_failed
from postbus.follow import Follow, InstanceMode, make_follow
from postbus.leftovers import Cancelled, HandlerFailed, Leftovers, cause
from postbus.loop import Bell, Loop
from postbus.model import AttemptError, Dead, Delivery, Done, Event, HandlerRecord, Lease, Mode, Retry, Stream
from postbus.observe import probe, tell
from postbus.quiet import UNDISTURBED
from postbus.store import log_of, open_store
from postbus.store.contract import Ahead, Burial, Lead, Log, Step, Transaction
from postbus.tracing import Handling, is_watched

__all__ = ["Follower"]

STANDBY: Final = 0.2
LOOK_BEHIND: Final = 0.5
MOST_READ: Final = 5_000
SPARSE: Final = 4
BEATS: Final = 3


class Follower:
    """Follows one ordered subscription. Started once, stopped once."""

    def __init__(self, store: Log, follow: Follow, *, worker_id: str | None = None, poll_interval: float = 1.0) -> None:
        """Follow on a store; the subscription is made if it is not there. Raises Conflict if it is of another mode."""
        self.follow = follow
        self.error: Exception | None = None
        """What has stopped it for good."""
        self._stopped_before: int | None = None
        self._store = store
        self._name = follow.name
        self._handler = follow.handler
        self._worker_id = worker_id or f"{socket.gethostname()}:{os.getpid()}"
        self._owner = uuid4().hex
        self._process = os.getpid()
        self._poll = poll_interval
        self._lease = timedelta(seconds=follow.lease)
        self._interests = (follow.handler.interest,)
        self._limit = follow.batch_size
        self._lead: Lead | None = None
        self._held: ExitStack | None = None
        self._check_held: Any = None
        self._position = self._saved = self._newest = 0
        self._ahead: Ahead | None = None
        self._unsaved = self._suspects = self._crashes = 0
        self._unsaved_since = self._took = 0.0
        self._interrupt = threading.Event()
        self._stopping = self._paused = False
        self._ending = threading.Lock()
        self._ended = self._outlasts = False
        """Whether its thread has taken its last turn, and whether `stop` did not wait for that."""
        self._single = follow.instance is InstanceMode.SINGLE
        self._alive = ExitStack()
        self._own: Log | None = None
        self._look_behind = self._try_again = 0.0
        self._chance = random.Random()  # noqa: S311  jitter needs no secrecy
        self._loop: asyncio.AbstractEventLoop | None = None
        self._runner: asyncio.Runner | None = None
        self._left = Leftovers(store, follow, self._worker_id, self._owner)
        self._subscribe()
        self._reader = store.reader()
        self._following = Loop(f"follow {self._name}", self._turn, self._reader, at_end=self._end_alone)
        self._beating = Loop(f"lead {self._name}", self._beat)

    @classmethod
    def open(
        cls, url: str, subscriber_id: str, function: Callable[..., Any], pattern: str = "*", **options: Any
    ) -> Self:
        """Return a follower with a store of its own, to be run alone: `Follower.open(url, "sales", handle).run()`.

        Takes the options of `EventBus.follow`.
        """
        follow = make_follow(subscriber_id, pattern, function, **options)
        store = log_of(open_store(url), "a follower")
        try:
            follower = cls(store, follow)
        except BaseException:
            store.close()
            raise
        follower._own = store
        return follower

    def _subscribe(self) -> None:
        """Make the subscription if it is new; let it show the pattern that is followed now."""
        pattern, tags = self._handler.interest.pattern, sorted(self._handler.interest.tags)
        found = next((each for each in self._store.subscriptions() if each.name == self._name), None)
        if found is None:
            try:
                found = self._store.create_subscription(
                    self._name, [pattern], tags, mode=Mode.ORDERED, lease=None, retry=None, start=self.follow.start
                )
            except Conflict:  # made by another at this very moment
                return self._subscribe()
            pruned = self._store.span(Stream.EVENTS).pruned
            if self.follow.start == "beginning" and pruned:
                tell(logging.WARNING, "follower_begins_late", subscription=self._name, archived_through=pruned)
        if found.mode is not Mode.ORDERED:
            raise Conflict(f"{self._name!r} is a subscription of mode {found.mode}: choose another name to follow by")
        if (found.patterns, found.tags) != ((pattern,), tuple(tags)):
            self._store.set_interests(self._name, [pattern], tags)
        return None

    # ── running ──────────────────────────────────────────────────────────────────────────────────────────────────

    def start(self, *, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Begin; a coroutine handler runs on `loop` if one is given, else on a loop of its own."""
        self._loop = loop
        self._alive.enter_context(self._store.mark_alive(self._owner))
        self._following.start()
        self._beating.start()

    def stop(self, timeout: float | None = None) -> bool:
        """Let the event that is being handled finish, save the checkpoint, and let another lead.

        Returns whether that was done within `timeout` seconds.
        """
        self._stopping = True
        self._interrupt.set()
        done = self._following.stop(timeout)
        self._beating.stop(timeout)
        with self._ending:
            self._outlasts = not (done or self._ended)
        if not self._outlasts:
            self._leave()
        self._reader.close()
        if self._own is not None:
            self._own.close()
        return not self._outlasts

    def _leave(self) -> None:
        """Let another lead, and be known as alive no longer."""
        try:
            self._step_down(resign=True)
        finally:
            if self._runner is not None:
                self._runner.close()
            self._alive.close()

    def _end_alone(self) -> None:
        """Leave behind a handler that has outlasted `stop`, whose store may be closed by now."""
        with self._ending:
            self._ended = True
        if self._outlasts:
            with suppress(PostbusError):
                self._leave()

    def run(self) -> None:
        """Start, and block until SIGINT or SIGTERM, or until it has stopped by itself: then raise why."""
        asked = Bell()

        def ask(_: int, __: object) -> None:
            asked.ring()

        before = {each: signal.signal(each, ask) for each in (signal.SIGINT, signal.SIGTERM)}
        self.start()
        try:
            while self.error is None and not asked.wait(STANDBY):
                pass
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            self.stop()
        if self.error is not None:
            raise self.error

    def __enter__(self) -> Self:
        """Start."""
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop."""
        self.stop()

    @property
    def leads(self) -> bool:
        """Whether this process is the one that reads."""
        return self._lead is not None and self.error is None

    def record(self, owner: str) -> HandlerRecord:
        """Return what is stored of it for people."""
        interest = self._handler.interest
        return HandlerRecord(
            id=self._handler.id,
            name=self._handler.name,
            subscription=self._name,
            pattern=interest.pattern,
            tags=tuple(sorted(interest.tags)),
            worker_id=self._worker_id,
            owner=owner,
            seen_at=self._store.now(),
        )

    def has_passed(self, position: int) -> bool:
        """Return whether a position has been passed, by whichever process leads; raise what has stopped it for good.

        Of a subscription that was deleted, nobody waits for anything.
        """
        if self.error is not None and not isinstance(self.error, NotFound):
            raise self.error
        try:
            return self._store.position(self._name) >= position
        except NotFound:
            return True

    def is_idle(self) -> bool:
        """Return whether everything there is has been done, or left behind as dead or parked."""
        return self.has_passed(self._store.span(Stream.EVENTS).head) and not self._left.may_go_on()

    # ── leading ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _turn(self) -> float:
        if self.error is not None:
            return self._poll
        if self._loop is not None and self._loop.is_closed():
            self._end(EventBusShutdownError(f"the event loop that {self._name!r} runs on was closed"))
            return self._poll
        try:
            if self._lead is None:
                if (left := self._try_again - time.monotonic()) > 0:
                    return left  # events that come wake those too who only stand by
                self._try_again = time.monotonic() + STANDBY
            lead = self._lead or self._take_over()
            return STANDBY if lead is None else self._go_on(lead)
        except LeaseLost as lost:
            tell(logging.WARNING, "follower_deposed", subscription=self._name, reason=str(lost))
            self._single = False  # two that are each the only one must not depose each other for ever
            self._step_down()
        except (UnsafeStore, NotFound, MaxRetriesExceeded) as error:
            self._end(error)
        except Cancelled:
            if self._lead is not None and not self._stopping:
                if not self._interrupt.is_set():  # a handler that is cancelled each time must not go round and round
                    tell(logging.WARNING, "follower_cancelled", subscription=self._name, position=self._position)
                    self._try_again = time.monotonic() + self._poll
                self._step_down()
        return 0.0

    def _end(self, error: Exception) -> None:
        """Stop for good, loudly: going on would lose something, or is not wanted."""
        self.error = error
        tell(logging.ERROR, "follower_stopped", subscription=self._name, reason=str(error))
        self._step_down(resign=True)

    def _take_over(self) -> Lead | None:
        if self.follow.instance is InstanceMode.COORDINATED:
            self._hold()
        lead = self._store.lead(
            self._name, self._owner, self._worker_id, self._lease, locked=self._held is not None, single=self._single
        )
        if lead is not None:
            tell(logging.INFO, "follower_leads", subscription=self._name, position=lead.position, epoch=lead.epoch)
            self._position = self._saved = lead.position
            self._unsaved = 0
            self._crashes = lead.crashes
            self._suspects = max(self.follow.checkpoint.size, self.follow.batch or 1) if lead.crashes else 0
            self._look_behind = 0.0
            self._paused = True  # as long as it is not known
            self._left.load()
            self._interrupt.clear()
            if self._stopping:
                self._interrupt.set()
            self._lead = lead
        return lead

    def _hold(self) -> None:
        """Try to hold the lock whose being free tells the others that this process is gone; or find that it is held."""
        if self._held is not None:
            try:
                self._check_held()
            except StoreUnavailable:  # its connection was cut: another may hold it by now
                self._let_go()
            else:
                return
        held = ExitStack()
        try:
            self._check_held = held.enter_context(self._store.hold(f"follower {self._name}"))
        except (Conflict, InvalidRequest):
            return
        self._held = held

    def _step_down(self, *, resign: bool = False) -> None:
        """Lead no more; what is not saved is repeated, by whoever leads next."""
        lead, self._lead = self._lead, None
        self._reader.drop()
        try:
            if lead is not None and resign:
                self._save(lead)
                why = None if self.error is None else str(self.error).removeprefix(f"{self._name!r} ")
                self._store.resign(lead, why, self._stopped_before)
        except (LeaseLost, StoreUnavailable) as error:
            tell(logging.WARNING, "follower_left", subscription=self._name, reason=str(error))
        finally:
            self._let_go()

    def _let_go(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            held.close()

    def _beat(self) -> float:
        """Say that the lead is still held; find out if it is not."""
        lead = self._lead
        self._reader.attend()
        if lead is not None:
            try:
                kept = self._store.keep(lead, self._lease)
                if self._held is not None:
                    self._check_held()
                self._left.extend(self._lease)
            except StoreUnavailable:
                kept = self._held is None
            if not kept and self._lead is lead:
                self._interrupt.set()
        return self.follow.lease / BEATS

    # ── reading on ───────────────────────────────────────────────────────────────────────────────────────────────

    def _go_on(self, lead: Lead) -> float:
        if self._interrupt.is_set():
            raise Cancelled
        if self._paused and not self._may_go_on(lead):
            return self._poll
        with UNDISTURBED:  # the last ones go when these have come: on balance, nothing was made
            self._ahead = ahead = self._reader.read_on(self._position, self._limit, self._interests)
        probe("read")
        if ahead.pruned > self._position:
            raise UnsafeStore(
                f"{self._name!r} stands at {self._position:,}, and everything up to {ahead.pruned:,} was pruned: "
                f"replay that from the lake, and `postbus subscriptions rewind {self._name} --to ID`"
            )
        self._newest = 0 if ahead.more else ahead.reached
        if ahead.events and not self._handle_all(lead, ahead):
            return self._poll
        self._done(ahead.reached, 0)
        self._limit = self._next_limit(ahead)
        busy = ahead.more or bool(ahead.events)
        pause = self._save_if_due(lead, idle=not busy)
        if time.monotonic() >= self._look_behind:
            self._look_behind = time.monotonic() + LOOK_BEHIND
            if self._may_go_on(lead):
                self._handle_left(lead)
        return 0.0 if busy else pause

    def _next_limit(self, ahead: Ahead) -> int:
        """Return how many events to look at next: more where few are wanted, fewer where they are large."""
        if ahead.more and ahead.looked < self._limit:
            return min(2 * ahead.looked, self.follow.batch_size)
        sparse = ahead.more and len(ahead.events) * SPARSE < self._limit
        return min(2 * self._limit, MOST_READ) if sparse else self.follow.batch_size

    def _may_go_on(self, lead: Lead) -> bool:
        """Return whether to go on; raise LeaseLost where another leads, or somebody rewound."""
        paused = self._store.is_paused(lead)
        if paused and not self._paused:
            self._save(lead)
        self._paused = paused
        return not paused

    def _handle_all(self, lead: Lead, ahead: Ahead) -> bool:
        """Handle what was read; False if it was paused meanwhile."""
        events, start = ahead.events, 0
        look = time.monotonic() + LOOK_BEHIND
        plain = not ahead.damaged
        while start < len(events):
            if self._interrupt.is_set():
                raise Cancelled
            if time.monotonic() > look:
                look = time.monotonic() + LOOK_BEHIND
                if not self._may_go_on(lead):
                    return False
            size = 1 if self._suspects or not plain else self.follow.batch or 1
            group = events[start : start + size]
            start += len(group)
            self._handle(lead, group, ahead)
        return True

    def _handle(self, lead: Lead, group: Sequence[Event], ahead: Ahead) -> None:
        """Bring a group to its end: done, dead or parked."""
        last = group[-1].id
        if self._left.keys:
            parked = [each for each in group if each.key in self._left.keys]
            if parked:
                self._handle_beside(lead, group, parked, ahead)
                return
        errors = self._doomed(lead, group[0], ahead)
        if errors is None:
            if self._suspects:
                self._store.announce(lead, last)
            errors = self._attempt(lead, group, last)
        if errors is None:
            if figures.listener is not None:
                figures.listener.settled(self._name, Done, len(group))
            if self._handler.transactional:
                self._saved_at(last)
            else:
                self._done(last, len(group))
                self._save_if_due(lead)
        elif len(group) > 1:
            for each in group:
                self._handle(lead, [each], ahead)
        else:
            self._give_up(lead, group[0], errors, self._took)

    def _handle_beside(self, lead: Lead, group: Sequence[Event], parked: Sequence[Event], ahead: Ahead) -> None:
        """Handle what no dead letter of its key stands before; leave the rest for later."""
        wait = {each.id for each in parked}
        for each in group:
            if each.id in wait:
                self._move(lead, each.id, parked=[each])
                self._left.add(each)
            else:
                self._handle(lead, [each], ahead)

    def _doomed(self, lead: Lead, event: Event, ahead: Ahead) -> list[AttemptError] | None:
        """Return why an event is not to be tried at all, if so."""
        if event.id in ahead.damaged:
            return [AttemptError("UnsafeStore", ahead.damaged[event.id], 1, self._worker_id, self._store.now())]
        if event.id != lead.tried or self._crashes <= self._allowed(event):
            return None
        told = f"{self._crashes} processes in a row ended without a word while this event was the next"
        return [AttemptError("ProcessEnded", told, self._crashes, self._worker_id, self._store.now())]

    def _allowed(self, event: Event) -> int:
        return self.follow.retry.max_retries if event.max_retries is None else event.max_retries

    def _attempt(self, lead: Lead, group: Sequence[Event], last: int) -> list[AttemptError] | None:
        """Have a group handled, again while its policy allows; return the error of each attempt if all failed.

        A group of several that fails is not tried again as one: its events come singly then.
        """
        errors: list[AttemptError] = []
        while True:
            attempt, began = len(errors) + 1, time.perf_counter()
            try:
                self._run(lead, group, last, attempt)
            except (LeaseLost, StoreUnavailable):
                raise
            except Exception as raised:  # noqa: BLE001  the handler's own, or its transaction's
                self._took = (time.perf_counter() - began) * 1000
                error, delivery = cause(raised), self._delivery(lead, group[0], attempt)
                errors.append(replace(describe(error, delivery, self._handler.name), at=self._store.now()))
                own = group[0].max_retries if len(group) == 1 else 0
                outcome = after(error, errors[-1], self.follow.retry, len(errors), own, chance=self._chance)
                if isinstance(outcome, Dead):
                    tell_failed(delivery, errors[-1], self._handler, self.follow.on_error)
                    return errors
                tell_failed(delivery, errors[-1], self._handler, "retry")
                if figures.listener is not None:
                    figures.listener.settled(self._name, Retry)
                if self._interrupt.wait(outcome.after.total_seconds()):
                    raise Cancelled from None
            else:
                return None

    def _run(self, lead: Lead, group: Sequence[Event], last: int, attempt: int) -> None:
        wanted = self._handler.wants_context or is_watched()
        delivery = self._delivery(lead, group[0], attempt) if wanted else None
        if not self._handler.transactional:
            self.call(group, delivery)
            probe("handled")
            return
        with self._in_doubt(), self._store.transaction() as tx:
            self.call(group, delivery, tx=tx)
            probe("handled")
            tx.move(Step(self._name, lead.epoch, last, self._worker_id))
            probe("checkpointing")

    def _watched(self, group: Sequence[Event], delivery: Delivery | None) -> AbstractContextManager[None]:
        """Return what tells of the handler while it runs, to whoever wants to know."""
        if delivery is None or not is_watched():
            return UNWATCHED
        return Handling(group, self._name, delivery.attempt, self._handler.name)

    def call(
        self,
        group: Sequence[Event],
        delivery: Delivery | None,
        *,
        tx: Transaction | None = None,
        redelivered: bool = False,
    ) -> None:
        """Call the handler, with a context if it wants one and there is a delivery to tell of, and wait for it.

        Raises HandlerFailed for whatever it raises, and Cancelled for that.
        """
        try:
            with self._watched(group, delivery):
                self._call(group, delivery, tx, redelivered=redelivered)
        except CANCELLED:
            raise Cancelled from None
        except BaseException as error:
            end_child(self._process, error)
            raise HandlerFailed(error) from error
        end_child(self._process)

    def _call(
        self, group: Sequence[Event], delivery: Delivery | None, tx: Transaction | None, *, redelivered: bool
    ) -> None:
        if delivery is not None and self._handler.wants_context:
            context = Context(delivery, handler_log(delivery), self._still_leads, redelivered)
            result = self.follow.call(group, context) if tx is None else self.follow.call(group, ctx=context, tx=tx)
        else:
            result = self.follow.call(group) if tx is None else self.follow.call(group, tx=tx)
        if self._handler.is_async:
            self._await(result)

    def _await(self, coroutine: Any) -> None:
        if self._loop is not None:
            if self._loop.is_closed():
                coroutine.close()
                raise asyncio.CancelledError
            asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()
            return
        if self._runner is None:
            self._runner = asyncio.Runner()
        self._runner.run(coroutine, context=copy_context())  # else it would know nothing of the span at hand

    def _still_leads(self, _: Delivery) -> None:
        if self._interrupt.is_set():
            raise LeaseLost(f"another has taken over {self._name!r}")

    def _delivery(self, lead: Lead, event: Event, attempt: int) -> Delivery:
        lease = Lease(event.id, self._name, lead.epoch)
        return Delivery(event, lease, attempt, self.follow.retry, self._worker_id, event.created_at)

    def _give_up(self, lead: Lead, event: Event, errors: Sequence[AttemptError], ms: float) -> None:
        if self.follow.on_error == "stop":
            self._stopped_before = event.id
            times = f"{len(errors)} attempt{'s' if len(errors) > 1 else ''}"
            raise MaxRetriesExceeded(
                f"{self._name!r} stopped before event {event.id} ({event.type}) after {times}: "
                f"{errors[-1].type}: {errors[-1].message}"
            )
        self._move(lead, event.id, buried=[Burial(event, errors, ms)])
        if figures.listener is not None:
            figures.listener.settled(self._name, Dead)
        if self.follow.on_error == "park_key" and event.key is not None:
            self._left.add(event)

    # ── the checkpoint ───────────────────────────────────────────────────────────────────────────────────────────

    def _done(self, position: int, count: int) -> None:
        if position > self._position:
            if self._position == self._saved:
                self._unsaved_since = time.monotonic()
            self._position = position
            self._unsaved += count

    def _save_if_due(self, lead: Lead, *, idle: bool = False) -> float:
        """Save the checkpoint when it is time; return how long to wait if there is nothing else to do."""
        mode = self.follow.checkpoint
        if self._position > self._saved:
            left = mode.max_delay - (time.monotonic() - self._unsaved_since)
            if self._unsaved >= mode.size or self._suspects or left <= 0 or (idle and not self._unsaved):
                self._save(lead)
            elif idle:
                return min(left, self._poll)
        return self._poll

    def _save(self, lead: Lead) -> None:
        if self._position > self._saved:
            probe("checkpointing")
            self._move(lead, self._position)

    def _move(self, lead: Lead, position: int, *, buried: Sequence[Burial] = (), parked: Sequence[Event] = ()) -> None:
        caught_up = position == self._newest
        with self._in_doubt() if buried or parked else nullcontext():
            self._store.move(Step(self._name, lead.epoch, position, self._worker_id, buried, parked, caught_up))
        self._saved_at(position)

    @contextmanager
    def _in_doubt(self) -> Generator[None]:
        """Have the position read anew where nobody knows whether a move past what is now done or dead was stored.

        Going on from the one in memory would do it twice. Leading anew waits for the end of a commit under way.
        """
        try:
            yield
        except StoreUnavailable:
            self._lead = None
            raise

    def _saved_at(self, position: int) -> None:
        self._position = self._saved = position
        self._unsaved = self._crashes = 0
        self._suspects = max(0, self._suspects - 1)

    # ── what was left behind ─────────────────────────────────────────────────────────────────────────────────────

    def _handle_left(self, lead: Lead) -> None:
        """Handle what operators retry, and what it stood before."""
        while (delivery := self._left.next()) is not None:
            self._save(lead)
            self._left.settle(delivery, self)
            if self._interrupt.is_set():
                raise Cancelled
