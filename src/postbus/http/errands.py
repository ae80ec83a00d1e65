"""Threads that ask the store on behalf of an event loop: what arrives together is asked together."""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Final, Generic, TypeVar

from postbus.errors import InvalidRequest, NotFound
from postbus.observe import tell

__all__ = ["MOST", "Hand", "Lane"]

A = TypeVar("A")
R = TypeVar("R")
Batch = list[tuple[A, asyncio.Future[R]]]
"""What is asked, and who waits for the answer."""
MOST: Final = 500
"""How much is asked in one go."""


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


class Lane(Generic[A, R]):
    """Asks the store for many at once, in a thread of its own; whatever comes meanwhile goes together next."""

    def __init__(self, name: str, run: Callable[[list[A]], Sequence[R | Exception]]) -> None:
        """Bring what is asked to `run`, which answers each in order, with an error if it is to be raised."""
        self._run = run
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
        if batch:
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
