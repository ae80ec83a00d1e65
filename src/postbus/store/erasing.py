"""Blanking what events say of anybody: their content, what errors quoted of it, and whatever was still to be done."""

from collections.abc import Sequence
from typing import Final

from postbus.model import Action
from postbus.store.burials import Burials
from postbus.store.records import checksum, json_array
from postbus.store.session import Session

__all__ = ["Erasing"]

BLANK: Final = "null"
END_OF_TIME: Final = (1 << 63) - 1
_NOTHING: Final = (None, None, None, None)


class Erasing:
    """Erases on one transaction's connection, at one moment, in somebody's name."""

    def __init__(self, session: Session, actor: str) -> None:
        """Work inside a write transaction; `actor` goes into the audit rows."""
        self._session = session
        self._db, _, self._now = session
        self._actor = actor

    @staticmethod
    def look(session: Session, uid: str | None, key: str | None, after: int, limit: int) -> tuple[int | None, list[int]]:
        """Return where the next `limit` events after an id end (None: there are none), and which bear a uid or a key."""
        end = session.db.value("ahead_events", (after, END_OF_TIME, limit))
        if end is None:
            return None, []
        return end, [row[0] for row in session.db.run("bearing", (after, end, uid, key))]

    def erase(self, ids: Sequence[int]) -> int:
        """Leave nothing of these but what the contract says; return how many had more, or no record of being erased."""
        array = json_array(ids)
        discarded = Burials(self._session, self._actor).discard(self._db.run("deliveries_of_all", (array,)))
        rows = self._db.run("identities", (array,))
        blank = [(checksum(uid, kind, tags, BLANK), identity) for identity, uid, kind, tags in rows]
        told = {row[0] for row in self._db.run("erased_before", (array,))}
        changed = {row[0] for row in self._db.many("blank_event", blank)}
        changed |= {row[0] for row in self._db.many("blank_log", [(identity,) for identity in ids])}
        changed |= discarded | (set(ids) - told)
        self._db.many(
            "log",
            [
                (identity, "", Action.ERASED, self._now, None, None, None, self._actor, *_NOTHING)
                for identity in sorted(changed)
            ],
        )
        return len(changed)
