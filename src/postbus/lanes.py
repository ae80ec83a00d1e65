"""Where handlers run: plain functions on threads, coroutines on an event loop."""

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from postbus.execution import Execution, Report, Run, overdue
from postbus.model import Delivery

__all__ = ["AsyncLane", "ThreadLane"]

WATCH_EVERY: Final = 0.05
Chunk = deque[Run]


class _Seat:
    """One thread's present work, so that a watcher can see that it is overdue and take it away."""

    __slots__ = ("calling", "chunk", "closed", "deadline", "lock", "run", "thread")

    def __init__(self) -> None:
        self.chunk: Chunk = deque()
        self.run: Run | None = None
        self.deadline = float("inf")
        self.calling = False
        self.closed = False
        self.lock = threading.Lock()
        self.thread: threading.Thread | None = None

    def holds(self, run: Run, *, calling: bool) -> bool:
        """Return whether the run is still this thread's own; only while `calling` its handler does time count."""
        with self.lock:
            if self.run is not run or (calling and self.closed and run.tx is not None):
                return False
            self.calling = calling
            timeout = run.handler.timeout if calling else None
            self.deadline = float("inf") if timeout is None else time.monotonic() + timeout
            return True

    def take_away(self, now: float) -> Run | None:
        """Return the run if its handler is overdue: from then on it is the caller's, not the thread's."""
        with self.lock:
            return None if now < self.deadline else self._vacate()

    def close(self) -> Run | None:
        """Let no transactional handler begin; return the run of one being called: it is the caller's from then on."""
        with self.lock:
            self.closed = True
            inside = self.calling and self.run is not None and self.run.tx is not None
            return self._vacate() if inside else None

    def leave(self) -> None:
        """Note that nothing runs."""
        with self.lock:
            self._vacate()

    def _vacate(self) -> Run | None:
        run, self.run = self.run, None
        self.deadline = float("inf")
        self.calling = False
        return run


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

    def submit(self, runs: Sequence[Run], chunk: int) -> None:
        """Take runs to their end, handed to threads `chunk` at a time."""
        with self._lock:
            while len(self._seats) < min(self._size, len(runs) + len(self._seats)):
                self._seat()
        for start in range(0, len(runs), chunk):
            self._chunks.put(deque(runs[start : start + chunk]))

    def take_back(self) -> list[Delivery]:
        """Return what was submitted and not begun; it will not run."""
        left: list[Run] = []
        with suppress(queue.Empty):
            while True:
                left += self._chunks.get_nowait() or ()
        for seat in tuple(self._seats):
            with suppress(IndexError):
                while True:
                    left.append(seat.chunk.pop())
        return [run.delivery for run in left]

    def watch(self) -> None:
        """Give up on handlers that are overdue: report them, and seat another thread in place of theirs."""
        now = time.monotonic()
        for seat in tuple(self._seats):
            if now >= seat.deadline and (run := seat.take_away(now)) is not None:
                self._replace(seat)
                self._go_on(run, overdue(run.handler))
        self.hung = {thread for thread in self.hung if thread.is_alive()}

    def cancel(self) -> None:
        """Undo the transactions whose handlers still run, and give their leases back: others wait for their lock."""
        for seat in tuple(self._seats):
            if (run := seat.close()) is not None:
                self._go_on(run, asyncio.CancelledError())

    def stop(self) -> None:
        """Let every thread end after its present work."""
        for _ in range(len(self._seats)):
            self._chunks.put(None)

    def _replace(self, seat: _Seat) -> None:
        """Leave a thread that hangs behind, and give what it had before it to another."""
        with self._lock:
            self._seats.remove(seat)
            self._seat()
        if seat.thread is not None:
            self.hung.add(seat.thread)
        if seat.chunk:
            self._chunks.put(seat.chunk)

    def _go_on(self, run: Run, error: BaseException) -> None:
        """Report a run taken away from its thread, or go on with its next handler if the error is only recorded."""
        report = self._execution.went(run, error)
        if report is not None:
            self._report(report)
        elif run.index < len(run.handlers):
            self._chunks.put(deque([run]))
        else:
            self._report(self._execution.finished(run))

    def _seat(self) -> None:
        seat = _Seat()
        seat.thread = threading.Thread(target=self._work, args=(seat,), name="postbus-handler", daemon=True)
        self._seats.append(seat)
        seat.thread.start()

    def _work(self, seat: _Seat) -> None:
        while (chunk := self._chunks.get()) is not None:
            seat.chunk = chunk
            while chunk:
                try:
                    seat.run = run = chunk.popleft()
                except IndexError:
                    break
                report = self._execution.run(run, seat.holds)
                if report is None:
                    return
                seat.leave()
                self._report(report)


class AsyncLane:
    """Runs coroutine handlers, `size` at a time, on the given event loop or on one of its own."""

    def __init__(
        self,
        execution: Execution,
        size: int,
        report: Callable[[Report], None],
        go_on: Callable[[Run], None],
        loop: asyncio.AbstractEventLoop | None,
    ) -> None:
        """Prepare; runners are started with the first work. What is left for threads is handed to `go_on`."""
        self._execution = execution
        self._size = size
        self._report = report
        self._go_on = go_on
        self._given = loop
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: deque[Run] = deque()
        self._runners: set[asyncio.Task[None]] = set()

    def submit(self, runs: Sequence[Run]) -> None:
        """Take runs to their end."""
        self._waiting.extend(runs)
        self._running().call_soon_threadsafe(self._spawn)

    def take_back(self) -> list[Delivery]:
        """Return what was submitted and not begun; it will not run."""
        left: list[Delivery] = []
        with suppress(IndexError):
            while True:
                left.append(self._waiting.popleft().delivery)
        return left

    def cancel(self) -> None:
        """Cancel the handlers that still run; their leases are given back."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(lambda: [runner.cancel() for runner in tuple(self._runners)])

    def stop(self) -> None:
        """End the lane's own event loop."""
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
                run = self._waiting.popleft()
            except IndexError:
                break
            report = await self._execution.run_async(run)
            if report is None:
                self._go_on(run)
            else:
                self._report(report)
