"""Claims that get all they ask for and meet nothing unusual: one statement finds, leases and reads."""

from collections.abc import Sequence
from datetime import timedelta
from itertools import chain, islice
from typing import Final, NamedTuple

from postbus.retry import RetryPolicy
from postbus.store.contract import PAGE_BYTES, Claim
from postbus.store.postgres.connection import Steps, array, texts
from postbus.store.postgres.leases import BEGINNING, Marks
from postbus.store.postgres.rows.leases import EXACT_ROUTES, Taken
from postbus.store.postgres.rows.routes import Selection
from postbus.store.postgres.rows.sql import Won, kind
from postbus.store.postgres.single import Remembered
from postbus.store.session import Row

__all__ = ["claim_at_once"]

_MICROS: Final = timedelta(microseconds=1)


class Way(NamedTuple):
    """A route to look at: from where on, and before which others."""

    route: int
    low: int
    rank: int


def claim_at_once(catalog: Remembered, marks: Marks, source: int, claims: Sequence[Claim]) -> Steps[list[Won]]:
    """Lease to claims of one kind all they ask for; return nothing if something is in the way, and nothing was taken.

    `source` is a route of the priority that is expected to yield it. What is remembered only decides what the statement
    is asked: whether it still holds, the statement finds out.
    """
    own = next((each for each in catalog.subscriptions() if each.name == claims[0].subscription), None)
    selection = catalog.select(*kind(claims[0]))
    normal, solo = (list(chain(*groups.values())) for groups in (selection.normal, selection.solo))
    if own is None or own.paused or len(normal) > EXACT_ROUTES or len(solo) > EXACT_ROUTES:
        return []
    ways = _ways(selection, marks, source)
    if not ways:
        return []
    leases = [(own.lease or each.lease) // _MICROS for each in claims]
    slots = [(each, lease) for each, lease in zip(claims, leases, strict=True) for _ in range(each.limit)]
    given = (
        catalog.version,
        catalog.marker,
        array(way.route for way in ways),
        array(way.low for way in ways),
        array(way.rank for way in ways),
        len(slots),
        texts(each.worker_id for each, _ in slots),
        texts(each.owner for each, _ in slots),
        array(lease for _, lease in slots),
        array(solo),
        own.name,
        array(normal + solo),
        PAGE_BYTES,
    )
    rows = yield [("claim_at_once", given)]
    marks.move([(row[1], row[0]) for row in rows])
    left = iter(rows)
    shares = [(list(islice(left, each.limit)), lease) for each, lease in zip(claims, leases, strict=True) if rows]
    return [_won(share, lease, own.retry) for share, lease in shares]


def _ways(selection: Selection, marks: Marks, source: int) -> list[Way]:
    """Return where to look, down to the priority of `source`; nothing if that has no mark.

    As for any claim, only a look that yields enough may begin at the marks: so higher priorities, of which less is
    expected, are looked at from the beginning, and lower ones not at all.
    """
    ways: list[Way] = []
    for rank, priority in enumerate(sorted(selection.normal, reverse=True)):
        routes = list(selection.normal[priority])
        if source in routes:
            lows = marks.of(routes)
            return [*ways, *map(Way, routes, lows, [rank] * len(routes))] if any(lows) else []
        ways += [Way(route, BEGINNING, rank) for route in routes]
    return []


def _won(rows: list[Row], lease: int, policy: RetryPolicy | None) -> Won:
    now = rows[0][2]
    taken = [Taken(*row[3:7], until=now + lease, suspect=False) for row in rows]
    came = {} if any(row[7] is None for row in rows) else {row[7]: row[7:] for row in rows}
    return Won(taken, suspects=False, next_due=None, policy=policy, now=now, rows=came)
