"""Where handlers run: plain functions on threads, coroutines on an event loop."""

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from postbus.execution import Execution, Report
from postbus.handlers import Handler
from postbus.model import Delivery

__all__ = ["AsyncLane", "ThreadLane"]

WATCH_EVERY: Final = 0.05
Chunk = deque[Delivery]


class _Seat:
    """One thread's present work, so that a watcher can see that it is overdue and take its place away."""

    __slots__ = ("began", "chunk", "deadline", "delivery", "handler", "lock")

    def __init__(self) -> None:
        self.chunk: Chunk = deque()
        self.delivery: Delivery | None = None
        self.handler: Handler | None = None
        self.deadline = float("inf")
        self.began = 0.0
        self.lock = threading.Lock()

    def watch(self, handler: Handler | None) -> None:
        """Note which handler runs now and until when it may."""
        self.handler = handler
        timeout = None if handler is None else handler.timeout
        self.deadline = float("inf") if timeout is None else time.monotonic() + timeout

    def begin(self, delivery: Delivery) -> None:
        self.began = time.monotonic()
        self.delivery = delivery

    def end(self) -> bool:
        """Return whether the work was still this thread's own; False when a watcher has reported it overdue."""
        with self.lock:
            mine = self.delivery is not None
            self.delivery = None
            self.deadline = float("inf")
        return mine


class ThreadLane:
    """Runs plain handlers on `size` threads. One that hangs past its timeout is left behind and replaced."""

    def __init__(self, execution: Execution, size: int, report: Callable[[Report], None]) -> None:
        """Prepare; threads are started with the first work."""
        self._execution = execution
        self._size = size
        self._report = report
        self._chunks: queue.SimpleQueue[Chunk | None] = queue.SimpleQueue()
        self._seats: list[_Seat] = []
        self._lock = threading.Lock()
        self.hung: set[threading.Thread] = set()

    def submit(self, deliveries: Sequence[Delivery], chunk: int) -> None:
        """Run deliveries, handed to threads `chunk` at a time."""
        with self._lock:
            while len(self._seats) < min(self._size, len(deliveries) + len(self._seats)):
                self._seat()
        for start in range(0, len(deliveries), chunk):
            self._chunks.put(deque(deliveries[start : start + chunk]))

    def take_back(self) -> list[Delivery]:
        """Return what was submitted and not begun; it will not run."""
        left: list[Delivery] = []
        while True:
            try:
                left += self._chunks.get_nowait() or ()
            except queue.Empty:
                break
        for seat in tuple(self._seats):
            while seat.chunk:
                try:
                    left.append(seat.chunk.pop())
                except IndexError:
                    break
        return left

    def watch(self) -> None:
        """Give up on handlers that are overdue: report them, and seat another thread in place of theirs."""
        now = time.monotonic()
        for seat in tuple(self._seats):
            if now >= seat.deadline:
                self._give_up(seat, now)
        self.hung = {thread for thread in self.hung if thread.is_alive()}

    def stop(self) -> None:
        """Let every thread end after its present work."""
        for _ in range(len(self._seats)):
            self._chunks.put(None)

    def _give_up(self, seat: _Seat, now: float) -> None:
        with seat.lock:
            delivery, handler = seat.delivery, seat.handler
            if delivery is None or handler is None or now < seat.deadline:
                return
            seat.delivery = None
            seat.deadline = float("inf")
        self._report(self._execution.timed_out(handler, delivery, now - seat.began))
        with self._lock:
            self._seats.remove(seat)
            self._seat()
        if seat.chunk:
            self._chunks.put(seat.chunk)

    def _seat(self) -> None:
        seat = _Seat()
        self._seats.append(seat)
        threading.Thread(target=self._work, args=(seat,), name="postbus-handler", daemon=True).start()

    def _work(self, seat: _Seat) -> None:
        while (chunk := self._chunks.get()) is not None:
            seat.chunk = chunk
            while chunk:
                try:
                    delivery = chunk.popleft()
                except IndexError:
                    break
                seat.begin(delivery)
                report = self._execution.run(delivery, seat.watch)
                if not seat.end():
                    return
                self._report(report)


class AsyncLane:
    """Runs coroutine handlers, `size` at a time, on the given event loop or on one of its own."""

    def __init__(
        self,
        execution: Execution,
        size: int,
        report: Callable[[Report], None],
        loop: asyncio.AbstractEventLoop | None,
    ) -> None:
        """Prepare; runners are started with the first work."""
        self._execution = execution
        self._size = size
        self._report = report
        self._given = loop
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: deque[Delivery] = deque()
        self._runners: set[asyncio.Task[None]] = set()
        self._threads = ThreadPoolExecutor(max_workers=size, thread_name_prefix="postbus-mixed")

    def submit(self, deliveries: Sequence[Delivery], chunk: int) -> None:
        """Run deliveries; `chunk` is of no use here, since handing over costs nothing."""
        del chunk
        self._waiting.extend(deliveries)
        self._running().call_soon_threadsafe(self._spawn)

    def take_back(self) -> list[Delivery]:
        """Return what was submitted and not begun; it will not run."""
        left: list[Delivery] = []
        while self._waiting:
            try:
                left.append(self._waiting.popleft())
            except IndexError:
                break
        return left

    def cancel(self) -> None:
        """Cancel the handlers that still run; their leases are given back."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(lambda: [runner.cancel() for runner in tuple(self._runners)])

    def stop(self) -> None:
        """End the lane's own event loop."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._loop is not None and self._given is None:
            self._loop.call_soon_threadsafe(self._loop.stop)

    def _running(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = self._given or asyncio.new_event_loop()
            if self._given is None:
                threading.Thread(target=self._serve, args=(self._loop,), name="postbus-async", daemon=True).start()
        return self._loop

    @staticmethod
    def _serve(loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
        finally:
            loop.close()

    def _spawn(self) -> None:
        """Have as many runners as there is work for, up to the limit; each ends when nothing waits."""
        while len(self._runners) < min(self._size, len(self._runners) + len(self._waiting)):
            runner = asyncio.get_running_loop().create_task(self._run())
            self._runners.add(runner)
            runner.add_done_callback(self._runners.discard)

    async def _run(self) -> None:
        # One task runs many deliveries: a task for each would cost more than a short handler does.
        while self._waiting:
            try:
                delivery = self._waiting.popleft()
            except IndexError:
                break
            self._report(await self._execution.run_async(delivery, self._threads))
