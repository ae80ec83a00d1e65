"""Least-privilege roles: who publishes cannot settle, who works cannot rewrite the log, who looks changes nothing."""

import re
from importlib import resources

from postbus.store.postgres.connection import Address, Database, put_schema, translated


def roles_script(url: str) -> str:
    """Return the SQL that makes the roles and grants them what they need, without a connection.

    In another schema than `postbus` they are named after that: `shop_publisher`, `shop_worker`, `shop_reader`.
    """
    return f"BEGIN;\n{roles_statements(Address.of(url).schema)}COMMIT;\n"


def grant_roles(url: str) -> None:
    """Make the roles that are missing, and grant all of them what they need and nothing else.

    Whoever connects must own the schema, and be allowed to make roles unless they are there. Raises UnsafeStore if
    not, with nothing changed; doing it again changes nothing.
    """
    address = Address.of(url, pooled=True)  # one transaction, which a pooler may carry
    db = Database(address)
    with translated(address.shown):
        try:
            db.begin()
            db.execute("SELECT pg_advisory_xact_lock(hashtextextended($1, 7))", (f"postbus migrates {address.schema}",))
            db.execute(roles_statements(address.schema))
            db.commit()
        finally:
            db.close()


def roles_statements(schema: str) -> str:
    """Return the SQL for a schema, to be run inside a transaction."""
    text = resources.files("postbus.store.postgres").joinpath("roles.sql").read_text(encoding="utf-8")
    named = re.sub(r"\bpostbus(?=_(?:reader|publisher|worker)\b)", schema, put_schema(text, schema))
    return re.sub(r"(?<=SCHEMA )postbus\b", schema, named)
