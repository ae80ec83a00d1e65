"""Bugs to plant on purpose, in a child or a test: the crash tests are worth something only if they notice each."""

from collections.abc import Callable, Iterable
from typing import Any, Final

import apsw

from postbus import Context, Event, EventBus
from postbus.model import Done, Lease
from postbus.observe import probe
from postbus.store import leases
from postbus.store.contract import Settlement
from postbus.store.deliveries import Held, load_held
from postbus.store.leases import find_lease
from postbus.store.postgres import append, claim
from postbus.store.postgres.connection import Database as PostgresDatabase
from postbus.store.session import Session
from postbus.store.sqlite.connection import Database

__all__ = ["PLANTS", "ForgetfulConnection"]


def no_epoch_check() -> None:
    """Let any epoch settle a delivery, as if it were the one that holds it."""
    honest = leases.find_held

    def find_held(session: Session, asked: Iterable[Lease]) -> dict[Lease, Held]:
        asked = list(asked)
        found = honest(session, asked)
        for lease in asked:
            number = session.catalog.known_number(lease.subscription)
            if lease not in found and number is not None and (place := find_lease(session, number, lease.event_id)):
                (found[lease],) = load_held(session, [place])
        return found

    leases.find_held = find_held
    claim.is_plain = lambda _: False  # what simply worked is fenced by a function of the database: past that


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
    honest, ready = append.append_all, PostgresDatabase.ready
    appended = 0

    def append_all(db: PostgresDatabase, *rest: Any, **options: Any) -> Any:
        nonlocal appended
        appended += 1
        if not db.in_transaction:
            db.begin()
        stored = honest(db, *rest, **options)
        if appended % 8 == 0:
            db.commit()
        return stored

    append.append_all = append_all
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
