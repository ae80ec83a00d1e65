"""Being woken by a server: one request that waits, for all the watches of a store, while anybody waits."""

import threading
import time
from collections.abc import Callable
from typing import Final

from postbus.errors import PostbusError

UNKNOWN: Final = -1
SHORTEST: Final = 0.02
"""So long a request takes at least, with the pause after it: where much happens, once in a while is enough."""
AWAY: Final = 0.5
"""How long to wait before a server that did not answer is asked again."""
PATIENCE: Final = 2.0


class Waker:
    """Asks the server whether something may have changed, in a thread that begins when somebody first waits."""

    def __init__(self, ask: Callable[[int], int]) -> None:
        """Ask by `ask`, which takes the last number it returned and waits for another."""
        self._ask = ask
        self._watches: set[RemoteWatch] = set()
        self._wanted = threading.Event()
        self._ending = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def watch(self) -> "RemoteWatch":
        """Return a new watch."""
        made = RemoteWatch(self)
        with self._lock:
            self._watches.add(made)
        return made

    def forget(self, watch: "RemoteWatch") -> None:
        """Wake a watch no more."""
        with self._lock:
            self._watches.discard(watch)

    def want(self) -> None:
        """Have the server asked: somebody waits."""
        self._wanted.set()
        with self._lock:
            if self._thread is None and not self._ending.is_set():
                self._thread = threading.Thread(target=self._run, name="postbus-wake", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Close all watches, and end; the server answers within a second or so."""
        self._ending.set()
        self._wanted.set()
        with self._lock:
            watches = list(self._watches)
        for watch in watches:
            watch.close()
        if self._thread is not None:
            self._thread.join(PATIENCE)

    def _run(self) -> None:
        rings = UNKNOWN
        while self._wanted.wait() and not self._ending.is_set():
            began = time.monotonic()
            try:
                told = self._ask(rings)
            except PostbusError:
                # Whoever waits looks by himself from time to time, and tells of what is wrong.
                self._ending.wait(AWAY)
                continue
            if told != rings:
                rings = told
                self._ring()
            self._ending.wait(max(0.0, SHORTEST - (time.monotonic() - began)))

    def _ring(self) -> None:
        self._wanted.clear()
        with self._lock:
            watches = list(self._watches)
        for watch in watches:
            watch.wake()


class RemoteWatch:
    """A `Watch` on a store behind HTTP."""

    def __init__(self, waker: Waker) -> None:
        """Be woken by a waker."""
        self._waker = waker
        self._rung = threading.Event()

    def wait(self, timeout: float) -> bool:
        """Return True when something may have changed, False after `timeout` seconds."""
        if not self._rung.is_set():
            self._waker.want()
        rung = self._rung.wait(timeout) if timeout > 0 else self._rung.is_set()
        self._rung.clear()
        return rung

    def wake(self) -> None:
        """Make `wait` return at once."""
        self._rung.set()

    def close(self) -> None:
        """Be woken no more; a `wait` in another thread returns."""
        self._waker.forget(self)
        self._rung.set()
