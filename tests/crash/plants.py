"""Bugs to plant on purpose, in a child or a test: the crash tests are worth something only if they notice each."""

import re
from collections.abc import Callable, Sequence
from typing import Any, Final

import apsw

from postbus import Context, Event, EventBus
from postbus.model import Done, Lease
from postbus.observe import probe
from postbus.store import leases
from postbus.store.contract import Settlement
from postbus.store.leases import Block, find_lease, load_held
from postbus.store.leases import Held as HeldInBlock
from postbus.store.postgres import appending
from postbus.store.postgres.connection import Database as PostgresDatabase
from postbus.store.postgres.connection import localized
from postbus.store.postgres.leases import PostgresLeases
from postbus.store.postgres.rows.leases import Leases
from postbus.store.records import Held
from postbus.store.session import Session
from postbus.store.sqlite.connection import Database

__all__ = ["PLANTS", "ForgetfulConnection"]

Found = tuple[dict[Lease, HeldInBlock], dict[int, Block]]
PG_FENCE: Final = re.compile(r"AND (?:[dv]\.)?epoch = (\$\d+|t\.epoch|g\.epoch)")


def no_epoch_check() -> None:
    """Let any epoch settle a delivery, as if it were the one that holds it."""
    _unfence(localized("postbus"), PG_FENCE, "held_all", lambda found: f"AND {found[1]}::bigint IS NOT NULL")
    for each in (Leases, PostgresLeases):
        each.held = _lenient(each.held)
    leases.find_held = _lenient_blocks(leases.find_held)


def _lenient(honest: Callable[..., dict[Lease, Held]]) -> Callable[..., dict[Lease, Held]]:
    """Return what a lease's delivery is held as now, whoever holds it."""

    def held_all(self: Leases, leases: Sequence[Lease]) -> dict[Lease, Held]:
        rows = {(row.event_id, row.subscription): row for row in honest(self, leases).values()}
        return {lease: rows[lease[:2]] for lease in leases if lease[:2] in rows}

    return held_all


def _lenient_blocks(honest: Callable[..., Found]) -> Callable[..., Found]:
    """Do the same where leases are blocks."""

    def find_held(session: Session, asked: Sequence[Lease]) -> Found:
        found, blocks = honest(session, asked)
        for lease in asked:
            number = session.catalog.known_number(lease.subscription)
            if lease not in found and number is not None and (place := find_lease(session, number, lease.event_id)):
                (found[lease],) = load_held(session, [place])
                blocks[place[0].number] = place[0]
        return found, blocks

    return find_held


def _unfence(
    queries: dict[str, str], fence: re.Pattern[str], held: str, without: Callable[[re.Match[str]], str]
) -> None:
    fenced = {name: sql for name, sql in queries.items() if fence.search(sql) and name != "recorded"}
    if not {held, "finish"} <= fenced.keys():
        raise LookupError("the queries that settle compare the epoch in another way now: plant this bug anew")
    for name, sql in fenced.items():
        queries[name] = fence.sub(without, sql)


def settle_before_handle() -> None:
    """Report success first, run the handler then."""
    honest = EventBus.subscribe

    def subscribe(self: EventBus, pattern: str, handler: Callable[..., Any], **options: Any) -> str:
        def hasty(event: Event, ctx: Context) -> None:
            self.store.settle([Settlement(ctx.delivery.lease, Done(), ctx.worker_id)])
            probe("settled before")  # a name of its own: the worker says "settled" too, when it is done
            handler(event, ctx)

        return honest(self, pattern, hasty, **options)

    EventBus.subscribe = subscribe


def ack_before_commit() -> None:
    """Answer publishers at once and commit only now and then."""
    begin, commit = Database.begin, Database.commit
    open_ones = 0

    def lazy_begin(self: Database) -> None:
        if not self._apsw.in_transaction:
            begin(self)

    def lazy_commit(self: Database) -> None:
        nonlocal open_ones
        open_ones += 1
        if open_ones % 8 == 0:
            commit(self)

    Database.begin, Database.commit = lazy_begin, lazy_commit
    _append_lazily()


def _append_lazily() -> None:
    """Do the same on PostgreSQL, where a small publish is a statement that commits itself."""
    honest, ready = appending.append_all, PostgresDatabase.ready
    appended = 0

    def append_all(db: PostgresDatabase, *rest: Any) -> Any:
        nonlocal appended
        appended += 1
        if not db.in_transaction:
            db.begin()
        stored = honest(db, *rest)
        if appended % 8 == 0:
            db.commit()
        return stored

    appending.append_all = append_all
    PostgresDatabase.ready = lambda self: self if self.in_transaction else ready(self)


class ForgetfulConnection(apsw.Connection):
    """A connection that answers FULL when asked about `synchronous`, and runs with NORMAL."""

    def pragma(self, name: str, *value: Any, **options: Any) -> Any:
        """Do as asked, but for one setting."""
        if name != "synchronous":
            return super().pragma(name, *value, **options)
        if value:
            super().pragma("synchronous", "normal")
        if super().pragma("synchronous") != 1:
            raise LookupError("synchronous=NORMAL did not take: plant this bug anew")
        return 2


PLANTS: Final = {each.__name__: each for each in (no_epoch_check, settle_before_handle, ack_before_commit)}
