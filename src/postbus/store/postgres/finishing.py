"""Finishing what simply worked: one statement, whatever the number."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from postbus.model import Lease
from postbus.store.contract import Report, Reported, Settlement
from postbus.store.postgres.connection import Database, Steps, array, texts
from postbus.store.postgres.rows.leases import Finished, Leases
from postbus.store.postgres.rows.reports import Reports, success
from postbus.store.postgres.rows.session import Session
from postbus.store.postgres.single import Remembered

__all__ = ["Key", "Plain", "finish", "plain_successes", "reported"]


class Ended(NamedTuple):
    """What a statement has finished, when, and what the catalog's version was then."""

    rows: dict[Lease, Finished]
    now: int = 0
    version: int = 0


Key = tuple[int, str]
"""The event and the subscription of a delivery."""
Plain = dict[Key, tuple[Report, Settlement]]


def plain_successes(reports: Sequence[Report]) -> Plain:
    """Return the reports that tell of success alone; none if two are on one delivery: then their order matters."""
    if len({each[:2] for each in reports}) < len(reports):
        return {}
    return {each[:2]: (each, told) for each in reports if (told := success(each)) is not None}


def finish(done: Iterable[Settlement], now: int | None = None) -> Steps[Ended]:
    """Record successes, now or at another moment; return what the fence let through.

    In order of ids, so that two batches never wait crosswise.
    """
    batch = sorted(done, key=lambda told: told.lease)
    given = (
        array(told.lease.event_id for told in batch),
        texts(told.lease.subscription for told in batch),
        array(told.lease.epoch for told in batch),
        texts(told.worker_id for told in batch),
        array("NULL" if told.status_code is None else told.status_code for told in batch),
        array("NULL" if told.execution_time_ms is None else told.execution_time_ms for told in batch),
        now,
    )
    rows = yield [("finish_all", given)]
    leases = dict(enumerate((told.lease for told in batch), 1))
    return Ended({leases[row[0]]: Finished(*row[1:4]) for row in rows}, *rows[0][4:]) if rows else Ended({})


def reported(db: Database, catalog: Remembered, plain: Plain, ended: Ended) -> dict[Key, Reported]:
    """Return what was recorded of which plain success."""
    if ended.rows and ended.version != catalog.version:
        catalog.refresh(db)
    session = Session(db, catalog, ended.now)
    answers = Reports(session, Leases(session))
    return {lease[:2]: answers.succeeded(*plain[lease[:2]], row) for lease, row in ended.rows.items()}
