"""The only start and stop code: a thread that takes one turn after another."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Final, Protocol

from postbus.errors import StoreUnavailable
from postbus.observe import tell

__all__ = ["Bell", "Loop", "Signal", "Waiter"]

LONGEST_PAUSE: Final = 5.0
LOOK_EVERY: Final = 0.25


class Waiter(Protocol):
    """Something to wait at."""

    def wait(self, timeout: float) -> bool:
        """Return True when woken since the last call, False after `timeout` seconds."""
        ...

    def wake(self) -> None:
        """Make the present or the next `wait` return at once."""
        ...


class Bell:
    """Once rung, it stays so. A signal handler may ring it.

    The handler runs in the very thread that waits, at any point of its waiting: there a `threading.Event` would wait
    for its own lock, for good.
    """

    def __init__(self) -> None:
        """Begin without having been rung."""
        self.rung = False
        self._silence = threading.Lock()
        self._silence.acquire()

    def ring(self) -> None:
        """End the waiting."""
        self.rung = True
        with contextlib.suppress(RuntimeError):  # released before
            self._silence.release()

    def wait(self, timeout: float) -> bool:
        """Return whether it is rung within `timeout` seconds, or was before."""
        if not self.rung:
            self._silence.acquire(timeout=timeout)
        return self.rung


class _Doorbell:
    """A waiter that only `wake` ends."""

    def __init__(self) -> None:
        self._rung = threading.Event()

    def wait(self, timeout: float) -> bool:
        rung = self._rung.wait(timeout) if timeout > 0 else self._rung.is_set()
        self._rung.clear()
        return rung

    def wake(self) -> None:
        if not self._rung.is_set():
            self._rung.set()


class Loop:
    """Calls `turn` again and again in a thread of its own; a turn returns the seconds to wait before the next.

    A turn that raises is logged and tried again after a pause that grows: a loop never dies of one bad turn.
    """

    def __init__(
        self,
        name: str,
        turn: Callable[[], float],
        waiter: Waiter | None = None,
        *,
        at_end: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare a loop that `start` sets going; `waiter` may end a pause early, as `wake` does.

        `at_end` is called in its thread behind the last turn, which may come long after `stop` has returned.
        """
        self._name = name
        self._turn = turn
        self._at_end = at_end
        self._waiter = waiter or _Doorbell()
        self._stopping = False
        self._failures = 0
        self._thread = threading.Thread(target=self._run, name=f"postbus-{name}", daemon=True)

    def start(self) -> None:
        """Set the loop going."""
        self._thread.start()

    def wake(self) -> None:
        """Have the next turn taken now."""
        self._waiter.wake()

    def stop(self, timeout: float | None = None) -> bool:
        """Let the present turn end and take no more; return whether it ended within `timeout`."""
        self._stopping = True
        self._waiter.wake()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stopping:
            pause = self._take_turn()
            if not self._stopping:
                self._pause(pause)
        self._at_end()

    def _pause(self, seconds: float) -> None:
        try:
            self._waiter.wait(seconds)
        except Exception as error:  # noqa: BLE001  a loop must outlive a store that is away
            time.sleep(self._failed(error))

    def _failed(self, error: Exception) -> float:
        """Tell of a failure and return how long to wait after it."""
        self._failures += 1
        if not self._stopping:
            known = isinstance(error, StoreUnavailable)
            fields = {"loop": self._name, "failures": self._failures, "reason": str(error)}
            tell(logging.WARNING, "loop_failed", error=None if known else error, **fields)
        return min(0.1 * 2 ** min(self._failures, 10), LONGEST_PAUSE)

    def _take_turn(self) -> float:
        try:
            pause = self._turn()
        except Exception as error:  # noqa: BLE001  a loop must outlive a store that is away
            return self._failed(error)
        self._failures = 0
        return pause


class Signal:
    """Lets threads wait until something holds, looking again whenever another thread says that it may."""

    def __init__(self) -> None:
        """Begin with nothing said."""
        self._condition = threading.Condition()
        self._count = 0

    def notify(self) -> None:
        """Have everybody who waits look again."""
        with self._condition:
            self._count += 1
            self._condition.notify_all()

    def wait_for(self, ready: Callable[[], bool], timeout: float | None) -> bool:
        """Return True once `ready()` holds, False after `timeout` seconds."""
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        while True:
            count = self._count
            if ready():
                return True
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            with self._condition:
                self._condition.wait_for(lambda count=count: self._count != count, min(left, LOOK_EVERY))
