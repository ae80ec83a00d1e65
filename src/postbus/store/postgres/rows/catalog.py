"""What this process remembers of the slowly changing tables: subscriptions and routes.

Every connection has a memory of its own, used by one thread at a time: the writer's may hold what is not committed
yet, and forgets everything at a rollback; a reader's holds what its snapshot shows. `meta.catalog` counts the changes
that added routes cannot tell of (a subscription made, changed or removed, routes removed), so that one look at the
start of a transaction is enough to be up to date.
"""

from datetime import timedelta

import orjson

from postbus.clock import from_micros
from postbus.errors import NotFound, UnsafeStore
from postbus.model import Mode, Subscription
from postbus.pattern import Interest
from postbus.retry import RetryPolicy
from postbus.store.postgres.rows.routes import Route, RouteBook, Selection, route_id
from postbus.store.records import decoding
from postbus.store.session import Database, Row

__all__ = ["Catalog", "Fanout"]

MAX_REMEMBERED = 100_000
Fanout = tuple[tuple[str, int], ...]


class Catalog:
    """Subscriptions and routes as one connection saw them at the last `refresh`."""

    def __init__(self) -> None:
        """Begin with nothing remembered."""
        self.head = 0
        self.now = 0
        """The database's time at the last look, where it is the one that decides."""
        self.forget()

    def forget(self) -> None:
        """Remember nothing: the next `refresh` reads everything."""
        self._version = -1
        self._marker = 0
        self._subscriptions: dict[str, Subscription] = {}
        self._queues: tuple[str, ...] = ()
        self._book = RouteBook()
        self._fanout: dict[tuple[str, tuple[str, ...], int], Fanout] = {}

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
        _, self._marker, self.head, self.now, routes = row
        for each in orjson.loads(routes):
            self._book.add(Route(*each[:5], solo=bool(each[5])))

    def _load_subscriptions(self, db: Database) -> None:
        self._subscriptions = {row[0]: _subscription(row) for row in db.run("subscriptions")}
        self._queues = tuple(found.name for found in self._subscriptions.values() if found.mode is Mode.QUEUE)

    def subscription(self, name: str) -> Subscription:
        """Return a subscription; raise NotFound."""
        try:
            return self._subscriptions[name]
        except KeyError:
            raise NotFound(f"there is no subscription {name!r}") from None

    def subscriptions(self) -> tuple[Subscription, ...]:
        """Return all subscriptions by name."""
        return tuple(self._subscriptions.values())

    def wants(self, name: str, event_type: str, tags: tuple[str, ...]) -> bool:
        """Return whether a subscription wants such an event."""
        found = self._subscriptions[name]
        wanted = frozenset(found.tags)
        return any(Interest(pattern, wanted).wants(event_type, tags) for pattern in found.patterns)

    def select(
        self, subscription: str, interests: tuple[Interest, ...], blocked: tuple[Interest, ...] = ()
    ) -> Selection:
        """Return the routes that these interests resolve to."""
        return self._book.select(subscription, interests, blocked)

    def route(self, db: Database, identity: int) -> Route:
        """Return what a route's id stands for; raise UnsafeStore if nothing does.

        Where others write at the same time, a delivery read just now may be filed under a route that was registered
        after the look at the start of this transaction. And a server that has crashed may give out numbers of
        transactions again, below those seen. Then everything is read anew.
        """
        if identity not in self._book.by_id:
            self.forget()
            self.refresh(db)
        try:
            return self._book.by_id[identity]
        except KeyError:
            raise UnsafeStore(f"a delivery is filed under route {identity}, which is not registered") from None

    def fanout(self, db: Database, event_type: str, tags: tuple[str, ...], priority: int) -> Fanout:
        """Return (subscription, route) for every queue that wants such an event, registering routes not seen before."""
        key = (event_type, tags, priority)
        found = self._fanout.get(key)
        if found is None:
            found = tuple(
                (name, self.file_under(db, name, priority, event_type, tags))
                for name in self._queues
                if self.wants(name, event_type, tags)
            )
            if len(self._fanout) >= MAX_REMEMBERED:
                self._fanout.clear()
            self._fanout[key] = found
        return found

    def file_under(self, db: Database, subscription: str, priority: int, event_type: str, tags: tuple[str, ...]) -> int:
        """Return the id of a route, registering it in `db`'s transaction if it is new."""
        joined = ",".join(sorted(tags))
        identity = route_id(subscription, priority, event_type, joined, solo=False)
        self._register(db, Route(identity, subscription, priority, event_type, joined, solo=False))
        return identity

    def file_anew(self, db: Database, subscription: str, priority: int, event_type: str, tags: tuple[str, ...]) -> int:
        """Return the id of a route that stays registered until the end of `db`'s transaction; see `register`."""
        way = (priority, event_type, ",".join(sorted(tags)))
        return self.register(db, Route(route_id(subscription, *way, solo=False), subscription, *way, solo=False))

    def variant(self, db: Database, identity: int, *, solo: bool) -> int:
        """Return the route for the same events run alone, or run beside others again."""
        route = self.route(db, identity)
        if route.solo == solo:
            return identity
        twin = route._replace(id=route_id(*route[1:5], solo=solo), solo=solo)
        return self.register(db, twin)

    def register(self, db: Database, route: Route) -> int:
        """Have a route registered until the end of `db`'s transaction; return its id.

        Done anew, though it may be known: where others write at the same time, one that nobody uses may be on its way
        out.
        """
        db.run("add_route", route)
        self._book.add(route)
        return route.id

    def _register(self, db: Database, route: Route) -> None:
        if route.id not in self._book.by_id:
            db.run("add_route", route)
            self._book.add(route)


def _subscription(row: Row) -> Subscription:
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
