"""What asks the store on behalf of an event loop: a thread, or the loop itself where that is quick."""

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Final, Generic, TypeVar

from postbus.errors import InvalidRequest, NotFound
from postbus.observe import tell
from postbus.store.contract import Store, WouldWait

__all__ = ["MOST", "Hand", "Haste", "Lane"]

A = TypeVar("A")
R = TypeVar("R")
Batch = list[tuple[A, asyncio.Future[R]]]
"""What is asked, and who waits for the answer."""
MOST: Final = 500
"""How much is asked in one go."""
BRISK: Final = 0.002
"""Seconds that the event loop may be kept: about what a commit takes on a disk that is not slow."""
SHARE: Final = 0.05
"""How much of the loop's time may go to what took longer …"""
OVER: Final = 1.0
"""… over so many seconds: a disk that is slow now and then is not a slow one."""


class Hand:
    """A thread that does what it is given, one thing after the other. A pool of one would take twice the time."""

    def __init__(self, name: str) -> None:
        """Begin with nothing to do."""
        self._name = name
        self._given: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"postbus-{name}", daemon=True)
        self._thread.start()

    def give(self, work: Callable[[], None]) -> None:
        """Have it done next."""
        self._given.put(work)

    def _work(self) -> None:
        while (work := self._given.get()) is not None:
            try:
                work()
            except Exception as error:  # noqa: BLE001  whoever comes next is served all the same
                tell(logging.ERROR, "http_failed", error=error, hand=self._name)

    def close(self) -> None:
        """Do what is left, and no more."""
        self._given.put(None)
        self._thread.join()


class Haste:
    """Does in the event loop what a thread would only make slower: as long as that is quick, and waits for nobody."""

    def __init__(self, store: Store) -> None:
        """Ask of a store."""
        self._store = store
        self._rested = -math.inf
        """When what took longer will be its share of the time since."""

    def at_once(self, work: Callable[[], R]) -> tuple[R] | None:
        """Return what `work` does, or nothing if it is to be done in a thread: then nothing has been done yet."""
        began = time.monotonic()
        if began + OVER < self._rested:
            return None
        try:
            with self._store.hurried():
                return (work(),)
        except WouldWait:
            return None
        finally:
            if (took := time.monotonic() - began) > BRISK:  # the disk is slow, now or always
                self._rested = max(self._rested, began) + took / SHARE


class Lane(Generic[A, R]):
    """Asks the store for many at once, in a thread of its own; whatever comes meanwhile goes together next."""

    def __init__(
        self,
        name: str,
        run: Callable[[list[A]], Sequence[R | Exception]],
        haste: Haste,
        is_small: Callable[[A], bool] = lambda _: True,
    ) -> None:
        """Bring what is asked to `run`, which answers each in order, with an error if it is to be raised."""
        self._run = run
        self._haste = haste
        self._is_small = is_small
        self._hand = Hand(name)
        self._waiting: deque[tuple[A, asyncio.Future[R]]] = deque()
        self._busy = False
        """Whether something is being done, and so whoever asks has to wait."""

    async def ask(self, item: A) -> R:
        """Return the answer for one."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[R] = loop.create_future()
        self._waiting.append((item, future))
        if not self._busy:
            self._busy = True
            loop.call_soon(self._start, loop)  # not at once: others may be about to ask
        return await future

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        batch = [self._waiting.popleft() for _ in range(min(MOST, len(self._waiting)))]
        self._busy = bool(batch)
        if not batch:
            return
        lone = len(batch) == 1 and self._is_small(batch[0][0])
        if lone and (done := self._haste.at_once(lambda: self._answers([batch[0][0]]))) is not None:
            self._finish(loop, batch, *done)
        else:
            self._hand.give(partial(self._bring, loop, batch))

    def _bring(self, loop: asyncio.AbstractEventLoop, batch: Batch[A, R]) -> None:
        loop.call_soon_threadsafe(self._finish, loop, batch, self._answers([item for item, _ in batch]))

    def _answers(self, items: list[A]) -> Sequence[R | Exception]:
        """Return an answer for each; one that is wrong in itself must not harm its neighbours, so each is asked alone.

        Not so where the store is away: what was asked may have happened all the same.
        """
        try:
            return self._run(items)
        except (InvalidRequest, NotFound) as error:
            if len(items) == 1:
                return [error]
            return [self._answers([item])[0] for item in items]
        except WouldWait:
            raise
        except Exception as error:  # noqa: BLE001  raised in the coroutine that asked
            return [error] * len(items)

    def _finish(
        self,
        loop: asyncio.AbstractEventLoop,
        batch: Batch[A, R],
        answers: Sequence[R | Exception],
    ) -> None:
        for (_, future), answer in zip(batch, answers, strict=True):
            if future.cancelled():
                continue
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)
        self._start(loop)

    @property
    def busy(self) -> bool:
        """Whether somebody waits for an answer."""
        return self._busy

    def close(self) -> None:
        """Take no more."""
        self._hand.close()
