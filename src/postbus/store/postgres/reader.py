"""Catching up: while a follower handles a page of the log, the server looks up the next."""

import time
from typing import Final, NamedTuple, Protocol

import psycopg

from postbus.pattern import Interest
from postbus.store.contract import Ahead
from postbus.store.following import ahead_of
from postbus.store.postgres.connection import Address, Database, Sent
from postbus.store.records import decoding

__all__ = ["PostgresReader"]

QUERY: Final = "read_on"
BRISK: Final = 0.05
"""Seconds in which a page is handled by one who goes on at once. For others the server would have to keep the next."""
STALE: Final = 1.0
"""Seconds after which a page is looked up again: something in it may have been erased."""


class _Log(Protocol):
    def read_on(self, after: int, limit: int, interests: tuple[Interest, ...]) -> Ahead: ...


class _Page(NamedTuple):
    """A page that was asked for."""

    after: int
    limit: int
    sent: Sent
    at: float


class PostgresReader:
    """A `Reader` with a connection of its own, as long as there is more than a page to read; see `Store.reader`."""

    def __init__(self, address: Address, store: _Log) -> None:
        """Begin without one."""
        self._store = store
        self._db = Database(address)
        self._coming: _Page | None = None
        self._returned = 0.0
        """When the last full page was."""

    def read_on(self, after: int, limit: int, interests: tuple[Interest, ...]) -> Ahead:
        """Read a page that is on its way, or else as `Store.read_on` does, and have the next one looked up."""
        try:
            with decoding():
                ahead = self._read_ahead(after, limit, interests)
        except psycopg.Error:  # it was a read: asked again, it tells whether the server can be reached at all
            self.close()
            ahead = None
        ahead = ahead or self._store.read_on(after, limit, interests)
        if ahead.more:
            self._returned = time.monotonic()
        else:
            self.close()
        return ahead

    def _read_ahead(self, after: int, limit: int, interests: tuple[Interest, ...]) -> Ahead | None:
        now = time.monotonic()
        coming, self._coming = self._coming, None
        if coming is not None and (coming[:2] != (after, limit) or now - coming.at > STALE):
            self._db.close()  # it is of no use, and may not be over
            coming = None
        brisk = now - self._returned < BRISK
        if coming is None and not brisk:
            return None
        page = coming or self._ask(after, limit, now)
        page.sent.wait()
        count, last = page.sent.extent()
        if brisk and count == limit:
            self._coming = self._ask(last, limit, now)
        return ahead_of(page.sent.rows(), after, limit, interests)

    def _ask(self, after: int, limit: int, now: float) -> _Page:
        self._db.prepare(QUERY)
        return _Page(after, limit, self._db.send((QUERY, (after, limit))), now)

    def close(self) -> None:
        """Have nothing under way, and no connection."""
        self._coming = None
        self._returned = 0.0
        self._db.close()
