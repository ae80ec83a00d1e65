"""Operations that are one statement: with nobody beside it, such a statement needs no transaction around it."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, NamedTuple, TypeVar

from psycopg.errors import DeadlockDetected

from postbus.observe import probe
from postbus.store.committer import Committer
from postbus.store.postgres.connection import Database
from postbus.store.postgres.rows.catalog import Catalog

__all__ = ["Remembered", "Single", "SingleCommitter", "undeadlocked"]

R = TypeVar("R")
DEADLOCKS: Final = 3


class Remembered(Catalog):
    """A catalog that tells as of when it is, so that a statement can find out whether it still holds."""

    @property
    def version(self) -> int:
        """What `meta.catalog` was at the last look."""
        return self._version

    @property
    def marker(self) -> int:
        """The oldest transaction that was open then: the routes of all before it are known."""
        return self._marker


class Single(NamedTuple):
    """An operation that is one statement."""

    operation: Callable[[Database], Any]

    def __call__(self, db: Database) -> Any:
        """Run it."""
        return self.operation(db)


def undeadlocked(transaction: Callable[[], R]) -> R:
    """Run a transaction, again where it and another waited for each other: the server has undone it then."""
    for _ in range(DEADLOCKS):
        with suppress(DeadlockDetected):
            return transaction()
    return transaction()


class SingleCommitter(Committer[Database]):
    """A committer that lets a lone statement commit itself; behind a pooler, settings need a transaction to hold in."""

    def __init__(self, connection: Database, *, pooled: bool) -> None:
        """Take charge of a connection that nobody else uses."""
        super().__init__(connection)
        self._pooled = pooled

    def _transact(self, operations: list[Callable[[Database], Any]]) -> list[Any]:
        if len(operations) > 1:
            return super()._transact(operations)  # where that fails, each is run again alone
        return undeadlocked(lambda: self._run_one(operations))

    def _run_one(self, operations: list[Callable[[Database], Any]]) -> list[Any]:
        if self._pooled or not isinstance(operations[0], Single):
            return super()._transact(operations)
        db = self._connection.ready()
        probe("committing")
        with db.committing():
            return [operations[0](db)]
