"""A session of the delivery-per-row core."""

from typing import TYPE_CHECKING, NamedTuple

from postbus.store.session import Database

if TYPE_CHECKING:
    from postbus.store.postgres.rows.catalog import Catalog


class Session(NamedTuple):
    """A transaction at work: all of it happens at `now`, in microseconds since 1970."""

    db: Database
    catalog: "Catalog"
    now: int


def bump(session: Session) -> None:
    """Have every connection, this one too, read subscriptions and routes anew."""
    session.db.run("bump_catalog")
    session.catalog.forget()
