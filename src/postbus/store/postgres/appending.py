"""Appending to the log: small batches by one statement, big ones by COPY; the database does the fan-out."""

import time
from collections.abc import Sequence
from typing import Any, Final

import orjson

from postbus.clock import from_micros, to_micros
from postbus.model import Event
from postbus.observe import probe
from postbus.payload import Draft
from postbus.store.postgres.connection import Asked, Database, Unanswered, array
from postbus.store.records import due_micros, event_from_draft
from postbus.store.session import Row

__all__ = [
    "Stored",
    "append",
    "append_all",
    "append_here",
    "append_lone",
    "arguments",
    "events",
    "found_event",
    "lone",
    "lone_asked",
    "lone_event",
    "stage",
    "stored_before",
]

COPY_FROM: Final = 100
"""From how many events on COPY is faster than one statement with everything in it."""
BATCH: Final = 20_000
LINES: Final = 250
FEW_WAYS: Final = 8
COLUMNS: Final = "id, uid, type, tags, key, title, description, payload, metadata, created_at, priority, max_retries"
STAGED: Final = (
    "part, position, uid, chosen, type, tags, key, title, description, payload, metadata, priority, max_retries, "
    "delay, at"
)
_ESCAPES: Final = str.maketrans({"\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"})
_NULL: Final = "\\N"
_OPTIONAL: Final = ("key", "title", "description", "max_retries")
Stored = list[Row]
"""For each event: its id, whether it is new, and the moment it was stored."""


def lone(batches: Sequence[Sequence[Draft]]) -> Draft | None:
    """Return what is to be stored if that is one event, for which nothing needs to be looked up."""
    only = batches[0][0] if len(batches) == 1 and len(batches[0]) == 1 else None
    return only if only is not None and _is_plain(only) else None


def append_lone(db: Database, draft: Draft, *, tell: bool) -> Event:
    """Store such an event, and have a notice of it follow in the same go if that is wanted."""
    probe("committing")
    db.ready()
    with db.committing():
        return lone_event(draft, db.run_at_once(*lone_asked(draft, tell=tell)))


def lone_asked(draft: Draft, *, tell: bool) -> Sequence[Asked]:
    """Return the statements that do so."""
    return [("append_one", _parameters(draft)), ("notify", ())][: 1 + tell]


def lone_event(draft: Draft, stored: Stored) -> Event:
    """Return such an event as it was stored."""
    ((event_id, _, at),) = stored
    return _event(draft, event_id, at)


def append_all(db: Database, batches: Sequence[Sequence[Draft]], schema: str) -> list[list[Event | int]]:
    """Store several callers' batches, all or none; see `events`."""
    drafts = [draft for batch in batches for draft in batch]
    probe("committing")
    rows = iter(db.run_alone(*_asked(drafts)) if len(drafts) < COPY_FROM else _copied(db, drafts, schema))
    return [events(batch, [next(rows) for _ in batch]) for batch in batches]


def append_here(db: Database, drafts: Sequence[Draft], schema: str) -> list[Event | int]:
    """Store events in the transaction that is open; see `events`."""
    return events(drafts, append(db, drafts) if len(drafts) < COPY_FROM else copy(db, drafts, schema))


def append(db: Database, drafts: Sequence[Draft]) -> Stored:
    """Store events by one statement, in the transaction that is open."""
    return db.run(*_asked(drafts))


def _asked(drafts: Sequence[Draft]) -> tuple[str, Sequence[Any]]:
    if len(drafts) == 1 and _is_plain(drafts[0]):
        return "append_one", _parameters(drafts[0])
    return "append", arguments(drafts)


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


def _is_plain(draft: Draft) -> bool:
    """Return whether nothing needs to be looked up for an event, and it is due now."""
    return not draft.supplied and draft.delay is None and draft.at is None


def _parameters(draft: Draft) -> Row:
    """Return what the SQL function `append_one` takes."""
    uid, kind, payload, _, _, tags, key, title, description, metadata, _, _, priority, max_retries = draft
    return uid, kind, ",".join(tags), key, title, description, payload, metadata, priority, max_retries


def arguments(drafts: Sequence[Draft]) -> tuple[str, bool, bool]:
    """Return what the SQL function `append` takes."""
    batch = orjson.dumps([_record(draft) for draft in drafts]).decode()
    return (
        batch,
        any(draft.supplied for draft in drafts),
        any(draft.delay is not None or draft.at is not None for draft in drafts),
    )


def events(drafts: Sequence[Draft], stored: Stored) -> list[Event | int]:
    """Return the events just stored; in the place of one that its uid stood for already, that one's id."""
    return [
        _event(draft, event_id, at) if fresh else event_id
        for draft, (event_id, fresh, at) in zip(drafts, stored, strict=True)
    ]


def found_event(draft: Draft, event_id: int, at: int | None) -> Event | int:
    """Return an event that was found stored; in the place of one whose uid was chosen, its id."""
    return event_id if at is None else _event(draft, event_id, at)


def _event(draft: Draft, event_id: int, now: int) -> Event:
    due = due_micros(draft, now)
    return event_from_draft(draft, event_id, from_micros(now), from_micros(due) if due > now else None)


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
    record |= {name: value for name in _OPTIONAL if (value := getattr(draft, name)) is not None}
    if draft.delay is not None:
        record["delay"] = due_micros(draft, 0)
    if draft.at is not None:
        record["at"] = to_micros(draft.at)
    return record


def _copied(db: Database, drafts: Sequence[Draft], schema: str) -> Stored:
    try:
        db.begin()
        stored: Stored = []
        for start in range(0, len(drafts), BATCH):
            stored += copy(db, drafts[start : start + BATCH], schema)
        db.commit()
    except BaseException:
        db.rollback()
        raise
    return stored


def copy(db: Database, drafts: Sequence[Draft], schema: str) -> Stored:
    """Store events by COPY inside the transaction that is open."""
    ids, now = db.run("reserve", (len(drafts),))[0]
    kept = _sifted(db, drafts, ids) if any(draft.supplied for draft in drafts) else ids
    new = [(draft, mine) for draft, mine, theirs in zip(drafts, ids, kept, strict=True) if mine == theirs]
    moment = from_micros(now).isoformat()
    # Some at a time: the server reads what it has while the next is being written.
    lines = ("".join(_line(*each, moment) for each in new[at : at + LINES]) for at in range(0, len(new), LINES))
    db.copy(f"COPY {schema}.events ({COLUMNS}) FROM STDIN", lines)
    _deliver(db, new, now)
    return [(theirs, mine == theirs, now) for mine, theirs in zip(ids, kept, strict=True)]


def _deliver(db: Database, new: Sequence[tuple[Draft, int]], now: int) -> None:
    """Have the deliveries made: for events that are all due now and mostly alike, without reading them again."""
    ways: dict[tuple[str, tuple[str, ...], int, int | None], list[int]] = {}
    timed = False
    for draft, mine in new:
        timed |= draft.delay is not None or draft.at is not None
        ways.setdefault((draft.type, draft.tags, draft.priority, draft.max_retries), []).append(mine)
    if timed or len(ways) > FEW_WAYS:
        dues = array(due_micros(draft, now) for draft, _ in new) if timed else "{}"
        db.run("deliver", (array(mine for _, mine in new), dues, now))
        return
    for (kind, tags, priority, retries), ids in ways.items():
        db.run("deliver_alike", (array(ids), kind, ",".join(tags), priority, retries, now))


def _sifted(db: Database, drafts: Sequence[Draft], ids: list[int]) -> list[int]:
    return db.value(
        "sift",
        (
            [draft.uid if draft.supplied else None for draft in drafts],
            array(ids),
            [draft.type for draft in drafts],
            [draft.payload for draft in drafts],
            [",".join(draft.tags) for draft in drafts],
            [draft.key for draft in drafts],
            [draft.title for draft in drafts],
            [draft.description for draft in drafts],
        ),
    )


def _line(draft: Draft, event_id: int, moment: str) -> str:
    """Return a row in COPY's text format: tabs between columns, and backslashes before what would mislead."""
    uid, kind, payload, _, _, tags, key, title, description, metadata, _, _, priority, max_retries = draft
    return (
        f"{event_id}\t{uid.translate(_ESCAPES)}\t{kind.translate(_ESCAPES)}\t{','.join(tags).translate(_ESCAPES)}\t"
        f"{_nullable(key)}\t{_nullable(title)}\t{_nullable(description)}\t{_escaped(payload)}\t{_escaped(metadata)}\t"
        f"{moment}\t{priority}\t{_NULL if max_retries is None else max_retries}\n"
    )


def stage(db: Database, part: int, first: int, drafts: Sequence[Draft], schema: str) -> None:
    """Lay events by in a part by COPY, inside the transaction that is open."""
    lines = (
        "".join(
            _staged_line(part, position, draft) for position, draft in enumerate(drafts[at : at + LINES], first + at)
        )
        for at in range(0, len(drafts), LINES)
    )
    db.copy(f"COPY {schema}.staged ({STAGED}) FROM STDIN", lines)


def _staged_line(part: int, position: int, draft: Draft) -> str:
    uid, kind, payload, _, chosen, tags, key, title, description, metadata, delay, at, priority, max_retries = draft
    return (
        f"{part}\t{position}\t{uid.translate(_ESCAPES)}\t{'t' if chosen else 'f'}\t{kind.translate(_ESCAPES)}\t"
        f"{','.join(tags).translate(_ESCAPES)}\t{_nullable(key)}\t{_nullable(title)}\t{_nullable(description)}\t"
        f"{_escaped(payload)}\t{_escaped(metadata)}\t{priority}\t{_NULL if max_retries is None else max_retries}\t"
        f"{_NULL if delay is None else due_micros(draft, 0)}\t{_NULL if at is None else to_micros(at)}\n"
    )


def _nullable(text: str | None) -> str:
    return _NULL if text is None else text.translate(_ESCAPES)


def _escaped(text: str) -> str:
    """Return JSON text, which has no control characters, for COPY."""
    return text.replace("\\", "\\\\") if "\\" in text else text
