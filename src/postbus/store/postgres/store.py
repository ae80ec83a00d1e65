"""The store in a PostgreSQL database: many processes, one log; publishers, claimers and settlers side by side."""

import math
import os
import tempfile
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import psycopg

from postbus.clock import from_micros
from postbus.errors import Conflict, InvalidRequest, OutcomeUnknown, PostbusError, StoreUnavailable
from postbus.model import Event, Lease, Stats, Stream
from postbus.observe import probe
from postbus.payload import Draft
from postbus.store import followers, lookups
from postbus.store.base import SqlStore
from postbus.store.committer import Committer
from postbus.store.contract import Claim, Finding, Reader, Settled, Settlement, Step, Transaction, Watch
from postbus.store.leases import Won, settle
from postbus.store.liveness import Liveness
from postbus.store.migrate import migrate
from postbus.store.owned import owned
from postbus.store.postgres import foreign
from postbus.store.postgres.address import Address, translate, translated
from postbus.store.postgres.append import Appender, append
from postbus.store.postgres.claim import Claimer, finish, give_back
from postbus.store.postgres.connection import Database, undeadlocked
from postbus.store.postgres.inspection import holders, inspect, require_safe
from postbus.store.postgres.listen import Bell, Listener, Notifier
from postbus.store.postgres.reader import PostgresReader
from postbus.store.postgres.schema import Schema
from postbus.store.records import decoding
from postbus.store.session import Row, Session
from postbus.store.staging import require_all
from postbus.store.transaction import CallersTransaction

R = TypeVar("R")
MAX_IDLE: Final = 8
PUBLISH: Final = 10_000
WHICH: Final = "SELECT pg_catalog.current_database(), pg_catalog.pg_postmaster_start_time()"
HOLD: Final = "SELECT pg_try_advisory_lock(hashtextextended($1, 11))"


class PostgresStore(SqlStore):
    """A `Log` in a schema of a PostgreSQL database. Safe to use from many threads, processes and hosts.

    Publishing, claiming and settling each have a connection, so that none waits for another; reading takes one from a
    pool. Only the database's clock decides.
    """

    def __init__(
        self, url: str, *, auto_migrate: bool = True, direct_url: str | None = None, listen: bool = True
    ) -> None:
        """Open the database, migrating it if allowed; raise UnsafeStore, SchemaMismatch, StoreUnavailable.

        `direct_url` says that `url` leads to a transaction pooler, and where the database itself is: listening needs
        that. Without `listen`, others' events are noticed by polling only; then `direct_url` may be `url` again.
        """
        self._address = Address.of(url, pooled=direct_url is not None)
        direct = Address.of(direct_url or url, pooled=direct_url == url)  # the same: nothing may go past the pooler
        self._direct = replace(direct, schema=self._address.schema)
        with translated(self._address.shown):
            log_id = self._prepare(auto_migrate=auto_migrate)
        super().__init__(Liveness(Path(tempfile.gettempdir()) / f"postbus-{os.getuid()}" / log_id))
        self._idle: list[Database] = []
        publisher, claimer, settler = (Database(self._address) for _ in range(3))
        appender = Appender(publisher)
        self._publisher = Committer(publisher, lambda batches: self._append_group(appender, batches))
        self._claimer = Committer(claimer, Claimer(claimer, self._owe).claim)
        self._settler = Committer(settler, lambda batches: self._settle_group(settler, batches))
        self._holders: set[int] = set()
        self._trying: psycopg.Connection[Row] | None = None
        self._listens = listen
        self._listener: Listener | None = None
        self._notifier: Notifier | None = None

    def _prepare(self, *, auto_migrate: bool) -> str:
        with closing(Database(self._direct).ready()) as db:
            require_safe(db)
            self._require_same(db)
            migrate(Schema(db, self._address.schema), allowed=auto_migrate)
            return db.value("meta", ("log_id",))

    def _require_same(self, direct: Database) -> None:
        """Raise InvalidRequest where the addresses lead to two databases: one would be migrated, and the other used."""
        if self._direct.libpq == self._address.libpq:
            return
        with closing(Database(self._address).ready()) as db:
            if db.execute(WHICH) != direct.execute(WHICH):
                raise InvalidRequest(f"direct_url leads to another database than {self.url}: set both, or neither")

    @property
    def url(self) -> str:
        return self._address.shown

    def now(self) -> datetime:
        with self._glance() as db:
            return from_micros(db.value("now"))

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            idle, watches, trying = list(self._idle), list(self._watches), self._trying
        if trying is not None:
            trying.close()
        for watch in watches:
            watch.close()
        for part in (self._listener, self._notifier):
            if part is not None:
                part.close()
        for db in idle:
            db.close()
        for committer in (self._publisher, self._claimer, self._settler):
            with committer.hold() as db:
                db.retire()

    # ── publishing ───────────────────────────────────────────────────────────────────────────────────────────────

    def publish(self, drafts: Sequence[Draft]) -> list[Event]:
        self._writable()
        if not drafts:
            return []
        with translated(self.url):
            stored = self._publisher.run(cast("Any", drafts))
        self._ring()
        return self._filled(drafts, stored)

    def _append_group(self, appender: Appender, batches: list[Sequence[Draft]]) -> list[Any]:
        notifier = self._notifying()
        told = notifier is not None and notifier.turn()
        stored = appender.store(batches, tell=told)
        if notifier is not None and not told:
            notifier.tell_soon()
        return stored

    def _filled(self, drafts: Sequence[Draft], stored: list[Event | int]) -> list[Event]:
        """Put the events that uids stood for already in the places that hold only their ids."""
        if all(isinstance(each, Event) for each in stored):
            return cast("list[Event]", stored)
        try:
            with self._read() as session:
                return _known(session, drafts, stored)
        except StoreUnavailable as error:  # behind the commit, which has stored the others
            raise OutcomeUnknown(
                f"all events are stored, but those with a uid that was known could not be read: {error}"
            ) from error

    @owned
    def transaction(self) -> Generator[Transaction]:
        self._writable()
        holder = threading.get_ident()
        try:
            try:
                self._holders.add(holder)
                with self._transaction() as tx:
                    yield tx
            finally:
                self._holders.discard(holder)
        finally:
            self._holders.discard(holder)  # again, as a committer does: Ctrl-C may have cut off the first
        if tx.touched:
            self._wake()

    def _writable(self) -> None:
        """Raise for a write that would not be part of the transaction its own thread has open."""
        self._usable()
        if threading.get_ident() in self._holders:
            raise InvalidRequest("inside a transaction of your own, pass it on: publish(..., connection=tx)")

    @owned
    def _transaction(self) -> Generator[CallersTransaction]:
        with self._borrowed() as db:

            def append_here(drafts: Sequence[Draft]) -> list[Event]:
                with translated(self.url):
                    return _known(_session(db), drafts, append(db, drafts))

            def settle_here(settlement: Settlement) -> Settled:
                session = _session(db)
                return Settled.APPLIED if finish(db, [settlement]) else settle(session, [settlement])[0]

            tx = CallersTransaction(db, append_here, settle_here, lambda step: _move_in(db, step))
            try:
                with db.transaction():
                    try:
                        yield tx
                        tx.check()
                    finally:
                        tx.close()
            except (psycopg.OperationalError, psycopg.InterfaceError) as error:
                raise translate(self.url, error) from error

    def publish_on(self, connection: Any, drafts: Sequence[Draft]) -> list[Event]:
        return foreign.on(connection, drafts, self._address.schema)

    async def publish_on_async(self, connection: Any, drafts: Sequence[Draft]) -> list[Event]:
        return await foreign.on_async(connection, drafts, self._address.schema)

    def is_async(self, connection: Any) -> bool:
        return foreign.is_async(connection)

    def _publish_part(self, session: Session, part: int, rows: int) -> int:
        total = 0
        for low in range(0, rows, PUBLISH):
            high = min(low + PUBLISH, rows)
            found, fresh = session.db.run("publish_part", (part, low, high))[0]
            require_all(part, found, high - low)
            total += fresh
        return total

    # ── claiming and settling ────────────────────────────────────────────────────────────────────────────────────

    def _claim_all(self, claims: Sequence[Claim]) -> list[Won]:
        self._writable()
        with translated(self.url):
            return self._claimer.run(cast("Any", claims))

    def _owe(self, token: str) -> None:
        """Give back what a claim was given that nobody got, now or when the store can be used again."""
        self._owed.add(partial(give_back, token=token))
        with suppress(psycopg.Error, PostbusError):
            self._pay_back()

    def _close_gaps(self) -> int:
        with self._glance() as db:
            gaps = [number for (number,) in db.run("some_gaps")]
        return sum(self._write(lambda session, gap=gap: session.db.value("close_gap", (gap,))) for gap in gaps)

    def settle(self, settlements: Sequence[Settlement]) -> list[Settled]:
        self._writable()
        with translated(self.url):
            results: list[Settled] = self._settler.run(cast("Any", settlements))
        self._ring()
        return results

    def _settle_group(self, db: Database, batches: list[Sequence[Settlement]]) -> list[Sequence[Settled]]:
        """Settle for several callers: what simply worked by one statement, the rest in one transaction."""
        told = [each for batch in batches for each in batch]

        def finish_plain() -> set[Lease]:
            db.learn(each.lease.subscription for each in told)
            with db.alone():
                return finish(db, told)

        done = undeadlocked(finish_plain)
        rest = [each for each in told if each.lease not in done]
        left = iter(_transact(db, lambda session: settle(session, rest)) if rest else ())
        return [[Settled.APPLIED if each.lease in done else next(left) for each in batch] for batch in batches]

    def _jump(self, session: Session) -> int:
        return session.db.value("jump")

    # ── following ────────────────────────────────────────────────────────────────────────────────────────────────

    @contextmanager
    def _glance(self) -> Generator[Database]:
        with self._connection() as db, decoding(), db.settled():
            yield db

    def reader(self) -> Reader:
        if self._address.pooled:
            return super().reader()
        reader = PostgresReader(self._address, self._usable, self._unwatch, listen=self._listens)
        with self._lock:
            self._watches.append(reader)
        return reader

    def _move_lightly(self, step: Step) -> bool:
        with self._glance() as db:
            if step.caught_up:
                # Also for the publishers' sake: what is left to be flushed later is flushed while one of them commits.
                return _moved(db, step)
            return db.value("move_lightly", (step.subscription, step.epoch, step.position))

    # ── watching and looking after ───────────────────────────────────────────────────────────────────────────────

    def watch(self) -> Watch:
        bell = Bell(self._listen, self._unwatch)
        with self._lock:
            self._watches.append(bell)
        return bell

    def _listen(self) -> None:
        """Hear what others tell, from the moment that somebody waits for it."""
        if self._listens and self._listener is None:
            with self._lock:
                if self._listener is None and not self._closed:
                    self._listener = Listener(self._direct, self._ring)

    def _wake(self) -> None:
        self._ring()
        if (notifier := self._notifying()) is not None:
            notifier.tell()

    def _notifying(self) -> Notifier | None:
        """Return what wakes other processes, if they are to be; nothing if no thread can be had: they poll, too."""
        if self._listens and self._notifier is None:
            with self._lock, suppress(RuntimeError):
                if self._notifier is None and not self._closed:
                    self._notifier = Notifier(self._address)
        return self._notifier

    def stats(self) -> Stats:
        found = super().stats()
        with self._glance() as db:
            return replace(found, holders=holders(db))

    def inspect(self, *, deep: bool) -> tuple[Finding, ...]:
        with self._glance() as db:
            return inspect(db, deep=deep)

    @contextmanager
    def hold(self, name: str) -> Generator[Callable[[], None]]:
        """Hold a lock of the server's on a connection of its own, past any pooler: it ends with the process."""
        self._usable()
        if self._direct.pooled:
            raise InvalidRequest(f"{self.url}: a pooler lends its connections to others, locks and all: say direct_url")
        with translated(self.url):
            connection = self._try_hold(f"{self._address.schema} holds {name}")
        if connection is None:
            raise Conflict(f"{self.url}: another process holds {name!r}")

        def check() -> None:
            with translated(self.url):
                connection.execute("SELECT 1")

        try:
            yield check
        finally:
            with suppress(psycopg.Error):  # a server notices only after a while that a connection is closed
                connection.execute("SELECT pg_advisory_unlock_all()")
            connection.close()

    def _try_hold(self, name: str) -> psycopg.Connection[Row] | None:
        """Return a connection that holds a name, or None; one that got nothing is kept for the next who tries."""
        with self._lock:
            connection, self._trying = self._trying, None
        if connection is None or connection.closed or connection.broken:
            connection = self._direct.connect()
        try:
            ((got,),) = connection.execute(HOLD, (name,)).fetchall()
        except BaseException:
            connection.close()
            raise
        if got:
            return connection
        with self._lock:
            if self._trying is None and not self._closed:
                self._trying = connection
                return None
        connection.close()
        return None

    # ── connections ──────────────────────────────────────────────────────────────────────────────────────────────

    def _write(self, operation: Callable[[Session], R]) -> R:
        """Run an operation in a transaction of its own: only claims, settlements and publishes are grouped."""
        self._writable()
        with self._connection() as db:
            return _transact(db, operation)

    def _beside(self, operation: Callable[[Session], R]) -> R:
        """Run it one at a time in the database."""

        def apart(session: Session) -> R:
            session.db.run("hold_beside")
            return operation(session)

        return self._write(apart)

    def _reclaim(self, stream: Stream, *, done: bool) -> None:
        """Vacuum at the end: autovacuum would come to it minutes later. Whoever does not own the tables, cannot.

        The queue too: what was finished has left it. Only what nobody's old snapshot shows becomes free; a vacuum that
        is cut off leaves the rest to autovacuum.
        """
        if not done:
            return
        table = {Stream.EVENTS: "events", Stream.AUDIT: "event_log"}[stream]
        with suppress(psycopg.Error, StoreUnavailable), closing(Database(self._direct).ready()) as db:
            if not self._direct.pooled:
                db.execute("SET statement_timeout = 0")
            db.connection.longest = math.inf
            for _ in range(2):  # index pages that the first empties are there for use only after a second look
                db.execute(f"VACUUM {self._address.schema}.{table}, {self._address.schema}.deliveries")

    @contextmanager
    def _read(self) -> Generator[Session]:
        with self._connection() as db, decoding(), db.snapshot():
            yield _session(db)

    @contextmanager
    def _look(self) -> Generator[Session]:
        with self._glance() as db:
            yield _session(db)

    @contextmanager
    def _connection(self) -> Generator[Database]:
        """Take a connection from the pool for a purpose of ours."""
        with translated(self.url), self._borrowed() as db:
            yield db.ready()

    @owned
    def _borrowed(self) -> Generator[Database]:
        """Take a connection from the pool; one that an error has made doubtful does not go back."""
        self._usable()
        with self._lock:
            db = self._idle.pop() if self._idle else Database(self._address)
        try:
            yield db
        finally:
            with self._lock:
                keep = not self._closed and len(self._idle) < MAX_IDLE and db.idle
                if keep:
                    self._idle.append(db)
            if not keep:
                db.close()


def _session(db: Database) -> Session:
    """Begin work in a transaction, at the database's time."""
    db.catalog.refresh(db)
    return Session(db, db.catalog, db.catalog.now)


def _transact(db: Database, operation: Callable[[Session], R]) -> R:
    """Run an operation in a transaction of its own."""

    def transaction() -> R:
        with db.transaction():
            result = operation(_session(db))
            probe("committing")
        return result

    return undeadlocked(transaction)


def _moved(db: Database, step: Step) -> bool:
    return db.count("move_firmly", (step.position, step.subscription, step.epoch)) == 1


def _move_in(db: Database, step: Step) -> None:
    """Move a checkpoint in the caller's transaction; what leaves nothing behind needs no look at anything else."""
    if step.leaves:
        followers.move(_session(db), step)
    elif not _moved(db, step):
        raise followers.deposed(step.subscription)


def _known(session: Session, drafts: Sequence[Draft], stored: list[Event | int]) -> list[Event]:
    """Return the events, read where there are only the ids of those that uids stood for already."""
    return [
        each if isinstance(each, Event) else lookups.known(session, each, draft)
        for draft, each in zip(drafts, stored, strict=True)
    ]
