"""Numbered, forward-only migrations: each in one transaction with its number, so that a crash leaves a whole step."""

from typing import Protocol

from postbus.errors import SchemaMismatch


class Migratable(Protocol):
    """A database whose schema has a number."""

    migrations: list[tuple[int, str, str]]

    def version(self) -> int:
        """Return the number of the last migration applied, 0 for an empty database."""
        ...

    def apply(self, number: int, sql: str) -> None:
        """Apply one migration and record its number, in one transaction, unless another process was faster."""
        ...


def pending(database: Migratable) -> list[tuple[int, str, str]]:
    """Return the migrations still to apply; raise SchemaMismatch when the schema is newer than this postbus."""
    version = database.version()
    newest = len(database.migrations)
    if version > newest:
        raise SchemaMismatch(f"the schema has version {version}, this postbus knows {newest}: upgrade postbus")
    return database.migrations[version:]


def migrate(database: Migratable, *, allowed: bool) -> list[str]:
    """Bring the schema up to date and return the names of what was applied.

    With `allowed` False it changes nothing and raises SchemaMismatch if there is something to do.
    """
    todo = pending(database)
    if todo and not allowed:
        raise SchemaMismatch(f"the schema is {len(todo)} migration(s) behind: run `postbus migrate`")
    for number, _, sql in todo:
        database.apply(number, sql)
    return [name for _, name, _ in todo]
