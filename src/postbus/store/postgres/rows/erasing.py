"""Blanking what events say of anybody: their content, what errors quoted of it, and whatever was still to be done."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Final

from postbus.model import Action, AttemptError, Erasable
from postbus.store.postgres.rows.burials import Burials
from postbus.store.postgres.rows.session import Session
from postbus.store.records import checksum, json_array
from postbus.store.session import Database

__all__ = ["ERASED", "Erasing", "bearing", "erasable", "erased", "unquoted"]

BLANK: Final = "null"
ERASED: Final = "erased"
"""What stands where something quoted an event."""
LOOK: Final = 10_000
END_OF_TIME: Final = (1 << 63) - 1
_NOTHING: Final = (None, None, None, None)


def bearing(read: Callable[[], AbstractContextManager[Session]], uid: str | None, key: str | None) -> Iterator[int]:
    """Yield the ids of the events that bear a uid or a key. No index knows: the log is read, a part at a time."""
    last: int | None = 0 if uid is not None or key is not None else None
    while last is not None:
        with read() as session:
            end = session.db.value("ahead_events", (last, END_OF_TIME, LOOK))
            found = [] if end is None else session.db.run("bearing", (last, end, uid, key))
        yield from (row[0] for row in found)
        last = end


def erasable(session: Session, ids: Sequence[int]) -> Erasable:
    """Count what there is to blank of these events."""
    db, array = session.db, json_array(ids)
    return Erasable(tuple(ids), db.value("erasable_events", (array,)), db.value("erasable_log", (array,)))


def erased(db: Database, ids: Collection[int]) -> set[int]:
    """Return which of these events were erased. Whoever read one before may still tell what it said."""
    return {row[0] for row in db.run("erased_before", (json_array(ids),))}


def unquoted(error: AttemptError) -> AttemptError:
    """Return an error without what it may quote of an event."""
    return replace(error, message=ERASED, traceback=None)


class Erasing:
    """Erases on one transaction's connection, at one moment, in somebody's name."""

    def __init__(self, session: Session, actor: str) -> None:
        """Work inside a write transaction; `actor` goes into the audit rows."""
        self._session = session
        self._db, _, self._now = session
        self._actor = actor

    def erase(self, ids: Sequence[int]) -> int:
        """Leave nothing of these but what the contract says; return how many had more, or no record of being erased."""
        array = json_array(ids)
        discarded = Burials(self._session, self._actor).discard(self._db.run("deliveries_of_all", (array,)))
        rows = self._db.run("identities", (array,))
        blank = [(checksum(uid, kind, tags, BLANK), identity) for identity, uid, kind, tags in rows]
        told = erased(self._db, ids)
        changed = {row[0] for row in self._db.many("blank_event", blank)}
        changed |= {row[0] for row in self._db.many("blank_log", [(identity,) for identity in ids])}
        self._db.many("blank_stopped", [(identity,) for identity in ids])
        changed |= discarded | (set(ids) - told)
        self._db.many(
            "log",
            [
                (identity, "", Action.ERASED, self._now, None, None, None, self._actor, *_NOTHING)
                for identity in sorted(changed)
            ],
        )
        return len(changed)
