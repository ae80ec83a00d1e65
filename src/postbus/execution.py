"""Running an event through its handlers, and turning what they did into an outcome. No threads, no loops."""

import asyncio
import concurrent.futures
import contextlib
import inspect
import logging
import os
import random
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, MutableMapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final, NamedTuple, NoReturn, Protocol, TypeVar

from postbus import figures
from postbus.breaker import Breaker, BreakerState
from postbus.errors import (
    Discard,
    EventBusShutdownError,
    InvalidRequest,
    LeaseLost,
    PostbusError,
    RetryLater,
    StoreUnavailable,
)
from postbus.handlers import PLAIN, Handler, Handlers, Match
from postbus.model import AttemptError, Dead, Delivery, Done, DoneWithErrors, Lease, Outcome, Retry, decide
from postbus.observe import logger, probe, tell
from postbus.retry import RetryPolicy
from postbus.store import log_of
from postbus.store.contract import Queue, Settled, Settlement, Transaction
from postbus.tracing import Handling, is_watched

__all__ = [
    "CANCELLED",
    "Context",
    "Execution",
    "Ownership",
    "Report",
    "Run",
    "describe",
    "end_child",
    "handler_log",
    "tell_failed",
]

R = TypeVar("R")
CANCELLED: Final = (asyncio.CancelledError, concurrent.futures.CancelledError)
TRACEBACK_LIMIT: Final = 4_000
MESSAGE_LIMIT: Final = 2_000
INPUT: Final = re.compile(r", input_value=(?:.*, input_type=.*\]|(?s:.{0,500}?), input_type=.*\]|.*)")
"""What pydantic quotes in the text of a ValidationError: on one line, over several, or cut off."""
MISFITS: Final = re.compile(r"(?<!\d)(\d{1,9}) validation errors? for (?:.{0,500}?(?:\n|\\n))?")
"""How the text of a ValidationError begins. In the text of a KeyError the line breaks are escaped."""
KIND: Final = re.compile(
    rf" \[type=([^\],\n]{{0,200}})(?:\]|{INPUT.pattern})(\n[ |]*For further information visit \S*)?"
)
"""What follows each location and message: type, perhaps the input, and a link if the message is pydantic's own."""
LOCATION: Final = re.compile(r"\n?(?: *\| )?[^ \n].*(?=\n)")
DONE: Final = Done()
UNWATCHED: Final = contextlib.nullcontext()


class Report(NamedTuple):
    """How a delivery fared.

    No outcome means it is handed back: cancelled, or its breaker is open. `Settled` means that its end is recorded
    already, in the transaction of its handlers, or that this was refused.
    """

    delivery: Delivery
    outcome: Outcome | Settled | None
    execution_time_ms: float


@dataclass(frozen=True, slots=True)
class Context:
    """What a handler may ask about its own run."""

    delivery: Delivery
    log: logging.LoggerAdapter[logging.Logger]
    _extend: Callable[[Delivery], None]
    redelivered: bool = False
    """Whether an ordered subscriber gets it out of its order: it was a dead letter, or parked behind one."""

    @property
    def attempt(self) -> int:
        """Which attempt this is; the first is 1."""
        return self.delivery.attempt

    @property
    def epoch(self) -> int:
        """The fencing number: hand it to outside systems that can refuse an older one."""
        return self.delivery.epoch

    @property
    def worker_id(self) -> str:
        """Who runs the handler."""
        return self.delivery.worker_id

    def extend(self) -> None:
        """Let the lease run on from now, as workers do by themselves; raise LeaseLost if it has passed."""
        self._extend(self.delivery)


class _HandlerLog(logging.LoggerAdapter[logging.Logger]):
    """Adds what the delivery is to whatever a handler logs, beside the handler's own `extra`."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Return the message as it is, with both sets of fields."""
        return msg, {**kwargs, "extra": {**(self.extra or {}), **(kwargs.get("extra") or {})}}


def handler_log(delivery: Delivery) -> logging.LoggerAdapter[logging.Logger]:
    """Return where a handler logs what it does with a delivery."""
    fields = {"event_id": delivery.id, "subscription": delivery.subscription, "attempt": delivery.attempt}
    return _HandlerLog(logger.getChild("handler"), fields)


class Run:
    """One delivery's way through its handlers: where it is, and what was recorded so far."""

    __slots__ = ("_block", "began", "delivery", "handlers", "index", "is_async", "outside", "recorded", "tx", "waited")

    def __init__(self, delivery: Delivery, match: Match) -> None:
        """Begin before the first handler."""
        self.delivery = delivery
        self.handlers, self.is_async, self.outside = match
        self.index = 0
        self.recorded: list[AttemptError] = []
        self.began = 0.0
        self.waited = 0.0
        self.tx: Transaction | None = None
        self._block: AbstractContextManager[Transaction] | None = None

    @property
    def handler(self) -> Handler:
        """The handler it is at."""
        return self.handlers[self.index]

    def report(self, outcome: Outcome | Settled | None) -> Report:
        """Return how it fared."""
        probe("handled")
        return Report(self.delivery, outcome, (time.perf_counter() - self.began) * 1000)

    # A transaction is not left by a `with`: the thread that entered it may hang in a handler, and another end it.

    def enter(self, store: Queue) -> Transaction:
        """Open the transaction of its handlers, when its turn has come."""
        asked = time.perf_counter()
        self._block = log_of(store, "a transaction").transaction()
        self.tx = self._block.__enter__()
        self.waited = (time.perf_counter() - asked) * 1000
        return self.tx

    def commit(self) -> None:
        """Make the transaction durable; whatever this raises, nothing of it is there or ever will be known to be."""
        block, self._block, self.tx = self._block, None, None
        if block is not None:
            block.__exit__(None, None, None)

    def roll_back(self) -> None:
        """Undo the transaction, if there is one."""
        block, self._block, self.tx = self._block, None, None
        if block is not None:
            undone = _Undone()
            with contextlib.suppress(PostbusError):  # it is undone by the store itself, then
                block.__exit__(_Undone, undone, None)


class _Undone(Exception):  # noqa: N818  no error: what ends a block that is to be rolled back
    """Raised into a transaction's block to roll it back."""


class Ownership(Protocol):
    """Tells whether a run is still the asking thread's own, and is told when its handler is being called."""

    def __call__(self, run: Run, *, calling: bool) -> bool:
        """Return whether to go on."""
        ...


@dataclass
class Execution:
    """Runs deliveries through this process's handlers."""

    store: Queue
    handlers: Handlers
    policy: RetryPolicy
    lease: timedelta
    chance: random.Random
    process: int = field(default_factory=os.getpid)
    left_behind: set[threading.Thread] = field(default_factory=set[threading.Thread])
    """Threads whose plain handler, beside async ones, did not return in time."""
    breakers: dict[str, BreakerState] = field(default_factory=dict[str, BreakerState])
    """How the breakers stood when last seen: refreshed at every claim, moved on by every failure."""
    probes: set[Lease] = field(default_factory=set[Lease])
    """The leases of deliveries that are half-open probes."""
    settled: set[Lease] = field(default_factory=set[Lease])
    """The leases that are settled, or are being so, and still held: they are gone, and not lost."""
    lost: set[Lease] = field(default_factory=set[Lease])
    """The leases that are known to have passed to another: what has not begun under one of them does not."""

    def begin(self, delivery: Delivery) -> Run:
        """Return a run that stands before the delivery's first handler."""
        if figures.listener is not None:
            figures.listener.claimed(delivery)
        return Run(delivery, self.handlers.match(delivery.subscription, delivery.event))

    def run(self, run: Run, is_mine: Ownership) -> Report | None:
        """Go through the handlers, all of them plain functions, one after another; the transactional ones last.

        `is_mine` is asked before and after each: once it says no, somebody else has reported on this run, and
        nothing more is done or told. Never raises: whatever a handler raises is its outcome.
        """
        if (unwanted := self._start(run, is_async=False)) is not None:
            return unwanted
        while run.index < run.outside:
            if self._is_blocked(run):
                return run.report(None)
            if not is_mine(run, calling=True):
                return None
            error = self._try(run)
            if not is_mine(run, calling=False):
                return None
            if (ended := self.went(run, error)) is not None:
                return ended
        return self.finished(run) if run.index == len(run.handlers) else self._run_inside(run, is_mine)

    async def run_async(self, run: Run) -> Report | None:
        """Go through the handlers, awaiting those that are coroutines; plain ones among them get a thread.

        None means that the transactional ones are left: they are for `run`.
        """
        if (unwanted := self._start(run, is_async=True)) is not None:
            return unwanted
        while run.index < run.outside:
            if self._is_blocked(run):
                return run.report(None)
            error = await self._try_async(run)
            end_child(self.process, error)
            if (ended := self.went(run, error)) is not None:
                return ended
        if run.index == len(run.handlers):
            return self.finished(run)
        run.is_async = False
        return None

    # ── transactional handlers ───────────────────────────────────────────────────────────────────────────────────

    def _run_inside(self, run: Run, is_mine: Ownership) -> Report | None:
        """Go through the transactional handlers in one transaction, and settle in it: all is stored, or nothing.

        Their time counts from when the transaction is open. If `is_mine` says no after a handler, somebody else has
        rolled back; if before one, none is to begin any more.
        """
        try:
            run.enter(self.store)
        except Exception as error:  # noqa: BLE001  told; the event is not to blame for its store
            return self._unknown(run, error)
        while run.index < len(run.handlers):
            if self._is_blocked(run) or not is_mine(run, calling=True):
                return self.went(run, asyncio.CancelledError())
            error = self._try(run)
            if not is_mine(run, calling=False):
                return None
            if error is not None:
                return self.went(run, error)
            run.index += 1
        return self._commit(run)

    def _commit(self, run: Run) -> Report | None:
        report, lease = self.finished(run), run.delivery.lease
        try:
            self._settle_inside(run, report)
            # From here on the delivery is gone as soon as the commit is through: a heartbeat must not call it lost.
            self.settled.add(lease)
            probe("settling")
            run.commit()
        except LeaseLost:
            run.roll_back()
            return report._replace(outcome=Settled.LOST)
        except (StoreUnavailable, EventBusShutdownError) as error:
            self.settled.discard(lease)
            return self._unknown(run, error)
        except Exception as error:  # noqa: BLE001  their writes break a rule checked at the commit: an attempt that failed
            self.settled.discard(lease)
            run.index -= 1
            return self.went(run, error)
        probe("settled")
        if figures.listener is not None and report.outcome is not None and not isinstance(report.outcome, Settled):
            figures.listener.settled(lease.subscription, report.outcome)
        for handler in run.handlers[run.outside :]:
            self._worked(handler)
        return report._replace(outcome=Settled.APPLIED)

    @staticmethod
    def _settle_inside(run: Run, report: Report) -> None:
        """Settle in the run's transaction; raise LeaseLost unless that is what ends the delivery."""
        delivery, took = run.delivery, report.execution_time_ms - run.waited
        if run.tx is None or report.outcome is None or isinstance(report.outcome, Settled):
            raise AssertionError("there is nothing to settle, or no transaction to settle it in")
        told = Settlement(delivery.lease, report.outcome, delivery.worker_id, execution_time_ms=took)
        if run.tx.settle(told) is not Settled.APPLIED:
            raise LeaseLost(f"the lease on event {delivery.id} in {delivery.subscription!r} has passed to another")

    @staticmethod
    def _unknown(run: Run, error: Exception) -> Report:
        """Hand the delivery back, for the store failed and not the handlers.

        If the commit went through after all, the epoch has passed and the release changes nothing; if not, the event
        is due again with no attempt burnt. To record a failure instead would count the store's faults against the
        event, to wait for the lease's end would only be slower.
        """
        run.roll_back()
        delivery = run.delivery
        tell(
            logging.WARNING,
            "transaction_failed",
            event_id=delivery.id,
            subscription=delivery.subscription,
            attempt=delivery.attempt,
            reason=str(error),
        )
        return run.report(None)

    # ── one handler ──────────────────────────────────────────────────────────────────────────────────────────────

    def _start(self, run: Run, *, is_async: bool) -> Report | None:
        """Let a run's time count from now, with the handlers there are now.

        Return the report on one that ends before it begins: its lease is lost, or its handlers want another lane.
        """
        if not run.began:
            run.began = time.perf_counter()
            if self.lost and run.delivery.lease in self.lost:
                return run.report(Settled.LOST)
            run.handlers, run.is_async, run.outside = self.handlers.match(run.delivery.subscription, run.delivery.event)
        return None if is_async or not run.is_async else run.report(None)

    def went(self, run: Run, error: BaseException | None) -> Report | None:
        """Take note of how the present handler went, and step to the next; return the report if the run ends here.

        A failure undoes the run's transaction first: what is recorded of it is stored in another.
        """
        if error is None:
            self._worked(run.handler)
            run.index += 1
            return None
        run.roll_back()
        if isinstance(error, CANCELLED):
            return run.report(None)
        if (outcome := self._failed(run, error)) is not None:
            return run.report(outcome)
        run.index += 1
        return None

    @staticmethod
    def finished(run: Run) -> Report:
        """Return the report on a run whose handlers have all been gone through; without any, it is handed back."""
        if not run.handlers:
            return run.report(None)
        return run.report(DoneWithErrors(tuple(run.recorded)) if run.recorded else DONE)

    def _try(self, run: Run) -> BaseException | None:
        try:
            with self._watched(run):
                result = self._call(run)
            error = _never_awaited(run.handler, result) if inspect.isawaitable(result) else None
        except BaseException as raised:  # noqa: BLE001  even SystemExit is only a failed attempt: the worker lives on
            error = raised
        end_child(self.process, error)
        return error

    async def _try_async(self, run: Run) -> BaseException | None:
        handler = run.handler
        try:
            async with asyncio.timeout(handler.timeout):
                if handler.is_async:
                    with self._watched(run):
                        await self._call(run)
                    return None
                return await in_thread(lambda: self._try(run), self.left_behind)
        except TimeoutError as error:
            return error if error.args else overdue(handler)
        except CANCELLED as error:
            _uncancel()
            return error
        except BaseException as error:  # noqa: BLE001  even SystemExit is only a failed attempt: the worker lives on
            return error

    @staticmethod
    def _watched(run: Run) -> AbstractContextManager[None]:
        """Return what tells of a handler while it runs, to whoever wants to know."""
        if not is_watched():
            return UNWATCHED
        delivery = run.delivery
        return Handling((delivery.event,), delivery.subscription, delivery.attempt, run.handler.name)

    def _call(self, run: Run) -> Any:
        handler, delivery = run.handler, run.delivery
        event = delivery.event if handler.model is None else handler.prepared(delivery.event)
        if handler.transactional:
            named = {"ctx": self._context(delivery, _kept)} if handler.wants_context else {}
            return handler.function(event, tx=run.tx, **named)
        if handler.wants_context:
            return handler.function(event, self._context(delivery, self.extend))
        return handler.function(event)

    @staticmethod
    def _context(delivery: Delivery, extend: Callable[[Delivery], None]) -> Context:
        return Context(delivery, handler_log(delivery), extend)

    def extend(self, delivery: Delivery) -> None:
        """Let a lease run on; raise LeaseLost if it has passed."""
        if self.store.extend([delivery.lease], self.lease):
            raise LeaseLost(f"the lease on event {delivery.id} in {delivery.subscription!r} has passed to another")

    # ── failure ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _failed(self, run: Run, error: BaseException) -> Outcome | None:
        """Return how the delivery ends by this failure; None when the failure is only to be recorded."""
        handler, delivery = run.handler, run.delivery
        told = describe(error, delivery, handler.name)
        self._move_breaker(handler, lambda breaker, state: breaker.failed(state, self.store.now()))
        if handler.on_error == "record":
            run.recorded.append(told)
            tell_failed(delivery, told, handler, "recorded")
            return None
        outcome = self.decide(delivery, told, error, handler)
        after = outcome.after if isinstance(outcome, Retry) else None
        tell_failed(delivery, told, handler, "retry" if after is not None else "dead", after)
        return outcome

    def broke(self, run: Run, error: BaseException) -> Report:
        """Return the report on a run that ended by an error not its handler's: a failed attempt, told with its trace.

        Without one, the heartbeat would keep its lease as long as this process lives.
        """
        delivery = run.delivery
        with contextlib.suppress(Exception):  # nobody commits what is left open
            run.roll_back()
        with contextlib.suppress(Exception):  # a filter of the log's may be what broke it
            tell(logging.ERROR, "run_broke", error=error, event_id=delivery.id, subscription=delivery.subscription)
        return run.report(self.decide(delivery, describe(error, delivery), error, None))

    def decide(
        self, delivery: Delivery, told: AttemptError, error: BaseException, handler: Handler | None
    ) -> Retry | Dead:
        """Return whether a failed attempt is followed by another, and when."""
        policy = delivery.retry.giving_way_to(handler.retry if handler else None)
        return after(error, told, policy, delivery.attempt, delivery.event.max_retries, chance=self.chance)

    # ── breakers ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _is_blocked(self, run: Run) -> bool:
        """Return whether an open breaker forbids going on now; a probe is always let through."""
        handler = run.handler
        if handler.breaker is None or run.delivery.lease in self.probes:
            return False
        return self.breakers.get(handler.breaker_name, BreakerState()).opened_at is not None

    def _worked(self, handler: Handler) -> None:
        if handler.breaker is not None and self.breakers.get(handler.breaker_name) != BreakerState():
            self._move_breaker(handler, lambda breaker, _: breaker.succeeded())

    def _move_breaker(self, handler: Handler, move: Callable[[Breaker, BreakerState], BreakerState]) -> None:
        breaker = handler.breaker
        if breaker is None:
            return
        try:
            state = self.store.change_breaker(handler.breaker_name, lambda state: move(breaker, state))
        except PostbusError as error:
            # The delivery's own outcome matters more; the next failure or success moves the breaker again.
            tell(logging.WARNING, "breaker_unmoved", breaker=handler.breaker_name, reason=str(error))
        else:
            self.breakers[handler.breaker_name] = state


def _kept(_: Delivery) -> NoReturn:
    raise InvalidRequest(
        "in a transactional handler the worker keeps the lease, and the commit is refused if it is lost"
    )


def _never_awaited(handler: Handler, result: Any) -> TypeError:
    if inspect.iscoroutine(result):
        result.close()
    return TypeError(f"{handler.name} returned something to await: register an async function")


def _uncancel() -> None:
    """Take the cancellation of one handler back from the task that goes on with the next."""
    task = asyncio.current_task()
    while task is not None and task.cancelling():
        task.uncancel()


def end_child(process: int, error: BaseException | None = None) -> None:
    """End this process if a handler of `process` forked it and it came back out of the handler.

    It has a copy of all that waits in its parent and would run it again; the parent alone goes on, and settles.
    """
    if os.getpid() == process:
        return
    code = 0
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    elif error is not None:
        traceback.print_exception(error)
        code = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, or nobody reads it
            stream.flush()
    os._exit(code)


async def in_thread(call: Callable[[], R], left_behind: set[threading.Thread]) -> R:
    """Run `call` in a thread of its own: one that hangs is left behind and noted, and no pool runs dry of it."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[R] = loop.create_future()

    def tell(result: R) -> None:
        if not future.done():
            future.set_result(result)

    def work() -> None:
        result = call()
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(tell, result)

    thread = threading.Thread(target=work, name="postbus-mixed", daemon=True)
    thread.start()
    try:
        return await future
    except asyncio.CancelledError:
        left_behind.add(thread)
        raise


def tell_failed(
    delivery: Delivery, told: AttemptError, handler: Handler, then: str, after: timedelta | None = None
) -> None:
    """Log a failed attempt, and what follows it."""
    tell(
        logging.WARNING,
        "attempt_failed",
        event_id=delivery.id,
        event_type=delivery.event.type,
        subscription=delivery.subscription,
        handler=handler.name,
        attempt=delivery.attempt,
        worker_id=delivery.worker_id,
        traceparent=delivery.event.metadata.get("traceparent"),
        error_type=told.type,
        error_message=told.message,
        then=then,
        retry_in=None if after is None else after.total_seconds(),
    )


def overdue(handler: Handler) -> TimeoutError:
    """Return the error of a handler that did not return in time."""
    return TimeoutError(f"{handler.name} did not return within {handler.timeout} s")


def describe(error: BaseException | str, delivery: Delivery, handler: str | None = None) -> AttemptError:
    """Return what is kept of an error: its type, message and the tail of its traceback, made safe to store.

    Values that pydantic quotes are left out, wherever in a chain or a group of errors: they are parts of the payload.
    When it was is told by the store, as it records it.
    """
    if isinstance(error, str):
        kind, message, trace = "Error", error, None
    else:
        kind, message, trace = type(error).__name__, _message(error), clean(_trace(error))[-TRACEBACK_LIMIT:]
    return AttemptError(
        type=kind,
        message=clean(message)[:MESSAGE_LIMIT],
        attempt=delivery.attempt,
        worker_id=delivery.worker_id,
        traceback=trace,
        handler=handler,
    )


def _message(error: BaseException) -> str:
    try:
        return str(error) or type(error).__name__
    except Exception:  # noqa: BLE001  a handler's exception may be broken itself
        return f"{type(error).__name__} (its message cannot be shown)"


def _trace(error: BaseException) -> str:
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None and _is_ours(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next  # what a reader wants begins in the handler
    try:
        return "".join(traceback.format_exception(type(error), error, frames))
    except Exception:  # noqa: BLE001  a handler's exception may be broken itself
        return "".join(traceback.format_tb(error.__traceback__))


def _is_ours(file: str) -> bool:
    return os.path.dirname(file) == os.path.dirname(__file__)  # noqa: PTH120  a text is all that is wanted


def after(
    raised: BaseException,
    told: AttemptError,
    policy: RetryPolicy,
    attempt: int,
    own: int | None,
    *,
    chance: random.Random,
) -> Retry | Dead:
    """Return what a handler's exception leads to: `Discard` and `RetryLater` have a say in that."""
    delay = raised.delay if isinstance(raised, RetryLater) else None
    return decide(policy, told, attempt, own, chance, final=isinstance(raised, Discard), delay=delay)


def clean(text: str) -> str:
    """Return text that every store can keep, and that quotes no payload: no NUL, no lone surrogates."""
    text = _unquoted(text)
    return INPUT.sub("]", text).replace("\0", "\N{SYMBOL FOR NULL}").encode(errors="backslashreplace").decode()


def _unquoted(text: str) -> str:
    """Return text without those messages of a ValidationError, anywhere in it, that may quote a value."""
    begins = [*MISFITS.finditer(text)]
    if not begins:
        return text
    kept = [text[: begins[0].start()]]
    for begin, end in zip(begins, [*(each.start() for each in begins[1:]), len(text)], strict=True):
        kept.append(begin[0])
        at = begin.end()
        kinds = [*KIND.finditer(text, at, end)]
        for kind in kinds:
            told = text[at : kind.start()]
            if kind[1] not in PLAIN or not kind[2]:
                place = LOCATION.match(told)
                told = place[0] if place else ""
            kept += [told, kind[0]]
            at = kind.end()
        # Cut off in the midst of a message, the text goes on behind its paragraph, if at all.
        rest = text[at:end]
        kept.append(rest if len(kinds) >= int(begin[1]) else "".join(rest.partition("\n\n")[1:]))
    return "".join(kept)
