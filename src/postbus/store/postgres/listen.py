"""Wake-up across processes: a hint to look now, never relied upon.

NOTIFY takes a lock of the whole cluster when it commits, so it is sent in a transaction of its own after the commit it
tells of, with a constant payload, and not more often than every ten milliseconds but for a few at a time.
"""

import os
import select
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final, LiteralString, cast

import psycopg

from postbus.errors import StoreUnavailable
from postbus.loop import Loop
from postbus.store.postgres.address import Address, translated
from postbus.store.postgres.connection import Database
from postbus.store.session import Row

APART: Final = 0.01
BURST: Final = 3
WAIT: Final = 5.0
PROBE_EVERY: Final = 10.0
IDLE: Final = 3_600.0


class Bell:
    """A `Watch` that rings when this process or another has something to look at; polling covers what it misses."""

    def __init__(self, on_wait: Callable[[], None], on_close: Callable[["Bell"], None]) -> None:
        """Begin silent."""
        self._on_wait = on_wait
        self._on_close = on_close
        self._silence = threading.Lock()  # broken by being released; whoever waits wakes sooner than by an Event
        self._silence.acquire()

    def wait(self, timeout: float) -> bool:
        """Return True when rung since the last call, False after `timeout` seconds."""
        self._on_wait()
        return self._silence.acquire(timeout=max(timeout, 0))

    def wake(self) -> None:
        """Make the present or the next `wait` return at once."""
        with suppress(RuntimeError):  # it has been rung already
            self._silence.release()

    def close(self) -> None:
        """Ring no more."""
        self._on_close(self)
        self.wake()


class Listener:
    """Listens on a connection of its own, looks every few seconds whether that is still alive, and connects anew."""

    def __init__(self, address: Address, ring: Callable[[], None]) -> None:
        """Call `ring` for every notification, and once after each new connection: something may have been missed."""
        self._address = address
        self._ring = ring
        self._connection: psycopg.Connection[Row] | None = None
        self._probed = 0.0
        self._closed = False
        self._closing = os.pipe()
        self._loop = Loop("listen", self._turn)
        self._loop.start()

    def _turn(self) -> float:
        with translated(self._address.shown):
            try:
                if self._connection is None:
                    self._listen()
                    self._ring()
                else:
                    if self._heard(self._connection):
                        self._ring()
                    self._probe(self._connection)
            except psycopg.Error:
                self._hang_up()
                raise
        if self._closed:  # and whoever closed it may not have waited so long
            self._hang_up()
        return 0

    def _heard(self, connection: psycopg.Connection[Row]) -> bool:
        """Wait for a notification; return early, too, when this is closed."""
        look = select.poll()
        for end in (connection.fileno(), self._closing[0]):
            look.register(end, select.POLLIN)
        look.poll(WAIT * 1000)
        connection.pgconn.consume_input()
        heard = False
        while connection.pgconn.notifies() is not None:
            heard = True
        return heard

    def _listen(self) -> None:
        connection = self._connection = self._address.connect()
        connection.add_notify_handler(lambda _: self._ring())  # for those that come while something else is asked
        connection.execute(cast("LiteralString", f"LISTEN {self._address.schema}"))
        self._probed = time.monotonic()

    def _probe(self, connection: psycopg.Connection[Row]) -> None:
        """Ask for something now and then: a connection that died half-open would stay silent for ever."""
        if time.monotonic() - self._probed > PROBE_EVERY:
            connection.execute("SELECT 1")
            self._probed = time.monotonic()

    def _hang_up(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(psycopg.Error):
                connection.close()

    def close(self) -> None:
        """Listen no more."""
        self._closed = True
        os.close(self._closing[1])
        if self._loop.stop(timeout=2 * WAIT):
            os.close(self._closing[0])
            self._hang_up()


class Notifier:
    """Tells other processes: at once if it has been silent for a moment, else once for many, a moment later."""

    def __init__(self, address: Address) -> None:
        """Begin with nothing to tell."""
        self._db = Database(address)
        self._shown = address.shown
        self._busy = threading.Lock()
        self._closed = False
        self._wanted = False
        self._pace = threading.Lock()
        self._next = 0.0
        """When the next notice is due at an even pace; a few may run ahead of it."""
        self._loop = Loop("notify", self._turn)
        self._loop.start()

    def turn(self) -> bool:
        """Return whether one more notice may be sent now; whoever asked is to send it, then."""
        with self._pace:
            now = time.monotonic()
            if self._next > now + BURST * APART:
                return False
            self._next = max(self._next, now) + APART
            return True

    def tell(self) -> None:
        """Have the others look."""
        if not self.turn():
            self.tell_soon()
            return
        with suppress(psycopg.Error, StoreUnavailable), self._busy:  # they poll, too
            self._notify()

    def _notify(self) -> None:
        try:
            self._db.ready().run("notify")
        finally:
            if self._closed:  # and whoever closed it may not have waited so long
                self._db.close()

    def tell_soon(self) -> None:
        """Have the others look a moment later; what was committed before this call is told by then."""
        if not self._wanted:
            self._wanted = True
            self._loop.wake()

    def _turn(self) -> float:
        if not self._wanted:
            return IDLE
        time.sleep(max(0.0, self._next - time.monotonic()))
        with self._busy, translated(self._shown):
            self._wanted = False
            with self._pace:
                self._next = max(self._next, time.monotonic()) + APART
            self._notify()
        return IDLE

    def close(self) -> None:
        """Tell nothing more."""
        self._closed = True
        self._loop.stop(timeout=1)
        if self._busy.acquire(timeout=1):
            self._db.close()
            self._busy.release()
