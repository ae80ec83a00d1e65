"""Staging: what the tasks of a Spark job bring is laid by, and published by the job, all of it or nothing."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Final, Protocol

from postbus.clock import to_micros
from postbus.errors import Conflict
from postbus.payload import Draft
from postbus.store.records import due_micros, moment, split_tags
from postbus.store.session import Database, Row


class At(Protocol):
    """A transaction, and its moment."""

    @property
    def db(self) -> Database:
        """The connection."""
        ...

    @property
    def now(self) -> int:
        """The moment, in microseconds since 1970."""
        ...


LEFTOVER: Final = timedelta(days=1)
"""How long what was never published is kept: no task runs longer."""
SUNK_MEMORY: Final = timedelta(days=30)
"""How long a published batch is known: a stream that was down for longer and brings its last batch again doubles it."""
STEP: Final = 20_000
FEW: Final = 20
_MICROS: Final = timedelta(microseconds=1)


def begin_part(session: At, query: str, batch: int) -> int:
    """Open a part of a batch, and return its number, which is never used again."""
    return session.db.value("add_part", (query, batch, session.now))


def stage(session: At, part: int, first: int, drafts: Sequence[Draft]) -> None:
    """Lay events by in a part."""
    require_part(session, part)
    session.db.many("stage", [staged_row(part, position, draft) for position, draft in enumerate(drafts, first)])


def sunk_before(session: At, query: str, batch: int, brought: int) -> bool:
    """Note in this transaction that a batch is published; return whether it had been before."""
    return not session.db.run("add_sunk", (query, batch, brought, session.now))


def staged_row(part: int, position: int, draft: Draft) -> Row:
    """Return an event as it is laid by."""
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
    """Return an event that was laid by, without what its payload reads back as: nobody asks for that."""
    uid, kind, payload, value, chosen, tags, key, title, description, metadata, delay, at, *rest = row
    wait = None if delay is None else timedelta(microseconds=delay)
    texts = (split_tags(tags), key, title, description, metadata)
    return Draft(uid, kind, payload, value, bool(chosen), *texts, wait, moment(at), *rest)


def require_part(session: At, part: int) -> None:
    """Raise Conflict for a part that was dropped."""
    if not session.db.run("part", (part,)):
        raise Conflict(f"part {part} was dropped: its batch is over")


def require_all(part: int, found: int, wanted: int) -> None:
    """Raise Conflict for a part that has lost rows."""
    if found != wanted:
        raise Conflict(
            f"part {part} is not complete, {found:,} of {wanted:,} rows: was the server restarted? Write again"
        )


def drop_some(session: At, parts: Sequence[int]) -> int:
    """Drop some rows of these parts, and a part when none of its are left; return how many rows there were."""
    removed = 0
    for part in parts:
        removed += session.db.count("drop_staged", (part, STEP - removed))
        if removed >= STEP:
            return removed
        session.db.run("drop_part", (part,))
    return removed


def tidied(session: At) -> int:
    """Drop some of what dead jobs left, and forget batches published long ago; return how many rows there were."""
    old = session.db.run("old_parts", (session.now - LEFTOVER // _MICROS, FEW))
    removed = drop_some(session, [part for (part,) in old])
    session.db.run("drop_stray")
    return removed + session.db.count("drop_old_sunk", (session.now - SUNK_MEMORY // _MICROS,))
