"""What the stores share: every verb of the contract that is the same on any SQL database, said once.

A dialect brings its connections (`_read`, `_write`), its statements, publishing and the claim's look ahead.
"""

import os
import threading
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar
from uuid import uuid4

import orjson

from postbus.breaker import BreakerState
from postbus.clock import from_micros, to_micros
from postbus.errors import Conflict, EventBusShutdownError, InvalidRequest, LeaseLost, NotFound, StoreUnavailable
from postbus.model import (
    AttemptError,
    Checkpoint,
    Dead,
    DeadLetter,
    Delivery,
    Erasable,
    Erased,
    Event,
    HandlerRecord,
    Lease,
    LogEntry,
    Mode,
    Page,
    Pruned,
    Span,
    Stats,
    Status,
    Stream,
    Subscription,
    Token,
)
from postbus.observe import probe
from postbus.pattern import Interest
from postbus.payload import Draft
from postbus.retry import RetryPolicy
from postbus.store.contract import (
    Activity,
    Claim,
    Claimed,
    DeadFilter,
    Failure,
    Fault,
    Finding,
    Report,
    Reported,
    Settled,
    Settlement,
    Watch,
    Work,
)
from postbus.store.liveness import Liveness
from postbus.store.postgres.rows.burials import Burials
from postbus.store.postgres.rows.diverting import Diverting
from postbus.store.postgres.rows.erasing import Erasing, bearing, erasable
from postbus.store.postgres.rows.following import Followed
from postbus.store.postgres.rows.leases import Leases, Taken
from postbus.store.postgres.rows.positions import Positions
from postbus.store.postgres.rows.pruning import Pruning
from postbus.store.postgres.rows.reading import END_OF_TIME, Reading, dead_keys, rows_of, tags_filter
from postbus.store.postgres.rows.redelivering import redeliver
from postbus.store.postgres.rows.reports import Reports
from postbus.store.postgres.rows.session import Session, bump
from postbus.store.records import UNREADABLE, claimed_event, moment, quick_delivery, split_tags
from postbus.store.session import Row
from postbus.store.staging import drop_some, sunk_before, tidied

__all__ = ["Kind", "SqlStore", "Won", "kind"]

R = TypeVar("R")
DEDUP_WINDOW: Final = timedelta(days=7)
HANDLER_MEMORY: Final = timedelta(days=7)
SILENT: Final = timedelta(minutes=3)
"""Workers report their handlers every minute; one on another host that has not for this long is gone."""
CHUNK: Final = 1_000
LOAD_CHUNK: Final = 100
FEW: Final = 8
"""Of so many events, the rows are read at once by whoever claims them: to begin anew would take longer."""
TIDY_UIDS: Final = 100_000
SPARE_ROUTES: Final = 10_000


class Won(NamedTuple):
    """What a claim got, before the events are read."""

    taken: list[Taken]
    suspects: bool
    """A suspect waits for somebody who holds nothing else."""
    next_due: datetime | None
    """When more falls due, if that was looked for."""
    policy: RetryPolicy | None
    """The subscription's own."""
    now: int
    more: bool = True
    rows: Mapping[int, Row] = {}
    """Those of the events, where they came along."""


Kind = tuple[str, tuple[Interest, ...], tuple[Interest, ...]]
"""What decides which deliveries a claim may have: its subscription, interests and what is blocked."""


def kind(claim: Claim) -> Kind:
    """Return what decides which deliveries a claim may have."""
    return claim.subscription, claim.interests, claim.blocked


def _alike(claims: Sequence[Claim]) -> Iterable[list[int]]:
    """Return the places of claims that may all have the same."""
    alike: dict[tuple[Kind, bool, RetryPolicy], list[int]] = {}
    for place, each in enumerate(claims):
        alike.setdefault((kind(each), each.alone, each.policy), []).append(place)
    return alike.values()


class SqlStore(Followed):
    """The verbs of a `Store`. Safe to use from many threads. What each promises stands in the contract."""

    served = False
    remote = False

    def __init__(self, liveness: Liveness) -> None:
        """Begin open, with nobody watching."""
        self._pid = os.getpid()
        self._closed = False
        self._liveness = liveness
        self._lock = threading.Lock()
        self._watches: list[Watch] = []

    @abstractmethod
    def _read(self) -> AbstractContextManager[Session]:
        """Read as of one moment until the end of the block."""

    @abstractmethod
    def _look(self) -> AbstractContextManager[Session]:
        """Read such that each statement sees what is committed by then."""

    @abstractmethod
    def _write(self, operation: Callable[[Session], R]) -> R:
        """Run an operation in a transaction, perhaps beside others, and return once it is durable."""

    @abstractmethod
    def _shut_out(self, operation: Callable[[Session], R]) -> R:
        """Run an operation in a transaction that no publish of another overlaps."""

    @abstractmethod
    def _beside(self, operation: Callable[[Session], R]) -> R:
        """Run a long operation in a transaction of its own, which no making of a subscription overlaps."""

    def _keeping(self, operation: Callable[[Session], R]) -> R:
        """Run an operation that makes deliveries of events long in the log, none of which is pruned meanwhile."""
        return self._write(operation)

    @abstractmethod
    def _reclaim(self, stream: Stream, *, done: bool) -> None:
        """Let the space that rows of a stream have left be used again; `done` if no more of them are about to go."""

    def _scrub(self) -> None:
        """Leave nothing in the store of what was erased, as far as that can be helped."""
        for stream in Stream:
            self._reclaim(stream, done=True)

    @abstractmethod
    def _backfill(self, session: Session, name: str, after: int) -> None:
        """Make a new subscription's deliveries for the events it wants that are in the log already."""

    @abstractmethod
    def stage(self, part: int, first: int, drafts: Sequence[Draft]) -> None: ...

    @abstractmethod
    def _publish_part(self, session: Session, part: int, rows: int) -> int:
        """Publish all of a part in this transaction, return how many are new; raise Conflict unless it has `rows`."""

    @abstractmethod
    def _claim_all(self, claims: Sequence[Claim]) -> list[Won]:
        """Lease what is due, to each in turn."""

    def _taken(self, session: Session, claims: Sequence[Claim]) -> list[Won]:
        """Lease to each in turn."""
        leases = self._leases(session)
        taken: dict[int, tuple[list[Taken], bool]] = {}
        for places in _alike(claims):
            taken |= zip(places, leases.claim_each([claims[place] for place in places]), strict=True)
        ids = [each.event_id for mine, _ in taken.values() for each in mine]
        rows, left = rows_of(session.db, ids) if 0 < len(ids) <= FEW else ({}, ids)
        rows = {} if left else rows
        return [
            Won(*taken[place], None, session.catalog.subscription(each.subscription).retry, session.now, rows=rows)
            for place, each in enumerate(claims)
        ]

    def _event_rows(self, ids: list[int]) -> tuple[dict[int, Row], list[int]]:
        """Do what `rows_of` does."""
        with self._read() as session:
            return rows_of(session.db, ids)

    def _leases(self, session: Session) -> Leases:
        return Leases(session)

    def _usable(self) -> None:
        if self._closed:
            raise EventBusShutdownError("the store is closed")
        if os.getpid() != self._pid:
            raise StoreUnavailable("the store was opened before a fork: open it anew in the child process")

    # ── a connection of the caller's ─────────────────────────────────────────────────────────────────────────────

    def publish_on(self, connection: Any, drafts: Sequence[Draft]) -> list[Event]:
        del connection, drafts
        raise InvalidRequest("on SQLite the bus alone opens its file: publish(..., connection=tx) of bus.transaction()")

    async def publish_on_async(self, connection: Any, drafts: Sequence[Draft]) -> list[Event]:
        return self.publish_on(connection, drafts)

    def is_async(self, connection: Any) -> bool:
        del connection
        return False

    # ── the lease verbs ──────────────────────────────────────────────────────────────────────────────────────────

    def claim(self, claim: Claim) -> Claimed:
        return self.claim_all([claim])[0]

    def claim_all(self, claims: Sequence[Claim]) -> list[Claimed]:
        wons = self._claim_all(claims)
        try:
            ids = [each.event_id for won in wons for each in won.taken if not won.rows]
            few, left = self._event_rows(ids) if len(claims) > 1 and 0 < len(ids) <= LOAD_CHUNK else ({}, ids)
            known = {} if left else few
            return [self._claimed(claim, won, won.rows or known) for claim, won in zip(claims, wons, strict=True)]
        except BaseException:
            for claim, won in zip(claims, wons, strict=True):
                self.release([each.lease(claim.subscription) for each in won.taken], claim.worker_id)
            raise

    def _claimed(self, claim: Claim, won: Won, few: Mapping[int, Row]) -> Claimed:
        if not won.taken:
            return Claimed(next_due=won.next_due, suspects=won.suspects, more=won.more)
        loaded = self._loaded(claim, won, few)
        more = won.more or len(loaded) < len(won.taken)
        return Claimed(loaded, won.next_due, suspects=won.suspects, more=more)

    def _loaded(self, claim: Claim, won: Won, few: Mapping[int, Row]) -> tuple[Delivery, ...]:
        """Return the deliveries with their events; many are read after the commit: other writers need not wait.

        An event that cannot be read is buried with the reason, and does not harm its neighbours. What does not fit
        into a page is handed back. `few`: the events' rows, if they have been read already.
        """
        ids = [each.event_id for each in won.taken]
        rows, left = (few, []) if few else self._event_rows(ids)
        kept = len(ids) - len(left)
        loaded, damaged = self._deliveries(claim, won, won.taken[:kept], rows)
        if left:
            self.release([each.lease(claim.subscription) for each in won.taken[kept:]], claim.worker_id)
        if damaged:
            self.settle(damaged)
        return tuple(loaded)

    @staticmethod
    def _deliveries(
        claim: Claim, won: Won, taken: Sequence[Taken], rows: Mapping[int, Row]
    ) -> tuple[list[Delivery], list[Settlement]]:
        """Return deliveries with their events, and how those end that cannot be read."""
        now, until = from_micros(won.now), from_micros(won.taken[0].until)
        policy = won.policy or claim.policy
        loaded: list[Delivery] = []
        damaged: list[Settlement] = []
        for each in taken:
            lease = Lease(each.event_id, claim.subscription, each.epoch)
            try:
                event = claimed_event(rows[each.event_id], each.retry_count, now)
            except UNREADABLE as error:
                told = AttemptError("UnsafeStore", str(error), each.attempt, claim.worker_id, now)
                damaged.append(Settlement(lease, Dead(told), claim.worker_id))
                continue
            loaded.append(quick_delivery(event, lease, each.attempt, policy, claim.worker_id, until, each.suspect))
        return loaded, damaged

    def settle(self, settlements: Sequence[Settlement]) -> list[Settled]:
        results = self._write(lambda session: self._leases(session).settle(settlements))
        self._ring()
        return results

    def report(self, reports: Sequence[Report]) -> list[Reported | LeaseLost | NotFound]:
        results = self._write(lambda session: Reports(session, self._leases(session)).report(reports))
        self._ring()
        return results

    def extend(self, leases: Sequence[Lease], lease: timedelta) -> set[Lease]:
        return self._write(lambda session: self._leases(session).extend(leases, lease))

    def release(self, leases: Sequence[Lease], worker_id: str, delay: timedelta = timedelta(0)) -> int:
        count = 0
        for start in range(0, len(leases), CHUNK):
            chunk = leases[start : start + CHUNK]
            count += self._write(lambda session, chunk=chunk: self._leases(session).release(chunk, worker_id, delay))
        self._wake()
        return count

    def started(self, lease: Lease, worker_id: str) -> None:
        self._write(lambda session: self._leases(session).started(lease, worker_id))

    def reset(self, event_id: int, subscription: str, reason: str, actor: str) -> None:
        if not 0 < event_id <= END_OF_TIME:
            raise NotFound(f"there is no event {event_id}")
        self._write(lambda session: self._leases(session).reset(event_id, subscription, reason, actor))
        self._wake()

    def expire(self, owners: Iterable[str] | None, policy: RetryPolicy, limit: int = 10_000) -> int:
        wanted = None if owners is None else tuple(owners)
        if wanted is None and not self._any_expired():
            return 0
        count = self._write(lambda session: self._leases(session).expire(wanted, policy, limit))
        if count:
            self._wake()
        return count

    def _any_expired(self) -> bool:
        with self._look() as session:
            return bool(session.db.run("any_expired", (session.now,)))

    def owners(self) -> set[str]:
        with self._glance() as db:
            return {row[0] for row in db.run("lease_owners")}

    def mark_alive(self, owner: str) -> AbstractContextManager[None]:
        return self._liveness.holding(owner, self._named)

    def is_dead(self, owner: str) -> bool:
        return self._liveness.is_alive(owner) is False

    def _named(self) -> set[str]:
        """Return the nonces of all processes that a lease, a handler or a checkpoint names."""
        with self._glance() as db:
            return {row[0] for row in db.run("named_owners")}

    def _is_gone(self, owner: str, silent: timedelta) -> bool:
        """Return whether a process is gone; where that cannot be told, by how far off its last report is.

        One from the future was made before the clock was set back: who lives has reported since.
        """
        alive = self._liveness.is_alive(owner)
        return abs(silent) > SILENT if alive is None else not alive

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────

    def work(self, subscription: str, interests: tuple[Interest, ...]) -> Work:
        with self._read() as session:
            return Reading(session).work(subscription, session.catalog.select(subscription, interests))

    def settled(self, event_id: int, subscriptions: Iterable[str]) -> bool:
        with self._read() as session:
            return Reading(session).settled(event_id, subscriptions)

    def get(self, event_id: int, subscription: str) -> Event:
        with self._read() as session:
            return Reading(session).event(event_id, subscription)

    def logs(self, event_id: int) -> tuple[LogEntry, ...]:
        with self._read() as session:
            return Reading(session).logs(event_id)

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
        within: timedelta | None = None,
    ) -> Page[Event]:
        with self._read() as session:
            wanted = tags_filter(type, tags)
            reading = Reading(session)
            if within is not None:
                return reading.newest(subscription, status, wanted, limit=limit, after=after, within=within)
            return reading.events(subscription, status, wanted, limit=limit, offset=offset, after=after)

    def stats(self) -> Stats:
        gone = {each.owner for each in self.handlers() if each.gone}
        with self._read() as session:
            return replace(Reading(session).stats(gone), checkpoints=Positions(session).checkpoints(self.is_dead))

    @abstractmethod
    def inspect(self, *, deep: bool) -> tuple[Finding, ...]: ...

    def condition(self) -> tuple[Finding, ...]:
        return self.inspect(deep=False)

    # ── dead letters ─────────────────────────────────────────────────────────────────────────────────────────────

    def dead_letters(self, which: DeadFilter, *, limit: int, offset: int, after: int | str | None) -> Page[DeadLetter]:
        with self._read() as session:
            return Reading(session).dead_letters(which, limit, offset, after)

    def faults(self, limit: int) -> Sequence[Fault]:
        with self._read() as session:
            return Reading(session).faults(limit)

    def retry_dead(self, which: DeadFilter, actor: str, progress: Callable[[int], None] | None = None) -> int:
        count = self._in_chunks(which, lambda session, keys: Burials(session, actor).revive(keys), progress)
        self._wake()
        return count

    def purge_dead(self, which: DeadFilter, actor: str, progress: Callable[[int], None] | None = None) -> int:
        return self._in_chunks(which, lambda session, keys: Burials(session, actor).purge(keys), progress)

    def _in_chunks(
        self,
        which: DeadFilter,
        change: Callable[[Session, Sequence[Row]], int],
        progress: Callable[[int], None] | None,
    ) -> int:
        """Change the dead letters that are dead now, a transaction a chunk, so that nobody waits long."""
        with self._read() as session:
            keys = list(dead_keys(session.db, session.catalog, which, None))
        total = 0
        for start in range(0, len(keys), CHUNK):
            chunk = keys[start : start + CHUNK]
            total += self._write(lambda session, chunk=chunk: change(session, chunk))
            if progress is not None:
                progress(total)
        return total

    # ── the streams, by position ─────────────────────────────────────────────────────────────────────────────────

    def span(self, stream: Stream) -> Span:
        with self._look() as session:
            return Positions(session).span(stream)

    def activity(self, stream: Stream, after: int, through: int, every: timedelta) -> Sequence[Activity]:
        with self._look() as session:
            return Positions(session).activity(stream, after, through, every)

    def ahead(self, stream: Stream, after: int, count: int) -> int:
        with self._look() as session:
            return Positions(session).ahead(stream, after, count)

    def before(self, stream: Stream, moment: datetime) -> int:
        with self._look() as session:
            return Positions(session).before(stream, to_micros(moment))

    def consumer(self, name: str, stream: Stream, start: int) -> Checkpoint:
        with self._look() as session:
            found = Positions(session).checkpoint(name, stream)
        if found is not None:
            return found
        return self._shut_out(lambda session: Positions(session).consumer(name, stream, start))

    def advance(self, name: str, position: int, log_id: str) -> None:
        self._write(lambda session: session.db.run("move_checkpoint", (position, session.now, name, log_id)))

    def checkpoints(self) -> tuple[Checkpoint, ...]:
        with self._look() as session:
            return Positions(session).checkpoints(self.is_dead)

    def prune(
        self, stream: Stream, *, after: int, through: int, limit: int = 10_000, past: Collection[str] = ()
    ) -> Pruned:
        if not 0 <= after <= through or limit < 1:
            raise InvalidRequest("pruning goes from a position to the same or a later one, at least a row at a time")
        step = self._beside(lambda session: Pruning(session, stream).step(after, through, limit, frozenset(past)))
        self._reclaim(stream, done=step.done)
        return step

    def prunable(self, stream: Stream, through: int) -> int:
        with self._read() as session:
            return Pruning(session, stream).prunable(through)

    def _meant(self, uid: str | None, key: str | None, ids: Collection[int]) -> Sequence[int]:
        """Return the events that an erase is about; raise InvalidRequest if that is nothing, or said in two ways."""
        if (uid is not None and key is not None) or not (uid or key or ids):
            raise InvalidRequest("erase by a uid or by a key, or name the ids")
        return sorted({*ids, *bearing(self._read, uid, key)})

    def erasable(self, *, uid: str | None = None, key: str | None = None, ids: Collection[int] = ()) -> Erasable:
        wanted = self._meant(uid, key, ids)
        with self._read() as session:
            return erasable(session, wanted)

    def erase(self, *, uid: str | None = None, key: str | None = None, ids: Collection[int] = (), actor: str) -> Erased:
        wanted = self._meant(uid, key, ids)
        changed = 0
        for start in range(0, len(wanted), CHUNK):
            chunk = wanted[start : start + CHUNK]
            changed += self._beside(lambda session, chunk=chunk: Erasing(session, actor).erase(chunk))
        if wanted:  # also where nothing changed: an earlier run may have been killed here
            self._scrub()
        if changed:
            self._wake()
        return Erased(tuple(wanted), changed)

    # ── Spark: what its streams failed at, and what its jobs bring ───────────────────────────────────────────────

    def divert(self, subscription: str, failures: Sequence[Failure], policy: RetryPolicy, worker_id: str) -> int:
        count = 0
        for start in range(0, len(failures), CHUNK):
            chunk = failures[start : start + CHUNK]
            count += self._keeping(
                lambda session, chunk=chunk: Diverting(session, self._leases).divert(
                    subscription, chunk, policy, worker_id
                )
            )
        self._wake()
        return count

    def begin_part(self, query: str, batch: int) -> int:
        return self._write(lambda session: session.db.value("add_part", (query, batch, session.now)))

    def publish_parts(self, query: str, batch: int, parts: Mapping[int, int]) -> int | None:

        def publish(session: Session) -> int | None:
            if sunk_before(session, query, batch, sum(parts.values())):
                return None
            if lost := parts.keys() - {part for (part,) in session.db.run("parts_of", (query, batch))}:
                raise Conflict(f"batch {batch} of {query}: {len(lost)} of its {len(parts)} parts were dropped")
            return sum(self._publish_part(session, part, rows) for part, rows in parts.items())

        published = self._write(publish)
        probe("published")
        self._wake()
        with self._read() as session:
            brought = [part for (part,) in session.db.run("parts_of", (query, batch))]
        self.drop_parts(brought)
        return published

    def drop_parts(self, parts: Sequence[int]) -> None:
        while self._write(lambda session: drop_some(session, parts)):
            pass

    def redeliver(self, subscription: str, ids: Sequence[int], actor: str) -> int:
        count = self._keeping(lambda session: redeliver(session, subscription, ids, actor))
        self._wake()
        return count

    # ── subscriptions ────────────────────────────────────────────────────────────────────────────────────────────

    def subscriptions(self) -> tuple[Subscription, ...]:
        with self._read() as session:
            return session.catalog.subscriptions()

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
        )

        def create(session: Session) -> Subscription:
            db, catalog, now = session
            if any(each.name == name for each in catalog.subscriptions()):
                raise Conflict(f"there is a subscription {name!r} already")
            if mode is Mode.QUEUE:
                Positions(session).check_start(start)
            db.run("add_subscription", (*row, now))
            bump(session)
            catalog.refresh(db)
            if mode is Mode.QUEUE and start != "now":
                self._backfill(session, name, 0 if start == "beginning" else int(start))
            if mode is Mode.ORDERED:
                Positions(session).begin(name, start)
            return catalog.subscription(name)

        created = self._shut_out(create)
        self._wake()
        return created

    def widen_subscription(self, name: str, pattern: str, tags: Sequence[str] = ()) -> bool:

        def widen(session: Session) -> bool:
            found = session.catalog.subscription(name)
            patterns = (
                found.patterns if pattern in found.patterns or "*" in found.patterns else (*found.patterns, pattern)
            )
            wanted = tuple(dict.fromkeys((*found.tags, *tags))) if tags and found.tags else ()
            if patterns == found.patterns and wanted == found.tags:
                return False
            _set_interests(session, name, patterns, wanted)
            return True

        return self._shut_out(widen)

    def set_interests(self, name: str, patterns: Sequence[str], tags: Sequence[str]) -> None:
        self._write(lambda session: _set_interests(session, name, patterns, tags))

    def pause_subscription(self, name: str, paused: bool) -> None:  # noqa: FBT001  the state itself

        def pause(session: Session) -> None:
            session.catalog.subscription(name)
            session.db.run("set_paused", (paused, name))
            bump(session)

        self._write(pause)
        self._wake()

    def delete_subscription(self, name: str, actor: str) -> int:

        def thin_out(session: Session, after: int) -> list[int]:
            session.catalog.subscription(name)
            return Burials(session, actor).discard_some(name, after)

        def delete(session: Session) -> int:
            session.catalog.subscription(name)
            count = Burials(session, actor).discard_all(name)
            session.db.run("drop_subscription", (name,))
            session.db.run("drop_checkpoint", (name,))
            bump(session)
            return count

        # Most of it goes before, a little at a time: who publishes must not wait for millions to go.
        count = after = 0
        while ids := self._write(partial(thin_out, after=after)):
            count, after = count + len(ids), ids[-1]
        return count + self._shut_out(delete)

    # ── handlers, breakers, housekeeping ─────────────────────────────────────────────────────────────────────────

    def register_handlers(self, handlers: Sequence[HandlerRecord]) -> None:
        rows = [
            (each.id, each.name, each.subscription, each.pattern, ",".join(each.tags), each.worker_id, each.owner,
             to_micros(each.seen_at))
            for each in handlers
        ]  # fmt: skip
        self._write(lambda session: session.db.many("see_handler", rows))

    def forget_handlers(self, owner: str, ids: Sequence[str] | None = None) -> None:
        if ids is None:
            self._write(lambda session: session.db.run("forget_owner", (owner,)))
        else:
            self._write(lambda session: session.db.many("forget_handler", [(owner, each) for each in ids]))

    def handlers(self) -> tuple[HandlerRecord, ...]:
        with self._read() as session:
            now, rows = from_micros(session.now), session.db.run("handlers")
        gone = {row[6]: self._is_gone(row[6], now - from_micros(row[7])) for row in rows}
        return tuple(
            HandlerRecord(
                identity, name, subscription, pattern, split_tags(tags), worker, owner, from_micros(seen), gone[owner]
            )
            for identity, name, subscription, pattern, tags, worker, owner, seen in rows
        )

    def breaker(self, name: str) -> BreakerState:
        with self._read() as session:
            return _breaker(session, "breaker", name)

    def change_breaker(self, name: str, change: Callable[[BreakerState], BreakerState | None]) -> BreakerState:

        def move(session: Session) -> tuple[BreakerState, BreakerState]:
            session.db.run("add_breaker", (name,))
            state = _breaker(session, "breaker_held", name)
            changed = change(state)
            if changed is None or changed == state:
                return state, state
            opened, probe = changed.opened_at, changed.probe_until
            session.db.run(
                "set_breaker", (changed.failures, opened and to_micros(opened), probe and to_micros(probe), name)
            )
            return state, changed

        before, state = self._write(move)
        if before.opened_at is not None and state.opened_at is None:  # nothing else makes more claimable than before
            self._wake()
        return state

    def add_token(self, token: Token) -> None:
        row = (token.id, token.name, token.digest, orjson.dumps(token.scopes).decode(), to_micros(token.created_at))
        ends = None if token.expires_at is None else to_micros(token.expires_at)
        self._write(lambda session: session.db.run("add_token", (*row, ends)))

    def tokens(self) -> tuple[Token, ...]:
        with self._read() as session:
            return tuple(
                Token(identity, name, digest, tuple(orjson.loads(scopes)), from_micros(made), moment(ends), moment(end))
                for identity, name, digest, scopes, made, ends, end in session.db.run("tokens")
            )

    def revoke_token(self, identity: str) -> None:
        if not self._write(lambda session: session.db.count("revoke_token", (session.now, identity))):
            raise NotFound(f"there is no token {identity!r}")

    def tidy(self) -> int:

        def clean(session: Session) -> int:
            db, _, now = session
            removed = db.count("drop_old_uids", (now - DEDUP_WINDOW // timedelta(microseconds=1), TIDY_UIDS))
            return removed + tidied(session)

        with self._read() as session:
            crowded, now = session.db.value("count_routes") > SPARE_ROUTES, from_micros(session.now)
        for each in self.handlers():
            if each.gone and (self.is_dead(each.owner) or abs(now - each.seen_at) > HANDLER_MEMORY):
                self.forget_handlers(each.owner)
        self._liveness.sweep(self._named)
        return self._write(clean) + (self._shut_out(_drop_routes) if crowded else 0)

    def known(self, uids: Sequence[str]) -> set[str]:
        with self._read() as session:
            return {row[0] for row in session.db.run("known_uids", (orjson.dumps(uids).decode(),))}

    # ── after a restore ──────────────────────────────────────────────────────────────────────────────────────────

    @abstractmethod
    def _jump(self, session: Session) -> int:
        """Let ids and epochs go on far above; return an epoch above all that were ever given."""

    def restore_mark(self, actor: str) -> str:
        log_id = uuid4().hex

        def mark(session: Session) -> int:
            epoch = self._jump(session)
            session.db.run("set_log_id", (log_id,))
            bump(session)
            return epoch

        epoch = self._shut_out(mark)
        while self._write(lambda session: self._reset_before(session, epoch, actor)):
            pass
        self._wake()
        return log_id

    def _reset_before(self, session: Session, epoch: int, actor: str) -> int:
        """Make some of the deliveries due that were leased under an earlier epoch than this; return how many."""
        held = session.db.run("leased_before", (epoch, CHUNK))
        leases = self._leases(session)
        for event_id, subscription in held:
            leases.reset(event_id, subscription, "the store was restored from a backup", actor)
        return len(held)

    # ── watching ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _ring(self) -> None:
        """Have this process look."""
        for watch in tuple(self._watches):
            watch.wake()

    def _wake(self) -> None:
        """Have every process look."""
        self._ring()

    def _unwatch(self, watch: Watch) -> None:
        with self._lock:
            if watch in self._watches:
                self._watches.remove(watch)


def _set_interests(session: Session, name: str, patterns: Sequence[str], tags: Sequence[str]) -> None:
    session.db.run("set_interests", (orjson.dumps(patterns).decode(), orjson.dumps(tags).decode(), name))
    bump(session)


def _drop_routes(session: Session) -> int:
    removed = session.db.count("drop_unused_routes")
    if removed:
        bump(session)
    return removed


def _breaker(session: Session, query: str, name: str) -> BreakerState:
    for failures, opened_at, probe_until in session.db.run(query, (name,)):
        return BreakerState(failures, moment(opened_at), moment(probe_until))
    return BreakerState()
