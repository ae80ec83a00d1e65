"""What the verbs work on: a database connection inside a transaction, what is remembered of it, and the moment."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from postbus.store.catalog import Catalog

Row = tuple[Any, ...]


class Database(Protocol):
    """One connection to a database that knows its dialect's statements by name. Used by one thread at a time."""

    packs: bool
    """Whether entries of one block are packed into one row here; elsewhere the database has done so before."""

    def run(self, name: str, parameters: Sequence[Any] = ()) -> list[Row]:
        """Run a named query and return its rows."""
        ...

    def page(self, name: str, parameters: Sequence[str | int | None]) -> list[Row]:
        """Run a named query whose last column is how many bytes a row has; return the first rows, as many as fit."""
        ...

    def rows(self, name: str, parameters: Sequence[Any] = ()) -> Sequence[Row]:
        """Run a named query for a whole batch and return its rows, by whichever way is fastest here."""
        ...

    def iterate(self, name: str, parameters: Sequence[Any] = ()) -> Iterator[Row]:
        """Run a named query, stepping only about as far as the caller goes."""
        ...

    def value(self, name: str, parameters: Sequence[Any] = ()) -> Any:
        """Run a named query and return the first column of its first row, or None."""
        ...

    def many(self, name: str, parameters: Iterable[Sequence[Any]]) -> list[Row]:
        """Run a named query once for each row of parameters and return all rows it yields."""
        ...

    def count(self, name: str, parameters: Sequence[Any] = ()) -> int:
        """Run a named statement and return how many rows it changed."""
        ...


class Session(NamedTuple):
    """A transaction at work: all of it happens at `now`, in microseconds since 1970."""

    db: Database
    catalog: "Catalog"
    now: int


def bump(session: Session) -> None:
    """Have every connection, this one too, read subscriptions and kinds anew."""
    session.db.run("bump_catalog")
    session.catalog.forget()
