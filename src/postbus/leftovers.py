"""What a follower has left behind: dead letters that are retried, and events parked behind a dead one of their key."""

import random
import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Final, Protocol

from postbus import figures
from postbus.errors import LeaseLost, StoreUnavailable
from postbus.execution import after, describe, tell_failed
from postbus.follow import Follow
from postbus.model import Dead, Delivery, Done, Event, Retry, State
from postbus.store.contract import Claim, Log, Settled, Settlement, Transaction

__all__ = ["Cancelled", "HandlerFailed", "Leftovers", "cause"]

LOOK_AGAIN: Final = 1.0
Standing = Sequence[tuple[int, str | None, State]]


class Cancelled(BaseException):
    """What was being done is to stop: the handler was cancelled, or the follower is to stop, or was deposed."""


class HandlerFailed(Exception):  # noqa: N818  said of the handler
    """The handler raised `error`: not to be mistaken for what the store has to say."""

    def __init__(self, error: BaseException) -> None:
        """Keep what was raised."""
        super().__init__(repr(error))
        self.error = error


def cause(raised: Exception) -> BaseException:
    """Return what made an attempt fail."""
    return raised.error if isinstance(raised, HandlerFailed) else raised


class _Caller(Protocol):
    def call(
        self, group: Sequence[Event], delivery: Delivery, *, tx: Transaction | None = None, redelivered: bool = False
    ) -> None:
        """Call the handler, and wait for it."""
        ...


class Leftovers:
    """Runs them one at a time, between positions, as deliveries like any other: claimed, settled, retried, dead.

    Of a key, only the first that is left may be due; the others are parked, and the next is freed when it is done.
    """

    def __init__(self, store: Log, follow: Follow, worker_id: str, owner: str) -> None:
        """Look after what one follower left; only whoever leads does so."""
        self._store = store
        self._follow = follow
        self._worker_id = worker_id
        self._claim = Claim(follow.name, worker_id, owner, lease=timedelta(seconds=follow.lease), policy=follow.retry)
        self._running: Delivery | None = None
        self._chance = random.Random()  # noqa: S311  jitter needs no secrecy
        self._looked = 0.0
        self.keys: dict[str, deque[int]] = {}
        """By key: the events left of it, in order. While there are any, later ones of it must wait."""

    def load(self) -> None:
        """See what is left, and free the first of each key if it is parked: what stood before it is gone."""
        self._looked = time.monotonic()
        self.keys, free = self._waiting(self._store.standing(self._follow.name))
        if free:
            self._store.unpark(self._follow.name, free, self._worker_id)

    def may_go_on(self) -> bool:
        """Return whether anything is left that is not dead, nor parked behind what is: as of one moment."""
        standing = self._store.standing(self._follow.name)
        return any(state in (State.PENDING, State.LEASED) for *_, state in standing) or bool(self._waiting(standing)[1])

    def _waiting(self, standing: Standing) -> tuple[dict[str, deque[int]], list[int]]:
        """Return what must wait, by key, and what nothing stands before although it is parked.

        Where dead letters hold up nobody, that is what was parked while they did, and may come now in its order.
        """
        if self._follow.on_error != "park_key":
            parked = {key for _, key, state in standing if state is State.PARKED}
            standing = [each for each in standing if each[1] in parked and each[2] is not State.DEAD]
        return _by_key(standing)

    def add(self, event: Event) -> None:
        """Have what follows of an event's key wait for it."""
        if event.key is not None:
            self.keys.setdefault(event.key, deque()).append(event.id)

    def next(self) -> Delivery | None:
        """Claim what is due of what is left."""
        if self.keys and time.monotonic() - self._looked > LOOK_AGAIN:
            self.load()
        return next(iter(self._store.claim(self._claim).deliveries), None)

    def extend(self, lease: timedelta) -> None:
        """Keep the lease on what is running."""
        running = self._running
        if running is not None:
            self._store.extend([running.lease], lease)

    def settle(self, delivery: Delivery, caller: _Caller) -> None:
        """Have a delivery handled, and record how it went."""
        self._running = delivery
        try:
            ended = self._handled(delivery, caller)
        finally:
            self._running = None
        if ended:
            self._free_next(delivery.event)

    def _handled(self, delivery: Delivery, caller: _Caller) -> bool:
        """Return whether it is done."""
        began = time.perf_counter()
        try:
            if self._follow.handler.transactional:
                with self._store.transaction() as tx:
                    caller.call([delivery.event], delivery, tx=tx, redelivered=True)
                    done = Settlement(delivery.lease, Done(), self._worker_id, execution_time_ms=_since(began))
                    _require(tx.settle(done), delivery)
            else:
                caller.call([delivery.event], delivery, redelivered=True)
                done = Settlement(delivery.lease, Done(), self._worker_id, execution_time_ms=_since(began))
                if self._store.settle([done])[0] is Settled.LOST:
                    return False
        except StoreUnavailable:
            raise
        except Cancelled:
            self._store.release([delivery.lease], self._worker_id, timedelta(seconds=LOOK_AGAIN))
            return False
        except LeaseLost:
            return False
        except Exception as raised:  # noqa: BLE001  the handler's own, or its transaction's
            outcome = self._outcome(delivery, cause(raised))
            self._store.settle([Settlement(delivery.lease, outcome, self._worker_id, execution_time_ms=_since(began))])
            if figures.listener is not None:
                figures.listener.settled(delivery.subscription, outcome)
            return False
        if figures.listener is not None:
            figures.listener.settled(delivery.subscription, Done)
        return True

    def _outcome(self, delivery: Delivery, error: BaseException) -> Retry | Dead:
        told = describe(error, delivery, self._follow.handler.name)
        outcome = after(error, told, self._follow.retry, delivery.attempt, delivery.max_retries, chance=self._chance)
        tell_failed(delivery, told, self._follow.handler, "dead" if isinstance(outcome, Dead) else "retry")
        return outcome

    def _free_next(self, event: Event) -> None:
        """Let the next of a key go, now that one is done."""
        waiting = self.keys.get(event.key) if event.key is not None else None
        if waiting is None:
            return
        if event.id in waiting:
            waiting.remove(event.id)
        if waiting:
            self._store.unpark(self._follow.name, [waiting[0]], self._worker_id)
        else:
            del self.keys[str(event.key)]


def _by_key(standing: Standing) -> tuple[dict[str, deque[int]], list[int]]:
    """Return what is left by key, and what nothing stands before although it is parked."""
    keys: dict[str, deque[int]] = {}
    free: list[int] = []
    for event_id, key, state in standing:
        if state is State.PARKED and key not in keys:
            free.append(event_id)
        if key is not None:
            keys.setdefault(key, deque()).append(event_id)
    return keys, free


def _require(settled: Settled, delivery: Delivery) -> None:
    if settled is not Settled.APPLIED:
        raise LeaseLost(f"the lease on event {delivery.id} has passed to another")


def _since(began: float) -> float:
    return (time.perf_counter() - began) * 1000
