"""Blanking what events say of anybody: their content, what errors quoted of it, and whatever was still to be done."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Final

from postbus.model import Action, Erasable
from postbus.store.burials import Burials
from postbus.store.records import checksum, json_array
from postbus.store.session import Session

__all__ = ["Erasing", "bearing", "erasable"]

BLANK: Final = "null"
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
        told = {row[0] for row in self._db.run("erased_before", (array,))}
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
