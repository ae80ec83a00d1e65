"""The store in one SQLite file: one writer at a time, grouped; readers beside it, each with a snapshot."""

import os
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Final, TypeVar

import apsw
import orjson

from postbus.breaker import BreakerState
from postbus.clock import Clock, from_micros, to_micros
from postbus.errors import Conflict, EventBusShutdownError, StoreUnavailable, UnsafeStore
from postbus.model import (
    AttemptError,
    Dead,
    DeadLetter,
    Delivery,
    Event,
    HandlerRecord,
    Lease,
    LogEntry,
    Mode,
    Page,
    Stats,
    Status,
    Subscription,
)
from postbus.pattern import Interest
from postbus.payload import Draft
from postbus.retry import RetryPolicy
from postbus.store.committer import Committer
from postbus.store.contract import (
    Claim,
    Claimed,
    DeadFilter,
    Finding,
    Settled,
    Settlement,
    Transaction,
    Watch,
    Work,
)
from postbus.store.migrate import migrate
from postbus.store.queries import load_migrations
from postbus.store.sqlite.appending import Appending, CallersTransaction
from postbus.store.sqlite.burials import Burials
from postbus.store.sqlite.catalog import Catalog
from postbus.store.sqlite.connection import SQLITE_ERRORS, Database, Row, translate, translated
from postbus.store.sqlite.inspection import inspect
from postbus.store.sqlite.leases import Leases, Taken
from postbus.store.sqlite.liveness import Liveness
from postbus.store.sqlite.reading import Reading, dead_keys, tags_filter
from postbus.store.sqlite.records import UNREADABLE, claimed_event, decoding, moment, quick_delivery, split_tags
from postbus.store.sqlite.watch import FileWatch

__all__ = ["SqliteStore"]

R = TypeVar("R")
APPLICATION_ID: Final = int.from_bytes(b"post")
"""Set by the first migration: it tells our file from another program's."""
DEDUP_WINDOW: Final = timedelta(days=7)
HANDLER_MEMORY: Final = timedelta(days=7)
CHUNK: Final = 1_000
MAX_READERS: Final = 8
LOAD_CHUNK: Final = 100
LOAD_BYTES: Final = 32_000_000
MAX_REMEMBERED: Final = 1_000
TIDY_UIDS: Final = 100_000
SPARE_ROUTES: Final = 10_000
ENOUGH_FREE_PAGES: Final = 2_000


class SqliteStore:
    """A `Store` in a file that postbus alone opens. Safe to use from many threads, and from many processes.

    What each method promises stands in the contract.
    """

    def __init__(self, path: Path, clock: Clock, *, auto_migrate: bool = True) -> None:
        """Open the file, making and migrating it if allowed; raise UnsafeStore, SchemaMismatch, StoreUnavailable."""
        self._path = path
        self._clock = clock
        self._pid = os.getpid()
        self._catalog = Catalog()
        self._liveness = Liveness(path)
        self._readers: list[tuple[Database, Catalog]] = []
        self._published = 0
        self._looked: dict[tuple[str, tuple[Interest, ...], tuple[Interest, ...]], int] = {}
        """For each kind of claim: how often this process had published when it last found less than it asked for."""
        self._watches: list[FileWatch] = []
        self._lock = threading.Lock()
        self._closed = False
        self._database = Database(path, on_rollback=self._catalog.forget)
        self._committer = Committer(self._database)
        with translated(path):
            migrate(_Schema(self._committer, self._database), allowed=auto_migrate)

    @property
    def url(self) -> str:
        return f"sqlite:///{self._path}"

    def now(self) -> datetime:
        return self._clock.now()

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            readers, watches = self._readers, list(self._watches)
        for watch in watches:
            watch.close()
        for reader, _ in readers:
            reader.close()
        with self._committer.hold() as writer:
            writer.close()

    # ── publishing ───────────────────────────────────────────────────────────────────────────────────────────────

    def publish(self, drafts: Sequence[Draft]) -> list[Event]:
        events = self._write(lambda db: self._appending(db).append(drafts))
        self._published += 1
        self._wake()
        return events

    @contextmanager
    def transaction(self) -> Generator[Transaction]:
        self._usable()
        try:
            with self._committer.exclusive() as db:
                tx = CallersTransaction(db, lambda: self._appending_anew(db))
                try:
                    yield tx
                finally:
                    tx.close()
                    self._catalog.forget()
        except apsw.SQLError:
            raise  # a mistake in a statement of the caller's own
        except SQLITE_ERRORS as error:
            raise translate(self._path, error) from error
        self._wake()

    def _appending_anew(self, db: Database) -> Appending:
        """Trust no memory: a savepoint of the caller's own may have taken back what was remembered."""
        self._catalog.forget()
        return self._appending(db)

    def _appending(self, db: Database) -> Appending:
        self._catalog.renew(db)
        return Appending(db, self._catalog, self.now())

    # ── the lease verbs ──────────────────────────────────────────────────────────────────────────────────────────

    def claim(self, claim: Claim) -> Claimed:
        key = (claim.subscription, claim.interests, claim.blocked)
        published = self._published
        if self._looked.get(key, published) == published:
            # Nothing is known to have come: look before waiting for the write lock.
            with self._read() as reading:
                selection = reading.catalog.select(*key)
                if reading.catalog.subscription(claim.subscription).paused:
                    return Claimed()
                if not reading.is_due(selection):
                    self._looked[key] = published
                    return Claimed(next_due=moment(reading.next_due(selection)))
        taken, suspects = self._write_catalogued(lambda db: self._claim(db, claim))
        if len(self._looked) > MAX_REMEMBERED:
            self._looked.clear()
        self._looked[key] = published if len(taken) < claim.limit else -1
        if taken:
            return Claimed(self._loaded_or_released(claim, taken), suspects=suspects)
        with self._read() as reading:
            return Claimed(next_due=moment(reading.next_due(reading.catalog.select(*key))), suspects=suspects)

    def _claim(self, db: Database, claim: Claim) -> tuple[list[Taken], bool]:
        subscription = self._catalog.subscription(claim.subscription)
        if subscription.paused:
            return [], False
        return self._leases(db).claim(claim, subscription)

    def _loaded_or_released(self, claim: Claim, taken: list[Taken]) -> tuple[Delivery, ...]:
        """Return the deliveries with their events; hand all of them back if that fails."""
        try:
            return self._loaded(claim, taken)
        except BaseException:
            self.release([each.lease(claim.subscription) for each in taken], claim.worker_id)
            raise

    def _loaded(self, claim: Claim, taken: list[Taken]) -> tuple[Delivery, ...]:
        """Return the deliveries with their events; read after the commit, so that other writers need not wait.

        An event that cannot be read is buried with the reason, and does not harm its neighbours. What would take too
        much memory at once is handed back.
        """
        now, until = self.now(), from_micros(taken[0].until)
        loaded: list[Delivery] = []
        damaged: list[Settlement] = []
        size = 0
        with self._read() as reading:
            policy = reading.catalog.subscription(claim.subscription).retry or claim.policy
            while taken and size < LOAD_BYTES:
                chunk, taken = taken[:LOAD_CHUNK], taken[LOAD_CHUNK:]
                rows = reading.rows([each.event_id for each in chunk])
                size += sum(len(row[7]) for row in rows.values())
                for each in chunk:
                    lease = Lease(each.event_id, claim.subscription, each.epoch)
                    try:
                        event = claimed_event(rows[each.event_id], each.retry_count, now)
                    except UNREADABLE as error:
                        told = AttemptError("UnsafeStore", str(error), each.attempt, claim.worker_id, now)
                        damaged.append(Settlement(lease, Dead(told), claim.worker_id))
                        continue
                    loaded.append(
                        quick_delivery(event, lease, each.attempt, policy, claim.worker_id, until, each.suspect)
                    )
        if taken:
            self.release([each.lease(claim.subscription) for each in taken], claim.worker_id)
        if damaged:
            self.settle(damaged)
        return tuple(loaded)

    def settle(self, settlements: Sequence[Settlement]) -> list[Settled]:
        results = self._write_catalogued(lambda db: self._leases(db).settle(settlements))
        self._wake()
        return results

    def extend(self, leases: Sequence[Lease], lease: timedelta) -> set[Lease]:
        return self._write_catalogued(lambda db: self._leases(db).extend(leases, lease))

    def release(self, leases: Sequence[Lease], worker_id: str, delay: timedelta = timedelta(0)) -> int:
        count = self._write(lambda db: self._leases(db).release(leases, worker_id, delay))
        self._wake()
        return count

    def started(self, lease: Lease, worker_id: str) -> None:
        self._write(lambda db: self._leases(db).started(lease, worker_id))

    def reset(self, event_id: int, subscription: str, reason: str, actor: str) -> None:
        self._write(lambda db: self._leases(db).reset(event_id, subscription, reason, actor))
        self._wake()

    def expire(self, owners: Iterable[str] | None, policy: RetryPolicy, limit: int = 10_000) -> int:
        wanted = None if owners is None else tuple(owners)
        if wanted is None and not self._any_expired():
            return 0
        count = self._write_catalogued(lambda db: self._leases(db).expire(wanted, policy, limit))
        if count:
            self._wake()
        return count

    def _any_expired(self) -> bool:
        with self._read() as reading:
            return bool(reading.db.run("expired_leases", (to_micros(self.now()), 1)))

    def owners(self) -> set[str]:
        with self._read() as reading:
            return {row[0] for row in reading.db.run("lease_owners")}

    def mark_alive(self, owner: str) -> AbstractContextManager[None]:
        return self._liveness.holding(owner)

    def is_dead(self, owner: str) -> bool:
        return self._liveness.is_dead(owner)

    def _bump(self, db: Database) -> None:
        """Have every connection, this one too, read subscriptions and routes anew."""
        db.run("bump_catalog")
        self._catalog.forget()

    def _leases(self, db: Database) -> Leases:
        return Leases(db, self._catalog, to_micros(self.now()))

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────

    def work(self, subscription: str, interests: tuple[Interest, ...]) -> Work:
        with self._read() as reading:
            return reading.work(subscription, reading.catalog.select(subscription, interests))

    def settled(self, event_id: int, subscriptions: Iterable[str]) -> bool:
        with self._read() as reading:
            return reading.settled(event_id, subscriptions)

    def get(self, event_id: int, subscription: str) -> Event:
        with self._read() as reading:
            return reading.event(event_id, subscription)

    def logs(self, event_id: int) -> tuple[LogEntry, ...]:
        with self._read() as reading:
            return reading.logs(event_id)

    def list(
        self,
        *,
        subscription: str,
        status: Status | None,
        type: str | None,  # noqa: A002  the public word for it
        tags: Sequence[str],
        limit: int,
        offset: int,
        after: int | str | None,
    ) -> Page[Event]:
        with self._read() as reading:
            wanted = tags_filter(type, tags)
            return reading.events(subscription, status, wanted, limit=limit, offset=offset, after=after)

    def stats(self) -> Stats:
        dead = {each.owner for each in self.handlers() if self.is_dead(each.owner)}
        with self._read() as reading:
            return reading.stats(dead)

    def inspect(self, *, deep: bool) -> tuple[Finding, ...]:
        with self._read() as reading:
            return inspect(reading.db, self._path, deep=deep)

    # ── dead letters ─────────────────────────────────────────────────────────────────────────────────────────────

    def dead_letters(self, which: DeadFilter, *, limit: int, offset: int, after: int | str | None) -> Page[DeadLetter]:
        with self._read() as reading:
            return reading.dead_letters(which, limit, offset, after)

    def retry_dead(self, which: DeadFilter, actor: str, progress: Callable[[int], None] | None = None) -> int:
        count = self._in_chunks(which, lambda db, keys: self._burials(db, actor).revive(keys), progress)
        self._wake()
        return count

    def purge_dead(self, which: DeadFilter, actor: str, progress: Callable[[int], None] | None = None) -> int:
        return self._in_chunks(which, lambda db, keys: self._burials(db, actor).purge(keys), progress)

    def _in_chunks(
        self,
        which: DeadFilter,
        change: Callable[[Database, Sequence[Row]], int],
        progress: Callable[[int], None] | None,
    ) -> int:
        """Change the dead letters that are dead now, a transaction a chunk, so that nobody waits long."""
        with self._read() as reading:
            keys = list(dead_keys(reading.db, reading.catalog, which, None))
        total = 0
        for start in range(0, len(keys), CHUNK):
            chunk = keys[start : start + CHUNK]
            total += self._write_catalogued(lambda db, chunk=chunk: change(db, chunk))
            if progress is not None:
                progress(total)
        return total

    def _burials(self, db: Database, actor: str) -> Burials:
        return Burials(db, self._catalog, to_micros(self.now()), actor)

    # ── subscriptions ────────────────────────────────────────────────────────────────────────────────────────────

    def subscriptions(self) -> tuple[Subscription, ...]:
        with self._read() as reading:
            return reading.catalog.subscriptions()

    def create_subscription(
        self,
        name: str,
        patterns: Sequence[str],
        tags: Sequence[str],
        *,
        mode: Mode,
        lease: timedelta | None,
        retry: RetryPolicy | None,
        start: str | int,
    ) -> Subscription:
        row = (
            name,
            mode,
            orjson.dumps(list(patterns)).decode(),
            orjson.dumps(list(tags)).decode(),
            None if lease is None else lease // timedelta(microseconds=1),
            None if retry is None else orjson.dumps(retry.to_dict()).decode(),
            to_micros(self.now()),
        )

        def create(db: Database) -> Subscription:
            self._catalog.renew(db)
            if any(each.name == name for each in self._catalog.subscriptions()):
                raise Conflict(f"there is a subscription {name!r} already")
            db.run("add_subscription", row)
            self._bump(db)
            self._catalog.refresh(db)
            if mode is Mode.QUEUE and start != "now":
                self._appending(db).backfill(name, 0 if start == "beginning" else int(start))
            return self._catalog.subscription(name)

        created = self._write(create)
        self._wake()
        return created

    def widen_subscription(self, name: str, pattern: str, tags: Sequence[str] = ()) -> bool:

        def widen(db: Database) -> bool:
            self._catalog.renew(db)
            found = self._catalog.subscription(name)
            patterns = (
                found.patterns if pattern in found.patterns or "*" in found.patterns else (*found.patterns, pattern)
            )
            wanted = tuple(dict.fromkeys((*found.tags, *tags))) if tags and found.tags else ()
            if patterns == found.patterns and wanted == found.tags:
                return False
            db.run("set_interests", (orjson.dumps(patterns).decode(), orjson.dumps(wanted).decode(), name))
            self._bump(db)
            return True

        return self._write(widen)

    def pause_subscription(self, name: str, paused: bool) -> None:  # noqa: FBT001  the state itself

        def pause(db: Database) -> None:
            self._catalog.renew(db)
            self._catalog.subscription(name)
            db.run("set_paused", (paused, name))
            self._bump(db)

        self._write(pause)
        self._wake()

    def delete_subscription(self, name: str, actor: str) -> int:

        def delete(db: Database) -> int:
            self._catalog.renew(db)
            self._catalog.subscription(name)
            count = self._burials(db, actor).discard_all(name)
            db.run("drop_subscription", (name,))
            self._bump(db)
            return count

        return self._write(delete)

    # ── handlers, breakers, housekeeping ─────────────────────────────────────────────────────────────────────────

    def register_handlers(self, handlers: Sequence[HandlerRecord]) -> None:
        rows = [
            (each.id, each.name, each.subscription, each.pattern, ",".join(each.tags), each.worker_id, each.owner,
             to_micros(each.seen_at))
            for each in handlers
        ]  # fmt: skip
        self._write(lambda db: db.many("see_handler", rows))

    def forget_handlers(self, owner: str, ids: Sequence[str] | None = None) -> None:
        if ids is None:
            self._write(lambda db: db.run("forget_owner", (owner,)))
        else:
            self._write(lambda db: db.many("forget_handler", [(owner, each) for each in ids]))

    def handlers(self) -> tuple[HandlerRecord, ...]:
        with self._read() as reading:
            return tuple(
                HandlerRecord(identity, name, subscription, pattern, split_tags(tags), worker, owner, from_micros(seen))
                for identity, name, subscription, pattern, tags, worker, owner, seen in reading.db.run("handlers")
            )

    def breaker(self, name: str) -> BreakerState:
        with self._read() as reading:
            return _breaker(reading.db, name)

    def change_breaker(self, name: str, change: Callable[[BreakerState], BreakerState | None]) -> BreakerState:

        def move(db: Database) -> BreakerState:
            state = _breaker(db, name)
            changed = change(state)
            if changed is None or changed == state:
                return state
            opened, probe = changed.opened_at, changed.probe_until
            db.run(
                "set_breaker",
                (name, changed.failures, opened and to_micros(opened), probe and to_micros(probe)),
            )
            return changed

        state = self._write(move)
        self._wake()
        return state

    def tidy(self) -> int:

        def clean(db: Database) -> int:
            db.run("drop_old_uids", (to_micros(self.now() - DEDUP_WINDOW), TIDY_UIDS))
            removed = db.changed()
            db.run("drop_old_handlers", (to_micros(self.now() - HANDLER_MEMORY),))
            if db.value("count_routes") > SPARE_ROUTES:
                db.run("drop_unused_routes")
                if db.changed():
                    removed += db.changed()
                    self._bump(db)
            if db.value("free_pages") > ENOUGH_FREE_PAGES:
                db.run("give_back_pages")
            return removed

        self._liveness.sweep(self.owners)
        for owner in {each.owner for each in self.handlers() if self.is_dead(each.owner)}:
            self.forget_handlers(owner)
        return self._write(clean)

    def watch(self) -> Watch:
        watch = FileWatch(self._open_reader, self._unwatch)
        with self._lock:
            self._watches.append(watch)
        return watch

    # ── connections ──────────────────────────────────────────────────────────────────────────────────────────────

    def _wake(self) -> None:
        for watch in tuple(self._watches):
            watch.wake()

    def _unwatch(self, watch: FileWatch) -> None:
        with self._lock:
            if watch in self._watches:
                self._watches.remove(watch)

    def _usable(self) -> None:
        if self._closed:
            raise EventBusShutdownError("the store is closed")
        if os.getpid() != self._pid:
            raise StoreUnavailable("the store was opened before a fork: open it anew in the child process")

    def _write(self, operation: Callable[[Database], R]) -> R:
        self._usable()
        try:
            return self._committer.run(operation)
        except SQLITE_ERRORS as error:
            raise translate(self._path, error) from error

    def _write_catalogued(self, operation: Callable[[Database], R]) -> R:
        def renewed(db: Database) -> R:
            self._catalog.renew(db)
            return operation(db)

        return self._write(renewed)

    @contextmanager
    def _read(self) -> Generator[Reading]:
        self._usable()
        with self._lock:
            reader = self._readers.pop() if self._readers else None
        db, catalog = reader or (self._open_reader(), Catalog())
        try:
            with translated(self._path), decoding(), db.snapshot():
                catalog.refresh(db)
                yield Reading(db, catalog, to_micros(self.now()))
        finally:
            self._give_back(db, catalog)

    def _give_back(self, db: Database, catalog: Catalog) -> None:
        with self._lock:
            if not self._closed and len(self._readers) < MAX_READERS:
                self._readers.append((db, catalog))
                return
        db.close()

    def _open_reader(self) -> Database:
        return Database(self._path, readonly=True)


class _Schema:
    """The file as something to migrate."""

    def __init__(self, committer: Committer[Database], db: Database) -> None:
        self.migrations = load_migrations("postbus.store.sqlite")
        self._committer = committer
        self._db = db

    def version(self) -> int:
        version = self._db.pragma("user_version")
        if version and self._db.pragma("application_id") != APPLICATION_ID:
            raise UnsafeStore("this SQLite file belongs to another program: choose another file")
        return version

    def apply(self, number: int, sql: str) -> None:
        with self._committer.exclusive() as db:
            if db.pragma("user_version") == number - 1:
                db.script(f"{sql}; PRAGMA user_version = {number:d}")


def _breaker(db: Database, name: str) -> BreakerState:
    for failures, opened_at, probe_until in db.run("breaker", (name,)):
        return BreakerState(failures, moment(opened_at), moment(probe_until))
    return BreakerState()
