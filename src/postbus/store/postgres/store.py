"""The store in a PostgreSQL database: many processes, one queue; publishers, claimers and settlers side by side."""

import math
import os
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar, cast

import psycopg

from postbus.clock import from_micros
from postbus.errors import (
    Conflict,
    InvalidRequest,
    LeaseLost,
    NotFound,
    OutcomeUnknown,
    PostbusError,
    StoreUnavailable,
)
from postbus.model import Done, Event, Stats, Stream
from postbus.observe import probe
from postbus.payload import Draft
from postbus.store.committer import Committer
from postbus.store.contract import (
    Claim,
    Claimed,
    Couriers,
    Finding,
    Reader,
    Report,
    Reported,
    Settled,
    Settlement,
    Step,
    Transaction,
    Watch,
    WouldWait,
)
from postbus.store.liveness import Liveness
from postbus.store.migrate import migrate
from postbus.store.postgres import appending, foreign
from postbus.store.postgres.claiming import claim_at_once
from postbus.store.postgres.connection import (
    Address,
    Database,
    Steps,
    Unanswered,
    put_schema,
    run_steps,
    translate,
    translated,
)
from postbus.store.postgres.courier import PostgresCourier
from postbus.store.postgres.finishing import Key, Plain, finish, plain_successes, reported
from postbus.store.postgres.inspection import holders, inspect, require_safe
from postbus.store.postgres.leases import Marks, PostgresLeases
from postbus.store.postgres.listen import Bell, Listener, Notifier
from postbus.store.postgres.reader import PostgresReader
from postbus.store.postgres.roles import roles_statements
from postbus.store.postgres.rows.catalog import Catalog
from postbus.store.postgres.rows.following import Following, deposed
from postbus.store.postgres.rows.reading import Reading, rows_of
from postbus.store.postgres.rows.session import Session
from postbus.store.postgres.rows.sql import LOAD_CHUNK, Kind, SqlStore, Won, kind
from postbus.store.postgres.single import Remembered, Single, SingleCommitter, undeadlocked
from postbus.store.queries import load_migrations
from postbus.store.records import decoding, moment
from postbus.store.session import Row
from postbus.store.staging import require_all, require_part
from postbus.store.transaction import CallersTransaction

__all__ = ["Address", "PostgresStore", "migration_script"]

R = TypeVar("R")
MAX_IDLE: Final = 8
MAX_CLAIM: Final = 1_000
MAX_REMEMBERED: Final = 1_000
BACKFILL: Final = 5_000
PUBLISH: Final = 10_000
PATIENCE: Final = 30.0
FLOOR_AGE: Final = 60.0
"""Seconds after which the latest event is looked up anew: what was published since then is what a lost answer costs."""
TRIES: Final = 3
RETURN: Final = 5.0
"""Seconds in which a server may come back, and tell what became of a commit."""
WHICH: Final = "SELECT current_database(), pg_postmaster_start_time()"
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
        self._catalogs: dict[int, Remembered] = {}
        self._marks = Marks()
        self._flowing: dict[Kind, int] = {}
        """The kinds of claims that got all they asked for, and probably will again: from routes such as this one."""
        publisher = Database(self._address)
        self._publisher = Committer(publisher, lambda batches: self._append_surely(publisher, batches))
        self._floor, self._floor_age = 0, -math.inf
        """The id of an event that was stored, and when it was the latest."""
        self._claimer = self._committer()
        self._settler = self._committer()
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

    def _committer(self) -> Committer[Database]:
        catalog = Remembered()
        db = Database(self._address, on_rollback=lambda: self._forget(catalog))
        self._catalogs[id(db)] = catalog
        return SingleCommitter(db, pooled=self._address.pooled)

    def _forget(self, catalog: Catalog) -> None:
        catalog.forget()
        self._marks.clear()

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

    def hurried(self) -> NoReturn:
        raise WouldWait

    def couriers(self) -> Couriers | None:
        if self._address.pooled:
            return None
        claiming, reporting = Remembered(), Remembered()
        return Couriers(
            PostgresCourier[list[Draft], list[Event]](
                self._address,
                ("append_one", "notify"),
                lambda _, drafts: self._publish_lone(drafts),
                self._look_for_floor,
            ),
            PostgresCourier[Claim, Claimed](
                self._address,
                ("claim_at_once",),
                lambda _, claim: self._claim_lone(claiming, claim),
                claiming.refresh,
                lambda: self._forget(claiming),
            ),
            PostgresCourier[Report, Reported](
                self._address,
                ("finish_all",),
                lambda db, report: self._report_lone(db, reporting, report),
                reporting.refresh,
                reporting.forget,
            ),
        )

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
                return [[appending.found_event(draft, *found[draft.uid]) for draft in batch] for batch in batches]
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
                return appending.stored_before(db.ready(), batches, lost, self._floor)
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
        if (lone := appending.lone(batches)) is not None and not self._address.pooled:
            told = notifier is not None and notifier.turn()
            stored: list[Any] = [[appending.append_lone(db, lone, tell=told)]]
            if notifier is not None and not told:
                notifier.tell_soon()
            return stored
        stored = appending.append_all(db, batches, self._address.schema)
        with suppress(Exception):  # it is stored: whoever is told that it failed would have it stored again
            if notifier is not None:
                notifier.tell(db)
        return stored

    def _publish_lone(self, drafts: list[Draft]) -> Steps[list[Event]] | None:
        draft = appending.lone([drafts])
        return None if draft is None else self._publishing(draft)

    def _publishing(self, draft: Draft) -> Steps[list[Event]]:
        notifier = self._notifying()
        told = notifier is not None and notifier.turn()
        probe("committing")
        try:
            rows = yield appending.lone_asked(draft, tell=told)
        except Unanswered as lost:
            raise WouldWait(partial(self._publish_again, [draft], lost)) from lost
        if notifier is not None and not told:
            notifier.tell_soon()
        self._ring()
        event = appending.lone_event(draft, rows)
        self._note_stored(event)
        return [event]

    def _publish_again(self, drafts: list[Draft], lost: Unanswered) -> list[Event]:
        with self._connection() as (db, _):
            (stored,) = self._append_again(db, [drafts], lost)
        self._wake()
        return stored

    def _filled(self, drafts: Sequence[Draft], stored: list[Event | int]) -> list[Event]:
        """Put the events that uids stood for already in the places that hold only their ids."""
        if all(isinstance(each, Event) for each in stored):
            return cast("list[Event]", stored)
        try:
            with self._read() as session:
                return _known(Reading(session), drafts, stored)
        except StoreUnavailable as error:  # behind the commit, which has stored the others
            raise OutcomeUnknown(
                f"all events are stored, but those with a uid that was known could not be read: {error}"
            ) from error

    @contextmanager
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

    @contextmanager
    def _transaction(self) -> Generator[CallersTransaction]:
        with self._borrowed() as (db, catalog):

            def append(drafts: Sequence[Draft]) -> list[Event]:
                with translated(self.url):
                    stored = appending.append_here(db, drafts, self._address.schema)
                    return _known(Reading(self._session(db, catalog)), drafts, stored)

            with translated(self.url):
                db.begin()
            tx = CallersTransaction(
                db,
                append,
                lambda settlement: self._leases(self._session(db, catalog)).settle([settlement])[0],
                lambda step: self._move_in(db, catalog, step),
            )
            try:
                yield tx
                tx.check()
                tx.close()
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

    def _backfill(self, session: Session, name: str, after: int) -> None:
        last: int | None = after
        while last is not None:
            last = session.db.value("deliver_to", (name, last, BACKFILL, session.now))

    def stage(self, part: int, first: int, drafts: Sequence[Draft]) -> None:
        self._writable()
        with self._connection() as (db, catalog):
            try:
                db.begin()
                require_part(self._session(db, catalog), part)
                appending.stage(db, part, first, drafts, self._address.schema)
                db.commit()
            except BaseException:
                db.rollback()
                raise

    def _publish_part(self, session: Session, part: int, rows: int) -> int:
        total = 0
        for low in range(0, rows, PUBLISH):
            high = min(low + PUBLISH, rows)
            found, fresh = session.db.run("publish_part", (part, low, high))[0]
            require_all(part, found, high - low)
            total += fresh
        return total

    # ── claiming ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _leases(self, session: Session) -> PostgresLeases:
        return PostgresLeases(session, self._marks)

    def _claim_all(self, claims: Sequence[Claim]) -> list[Won]:
        wanted = [replace(each, limit=min(each.limit, MAX_CLAIM)) for each in claims]

        def take(session: Session) -> list[Won]:
            due: dict[Kind, datetime | None] = {}
            results: list[Won] = []
            for each, won in zip(wanted, self._taken(session, wanted), strict=True):
                key, full = kind(each), len(won.taken) == each.limit
                self._remember(key, full=full)
                more = won.suspects or full
                if more or session.catalog.subscription(each.subscription).paused:
                    results.append(won._replace(more=more))
                    continue
                if key not in due:
                    due[key] = moment(Reading(session).next_due(session.catalog.select(*key)))
                results.append(won._replace(more=False, next_due=due[key]))
            return results

        return self._claim_at_once(wanted) or self._run(self._claimer, take)

    def _claim_at_once(self, claims: Sequence[Claim]) -> list[Won]:
        """Lease by one statement what claims that are alike will probably get; return nothing if they did not."""
        kinds = {kind(each) for each in claims}
        source = self._flowing.get(kinds.pop()) if len(kinds) == 1 else None
        if source is None or sum(each.limit for each in claims) > LOAD_CHUNK:
            return []
        return self._single(
            self._claimer,
            lambda db, catalog: run_steps(db, claim_at_once(catalog, self._marks, source, claims)),
        )

    def _claim_lone(self, catalog: Remembered, claim: Claim) -> Steps[Claimed] | None:
        source = self._flowing.get(kind(claim))
        return None if source is None or claim.limit > 1 else self._claiming(catalog, source, claim)

    def _claiming(self, catalog: Remembered, source: int, claim: Claim) -> Steps[Claimed]:
        wons = yield from claim_at_once(catalog, self._marks, source, [claim])
        if not wons:
            raise WouldWait
        loaded, damaged = self._deliveries(claim, wons[0], wons[0].taken, wons[0].rows)
        if damaged:
            raise WouldWait(lambda: self._claimed(claim, wons[0], wons[0].rows))
        return Claimed(tuple(loaded), wons[0].next_due, suspects=wons[0].suspects, more=wons[0].more)

    def _remember(self, key: Kind, *, full: bool) -> None:
        if len(self._flowing) > MAX_REMEMBERED:
            self._flowing.clear()
        self._flowing.pop(key, None)
        if full:
            self._flowing[key] = self._marks.latest

    def _event_rows(self, ids: list[int]) -> tuple[dict[int, Row], list[int]]:
        """Read them as they are: an event never changes, so that no snapshot is needed."""
        with self._glance() as db:
            return rows_of(db, ids)

    def settle(self, settlements: Sequence[Settlement]) -> list[Settled]:
        leases = {each.lease for each in settlements}
        if len(leases) < len(settlements) or not all(isinstance(each.outcome, Done) for each in settlements):
            return super().settle(settlements)
        finished = self._single(self._settler, lambda db, _: run_steps(db, finish(settlements)).rows) if leases else {}
        rest = [each for each in settlements if each.lease not in finished]
        told = dict(zip((each.lease for each in rest), super().settle(rest), strict=True)) if rest else {}
        self._ring()
        return [told.get(each.lease, Settled.APPLIED) for each in settlements]

    def report(self, reports: Sequence[Report]) -> list[Reported | LeaseLost | NotFound]:
        plain = plain_successes(reports)
        if not plain:
            return super().report(reports)
        answers: dict[Key, Reported | LeaseLost | NotFound] = {}
        told = [each for _, each in plain.values()]
        answers |= self._single(
            self._settler, lambda db, catalog: reported(db, catalog, plain, run_steps(db, finish(told)))
        )
        if rest := [each for each in reports if each[:2] not in answers]:
            answers |= zip((each[:2] for each in rest), super().report(rest), strict=True)
        self._ring()
        return [answers[each[:2]] for each in reports]

    def _report_lone(self, db: Database, catalog: Remembered, report: Report) -> Steps[Reported] | None:
        plain = plain_successes([report])
        return self._reporting(db, catalog, plain) if plain else None

    def _reporting(self, db: Database, catalog: Remembered, plain: Plain) -> Steps[Reported]:
        ended = yield from finish(told for _, told in plain.values())
        if not ended.rows:
            raise WouldWait
        self._ring()
        if ended.version != catalog.version:
            raise WouldWait(lambda: next(iter(reported(db, catalog, plain, ended).values())))
        return next(iter(reported(db, catalog, plain, ended).values()))

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
            db.run("await_beside")
            db.run("keep_subscriptions")
            Following(self._session(db, catalog)).move(step)
        elif not self._moved(db, step):
            raise deposed(step.subscription)

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

    def _single(self, committer: Committer[Database], operation: Callable[[Database, Remembered], R]) -> R:
        """Run an operation of one statement, which is a transaction of its own unless others run beside it."""
        self._writable()

        def run(db: Database) -> R:
            return operation(db, self._catalogs[id(db)])

        with translated(self.url):
            return committer.run(Single(run))

    def _write(self, operation: Callable[[Session], R]) -> R:
        return self._run(self._settler, operation)

    def _run(self, committer: Committer[Database], operation: Callable[[Session], R]) -> R:
        self._writable()
        with translated(self.url):
            return committer.run(lambda db: operation(self._session(db, self._catalogs[id(db)])))

    def _session(self, db: Database, catalog: Catalog) -> Session:
        catalog.refresh(db)
        return Session(db, catalog, catalog.now)

    @staticmethod
    def _anew(session: Session) -> Session:
        session.catalog.refresh(session.db)
        return session._replace(now=session.catalog.now)

    def _shut_out(self, operation: Callable[[Session], R]) -> R:
        """Run an operation while no publish is under way, waiting for those that are, and making none wait for us."""

        def attempt(session: Session) -> tuple[R] | None:
            # Looked at anew behind the lock: whoever held it before may have changed what was seen.
            session.db.run("await_beside")
            alone = session.db.value("try_shut_out")
            return (operation(self._anew(session)),) if alone else None

        deadline = time.monotonic() + PATIENCE
        while True:
            result = self._write(attempt)
            if result is not None:
                return result[0]
            if time.monotonic() > deadline:
                raise StoreUnavailable(
                    f"{self.url}: publishers had transactions open for {PATIENCE:.0f} s: `postbus doctor` names them"
                )
            time.sleep(0.02)

    def _keeping(self, operation: Callable[[Session], R]) -> R:

        def kept(session: Session) -> R:
            # Looked at anew behind the locks: subscriptions and routes that are there stay until the end of it.
            session.db.run("await_beside")
            session.db.run("keep_subscriptions")
            return operation(self._anew(session))

        return self._write(kept)

    def _beside(self, operation: Callable[[Session], R]) -> R:
        """Run it on a connection from the pool, so that no settle waits for it, and one at a time in the database."""
        self._writable()
        with self._connection() as (db, catalog):

            def attempt() -> R:
                try:
                    db.begin()
                    db.run("hold_beside")
                    result = operation(self._session(db, catalog))
                    db.commit()
                except BaseException:
                    db.rollback()
                    raise
                return result

            return undeadlocked(attempt)

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
        with self._connection() as (db, catalog), decoding():
            yield self._session(db, catalog)

    @contextmanager
    def _connection(self) -> Generator[tuple[Database, Catalog]]:
        """Take a connection from the pool for a purpose of ours."""
        with translated(self.url), self._borrowed() as (db, catalog):
            yield db.ready(), catalog

    @contextmanager
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


def _known(reading: Reading, drafts: Sequence[Draft], stored: list[Event | int]) -> list[Event]:
    """Return the events, read where there are only the ids of those that uids stood for already."""
    return [
        each if isinstance(each, Event) else reading.known(each, draft)
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
        sql = put_schema("SELECT value::integer FROM postbus.meta WHERE key = 'schema_version'", self._schema)
        return self._db.execute(sql)[0][0]

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
