"""What a store promises: the specification to which `tests/contract` holds every store.

`Queue` is what any store does, one behind a postbus server as well. `Log` is what only a database does.

Rules for every method:

- A write is durable when the method returns (but see `Log.move`), and all of it or none of it happened.
- Whatever decides by time uses the store's one clock (`now`).
- A queue subscription gets each event after the position where it began that its patterns and tags cover. Each is a
  delivery: pending until it is claimed, leased until its lease is settled or ends, and then pending again, dead or
  finished. It is in exactly one of these states at any moment, however a store keeps it.
- Every change of a delivery writes its audit entry in the same transaction (I13). Publishing writes none. Rewinding and
  deleting a queue write one entry for all the events that were not claimed yet.
- The ids of audit entries rise, with gaps: count entries, never subtract ids.
- A read returns at most `PAGE_BYTES`: a list, a page or a claim that would be larger is cut short, and says so by
  `next` or `more`. A single event always fits.
- StoreUnavailable means that nothing was acknowledged: it may still have happened if a server was lost meanwhile. Every
  verb may be repeated; a publish, if it brings its `uid`. UnsafeStore means that the store cannot be trusted.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, Final, NamedTuple, Protocol

from postbus.breaker import BreakerState
from postbus.errors import InvalidRequest, LeaseLost, NotFound
from postbus.model import (
    Action,
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
    Outcome,
    Page,
    Pruned,
    Retry,
    Span,
    State,
    Stats,
    Status,
    Stream,
    Subscription,
    Token,
)
from postbus.pattern import Interest
from postbus.payload import MAX_PAYLOAD, Draft
from postbus.retry import RetryPolicy

PAGE_BYTES: Final = 4 * MAX_PAYLOAD
"""How many bytes of events and errors one read returns; only its last event may exceed them."""


# ── claim and settle ─────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Claim:
    """A worker's request for deliveries."""

    subscription: str
    worker_id: str
    owner: str
    """The claiming process's nonce: unlike `worker_id`, never used twice."""
    interests: tuple[Interest, ...] = (Interest(),)
    blocked: tuple[Interest, ...] = ()
    """What is not claimed although an interest covers it: the handlers whose breakers are open."""
    limit: int = 1
    """How many to take at most; 0 only asks whether a suspect waits."""
    lease: timedelta = timedelta(seconds=60)
    """Applies unless the subscription has a lease of its own."""
    policy: RetryPolicy = RetryPolicy()
    """How many attempts an expired delivery has, unless its event or subscription says otherwise."""
    alone: bool = True
    """The worker holds nothing else, so it may take a suspect (one, and nothing beside it)."""
    free: int | None = None
    """How many last attempts to take at most; None: as many as others.

    A worker takes as many as can begin at once: those that it has not begun would die with it, unrun.
    """
    shared: bool = False
    """Lease the deliveries as one block, which is extended, and expires, as a whole.

    For a worker that holds all of them in one process and extends all of them. Each is still settled by itself. A
    suspect and a last attempt are always leased apart, so that neither dies because a neighbour killed the worker.
    """


@dataclass(frozen=True, slots=True)
class Claimed:
    """The answer to a claim. `next_due` is when something more falls due, as far as that is cheap to know."""

    deliveries: tuple[Delivery, ...] = ()
    next_due: datetime | None = None
    suspects: bool = False
    """A suspect waits for a worker that holds nothing else."""
    more: bool = True
    """More may be due now, even if nothing was claimed; False only if that is known not to be so."""


class Settlement(NamedTuple):
    """How the delivery under a lease ended, as its worker reports it."""

    lease: Lease
    outcome: Outcome
    worker_id: str
    status_code: int | None = None
    execution_time_ms: float | None = None


class Settled(StrEnum):
    """What became of a settlement."""

    APPLIED = "applied"
    REPEATED = "repeated"
    """This very epoch had recorded the same outcome before; nothing changed."""
    LOST = "lost"
    """The epoch has passed, has recorded another outcome, or may no longer record this one; nothing changed."""


class Report(NamedTuple):
    """How an attempt ended, from a worker that leaves it to the store what follows."""

    event_id: int
    subscription: str
    worker_id: str
    policy: RetryPolicy
    """Decides what follows a failure, unless the subscription has a policy of its own."""
    epoch: int | None = None
    """None: the last lease that this worker had on the event."""
    failed: bool = False
    errors: tuple[AttemptError, ...] = ()
    """The errors of an attempt that succeeded all the same; of a failure, the one error."""
    max_retries: int | None = None
    """How many retries the failing handler allows; the event's own number takes precedence."""
    delay: timedelta | None = None
    """When to try again; None: as the policy says."""
    final: bool = False
    """Do not try again."""
    status_code: int | None = None
    execution_time_ms: float | None = None


class Reported(NamedTuple):
    """What a report has recorded; the entry's own number is known only if it had been recorded before."""

    entry: LogEntry
    retry_count: int
    max_retries: int
    next_retry_at: datetime | None
    repeated: bool = False
    """It had been recorded before; nothing changed."""


@dataclass(frozen=True, slots=True)
class Work:
    """What is left to do for some interests: `due` now, `leased`, or waiting for a `retry`."""

    due: bool
    leased: bool
    retrying: bool


@dataclass(frozen=True, slots=True)
class DeadFilter:
    """Which dead letters are meant; None means any. `before` bounds `by`, and includes the moment itself.

    `fault` is what the last attempt died of: the kind of its error and the message folded, as `fingerprint.cause` has
    them, joined by a colon and a space.
    """

    event_id: int | None = None
    subscription: str | None = None
    type: str | None = None
    before: datetime | None = None
    by: str = "created_at"
    fault: str | None = None


class Rewound(NamedTuple):
    """What a rewind leads to."""

    position: int
    again: int
    """How many events are handled again."""
    discarded: int
    """How many deliveries go, unfinished and dead ones, because their events come again."""
    skipped: int = 0
    """How many events a rewind forwards passes over."""
    before: int = 0
    """Where the subscription stood."""


# ── read by position ─────────────────────────────────────────────────────────────────────────────────────────────────


class Lead(NamedTuple):
    """The right to read an ordered subscription: valid until a newer epoch is drawn for it."""

    subscription: str
    epoch: int
    position: int
    """Everything up to here is done, dead or parked."""
    crashes: int
    """How many readers have vanished since the position last moved: the next event may be the cause."""
    tried: int | None = None
    """The event that the last of them was at, if it had announced it."""


class Ahead(NamedTuple):
    """What comes next in the log, as far as it is wanted."""

    events: Sequence[Event]
    damaged: Mapping[int, str]
    """Which of these cannot be read, and why; their payload is None."""
    reached: int
    """All events up to this one have been looked at."""
    more: bool
    pruned: int = 0
    """Up to where the log had been pruned when these events were read; not looked up if there are none."""
    looked: int = 0
    """How many events were looked at, unwanted ones too: fewer than asked for where they are large."""


class Burial(NamedTuple):
    """An event that a follower has failed at for good, with the error of each attempt."""

    event: Event
    errors: Sequence[AttemptError]
    execution_time_ms: float | None = None


class Step(NamedTuple):
    """How far a follower has come, and what it leaves behind on the way."""

    subscription: str
    epoch: int
    position: int
    worker_id: str
    buried: Sequence[Burial] = ()
    parked: Sequence[Event] = ()
    caught_up: bool = False
    """There was nothing more to read, so there is time to wait for the disk."""

    @property
    def leaves(self) -> bool:
        """Whether anything is left behind."""
        return bool(self.buried or self.parked)


class Failure(NamedTuple):
    """What becomes of an event whose first attempt failed in a Spark stream, where nothing is leased."""

    event_id: int
    outcome: Retry | Dead
    execution_time_ms: float | None = None


class Activity(NamedTuple):
    """How often something happened in a slot of time. An event that was published has no action and no status."""

    start: datetime
    action: Action | None
    status: Status | None
    times: int


class Fault(NamedTuple):
    """What a dead letter died of; its error is None where an operator ended it."""

    event_id: int
    subscription: str
    type: str
    died_at: datetime
    error: AttemptError | None


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding of `doctor`: what is wrong, and the command or step that fixes it; or what is `ok`."""

    check: str
    ok: bool
    message: str
    remedy: str | None = None


# ── what a store hands out ───────────────────────────────────────────────────────────────────────────────────────────


class Transaction(Protocol):
    """The caller's own transaction on the bus's store: publish in it, and write your own tables with it."""

    def execute(self, sql: str, parameters: Sequence[Any] | Mapping[str, Any] = ()) -> list[tuple[Any, ...]]:
        """Run one statement of your own and return its rows."""
        ...

    def publish(self, drafts: Sequence[Draft]) -> list[Event]:
        """Store events that exist only once, and only if, this transaction commits."""
        ...

    def settle(self, settlement: Settlement) -> Settled:
        """Record how a leased delivery ended, only if this transaction commits.

        Fenced as `Queue.settle` is: after LOST or REPEATED, which change nothing, the caller should roll back.
        """
        ...

    def move(self, step: Step) -> None:
        """Move a follower's checkpoint, only if this transaction commits; see `Log.move`."""
        ...


class Watch(Protocol):
    """Says that something may have changed, in this process or another: a hint to look, never a promise."""

    def wait(self, timeout: float) -> bool:
        """Return True when something may have changed since the last call, False after `timeout` seconds."""
        ...

    def wake(self) -> None:
        """Make the present or the next `wait` return at once."""
        ...

    def close(self) -> None:
        """Give back what the watch holds; a `wait` in another thread returns."""
        ...


class Reader(Watch, Protocol):
    """Reads the log continuously, and says when there may be more."""

    def read_on(self, after: int, limit: int, interests: tuple[Interest, ...]) -> Ahead:
        """Do what `Log.read_on` does; the next page may have been requested already."""
        ...

    def drop(self) -> None:
        """Cancel what was requested, and listen for nothing until the next reading."""
        ...

    def attend(self) -> None:
        """Take in notifications while the thread that reads is busy, so that they do not pile up; for another one."""
        ...


# ── the store ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Queue(Protocol):
    """What every store does, one behind a postbus server as well."""

    @property
    def url(self) -> str:
        """The store's address, without any secret."""
        ...

    def now(self) -> datetime:
        """Return the time that this store decides by."""
        ...

    def close(self) -> None:
        """Give everything back; a second call does nothing."""
        ...

    def watch(self) -> Watch:
        """Return a new watch on this store."""
        ...

    # ── publish ──────────────────────────────────────────────────────────────────────────────────────────────────

    def publish(self, drafts: Sequence[Draft]) -> list[Event]:
        """Append events to the log; every subscription that wants them gets them.

        In the order given; ids rise in that order. A draft whose supplied uid is known already stores nothing and
        returns the first event; with another body it raises InvalidEventError (I2, I3).

        Writes events and supplied uids only, so publishing costs the same however many subscriptions there are.
        """
        ...

    def known(self, uids: Sequence[str]) -> set[str]:
        """Return which of these uids, supplied by a producer within the last 7 days, stand for an event already."""
        ...

    # ── work ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def claim(self, claim: Claim) -> Claimed:
        """Lease due deliveries to a worker, highest priority first.

        Each gets a new epoch and one more attempt, and no other worker gets it until its lease ends (I7). A suspect
        goes before all others, if the worker may take one. A paused subscription yields nothing.

        Among equal priorities, deliveries that wait one by one (delayed, retried, handed back) come by due time and id,
        and then new events by id. Those of negative priority come when there are no new events left.

        A claim that finds nothing ends the leases that have run out, as `expire` does, and looks again; so a program
        with its own loop needs no other process.

        Never waits for events. One transaction looks at new ones for at most a fifth of a second; as long as none was
        found, further ones do so for about a second. So nothing may be returned although something is due farther on:
        then `more` is set.
        """
        ...

    def settle(self, settlements: Sequence[Settlement]) -> list[Settled]:
        """Record how leased deliveries ended; one answer for each, in order.

        The epoch is the fence: one that has passed changes nothing (I8). A lease that ran out is good until it is
        ended. After that, and until the delivery is claimed again, Done, DoneWithErrors and Dead are still accepted; a
        Retry is LOST, since the delivery is due again already. A settlement that loses does not stop its neighbours.
        """
        ...

    def extend(self, leases: Sequence[Lease], lease: timedelta) -> set[Lease]:
        """Let leases run `lease` from now (or as long as their subscription says); return the ones that are lost.

        A lease in a block extends the block.
        """
        ...

    def release(self, leases: Sequence[Lease], worker_id: str, delay: timedelta = timedelta(0)) -> int:
        """Hand deliveries back, due after `delay` and with the attempt given back; return how many were still held."""
        ...

    def started(self, lease: Lease, worker_id: str) -> None:
        """Record that work on a delivery has begun; raise LeaseLost if its epoch has passed."""
        ...

    def reset(self, event_id: int, subscription: str, reason: str, actor: str) -> None:
        """Make a leased or scheduled delivery due now; a leased one loses its lease and keeps its attempts.

        Raises NotFound if there is no such event, Conflict if the delivery is dead or finished.
        """
        ...

    def expire(self, owners: Iterable[str] | None, policy: RetryPolicy, limit: int = 10_000) -> int:
        """End leases that have run out, or, with `owners`, those of processes known to be dead; return how many.

        Each delivery is pending again as a suspect, its attempt used, or dead if that was the last attempt allowed
        (I12); the end is recorded as EXPIRED, or FAILED for a dead one. `limit` bounds how many deliveries one call
        looks at, but for the rest of the last block. `policy` sets the attempts where neither the event nor its
        subscription does. Every process with a running bus calls this about once a second.

        Without `owners`, PostgreSQL also hands back what was leased to a claim whose answer was lost, and looks for
        events that were committed too late for a cursor to remember them; those it finds are due then, and are counted.
        With `owners`, raises InvalidRequest where a server stands between: it cannot know which process is dead.
        """
        ...

    def owners(self) -> set[str]:
        """Return the nonces of the processes that hold leases."""
        ...

    def work(self, subscription: str, interests: tuple[Interest, ...]) -> Work:
        """Return what these interests have left to do. Events delayed by their publisher do not count until due."""
        ...

    # ── look ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def settled(self, event_id: int, subscriptions: Iterable[str]) -> bool:
        """Return whether an event is finished or dead in all of these subscriptions."""
        ...

    def get(self, event_id: int, subscription: str) -> Event:
        """Return an event and its state in each subscription; raise NotFound."""
        ...

    def logs(self, event_id: int) -> tuple[LogEntry, ...]:
        """Return an event's audit entries, oldest first."""
        ...

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
        """Return events newest first; `after` is the last id already seen. Without `status`: the whole log.

        `within` bounds how long the search takes: then nothing is counted, and a page may hold less than there is; its
        `next` says how far it was looked. Raises InvalidRequest with `within` where a server stands between.
        """
        ...

    def dead_letters(self, which: DeadFilter, *, limit: int, offset: int, after: int | str | None) -> Page[DeadLetter]:
        """Return dead letters, the newest event first."""
        ...

    def retry_dead(self, which: DeadFilter, actor: str, progress: Callable[[int], None] | None = None) -> int:
        """Make dead letters pending again with all their attempts before them; return how many."""
        ...

    def purge_dead(self, which: DeadFilter, actor: str, progress: Callable[[int], None] | None = None) -> int:
        """Remove dead letters for good; the event and its audit entries stay. Return how many."""
        ...

    def stats(self) -> Stats:
        """Return the figures of the bus."""
        ...

    def span(self, stream: Stream) -> Span:
        """Return what of a stream can be read now, such that nothing below its head will appear later (I5)."""
        ...

    def checkpoints(self) -> tuple[Checkpoint, ...]:
        """Return how far ordered subscriptions and Spark streams have come, by name."""
        ...

    def position(self, name: str) -> int:
        """Return how far an ordered subscription or a Spark stream has come; raise NotFound."""
        ...

    def standing(self, name: str) -> Sequence[tuple[int, str | None, State]]:
        """Return what an ordered subscription has left behind and not done yet: event, key and state, by id."""
        ...

    # ── subscriptions, handlers, breakers ────────────────────────────────────────────────────────────────────────

    def subscriptions(self) -> tuple[Subscription, ...]:
        """Return all subscriptions by name."""
        ...

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
        """Create a subscription that gets every event after `start` (now, beginning, or an id), none missed or twice.

        `now` is the last event; `beginning` lies before the first that was not pruned, to which an earlier id of a
        queue is moved up. Events that are committed later, though their ids lie below the last one at this moment, are
        not before `now`. Nothing is copied, however long the log is, and no publisher waits. Raises Conflict if the
        name is taken, InvalidRequest if `start` is not in the log.
        """
        ...

    def widen_subscription(self, name: str, pattern: str, tags: Sequence[str] = ()) -> bool:
        """Add a pattern with these tags (none: with any) to what a subscription wants; return whether that was new.

        It counts from where the subscription stands: events that a queue has passed do not come, those still before it
        do, though they were published earlier.
        """
        ...

    def pause_subscription(self, name: str, paused: bool) -> None:  # noqa: FBT001  the state itself
        """Stop or resume claiming from a subscription; raise NotFound."""
        ...

    def rewind(self, name: str, to: int | datetime | str, actor: str, *, dry_run: bool = False) -> Rewound:
        """Have an ordered subscription or a queue go on after another position: an id, a moment, `beginning` or `now`.

        An ordered subscription's reader is deposed. What was dead or parked behind the position is discarded, each
        recorded as DISCARDED, since its event comes again.

        A queue goes back only. Every event behind the position that it wants comes again with all its attempts, also
        if it was completed, dead or purged, but not if it was erased. Deliveries behind the position that are pending,
        dead or leased are gone, and their leases lost. One REPLAYED entry, on the event at the position, says from
        where, to where, and how many events come again, counted up to 10,000.

        Raises InvalidRequest for a position that was pruned or lies beyond the log (of a queue: beyond its own), and
        for a Spark stream. `dry_run` changes nothing and returns what would follow.
        """
        ...

    def delete_subscription(self, name: str, actor: str) -> int:
        """Remove a subscription and its unfinished deliveries, each recorded as DISCARDED; return how many.

        For the events that a queue had not come to yet, one DISCARDED entry on the last event of the log says from
        where, to where, and how many, counted up to 10,000.
        """
        ...

    def register_handlers(self, handlers: Sequence[HandlerRecord]) -> None:
        """Store what a process handles, or that it still does."""
        ...

    def forget_handlers(self, owner: str, ids: Sequence[str] | None = None) -> None:
        """Remove a process's handlers, or the named ones of them."""
        ...

    def handlers(self) -> tuple[HandlerRecord, ...]:
        """Return what all processes have registered, and whether they live."""
        ...

    def breaker(self, name: str) -> BreakerState:
        """Return the state of a breaker; an unknown one is closed."""
        ...

    def change_breaker(self, name: str, change: Callable[[BreakerState], BreakerState | None]) -> BreakerState:
        """Move a breaker from its present state to the one `change` returns (None: leave it), atomically."""
        ...


class Log(Queue, Protocol):
    """What only a database does. `postbus.store.log_of` gives it, or explains why a store is none."""

    # ── publish and work in transactions ─────────────────────────────────────────────────────────────────────────

    def transaction(self) -> AbstractContextManager[Transaction]:
        """Open a transaction of the caller's: committed when the block ends, rolled back when it raises.

        The block may be left in another thread than entered it, to roll back a handler that hangs: a statement that
        still runs is then cancelled, and the transaction accepts no more (InvalidRequest).
        """
        ...

    def publish_on(self, connection: Any, drafts: Sequence[Draft]) -> list[Event]:
        """Publish in the transaction that a connection of the caller's own has open: committed or undone with it.

        Raises InvalidRequest where the store takes no such connection, or for an async one.
        """
        ...

    async def publish_on_async(self, connection: Any, drafts: Sequence[Draft]) -> list[Event]:
        """Do the same on an async connection."""
        ...

    def is_async(self, connection: Any) -> bool:
        """Return whether a connection of the caller's own is an async one."""
        ...

    def claim_all(self, claims: Sequence[Claim]) -> list[Claimed]:
        """Claim for several workers, in their order, in one transaction as far as none has to wait for another process.

        A claim that has found nothing yet is continued once.
        """
        ...

    def report(self, reports: Sequence[Report]) -> list[Reported | LeaseLost | NotFound]:
        """Record how attempts ended, and decide what follows those that failed; one answer for each, in order.

        Fenced as `settle` is. The same report again changes nothing, and is answered with what it recorded. One that
        loses is answered with the reason, and does not stop its neighbours.
        """
        ...

    def mark_alive(self, owner: str) -> AbstractContextManager[None]:
        """Let other processes on this host know at once when this one dies.

        Until the end of the block; of its process, if it leaves a lease, a lead or a registered handler behind.
        """
        ...

    def is_dead(self, owner: str) -> bool:
        """Return whether a process is known to have died; False when that cannot be known from here."""
        ...

    # ── the streams, by position ─────────────────────────────────────────────────────────────────────────────────

    def ahead(self, stream: Stream, after: int, count: int) -> int:
        """Return the id of the `count`-th event or entry after a position, or of the last; `after` if there is none."""
        ...

    def before(self, stream: Stream, moment: datetime) -> int:
        """Return a position that every row written at the moment or later lies behind, and few others do."""
        ...

    def read_on(self, after: int, limit: int, interests: tuple[Interest, ...]) -> Ahead:
        """Look at the next `limit` events after a position, in order; nothing will appear among them later (I5)."""
        ...

    def reader(self) -> Reader:
        """Return what reads on continuously; for one thread, and the caller's to close."""
        ...

    def activity(self, stream: Stream, after: int, through: int, every: timedelta) -> Sequence[Activity]:
        """Count what happened, by kind, in slots of `every`: of the rows with `after < id <= through`."""
        ...

    def faults(self, limit: int) -> Sequence[Fault]:
        """Return what the newest dead letters died of, up to `limit` of each subscription."""
        ...

    # ── followers ────────────────────────────────────────────────────────────────────────────────────────────────

    def lead(
        self, name: str, holder: str, worker_id: str, lease: timedelta, *, locked: bool = False, single: bool = False
    ) -> Lead | None:
        """Become the reader of an ordered subscription, under a new epoch; None while another one leads.

        Another leads until its lease has run out, it resigned, or it is known to be dead (`is_dead`). `locked` says
        that the caller holds the lock of that name (`hold`): a reader that led by that lock is gone then, and is not
        waited for. With `single`, the newest reader always leads. Raises NotFound, InvalidRequest for a subscription of
        another mode, and UnsafeStore where going on would lose something: the position is of another log, beyond the
        head, or what follows it was pruned.
        """
        ...

    def keep(self, lead: Lead, lease: timedelta) -> bool:
        """Let a lead run `lease` from now; False if another leads."""
        ...

    def is_paused(self, lead: Lead) -> bool:
        """Return whether the subscription is paused; raise LeaseLost if another leads, NotFound if it is gone."""
        ...

    def announce(self, lead: Lead, event_id: int) -> None:
        """Record which event is handled next, so that it is known if it ends the reader; raise LeaseLost."""
        ...

    def move(self, step: Step) -> None:
        """Move a checkpoint forwards, and record what is left behind as dead or parked in the same transaction (I6).

        Raises LeaseLost, and changes nothing, if the epoch has passed (I8). A move that leaves nothing behind is seen
        by all at once, and survives any crash but that of the machine or server, after which the last of them may be
        undone: events are then handled again, never passed over. PostgreSQL keeps one that caught up in any case.
        """
        ...

    def unpark(self, name: str, ids: Sequence[int], actor: str) -> int:
        """Make parked deliveries due, each recorded as RELEASED; return how many were parked."""
        ...

    def resign(self, lead: Lead, stopped: str | None = None, before: int | None = None) -> None:
        """Let another lead; if one does already, nothing changes (I8).

        `stopped` says why the reader has stopped for good, `before` at which event. The checkpoint shows it until a
        reader gets further, or it is rewound.
        """
        ...

    def set_interests(self, name: str, patterns: Sequence[str], tags: Sequence[str]) -> None:
        """Let an ordered subscription want this and nothing else, from its position on."""
        ...

    def hold(self, name: str) -> AbstractContextManager[Callable[[], None]]:
        """Be the only one on this store who holds a name, until the end of the block or of the process.

        Raises Conflict if another does. The block gets a function that raises StoreUnavailable if the hold was lost.
        """
        ...

    # ── Spark ────────────────────────────────────────────────────────────────────────────────────────────────────

    def consumer(self, name: str, stream: Stream, start: int) -> Checkpoint:
        """Return how far a Spark stream has come, creating its subscription, at `start`, if it is new.

        Raises Conflict if the name stands for another mode, another stream, or a position in another log.
        """
        ...

    def advance(self, name: str, position: int, log_id: str) -> None:
        """Move a checkpoint forwards; one that is further already, or of another log, stays."""
        ...

    def divert(self, subscription: str, failures: Sequence[Failure], policy: RetryPolicy, worker_id: str) -> int:
        """Take failed first attempts of a Spark stream over as deliveries of its subscription; return how many.

        Each has one attempt behind it, with its error, and is due as its outcome says, or dead: also where neither the
        event nor, failing that, `policy` allows a retry. From there on it is claimed, settled, and a dead letter, like
        any other. Not taken over again is an event that has a delivery there, or had one since the subscription was
        created: a batch that is replayed changes nothing (I9). Raises NotFound for a subscription that is not there,
        and UnsafeStore for an event that was pruned meanwhile: its failure would be forgotten.
        """
        ...

    def redeliver(self, subscription: str, ids: Sequence[int], actor: str) -> int:
        """Deliver events of the log to a queue subscription again, due now; return how many.

        One that is on its way there, or a dead letter there, is left as it is. Each is recorded as REPLAYED (I11).
        Raises InvalidRequest, and delivers none, where one was pruned or the subscription is no queue.
        """
        ...

    def begin_part(self, query: str, batch: int) -> int:
        """Open a part of a batch that a Spark job brings, and return its number, which is never used again."""
        ...

    def stage(self, part: int, first: int, drafts: Sequence[Draft]) -> None:
        """Stage events in a part, the first of them at position `first`, for `publish_parts`.

        They cannot be seen until then. Raises Conflict if the part was dropped.
        """
        ...

    def publish_parts(self, query: str, batch: int, parts: Mapping[int, int]) -> int | None:
        """Publish what is staged in these parts of a batch, as `publish` would: all of it, in this order, once.

        `parts` says how many events each must hold. Returns how many are new; None, and nothing is published, if this
        batch of this query was published before (within 30 days). Whatever else was staged for the batch is dropped.
        Raises InvalidEventError where a uid stands for another body, Conflict where a part is not complete (a server
        that crashed forgets it); then nothing is published, and the batch can be brought again (I2, I3).
        """
        ...

    def drop_parts(self, parts: Sequence[int]) -> None:
        """Drop what is staged in these parts; one that is gone already does no harm."""
        ...

    # ── operate ──────────────────────────────────────────────────────────────────────────────────────────────────

    def prune(
        self, stream: Stream, *, after: int, through: int, limit: int = 10_000, past: Collection[str] = ()
    ) -> Pruned:
        """Remove rows of a stream with `after < id <= through`, looking at no more than `limit` of them.

        The first step is taken `after` 0, every further one after what the last has `reached`, until it is `done`: so
        that what was held at an earlier pruning goes too. Each step is a transaction of its own, in which the stream's
        `pruned` moves to where the step ends: a reader that goes on from there finds everything (I5). An event that is
        unfinished or dead in any subscription stays, with its audit entries, and holds nothing else back. Of the audit
        log, entries are counted; those that were recorded together go together, once none of them is needed and all lie
        before `through`, and are looked at together even if they are more than `limit`. Space is given back, or made
        fit for use again, as far as that can be done in passing.

        Raises Conflict if an ordered subscription or a Spark stream has not come to `through`, unless `past` names it
        (I14); InvalidRequest if `through` lies beyond the stream's head, or `after` beyond what was pruned before.
        """
        ...

    def prunable(self, stream: Stream, through: int) -> int:
        """Return how many rows of a stream would go if it were pruned up to a position now."""
        ...

    def erase(self, *, uid: str | None = None, key: str | None = None, ids: Collection[int] = (), actor: str) -> Erased:
        """Blank the content of the events with a uid or a key, and what `ids` (known from elsewhere) left in the store.

        Payload (now null), title, description and metadata go, and what errors may have quoted of them in the audit
        log; id, uid, type, tags, key and times stay. Each is recorded as ERASED. Their deliveries end, leased and dead
        ones too, recorded as DISCARDED; a worker at one loses its lease. A publish that repeats the uid is still a
        repeat, and brings nothing back. Done in chunks, each all or nothing; done again, it changes nothing and returns
        the same ids. Events published meanwhile may be missed.
        """
        ...

    def erasable(self, *, uid: str | None = None, key: str | None = None, ids: Collection[int] = ()) -> Erasable:
        """Return what `erase` would blank; what is blank already does not count."""
        ...

    def add_token(self, token: Token) -> None:
        """Keep a token for the HTTP API; its id must be new."""
        ...

    def tokens(self) -> tuple[Token, ...]:
        """Return all tokens, oldest first, revoked and expired ones too."""
        ...

    def revoke_token(self, identity: str) -> None:
        """Revoke a token; raise NotFound. A second time changes nothing."""
        ...

    def tidy(self) -> int:
        """Do one bounded piece of housekeeping, return what was removed.

        It removes uids older than 7 days, handlers of processes that are gone, kinds of events (types with their tags)
        that no delivery has, once there are more than 10,000 kinds, what dead jobs staged (after a day), and batches
        published long ago; it gives free pages back. Leases are ended by `expire`.
        """
        ...

    def restore_mark(self, actor: str) -> str:
        """Make a store that was restored from a backup another log than the one backed up; return its new `log_id`.

        Events published after the backup were seen, and leases given after it are still held, by programs that will
        come back. So ids and epochs go on far above any that the old log can have given (I4, I7), positions of the old
        log are recognised by its `log_id`, and what was leased at the backup is due now, each recorded as RESET. A
        queue whose cursor lies beyond the log is set back to its end, and a log line says so. If it was interrupted,
        do it again; done twice, it only jumps twice.
        """
        ...

    def inspect(self, *, deep: bool) -> tuple[Finding, ...]:
        """Return the findings about the store itself; `deep` reads every page of it."""
        ...

    def condition(self) -> tuple[Finding, ...]:
        """Return those findings that are cheap enough to be looked for again and again."""
        ...


def needs_database(what: str) -> InvalidRequest:
    """Return the error for what only a `Log` does."""
    return InvalidRequest(f"{what} needs the database itself: open the bus by its sqlite:/// or postgresql:// URL")
