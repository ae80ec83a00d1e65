"""What a connection remembers of the slowly changing tables: subscriptions, their numbers, and kinds of events.

Every connection has a memory of its own, used by one thread at a time: the writer's may hold what is not committed
yet, and forgets everything at a rollback; a reader's holds what its snapshot shows. `meta.catalog` counts the changes
that added kinds cannot tell of, so that one look at the start of a transaction is enough to be up to date.
"""

import hashlib
from collections.abc import Iterable, Sequence
from datetime import timedelta
from functools import lru_cache
from typing import Any, Final, NamedTuple

import orjson

from postbus.clock import from_micros
from postbus.errors import NotFound, UnsafeStore
from postbus.model import Mode, Subscription
from postbus.pattern import Interest
from postbus.retry import RetryPolicy
from postbus.store.records import decoding, split_tags
from postbus.store.session import Database

SEPARATOR: Final = "\x1f"
MAX_SELECTIONS: Final = 1_000
MAX_REMEMBERED: Final = 100_000


class Kind(NamedTuple):
    """A type and a set of tags, sorted and joined by commas; `id` is a hash of both."""

    id: int
    type: str
    tags: str


@lru_cache(MAX_REMEMBERED)
def _hash(type_: str, tags: str) -> int:
    digest = hashlib.md5(f"{type_}{SEPARATOR}{tags}".encode(), usedforsecurity=False).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


def kind_of(type_: str, tags: str) -> Kind:
    """Return the kind of an event with these tags, joined by commas in any order."""
    joined = ",".join(sorted(tags.split(","))) if "," in tags else tags
    return Kind(_hash(type_, joined), type_, joined)


class Selection:
    """What some interests, less what is blocked, cover: which kinds, and whether that is everything."""

    def __init__(self, interests: Sequence[Interest], blocked: Sequence[Interest]) -> None:
        self._interests = interests
        self._blocked = blocked
        self._wanted: dict[tuple[str, str], bool] = {}
        self.kinds: dict[int, None] = {}
        self.seen = 0
        self.turn = -(1 << 63)
        """The kind that the last claim of many kinds ended at: each has its turn."""
        self.everything = not blocked and any(each.pattern == "*" and not each.tags for each in interests)
        self.nothing = all(each in blocked for each in interests)

    def wants(self, type_: str, tags: str) -> bool:
        """Return whether events of a type with these tags, joined by commas, are covered."""
        if self.everything:
            return True
        found = self._wanted.get((type_, tags))
        if found is None:
            if len(self._wanted) >= MAX_REMEMBERED:
                self._wanted.clear()
            split = split_tags(tags)
            found = any(each.wants(type_, split) for each in self._interests) and not any(
                each.wants(type_, split) for each in self._blocked
            )
            self._wanted[type_, tags] = found
        return found


class Catalog:
    """Subscriptions and kinds as one connection saw them at the last `refresh`."""

    def __init__(self) -> None:
        self.head = 0
        """The last id given to an event."""
        self.now = 0
        """The database's time at the last look, where it is the one that decides."""
        self.forget()

    def forget(self) -> None:
        """Remember nothing: the next `refresh` reads everything."""
        self._version = -1
        self._marker = 0
        self._subscriptions: dict[str, Subscription] = {}
        self._numbers: dict[str, int] = {}
        self._names: dict[int, str] = {0: ""}
        self._wanted: dict[str, Selection] = {}
        self._kinds: dict[int, Kind] = {}
        self._order: list[Kind] = []
        self._selections: dict[tuple[tuple[Interest, ...], tuple[Interest, ...]], Selection] = {}

    @property
    def empty(self) -> bool:
        """Whether nothing is remembered."""
        return self._version < 0

    def refresh(self, db: Database) -> None:
        """Take in what has changed since the last time."""
        row = db.run("catalog", (self._marker,))[0]
        if row[0] != self._version:
            self.forget()
            self._load_subscriptions(db)
            self._version = row[0]
            row = db.run("catalog", (self._marker,))[0]
        _, self._marker, self.head, self.now, kinds = row
        for each in orjson.loads(kinds):
            self._remember(Kind(*each))

    def _load_subscriptions(self, db: Database) -> None:
        for number, *row in db.run("subscriptions"):
            found = _subscription(row)
            self._subscriptions[found.name] = found
            self._numbers[found.name] = number
            tags = frozenset(found.tags)
            self._wanted[found.name] = Selection([Interest(each, tags) for each in found.patterns], ())
        self._names |= {number: name for name, number in self._numbers.items()}
        self._names |= dict(db.run("former_subscriptions"))

    # ── subscriptions ────────────────────────────────────────────────────────────────────────────────────────────

    def subscription(self, name: str) -> Subscription:
        """Return a subscription; raise NotFound."""
        try:
            return self._subscriptions[name]
        except KeyError:
            raise NotFound(f"there is no subscription {name!r}") from None

    def subscriptions(self) -> tuple[Subscription, ...]:
        """Return all subscriptions by name."""
        return tuple(self._subscriptions.values())

    def number(self, name: str) -> int:
        """Return a subscription's number; raise NotFound."""
        self.subscription(name)
        return self._numbers[name]

    def known_number(self, name: str) -> int | None:
        """Return a subscription's number; None if there is none."""
        return self._numbers.get(name)

    def name(self, number: int) -> str:
        """Return the name of a subscription, also of a deleted one."""
        try:
            return self._names[number]
        except KeyError:
            raise UnsafeStore(f"the store names subscription {number}, which never was") from None

    def wants(self, name: str, type_: str, tags: str) -> bool:
        """Return whether a subscription wants events of a type with these tags; one that was deleted wants nothing."""
        return name in self._wanted and self._wanted[name].wants(type_, tags)

    # ── kinds ────────────────────────────────────────────────────────────────────────────────────────────────────

    def select(self, interests: tuple[Interest, ...], blocked: tuple[Interest, ...] = ()) -> Selection:
        """Return what these interests cover; only kinds new since the last call are looked at."""
        selection = self._selections.get((interests, blocked))
        if selection is None:
            if len(self._selections) >= MAX_SELECTIONS:
                self._selections.clear()
            selection = self._selections[interests, blocked] = Selection(interests, blocked)
        for kind in self._order[selection.seen :]:
            if selection.wants(kind.type, kind.tags):
                selection.kinds[kind.id] = None
        selection.seen = len(self._order)
        return selection

    def kind(self, db: Database, identity: int) -> Kind:
        """Return a kind by its id; raise UnsafeStore if it is not there."""
        if identity not in self._kinds:
            for row in db.run("kind", (identity,)):
                self._remember(Kind(*row))
        try:
            return self._kinds[identity]
        except KeyError:
            raise UnsafeStore(f"a delivery is of kind {identity}, which is not registered") from None

    def require_kinds(self, db: Database, kinds: Iterable[Kind]) -> None:
        """Have kinds registered until the end of the transaction: known ones too, for unused ones may be removed."""
        new = sorted({each for each in kinds if each.id not in self._kinds})
        if new:
            db.many("add_kind", new)
            for each in new:
                self._remember(each)

    def _remember(self, kind: Kind) -> None:
        if kind.id not in self._kinds:
            self._kinds[kind.id] = kind
            self._order.append(kind)


def _subscription(row: Sequence[Any]) -> Subscription:
    name, mode, patterns, tags, paused, lease, retry, created_at = row
    with decoding():
        return Subscription(
            name=name,
            mode=Mode(mode),
            patterns=tuple(orjson.loads(patterns)),
            tags=tuple(orjson.loads(tags)),
            paused=bool(paused),
            lease=None if lease is None else timedelta(microseconds=lease),
            retry=None if retry is None else RetryPolicy.from_dict(orjson.loads(retry)),
            created_at=from_micros(created_at),
        )
