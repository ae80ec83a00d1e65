"""Writers that do to a log what applications do: at once, late, in part, in bulk, in two phases, and not at all."""

import random
import threading
import time
from collections.abc import Callable
from typing import Any, Final, LiteralString

import psycopg

from postbus.pattern import Interest
from postbus.payload import draft
from postbus.store import Log, contract

__all__ = ["Reader", "StoreReader", "Writers", "insert"]

INSERT: Final = """
    INSERT INTO postbus.events (uid, type, payload, created_at) VALUES (%s, 'gap.test', '1', postbus.now())
    RETURNING id
"""
COPY: Final = "COPY postbus.events (uid, type, payload, created_at) FROM STDIN"


def insert(connection: psycopg.Connection[Any], uid: str = "u") -> int:
    """Append one event, past the product but not past the table's trigger; return its id."""
    row = connection.execute(INSERT, (uid,)).fetchone()
    assert row is not None
    return row[0]


class Writers:
    """Threads that append to the log, each with a connection of its own, in every way there is."""

    def __init__(self, url: str, store: Log | None = None) -> None:
        """Have none yet; with a store, some publish through it too, single events and large batches."""
        self._url = url
        self._store = store
        self._over = threading.Event()
        self.done: set[str] = set()

    def __call__(self, number: int) -> None:
        """Append until told to stop, with chance as the only plan."""
        chance = random.Random(f"writer {number}")
        ways: list[Callable[[psycopg.Connection[Any], random.Random], None]] = [
            self._late, self._late, self._rolled_back, self._savepoints, self._copied, self._prepared, self._replica,
        ]  # fmt: skip
        if self._store is not None:
            ways += [self._published, self._published_many]
        with psycopg.connect(self._url) as connection:
            while not self._over.is_set():
                way = chance.choice(ways)
                way(connection, chance)
                self.done.add(way.__name__)

    def stop(self) -> None:
        """Let each finish what it is at."""
        self._over.set()

    def _wait(self, chance: random.Random) -> None:
        self._over.wait(chance.choice([0, 0, 0.001, 0.003, 0.01, 0.04]))

    def _late(self, connection: psycopg.Connection[Any], chance: random.Random) -> None:
        for _ in range(chance.randint(1, 3)):
            insert(connection)
            self._wait(chance)
        connection.commit()

    def _rolled_back(self, connection: psycopg.Connection[Any], chance: random.Random) -> None:
        insert(connection)
        self._wait(chance)
        connection.rollback()

    def _savepoints(self, connection: psycopg.Connection[Any], chance: random.Random) -> None:
        """Pin within a savepoint that is taken back, wait without a pin, and pin anew."""
        connection.execute("SAVEPOINT s")
        insert(connection)
        self._wait(chance)
        connection.execute("ROLLBACK TO SAVEPOINT s")
        self._wait(chance)
        insert(connection)
        connection.execute("SAVEPOINT s")
        insert(connection)
        connection.execute("ROLLBACK TO SAVEPOINT s")
        self._wait(chance)
        connection.commit()

    def _copied(self, connection: psycopg.Connection[Any], chance: random.Random) -> None:
        with connection.cursor().copy(COPY) as copy:
            for _ in range(chance.randint(1, 30)):
                copy.write_row(("u", "gap.test", "1", "2030-01-01Z"))
                self._wait(chance)
        connection.commit()

    def _prepared(self, connection: psycopg.Connection[Any], chance: random.Random) -> None:
        """Append in a transaction that outlives its session's interest: nobody holds it but the server."""
        transaction = connection.xid(1, f"gap-{chance.random()}", "test")
        connection.tpc_begin(transaction)
        insert(connection)
        connection.tpc_prepare()
        self._wait(chance)
        (connection.tpc_commit if chance.random() < 0.7 else connection.tpc_rollback)()

    def _replica(self, connection: psycopg.Connection[Any], chance: random.Random) -> None:
        """Append as a restore or a logical replica does, for which ordinary triggers are silent."""
        connection.execute("SET LOCAL session_replication_role = replica")
        insert(connection)
        self._wait(chance)
        connection.commit()

    def _published(self, _connection: psycopg.Connection[Any], _chance: random.Random) -> None:
        assert self._store is not None
        self._store.publish([draft({"type": "gap.published"})])

    def _published_many(self, _connection: psycopg.Connection[Any], chance: random.Random) -> None:
        assert self._store is not None
        size = chance.choice([2, 10, 700])
        self._store.publish([draft({"type": "gap.batch", "uid": f"{chance.random()}"}) for _ in range(size)])


class Reader:
    """Follows the log as followers do, by the function that looks up the head first, and then reads up to it."""

    HEAD: LiteralString = "SELECT postbus.head('events')"
    READ: LiteralString = "SELECT id FROM postbus.read_on(%s, 1000000)"

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        """Begin before the first event."""
        self._connection = connection
        self.seen: list[int] = []
        self.slowest = 0.0

    def turn(self) -> int:
        """Read on; return the head of just before."""
        began = time.monotonic()
        row = self._connection.execute(self.HEAD).fetchone()
        assert row is not None
        self._read()
        self.slowest = max(self.slowest, time.monotonic() - began)
        return row[0]

    def _read(self) -> None:
        self.seen += [each for (each,) in self._connection.execute(self.READ, (self._last,))]

    @property
    def _last(self) -> int:
        return self.seen[-1] if self.seen else 0


class StoreReader(Reader):
    """Does so by the product's own way, which looks up the head only where an id is missing."""

    def __init__(self, connection: psycopg.Connection[Any], followers: contract.Reader, page: int = 20) -> None:
        """Read so many at a time, as a follower does."""
        super().__init__(connection)
        self._followers = followers
        self._page = page

    def _read(self) -> None:
        more = True
        while more:
            ahead = self._followers.read_on(self._last, self._page, (Interest("*"),))
            self.seen += [each.id for each in ahead.events]
            more = ahead.more
