"""Following the log: who reads an ordered subscription, how far it has come, and what it leaves behind.

A reader's epoch fences every move of its checkpoint. What it could not do, or must not do yet, becomes a delivery in
the same transaction as the move past it (I6).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Final, NamedTuple, TypeVar

from postbus.clock import to_micros
from postbus.errors import InvalidRequest, LeaseLost, NotFound, UnsafeStore
from postbus.model import Action, Event, Mode, Span, State, Status, Stream, Subscription
from postbus.pattern import Interest
from postbus.store.contract import PAGE_BYTES, Ahead, Burial, Lead, Reader, Rewound, Step, Watch
from postbus.store.postgres.rows.burials import Burials
from postbus.store.postgres.rows.erasing import ERASED, erased, unquoted
from postbus.store.postgres.rows.positions import Positions
from postbus.store.postgres.rows.session import Session
from postbus.store.records import encode_errors, followed_events
from postbus.store.session import Database, Row

__all__ = ["Followed", "Following", "ahead_of", "deposed"]

R = TypeVar("R")
_MICROS: Final = timedelta(microseconds=1)
_NOTHING: Final = (None, None, None, None)
CHUNK: Final = 1_000
REMEMBERED: Final = 10_000
COUNTED: Final = 500_000


class _Stand(NamedTuple):
    """A checkpoint's row, locked."""

    position: int
    log_id: str
    holder: str | None
    locked: bool
    held_until: int | None
    crashes: int
    trying: int | None


class Following:
    """Moves one checkpoint on one transaction's connection, at one moment."""

    def __init__(self, session: Session) -> None:
        """Work inside a write transaction."""
        self._session = session
        self._db, self._catalog, self._now = session

    def lead(
        self,
        name: str,
        holder: str,
        worker_id: str,
        lease: timedelta,
        *,
        locked: bool,
        single: bool,
        is_dead: Callable[[str], bool],
    ) -> Lead | None:
        """Become the one who reads; None while another does. See the contract."""
        stand = self._stand(name)
        mine = stand.holder is None or stand.holder == holder
        over = stand.held_until is not None and stand.held_until <= self._now
        gone = not mine and ((stand.locked and locked) or over or is_dead(str(stand.holder)))
        if not (mine or gone or single):
            return None
        span = self._require_here(name, stand)
        # Of one that is deposed and lives, or that had nothing to do, no event was the end. One that has not said what
        # it was about to try counts once, so that the next ones say so: something else may have been its end.
        tried = stand.trying if stand.trying is not None and stand.trying > stand.position else None
        crashes = stand.crashes
        if gone:
            crashes = max(crashes, int(span.head > stand.position)) if tried is None else crashes + 1
        epoch = self._db.value("draw_epochs", (1,))
        until = self._now + lease // _MICROS
        self._db.run("take_lead", (epoch, holder, worker_id, locked, until, crashes, name))
        return Lead(name, epoch, stand.position, crashes, tried)

    def _stand(self, name: str) -> _Stand:
        self._require_ordered(name)
        if not (rows := self._db.run("lead", (name,))):
            raise NotFound(f"{name!r} has no checkpoint: delete the subscription, and start anew")
        return _Stand._make(rows[0])

    def _require_here(self, name: str, stand: _Stand) -> Span:
        """Raise UnsafeStore where the position means nothing in this log, or what follows it is no longer there."""
        span = Positions(self._session).span(Stream.EVENTS)
        rewind = f"look at what it has done, and `postbus subscriptions rewind {name} --to ID` to where it should go on"
        if stand.log_id != span.log_id:
            raise UnsafeStore(
                f"{name!r} stands at {stand.position:,} of another log: the store was restored or replaced; {rewind}"
            )
        if stand.position > span.head and not self._held_back(stand.position):
            raise UnsafeStore(
                f"{name!r} stands at {stand.position:,}, beyond the head at {span.head:,}: was an old backup put back? "
                f"Then {rewind}"
            )
        if stand.position < span.pruned:
            raise UnsafeStore(
                f"{name!r} stands at {stand.position:,}, and everything up to {span.pruned:,} was pruned: replay that "
                f"from the lake, and {rewind}"
            )
        return span

    def _held_back(self, position: int) -> bool:
        """Return whether a position is that of an event which is there: a head held back does not make it wrong."""
        return bool(self._db.run("event", (position,)))

    def keep(self, name: str, epoch: int, lease: timedelta) -> bool:
        """Go on being the one who reads; False if that is another by now."""
        return self._db.count("keep_lead", (self._now + lease // _MICROS, name, epoch)) == 1

    def move(self, step: Step) -> None:
        """Move past events that are done, dead or parked; raise LeaseLost if another reads by now."""
        if not self._db.count("move_lead", (step.position, self._now, step.subscription, step.epoch)):
            raise deposed(step.subscription)
        for each in step.buried:
            self._bury(step, each)
        self._park(step, step.parked)

    def _bury(self, step: Step, burial: Burial) -> None:
        event, name = burial.event, step.subscription
        failures = [*map(unquoted, burial.errors)] if erased(self._db, [event.id]) else burial.errors
        count = len(failures)
        told = [(each.type, each.message) for each in failures]
        for attempt, (kind, message) in enumerate(told[:-1], 1):
            row = (event.id, name, Action.FAILED, self._now, Status.PENDING, attempt, step.epoch, step.worker_id)
            self._db.run("log", (*row, None, kind, message, None))
        route, created = self._route(name, event), to_micros(event.created_at)
        errors = encode_errors(failures)
        self._db.run(
            "bury_followed",
            (event.id, name, route, created, self._now, step.epoch, count, event.max_retries, step.worker_id, errors),
        )
        end = (
            event.id,
            name,
            Action.FAILED,
            self._now,
            Status.FAILED,
            count,
            step.epoch,
            step.worker_id,
            None,
            *told[-1],
        )
        way = (event.type, ",".join(sorted(event.tags)), event.priority)
        self._db.run("log_end", (*end, burial.execution_time_ms, *way, created, created, self._now, count - 1, errors))

    def _park(self, step: Step, events: Sequence[Event]) -> None:
        name = step.subscription
        self._db.many(
            "park",
            [
                (each.id, name, self._route(name, each), to_micros(each.created_at), self._now, each.max_retries)
                for each in events
            ],
        )
        told = (name, Action.PARKED, self._now, Status.PENDING, 0, step.epoch, step.worker_id, *_NOTHING)
        self._db.many("log", [(each.id, *told) for each in events])

    def _route(self, name: str, event: Event) -> int:
        return self._catalog.file_anew(self._db, name, event.priority, event.type, event.tags)

    def unpark(self, name: str, ids: Sequence[int], actor: str) -> int:
        """Make parked deliveries due; return how many still were parked."""
        freed: list[int] = []
        for start in range(0, len(ids), CHUNK):
            some = ids[start : start + CHUNK]
            first = self._db.value("draw_epochs", (len(some),)) - len(some) + 1
            rows = [(self._now, epoch, event_id, name) for epoch, event_id in enumerate(some, first)]
            freed += [row[0] for row in self._db.many("unpark", rows)]
        told = (name, Action.RELEASED, self._now, Status.PENDING, 0, None, actor, *_NOTHING)
        self._db.many("log", [(each, *told) for each in freed])
        return len(freed)

    def rewind(self, name: str, position: int, actor: str) -> int:
        """Put a checkpoint where it should go on from; return how many of the deliveries behind it were discarded."""
        self._stand(name)
        self.check_rewind(name, position)
        gone = Burials(self._session, actor).discard_all(name, position)
        epoch = self._db.value("draw_epochs", (1,))
        self._db.run("rewind", (position, self._now, epoch, self._db.value("meta", ("log_id",)), name))
        return gone

    def check_rewind(self, name: str, position: int) -> int:
        """Return where a checkpoint stands; raise InvalidRequest if it cannot go on from a position."""
        self._require_ordered(name)
        span = Positions(self._session).span(Stream.EVENTS)
        if not span.pruned <= position <= span.head:
            raise InvalidRequest(f"rewind to a position from {span.pruned:,} to {span.head:,}, not {position:,}")
        return self._db.value("position", (name,)) or 0

    def _require_ordered(self, name: str) -> None:
        if self._catalog.subscription(name).mode is not Mode.ORDERED:
            raise InvalidRequest(f"{name!r} is no ordered subscription: choose another name")


class Followed(ABC):
    """The verbs of a store that followers use; see the contract."""

    @abstractmethod
    def _read(self) -> AbstractContextManager[Session]: ...

    @abstractmethod
    def _look(self) -> AbstractContextManager[Session]: ...

    @abstractmethod
    def _write(self, operation: Callable[[Session], R]) -> R: ...

    @abstractmethod
    def _keeping(self, operation: Callable[[Session], R]) -> R: ...

    @abstractmethod
    def _shut_out(self, operation: Callable[[Session], R]) -> R: ...

    @abstractmethod
    def _glance(self) -> AbstractContextManager[Database]:
        """Read such that each statement sees what is committed by then, with as little ado as possible."""

    @abstractmethod
    def _move_lightly(self, step: Step) -> bool:
        """Move a checkpoint and nothing else, at once visible, durable soon; return whether the epoch still stood."""

    @abstractmethod
    def is_dead(self, owner: str) -> bool: ...

    @abstractmethod
    def watch(self) -> Watch: ...

    @abstractmethod
    def _ring(self) -> None: ...

    @abstractmethod
    def _wake(self) -> None: ...

    def lead(
        self, name: str, holder: str, worker_id: str, lease: timedelta, *, locked: bool = False, single: bool = False
    ) -> Lead | None:
        return self._write(
            lambda session: Following(session).lead(
                name, holder, worker_id, lease, locked=locked, single=single, is_dead=self.is_dead
            )
        )

    def keep(self, lead: Lead, lease: timedelta) -> bool:
        return self._write(lambda session: Following(session).keep(lead.subscription, lead.epoch, lease))

    def position(self, name: str) -> int:
        with self._glance() as db:
            place = db.value("position", (name,))
        if place is None:
            raise NotFound(f"there is no subscriber {name!r}")
        return place

    def is_paused(self, lead: Lead) -> bool:
        with self._look() as session:
            subscription = session.catalog.subscription(lead.subscription)
            if session.db.value("reader", (lead.subscription,)) != lead.epoch:
                raise deposed(lead.subscription)
            return subscription.paused

    def resign(self, lead: Lead, stopped: str | None = None, before: int | None = None) -> None:

        def give_up(session: Session) -> None:
            quotes = before is not None and erased(session.db, [before])
            told = ERASED if quotes and stopped is not None else stopped
            session.db.run("resign", (told, before, lead.subscription, lead.epoch))

        (self._write if before is None else self._keeping)(give_up)
        self._wake()

    def announce(self, lead: Lead, event_id: int) -> None:
        if not self._write(lambda session: session.db.count("announce", (event_id, lead.subscription, lead.epoch))):
            raise deposed(lead.subscription)

    def move(self, step: Step) -> None:
        if step.leaves:
            self._keeping(lambda session: Following(session).move(step))
            self._wake()
        elif not self._move_lightly(step):
            raise deposed(step.subscription)

    def read_on(self, after: int, limit: int, interests: tuple[Interest, ...]) -> Ahead:
        with self._glance() as db:
            rows = db.page("read_on", (after, limit))
        return ahead_of(rows, after, limit, interests)

    def reader(self) -> Reader:
        return _PlainReader(self)

    def standing(self, name: str) -> list[tuple[int, str | None, State]]:
        with self._read() as session:
            return [(event_id, key, State(state)) for event_id, key, state in session.db.run("standing", (name,))]

    def unpark(self, name: str, ids: Sequence[int], actor: str) -> int:
        count = self._write(lambda session: Following(session).unpark(name, ids, actor)) if ids else 0
        self._ring()
        return count

    def rewind(self, name: str, to: int | datetime | str, actor: str, *, dry_run: bool = False) -> Rewound:
        position = self._position(to)
        with self._look() as session:
            stood = Following(session).check_rewind(name, position)
            wanted = session.catalog.subscription(name)
            again = _count(session.db, position, stood, wanted)
            skipped = _count(session.db, stood, position, wanted)
            behind = sum(event_id > position for event_id, *_ in session.db.run("standing", (name,)))
        if not dry_run:
            behind = self._keeping(lambda session: Following(session).rewind(name, position, actor))
            self._wake()
        return Rewound(position, again, behind, skipped)

    def _position(self, to: int | datetime | str) -> int:
        with self._look() as session:
            positions = Positions(session)
            span = positions.span(Stream.EVENTS)
            match to:
                case "beginning":
                    return span.pruned
                case "now":
                    return span.head
                case datetime():
                    return positions.before(Stream.EVENTS, to_micros(to))
                case int():
                    return to
                case _:
                    raise InvalidRequest(f"rewind to an id, a moment, 'beginning' or 'now', not {to!r:.80}")


def deposed(name: str) -> LeaseLost:
    """Return the error of a reader whose epoch has passed."""
    return LeaseLost(f"another has taken over {name!r}, or it was rewound or deleted: nothing changed")


class _PlainReader:
    """A `Reader` that has nothing under way between two calls."""

    def __init__(self, store: Followed) -> None:
        self.read_on = store.read_on
        watch = store.watch()
        self.wait, self.wake, self.close = watch.wait, watch.wake, watch.close

    def drop(self) -> None:
        pass

    def attend(self) -> None:
        pass


def ahead_of(rows: Sequence[Row], after: int, limit: int, interests: tuple[Interest, ...]) -> Ahead:
    """Return what `read_on` has found."""
    events, damaged = followed_events(rows, _wanting(interests))
    reached, pruned = (rows[-1][0], int(rows[0][13])) if rows else (after, 0)
    more = len(rows) == limit or sum(row[14] for row in rows) >= PAGE_BYTES
    return Ahead(events, damaged, reached, more, pruned, len(rows))


@lru_cache(REMEMBERED)
def _wanting(interests: tuple[Interest, ...]) -> Callable[[str, str], bool] | None:
    """Return what tells whether events of a type with tags (joined) are wanted; None: all are."""
    if any(each.pattern == "*" and not each.tags for each in interests):
        return None

    @lru_cache(REMEMBERED)
    def wants(kind: str, tags: str) -> bool:
        split = tuple(tags.split(",")) if tags else ()
        return any(each.wants(kind, split) for each in interests)

    return wants


def _count(db: Database, after: int, through: int, wanted: Subscription) -> int:
    """Count the events of a range that a subscription wants, a part at a time: no statement may take a minute."""
    tags = frozenset(wanted.tags)
    wants = _wanting(tuple(Interest(each, tags) for each in wanted.patterns))
    total = 0
    while after < through and (end := db.value("ahead_events", (after, through, COUNTED))):
        kinds: list[Row] = db.run("kinds_between", (after, end))
        total += sum(count for kind, tags, count in kinds if wants is None or wants(kind, tags))
        after = end
    return total
