"""What `doctor` can say of a PostgreSQL database: its settings, and who holds readers or vacuum back."""

from typing import Final

from postbus.store.contract import Finding
from postbus.store.postgres.connection import Database

__all__ = ["inspect"]

LONG: Final = 60


def inspect(db: Database, *, deep: bool) -> tuple[Finding, ...]:
    """Return one finding a check."""
    del deep
    return (_server(db),)


def _server(db: Database) -> Finding:
    version = db.execute("SELECT current_setting('server_version')")[0][0]
    return Finding("server", ok=True, message=f"PostgreSQL {version}")
