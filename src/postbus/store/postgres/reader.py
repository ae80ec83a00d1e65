"""Reading on: on one connection a follower hears that there may be more, reads it, and has the next page looked up.

No other thread needs to be woken for that, nor another process in the server: each takes longer than the reading.
"""

import os
import select
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Final, LiteralString, NamedTuple, cast

import psycopg
from psycopg import pq

from postbus.errors import EventBusShutdownError
from postbus.pattern import Interest
from postbus.store.contract import PAGE_BYTES, Ahead
from postbus.store.followers import ahead_of
from postbus.store.postgres.address import Address, translated
from postbus.store.postgres.connection import Database, Sent
from postbus.store.records import decoding
from postbus.store.session import Row

QUERY: Final = "read_on"
QUICK: Final = "read_right_on"
BRISK: Final = 0.05
"""Seconds in which a page is handled by one who goes on at once. For others the server would have to keep the next."""
STALE: Final = 1.0
"""Seconds after which a page is looked up again: something in it may have been erased."""
MANY: Final = 65_536
LONGEST: Final = 86_400.0


class _Page(NamedTuple):
    """A page that was asked for."""

    after: int
    limit: int
    sent: Sent
    at: float


class PostgresReader:
    """A `Reader` with a connection of its own, made when something is read; see `Log.reader`.

    Reading and waiting are for one thread. Another may `attend` to it meanwhile, `wake` or `close` it.
    """

    def __init__(
        self,
        address: Address,
        usable: Callable[[], None],
        on_close: Callable[["PostgresReader"], None],
        *,
        listen: bool = True,
    ) -> None:
        """Begin without one. `usable` is to raise if the store may not be used."""
        self._usable = usable
        self._on_close = on_close
        self._address = address
        self._listens = listen
        self._db = Database(address)
        self._coming: _Page | None = None
        self._returned = 0.0
        """When the last full page was."""
        self._using = threading.Lock()
        """Held by whoever has to do with the connection."""
        self._closed = False
        self._server: pq.abc.PGconn | None = None
        """The connection, for one who only listens."""
        self._wire = -1
        self._bell = os.pipe()
        self._ringing = threading.RLock()
        self._remove_bell = weakref.finalize(self, _close, self._bell)
        self._remove_bell.atexit = False  # others still ring it then, and its numbers would be those of other files
        for end in self._bell:
            os.set_blocking(end, False)
        self._look = select.poll()
        self._look.register(self._bell[0], select.POLLIN)

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────

    def read_on(self, after: int, limit: int, interests: tuple[Interest, ...]) -> Ahead:
        """Read a page, which may be on its way, and have the next one looked up."""
        self._usable()
        with self._using, decoding():
            try:
                ahead = ahead_of(self._read_surely(after, limit), after, limit, interests)
            except BaseException:  # in the midst of something, perhaps
                self._hang_up()
                raise
            self._returned = time.monotonic() if ahead.more else 0.0
            if self._closed:
                self._hang_up()
        return ahead

    def _read_surely(self, after: int, limit: int) -> list[Row]:
        if self._closed:
            raise EventBusShutdownError("the reader is closed")
        try:
            return self._read(after, limit)
        except psycopg.Error:  # it was a read: asked again, it tells whether the server can be reached at all
            self._hang_up()
            with translated(self._address.shown):
                return self._read(after, limit)

    def _read(self, after: int, limit: int) -> list[Row]:
        now = time.monotonic()
        self._connect()
        coming, self._coming = self._coming, None
        brisk = now - self._returned < BRISK
        if coming is not None or brisk:
            page = coming or self._ask(after, limit, now)
            page.sent.wait()
            rows = page.sent.rows()
            if page[:2] == (after, limit) and now - page.at <= STALE and rows:
                if brisk and len(rows) == limit:
                    self._coming = self._ask(rows[-1][0], limit, now)
                return rows
        rows = self._db.run_at_once((QUICK, (after, limit, PAGE_BYTES)))
        missing = rows and rows[-1][0] != after + len(rows)  # and may be about to come
        return self._db.run_at_once((QUERY, (after, limit, PAGE_BYTES))) if missing else rows

    def _ask(self, after: int, limit: int, now: float) -> _Page:
        return _Page(after, limit, self._db.send((QUERY, (after, limit, PAGE_BYTES))), now)

    def _connect(self) -> None:
        """Have a connection; a new one listens before anything is read by it, so that nothing is missed."""
        if not self._db.lost:
            return
        self._hang_up()
        connection = self._db.connection
        if self._listens:
            connection.execute(cast("LiteralString", f"LISTEN {self._address.schema}"))
        self._server, self._wire = connection.pgconn, connection.fileno()
        self._look.register(self._wire, select.POLLIN)

    def drop(self) -> None:
        """Have nothing under way, and no connection."""
        with self._using:
            self._hang_up()

    def _hang_up(self) -> None:
        if self._server is not None:
            self._look.unregister(self._wire)
            self._server = None
        self._coming = None
        self._returned = 0.0
        self._db.close()

    # ── waiting ──────────────────────────────────────────────────────────────────────────────────────────────────

    def wait(self, timeout: float) -> bool:
        """Return True when this process or another has told of something since the last call, False after `timeout`.

        While there is no connection, others are not heard.
        """
        with self._using:
            if not self._closed:
                return self._wait(min(max(timeout, 0.0), LONGEST))
        time.sleep(min(max(timeout, 0.0), BRISK))
        return False

    def _wait(self, timeout: float) -> bool:
        told: set[int] = set()
        try:
            if timeout > 0:
                self._rest()
            heard = self._heard()
            told = {end for end, _ in self._look.poll(0 if heard else timeout * 1000)}
            if self._wire in told:
                self._heard(come=True)
                heard = True
        except psycopg.Error:  # what was told meanwhile is found by looking
            self._hang_up()
            heard = True
        if self._bell[0] in told:
            os.read(self._bell[0], MANY)
            heard = True
        if self._closed:
            self._hang_up()
        return heard

    def _rest(self) -> None:
        """Take in a page on its way, for nobody: the server might hold it, and its snapshot, as long as this waits."""
        coming, self._coming = self._coming, None
        if coming is not None:
            coming.sent.wait()

    def _heard(self, *, come: bool = False) -> bool:
        """Take the notices that were read before, and what else has come, which may be the end."""
        heard = False
        if self._server is not None:
            if come:
                self._server.consume_input()
            while self._server.notifies() is not None:
                heard = True
        return heard

    def attend(self) -> None:
        """Take notices for one who is busy: the server keeps what nobody takes, for all of its databases."""
        if self._using.acquire(blocking=False):
            try:
                heard = self._heard(come=True)
            except psycopg.Error:  # whoever reads next finds that, too
                heard = False
            finally:
                self._using.release()
            if heard:
                self.wake()

    def wake(self) -> None:
        """Make the present or the next `wait` return at once."""
        with self._ringing, suppress(BlockingIOError):
            if self._remove_bell.alive:
                os.write(self._bell[1], b"!")

    def close(self) -> None:
        """Hear and read no more; a `wait` in another thread returns."""
        self._closed = True
        self._on_close(self)
        self.wake()
        if self._using.acquire(timeout=1.0):  # else whoever is reading hangs up
            try:
                self._hang_up()
                with self._ringing:
                    self._remove_bell()
            finally:
                self._using.release()


def _close(ends: tuple[int, int]) -> None:
    for end in ends:
        os.close(end)
