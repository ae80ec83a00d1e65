"""Staging: what the tasks of a Spark job bring is staged in parts, and published by the job, all of it or nothing."""

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Final

from postbus.clock import to_micros
from postbus.errors import Conflict
from postbus.payload import Draft
from postbus.store.records import due_micros, moment, split_tags
from postbus.store.session import Row, Session

LEFTOVER: Final = timedelta(days=1)
"""How long what was never published is kept: no task runs longer."""
SUNK_MEMORY: Final = timedelta(days=30)
"""How long a published batch is known: a stream that was down for longer and brings its last batch again doubles it."""
STEP: Final = 20_000
FEW: Final = 20
_MICROS: Final = timedelta(microseconds=1)


def begin_part(session: Session, query: str, batch: int) -> int:
    """Open a part of a batch, and return its number, which is never used again."""
    return session.db.value("add_part", (query, batch, session.now))


def stage(session: Session, part: int, first: int, drafts: Sequence[Draft]) -> None:
    """Stage events in a part."""
    if not session.db.run("part", (part,)):
        raise Conflict(f"part {part} was dropped: its batch is over")
    session.db.many("stage", [staged_row(part, position, draft) for position, draft in enumerate(drafts, first)])


def publish_parts(
    session: Session,
    query: str,
    batch: int,
    parts: Mapping[int, int],
    publish_part: Callable[[Session, int, int], int],
) -> int | None:
    """Publish parts of a batch by `publish_part`; return how many events are new, None if it was published before."""
    if not session.db.run("add_sunk", (query, batch, sum(parts.values()), session.now)):
        return None
    if lost := parts.keys() - set(parts_of(session, query, batch)):
        raise Conflict(f"batch {batch} of {query}: {len(lost)} of its {len(parts)} parts were dropped")
    return sum(publish_part(session, part, rows) for part, rows in parts.items())


def parts_of(session: Session, query: str, batch: int) -> Sequence[int]:
    """Return the parts of a batch that are there."""
    return [part for (part,) in session.db.run("parts_of", (query, batch))]


def staged_row(part: int, position: int, draft: Draft) -> Row:
    """Return an event as it is staged."""
    return (
        part,
        position,
        draft.uid,
        draft.supplied,
        draft.type,
        ",".join(draft.tags),
        draft.key,
        draft.title,
        draft.description,
        draft.payload,
        draft.metadata,
        draft.priority,
        draft.max_retries,
        None if draft.delay is None else due_micros(draft, 0),
        None if draft.at is None else to_micros(draft.at),
    )


def draft_from_row(row: Row) -> Draft:
    """Return an event that was staged, without what its payload reads back as: nobody asks for that."""
    uid, kind, payload, value, chosen, tags, key, title, description, metadata, delay, at, *rest = row
    wait = None if delay is None else timedelta(microseconds=delay)
    texts = (split_tags(tags), key, title, description, metadata)
    return Draft(uid, kind, payload, value, bool(chosen), *texts, wait, moment(at), *rest)


def require_all(part: int, found: int, wanted: int) -> None:
    """Raise Conflict for a part that has lost rows."""
    if found != wanted:
        raise Conflict(
            f"part {part} is not complete, {found:,} of {wanted:,} rows: was the server restarted? Write again"
        )


def drop_some(session: Session, parts: Sequence[int]) -> int:
    """Drop some rows of these parts, and a part when none of its are left; return how many rows there were."""
    removed = 0
    for part in parts:
        removed += session.db.count("drop_staged", (part, STEP - removed))
        if removed >= STEP:
            return removed
        session.db.run("drop_part", (part,))
    return removed


def tidied(session: Session) -> int:
    """Drop some of what dead jobs left, and forget batches published long ago; return how many rows there were."""
    old = session.db.run("old_parts", (session.now - LEFTOVER // _MICROS, FEW))
    removed = drop_some(session, [part for (part,) in old])
    session.db.run("drop_stray")
    return removed + session.db.count("drop_old_sunk", (session.now - SUNK_MEMORY // _MICROS,))
