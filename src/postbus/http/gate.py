"""Between many coroutines and the store, which blocks: what is asked at the same time is asked in one go.

Nothing here holds a thread while it waits. Three threads in all bring requests to the store (one publishes, one claims,
one reports); a few more read. What comes alone goes to its thread as well: that costs a request less than 5 %.
"""

import asyncio
import logging
import math
import threading
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, ParamSpec, TypeVar

from postbus import figures
from postbus.errors import NotFound, PostbusError
from postbus.http.buffers import Buffers
from postbus.http.errands import MOST, Hand, Lane
from postbus.loop import Loop
from postbus.model import Action, Dead, Delivery, Done, DoneWithErrors, Event, LogEntry, Outcome, Retry, Status
from postbus.observe import tell
from postbus.payload import Draft
from postbus.store.contract import Claim, Claimed, Log, Report, Reported, Watch

__all__ = ["Gate"]

R = TypeVar("R")
P = ParamSpec("P")
Gone = Callable[[], Coroutine[Any, Any, None]]
"""Returns when whoever asked has hung up."""
READERS: Final = 8
LOOK_EVERY: Final = 1.0
LOOK_AGAIN: Final = 0.01


class Waiting:
    """A request that waits for deliveries."""

    def __init__(self, claim: Claim, until: float) -> None:
        """Wait until that moment of the loop's clock."""
        self.claim = claim
        self.until = until
        self.looked = False
        """Whether the store was asked at least once."""
        self.future: asyncio.Future[Claimed] = asyncio.get_running_loop().create_future()


class _Attention:
    """A watch that is looked at only while somebody wants to know: else each publish would wake a thread for nobody.

    What changed meanwhile is told to the next who does.
    """

    def __init__(self, watch: Watch, wanted: threading.Event) -> None:
        self._watch = watch
        self._wanted = wanted

    def wait(self, timeout: float) -> bool:
        self._wanted.wait()
        return self._watch.wait(timeout)

    def wake(self) -> None:
        self._wanted.set()
        self._watch.wake()


class Gate:
    """What the routes ask the store through. Opened on the event loop that serves them."""

    def __init__(self, store: Log) -> None:
        """Work on a store that is open."""
        self.store = store
        self._publishing = Lane[list[Draft], list[Event]]("publish", self._publish)
        self._reporting = Lane[Report, Reported]("report", store.report)
        self._claiming = Hand("claim")
        self._readers = ThreadPoolExecutor(READERS, "postbus-read")
        self._rooms: defaultdict[Any, deque[Waiting]] = defaultdict(deque)
        self._stirred: set[Any] = set()
        self._looking = False
        self._rung: asyncio.Future[None] | None = None
        self._wanted = threading.Event()
        self.streams = Buffers()
        self.rings = 0
        """How often something may have changed."""
        self._draining = False
        self.leaving = False
        """Whether it is about to be."""

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[None]:
        """Be woken by the store until the end of the block."""
        loop = asyncio.get_running_loop()
        watch = self.store.watch()

        def turn() -> float:
            self._wanted.clear()
            self.rings += 1
            if self._rooms or self._rung is not None:  # looked at last: whoever comes from now on sets it again
                self._wanted.set()
                loop.call_soon_threadsafe(self._ring)
            return LOOK_EVERY

        waking = Loop("http", turn, _Attention(watch, self._wanted))
        waking.start()
        try:
            yield
        finally:
            self.drain()
            await asyncio.to_thread(waking.stop, 5)
            watch.close()
            while self._looking or self._publishing.busy or self._reporting.busy:  # noqa: ASYNC110  for a moment, once
                await asyncio.sleep(LOOK_AGAIN)
            for part in (self._publishing, self._reporting, self._claiming):
                await asyncio.to_thread(part.close)
            await asyncio.to_thread(self._readers.shutdown)

    def drain(self) -> None:
        """Let nobody wait any longer: the server is about to end."""
        self._draining = self.leaving = True
        self.rings += 1
        self._ring()
        for room in self._rooms.values():
            for each in room:
                if not each.future.done():
                    each.future.set_result(Claimed())

    @property
    def draining(self) -> bool:
        """Whether the server is about to end."""
        return self._draining

    def leave(self) -> None:
        """Serve on for a while, and tell whoever asks that others should be sent elsewhere."""
        self.leaving = True

    async def read(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call something that blocks, in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, partial(function, *args, **kwargs))

    # ── publishing and reporting ─────────────────────────────────────────────────────────────────────────────────

    async def publish(self, drafts: list[Draft]) -> list[Event]:
        """Store events, all or none, in one transaction with what others publish now."""
        stored = await self._publishing.ask(drafts)
        if figures.listener is not None:
            figures.listener.published(len(stored))
        return stored

    def _publish(self, batches: list[list[Draft]]) -> list[list[Event]]:
        stored = self.store.publish([draft for batch in batches for draft in batch])
        events = iter(stored)
        return [[next(events) for _ in batch] for batch in batches]

    async def report(self, report: Report) -> Reported:
        """Record how an attempt ended; raise LeaseLost or NotFound."""
        reported = await self._reporting.ask(report)
        if figures.listener is not None and not reported.repeated:
            figures.listener.settled(reported.entry.subscription, _outcome(reported.entry))
        return reported

    # ── claiming ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def claim(self, claim: Claim, wait: float, gone: Gone) -> Claimed:
        """Lease what is due, or within `wait` seconds falls due; nothing once `gone` returns: then nobody wants it."""
        loop = asyncio.get_running_loop()
        waiting = Waiting(claim, loop.time() + (0 if self._draining else wait))
        key = claim.subscription, claim.interests
        self._rooms[key].append(waiting)
        self._stir({key})
        there = False
        try:
            there = await (self._answered(waiting, gone) if wait > 0 else self._answered_now(waiting, gone))
            return waiting.future.result() if there else Claimed()
        finally:
            if not there:
                self._take_back(waiting)

    async def _answered(self, waiting: Waiting, gone: Gone) -> bool:
        """Wait for an answer, and return whether somebody is still there to take it."""
        self._wanted.set()
        leaving = asyncio.ensure_future(gone())
        timer = asyncio.get_running_loop().call_at(waiting.until, self._give_up, waiting)
        try:
            await asyncio.wait({leaving, waiting.future}, return_when=asyncio.FIRST_COMPLETED)
            return not leaving.done()
        finally:
            timer.cancel()
            leaving.cancel()

    @staticmethod
    async def _answered_now(waiting: Waiting, gone: Gone) -> bool:
        """Do the same for one who waits for nothing but the store: asked at the end only, which takes no task."""
        await waiting.future
        asking = gone()
        try:
            asking.send(None)
        except StopIteration:
            return False
        asking.close()
        return True

    @staticmethod
    def _give_up(waiting: Waiting) -> None:
        if waiting.looked and not waiting.future.done():
            waiting.future.set_result(Claimed())

    def _stir(self, keys: set[Any]) -> None:
        self._stirred |= keys
        if not self._looking and self._stirred:
            self._looking = True
            asyncio.get_running_loop().call_soon(self._look)

    def _look(self) -> None:
        """Claim for those who wait, those who came first before the others."""
        asked: list[tuple[Any, Waiting]] = []
        stirred, self._stirred = self._stirred, set[Any]()
        for key in stirred:
            room = self._still_waiting(key)
            asked += [(key, each) for place, each in enumerate(room) if place < MOST or not each.looked]
        self._looking = bool(asked)
        claims = [each.claim for _, each in asked]
        if asked:
            self._claiming.give(partial(self._claim_all, asyncio.get_running_loop(), asked, claims))

    def _still_waiting(self, key: Any) -> deque[Waiting]:
        """Return who waits for one thing; whoever has his answer, or has left, is forgotten."""
        room = deque(each for each in self._rooms.pop(key, ()) if not each.future.done())
        if room:
            self._rooms[key] = room
        return room

    def _claim_all(
        self,
        loop: asyncio.AbstractEventLoop,
        asked: list[tuple[Any, Waiting]],
        claims: list[Claim],
    ) -> None:
        loop.call_soon_threadsafe(self._hand_out, asked, self._claimed(claims))

    def _claimed(self, claims: list[Claim]) -> list[Claimed | Exception]:
        try:
            return list(self.store.claim_all(claims))
        except NotFound as error:
            return [error] if len(claims) == 1 else [self._claimed([claim])[0] for claim in claims]
        except Exception as error:  # noqa: BLE001  raised in the coroutine that asked
            return [error] * len(claims)

    def _hand_out(self, asked: list[tuple[Any, Waiting]], answers: Sequence[Claimed | Exception]) -> None:
        now = asyncio.get_running_loop().time()
        soonest = math.inf
        for (_, waiting), answer in zip(asked, answers, strict=True):
            waiting.looked = True
            if isinstance(answer, Exception):
                if not waiting.future.done():
                    waiting.future.set_exception(answer)
            elif answer.deliveries and waiting.future.done():
                self._give_back(waiting.claim, answer.deliveries)
            elif not waiting.future.done() and (answer.deliveries or waiting.until <= now):
                waiting.future.set_result(answer)
            elif answer.next_due is not None:
                soonest = min(soonest, (answer.next_due - datetime.now(UTC)).total_seconds())
        for key in {key for key, _ in asked}:
            self._still_waiting(key)
        if soonest < LOOK_EVERY:
            asyncio.get_running_loop().call_later(max(soonest, 0.001), self._stir_all)
        self._looking = False
        self._stir(set())

    def _take_back(self, waiting: Waiting) -> None:
        """Let nobody have what one who has left would have got."""
        future = waiting.future
        if not (future.cancel() or future.cancelled() or future.exception()):
            self._give_back(waiting.claim, future.result().deliveries)

    def _give_back(self, claim: Claim, deliveries: Sequence[Delivery]) -> None:
        """Hand back what nobody is there any more to take."""
        if deliveries:
            self._claiming.give(partial(self._release, claim, deliveries))

    def _release(self, claim: Claim, deliveries: Sequence[Delivery]) -> None:
        try:
            self.store.release([each.lease for each in deliveries], claim.worker_id)
        except PostbusError as error:  # then they come again after their lease
            tell(logging.WARNING, "http_not_given_back", worker_id=claim.worker_id, reason=str(error))

    def _stir_all(self) -> None:
        self._stir(set(self._rooms))

    # ── being woken ──────────────────────────────────────────────────────────────────────────────────────────────

    def _ring(self) -> None:
        rung, self._rung = self._rung, None
        if rung is not None and not rung.done():
            rung.set_result(None)
        self._stir_all()

    async def rung(self, since: int, timeout: float) -> None:  # noqa: ASYNC109  an end to waiting, not an error
        """Return when there were more `rings` than `since`, or after `timeout` seconds."""
        if self._rung is None:
            self._rung = asyncio.get_running_loop().create_future()
        self._wanted.set()
        if self.rings <= since:  # looked at last: from now on a ring finds the one who waits
            await asyncio.wait({self._rung}, timeout=timeout)


def _outcome(entry: LogEntry) -> type[Outcome]:
    """Return how an attempt ended, by the row that records it."""
    if entry.action is Action.FAILED:
        return Retry if entry.status is Status.PENDING else Dead
    return Done if entry.action is Action.COMPLETED else DoneWithErrors
