"""The verbs of a store on a SQL database: each is a function of a `Session`, bound here to its kind of transaction."""

import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial, wraps
from typing import Any, Concatenate, Final, ParamSpec, TypeVar
from uuid import uuid4

from postbus.breaker import BreakerState
from postbus.clock import from_micros
from postbus.errors import EventBusShutdownError, InvalidRequest, PostbusError, StoreUnavailable
from postbus.model import (
    AttemptError,
    Checkpoint,
    Dead,
    Delivery,
    Erasable,
    Erased,
    Event,
    HandlerRecord,
    Lease,
    Pruned,
    Stats,
    Status,
    Stream,
)
from postbus.observe import probe, tell
from postbus.pattern import Interest
from postbus.payload import Draft
from postbus.retry import RetryPolicy
from postbus.store import depth, followers, lookups, registry, retention, spark, staging, status, subscriptions
from postbus.store import leases as lease_verbs
from postbus.store.contract import (
    Ahead,
    Claim,
    Claimed,
    DeadFilter,
    Failure,
    Finding,
    Lead,
    Reader,
    Rewound,
    Settlement,
    Step,
    Transaction,
    Watch,
)
from postbus.store.followers import deposed
from postbus.store.leases import Taken, Won
from postbus.store.liveness import Liveness
from postbus.store.records import UNREADABLE, event_from_row, quick_delivery
from postbus.store.session import Database, Row, Session, bump

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
HANDLER_MEMORY: Final = timedelta(days=7)
SILENT: Final = timedelta(minutes=3)
"""Workers report their handlers every minute; one on another host that has not for this long is gone."""
CHUNK: Final = 1_000
LONGEST_CLAIM: Final = 1.0

Verb = Callable[Concatenate[Session, P], R]
Method = Callable[Concatenate["SqlStore", P], R]


def write(verb: Verb[P, R], *, wake: bool = False, ring: bool = False) -> Method[P, R]:
    """Bind a verb that writes: in one transaction, grouped with others. `wake` tells all processes, `ring` this one."""

    @wraps(verb)
    def method(self: "SqlStore", *args: P.args, **kwargs: P.kwargs) -> R:
        result = self._write(lambda session: verb(session, *args, **kwargs))  # pyright: ignore[reportPrivateUsage]
        if wake:
            self._wake()  # pyright: ignore[reportPrivateUsage]
        elif ring:
            self._ring()  # pyright: ignore[reportPrivateUsage]
        return result

    return method


def read(verb: Verb[P, R]) -> Method[P, R]:
    """Bind a verb that reads as of one moment."""

    @wraps(verb)
    def method(self: "SqlStore", *args: P.args, **kwargs: P.kwargs) -> R:
        with self._read() as session:  # pyright: ignore[reportPrivateUsage]
            return verb(session, *args, **kwargs)

    return method


def look(verb: Verb[P, R]) -> Method[P, R]:
    """Bind a verb that reads such that each statement sees what is committed by then."""

    @wraps(verb)
    def method(self: "SqlStore", *args: P.args, **kwargs: P.kwargs) -> R:
        with self._look() as session:  # pyright: ignore[reportPrivateUsage]
            return verb(session, *args, **kwargs)

    return method


class SqlStore(ABC):
    """The verbs of a `Log`. Safe to use from many threads. What each promises is said in the contract."""

    def __init__(self, liveness: Liveness) -> None:
        self._pid = os.getpid()
        self._closed = False
        self._liveness = liveness
        self._lock = threading.Lock()
        self._watches: list[Watch] = []
        self._owed: set[Callable[[Session], object]] = set()
        """What hands back the leases of a claim that nobody got, once the store can be used again."""

    def _usable(self) -> None:
        if self._closed:
            raise EventBusShutdownError("the store is closed")
        if os.getpid() != self._pid:
            raise StoreUnavailable("the store was opened before a fork: open it anew in the child process")

    # ── what a dialect brings ────────────────────────────────────────────────────────────────────────────────────

    @abstractmethod
    def _read(self) -> AbstractContextManager[Session]:
        """Read as of one moment until the end of the block."""

    @abstractmethod
    def _look(self) -> AbstractContextManager[Session]:
        """Read such that each statement sees what is committed by then."""

    @abstractmethod
    def _glance(self) -> AbstractContextManager[Database]:
        """Do the same without a look at subscriptions and the time."""

    @abstractmethod
    def _write(self, operation: Callable[[Session], R]) -> R:
        """Run an operation in a transaction, perhaps beside others, and return once it is durable."""

    @abstractmethod
    def _beside(self, operation: Callable[[Session], R]) -> R:
        """Run an operation that removes rows, leaving nothing of them in the store."""

    @abstractmethod
    def _claim_all(self, claims: Sequence[Claim]) -> list[Won]:
        """Lease what is due, to each in turn."""

    @abstractmethod
    def _move_lightly(self, step: Step) -> bool:
        """Move a checkpoint and nothing else, at once visible, durable soon; return whether the epoch still stood."""

    @abstractmethod
    def _reclaim(self, stream: Stream, *, done: bool) -> None:
        """Let the space that rows of a stream have left be used again; `done` if no more of them are about to go."""

    @abstractmethod
    def _publish_part(self, session: Session, part: int, rows: int) -> int:
        """Publish all of a part in this transaction, return how many are new; raise Conflict unless it has `rows`."""

    @abstractmethod
    def _jump(self, session: Session) -> int:
        """Let ids and numbers of blocks go on far above; return a number above all that were ever given."""

    @abstractmethod
    def transaction(self) -> AbstractContextManager[Transaction]: ...

    @abstractmethod
    def hold(self, name: str) -> AbstractContextManager[Callable[[], None]]: ...

    @abstractmethod
    def inspect(self, *, deep: bool) -> tuple[Finding, ...]: ...

    @abstractmethod
    def watch(self) -> Watch: ...

    def _in_chunks(
        self,
        items: Sequence[T],
        change: Callable[[Session, Sequence[T]], int],
        *,
        within: Callable[[Callable[[Session], int]], int] | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> int:
        """Change items, a transaction a chunk, so that nothing else waits long; return how many changed."""
        total = 0
        for start in range(0, len(items), CHUNK):
            chunk = items[start : start + CHUNK]
            total += (within or self._write)(lambda session, chunk=chunk: change(session, chunk))
            if progress is not None:
                progress(total)
        return total

    # ── a connection of the caller's ─────────────────────────────────────────────────────────────────────────────

    def publish_on(self, connection: Any, drafts: Sequence[Draft]) -> list[Event]:
        del connection, drafts
        raise InvalidRequest("on SQLite the bus alone opens its file: publish(..., connection=tx) of bus.transaction()")

    async def publish_on_async(self, connection: Any, drafts: Sequence[Draft]) -> list[Event]:
        return self.publish_on(connection, drafts)

    def is_async(self, connection: Any) -> bool:
        del connection
        return False

    # ── claim ────────────────────────────────────────────────────────────────────────────────────────────────────

    def claim(self, claim: Claim) -> Claimed:
        return self.claim_all([claim])[0]

    def claim_all(self, claims: Sequence[Claim]) -> list[Claimed]:
        wons = self._claim_again(claims, self._claim_all(claims))
        empty = [each for each, won in zip(claims, wons, strict=True) if not won.taken and each.limit]
        # A program with its own loop needs no other process to end leases: a claim that finds nothing does it.
        if empty and self._expired(empty[0].policy):
            again = iter(self._claim_all(empty))
            wons = [
                next(again) if each in empty and not won.taken else won for each, won in zip(claims, wons, strict=True)
            ]
        try:
            return [self._claimed(claim, won) for claim, won in zip(claims, wons, strict=True)]
        except BaseException:
            for claim, won in zip(claims, wons, strict=True):
                leases = [each.lease(claim.subscription) for each in won.taken]
                self._owed.add(
                    partial(lease_verbs.release, leases=leases, worker_id=claim.worker_id, delay=timedelta(0))
                )
            with suppress(StoreUnavailable):
                self._pay_back()
            raise

    def _claim_again(self, claims: Sequence[Claim], wons: list[Won]) -> list[Won]:
        """Let claims that found nothing yet go on passing the log: a lone one for a second, several once."""
        ends = time.monotonic() + (LONGEST_CLAIM if len(claims) == 1 else 0)
        while True:
            waiting = [place for place, won in enumerate(wons) if won.more and not won.taken and claims[place].limit]
            if not waiting:
                return wons
            for place, won in zip(waiting, self._claim_all([claims[place] for place in waiting]), strict=True):
                wons[place] = won
            if time.monotonic() >= ends:
                return wons

    def _claimed(self, claim: Claim, won: Won) -> Claimed:
        if not won.taken:
            next_due = from_micros(won.now) if won.more else won.next_due
            return Claimed(next_due=next_due, suspects=won.suspects, more=won.more)
        loaded = self._loaded(claim, won)
        more = won.more or len(loaded) < len(won.taken)
        return Claimed(loaded, won.next_due, suspects=won.suspects, more=more)

    def _loaded(self, claim: Claim, won: Won) -> tuple[Delivery, ...]:
        """Return the deliveries with their events, read after the commit: other writers need not wait.

        An event that cannot be read is buried with the reason, and does not harm its neighbours. What does not fit
        into a page is handed back.
        """
        ids = [each.event_id for each in won.taken]
        rows, left = won.rows, list[int]()
        if not rows:
            with self._glance() as db:
                rows, left = lookups.rows_of(db, ids)
        kept = len(ids) - len(left)
        loaded, damaged = _deliveries(claim, won, won.taken[:kept], rows)
        if left:
            self.release([each.lease(claim.subscription) for each in won.taken[kept:]], claim.worker_id)
        if damaged:
            self.settle(damaged)
        return tuple(loaded)

    # ── leases ───────────────────────────────────────────────────────────────────────────────────────────────────

    settle = write(lease_verbs.settle, ring=True)
    report = write(lease_verbs.report, ring=True)
    extend = write(lease_verbs.extend)
    started = write(lease_verbs.started)
    reset = write(lease_verbs.reset, wake=True)

    def release(self, leases: Sequence[Lease], worker_id: str, delay: timedelta = timedelta(0)) -> int:
        count = self._in_chunks(leases, lambda session, chunk: lease_verbs.release(session, chunk, worker_id, delay))
        self._wake()
        return count

    def _pay_back(self) -> None:
        for hand_back in tuple(self._owed):
            self._write(hand_back)
            self._owed.discard(hand_back)
            self._wake()

    def expire(self, owners: Iterable[str] | None, policy: RetryPolicy, limit: int = 10_000) -> int:
        self._pay_back()
        wanted = None if owners is None else tuple(owners)
        if wanted is None and not self._any_overdue():
            return 0
        count = self._close_gaps() if wanted is None else 0
        count += self._write(lambda session: lease_verbs.expire(session, wanted, policy, limit))
        if count:
            self._wake()
        return count

    def _close_gaps(self) -> int:
        """Look again for ids that are kept apart, in a database that has such; return how many deliveries that made."""
        return 0

    def _expired(self, policy: RetryPolicy) -> bool:
        """End leases that ran out; what others have leased meanwhile must not be lost over it."""
        with suppress(PostbusError):
            return bool(self.expire(None, policy))
        return False

    def _any_overdue(self) -> bool:
        with self._look() as session:
            return bool(session.db.run("any_overdue", (session.now,)))

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

    # ── lookups ──────────────────────────────────────────────────────────────────────────────────────────────────

    work = read(depth.work)
    settled = read(status.settled)
    get = read(lookups.get)
    logs = read(lookups.logs)
    list = read(lookups.list_events)
    dead_letters = read(lookups.dead_letters)
    faults = read(lookups.faults)

    def stats(self) -> Stats:
        gone = {each.owner for each in self.handlers() if each.gone}
        with self._read() as session:
            return replace(depth.stats(session, gone), checkpoints=followers.checkpoints(session, self.is_dead))

    def condition(self) -> tuple[Finding, ...]:
        return self.inspect(deep=False)

    # ── dead letters ─────────────────────────────────────────────────────────────────────────────────────────────

    def retry_dead(self, which: DeadFilter, actor: str, progress: Callable[[int], None] | None = None) -> int:
        count = self._change_dead(which, retention.revive, actor, progress)
        self._wake()
        return count

    def purge_dead(self, which: DeadFilter, actor: str, progress: Callable[[int], None] | None = None) -> int:
        return self._change_dead(which, retention.purge, actor, progress)

    def _change_dead(
        self,
        which: DeadFilter,
        change: Callable[[Session, Sequence[Row], str], int],
        actor: str,
        progress: Callable[[int], None] | None,
    ) -> int:
        """Change the dead letters that are dead now."""
        with self._read() as session:
            keys = [*lookups.dead_keys(session, which, None)]
        return self._in_chunks(keys, lambda session, chunk: change(session, chunk, actor), progress=progress)

    # ── the streams, by position ─────────────────────────────────────────────────────────────────────────────────

    span = look(followers.span)
    activity = look(followers.activity)
    ahead = look(followers.ahead)
    before = look(followers.before)
    advance = write(followers.advance)
    prunable = read(retention.prunable)

    def consumer(self, name: str, stream: Stream, start: int) -> Checkpoint:
        with self._look() as session:
            found = followers.checkpoint(session, name, stream)
        return found or self._write(lambda session: followers.consumer(session, name, stream, start))

    def checkpoints(self) -> tuple[Checkpoint, ...]:
        with self._look() as session:
            return followers.checkpoints(session, self.is_dead)

    def prune(
        self, stream: Stream, *, after: int, through: int, limit: int = 10_000, past: Collection[str] = ()
    ) -> Pruned:
        if not 0 <= after <= through or limit < 1:
            raise InvalidRequest("pruning goes from a position to the same or a later one, at least a row at a time")
        step = self._beside(
            lambda session: retention.prune(session, stream, after, through, limit=limit, past=frozenset(past))
        )
        self._reclaim(stream, done=step.done)
        return step

    def erasable(self, *, uid: str | None = None, key: str | None = None, ids: Collection[int] = ()) -> Erasable:
        wanted = self._meant(uid, key, ids)
        with self._read() as session:
            return retention.erasable(session, wanted)

    def erase(self, *, uid: str | None = None, key: str | None = None, ids: Collection[int] = (), actor: str) -> Erased:
        wanted = self._meant(uid, key, ids)
        changed = self._in_chunks(
            wanted, lambda session, chunk: retention.erase(session, chunk, actor), within=self._beside
        )
        if wanted:  # also where nothing changed: an earlier run may have been killed here
            self._scrub()
        if changed:
            self._wake()
        return Erased(tuple(wanted), changed)

    def _meant(self, uid: str | None, key: str | None, ids: Collection[int]) -> Sequence[int]:
        """Return the events that an erase is about; raise InvalidRequest if that is nothing, or said in two ways."""
        if (uid is not None and key is not None) or not (uid or key or ids):
            raise InvalidRequest("erase by a uid or by a key, or name the ids")
        return sorted({*ids, *retention.bearing(self._read, uid, key)})

    def _scrub(self) -> None:
        """Leave nothing in the store of what was erased, as far as that can be helped."""
        for stream in Stream:
            self._reclaim(stream, done=True)

    # ── followers ────────────────────────────────────────────────────────────────────────────────────────────────

    def lead(
        self, name: str, holder: str, worker_id: str, lease: timedelta, *, locked: bool = False, single: bool = False
    ) -> Lead | None:
        return self._write(
            lambda session: followers.lead(
                session, name, holder, worker_id, lease, locked=locked, single=single, is_dead=self.is_dead
            )
        )

    keep = write(followers.keep)
    position = look(followers.position)
    is_paused = look(followers.is_paused)
    resign = write(followers.resign, wake=True)
    announce = write(followers.announce)
    standing = read(followers.standing)
    unpark = write(followers.unpark, ring=True)

    def move(self, step: Step) -> None:
        if step.leaves:
            self._write(lambda session: followers.move(session, step))
            self._wake()
        elif not self._move_lightly(step):
            raise deposed(step.subscription)

    def read_on(self, after: int, limit: int, interests: tuple[Interest, ...]) -> Ahead:
        with self._glance() as db:
            rows = db.page("read_on", (after, limit))
        return followers.ahead_of(rows, after, limit, interests)

    def reader(self) -> Reader:
        return _PlainReader(self)

    def rewind(self, name: str, to: int | datetime | str, actor: str, *, dry_run: bool = False) -> Rewound:
        with self._look() as session:
            told = followers.rewinding(session, name, to)
        if dry_run:
            return told
        discarded = self._write(lambda session: followers.rewind(session, name, told.position, actor))
        self._wake()
        return told._replace(discarded=discarded)

    # ── Spark ────────────────────────────────────────────────────────────────────────────────────────────────────

    def divert(self, subscription: str, failures: Sequence[Failure], policy: RetryPolicy, worker_id: str) -> int:
        count = self._in_chunks(
            failures, lambda session, chunk: spark.divert(session, subscription, chunk, policy, worker_id)
        )
        self._wake()
        return count

    begin_part = write(staging.begin_part)
    stage = write(staging.stage)
    redeliver = write(spark.redeliver, wake=True)

    def publish_parts(self, query: str, batch: int, parts: Mapping[int, int]) -> int | None:
        published = self._write(lambda session: staging.publish_parts(session, query, batch, parts, self._publish_part))
        probe("published")
        self._wake()
        with self._read() as session:
            brought = staging.parts_of(session, query, batch)
        self.drop_parts(brought)
        return published

    def drop_parts(self, parts: Sequence[int]) -> None:
        while self._write(lambda session: staging.drop_some(session, parts)):
            pass

    # ── subscriptions ────────────────────────────────────────────────────────────────────────────────────────────

    create_subscription = write(subscriptions.create_subscription, wake=True)
    widen_subscription = write(subscriptions.widen_subscription)
    set_interests = write(subscriptions.set_interests)
    pause_subscription = write(subscriptions.pause_subscription, wake=True)
    subscriptions = read(subscriptions.all_subscriptions)

    def delete_subscription(self, name: str, actor: str) -> int:
        # Most of it goes before, a little at a time: others must not wait for millions to go.
        count = 0
        while some := self._write(lambda session: retention.discard_some(session, name, actor)):
            count += some
        return count + self._write(lambda session: retention.delete_subscription(session, name, actor))

    # ── handlers, breakers, tokens, housekeeping ─────────────────────────────────────────────────────────────────

    register_handlers = write(registry.register_handlers)
    forget_handlers = write(registry.forget_handlers)
    breaker = read(registry.breaker)
    add_token = write(registry.add_token)
    tokens = read(registry.tokens)
    revoke_token = write(registry.revoke_token)
    known = read(registry.known_uids)

    def handlers(self) -> tuple[HandlerRecord, ...]:
        with self._read() as session:
            return registry.handlers(session, self._is_gone)

    def change_breaker(self, name: str, change: Callable[[BreakerState], BreakerState | None]) -> BreakerState:
        before, state = self._write(lambda session: registry.change_breaker(session, name, change))
        if before.opened_at is not None and state.opened_at is None:  # nothing else makes more claimable than before
            self._wake()
        return state

    def tidy(self) -> int:
        with self._read() as session:
            now = from_micros(session.now)
        for each in self.handlers():
            if each.gone and (self.is_dead(each.owner) or abs(now - each.seen_at) > HANDLER_MEMORY):
                self.forget_handlers(each.owner)
        self._liveness.sweep(self._named)
        return self._write(lambda session: registry.drop_old(session) + staging.tidied(session))

    # ── after a restore ──────────────────────────────────────────────────────────────────────────────────────────

    def restore_mark(self, actor: str) -> str:
        log_id = uuid4().hex

        def mark(session: Session) -> tuple[int, list[tuple[str, int]]]:
            number = self._jump(session)
            session.db.run("set_log_id", (log_id,))
            moved = [(session.catalog.name(each), position) for each, position in session.db.run("set_back_cursors")]
            bump(session)
            return number, moved

        number, moved = self._write(mark)
        for name, position in moved:
            tell(logging.WARNING, "cursor_set_back", subscription=name, position=position)
        while self._write(lambda session: lease_verbs.reset_blocks(session, number, CHUNK, actor)):
            pass
        self._wake()
        return log_id

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
            event = event_from_row(rows[each.event_id], Status.PROCESSING, each.retry_count, None, now)
        except UNREADABLE as error:
            told = AttemptError("UnsafeStore", str(error), each.attempt, claim.worker_id, now)
            damaged.append(Settlement(lease, Dead(told), claim.worker_id))
            continue
        loaded.append(quick_delivery(event, lease, each.attempt, policy, claim.worker_id, until, each.suspect))
    return loaded, damaged


class _PlainReader:
    """A `Reader` that has nothing under way between two calls."""

    def __init__(self, store: SqlStore) -> None:
        self.read_on = store.read_on
        watch = store.watch()
        self.wait, self.wake, self.close = watch.wait, watch.wake, watch.close

    def drop(self) -> None:
        pass

    def attend(self) -> None:
        pass
