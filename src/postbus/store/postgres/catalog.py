"""What a connection to PostgreSQL remembers: subscriptions; kinds of events are looked up when they are needed."""

from collections.abc import Iterable

import orjson

from postbus.pattern import Interest
from postbus.store import catalog
from postbus.store.catalog import Kind, Selection
from postbus.store.session import Database


class Catalog(catalog.Catalog):
    """Subscriptions as a connection saw them at the last `refresh`, and the kinds its transaction is to write."""

    def forget(self) -> None:
        """Remember nothing."""
        super().forget()
        self._new: set[Kind] = set()

    def refresh(self, db: Database) -> None:
        """Take in what has changed since the last time; the kinds that this transaction has still to write stay."""
        self._db = db
        new = self._new
        super().refresh(db)
        self._new = new

    def name(self, number: int) -> str:
        """Return the name of a subscription, also of a deleted one, and of one that was made in the midst of this."""
        if number not in self._names:
            self.refresh(self._db)
        return super().name(number)

    def select(self, interests: tuple[Interest, ...], blocked: tuple[Interest, ...] = ()) -> Selection:
        """Return what these interests cover of the kinds that rows have now."""
        selection = Selection(interests, blocked)
        given = [
            orjson.dumps([[each.pattern, sorted(each.tags)] for each in some]).decode() for some in (interests, blocked)
        ]
        if not selection.everything:
            selection.kinds.update((kind, None) for (kind,) in self._db.run("kinds_covered", given))
        return selection

    def require_kinds(self, db: Database, kinds: Iterable[Kind]) -> None:
        """Have kinds registered at the end of the transaction: who adds the same one waits for its end."""
        del db
        self._new.update(kinds)

    def write_kinds(self, db: Database) -> None:
        """Register them."""
        if self._new:
            db.many("add_kind", sorted(self._new))
            self._new.clear()
