"""What `doctor` can say of a SQLite file: its version, its settings, its pages, the room left on its disk."""

import shutil
from pathlib import Path
from typing import Final

import apsw

from postbus.errors import UnsafeStore
from postbus.store.contract import Finding
from postbus.store.sqlite.connection import Database, require_safe_sqlite

LOW_SPACE: Final = 256 * 1024 * 1024
ARCHIVE: Final = "postbus pipeline archive --lake DIR --older-than 30d"


def condition(db: Database, path: Path) -> tuple[Finding, ...]:
    """Return one finding for each check that need not read the file."""
    return (_version(), _settings(db), _space(path))


def inspect(db: Database, path: Path, *, deep: bool) -> tuple[Finding, ...]:
    """Return one finding a check; `deep` reads every index as well as every page of the file."""
    return (*condition(db, path), _pages(db, path, deep=deep))


def _version() -> Finding:
    try:
        require_safe_sqlite(apsw.SQLITE_VERSION_NUMBER)
    except UnsafeStore as error:
        return Finding("sqlite", ok=False, message=str(error), remedy="pip install --upgrade apsw")
    return Finding("sqlite", ok=True, message=f"SQLite {apsw.sqlite_lib_version()} has the WAL-reset fix")


def _settings(db: Database) -> Finding:
    journal, synchronous = db.pragma("journal_mode"), db.pragma("synchronous")
    ok = journal == "wal" and synchronous >= 2  # noqa: PLR2004  SQLite's number for FULL
    return Finding(
        "durability",
        ok=ok,
        message=f"journal_mode={journal}, synchronous={'full' if ok else synchronous}",
        remedy=None if ok else "stop the programs, and move the file to a local disk that allows WAL",
    )


def _space(path: Path) -> Finding:
    free = shutil.disk_usage(path.parent).free
    return Finding(
        "disk",
        ok=free > LOW_SPACE,
        message=f"{free / 1e9:.1f} GB free beside the file",
        remedy=None if free > LOW_SPACE else "free some space, or move what is old into a lake: " + ARCHIVE,
    )


def _pages(db: Database, path: Path, *, deep: bool) -> Finding:
    answer = db.pragma("integrity_check" if deep else "quick_check", 1)
    how = "every page and index" if deep else "every page"
    return Finding(
        "integrity",
        ok=answer == "ok",
        message=f"{how} read, no damage" if answer == "ok" else f"{path} is damaged: {answer}",
        remedy=None
        if answer == "ok"
        else "stop the workers, restore the file from a backup, then: postbus restore-mark",
    )
