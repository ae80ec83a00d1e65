"""The store in a PostgreSQL database: many processes, one log; publishers, claimers and settlers side by side."""

import math
import os
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import psycopg
from psycopg.errors import DeadlockDetected

from postbus.clock import from_micros
from postbus.errors import (
    Conflict,
    InvalidRequest,
    OutcomeUnknown,
    PostbusError,
    SchemaMismatch,
    StoreUnavailable,
)
from postbus.model import Event, Lease, Stats, Stream
from postbus.observe import probe
from postbus.payload import Draft
from postbus.retry import RetryPolicy
from postbus.store import followers, lookups
from postbus.store.base import SqlStore
from postbus.store.committer import Committer
from postbus.store.contract import Claim, Finding, Reader, Settled, Settlement, Step, Transaction, Watch
from postbus.store.leases import Won, block_from_row, release, settle
from postbus.store.liveness import Liveness
from postbus.store.migrate import migrate
from postbus.store.owned import owned
from postbus.store.postgres import foreign
from postbus.store.postgres.append import append, append_all, found_event, stored_before
from postbus.store.postgres.catalog import Catalog
from postbus.store.postgres.claim import Floors, claim, finish, is_plain, new_token, settle_in
from postbus.store.postgres.connection import Address, Database, Unanswered, put_schema, translate, translated
from postbus.store.postgres.inspection import holders, inspect, require_safe
from postbus.store.postgres.listen import Bell, Listener, Notifier
from postbus.store.postgres.reader import PostgresReader
from postbus.store.postgres.roles import roles_statements
from postbus.store.queries import load_migrations
from postbus.store.records import decoding
from postbus.store.session import Row, Session
from postbus.store.staging import require_all
from postbus.store.transaction import CallersTransaction

R = TypeVar("R")
MAX_IDLE: Final = 8
PUBLISH: Final = 10_000
DEADLOCKS: Final = 3
FLOOR_AGE: Final = 60.0
"""Seconds after which the latest event is looked up anew: what was published since then is what a lost answer costs."""
TRIES: Final = 3
NO_SUBSCRIPTION: Final = "PB005"
RETURN: Final = 5.0
"""Seconds in which a server may come back, and tell what became of a commit."""
FORMER: Final = (
    "the schema {schema} was made by an earlier postbus, whose tables this one does not read; nothing was changed. "
    "To bring its events into a new schema: postbus import {schema}.events --type type --payload payload --key key "
    "--tags tags --from OLD_URL --url NEW_URL?schema=another"
)
WHICH: Final = "SELECT pg_catalog.current_database(), pg_catalog.pg_postmaster_start_time()"
HOLD: Final = "SELECT pg_try_advisory_lock(hashtextextended($1, 11))"
HAS_ROLES: Final = """
    SELECT 1 FROM pg_roles AS r JOIN pg_namespace AS n ON n.nspname = $1
     WHERE r.rolname = $2 AND has_schema_privilege(r.oid, n.oid, 'USAGE')
"""


class PostgresStore(SqlStore):
    """A `Store` in a schema of a PostgreSQL database. Safe to use from many threads, processes and hosts.

    Publishing, claiming and settling each have a connection, so that none waits for another; reading takes one from a
    pool. Only the database's clock decides.
    """

    served = True

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
        self._idle: list[tuple[Database, Catalog]] = []
        publisher, claimer = Database(self._address), Database(self._address)
        settling = Catalog()
        settler = Database(self._address, on_rollback=settling.forget)
        self._publisher = Committer(publisher, lambda batches: self._append_surely(publisher, batches))
        self._claimer = Committer(claimer, lambda batches: self._claim_group(claimer, batches))
        self._settler = Committer(settler, lambda batches: self._settle_group(settler, settling, batches))
        self._floor, self._floor_age = 0, -math.inf
        """The id of an event that was stored, and when it was the latest."""
        self._floors = Floors()
        self._numbers: dict[str, int] = {}
        """Of subscriptions, as far as they were needed; the database finds out if one is out of date."""
        self._unanswered: set[str] = set()
        """Claims whose answer was lost: what they were given is to be given back."""
        self._holders: set[int] = set()
        self._trying: psycopg.Connection[Row] | None = None
        self._listens = listen
        self._listener: Listener | None = None
        self._notifier: Notifier | None = None

    def _prepare(self, *, auto_migrate: bool) -> str:
        db = Database(self._direct).ready()
        try:
            require_safe(db)
            self._require_same(db)
            migrate(_Schema(db, self._address.schema), allowed=auto_migrate)
            return db.value("meta", ("log_id",))
        finally:
            db.close()

    def _require_same(self, direct: Database) -> None:
        """Raise InvalidRequest where the addresses lead to two databases: one would be migrated, and the other used."""
        if self._direct.libpq == self._address.libpq:
            return
        db = Database(self._address).ready()
        try:
            if db.execute(WHICH) != direct.execute(WHICH):
                raise InvalidRequest(f"direct_url leads to another database than {self.url}: set both, or neither")
        finally:
            db.close()

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
        for db, _ in idle:
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

    def _append_surely(self, db: Database, batches: list[Sequence[Draft]]) -> list[Any]:
        """Store batches, by whichever way; where the answer to their commit is lost, find out what became of them."""
        if time.monotonic() - self._floor_age > FLOOR_AGE:
            self._look_for_floor(db)
        try:
            stored = self._append_all(db, batches)
        except Unanswered as lost:
            stored = self._append_again(db, batches, lost)
        self._note_stored(stored[0][0])
        return stored

    def _append_again(self, db: Database, batches: list[Sequence[Draft]], lost: Unanswered) -> list[Any]:
        """Return what was stored of batches whose commit got no answer, or store them; raise OutcomeUnknown."""
        for _ in range(TRIES):
            found, final = self._stored_before(db, batches, lost)
            if any(not draft.supplied and draft.uid in found for batch in batches for draft in batch):
                return [[found_event(draft, *found[draft.uid]) for draft in batch] for batch in batches]
            if not final:
                break
            try:
                return self._append_all(db, batches)
            except Unanswered as again:
                lost = again
            except (psycopg.OperationalError, psycopg.InterfaceError, StoreUnavailable) as error:
                if found:
                    raise lost from error
                raise
        db.close()  # so that nobody does again what may have been done
        raise lost

    def _stored_before(
        self, db: Database, batches: list[Sequence[Draft]], lost: Unanswered
    ) -> tuple[dict[str, tuple[int, int | None]], bool]:
        """Look on a new connection, for which a server that restarts is given a moment."""
        deadline = time.monotonic() + RETURN
        while True:
            try:
                with db.settled():
                    return stored_before(db, batches, lost, self._floor)
            except (psycopg.Error, PostbusError) as error:
                db.close()
                if time.monotonic() > deadline:
                    raise lost from error
            time.sleep(0.1)

    def _look_for_floor(self, db: Database) -> None:
        with db.settled():
            self._floor, self._floor_age = db.value("latest"), time.monotonic()

    def _note_stored(self, event: Event | int) -> None:
        self._floor = max(self._floor, event if isinstance(event, int) else event.id)
        self._floor_age = time.monotonic()

    def _append_all(self, db: Database, batches: list[Sequence[Draft]]) -> list[Any]:
        notifier = self._notifying()
        told = notifier is not None and notifier.turn()
        stored = _undeadlocked(lambda: append_all(db, batches, tell=told))
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
        with self._borrowed() as (db, catalog):

            def append_here(drafts: Sequence[Draft]) -> list[Event]:
                with translated(self.url):
                    return _known(self._session(db, catalog), drafts, append(db, drafts))

            with translated(self.url):
                db.begin()
            tx = CallersTransaction(
                db,
                append_here,
                lambda settlement: settle_in(self._session(db, catalog), db, settlement),
                lambda step: self._move_in(db, catalog, step),
            )
            try:
                yield tx
                tx.check()
                tx.close()
                catalog.write_kinds(db)
                db.commit()
            except BaseException as error:
                tx.close()
                db.rollback()
                if isinstance(error, psycopg.OperationalError | psycopg.InterfaceError):
                    raise translate(self.url, error) from error
                raise

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

    def _claim_group(self, db: Database, batches: list[Sequence[Claim]]) -> list[list[Won]]:
        """Claim for several callers in one transaction; whoever has to wait for a cursor, in one of its own."""
        claims = [each for batch in batches for each in batch]
        token = new_token()
        try:
            tried = self._claim_some(db, claims, token)
            wons = iter([won or self._claim_waiting(db, each, token) for won, each in zip(tried, claims, strict=True)])
        except psycopg.Error:
            if db.lost:
                self._unanswered.add(token)
                with suppress(psycopg.Error, PostbusError):
                    self._give_back()
            raise
        return [[next(wons) for _ in batch] for batch in batches]

    def _claim_some(self, db: Database, claims: Sequence[Claim], token: str, *, wait: bool = False) -> list[Won | None]:
        try:
            return self._claim_by_number(db, claims, token, wait=wait)
        except psycopg.Error as error:
            if error.sqlstate != NO_SUBSCRIPTION:
                raise
        self._numbers = {}  # one was deleted, and perhaps made anew
        return self._claim_by_number(db, claims, token, wait=wait)

    def _claim_by_number(self, db: Database, claims: Sequence[Claim], token: str, *, wait: bool) -> list[Won | None]:
        if any(each.subscription not in self._numbers for each in claims):
            with self._look() as session:
                for each in claims:
                    self._numbers[each.subscription] = session.catalog.number(each.subscription)
        numbered = [(self._numbers[each.subscription], each) for each in claims]
        with self._alone(db):
            return claim(db, self._floors, numbered, token, wait=wait)

    def _claim_waiting(self, db: Database, asked: Claim, token: str) -> Won:
        while True:
            (won,) = self._claim_some(db, [asked], token, wait=True)
            if won is not None:
                return won

    def _give_back(self) -> None:
        """Hand back what claims were given whose answer was lost."""
        for token in tuple(self._unanswered):

            def end(session: Session, token: str = token) -> None:
                blocks = [block_from_row(row) for row in session.db.run("blocks_of_token", (token,))]
                leases = [lease for block in blocks for lease in block.leases(session.catalog.name(block.subscription))]
                release(session, leases, blocks[0].worker_id if blocks else "", timedelta(0))

            self._write(end)
            self._unanswered.discard(token)

    def expire(self, owners: Iterable[str] | None, policy: RetryPolicy, limit: int = 10_000) -> int:
        if owners is not None:
            return super().expire(owners, policy, limit)
        self._pay_back()
        self._give_back()
        if not self._any_overdue():
            return 0
        made = sum(self._write(lambda session, gap=gap: session.db.value("close_gap", (gap,))) for gap in self._gaps())
        if made:
            self._wake()
        return made + super().expire(None, policy, limit)

    def _gaps(self) -> list[int]:
        with self._glance() as db:
            return [number for (number,) in db.run("some_gaps")]

    def settle(self, settlements: Sequence[Settlement]) -> list[Settled]:
        self._writable()
        with translated(self.url):
            results: list[Settled] = self._settler.run(cast("Any", settlements))
        self._ring()
        return results

    def _settle_group(
        self, db: Database, catalog: Catalog, batches: list[Sequence[Settlement]]
    ) -> list[Sequence[Settled]]:
        """Settle for several callers: what simply worked by one statement, the rest in one transaction."""
        told = [each for batch in batches for each in batch]
        counts = Counter(each.lease[:2] for each in told)
        plain = [each for each in told if is_plain(each) and counts[each.lease[:2]] == 1]
        with self._alone(db):
            done = _undeadlocked(lambda: finish(db, self._numbers, plain)) if plain else set[Lease]()
        rest = [each for each in told if each.lease not in done]
        left = iter(_undeadlocked(lambda: self._settle_rest(db, catalog, rest)) if rest else ())
        return [[Settled.APPLIED if each.lease in done else next(left) for each in batch] for batch in batches]

    def _settle_rest(self, db: Database, catalog: Catalog, told: Sequence[Settlement]) -> list[Settled]:
        with _transaction(db):
            session = self._session(db, catalog)
            results = settle(session, told)
            catalog.write_kinds(db)
        known = {name: session.catalog.known_number(name) for name in {each.lease.subscription for each in told}}
        self._numbers |= {name: number for name, number in known.items() if number is not None}
        return results

    def _jump(self, session: Session) -> int:
        return session.db.value("jump")

    # ── following ────────────────────────────────────────────────────────────────────────────────────────────────

    @contextmanager
    def _glance(self) -> Generator[Database]:
        with self._connection() as (db, _), decoding(), db.settled():
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
                return self._moved(db, step)
            return db.value("move_lightly", (step.subscription, step.epoch, step.position))

    @staticmethod
    def _moved(db: Database, step: Step) -> bool:
        return db.count("move_firmly", (step.position, step.subscription, step.epoch)) == 1

    def _move_in(self, db: Database, catalog: Catalog, step: Step) -> None:
        """Move a checkpoint in the caller's transaction; what leaves nothing behind needs no look at anything else."""
        if step.leaves:
            followers.move(self._session(db, catalog), step)
        elif not self._moved(db, step):
            raise followers.deposed(step.subscription)

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
            got = connection.execute(HOLD, (name,)).fetchone()
        except BaseException:
            connection.close()
            raise
        if got is not None and got[0]:
            return connection
        with self._lock:
            keep = self._trying is None and not self._closed
            if keep:
                self._trying = connection
        if not keep:
            connection.close()
        return None

    # ── connections ──────────────────────────────────────────────────────────────────────────────────────────────

    @contextmanager
    def _alone(self, db: Database) -> Generator[None]:
        """Have a statement commit itself; behind a pooler, settings need a transaction to hold in."""
        if self._address.pooled:
            with _transaction(db):
                yield
            return
        db.ready()
        probe("committing")
        with db.committing():
            yield

    def _write(self, operation: Callable[[Session], R]) -> R:
        """Run an operation in a transaction of its own: only claims, settlements and publishes are grouped."""
        self._writable()
        with self._connection() as (db, catalog):
            return _undeadlocked(lambda: self._transact(db, catalog, operation))

    def _transact(self, db: Database, catalog: Catalog, operation: Callable[[Session], R]) -> R:
        with _transaction(db):
            result = operation(self._session(db, catalog))
            catalog.write_kinds(db)
            probe("committing")
        return result

    def _session(self, db: Database, catalog: Catalog) -> Session:
        catalog.refresh(db)
        return Session(db, catalog, catalog.now)

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
        db = Database(self._direct)
        with suppress(psycopg.Error, StoreUnavailable), closing(db):
            db.ready()
            if not self._direct.pooled:
                db.execute("SET statement_timeout = 0")
            db.connection.longest = math.inf
            for _ in range(2):  # index pages that the first empties are there for use only after a second look
                db.execute(f"VACUUM {self._address.schema}.{table}, {self._address.schema}.deliveries")

    @contextmanager
    def _read(self) -> Generator[Session]:
        with self._connection() as (db, catalog), decoding(), db.snapshot():
            yield self._session(db, catalog)

    @contextmanager
    def _look(self) -> Generator[Session]:
        with self._connection() as (db, catalog), decoding(), db.settled():
            yield self._session(db, catalog)

    @contextmanager
    def _connection(self) -> Generator[tuple[Database, Catalog]]:
        """Take a connection from the pool for a purpose of ours."""
        with translated(self.url), self._borrowed() as (db, catalog):
            yield db.ready(), catalog

    @owned
    def _borrowed(self) -> Generator[tuple[Database, Catalog]]:
        """Take a connection from the pool; one that an error has made doubtful does not go back."""
        self._usable()
        with self._lock:
            taken = self._idle.pop() if self._idle else None
        if taken is None:
            catalog = Catalog()
            taken = Database(self._address, on_rollback=catalog.forget), catalog
        try:
            yield taken
        finally:
            with self._lock:
                keep = not self._closed and len(self._idle) < MAX_IDLE and taken[0].idle
                if keep:
                    self._idle.append(taken)
            if not keep:
                taken[0].close()


@contextmanager
def _transaction(db: Database) -> Generator[None]:
    """Commit at the end of the block, or roll back if it raises."""
    try:
        db.begin()
        yield
        db.commit()
    except BaseException:
        db.rollback()
        raise


def _undeadlocked(transaction: Callable[[], R]) -> R:
    """Run a transaction, again where it and another waited for each other: the server has undone it then."""
    for _ in range(DEADLOCKS):
        with suppress(DeadlockDetected):
            return transaction()
    return transaction()


def _known(session: Session, drafts: Sequence[Draft], stored: list[Event | int]) -> list[Event]:
    """Return the events, read where there are only the ids of those that uids stood for already."""
    return [
        each if isinstance(each, Event) else lookups.known(session, each, draft)
        for draft, each in zip(drafts, stored, strict=True)
    ]


class _Schema:
    """The schema as something to migrate; processes that start at once take turns."""

    def __init__(self, db: Database, schema: str) -> None:
        self.migrations = load_migrations("postbus.store.postgres")
        self._db = db
        self._schema = schema

    def version(self) -> int:
        # A look at the table of tables: to_regclass() may answer from a memory older than another's migration.
        there = "SELECT 1 FROM pg_tables WHERE schemaname = $1 AND tablename = 'meta'"
        if not self._db.execute(there, (self._schema,)):
            return 0
        sql = "SELECT key, value FROM postbus.meta WHERE key IN ('schema_version', 'generation')"
        found = dict(self._db.execute(put_schema(sql, self._schema)))
        if "generation" not in found:
            raise SchemaMismatch(FORMER.format(schema=self._schema))
        return int(found["schema_version"])

    def apply(self, number: int, sql: str) -> None:
        db = self._db
        try:
            db.begin()
            db.execute("SET LOCAL lock_timeout = '10min'; SET LOCAL statement_timeout = 0")
            db.connection.longest = math.inf
            db.execute("SELECT pg_advisory_xact_lock(hashtextextended($1, 7))", (f"postbus migrates {self._schema}",))
            if self.version() == number - 1:
                db.execute(f"CREATE SCHEMA IF NOT EXISTS {self._schema}")
                db.execute(put_schema(sql, self._schema))
                done = put_schema("UPDATE postbus.meta SET value = $1 WHERE key = 'schema_version'", self._schema)
                db.execute(done, (str(number),))
                if number == len(self.migrations) and self._has_roles():
                    db.execute(roles_statements(self._schema))  # new functions are everybody's until they are granted
            db.commit()
        except BaseException:
            db.rollback()
            raise

    def _has_roles(self) -> bool:
        """Return whether `grant_roles` has been here: the reader may look into the schema."""
        return bool(self._db.execute(HAS_ROLES, (self._schema, f"{self._schema}_reader")))


def migration_script(url: str) -> str:
    """Return the SQL that makes the schema from nothing, without a connection."""
    schema = Address.of(url).schema
    steps = "".join(
        f"-- {name}\n{sql.rstrip()}\nUPDATE postbus.meta SET value = '{number}' WHERE key = 'schema_version';\n\n"
        for number, name, sql in load_migrations("postbus.store.postgres")
    )
    return f"BEGIN;\nCREATE SCHEMA IF NOT EXISTS {schema};\n\n{put_schema(steps, schema)}COMMIT;\n"
