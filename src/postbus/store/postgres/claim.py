"""Claim deliveries, and finish what simply worked: each is one call of a function of the database."""

import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from functools import lru_cache
from typing import Any, Final
from uuid import uuid4

import orjson

from postbus.model import Done, Lease
from postbus.pattern import Interest
from postbus.retry import RetryPolicy
from postbus.store.audit import PLACE_BITS
from postbus.store.contract import Claim, Settled, Settlement
from postbus.store.leases import Taken, Won, settle
from postbus.store.postgres.connection import Database
from postbus.store.records import moment
from postbus.store.session import Row, Session

MOST: Final = 1_000
"""How many one claim takes: a block has room for 1,024."""
SMALL_CLAIM: Final = 64
ANSWER_BYTES: Final = 65_536
"""How much of events comes along with a claim. An answer that fills the socket's buffer keeps the cursor locked."""
FLOOR_AGE: Final = 1.0
MAX_FLOORS: Final = 1_000
MICROSECOND: Final = timedelta(microseconds=1)
Floor = tuple[int, int, float]


class Floors:
    """Up to where this process has just taken due rows, for each kind of claim.

    While an old snapshot is open, the index keeps entries of all that was taken since: the next claim begins behind
    them.
    """

    def __init__(self) -> None:
        """Begin with none."""
        self._floors: dict[object, Floor] = {}

    def of(self, key: object) -> tuple[int | None, int | None]:
        """Return the due time and id to begin behind, for at most a second: what came up before them is found then."""
        due_at, event_id, since = self._floors.get(key, (None, None, 0.0))
        return (due_at, event_id) if time.monotonic() - since < FLOOR_AGE else (None, None)

    def move(self, key: object, due_at: int | None, event_id: int | None) -> None:
        """Remember how far a claim came."""
        if due_at is None or event_id is None:
            self._floors.pop(key, None)
            return
        if len(self._floors) > MAX_FLOORS:
            self._floors.clear()
        since = self._floors[key][2] if key in self._floors else time.monotonic()
        if time.monotonic() - since >= FLOOR_AGE:
            since = time.monotonic()
        self._floors[key] = due_at, event_id, since


def claim(
    db: Database, floors: Floors, claims: Sequence[tuple[int, Claim]], token: str, *, wait: bool
) -> list[Won | None]:
    """Lease what claims may have, each on a subscription by its number, one after the other.

    None in the place of one that found somebody else passing the log: ask again with `wait`, in a transaction alone.
    """
    keys = [(number, each.interests, each.blocked) for number, each in claims]
    size = ANSWER_BYTES // len(claims)
    given = [
        (*_arguments(number, each, size), *floors.of(key)) for (number, each), key in zip(claims, keys, strict=True)
    ]
    rows = db.run_plain("claim", (orjson.dumps(given).decode(), token, "true" if wait else "false"))
    wons: list[Won | None] = []
    for row, key in zip(rows, keys, strict=True):
        state, now, policy, until, next_due, suspects, suspect, more, *taken, reached, reached_id, events = row
        if state == "busy":
            wons.append(None)
            continue
        floors.move(key, reached, reached_id)
        wons.append(
            Won(
                _taken(taken, until, suspect=suspect),
                suspects=suspects,
                policy=_policy(policy),
                now=now,
                more=more if state == "claimed" else state == "again",
                next_due=moment(next_due),
                rows=_rows(events),
            )
        )
    return wons


def _arguments(number: int, asked: Claim, size: int) -> tuple[Any, ...]:
    """Return what the SQL function `claim` takes; `size`: how much of events may come along."""
    limit = min(asked.limit, MOST)
    return (
        number,
        _interests(asked.interests),
        _interests(asked.blocked),
        limit,
        limit if asked.free is None else asked.free,
        asked.shared,
        asked.lease // MICROSECOND,
        asked.policy.attempts,
        asked.worker_id,
        asked.owner,
        asked.alone,
        size if limit <= SMALL_CLAIM else 0,
    )


def new_token() -> str:
    """Return an id for a claim, by which it gives back what it may have been given."""
    return uuid4().hex


@lru_cache
def _interests(interests: tuple[Interest, ...]) -> orjson.Fragment:
    return orjson.Fragment(orjson.dumps([[each.pattern, sorted(each.tags)] for each in interests]))


@lru_cache
def _policy(text: str | None) -> RetryPolicy | None:
    return None if text is None else RetryPolicy.from_dict(orjson.loads(text))


def _taken(columns: Sequence[Any], until: int, *, suspect: bool) -> list[Taken]:
    """Return what is in the block and what has a block of its own, in the order in which they were due."""
    number, first_id, size, ids, tries, again, numbers, lone_ids, lone_tries, lone_again, ranks = columns
    found: list[Taken] = []
    if number is not None:
        events: Iterable[int] = range(first_id, first_id + size) if ids is None else (first_id + each for each in ids)
        tries, again, first = tries or [1] * size, again or [0] * size, number << PLACE_BITS
        found += [
            Taken(event_id, tries[place], again[place], first | place, until, suspect)
            for place, event_id in enumerate(events)
        ]
    if numbers:
        found += [
            Taken(event_id, attempt, retried, own << PLACE_BITS, until, suspect)
            for own, event_id, attempt, retried in zip(numbers, lone_ids, lone_tries, lone_again, strict=True)
        ]
    if ranks:
        found = [each for _, each in sorted(zip(ranks, found, strict=True))]
    return found


def _rows(events: str | None) -> Mapping[int, Row]:
    return {} if events is None else {row[0]: (*row, None) for row in orjson.loads(events)}


# ── finish ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def is_plain(told: Settlement) -> bool:
    """Return whether a settlement tells of nothing but success."""
    return isinstance(told.outcome, Done) and told.status_code is None


def finish(db: Database, numbers: Mapping[str, int], told: Sequence[Settlement]) -> set[Lease]:
    """Record successes, no two of one lease, by one statement a worker; return those that the fence let through."""
    finished: set[Lease] = set()
    for worker in sorted({each.worker_id for each in told}):
        some = [each for each in told if each.worker_id == worker and each.lease.subscription in numbers]
        if not some:
            continue
        ((unfit,),) = db.run_plain(
            "finish",
            (
                _array(each.lease.epoch for each in some),
                _array(each.lease.event_id for each in some),
                _array(numbers[each.lease.subscription] for each in some),
                _array("NULL" if each.execution_time_ms is None else each.execution_time_ms for each in some),
                worker,
            ),
        )
        left = set(unfit)
        finished.update(each.lease for place, each in enumerate(some, 1) if place not in left)
    return finished


def settle_in(session: Session, db: Database, told: Settlement) -> Settled:
    """Record an outcome in the caller's transaction."""
    number = session.catalog.known_number(told.lease.subscription)
    if is_plain(told) and number is not None and finish(db, {told.lease.subscription: number}, [told]):
        return Settled.APPLIED
    return settle(session, [told])[0]


def _array(values: Iterable[float | str]) -> str:
    """Return values as the text of an SQL array: of a list, psycopg would choose the narrowest type that holds it."""
    return f"{{{','.join(map(str, values))}}}"
