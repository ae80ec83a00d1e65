"""Where handlers run: plain functions on threads, coroutines on an event loop."""

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, cast

from postbus.execution import Execution, Report, Run, overdue
from postbus.model import Delivery
from postbus.observe import tell

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
        self._told_refused = False
        self.hung: set[threading.Thread] = set()

    def submit(self, runs: Sequence[Run], chunk: int) -> None:
        """Take runs to their end, handed to threads `chunk` at a time; raise, and take none, if there is no thread."""
        self._seat_more(len(runs))
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
        """Give up on handlers that are overdue: report them, and seat other threads for what waits."""
        now = time.monotonic()
        for seat in tuple(self._seats):
            if now >= seat.deadline and (run := seat.take_away(now)) is not None:
                self._leave_behind(seat)
                self._go_on(run, overdue(run.handler))
        self.hung = {thread for thread in self.hung if thread.is_alive()}
        if waiting := self._chunks.qsize():
            self._seat_more(waiting)

    def cancel(self) -> None:
        """Undo the transactions whose handlers still run, and give their leases back: others wait for their lock."""
        for seat in tuple(self._seats):
            if (run := seat.close()) is not None:
                self._go_on(run, asyncio.CancelledError())

    def stop(self) -> None:
        """Let every thread end after its present work."""
        for _ in range(len(self._seats)):
            self._chunks.put(None)

    def _leave_behind(self, seat: _Seat) -> None:
        """Count on a thread that hangs no more, and give what it had before it to another."""
        with self._lock:
            self._seats.remove(seat)
        if seat.thread is not None:
            self.hung.add(seat.thread)
        if seat.chunk:
            self._chunks.put(seat.chunk)

    def _go_on(self, run: Run, error: BaseException) -> None:
        """Report a run taken away from its thread, or go on with its next handler if the error is only recorded."""
        try:
            report = self._execution.went(run, error)
            if report is None and run.index < len(run.handlers):
                self._chunks.put(deque([run]))
                return
        except Exception as failure:  # noqa: BLE001  reported: a run must not vanish
            report = self._execution.broke(run, failure)
        self._report(report or self._execution.finished(run))

    def _seat_more(self, count: int) -> None:
        """Have up to `count` more threads, within the limit; if the system gives fewer, those there are must do."""
        with self._lock:
            for _ in range(min(count, self._size - len(self._seats))):
                try:
                    self._seat()
                except RuntimeError as error:
                    if not self._seats:
                        raise
                    if not self._told_refused:
                        tell(logging.WARNING, "thread_refused", reason=str(error), threads=len(self._seats))
                    self._told_refused = True
                    return
                self._told_refused = False

    def _seat(self) -> None:
        seat = _Seat()
        seat.thread = threading.Thread(target=self._work, args=(seat,), name="postbus-handler", daemon=True)
        seat.thread.start()
        self._seats.append(seat)

    def _work(self, seat: _Seat) -> None:
        while (chunk := self._chunks.get()) is not None:
            seat.chunk = chunk
            while chunk:
                try:
                    seat.run = run = chunk.popleft()
                except IndexError:
                    break
                try:
                    report = self._execution.run(run, seat.holds)
                except BaseException as error:  # noqa: BLE001  reported: a run must not vanish
                    report = self._execution.broke(run, error) if seat.holds(run, calling=False) else None
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
        self._runners: dict[asyncio.Task[None], Run | None] = {}
        self._stopped = False

    def submit(self, runs: Sequence[Run]) -> None:
        """Take runs to their end; raise, and take none, if there is no event loop."""
        loop = self._running()
        self._waiting.extend(runs)
        try:
            loop.call_soon_threadsafe(self._spawn)
        except RuntimeError:
            for run in runs:
                self._waiting.remove(run)
            raise

    def take_back(self) -> list[Delivery]:
        """Return what was submitted and not begun; it will not run."""
        left: list[Delivery] = []
        with suppress(IndexError):
            while True:
                left.append(self._waiting.popleft().delivery)
        return left

    def cancel(self) -> None:
        """Cancel the coroutines that still run; their leases are given back. Plain functions among them go on."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._cancel_coroutines)

    def stop(self) -> None:
        """End the lane's own event loop, with whatever still runs in it: nobody hears its report."""
        self._stopped = True
        if self._loop is not None and self._given is None:
            self._loop.call_soon_threadsafe(self._loop.stop)

    def _cancel_coroutines(self) -> None:
        for runner, run in tuple(self._runners.items()):
            if not runner.done() and (run is None or run.handler.is_async):
                runner.cancel()

    def _running(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = self._given or self._start(asyncio.new_event_loop())
        return self._loop

    def _start(self, loop: asyncio.AbstractEventLoop) -> asyncio.AbstractEventLoop:
        try:
            threading.Thread(target=self._serve, args=(loop,), name="postbus-async", daemon=True).start()
        except RuntimeError:
            loop.close()
            raise
        return loop

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        while not self._stopped:
            try:
                loop.run_forever()
            except BaseException as error:  # noqa: BLE001  told; who awaits the task that raised it gets it next
                # asyncio lets SystemExit and KeyboardInterrupt of any task end the loop; all else in it can go on.
                tell(logging.ERROR, "event_loop_interrupted", error=error)
        if self._runners:
            for runner in self._runners:
                runner.cancel()
            loop.run_until_complete(asyncio.wait(set(self._runners)))
        loop.close()

    def _spawn(self) -> None:
        """Have as many runners as there is work for, up to the limit; each ends when nothing waits."""
        for _ in range(min(len(self._waiting), self._size - len(self._runners))):
            runner = asyncio.get_running_loop().create_task(self._run())
            self._runners[runner] = None
            runner.add_done_callback(self._runners.pop)

    async def _run(self) -> None:
        # One task runs many deliveries: a task for each would cost more than a short handler does.
        me = cast("asyncio.Task[None]", asyncio.current_task())
        while self._waiting:
            try:
                self._runners[me] = run = self._waiting.popleft()
            except IndexError:
                break
            try:
                report = await self._execution.run_async(run)
                if report is None:
                    self._go_on(run)
                    continue
            except BaseException as error:  # noqa: BLE001  reported: a run must not vanish
                report = self._execution.broke(run, error)
            self._report(report)
