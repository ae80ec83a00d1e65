"""What `doctor` can say of a PostgreSQL database: its settings, and who holds followers or vacuum back."""

from collections.abc import Iterator
from typing import Any, Final

from postbus.errors import UnsafeStore
from postbus.model import Holder
from postbus.store.contract import Finding
from postbus.store.postgres.connection import Database

OLDEST_SERVER: Final = 14
LONG_PUBLISH: Final = 1.0
LONG_SNAPSHOT: Final = 60.0


def require_safe(db: Database) -> None:
    """Raise UnsafeStore for a server too old, a standby, or one that cannot keep what it is given as it is."""
    encoding = db.connection.info.parameter_status("server_encoding")
    if encoding != "UTF8":
        told = "make one with CREATE DATABASE … ENCODING 'UTF8' TEMPLATE template0"
        raise UnsafeStore(f"the database has the encoding {encoding}, which cannot hold every text: {told}")
    _, version, standby, fsync, pages, _ = db.run("server")[0]
    if version < OLDEST_SERVER:
        raise UnsafeStore(f"PostgreSQL {version} is too old: postbus needs {OLDEST_SERVER} or newer")
    if standby:
        raise UnsafeStore("this is a standby, which shows neither pins nor the newest events: connect to the primary")
    if (fsync, pages) != ("on", "on"):
        raise UnsafeStore(
            f"fsync={fsync}, full_page_writes={pages}: a crash could lose acknowledged events; turn both on"
        )


def holders(db: Database) -> tuple[Holder, ...]:
    """Return who has published and not ended yet, the one that holds followers back furthest first."""
    return tuple(Holder(*row) for row in db.run("holders"))


def inspect(db: Database, *, deep: bool) -> tuple[Finding, ...]:
    """Return one finding a check; `deep` reads the whole queue."""
    return tuple(_findings(db, deep=deep))


def _findings(db: Database, *, deep: bool) -> Iterator[Finding]:
    name, _, _, fsync, pages, autovacuum = db.run("server")[0]
    yield Finding("server", ok=True, message=f"PostgreSQL {name}, fsync={fsync}, full_page_writes={pages}")
    yield Finding(
        "autovacuum",
        ok=autovacuum == "on",
        message=f"autovacuum={autovacuum}",
        remedy=None if autovacuum == "on" else "ALTER SYSTEM SET autovacuum = on; SELECT pg_reload_conf();",
    )
    yield from _followers(db)
    yield _gaps(db)
    yield from _snapshots(db)
    if deep:
        yield _kinds(db.value("lost_kinds"))


def _followers(db: Database) -> Iterator[Finding]:
    late = [each for each in holders(db) if each.seconds > LONG_PUBLISH]
    for each in late:
        yield Finding("followers", ok=False, message=each.told, remedy=each.remedy)
    if not late:
        yield Finding("followers", ok=True, message="no open transaction holds them back")


def _gaps(db: Database) -> Finding:
    """Find ids that no queue has looked for again, though the transactions that drew them have ended."""
    old = db.value("old_gaps")
    if not old or holders(db):
        return Finding("queues", ok=True, message="no event that was committed late waits to be looked for")
    told = f"{old:,} ranges of ids wait to be looked for: events in them would reach nobody"
    return Finding("queues", ok=False, message=told, remedy="start a worker, or: postbus doctor --mend")


def _snapshots(db: Database) -> Iterator[Finding]:
    rows: list[Any] = [row for row in db.run("horizon") if row[3] is not None and row[3] > LONG_SNAPSHOT]
    for pid, application, state, seconds in rows:
        told = (
            f"pid {pid} ({application or 'no name'}) has kept a snapshot for {seconds:,.0f} s ({state}): vacuum waits"
        )
        yield Finding("vacuum", ok=False, message=told, remedy=f"SELECT pg_terminate_backend({pid});")
    if not rows:
        yield Finding("vacuum", ok=True, message="no old snapshot keeps dead rows alive")


def _kinds(lost: int) -> Finding:
    if not lost:
        return Finding("integrity", ok=True, message="every delivery's kind is registered")
    told = f"{lost:,} deliveries are of kinds that are not registered"
    how = "stop the workers, restore the database from a backup, then: postbus restore-mark"
    return Finding("integrity", ok=False, message=told, remedy=how)
