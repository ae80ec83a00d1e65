"""`postbus migrate`: make the schema, or bring it up to date."""

from typing import Annotated, Final

import typer

from postbus.cli.console import Output, emit, say
from postbus.cli.options import Format, Url
from postbus.config import Settings
from postbus.errors import SchemaMismatch
from postbus.store import grant_roles, is_server, migration_script, open_store, roles_script
from postbus.store.contract import needs_database

__all__ = ["EXAMPLES", "migrate"]

EXAMPLES: Final = """\
Example: postbus migrate

Example: postbus migrate --sql > schema.sql

Example: postbus migrate --roles   (after every upgrade, as the owner of the schema)

Example: postbus migrate --sql --roles > roles.sql"""


def migrate(
    *,
    sql: Annotated[bool, typer.Option("--sql", help="Only print the SQL, without opening any database.")] = False,
    roles: Annotated[
        bool, typer.Option("--roles", help="PostgreSQL: then grant the roles for publishers, workers and readers.")
    ] = False,
    url: Url = None,
    output: Format = Output.TABLE,
) -> None:
    """Make the database, or bring its schema up to date. Doing it again changes nothing.

    --sql --roles prints the SQL of the roles alone.
    """
    settings = Settings.load(url=url)
    where = settings.url
    if is_server(where):
        raise needs_database("migrating")
    if roles:
        script = roles_script(where)  # refused before anything is changed where there are no roles
        if sql:
            typer.echo(script)
            return
    elif sql:
        typer.echo(migration_script(where))
        return
    changed, shown = _bring_up_to_date(where, settings.direct_url)
    if roles:
        grant_roles(where)
    emit(output, {"url": shown, "changed": changed, "roles": roles}, lambda: ())
    if output is Output.TABLE:
        say(f"{shown}: {'migrated to the newest schema' if changed else 'the schema is up to date'}")
        if roles:
            say("the roles have what they need; give them to login roles: CREATE ROLE web LOGIN IN ROLE …", style="dim")


def _bring_up_to_date(url: str, direct_url: str | None) -> tuple[bool, str]:
    """Migrate; return whether there was something to do, and the URL fit to be shown."""
    try:
        store, changed = open_store(url, auto_migrate=False, direct_url=direct_url), False
    except SchemaMismatch:
        store, changed = open_store(url, auto_migrate=True, direct_url=direct_url), True
    shown = store.url
    store.close()
    return changed, shown
