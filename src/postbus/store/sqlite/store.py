"""The store in one SQLite file: one writer at a time, grouped; readers beside it, each with a snapshot."""

import hashlib
import logging
import os
import re
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Final, TypeVar

import apsw

from postbus.clock import Clock, to_micros
from postbus.errors import Conflict, SchemaMismatch, UnsafeStore
from postbus.model import Event, Stream
from postbus.observe import tell
from postbus.pattern import Interest
from postbus.payload import Draft
from postbus.store import depth, followers, lookups
from postbus.store.base import SqlStore
from postbus.store.committer import Committer
from postbus.store.contract import Claim, Finding, Step, Transaction, Watch
from postbus.store.leases import Won, settle
from postbus.store.liveness import Liveness, lock
from postbus.store.migrate import migrate, pending
from postbus.store.owned import owned
from postbus.store.queries import load_migrations
from postbus.store.records import decoding, moment
from postbus.store.session import Session
from postbus.store.sqlite import forks
from postbus.store.sqlite.append import append, publish_part
from postbus.store.sqlite.claim import claim
from postbus.store.sqlite.connection import SQLITE_ERRORS, Database, translate, translated
from postbus.store.sqlite.inspection import condition, inspect
from postbus.store.sqlite.watch import FileWatch
from postbus.store.transaction import CallersTransaction

R = TypeVar("R")
APPLICATION_ID: Final = int.from_bytes(b"pbus")
"""Set by the first migration: it tells our file from another program's."""
FORMER_ID: Final = int.from_bytes(b"post")
"""What files had that were made before the first release, by another schema."""
ESCAPED: Final = str.maketrans({"%": "%25", "?": "%3F", "#": "%23"})
CREATED: Final = re.compile(r"^CREATE TABLE (\w+)", re.MULTILINE)
FEW: Final = 8
MAX_READERS: Final = 8
MAX_REMEMBERED: Final = 1_000
ENOUGH_FREE_PAGES: Final = 2_000
MOST_GIVEN_BACK: Final = 100
FORK_PATIENCE: Final = 1.0
LARGEST_REWRITTEN: Final = 500_000_000
"""Bytes: some seconds, in which nobody can write. More would hold up other processes for longer than they wait."""
NUMBERS_APART: Final = 1 << 30
"""How far the numbers of blocks jump after a restore: more than the old log can have given since the backup."""
Asked = tuple[str, tuple[Interest, ...], tuple[Interest, ...]]
"""What decides which deliveries a claim may have: its subscription, interests and what is blocked."""


class SqliteStore(SqlStore):
    """A `Log` in a file that postbus alone opens. Safe to use from many threads, and from many processes."""

    def __init__(self, path: Path, clock: Clock, *, auto_migrate: bool = True) -> None:
        """Open the file, making and migrating it if allowed; raise UnsafeStore, SchemaMismatch, StoreUnavailable."""
        self.url = f"sqlite:///{str(path).translate(ESCAPED)}"
        path = path.resolve()  # as SQLite does: by whatever name or from wherever, what lies beside it is found there
        super().__init__(Liveness(path.with_name(path.name + "-alive")))
        self._path = path
        self._clock = clock
        self._readers: list[Database] = []
        self._lent = 0
        """How many readers are in use."""
        self._returned = threading.Condition(self._lock)
        self._published = 0
        self._looked: dict[Asked, int] = {}
        """For each kind of claim: how often this process had published when it last found less than it asked for."""
        if os.access(path, os.R_OK):
            _require_ours(path, auto_migrate=auto_migrate)
        self._database = Database(path)
        self._committer = Committer(self._database)
        with translated(path):
            migrate(_Schema(path, self._database), allowed=auto_migrate)
        forks.STORES[id(self)] = self

    def now(self) -> datetime:
        return self._clock.now()

    def close(self) -> None:
        if self._pid != os.getpid():  # a forked child's copy: everything is the parent's, its locks too
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            readers, watches = self._readers, list(self._watches)
        for watch in watches:
            watch.close()
        for reader in readers:
            reader.close()
        with self._committer.hold() as writer:
            writer.close()

    @contextmanager
    def forking(self) -> Generator[None]:
        """Have nothing of the file open while this process forks, if nobody is in the midst of using it."""
        with self._committer.hold(FORK_PATIENCE) as writer, self._lock:
            if not self._returned.wait_for(lambda: not self._lent, FORK_PATIENCE) or self._watches or self._closed:
                raise Conflict(f"{self.url} is in use")
            for db in (writer, *self._readers):
                db.close()
            self._readers.clear()
            try:
                yield
            finally:
                if os.getpid() == self._pid:
                    writer.reopen()

    # ── publishing ───────────────────────────────────────────────────────────────────────────────────────────────

    def publish(self, drafts: Sequence[Draft]) -> list[Event]:
        events = self._write(lambda session: append(session, drafts))
        self._published += 1
        self._wake()
        return events

    @owned
    def transaction(self) -> Generator[Transaction]:
        self._usable()
        try:
            with self._committer.exclusive() as db:
                tx = CallersTransaction(
                    db,
                    lambda drafts: self._append_in(db, drafts),
                    lambda settlement: settle(self._session_anew(db), [settlement])[0],
                    lambda step: self._move_in(db, step),
                )
                try:
                    yield tx
                finally:
                    tx.close()
                    if tx.touched:
                        db.catalog.forget()
        except apsw.SQLError:
            raise  # a mistake in a statement of the caller's own
        except apsw.Error as error:
            raise translate(self._path, error) from error
        if tx.touched:
            self._wake()

    def _append_in(self, db: Database, drafts: Sequence[Draft]) -> list[Event]:
        """Store events in the caller's transaction, all or none: it may go on after a refusal, and commit."""
        with db.savepoint():
            return append(self._session_anew(db), drafts)

    def _session_anew(self, db: Database) -> Session:
        """Trust no memory: a savepoint of the caller's own may have taken back what was remembered."""
        db.catalog.forget()
        return self._session(db)

    def _publish_part(self, session: Session, part: int, rows: int) -> int:
        return publish_part(session, part, rows)

    # ── claiming ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _claim_all(self, claims: Sequence[Claim]) -> list[Won]:
        """Lease what is due; a claim for which nothing is due waits for no writer: it looks before it takes the lock.

        That takes a tenth of the time of an event that is claimed and settled by itself. So a claim does not look
        where something is likely: if the last such claim got all it asked for, or this process has published since.
        """
        published = self._published
        nothing: dict[Asked, Won] = {}
        for key in {_asked(each) for each in claims}:
            if self._looked.get(key, published) == published and (won := self._look_first(key)) is not None:
                nothing[key] = won
        waiting = [each for each in claims if _asked(each) not in nothing]
        wons = iter(self._write(lambda session: _claim_each(session, waiting)) if waiting else ())
        results = [nothing[key] if (key := _asked(each)) in nothing else next(wons) for each in claims]
        if len(self._looked) > MAX_REMEMBERED:
            self._looked.clear()
        for each, won in zip(claims, results, strict=True):
            self._looked[_asked(each)] = published if len(won.taken) < each.limit else -1
        return results

    def _look_first(self, key: Asked) -> Won | None:
        """Return that there is nothing to claim, if so."""
        name, *interests = key
        with self._read() as session:
            nothing = Won([], suspects=False, policy=None, now=session.now, more=False)
            if session.catalog.subscription(name).paused:
                return nothing
            selection = session.catalog.select(*interests)
            if depth.is_due(session, name, selection):
                return None
            return nothing._replace(next_due=moment(depth.next_due(session, name, selection)))

    # ── following ────────────────────────────────────────────────────────────────────────────────────────────────

    def _move_lightly(self, step: Step) -> bool:
        self._usable()
        with self._committer.hold() as db, translated(self._path), db.durable_later():
            return self._moved(db, step)

    def _moved(self, db: Database, step: Step) -> bool:
        now = to_micros(self._clock.now())
        return db.count("move_lead", (step.position, now, step.subscription, step.epoch)) == 1

    def _move_in(self, db: Database, step: Step) -> None:
        """Move a checkpoint in the caller's transaction; what leaves nothing behind needs no look at anything else."""
        if step.leaves:
            followers.move(self._session_anew(db), step)
        elif not self._moved(db, step):
            raise followers.deposed(step.subscription)

    # ── housekeeping ─────────────────────────────────────────────────────────────────────────────────────────────

    def tidy(self) -> int:
        removed = super().tidy()
        self._write(_give_back_pages)
        return removed

    def _reclaim(self, stream: Stream, *, done: bool) -> None:
        """Make the file smaller, a thousand pages a transaction; at the end, as small as it gets, with an empty WAL."""
        del stream
        enough = 0 if done else ENOUGH_FREE_PAGES
        for _ in range(MOST_GIVEN_BACK):
            if not self._write(lambda session: _give_back_pages(session, enough)):
                break
        if done:
            with self._committer.hold() as db, translated(self._path):
                db.empty_wal()

    def _scrub(self) -> None:
        """Rewrite the file, unless it is large: in the slack of pages SQLite leaves copies of rows that it moved."""
        size = self._path.stat().st_size
        if size > LARGEST_REWRITTEN:
            tell(logging.WARNING, "file_not_rewritten", path=str(self._path), bytes=size, remedy="VACUUM")
            self._reclaim(Stream.EVENTS, done=True)
            return
        with self._committer.hold() as db, translated(self._path):
            db.script("VACUUM")
            db.empty_wal()

    def _jump(self, session: Session) -> int:
        session.db.run("begin_sequences")
        session.db.run("jump_ids")
        return session.db.value("draw_numbers", (NUMBERS_APART,))

    def inspect(self, *, deep: bool) -> tuple[Finding, ...]:
        with self._glance() as db:
            return inspect(db, self._path, deep=deep)

    def condition(self) -> tuple[Finding, ...]:
        with self._glance() as db:
            return condition(db, self._path)

    def watch(self) -> Watch:
        watch = FileWatch(self._path, self._unwatch)
        with self._lock:
            self._watches.append(watch)
        return watch

    @contextmanager
    def hold(self, name: str) -> Generator[Callable[[], None]]:
        self._usable()
        file = hashlib.md5(name.encode(), usedforsecurity=False).hexdigest()
        with lock(self._path.with_name(self._path.name + "-held") / file) as held:
            if not held:
                raise Conflict(f"{self.url}: another process holds {name!r}")
            yield lambda: None

    # ── connections ──────────────────────────────────────────────────────────────────────────────────────────────

    def _session(self, db: Database) -> Session:
        """Begin work in a transaction."""
        db.refresh_catalog()
        return Session(db, db.catalog, to_micros(self._clock.now()))

    def _write(self, operation: Callable[[Session], R]) -> R:
        self._usable()
        try:
            return self._committer.run(lambda db: operation(self._session(db)))
        except SQLITE_ERRORS as error:
            raise translate(self._path, error) from error

    def _beside(self, operation: Callable[[Session], R]) -> R:
        """There is one writer at a time anyway; of what it removes nothing is left in the file."""

        def thoroughly(session: Session) -> R:
            with self._database.overwriting():
                return operation(session)

        return self._write(thoroughly)

    @owned
    def _read(self) -> Generator[Session]:
        with self._glance() as db, db.snapshot():
            yield self._session(db)

    _look = _read
    """One writer at a time: a snapshot of a moment shows a later statement no less than it must see."""

    @owned
    def _glance(self) -> Generator[Database]:
        self._usable()
        with self._lock:
            self._lent += 1
            reader = self._readers.pop() if self._readers else None
        try:
            db = reader or Database(self._path, readonly=True)
            try:
                with translated(self._path), decoding():
                    yield db
            finally:
                self._give_back(db)
        finally:
            with self._lock:
                self._lent -= 1
                self._returned.notify_all()

    def _give_back(self, db: Database) -> None:
        """Keep a reader for the next one, unless an interrupt left its snapshot open."""
        with self._lock:
            if not self._closed and len(self._readers) < MAX_READERS and not db.in_transaction:
                self._readers.append(db)
                return
        db.close()


def _claim_each(session: Session, claims: Sequence[Claim]) -> list[Won]:
    """Claim in turn; the rows of a few events are read at once: to begin anew would take longer."""
    wons = [_with_next_due(session, each, claim(session, each)) for each in claims]
    ids = [each.event_id for won in wons for each in won.taken]
    if not 0 < len(ids) <= FEW:
        return wons
    rows, left = lookups.rows_of(session.db, ids)
    return wons if left else [won._replace(rows=rows) for won in wons]


def _with_next_due(session: Session, claim: Claim, won: Won) -> Won:
    """Tell a claim that got nothing when to come again."""
    if won.taken:
        return won
    selection = session.catalog.select(claim.interests, claim.blocked)
    return won._replace(next_due=moment(depth.next_due(session, claim.subscription, selection)))


def _asked(claim: Claim) -> Asked:
    return claim.subscription, claim.interests, claim.blocked


def _require_ours(path: Path, *, auto_migrate: bool) -> None:
    """Raise what keeps a file from being used, before opening it to write makes it a WAL file: it may be another's."""
    with closing(Database(path, readonly=True)) as db, translated(path), db.snapshot():
        schema = _Schema(path, db)
        wanted = {name for *_, sql in pending(schema) for name in CREATED.findall(sql)}
        taken = sorted(wanted.intersection(name for (name,) in db.run("names")))
        if taken and db.pragma("application_id") != APPLICATION_ID:
            raise UnsafeStore(f"{path} has tables of another program ({', '.join(taken)}): choose another file")
        if not auto_migrate:
            migrate(schema, allowed=False)


class _Schema:
    """The file as something to migrate."""

    def __init__(self, path: Path, db: Database) -> None:
        self._path = path
        self.migrations = load_migrations("postbus.store.sqlite")
        self._db = db

    def version(self) -> int:
        version = self._db.pragma("user_version")
        if self._db.pragma("application_id") == FORMER_ID:
            raise SchemaMismatch(
                f"{self._path} was made by an earlier postbus, whose tables this one does not read; nothing was "
                "changed. To bring its events into a new file: postbus import events --type type --payload payload "
                f"--key key --tags tags --from sqlite:///{self._path} --url NEW"
            )
        if version and self._db.pragma("application_id") != APPLICATION_ID:
            raise UnsafeStore("this SQLite file belongs to another program: choose another file")
        return version

    def apply(self, number: int, sql: str) -> None:
        with Committer(self._db).exclusive() as db:
            if db.pragma("user_version") == number - 1:
                db.script(f"{sql}; PRAGMA user_version = {number:d}")


def _give_back_pages(session: Session, enough: int = ENOUGH_FREE_PAGES) -> bool:
    """Give back some pages if more than enough are free; return whether that was so."""
    many = session.db.value("free_pages") > enough
    if many:
        session.db.run("give_back_pages")
    return many
