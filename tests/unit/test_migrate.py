"""Migrations: forward only, each whole, and never past what this postbus knows."""

from pathlib import Path

import apsw
import pytest

from postbus.bus import EventBus
from postbus.errors import SchemaMismatch
from postbus.store import open_store
from postbus.store.migrate import migrate, pending
from postbus.store.queries import load_migrations
from tests.conftest import Crew

NEWEST = len(load_migrations("postbus.store.sqlite"))


class Schema:
    """A schema with a number, in memory."""

    def __init__(self, version: int, known: int) -> None:
        """Stand at `version`, with `known` migrations in the package."""
        self.at = version
        self.migrations = [(number, f"{number:04}_step.sql", f"sql {number}") for number in range(1, known + 1)]
        self.applied: list[str] = []

    def version(self) -> int:
        """Return the number it stands at."""
        return self.at

    def apply(self, number: int, sql: str) -> None:
        """Apply the next one."""
        assert number == self.at + 1
        self.at = number
        self.applied.append(sql)


def test_migrations_are_applied_in_order_from_where_the_schema_stands():
    """None twice, none skipped, and their names are told."""
    schema = Schema(1, 3)
    assert migrate(schema, allowed=True) == ["0002_step.sql", "0003_step.sql"]
    assert schema.applied == ["sql 2", "sql 3"]
    assert migrate(schema, allowed=True) == []


def test_without_leave_an_old_schema_is_refused_and_untouched():
    """The message says what to run."""
    schema = Schema(1, 3)
    with pytest.raises(SchemaMismatch, match="postbus migrate"):
        migrate(schema, allowed=False)
    assert schema.applied == []


def test_without_leave_a_current_schema_is_fine():
    """There is nothing to do."""
    assert migrate(Schema(3, 3), allowed=False) == []


def test_a_newer_schema_is_refused():
    """Whoever knows less must not write to it."""
    with pytest.raises(SchemaMismatch, match="upgrade"):
        pending(Schema(4, 3))
    for allowed in (True, False):
        with pytest.raises(SchemaMismatch):
            migrate(Schema(4, 3), allowed=allowed)


def set_version(path: Path, number: int) -> None:
    """Write a schema's number into a file."""
    connection = apsw.Connection(str(path))
    connection.pragma("user_version", number)
    connection.close()


def test_a_file_of_a_newer_postbus_is_not_opened(tmp_path: Path):
    """Neither by the store nor by the bus, with or without leave to migrate."""
    path = tmp_path / "bus.db"
    open_store(f"sqlite:///{path}").close()
    set_version(path, NEWEST + 1)
    for auto_migrate in (True, False):
        with pytest.raises(SchemaMismatch, match="upgrade"):
            open_store(f"sqlite:///{path}", auto_migrate=auto_migrate)
    with pytest.raises(SchemaMismatch):
        EventBus(f"sqlite:///{path}").stats()


def former(path: Path) -> bytes:
    """Make a file as it was before the first release, as far as telling it goes; return its bytes."""
    connection = apsw.Connection(str(path))
    connection.execute("CREATE TABLE events (id INTEGER PRIMARY KEY AUTOINCREMENT, type, payload)")
    connection.execute("CREATE TABLE routes (id INTEGER PRIMARY KEY)")
    connection.pragma("application_id", int.from_bytes(b"post"))
    connection.pragma("user_version", 5)
    connection.close()
    return path.read_bytes()


@pytest.mark.parametrize("auto_migrate", [True, False])
def test_a_file_of_the_former_schema_is_refused_and_untouched(tmp_path: Path, auto_migrate: bool):  # noqa: FBT001
    """The message names the way over: its events can be imported into a new file (S4.11)."""
    path = tmp_path / "bus.db"
    before = former(path)
    with pytest.raises(SchemaMismatch, match=r"postbus import events .*--from sqlite:///.*bus\.db"):
        open_store(f"sqlite:///{path}", auto_migrate=auto_migrate)
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["bus.db"]


def test_an_empty_file_is_not_migrated_without_leave(tmp_path: Path):
    """In production a missing schema is an operator's business."""
    path = tmp_path / "bus.db"
    with pytest.raises(SchemaMismatch, match="postbus migrate"):
        EventBus(f"sqlite:///{path}", auto_migrate=False).stats()
    open_store(f"sqlite:///{path}").close()
    bus = EventBus(f"sqlite:///{path}", auto_migrate=False)
    assert bus.stats().events == 0
    bus.shutdown()


def test_the_schema_has_the_number_of_its_last_migration(tmp_path: Path):
    """Set in the same transaction as the migration itself (S1.5)."""
    path = tmp_path / "bus.db"
    open_store(f"sqlite:///{path}").close()
    connection = apsw.Connection(str(path))
    assert connection.pragma("user_version") == NEWEST
    connection.close()


def test_several_processes_may_open_an_empty_file_at_once(tmp_path: Path, crew: Crew):
    """One makes the schema, the others find it made (S1.5, S1.17)."""
    url = f"sqlite:///{tmp_path / 'bus.db'}"
    crew.start(lambda: open_store(url), 6)
    stores = crew.join(30)
    assert [len(store.subscriptions()) for store in stores] == [1] * 6
    for store in stores:
        store.close()


def test_migrations_are_numbered_without_a_hole():
    """From one on, each with a name that says what it does."""
    migrations = load_migrations("postbus.store.sqlite")
    assert [number for number, _, _ in migrations] == list(range(1, len(migrations) + 1))
    assert all(name.endswith(".sql") and sql.strip() for _, name, sql in migrations)
