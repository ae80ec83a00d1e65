"""Append to the log: events and the uids their producers gave them, and nothing else."""

import hashlib
from collections.abc import Sequence
from typing import Final

from postbus.clock import from_micros
from postbus.errors import InvalidEventError
from postbus.model import Event
from postbus.payload import Draft
from postbus.store.lookups import known
from postbus.store.records import due_micros, event_from_draft, row_from_draft
from postbus.store.session import Row, Session
from postbus.store.staging import draft_from_row, require_all

CHUNK: Final = 1_000


def append(session: Session, drafts: Sequence[Draft]) -> list[Event]:
    """Store events; a uid known already stores nothing and returns the first event."""
    db, catalog, now = session
    moment = from_micros(now)
    seen = {
        draft.uid: (known(session, event_id, draft), digest)
        for draft in drafts
        if draft.supplied
        for event_id, digest in db.run("find_uid", (draft.uid,))
    }
    events: list[Event] = []
    rows: list[Row] = []
    uids: list[Row] = []
    for draft in drafts:
        if draft.supplied and draft.uid in seen:
            events.append(_same(*seen[draft.uid], draft))
            continue
        catalog.head += 1
        due = due_micros(draft, now)
        later = from_micros(due) if due > now else None
        rows.append((*row_from_draft(draft, catalog.head, now), due if due > now else None))
        events.append(event_from_draft(draft, catalog.head, moment, later))
        if draft.supplied:
            digest = _digest(draft)
            uids.append((draft.uid, catalog.head, digest, now))
            seen[draft.uid] = events[-1], digest
    db.many("add_event", rows)
    if uids:
        db.many("add_uid", uids)
    return events


def publish_part(session: Session, part: int, rows: int) -> int:
    """Append what is staged in a part, `rows` events; return how many are new."""
    before = session.catalog.head
    for low in range(0, rows, CHUNK):
        high = min(low + CHUNK, rows)
        found = session.db.run("publish_part", (part, low, high))
        require_all(part, len(found), high - low)
        append(session, [draft_from_row(row) for row in found])
    return session.catalog.head - before


def _digest(draft: Draft) -> bytes:
    """Return a fingerprint of what makes two publishes the same event; metadata may differ between tries."""
    body = (draft.type, draft.payload, ",".join(sorted(draft.tags)), draft.key, draft.title, draft.description)
    return hashlib.blake2b(repr(body).encode(), digest_size=16).digest()


def _same(event: Event, digest: bytes, draft: Draft) -> Event:
    if digest != _digest(draft):
        raise InvalidEventError(f"uid {draft.uid!r} already stands for event {event.id}, which has another body")
    return event
