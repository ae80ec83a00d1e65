"""Append to the log: one call of a function of the database, whatever the number of events."""

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, Final

import orjson

from postbus.clock import from_micros, to_micros
from postbus.model import Event
from postbus.observe import probe
from postbus.payload import Draft
from postbus.store.postgres.connection import Asked, Database, Unanswered
from postbus.store.records import due_micros, event_from_draft
from postbus.store.session import Row

BATCH_BYTES: Final = 16_000_000
"""About how much is sent at once: the database has it in memory several times over."""
OPTIONAL: Final = ("key", "title", "description", "max_retries")


def append_all(db: Database, batches: Sequence[Sequence[Draft]], *, tell: bool) -> list[list[Event | int]]:
    """Store several callers' batches, all or none, and have a notice follow in the same go if that is wanted.

    In the place of an event that its uid stood for already is that one's id.
    """
    drafts = [draft for batch in batches for draft in batch]
    texts = list(_texts(drafts))
    if len(texts) > 1 or db.pooled:
        stored = _append_in_parts(db, drafts, texts)
        if tell:
            # It is stored: whoever is told that it failed would have it stored again.
            with suppress(Exception), db.settled():
                db.run("notify")
    else:
        db.ready()
        probe("committing")
        asked: list[Asked] = [("append", (texts[0], _chosen(drafts))), ("notify", ())]
        with db.committing():
            stored = db.run_at_once(*asked[: 1 + tell])
    rows = iter(stored)
    return [events(batch, [next(rows) for _ in batch]) for batch in batches]


def _append_in_parts(db: Database, drafts: Sequence[Draft], texts: Sequence[str]) -> list[Row]:
    try:
        db.begin()
        stored = [row for text in texts for row in db.run("append", (text, _chosen(drafts)))]
        probe("committing")
        db.commit()
    except BaseException:
        db.rollback()
        raise
    return stored


def append(db: Database, drafts: Sequence[Draft]) -> list[Event | int]:
    """Store events in the transaction that is open; see `append_all`."""
    rows = [row for text in _texts(drafts) for row in db.run("append", (text, _chosen(drafts)))]
    return events(drafts, rows)


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


def found_event(draft: Draft, event_id: int, at: int | None) -> Event | int:
    """Return an event that was found stored; in the place of one whose uid was chosen, its id."""
    return event_id if at is None else _event(draft, event_id, at)


def _event(draft: Draft, event_id: int, now: int) -> Event:
    due = due_micros(draft, now)
    return event_from_draft(draft, event_id, from_micros(now), from_micros(due) if due > now else None)


def stored_before(
    db: Database, batches: Sequence[Sequence[Draft]], lost: Unanswered, floor: int
) -> tuple[dict[str, tuple[int, int | None]], bool]:
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
