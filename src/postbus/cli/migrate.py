"""`postbus migrate`: make the schema, or bring it up to date."""

from typing import Annotated, Final

import typer

from postbus.cli.console import Output, emit, say
from postbus.cli.options import Format, Url
from postbus.config import Settings
from postbus.errors import SchemaMismatch
from postbus.store import migration_script, open_store

__all__ = ["EXAMPLES", "migrate"]

EXAMPLES: Final = "Example: postbus migrate\n\nExample: postbus migrate --sql > schema.sql"


def migrate(
    *,
    sql: Annotated[bool, typer.Option("--sql", help="Only print the SQL, without opening any database.")] = False,
    url: Url = None,
    output: Format = Output.TABLE,
) -> None:
    """Make the database, or bring its schema up to date. Doing it again changes nothing."""
    where = Settings.load(url=url).url
    if sql:
        typer.echo(migration_script(where))
        return
    changed, shown = _bring_up_to_date(where)
    emit(output, {"url": shown, "changed": changed}, lambda: ())
    if output is Output.TABLE:
        say(f"{shown}: {'migrated to the newest schema' if changed else 'the schema is up to date'}")


def _bring_up_to_date(url: str) -> tuple[bool, str]:
    """Migrate; return whether there was something to do, and the URL fit to be shown."""
    try:
        store, changed = open_store(url, auto_migrate=False), False
    except SchemaMismatch:
        store, changed = open_store(url, auto_migrate=True), True
    shown = store.url
    store.close()
    return changed, shown
