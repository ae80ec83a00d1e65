"""`postbus migrate`: make the schema, or bring it up to date."""

from typing import Annotated, Final
from urllib.parse import urlsplit

import typer

from postbus.cli.console import Output, emit, say
from postbus.cli.options import Format, Url
from postbus.config import Settings
from postbus.errors import InvalidRequest, SchemaMismatch
from postbus.store import open_store
from postbus.store.queries import load_migrations

__all__ = ["EXAMPLES", "migrate"]

EXAMPLES: Final = "Example: postbus migrate\n\nExample: postbus migrate --sql > schema.sql"
DIALECTS: Final = {"sqlite": ("postbus.store.sqlite", "PRAGMA user_version = {number};")}
"""Where each dialect keeps its migrations, and the statement that records one as applied."""


def migrate(
    *,
    sql: Annotated[bool, typer.Option("--sql", help="Only print the SQL, without opening any database.")] = False,
    url: Url = None,
    output: Format = Output.TABLE,
) -> None:
    """Make the database, or bring its schema up to date. Doing it again changes nothing."""
    where = Settings.load(url=url).url
    scheme = urlsplit(where).scheme
    if scheme not in DIALECTS:
        raise InvalidRequest(f"a URL begins with {' or '.join(f'{each}:///' for each in DIALECTS)}")
    package, record = DIALECTS[scheme]
    migrations = load_migrations(package)
    if sql:
        for number, name, text in migrations:
            typer.echo(f"-- {name}\n{text.rstrip()}\n{record.format(number=number)}\n")
        return
    changed, shown = _bring_up_to_date(where)
    emit(output, {"url": shown, "version": len(migrations), "changed": changed}, lambda: ())
    if output is Output.TABLE:
        say(f"{shown}: {'migrated to' if changed else 'already at'} schema version {len(migrations)}")


def _bring_up_to_date(url: str) -> tuple[bool, str]:
    """Migrate; return whether there was something to do, and the URL fit to be shown."""
    try:
        store, changed = open_store(url, auto_migrate=False), False
    except SchemaMismatch:
        store, changed = open_store(url, auto_migrate=True), True
    shown = store.url
    store.close()
    return changed, shown
