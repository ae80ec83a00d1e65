"""Read the tables past the product: deliveries with their states, and the audit log entry by entry."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from postbus.pattern import Interest
from postbus.store.arrays import unpack, unpack_bits

Run = Callable[[str], Iterable[tuple[Any, ...]]]
PENDING, LEASED, DEAD, PARKED = range(4)
PLACE_BITS: Final = 10


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


def audit_of(run: Run, *, arrays: bool) -> dict[int, AuditRow]:
    """Return the audit log by the ids of its entries; `arrays`: a row may be many."""
    if not arrays:
        sql = "SELECT id, event_id, subscription, action, status, attempt, epoch, worker_id FROM event_log ORDER BY id"
        return {number: AuditRow(*row) for number, *row in run(sql)}
    names = _names(run)
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


def deliveries_of(run: Run, *, blocks: bool) -> dict[tuple[int, str], StoredDelivery]:
    """Return what is unfinished or dead; `blocks`: as rows, in blocks, and above cursors."""
    if not blocks:
        sql = "SELECT event_id, subscription, state, attempt, epoch FROM deliveries"
        return {(event_id, name): StoredDelivery(*rest) for event_id, name, *rest in run(sql)}
    names = _names(run)
    found = {(event_id, names[number]): StoredDelivery(PENDING, 0, 0) for number, event_id in _above_cursors(run)}
    attempts: dict[tuple[int, int], int] = {}
    for number, event_id, state, attempt in run("SELECT subscription, event_id, state, attempt FROM deliveries"):
        attempts[number, event_id] = attempt
        if state != LEASED:
            found[event_id, names[number]] = StoredDelivery(state, attempt, 0)
    for number, subscription, first_id, ids, done in run(
        "SELECT number, subscription, first_id, ids, done FROM blocks"
    ):
        settled = unpack_bits(done)
        for place, event_id in enumerate(unpack(ids) if ids else (first_id,)):
            if not settled >> place & 1:
                attempt = attempts.get((subscription, event_id), 1)
                found[event_id, names[subscription]] = StoredDelivery(LEASED, attempt, number << PLACE_BITS | place)
    return found


def _names(run: Run) -> Mapping[int, str]:
    sql = "SELECT number, name FROM subscriptions UNION ALL SELECT number, name FROM former_subscriptions"
    return {0: "", **dict(run(sql))}


def _above_cursors(run: Run) -> Iterator[tuple[int, int]]:
    """Go through (subscription, event) of what queues have still to come to."""
    skips = set(run("SELECT subscription, event_id FROM skips"))
    cursors = list(
        run(
            "SELECT s.number, c.position, s.patterns, s.tags FROM subscriptions AS s "
            "JOIN cursors AS c ON c.subscription = s.number"
        )
    )
    for number, position, patterns, tags in cursors:
        interests = [Interest(each, frozenset(json.loads(tags))) for each in json.loads(patterns)]
        events = run(f"SELECT id, type, tags FROM events WHERE id > {position:d} AND erased_at IS NULL")  # noqa: S608
        for event_id, type_, joined in events:
            wanted = any(each.wants(type_, joined.split(",") if joined else ()) for each in interests)
            if wanted and (number, event_id) not in skips:
                yield number, event_id
