"""Reading on: on one connection a follower hears that there may be more, reads it, and has the next page looked up.

No other thread needs to be woken for that, nor another process in the server: each takes longer than the reading.
"""

import os
import select
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Final, LiteralString, NamedTuple, cast

import psycopg
from psycopg import pq

from postbus.pattern import Interest
from postbus.store.contract import Ahead
from postbus.store.following import ahead_of
from postbus.store.postgres.connection import Address, Database, Sent, translated
from postbus.store.records import decoding
from postbus.store.session import Row

__all__ = ["PostgresReader"]

QUERY: Final = "read_on"
QUICK: Final = "read_right_on"
BRISK: Final = 0.05
"""Seconds in which a page is handled by one who goes on at once. For others the server would have to keep the next."""
STALE: Final = 1.0
"""Seconds after which a page is looked up again: something in it may have been erased."""
MANY: Final = 4_096


class _Page(NamedTuple):
    """A page that was asked for."""

    after: int
    limit: int
    sent: Sent
    at: float


class PostgresReader:
    """A `Reader` with a connection of its own, made when something is read; see `Store.reader`.

    Reading and waiting are for one thread; any may `wake` that.
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
        self._rung = False
        self._bell = os.pipe()
        weakref.finalize(self, _close, self._bell)  # not before: closed, their numbers may be those of other files
        for end in self._bell:
            os.set_blocking(end, False)
        self._server: pq.abc.PGconn | None = None
        """The connection, for one who only listens."""
        self._wire = -1
        self._look = select.poll()
        self._look.register(self._bell[0], select.POLLIN)

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────

    def read_on(self, after: int, limit: int, interests: tuple[Interest, ...]) -> Ahead:
        """Read a page, which may be on its way, and have the next one looked up."""
        self._usable()
        with decoding():
            try:
                rows = self._read(after, limit)
            except psycopg.Error:  # it was a read: asked again, it tells whether the server can be reached at all
                self.drop()
                with translated(self._address.shown):
                    rows = self._read(after, limit)
            ahead = ahead_of(rows, after, limit, interests)
        self._returned = time.monotonic() if ahead.more else 0.0
        return ahead

    def _read(self, after: int, limit: int) -> list[Row]:
        now = time.monotonic()
        self._connect()
        coming, self._coming = self._coming, None
        brisk = now - self._returned < BRISK
        if coming is not None or brisk:
            page = coming or self._ask(after, limit, now)
            page.sent.wait()
            count, last = page.sent.extent()
            if page[:2] == (after, limit) and now - page.at <= STALE and count:
                if brisk and count == limit:
                    self._coming = self._ask(last, limit, now)
                return page.sent.rows()
        rows = self._db.run_at_once((QUICK, (after, limit)))
        missing = rows and rows[-1][0] != after + len(rows)  # and may be about to come
        return self._db.run_at_once((QUERY, (after, limit))) if missing else rows

    def _ask(self, after: int, limit: int, now: float) -> _Page:
        return _Page(after, limit, self._db.send((QUERY, (after, limit))), now)

    def _connect(self) -> None:
        """Have a connection; a new one listens before anything is read by it, so that nothing is missed."""
        if not self._db.lost:
            return
        self.drop()
        connection = self._db.connection
        if self._listens:
            connection.execute(cast("LiteralString", f"LISTEN {self._address.schema}"))
        self._server, self._wire = connection.pgconn, connection.fileno()
        self._look.register(self._wire, select.POLLIN)

    def drop(self) -> None:
        """Have nothing under way, and no connection."""
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
        try:
            if timeout > 0:
                self._rest()
            heard = self._heard()
            if not heard and not self._rung:
                told = self._look.poll(max(timeout, 0) * 1000)
                heard = any(wire == self._wire for wire, _ in told)
                self._heard(come=heard)
        except psycopg.Error:  # what was told meanwhile is found by looking
            self.drop()
            heard = True
        return self._was_rung() or heard

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

    def _was_rung(self) -> bool:
        rung, self._rung = self._rung, False  # before the pipe is emptied: who rings from now on writes to it again
        try:
            return bool(os.read(self._bell[0], MANY)) or rung
        except BlockingIOError:
            return rung

    def wake(self) -> None:
        """Make the present or the next `wait` return at once."""
        if not self._rung:
            self._rung = True
            with suppress(BlockingIOError):
                os.write(self._bell[1], b"!")

    def close(self) -> None:
        """Hear no more of this process; a `wait` in another thread returns."""
        self._on_close(self)
        self.wake()


def _close(ends: tuple[int, int]) -> None:
    for end in ends:
        os.close(end)
