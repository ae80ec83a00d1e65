"""Positions in the streams: how far they go, how far each follower has come, who leads it, and what it leaves behind.

A leader's epoch fences every move of its checkpoint. What it could not do, or must not do yet, becomes a delivery in
the same transaction as the move past it (I6). Positions of the audit stream are ids of entries, which lie within the
row of an array.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Final, NamedTuple

from postbus.clock import from_micros, to_micros
from postbus.errors import Conflict, InvalidRequest, LeaseLost, NotFound, UnsafeStore
from postbus.model import (
    Action,
    AttemptError,
    Checkpoint,
    Dead,
    Event,
    Lease,
    Mode,
    Span,
    State,
    Status,
    Stream,
)
from postbus.pattern import Interest
from postbus.store.audit import PLACE_BITS, Entry, add_entries
from postbus.store.catalog import kind_of
from postbus.store.contract import PAGE_BYTES, Activity, Ahead, Burial, Lead, Rewound, Settlement, Step
from postbus.store.deliveries import Changes, DeliveryRow, Held, delivery_rows, end_entry, entry_of, hold
from postbus.store.records import encode_errors, followed_events, json_array
from postbus.store.session import Row, Session, bump
from postbus.store.unfinished import (
    MOST_COUNTED,
    count_ahead,
    discard_all,
    leased_after,
    told_count,
)

MICROSECOND: Final = timedelta(microseconds=1)
REMEMBERED: Final = 10_000
MOST_ROWS: Final = 10_000
"""How many rows of the audit log are looked at to tell a lag; beyond them it is estimated."""
DISORDER: Final = 10_000
"""Ids are drawn a moment before the time is noted: how far apart rows may be whose times are the wrong way round."""
ERASED: Final = "erased"
"""What replaces text that quoted an event."""


class Statements(NamedTuple):
    """What a stream's statements are called, and the entry of `meta` that tells how far it was pruned."""

    pruned: str
    head: str
    last: str
    ahead: str
    when: str
    since: str
    activity: str
    disorder: int


STATEMENTS: Final = {
    Stream.EVENTS: Statements(
        "pruned_through", "head_events", "last_events", "ahead_events", "when_events", "since_events",
        "activity_events", DISORDER,
    ),
    Stream.AUDIT: Statements(
        "audit_pruned_through", "head_audit", "last_audit", "ahead_audit", "when_audit", "since_audit",
        "activity_audit", DISORDER << PLACE_BITS,
    ),
}  # fmt: skip


# ── the streams ──────────────────────────────────────────────────────────────────────────────────────────────────────


def span(session: Session, stream: Stream) -> Span:
    """Return what can be read. A position is the id of what was seen, never merely one that was drawn."""
    names = STATEMENTS[stream]
    head = session.db.value(names.head)
    last = session.db.value(names.last, (head,)) or 0
    pruned = int(session.db.value("meta", (names.pruned,)))  # last: what was seen may be pruned meanwhile
    return Span(_log_id(session), pruned, max(pruned, last))


def ahead(session: Session, stream: Stream, after: int, count: int) -> int:
    """Return the id of the `count`-th event or entry after a position, or of the last there is."""
    head = session.db.value(STATEMENTS[stream].head)
    return session.db.value(STATEMENTS[stream].ahead, (after, head, count)) or after


def activity(session: Session, stream: Stream, after: int, through: int, every: timedelta) -> list[Activity]:
    """Count what happened, by kind, in slots of time."""
    slot = every // MICROSECOND
    rows = session.db.run(STATEMENTS[stream].activity, (after, through, slot))
    return [
        Activity(from_micros(number * slot), action and Action(action), status and Status(status), count)
        for number, action, status, count in rows
    ]


def before(session: Session, stream: Stream, moment: datetime) -> int:
    """Return a position behind which lies all of a moment and later: found by halving, times rise with ids."""
    names, wanted = STATEMENTS[stream], to_micros(moment)
    whole = span(session, stream)
    low, high = whole.pruned, whole.head
    while low < high:
        middle = (low + high) // 2
        rows = session.db.run(names.when, (middle,))  # none: pruned meanwhile
        if rows and rows[0][1] < wanted:
            low = rows[0][0]
        else:
            high = middle
    strays = session.db.value(names.since, (max(whole.pruned, low - names.disorder), low, wanted))
    return low if strays is None else strays - 1


def _log_id(session: Session) -> str:
    return session.db.value("meta", ("log_id",))


# ── checkpoints ──────────────────────────────────────────────────────────────────────────────────────────────────────


def checkpoints(session: Session, is_dead: Callable[[str], bool] = lambda _: False) -> tuple[Checkpoint, ...]:
    """Return all checkpoints by name; `is_dead` tells of a process whether it is known to have died."""
    rows = session.db.run("checkpoints")
    heads = {stream: span(session, Stream(stream)).head for stream in {row[1] for row in rows}}
    return tuple(_checkpoint(session, row, heads[row[1]], is_dead) for row in rows)


def _checkpoint(session: Session, row: Row, head: int, is_dead: Callable[[str], bool]) -> Checkpoint:
    subscription, stream, position, log_id, moved_at, epoch, worker_id, held_until, *rest = row
    holder, unlocked, stopped, stopped_before = rest
    held = held_until is not None and held_until > session.now
    since = session.db.run(STATEMENTS[Stream(stream)].when, (position,)) if position < head else []
    return Checkpoint(
        subscription,
        Stream(stream),
        position,
        log_id,
        from_micros(moved_at),
        epoch=epoch,
        worker_id=worker_id if held else None,
        held_until=from_micros(held_until) if held else None,
        stopped=stopped,
        stopped_before=stopped_before,
        gone=held and (bool(unlocked) or is_dead(holder)),
        lag=_lag(session, Stream(stream), position, head),
        waiting=timedelta(microseconds=max(0, session.now - since[0][1])) if since else None,
    )


def _lag(session: Session, stream: Stream, position: int, head: int) -> int:
    """Return how far a position is behind: of the audit log in entries, estimated if they are many."""
    if stream is Stream.EVENTS or position >= head:
        return max(0, head - position)
    rows, entries, last = session.db.run("lag_audit", (position, head, MOST_ROWS))[0]
    if rows < MOST_ROWS:
        return entries
    return entries + ((head >> PLACE_BITS) - (last >> PLACE_BITS)) * entries // rows


def checkpoint(session: Session, name: str, stream: Stream) -> Checkpoint | None:
    """Return a Spark stream's checkpoint if it has one; raise Conflict if the name stands for something else."""
    if session.catalog.known_number(name) is not None:
        mode = session.catalog.subscription(name).mode
        if mode is not Mode.SPARK:
            raise Conflict(f"{name!r} is a subscription of mode {mode}: choose another consumer")
    found = next((each for each in checkpoints(session) if each.subscription == name), None)
    if found is not None and found.stream is not stream:
        raise Conflict(f"consumer {name!r} reads {found.stream}: choose another consumer for {stream}")
    if found is not None and found.log_id != _log_id(session):
        raise Conflict(
            f"consumer {name!r} stands at {found.position:,} of another log: the store was restored or replaced. "
            "Delete the subscription and start anew"
        )
    return found


def consumer(session: Session, name: str, stream: Stream, start: int) -> Checkpoint:
    """Return a Spark stream's checkpoint, made with its subscription unless there is one."""
    session.db.run("hold_pruned")
    found = checkpoint(session, name, stream)
    if found is not None:
        return found
    if session.catalog.known_number(name) is None:
        if session.db.value("add_subscription", (name, Mode.SPARK, '["*"]', "[]", None, None, session.now)) is None:
            session.catalog.refresh(session.db)  # another process has just made it
            return consumer(session, name, stream, start)
        bump(session)
    add_checkpoint(session, name, start, stream)
    return Checkpoint(name, stream, start, _log_id(session), from_micros(session.now))


def add_checkpoint(session: Session, name: str, position: int, stream: Stream = Stream.EVENTS) -> None:
    """Make the checkpoint of a subscription."""
    session.db.run("add_checkpoint", (name, stream, position, _log_id(session), session.now))


def start_position(session: Session, mode: Mode, start: str | int) -> int:
    """Return the position at which a new subscription begins; raise InvalidRequest if there is nothing to begin at."""
    whole = span(session, Stream.EVENTS)
    if mode is Mode.SPARK:  # its checkpoint is made by its stream
        return whole.head
    position = {"now": whole.head, "beginning": whole.pruned}.get(str(start), start)
    if mode is Mode.QUEUE and isinstance(position, int) and 0 <= position < whole.pruned:
        position = whole.pruned  # a queue gets what is still there
    if not isinstance(position, int) or not whole.pruned <= position <= whole.head:
        raise InvalidRequest(f"start at 'now', 'beginning' or an id from {whole.pruned:,} to {whole.head:,}")
    return position


def advance(session: Session, name: str, position: int, log_id: str) -> None:
    """Move a Spark stream's checkpoint forwards, in the log it was made for."""
    session.db.run("move_checkpoint", (position, session.now, name, log_id))


def position(session: Session, name: str) -> int:
    """Return how far an ordered subscription or a Spark stream has come."""
    found = session.db.value("position", (name,))
    if found is None:
        raise NotFound(f"there is no subscriber {name!r}")
    return found


# ── leading ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Stand(NamedTuple):
    """The columns of a checkpoint that decide who leads."""

    position: int
    log_id: str
    holder: str | None
    locked: bool
    held_until: int | None
    crashes: int
    trying: int | None


def lead(
    session: Session,
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
    stand = _stand(session, name)
    mine = stand.holder is None or stand.holder == holder
    over = stand.held_until is not None and stand.held_until <= session.now
    gone = not mine and ((stand.locked and locked) or over or is_dead(str(stand.holder)))
    if not (mine or gone or single):
        return None
    head = _require_here(session, name, stand)
    # One that is deposed and lives, or that had nothing to do, was ended by no event. One that has not said what it
    # was about to try counts once, so that the next ones say so: something else may have ended it.
    tried = stand.trying if stand.trying is not None and stand.trying > stand.position else None
    crashes = stand.crashes
    if gone:
        crashes = max(crashes, int(head > stand.position)) if tried is None else crashes + 1
    epoch = _new_epoch(session)
    until = session.now + lease // MICROSECOND
    session.db.run("take_lead", (epoch, holder, worker_id, locked, until, crashes, name))
    return Lead(name, epoch, stand.position, crashes, tried)


def _new_epoch(session: Session) -> int:
    return session.db.value("draw_numbers", (1,)) << PLACE_BITS


def _stand(session: Session, name: str) -> Stand:
    if session.catalog.subscription(name).mode is not Mode.ORDERED:
        raise InvalidRequest(f"{name!r} is no ordered subscription: choose another name")
    if not (rows := session.db.run("lead", (name,))):
        raise NotFound(f"{name!r} has no checkpoint: delete the subscription, and start anew")
    return Stand._make(rows[0])


def _require_here(session: Session, name: str, stand: Stand) -> int:
    """Return the head; raise UnsafeStore where the position means nothing in this log, or what follows it is gone."""
    whole = span(session, Stream.EVENTS)
    again = f"look at what it has done, and `postbus subscriptions rewind {name} --to ID` to where it should go on"
    if stand.log_id != whole.log_id:
        raise UnsafeStore(
            f"{name!r} stands at {stand.position:,} of another log: the store was restored or replaced; {again}"
        )
    # An event that is there may lie beyond a head that is held back.
    if stand.position > whole.head and not session.db.run("event", (stand.position,)):
        raise UnsafeStore(
            f"{name!r} stands at {stand.position:,}, beyond the head at {whole.head:,}: was an old backup put back? "
            f"Then {again}"
        )
    if stand.position < whole.pruned:
        raise UnsafeStore(
            f"{name!r} stands at {stand.position:,}, and everything up to {whole.pruned:,} was pruned: replay that "
            f"from the lake, and {again}"
        )
    return whole.head


def keep(session: Session, lead: Lead, lease: timedelta) -> bool:
    """Go on being the one who reads; False if that is another by now."""
    return session.db.count("keep_lead", (session.now + lease // MICROSECOND, lead.subscription, lead.epoch)) == 1


def is_paused(session: Session, lead: Lead) -> bool:
    """Return whether the subscription is paused; raise LeaseLost if another leads."""
    subscription = session.catalog.subscription(lead.subscription)
    if session.db.value("reader", (lead.subscription,)) != lead.epoch:
        raise deposed(lead.subscription)
    return subscription.paused


def resign(session: Session, lead: Lead, stopped: str | None = None, before: int | None = None) -> None:
    """Let another lead; what an erased event made its reader say is not kept."""
    quotes = stopped is not None and before is not None and erased(session, [before])
    session.db.run("resign", (ERASED if quotes else stopped, before, lead.subscription, lead.epoch))


def announce(session: Session, lead: Lead, event_id: int) -> None:
    """Say which event is handled next; raise LeaseLost if another leads."""
    if not session.db.count("announce", (event_id, lead.subscription, lead.epoch)):
        raise deposed(lead.subscription)


def deposed(name: str) -> LeaseLost:
    """Return the error of a reader whose epoch has passed."""
    return LeaseLost(f"another has taken over {name!r}, or it was rewound or deleted: nothing changed")


# ── moving, and what is left behind ──────────────────────────────────────────────────────────────────────────────────


def move(session: Session, step: Step) -> None:
    """Move past events that are done, dead or parked; raise LeaseLost if another reads by now."""
    if not session.db.count("move_lead", (step.position, session.now, step.subscription, step.epoch)):
        raise deposed(step.subscription)
    number, changes = session.catalog.number(step.subscription), Changes()
    ids = [*(each.event.id for each in step.buried), *(each.id for each in step.parked)]
    # A move is made again if its answer was lost. Nothing that is there by then is written over: it may be leased.
    known = {row.event_id for row in delivery_rows(session, number, ids)}
    for burial in step.buried:
        if burial.event.id not in known:
            _bury(session, changes, step, burial)
    for event in step.parked:
        if event.id not in known:
            _park(session, changes, step, event)
    changes.write(session)


def _bury(session: Session, changes: Changes, step: Step, burial: Burial) -> None:
    event, now = burial.event, session.now
    failures = [*map(unquoted, burial.errors)] if erased(session, [event.id]) else burial.errors
    errors, count = encode_errors(failures), len(failures)
    parked = _left(session, step, event)
    row = parked.row._replace(
        state=State.DEAD, attempt=count, retry_count=count - 1, worker_id=step.worker_id, claimed_at=now,
        died_at=now, errors=errors,
    )  # fmt: skip
    dead = parked._replace(row=row)
    changes.replace(dead, row._replace(epoch=None))
    for attempt, error in enumerate(failures[:-1], 1):
        tried = dead._replace(row=row._replace(attempt=attempt))
        changes.entries.append(entry_of(session, tried, Action.FAILED, step.worker_id, error))
    lease = Lease(event.id, step.subscription, step.epoch)
    told = Settlement(lease, Dead(failures[-1]), step.worker_id, None, burial.execution_time_ms)
    changes.entries.append(end_entry(session, told, dead, errors))


def _park(session: Session, changes: Changes, step: Step, event: Event) -> None:
    parked = _left(session, step, event)
    changes.replace(parked, parked.row._replace(epoch=None))
    changes.entries.append(entry_of(session, parked, Action.PARKED, step.worker_id))


def _left(session: Session, step: Step, event: Event) -> Held:
    """Return an event that a follower moves past without having done it, under the epoch that its entries name."""
    created, kind = to_micros(event.created_at), kind_of(event.type, ",".join(event.tags))
    number = session.catalog.number(step.subscription)
    row = DeliveryRow(number, event.id, State.PARKED, kind.id, event.priority, created, created, session.now)
    return Held(row._replace(max_retries=event.max_retries, epoch=step.epoch), kind)


def standing(session: Session, name: str) -> list[tuple[int, str | None, State]]:
    """Return what an ordered subscription has left behind and not done yet: event, key and state, by id."""
    number = session.catalog.known_number(name)
    rows = [] if number is None else session.db.run("standing", (number,))
    return [(event_id, key, State(state)) for event_id, key, state in rows]


def unpark(session: Session, name: str, ids: Sequence[int], actor: str) -> int:
    """Make parked deliveries due; return how many still were parked."""
    number = session.catalog.number(name)
    freed = sorted(row[0] for row in session.db.run("unpark", (session.now, number, json_array(ids))))
    told = (number, Action.RELEASED, session.now, Status.PENDING, 0, None, actor)
    add_entries(session, [Entry(event_id, *told) for event_id in freed])
    return len(freed)


def erased(session: Session, ids: Collection[int]) -> set[int]:
    """Return which of these events were erased. Whoever read one before may still tell what it said."""
    return {row[0] for row in session.db.rows("erased_among", (json_array(ids),))}


def unquoted(error: AttemptError) -> AttemptError:
    """Return an error without what it may quote of an event."""
    return replace(error, message=ERASED, traceback=None)


# ── rewind ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def rewinding(session: Session, name: str, to: int | datetime | str) -> Rewound:
    """Return what a rewind would lead to; raise InvalidRequest if it is refused."""
    goal = _position(session, to)
    stood, number = _check_rewind(session, name, goal), session.catalog.number(name)
    behind = session.db.value("count_unleased", (number, goal)) + len(leased_after(session, number, goal))
    again, skipped = count_ahead(session, name, goal, stood), count_ahead(session, name, stood, goal)
    return Rewound(goal, again, behind, skipped, before=stood)


def _position(session: Session, to: int | datetime | str) -> int:
    match to:
        case "beginning":
            return span(session, Stream.EVENTS).pruned
        case "now":
            return span(session, Stream.EVENTS).head
        case datetime():
            return before(session, Stream.EVENTS, to)
        case int():
            return to
        case _:
            raise InvalidRequest(f"rewind to an id, a moment, 'beginning' or 'now', not {to!r:.80}")


def _check_rewind(session: Session, name: str, goal: int) -> int:
    """Return where a subscription stands; raise InvalidRequest if it cannot go on from a position."""
    whole = span(session, Stream.EVENTS)
    match session.catalog.subscription(name).mode:
        case Mode.ORDERED:
            stood, last, hint = session.db.value("position", (name,)) or 0, whole.head, ""
        case Mode.QUEUE:
            stood = last = session.db.run("cursor", (session.catalog.number(name),))[0][0]
            hint = ": a queue goes back only"
        case Mode.SPARK:
            raise InvalidRequest(f"{name!r} is a Spark stream, whose own checkpoint decides: rewind another")
    if not whole.pruned <= goal <= last:
        raise InvalidRequest(f"rewind to a position from {whole.pruned:,} to {last:,}, not {goal:,}{hint}")
    return stood


def rewind(session: Session, name: str, goal: int, actor: str) -> int:
    """Have a subscription go on after another position; return how many deliveries behind it were discarded.

    All that a queue has behind it goes, and comes again unless it was erased: one REPLAYED entry tells of that.
    """
    number = hold(session, "hold_alone", name, goal)
    stood = _check_rewind(session, name, goal)
    if session.catalog.subscription(name).mode is Mode.ORDERED:
        gone = discard_all(session, name, goal, actor)
        session.db.run("rewind", (goal, session.now, _new_epoch(session), _log_id(session), name))
        return gone
    again = count_ahead(session, name, goal, stood, MOST_COUNTED)
    leased, changes = leased_after(session, number, goal), Changes()
    for block, place in leased:
        changes.settle(block, 1 << place)
    message = f"rewound from {stood:,} to {goal:,}: {told_count(again)} events come again"
    entry = Entry(goal, number, Action.REPLAYED, session.now, worker_id=actor, error_message=message)
    changes.entries.append(entry)
    changes.write(session)
    gone = len(leased) + session.db.value("count_unleased", (number, goal))
    session.db.run("drop_deliveries_after", (number, goal))
    session.db.run("drop_skips_after", (number, goal))
    session.db.run("move_cursor", (goal, goal, number))
    return gone


# ── reading on ───────────────────────────────────────────────────────────────────────────────────────────────────────


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
