"""Publishing on a connection of the caller's: psycopg, SQLAlchemy, Django, or any driver with `%(name)s` parameters.

What is asked stands apart from who asks it: `_published` is a conversation of statements and rows, which `on` holds
with a connection that answers at once, and `on_async` with one that is awaited.
"""

import json
from collections.abc import Generator, Sequence
from contextlib import closing, contextmanager
from importlib import import_module
from typing import Any, Final

import psycopg
from psycopg.rows import tuple_row

from postbus.clock import from_micros
from postbus.errors import InvalidEventError, InvalidRequest
from postbus.model import Event
from postbus.payload import Draft
from postbus.store.postgres import append
from postbus.store.postgres.connection import put_schema
from postbus.store.records import event_from_row, row_from_draft
from postbus.store.session import Row

Asked = Generator[tuple[str, dict[str, Any]], Sequence[Row], list[Event]]
# The search path is the caller's: every name says where it is.
APPEND: Final = """SELECT event_id, fresh, stored_at, (SELECT pg_catalog.pg_notify('postbus', ''))
  FROM postbus.append(CAST(:batch AS pg_catalog.text), CAST(:chosen AS pg_catalog.bool))"""
KNOWN: Final = """SELECT id, uid, type, tags, key, title, description, CAST(payload AS pg_catalog.text),
       CAST(metadata AS pg_catalog.text), postbus.micros(created_at), priority, max_retries, NULL FROM postbus.events
 WHERE id OPERATOR(pg_catalog.=) CAST(:id AS pg_catalog.int8)"""
SINCE: Final = """SELECT coalesce((SELECT postbus.micros(created_at) FROM postbus.dedup
                         WHERE uid OPERATOR(pg_catalog.=) CAST(:uid AS pg_catalog.text)),
                       postbus.micros(postbus.now()))"""
UNTRANSLATABLE: Final = "22P05"
"""A character has no equivalent in the encoding of the client."""


def on(connection: Any, drafts: Sequence[Draft], schema: str) -> list[Event]:
    """Publish in the caller's transaction; raise InvalidRequest for what is no connection."""
    if is_async(connection):
        raise InvalidRequest("this connection is awaited: publish on it with AsyncEventBus")
    asked = _published(drafts, schema)
    rows: Any = None
    try:
        while True:
            rows = _ask(connection, *asked.send(rows))
    except StopIteration as done:
        return done.value


async def on_async(connection: Any, drafts: Sequence[Draft], schema: str) -> list[Event]:
    """Publish in the caller's transaction on a connection that is awaited."""
    asked = _published(drafts, schema)
    rows: Any = None
    try:
        while True:
            rows = await _ask_async(connection, *asked.send(rows))
    except StopIteration as done:
        return done.value


def is_async(connection: Any) -> bool:
    """Return whether a connection is one that is awaited."""
    return isinstance(connection, psycopg.AsyncConnection) or _is_from(connection, "sqlalchemy.ext.asyncio")


def _published(drafts: Sequence[Draft], schema: str) -> Asked:
    """Ask for the events to be stored, and to be told of at the commit; then for those that were known already."""
    if not drafts:
        return []
    batch, chosen = append.arguments(drafts)
    if not batch.isascii():  # the connection's encoding may not have these characters
        batch = json.dumps(json.loads(batch))
    rows = yield put_schema(APPEND, schema), {"batch": batch, "chosen": chosen}
    events: list[Event] = []
    for draft, each in zip(drafts, append.events(drafts, [tuple(row)[:3] for row in rows]), strict=True):
        if isinstance(each, Event):
            events.append(each)
            continue
        known: Sequence[Row] = yield put_schema(KNOWN, schema), {"id": each}
        if not known:  # pruned: what is known of it comes with the draft
            ((since,),) = yield put_schema(SINCE, schema), {"uid": draft.uid}
            known = [row_from_draft(draft, each, since)]
        row = tuple(known[0])
        if isinstance(row[1], bytes):  # SQL_ASCII: no encoding at all
            raise InvalidRequest(f"event {each} cannot be read on this connection: set its client_encoding to UTF8")
        events.append(event_from_row(row, updated_at=from_micros(row[9])))
    return events


def _ask(connection: Any, sql: str, given: dict[str, Any]) -> Sequence[Row]:
    with _refusals():
        if isinstance(connection, psycopg.Connection):
            cursor: Any = psycopg.Cursor(connection, row_factory=tuple_row)  # pyright: ignore[reportUnknownArgumentType]
            return cursor.execute(*_percent(sql, given)).fetchall()
        if _is_from(connection, "sqlalchemy."):
            return connection.execute(_text(sql), given).all()
        if not hasattr(connection, "cursor"):
            what = type(connection).__name__
            raise InvalidRequest(f"connection= takes bus.transaction(), or a PostgreSQL connection, not {what}")
        with closing(connection.cursor()) as cursor:
            cursor.execute(*_percent(sql, given))
            return cursor.fetchall()


async def _ask_async(connection: Any, sql: str, given: dict[str, Any]) -> Sequence[Row]:
    with _refusals():
        if isinstance(connection, psycopg.AsyncConnection):
            cursor: Any = psycopg.AsyncCursor(connection, row_factory=tuple_row)  # pyright: ignore[reportUnknownArgumentType]
            return await (await cursor.execute(*_percent(sql, given))).fetchall()
        return (await connection.execute(_text(sql), given)).all()


@contextmanager
def _refusals() -> Generator[None]:
    """Tell of an event the database refuses as anywhere else, whichever driver brings the news."""
    try:
        yield
    except Exception as error:
        origin: Any = getattr(error, "orig", None) or error.__cause__ or error
        state = getattr(origin, "sqlstate", None) or getattr(origin, "pgcode", None)
        told = str(origin).partition("\n")[0]
        if state in {"PB001", "PB002"}:
            raise InvalidEventError(told) from error
        if state == UNTRANSLATABLE:
            raise InvalidRequest(f"{told}: set client_encoding to UTF8 on the connection") from error
        raise


def _is_from(connection: Any, package: str) -> bool:
    return any(kind.__module__.startswith(package) for kind in type(connection).__mro__)


def _text(sql: str) -> Any:
    """Return a statement for SQLAlchemy, which only callers who pass its connections need to have."""
    return import_module("sqlalchemy").text(sql)


def _percent(sql: str, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return a statement in the style of `%(name)s` that psycopg, psycopg2 and Django share."""
    for name in given:
        sql = sql.replace(f":{name} ", f"%({name})s ")
    return sql, given
