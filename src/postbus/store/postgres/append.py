"""Append to the log: one call of a function of the database, whatever the number of events."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, Final

import orjson
import psycopg

from postbus.clock import from_micros, to_micros
from postbus.errors import PostbusError, StoreUnavailable
from postbus.model import Event
from postbus.observe import probe
from postbus.payload import Draft
from postbus.store.postgres.address import Unanswered
from postbus.store.postgres.connection import Asked, Database, undeadlocked
from postbus.store.records import due_micros, event_from_draft
from postbus.store.session import Row

Found = dict[str, tuple[int, int | None]]
"""Ids of events that are stored, by uid, and when that was."""
BATCH_BYTES: Final = 16_000_000
"""About how much is sent at once: the database has it in memory several times over."""
FLOOR_AGE: Final = 60.0
"""Seconds after which the latest event is looked up anew: what was published since then is what a lost answer costs."""
TRIES: Final = 3
RETURN: Final = 5.0
"""Seconds in which a server may come back, and tell what became of a commit."""
OPTIONAL: Final = ("key", "title", "description", "max_retries")


class Appender:
    """Stores what publishers bring, surely: where the answer to a commit is lost, it finds out what became of it."""

    def __init__(self, db: Database) -> None:
        """Take charge of a connection."""
        self._db = db
        self._floor, self._floor_age = 0, -math.inf
        """The id of an event that was stored, and when it was the latest."""

    def store(self, batches: Sequence[Sequence[Draft]], *, tell: bool) -> list[list[Event | int]]:
        """Store batches as `append_all` does; raise OutcomeUnknown where that may have happened, or not."""
        if time.monotonic() - self._floor_age > FLOOR_AGE:
            with self._db.settled():
                self._floor, self._floor_age = self._db.value("latest"), time.monotonic()
        try:
            stored = append_all(self._db, batches, tell=tell)
        except Unanswered as lost:
            stored = self._store_again(batches, lost, tell=tell)
        first = stored[0][0]
        self._floor = max(self._floor, first if isinstance(first, int) else first.id)
        self._floor_age = time.monotonic()
        return stored

    def _store_again(
        self, batches: Sequence[Sequence[Draft]], lost: Unanswered, *, tell: bool
    ) -> list[list[Event | int]]:
        """Return what was stored of batches whose commit got no answer, or store them; raise Unanswered."""
        for _ in range(TRIES):
            found, final = self._found(batches, lost)
            if any(not draft.supplied and draft.uid in found for batch in batches for draft in batch):
                return [[_found_event(draft, *found[draft.uid]) for draft in batch] for batch in batches]
            if not final:
                break
            try:
                return append_all(self._db, batches, tell=tell)
            except Unanswered as again:
                lost = again
            except (psycopg.OperationalError, psycopg.InterfaceError, StoreUnavailable) as error:
                if found:
                    raise lost from error
                raise
        self._db.close()  # so that nobody does again what may have been done
        raise lost

    def _found(self, batches: Sequence[Sequence[Draft]], lost: Unanswered) -> tuple[Found, bool]:
        """Look on a new connection, for which a server that restarts is given a moment."""
        deadline = time.monotonic() + RETURN
        while True:
            try:
                with self._db.settled():
                    return _stored_before(self._db, batches, lost, self._floor)
            except (psycopg.Error, PostbusError) as error:
                self._db.close()
                if time.monotonic() > deadline:
                    raise lost from error
            time.sleep(0.1)


def append_all(db: Database, batches: Sequence[Sequence[Draft]], *, tell: bool) -> list[list[Event | int]]:
    """Store several callers' batches, all or none, and have a notice follow in the same go if that is wanted.

    In the place of an event that its uid stood for already is that one's id.
    """
    drafts = [draft for batch in batches for draft in batch]
    rows = iter(undeadlocked(lambda: _stored(db, drafts, tell=tell)))
    return [events(batch, [next(rows) for _ in batch]) for batch in batches]


def _stored(db: Database, drafts: Sequence[Draft], *, tell: bool) -> list[Row]:
    asked = _asked(drafts)
    if len(asked) == 1 and not db.pooled:
        if tell:
            asked.append(("notify", ()))
        with db.alone():
            return db.run_at_once(*asked)
    with db.transaction():
        stored = [row for each in asked for row in db.run(*each)]
        probe("committing")
    if tell:
        # It is stored: whoever is told that it failed would have it stored again.
        with suppress(Exception), db.settled():
            db.run("notify")
    return stored


def append(db: Database, drafts: Sequence[Draft]) -> list[Event | int]:
    """Store events in the transaction that is open; see `append_all`."""
    return events(drafts, [row for each in _asked(drafts) for row in db.run(*each)])


def _asked(drafts: Sequence[Draft]) -> list[Asked]:
    chosen = _chosen(drafts)
    return [("append", (text, chosen)) for text in _texts(drafts)]


def arguments(drafts: Sequence[Draft]) -> tuple[str, bool]:
    """Return what the SQL function `append` takes."""
    return orjson.dumps([_record(draft) for draft in drafts]).decode(), _chosen(drafts)


def _texts(drafts: Sequence[Draft]) -> Iterator[str]:
    """Yield the events as JSON arrays, of which none is much too large."""
    records: list[bytes] = []
    size = 0
    for draft in drafts:
        records.append(orjson.dumps(_record(draft)))
        size += len(records[-1])
        if size > BATCH_BYTES:
            yield f"[{b','.join(records).decode()}]"
            records, size = [], 0
    if records:
        yield f"[{b','.join(records).decode()}]"


def _chosen(drafts: Sequence[Draft]) -> bool:
    return any(draft.supplied for draft in drafts)


def _record(draft: Draft) -> dict[str, Any]:
    record: dict[str, Any] = {"uid": draft.uid, "type": draft.type, "payload": draft.payload}
    if draft.supplied:
        record["chosen"] = True
    if draft.tags:
        record["tags"] = ",".join(draft.tags)
    if draft.metadata != "{}":
        record["metadata"] = draft.metadata
    if draft.priority:
        record["priority"] = draft.priority
    record |= {name: value for name in OPTIONAL if (value := getattr(draft, name)) is not None}
    if draft.delay is not None:
        record["delay"] = due_micros(draft, 0)
    if draft.at is not None:
        record["at"] = to_micros(draft.at)
    return record


def events(drafts: Sequence[Draft], stored: Sequence[Row]) -> list[Event | int]:
    """Return the events just stored: of each, its id, whether it is new, and the moment it was stored are known."""
    return [
        _event(draft, event_id, at) if fresh else event_id
        for draft, (event_id, fresh, at, *_) in zip(drafts, stored, strict=True)
    ]


def _found_event(draft: Draft, event_id: int, at: int | None) -> Event | int:
    """Return an event that was found stored; in the place of one whose uid was chosen, its id."""
    return event_id if at is None else _event(draft, event_id, at)


def _event(draft: Draft, event_id: int, now: int) -> Event:
    due = due_micros(draft, now)
    return event_from_draft(draft, event_id, from_micros(now), from_micros(due) if due > now else None)


def _stored_before(
    db: Database, batches: Sequence[Sequence[Draft]], lost: Unanswered, floor: int
) -> tuple[Found, bool]:
    """Return what is stored of batches whose commit got no answer, by uid, and whether that is final.

    The session that was to commit is ended first, and waited for: then nothing of it is on its way any more. Behind a
    pooler nobody can tell which session that was. `floor` is the id of an event stored before.
    """
    pid, age = lost.session.pid, int((time.monotonic() - lost.session.opened) * 1e6)
    gone = bool(pid) and all(ended for (ended,) in db.run("end_session", (pid, age)))
    drafts = [draft for batch in batches for draft in batch]
    chosen = [draft.uid for draft in drafts if draft.supplied]
    others = [draft.uid for draft in drafts if not draft.supplied]
    found = {uid: (event_id, at) for uid, event_id, at in db.run("stored_uids", (others, floor, chosen))}
    if found:
        db.run("await_durable")
    return found, gone or not others or any(uid in found for uid in others)
