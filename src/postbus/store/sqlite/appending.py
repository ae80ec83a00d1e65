"""Appending to the log: events, their deliveries and their uids, inside one transaction."""

import hashlib
from collections.abc import Sequence
from typing import Final

from postbus.clock import from_micros
from postbus.errors import InvalidEventError
from postbus.model import Event
from postbus.payload import Draft
from postbus.store.catalog import Fanout
from postbus.store.reading import Reading
from postbus.store.records import due_micros, event_from_draft, json_array, row_from_draft, split_tags
from postbus.store.session import Row, Session
from postbus.store.staging import draft_from_row, require_all

__all__ = ["Appending"]

CHUNK: Final = 1_000
Known = dict[str, tuple[Event, bytes]]


class Appending:
    """Adds to the log on one transaction's connection, at one moment."""

    def __init__(self, session: Session) -> None:
        """Work inside a write transaction."""
        self._session = session
        self._db, self._catalog, self._now = session
        self._moment = from_micros(self._now)

    def append(self, drafts: Sequence[Draft]) -> list[Event]:
        """Store events and make their deliveries; a uid known already stores nothing and returns the first event."""
        known = self._known(drafts)
        identity = self._catalog.head
        events: list[Event] = []
        rows: list[Row] = []
        ways: dict[tuple[str, tuple[str, ...], int, int], list[int]] = {}
        now = self._now
        for draft in drafts:
            if draft.supplied and draft.uid in known:
                events.append(_same(known[draft.uid], draft))
                continue
            identity += 1
            due = due_micros(draft, now)
            rows.append(row_from_draft(draft, identity, now))
            ways.setdefault((draft.type, draft.tags, draft.priority, due), []).append(identity)
            events.append(self._event(draft, identity, due))
            if draft.supplied:
                known[draft.uid] = self._remember(draft, events[-1])
        self._catalog.head = identity
        self._db.many("add_event", rows)
        for (kind, tags, priority, due), ids in ways.items():
            self._deliver(self._catalog.fanout(self._db, kind, tags, priority), due, ids)
        return events

    def _deliver(self, wanted: Fanout, due: int, ids: list[int]) -> None:
        """Make the deliveries of events that go the same ways: one statement for each subscription."""
        array = json_array(ids) if wanted else ""
        for name, route in wanted:
            self._db.run("add_deliveries", (name, route, due, self._now, array))

    def _event(self, draft: Draft, identity: int, due: int) -> Event:
        later = from_micros(due) if due > self._now else None
        return event_from_draft(draft, identity, self._moment, later)

    def _known(self, drafts: Sequence[Draft]) -> Known:
        """Return the events that the supplied uids already stand for."""
        reading = Reading(self._session)
        return {
            draft.uid: (reading.known(event_id, draft), digest)
            for draft in drafts
            if draft.supplied
            for event_id, digest in self._db.run("find_uid", (draft.uid,))
        }

    def _remember(self, draft: Draft, event: Event) -> tuple[Event, bytes]:
        digest = _digest(draft)
        self._db.run("add_uid", (draft.uid, event.id, digest, self._now))
        return event, digest

    def publish_part(self, part: int, rows: int) -> int:
        """Append what lies in a part, `rows` events; return how many are new."""
        before = self._catalog.head
        for low in range(0, rows, CHUNK):
            high = min(low + CHUNK, rows)
            found = self._db.run("publish_part", (part, low, high))
            require_all(part, len(found), high - low)
            self.append([draft_from_row(row) for row in found])
        return self._catalog.head - before

    def backfill(self, name: str, after: int) -> None:
        """Make a new subscription's deliveries for the events it wants that are in the log already."""
        while rows := self._db.run("events_after", (after, CHUNK)):
            ways: dict[int, list[int]] = {}
            for event_id, kind, joined, priority in rows:
                tags = split_tags(joined)
                if self._catalog.wants(name, kind, tags):
                    route = self._catalog.file_under(self._db, name, priority, kind, tags)
                    ways.setdefault(route, []).append(event_id)
            for route, ids in ways.items():
                self._deliver(((name, route),), self._now, ids)
            after = rows[-1][0]


def _digest(draft: Draft) -> bytes:
    """Return a fingerprint of what makes two publishes the same event; metadata may differ between tries."""
    body = (draft.type, draft.payload, ",".join(sorted(draft.tags)), draft.key, draft.title, draft.description)
    return hashlib.blake2b(repr(body).encode(), digest_size=16).digest()


def _same(known: tuple[Event, bytes], draft: Draft) -> Event:
    event, digest = known
    if digest != _digest(draft):
        raise InvalidEventError(f"uid {draft.uid!r} already stands for event {event.id}, which has another body")
    return event
