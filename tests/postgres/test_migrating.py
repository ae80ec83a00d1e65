"""The schema: made once whoever comes first, and never touched by an older postbus."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from postbus.errors import SchemaMismatch
from postbus.store import open_store
from tests.crash.processes import Trial
from tests.postgres.server import Server, query


@pytest.fixture
def empty(server: Server) -> Iterator[str]:
    """Give the address of a database with nothing in it."""
    with server.database(empty=True) as url:
        yield url


def test_processes_that_open_an_empty_database_at_once_all_succeed(empty: str, tmp_path: Path):
    """One of eight migrates, the others wait for it; all of them publish (S4.11, S1.17)."""
    trial = Trial(tmp_path, empty)
    crew = [trial.start("publish", name=f"c{number}", count=3) for number in range(8)]
    try:
        assert [each.wait() for each in crew] == [0] * 8, [each.errors() for each in crew]
        assert sorted(trial.database().events.values()) == sorted(trial.journal().acknowledged)
        assert len(trial.journal().acknowledged) == 24
    finally:
        trial.close()


def test_a_newer_schema_is_refused(url: str):
    """An older postbus changes nothing in it (S4.11)."""
    query(url, "UPDATE meta SET value = '999' WHERE key = 'schema_version'")
    before = query(url, "SELECT key, value FROM meta ORDER BY key")
    with pytest.raises(SchemaMismatch, match="999"):
        open_store(url)
    assert query(url, "SELECT key, value FROM meta ORDER BY key") == before


def test_an_empty_database_is_not_migrated_unless_allowed(empty: str):
    """It says what to run, and makes nothing (S4.11)."""
    with pytest.raises(SchemaMismatch, match="postbus migrate"):
        open_store(empty, auto_migrate=False)
    assert query(empty, "SELECT count(*) FROM pg_namespace WHERE nspname = 'postbus'") == [(0,)]


def test_a_migrated_database_opens_without_migrating(url: str):
    """With `auto_migrate` off it just opens (S4.11)."""
    open_store(url, auto_migrate=False).close()


def test_a_migration_that_fails_leaves_nothing(empty: str, monkeypatch: pytest.MonkeyPatch):
    """A step is whole or not there at all; the next start does it (S4.11, I2)."""
    query(empty, "CREATE FUNCTION public.stop() RETURNS event_trigger LANGUAGE plpgsql AS 'BEGIN RAISE ''no''; END'")
    query(
        empty,
        "CREATE EVENT TRIGGER stop ON ddl_command_end WHEN TAG IN ('CREATE SEQUENCE') EXECUTE FUNCTION public.stop()",
    )
    with pytest.raises(Exception, match="no"):
        open_store(empty)
    assert query(empty, "SELECT count(*) FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace"
                        " WHERE n.nspname = 'postbus'") == [(0,)]  # fmt: skip
    query(empty, "DROP EVENT TRIGGER stop")
    open_store(empty).close()


@pytest.mark.parametrize("names", [("shop", "office")])
def test_two_buses_live_in_one_database(empty: str, names: tuple[str, str]):
    """Each in a schema of its own, with its own events, and pins that hold only its own readers (S4.11)."""
    first, second = (open_store(f"{empty}&schema={name}") for name in names)
    try:
        assert {name for (name,) in query(empty, "SELECT nspname FROM pg_namespace")} >= set(names)
        assert first.stats().head == second.stats().head == 0
    finally:
        first.close()
        second.close()
