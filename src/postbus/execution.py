"""Running an event through its handlers, and turning what they did into an outcome. No threads, no loops."""

import asyncio
import concurrent.futures
import logging
import random
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

from postbus.breaker import Breaker, BreakerState
from postbus.errors import Discard, LeaseLost, RetryLater
from postbus.handlers import Handler, Handlers
from postbus.model import AttemptError, Dead, Delivery, Done, DoneWithErrors, Lease, Outcome, Retry
from postbus.observe import logger, probe
from postbus.retry import RetryPolicy
from postbus.store.contract import Store

__all__ = ["Context", "Execution", "Report"]

CANCELLED: Final = (asyncio.CancelledError, concurrent.futures.CancelledError)
TRACEBACK_LIMIT: Final = 4_000
MESSAGE_LIMIT: Final = 2_000
DONE: Final = Done()


@dataclass(frozen=True, slots=True)
class Report:
    """How a delivery fared. No outcome means it is handed back: cancelled, or its breaker is open."""

    delivery: Delivery
    outcome: Outcome | None
    execution_time_ms: float


@dataclass(frozen=True, slots=True)
class Context:
    """What a handler may ask about its own run."""

    delivery: Delivery
    log: logging.LoggerAdapter[logging.Logger]
    _extend: Callable[[Delivery], None]

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


@dataclass
class Execution:
    """Runs deliveries. `deadline` is told when each handler must be done, so that a watcher can step in."""

    store: Store
    handlers: Handlers
    policy: RetryPolicy
    lease: timedelta
    chance: random.Random
    breakers: dict[str, BreakerState] = field(default_factory=dict[str, BreakerState])
    """How the breakers stood when last seen: refreshed at every claim, moved on by every failure."""
    probes: set[Lease] = field(default_factory=set[Lease])
    """The leases of deliveries that are half-open probes."""
    policies: dict[str, RetryPolicy] = field(default_factory=dict[str, RetryPolicy])
    """The retry policies that subscriptions have of their own."""

    def is_async(self, delivery: Delivery) -> bool:
        """Return whether any handler of it must be awaited."""
        return any(each.is_async for each in self.handlers.matching(delivery.subscription, delivery.event))

    def run(self, delivery: Delivery, deadline: Callable[[Handler | None], None]) -> Report:
        """Run the handlers, all of them plain functions, one after another."""
        began = time.perf_counter()
        recorded: list[AttemptError] = []
        for handler in self.handlers.matching(delivery.subscription, delivery.event):
            if self._is_blocked(handler, delivery):
                return self._report(delivery, None, began)
            deadline(handler)
            try:
                self._call(handler, delivery)
            except CANCELLED:
                return self._report(delivery, None, began)
            except Exception as error:  # noqa: BLE001  whatever a handler raises is its outcome
                if ended := self._failed(handler, delivery, error, recorded):
                    return self._report(delivery, ended, began)
            else:
                self._worked(handler)
        return self._report(delivery, _finished(recorded), began)

    async def run_async(self, delivery: Delivery, threads: concurrent.futures.Executor) -> Report:
        """Run the handlers, awaiting those that are coroutines; plain ones among them go to a thread."""
        began = time.perf_counter()
        recorded: list[AttemptError] = []
        for handler in self.handlers.matching(delivery.subscription, delivery.event):
            if self._is_blocked(handler, delivery):
                return self._report(delivery, None, began)
            try:
                async with asyncio.timeout(handler.timeout):
                    if handler.is_async:
                        await self._call(handler, delivery)
                    else:
                        await asyncio.get_running_loop().run_in_executor(threads, self._call, handler, delivery)
            except CANCELLED:
                self._uncancel()
                return self._report(delivery, None, began)
            except TimeoutError as error:
                named = error if error.args else overdue(handler)
                if ended := self._failed(handler, delivery, named, recorded):
                    return self._report(delivery, ended, began)
            except Exception as error:  # noqa: BLE001  whatever a handler raises is its outcome
                if ended := self._failed(handler, delivery, error, recorded):
                    return self._report(delivery, ended, began)
            else:
                self._worked(handler)
        return self._report(delivery, _finished(recorded), began)

    def timed_out(self, handler: Handler, delivery: Delivery, seconds: float) -> Report:
        """Return the report on a delivery whose plain handler did not return in time and was left behind."""
        ended = self._failed(handler, delivery, overdue(handler), recorded := [])
        return Report(delivery, ended or _finished(recorded), seconds * 1000)

    @staticmethod
    def _uncancel() -> None:
        task = asyncio.current_task()
        while task is not None and task.cancelling():
            task.uncancel()

    def _report(self, delivery: Delivery, outcome: Outcome | None, began: float) -> Report:
        probe("handled")
        return Report(delivery, outcome, (time.perf_counter() - began) * 1000)

    def _call(self, handler: Handler, delivery: Delivery) -> Any:
        event = delivery.event if handler.model is None else handler.prepared(delivery.event)
        if handler.wants_context:
            return handler.function(event, self._context(delivery))
        return handler.function(event)

    def _context(self, delivery: Delivery) -> Context:
        fields = {"event_id": delivery.id, "subscription": delivery.subscription, "attempt": delivery.attempt}
        return Context(delivery, logging.LoggerAdapter(logger.getChild("handler"), fields), self.extend)

    def extend(self, delivery: Delivery) -> None:
        """Let a lease run on; raise LeaseLost if it has passed."""
        if self.store.extend([delivery.lease], self.lease):
            raise LeaseLost(f"the lease on event {delivery.id} in {delivery.subscription!r} has passed to another")

    # ── failure ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _failed(
        self, handler: Handler, delivery: Delivery, error: Exception, recorded: list[AttemptError]
    ) -> Outcome | None:
        """Return how the delivery ends by this failure; None when the failure is only to be recorded."""
        told = self._describe(handler, delivery, error)
        self._move_breaker(handler, lambda breaker, state: breaker.failed(state, self.store.now()))
        if handler.on_error == "record":
            recorded.append(told)
            self._log_failure(handler, delivery, told, "recorded", None)
            return None
        outcome = self.decide(delivery, told, error, handler)
        after = outcome.after if isinstance(outcome, Retry) else None
        self._log_failure(handler, delivery, told, "retry" if after is not None else "dead", after)
        return outcome

    def decide(self, delivery: Delivery, told: AttemptError, error: Exception, handler: Handler | None) -> Retry | Dead:
        """Return whether a failed attempt is followed by another, and when."""
        policy = self.policies.get(delivery.subscription, self.policy).merged(handler.retry if handler else None)
        event = delivery.event
        allowed = policy.max_retries if event.max_retries is None else event.max_retries
        if isinstance(error, Discard) or delivery.attempt > allowed:
            return Dead(told)
        if isinstance(error, RetryLater):
            return Retry(error.delay, told)
        return Retry(policy.delay(delivery.attempt + 1, self.chance), told)

    def _describe(self, handler: Handler, delivery: Delivery, error: Exception) -> AttemptError:
        return describe(error, delivery, self.store, handler.name)

    @staticmethod
    def _log_failure(
        handler: Handler, delivery: Delivery, told: AttemptError, then: str, after: timedelta | None
    ) -> None:
        logger.warning(
            "attempt_failed",
            extra={
                "event_id": delivery.id,
                "event_type": delivery.event.type,
                "subscription": delivery.subscription,
                "handler": handler.name,
                "attempt": delivery.attempt,
                "worker_id": delivery.worker_id,
                "error_type": told.type,
                "error_message": told.message,
                "then": then,
                "retry_in": None if after is None else after.total_seconds(),
            },
        )

    # ── breakers ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _is_blocked(self, handler: Handler, delivery: Delivery) -> bool:
        """Return whether an open breaker forbids running it now; a probe is always let through."""
        if handler.breaker is None or delivery.lease in self.probes:
            return False
        return self.breakers.get(handler.breaker_name, BreakerState()).opened_at is not None

    def _worked(self, handler: Handler) -> None:
        if handler.breaker is not None and self.breakers.get(handler.breaker_name) != BreakerState():
            self._move_breaker(handler, lambda breaker, _: breaker.succeeded())

    def _move_breaker(self, handler: Handler, move: Callable[[Breaker, BreakerState], BreakerState]) -> None:
        breaker = handler.breaker
        if breaker is not None:
            state = self.store.change_breaker(handler.breaker_name, lambda state: move(breaker, state))
            self.breakers[handler.breaker_name] = state


def _finished(recorded: list[AttemptError]) -> Done | DoneWithErrors:
    return DoneWithErrors(tuple(recorded)) if recorded else DONE


def overdue(handler: Handler) -> TimeoutError:
    """Return the error of a handler that did not return in time."""
    return TimeoutError(f"{handler.name} did not return within {handler.timeout} s")


def describe(error: BaseException | str, delivery: Delivery, store: Store, handler: str | None = None) -> AttemptError:
    """Return what is kept of an error: its type, message and the tail of its traceback, made safe to store."""
    if isinstance(error, str):
        kind, message, trace = "Error", error, None
    else:
        kind, message = type(error).__name__, str(error) or type(error).__name__
        trace = "".join(traceback.format_exception(error))[-TRACEBACK_LIMIT:]
    return AttemptError(
        type=kind,
        message=clean(message)[:MESSAGE_LIMIT],
        attempt=delivery.attempt,
        worker_id=delivery.worker_id,
        at=store.now(),
        traceback=None if trace is None else clean(trace),
        handler=handler,
    )


def clean(text: str) -> str:
    """Return text that every store can keep: no NUL, no lone surrogates."""
    return text.replace("\0", "\N{SYMBOL FOR NULL}").encode(errors="backslashreplace").decode()
