"""Claim deliveries, and finish what simply worked: each is one call of a function of the database."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import lru_cache
from typing import Any, Final
from uuid import uuid4

import orjson
import psycopg

from postbus.model import Done, Lease
from postbus.pattern import Interest
from postbus.retry import RetryPolicy
from postbus.store.audit import PLACE_BITS
from postbus.store.contract import Claim, Settlement
from postbus.store.deliveries import block_from_row
from postbus.store.leases import Taken, Won, release
from postbus.store.postgres.connection import Database
from postbus.store.records import moment
from postbus.store.session import Row, Session

MOST: Final = 1_000
"""How many one claim takes: a block has room for 1,024."""
SMALL_CLAIM: Final = 64
ANSWER_BYTES: Final = 65_536
"""How much of events comes along with a claim. An answer that fills the socket's buffer keeps the cursor locked."""
NO_SUBSCRIPTION: Final = "PB005"
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
        now = time.monotonic()
        *_, since = self._floors.get(key, (0, 0, now))
        self._floors[key] = due_at, event_id, since if now - since < FLOOR_AGE else now


class Claimer:
    """Claims for several callers at once, each on a subscription by its number."""

    def __init__(self, db: Database, on_lost: Callable[[str], None]) -> None:
        """Take charge of a connection. `on_lost` is called with the id of a claim that nobody got."""
        self._db = db
        self._on_lost = on_lost
        self._floors = Floors()

    def claim(self, batches: Sequence[Sequence[Claim]]) -> list[list[Won]]:
        """Claim in one transaction; whoever has to wait for a cursor, in one of its own."""
        claims = [each for batch in batches for each in batch]
        token, tried = uuid4().hex, list[Won | None]()
        try:
            tried = self._try(claims, token)
            wons = iter([won or self._wait(each, token) for won, each in zip(tried, claims, strict=True)])
        except psycopg.Error:
            if self._db.lost or any(tried):
                self._on_lost(token)
            raise
        return [[next(wons) for _ in batch] for batch in batches]

    def _try(self, claims: Sequence[Claim], token: str, *, wait: bool = False) -> list[Won | None]:
        try:
            return self._try_by_number(claims, token, wait=wait)
        except psycopg.Error as error:
            if error.sqlstate != NO_SUBSCRIPTION:
                raise
        self._db.catalog.forget()  # one was deleted, and perhaps made anew
        return self._try_by_number(claims, token, wait=wait)

    def _try_by_number(self, claims: Sequence[Claim], token: str, *, wait: bool) -> list[Won | None]:
        self._db.learn(each.subscription for each in claims)
        numbered = [(self._db.catalog.number(each.subscription), each) for each in claims]
        with self._db.alone():
            return claim(self._db, self._floors, numbered, token, wait=wait)

    def _wait(self, asked: Claim, token: str) -> Won:
        while True:
            (won,) = self._try([asked], token, wait=True)
            if won is not None:
                return won


def claim(
    db: Database, floors: Floors, claims: Sequence[tuple[int, Claim]], token: str, *, wait: bool
) -> list[Won | None]:
    """Lease what claims may have, each on a subscription by its number, one after the other.

    By `token`, an id of their own, they give back what they may have been given. None in the place of one that found
    somebody else passing the log: ask again with `wait`, in a transaction alone.
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


def give_back(session: Session, token: str) -> None:
    """Hand back what a claim was given that nobody got."""
    blocks = [block_from_row(row) for row in session.db.run("blocks_of_token", (token,))]
    leases = [lease for block in blocks for lease in block.leases(session.catalog.name(block.subscription))]
    release(session, leases, blocks[0].worker_id if blocks else "", timedelta(0))


# ── finish ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def finish(db: Database, told: Sequence[Settlement]) -> set[Lease]:
    """Record what simply worked, by one statement a worker; return what the fence let through, and leave the rest."""
    number = db.catalog.known_number
    times = Counter(each.lease[:2] for each in told)
    plain = [
        each
        for each in told
        if is_plain(each) and times[each.lease[:2]] == 1 and number(each.lease.subscription) is not None
    ]
    finished: set[Lease] = set()
    for worker in sorted({each.worker_id for each in plain}):
        some = [each for each in plain if each.worker_id == worker]
        ((unfit,),) = db.run_plain(
            "finish",
            (
                _array(each.lease.epoch for each in some),
                _array(each.lease.event_id for each in some),
                _array(number(each.lease.subscription) for each in some),
                _array("NULL" if each.execution_time_ms is None else each.execution_time_ms for each in some),
                worker,
            ),
        )
        left = set(unfit)
        finished.update(each.lease for place, each in enumerate(some, 1) if place not in left)
    return finished


def is_plain(told: Settlement) -> bool:
    """Return whether a settlement tells of nothing but success."""
    return isinstance(told.outcome, Done) and told.status_code is None


def _array(values: Iterable[object]) -> str:
    """Return values as the text of an SQL array: of a list, psycopg would choose the narrowest type that holds it."""
    return f"{{{','.join(map(str, values))}}}"
