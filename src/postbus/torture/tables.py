"""Read the tables past the product: deliveries with their states, and the audit log entry by entry."""

import json
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import apsw
import psycopg

from postbus.pattern import Interest
from postbus.store.arrays import unpack, unpack_bits

Run = Callable[[str], Iterable[tuple[Any, ...]]]
PENDING, LEASED, DEAD, PARKED = range(4)
PLACE_BITS: Final = 10
ABOVE: Final = """
    SELECT c.subscription, e.id, e.type, e.tags
      FROM cursors AS c JOIN events AS e ON e.id > c.position AND e.erased_at IS NULL
     WHERE NOT EXISTS (SELECT 1 FROM skips AS k WHERE k.subscription = c.subscription AND k.event_id = e.id)
"""
MISSING: Final = """
    SELECT c.subscription, e.id, e.type, e.tags
      FROM cursors AS c JOIN events AS e ON c.missing @> e.id AND e.erased_at IS NULL
"""
GAPS: Final = MISSING.replace("cursors AS c", "gaps AS c").replace("c.missing", "c.ids")


class AuditRow(NamedTuple):
    """An entry of the audit log, as far as rules look at it."""

    event_id: int
    subscription: str
    action: str
    status: str | None
    attempt: int
    epoch: int
    worker_id: str | None


class StoredDelivery(NamedTuple):
    """An unfinished delivery, as far as rules look at it."""

    state: int
    attempt: int
    epoch: int


@contextmanager
def reading(url: str) -> Generator[Run]:
    """Read a database's tables as of one moment."""
    if not url.startswith("sqlite:"):
        with psycopg.connect(url, options="-c search_path=postbus") as server:
            server.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            yield lambda sql: server.execute(sql.encode())
        return
    connection = apsw.Connection(url.removeprefix("sqlite:///"), flags=apsw.SQLITE_OPEN_READONLY)
    connection.set_busy_timeout(10_000)
    try:
        connection.execute("BEGIN")
        yield connection.execute
    finally:
        connection.close()


def audit_of(run: Run, *, postgres: bool) -> dict[int, AuditRow]:
    """Return the audit log by the ids of its entries."""
    names = _names(run)
    if postgres:
        sql = "SELECT id, event_id, subscription, action, status, attempt, epoch, worker_id FROM audit ORDER BY id"
        return {identity: AuditRow(event_id, names[number], *rest) for identity, event_id, number, *rest in run(sql)}
    found: dict[int, AuditRow] = {}
    for row in run(
        "SELECT id, first_id, ids, places, subscription, action, status, attempt, epoch, worker_id FROM event_log "
        "ORDER BY id"
    ):
        identity, first_id, ids, places, number, action, status, attempt, epoch, worker_id = row
        told = (names[number], action, status, attempt)
        if ids is None:
            found[identity] = AuditRow(first_id, *told, epoch, worker_id)
            continue
        for place, (event_id, at) in enumerate(zip(unpack(ids), unpack(places), strict=True)):
            found[identity + place] = AuditRow(event_id, *told, epoch + at, worker_id)
    return found


def deliveries_of(run: Run, *, postgres: bool) -> dict[tuple[int, str], StoredDelivery]:
    """Return what is unfinished or dead: as rows, in blocks, and where cursors have still to come to."""
    names = _names(run)
    found = {(event_id, names[number]): StoredDelivery(PENDING, 0, 0) for number, event_id in _ahead(run, postgres)}
    attempts: dict[tuple[int, int], int] = {}
    for number, event_id, state, attempt in run("SELECT subscription, event_id, state, attempt FROM deliveries"):
        attempts[number, event_id] = attempt
        if state != LEASED:
            found[event_id, names[number]] = StoredDelivery(state, attempt, 0)
    ids = "CASE WHEN last_id > first_id THEN ids_of(first_id, last_id, ids) END" if postgres else "ids"
    for number, subscription, first_id, events, done in run(
        f"SELECT number, subscription, first_id, {ids}, done FROM blocks"  # noqa: S608
    ):
        settled = unpack_bits(done)
        for place, event_id in enumerate(unpack(events) if events else (first_id,)):
            if not settled >> place & 1:
                attempt = attempts.get((subscription, event_id), 1)
                found[event_id, names[subscription]] = StoredDelivery(LEASED, attempt, number << PLACE_BITS | place)
    return found


def _names(run: Run) -> Mapping[int, str]:
    sql = "SELECT number, name FROM subscriptions UNION ALL SELECT number, name FROM former_subscriptions"
    return {0: "", **dict(run(sql))}


def _ahead(run: Run, postgres: bool) -> Iterator[tuple[int, int]]:  # noqa: FBT001  as its callers have it
    """Go through (subscription, event) of what queues have still to come to: above the cursor, or missing below it."""
    interests = {
        number: [Interest(each, frozenset(json.loads(tags))) for each in json.loads(patterns)]
        for number, patterns, tags in run(
            "SELECT number, CAST(patterns AS text), CAST(tags AS text) FROM subscriptions WHERE mode = 'queue'"
        )
    }
    places = [ABOVE, *((MISSING, GAPS) if postgres else ())]
    for number, event_id, type_, joined in (row for sql in places for row in run(sql)):
        if any(each.wants(type_, joined.split(",") if joined else ()) for each in interests[number]):
            yield number, event_id
