"""What a store promises. Both stores pass one suite (`tests/contract`), which holds them to these words.

Rules for every method:

- A write is durable when the method returns (but see `move`), and all of it or none of it happened.
- Whatever decides by time uses the store's one clock (`now`).
- A queue subscription gets each event behind the position where it began that its patterns and tags cover: a delivery,
  which is pending until it is claimed, leased until its lease is settled or ends, and then pending again, dead or
  finished. It is in exactly one of these states at any moment, however a store keeps it.
- Every change of a delivery writes its audit entry in the same transaction (I13). Publishing writes none. Rewinding and
  deleting a queue write one entry for all the events that nobody had claimed yet.
- Ids of audit entries rise, and positions between them may be empty: count entries, never subtract ids.
- What a read returns fits into `PAGE_BYTES`: a list, a page or a claim that would be larger comes shorter, and says
  so by `next` or `more`. One event alone always fits.
- StoreUnavailable means that nothing was acknowledged: it may have happened all the same if a server was lost in the
  midst of it. Every verb may be repeated; a publish, if it brings its `uid`. UnsafeStore: do not trust the store.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, Final, NamedTuple, Protocol

from postbus.breaker import BreakerState
from postbus.errors import LeaseLost, NotFound
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
"""How many bytes of events and errors one read returns, but for the last event, which may go beyond."""


@dataclass(frozen=True, slots=True)
class Claim:
    """Who asks for deliveries, for which of them, and on which terms."""

    subscription: str
    worker_id: str
    owner: str
    """The claiming process's nonce: unlike `worker_id`, never used twice."""
    interests: tuple[Interest, ...] = (Interest(),)
    blocked: tuple[Interest, ...] = ()
    """What must not be claimed although an interest covers it (breakers that are open)."""
    limit: int = 1
    """How many to take at most; 0 only tells whether a suspect waits."""
    lease: timedelta = timedelta(seconds=60)
    """Holds unless the subscription has a lease of its own."""
    policy: RetryPolicy = RetryPolicy()
    """How many attempts an expired delivery has, unless its event or subscription says otherwise."""
    alone: bool = True
    """The claimer holds nothing else, so that it may take a suspect (one, and nothing beside it)."""
    free: int | None = None
    """How many to take at most of those that may not be tried again; None: as many as others."""
    shared: bool = False
    """Lease what it takes as one block, which is extended as a whole, and expires as a whole if nobody extends it.

    For a worker that holds all of it in one process and extends all of it. Each delivery is settled by itself all the
    same. A suspect and an attempt that is the last one allowed are always leased apart, so that none of them dies
    because a neighbour killed the worker.
    """


@dataclass(frozen=True, slots=True)
class Claimed:
    """What a claim got. `next_due` is when something more falls due, as far as that is cheap to know."""

    deliveries: tuple[Delivery, ...] = ()
    next_due: datetime | None = None
    suspects: bool = False
    """A suspect is waiting for somebody who holds nothing else."""
    more: bool = True
    """There may be more that is due now, even if nothing was claimed; False only if that is known not to be so."""


class Settlement(NamedTuple):
    """How the delivery of a lease ended, as told by its worker."""

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
    """How an attempt ended, as told by a worker that leaves it to the store what follows."""

    event_id: int
    subscription: str
    worker_id: str
    policy: RetryPolicy
    """Decides what follows a failure, unless the subscription has a policy of its own."""
    epoch: int | None = None
    """None: the last lease that this worker had on the event."""
    failed: bool = False
    errors: tuple[AttemptError, ...] = ()
    """What was met on the way; of a failure, the one error."""
    max_retries: int | None = None
    """How many retries the failing handler allows; the event's own number goes before it."""
    delay: timedelta | None = None
    """When to try again; None: as the policy says."""
    final: bool = False
    """Do not try again."""
    status_code: int | None = None
    execution_time_ms: float | None = None


class Reported(NamedTuple):
    """What a report has recorded; the entry's own number is known only of one that was there before."""

    entry: LogEntry
    retry_count: int
    max_retries: int
    next_retry_at: datetime | None
    repeated: bool = False
    """It had been recorded before; nothing changed."""


class Failure(NamedTuple):
    """What became of an event's first attempt in a Spark stream, where nothing was leased."""

    event_id: int
    outcome: Retry | Dead
    execution_time_ms: float | None = None


class Lead(NamedTuple):
    """The right to read an ordered subscription: valid while nobody drew a newer epoch for it."""

    subscription: str
    epoch: int
    position: int
    """Everything up to here is done, dead or parked."""
    crashes: int
    """How many readers have ended without a word since the position last moved: the next event may be the cause."""
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
    """Up to where the log had been pruned when these events were read; not looked at if there are none."""
    looked: int = 0
    """How many events that were, unwanted ones included: fewer than asked for where they are large."""


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
    """Whether there was nothing more to read: then there is time to wait for the disk."""

    @property
    def leaves(self) -> bool:
        """Whether anything is left behind."""
        return bool(self.buried or self.parked)


class Rewound(NamedTuple):
    """What a rewind leads to."""

    position: int
    again: int
    """How many events are handled again."""
    discarded: int
    """How many deliveries go, unfinished and dead ones, because their events come again."""
    skipped: int = 0
    """How many events are passed over, by one that goes forwards."""
    before: int = 0
    """Where the subscription stood."""


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


class Activity(NamedTuple):
    """How often something happened in a slot of time. An event that was published has no action and no status."""

    start: datetime
    action: Action | None
    status: Status | None
    times: int


class Fault(NamedTuple):
    """What a dead letter died of; its error is None where an operator made an end of it."""

    event_id: int
    subscription: str
    type: str
    died_at: datetime
    error: AttemptError | None


@dataclass(frozen=True, slots=True)
class Finding:
    """Something `doctor` has to say: what is wrong and the command or step that mends it. `ok` if nothing is."""

    check: str
    ok: bool
    message: str
    remedy: str | None = None


class Transaction(Protocol):
    """The caller's own transaction on the bus's store: publish in it, and write your own tables with it."""

    def execute(self, sql: str, parameters: Sequence[Any] | Mapping[str, Any] = ()) -> list[tuple[Any, ...]]:
        """Run one statement of your own and return its rows."""
        ...

    def publish(self, drafts: Sequence[Draft]) -> list[Event]:
        """Store events that exist only once, and only if, this transaction commits."""
        ...

    def settle(self, settlement: Settlement) -> Settled:
        """Record how a leased delivery ended, once and only if this transaction commits.

        Fenced as `Store.settle` is: LOST and REPEATED change nothing, and whoever gets them should roll back.
        """
        ...

    def move(self, step: Step) -> None:
        """Move a follower's checkpoint, once and only if this transaction commits; see `Store.move`."""
        ...


class Watch(Protocol):
    """Tells that something may have changed, in this process or another: a hint to look, never a promise."""

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
    """Reads the log for one who goes on and on, and tells when there may be more."""

    def read_on(self, after: int, limit: int, interests: tuple[Interest, ...]) -> "Ahead":
        """Do what `Store.read_on` does; what probably comes next may be on its way already."""
        ...

    def drop(self) -> None:
        """Have nothing under way, and hear of nothing until the next reading: for one who does not read for now."""
        ...

    def attend(self) -> None:
        """Keep what tells it from piling up while its own thread is busy with what was read; for another thread."""
        ...


class Store(Protocol):
    """Where the bus lives."""

    @property
    def url(self) -> str:
        """The store's address, fit to be shown: without any secret."""
        ...

    @property
    def served(self) -> bool:
        """Whether a server does the work, beside this process."""
        ...

    @property
    def remote(self) -> bool:
        """Whether a postbus server stands between: it does the upkeep, and some of this is not to be had there.

        What needs the database itself then raises InvalidRequest.
        """
        ...

    def now(self) -> datetime:
        """Return the time that this store decides by."""
        ...

    def close(self) -> None:
        """Give everything back; a second call does nothing."""
        ...

    def publish(self, drafts: Sequence[Draft]) -> list[Event]:
        """Append events to the log; every subscription that wants them gets them.

        All or nothing, in the order given; ids rise in that order. A draft whose supplied uid is known already
        stores nothing and returns the first event; with another body it raises InvalidEventError (I2, I3).

        Nothing is written but events and supplied uids, so that publishing costs the same however many subscriptions
        there are.
        """
        ...

    def transaction(self) -> AbstractContextManager[Transaction]:
        """Open a transaction of the caller's: committed when the block ends, rolled back when it raises.

        The block may be left in another thread than entered it, to roll back what hangs: a statement that still runs
        is then cut off, and the transaction takes no more (InvalidRequest).
        """
        ...

    def publish_on(self, connection: Any, drafts: Sequence[Draft]) -> list[Event]:
        """Publish in the transaction that a connection of the caller's own has open: committed or undone with it.

        Raises InvalidRequest where the store takes no such connection, or for one that is awaited.
        """
        ...

    async def publish_on_async(self, connection: Any, drafts: Sequence[Draft]) -> list[Event]:
        """Do the same on a connection that is awaited."""
        ...

    def is_async(self, connection: Any) -> bool:
        """Return whether a connection of the caller's own is one that is awaited."""
        ...

    def claim(self, claim: Claim) -> Claimed:
        """Lease due deliveries to a worker, highest priority first.

        Each gets a new epoch and one more attempt, and belongs to nobody else until its lease ends (I7). A suspect
        goes before all others, if the claimer may take one. A paused subscription yields nothing.

        Among equal priorities, deliveries that wait one by one (delayed, retried, handed back) come by due time and id,
        and then new events by id. Those of negative priority come when there are no new events left.

        A claim that finds nothing ends the leases that have run out, as `expire` does, and looks again; so a program
        with its own loop needs no other process.

        Never waits for events. It looks at new ones for a fifth of a second at most in one transaction, and as long as
        it has found none, in further ones for about a second: it may return nothing although something is due farther
        on, and then says so by `more`.
        """
        ...

    def claim_all(self, claims: Sequence[Claim]) -> list[Claimed]:
        """Claim for several workers, in their order, in one transaction as far as none has to wait for another process.

        A claim that has found nothing yet is continued once.
        """
        ...

    def settle(self, settlements: Sequence[Settlement]) -> list[Settled]:
        """Record how leased deliveries ended; one answer for each, in order.

        The epoch is the fence: one that has passed changes nothing (I8). A lease that ran out is good until it is
        ended. After that, and until the delivery is claimed again, Done, DoneWithErrors and Dead are still accepted; a
        Retry is LOST, since the delivery is due again already. A settlement that loses does not stop its neighbours.
        """
        ...

    def report(self, reports: Sequence[Report]) -> list[Reported | LeaseLost | NotFound]:
        """Record how attempts ended, and decide what follows those that failed; one answer for each, in order.

        Fenced as `settle` is. The same report again changes nothing, and is answered with what it recorded. One that
        loses is answered with why, and does not stop its neighbours.
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
        looks at, but for the rest of the last block. `policy` tells how many attempts there are where neither the event
        nor its subscription does. Every process with a running bus calls this about once a second.

        Without `owners`, PostgreSQL also hands back what a claim was given whose answer was lost, and looks for events
        that were committed too late for a cursor to remember them; those it finds are due then, and are counted.
        """
        ...

    def owners(self) -> set[str]:
        """Return the nonces of the processes that hold leases."""
        ...

    def mark_alive(self, owner: str) -> AbstractContextManager[None]:
        """Let other processes on this host know at once when this one dies.

        Until the end of the block; of its process, if it leaves a lease, a lead or a registered handler behind.
        """
        ...

    def is_dead(self, owner: str) -> bool:
        """Return whether a process is known to have died; False when that cannot be told from here."""
        ...

    def work(self, subscription: str, interests: tuple[Interest, ...]) -> Work:
        """Tell what these interests have left to do. Events delayed by their publisher do not count until due."""
        ...

    def settled(self, event_id: int, subscriptions: Iterable[str]) -> bool:
        """Return whether an event is finished or dead in all of these subscriptions."""
        ...

    def get(self, event_id: int, subscription: str) -> Event:
        """Return an event and how it stands in each subscription; raise NotFound."""
        ...

    def logs(self, event_id: int) -> tuple[LogEntry, ...]:
        """Return an event's audit rows, oldest first."""
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

        `within` bounds the search: then nothing is counted, and a page may hold less than there is; its `next` says how
        far it was looked.
        """
        ...

    def dead_letters(self, which: DeadFilter, *, limit: int, offset: int, after: int | str | None) -> Page[DeadLetter]:
        """Return dead letters, the newest event first."""
        ...

    def faults(self, limit: int) -> Sequence[Fault]:
        """Return of the newest dead letters what they died of, up to `limit` of each subscription."""
        ...

    def retry_dead(self, which: DeadFilter, actor: str, progress: Callable[[int], None] | None = None) -> int:
        """Make dead letters pending again with all their attempts before them; return how many."""
        ...

    def purge_dead(self, which: DeadFilter, actor: str, progress: Callable[[int], None] | None = None) -> int:
        """Remove dead letters for good; the event and its audit rows stay. Return how many."""
        ...

    def span(self, stream: Stream) -> Span:
        """Return what of a stream can be read now, such that nothing below its head will appear later (I5)."""
        ...

    def activity(self, stream: Stream, after: int, through: int, every: timedelta) -> Sequence[Activity]:
        """Count what happened, by kind, in slots of `every`: of the rows with `after < id <= through`."""
        ...

    def ahead(self, stream: Stream, after: int, count: int) -> int:
        """Return the id of the `count`-th event or entry after a position, or of the last; `after` if there is none."""
        ...

    def before(self, stream: Stream, moment: datetime) -> int:
        """Return a position that every row written at the moment or later lies behind, and few others do."""
        ...

    def consumer(self, name: str, stream: Stream, start: int) -> Checkpoint:
        """Return how far a Spark stream has come, making its subscription, at `start`, if it is new.

        Raises Conflict if the name stands for another mode, another stream, or a position in another log.
        """
        ...

    def advance(self, name: str, position: int, log_id: str) -> None:
        """Move a checkpoint forwards; one that is further already, or of another log, stays."""
        ...

    def checkpoints(self) -> tuple[Checkpoint, ...]:
        """Return how far ordered subscriptions and Spark streams have come, by name."""
        ...

    def lead(
        self, name: str, holder: str, worker_id: str, lease: timedelta, *, locked: bool = False, single: bool = False
    ) -> Lead | None:
        """Become the one who reads an ordered subscription, under a new epoch; None while another does.

        Another does until its lease has run out, it resigned, or it is known to be dead (`is_dead`). `locked` says
        that the caller holds the lock of that name (`hold`): whoever led by that lock is gone then, and need not be
        waited for. With `single` nobody is asked: the last one who comes reads. Raises NotFound, InvalidRequest for a
        subscription of another mode, and UnsafeStore where going on would lose something: the position is of another
        log, beyond the head, or what follows it was pruned.
        """
        ...

    def keep(self, lead: Lead, lease: timedelta) -> bool:
        """Let a lead run `lease` from now; False if another leads."""
        ...

    def position(self, name: str) -> int:
        """Return how far an ordered subscription or a Spark stream has come; raise NotFound."""
        ...

    def is_paused(self, lead: Lead) -> bool:
        """Return whether the subscription is paused; raise LeaseLost if another leads, NotFound if it is gone."""
        ...

    def resign(self, lead: Lead, stopped: str | None = None, before: int | None = None) -> None:
        """Let another lead; if one does already, nothing changes (I8).

        `stopped` says why the reader has stopped for good, `before` at which event. It shows in the checkpoint until
        somebody gets further, or rewinds it.
        """
        ...

    def announce(self, lead: Lead, event_id: int) -> None:
        """Say which event is handled next, so that it is known if this is the reader's end; raise LeaseLost."""
        ...

    def read_on(self, after: int, limit: int, interests: tuple[Interest, ...]) -> Ahead:
        """Look at the next `limit` events after a position, in order; nothing will appear among them later (I5)."""
        ...

    def reader(self) -> Reader:
        """Return what does the same again and again; for one thread, and the caller's to close."""
        ...

    def move(self, step: Step) -> None:
        """Move a checkpoint forwards, and record what is left behind as dead or parked in the same transaction (I6).

        Raises LeaseLost, and changes nothing, if the epoch has passed (I8). A move that leaves nothing behind is seen
        by all at once, and survives any crash but that of the machine or server, after which the last of them may be
        undone: events are then handled again, never passed over. PostgreSQL keeps one that caught up in any case.
        """
        ...

    def standing(self, name: str) -> Sequence[tuple[int, str | None, State]]:
        """Return what an ordered subscription has left behind and not done yet: event, key and state, by id."""
        ...

    def unpark(self, name: str, ids: Sequence[int], actor: str) -> int:
        """Make parked deliveries due, each recorded as RELEASED; return how many were parked."""
        ...

    def rewind(self, name: str, to: int | datetime | str, actor: str, *, dry_run: bool = False) -> Rewound:
        """Have an ordered subscription or a queue go on after another position: an id, a moment, `beginning` or `now`.

        The reader of an ordered subscription is deposed and begins there. What lay dead or parked behind the position
        is discarded, each recorded as DISCARDED, since its event comes again.

        A queue goes back only. Every event behind the position that it wants comes again with all its attempts, also
        if it was completed, dead or purged, but not if it was erased. Deliveries behind the position that are pending,
        dead or leased are gone, and their leases lost. One REPLAYED entry, on the event at the position, tells from
        where, to where, and how many events come again, counted up to 10,000.

        Raises InvalidRequest for a position that was pruned or lies beyond the log (of a queue: beyond its own), and
        for a Spark stream. `dry_run` changes nothing and returns what would follow.
        """
        ...

    def prune(
        self, stream: Stream, *, after: int, through: int, limit: int = 10_000, past: Collection[str] = ()
    ) -> Pruned:
        """Remove rows of a stream with `after < id <= through`, looking at no more than `limit` of them.

        The first step is taken `after` 0, every further one after what the last has `reached`, until it is `done`: so
        that what was held at an earlier pruning goes too. Each step is a transaction of its own, in which the stream's
        `pruned` moves to where the step ends: whoever reads from there on finds everything (I5). An event that is
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
        """Blank what events of a uid or a key say of anybody, and what `ids` (known from elsewhere) left in the store.

        Payload (now null), title, description and metadata go, and what errors may have quoted of them in the audit
        log; id, uid, type, tags, key and times stay. Each is recorded as ERASED. Whatever is still to be done for them
        is not: their deliveries, leased and dead ones too, are recorded as DISCARDED, and a worker at it loses its
        lease. A publish that repeats the uid is still a repeat, and brings nothing back. Done in chunks, each all or
        nothing; done again, it changes nothing and returns the same ids. Events published meanwhile may be missed.
        """
        ...

    def erasable(self, *, uid: str | None = None, key: str | None = None, ids: Collection[int] = ()) -> Erasable:
        """Return what `erase` would blank; what is blank already does not count."""
        ...

    def redeliver(self, subscription: str, ids: Sequence[int], actor: str) -> int:
        """Deliver events of the log to a queue subscription again, due now; return how many.

        One that is on its way there, or a dead letter there, is left as it is. Each is recorded as REPLAYED (I11).
        Raises InvalidRequest, and delivers none, where one was pruned or the subscription is no queue.
        """
        ...

    def hold(self, name: str) -> AbstractContextManager[Callable[[], None]]:
        """Be the only one on this store who holds a name, until the end of the block or of the process.

        Raises Conflict if another does. The block gets what raises StoreUnavailable if the hold was lost meanwhile.
        """
        ...

    def divert(self, subscription: str, failures: Sequence[Failure], policy: RetryPolicy, worker_id: str) -> int:
        """Take failed first attempts of a Spark stream over as deliveries of its subscription; return how many.

        Each has one attempt behind it, with its error, and is due as its outcome says, or dead: also where neither the
        event nor, failing that, `policy` allows a retry. From there on it is claimed, settled, and a dead letter, like
        any other. Not taken over again is an event that has a delivery there, or had one since the subscription was
        made: a batch that is replayed changes nothing (I9). Raises NotFound for a subscription that is not there, and
        UnsafeStore for an event that was pruned meanwhile: its failure would be forgotten.
        """
        ...

    def begin_part(self, query: str, batch: int) -> int:
        """Open a part of a batch that a Spark job is bringing, and return its number, which is never used again."""
        ...

    def stage(self, part: int, first: int, drafts: Sequence[Draft]) -> None:
        """Lay events by in a part, the first of them at position `first`, to be published by `publish_parts`.

        Nobody sees them until then. Raises Conflict if the part was dropped.
        """
        ...

    def publish_parts(self, query: str, batch: int, parts: Mapping[int, int]) -> int | None:
        """Publish what lies in these parts of a batch, as `publish` would: all of it, in this order, once.

        `parts` says how many events each must hold. Returns how many are new; None, and nothing is published, if this
        batch of this query was published before (within 30 days). Whatever else was brought for the batch is dropped.
        Raises InvalidEventError where a uid stands for another body, Conflict where a part is not complete (a server
        that crashed forgets it); then nothing is published, and the batch can be brought again (I2, I3).
        """
        ...

    def drop_parts(self, parts: Sequence[int]) -> None:
        """Drop what was laid by in these parts; one that is gone already does no harm."""
        ...

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
        """Make a subscription that gets every event after `start` (now, beginning, or an id), none missed or twice.

        `start` is a position in the log: `now` is the last event, `beginning` lies before the first that was not
        pruned, to which an earlier id of a queue is moved up. Events that are committed later, though their ids lie
        below the last one at this moment, are not before `now`. Nothing is copied, however long the log is, and no
        publisher waits. Raises Conflict if the name is taken, InvalidRequest if `start` is not in the log.
        """
        ...

    def widen_subscription(self, name: str, pattern: str, tags: Sequence[str] = ()) -> bool:
        """Let a subscription want this pattern with these tags too (none: with any); return whether that was news.

        It counts from where the subscription stands: what a queue has passed does not come, what it has still to come
        to does, though it was published before.
        """
        ...

    def set_interests(self, name: str, patterns: Sequence[str], tags: Sequence[str]) -> None:
        """Let an ordered subscription want this and nothing else; what it has passed, it has passed."""
        ...

    def pause_subscription(self, name: str, paused: bool) -> None:  # noqa: FBT001  the state itself
        """Stop or let go on what is claimed from a subscription; raise NotFound."""
        ...

    def delete_subscription(self, name: str, actor: str) -> int:
        """Remove a subscription and its unfinished deliveries, each recorded as DISCARDED; return how many.

        For the events that a queue had not come to yet, one DISCARDED entry on the last event of the log tells from
        where, to where, and how many, counted up to 10,000.
        """
        ...

    def register_handlers(self, handlers: Sequence[HandlerRecord]) -> None:
        """Store, or see again, what a process handles."""
        ...

    def forget_handlers(self, owner: str, ids: Sequence[str] | None = None) -> None:
        """Remove a process's handlers, or the named ones of them."""
        ...

    def handlers(self) -> tuple[HandlerRecord, ...]:
        """Return what all processes have registered, and whether they live: one answer for whoever shows it."""
        ...

    def breaker(self, name: str) -> BreakerState:
        """Return how a breaker stands; one never heard of is closed."""
        ...

    def change_breaker(self, name: str, change: Callable[[BreakerState], BreakerState | None]) -> BreakerState:
        """Move a breaker from its present state to the one `change` returns (None: leave it), atomically."""
        ...

    def add_token(self, token: Token) -> None:
        """Keep a token for the HTTP API; its id must be new."""
        ...

    def tokens(self) -> tuple[Token, ...]:
        """Return all tokens, oldest first: the revoked and expired ones too."""
        ...

    def revoke_token(self, identity: str) -> None:
        """Let a token be used no more; raise NotFound. A second time changes nothing."""
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
        log can be told by its `log_id`, and what was leased at the backup is due now, each recorded as RESET. Lost in
        the midst of it, it is done again; done twice, it only jumps twice.
        """
        ...

    def known(self, uids: Sequence[str]) -> set[str]:
        """Return which of these uids, supplied by a producer within the last days, stand for an event already."""
        ...

    def watch(self) -> Watch:
        """Return a new watch on this store."""
        ...

    def stats(self) -> Stats:
        """Return the bus in figures."""
        ...

    def inspect(self, *, deep: bool) -> tuple[Finding, ...]:
        """Return what `doctor` can say of the store itself; `deep` reads every page of it."""
        ...

    def condition(self) -> tuple[Finding, ...]:
        """Return what of it can be said without reading the store: cheap enough to be asked for again and again."""
        ...
